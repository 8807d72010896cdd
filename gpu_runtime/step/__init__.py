"""
One action of a step: ask the contract, act on memory, report to the contract.

* `plan/`: the order of a rank's actions, and the slots that they need (a slot is a set of buffers
  for one microbatch).
* `memory/`: slots, gradient destinations, counters, numerical state.
* `actions.py`: `GuardedActions`, with F, dI, dW and the refresh of a weight cache.
* `performer.py`: everything that touches memory, streams or other ranks; `streams.py` orders the
  graph stream and the caller's stream.
* `eager.py` calls the backend; `graphs.py` captures the same calls, one graph per action, and
  replays the graphs; `launch_executor.py` runs the actions of a step that is captured as one graph.
* `reductions.py`, `clipping.py`, `optimizer.py`: reductions, clipping and the update at the end of
  a step.
"""

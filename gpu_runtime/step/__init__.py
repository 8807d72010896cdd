"""
The actions of a step. Each action asks the contract, acts on memory, and reports to the contract.

* `plan/`: the order of a rank's actions, and the slots that they need (a slot is a set of buffers
  for one microbatch).
* `memory/`: slots, gradient destinations, counters, numerical state.
* `actions.py`: `GuardedActions`, with F (forward), dI (input gradient), dW (weight gradient) and
  the refresh of a weight cache.
* `performer.py`: all access to memory, streams and other ranks. `streams.py`: the waits between the
  graph stream and the caller's stream.
* `eager.py` calls the backend; `graphs.py` captures the same calls, one graph per action, and
  replays the graphs; `launch_executor.py` runs the actions of a step that one graph contains.
* `reductions.py`, `clipping.py`, `optimizer.py`: reductions, clipping and the update at the end of
  a step.
"""

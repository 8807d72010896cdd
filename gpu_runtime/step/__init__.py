"""
One action of a step: ask the contract, act on memory, report to the contract.

* `plan/`: the order of a rank's actions, and the slots that they need.
* `memory/`: slots, gradient destinations, counters, numerical state.
* `actions.py`: `GuardedActions`, with F, dI, dW and the refresh of a weight cache.
* `performer.py`: everything that touches memory, streams or other ranks; `streams.py` orders the
  graph stream and the caller's stream.
* `eager.py` calls the backend, `graphs.py` captures the same calls and replays them;
  `nested_graphs.py` makes graphs that the graph of a whole step can hold.
* `reductions.py`, `clipping.py`, `optimizer.py`: reductions, clipping and the update at the end of
  a step.
"""

"""
A pipeline over several ranks: one process per rank, over gloo (cpu) or NCCL (cuda).

* `membership.py` lets the ranks meet; `worker_assembly.py` builds a `Worker` (`worker.py`) from a
  job (`job.py`).
* `pipeline.py` runs one rank's row of the schedule: receive, F, send, receive, dI, send, dW.
  `channels.py` posts the messages, `side_stream_feed.py` brings the data.
* `replicas.py` and `ties.py` sum gradients over replicas, and over copies of one weight.
* `consent.py` ends a step: no rank updates its weights before all ranks agree. If one rank stops,
  all ranks raise the same cause; a rank may then be one step ahead of the other ranks.
* `one_launch.py` runs a whole step as one CUDA graph: `step_capture.py` captures the graph,
  `launch_waits.py` waits for launches and reads their verdicts, `rehearsal.py` asks the contract
  without device work, `staged_feed.py` holds the data where the graph reads them, `gate.py` lets
  each device decide whether to update. `obstacles.py` says why a worker's step cannot be one
  launch, and `fallback.py` continues with guarded replays.
* `trace.py` records one step of all ranks.
"""

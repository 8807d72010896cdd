"""
A pipeline over several ranks: one process per rank, over gloo (cpu) or NCCL (cuda).

* `membership.py` connects the ranks; `worker_assembly.py` builds a `Worker` (`worker.py`) from a
  job (`job.py`).
* `pipeline.py` runs one rank's row of the schedule table: receive, F, send, receive, dI, send, dW.
  `channels.py` posts the messages, and `side_stream_feed.py` supplies the data.
* `replicas.py` and `ties.py` sum gradients over replicas, and over copies of one weight.
* `consent.py` ends a step: no rank updates its weights before all ranks agree. If one rank stops,
  all ranks raise an error with the same cause. Some ranks may then have run one update more than
  other ranks.
* `one_launch.py` runs a whole step as one CUDA graph, which is called a launch. `step_capture.py`
  captures the graph. `launch_waits.py` waits for launches and reads their results. `rehearsal.py`
  asks the contract without device work. `staged_feed.py` copies the data to the addresses from
  which the graph reads. `gate.py` lets each device decide whether to update. `obstacles.py` says
  why a worker's step cannot be one launch. `fallback.py` then continues with guarded replays: one
  graph per action, and a check before each replay.
* `trace.py` records one step of all ranks as a Chrome trace.
"""

"""
The runtime of one process: its configuration, its parts, and the start and end of its epochs. An
epoch is one optimizer step.

* `step_mode.py`: how a step can run (`Mode`), and why a step cannot be one launch (one CUDA graph).
* `runtime_config.py`: `RuntimeConfig`, the options of a process, such as how a step runs.
* `assembly.py`: builds slots, gradient destinations, the contract and the executor.
* `parts.py`: holds these objects, among them the performer, which acts on memory, streams and other
  ranks. In a `with runtime.performed_by(performer)` block, another performer does this work.
* `epoch.py`: the end of an epoch: `finalize`, `update`, and the device's counts of its actions.
* `runtime.py`: `Runtime`, with failure and restart: `abort`, `rebuild`, `checkpoint`, `restore`.
"""

from ..step.reductions import Reducer, Reduction
from .runtime import Runtime
from .runtime_config import COUNTS, Counts, RuntimeConfig
from .step_mode import MODES, Mode, mode_on, one_launch_obstacles, without_launches

__all__ = [
    "COUNTS",
    "MODES",
    "Counts",
    "Mode",
    "Reducer",
    "Reduction",
    "Runtime",
    "RuntimeConfig",
    "mode_on",
    "one_launch_obstacles",
    "without_launches",
]

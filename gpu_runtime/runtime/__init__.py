"""
The runtime of one process: its configuration, its parts, and the boundaries of its epochs.

* `configuration.py`: `RuntimeConfig`, which says how a step runs (`mode`) and what it holds.
* `runtime.py`: `Runtime`, the guarded actions and the end of an epoch: finalize, update, restore.
"""

from ..step.reductions import Reducer, Reduction
from .configuration import COUNTS, MODES, Counts, Mode, RuntimeConfig, mode_on
from .runtime import Runtime

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
]

"""
The modules that the server of ranks imports before it starts a rank, so that no rank imports them
again.

A rank is a fork of the server. A rank collects garbage when it leaves and before it captures. The
objects that the server imported are frozen, so that no rank's collection visits these objects and
thereby copies their memory pages.
"""

from __future__ import annotations

import gc
import threading
from importlib import import_module

#: Modules of bodies, and what these import in the middle of a run.
NAMES = (
    *(f"tests.ranks.{name}_bodies" for name in (
        "amax", "clip", "guard", "launch", "log", "recorded", "replica", "table", "trace"
    )),
    *(f"tests.training.{name}_bodies" for name in (
        "balance", "curves", "digest", "divergence", "ending", "language", "launched", "start",
        "step_times", "tied", "torchao",
    )),
    "tests.ranks.bodies",
    "tests.training.bodies",
    "qeffect.gpu_runtime.backends.reference",
    "torch.utils.serialization.config",
)  # fmt: skip

for name in NAMES:
    import_module(name)
gc.collect()
gc.freeze()
# A fork has none of the server's threads: what needs one would wait for it.
assert threading.active_count() == 1, threading.enumerate()

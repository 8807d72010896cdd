"""
The contract in force: every transition as one flat function, all guards before the first write.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
A comment names the half, as ``relation.function``, that the lines below it come from. The order of
the guards is normative: a refusal names the first that fails.

These very function objects guard a replay, and are what the explorer walks, what Z3 proves and
what NumPy batches. A composition that leaves relations out is made at run time.
"""

from __future__ import annotations

from .dgrad import abort_dgrad, check_dgrad, commit_dgrad
from .epochs import commit_epoch, fail_reduction, finalize, finish_reduction, start_reduction
from .forward import abort_forward, check_forward, commit_forward
from .refresh import abort_refresh, check_refresh, commit_refresh
from .restarts import checkpoint, restore
from .streams import drain, join, submit, wait
from .tapes import bind, drop, invalidate, reserve
from .transfers import finish_read, finish_receive, post_receive, read
from .wgrad import abort_wgrad, check_wgrad, commit_wgrad

__all__ = [
    "abort_dgrad",
    "abort_forward",
    "abort_refresh",
    "abort_wgrad",
    "bind",
    "check_dgrad",
    "check_forward",
    "check_refresh",
    "check_wgrad",
    "checkpoint",
    "commit_dgrad",
    "commit_epoch",
    "commit_forward",
    "commit_refresh",
    "commit_wgrad",
    "drain",
    "drop",
    "fail_reduction",
    "finalize",
    "finish_read",
    "finish_receive",
    "finish_reduction",
    "invalidate",
    "join",
    "post_receive",
    "read",
    "reserve",
    "restore",
    "start_reduction",
    "submit",
    "wait",
]

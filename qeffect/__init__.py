"""
State and resource contracts for low-precision pipeline training under captured graphs.
"""

from . import startup  # noqa: F401 - first: without it, Ctrl-C during imports is a traceback

# isort: split
from .action_blocks import guarded
from .checkpoint import Checkpoint
from .contract import Contract, Ticket
from .counts import DeviceCounts
from .destination_registry import DestinationRegistry
from .destinations import Destination
from .keys import TapeKey, TapeRef
from .refusals import Refusal, Refused
from .renamed import MODULES, NAMES, install
from .stage_config import Bucket, StageConfig
from .threads import ConcurrentCallError

__all__ = [
    "Bucket",
    "Checkpoint",
    "ConcurrentCallError",
    "Contract",
    "Destination",
    "DestinationRegistry",
    "DeviceCounts",
    "Refusal",
    "Refused",
    "StageConfig",
    "TapeKey",
    "TapeRef",
    "Ticket",
    "guarded",
]

install(__name__, MODULES, NAMES)

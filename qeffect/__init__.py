"""
State and resource contracts for low-precision pipeline training under captured graphs.
"""

from .checkpoint import Checkpoint
from .config import Bucket, StageConfig
from .contract import Contract, Ticket
from .destinations import Destination
from .guarded import guarded
from .keys import TapeKey, TapeRef
from .refusals import Refusal, Refused

__all__ = [
    "Bucket",
    "Checkpoint",
    "Contract",
    "Destination",
    "Refusal",
    "Refused",
    "StageConfig",
    "TapeKey",
    "TapeRef",
    "Ticket",
    "guarded",
]

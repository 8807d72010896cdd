"""
The attributes that a contract's calls share: state, records, and look-up tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..arguments import Arguments
from ..engine.concrete_memory import Memory
from ..engine.freelist import FreeSlots
from ..engine.stage import Transitions
from ..keys import Cell
from ..ledgers.epochs import Epochs
from ..ledgers.expected_counts import ExpectedCounts
from ..ledgers.groups import Groups
from ..ledgers.pool import Pool
from ..ledgers.recorded_steps import RecordedSteps
from ..ledgers.restarts import Restarts
from ..ledgers.runner import Observer, Runner
from ..ledgers.streams import Streams
from ..ledgers.tapes import Tapes
from ..stage_config import StageConfig

__all__ = ["ContractParts"]


class ContractParts:
    """
    The attributes of a contract; `qeffect.contract.Contract` sets them all.

    Attributes:
        stages: The stages of this process.
        transitions: The composed transitions: functions that check and change the contract's state.
        memory: The contract's state: named lists (columns) that the transitions read and write.
    """

    stages: tuple[StageConfig, ...]
    transitions: Transitions
    memory: Memory

    _runner: Runner
    _counted: ExpectedCounts | None
    _pool: Pool
    _tapes: Tapes
    _groups: Groups
    _streams: Streams
    _epochs: Epochs
    _restarts: Restarts
    _steps: RecordedSteps

    _observer: Observer | None
    #: Whether a commit must tell the observer, or update the expected device counts.
    _heard: bool
    #: By stage, how a reported weight of a gradient is counted.
    _weighed: Mapping[int, Callable[[Any], tuple[int, int]]]
    #: Whether a call is under way.
    #: True while a call is under way; None if the last call was a `check_step` that accepted its
    #: step; otherwise False. Each call that may change the state sets True and then False, so None
    #: shows that the state is as the check has seen it.
    _entered: bool | None
    #: Whether a stage shares gradient destinations with another.
    _shares: bool

    # Parts of the ledgers, bound once: each look-up would cost a guard's time.
    _arguments: Arguments
    _free: dict[int, FreeSlots]
    _reserved: dict[Cell, int]
    _join: Callable[[int], None]
    _wait: Callable[[int], None]
    _enter: Callable[[int], None]
    _check_forward: Callable[..., Any]
    _commit_forward: Callable[..., Any]
    _check_dgrad: Callable[..., Any]
    _commit_dgrad: Callable[..., Any]
    _check_wgrad: Callable[..., Any]
    _commit_wgrad: Callable[..., Any]

"""
The configuration of one process and its contract.

Random walks, mutants, example logs and re-enacted failures all start from a `Process`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import cached_property
from typing import Any

from attrs import define, field, fields

from qeffect import Contract, StageConfig
from qeffect.contract import Observer
from qeffect.engine.stage import transitions
from qeffect.keys import Cell
from qeffect.process_layout import Graph, ProcessLayout, lay_out
from qeffect.relations.constants import GENERATION_MAX

__all__ = ["Process"]


def _stages(stages: Iterable[StageConfig]) -> tuple[StageConfig, ...]:
    return tuple(stages)


def _relations(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@define(eq=False)
class Process:
    """
    The configuration of one process; all arguments except the name are those of `Contract`.

    Args:
        name: Name for reports.

    >>> Process("tiny", [StageConfig(0, microbatches=1, slots=1)], epoch=3).contract().epoch
    3
    """

    name: str
    stages: tuple[StageConfig, ...] = field(converter=_stages)
    omit: frozenset[str] = field(default=frozenset(), converter=_relations)
    callers: tuple[Hashable, ...] = ("main",)
    capture_order: tuple[Graph, ...] = ()
    declared: Mapping[Hashable, tuple[tuple[str, Cell], ...]] = field(factory=dict)
    generation_max: int = GENERATION_MAX
    reductions: tuple[int | str, ...] = ()
    epoch: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the contract that differ from their defaults, without the stages."""
        plain = Process(self.name, self.stages)
        names = (option.name for option in fields(Process)[2:])
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(plain, n)}

    def contract(self, observer: Observer | None = None, **changes: Any) -> Contract:
        """Return a fresh contract of the process; ``changes`` replace arguments by name."""
        arguments = {"stages": self.stages, **self.options, **changes}
        return Contract(**arguments, observer=observer)

    def lay_out(self) -> ProcessLayout:
        """Return the kernel's memory of the process, in incarnation 1 and the process's epoch."""
        options = self.options
        omit, epoch = options.pop("omit", ()), options.pop("epoch", 0)
        laid = lay_out(self.stages, transitions(omit), **options)
        laid.memory.incarnation[0] = 1
        laid.memory.fill(laid.memory.weight_epoch, epoch)
        return laid

    @cached_property
    def capture(self) -> tuple[list[int], dict[tuple[int, str], int]]:
        """
        The capture-memory pool of each slot, and the position of each graph in the order of
        capture. A graph is named by its slot and "F", "dI" or "dW", or by its stage and "refresh".
        """
        names: list[Hashable] = []
        first: dict[int, int] = {}
        for config in self.stages:
            first[config.stage] = len(names)
            for slot in range(config.slots):
                own = (config.stage, slot)
                names.append(own if config.pool is None else (config.pool,))
        numbers = list(dict.fromkeys(names))
        order: list[tuple[int, str]] = []
        for graph in self.capture_order:
            match graph:
                case (stage, local, kind):
                    order.append((first[stage] + local, kind))
                case (stage, kind):
                    order.append((stage, kind))
        order = order or [
            *((c.stage, "refresh") for c in self.stages if c.refresh_pool is not None),
            *((slot, kind) for kind in ("F", "dI", "dW") for slot in range(len(names))),
        ]
        return [numbers.index(name) for name in names], {g: rank for rank, g in enumerate(order)}

    def __str__(self) -> str:
        return self.name

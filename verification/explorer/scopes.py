"""
A scope: the small contract that one exploration visits, and the moves that it tries.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, Final

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, instance_of

from qeffect import Bucket, Destination, StageConfig
from qeffect.engine.stage import OPTIONAL, TRANSITIONS
from qeffect.keys import Cell
from qeffect.refusals import Refused
from qeffect.relations.columns import CONFIG
from qeffect.relations.constants import (
    BACK_BIT,
    COPY_BIT,
    GRAD_BIT,
    IN_BIT,
    NO_RANK,
    OUT_BIT,
    SOURCE_BIT,
    TARGET_BIT,
)

from ..process import Process

__all__ = ["WHOLE", "Scope", "configuration", "members_in", "sizes"]

_count = [instance_of(int), ge(1)]
_counts = deep_iterable(_count, instance_of(tuple))

#: The matrices of every stage.
WHOLE: Final = 1

#: Configured flags of the evidence that a backend reports, and of what the evidence is about.
_EVIDENCE: Final = (
    *("reports_fills", "reports_updates", "live_scales", "carried_scales", "reports_draws"),
    *("recomputes_draws", "reports_weights", "epoch_scales"),
)

#: Transitions of an evaluation.
_EVALUATION: Final = frozenset({"check_evaluation", "commit_evaluation", "abort_evaluation"})

#: Transitions of the quantized weight cache.
_CACHE: Final = frozenset({"check_refresh", "commit_refresh", "abort_refresh", "invalidate"})


@frozen
class Scope:
    """
    A small contract, and which of its moves an exploration tries.

    Args:
        name: The scope's name in reports.
        slots: Number of slots (sets of buffers for one microbatch) of each stage.
        cells: Number of microbatches of each stage.
        domains: State domain of each stage (stages of one domain update their FP8 scales together).
            By default all stages share domain 0.
        callers: Number of caller streams; each forms a link (a pair of streams) with the graph
            stream of every domain.
        epochs: Number of epochs (optimizer steps) for which keys are presented; the weight epoch
            reaches this number.
        walks: Number of passes over the microbatches (walks) per epoch. With the default of 1,
            `next_walk` is never called.
        skips: Whether walks may leave microbatches out; by default `skip` is never called.
        generation_max: The last generation that a slot may reach. The generation counts the tapes
            that left the slot.
        omit: Relations to leave out of the contract.
        only: Transitions to explore; by default all transitions except evaluations.
        tickets: Whether checks, commits and aborts are separate moves, so that several actions
            (each with a ticket) can be in flight. Otherwise a check runs in one move with its
            commit or its abort.
        readers: Output and gradient readers of every tape: bits of OUT_BIT | GRAD_BIT.
        receives: Messages or copies that every tape waits for: bits of IN_BIT | BACK_BIT |
            COPY_BIT.
        reduces: Whether stages reduce their gradients, each in its own bucket.
        buckets: The two stages that write each bucket; a single writer is given twice. By default
            one bucket per stage with ``reduces``, otherwise none.
        ordered: Whether the order of the buckets is declared as the order of reductions.
        reports: Whether backends report fills and scaling updates; checks then run with their
            commits, except without the relation version.
        tape_scales: Scales that dI of every stage reads: ``carried``, ``live``, or empty for
            undeclared.
        draws: Whether F of every stage reports where it began to draw random numbers, and dI where
            its recomputation began to draw.
        weights: Whether dI of every stage reports the weight of its gradient: one over the number
            of the stage's microbatches.
        epoch_scales: Whether the scales of every domain move (are updated) once per epoch. By
            default they move with F and dI, and `move_scales` is never called.
        accumulate: Whether each stage has one accumulating buffer; otherwise each cell (a
            microbatch in a stage) has its own buffer.
        groups: Whether one dW may take several tapes (compute the gradients of several
            microbatches); by default `group_wgrad` and `ungroup_wgrad` are never called. Needs
            ``tickets``, since a dW takes tapes while it is in flight.
        feeds: Whether each stage feeds the next stage, which has as many microbatches.
        tied: Whether the first two stages, which accumulate, also share one buffer.
        shared_pool: Whether the slots of a domain share one capture-memory pool.
        refreshes_in_pool: Whether the refreshes of a domain were captured first in the shared pool.
        declared: Whether an order is declared for each domain: F of every microbatch, then dI of
            every microbatch.
        fresh_keys: Whether every presented key has an epoch in which its cell (stage and
            microbatch) has had no forward, so that keys never run out. Only for scopes in which no
            guard checks the weight epoch or a repeated forward.
        wrong_arguments: Whether to try each move (a call of the contract) also with one wrong
            argument.

    Raises:
        TypeError, ValueError: A count is not a positive integer, a name is unknown, or no contract
            can have this configuration.
    """

    name: str
    slots: tuple[int, ...] = field(default=(2,), validator=_counts)
    cells: tuple[int, ...] = field(default=(2,), validator=_counts)
    domains: tuple[int, ...] = ()
    callers: int = field(default=1, validator=_count)
    epochs: int = field(default=1, validator=_count)
    walks: int = field(default=1, validator=_count)
    skips: bool = False
    generation_max: int = field(default=2, validator=_count)
    omit: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    tickets: bool = False
    readers: int = 0
    receives: int = 0
    reduces: bool = False
    buckets: tuple[tuple[int, int], ...] = ()
    ordered: bool = False
    reports: bool = False
    tape_scales: str = ""
    draws: bool = False
    weights: bool = False
    epoch_scales: bool = False
    accumulate: bool = True
    groups: bool = False
    feeds: bool = False
    tied: bool = False
    shared_pool: bool = False
    refreshes_in_pool: bool = False
    declared: bool = False
    fresh_keys: bool = False
    wrong_arguments: bool = True

    def __attrs_post_init__(self) -> None:
        stages = len(self.slots)
        if len(self.cells) != stages or len(self.domains) not in (0, stages):
            raise ValueError(
                f"scope {self.name}: {stages} stages have slots, so give {stages} cells and domains"
            )
        if set(self.domains) != set(range(len(set(self.domains)))):
            raise ValueError(f"scope {self.name}: domains must be numbered from 0 without gaps")
        for given, known in ((self.omit, OPTIONAL), (self.only, TRANSITIONS)):
            unknown = sorted(set(given) - set(known))
            if unknown:
                raise ValueError(f"scope {self.name}: unknown {', '.join(unknown)}")
        if any(not 0 <= stage < stages for bucket in self.buckets for stage in bucket):
            raise ValueError(f"scope {self.name}: the stages of a bucket must be 0 to {stages - 1}")
        if self.tied and not self.accumulate:
            raise ValueError(f"scope {self.name}: only destinations that accumulate are tied")
        if self.refreshes_in_pool and ("version" in self.omit or not self.shared_pool):
            raise ValueError(
                f"scope {self.name}: refreshes are in a pool only with the relation version and a "
                "shared pool"
            )
        if self.readers & ~(OUT_BIT | GRAD_BIT):
            raise ValueError(f"scope {self.name}: readers must be bits of OUT_BIT | GRAD_BIT")
        if self.receives & ~(IN_BIT | BACK_BIT | COPY_BIT):
            raise ValueError(
                f"scope {self.name}: receives must be bits of IN_BIT | BACK_BIT | COPY_BIT"
            )
        told = self.tape_scales == "carried" or self.draws or self.weights
        fills = self.reports and "version" not in self.omit
        if (told or fills) and self.tickets:
            raise ValueError(
                f"scope {self.name}: with tickets, backends cannot report (fills, "
                "draws, weights or carried scales)"
            )
        if self.groups and not self.tickets:
            raise ValueError(f"scope {self.name}: a dW takes several tapes only with tickets")
        if self.tape_scales not in ("", "carried", "live"):
            raise ValueError(f"scope {self.name}: tape_scales must be carried or live")
        if self.fresh_keys and ("version" not in self.omit or "finalize" in self.transitions):
            raise ValueError(f"scope {self.name}: fresh keys need a scope without epochs")
        try:
            self.process.lay_out()
        except (ValueError, Refused) as error:
            raise ValueError(f"scope {self.name}: {error}") from None

    @property
    def transitions(self) -> tuple[str, ...]:
        """
        Names of the transitions that are explored.

        Without the relation version, the contract has no weight cache and refuses the cache's
        transitions in every state, so they are left out. Some calls are left out of scopes that
        cannot use them: `next_walk` if an epoch has one walk, `skip` without skips, `move_scales`
        if scales move with F and dI, and `group_wgrad` and `ungroup_wgrad` without groups.
        """
        chosen = self.only or tuple(name for name in TRANSITIONS if name not in _EVALUATION)
        absent = _CACHE if "version" in self.omit else frozenset()
        if self.walks == 1:
            absent |= {"next_walk"}
        if not self.skips:
            absent |= {"skip"}
        if not self.epoch_scales:
            absent |= {"move_scales"}
        if not self.groups:
            absent |= {"group_wgrad", "ungroup_wgrad"}
        return tuple(name for name in chosen if name not in absent)

    @property
    def off(self) -> frozenset[str]:
        """Flags of evidence, and bits for edges between stages, that no stage of the scope sets."""
        _, columns = _dense(self)
        bits = {"SOURCE_BIT": SOURCE_BIT, "TARGET_BIT": TARGET_BIT}
        unset = {
            name for name, bit in bits.items() if not any(r & bit for r in columns["receives"])
        }
        return frozenset(unset | {name for name in _EVIDENCE if not any(columns[name])})

    @property
    def domain_of(self) -> tuple[int, ...]:
        """State domain of each stage."""
        return self.domains or (0,) * len(self.slots)

    @property
    def process(self) -> Process:
        """The process whose contract is explored."""
        stages = [self._stage(stage) for stage in range(len(self.slots))]
        orders: dict[Hashable, tuple[tuple[str, Cell], ...]] = {}
        for domain in dict.fromkeys(self.domain_of) if self.declared else ():
            cells = [c for config in stages if config.domain == domain for c in config.cells()]
            orders[domain] = tuple((kind, cell) for kind in ("F", "dI") for cell in cells)
        return Process(
            self.name,
            stages,
            omit=self.omit,
            callers=tuple(range(self.callers)),
            declared=orders,
            generation_max=self.generation_max,
            reductions=tuple(range(len(self.stages_of))) if self.ordered else (),
        )

    def _stage(self, stage: int) -> StageConfig:
        """The configuration of one stage."""
        shares = self.tied and stage < 2
        own = f"own {stage}"
        matrices = (own, "shared") if shares else (own,)
        written = [bucket for bucket, stages in enumerate(self.stages_of) if stage in stages]
        one_each = () if self.accumulate else range(self.cells[stage])
        return StageConfig(
            stage,
            self.cells[stage],
            self.slots[stage],
            domain=self.domain_of[stage],
            matrices=matrices,
            destinations=[Destination(own, microbatch) for microbatch in one_each],
            sends_output=bool(self.readers & OUT_BIT),
            sends_gradient=bool(self.readers & GRAD_BIT),
            receives_input=bool(self.receives & IN_BIT),
            receives_gradient=bool(self.receives & BACK_BIT),
            copies_input=bool(self.receives & COPY_BIT),
            reduces=bool(written),
            buckets=[Bucket(b, matrices if b == written[0] else ()) for b in written],
            reports_fills=self.reports and "version" not in self.omit,
            reports_updates=self.reports and "order" not in self.omit,
            tape_scales=self.tape_scales or None,
            reports_draws=self.draws,
            recomputes_draws=self.draws,
            weights_sum=(1, 1) if self.weights else None,
            scales="epoch" if self.epoch_scales else "action",
            pool=self.domain_of[stage] if self.shared_pool else None,
            refresh_pool=self.domain_of[stage] if self.refreshes_in_pool else None,
            feeds=stage + 1 if self.feeds and stage + 1 < len(self.slots) else None,
            buffers={"shared": "shared"} if shares else {},
            tied=("shared",) if shares else (),
        )

    @property
    def stages_of(self) -> tuple[tuple[int, int], ...]:
        """The two stages that write each bucket."""
        return self.buckets or tuple((s, s) for s in range(len(self.slots)) if self.reduces)


def sizes(scope: Scope) -> dict[str, int]:
    """Return the number of indices (slots, cells, stages and so on) of each sort in the scope."""
    return dict(_dense(scope)[0])


def members_in(scope: Scope) -> dict[str, range]:
    """Return the range of indices of each sort (slots, cells, stages and so on)."""
    return {sort: range(count) for sort, count in sizes(scope).items()}


def configuration(scope: Scope) -> dict[str, list[int]]:
    """
    Return every configuration column of the scope's process; cells are numbered from 0.

    The additional column ``stage_of`` has the stage of each cell; a real key names the stage
    itself. Matrices and destinations are opaque numbers. Capture ranks count within a pool, so that
    all slots with their own pools are alike.
    """
    return {name: list(column) for name, column in _dense(scope)[1].items()}


@cache
def _dense(scope: Scope) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return a scope's sizes and configuration columns (arrays that never change), from the
    kernel's layout of its process."""
    process = scope.process
    memory = process.lay_out().memory
    cells = {cell: n for n, cell in enumerate(c for s in process.stages for c in s.cells())}
    columns: dict[str, list[int]] = {"stage_of": [cell[0] for cell in cells]}
    for name, column in CONFIG.items():
        values = getattr(memory, name)
        listed = [values[cell] for cell in cells] if column.index == "cell" else list(values)
        if column.values == "cell":
            listed = [cells[cell] for cell in listed]
        elif name == "matrices":
            listed = [WHOLE] * len(listed)
        elif column.values == "opaque":
            listed = _numbered(listed)
        columns[name] = listed
    placed = [("pool_of", name) for name in ("forward_rank", "dgrad_rank", "wgrad_rank")]
    placed.append(("refresh_pool", "refresh_rank"))
    for pool in set(columns["pool_of"]):
        order = sorted(
            (rank, name, index)
            for pools, name in placed
            for index, rank in enumerate(columns[name])
            if columns[pools][index] == pool and rank != NO_RANK
        )
        for place, (_, name, index) in enumerate(order):
            columns[name][index] = place
    n = {column.index: len(columns[name]) for name, column in CONFIG.items()}
    n |= {"caller": scope.callers, "pool": len(set(columns["pool_of"]))}
    return n, columns


def _numbered(values: list[Any]) -> list[int]:
    """Replace each value by a number: equal values get equal numbers, in order of appearance."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]

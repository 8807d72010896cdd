"""
A scope: how much of the contract one exploration walks.
"""

from __future__ import annotations

from typing import Final

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, instance_of

from qeffect.engine.stage import OPTIONAL, TRANSITIONS
from qeffect.relations.constants import (
    BACK_BIT,
    COPY_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    OUT_BIT,
    SOURCE_BIT,
    TARGET_BIT,
    WGRAD_BIT,
)

__all__ = ["Scope", "configuration", "members_in", "sizes"]

_count = [instance_of(int), ge(1)]
_counts = deep_iterable(_count, instance_of(tuple))

#: Transitions of an evaluation.
_EVALUATION: Final = frozenset({"check_evaluation", "commit_evaluation", "abort_evaluation"})

#: Transitions of the quantized weight cache.
_CACHE: Final = frozenset({"check_refresh", "commit_refresh", "abort_refresh", "invalidate"})


@frozen
class Scope:
    """
    A small contract, and which of its moves an exploration tries.

    Args:
        name: Name in reports.
        slots: Slots of each stage's pool.
        cells: Microbatches of each stage.
        domains: State domain of each stage; all share domain 0 by default.
        callers: Streams that call into the graph streams; each has a link to every domain.
        epochs: Number of epochs whose keys are presented; the weight epoch reaches this number.
        walks: Walks of an epoch; with the default of one, `next_walk` does not take part.
        skips: Walks may leave cells out; by default `skip` does not take part.
        generation_max: The last generation that a slot may reach.
        omit: Relations left out.
        only: Transitions that take part; all by default, but for evaluations.
        tickets: Explore checks, commits and aborts one by one, with several tickets outstanding.
            Otherwise a check runs in one step with its commit, or with its abort.
        readers: Output and gradient readers of every tape: bits of OUT_BIT | GRAD_BIT.
        receives: Messages or copies that every tape waits for: bits of IN_BIT | BACK_BIT |
            COPY_BIT.
        reduces: Stages reduce their gradients, each in one bucket.
        buckets: The two stages that write each bucket; a single writer is given twice. By default
            as ``reduces`` says.
        ordered: The order of reductions is declared as the order of the buckets.
        reports: Backends report fills and scaling updates; checks run with their commits, except
            without version.
        tape_scales: Scales that dI of every stage reads: ``carried``, ``live``, or empty for
            undeclared.
        draws: F of every stage reports where it began to draw random numbers, and dI where its
            recomputation began.
        weights: dI of every stage reports the weight of its gradient: one over the stage's number
            of cells.
        epoch_scales: Scales of every domain move once an epoch; by default they move with F and
            dI, and `move_scales` does not take part.
        accumulate: One accumulating buffer for each stage, or else one buffer for each cell.
        feeds: Each stage feeds the next, which has as many cells.
        tied: The first two stages, which accumulate, share one more buffer.
        shared_pool: The slots of a domain share one capture-memory pool.
        declared: F of every cell in order, then dI of every cell, is declared for each domain.
        fresh_keys: Every presented key has an epoch without a forward of its cell, so that keys
            never run out. Only for scopes where no guard checks the weight epoch or a repeated
            forward.
        wrong_arguments: Present each move also with one argument wrong.

    Raises:
        TypeError, ValueError: A count is not a positive integer, or a name is unknown.
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
    feeds: bool = False
    tied: bool = False
    shared_pool: bool = False
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
        if self.tied and (not self.accumulate or self.domain_of[:2] not in ((0, 0), (1, 1))):
            raise ValueError(
                f"scope {self.name}: a tied destination needs accumulation, and the first two "
                "stages in the same domain"
            )
        if self.readers & ~(OUT_BIT | GRAD_BIT):
            raise ValueError(f"scope {self.name}: readers must be bits of OUT_BIT | GRAD_BIT")
        if self.feeds and len(set(self.cells)) > 1:
            raise ValueError(
                f"scope {self.name}: stages that feed each other must have equally many cells"
            )
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
        if self.tape_scales not in ("", "carried", "live"):
            raise ValueError(f"scope {self.name}: tape_scales must be carried or live")
        if self.fresh_keys and ("version" not in self.omit or "finalize" in self.transitions):
            raise ValueError(f"scope {self.name}: fresh keys need a scope without epochs")

    @property
    def transitions(self) -> tuple[str, ...]:
        """
        Names of the transitions that take part.

        A composition without version has no cache and refuses the cache's transitions in every
        state, so these are not explored. Neither is `next_walk` in a scope with one walk, `skip` in
        a scope without skips, nor `move_scales` in a scope whose scales move with F and dI.
        """
        chosen = self.only or tuple(name for name in TRANSITIONS if name not in _EVALUATION)
        absent = _CACHE if "version" in self.omit else frozenset()
        if self.walks == 1:
            absent |= {"next_walk"}
        if not self.skips:
            absent |= {"skip"}
        if not self.epoch_scales:
            absent |= {"move_scales"}
        return tuple(name for name in chosen if name not in absent)

    @property
    def off(self) -> frozenset[str]:
        """Flags of evidence and bits of edges between stages that no stage of the scope sets."""
        flags = {
            "SOURCE_BIT": self.feeds,
            "TARGET_BIT": self.feeds,
            "reports_fills": self.reports,
            "reports_updates": self.reports,
            "live_scales": self.tape_scales == "live",
            "carried_scales": self.tape_scales == "carried",
            "reports_draws": self.draws,
            "recomputes_draws": self.draws,
            "reports_weights": self.weights,
            "epoch_scales": self.epoch_scales,
        }
        return frozenset(name for name, given in flags.items() if not given)

    @property
    def domain_of(self) -> tuple[int, ...]:
        """State domain of each stage."""
        return self.domains or (0,) * len(self.slots)

    @property
    def stages_of(self) -> tuple[tuple[int, int], ...]:
        """The two stages that write each bucket."""
        return self.buckets or tuple((s, s) for s in range(len(self.slots)) if self.reduces)


def sizes(scope: Scope) -> dict[str, int]:
    """Return the number of members of each index sort of the scope."""
    slots, cells, domains = sum(scope.slots), sum(scope.cells), len(set(scope.domain_of))
    return {
        "one": 1,
        "slot": slots,
        "cell": cells,
        "stage": len(scope.slots),
        "domain": domains,
        "link": scope.callers * domains,
        "caller": scope.callers,
        "pool": domains if scope.shared_pool else slots,
        "buffer": len(scope.slots) + scope.tied if scope.accumulate else cells,
        "bucket": len(scope.stages_of),
    }


def members_in(scope: Scope) -> dict[str, range]:
    """Return the members of each index sort."""
    return {sort: range(count) for sort, count in sizes(scope).items()}


def configuration(scope: Scope) -> dict[str, list[int]]:
    """
    Return every configured column, as ``qeffect.process_layout.lay_out`` fills them, but over
    dense cells.

    The column ``stage_of`` has the stage of each cell, which a real key names itself. Destinations
    and matrices are opaque numbers. Capture ranks count within a slot's own pool, so that all slots
    are alike.
    """
    n, stages = sizes(scope), len(scope.slots)
    each = scope.cells[0] if scope.feeds else n["cell"]  # cells from one stage to the next
    stage_of = [s for s, count in enumerate(scope.cells) for _ in range(count)]
    slot_stage = [s for s, count in enumerate(scope.slots) for _ in range(count)]
    order: dict[int, list[int]] = {d: [] for d in range(n["domain"])}
    for cell, stage in enumerate(stage_of):
        order[scope.domain_of[stage]].append(cell)
    position = [order[scope.domain_of[s]].index(c) for c, s in enumerate(stage_of)]
    updates = [len(order[scope.domain_of[s]]) for s in stage_of]
    if scope.shared_pool:
        pools = [scope.domain_of[s] for s in slot_stage]
        ranks = [[kind * n["slot"] + slot for slot in range(n["slot"])] for kind in range(3)]
    else:
        pools = list(range(n["slot"]))
        ranks = [[kind] * n["slot"] for kind in range(3)]
    buffer_of = list(stage_of) if scope.accumulate else list(range(n["cell"]))
    return {
        "stage_of": stage_of,
        "generation_max": [scope.generation_max],
        "slot_stage": slot_stage,
        "domain_of": list(scope.domain_of),
        "domain_at": [link % n["domain"] for link in range(n["link"])],
        "caller_at": [link // n["domain"] for link in range(n["link"])],
        "owes": [DGRAD_BIT | WGRAD_BIT | scope.readers] * n["stage"],
        "receives": [
            scope.receives
            | (SOURCE_BIT if scope.feeds and s else 0)
            | (TARGET_BIT if scope.feeds and s + 1 < stages else 0)
            for s in range(stages)
        ],
        "matrices": [1] * n["stage"],
        "cells": list(scope.cells),
        "target_of": [s + 1 if scope.feeds and s + 1 < stages else s for s in range(stages)],
        "input_of": [c - each if c >= each else c for c in range(n["cell"])],
        "gradient_of": [c + each if c + each < n["cell"] else c for c in range(n["cell"])],
        "declared": [int(scope.declared)] * n["domain"],
        "epoch_scales": [int(scope.epoch_scales)] * n["domain"],
        "forward_at": position if scope.declared else [-1] * n["cell"],
        "dgrad_at": [u + p for u, p in zip(updates, position, strict=True)]
        if scope.declared
        else [-1] * n["cell"],
        "destination_of": list(stage_of) if scope.accumulate else list(range(n["cell"])),
        "buffer_of": buffer_of,
        "keeper_of": [buffer_of.index(b) if b in buffer_of else 0 for b in range(n["buffer"])],
        "shared_of": [len(scope.slots) if scope.tied and b < 2 else b for b in range(n["buffer"])],
        "sharer_of": [1 - s if scope.tied and s < 2 else s for s in range(n["stage"])],
        "pool_of": pools,
        "forward_rank": ranks[0],
        "dgrad_rank": ranks[1],
        "wgrad_rank": ranks[2],
        **{
            name: [int(name not in scope.off)] * n["stage"]
            for name in (
                *("reports_fills", "reports_updates", "live_scales", "carried_scales"),
                *("reports_draws", "recomputes_draws", "reports_weights"),
            )
        },
        "stage_at": [first for first, _ in scope.stages_of],
        "tied_at": [last for _, last in scope.stages_of],
        "reduce_at": [b if scope.ordered else -1 for b in range(n["bucket"])],
        "ordered": [int(scope.ordered)],
    }

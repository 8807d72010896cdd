"""
Scopes: how much of the contract one exploration walks, and the standard ones by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, instance_of

from qeffect.engine.stage import OPTIONAL, TRANSITIONS
from qeffect.relations.constants import BACK_BIT, DGRAD_BIT, GRAD_BIT, IN_BIT, OUT_BIT, WGRAD_BIT

__all__ = [
    "Scope",
    "configuration",
    "large_scopes",
    "members_in",
    "pool_scope",
    "sizes",
    "standard_scopes",
]

_count = [instance_of(int), ge(1)]
_counts = deep_iterable(_count, instance_of(tuple))

#: The transitions that the slot pool alone consists of.
_POOL: Final = (
    "reserve",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "drop",
)

#: The transitions from a refresh to the reading of an output, on one stream or another.
_READ: Final = (
    "check_refresh",
    "commit_refresh",
    "abort_refresh",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "read",
    "finish_read",
    "submit",
    "join",
    "wait",
)

#: The transitions that move through a slot what is received and sent.
_MESSAGES: Final = (
    "reserve",
    "check_forward",
    "commit_forward",
    "check_dgrad",
    "commit_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "abort_dgrad",
    "abort_forward",
    "post_receive",
    "finish_receive",
    "read",
    "finish_read",
    "drop",
    "submit",
    "join",
    "wait",
)

#: The transitions from an F to the commit of reduced gradients.
_REDUCE: Final = (
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "join",
    "wait",
    "finalize",
    "start_reduction",
    "finish_reduction",
    "fail_reduction",
    "commit_epoch",
)

#: The transitions from an F to the commit of gradients of which two stages write one.
_SHARE: Final = (
    "bind",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "finalize",
    "commit_epoch",
)

#: The transitions from a refresh to the optimizer's update and the next refresh.
_UPDATE: Final = (
    "check_refresh",
    "commit_refresh",
    "abort_refresh",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "join",
    "wait",
    "drain",
    "finalize",
    "commit_epoch",
    "checkpoint",
)

#: All transitions but those of a reduction that does not fail.
_NO_REDUCTION: Final = tuple(
    name for name in TRANSITIONS if name not in ("start_reduction", "finish_reduction")
)

#: The transitions that bring an epoch to its end, and those between epochs.
_CLOSING: Final = (
    "drain",
    "finalize",
    "start_reduction",
    "finish_reduction",
    "fail_reduction",
    "commit_epoch",
    "checkpoint",
    "restore",
)

#: Transitions of the quantized weight cache.
_CACHE: Final = frozenset({"check_refresh", "commit_refresh", "abort_refresh", "invalidate"})


@frozen
class Scope:
    """
    A small contract, and which of its moves an exploration tries.

    Args:
        name: What reports call it.
        slots: Slots of each stage's pool.
        cells: Microbatches of each stage.
        domains: State domain of each stage; all share domain 0 by default.
        callers: Streams that call into the graph streams; each has a link to every domain.
        epochs: Epochs whose keys are presented, so that the weight epoch reaches this number.
        generation_max: The last generation that a slot may reach.
        omit: Relations left out.
        only: Transitions that take part; all by default.
        tickets: Explore checks, commits and aborts one by one, with several tickets outstanding.
            Otherwise a check runs in one step with its commit, or with its abort.
        readers: Output and gradient readers of every tape: bits of OUT_BIT | GRAD_BIT.
        receives: Messages that every tape waits for: bits of IN_BIT | BACK_BIT.
        reduces: Stages reduce their gradients, each in one bucket.
        buckets: The two stages that write each bucket, the same twice where there is one; by
            default as ``reduces`` says.
        ordered: The order of reductions is declared: that of the buckets.
        reports: Backends report fills and scaling updates; checks run with their commits.
        tape_scales: What dI of every stage reads: ``carried``, ``live``, or nothing known.
        accumulate: One accumulating buffer for each stage, or else one buffer for each cell.
        tied: The first two stages, which accumulate, share one more buffer.
        shared_pool: The slots of a domain share one capture-memory pool.
        declared: F of every cell in order, then dI of every cell, is declared for each domain.
        fresh_keys: The epoch of every presented key is one its cell has not been forwarded in,
            so that keys never run out. Only where neither the weight epoch nor a repeated
            forward is asked about.
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
    accumulate: bool = True
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
            raise ValueError(f"scope {self.name}: domains must be numbered from 0")
        for given, known in ((self.omit, OPTIONAL), (self.only, TRANSITIONS)):
            unknown = sorted(set(given) - set(known))
            if unknown:
                raise ValueError(f"scope {self.name}: unknown {', '.join(unknown)}")
        if any(not 0 <= stage < stages for bucket in self.buckets for stage in bucket):
            raise ValueError(f"scope {self.name}: a bucket is of stages from 0 to {stages - 1}")
        if self.tied and (not self.accumulate or self.domain_of[:2] not in ((0, 0), (1, 1))):
            raise ValueError(f"scope {self.name}: two stages of a domain share, and accumulate")
        if self.readers & ~(OUT_BIT | GRAD_BIT):
            raise ValueError(f"scope {self.name}: readers are bits of OUT_BIT | GRAD_BIT")
        if self.receives & ~(IN_BIT | BACK_BIT):
            raise ValueError(f"scope {self.name}: receives are bits of IN_BIT | BACK_BIT")
        if (self.reports or self.tape_scales) and self.tickets:
            raise ValueError(f"scope {self.name}: evidence is explored with its check in one step")
        if self.tape_scales not in ("", "carried", "live"):
            raise ValueError(f"scope {self.name}: tape_scales is carried or live")
        if self.fresh_keys and ("version" not in self.omit or "finalize" in self.transitions):
            raise ValueError(f"scope {self.name}: fresh keys need the epoch to be out of play")

    @property
    def transitions(self) -> tuple[str, ...]:
        """
        Names of the transitions that take part.

        Without version there is no cache: a composition without it refuses these whatever the
        state, and there is nothing to explore.
        """
        chosen = self.only or tuple(TRANSITIONS)
        return tuple(n for n in chosen if n not in _CACHE or "version" not in self.omit)

    @property
    def off(self) -> frozenset[str]:
        """Configured flags of evidence that are set nowhere."""
        flags = {
            "reports_fills": self.reports,
            "reports_updates": self.reports,
            "live_scales": self.tape_scales == "live",
            "carried_scales": self.tape_scales == "carried",
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
    """Return how many members each index sort has."""
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
    Return every configured column, as ``qeffect.layout.lay_out`` fills them but over dense cells.

    Two more say where things are: ``stage_of`` each cell, which keys carry themselves.
    Destinations and matrices are opaque numbers. Capture ranks count within a slot's own pool,
    so that slots differ in nothing.
    """
    n = sizes(scope)
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
    return {
        "stage_of": stage_of,
        "generation_max": [scope.generation_max],
        "slot_stage": slot_stage,
        "domain_of": list(scope.domain_of),
        "domain_at": [link % n["domain"] for link in range(n["link"])],
        "caller_at": [link // n["domain"] for link in range(n["link"])],
        "owes": [DGRAD_BIT | WGRAD_BIT | scope.readers] * n["stage"],
        "receives": [scope.receives] * n["stage"],
        "matrices": [1] * n["stage"],
        "cells": list(scope.cells),
        "declared": [int(scope.declared)] * n["domain"],
        "forward_at": position if scope.declared else [-1] * n["cell"],
        "dgrad_at": [u + p for u, p in zip(updates, position, strict=True)]
        if scope.declared
        else [-1] * n["cell"],
        "destination_of": list(stage_of) if scope.accumulate else list(range(n["cell"])),
        "buffer_of": list(stage_of) if scope.accumulate else list(range(n["cell"])),
        "shared_of": [len(scope.slots) if scope.tied and b < 2 else b for b in range(n["buffer"])],
        "sharer_of": [1 - s if scope.tied and s < 2 else s for s in range(n["stage"])],
        "pool_of": pools,
        "forward_rank": ranks[0],
        "dgrad_rank": ranks[1],
        "wgrad_rank": ranks[2],
        **{
            name: [int(name not in scope.off)] * n["stage"]
            for name in ("reports_fills", "reports_updates", "live_scales", "carried_scales")
        },
        "stage_at": [first for first, _ in scope.stages_of],
        "tied_at": [last for _, last in scope.stages_of],
        "reduce_at": [b if scope.ordered else -1 for b in range(n["bucket"])],
        "ordered": [int(scope.ordered)],
    }


def pool_scope(slots: int, keys: int, generations: int, **options: Any) -> Scope:
    """
    Return the slot pool alone: ownership without the epoch, every check run with its commit.

    Args:
        slots: Slots of the pool.
        keys: Keys that compete for them; a key returns after its release.
        generations: Tenants that each slot may have, one after another.
        options: Further arguments of ``Scope``.

    Raises:
        TypeError, ValueError: A count is not a positive integer.

    >>> pool_scope(4, 4, 3).name
    'pool-4-4-3'
    """
    right = "" if options.get("wrong_arguments", True) else "-right"
    return Scope(
        name=f"pool-{slots}-{keys}-{generations}{right}",
        slots=(slots,),
        cells=(keys,),
        generation_max=generations,
        omit=tuple(sorted(OPTIONAL)),
        only=_POOL,
        fresh_keys=True,
        **options,
    )


def standard_scopes() -> Mapping[str, Scope]:
    """
    Return the scopes whose counts the tests pin, by name.

    Together they accept every transition and reach every refusal that the specification names, in
    each transition that it names it for. Not every accepting path is taken: paths tell apart every
    combination of configured flags, and there is no scope for each.
    """
    scopes = (
        pool_scope(2, 2, 2),
        pool_scope(3, 3, 2),
        Scope("stage-epochs", slots=(1,), cells=(1,), generation_max=1, epochs=2),
        Scope("stage-reuse", slots=(1,), cells=(2,), generation_max=2),
        Scope("stage-small", slots=(2,), cells=(2,), generation_max=1),
        Scope("stage-tickets", slots=(2,), cells=(2,), generation_max=1, tickets=True),
        Scope(
            "stage-readers",
            slots=(1,),
            cells=(1,),
            generation_max=1,
            epochs=2,
            readers=OUT_BIT | GRAD_BIT,
            reduces=True,
        ),
        Scope(
            "domains-readers",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            readers=OUT_BIT,
            only=_READ,
            omit=("arena", "capture", "order", "reduction"),
        ),
        Scope(
            "stage-messages",
            slots=(1,),
            cells=(2,),
            generation_max=2,
            readers=OUT_BIT | GRAD_BIT,
            receives=IN_BIT | BACK_BIT,
            only=_MESSAGES,
            omit=("arena", "capture", "completion", "order", "reduction", "version"),
        ),
        Scope(
            "domains-messages",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            receives=IN_BIT | BACK_BIT,
            only=tuple(n for n in _MESSAGES if "read" not in n and "abort" not in n),
            omit=("arena", "capture", "order", "reduction", "version"),
        ),
        Scope(
            "callers-messages",
            slots=(1,),
            cells=(2,),
            callers=2,
            generation_max=2,
            readers=OUT_BIT | GRAD_BIT,
            receives=BACK_BIT,
            only=_MESSAGES,
            omit=("arena", "capture", "order", "reduction", "version"),
            wrong_arguments=False,
        ),
        Scope(
            "stage-buckets",
            slots=(1,),
            cells=(1,),
            callers=2,
            generation_max=1,
            epochs=2,
            buckets=((0, 0), (0, 0)),
            ordered=True,
            only=_REDUCE,
            omit=("arena", "capture", "order", "version"),
        ),
        Scope(
            "callers-update",
            slots=(1,),
            cells=(1,),
            callers=2,
            generation_max=2,
            epochs=2,
            only=_UPDATE,
            omit=("arena", "capture", "order", "reduction"),
        ),
        Scope(
            "stages-tied",
            slots=(1, 1),
            cells=(1, 1),
            callers=2,
            generation_max=1,
            buckets=((0, 1), (1, 1)),
            only=_REDUCE,
            omit=("arena", "capture", "order", "version"),
        ),
        Scope(
            "stages-shared",
            slots=(2, 1),
            cells=(2, 1),
            generation_max=1,
            tied=True,
            tickets=True,
            only=_SHARE,
            omit=("capture", "completion", "order", "reduction", "version"),
        ),
        Scope(
            "stages-shared-streams",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            tied=True,
            only=(*_SHARE, "join", "wait"),
            omit=("capture", "order", "reduction", "version"),
            wrong_arguments=False,
        ),
        Scope(
            "domains-buckets",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            reduces=True,
            only=_REDUCE,
            omit=("arena", "capture", "order", "version"),
        ),
        Scope("stage-shared-pool", slots=(2,), cells=(2,), generation_max=1, shared_pool=True),
        Scope(
            "stage-declared",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            shared_pool=True,
            declared=True,
        ),
        Scope(
            "stages-two",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            tickets=True,
            shared_pool=True,
        ),
        Scope(
            "stages-declared",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            shared_pool=True,
            declared=True,
        ),
        Scope(
            "stage-reports",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            reduces=True,
            reports=True,
            tape_scales="carried",
            omit=("arena", "capture", "completion", "reduction"),
        ),
        Scope(
            "callers-reports",
            slots=(1,),
            cells=(1,),
            callers=2,
            generation_max=1,
            readers=OUT_BIT | GRAD_BIT,
            receives=IN_BIT | BACK_BIT,
            reports=True,
            tape_scales="carried",
            only=tuple(name for name in TRANSITIONS if name not in _CLOSING),
            wrong_arguments=False,
        ),
        Scope(
            "stages-live",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            reduces=True,
            tape_scales="live",
            omit=("arena", "capture", "completion", "reduction"),
        ),
        Scope(
            "domains-two",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            reduces=True,
            only=_NO_REDUCTION,
            omit=("arena", "capture", "order", "reduction", "version"),
        ),
    )
    return {scope.name: scope for scope in scopes}


def large_scopes() -> Mapping[str, Scope]:
    """
    Return scopes for the batch reading and for measuring rates, by name.

    The pool of 4 slots, 4 keys and 3 generations has 540,184 states, as many as the same model
    has in TLC and SPIN; ``-right`` presents only right arguments, as those do. The last pool and
    the last stage have more than five million states.
    """
    scopes = (
        pool_scope(4, 4, 2, wrong_arguments=False),
        pool_scope(4, 4, 3, wrong_arguments=False),
        pool_scope(4, 4, 3),
        pool_scope(4, 5, 4),
        Scope("stage-small-right", slots=(2,), cells=(2,), generation_max=1, wrong_arguments=False),
        Scope("stage-medium", slots=(2,), cells=(3,), generation_max=2),
        Scope("stage-large", slots=(3,), cells=(3,), generation_max=2, epochs=2),
    )
    return {scope.name: scope for scope in scopes}

"""
Schedules that one edit has made illegal, each with the clause that must refuse the schedule.

The edit is made in a legal schedule, and the intended properties of the table (stages,
microbatches, ranks of stages) are kept, as a user would state them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import MappingProxyType

import attrs

from qeffect.schedule.actions import COMPUTE, RECEIVES, SENDS, WAITS, Action, Kind, Schedule

from .random_schedules import random_schedule, random_shape

Rows = list[list[Action | None]]
_ATTEMPTS = 400


@attrs.frozen
class Illegal:
    """
    A schedule with one injected fault.

    Args:
        schedule: The schedule after the edit.
        fault: The edit.
        clause: The clause that must refuse it.
        rank: The rank whose line of the schedule table was edited.
        action: The action that was added, moved, changed or removed.
        original: The legal schedule before the edit.
    """

    schedule: Schedule
    fault: str
    clause: str
    rank: int
    action: str
    original: Schedule


Edit = Callable[[Random, Schedule, Rows], tuple[int, Action] | None]


def random_illegal(seed: int | Random, fault: str | None = None) -> Illegal:
    """
    A random legal schedule with one random fault in it.

    Args:
        seed: A seed, or a random generator.
        fault: One of `FAULTS`; random if left out.

    Raises:
        ValueError: There is no such fault.
    """
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; expected one of {', '.join(FAULTS)}")
    rng = seed if isinstance(seed, Random) else Random(seed)
    for _ in range(_ATTEMPTS):
        illegal = inject(rng, random_schedule(rng, random_shape(rng)), fault)
        if illegal is not None:
            return illegal
    raise ValueError(f"no schedule found in which {fault!r} is possible")  # pragma: no cover


def inject(rng: Random, schedule: Schedule, fault: str | None = None) -> Illegal | None:
    """
    Make one edit that breaks a legal schedule; return `None` if the schedule has no place for this
    edit.

    Args:
        rng: Random generator.
        schedule: A legal schedule.
        fault: One of `FAULTS`; random if left out.
    """
    name = rng.choice(sorted(FAULTS)) if fault is None else fault
    clause, edit = FAULTS[name]
    rows: Rows = [list(row) for row in schedule.rows]
    edited = edit(rng, schedule, rows)
    if edited is None:
        return None
    rank, action = edited
    return Illegal(
        schedule=attrs.evolve(
            schedule,
            rows=tuple(map(tuple, rows)),
            source=f"{schedule.source}, {name} {action}",
        ),
        fault=name,
        clause=f"schedule.{clause}",
        rank=rank,
        action=str(action),
        original=schedule,
    )


def _entries(rows: Rows, kinds: frozenset[Kind]) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is not None and action.kind in kinds:
                yield rank, step, action


def _pick(
    rng: Random,
    rows: Rows,
    kinds: frozenset[Kind],
    where: Callable[[int, Action], bool] | None = None,
) -> tuple[int, int, Action] | None:
    places = [
        (rank, step, action)
        for rank, step, action in _entries(rows, kinds)
        if where is None or where(rank, action)
    ]
    return rng.choice(places) if places else None


def _find(rows: Rows, rank: int, action: Action) -> int | None:
    """The step at which a rank runs an action, alone or within an overlap."""
    for step, other in enumerate(rows[rank]):
        if other is not None and action in (other, *other.leaves()):
            return step
    return None


def _move_before(rows: Rows, rank: int, step: int, target: int) -> None:
    rows[rank].insert(target, rows[rank].pop(step))


def _change(stage: int, microbatch: int) -> Edit:
    def edit(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
        place = _pick(rng, rows, COMPUTE)
        if place is None:
            return None
        rank, step, action = place
        wrong = attrs.evolve(
            action,
            stage=schedule.num_stages + rng.randrange(3) if stage else action.stage,
            microbatch=schedule.num_microbatches + rng.randrange(3)
            if microbatch
            else action.microbatch,
        )
        rows[rank][step] = wrong
        return rank, wrong

    return edit


def _move_rank(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    place = _pick(rng, rows, COMPUTE)
    if place is None or len(rows) < 2:
        return None
    rank, step, action = place
    other = rng.choice([r for r in range(len(rows)) if r != rank])
    rows[other].insert(rng.randint(0, len(rows[other])), rows[rank].pop(step))
    return other, action


def _drop(kinds: frozenset[Kind]) -> Edit:
    def edit(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
        place = _pick(rng, rows, kinds)
        if place is None:
            return None
        rank, step, action = place
        # A table without its last reduction is legal: it leaves reductions to the runtime.
        if action.kind is Kind.REDUCE_GRAD and schedule.num_stages < 2:
            return None
        del rows[rank][step]
        return rank, action

    return edit


def _repeat(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    place = _pick(rng, rows, COMPUTE | SENDS | RECEIVES)
    if place is None:
        return None
    rank, step, action = place
    rows[rank].insert(rng.randint(step + 1, len(rows[rank])), action)
    return rank, action


def _before(later: frozenset[Kind], earlier: Mapping[Kind, Kind]) -> Edit:
    """Move an action directly before the action that it must follow, on the same rank."""

    def edit(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
        place = _pick(rng, rows, later)
        if place is None:
            return None
        rank, step, action = place
        kind = earlier[action.kind]
        target = _find(rows, rank, attrs.evolve(action, kind=kind))
        if target is None and kind is Kind.DGRAD:
            target = _find(rows, rank, attrs.evolve(action, kind=Kind.BACKWARD))
        if target is None or target >= step:
            return None
        _move_before(rows, rank, step, target)
        return rank, action

    return edit


def _receive_late(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    place = _pick(rng, rows, RECEIVES)
    if place is None:
        return None
    rank, step, action = place
    users = (Kind.FORWARD,) if action.kind is Kind.RECV_F else (Kind.DGRAD, Kind.BACKWARD)
    for kind in users:
        use = _find(rows, rank, attrs.evolve(action, kind=kind))
        if use is not None:
            rows[rank].insert(use, rows[rank].pop(step))
            return rank, action
    return None


def _send_nowhere(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    if not schedule.has_comms:
        return None
    stage, kind = rng.choice(((0, Kind.RECV_F), (schedule.num_stages - 1, Kind.RECV_B)))
    rank = schedule.stage_to_rank[stage]
    action = Action(kind, stage, rng.randrange(schedule.num_microbatches))
    rows[rank].insert(rng.randint(0, len(rows[rank])), action)
    return rank, action


def _swap_receives(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    if schedule.awaits_sends:
        # The sender may await the first message before it sends the second: that is a deadlock.
        return None

    def source(action: Action) -> int:
        offset = -1 if action.kind is Kind.RECV_F else 1
        return schedule.stage_to_rank[action.stage + offset]

    pairs = []
    for rank, step, action in _entries(rows, RECEIVES):
        following = rows[rank][step + 1] if step + 1 < len(rows[rank]) else None
        if following is None or following.kind not in RECEIVES:
            continue
        if source(action) == source(following):
            pairs.append((rank, step, following))
    if not pairs:
        return None
    rank, step, action = rng.choice(pairs)
    _move_before(rows, rank, step + 1, step)
    return rank, action


def _wait_for_own(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    """
    Let a rank wait for an action that another rank can do only after the waiting rank has
    continued.
    """
    if schedule.has_comms:
        # The gradient of a microbatch cannot arrive before its activation was sent.
        return _before(frozenset({Kind.RECV_B}), {Kind.RECV_B: Kind.SEND_F})(rng, schedule, rows)
    homes = schedule.stage_to_rank

    def comes_back(rank: int, action: Action) -> bool:
        return homes.get(action.stage - 1, rank) != rank and any(
            homes[stage] == rank for stage in range(action.stage - 1)
        )

    place = _pick(rng, rows, frozenset({Kind.FORWARD}), comes_back)
    if place is None:
        return None
    rank, step, action = place
    origin = min(stage for stage in range(action.stage) if homes[stage] == rank)
    target = _find(rows, rank, attrs.evolve(action, stage=origin))
    if target is None or target >= step:
        return None
    _move_before(rows, rank, step, target)
    return rank, action


def _reduce_early(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    place = _pick(rng, rows, frozenset({Kind.REDUCE_GRAD}))
    if place is None:
        return None
    rank, step, action = place
    settling = [
        s
        for s, other in enumerate(rows[rank])
        if other is not None
        for leaf in other.leaves()
        if leaf.stage == action.stage and leaf.kind in (Kind.WGRAD, Kind.BACKWARD)
    ]
    _move_before(rows, rank, step, rng.choice(settling))
    return rank, action


def _unshard_late(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    place = _pick(rng, rows, frozenset({Kind.UNSHARD}))
    if place is None:
        return None
    rank, step, action = place
    first = next(
        s
        for s, other in enumerate(rows[rank])
        if other is not None and any(leaf.stage == action.stage for leaf in other.leaves())
        if other.is_compute
    )
    rows[rank].insert(first, rows[rank].pop(step))
    return rank, action


def _unshard_twice(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    place = _pick(rng, rows, frozenset({Kind.UNSHARD}))
    if place is None:
        return None
    rank, step, action = place
    rows[rank].insert(step + 1, action)
    return rank, action


def _drop_wait(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    # The absence of all waits is no fault: such a table leaves ends to the runtime.
    sends = frozenset(kind for kind, start in WAITS.items() if start in SENDS)
    kinds = rng.choice((sends, frozenset(WAITS) - sends))
    if len(list(_entries(rows, kinds))) < 2:
        return None
    return _drop(kinds)(rng, schedule, rows)


def _wait_twice(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    place = _pick(rng, rows, frozenset(WAITS))
    if place is None:
        return None
    rank, step, action = place
    rows[rank].insert(rng.randint(step + 1, len(rows[rank])), action)
    return rank, action


def _wait_for_nothing(rng: Random, schedule: Schedule, rows: Rows) -> tuple[int, Action] | None:
    if not schedule.awaits_sends:
        return None
    stage, kind = rng.choice(((0, Kind.WAIT_SEND_B), (schedule.num_stages - 1, Kind.WAIT_SEND_F)))
    rank = schedule.stage_to_rank[stage]
    action = Action(kind, stage, rng.randrange(schedule.num_microbatches))
    rows[rank].insert(rng.randint(0, len(rows[rank])), action)
    return rank, action


FAULTS: Mapping[str, tuple[str, Edit]] = MappingProxyType(
    {
        "wrong-stage": ("stage-out-of-range", _change(1, 0)),
        "wrong-microbatch": ("microbatch-out-of-range", _change(0, 1)),
        "wrong-rank": ("stage-on-wrong-rank", _move_rank),
        "drop-compute": ("microbatch-missing", _drop(COMPUTE)),
        "repeat": ("duplicate-action", _repeat),
        "dgrad-early": (
            "dgrad-before-forward",
            _before(
                frozenset({Kind.DGRAD, Kind.BACKWARD}),
                {Kind.DGRAD: Kind.FORWARD, Kind.BACKWARD: Kind.FORWARD},
            ),
        ),
        "wgrad-early": (
            "wgrad-before-dgrad",
            _before(frozenset({Kind.WGRAD}), {Kind.WGRAD: Kind.DGRAD}),
        ),
        "send-early": (
            "send-before-compute",
            _before(SENDS, {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.DGRAD}),
        ),
        "receive-late": ("use-before-receive", _receive_late),
        "drop-receive": ("send-without-receive", _drop(RECEIVES)),
        "drop-send": ("receive-without-send", _drop(SENDS)),
        "message-nowhere": ("message-misplaced", _send_nowhere),
        "wait-for-nothing": ("wait-without-start", _wait_for_nothing),
        "wait-early": ("wait-before-start", _before(frozenset(WAITS), WAITS)),
        "wait-twice": ("wait-twice", _wait_twice),
        "drop-wait": ("wait-missing", _drop_wait),
        "swap-receives": ("message-order", _swap_receives),
        "wait-in-a-circle": ("deadlock", _wait_for_own),
        "reduce-early": ("reduction-before-settled", _reduce_early),
        "drop-reduction": ("reduction-missing", _drop(frozenset({Kind.REDUCE_GRAD}))),
        "unshard-late": ("use-while-resharded", _unshard_late),
        "unshard-twice": ("sharding-order", _unshard_twice),
    }
)

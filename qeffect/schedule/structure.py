"""
Checks of single ranks: each stage is on the rank that owns it, each microbatch occurs once, F comes
before dI, dI comes before dW, and reductions come last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from ..text import counted
from .actions import WAITS, Kind
from .findings import Finding, finding, place
from .index import Index, Occurrence

_NAMES = {Kind.FORWARD: "forward", Kind.DGRAD: "input gradient", Kind.WGRAD: "weight gradient"}
_SHOWN = 8


def check_places(index: Index) -> Iterator[Finding]:
    """
    Yield a finding for each action with an unknown stage, a stage of another rank, or a microbatch
    out of range.
    """
    schedule = index.schedule
    for spot in index.stray_stages:
        yield finding(
            "stage-out-of-range",
            f"{spot.atom.action} names stage {spot.atom.stage}, but the pipeline has stages 0 to "
            f"{schedule.num_stages - 1}",
            rank=spot.rank,
            atom=spot.atom,
            expected=f"a stage below {schedule.num_stages}",
            found=f"stage {spot.atom.stage}",
        )
    for spot in _once_per_entry(index.misplaced):
        home = schedule.stage_to_rank[spot.atom.stage]
        yield finding(
            "stage-on-wrong-rank",
            f"{spot.atom.action} runs on rank {spot.rank}, but stage {spot.atom.stage} lives on "
            f"rank {home}",
            rank=spot.rank,
            atom=spot.atom,
            expected=f"stage {spot.atom.stage} on rank {home}",
            found=f"stage {spot.atom.stage} on rank {spot.rank}",
        )
    for spot in _once_per_entry(index.stray_microbatches):
        yield finding(
            "microbatch-out-of-range",
            f"{spot.atom.action} names microbatch {spot.atom.microbatch}, but a step has "
            f"microbatches 0 to {schedule.num_microbatches - 1}",
            rank=spot.rank,
            atom=spot.atom,
            expected=f"a microbatch below {schedule.num_microbatches}",
            found=f"microbatch {spot.atom.microbatch}",
        )


def check_repeats(index: Index) -> Iterator[Finding]:
    """Yield a finding for each computation or message that occurs more than once."""
    for spot, earlier in index.repeated:
        atom = spot.atom
        if atom.kind in WAITS:
            continue
        what = f"{atom.stage}{atom.kind.value}{atom.microbatch}"
        yield finding(
            "duplicate-action",
            f"{what} occurs again; it already occurs on rank {earlier.rank} at step "
            f"{earlier.atom.step} ({earlier.atom.action})",
            rank=spot.rank,
            atom=atom,
            expected=f"{what} once",
            found="a second occurrence",
            related=(place(earlier.rank, earlier.atom, "first"),),
        )


def check_missing(index: Index) -> Iterator[Finding]:
    """Yield findings for stages that lack F, dI or dW of a microbatch."""
    schedule = index.schedule
    present: dict[tuple[Kind, int], set[int]] = defaultdict(set)
    for kind, stage, microbatch in index.first:
        if kind in _NAMES:
            present[kind, stage].add(microbatch)
    total = schedule.num_microbatches
    for stage in range(schedule.num_stages):
        rank = schedule.stage_to_rank.get(stage)
        if not any(present[kind, stage] for kind in _NAMES):
            if schedule.complete:
                yield finding(
                    "stage-missing",
                    f"stage {stage} computes nothing on any rank",
                    rank=rank,
                    expected=f"F, dI and dW of stage {stage}",
                    found="no action",
                )
            continue
        for kind, name in _NAMES.items():
            lacking = total - len(present[kind, stage])
            if not lacking:
                continue
            absent = _absent(present[kind, stage], total)
            yield finding(
                "microbatch-missing",
                f"stage {stage} has no {name} of microbatch{'es' * (lacking > 1)} {absent}",
                rank=rank,
                expected=f"{stage}{kind.value} for {counted(total, 'microbatch')}",
                found=f"{total - lacking} of them",
            )


def check_order(index: Index) -> Iterator[Finding]:
    """
    Yield a finding for each dI that does not follow its F, and each dW that does not follow its dI.
    """
    for (kind, stage, microbatch), spot in index.first.items():
        if kind is Kind.DGRAD:
            needs, name = Kind.FORWARD, "dgrad-before-forward"
        elif kind is Kind.WGRAD:
            needs, name = Kind.DGRAD, "wgrad-before-dgrad"
        else:
            continue
        needed = index.get(needs, stage, microbatch)
        # An absent or misplaced step is already reported.
        if needed is None or needed.rank != spot.rank or index.before(needed, spot):
            continue
        yield finding(
            name,
            f"the {_NAMES[kind]} {stage}{kind.value}{microbatch} comes before its {_NAMES[needs]} "
            f"{stage}{needs.value}{microbatch}, which is at step {needed.atom.step}",
            rank=spot.rank,
            atom=spot.atom,
            expected=f"{stage}{needs.value}{microbatch} earlier on rank {spot.rank}",
            found=f"{stage}{needs.value}{microbatch} at step {needed.atom.step}",
            related=(place(needed.rank, needed.atom, "needs"),),
        )


def check_reductions(index: Index) -> Iterator[Finding]:
    """
    Yield findings for stages whose gradients are reduced twice or too early, or are not reduced
    although other stages have a reduction.
    """
    schedule = index.schedule
    reduced: dict[int, Occurrence] = {}
    for spot in index.per_stage:
        if spot.atom.kind is not Kind.REDUCE_GRAD:
            continue
        stage = spot.atom.stage
        earlier = reduced.setdefault(stage, spot)
        if earlier is not spot:
            yield finding(
                "duplicate-action",
                f"{spot.atom.action} occurs again; it already occurs on rank {earlier.rank} at "
                f"step {earlier.atom.step}",
                rank=spot.rank,
                atom=spot.atom,
                expected=f"{spot.atom.action} once",
                found="a second occurrence",
                related=(place(earlier.rank, earlier.atom, "first"),),
            )
    if not reduced:
        return
    late: dict[int, list[Occurrence]] = defaultdict(list)
    for (kind, stage, _), spot in index.first.items():
        reduction = reduced.get(stage)
        if kind in _NAMES and reduction is not None and index.before(reduction, spot):
            late[stage].append(spot)
    for stage in range(schedule.num_stages):
        reduction = reduced.get(stage)
        if reduction is None:
            if stage in schedule.stage_to_rank:
                yield finding(
                    "reduction-missing",
                    f"stage {stage} has no REDUCE_GRAD, but other stages have one",
                    rank=schedule.stage_to_rank[stage],
                    expected=f"{stage}REDUCE_GRAD after the stage's last weight gradient",
                    found="no REDUCE_GRAD",
                )
            continue
        left = Counter(spot.atom.kind for spot in late[stage])[Kind.WGRAD]
        if left:
            last = max(
                (spot for spot in late[stage] if spot.atom.kind is Kind.WGRAD),
                key=lambda spot: spot.position,
            )
            yield finding(
                "reduction-before-settled",
                f"{reduction.atom.action} runs while {left} of stage {stage}'s weight gradients "
                f"are still to come, the last at step {last.atom.step} ({last.atom.action})",
                rank=reduction.rank,
                atom=reduction.atom,
                expected=f"{reduction.atom.action} after step {last.atom.step}",
                found=f"{reduction.atom.action} at step {reduction.atom.step}",
                related=(place(last.rank, last.atom, "needs"),),
            )
        if late[stage]:
            spot = min(late[stage], key=lambda spot: spot.position)
            yield finding(
                "action-after-reduction",
                f"{spot.atom.action} runs after stage {stage}'s gradients were reduced at step "
                f"{reduction.atom.step}",
                rank=spot.rank,
                atom=spot.atom,
                expected=f"no action of stage {stage} after {reduction.atom.action}",
                found=f"{spot.atom.action} at step {spot.atom.step}",
                related=(place(reduction.rank, reduction.atom, "first"),),
            )


def check_sharding(index: Index) -> Iterator[Finding]:
    """
    Yield findings for stages that compute while resharded, and for UNSHARD and RESHARD entries that
    do not alternate.
    """
    schedule = index.schedule
    sharded = {s.atom.stage for s in index.per_stage if s.atom.kind is Kind.UNSHARD}
    for rank, atoms in enumerate(schedule.atoms):
        gathered: set[int] = set()
        told: set[int] = set()
        for atom in atoms:
            stage = atom.stage
            if atom.kind in (Kind.UNSHARD, Kind.RESHARD):
                if (atom.kind is Kind.UNSHARD) is (stage in gathered):
                    state = "unsharded" if stage in gathered else "resharded"
                    yield finding(
                        "sharding-order",
                        f"{atom.action} finds stage {stage} already {state}",
                        rank=rank,
                        atom=atom,
                        expected="UNSHARD and RESHARD of a stage to alternate",
                        found=f"stage {stage} {state}",
                    )
                if atom.kind is Kind.UNSHARD:
                    gathered.add(stage)
                else:
                    gathered.discard(stage)
            elif atom.kind in _NAMES and stage in sharded and stage not in gathered | told:
                told.add(stage)
                yield finding(
                    "use-while-resharded",
                    f"{atom.action} computes while stage {stage} is resharded",
                    rank=rank,
                    atom=atom,
                    expected=f"{stage}UNSHARD before step {atom.step}",
                    found=f"stage {stage} resharded",
                )


def _once_per_entry(spots: list[Occurrence]) -> Iterator[Occurrence]:
    # B is two indivisible steps; one wrong entry gives one finding.
    last: tuple[int, int, int] | None = None
    for spot in spots:
        key = (spot.rank, spot.atom.step, spot.atom.stage)
        if key != last:
            yield spot
        last = key


def _absent(present: set[int], total: int) -> str:
    shown = []
    for microbatch in range(total):
        if microbatch not in present:
            shown.append(str(microbatch))
            if len(shown) == _SHOWN:
                break
    more = total - len(present) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

"""
Checks of waits: each wait ends exactly one send or one reduction, after the send or reduction
started.

A send reads its tape (what a forward leaves for its backward) until the send ends, and a reduction
uses a stage's gradients until the reduction ends. Tables up to torch 2.14 do not say when sends and
reductions end. Tables of torch 2.15 say so (`WAIT_SEND_F`, `WAIT_SEND_B`, `WAIT_REDUCE_GRAD`),
because a step that is captured in a graph cannot query whether a send has ended (pytorch pull
request 194121). A table that awaits one send must await every send; otherwise the buffers of the
other sends never become free. The same holds for reductions.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..text import counted
from .actions import SEND_WAITS, SENDS, WAITS, Kind
from .findings import Finding, finding, place
from .index import Index, Occurrence

_SHOWN = 8
_WAIT_OF = {start: wait for wait, start in WAITS.items()}


def check_send_waits(index: Index) -> Iterator[Finding]:
    """
    Yield findings for waits without an earlier send, repeated waits, and sends without a wait in a
    table that awaits sends.
    """
    for spot, earlier in index.repeated:
        if spot.atom.kind in SEND_WAITS:
            yield _twice(spot, earlier)
    for (kind, stage, microbatch), spot in index.first.items():
        if kind in SEND_WAITS:
            yield from _check_start(spot, index.get(WAITS[kind], stage, microbatch))
        elif kind in SENDS and index.schedule.awaits_sends:
            if index.get(_WAIT_OF[kind], stage, microbatch) is None:
                yield _missing(spot)


def check_reduction_waits(index: Index) -> Iterator[Finding]:
    """
    Yield findings for waits without an earlier reduction, repeated waits, and reductions without a
    wait in a table that awaits reductions.
    """
    started: dict[int, Occurrence] = {}
    awaited: dict[int, Occurrence] = {}
    for spot in index.per_stage:
        if spot.atom.kind is Kind.REDUCE_GRAD:
            started.setdefault(spot.atom.stage, spot)
        elif spot.atom.kind is Kind.WAIT_REDUCE_GRAD:
            earlier = awaited.setdefault(spot.atom.stage, spot)
            if earlier is not spot:
                yield _twice(spot, earlier)
    for stage, spot in awaited.items():
        yield from _check_start(spot, started.get(stage))
    if index.schedule.awaits_reductions:
        for stage, spot in started.items():
            if stage not in awaited:
                yield _missing(spot)


def check_outstanding(index: Index) -> Iterator[Finding]:
    """
    Yield, for each rank, a finding for its first send beyond the runtime's limit of outstanding
    sends.
    """
    limit = index.transport.max_outstanding_sends
    if limit is None or not index.schedule.awaits_sends:
        return
    for rank, atoms in enumerate(index.schedule.atoms):
        outstanding: dict[tuple[Kind, int, int], Occurrence] = {}
        for position, atom in enumerate(atoms):
            if atom.kind in SEND_WAITS:
                outstanding.pop((WAITS[atom.kind], atom.stage, atom.microbatch), None)
            elif atom.kind in SENDS:
                outstanding[atom.kind, atom.stage, atom.microbatch] = Occurrence(
                    rank, position, atom
                )
                if len(outstanding) <= limit:
                    continue
                *earlier, _ = outstanding.values()
                names = ", ".join(str(spot.atom.action) for spot in earlier[:_SHOWN])
                yield finding(
                    "outstanding-sends",
                    f"after {atom.action}, rank {rank} has posted {len(outstanding)} sends that it "
                    f"has not awaited; the limit is {limit}",
                    rank=rank,
                    atom=atom,
                    expected=f"at most {counted(limit, 'outstanding send')}",
                    found=f"already outstanding: {names or 'none'}",
                    related=tuple(place(rank, spot.atom, "first") for spot in earlier),
                )
                break


def _check_start(wait: Occurrence, start: Occurrence | None) -> Iterator[Finding]:
    atom = wait.atom
    microbatch = atom.microbatch if atom.microbatch >= 0 else ""
    name = f"{atom.stage}{WAITS[atom.kind].value}{microbatch}"
    if start is None:
        yield finding(
            "wait-without-start",
            f"{atom.action} waits for {name}, which is not in rank {wait.rank}'s row",
            rank=wait.rank,
            atom=atom,
            expected=f"{name} before step {atom.step}",
            found="none",
        )
    # A start on another rank is already reported as misplaced.
    elif start.rank == wait.rank and start.position > wait.position:
        yield finding(
            "wait-before-start",
            f"{atom.action} waits for {name}, which starts only at step {start.atom.step}",
            rank=wait.rank,
            atom=atom,
            expected=f"{name} before step {atom.step}",
            found=f"{name} at step {start.atom.step}",
            related=(place(start.rank, start.atom, "needs"),),
        )


def _twice(spot: Occurrence, earlier: Occurrence) -> Finding:
    return finding(
        "wait-twice",
        f"{spot.atom.action} occurs again; it already occurs on rank {earlier.rank} at step "
        f"{earlier.atom.step}, where its send or reduction ends",
        rank=spot.rank,
        atom=spot.atom,
        expected=f"{spot.atom.action} once",
        found="a second occurrence",
        related=(place(earlier.rank, earlier.atom, "first"),),
    )


def _missing(spot: Occurrence) -> Finding:
    atom = spot.atom
    microbatch = atom.microbatch if atom.microbatch >= 0 else ""
    name = f"{atom.stage}{_WAIT_OF[atom.kind].value}{microbatch}"
    what = "reduction" if atom.kind is Kind.REDUCE_GRAD else "send"
    return finding(
        "wait-missing",
        f"the table has waits, but no wait for {atom.action}: {name} is missing",
        rank=spot.rank,
        atom=atom,
        expected=f"{name} after step {atom.step}",
        found=f"a {what} without end",
    )

"""
`gpu_runtime/PROJECTION.md`: what more ranks would do, simulated from a checked-in report.

``python -m tests.docs.projection`` writes it, in minutes; `test_projection.py` holds its rows to
the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.statistics.projection import CLASSES, Links, Measured, projected
from tests.docs.blocks import ROOT, RUNTIME_REPORTS, load, markdown

PAGE = ROOT / "gpu_runtime" / "PROJECTION.md"
REPORT = "scale.json"
CELLS = ("h2048-s256-m4", "h4096-s256-m8")
RANKS = (8, 16, 32, 64)
HEADER = (
    "cell", "schedule", "ranks", "M", "step, messages free", "step", "bubble",
    "step, slow between hosts", "step of guarded replays", "host of one launch", "slots",
)  # fmt: skip


def row(report: Mapping[str, Any], cell: str, schedule: str, pp: int) -> tuple[str, ...]:
    """One line of the table, simulated now."""
    p = projected(Measured.of(report, cell, schedule), schedule, pp)
    return (
        cell.rsplit("-", 1)[0],
        schedule,
        str(p.pp),
        str(p.microbatches),
        f"{p.free:.1f}",
        f"{p.step:.1f}",
        f"{p.bubble:.0%}",
        f"{p.slow:.1f}",
        f"{p.replays:.1f}",
        f"{p.launch_host:.1f}",
        "-" if p.slots is None else str(p.slots),
    )


def over_bound() -> str:
    """How far launches that were measured are above what the simulator made of the same table."""
    found = []
    for name in (REPORT, "scale_four.json"):
        report = load(RUNTIME_REPORTS / name)
        timed = [r for r in report["derived"]["timed"] if r["side"] == "one launch"]
        least, most = (f(r["over_bound"] for r in timed) for f in (min, max))
        found.append(f"{report['configuration']['pp']} ranks {least:.2f}x to {most:.2f}x")
    return ", over ".join(found)


def over_replays(report: Mapping[str, Any]) -> str:
    """How far the step of replays is above what they took, where the simulator can be asked."""
    found = []
    for schedule in CLASSES:
        p = projected(Measured.of(report, CELLS[0], schedule), schedule, 2)
        (took,) = (
            r["step_ms"]["median"]
            for r in report["derived"]["timed"]
            if (r["cell"], r["schedule"], r["side"]) == (CELLS[0], schedule, "guarded")
        )
        found.append(p.replays / took)
    return span(found)


def over_steps(rows: Iterable[tuple[str, ...]], column: str, *, base: str = "step") -> str:
    """How far a column of the table is above the steps, at the least and at the most."""
    at, under = HEADER.index(column), HEADER.index(base)
    return span([float(line[at]) / float(line[under]) for line in rows])


def span(found: Sequence[float]) -> str:
    """Two ratios, or one where they do not differ as they are written."""
    least, most = f"{min(found):.2f}x", f"{max(found):.2f}x"
    return least if least == most else f"{least} to {most}"


def page(report: Mapping[str, Any], rows: Iterable[tuple[str, ...]]) -> str:
    """The whole page."""
    links, commit = Links(), report["environment"]["commit"][:12]
    rows = list(rows)
    most = [line for line in rows if line[2] == str(RANKS[-1])]
    small, large = ([r for r in most if r[0] == c.rsplit("-", 1)[0]] for c in CELLS)
    return f"""# More ranks than were measured

**Every number of the table is simulated, none is measured.** The simulator (`qeffect plan --durations`)
is given what `reports/{REPORT}` measured over two ranks at `{commit}`: each stage's F, dI and dW
alone, refreshes, updates, and the host's time of a step. One layer a stage, two stages a rank,
`2 * ranks` microbatches (M). Messages are not those that it measured; they are assumed to cost {links.inside_ms:g} ms and
{links.inside_gb_s:g} GB/s inside of a host of {links.ranks_a_host} ranks, {links.between_ms:g} ms and {links.between_gb_s:g} GB/s between hosts. Milliseconds:

{markdown(HEADER, rows)}

What breaks first, by these numbers, over {RANKS[-1]} ranks:

- *Messages between hosts*, were they ten times slower than assumed: a step then takes {over_steps(most, "step, slow between hosts")} of what it
  takes as assumed. As assumed, all messages make it {over_steps(most, "step", base="step, messages free")} of a step with messages for nothing.
- *The host of guarded replays*, at the smaller cell: the step of replays is {over_steps(small, "step of guarded replays")} of a step, at the
  larger one {over_steps(large, "step of guarded replays")}.
- *The host of one launch* never: it takes {over_steps(most, "host of one launch")} of a step.
- *Memory* for slots is not in these times; see below.

How to read it:

- How far to trust it: one launch that was measured took, over {over_bound()} of its
  bound there: what the simulator makes of the same table, over two ranks with the messages that were measured, over four
  with messages for nothing, from an older report whose bounds are too low. Read the steps as bounds.
- *Bubble* is the idle share of all ranks, with those messages; an update counts as busy.
- *Slow between hosts* has every message between hosts ten times slower. Up to {links.ranks_a_host} ranks there is one host.
- *Guarded replays* have the host's measured time in front of each action: all of a single step's
  host time, waits included, spread over its actions, so an upper bound. Over two ranks, at the smaller cell, it
  gives {over_replays(report)} of what replays took there: by so much it may be too high for more ranks too.
- *Host of one launch* is the host's measured time of a single launch, behind a wait for all ranks, spread over its
  actions. Back to back a launch takes the host less.
- The consent of guarded replays is one all-reduce of all ranks on the CPU, which adds its latency
  to a step once. One launch gathers a number of each rank inside the graph instead.
- *Slots* are those of the rank with most, and grow with the ranks: where a slot is large, memory ends
  before any of this. Planning above 16 ranks takes minutes, and is left out.
"""  # noqa: E501 - numbers are shorter than their names


def main() -> None:
    """Simulate every row, and write the page."""
    report = load(RUNTIME_REPORTS / REPORT)
    rows = [row(report, cell, s, pp) for pp in RANKS for cell in CELLS for s in CLASSES]
    PAGE.write_text(page(report, rows), encoding="utf-8")


if __name__ == "__main__":
    main()

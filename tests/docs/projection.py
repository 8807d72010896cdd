"""
`gpu_runtime/PROJECTION.md`: what more ranks would do, simulated from a checked-in report.

``python -m tests.docs.projection`` writes it, in minutes; `test_projection.py` holds its rows to
the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qeffect.gpu_runtime.measure.projection import CLASSES, Links, Measured, projected
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


def page(report: Mapping[str, Any], rows: Iterable[tuple[str, ...]]) -> str:
    """The whole page."""
    links, commit = Links(), report["environment"]["commit"][:12]
    return f"""# More ranks than were measured

**Every number of the table is simulated, none is measured.** The simulator (`qeffect plan --durations`)
is given what `reports/{REPORT}` measured over two ranks at `{commit}`: each stage's F, dI and dW
alone, refreshes, updates, and the host's time of a step. One layer a stage, two stages a rank,
`2 * ranks` microbatches. Messages are not those that it measured; they are assumed to cost {links.inside_ms:g} ms and
{links.inside_gb_s:g} GB/s inside of a host of {links.ranks_a_host} ranks, {links.between_ms:g} ms and {links.between_gb_s:g} GB/s between hosts. Milliseconds:

{markdown(HEADER, rows)}

- How far to trust it: one launch that was measured took, over {over_bound()} of its
  bound there: what the simulator makes of the same table, over two ranks with the messages that were measured, over four
  with messages for nothing. Read the steps as bounds.
- *Bubble* is the idle share of all ranks, with those messages; an update counts as busy.
- *Slow between hosts* has every message between hosts ten times slower. Where that moves the step
  much, messages between hosts are what breaks first under one launch.
- *Guarded replays* have the host's measured time in front of each action: all of a single step's
  host time, waits included, spread over its actions, so an upper bound. Where it is far above the
  step, the host is what breaks first with replays.
- *Host of one launch* is the measured host time of a launch, for each action too, its wait for the
  device included. Where it comes near the step, the host is what breaks first.
- The consent of guarded replays is one all-reduce of all ranks on the CPU, which adds its latency
  to a step once. One launch gathers a number of each rank inside the graph instead.
- *Slots* are those of the rank with most, and grow with the ranks: memory breaks first where a slot
  is large. Planning above 16 ranks takes minutes, and is left out.
"""  # noqa: E501 - numbers are shorter than their names


def main() -> None:
    """Simulate every row, and write the page."""
    report = load(RUNTIME_REPORTS / REPORT)
    rows = [row(report, cell, s, pp) for pp in RANKS for cell in CELLS for s in CLASSES]
    PAGE.write_text(page(report, rows), encoding="utf-8")


if __name__ == "__main__":
    main()

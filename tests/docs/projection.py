"""
`gpu_runtime/PROJECTION.md`: a step over more ranks, simulated from a checked-in report.

``python -m tests.docs.projection`` writes the page in minutes; `test_projection.py` compares its
rows with the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.statistics.projection import CLASSES, Links, Measured, project
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
    p = project(Measured.of(report, cell, schedule), schedule, pp)
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
    """Measured steps of one launch, divided by the simulated step of the same table."""
    found = []
    for name in (REPORT, "scale_four.json"):
        report = load(RUNTIME_REPORTS / name)
        timed = [r for r in report["derived"]["timed"] if r["side"] == "one launch"]
        least, most = (f(r["over_bound"] for r in timed) for f in (min, max))
        found.append(f"{least:.2f}x to {most:.2f}x over {report['configuration']['pp']} ranks")
    return ", ".join(found)


def over_replays(report: Mapping[str, Any]) -> str:
    """The simulated step of replays over the measured one, at two ranks."""
    found = []
    for schedule in CLASSES:
        p = project(Measured.of(report, CELLS[0], schedule), schedule, 2)
        (took,) = (
            r["step_ms"]["median"]
            for r in report["derived"]["timed"]
            if (r["cell"], r["schedule"], r["side"]) == (CELLS[0], schedule, "guarded")
        )
        found.append(p.replays / took)
    return span(found)


def over_steps(rows: Iterable[tuple[str, ...]], column: str, *, base: str = "step") -> str:
    """The least and the greatest ratio of a column of the table over the steps."""
    at, under = HEADER.index(column), HEADER.index(base)
    return span([float(line[at]) / float(line[under]) for line in rows])


def span(found: Sequence[float]) -> str:
    """Two ratios as text, or one if both texts are equal."""
    least, most = f"{min(found):.2f}x", f"{max(found):.2f}x"
    return least if least == most else f"{least} to {most}"


def page(report: Mapping[str, Any], rows: Iterable[tuple[str, ...]]) -> str:
    """The whole page."""
    links, commit = Links(), report["environment"]["commit"][:12]
    rows = list(rows)
    most = [line for line in rows if line[2] == str(RANKS[-1])]
    small, large = ([r for r in most if r[0] == c.rsplit("-", 1)[0]] for c in CELLS)
    return f"""# More ranks than were measured

**Every number in the table is simulated; none is measured.** The simulator (`qeffect plan --durations`) takes its times from
`lab/reports/{REPORT}`, measured over two ranks at commit `{commit}`. These are the times of F, dI and dW (forward, input gradient,
weight gradient) of each stage alone, of refreshes (quantization of weights) and of updates, and the host time of a step. Each stage
has one layer, each rank has two stages, and a step has `2 * ranks` microbatches (M). Message times are assumed, not measured:
{links.inside_ms:g} ms and {links.inside_gb_s:g} GB/s within a host of {links.ranks_a_host} ranks, {links.between_ms:g} ms and {links.between_gb_s:g} GB/s between hosts.
Times are in milliseconds:

{markdown(HEADER, rows)}

In this simulation, the following limits a step over {RANKS[-1]} ranks. A *step* is one launch (a rank's step as one CUDA graph) with
the assumed messages, as in column `step`:

- *Messages between hosts* limit a step if they are ten times slower than assumed: such a step takes {over_steps(most, "step, slow between hosts")} the time of a
  *step*. With the assumed messages, a *step* takes {over_steps(most, "step", base="step, messages free")} the time of a step with free messages.
- *Host time of guarded replays* (a checked CUDA graph per action) limits replays at the smaller cell: a step of replays takes
  {over_steps(small, "step of guarded replays")} the time of a *step*. At the larger cell a step of replays takes {over_steps(large, "step of guarded replays")} the time of a *step*.
- *Host time of one launch* limits no step: it is {over_steps(most, "host of one launch")} the time of a step.
- *Memory* for slots has no effect on these times; see *slots* below.

How to read the table:

- *Cell* is hidden size and sequence length; *schedule* `il` is Interleaved 1F1B, `zbv` is ZB-V.
- *Step* is a lower bound, because the simulator adds no host time. Measured steps of one launch, divided by the simulated steps of
  the same table, are {over_bound()}. The simulation over two ranks uses measured times of
  messages. The simulation over four ranks assumes that messages take no time. It comes from an older report, whose bounds are too low.
- *Step, messages free* assumes that messages take no time.
- *Bubble* is the idle share of all ranks, with the assumed messages; the optimizer's update counts as busy.
- *Step, slow between hosts* makes every message between hosts ten times slower than assumed. Up to {links.ranks_a_host} ranks fit on one host.
- *Step of guarded replays* adds host time before each action. The added time is the measured host time of a single step (waits
  included), divided equally among the step's actions. The result is an upper bound. Over two ranks, at the smaller cell, the
  simulated step takes {over_replays(report)} the time of the measured step; for more ranks the simulated step may be too long by the same factor.
- *Host of one launch* is the measured host time of a single launch that starts after a wait for all ranks, scaled with the number of
  actions. When launches follow each other without waits, the host needs less time.
- The table leaves out the ranks' agreement on an update. Guarded replays use one all-reduce of all ranks on the CPU, which adds its
  latency once to each step. One launch gathers one number per rank inside the graph instead.
- *Slots* is the number of slots on the rank with the most slots. This number grows with the number of ranks. If each slot needs much
  memory, memory limits the number of ranks first. Above 16 ranks slots were not computed, because planning takes minutes.
"""  # noqa: E501 - numbers are shorter than their names


def main() -> None:
    """Simulate every row, and write the page."""
    report = load(RUNTIME_REPORTS / REPORT)
    rows = [row(report, cell, s, pp) for pp in RANKS for cell in CELLS for s in CLASSES]
    PAGE.write_text(page(report, rows), encoding="utf-8")


if __name__ == "__main__":
    main()

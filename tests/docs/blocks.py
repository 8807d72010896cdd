"""
The README's generated blocks: every number in them comes from a run or from a checked-in report.

``python -m tests.docs.blocks`` writes them, ``--check`` says whether they are current.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
KERNEL_REPORTS = ROOT / "verification" / "reports"
RUNTIME_REPORTS = ROOT / "gpu_runtime" / "reports"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def load(path: Path) -> Mapping[str, Any]:
    """Read a report."""
    data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def where(environment: Mapping[str, Any]) -> str:
    """Say in a line what a kernel report was measured on."""
    return (
        f"{environment['cpu']}, {environment['cores']} cores, Python {environment['python']}, "
        f"z3-solver {environment['packages']['z3-solver']}, commit "
        f"`{environment['commit'][:12]}`"
    )


def faults() -> str:
    """The fault table, from a run now."""
    from qeffect.faults import run

    rows = run().asdict()["rows"]
    return markdown(
        ("injected violation", "detected at", "refused by", "preserved"),
        [
            (row["injection"], row["detected_at"], f"`{row['clause']}`", row["preserved"])
            for row in rows
        ],
    )


def proofs() -> str:
    """The proofs and the mutants, from their report."""
    data = load(KERNEL_REPORTS / "proofs.json")
    text = (
        f"{data['unsat']:,} of {data['obligations']:,} obligations are proved and "
        f"{data['unknown']} are unknown, in {data['seconds']:.1f} s: every invariant is inductive "
        "over every path of every transition, with every relation and with each optional one left "
        "out, for any number of slots, microbatches and epochs; every refusal leaves every column "
        "as it was; every path can be taken; an outstanding ticket with whole evidence is never "
        "refused.\n\n"
    )
    seeds = [a for a in data["agreements"] if a["solver"] == "z3"]
    others = [a for a in data["agreements"] if a["solver"] != "z3"]
    goals = data["agreements"][0]["goals"]
    assert all(a["unsat"] == goals for a in data["agreements"])
    text += (
        f"{len(seeds) + 1} seeds of Z3 agree, and so does {others[0]['solver']}, on the {goals:,} "
        f"obligations of the full composition. A bounded proof beside them, from the beginning: "
        f"{data['bounded'][-1]['name']}.\n\n" + _mutants(data["mutant_report"])
    )
    return (
        text + "Report: [verification/reports/proofs.json](verification/reports/proofs.json), "
        f"measured on {where(data['environment'])}. `qeffect prove` makes it again; "
        "`--mutants`, `--seeds 40` and `--cvc5` add the rest."
    )


def _mutants(report: Mapping[str, Any]) -> str:
    rows = [(name, str(count)) for name, count in report["by_class"].items()]
    same = "nothing: proved, and the guard that does its work is named"
    rows.append((same, str(len(report["equivalent"]))))
    rows.append(("survived", str(len(report["survivors"]))))
    return (
        "Is every guard needed? Every guard clause, every operand of one and every state update of "
        f"every transition is deleted in turn, {report['mutants']} mutants from the syntax trees, "
        f"and {report['killed']} are killed, each by a call in a state that the contract reaches "
        f"({report['elsewhere']} of them only where a relation is left out), in "
        f"{report['seconds'] / report['mutants']:.2f} s each:\n\n"
        + markdown(("what the deletion does", "mutants"), rows)
        + "\n\n"
    )


def bench() -> str:
    """What the guards cost, from the bench report."""
    data = load(KERNEL_REPORTS / "bench.json")
    pool, stage = data["explore_pool_batch"], data["explore_stage_batch"]
    rows = [
        ("guarded F, dI or dW, check plus commit", f"{data['guarded_action_us']:.2f} µs"),
        ("the same through a context manager", f"{data['context_manager_us']:.2f} µs"),
        ("a refusal, explained", f"{data['refusal_us']:.2f} µs"),
        ("cost with 4,096 slots over 4", f"{data['slots_4096_over_4']:.2f}x"),
        ("memory of a live tape", f"{data['bytes_per_live_tape']:.0f} B"),
        ("check of ZB-V, PP=8, M=64, two steps", f"{data['check_zbv_pp8_m64_s']:.2f} s"),
        ("event log replay", f"{data['replay_events_per_s']:,.0f} events/s"),
        ("random schedules", f"{data['random_actions_per_s']:,.0f} actions/s"),
        (
            "exploration of the slot pool, plain / NumPy, accepted transitions",
            f"{data['explore_pool_plain']['accepted_per_cpu_s']:,.0f} / "
            f"{pool['accepted_per_s']:,.0f} a second",
        ),
        (
            "exploration of the composed stage, plain / NumPy, accepted transitions",
            f"{data['explore_stage_plain']['accepted_per_cpu_s']:,.0f} / "
            f"{stage['accepted_per_s']:,.0f} a second",
        ),
        (
            f"{data['explore_five_million_states']['states']:,} unreduced states",
            f"{data['explore_five_million_states']['seconds']:.1f} s, peak "
            f"{data['explore_five_million_states']['peak_rss_mb']:,.0f} MiB",
        ),
        ("all unbounded proofs", f"{data['proofs_s']:.1f} s"),
    ]
    return (
        markdown(("the kernel", "median"), rows)
        + "\n\nReport: [verification/reports/bench.json](verification/reports/bench.json), "
        f"measured on {where(data['environment'])}; `qeffect bench` makes it again."
    )


BLOCKS: Mapping[str, Callable[[], str]] = {"faults": faults, "proofs": proofs, "bench": bench}


def rendered(text: str) -> str:
    """Return the README with every block made anew."""
    from tests.docs.runtime_block import runtime

    for name, make in {**BLOCKS, "runtime": runtime}.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the README has no block {name!r}")
        made = make()
        text = pattern.sub(lambda _, b=begin, m=made, e=end: f"{b}\n{m}\n{e}", text)
    return text


def main(argv: Sequence[str]) -> int:
    """Write the blocks, or with ``--check`` only say whether they are current."""
    before = README.read_text(encoding="utf-8")
    after = rendered(before)
    if "--check" in argv:
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

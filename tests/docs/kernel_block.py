"""
The blocks about the kernel: faults, public failures, proofs and mutants, and what guards cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from qeffect.faults import run as run_faults
from qeffect.verification.failures.catalogue import FAILURES
from qeffect.verification.failures.command import counts
from qeffect.verification.failures.model import KINDS, Failure, Outcome, run
from tests.docs.bench_block import conditions, cost, figures, missed
from tests.docs.blocks import KERNEL_REPORTS, load, markdown


def where(environment: Mapping[str, Any]) -> str:
    """Say in a line what a kernel report was measured on."""
    return (
        f"{environment['cpu']}, {environment['cores']} cores, Python {environment['python']}, "
        f"z3-solver {environment['packages']['z3-solver']}, commit "
        f"`{environment['commit'][:12]}`" + " with changes" * ("+" in environment["commit"])
    )


def faults() -> str:
    """The fault table, from a run now."""
    rows = run_faults().asdict()["rows"]
    return markdown(
        ("injected violation", "detected at", "result", "refused by", "preserved"),
        [
            (
                row["injection"],
                row["detected_at"],
                row["result"],
                f"`{row['clause']}`",
                row["preserved"],
            )
            for row in rows
        ],
    )


@cache
def _failures() -> Sequence[tuple[Failure, Outcome]]:
    """Every public failure with what a run of it now comes to."""
    return [(failure, run(failure)) for failure in FAILURES]


def failures_counted() -> str:
    """How many public failures are refused, in a paragraph."""
    counted = counts(_failures())
    return (
        f"Of {counted['failures']} failures that users of Transformer Engine, Megatron-LM, torch, "
        f"DeepSpeed and others reported in public, {counted['refused']} are refused, "
        f"{counted['given_a_report']} of them where the runtime makes a report that not every one "
        f"does, and {counted['refused_by_guess']} under a cause that is wholly our guess, because "
        f"none was published; {counted['not_caught']} are not caught, and "
        f"{counted['unexplained']} more were never explained. {counted['enacted']} are re-enacted; "
        "of the others no call of the contract differs from that of a right run."
    )


def failures() -> str:
    """What becomes of the public failures, by relation, and what is not seen."""
    pairs = _failures()
    relations = dict.fromkeys(failure.relation for failure, _ in pairs)
    verdicts = ("refused", "not caught", "unexplained")
    table = [
        (
            relation,
            *(
                sum(f.relation == relation and o.verdict == verdict for f, o in pairs)
                for verdict in verdicts
            ),
        )
        for relation in relations
    ]
    totals = tuple(sum(o.verdict == verdict for _, o in pairs) for verdict in verdicts)
    missed: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for failure, outcome in pairs:
        if outcome.verdict != "refused":
            missed[failure.kind].append(failure.references[0])
    return (
        failures_counted()
        + "\n\n"
        + markdown(
            ("relation", "refused", "not caught", "never explained"),
            [*table, ("all", *totals)],
        )
        + "\n\nWhat the contract does not see:\n\n"
        + markdown(
            ("because", "failures"),
            [(KINDS[kind], ", ".join(names)) for kind, names in missed.items() if names],
        )
    )


def settled(data: Mapping[str, Any]) -> str:
    """
    How many obligations are proved, and what they say.

    Args:
        data: The proofs' report.
    """
    text = (
        f"{data['unsat']:,} of {data['obligations']:,} obligations are proved and "
        f"{data['unknown']} are unknown, in {data['seconds']:.1f} s"
    )
    if "questions" in data:
        text = (
            f"{data['questions']:,} distinct questions to the solver, {data['unknown']} of them "
            f"unknown, settle {data['unsat']:,} of {data['obligations']:,} obligations in "
            f"{data['seconds']:.1f} s ({data['implied']:,} follow from one already proved, "
            f"{data['same_term']:,} compare a term with itself)"
        )
    return (
        f"{text}: every invariant is inductive "
        "over every path of every transition, with every relation and with each optional one left "
        "out, for any number of slots, microbatches and epochs; every refusal leaves every column "
        "as it was; an outstanding ticket with whole evidence is never refused."
    )


def proofs() -> str:
    """The proofs and the mutants, from their report."""
    data = load(KERNEL_REPORTS / "proofs.json")
    further = ""
    if "recovery" in data["by_kind"]:
        further = (
            " From every state the way back is open: aborts, failed reductions and drains are "
            "accepted, come to an end, and a restore is accepted then. With every relation in "
            "force a legal F, dI, dW or refresh is accepted: no guard is too strong."
        )
    text = (
        settled(data)
        + further
        + " (`make slow` asks it of all 64 choices of relations.) "
        + _vacuity(data)
        + "\n\n"
    )
    text += (
        f"{agreements(data['agreements'])} A bounded proof beside them, from the beginning: "
        f"{data['bounded'][-1]['name']}.\n\n" + _mutants(data["mutant_report"])
    )
    return (
        f"{text}Report: [proofs.json](proofs.json), "
        f"measured on {where(data['environment'])}. `qeffect prove` makes it again; "
        "`--mutants`, `--seeds 40` and `--cvc5` add the rest."
    )


def agreements(found: Sequence[Mapping[str, Any]]) -> str:
    """Which seeds and solvers agree on the full composition."""
    if not found:
        return "For this report one seed of Z3 was asked, and no other solver."
    seeds = [a for a in found if a["solver"] == "z3"]
    others = [a for a in found if a["solver"] != "z3"]
    goals = found[0]["goals"]
    assert all(a["unsat"] == goals for a in seeds)
    text = f"{len(seeds) + 1} seeds of Z3 agree on the {goals:,} obligations of all relations"
    for other in others:
        left = [row for row in other["open"] if row["verdict"] == "unknown"]
        assert other["unsat"] + len(left) == goals
        agrees = f"all {goals:,}" if other["unsat"] == goals else f"{other['unsat']:,}"
        text += f"; {other['solver']} agrees on {agrees} of them"
        if "attempts" in other:
            told = [f"{count:,} from {name}" for name, count in other["attempts"].items()]
            text += f" ({', '.join(told)})"
        if left:
            limit = max(row["seconds"] for row in left)
            names = ", ".join(f"`{row['name']}` at {row['transition']}" for row in left)
            text += f", and on {len(left)} it gave no answer in {limit:.0f} s ({names})"
    return text + "."


def _vacuity(data: Mapping[str, Any]) -> str:
    """How many paths are taken from some state, and which of the others nothing accounts for."""
    unnamed = [row for row in data["open"] if row["kind"] == "witness"]
    taken = data["witnesses"] - data["covered"] - len(unnamed)
    text = (
        f"{'Of' if unnamed else 'Nothing is vacuous: of'} {data['witnesses']} paths {taken} are "
        f"taken from some state, and of {data['covered']} it is proved that none takes them; "
        "[verification/targets.py](../targets.py) says why they stay."
    )
    if unnamed:
        never = sum(row["verdict"] == "unsat" for row in unnamed)
        text += (
            f" {len(unnamed)} are open: at that commit nothing says why they stay. No state takes "
            + ("them." if never == len(unnamed) else f"{never} of them; the others are unsettled.")
        )
    return text


def _mutants(report: Mapping[str, Any]) -> str:
    rows = [(name, str(count)) for name, count in report["by_class"].items()]
    same = "nothing: proved, and the guard that does its work is named"
    rows.append((same, str(len(report["equivalent"]))))
    rows.append(("survived", str(len(report["survivors"]))))
    return (
        "Is every guard needed? Every guard clause, every operand of one and every state update of "
        f"every transition is deleted in turn, {report['mutants']} mutants from the syntax trees, "
        f"and {report['killed']} are killed, by a call in a state that the contract reaches but "
        "where the table says otherwise "
        f"({report['elsewhere']} of them only where a relation is left out). The search takes "
        f"{report['setup_seconds']:.0f} s for all, the verdicts at most "
        f"{report['slowest_seconds']:.1f} s each:\n\n"
        + markdown(("what the deletion does", "mutants"), rows)
        + "\n\n"
    )


def bench() -> str:
    """What the guards cost, from the bench report."""
    data, proofs = load(KERNEL_REPORTS / "bench.json"), load(KERNEL_REPORTS / "proofs.json")
    rows = figures(data, proofs)
    under, prices = conditions(data, proofs), cost(data)
    return (
        markdown(HEADER, [row.cells() for row in rows])
        + f"\n\n{missed(rows, data)}\n\n"
        + f"{prices}\n\n" * bool(prices)
        + "A figure in bold misses its goal. Times of an action are medians. Report: "
        "[bench.json](bench.json), measured on "
        f"{where(data['environment'])}; `qeffect bench` makes it again. The row of the run of the "
        "proofs' report is of that report, named above." + f"\n\n{under}" * bool(under)
    )


HEADER = ("the kernel", "measured", "goal")
#: The blocks of the kernel's page.
BLOCKS: Mapping[str, Callable[[], str]] = {"failures": failures, "proofs": proofs, "bench": bench}

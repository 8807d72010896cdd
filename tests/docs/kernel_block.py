"""
The blocks about the kernel: faults, public failures, proofs, mutants, and the cost of guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from qeffect.faults import run as run_faults
from qeffect.verification.failures.catalogue import FAILURES
from qeffect.verification.failures.command import counts
from qeffect.verification.failures.failure import KINDS, Failure, FailureOutcome, run
from tests.docs.bench_block import conditions, cost, figures, missed
from tests.docs.blocks import KERNEL_REPORTS, load, markdown


def where(environment: Mapping[str, Any]) -> str:
    """The machine, versions and commit of a kernel report in a line."""
    return (
        f"{environment['cpu']}, {environment['cores']} cores, Python {environment['python']}, "
        f"z3-solver {environment['packages']['z3-solver']}, commit "
        f"`{environment['commit'][:12]}`" + " with local changes" * ("+" in environment["commit"])
    )


def faults() -> str:
    """The fault table, from a run of all faults now."""
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
def _failures() -> Sequence[tuple[Failure, FailureOutcome]]:
    """Every public failure with the outcome of a run now."""
    return [(failure, run(failure)) for failure in FAILURES]


def failures_counts() -> Mapping[str, int]:
    """How many public failures have each verdict."""
    return counts(_failures())


def failures_counted() -> str:
    """How many public failures are refused, in a paragraph."""
    counted = failures_counts()
    return (
        "Users of Transformer Engine, Megatron-LM, torch, DeepSpeed and other projects reported "
        f"{counted['failures']} failures in public. The contract refuses {counted['refused']} of "
        f"these failures. {counted['given_a_report']} of the refused failures are refused only "
        f"if the runtime supplies an optional report. For {counted['refused_by_guess']} of the "
        "refused failures no cause was published, and we guessed the cause. "
        f"{counted['not_caught']} failures are not caught. The other {counted['unexplained']} "
        f"were never explained. {counted['enacted']} failures are *re-enacted*: a program makes "
        "the calls of the contract that the faulty runtime would make. The other failures "
        "cannot be re-enacted, because they make the same calls as a correct run."
    )


def failures() -> str:
    """The verdicts on the public failures by relation, and the failures that are not refused."""
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
        + "\n\nThese failures are not caught or were never explained:\n\n"
        + markdown(
            ("reason", "failures"),
            [(KINDS[kind], ", ".join(names)) for kind, names in missed.items() if names],
        )
    )


def proof_counts(data: Mapping[str, Any]) -> str:
    """
    How many obligations are proved, and their meaning.

    Args:
        data: The proofs' report.
    """
    text = (
        f"{data['unsat']:,} of {data['obligations']:,} obligations are proved and "
        f"{data['unknown']} are unknown, in {data['seconds']:.1f} s"
    )
    if "questions" in data:
        text = (
            f"{data['unsat']:,} of {data['obligations']:,} obligations are proved in "
            f"{data['seconds']:.1f} s; {data['unknown']} are unknown. The solver answered "
            f"{data['questions']:,} distinct queries. {data['implied']:,} obligations follow "
            f"from another proved obligation. {data['same_term']:,} obligations need no solver, "
            "because the transition does not change their values"
        )
    return (
        f"{text}. No path of any transition breaks an invariant, for any number of slots, "
        "microbatches and epochs. The proofs hold with all relations, and if any one optional "
        "relation is left out. A refused call changes nothing in the contract's state. After an "
        "accepted check, a commit with complete evidence is never refused."
    )


def proofs() -> str:
    """The proofs and the mutants, from their report."""
    data = load(KERNEL_REPORTS / "proofs.json")
    further = ""
    if "recovery" in data["by_kind"]:
        further = (
            " Recovery is possible in every state: the contract accepts aborts, failed "
            "reductions and drains (the host records that device work finished) until nothing "
            "is in flight, and then accepts a restore. No guard is too strong: with all "
            "relations in force, every legal F, dI, dW or refresh is accepted."
        )
    text = (
        proof_counts(data)
        + further
        + " (`make slow` proves all of this for all 64 choices of optional relations.) "
        + _vacuity(data)
        + "\n\n"
    )
    text += (
        f"{agreements(data['agreements'])} A bounded proof starts from the initial state instead "
        f"of an arbitrary state. It found {data['bounded'][-1]['name']}.\n\n"
        + _mutants(data["mutant_report"])
    )
    return (
        f"{text}Report: [proofs.json](proofs.json), measured on {where(data['environment'])}. "
        "`qeffect prove` repeats the proofs; `--mutants` adds the mutants, `--seeds 40` adds other "
        "seeds of Z3, and `--cvc5` adds the other solver."
    )


def agreements(found: Sequence[Mapping[str, Any]]) -> str:
    """Which seeds and solvers agree on the obligations of all relations."""
    if not found:
        return "This report used one seed of Z3 and no other solver."
    seeds = [a for a in found if a["solver"] == "z3"]
    others = [a for a in found if a["solver"] != "z3"]
    goals = found[0]["goals"]
    assert all(a["unsat"] == goals for a in seeds)
    text = f"{len(seeds) + 1} seeds of Z3 prove all {goals:,} obligations with all relations"
    for other in others:
        left = [row for row in other["open"] if row["verdict"] == "unknown"]
        assert other["unsat"] + len(left) == goals
        agrees = f"all {goals:,}" if other["unsat"] == goals else f"{other['unsat']:,}"
        text += f"; the solver {other['solver']} proves {agrees}"
        if "attempts" in other:
            told = [f"{count:,} with {name}" for name, count in other["attempts"].items()]
            text += f" ({', '.join(told)})"
        if left:
            limit = max(row["seconds"] for row in left)
            names = ", ".join(f"`{row['name']}` at {row['transition']}" for row in left)
            text += f" and gave no answer on {len(left)} within {limit:.0f} s ({names})"
    return text + "."


def _vacuity(data: Mapping[str, Any]) -> str:
    """How many paths some state takes, how many no state takes, and how many are undecided."""
    unnamed = [row for row in data["open"] if row["kind"] == "witness"]
    taken = data["witnesses"] - data["covered"] - len(unnamed)
    text = (
        f"{'Of' if unnamed else 'The proofs cover calls that can happen: of'} "
        f"{data['witnesses']:,} paths, {taken:,} are taken from some state. {data['covered']} "
        "paths are proved unreachable, and [verification/coverage.py](../coverage.py) says why "
        "the code keeps each of these paths."
    )
    if unnamed:
        never = sum(row["verdict"] == "unsat" for row in unnamed)
        text += (
            f" For {len(unnamed)} more, the code of that commit gives no reason to keep them. "
            + (
                "No state takes these paths."
                if never == len(unnamed)
                else f"No state takes {never} of these; for the others no answer was found."
            )
        )
    return text


def _mutants(report: Mapping[str, Any]) -> str:
    rows = [(name, str(count)) for name, count in report["by_class"].items()]
    same = "no effect (proved; another guard does the same work)"
    rows.append((same, str(len(report["equivalent"]))))
    rows.append(("survived", str(len(report["survivors"]))))
    return (
        "Is every guard needed? A program makes the mutants from the code's syntax trees. Each "
        "mutant lacks one guard clause, one operand of a guard or one state update of a "
        f"transition. {report['killed']} of {report['mutants']} mutants are killed: after the "
        f"deletion, a call in a reachable state goes wrong. For {report['elsewhere']} of the "
        "killed mutants, a call goes wrong only if an optional relation is left out. One search "
        f"for reachable states serves all mutants and takes {report['setup_seconds']:.0f} s. "
        "After the search, the verdict on a mutant takes at most "
        f"{report['slowest_seconds']:.1f} s. This table shows what goes wrong:\n\n"
        + markdown(("effect of the deletion", "mutants"), rows)
        + "\n\n"
    )


def bench() -> str:
    """The cost of the guards, from the bench report."""
    data, proofs = load(KERNEL_REPORTS / "bench.json"), load(KERNEL_REPORTS / "proofs.json")
    rows = figures(data, proofs)
    under, prices = conditions(data, proofs), cost(data)
    return (
        markdown(HEADER, [row.cells() for row in rows])
        + f"\n\n{missed(rows, data)}\n\n"
        + f"{prices}\n\n" * bool(prices)
        + (
            "Times of an action are medians. Report: [bench.json](bench.json), measured on "
            f"{where(data['environment'])}; `qeffect bench` repeats the measurement. The row "
            "whose name ends with *in the run of the proofs' report* comes from "
            "[proofs.json](proofs.json)."
        )
        + f"\n\n{under}" * bool(under)
    )


HEADER = ("the kernel", "measured", "goal")
#: The blocks of the kernel's page.
BLOCKS: Mapping[str, Callable[[], str]] = {"failures": failures, "proofs": proofs, "bench": bench}

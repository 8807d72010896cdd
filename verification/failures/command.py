"""
``qeffect failures``: re-enact public failures and show whether the contract refuses each.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from attrs import asdict

from qeffect.cli.command import Outcome as CommandOutcome
from qeffect.cli.command import Progress, UnusableError
from qeffect.countdown import Countdown
from qeffect.text import counted as number_of

if TYPE_CHECKING:
    from .failure import Failure, FailureOutcome

__all__ = ["Failures", "counts", "record"]


class Failures:
    """Re-enact failures that users reported in public."""

    name = "failures"
    help = "re-enact public failures of FP8 pipeline training and show which clause refuses each"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "names",
            nargs="*",
            metavar="NAME",
            help="failures to show in full: a name, a reference such as NVIDIA/Megatron-LM#4047, "
            "or a relation (default: a list of all)",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> CommandOutcome:
        """Run the chosen re-enactments, and report their outcomes."""
        from .catalogue import FAILURES
        from .failure import run

        chosen = _chosen(FAILURES, args.names)
        pairs: list[tuple[Failure, FailureOutcome]] = []
        count = Countdown("failures", len(chosen))
        for number, failure in enumerate(chosen):
            progress(f"Re-enacting. {count(number)}: {failure.name}")
            outcome = run(failure)
            if outcome.problem and not any(earlier.problem for _, earlier in pairs):
                progress.note(f"First finding: {failure.name}: {outcome.problem}")
            pairs.append((failure, outcome))
        problems = [(f, o) for f, o in pairs if o.problem]
        data: dict[str, Any] = {
            "counts": counts(pairs),
            "rows": [record(failure, outcome) for failure, outcome in pairs],
        }
        if problems:
            failure, outcome = problems[0]
            data |= {"clause": outcome.clause or None, "action": outcome.at or None}
        lines = _in_full(pairs) if args.names else _listed(pairs)
        lines += ["", _LEGEND, _summary(data["counts"])]
        lines += [f"differs from its entry: {f.name}: {o.problem}" for f, o in problems]
        return CommandOutcome("refused" if problems else "accepted", data, lines)


def record(failure: Failure, outcome: FailureOutcome) -> dict[str, Any]:
    """
    Return a failure's entry and the outcome of its re-enactment as plain data.

    Args:
        failure: The entry of the failure.
        outcome: The outcome of the failure's re-enactment.
    """
    story = asdict(failure, filter=lambda attribute, _: attribute.name not in _NOT_STORY)
    ran = asdict(outcome, filter=lambda attribute, _: not attribute.name.endswith("steps"))
    enacted = failure.enact.__name__ if failure.enact is not None else None
    return {**story, "enacted": enacted, **ran, "difference": outcome.difference()}


#: How a line names the place of a refusal; printed below the list.
_LEGEND = (
    "0F1 is F of stage 0 and microbatch 1, 0I1 its dI, 0W1 its dW; s0 is stage 0; e1 is epoch 1; "
    "SEND, RECV and WAIT are messages"
)

#: Fields of a row that are not text, or that the outcome has too.
_NOT_STORY = ("enact", "clause", "at")


def counts(pairs: Iterable[tuple[Failure, FailureOutcome]]) -> dict[str, Any]:
    """
    Count failures by the outcome of their re-enactments.

    Args:
        pairs: The failures, each with its outcome.

    Returns:
        Numbers of failures. ``failures``: all; ``enacted``: with a re-enactment; ``refused``:
        refused by a clause; ``given_a_report``: refused only if the runtime supplies an optional
        report; ``not_caught``: refused by no clause; ``by_kind``: the uncaught failures by reason;
        ``unexplained``: without a known cause; ``guessed``: with a guessed detail;
        ``refused_by_guess``: refused, with a wholly guessed cause; ``not_as_stated``: with an
        outcome that differs from the failure's entry.
    """
    from .failure import WHOLE_CAUSE

    rows = list(pairs)
    verdicts = Counter(outcome.verdict for _, outcome in rows)
    kinds = Counter(f.kind for f, outcome in rows if outcome.verdict == "not caught")
    return {
        "failures": len(rows),
        "enacted": sum(failure.enact is not None for failure, _ in rows),
        "refused": verdicts["refused"],
        "given_a_report": sum(o.verdict == "refused" and bool(f.reports) for f, o in rows),
        "not_caught": verdicts["not caught"],
        "by_kind": dict(sorted(kinds.items())),
        "unexplained": verdicts["unexplained"],
        "guessed": sum(bool(f.guessed) for f, _ in rows),
        "refused_by_guess": sum(
            o.verdict == "refused" and f.guessed.startswith(WHOLE_CAUSE) for f, o in rows
        ),
        "not_as_stated": sum(bool(o.problem) for _, o in rows),
    }


def _chosen(failures: Sequence[Failure], names: Sequence[str]) -> list[Failure]:
    """Return the chosen failures in the order of the list; all if no name is given."""
    found: list[Failure] = []
    for name in names:
        wanted = name.lower()
        rows = [
            failure
            for failure in failures
            if wanted
            in (failure.name, failure.relation, *(known.lower() for known in failure.references))
        ]
        if not rows:
            relations = ", ".join(dict.fromkeys(failure.relation for failure in failures))
            near = [f.name for f in failures if wanted in f.name or f.name in wanted][:5]
            hint = f"did you mean {', '.join(near)}?" if near else f"relations are {relations};"
            raise UnusableError(
                f"no failure is named {name!r}; {hint} 'qeffect failures' lists them all"
            )
        found += rows
    return [failure for failure in failures if failure in found] if names else list(failures)


def _said(failure: Failure, outcome: FailureOutcome) -> str:
    if outcome.verdict == "refused":
        given = f", if the runtime reports {failure.reports}" if failure.reports else ""
        return f"refused by {outcome.clause} at {outcome.at}{given}"
    if outcome.verdict == "unexplained":
        return f"never explained: {failure.why}"
    accepted = "; the faulty run was accepted" if failure.enact is not None else ""
    return f"not caught ({failure.kind}){accepted}: {failure.why}"


def _listed(pairs: Sequence[tuple[Failure, FailureOutcome]]) -> list[str]:
    names = max(len(failure.name) for failure, _ in pairs)
    references = max(len(failure.references[0]) for failure, _ in pairs)
    lines: list[str] = []
    for relation, rows in groupby(pairs, key=lambda pair: pair[0].relation):
        lines += ["", relation] if lines else [relation]
        lines += [
            f"  {failure.name:{names}}  {failure.references[0]:{references}}  "
            f"{_said(failure, outcome)}"
            for failure, outcome in rows
        ]
    return lines


def _in_full(pairs: Sequence[tuple[Failure, FailureOutcome]]) -> list[str]:
    lines: list[str] = []
    for failure, outcome in pairs:
        told = {
            "relation": failure.relation,
            "reported": f"{', '.join(failure.references)} ({failure.state})",
            "what failed": failure.what,
            "cause": failure.cause,
            "guessed": failure.guessed,
            "consequence": failure.consequence,
            "fixed by": failure.fix,
            "outcome": _said(failure, outcome),
            "found": outcome.found,
            "expected": outcome.expected,
            "shown by": failure.shown,
        }
        lines += [""] if lines else []
        lines.append(failure.name)
        lines += [f"  {what:12} {text}" for what, text in told.items() if text]
        if failure.enact is not None:
            lines.append(
                "  the corrected run is accepted; calls of the faulty run that differ "
                "(- left out, + added):"
            )
            lines += [f"    {line}" for line in outcome.difference()]
    return lines


def _summary(counted: dict[str, Any]) -> str:
    given = f"{counted['given_a_report']} of them only if the runtime supplies an optional report"
    return (
        f"{number_of(counted['failures'], 'public failure')}, {counted['enacted']} of them "
        f"re-enacted. Of all: {counted['refused']} refused ({given}), {counted['not_caught']} "
        f"not caught, {counted['unexplained']} never explained. Of the causes, "
        f"{counted['guessed']} are guessed at least in part; of the refused failures, "
        f"{counted['refused_by_guess']} have a wholly guessed cause."
    )

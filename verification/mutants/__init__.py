"""
Mutants: each guard, operand and state update is deleted in turn, to see whether it is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from qeffect.countdown import Countdown
from qeffect.engine.stage import TRANSITIONS

from .corpus import TELL
from .program import program
from .sites import Mutant, Site, mutant, sites, updates_read_by
from .verdicts import CLASSES, MutantVerdict, judge, prepare, search

__all__ = [
    "CLASSES",
    "Mutant",
    "MutantReport",
    "MutantVerdict",
    "Site",
    "judge",
    "program",
    "run",
    "sites",
    "sites_with",
]


@define
class MutantReport:
    """
    The verdicts on all mutants.

    Args:
        verdicts: The verdict on each mutant.
        seconds: Total time in seconds.
        setup_seconds: The portion of `seconds` in which all mutants are tried in reachable states.
    """

    verdicts: list[MutantVerdict] = field(factory=list)
    seconds: float = 0.0
    setup_seconds: float = 0.0

    @property
    def mutants(self) -> int:
        """Number of mutants."""
        return len(self.verdicts)

    @property
    def killed(self) -> int:
        """Number of mutants that a promise, a legal schedule or a clause's name detects."""
        return sum(verdict.killed for verdict in self.verdicts)

    @property
    def equivalent(self) -> list[MutantVerdict]:
        """The mutants that are proved equal to the contract, because another guard covers them."""
        return [v for v in self.verdicts if v.kind == "equivalent" and v.justified]

    @property
    def survivors(self) -> list[MutantVerdict]:
        """The mutants that are neither killed nor proved equivalent and justified."""
        return [verdict for verdict in self.verdicts if not verdict.justified]

    @property
    def by_class(self) -> dict[str, int]:
        """Return the number of killed mutants for each kind of effect."""
        kinds = [verdict.kind for verdict in self.verdicts]
        return {words: kinds.count(kind) for kind, words in CLASSES.items() if kind in kinds}

    def asdict(self) -> dict[str, Any]:
        """Return the report as a plain dictionary, ready for JSON."""
        return {
            "mutants": self.mutants,
            "killed": self.killed,
            "by_class": self.by_class,
            "elsewhere": sum(v.killed and v.mutant.omit != () for v in self.verdicts),
            "equivalent": [verdict.asdict() for verdict in self.equivalent],
            "survivors": [verdict.asdict() for verdict in self.survivors],
            "verdicts": [verdict.asdict() for verdict in self.verdicts],
            "seconds": round(self.seconds, 3),
            "setup_seconds": round(self.setup_seconds, 3),
            "slowest_seconds": round(max((v.seconds for v in self.verdicts), default=0.0), 3),
        }


def sites_with(text: str) -> list[Site]:
    """
    Return the sites (places in the code that a mutant deletes) whose line in reports contains a
    text. If the text is part of a clause's name, the result includes state updates: in each
    transition that the clause guards, the updates of the columns that the clause's guards read.
    """
    updates = updates_read_by(s for s in sites() if s.kind == "guard" and text in s.clause)
    return [site for site in sites() if text in str(site) or site in updates]


def run(
    progress: Callable[[str], None] | None = None,
    only: str | None = None,
    *,
    among: Sequence[str] = tuple(TRANSITIONS),
    note: Callable[[str], None] | None = None,
) -> MutantReport:
    """
    Delete each guard, operand and update in turn, and return the verdict on each mutant.

    Args:
        progress: Function that is called with progress lines.
        only: Text that chooses sites by `sites_with`, for example ``check_dgrad``; None for all
            sites.
        among: Transitions whose mutants are run; by default all.
        note: Function that is called at once with the first surviving mutant.
    """
    report = MutantReport()
    began = time.perf_counter()
    chosen = [site for site in sites_with(only or "") if site.transition in among]
    told = TELL.set(progress)
    try:
        _judge_all(report, chosen, progress, note)
    finally:
        TELL.reset(told)
    report.seconds = time.perf_counter() - began
    return report


def _judge_all(
    report: MutantReport,
    chosen: Sequence[Site],
    progress: Callable[[str], None] | None,
    note: Callable[[str], None] | None,
) -> None:
    """Add the verdict on the mutant of each chosen site to a report."""
    began = time.perf_counter()
    searched = tuple(dict.fromkeys(site.transition for site in chosen))
    if searched == tuple(TRANSITIONS):
        prepare(progress or (lambda line: None))
        report.setup_seconds = time.perf_counter() - began
    else:
        if progress is not None:
            progress("Mutants: trying them in reachable states")
        search(searched)
    count = Countdown("mutants", len(chosen))
    for site in chosen:
        report.verdicts.append(judge(mutant(site), searched))
        if note is not None and [report.verdicts[-1]] == report.survivors:
            note(f"First survivor: {site}")
        if progress is not None:
            progress(f"Mutants: {count(len(report.verdicts))}, {report.killed} killed")

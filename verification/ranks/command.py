"""
``qeffect ranks``: prove and explore the protocol by which several ranks work together.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from qeffect.cli.command import Outcome, Progress, needs
from qeffect.countdown import Countdown

from ..solver_options import add_solver_options, chosen_seeds, chosen_solvers
from .replay import RankReport, replay_ranks

__all__ = ["Ranks"]


class Ranks:
    """Prove and explore the protocol by which N ranks work together."""

    name = "ranks"
    help = (
        "prove and explore the protocol by which ranks exchange messages, commit, checkpoint "
        "and stop"
    )

    @staticmethod
    def replay(paths: Sequence[str | os.PathLike[str]]) -> RankReport:
        """Replay rank logs through the model; `qeffect replay` finds this by its entry point."""
        return replay_ranks(paths)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add_solver_options(parser)
        parser.add_argument(
            "--mutants",
            action="store_true",
            help="also leave out each rule of the protocol in turn, and show what breaks (minutes)",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Run the proofs and the explorations, and report the results."""
        seeds = chosen_seeds(args)
        analysis = needs("verify", _analysis)
        report = analysis.run_proofs(
            progress=progress, note=progress.note, seeds=seeds, solvers=chosen_solvers(args)
        )
        asked = len(report.obligations) - report.same_term
        scopes = []
        count = Countdown("scopes", len(analysis.SCOPES))
        for number, scope in enumerate(analysis.SCOPES.values()):
            progress.note(f"Exploring: {count(number)}, {scope.name}: {scope.says}")
            scopes.append(analysis.explore(scope, lemmas=False))
            if scopes[-1].violation:
                progress.note(f"Finding: {scope.name}: {scopes[-1].violation}")
        kernels = [analysis.match(name=name) for name in analysis.KERNEL_SCOPES]
        lines = [
            f"any number of ranks: {report.unsat - report.same_term} of {asked} obligations "
            f"proved, {report.unknown} unknown; {report.same_term} more need no solver, since "
            "the transition leaves their values unchanged",
            *(agreement.text for agreement in report.agreements),
            *(obligation.text for obligation in report.open),
        ]
        for found in scopes:
            said = found.violation or "no promise broken; every state can reach the end"
            if found.apart:
                said += f"; in {found.apart:,} states a rank stopped one step behind another"
            lines.append(
                f"{found.scope:20} {found.states:>7,} states {found.steps:>8,} steps: {said}"
            )
            lines += [f"  {step}" for step in found.trace]
        for kernel in kernels:
            said = kernel.difference or "the kernel behaves as the protocol assumes"
            lines.append(
                f"{kernel.scope:20} {kernel.states:>7,} states {kernel.moves:>8,} moves: {said}"
            )
        good = not report.open and not any(f.violation for f in scopes)
        good = good and not any(k.difference for k in kernels)
        data: dict[str, Any] = {
            "obligations": len(report.obligations),
            "asked": asked,
            "unknown": report.unknown,
            "agreements": [agreement.asdict() for agreement in report.agreements],
            "open": [obligation.asdict() for obligation in report.open],
            "scopes": [f.record() for f in scopes],
            "kernel": [k.record() for k in kernels],
            "mutants": None,
        }
        if args.mutants:
            found = [analysis.caught(mutant, progress) for mutant in analysis.mutants()]
            data["mutants"] = [one.record() for one in found]
            killed = [one for one in found if one.killed]
            good = good and len(killed) == len(found)
            lines.append(
                f"{len(killed)} of {len(found)} protocols with one rule left out or changed go "
                "wrong:"
            )
            for one in found:
                lines.append(f"  {one.mutant.name}: {one.mutant.says}")
                lines.append(f"    {one.scope}: {one.violation or 'nothing goes wrong'}")
                lines += [f"      {step}" for step in one.trace]
        return Outcome("accepted" if good else "refused", data, lines)


def _analysis() -> Any:
    from . import analysis

    return analysis

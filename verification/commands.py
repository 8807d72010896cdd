"""
The commands of the verification package: ``qeffect explore``, ``qeffect prove`` and
``qeffect check --random``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qeffect.cli.command import Outcome, Progress, UnusableError, needs, refuse_unused
from qeffect.countdown import Countdown
from qeffect.report import environment, require_folder, require_place, write_json, write_text
from qeffect.spec.clauses import CLAUSES
from qeffect.spec.promises import ASSUMED, CONFIGURATION, LEGAL
from qeffect.text import counted, near

from .scope_sizes import SCOPE_STATES, UNKNOWN, pool_states
from .solver_options import add_solver_options, chosen_seeds, chosen_solvers

__all__ = [
    "DEPTH",
    "MOST_KEYS",
    "MOST_STATES",
    "SCOPES",
    "Explore",
    "Prove",
    "random_schedules",
]

#: Names of the explorer's scopes; a scope is built only when it is explored.
SCOPES = tuple(SCOPE_STATES)
#: The largest pool that is explored: all its states are kept in memory.
MOST_STATES, MOST_KEYS = 20_000_000, 64
#: Maximum number of random schedules per run; a million take days.
MOST_RANDOM = 1_000_000
#: Maximum length of the bounded proofs, in transitions; each further transition takes minutes.
DEPTH = 8
#: Number of random schedules that exercised everything with each seed tried.
_ENOUGH = 1_000
_NAMED = 5


class Explore:
    """Visit every reachable state of small contracts."""

    name = "explore"
    help = "explore every reachable state of small contracts"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "--slots",
            type=int,
            metavar="N",
            help="explore a pool of N slots (sets of buffers for one microbatch) instead of the "
            "standard scopes (small contracts). With --keys or --generations alone, N is 3. "
            f"Limits: {MOST_STATES:,} states and {MOST_KEYS} keys (microbatches)",
        )
        parser.add_argument(
            "--keys",
            type=int,
            metavar="N",
            help="number of microbatches in the pool (default: as many as slots)",
        )
        parser.add_argument(
            "--generations",
            type=int,
            metavar="N",
            help="number of tapes that each slot holds one after another; a tape is the data "
            "that one F keeps (default 3)",
        )
        parser.add_argument(
            "--scope", metavar="NAME", help=f"explore only this scope, one of: {', '.join(SCOPES)}"
        )
        parser.add_argument(
            "--batch", action="store_true", help="no effect, since every exploration is batched"
        )
        parser.add_argument(
            "--symmetry",
            action="store_true",
            help="count states that differ only in the names of slots or microbatches as one state",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Explore the chosen scopes and report the results."""
        explorer = needs("verify", _explorer)
        scopes = explorer.standard_scopes()
        if args.slots is not None or args.keys is not None or args.generations is not None:
            refuse_unused(args, ("--scope",), "--slots, --keys and --generations make a pool")
            slots = 3 if args.slots is None else args.slots
            keys = slots if args.keys is None else args.keys
            generations = 3 if args.generations is None else args.generations
            _refuse_absurd(slots, keys, generations, args.symmetry)
            try:
                chosen = [explorer.pool_scope(slots, keys, generations)]
            except ValueError as error:
                raise UnusableError(str(error)) from error
        elif args.scope is not None:
            named = {**scopes, **explorer.large_scopes()}
            if args.scope not in named:
                raise UnusableError(
                    f"no scope is named {args.scope!r}; choose from {', '.join(named)}"
                    f"{near(args.scope, named)}"
                )
            chosen = [named[args.scope]]
        else:
            chosen = list(scopes.values())
        try:
            reports = list(_explored(explorer, chosen, args, progress))
        except ValueError as error:
            raise UnusableError(str(error)) from error
        rows = [report.asdict() for report in reports]
        missing = [] if len(chosen) == 1 else explorer.unwitnessed(reports)
        violation = next((row["violation"] for row in rows if row["violation"]), None)
        text = []
        for row in rows:
            text.append(
                f"{row['scope']:24} {row['states']:>10,} states {row['transitions']:>12,} "
                f"transitions {row['refused']:>12,} refused  depth {row['depth']:>3}  "
                f"{row['rate']:>11,.0f}/s"
            )
        if violation:
            text.append(f"violated: {violation}")
        for name in missing:
            text.append(f"not reached in any scope: {name}")
        if len(chosen) > 1 and not missing:
            text.append(
                "every transition was accepted and every clause refused a call in at "
                "least one scope."
            )
        verdict = "refused" if violation or missing else "accepted"
        return Outcome(verdict, {"scopes": rows, "unwitnessed": missing}, text)


def _explored(
    explorer: Any, scopes: Sequence[Any], args: argparse.Namespace, progress: Progress
) -> Iterator[Any]:
    """Yield a report for each scope; print the first violation as soon as it is found."""
    count = Countdown("scopes", len(scopes))
    violated = False
    for number, scope in enumerate(scopes):
        where = f" Scope {scope.name}, {count(number)}." if len(scopes) > 1 else ""
        report = explorer.run(
            scope,
            symmetry=args.symmetry,
            total=_states(scope, args.symmetry),
            progress=lambda line: progress(f"{line}{where}"),  # noqa: B023 - called within the turn
        )
        if report.violation and not violated:
            violated = True
            progress.note(f"First finding: {scope.name}: {report.violation}")
        yield report


def _states(scope: Any, symmetry: bool) -> int:
    """Return the number of states of a scope, or UNKNOWN if the number is not recorded."""
    if scope.name.startswith("pool-"):
        (slots,), (keys,) = scope.slots, scope.cells
        return pool_states(slots, keys, scope.generation_max, symmetry=symmetry)
    return UNKNOWN if symmetry else SCOPE_STATES.get(scope.name, UNKNOWN)


def _refuse_absurd(slots: int, keys: int, generations: int, symmetry: bool) -> None:
    """Refuse a pool that has no slots, keys or generations, or that is too large to explore."""
    for option, count in (("slots", slots), ("keys", keys), ("generations", generations)):
        if count < 1:
            raise UnusableError(f"--{option} must be at least 1, not {count}")
    pool = f"a pool of {slots} slots, {keys} keys and {generations} generations"
    if keys > MOST_KEYS:
        raise UnusableError(f"{pool} has more than {MOST_KEYS} keys; ask for fewer")
    # The free states alone are 2**slots and more, or C(slots + generations, slots) orbits. A pool
    # with too many of these is refused without counting, which would not end.
    most_slots = MOST_STATES if symmetry else MOST_KEYS
    absurd = generations > MOST_STATES or slots > most_slots or min(slots, generations) > MOST_KEYS
    if absurd or pool_states(slots, keys, generations, symmetry=symmetry) > MOST_STATES:
        raise UnusableError(
            f"{pool} has more than {MOST_STATES:,} states; ask for fewer"
            + ("" if symmetry else ", or use --symmetry")
        )


class Prove:
    """Prove that the guards keep the promises, and test whether each guard is needed."""

    name = "prove"
    help = (
        "prove that no call of the contract breaks an invariant (a property that always holds), "
        "on any path through the code"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "--depth",
            type=int,
            metavar="N",
            help="length of the bounded proofs, in accepted calls from the initial state "
            f"(default and maximum {DEPTH}); the unbounded proofs always run",
        )
        add_solver_options(parser)
        parser.add_argument(
            "--mutants",
            action="store_true",
            help="also delete each guard, each operand of a guard and each state update, one at a "
            "time, and show what breaks (minutes)",
        )
        parser.add_argument(
            "--only",
            metavar="TEXT",
            help="run no proofs, only mutants, and print each counterexample as a program "
            "(minutes). A mutant is a copy of the code without one guard, operand or state update. "
            "TEXT must occur in the mutant's description (function, deleted code, clause). If TEXT "
            "is part of a clause's name, also run the mutants without an update of state that the "
            "clause's guards read",
        )
        parser.add_argument(
            "--promise",
            metavar="ID",
            help="prove only this promise, with all relations in force, and print each of its "
            "proof obligations (seconds)",
        )
        parser.add_argument(
            "--programs",
            type=Path,
            metavar="DIR",
            help="folder for the counterexamples, one program each",
        )
        parser.add_argument("--out", type=Path, metavar="F", help="file for the JSON report")

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Run the proofs or the mutants, and report the results."""
        if args.promise is not None:
            others = ("--seeds", "--depth", "--cvc5", "--mutants", "--only", "--programs", "--out")
            refuse_unused(args, others, "--promise only prints the proof of one promise")
            return _promise(args.promise)
        if args.only is not None:
            why = "--only runs mutants and proves nothing"
            refuse_unused(args, ("--seeds", "--depth", "--cvc5", "--out"), why)
        elif not args.mutants:
            why = "only mutants make programs"
            refuse_unused(args, ("--programs",), why, wants="--mutants")
        args.depth = DEPTH if args.depth is None else args.depth
        if args.programs is not None:
            require_folder(args.programs, "--programs")
        seeds = chosen_seeds(args)
        if not 1 <= args.depth <= DEPTH:
            raise UnusableError(f"--depth must be at least 1 and at most {DEPTH}, not {args.depth}")
        require_place(args.out)
        environment(out=args.out)  # refuses now instead of after the proofs
        prove = needs("verify", _prove)
        if args.only is not None:
            if not needs("verify", _mutants).sites_with(args.only):
                raise UnusableError(
                    f"no mutant's description contains {args.only!r}; --only chooses among "
                    "mutants, not among proofs; --mutants --json lists all mutants"
                )
            swept = _swept(args, progress)
            text = swept.pop("lines")
            survived = swept["mutant_report"]["survivors"]
            return Outcome("refused" if survived else "accepted", swept, text)
        report = prove.run(
            progress=progress,
            note=progress.note,
            seeds=seeds,
            solvers=chosen_solvers(args),
            depth=args.depth,
        )
        data: dict[str, Any] = report.asdict()
        taken = len(data["witnesses"]) - data["covered"]
        lines = [
            f"{data['questions']:,} distinct queries to the solver in {data['seconds']:.1f} s, "
            f"{data['unknown']} without an answer",
            f"{data['unsat']} of {len(data['obligations'])} obligations (formulas to prove) are "
            f"proved: {data['implied']:,} of these follow from another proof; "
            f"{data['same_term']:,} need no solver, since the transition leaves their values "
            "unchanged",
            f"{len(data['witnesses'])} paths through the transitions: {taken} are taken from some "
            f"state, {data['covered']} are proved unreachable",
        ]
        kept = [name for name, proved in data["paper"].items() if proved]
        lines.append(
            f"{len(kept)} of the paper's {len(data['paper'])} invariants proved: {', '.join(kept)}"
        )
        lines += [
            f"bounded proof: {b['path']}: {'proved' if b['verdict'] == 'unsat' else b['verdict']}"
            for b in data["bounded"]
        ]
        lines += [agreement.text for agreement in report.agreements]
        lines += [obligation.text for obligation in report.open]
        good = not data["open"]
        if data["open"]:
            data["action"] = data["open"][0]["transition"]
        data |= {"mutants": None, "killed": None, "mutant_report": None}
        if args.mutants:
            swept = _swept(args, progress)
            lines += swept.pop("lines")
            good = good and not swept["mutant_report"]["survivors"]
            data |= swept
        if args.out is not None:
            write_json(args.out, {"environment": environment(), **_summary(data)})
        return Outcome("accepted" if good else "refused", data, lines)


def _clause_of(name: str) -> str:
    """Return a hint if a clause has the same name."""
    if name not in CLAUSES:
        return ""
    return "; the line 'Raised by' of the clause of this name lists what rests on its guards"


def _promise(name: str) -> Outcome:
    """Prove one promise alone, and return a line for each of its obligations."""
    where = "spec/contract.md lists all promises under Promises"
    if name in {p.name for register in (CONFIGURATION, LEGAL, ASSUMED) for p in register}:
        raise UnusableError(
            f"--promise: {name} is an assumption or a condition of a legal call; proofs use it as "
            f"a fact and do not prove it{_clause_of(name)}; {where}"
        )
    if name.partition(".")[0] in ("ranks", "launches"):
        raise UnusableError(
            f"--promise: {name} is about several ranks, and `prove` is about one contract; "
            "`qeffect ranks` proves all promises about ranks"
        )
    began = time.perf_counter()
    found, names = needs("verify", _prove).named(name)
    if not found:
        raise UnusableError(
            f"--promise: no promise, lemma or theorem is named {name!r}{near(name, names)}; {where}"
        )
    unproved = [one for one in found if not one.proved]
    asked = sum(one.solver != "syntax" for one in found)
    lines = [
        f"{name}, with all relations: {len(found) - len(unproved)} of "
        f"{counted(len(found), 'obligation')} proved in {time.perf_counter() - began:.1f} s, "
        f"{asked} by the solver; each line below is one obligation, and unsat means proved",
        *(one.text for one in found),
        *([f"{name} is also a clause{_clause_of(name)}"] if name in CLAUSES else []),
    ]
    data: dict[str, Any] = {
        "promise": name,
        "obligations": [one.asdict() for one in found],
        "open": [one.asdict() for one in unproved],
    }
    if unproved:
        data["action"] = unproved[0].transition
    return Outcome("refused" if unproved else "accepted", data, lines)


def _swept(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Run the mutants (copies of the code with one deletion each); return their part of the JSON
    report, and the lines to print."""
    mutants = _mutants()
    report = mutants.run(progress, args.only, note=progress.note)
    found = report.asdict()
    by_class = ", ".join(f"{count} because {name}" for name, count in found["by_class"].items())
    lines = [
        f"{report.killed} of {report.mutants} mutants killed (something goes wrong) in "
        f"{report.seconds:.1f} s: {by_class}",
        *(
            f"  killed     {v.mutant.site}: {v.by}"
            for v in report.verdicts
            if args.only and v.killed
        ),
        *(f"  equivalent {v.mutant.site}: {v.by}" for v in report.equivalent),
        *(f"  survived   {v.mutant.site}: {v.by}" for v in report.survivors),
    ]
    if args.only is not None or args.programs is not None:
        programs = {
            f"{number:03}_{verdict.mutant.site.half}.py": (verdict, mutants.program(verdict))
            for number, verdict in enumerate(report.verdicts)
            if verdict.probe is not None
        }
        if args.only is not None:
            for verdict, program in programs.values():
                lines += ["", f"{verdict.mutant.site}", "", program]
        if args.programs is not None:
            args.programs.mkdir(parents=True, exist_ok=True)
            for name, (_, program) in programs.items():
                write_text(args.programs / name, program)
            lines.append(f"{len(programs)} programs in {args.programs}")
    return {
        "mutants": report.mutants,
        "killed": report.killed,
        "mutant_report": found,
        "lines": lines,
    }


def _summary(data: dict[str, Any]) -> dict[str, Any]:
    """Return a report in which counts and the ten slowest entries replace the list of all
    entries."""
    rows = data["obligations"]
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:10]
    return {
        **data,
        "obligations": len(rows),
        "witnesses": len(data["witnesses"]),
        "slowest": slowest,
    }


def random_schedules(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Run ``qeffect check --random N --seed S``.

    Raises:
        UnusableError: N is too large, or the seed is negative.
    """
    if args.random > MOST_RANDOM:
        raise UnusableError(
            f"--random must be at most {MOST_RANDOM:,}, not {args.random}; run several seeds "
            "instead"
        )
    if args.seed < 0:
        raise UnusableError(f"--seed must be at least 0, not {args.seed}")
    machine = needs("verify", _machine)
    report = machine.run(args.random, args.seed, progress=progress, note=progress.note)
    data = report.asdict()
    missing = data["uncovered"]
    ran = (
        f"{counted(data['schedules'], 'random schedule')}, {data['actions']:,} actions at "
        f"{data['actions_per_second']:,.0f}/s"
    )
    good = "every legal call was accepted, every illegal call was refused and changed nothing."
    if data["failure"]:
        reason, lines = "violation", [str(data["failure"])]
    elif missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        few = (
            f"too few schedules: never exercised: {', '.join(missing[:_NAMED])}{more}; "
            f"use --random {max(_ENOUGH, 2 * args.random)} or more"
        )
        lines = [
            few,
            f"{ran}: among these, {good}",
            "--json lists everything that was never exercised",
        ]
        return Outcome("unusable", {"error": few, "reason": "too few schedules", **data}, lines)
    else:
        reason, lines = "", [f"{ran}: {good}"]
    return Outcome("refused" if reason else "accepted", {"reason": reason, **data}, lines)


def _explorer() -> Any:
    from . import explorer

    return explorer


def _prove() -> Any:
    from .proofs import prove

    return prove


def _mutants() -> Any:
    from . import mutants

    return mutants


def _machine() -> Any:
    from .walks import machine

    return machine

"""
``python -m qeffect.verification.kept``: record which promises need each clause, and where each
clause is raised and shown.

A clause states what is refused; a promise states what users may rely on. With ``--prove`` (minutes)
this module finds, for each guard, the promises that fail if the guard is deleted; the search starts
from all states of a finite scope that satisfy every invariant. For each clause, the module finds
the functions that raise the clause, and the rejected log, injected faults, re-enacted failures and
tests that name the clause. For each promise, it records the obligations and lemmas that prove the
promise (``proved_by``). ``qeffect.spec`` renders ``kept.json`` in the contract and imports nothing
from this module.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import qeffect
from qeffect import spec
from qeffect.report import write_text
from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES
from qeffect.spec.document import fault_rows
from qeffect.spec.promises import CHANGES, MEMORY, STEPS, WORLD

from .failures.catalogue import FAILURES
from .mutants import Mutant, Site, sites
from .proofs.finite import SCOPE, refuted, solver_of
from .proofs.obligations import Composition
from .proved_by import callables, lemmas, proofs
from .symbolic import Encoding

__all__ = ["FILE", "PROMISES", "guard_sites", "main", "places", "predicates_without", "rows"]

_KERNEL: Final = Path(qeffect.__file__).parent
_SPEC: Final = Path(spec.__file__).parent.resolve()
#: The file to write.
FILE: Final = _SPEC / "kept.json"
_TESTS: Final = _SPEC.parent / "tests"

#: Names of the modules below the tests' folder that show a clause: tests, and tables of faults.
_SHOWING: Final = ("test_*.py", "faults.py", "fault_table.py")

#: Test modules that check the texts of clauses; they refuse nothing.
_TEXTS_ONLY: Final = frozenset({"test_guard_advice.py"})
_RUNTIME: Final = _SPEC.parent / "gpu_runtime"
_PROOFS: Final = Path(__file__).parent / "reports" / "proofs.json"

#: A possible name of a clause within a message.
_CLAUSE: Final = re.compile(r"[a-z]+\.[a-z]+(?:-[a-z]+)*")

#: Names of all promises of the specification; any other predicate is a lemma of the proofs.
PROMISES: Final = frozenset(
    p.name for register in (MEMORY, WORLD, STEPS, CHANGES) for p in register
)

#: Parts of the kernel that name clauses without raising them, or that are generated.
_TELLING: Final = frozenset(
    {
        "cli",
        "explain.py",
        "explanations",
        "refusals.py",
        "faults.py",
        "composed",
        "spec",
        "verification",
        "gpu_runtime",
    }
)


def guard_sites() -> tuple[Site, ...]:
    """Return every guard of every transition, relation by relation."""
    return tuple(site for site in sites() if site.kind == "guard")


def predicates_without(guards: Sequence[Site]) -> Iterator[tuple[str, ...]]:
    """
    Yield for each guard the sorted names of the predicates that fail if the guard is deleted.

    Args:
        guards: Guards of the contract with all relations; one guard is deleted at a time.
    """
    own = Composition.of((), Encoding.finite(SCOPE))
    solver = solver_of(own)
    for site in guards:
        broken = Composition((), own.encoding, Mutant((site,)).functions)
        yield tuple(sorted(set(refuted(broken, site.transition, solver))))


def rows(guards: Sequence[Site], found: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """
    Return the entry of each guard in ``kept.json``.

    Args:
        guards: The guards.
        found: For each guard, the predicates that fail without the guard, from
            `predicates_without`.

    Returns:
        One entry per guard. It has the promises that fail without the guard; if no promise fails,
        the lemmas that fail; if no lemma fails either, the verdict on the guard's mutant from the
        proofs' report.
    """
    proofs = json.loads(_PROOFS.read_text(encoding="utf-8"))
    verdicts = proofs["mutant_report"]["verdicts"]
    becomes = {_key(v): v["by"] for v in verdicts if v["kind"] == "guard"}
    made = []
    for site, failing in zip(guards, found, strict=True):
        row = _named_as(site)
        promises = [name for name in failing if name in PROMISES]
        if promises:
            row["promises"] = promises
        elif failing:
            row["lemmas"] = [*failing]
        else:
            row["otherwise"] = becomes.get(_key(row), "")
        made.append(row)
    return made


def _named_as(site: Site) -> dict[str, Any]:
    names = ("transition", "half", "clause")
    return {**{name: getattr(site, name) for name in names}, "deleted": site.text}


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("transition", "half", "clause", "deleted"))


# Functions that raise a clause, and files that show it


def places() -> dict[str, dict[str, list[str]]]:
    """
    Return, for each clause, the functions that raise it, and its log, faults, failures and tests.

    A function is written ``file: function``, relative to the kernel's or the runtime's folder; a
    log is a path relative to the specification's folder.
    """
    raised, tests = _raised(_KERNEL, _TELLING), _tested()
    also = _raised(_RUNTIME, frozenset({"lab"}))  # the runtime without its laboratory
    return {
        clause: {
            "raised_by": raised.get(clause, []),
            "also_raised_by": also.get(clause, []),
            "logs": [
                f"logs/rejected/{path.name}"
                for path in [_SPEC / "logs" / "rejected" / f"{clause}.jsonl"]
                if path.is_file()
            ],
            "faults": [row["id"] for row in fault_rows() if row["clause"] == clause],
            "failures": [failure.name for failure in FAILURES if failure.clause == clause],
            "tests": tests.get(clause, []),
        }
        for clause in (*CLAUSES, *SCHEDULE_CLAUSES)
    }


def _raised(folder: Path, left_out: frozenset[str]) -> dict[str, list[str]]:
    """Return the functions below a folder that name each clause; some modules are left out."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        where = path.relative_to(folder)
        if not left_out & {*where.parts}:
            for function, clause in _named(path, where.parts[0] == "schedule"):
                if function:
                    _add(found, clause, f"{where.as_posix()}: {function}")
    return found


def _tested() -> dict[str, list[str]]:
    """
    Return the test modules that name each clause, as a string or in a pattern for a message.

    Tables of faults that tests inject count too; tests that only read the clauses' texts do not.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(path for pattern in _SHOWING for path in _TESTS.rglob(pattern)):
        if path.name in _TEXTS_ONLY:
            continue
        for _, clause in _named(path, path.relative_to(_TESTS).parts[0] == "schedule", True):
            _add(found, clause, path.relative_to(_TESTS.parent).as_posix())
    return found


def _named(path: Path, schedules: bool, patterns: bool = False) -> Iterator[tuple[str, str]]:
    """
    Yield each clause that a module names in a string, with the name of the enclosing function
    (empty outside functions).

    Args:
        path: The file of the module.
        schedules: Whether the module names the clauses for schedules without ``schedule.``.
        patterns: Whether to find clauses inside longer strings too, also with escaped dots.
    """
    for name, node in _functions(ast.parse(path.read_text(encoding="utf-8"))):
        for clause in _clauses(node, schedules, patterns):
            yield name, clause


def _clauses(node: ast.AST, schedules: bool, patterns: bool = False) -> Iterator[str]:
    """Yield each clause that a string of `node` names; the arguments are those of `_named`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            text = inner.value
            names = [text, f"schedule.{text}"] if schedules else [text]
            if patterns:
                names += _CLAUSE.findall(text.replace("\\", ""))
            yield from (name for name in names if name in CLAUSES or name in SCHEDULE_CLAUSES)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield a module's top-level statements and its classes' methods, each with its name."""
    for statement in tree.body:
        if not isinstance(statement, ast.ClassDef):
            yield getattr(statement, "name", ""), statement
            continue
        for inner in statement.body:
            method = getattr(inner, "name", "")
            yield method and f"{statement.name}.{method}", inner


def _add(found: dict[str, list[str]], clause: str, place: str) -> None:
    if place not in found.setdefault(clause, []):
        found[clause].append(place)


# The file


def main(argv: Sequence[str] | None = None) -> int:
    """
    Write ``kept.json``, or check that it is up to date.

    Args:
        argv: Arguments without the program's name.

    Returns:
        0 if the file is up to date or was written; 1 if ``--check`` finds the file out of date, or
        if a guard has no entry yet (``--prove`` adds entries).
    """
    parser = argparse.ArgumentParser(
        prog="python -m qeffect.verification.kept", description=__doc__
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the file is out of date"
    )
    parser.add_argument(
        "--prove", action="store_true", help="compute all rows again with the solver (minutes)"
    )
    args = parser.parse_args(argv)
    if not _TESTS.is_dir():
        print(
            "expected a tests folder beside the specification, found none; run this in a checkout"
        )
        return 1
    before = FILE.read_text(encoding="utf-8") if FILE.is_file() else '{"guards": []}'
    guards = guard_sites()
    if args.prove:
        told = rows(guards, predicates_without(guards))
    else:
        known = {_key(row): row for row in json.loads(before)["guards"]}
        keys = [_key(_named_as(site)) for site in guards]
        if missing := [key for key in keys if key not in known]:
            print(
                f"{FILE.name} has no row for {missing[0]}; run again with --prove (takes minutes)"
            )
            return 1
        told = [known[key] for key in keys]
    after = _spelled(told, places())
    if before == after:
        return 0
    if args.check:
        print(f"{FILE.name} is out of date; run python -m qeffect.verification.kept")
        return 1
    write_text(FILE, after)
    print(f"wrote {FILE.name}; run python -m qeffect.spec to render the contract")
    return 0


def _spelled(told: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> str:
    """Return the file's text, with one entry per line."""
    guards = ",\n".join(f"  {json.dumps(row)}" for row in told)
    tables = {"clauses": shown, "proofs": proofs(), "lemmas": lemmas(), "callables": callables()}
    parts = [json.dumps({"scope": dict(SCOPE)})[1:-1], f'"guards": [\n{guards}\n ]']
    for part, table in tables.items():
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in table.items())
        parts.append(f'"{part}": {{\n{rows}\n }}')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())

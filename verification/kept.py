"""
``python -m qeffect.verification.kept``: what keeps each clause, written beside the specification.

A clause says what is refused, a promise what may be relied on, and their names differ. For each
guard this finds the promises that fail once it is deleted, from some state that keeps every
invariant, in a finite scope (``--prove``, minutes); and for each clause the functions that raise
it, and the rejected log, the injected faults, the re-enacted failures and the tests that name it.
``qeffect.spec`` renders ``kept.json`` in the contract; it can import nothing of this.
"""

from __future__ import annotations

import argparse
import ast
import json
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
from .symbolic import Encoding

__all__ = ["FILE", "PROMISES", "guard_sites", "main", "places", "predicates_without", "rows"]

_KERNEL: Final = Path(qeffect.__file__).parent
_SPEC: Final = Path(spec.__file__).parent.resolve()
#: What is written.
FILE: Final = _SPEC / "kept.json"
_TESTS: Final = _SPEC.parent / "tests"
#: Where tests of the contract are; those of a runtime name clauses too.
_ROOMS: Final = ("kernel", "schedule", "eventlog", "faults", "failures", "spec")
_PROOFS: Final = Path(__file__).parent / "reports" / "proofs.json"

#: Every name that the specification promises; what else may fail is a lemma of the proofs.
PROMISES: Final = frozenset(
    p.name for register in (MEMORY, WORLD, STEPS, CHANGES) for p in register
)

#: Parts of the kernel that name a clause without raising it, or are generated from those that do.
_TELLING: Final = frozenset(
    {
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
    """Every guard of every transition, relation by relation."""
    return tuple(site for site in sites() if site.kind == "guard")


def predicates_without(guards: Sequence[Site]) -> Iterator[tuple[str, ...]]:
    """
    For each guard, the predicates that its transition fails to keep without it; sorted.

    Args:
        guards: Guards of the full composition, each deleted by itself.
    """
    own = Composition.of((), Encoding.finite(SCOPE))
    solver = solver_of(own)
    for site in guards:
        broken = Composition((), own.encoding, Mutant((site,)).functions)
        yield tuple(sorted(set(refuted(broken, site.transition, solver))))


def rows(guards: Sequence[Site], found: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """
    What is written of each guard.

    Args:
        guards: The guards.
        found: Of each, what fails without it, as `predicates_without` gives it.

    Returns:
        The promises among it, else the lemmas, else what the report of the proofs says that becomes
        of a contract without the guard.
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


# Who raises a clause, and what shows it


def places() -> dict[str, dict[str, list[str]]]:
    """
    For each clause: who raises it, and the log, the faults, the failures and the tests of it.

    Functions are ``file: function`` from the kernel's folder, logs from the specification's.
    """
    raised, tests = _raised(), _tested()
    return {
        clause: {
            "raised_by": raised.get(clause, []),
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


def _raised() -> dict[str, list[str]]:
    """The functions of the kernel that name a clause."""
    found: dict[str, list[str]] = {}
    for path in sorted(_KERNEL.rglob("*.py")):
        where = path.relative_to(_KERNEL)
        if not _TELLING & {*where.parts}:
            for function, clause in _named(path, where.parts[0] == "schedule"):
                if function:
                    _add(found, clause, f"{where.as_posix()}: {function}")
    return found


def _tested() -> dict[str, list[str]]:
    """The test modules that name a clause."""
    found: dict[str, list[str]] = {}
    for room in _ROOMS:
        for path in sorted((_TESTS / room).rglob("test_*.py")):
            for _, clause in _named(path, room == "schedule"):
                _add(found, clause, path.relative_to(_TESTS.parent).as_posix())
    return found


def _named(path: Path, schedules: bool) -> Iterator[tuple[str, str]]:
    """
    Each clause that stands as a string in a module, and the function around it; empty for none.

    Args:
        path: The module.
        schedules: Whether it is about schedules, whose clauses it names without their part.
    """
    for name, node in _functions(ast.parse(path.read_text(encoding="utf-8"))):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                for clause in (inner.value, f"schedule.{inner.value}" if schedules else ""):
                    if clause in CLAUSES or clause in SCHEDULE_CLAUSES:
                        yield name, clause


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """What a module consists of, by name; methods one by one."""
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
    Write what keeps each clause, or check that it is current.

    Args:
        argv: Arguments without the program's name.

    Returns:
        0 when it is current or was written; 1 when ``--check`` finds that it is not, or when there
        is a guard that nothing is known of yet, for which ``--prove`` has to be asked.
    """
    parser = argparse.ArgumentParser(
        prog="python -m qeffect.verification.kept", description=__doc__
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    parser.add_argument("--prove", action="store_true", help="ask the solver again (minutes)")
    args = parser.parse_args(argv)
    if not _TESTS.is_dir():
        print("expected the tests beside the specification, found none; run it in a checkout")
        return 1
    before = FILE.read_text(encoding="utf-8") if FILE.is_file() else '{"guards": []}'
    guards = guard_sites()
    if args.prove:
        told = rows(guards, predicates_without(guards))
    else:
        known = {_key(row): row for row in json.loads(before)["guards"]}
        keys = [_key(_named_as(site)) for site in guards]
        if missing := [key for key in keys if key not in known]:
            print(f"nothing is known of {missing[0]}: run it with --prove, which takes minutes")
            return 1
        told = [known[key] for key in keys]
    after = _spelled(told, places())
    if before == after:
        return 0
    if args.check:
        print(f"{FILE.name} is stale: run python -m qeffect.verification.kept")
        return 1
    write_text(FILE, after)
    print(f"wrote {FILE.name}; python -m qeffect.spec renders it")
    return 0


def _spelled(told: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> str:
    """The file's text, a row a line."""
    guards = ",\n".join(f"  {json.dumps(row)}" for row in told)
    clauses = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in shown.items())
    scope = json.dumps({"scope": dict(SCOPE)})[1:-1]
    return f'{{\n {scope},\n "guards": [\n{guards}\n ],\n "clauses": {{\n{clauses}\n }}\n}}\n'


if __name__ == "__main__":
    sys.exit(main())

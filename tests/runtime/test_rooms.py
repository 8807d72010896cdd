"""
The rooms of the runtime that measure: what each may import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_imports import nodes

ROOT = Path(__file__).parents[2] / "gpu_runtime"
NAME = "qeffect.gpu_runtime"
#: Rooms over which benchmarks and evidence stand; none of these may know those.
BELOW = ("measure", "reports", "execute", "memory", "plan", "backends")
MEASURING = ("bench", "evidence")


def imported(path: Path, *, lazy: bool) -> Iterator[str]:
    """Modules of the runtime that a module imports, with or without those inside functions."""
    for node in nodes(path, lazy=lazy):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if base == NAME or base.startswith(f"{NAME}."):
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if module_at(full) else base


def module_at(name: str) -> Path | None:
    """The file of a module of the runtime, where it has one."""
    place = ROOT.joinpath(*name.removeprefix(NAME).strip(".").split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.exists():
            return path
    return None


def modules(room: str) -> list[Path]:
    """Every module of a room."""
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", BELOW)
def test_nothing_below_knows_a_benchmark_or_evidence(room: str) -> None:
    """Not even inside a function."""
    paths = modules(room)
    assert paths
    for path in paths:
        rooms = {name.split(".")[2] for name in imported(path, lazy=True) if name.count(".") > 1}

        assert not rooms & set(MEASURING), path


def test_benchmarks_and_evidence_do_not_know_each_other() -> None:
    """What they share is in `measure`."""
    for room, other in (MEASURING, MEASURING[::-1]):
        for path in modules(room):
            assert not any(
                name.startswith(f"{NAME}.{other}") for name in imported(path, lazy=True)
            ), path


@pytest.mark.parametrize("room", [*BELOW, *MEASURING, "parallel"])
def test_training_stands_over_all_other_rooms(room: str) -> None:
    """None of them knows what is trained, but benchmarks of complete steps, which time it."""
    knowing = {
        path.name
        for path in modules(room)
        if any(n.startswith(f"{NAME}.training") for n in imported(path, lazy=True))
    }
    assert knowing == ({"tables.py"} if room == "bench" else set())


def test_training_knows_no_benchmark() -> None:
    """Or the two rooms would stand on each other."""
    for path in modules("training"):
        assert not any(n.startswith(f"{NAME}.bench") for n in imported(path, lazy=True)), path

"""
The structure of the runtime: what each package may import, and that no package imports the
laboratory.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_imports import statements

ROOT = Path(__file__).parents[2] / "gpu_runtime"
NAME = "qeffect.gpu_runtime"
#: Rooms in the order in which they stand: each may import those before it, and itself.
ROOMS = (
    "renamed",
    "backends",
    "report",
    "step",
    "runtime",
    "operators",
    "ranks",
    "training",
    "doctor",
    "lab",
    "commands",
)


def imported(path: Path, *, lazy: bool) -> Iterator[str]:
    """Modules of the runtime that a module imports, with or without those inside functions."""
    for node in statements(path, lazy=lazy):
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (name for name in names if name == NAME or name.startswith(f"{NAME}."))
            continue
        base = node.module or ""
        if node.level:
            inside = [*NAME.split("."), *path.relative_to(ROOT).parent.parts]
            inside = inside[: len(inside) - node.level + 1]
            base = ".".join([*inside, base]).strip(".")
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


def room_of(path: Path) -> str:
    """The room that a module of the runtime stands in."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    """Arrows between rooms go one way, also inside functions."""
    paths = [p for p in sorted(ROOT.rglob("*.py")) if room_of(p) == room]
    assert paths
    for path in paths:
        rooms = {n.split(".")[2] for n in imported(path, lazy=True) if n.count(".") > 1}

        assert rooms <= set(ROOMS[: ROOMS.index(room) + 1]), path


def test_every_room_is_listed() -> None:
    """A new room has its place in the order."""
    # The guards are a layer beside the runtime, though their folder lies in it: test_imports.py.
    found = {room_of(path) for path in ROOT.rglob("*.py")} - {"__init__", "__main__", "guards"}

    assert found == set(ROOMS)


def users_of_the_laboratory() -> list[tuple[str, str]]:
    """Modules of other rooms (folders) that import the laboratory, each with the names that it
    imports."""
    return [
        (str(path.relative_to(ROOT)), name)
        for path in sorted(ROOT.rglob("*.py"))
        if room_of(path) != "lab"
        for name in imported(path, lazy=True)
        if name.startswith(f"{NAME}.lab")
    ]


def test_nothing_imports_the_laboratory_but_its_commands() -> None:
    """The product stands on nothing that measures it: commands are loaded by name."""
    assert users_of_the_laboratory() == []


@pytest.mark.parametrize(
    "code",
    [
        "import qeffect.gpu_runtime.lab.reports",
        "from qeffect.gpu_runtime import lab",
        "from ..lab import reports",
        "from .. import lab",
        "def f():\n    from ..lab.reports import cells",
        'importlib.import_module("qeffect.gpu_runtime.lab.reports")',
        'import_module("..lab.reports", __package__)',
    ],
)
def test_an_import_of_the_laboratory_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """In a room of the product, however it is imported."""
    monkeypatch.setattr("tests.runtime.test_rooms.ROOT", tmp_path)
    for name in ("step/planted.py", "lab/__init__.py", "lab/reports.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "step" / "planted.py").write_text(f"{code}\n")

    assert ["step/planted.py"] == [path for path, _ in users_of_the_laboratory()]

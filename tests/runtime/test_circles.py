"""The runtime's modules import one another one way, lazily or not."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import qeffect.gpu_runtime

ROOT = Path(qeffect.gpu_runtime.__file__).parent
NAME = "qeffect.gpu_runtime"

#: Edges of a circle that type annotations alone make, each with a module that is to lose it.
TYPES_ALONE = {(f"{NAME}.backends.te.domain", f"{NAME}.backends.te.stage")}


def named(root: Path) -> dict[str, Path]:
    """Every module below a folder by its full name."""
    found = {}
    for path in root.rglob("*.py"):
        parts = (NAME, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Our modules that one imports: at its top, inside its functions, or for its types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if (found := inner if inner in modules else node.module) in modules:
                    yield found


def graph(root: Path) -> dict[str, set[str]]:
    """What each module imports."""
    modules = named(root)
    return {
        name: {n for n in imports(path, modules) if n != name and (name, n) not in TYPES_ALONE}
        for name, path in modules.items()
    }


def room(module: str) -> str:
    """The folder below the package, or the module itself where it is in none."""
    return ".".join(module.split(".")[:3])


def test_no_circle_of_modules() -> None:
    """There is an order in which each module comes after everything that it imports."""
    order = list(graphlib.TopologicalSorter(graph(ROOT)).static_order())

    assert f"{NAME}.runtime" in order


def test_no_circle_of_rooms() -> None:
    """Nor is there a circle between folders, reports and the package's own name left out."""
    rooms: dict[str, set[str]] = {}
    for module, needed in graph(ROOT).items():
        rooms.setdefault(room(module), set()).update({room(n) for n in needed} - {room(module)})

    order = list(graphlib.TopologicalSorter(rooms).static_order())

    assert order.index(f"{NAME}.execute") < order.index(f"{NAME}.runtime")


def test_a_circle_is_found(tmp_path: Path) -> None:
    """Two modules that import each other, one of them inside a function, are a circle."""
    (tmp_path / "a.py").write_text(f"from {NAME}.b import x\n")
    (tmp_path / "b.py").write_text(f"def f():\n    from {NAME} import a\n")

    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph(tmp_path)).static_order())

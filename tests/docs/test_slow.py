"""
Tests that CI leaves out: each module with slow tests has a reason, and tests that CI runs instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS / "README.md"


def slow(node: ast.AST) -> bool:
    """Whether code has a mark `slow`."""
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == "slow"
        and isinstance(part.value, ast.Attribute)
        and part.value.attr == "mark"
        for part in ast.walk(node)
    )


def slow_modules(folder: Path) -> set[str]:
    """The files below a folder that mark tests as slow."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if slow(ast.parse(path.read_text(encoding="utf-8")))
    }


def rows(text: str) -> Iterator[tuple[str, ...]]:
    """The rows of the page's table, without its head."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield tuple(cell.strip() for cell in line.strip("|").split(" | "))


def ran_by_ci(name: str) -> bool:
    """Whether CI runs a test, at least some of its rows; without those that `nightly` marks."""
    file, _, function = name.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    whole = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    marks = {
        ast.unparse(decorator).partition("(")[0]
        for node in found
        for decorator in node.decorator_list
    } | {ast.unparse(node.value) for node in whole}
    return bool(found) and not marks & {"pytest.mark.slow", "pytest.mark.nightly"}


def test_every_slow_module_has_its_row() -> None:
    """Exactly one row; modules without slow tests have no row."""
    named = [row[0].strip("`") for row in rows(PAGE.read_text(encoding="utf-8"))]

    assert sorted(slow_modules(TESTS)) == sorted(named)


def test_every_row_has_a_reason() -> None:
    """And says what is left out."""
    for row in rows(PAGE.read_text(encoding="utf-8")):
        assert len(row) == 4, row
        assert all(row), row


def test_what_a_row_names_is_run_by_ci() -> None:
    """The named tests exist and are not slow."""
    for row in rows(PAGE.read_text(encoding="utf-8")):
        names = re.findall(r"`([^`]+\.py::\w+)`", row[3])
        assert names, row
        assert [] == [name for name in names if not ran_by_ci(name)], row


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pytest\npytestmark = pytest.mark.slow\n", {"test_it.py"}),
        ("import pytest\n@pytest.mark.slow(minutes=2)\ndef test_it(): ...\n", {"test_it.py"}),
        ("import pytest\nP = [pytest.param(1, marks=pytest.mark.slow)]\n", {"test_it.py"}),
        ("slow = 3\nother = slow.mark\n'pytest.mark.slow'\n", set()),
    ],
)
def test_a_slow_mark_is_seen(tmp_path: Path, code: str, found: set[str]) -> None:
    """On a module, a test or a row; the word in a text is not a mark."""
    (tmp_path / "test_it.py").write_text(code)

    assert found == slow_modules(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "verification/test_mutants.py::test_nothing",
        "verification/test_deleted_guards.py::test_every_deleted_guard_is_found",
        "training/test_kills.py::test_twenty_kills_in_a_row",
    ],
)
def test_a_test_that_ci_does_not_run_is_seen(name: str) -> None:
    """A slow test, and a test that does not exist."""
    assert not ran_by_ci(name)


def test_a_test_of_a_slow_module_is_seen() -> None:
    """The mark of a whole module counts for each of its tests."""
    tree = ast.parse((TESTS / "verification" / "test_prove.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [name for name in names if name.startswith("test_")]

    assert tests
    assert not any(ran_by_ci(f"verification/test_prove.py::{name}") for name in tests)

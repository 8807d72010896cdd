"""
Find the columns (arrays of the state) and arguments that the outcome of a transition (a call of the
contract) can depend on.

An exploration keeps only the columns that the guards of its transitions can read. Two states that
differ only in other columns have the same future refusals.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from attrs import field, frozen

__all__ = ["Dependence", "dependence", "visible_columns"]


@frozen
class Dependence:
    """
    How one composed function depends on its state and arguments.

    Args:
        guards: Columns (arrays of the state) that decide whether the call is refused.
        writes: For each column that the function writes, the columns that decide the index and the
            value of the write.
        arguments: Arguments that the function reads, such as ``token`` or ``key.cell``.
        clauses: Clauses by which the function can refuse.
    """

    guards: frozenset[str]
    writes: Mapping[str, frozenset[str]]
    arguments: frozenset[str]
    clauses: frozenset[str]


@cache
def dependence(function: Callable[..., Any], off: frozenset[str] = frozenset()) -> Dependence:
    """
    Read from a composed function's syntax tree what the function depends on.

    Args:
        function: The composed function (all guards and writes of one transition).
        off: Configured flags that are 0 in every stage, and mask bits that no stage sets. A guard
            that first tests one of these never refuses.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return _Reader(tree, off).result()


def visible_columns(found: Iterable[Dependence]) -> frozenset[str]:
    """Return the columns (arrays of the state) that some guard can read now or after any sequence
    of transitions."""
    all_found = list(found)
    seen = frozenset().union(*(one.guards for one in all_found))
    while True:
        more = seen.union(
            *(
                sources
                for one in all_found
                for column, sources in one.writes.items()
                if column in seen
            )
        )
        if more == seen:
            return seen
        seen = more


@frozen
class _Reader:
    tree: ast.FunctionDef
    off: frozenset[str] = frozenset()
    idle: list[ast.AST] = field(factory=list)
    locals: dict[str, frozenset[str]] = field(factory=dict)
    guards: set[str] = field(factory=set)
    writes: dict[str, set[str]] = field(factory=dict)
    clauses: set[str] = field(factory=set)

    def result(self) -> Dependence:
        for statement in self.tree.body:
            self.statement(statement, frozenset())
        return Dependence(
            frozenset(self.guards),
            {column: frozenset(sources) for column, sources in self.writes.items()},
            self.arguments(),
            frozenset(self.clauses),
        )

    def statement(self, node: ast.stmt, under: frozenset[str]) -> None:
        if isinstance(node, ast.If) and self.never(node.test):
            self.idle.append(node)
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            self.guards.update(self.columns(node.test))
            self.clauses.update(
                n.value
                for n in ast.walk(node.body[0])
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            )
        elif isinstance(node, ast.If):
            inside = under | self.columns(node.test)
            for statement in (*node.body, *node.orelse):
                self.statement(statement, inside)
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                self.locals[target.id] = self.columns(node.value)
            else:
                assert isinstance(target, ast.Subscript)
                assert isinstance(target.value, ast.Attribute)
                sources = under | self.columns(target.slice) | self.columns(node.value)
                self.writes.setdefault(target.value.attr, set()).update(sources)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            filled, value = node.value.args
            assert isinstance(filled, ast.Attribute)
            self.writes.setdefault(filled.attr, set()).update(under | self.columns(value))

    def never(self, test: ast.expr) -> bool:
        """Return whether a test first requires a flag or a bit that is always off."""
        first = test.values[0] if isinstance(test, ast.BoolOp) else test
        asks = isinstance(first, ast.Compare) and isinstance(first.ops[0], ast.NotEq)
        names = {node.id for node in ast.walk(first) if isinstance(node, ast.Name)}
        return asks and bool((self.columns(first) | names) & self.off)

    def columns(self, node: ast.expr) -> frozenset[str]:
        found: set[str] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and _base(inner) == "st":
                found.add(inner.attr)
            elif isinstance(inner, ast.Name):
                found |= self.locals.get(inner.id, frozenset())
        return frozenset(found - {"every", "fill"})

    def arguments(self) -> frozenset[str]:
        names = {a.arg for a in self.tree.args.args} - {"st"}
        found = set()
        idle = {inner for node in self.idle for inner in ast.walk(node)}
        for node in (node for node in ast.walk(self.tree) if node not in idle):
            if isinstance(node, ast.Attribute) and _base(node) in names:
                found.add(f"{_base(node)}.{node.attr}")
            elif isinstance(node, ast.Name) and node.id in names - {"key", "ref"}:
                found.add(node.id)
        return frozenset(found)


def _base(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""

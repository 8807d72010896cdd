"""
The sites of mutants: every guard, every operand of a guard, every state update.

Sites are found in the syntax trees of the relations' halves (a transition has a guard half and a
write half). Helpers are inlined first, so that a helper's guard is deleted in one transition at a
time.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from types import ModuleType
from typing import Any, Final, Literal

from attrs import evolve, field, frozen

from qeffect.engine.compose import compose, half_source, halves
from qeffect.engine.stage import RELATIONS, TRANSITIONS, Transitions, transitions

__all__ = ["BREAKDOWN", "Mutant", "Site", "mutant", "sites", "updates_read_by"]

#: Exceptions, besides a refusal, that a mutant may raise.
BREAKDOWN: Final = (KeyError, IndexError, TypeError)

#: Steps from a syntax node to one of its parts: attribute names and positions.
Place = tuple[str | int, ...]


@frozen
class Site:
    """
    One piece of source to delete.

    Args:
        transition: The transition of the site.
        half: The half with the site, as ``relation.function``.
        kind: ``guard``, ``operand`` or ``update``; or ``condition`` for the test of an update,
            which then always runs.
        text: The source code that is deleted.
        clause: The clause that the guard raises; empty for an update.
        place: The site's path in the syntax tree of the half, after helpers are inlined.
    """

    transition: str
    half: str
    kind: Literal["guard", "operand", "update", "condition"]
    text: str
    clause: str = ""
    place: Place = field(default=(), repr=False)

    @property
    def relation(self) -> str:
        """The relation of the site."""
        return self.half.partition(".")[0]

    def __str__(self) -> str:
        what = f" of {self.clause}" if self.clause else ""
        return f"{self.half}: {self.kind} `{self.text}`{what}"


@frozen(slots=False)
class Mutant:
    """
    The transitions with some sites deleted.

    Args:
        deleted: The deleted sites; usually one. Several sites are deleted only to show that one
            guard covers another.
        omit: Relations that the contract leaves out.
    """

    deleted: tuple[Site, ...]
    omit: tuple[str, ...] = ()

    @property
    def site(self) -> Site:
        """The first deleted site."""
        return self.deleted[0]

    @cached_property
    def replaced(self) -> dict[str, ast.FunctionDef]:
        """The changed halves, which replace those of the relations."""
        found: dict[str, ast.FunctionDef] = {}
        # From the back, so that deleting one site does not move the others.
        for site in sorted(self.deleted, key=lambda s: _sortable(s.place), reverse=True):
            module, _, name = site.half.partition(".")
            half = found.get(site.half) or _flat(
                RELATIONS[module], getattr(RELATIONS[module], name)
            )
            if site.kind == "condition":
                _make_unconditional(half, site.place)
            else:
                _delete(half, site.place)
            found[site.half] = ast.fix_missing_locations(half)
        return found

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The composed transition that the site is in."""
        name = self.site.transition
        modules = [RELATIONS[relation] for relation in transitions(self.omit).relations]
        return compose(name, TRANSITIONS[name], modules, replaced=self.replaced)

    @cached_property
    def functions(self) -> Transitions:
        """All composed transitions: the kernel's, except the mutant's transition."""
        own = transitions(self.omit)
        return evolve(own, functions={**own.functions, self.site.transition: self.function})

    def source(self) -> dict[str, str]:
        """Return the source of each changed half."""
        return {name: ast.unparse(half) for name, half in self.replaced.items()}


@cache
def mutant(site: Site, omit: tuple[str, ...] = ()) -> Mutant:
    """Return the mutant without one site."""
    return Mutant((site,), omit)


def _sortable(place: Place) -> tuple[tuple[int, str | int], ...]:
    return tuple((0, p) if isinstance(p, int) else (1, p) for p in place)


@cache
def sites(omit: tuple[str, ...] = ()) -> tuple[Site, ...]:
    """Return every site of every transition, in the order of the composed functions."""
    found = []
    modules = {name: module for name, module in RELATIONS.items() if name not in omit}
    for transition in TRANSITIONS:
        for name, module in modules.items():
            for _, function in halves(module, transition):
                half = _flat(module, function)
                where = f"{name}.{function.__name__}"
                found += list(_sites(transition, where, half.body, ("body",)))
    return tuple(found)


def updates_read_by(guards: Iterable[Site]) -> set[Site]:
    """
    Return the state updates of columns (arrays of the state) that the given guards read, in the
    transitions of these guards.
    """
    read = {(guard.transition, column) for guard in guards for column in _columns_of(guard)}
    return {s for s in sites() if s.kind == "update" and (s.transition, _written(s)) in read}


def _columns_of(guard: Site) -> set[str]:
    """Return the columns (arrays of the state) that a guard reads, directly or through local names
    of its function."""
    module, _, name = guard.half.partition(".")
    half = _flat(RELATIONS[module], getattr(RELATIONS[module], name))
    named = {
        node.targets[0].id: node.value
        for node in ast.walk(half)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    left: list[ast.AST] = [ast.parse(guard.text)]
    found = set()
    while left:
        for node in ast.walk(left.pop()):
            if isinstance(node, ast.Name) and node.id in named:
                left.append(named.pop(node.id))
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "st":
                found.add(node.attr)
    return found


def _written(update: Site) -> str:
    """Return the column that `st.COLUMN[...] = ...` or `st.fill(st.COLUMN, ...)` writes."""
    column: str = re.findall(r"\bst\.(?!fill\b)(\w+)", update.text)[0]
    return column


def _flat(module: ModuleType, function: Any) -> ast.FunctionDef:
    """Return a copy of a half with the bodies of its helpers in place of the calls."""
    half = copy.deepcopy(half_source(function))
    half.body = _written_out(module, half.body)
    return half


def _written_out(module: ModuleType, body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if _is_helper_call(statement):
            helper = getattr(module, statement.value.func.id)  # type: ignore[attr-defined]
            found += _written_out(module, copy.deepcopy(half_source(helper)).body)
            continue
        if isinstance(statement, ast.If):
            statement.body = _written_out(module, statement.body)
            statement.orelse = _written_out(module, statement.orelse)
        found.append(statement)
    return found


def _is_helper_call(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name)


def _sites(transition: str, half: str, body: Sequence[ast.stmt], place: Place) -> Iterator[Site]:
    for number, statement in enumerate(body):
        here = (*place, number)
        if isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise):
            clause = statement.body[0].exc.args[0].value  # type: ignore[union-attr]
            test = ast.unparse(statement.test)
            yield Site(transition, half, "guard", test, clause, here)
            for operand, at in _operands(statement.test, (*here, "test")):
                yield Site(transition, half, "operand", f"{operand}", clause, at)
        elif isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            yield Site(transition, half, "condition", test, "", here)
            yield from _sites(transition, half, statement.body, (*here, "body"))
            yield from _sites(transition, half, statement.orelse, (*here, "orelse"))
        elif _is_update(statement):
            yield Site(transition, half, "update", ast.unparse(statement), "", here)


def _operands(test: ast.expr, place: Place) -> Iterator[tuple[str, Place]]:
    if isinstance(test, ast.BoolOp):
        for number, operand in enumerate(test.values):
            here = (*place, "values", number)
            yield f"{ast.unparse(operand)}` in `{ast.unparse(test)}", here
            yield from _operands(operand, here)


def _is_update(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return isinstance(statement.targets[0], ast.Subscript)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _make_unconditional(half: ast.FunctionDef, place: Place) -> None:
    """Replace a test by its body."""
    body: Any = half
    for step in place[:-1]:
        body = body[step] if isinstance(step, int) else getattr(body, step)
    position = place[-1]
    assert isinstance(position, int)
    body[position : position + 1] = body[position].body


def _delete(half: ast.FunctionDef, place: Place) -> None:
    """Delete a statement, or an operand of a test."""
    node: Any = half
    parents = []
    for step in place:
        parents.append((node, step))
        node = node[step] if isinstance(step, int) else getattr(node, step)
    holder, position = parents[-1]
    del holder[position]
    if isinstance(node, ast.expr) and len(holder) == 1:
        # Only one operand is left; it replaces the whole operation.
        above, step = parents[-3]
        if isinstance(step, int):
            above[step] = holder[0]
        else:
            setattr(above, step, holder[0])
    elif isinstance(node, ast.stmt) and not holder:
        holder.append(ast.Expr(ast.Constant("deleted")))  # a docstring, which composing skips

"""
Composition: one flat transition function from the guards and writes that each relation exports.

The module of a relation (group of guards) exports a transition (contract call) as two halves,
``NAME_guards`` and ``NAME_writes``. The composed function runs the guards of every relation in the
normative order, then all writes. So a refusal has one name and changes no state. A guard half named
``NAME_before_RELATION_guards`` runs before the guards of that relation, instead of with the guards
of its own relation.

The halves are joined as syntax trees, not called one by one, so a guarded action costs a third
less. The same function object guards replays, and is used by the state explorer, the Z3 proofs and
the NumPy batches.

The composition of all relations is checked in as source, ``qeffect.engine.composed``; see
``qeffect.engine.generate``. A composition without some relations is made on first use.

Composition fails if joining could change a meaning. Examples are a guard that writes, a local name
with two definitions, and a read of a column that an earlier half has already written.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, Final

from attrs import frozen

from qeffect.spec.transitions import TRANSITIONS as DESCRIBED

__all__ = [
    "LEFT_OUT",
    "ComposedText",
    "CompositionError",
    "Half",
    "compose",
    "half_name",
    "half_source",
    "halves",
    "join",
    "refuse",
    "source",
]

_WIDTH = 100

#: The function that refuses a relation's own transitions if the relation is left out.
LEFT_OUT: Final = "left_out"


class CompositionError(Exception):
    """A relation's guard or write function cannot be composed without changing its meaning."""


@frozen
class Half:
    """
    The parsed name of a half: a relation's guard function or write function for one transition.

    Args:
        transition: The transition that the half belongs to.
        part: ``guards`` or ``writes``.
        before: The relation before whose guards the function runs; empty if the function runs with
            the guards of its own relation.

    >>> half_name("checkpoint_before_order_guards")
    Half(transition='checkpoint', part='guards', before='order')
    """

    transition: str
    part: str
    before: str = ""


def half_name(name: str) -> Half | None:
    """Parse the name of a guard or write function; return None for any other name."""
    transition, _, part = name.rpartition("_")
    if part not in ("guards", "writes") or not transition:
        return None
    transition, _, before = transition.partition("_before_")
    return Half(transition, part, before)


@cache
def half_source(function: FunctionType) -> ast.FunctionDef:
    """
    Return the syntax tree of a guard or write function, or of a helper that these functions call.
    """
    source = textwrap.dedent(inspect.getsource(function))
    node = ast.parse(source).body[0]
    if not isinstance(node, ast.FunctionDef):
        raise CompositionError(f"{function.__qualname__} is not a plain function")
    for statement in node.body:
        segment = ast.get_source_segment(source, statement) or ""
        vars(statement)["spelled"] = textwrap.dedent(" " * statement.col_offset + segment)
    return node


def halves(module: ModuleType, transition: str) -> list[tuple[str, FunctionType]]:
    """
    Return the guard and write functions that a relation exports for a transition, as pairs of kind
    ("guards" or "writes") and function.

    Guards come first; among the guards, those that run before another relation's guards come first.
    """
    found = []
    for name, function in vars(module).items():
        half = half_name(name)
        if half is not None and half.transition == transition:
            found.append((half, function))
    found.sort(key=lambda one: (one[0].part == "writes", not one[0].before))
    return [(half.part, function) for half, function in found]


def source(function: Callable[..., Any]) -> str:
    """Return the source text of a composed function, checked in or made at run time."""
    text = vars(function).get("source")
    if text is None:
        text = textwrap.dedent(inspect.getsource(function))
        vars(function)["source"] = text
    return str(text)


@frozen
class ComposedText:
    """
    A composed transition as text.

    Args:
        text: Source of one function of the state and the parameters.
        names: The globals that the source reads.
    """

    text: str
    names: Mapping[str, Any]


def compose(
    transition: str,
    parameters: tuple[str, ...],
    relations: Iterable[ModuleType],
    *,
    replaced: Mapping[str, ast.FunctionDef] | None = None,
) -> Callable[..., Any]:
    """
    Return the composed function of a transition over the given relations, in their order.

    Args:
        transition: Name of the transition, for example ``check_dgrad``.
        parameters: Names of the parameters after the state.
        relations: The relation modules that take part, in the normative order.
        replaced: For a ``module.function`` name, the guard, write or helper function to use
            instead. A mutant (for tests of the proofs) is a composition with one replacement.

    Returns:
        A function of the state and the parameters. A check returns the ticket that it issued.

    Raises:
        CompositionError: The halves cannot be joined without changing their meaning.
    """
    return _built(transition, join(transition, parameters, relations, replaced=replaced))


def refuse(
    transition: str, parameters: tuple[str, ...], relation: ModuleType
) -> Callable[..., Any]:
    """
    Return a transition that refuses every call because its relation is left out.

    Args:
        transition: Name of the transition.
        parameters: Names of the parameters after the state.
        relation: The relation's module; its ``left_out`` function gives the refusal.
    """
    joiner = _Joiner(transition, parameters, {})
    refusal = half_source(getattr(relation, LEFT_OUT))
    joiner.guards[f"{_short(relation)}.{LEFT_OUT}"] = refusal.body[-1:]
    joiner.carry(relation, refusal)
    return _built(transition, joiner.join())


def _built(transition: str, joined: ComposedText) -> Callable[..., Any]:
    filename = f"<composed {transition} {hash(joined.text) & 0xFFFFFFFF:08x}>"
    lines = joined.text.splitlines(True)
    linecache.cache[filename] = (len(joined.text), None, lines, filename)
    namespace = dict(joined.names)
    exec(compile(joined.text, filename, "exec"), namespace)
    built: Callable[..., Any] = namespace[transition]
    built.__module__ = "qeffect.engine.compose"
    vars(built)["source"] = joined.text
    return built


def join(
    transition: str,
    parameters: tuple[str, ...],
    relations: Iterable[ModuleType],
    *,
    replaced: Mapping[str, ast.FunctionDef] | None = None,
) -> ComposedText:
    """
    Return the source of a composed transition; the arguments are those of `compose`.

    Raises:
        CompositionError: The halves cannot be joined without changing their meaning.
    """
    joiner = _Joiner(transition, parameters, dict(replaced or {}))
    taking_part = list(relations)
    places = {_short(relation): place for place, relation in enumerate(taking_part)}
    exported = []
    for place, relation in enumerate(taking_part):
        for part, function in halves(relation, transition):
            half = half_name(function.__name__)
            before = half.before if half else ""
            at = (places.get(before, place), not before)
            exported.append(((part == "writes", *at), relation, part, function))
    # Guards first; the writes use locals that the guards define.
    for _, relation, part, function in sorted(exported, key=lambda half: half[0]):
        joiner.add(relation, part, function)
    return joiner.join()


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


class _Joiner:
    def __init__(
        self, transition: str, parameters: tuple[str, ...], replaced: dict[str, ast.FunctionDef]
    ) -> None:
        self.transition = transition
        self.parameters = parameters
        self.replaced = replaced
        self.names: dict[str, Any] = {}
        self.locals: dict[str, str] = {}
        self.guards: dict[str, list[ast.stmt]] = {}
        self.hoisted: list[ast.stmt] = []
        self.writes: dict[str, list[ast.stmt]] = {}

    def add(self, module: ModuleType, part: str, function: FunctionType) -> None:
        node = self.tree(module, function)
        given = tuple(a.arg for a in node.args.args)
        if given != ("st", *self.parameters):
            raise CompositionError(
                f"{module.__name__}.{node.name} takes {given}, the transition {self.parameters}"
            )
        where = f"{module.__name__}.{node.name}"
        half = f"{_short(module)}.{node.name}"
        own = (self.guards if part == "guards" else self.writes).setdefault(half, [])
        for statement in self.inlined(module, node.body):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.local(statement, where, own if part == "guards" else self.hoisted)
            elif part == "guards":
                if not (isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise)):
                    raise CompositionError(f"{where}: a guard may only refuse: {_text(statement)}")
                own.append(statement)
            else:
                own.append(statement)
        self.carry(module, node)

    def tree(self, module: ModuleType, function: FunctionType) -> ast.FunctionDef:
        return self.replaced.get(f"{_short(module)}.{function.__name__}") or half_source(function)

    def local(self, statement: ast.Assign, where: str, into: list[ast.stmt]) -> None:
        target = statement.targets[0]
        assert isinstance(target, ast.Name)
        definition = ast.unparse(statement.value)
        known = self.locals.get(target.id)
        if known is None:
            self.locals[target.id] = definition
            into.append(statement)
        elif known != definition:
            raise CompositionError(
                f"{where}: {target.id} has two definitions: here {definition}, before {known}"
            )

    def inlined(self, module: ModuleType, body: list[ast.stmt]) -> list[ast.stmt]:
        """Replace statements that call a helper of the same module by the helper's body."""
        result: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            if isinstance(statement, ast.If) and not isinstance(statement.body[0], ast.Raise):
                statement = ast.If(
                    statement.test,
                    self.inlined(module, statement.body) or [ast.Pass()],
                    self.inlined(module, statement.orelse),
                )
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                helper = self.tree(module, getattr(module, call.func.id))
                wanted = [a.arg for a in helper.args.args]
                passed = [a.id if isinstance(a, ast.Name) else "" for a in call.args]
                if wanted != passed:
                    raise CompositionError(f"{helper.name} is called with other names: {passed}")
                self.carry(module, helper)
                result += self.inlined(module, helper.body)
            else:
                result.append(statement)
        return result

    def carry(self, module: ModuleType, node: ast.FunctionDef) -> None:
        """Add the globals that a half reads."""
        for name in (n.id for n in ast.walk(node) if isinstance(n, ast.Name)):
            if name in vars(module):
                value = vars(module)[name]
                if self.names.setdefault(name, value) is not value:
                    raise CompositionError(f"{name} means two things in {self.transition}")

    def join(self) -> ComposedText:
        self.refuse_late_reads()
        lines = [f"def {self.transition}({', '.join(('st', *self.parameters))}):"]
        lines += [f"    {line}".rstrip() for line in self.docstring()]
        for half, statements in self.guards.items():
            if statements:
                lines += [f"    # {half}", *_lines(statements)]
        lines += _lines(self.hoisted)
        for half, statements in self.writes.items():
            if statements:
                lines += [f"    # {half}", *_lines(statements)]
        if "ticket" in self.locals:
            lines.append("    return ticket")
        text = "\n".join(lines) + "\n"
        read = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        return ComposedText(text, {name: v for name, v in self.names.items() if name in read})

    def docstring(self) -> list[str]:
        when = [t.when for t in DESCRIBED if t.name == self.transition]
        found = when or [f"The composed transition {self.transition}."]
        for what, part in (("Guards", self.guards), ("Writes", self.writes)):
            relations = list(dict.fromkeys(half.partition(".")[0] for half in part))
            found.append(f"{what}: {', '.join(relations) or 'none'}.")
        first, *rest = found
        return ['"""', *textwrap.wrap(first, _WIDTH - 4), "", *rest, '"""']

    def refuse_late_reads(self) -> None:
        written: set[str] = set()
        for statement in (s for statements in self.writes.values() for s in statements):
            for read in sorted(_columns(statement, ast.Load) & written):
                raise CompositionError(f"{self.transition}: st.{read} is read after it was written")
            written |= _columns(statement, ast.Store)


def _columns(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Names of the columns that a statement reads (Load) or writes (Store)."""
    found = set()
    for node in ast.walk(statement):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Attribute)
            and isinstance(node.ctx, context)
        ):
            found.add(node.value.attr)
        if (
            context is ast.Store
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "fill"
            and isinstance(node.args[0], ast.Attribute)
        ):
            found.add(node.args[0].attr)
    return found


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _spelled(statement: ast.stmt) -> str:
    """Return a statement's source; a long statement keeps the line breaks of its source file."""
    text = _text(statement)
    if max(map(len, text.splitlines())) <= _WIDTH - 4:
        return text
    kept = str(vars(statement).get("spelled", ""))
    return kept if ast.unparse(ast.parse(kept)) == text else text


def _lines(statements: list[ast.stmt]) -> list[str]:
    """Return statements as indented source, strings in double quotes."""
    text = "\n".join(map(_spelled, statements)).replace("'", '"')
    return textwrap.indent(text, "    ").splitlines()

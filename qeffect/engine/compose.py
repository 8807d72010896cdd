"""
Composition: one flat transition function from the guards and writes that each relation exports.

A relation module exports a transition as two halves, ``NAME_guards`` and ``NAME_writes``. The
composed function runs every relation's guards in the normative order, then every write, so that a
refusal has one name and leaves the state as it was. The halves are joined as syntax trees rather
than called one by one: a guarded action then costs a third less, and one function object is what
runs beside the GPU, what the explorer walks, what Z3 proves and what NumPy batches.

Joining is refused where it could change a meaning: a guard that writes, a local name with two
definitions, or a read of a column that an earlier half has already written.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["CompositionError", "compose", "half_source", "halves"]

Halves = Mapping[tuple[str, str], ast.FunctionDef]


class CompositionError(Exception):
    """A relation's half is outside what the readings understand."""


@cache
def half_source(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of one half, or of a helper that halves call."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise CompositionError(f"{function.__qualname__} is not a plain function")
    return node


def halves(module: ModuleType, transition: str) -> Iterable[tuple[str, FunctionType]]:
    """Yield the ("guards" | "writes", function) pairs that a relation exports for a transition."""
    for part in ("guards", "writes"):
        function = getattr(module, f"{transition}_{part}", None)
        if function is not None:
            yield part, function


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
        parameters: Its parameters after the state.
        relations: The relation modules that take part, in the normative order.
        replaced: Halves or helpers to use in place of a module's own, by
            ``module.function`` name. A mutant is a composition with one replacement.

    Returns:
        A function of the state and the parameters. A check returns the ticket it issued.

    Raises:
        CompositionError: The halves cannot be joined without changing their meaning.
    """
    joiner = _Joiner(transition, parameters, dict(replaced or {}))
    exported = [
        (relation, *half) for relation in relations for half in halves(relation, transition)
    ]
    for relation, part, function in sorted(exported, key=lambda half: half[1] == "writes"):
        joiner.add(relation, part, function)  # guards first: their locals must precede them
    return joiner.build()


class _Joiner:
    def __init__(
        self, transition: str, parameters: tuple[str, ...], replaced: dict[str, ast.FunctionDef]
    ) -> None:
        self.transition = transition
        self.parameters = parameters
        self.replaced = replaced
        self.names: dict[str, Any] = {}
        self.locals: dict[str, str] = {}
        self.guards: list[ast.stmt] = []
        self.hoisted: list[ast.stmt] = []
        self.writes: list[ast.stmt] = []
        self.doc: list[str] = []

    def add(self, module: ModuleType, part: str, function: FunctionType) -> None:
        node = self.tree(module, function)
        given = tuple(a.arg for a in node.args.args)
        if given != ("st", *self.parameters):
            raise CompositionError(
                f"{module.__name__}.{node.name} takes {given}, the transition {self.parameters}"
            )
        where = f"{module.__name__}.{node.name}"
        for statement in self.inlined(module, node.body):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.local(statement, where, self.guards if part == "guards" else self.hoisted)
            elif part == "guards":
                if not (isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise)):
                    raise CompositionError(f"{where}: a guard may only refuse: {_text(statement)}")
                self.guards.append(statement)
            else:
                self.writes.append(statement)
        self.bind(module, node)

    def tree(self, module: ModuleType, function: FunctionType) -> ast.FunctionDef:
        name = f"{module.__name__.rpartition('.')[2]}.{function.__name__}"
        return self.replaced.get(name) or half_source(function)

    def local(self, statement: ast.Assign, where: str, into: list[ast.stmt]) -> None:
        target = statement.targets[0]
        assert isinstance(target, ast.Name)
        definition = ast.unparse(statement.value)
        known = self.locals.setdefault(target.id, definition)
        if known != definition:
            raise CompositionError(f"{where}: {target.id} is {definition}, elsewhere {known}")
        if not any(_text(s) == _text(statement) for s in (*self.guards, *self.hoisted)):
            into.append(statement)

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
                self.bind(module, helper)
                result += self.inlined(module, helper.body)
            else:
                result.append(statement)
        return result

    def bind(self, module: ModuleType, node: ast.FunctionDef) -> None:
        """Carry over the globals that a half reads."""
        for name in (n.id for n in ast.walk(node) if isinstance(n, ast.Name)):
            if name in vars(module):
                value = vars(module)[name]
                if self.names.setdefault(name, value) is not value:
                    raise CompositionError(f"{name} means two things in {self.transition}")

    def build(self) -> Callable[..., Any]:
        self.refuse_late_reads()
        body: list[ast.stmt] = [*self.guards, *self.hoisted, *self.writes]
        if "ticket" in self.locals:
            body.append(ast.Return(ast.Name("ticket", ast.Load())))
        function = ast.FunctionDef(
            name=self.transition,
            args=ast.arguments(
                posonlyargs=[],
                args=[ast.arg(a) for a in ("st", *self.parameters)],
                kwonlyargs=[],
                kw_defaults=[],
                defaults=[],
            ),
            body=body or [ast.Pass()],
            decorator_list=[],
        )
        source = ast.unparse(ast.fix_missing_locations(ast.Module([function], [])))
        filename = f"<composed {self.transition} {hash(source) & 0xFFFFFFFF:08x}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        constants = {name: v for name, v in self.names.items() if isinstance(v, int)}
        literal = ast.fix_missing_locations(_Literal(constants).visit(ast.parse(source)))
        namespace = dict(self.names)
        exec(compile(literal, filename, "exec"), namespace)
        built: Callable[..., Any] = namespace[self.transition]
        built.__module__ = "qeffect.engine.stage"
        built.__doc__ = f"Composed transition; its guards and writes, in order:\n\n{source}"
        return built

    def refuse_late_reads(self) -> None:
        written: set[str] = set()
        for statement in self.writes:
            for read in sorted(_columns(statement, ast.Load) & written):
                raise CompositionError(f"{self.transition}: st.{read} is read after it was written")
            written |= _columns(statement, ast.Store)


class _Literal(ast.NodeTransformer):
    """Put the values of named constants in their place: each look-up costs a guard's time."""

    def __init__(self, constants: Mapping[str, int]) -> None:
        self.constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.constants:
            return ast.copy_location(ast.Constant(self.constants[node.id]), node)
        return node


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

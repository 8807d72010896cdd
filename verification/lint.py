"""
Lint of relation modules: they may use only constructs that work on all four kinds of memory.

Each transition of a relation has a guard half and a write half. The same code runs on lists, on
small tuples, on Z3 arrays and on NumPy batches. So a half may compare values in a column (an array
of the state) and branch on these values, but must not depend on the type of its memory. Therefore
it has no ``is``, no ``isinstance`` and no loop over state, and makes only the few calls that every
kind of memory supports. Guards come before writes, in separate halves. A relation writes only its
own columns. Every clause is a string literal that the specification lists.
``python -m qeffect.verification.lint`` checks the relation modules.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping

from attrs import define, field, frozen

from qeffect.engine.compose import LEFT_OUT, half_name
from qeffect.engine.stage import RELATIONS, STATE, TRANSITIONS
from qeffect.relations.columns import CONFIG
from qeffect.spec.clauses import CLAUSES

__all__ = ["BOUNDARY", "RULES", "LintFinding", "lint", "lint_source"]

#: Transitions that may quantify over a column. They begin or end a walk or an epoch, save or
#: restore, so their cost may grow with the pool.
BOUNDARY = frozenset(
    {
        "finalize",
        "start_gradients_read",
        "next_walk",
        "skip",
        "check_update",
        "commit_update",
        "abort_update",
        "checkpoint",
        "restore",
    }
)

#: The text of each rule, with the reason or the remedy.
RULES: Mapping[str, str] = {
    "is": "`is` has no meaning for Z3 terms; compare with ==",
    "isinstance": "a half must not depend on the type of its memory",
    "try": "a symbolic run cannot catch exceptions of a concrete run",
    "loop": "loops over state have no bound in the proofs; use st.every or st.fill",
    "comprehension": "a comprehension is a loop; use st.every or st.fill",
    "lambda": "a nested function is not inlined into the composition",
    "attribute-write": "a half may write only entries of columns",
    "call": "a half may call only st.every, st.fill, Refused, and, as statements, helpers of its "
    "module",
    "nested-call": "the arguments of a call must not contain calls, so that the composition can "
    "inline it",
    "guard": "a guard half may only assign names and refuse",
    "write": "a write half must not refuse, since every guard runs before the first write",
    "own-columns": "a relation may write only columns that its own STATE declares",
    "column": "a column that is read or written must be declared",
    "clause-literal": "a clause must be a string literal, so that a search finds it",
    "clause": "a clause must be in qeffect.spec.clauses",
    "every": "st.every is allowed only in guards of the transitions that begin or end a walk or an "
    "epoch, save or restore (BOUNDARY)",
    "fill": "st.fill is allowed only in write halves, as a statement",
    "half": "a half must be named after a transition and take its parameters; the name of a "
    "guard half may add the relation that it runs before",
    "plain": "a half must be a plain function without defaults, decorators, returns or other "
    "statements",
}


@frozen
class LintFinding:
    """
    A construct that does not work on every kind of memory.

    Args:
        rule: The violated rule, a key of `RULES`.
        where: The place, as ``module.function:line``.
        text: The source of the construct.
    """

    rule: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.text!r} ({RULES[self.rule]})"


_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Other nodes that an expression may contain.
_EXPRESSIONS = (
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.UnaryOp,
    ast.Constant,
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Call,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
)


def lint() -> list[LintFinding]:
    """
    Return the findings in the relation modules.

    >>> lint()
    []
    """
    return [
        finding
        for name, module in RELATIONS.items()
        for finding in lint_source(inspect.getsource(module), name)
    ]


def lint_source(
    source: str, module: str, columns: Collection[str] = (*CONFIG, *STATE)
) -> list[LintFinding]:
    """
    Return the findings in the source of one relation module.

    Args:
        source: The module's source.
        module: The module's name, for the findings.
        columns: Columns (arrays of the state) that the module may read, besides those that it
            declares itself.
    """
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    own = _declared(tree)
    checker = _Checker(module, own, {*columns, *own}, functions)
    for function in functions.values():
        checker.check(function)
    return checker.findings


def _declared(tree: ast.Module) -> set[str]:
    """Return the names of the columns (arrays of the state) that the module's STATE declares."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "STATE":
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                return {str(k.value) for k in node.value.keys if isinstance(k, ast.Constant)}
    return set()


@define
class _Checker:
    module: str
    own: set[str]
    columns: set[str]
    functions: Mapping[str, ast.FunctionDef]
    findings: list[LintFinding] = field(factory=list)
    function: str = ""

    def report(self, rule: str, node: ast.AST) -> None:
        line = getattr(node, "lineno", 0)
        where = f"{self.module}.{self.function}:{line}"
        finding = LintFinding(rule, where, ast.unparse(node).partition("\n")[0])
        if finding not in self.findings:
            self.findings.append(finding)

    def check(self, function: ast.FunctionDef) -> None:
        self.function = function.name
        half = half_name(function.name)
        transition = half.transition if half else ""
        args = function.args
        names = tuple(arg.arg for arg in args.args)
        if half:
            if (
                transition not in TRANSITIONS
                or names != ("st", *TRANSITIONS[transition])
                or (half.before and (half.part != "guards" or half.before not in RELATIONS))
            ):
                self.report("half", function)
        elif function.name != LEFT_OUT and not self.is_called(function.name):
            self.report("half", function)
        if args.defaults or args.kwonlyargs or args.vararg or args.kwarg or function.decorator_list:
            self.report("plain", function)
        for node in ast.walk(function):
            self.forbidden(node)
        part = half.part if half else "helper"
        self.block(function.body, part, transition)

    def is_called(self, helper: str) -> bool:
        """
        Return whether a half of the module calls this function. A function that no half calls must
        be a half with a wrong name.
        """
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == helper
            for function in self.functions.values()
            for node in ast.walk(function)
        )

    # What may stand nowhere

    def forbidden(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare) and any(
            isinstance(o, ast.Is | ast.IsNot) for o in node.ops
        ):
            self.report("is", node)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.report("try", node)
        elif isinstance(node, _LOOPS):
            self.report("loop", node)
        elif isinstance(node, _COMPREHENSIONS):
            self.report("comprehension", node)
        elif isinstance(node, ast.Lambda):
            self.report("lambda", node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            self.report("attribute-write", node)
        elif isinstance(node, ast.Call) and _name(node.func) in (
            "isinstance",
            "issubclass",
            "type",
        ):
            self.report("isinstance", node)

    # Statements

    def block(self, body: list[ast.stmt], part: str, transition: str) -> None:
        for statement in body:
            self.statement(statement, part, transition)

    def statement(self, node: ast.stmt, part: str, transition: str) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                pass
            case ast.Expr(value=ast.Call() as call):
                self.called(call, part)
            case ast.Assign(targets=[ast.Name()], value=value):
                self.expression(value, part, transition)
            case ast.Assign(targets=[ast.Subscript() as target], value=value):
                self.written(target, node, part)
                self.expression(target.slice, part, transition)
                self.expression(value, part, transition)
            case ast.If(test=test, body=[ast.Raise() as refusal], orelse=[]):
                self.expression(test, part, transition)
                self.refusal(refusal, part)
            case ast.If(test=test, body=body, orelse=orelse):
                if part == "guards":
                    self.report("guard", node)
                self.expression(test, part, transition)
                self.block(body, part, transition)
                self.block(orelse, part, transition)
            case ast.Raise():
                self.refusal(node, part)
            case _ if not isinstance(node, (*_LOOPS, ast.Try, ast.TryStar)):
                self.report("plain", node)

    def written(self, target: ast.Subscript, node: ast.stmt, part: str) -> None:
        column = _column(target.value)
        if part == "guards":
            self.report("guard", node)
        elif column is None or column not in self.columns:
            self.report("column", node)
        elif column not in self.own:
            self.report("own-columns", node)

    def called(self, call: ast.Call, part: str) -> None:
        name = _name(call.func)
        if name == "fill" and isinstance(call.func, ast.Attribute):
            if part != "writes" or len(call.args) != 2:
                self.report("fill", call)
            column = _column(call.args[0]) if call.args else None
            if column is None or column not in self.columns:
                self.report("column", call)
            elif column not in self.own:
                self.report("own-columns", call)
        elif not isinstance(call.func, ast.Name) or name not in self.functions:
            self.report("call", call)
        if any(isinstance(node, ast.Call) for arg in call.args for node in ast.walk(arg)):
            self.report("nested-call", call)

    def refusal(self, node: ast.Raise, part: str) -> None:
        if part == "writes":
            self.report("write", node)
        match node.exc:
            case ast.Call(func=ast.Name(id="Refused"), args=[ast.Constant(value=str() as clause)]):
                if clause not in CLAUSES:
                    self.report("clause", node)
            case _:
                self.report("clause-literal", node)

    # Expressions

    def expression(self, value: ast.expr, part: str, transition: str) -> None:
        for node in _without_calls(value):
            if isinstance(node, ast.Call):
                self.quantifier(node, part, transition)
            elif isinstance(node, ast.Attribute) and _name(node.value) == "st":
                if node.attr not in self.columns:
                    self.report("column", node)
            elif not _plain(node):
                self.report("plain", node)

    def quantifier(self, call: ast.Call, part: str, transition: str) -> None:
        name = _name(call.func)
        if name in ("isinstance", "issubclass", "type"):
            return
        if name == "fill" and _name(getattr(call.func, "value", None)) == "st":
            self.report("fill", call)
        elif name != "every" or not isinstance(call.func, ast.Attribute):
            self.report("call", call)
        else:
            if part != "guards" or transition not in BOUNDARY:
                self.report("every", call)
            column = _column(call.args[0]) if call.args else None
            if column is None or column not in self.columns:
                self.report("column", call)
        if any(isinstance(node, ast.Call) for arg in call.args for node in ast.walk(arg)):
            self.report("nested-call", call)


def _plain(node: ast.AST) -> bool:
    """Return whether a node is allowed in an expression, or a separate rule covers it."""
    if isinstance(node, ast.Attribute):
        return _name(node.value) in ("st", "key", "ref")
    return isinstance(node, (*_EXPRESSIONS, *_COMPREHENSIONS, ast.Lambda))


def _without_calls(value: ast.expr) -> Iterator[ast.AST]:
    """Yield every node of an expression, except the nodes inside calls."""
    unread: list[ast.AST] = [value]
    while unread:
        node = unread.pop()
        yield node
        if not isinstance(node, ast.Call):
            unread.extend(ast.iter_child_nodes(node))


def _name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _column(node: ast.AST) -> str | None:
    """Return the name COLUMN if the node is ``st.COLUMN``, otherwise None."""
    if isinstance(node, ast.Attribute) and _name(node.value) == "st":
        return node.attr
    return None


def main() -> int:
    """Print the findings; return 1 if there are findings, otherwise 0."""
    findings = lint()
    for finding in findings:
        print(finding)
    print(f"{len(RELATIONS)} relation modules, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

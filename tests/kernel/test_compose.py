"""
Composition: guards first and in the normative order, then writes; a faulty half is refused.
"""

from __future__ import annotations

import ast
import copy
from types import ModuleType
from typing import Any

import pytest

from qeffect.engine.compose import CompositionError, compose, half_name, half_source, source
from qeffect.engine.stage import RELATIONS, STATE, TRANSITIONS, transitions


def _relation(name: str, source: str) -> ModuleType:
    """A relation module made from source that the composition can read back."""
    import linecache

    module = ModuleType(f"tests.{name}")
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), vars(module))
    module.__dict__["Refused"] = RuntimeError
    return module


class TestTransitions:
    @pytest.mark.parametrize("name", TRANSITIONS)
    def test_guards_before_writes(self, name: str) -> None:
        """No composed function writes before its last guard."""
        (function,) = ast.parse(source(transitions().functions[name])).body
        assert isinstance(function, ast.FunctionDef)
        guards = [
            at
            for at, node in enumerate(function.body)
            if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
        ]
        writes = [
            at
            for at, node in enumerate(function.body)
            if any(
                isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store)
                for inner in ast.walk(node)
            )
        ]

        assert not guards or not writes or max(guards) < min(writes)

    def test_every_half_is_used(self) -> None:
        """Every half that a relation exports belongs to a transition."""
        for relation in RELATIONS.values():
            for name in vars(relation):
                half = half_name(name)
                assert half is None or half.transition in TRANSITIONS, name

    def test_columns_have_one_owner(self) -> None:
        """Every column is declared by one relation."""
        declared = [name for module in RELATIONS.values() for name in module.STATE]

        assert len(set(declared)) == len(declared) == len(STATE)

    def test_the_same_relations_are_composed_once(self) -> None:
        """The composition of the same relations is made once."""
        assert transitions() is transitions(())
        assert transitions({"arena", "order"}) is transitions(["order", "arena"])

    def test_a_replaced_half_is_a_mutant(self) -> None:
        """One half may be replaced; the composition is then another."""
        half = half_source(RELATIONS["order"].check_forward_guards)
        mutant = copy.deepcopy(half)
        mutant.body = [node for node in half.body if "order.token" not in ast.unparse(node)]
        composed = transitions(replaced={"order.check_forward_guards": mutant})

        assert "order.token" in source(transitions().check_forward)
        assert "order.token" not in source(composed.check_forward)
        assert "order.token" in source(composed.check_dgrad)

    def test_the_composed_functions_are_the_transitions_of_the_specification(self) -> None:
        """The composed functions are exactly the specification's transitions, with the same
        arguments. Any other name raises an error that names it."""
        assert set(TRANSITIONS) == set(transitions().functions)
        with pytest.raises(AttributeError, match="teleport"):
            _ = transitions().teleport


class TestRefused:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("def go_guards(st, x):\n    st.a[x] = 1\n", "a guard may only refuse"),
            ("def go_guards(st, y):\n    pass\n", r"takes \('st', 'y'\), the transition \('x',\)"),
            (
                "def go_guards(st, x):\n    d = st.a[x]\n\n\n"
                "def go_writes(st, x):\n    d = st.b[x]\n",
                "d has two definitions: here st.b.x., before st.a.x.",
            ),
            (
                "def go_writes(st, x):\n    st.a[x] = 1\n    st.b[x] = st.a[x]\n",
                "st.a is read after it was written",
            ),
            (
                "def go_writes(st, x):\n    st.fill(st.a, 0)\n    st.b[x] = st.a[x]\n",
                "st.a is read after it was written",
            ),
            (
                "def help(st, d):\n    st.a[d] = 1\n\n\ndef go_writes(st, x):\n    help(st, x)\n",
                r"help is called with other names: \['st', 'x'\]",
            ),
        ],
    )
    def test_would_change_a_meaning(self, source: str, message: str) -> None:
        """Halves that cannot be joined without changing their meaning are refused."""
        with pytest.raises(CompositionError, match=message):
            compose("go", ("x",), [_relation("bad", source)])

    def test_joined_halves_run_as_if_called_in_turn(self) -> None:
        """What can be joined runs as if the halves were called one after another."""
        first = _relation("first", "def go_writes(st, x):\n    st.a[x] = st.b[x] + 1\n")
        second = _relation("second", "def go_writes(st, x):\n    st.b[x] = 5\n")
        go = compose("go", ("x",), [first, second])

        class Memory:
            a: Any = [0]
            b: Any = [3]

        go(Memory, 0)
        assert ([4], [5]) == (Memory.a, Memory.b)

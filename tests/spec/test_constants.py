"""
Sentinels, consumer bits and transitions are defined once, in the specification.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from qeffect.engine.stage import TRANSITIONS
from qeffect.relations import constants as kernel
from qeffect.spec import constants
from qeffect.spec.transitions import TRANSITIONS as WRITTEN

ROOT = Path(__file__).parents[2]
OWNER = ROOT / "spec" / "constants.py"


def assigned(path: Path) -> Iterator[str]:
    """Names that a module gives a number itself."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target, value = None, None
        if isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant | ast.UnaryOp):
            yield target.id


def test_only_the_specification_defines_them() -> None:
    """No module of any layer gives one of these names a number of its own."""
    names = set(constants.__all__)
    assert names == set(assigned(OWNER))
    for layer in ("spec", "qeffect", "verification", "gpu_runtime"):
        for path in (ROOT / layer).rglob("*.py"):
            if path != OWNER and "spec/constants" not in path.as_posix():
                assert not names & set(assigned(path)), path


def test_the_kernel_has_the_specifications() -> None:
    """What the relations import is what the specification defines."""
    for name in constants.__all__:
        assert getattr(constants, name) == getattr(kernel, name)


def test_consumer_bits_do_not_overlap() -> None:
    """Each consumer has a bit of its own, and a reservation none of theirs."""
    bits = [
        constants.DGRAD_BIT,
        constants.WGRAD_BIT,
        constants.OUT_BIT,
        constants.GRAD_BIT,
        constants.RESERVED,
    ]

    assert sum(bits) == 0b11111
    assert all(bit.bit_count() == 1 for bit in bits)


def test_the_kernel_composes_the_transitions_that_are_written() -> None:
    """Their names and arguments are the specification's own."""
    assert {t.name: t.arguments for t in WRITTEN} == TRANSITIONS

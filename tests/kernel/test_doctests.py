"""
Doctests: every example in a docstring of the kernel and the specification runs.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import qeffect
import spec
import verification.walks
from qeffect.refusals import Refused

#: As attrs does: ``...`` stands for any text, and an exception's module is not compared.
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE


def _names(package: ModuleType) -> list[str]:
    prefix = f"{package.__name__}."
    walked = (found.name for found in pkgutil.walk_packages(package.__path__, prefix))
    return [package.__name__, *(name for name in walked if not name.endswith("__main__"))]


NAMES = [
    *_names(qeffect),
    *_names(spec),
    *_names(verification.walks),
    "verification.lint",
    "verification.machine",
    "verification.strategies",
]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    """Every example gives what it says."""
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)

    assert result.failed == 0


def test_the_public_names_have_examples() -> None:
    """What a person meets first is shown by an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for public in (qeffect.Contract, qeffect.TapeKey, qeffect.TapeRef, Refused):
        examples = [test for test in finder.find(public) if test.examples]

        assert examples, public

"""
The changelog's new import names exist.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import pytest

from qeffect import renamed
from qeffect.gpu_runtime.renamed import MODULES, NAMES
from qeffect.renamed import whole
from tests.docs.blocks import CHANGELOG

TEXT = CHANGELOG.read_text(encoding="utf-8")


def expanded(name: str) -> list[str]:
    """The names of a row: `a.{b, c}` is `a.b` and `a.c`."""
    folder, brace, words = name.rstrip("}").partition("{")
    return [f"{folder}{word.strip()}" for word in words.split(",")] if brace else [name]


def rows(heading: str) -> Iterator[tuple[str, str]]:
    """The first names of both columns of the table below a heading."""
    section = TEXT.split(f"#### {heading}\n")[1].split("\n##")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            old, new = (re.findall(r"`([^`]+)`", cell)[0] for cell in line.strip("| ").split(" | "))
            yield old, new


def found(name: str) -> object:
    """Import a module, or the module that has an attribute."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name.partition(".")[0]):
            pytest.skip(f"{name} needs {error.name}")
        owner, _, attribute = name.rpartition(".")
        return getattr(found(owner), attribute)


def test_every_moved_name_of_the_runtime_is_listed() -> None:
    """Once, with the new place of the name."""
    listed = {
        old: new
        for before, after in rows("Below `qeffect.gpu_runtime`")
        for old, new in zip(expanded(before), expanded(after), strict=True)
    }
    leads = {**MODULES, **NAMES}
    wanted = {o: n for o, n in leads.items() if n and not n.endswith("__main__")}
    assert listed == wanted


def test_every_moved_name_outside_of_the_runtime_is_listed() -> None:
    """Once, with the new place of the name."""
    leads = {**renamed.MODULES, **renamed.NAMES}
    wanted = [(f"qeffect.{old}", f"qeffect.{new}") for old, new in leads.items()]
    assert wanted == list(rows("Outside of `qeffect.gpu_runtime`"))


@pytest.mark.parametrize("new", [new for _, new in rows("Below `qeffect.gpu_runtime`")])
def test_a_new_name_of_the_runtime_imports(new: str) -> None:
    """Under the name in the table."""
    for name in expanded(new):
        assert found(whole("qeffect.gpu_runtime", name))


@pytest.mark.parametrize("new", [new for _, new in rows("Elsewhere")])
def test_another_new_name_imports(new: str) -> None:
    """Under the name in the table; parentheses of a call are dropped."""
    for name in expanded(new.partition("(")[0]):
        assert found(name)

"""
Doctests: every example in a docstring of the kernel and the specification runs.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import warnings

import pytest

import qeffect
import qeffect.verification.walks

#: As attrs does: ``...`` stands for any text, and an exception's module is not compared.
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE


#: Modules that run or need a device's compiler as soon as they are imported.
NOT_IMPORTED = (
    "__main__",
    *(f"{name}_kernel" for name in ("sums", "counters", "gate", "digests")),
)


def names() -> list[str]:
    """Every module of ours; the guards by their own name only, though their folder has two."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = [one.name for one in pkgutil.walk_packages(qeffect.__path__, "qeffect.")]
    second = "qeffect.gpu_runtime.guards"
    assert second in found
    return ["qeffect", *(n for n in found if n != second and not n.endswith(NOT_IMPORTED))]


NAMES = names()


@pytest.mark.parametrize("name", NAMES)
def test_every_example_gives_what_it_says(name: str) -> None:
    """Every example gives what it says; the runtime cannot be imported without torch."""
    if name.startswith("qeffect.gpu_runtime.") and importlib.util.find_spec("torch") is None:
        pytest.skip("the runtime needs torch")
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
        if test.examples:  # each run looks at every file that Python has read
            runner.run(test)

    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", qeffect.__all__)
def test_the_public_names_have_examples(name: str) -> None:
    """Each name that the package exports has an example."""
    public = getattr(qeffect, name)
    shown = [test.name for test in doctest.DocTestFinder().find(public, name) if test.examples]

    assert name in shown


@pytest.mark.parametrize("name", ["check_forward", "commit", "abort", "snapshot"])
def test_the_main_calls_have_examples(name: str) -> None:
    """So are the calls of a contract that most callers make."""
    method = getattr(qeffect.Contract, name)

    assert doctest.DocTestFinder().find(method, name)[0].examples

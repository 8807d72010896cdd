"""
One name for one thing: ambiguous words and removed synonyms do not come back.

The table of names is in `CONTRIBUTING.md`. Identifiers are read with `tokenize`, so prose may use a
word that no identifier may contain.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from qeffect.spec.clauses import CLAUSES

ROOT = Path(__file__).parents[1]
ROOMS = ("spec", "qeffect", "verification", "gpu_runtime", "tests")
#: Files that may contain the old names, and why.
ALLOWED: Mapping[str, str] = {"tests/test_names.py": "names what it forbids"}
#: Words that no identifier may contain between its underscores, and the name to use instead.
IDENTIFIERS: Mapping[str, str] = {
    "pending": "`consumers` of a slot, a ticket `in_flight`, a `deferred` dW",
    "binding": "`pairing` of dW with work; `bind` for destinations",
    "presented": "`found`, beside `expected`",
    "ruined": "`spoiled`",
    "input_gradient": "`dgrad`",
    "input_gradients": "`dgrads`",
    "weight_gradient": "`wgrad`",
    "weight_gradients": "`wgrads`",
    "DI": "`dgrad`; the consumer bit is `DGRAD_BIT`",
    "DW": "`wgrad`; the consumer bit is `WGRAD_BIT`",
}
#: Any of these words, between underscores or the ends of an identifier.
_LISTED = re.compile(rf"(?<![^\W_])({'|'.join(IDENTIFIERS)})(?![^\W_])")
#: Patterns that no comment, docstring, message or page may contain, and what to write instead.
TEXT: Mapping[str, str] = {
    r"\bpending\b": "consumers, in flight, deferred or to come",
    r"\bruined\b": "spoiled",
    r"--binding\b": "--pairing",
    r"\b(input|weight)_gradients?\b": "dgrad, wgrad",
    r": presented \S": "found ...; expected ...",
}
#: Verbs and adjectives that may name no function, method, field or class outside the tests, and
#: a noun to use instead.
DEFINITIONS: Mapping[str, str] = {
    "apart": "`evaluation_scope`; `single_edit_logs`, `run_parallel`",
    "settled": "`settling_steps`",
    "told": "`kept_calls` of a mutant; a progress text is `shown`",
    "looks": "`searching`",
    "Given": "`FileEncoding`",
    "_Told": "`_RankRecord`",
    "_Kept": "`_StepRecord`",
}
#: Where such a name stays, and why.
STAYS: Mapping[tuple[str, str], str] = {
    ("gpu_runtime/runtime/runtime.py", "apart"): "the name of the last release",
    ("verification/ranks/explore.py", "apart"): "a field of a report",
}
#: Names that belong to one type only.
TYPES = (
    *("Cell", "Work", "BenchCell", "Discipline", "Provisioning"),
    *("Field", "Finding", "Outcome", "Start", "Transition", "Verdict"),
)


def files(suffix: str, *rooms: str) -> Iterator[tuple[str, str]]:
    for room in rooms:
        for path in sorted((ROOT / room).rglob(f"*{suffix}")):
            name = path.relative_to(ROOT).as_posix()
            if name not in ALLOWED and "/build/" not in name:
                yield name, path.read_text(encoding="utf-8")


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every identifier."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def misnamed(source: str) -> list[str]:
    """Return the forbidden identifiers, each with its line and the name to use."""
    found: list[str] = []
    if not _LISTED.search(source):
        return found  # tokenizing the whole tree takes seconds, and few files have such a word
    for line, name in identifiers(source):
        for word, better in IDENTIFIERS.items():
            if f"_{word}_" in f"_{name}_":
                found.append(f"{line}: {name}; use {better}")
    return found


def misworded(text: str) -> list[str]:
    """Return the lines with forbidden words, each with what to write instead."""
    return [
        f"{number}: {line.strip()}; write {better}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, better in TEXT.items()
        if re.search(pattern, line)
    ]


def defined(source: str) -> Iterator[str]:
    """Yield the names of classes and of what a module assigns."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@cache
def definitions() -> tuple[tuple[str, str], ...]:
    """Pairs of a file and a name that it defines; the tree is parsed once."""
    return tuple((n, d) for n, source in files(".py", *ROOMS[:-1]) for d in defined(source))


def named(source: str) -> Iterator[str]:
    """Yield the names of functions, methods, classes and fields, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for own in node.body:
                targets = own.targets if isinstance(own, ast.Assign) else []
                targets = [own.target] if isinstance(own, ast.AnnAssign) else targets
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def literals(room: str, name: str) -> set[str]:
    """Return the values of the one `NAME = Literal[...]` of a room."""
    for _, source in files(".py", room):
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    raise AssertionError(f"expected an assignment {name} = Literal[...] in {room}/, found none")


def test_every_identifier_has_the_one_name() -> None:
    """No identifier of the project contains a forbidden word."""
    assert [] == [f"{n}:{f}" for n, source in files(".py", *ROOMS) for f in misnamed(source)]


def test_every_text_has_the_one_word() -> None:
    """No comment, message or page contains a forbidden word."""
    pages = [(p.name, p.read_text(encoding="utf-8")) for p in ROOT.glob("README.md")]
    texts = [*files(".py", *ROOMS), *files(".md", *ROOMS), *pages]
    assert [] == [f"{name}:{found}" for name, text in texts for found in misworded(text)]


@pytest.mark.parametrize("word", IDENTIFIERS)
def test_an_old_identifier_is_seen(word: str) -> None:
    """A forbidden word is found alone and between underscores, not in a word or a string."""
    assert 1 == len(misnamed(f"x = st.{word}"))
    assert 1 == len(misnamed(f"peak_{word} = 0"))
    assert [] == misnamed(f"x{word} = '{word}'")


@pytest.mark.parametrize(
    "text",
    ["# a pending dW", '"--binding"', "order.pending", "stage.input_gradient", "F: presented 7"],
)
def test_an_old_word_is_seen(text: str) -> None:
    """A forbidden word is found in a comment, a message and a page."""
    assert 1 == len(misworded(text))


def test_no_definition_is_a_verb_or_an_adjective_of_the_list() -> None:
    """No definition has a forbidden name but the listed ones, which still exist."""
    found = {
        (name, word)
        for name, source in files(".py", *ROOMS[:-1])
        if any(word in source for word in DEFINITIONS)
        for word in named(source)
        if word in DEFINITIONS
    }
    assert set(STAYS) == found


@pytest.mark.parametrize("word", DEFINITIONS)
def test_an_old_definition_is_seen(word: str) -> None:
    """A forbidden name is found as a function, a method, a field and a class."""
    for source in (
        f"def {word}(): ...",
        f"class A:\n    def {word}(self): ...",
        f"class A:\n    {word} = 1",
        f"class A:\n    {word}: int",
        f"class {word}: ...",
    ):
        assert word in list(named(source))
    assert word not in list(named(f"x = st.{word}\n{word} = 1"))


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_defined_once(name: str) -> None:
    """Two modules never give the same name to two types."""
    places = [place for place, found in definitions() if found == name]
    assert 1 == len(places), places


def test_a_schedule_has_entries_not_cells() -> None:
    """A cell is a key without its epoch; a schedule's table consists of entries."""
    found = [
        f"{name}:{line}: {word}"
        for name, source in files(".py", "qeffect/schedule", "tests/schedule")
        for line, word in identifiers(source)
        if re.search(r"(?i)(^|_)cells?(_|$)", word)
    ]
    assert [] == found


def test_slots_and_destinations_have_words_of_their_own() -> None:
    """No option has the same name for slots and for gradient destinations."""
    slots, destinations = literals("gpu_runtime", "Provisioning"), literals("gpu_runtime", "Rule")
    assert {"live", "static"} == slots
    assert "per_microbatch" in destinations
    assert not slots & destinations


def test_clauses_say_in_flight_and_spoiled() -> None:
    """No clause id contains `pending` or another old word; `unusable` describes input only."""
    assert [] == [c for c in CLAUSES if re.search("pending|unusable|ruined|presented", c)]
    in_flight = {c for c in CLAUSES if c.endswith("in-flight")}
    assert {f"{part}.in-flight" for part in ("ownership", "version", "order", "arena")} < in_flight

"""
Each guard's page has three tables: what the guard sees, what it takes on trust, what it never sees.

The table of trust consists of the sentences of `on_trust` (`test_generated_blocks_are_current`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from qeffect.guards import advice, deepspeed, megatron, pipelining, trust
from tests.deepspeed.stand_in import PipelineEngine
from tests.docs.blocks import ROOT
from tests.docs.trust_block import PAGES

GUARDS = {
    "pipelining": (pipelining.GuardedSchedule.on_trust, trust.PIPELINING),
    "deepspeed": (deepspeed.GuardedEngine.on_trust, trust.DEEPSPEED),
    "megatron": (megatron.GuardedMegatron.on_trust, trust.MEGATRON),
}
TABLES = {
    "## What it sees": "| fact | seen by | clauses |",
    "## What it takes on trust": "| taken on trust | when |",
    "## What it cannot see": "| never seen | more |",
}

ADVICE = {
    "pipelining": advice.PIPELINING_ADVICE,
    "torchtitan": advice.PIPELINING_ADVICE,
    "deepspeed": advice.DEEPSPEED_ADVICE,
    "megatron": advice.MEGATRON_ADVICE,
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))


def part(page: Path, heading: str) -> list[str]:
    """The lines below a heading, up to the next heading."""
    text = page.read_text(encoding="utf-8")
    assert f"\n{heading}\n" in text
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0].splitlines()


@each_page
@pytest.mark.parametrize("heading", TABLES)
def test_a_page_has_a_table_of_each(page: Path, heading: str) -> None:
    """Each table has at least three rows."""
    lines = part(page, heading)
    assert lines.count(TABLES[heading]) == 1
    begin = lines.index(TABLES[heading])
    rows = [line for line in lines[begin + 2 :] if line.startswith("|")]

    assert len(rows) >= 3
    assert not [line for line in lines if line.startswith("- ")]


@pytest.mark.parametrize("name", GUARDS)
def test_on_trust_says_what_the_table_says(name: str) -> None:
    """The guard's code has exactly the sentences of the table."""
    _, sentences = GUARDS[name]
    table, used, loose = name.upper(), set[str](), list[str]()
    for path in sorted((ROOT / "gpu_runtime" / "guards").glob(f"{name}*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not any(isinstance(n, ast.Name) and n.id == table for n in ast.walk(tree)):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "on_trust":
                constants = [
                    n.value
                    for statement in node.body[1:]
                    for n in ast.walk(statement)
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ]
                used |= set(constants) & sentences.keys()
                loose += [text for text in constants if len(text.split()) > 2]

    assert sentences.keys() == used
    assert [] == loose


@pytest.mark.parametrize("name", GUARDS)
def test_sentences_differ(name: str) -> None:
    """No sentence occurs twice, whatever its stage and kind."""
    _, sentences = GUARDS[name]
    said = [re.sub(r"{\w+}", "X", each.text) for each in sentences.values()]

    assert len(said) == len(set(said))


def test_what_a_guard_says_is_in_the_table() -> None:
    """Every claim that a guard prints is a sentence of the table."""
    said = deepspeed.guard(PipelineEngine()).on_trust()
    assert said
    assert set(said) <= {each.text for each in trust.DEEPSPEED.values()}


@each_page
def test_a_shown_message_has_the_guards_advice(page: Path) -> None:
    """The message in the page ends with the cause and the remedy that the guard gives."""
    (shown,) = re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    message = " ".join(shown.split())
    (clause,) = re.findall(r"^(?:\S+Refused: )?(\S+) (?:on pipeline rank|in \w+:)", message)
    said = ADVICE[page.stem][clause]

    assert f". Likely cause: {said.cause} What to do: {said.remedy}" in message

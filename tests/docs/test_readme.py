"""
The README is correct and short: its code runs and prints what its comments say.
"""

from __future__ import annotations

import contextlib
import io
import re

from tests.docs.blocks import README


def python_blocks() -> list[str]:
    """Every Python block of the README, in order."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def said_by(code: str) -> str:
    """Run a block; return its output as one line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return " ".join(out.getvalue().split())


def comments_of(code: str) -> str:
    """The output of the last print, according to the block's comments."""
    after = code[code.rindex("print(") :].splitlines()[1:]
    return " ".join(line.removeprefix("#").strip() for line in after)


def test_first_check_is_six_lines() -> None:
    """The first block is a check of at most six lines, and gives the printed refusal."""
    block = python_blocks()[0]

    code = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]

    assert len(code) <= 6
    assert said_by(block) == comments_of(block)


def test_the_embedding_ends_in_the_refusal_that_it_names() -> None:
    """The embedding runs a whole epoch and ends in the refusal that its comment names."""
    block = python_blocks()[1]

    assert "ownership.stale-reference" == said_by(block)

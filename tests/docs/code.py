"""
The code blocks of the pages, by page and language.

A ``python`` block and a ``sh`` block run as they stand. In a ``console`` block a line after ``$``
is a command, and the other lines are its output; ``...`` stands for output that is left out. Blocks
of other languages are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from tests.docs.blocks import ROOT

__all__ = ["LANGUAGES", "PAGES", "Block", "blocks", "commands", "shown"]

LANGUAGES = ("python", "sh", "console")
PAGES = tuple(
    sorted(
        page.relative_to(ROOT).as_posix()
        for room in (".", "docs", "gpu_runtime", "qeffect", "spec", "tests", "verification")
        for page in (ROOT / room).glob("*.md" if room == "." else "**/*.md")
    )
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@frozen
class Block:
    """
    One code block.

    Args:
        page: Its page, from the top of the tree.
        number: Its number among the page's blocks of its language, from 0.
        language: The word behind the opening fence, such as `python`; empty for text.
        text: Its lines.
    """

    page: str
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Page, language and number."""
        return f"{self.page} {self.language} {self.number}"


def blocks(page: str | Path, language: str) -> list[Block]:
    """Return the blocks of a page in one language, in order."""
    name = page if isinstance(page, str) else page.relative_to(ROOT).as_posix()
    found = _FENCE.findall((ROOT / name).read_text(encoding="utf-8"))
    texts = [text for kind, text in found if kind == language]
    return [Block(name, number, language, text) for number, text in enumerate(texts)]


def shown(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a console block with the parts of its output, blanks collapsed."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        pieces = re.split(r"^\.\.\.$", output, flags=re.MULTILINE)
        yield command, [" ".join(piece.split()) for piece in pieces if piece.strip()]


def commands(block: Block) -> list[str]:
    """Return the lines of a shell block without their comments and without empty lines."""
    lines = (re.sub(r"(^|\s+)#.*", "", line) for line in block.text.splitlines())
    return [line for line in lines if line.strip()]

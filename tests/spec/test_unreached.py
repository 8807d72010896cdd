"""
The chapter on clauses without a rejected log lists what the example logs leave out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qeffect.spec.clauses import CLAUSES
from qeffect.spec.document import contract
from qeffect.verification.logs.examples import UNREACHED

KERNEL = Path(__file__).parent.parent / "kernel"
HEADING = "Clauses without a rejected log"


def listed() -> list[str]:
    """The clauses at the head of the chapter's items, before each item's reason."""
    _, _, chapter = contract().partition(f". {HEADING}\n")
    items = re.findall(r"^- (.*?):\s", chapter.split("\n## ")[0], re.MULTILINE | re.DOTALL)
    return [clause for item in items for clause in re.findall(r"`([a-z]+\.[a-z-]+)`", item)]


def test_the_chapter_lists_every_clause_without_a_rejected_log() -> None:
    """Each stands there once, no other does, and all are clauses."""
    assert sorted(UNREACHED) == sorted(listed())
    assert set(CLAUSES) > UNREACHED


@pytest.mark.parametrize("clause", sorted(UNREACHED))
def test_the_tests_of_the_kernel_show_it_instead(clause: str) -> None:
    """As the chapter says, a test of the kernel names the clause."""
    tests = [path.read_text(encoding="utf-8") for path in sorted(KERNEL.glob("test_*.py"))]

    assert any(f'"{clause}"' in text for text in tests)

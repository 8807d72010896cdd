"""
The contributor's tour leads somewhere: its files and commands exist, and it stays short.
"""

from __future__ import annotations

import re

from qeffect.cli import parser
from tests.docs.blocks import ROOT

TOUR = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", TOUR)


def test_every_file_that_is_named_exists() -> None:
    """Paths are whole, from the top of the tree, so that a reader can open them."""
    paths = [code for code in CODE if re.fullmatch(r"\.?[a-z_]+/[\w./-]*", code)]

    assert [] == [path for path in paths if not (ROOT / path).exists()]
    assert len(paths) > 20


def test_every_command_that_is_named_exists() -> None:
    """``qeffect`` and ``make`` have the words that the tour types after them."""
    known = parser().format_help()
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = {code.split()[1] for code in CODE if code.startswith("qeffect ")}
    made = {t for code in CODE if code.startswith("make ") for t in code.split()[1:]}

    assert {"check", "prove", "runtime"} <= commands
    assert [] == [c for c in commands if not re.search(rf"^ +{c} ", known, re.MULTILINE)]
    assert {"test", "slow", "lint", "types", "check"} <= made
    assert [] == [t for t in made if not re.search(rf"^{t}:", targets, re.MULTILINE)]


def test_the_tour_is_two_pages() -> None:
    """Who adds a paragraph takes one out."""
    assert len(TOUR.split()) < 1_500

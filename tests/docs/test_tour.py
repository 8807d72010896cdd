"""
The contributor's tour names files and commands that exist, and stays short.
"""

from __future__ import annotations

import ast
import re

from qeffect.cli import parser
from tests.docs.blocks import ROOT

TOUR = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", TOUR)


def test_every_file_that_is_named_exists() -> None:
    """Paths are complete, from the top of the tree, so that a reader can open them."""
    paths = [code for code in CODE if re.fullmatch(r"\.?[a-z_]+/[\w./-]*", code)]

    assert [] == [path for path in paths if not (ROOT / path).exists()]
    assert len(paths) > 20


def test_every_command_that_is_named_exists() -> None:
    """``qeffect`` and ``make`` accept the arguments that the tour names."""
    known = parser().format_help()
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = {code.split()[1] for code in CODE if code.startswith("qeffect ")}
    made = {t for code in CODE if code.startswith("make ") for t in code.split()[1:]}

    assert {"check", "prove", "runtime"} <= commands
    assert [] == [c for c in commands if not re.search(rf"^ +{c} ", known, re.MULTILINE)]
    assert {"test", "slow", "lint", "types", "check"} <= made
    assert [] == [t for t in made if not re.search(rf"^{t}:", targets, re.MULTILINE)]


def test_the_way_of_a_step_names_what_its_files_define() -> None:
    """Each class, method and function from the command to the launch is in a named file."""
    section = TOUR.split("## The way of a training step")[1].split("\n## ")[0]
    named = re.findall(r"`([^`]+)`", section)
    files = [ROOT / name for name in named if name.endswith(".py")]
    names = {name for name in named if re.fullmatch(r"[A-Za-z_]+(\.[a-z_]+)?", name)}
    defined = {"check_forward", "check_commit", "eager"}  # the contract's calls, and a mode
    for node in (n for file in files for n in ast.parse(file.read_text("utf-8")).body):
        inner = node.body if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
            defined |= {f"{node.name}.{each.name}" for each in inner if hasattr(each, "name")}

    assert len(files) > 15
    assert names - defined == set()
    assert {"Trainer.run", "OneLaunch.step", "GraphExecutor.forward"} <= names


def test_the_independent_oracle_is_named() -> None:
    """The tour names the oracle, and says that it does not read the contract."""
    oracle = (ROOT / "verification" / "walks" / "oracle.py").read_text("utf-8")
    assert "verification/walks/oracle.py" in CODE
    assert "from the paper alone" in " ".join(TOUR.split())
    assert "from the paper alone" in oracle
    assert "import Contract" not in oracle


def test_the_tour_is_two_pages() -> None:
    """Whoever adds a paragraph must remove one."""
    assert len(TOUR.split()) < 1_500

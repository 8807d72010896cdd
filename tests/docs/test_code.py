"""
Every code block of every page runs as printed; lines that do not run are listed with a reason.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qeffect.cli import parser
from tests.docs.blocks import ROOT
from tests.docs.code import LANGUAGES, PAGES, Block, blocks, commands, shown
from tests.torch_release import DEFERS_RECEIVES, LACKS_DEFERRED

#: Python blocks that another test runs as they stand, with what it asserts beside.
ELSEWHERE = {
    "README.md python 0": "tests/docs/test_readme.py::test_first_check_is_six_lines",
    "README.md python 1": (
        "tests/docs/test_readme.py::test_the_embedding_ends_in_the_refusal_that_it_names"
    ),
    "README.md python 2": "tests/ranks/test_guard.py::test_the_example_runs",
    "docs/deepspeed.md python 0": (
        "tests/deepspeed/test_real_engine.py::test_the_pages_example_runs"
    ),
    "docs/megatron.md python 0": "tests/megatron/test_real_core.py::test_the_pages_example_runs",
    "docs/torchtitan.md python 0": (
        "tests/torchtitan/test_real_trainer.py::test_the_pages_example_runs"
    ),
    "gpu_runtime/README.md python 0": (
        "tests/runtime/test_embedding.py::test_the_documented_loop_trains"
    ),
    "gpu_runtime/README.md python 1": (
        "tests/ranks/test_command.py::test_the_examples_of_the_page_run"
    ),
    "gpu_runtime/README.md python 2": (
        "tests/ranks/test_command.py::test_the_examples_of_the_page_run"
    ),
    "tests/failures/megatron_batched_messages.md python 0": (
        "tests/megatron/test_found.py::test_a_reproducer_prints_what_its_text_says"
    ),
    "tests/failures/megatron_stale_weights.md python 0": (
        "tests/megatron/test_found.py::test_a_reproducer_prints_what_its_text_says"
    ),
    "tests/failures/torch_deferred_receives.md python 0": (
        "tests/failures/test_torch_deferred_receives.py::test_reproducer"
    ),
}
#: Shell lines that are not run here, by how they begin; their options are parsed all the same.
NOT_RUN = {
    "make ": "takes minutes; continuous integration runs both",
    "qeffect explore": "takes minutes; part of `make check`",
    "qeffect prove": "takes minutes; part of `make check`",
    "qeffect ranks": "takes minutes; part of `make check`",
    "qeffect check --deepspeed": "needs deepspeed; tests/deepspeed has it",
    "qeffect bench": "takes minutes; tests/verification/test_bench.py has its report",
    "qeffect runtime compare": "needs a GPU",
    "qeffect runtime report": "needs GPUs",
    "torchrun --nproc-per-node 2 -m qeffect runtime report": "needs GPUs",
    "for n in ": "needs GPUs",
    "python -m pytest -m gpu": "needs a GPU",
}
#: Shell blocks that take more than ten seconds, with what does.
SLOW = {
    "gpu_runtime/README.md sh 1": "trains in six processes, one after another",
    "qeffect/README.md sh 0": "starts every command, one after another",
    "qeffect/README.md sh 1": "starts a pipeline of two processes three times",
}
#: Shell blocks whose commands other tests of the profile ci run as well.
NIGHTLY = {
    "gpu_runtime/README.md sh 2": "starts two trainings, one after the other",
    "gpu_runtime/README.md sh 0": "starts a pipeline of two processes",
    "gpu_runtime/README.md sh 3": "starts two agents with a process each",
    "qeffect/schedule/README.md console 0": "asks torch for a schedule, with each choice of queues",
    "tests/failures/torch_deferred_receives.md console 0": "starts a pipeline of two processes",
}
#: Shell blocks that start trainings or pipelines, which the profile dev leaves out.
LONG = {
    "README.md sh 1": "starts a pipeline of two processes",
}


def marks(block: Block) -> list[pytest.MarkDecorator]:
    """The marks that exclude a block from short runs."""
    kinds = ((SLOW, pytest.mark.slow), (NIGHTLY, pytest.mark.nightly), (LONG, pytest.mark.ci))
    return [mark for names, mark in kinds if block.name in names]


def every(language: str) -> list[Block]:
    """The blocks of all pages in one language."""
    return [block for page in PAGES for block in blocks(page, language)]


def is_run(line: str) -> bool:
    """Whether a shell line is run here."""
    return not line.startswith(tuple(NOT_RUN))


def checked(line: str, block: Block) -> str:
    """A shell line that ends the script unless its exit code is 0; 1 if the page says `refused`."""
    if not re.search(rf"^{re.escape(line)}\s+# refused", block.text, re.MULTILINE):
        return line
    return f"code=0; {line} || code=$?; test $code -eq 1"


def parametrized(language: str) -> list[object]:
    """The blocks of a language as parameters, the long ones marked."""
    return [pytest.param(block, id=block.name, marks=marks(block)) for block in every(language)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with links to the whole tree, in which commands may write."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    programs = tmp_path / ".programs"
    programs.mkdir()
    for name, module in (
        ("qeffect", "qeffect"),
        ("torchrun", "torch.distributed.run"),
        ("python", ""),
    ):
        how = f"-m {module} " * bool(module)
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {how}"$@"\n')
        program.chmod(0o755)
    return tmp_path


def run(folder: Path, script: str) -> str:
    """Run a script of the shell; return its standard output."""
    environment = {
        **os.environ,
        "PATH": f"{folder / '.programs'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout if done.returncode == 0 else f"{done.stdout}\nexit code 1"


@pytest.mark.parametrize("block", parametrized("sh"))
def test_a_shell_block_runs(block: Block, folder: Path) -> None:
    """Every line not listed above ends with exit code 0, or 1 if it says `refused`."""
    script = "\n".join(checked(line, block) for line in commands(block) if is_run(line))
    assert "exit code 1" not in run(folder, f"set -e\n{script}")


@pytest.mark.parametrize("block", parametrized("console"))
def test_a_console_block_shows_its_output(block: Block, folder: Path) -> None:
    """Every shown part of the output is printed, in this order."""
    for command, pieces in shown(block):
        if "--defer-receives" in command and not DEFERS_RECEIVES:
            pytest.skip(LACKS_DEFERRED)
        said, at = " ".join(run(folder, command).split()), 0
        for piece in pieces:
            assert piece in said[at:], command
            at = said.index(piece, at) + len(piece)


@pytest.mark.parametrize("block", parametrized("python"))
def test_a_python_block_runs(block: Block, tmp_path: Path) -> None:
    """Here, or in the test listed for it."""
    if (where := ELSEWHERE.get(block.name)) is not None:
        path, _, name = where.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
        return
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block.text, block.name, "exec"), {"__name__": "page"})


def typed(line: str) -> list[list[str]]:
    """The arguments of each `qeffect` command in a shell line."""
    found = []
    for part in re.split(r"; (?:do )?|&& ", line):
        words = shlex.split(re.sub(r"\$\w+", "NAME", part))
        if "qeffect" in words:
            found.append(words[words.index("qeffect") + 1 :])
    return found


@pytest.mark.parametrize("line", [n for b in every("sh") for n in commands(b) if not is_run(n)])
def test_a_line_that_is_not_run_has_options_that_exist(line: str) -> None:
    """The parser accepts every `qeffect` command in it."""
    for words in typed(line):
        parser().parse_args(words)


def test_nothing_is_named_that_no_page_has() -> None:
    """The lists above name only blocks and lines that exist."""
    names = {block.name for language in LANGUAGES for block in every(language)}
    lines = [line for block in every("sh") for line in commands(block)]

    assert names >= {*ELSEWHERE, *SLOW, *NIGHTLY, *LONG}
    assert [] == [n for n in NOT_RUN if not any(line.startswith(n) for line in lines)]

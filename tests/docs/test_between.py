"""
The list of code between the public calls and the proved functions is complete and correct.

Every module that a contract imports is either proved, or has its functions in one row of the list;
a new function fails the test until it is put into a row.
"""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.docs.blocks import ROOT

PACKAGE: Final = ROOT / "qeffect"
PAGE: Final = PACKAGE / "README.md"
HEADING: Final = "## Between the public calls and the proved functions"

#: What is proved, or is written in words that the proofs read: no row has it.
PROVED: Final = ("relations.*", "engine.composed.*")

#: The functions of each row, by how its first column begins. Where two rows have one, the longer
#: pattern counts.
ROWS: Final[dict[str, tuple[str, ...]]] = {
    "defaults of arguments": (
        "calls.checks.Checks.check_refresh",
        "calls.checks.Checks.check_evaluation",
        "calls.checks.Checks.check_forward",
        "calls.checks.Checks.check_dgrad",
        "calls.checks.Checks.check_wgrad",
        "calls.checks.Checks._writes",
        "calls.restarts.RestartCalls.invalidate",
        "ledgers.epochs.*",
        "calls.epochs.EpochCalls.finalize",
        "calls.epochs.EpochCalls.commit_epoch",
        "calls.epochs.EpochCalls.check_update",
        "calls.epochs.EpochCalls.fail",
        "calls.epochs.EpochCalls.move_scales",
        "calls.epochs.EpochCalls.next_walk",
        "calls.readers.ReaderCalls.start_weights_read",
        "calls.readers.ReaderCalls.finish_weights_read",
        "calls.readers.ReaderCalls.start_gradients_read",
        "calls.readers.ReaderCalls.finish_gradients_read",
    ),
    "the tapes of a grouped dW": ("ledgers.groups.*",),
    "which slots are free": ("ledgers.pool.*", "engine.freelist.*"),
    "evidence": (
        "calls.redemption.Redemption.commit",
        "calls.redemption.Redemption.abort",
        "calls.redemption.Redemption._abort",
        "evidence.*",
        "tickets.*",
    ),
    "the ends of transfers": (
        "calls.tapes.TapeCalls.reserve",
        "calls.tapes.TapeCalls.skip",
        "calls.tapes.TapeCalls.bind",
        "calls.tapes.TapeCalls.post_receive",
        "calls.tapes.TapeCalls.finish_receive",
        "calls.tapes.TapeCalls.read",
        "calls.tapes.TapeCalls.finish_read",
        "calls.tapes.TapeCalls.drop",
        "ledgers.tapes.*",
    ),
    "the calls `purge`": (
        "calls.tapes.TapeCalls.purge",
        "ledgers.tapes.Tapes.purge",
        "calls.epochs.EpochCalls.shorten_walk",
        "ledgers.tapes.Tapes.shorten",
        "calls.epochs.EpochCalls.check_commit",
        "calls.restarts.RestartCalls.check_checkpoint",
        "ledgers.restarts.Restarts.check_checkpoint",
    ),
    "names of streams": (
        "calls.streams.StreamCalls.submit",
        "calls.streams.StreamCalls.enter",
        "calls.streams.StreamCalls.join",
        "calls.streams.StreamCalls.wait",
        "calls.streams.StreamCalls.drain",
        "calls.queries.Queries.link",
        "calls.epochs.EpochCalls.default_reader",
        "calls.epochs.EpochCalls.*_reduction",
        "ledgers.streams.*",
        "ledgers.epochs.Epochs._index",
        "ledgers.epochs.Epochs.*reduction",
    ),
    "the configuration": (
        "contract.Contract.__init__",
        "contract.Contract.__reduce_ex__",
        "contract._collection",
        "stage_config.*",
        "process_layout.*",
        "destinations.*",
        "sharing.*",
        "order_search.*",
        "destination_registry.*",
        "local_edges.*",
        "engine.stage.*",
    ),
    "restarts": (
        "calls.restarts.RestartCalls.checkpoint",
        "calls.restarts.RestartCalls.restore",
        "checkpoint.*",
        "configuration.*",
        "ledgers.restarts.*",
    ),
    "checks of the classes and ranges": ("arguments.*",),
    "the check that only one call": ("threads.*",),
    "context managers": (
        "action_blocks.*",
        "calls.blocks.Blocks.refresh",
        "calls.blocks.Blocks.forward",
        "calls.blocks.Blocks.dgrad",
        "calls.blocks.Blocks.wgrad",
        "calls.blocks.Blocks.update",
        "calls.blocks.Blocks.evaluation",
    ),
    "observers": (
        "calls.queries.Queries.observer",
        "calls.queries.Queries.configuration",
        "calls.queries.Queries.epoch",
        "calls.queries.Queries.incarnation",
        "calls.queries.Queries.token",
        "calls.queries.Queries.live",
        "calls.queries.Queries.half_updated",
        "calls.queries.Queries.reference",
        "calls.queries.Queries.outstanding",
        "calls.queries.Queries.first_writer",
        "calls.queries.Queries.first_of_tied",
        "calls.queries.Queries.snapshot",
        "ledgers.runner.*",
        "ledgers.tapes.Tapes.live",
        "ledgers.tapes.Tapes.outstanding",
        "ledgers.tapes.Tapes._ticket",
        "ledgers.tapes.Tapes.reference",
        "keys.*",
    ),
    "the text of a refusal": ("explain.*", "explanations.*", "refusals.*", "text.*"),
    "a repeated step": (
        "steps.*",
        "ledgers.recorded_steps.*",
        "ledgers.step_trial.*",
        "calls.steps.StepCalls.step_state",
        "calls.steps.StepCalls.record_step",
        "calls.steps.StepCalls.check_step",
        "calls.steps.StepCalls.withdraw_step",
        "calls.steps.StepCalls.commit_step",
    ),
    "the comparison of the device's counts": (
        "counts.*",
        "ledgers.expected_counts.*",
        "calls.epochs.EpochCalls.committed_counts",
        "calls.epochs.EpochCalls.counts_awaited",
        "calls.epochs.EpochCalls.present_counts",
        "calls.epochs.EpochCalls._require_counts",
        "calls.epochs.EpochCalls._ask_counted",
        "ledgers.restarts.Restarts._require_compared",
    ),
    "the contract's memory": ("engine.concrete_memory.*", "engine.compose.*"),
    "the recorder": ("log.*",),
}


def _path(module: str) -> Path | None:
    plain = PACKAGE / f"{module.replace('.', '/')}.py"
    package = PACKAGE / module.replace(".", "/") / "__init__.py"
    return next((path for path in (plain, package) if path.exists()), None)


def _imported(module: str) -> list[str]:
    """The modules of the kernel that a module of the kernel imports."""
    path = _path(module)
    assert path is not None
    package = module.split(".")[: None if path.name == "__init__.py" else -1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            found += [".".join(base), *(".".join([*base, a.name]) for a in node.names)]
    return [name for name in found if name and _path(name)]


@cache
def functions() -> frozenset[str]:
    """Every function of every module that a contract or its log imports."""
    modules, found = {"contract", "log.recorder", "log.replayer"}, set()
    while waiting := [name for m in modules for name in _imported(m) if name not in modules]:
        modules.update(waiting)
    for module in modules:
        path = _path(module)
        assert path is not None
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            of = f"{module}.{node.name}." if isinstance(node, ast.ClassDef) else ""
            found |= {f"{of}{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}
            if isinstance(node, ast.FunctionDef):
                found.add(f"{module}.{node.name}")
    return frozenset(found)


def rows_of(function: str) -> list[str]:
    """The rows that list a function, the most specific first."""
    found = [
        (len(pattern), row)
        for row, patterns in ROWS.items()
        for pattern in patterns
        if fnmatchcase(function, pattern)
    ]
    return [row for _, row in sorted(found, reverse=True)]


def listed() -> list[tuple[str, ...]]:
    """The page's rows."""
    _, _, chapter = PAGE.read_text(encoding="utf-8").partition(f"{HEADING}\n")
    lines = [line for line in chapter.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def test_a_contract_imports_what_is_looked_at() -> None:
    """The walk over imports finds the known parts."""
    assert {
        "calls.checks.Checks.check_forward",
        "ledgers.pool.Pool.reclaim",
        "engine.composed.forward.check_forward",
        "relations.order.check_forward_guards",
        "log.player.Player.play",
    } <= functions()


def test_every_function_is_proved_or_in_a_row() -> None:
    """Every function that a call runs is proved or in a row."""
    proved = {f for f in functions() for pattern in PROVED if fnmatchcase(f, pattern)}
    homeless = sorted(f for f in functions() - proved if not rows_of(f))

    assert [] == homeless
    assert not [f for f in proved if rows_of(f)]


@pytest.mark.parametrize("row", ROWS)
def test_every_pattern_of_a_row_is_of_something(row: str) -> None:
    """Every pattern of a row matches a function that exists."""
    for pattern in ROWS[row]:
        assert any(fnmatchcase(f, pattern) for f in functions()), pattern


def test_the_page_has_these_rows() -> None:
    """In this order; the files of the code and of its tests exist."""
    assert len(ROWS) == len(listed())
    for beginning, (what, where, tests) in zip(ROWS, listed(), strict=True):
        assert what.startswith(beginning)
        for folder, cell in ((PACKAGE, where), (ROOT / "tests", tests)):
            named = re.findall(r"`([^`]+)`", cell)
            assert named
            for name in named:
                assert (folder / name).exists(), name


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_the_modules_of_its_functions(row: str) -> None:
    """The files that a row names are those of its functions, if it names single files."""
    (where,) = (cell for what, cell, _ in listed() if what.startswith(row))
    named = re.findall(r"`([^`]+)`", where)
    own = {f for f in functions() if rows_of(f)[:1] == [row]}
    assert own
    for name in named:
        at = name.removesuffix(".py").rstrip("/").replace("/", ".")
        assert any(f.startswith(f"{at}.") for f in own), name

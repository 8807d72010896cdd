"""
Ctrl-C in the parts of `qeffect runtime report`: one line, exit code 130, and no remaining process.

Two parts are left out: `streams` needs a device, and `plots` ends at once.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.test_interrupts import (  # noqa: F401 - a fixture
    ended_with_children,
    processes,
    require_promise,
    said_nothing_else,
    started,
    wait_for,
)
from tests.training.helpers import SMALL, text

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs /proc, to find child processes"
)

#: Words of each part that starts processes, and how many of them run at a time.
PARTS = {
    "scale --device cpu --cells tiny --compared --rounds 100000": 2,
    "tables --device cpu --cells tiny-m4 --parts steps --rounds 100000": 2,
    "peers --device cpu --modes ours --cells tiny-m2 --rounds 100000": 2,
    "restarts --schedules il --same": 2,
    "kills --kills 1": 4,
    "bench --device cpu --columns native ours_accumulate --rounds 100000": 2,
    "pools --device cpu --steps 100000": 5,
    "probes --device cpu --only addresses": 1,
}
#: Parts whose processes differ from each other in how they are started, or end in another way.
FEW = ("scale", "bench", "probes")
#: Parts of which the profile ci signals the group: killed runs, and processes beside each other.
GROUPS = ("kills", "peers")
#: The part that the profile dev interrupts.
EVERYWHERE = "scale"
CURVES = (
    SMALL.format(vocabulary=128, layers=2)
    + """[parallel]
pp = 1
[data]
train = "train.npy"
held_out = "train.npy"
[run]
steps = 100000
log_every = 1
evaluate_every = 1
evaluate_windows = 1
"""
)


def every_part() -> list[object]:
    """Each part, the signal to the process alone and to its group; most of them only nightly."""
    return [
        pytest.param(
            words,
            whole_group,
            id=f"{words.split()[0]}-{'group' if whole_group else 'alone'}",
            marks=()
            if words.startswith(EVERYWHERE) and not whole_group
            else pytest.mark.ci
            if words.startswith(GROUPS if whole_group else FEW)
            else pytest.mark.nightly,
        )
        for words in PARTS
        for whole_group in (False, True)
    ]


@pytest.mark.ci
@pytest.mark.parametrize(("words", "whole_group"), every_part())
def test_a_part_ends_with_the_processes_that_it_started(
    words: str,
    whole_group: bool,
    processes: list[subprocess.Popen[str]],  # noqa: F811
) -> None:
    """Whatever its processes do at that moment; none of them prints."""

    def once() -> float:
        process = started(f"runtime report {words} --quiet")
        processes.append(process)
        return ended_with_children(process, PARTS[words], whole_group)

    require_promise(once)


@pytest.mark.parametrize(
    "whole_group",
    [
        pytest.param(False, id="alone", marks=pytest.mark.nightly),
        pytest.param(True, id="group", marks=pytest.mark.ci),
    ],
)
def test_curves_end_while_they_train(
    whole_group: bool,
    tmp_path: Path,
    processes: list[subprocess.Popen[str]],  # noqa: F811
) -> None:
    """In the process itself; the report of the runs that had ended stays."""
    text(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(CURVES)

    def once() -> float:
        out = tmp_path / f"out{len(processes)}.json"
        process = started(f"runtime report curves {config} --runs native:il:0 --out {out}")
        processes.append(process)
        wait_for(process, "native:il:0: ")
        return said_nothing_else(process, "native:il:0: ", whole_group)

    require_promise(once)

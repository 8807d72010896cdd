"""
`qeffect runtime report guards` prints a line for each schedule, from one run. The tests assert no
times.
"""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from qeffect.cli import main
from qeffect.gpu_runtime.lab.commands import guards


def test_a_line_for_each_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command makes its process group and takes it down; collection is as before."""
    found: list[guards.Price] = []
    measure, before = guards.measure, (gc.isenabled(), torch.get_num_threads())
    monkeypatch.setattr(guards, "measure", lambda rounds: found.extend(measure(rounds)) or found)
    assert 0 == main(["runtime", "report", "guards", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()

    assert list(guards.SCHEDULES) == [line.split()[0] for line in lines]
    assert all(
        "times torch's" in line and "times the contract's check and commit" in line
        for line in lines
    )
    assert before == (gc.isenabled(), torch.get_num_threads())
    assert not dist.is_initialized()
    actions = {each.schedule: each.actions for each in found}
    assert 2 * 8 == actions["ScheduleGPipe"]  # F and B of each microbatch
    assert 2 * 2 * 8 <= actions["ScheduleInterleaved1F1B"]  # the entries of a row
    assert actions["ScheduleInterleaved1F1B"] < actions["ScheduleInterleavedZeroBubble"]
    assert all(each.torch_us > 0 and each.kernel_us > 0 for each in found)


def test_no_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that names the option."""
    assert 2 == main(["runtime", "report", "guards", "--rounds", "0"])
    assert "--rounds must be at least 1, found 0" in capsys.readouterr().err


@pytest.mark.ci
def test_the_old_command_says_its_new_name_and_works() -> None:
    """`python -m qeffect.guards.price` is a name of the last release."""
    old = [sys.executable, "-W", "always::DeprecationWarning", "-m", "qeffect.guards.price"]
    done = subprocess.run([*old, "--rounds", "0"], capture_output=True, text=True, check=False)

    assert 2 == done.returncode
    assert "qeffect.guards.price is now qeffect.gpu_runtime.lab.commands.guards;" in done.stderr
    assert "--rounds must be at least 1, found 0" in done.stderr

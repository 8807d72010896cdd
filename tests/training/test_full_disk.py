"""
A save on a disk that is really full, with the command as it is shipped.

If the machine does not let the test mount a file system, the test is skipped and shows nothing
about a full disk; `test_saves.py` simulates a full disk with a limit on file sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.rank_logs import replayed_run

pytestmark = pytest.mark.ci


def test_a_full_disk_costs_no_checkpoint(tmp_path: Path) -> None:
    """Each failed save is reported and leaves no file. Once there is space again, the run
    resumes."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.training.full_disk", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    if "not_permitted" in found[0]:
        pytest.skip(f"cannot mount a small disk to fill: {found[0]['not_permitted']}")
    full, behind, after = found
    for one in (full, behind):
        assert one["code"] == 2, one
        assert one["held"] == [".lock", "status.json", "step-00000001"], one
        assert "No space left on device" in one["said"], one
        assert "internal error" not in one["said"], one
        assert "the newest is " in one["said"], one
    assert "step 1  NOT SAVED: " in full["said"]
    for number in (2, 3):
        place = tmp_path / "kept" / f"step-0000000{number}"
        assert f"{place} was not saved: rank 0: " in behind["said"], behind
    assert after["code"] == 0, after
    assert after["held"] == [".lock", "status.json", "step-00000003"]
    assert "from step 1 on" in after["said"]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in log if "loss" in line]
    assert len(losses) == 3 + 2 + 2
    assert len(set(losses)) == 3  # every time the same losses
    assert replayed_run(tmp_path / "logs").commits == len(losses)

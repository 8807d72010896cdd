"""`qeffect runtime pipeline` under torchrun, and what it says where it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qeffect.cli import main
from qeffect.schedule.tables import read_fixture, write_table

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command on as many ranks."""
    command = [*TORCHRUN, str(ranks), "-m", "qeffect", "runtime", "pipeline", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_torchrun_trains_replicas_with_the_bits_of_torchs_pipeline(tmp_path: Path) -> None:
    """PP=2 x DP=2: the command a person types, its logs, and one answer from rank 0."""
    small = ("--hidden", "32", "--ffn", "64", "--sequence", "16", "--steps", "3")
    done = torchrun(
        4, "--dp", "2", "--compare", "--event-logs", str(tmp_path / "logs"), "--json", *small
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().splitlines()
    data = json.loads(line)
    assert data["verdict"] == "accepted"
    assert all(total["compared"] and not total["differ"] for total in data["categories"].values())
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == [f"rank{n}.jsonl" for n in range(4)]
    for rank, log in enumerate(logs):
        assert json.loads(log.read_text().splitlines()[0])["rank"] == rank
        assert main(["replay", str(log)]) == 0


@pytest.mark.parametrize(
    ("ranks", "argv", "words"),
    [
        (2, ["--pp", "4"], "2 processes were started for --pp 4 --dp 1, which takes 4"),
        (2, ["--schedule", "TABLE"], "is a table of 4 ranks, --pp is 2"),
        (2, ["--device", "cuda"], "no NCCL"),
    ],
)
def test_what_cannot_run_is_one_line_of_rank_0(
    ranks: int, argv: list[str], words: str, tmp_path: Path
) -> None:
    """Exit code 2, and no rank waits for another."""
    table = tmp_path / "four.csv"
    table.write_text(write_table(read_fixture("ScheduleZBVZeroBubble_pp4_vpp2_m8.comms.csv")))
    done = torchrun(ranks, *(str(table) if word == "TABLE" else word for word in argv))
    said = [line for line in done.stderr.splitlines() if line.startswith("qeffect: ")]
    assert len(said) == 1
    assert words in said[0]
    assert "exitcode  : 2" in done.stderr
    assert done.stdout.strip() == ""


def test_without_torchrun_the_command_says_how_to_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One process alone has no rank."""
    assert main(["runtime", "pipeline"]) == 2
    assert "start the ranks with torchrun" in capsys.readouterr().err

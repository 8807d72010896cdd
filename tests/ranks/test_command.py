"""`qeffect runtime pipeline` under torchrun, and its error messages where it cannot run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.lab.commands import pipeline
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.report import UnusableError
from qeffect.schedule.tables import read_fixture, write_table
from tests.docs.code import blocks
from tests.ranks import bodies
from tests.ranks.ranks import launch

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command on as many ranks."""
    command = [*TORCHRUN, str(ranks), "-m", "qeffect", "runtime", "pipeline", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.ci
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
    written = sorted((tmp_path / "logs").iterdir())
    ranks = [str(log) for log in written if log.name.endswith(".ranks.jsonl")]
    assert len(ranks) == 4
    assert main(["replay", *ranks]) == 0
    logs = [log for log in written if str(log) not in ranks]
    assert [log.name for log in logs] == [f"rank{n}.jsonl" for n in range(4)]
    for rank, log in enumerate(logs):
        assert json.loads(log.read_text().splitlines()[0])["rank"] == rank
        assert main(["replay", str(log)]) == 0


@pytest.mark.nightly
def test_torchrun_clips_and_writes_one_trace_of_all_ranks(tmp_path: Path) -> None:
    """No option is taken by torchrun for one of its own; rank 0 writes the file."""
    small = ("--hidden", "32", "--ffn", "64", "--sequence", "16", "--steps", "2")
    file = tmp_path / "trace.json"
    clip = ("--clip-norm", "0.01", "--skip-nonfinite")
    done = torchrun(2, "--trace", str(file), *clip, "--json", *small)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().splitlines()
    norms = json.loads(line)["norms"]
    assert [norm["skipped"] for norm in norms] == [False, False]
    assert all(0 < norm["factor"] < 1 for norm in norms)
    events = json.loads(file.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2, 3}  # and two that are simulated
    assert any(e["ph"] == "f" for e in events)


def test_what_cannot_run_is_one_line_of_rank_0(tmp_path: Path) -> None:
    """Exit code 2 on every rank, one line from the first, and no rank waits for another."""
    table = tmp_path / "four.csv"
    table.write_text(write_table(read_fixture("ScheduleZBVZeroBubble_pp4_vpp2_m8.comms.csv")))
    swapped = tmp_path / "swapped.csv"
    swapped.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n")
    cases: list[tuple[list[str], int | None, str]] = [
        (["--pp", "4"], None, "expected 4 processes for --pp 4 --dp 1, found 2"),
        (["--schedule", str(table)], None, "is a table for 4 ranks, but --pp is 2"),
        (["--schedule", str(swapped)], None, "schedule."),
        (["--schedule", "zigzag"], None, "unknown schedule class 'zigzag'"),
        (["--vpp", "3"], None, "2 stages per rank; expected vpp=2"),
        (["--device", "cuda"], None, "this torch has no NCCL"),
        (["--one-launch"], 2, "--one-launch makes a step one CUDA graph"),
        (["--amax", "replicas"], 2, "--amax replicas shares amaxes between replicas"),
        (["--clip-norm", "-1"], 2, "clip_norm is -1.0; expected a positive finite number"),
        (
            ["--clip-norm", "1", "--compare"],
            2,
            "--clip-norm and --skip-nonfinite cannot be used with",
        ),
        (["--trace", str(tmp_path / "no" / "t")], 2, "there is no folder"),
        (["--device", "cuda"], 1, "rank 1 wants GPU 1 (counted from 0) of this host, which has 1"),
    ]
    (tmp_path / "said").mkdir()
    typed = [(argv, gpus) for argv, gpus, _ in cases]
    said = launch(2, tmp_path / "said", bodies.typed, typed)
    assert said.codes == [0, 0]
    for n, (_, _, words) in enumerate(cases):
        (code, out, err), second = (said.words[rank][n] for rank in range(2))
        assert second == [2, "", ""]
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert words in line


def test_stages_that_do_not_meet_are_named_on_every_rank(tmp_path: Path) -> None:
    """Before a group is made: no message of another size is ever posted."""
    said = launch(2, tmp_path, bodies.unmet)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    assert "stage 0 outputs (16, 1, 32)" in said.words[0]
    assert "stage 1 expects (16, 1, 64)" in said.words[0]


def test_a_mistake_in_building_stages_is_heard_by_every_rank(tmp_path: Path) -> None:
    """Exceptions of any class: no rank waits for an ended rank; the failed rank keeps its cause."""
    said = launch(2, tmp_path, bodies.unbuilt)
    assert said.codes == [0, 0]
    words = "rank 1 cannot build its stages: KeyError: 'no\\nsuch layer'"
    assert said.words == {0: [words, "NoneType"], 1: [words, "KeyError"]}


@pytest.mark.parametrize("device", ["gpu", "cuda:0", "CPU", None])
def test_a_rank_runs_on_cpu_or_cuda(device: Any) -> None:
    """Anything else was taken for a CPU."""
    with pytest.raises(BackendError, match=r"^device is .*; expected 'cpu' or 'cuda'"):
        join(device)


def test_without_torchrun_the_command_says_how_to_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One process alone has no rank."""
    assert main(["runtime", "pipeline"]) == 2
    assert "start the ranks with torchrun" in capsys.readouterr().err


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one's own and its checkpoint, as written: three steps, each microbatch's loss."""
    _, pipeline, checkpoints = blocks("gpu_runtime/README.md", "python")
    monkeypatch.chdir(tmp_path)
    said = launch(2, tmp_path, bodies.example, pipeline.text + checkpoints.text)
    assert said.codes == [0, 0]
    lines = [line.split() for words in said.words.values() for line in words.splitlines()]
    assert [line[:2] for line in lines] == [[str(s), str(m)] for s in range(3) for m in range(4)]
    assert ["step-00000003"] == [path.name for path in (tmp_path / "run/checkpoints").iterdir()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trace", "t.json"], "--one-launch cannot be used with --trace: the host cannot see"),
        (["--eager"], "--one-launch cannot be used with --eager: one launch per step needs"),
        (["--compare"], "--one-launch cannot be used with --compare: here only replays"),
        (["--dp", "2"], None),
        (["--dp", "2", "--amax", "replicas"], None),
    ],
)
def test_one_launch_is_refused_by_name_where_it_says_nothing(
    options: list[str], said: str | None
) -> None:
    """Over replicas it does."""
    parser = argparse.ArgumentParser()
    pipeline.add_pipeline_arguments(parser)
    given = parser.parse_args(["--one-launch", "--device", "cuda", *options])
    if said is None:
        pipeline._require_together(given)
        return
    with pytest.raises(UnusableError, match=said):
        pipeline._require_together(given)

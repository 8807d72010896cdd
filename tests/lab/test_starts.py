"""Starts of ranks: processes that time, and then other processes that profile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.runner import starts as module
from qeffect.gpu_runtime.lab.runner.profiles import add_profiles
from qeffect.gpu_runtime.lab.runner.ranks import RankExits
from qeffect.gpu_runtime.lab.runner.starts import RankStart, RankStarts
from qeffect.gpu_runtime.lab.sides.language import PeerRow, PeerSettings
from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.report import UnusableError
from tests.ports import free_port

from . import start_bodies as bodies

COMMIT = "0" * 40


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RankStart], list[str]]:
    """Two ranks, started to be timed and then to be profiled; both starts, and the notes."""
    ranks = RankStarts(2, tmp_path_factory.mktemp("ranks"))
    notes: list[str] = []
    timed = ranks.start(bodies.profiler_and_meeting, note=notes.append)
    return [timed, ranks.start(bodies.profiler_and_meeting, profiles=True)], notes


@pytest.mark.ci
def test_only_the_second_start_can_profile_and_it_is_another_process(
    two_starts: tuple[list[RankStart], list[str]],
) -> None:
    """In the first one the profiler raises, and our own module of it cannot be imported."""
    (timed, profiled), notes = two_starts

    for rank in range(2):
        first, second = timed.rows[rank][0], profiled.rows[rank][0]
        assert "in a process that times steps" in first["used"]
        assert (first["imported"], second["used"], second["imported"]) == (False, True, True)
        assert first["pid"] == timed.exits.pids[rank]
        assert second["pid"] == profiled.exits.pids[rank]
        assert first["parent"] == second["parent"] == os.getpid()
    assert notes == ["looked"]


@pytest.mark.ci
def test_every_rank_of_every_start_is_a_process_of_its_own(
    two_starts: tuple[list[RankStart], list[str]],
) -> None:
    """Two ranks meet, twice; what each said is kept by rank."""
    pids = []
    for start in two_starts[0]:
        assert start.exits.codes == [0, 0]
        assert [rows[1]["rank"] for rows in start.rows] == [0, 1]
        assert start.rows[0][1]["pids"] == start.rows[1][1]["pids"] == start.exits.pids
        pids += start.exits.pids
    assert len(set(pids)) == 4


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (bodies.unusable, UnusableError, "^not today$"),
        pytest.param(bodies.stopped, StoppedError, "no more", marks=pytest.mark.ci),
    ],
)
def test_a_rank_that_fails_says_why(
    body: Callable[..., None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    """As the command would have said it itself; what was found before is kept."""
    start = RankStarts(1, tmp_path).start(body)
    with pytest.raises(error, match=words):
        start.require()
    assert start.rows == [["before"] if body is bodies.unusable else []]


def test_another_failure_is_told_by_its_last_words() -> None:
    """The error of the rank that failed."""
    start = RankStart(RankExits([1, 0], ["ValueError: odd"], 1.0), [[], []])
    with pytest.raises(UnusableError, match=r"^a rank failed: ValueError: odd$"):
        start.require()


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, to find processes")
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """However that one ends."""
    code = (
        "from pathlib import Path\n"
        "from qeffect.gpu_runtime.lab.runner.starts import RankStarts\n"
        "from tests.lab import start_bodies\n"
        f"RankStarts(1, Path({str(tmp_path)!r})).start(start_bodies.forever, {str(tmp_path)!r})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    place = Path("/proc") / (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 10
    while place.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not place.exists()


class TestHere:
    """Whose ranks a command starts."""

    def test_without_torchrun_all_of_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process itself does not count."""
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        found = RankStarts.here(2, "cpu", tmp_path)
        assert (found.world, found.own, found.speaks) == (2, None, True)
        with pytest.raises(UnusableError, match="expected 2 GPUs, one per rank, found 0"):
            RankStarts.here(2, "cuda", tmp_path)

    def test_under_torchrun_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One process for each that torchrun started, in its store, under keys of each start."""
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
        found = RankStarts.here(2, "cpu", tmp_path)
        assert (found.own, found.speaks) == (1, False)
        told: list[Any] = []

        def run(*_: object, own: int, environ: dict[str, str], **__: object) -> RankExits:
            told.append((own, environ["TORCHELASTIC_RESTART_COUNT"]))
            return RankExits([0], [], 0.0)

        monkeypatch.setattr(module, "run_ranks", run)
        found.start(bodies.meeting)
        found.start(bodies.meeting, profiles=True)
        assert told == [(1, "3.1"), (1, "3.2")]
        with pytest.raises(UnusableError, match="expected 4 processes for --pp 4, found 2"):
            RankStarts.here(4, "cpu", tmp_path)


@pytest.mark.nightly
def test_ranks_that_nobody_keeps_a_store_for_meet_in_rank_0s(tmp_path: Path) -> None:
    """Started by hand, with torchrun's variables alone: both starts, each in new processes."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from qeffect.gpu_runtime.lab.runner.starts import RankStarts\n"
        "from tests.lab import start_bodies\n"
        "ranks = RankStarts.here(2, 'cpu', Path(sys.argv[1]))\n"
        "found = [ranks.start(start_bodies.meeting).require()[0] for _ in range(2)]\n"
        "print(json.dumps(found))\n"
    )
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / rank)],
                env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = [json.loads(process.communicate(timeout=100)[0]) for process in ranks]
    assert [[start["rank"] for start in own] for own in said] == [[0, 0], [1, 1]]
    pids = [[start["pids"] for start in own] for own in said]
    assert pids[0] == pids[1]
    assert len({pid for start in pids[0] for pid in start}) == 4


def test_profiles_are_added_to_the_rows_that_were_measured(tmp_path: Path) -> None:
    """By their order; a side that fails keeps its measurement and gets no figure."""

    class Ranks(RankStarts):
        def start(self, *_: Any, take: Callable[[Any], None] = print, **options: Any) -> RankStart:
            assert options["profiles"]
            take({"busy_ms": [{"kernels": 1.0}]})
            take({"error": "RuntimeError: odd"})
            return RankStart(RankExits([0], [], 0.0), [[]])

    settings = PeerSettings(cells=["tiny-m2"])
    rows = [
        (PeerRow("tiny-m2", side, "il", settings), {"side": side, "busy_ms": []})
        for side in ("native", "replays")
    ]
    notes: list[str] = []
    saved: list[int] = []
    add_profiles(
        Ranks(1, tmp_path),
        print,
        rows,
        save=lambda: saved.append(1),
        note=notes.append,  # type: ignore[arg-type]
    )
    assert [row["busy_ms"] for _, row in rows] == [[{"kernels": 1.0}], []]
    assert all("error" not in row for _, row in rows)
    assert notes == ["Not profiled. tiny-m2, replays, il: RuntimeError: odd"]
    assert len(saved) == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("scale", ("--cells", "tiny", "--compared", "--schedules", "il")),
        pytest.param(
            *("tables", ("--cells", "tiny-m4", "--parts", "steps")), marks=pytest.mark.nightly
        ),
        pytest.param(
            *("peers", ("--cells", "tiny-m2", "--modes", "ours")), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_part_starts_its_ranks_twice(
    part: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU from end to end: other processes, the same rows, and no figure of a profiler."""
    made: list[tuple[bool, RankStart]] = []
    start = RankStarts.start

    def kept(
        self: RankStarts, *arguments: Any, profiles: bool = False, **options: Any
    ) -> RankStart:
        made.append((profiles, start(self, *arguments, profiles=profiles, **options)))
        return made[-1][1]

    monkeypatch.setattr(RankStarts, "start", kept)
    out = tmp_path / "out.json"
    few = ("--rounds", "1", "--steps", "1", "--native-steps", "1", "--device", "cpu")
    argv = ["runtime", "report", part, *words, *few, "--commit", COMMIT, "--out", str(out)]
    assert main(argv) == 0

    assert [profiles for profiles, _ in made] == [False, True]
    assert [one.exits.codes for _, one in made] == [[0, 0], [0, 0]]
    timed, profiled = (set(one.exits.pids) for _, one in made)
    assert not timed & profiled
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    raw = report["raw"]
    rows = {"scale": "timed", "peers": "rows"}
    found = raw["trials"][0]["rows"] if part == "tables" else raw[rows[part]]
    assert len(found) == len(made[1][1].rows[0]) > 1
    assert all(row["busy_ms"] == [] and row["step_ms"][0] > 0 for row in found)
    assert report["complete"]

"""
The command line: its options are frozen, its exit codes and its JSON are what scripts rely on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main, parser
from qeffect.schedule.tables import fixture_names, read_fixture, write_table

SOURCE = {"file", "--torch", "--pp", "--vpp", "--microbatches", "--comms", "--te-order"}
COMMON = {"-h", "--help", "--json", "--quiet"}
OPTIONS = {
    "check": SOURCE
    | {"--fixtures", "--random", "--seed", "--binding", "--shared-pool", "--svg", "--trace"},
    "faults": set(),
    "plan": SOURCE | {"--hidden", "--ffn", "--layers", "--dtype"},
    "replay": {"log"},
    "bench": {"--kernel", "--out"},
    "explore": {"--slots", "--keys", "--generations", "--scope", "--batch", "--symmetry"},
    "prove": {"--seeds", "--cvc5", "--mutants", "--only", "--programs", "--out"},
}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run the command line; return its exit code and what it printed."""
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Run with ``--json``; return its exit code and the one object that it printed."""
    code, out, _ = run(capsys, *argv, "--json")
    lines = out.strip().splitlines()
    assert 1 == len(lines)
    data: dict[str, Any] = json.loads(lines[0])
    return code, data


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """ZB-V at PP=2, M=4, as a file."""
    path = tmp_path / "zbv.csv"
    path.write_text(write_table(read_fixture("ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv")))
    return path


def test_options_are_frozen() -> None:
    """Every command has exactly these options; adding one is a decision, not an accident."""
    (commands,) = (a for a in parser()._actions if a.dest == "command")
    assert isinstance(commands.choices, dict)

    found = {
        name: {o for a in sub._actions for o in (a.option_strings or [a.dest])} - COMMON
        for name, sub in commands.choices.items()
    }

    assert OPTIONS == found


class TestCheck:
    """``qeffect check``."""

    def test_accepted(self, capsys: pytest.CaptureFixture[str], table: Path) -> None:
        """A table that keeps the contract exits with 0."""
        code, data = json_of(capsys, "check", str(table))

        assert 0 == code
        assert "accepted" == data["verdict"]

    def test_refused(self, capsys: pytest.CaptureFixture[str], table: Path) -> None:
        """A binding that mispairs dW exits with 1 and names clause, rank, step and action."""
        code, data = json_of(capsys, "check", str(table), "--binding", "latest")

        assert 1 == code
        named = tuple(data[k] for k in ("verdict", "clause", "rank", "step", "action"))
        assert ("refused", "ownership.wrong-key", 1, 22, "1W2") == named

    def test_shared_pool(self, capsys: pytest.CaptureFixture[str], table: Path) -> None:
        """A real ZB-V order breaks graphs that share one memory pool."""
        code, data = json_of(capsys, "check", str(table), "--shared-pool")

        assert 1 == code
        assert "capture.out-of-order" == data["clause"]

    def test_pictures(
        self, capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
    ) -> None:
        """``--svg`` and ``--trace`` write a picture and a trace of the refusal."""
        svg, trace = tmp_path / "a.svg", tmp_path / "a.json"

        code, out, _ = run(
            capsys, "check", str(table), "--binding", "latest", "--svg", str(svg), "--trace",
            str(trace),
        )  # fmt: skip

        assert 1 == code
        assert ">1W2<" in out
        assert svg.read_text().startswith("<svg")
        assert json.loads(trace.read_text())["traceEvents"]

    def test_fixtures(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Every shipped table is accepted."""
        code, data = json_of(capsys, "check", "--fixtures")

        assert 0 == code
        assert list(fixture_names()) == [row["table"] for row in data["tables"]]

    def test_te_order(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A Transformer Engine order list is a schedule of one rank."""
        assert 0 == run(capsys, "check", "--te-order", "1,1,-1,-1.5,-1,-1.5")[0]

    def test_unwritable_picture(
        self, capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
    ) -> None:
        """A picture that cannot be written is one clear line."""
        code, _, err = run(capsys, "check", str(table), "--svg", str(tmp_path / "no" / "a.svg"))

        assert 2 == code
        assert 1 == len(err.splitlines())
        assert "cannot write" in err

    def test_random(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Random schedules run through the machine; what too few leave out is named."""
        code, data = json_of(capsys, "check", "--random", "40", "--seed", "3")

        assert 40 == data["schedules"]
        assert not data["failure"]
        assert int(bool(data["uncovered"])) == code


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["check"], "name one schedule"),
        (["check", "a.csv", "--te-order", "1,-1"], "FILE.csv and --te-order"),
        (["check", "no-such-file.csv"], "cannot be read"),
        (["check", "--random", "0"], "positive number"),
        (["check", "--random", "many"], "invalid int value"),
        (["check", "--torch", "ScheduleNone"], "ScheduleNone"),
        (["check", "--binding", "lifo", "a.csv"], "invalid choice"),
        (["plan", "--te-order", "1,-1", "--hidden", "-3"], "hidden"),
        (["plan", "--te-order", "1,-1", "--hidden", "64", "--dtype", "int4"], "int4"),
        (["explore", "--scope", "none"], "no scope"),
        (["explore", "--slots", "0"], "slots"),
        (["prove", "--seeds", "0"], "positive number"),
        (["prove", "--only", "arena."], "--mutants"),
        (["prove", "--mutants", "--programs", "pyproject.toml"], "directory"),
        (["prove", "--mutants", "--only", "no such line"], "no mutant's line"),
        (["replay", "no-such-log.jsonl"], "no-such-log.jsonl"),
        (["frobnicate"], "invalid choice"),
        ([], "required"),
    ],
)
def test_unusable_input(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    """Bad input exits with 2 and one line that says what is wrong, never a traceback."""
    code, out, err = run(capsys, *argv)

    assert 2 == code
    assert "" == out
    assert 1 == len(err.splitlines())
    assert err.startswith("qeffect: ")
    assert said in err


def test_unusable_input_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json`` unusable input is an object too."""
    code, data = json_of(capsys, "check", "no-such-file.csv")

    assert 2 == code
    assert "unusable" == data["verdict"]


def test_faults(capsys: pytest.CaptureFixture[str]) -> None:
    """The fault table as JSON has its seven rows, every one refused."""
    code, data = json_of(capsys, "faults")

    assert 0 == code
    assert 7 == len(data["rows"])
    columns = {"injection", "family", "detected_at", "clause", "refused", "preserved"}
    assert all(columns <= row.keys() and row["refused"] for row in data["rows"])


def test_explore(capsys: pytest.CaptureFixture[str]) -> None:
    """Both readings of the slot pool walk the same states."""
    arguments = ("explore", "--slots", "2", "--keys", "2", "--generations", "2")

    plain, batch = (json_of(capsys, *arguments, *more) for more in ((), ("--batch",)))

    assert 0 == plain[0] == batch[0]
    (walked,), (batched,) = plain[1]["scopes"], batch[1]["scopes"]
    for count in ("states", "transitions", "refused", "depth"):
        assert walked[count] == batched[count]
    assert walked["states"] > 100


def test_plan(capsys: pytest.CaptureFixture[str], table: Path) -> None:
    """The plan of ZB-V at PP=2, M=4 keeps four tapes live a rank and needs five slots."""
    code, data = json_of(capsys, "plan", str(table), "--hidden", "4096", "--ffn", "11008")

    assert 0 == code
    assert [(4, 5), (4, 5)] == [(r["peak_live"], r["slots"]) for r in data["plan"]["ranks"]]


def test_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The kernel's bench names where it ran and measures every figure."""
    out = tmp_path / "bench.json"

    code, data = json_of(capsys, "bench", "--kernel", "--out", str(out))

    assert 0 == code
    assert {"guarded_action_us", "refusal_us", "bytes_per_live_tape", "environment"} <= data.keys()
    assert data["guarded_action_us"] > 0
    assert json.loads(out.read_text())["environment"]["commit"]


def test_module_is_the_command(table: Path) -> None:
    """``python -m qeffect`` is the command, and needs neither torch nor a solver to check."""
    code = (
        "import sys; from qeffect.cli import main; rc = main(['check', sys.argv[1]]); "
        "heavy = {'torch', 'z3', 'numpy', 'hypothesis'} & set(sys.modules); "
        "print(sorted(heavy)); raise SystemExit(rc)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(table)], capture_output=True, text=True, check=False
    )

    assert 0 == done.returncode
    assert "[]" == done.stdout.splitlines()[-1]

"""
The command line: its options are frozen, its exit codes and its JSON are what scripts rely on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

import qeffect.faults
from qeffect.cli import bench, command, main, parser
from qeffect.schedule.tables import fixture_names, read_fixture, write_table
from qeffect.verification import explorer
from qeffect.verification.commands import DEPTH, MOST_STATES, SCOPES
from qeffect.verification.explorer.plain import PlainExplorer
from qeffect.verification.explorer.space import Space
from qeffect.verification.proofs import bounded, prove
from qeffect.verification.proofs.goals import Obligation
from qeffect.verification.proofs.report import ProofReport
from qeffect.verification.scope_sizes import SCOPE_STATES, UNKNOWN, pool_states
from qeffect.verification.walks import machine
from tests.verification.test_explorer import COUNTS

SOURCE = {
    "file",
    "--torch",
    "--pp",
    "--vpp",
    "--microbatches",
    "--comms",
    "--defer-receives",
    "--megatron",
    "--messages",
    "--group",
    "--deepspeed",
    "--stages",
    "--te-order",
    "--max-outstanding-sends",
    "--queues",
    "--rendezvous",
}
REPORT = {"--out", "--commit"}
COMMON = {"-h", "--help", "--json", "--quiet"}
OPTIONS = {
    "check": SOURCE
    | {
        "--fixtures",
        "--random",
        "--seed",
        "--pairing",
        "--shared-pool",
        "--svg",
        "--trace",
        "--html",
    },
    "check-all": {"tables", "--pairing", "--queues", "--html", "--github"},
    "faults": set(),
    "plan": SOURCE
    | {"--hidden", "--ffn", "--layers", "--dtype", "--durations", "--svg", "--trace"}
    | {"--wgrad-group"},
    "replay": {"log"},
    "bench": {"--kernel", "--out"},
    "failures": {"names"},
    "explore": {"--slots", "--keys", "--generations", "--scope", "--batch", "--symmetry"},
    "prove": {
        *{"--seeds", "--depth", "--cvc5", "--mutants", "--only", "--promise", "--programs"},
        "--out",
    },
    "ranks": {"--seeds", "--cvc5", "--mutants"},
    "runtime doctor": set(),
    "runtime demo": {"--steps", "--ranks"},
    "runtime compare": {"--sets", "--cases", "--steps", "--sides", "--device", *REPORT},
    "runtime pipeline": {
        *("--schedule", "--pp", "--vpp", "--dp", "--microbatches", "--steps", "--device"),
        *("--backend", "--eager", "--rule", "--provisioning", "--compare", "--event-logs"),
        *("--one-launch", "--clip-norm", "--skip-nonfinite", "--trace", "--amax"),
        *("--layers", "--hidden", "--ffn", "--heads", "--sequence"),
    },
    "runtime corpus": {
        *("--out", "--tokenizer", "--vocabulary", "--end", "--any-version"),
        *("--text", "--weights", "--field", "--held-out"),
    },
    "runtime export": {"checkpoint", "--out", "--to", "--names"},
    "runtime bisect": {"first", "second"},
    "runtime generate": {
        *("checkpoint", "--prompt", "--tokens", "--temperature", "--seed", "--corpus"),
    },
    "runtime times": {"config", "--device", "--groups", "--out"},
    "runtime train": {
        *("config", "--device", "--steps", "--compare", "--resume", "--adopt", "--digest"),
        *("--out", "--commit"),
    },
    "runtime report curves": {
        *("config", "--runs", "--steps", "--held-out-steps", "--limit-s", "--device", "--merge"),
        *REPORT,
    },
    "runtime report bench": {
        *("table", "--cells", "--columns", "--microbatches", "--rank", "--rounds", "--steps"),
        *("--growth-steps", "--history", "--quick", "--device", "--no-profile", *REPORT),
    },
    "runtime report guards": {"--rounds"},
    "runtime report streams": {"--processes", "--checks", "--width", "--depth", "--quick", *REPORT},
    "runtime report pools": {"--steps", "--device", *REPORT},
    "runtime report probes": {"--device", "--only", *REPORT},
    "runtime report scale": {
        *("--pp", "--schedules", "--cells", "--compared", "--rounds", "--steps", "--native-steps"),
        *("--device", *REPORT),
    },
    "runtime report tables": {
        *("--pp", "--parts", "--cells", "--microbatches", "--rounds", "--steps", "--native-steps"),
        *("--no-profile", "--device", "--merge", *REPORT),
    },
    "runtime report models": {
        *("--pp", "--cells", "--schedules", "--replicas", "--main-grad", "--megatron", "--limit"),
        *("--rounds", "--steps", "--native-steps", "--no-profile", "--device", *REPORT),
        *("--head", "--recompute", "--norms", "--no-native"),
    },
    "runtime report groups": {
        *("--pp", "--cells", "--schedules", "--dtypes", "--groups", "--rounds", "--steps"),
        *("--digests", "--limit", "--device", *REPORT),
    },
    "runtime report plots": {"--reports", "--out", "--format"},
    "runtime report peers": {
        *("--cells", "--modes", "--main-grads", "--limit", "--rounds", "--steps"),
        *("--native-steps", "--no-profile", "--device", *REPORT),
    },
    "runtime report restarts": {
        *("--device", "--eager", "--one-launch", "--masters", "--asynchronous", "--hidden"),
        *("--history", "--schedules", "--dp", "--at-once", "--same", *REPORT),
    },
    "runtime report scales": {"config", "--seeds", "--steps", "--device", *REPORT},
    "runtime report second_runs": {
        *("--device", "--flips", "--inside", "--launched", "--every", "--rounds", "--microbatches"),
        *("--layers", "--seed", *REPORT),
    },
    "runtime report modes": {
        *("--framework", "--device", "--python", "--packages", "--limit", "--at-once", *REPORT),
    },
    "runtime report kills": {
        *("--device", "--one-launch", "--kills", "--seed", "--at-once", *REPORT),
    },
}
#: Commands that became parts of `runtime report`; the old names work for a release.
MOVED = ("curves", "bench", "scale", "tables", "streams", "pools", "probes", "plots")
OPTIONS |= {f"runtime {name}": OPTIONS[f"runtime report {name}"] for name in MOVED}


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


def leaves(above: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, with its path and its parser, declared."""
    for action in above._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from leaves(sub, f"{path} {name}".strip())
            return
    assert hasattr(above, "fill")
    above.fill()
    yield path, above


def test_options_are_frozen() -> None:
    """Every command has exactly these options; adding one is a decision, not an accident."""
    found = {
        name: {o for a in sub._actions for o in (a.option_strings or [a.dest])} - COMMON
        for name, sub in leaves(parser())
    }

    assert OPTIONS == found


class TestCheck:
    """``qeffect check``."""

    def test_a_good_table_exits_with_0(
        self, capsys: pytest.CaptureFixture[str], table: Path
    ) -> None:
        """A table that keeps the contract exits with 0."""
        code, data = json_of(capsys, "check", str(table))

        assert 0 == code
        assert "accepted" == data["verdict"]

    @pytest.mark.parametrize("command", ["check", "plan"])
    def test_the_row_of_one_rank_is_said_to_be_that(
        self, capsys: pytest.CaptureFixture[str], table: Path, command: str
    ) -> None:
        """A table without its other rows is reported as one rank's row."""
        alone = "only one rank's row was given"
        assert alone not in run(capsys, command, str(table))[1]
        table.write_text(table.read_text().splitlines()[0] + "\n")
        code, out, _ = run(capsys, command, str(table))

        assert 0 == code
        assert alone in out
        if command == "check":
            assert "  1 rank with stages 0, 3, 4 microbatches" in out
            assert json_of(capsys, "check", str(table))[1]["complete"] is False

    def test_a_refusal_exits_with_1_and_says_where(
        self, capsys: pytest.CaptureFixture[str], table: Path
    ) -> None:
        """A binding that mispairs dW exits with 1 and names clause, rank, step and action."""
        code, data = json_of(capsys, "check", str(table), "--pairing", "latest")

        assert 1 == code
        named = tuple(data[k] for k in ("verdict", "clause", "rank", "step", "action"))
        assert ("refused", "ownership.wrong-key", 1, 22, "1W2") == named

    def test_a_shared_pool_is_refused_on_a_real_order(
        self, capsys: pytest.CaptureFixture[str], table: Path
    ) -> None:
        """A real ZB-V order breaks graphs that share one memory pool."""
        code, data = json_of(capsys, "check", str(table), "--shared-pool")

        assert 1 == code
        assert "capture.out-of-order" == data["clause"]

    def test_a_picture_and_a_trace_of_the_refusal_are_written(
        self, capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
    ) -> None:
        """``--svg`` and ``--trace`` write a picture and a trace of the refusal."""
        svg, trace = tmp_path / "a.svg", tmp_path / "a.json"

        code, out, _ = run(
            capsys, "check", str(table), "--pairing", "latest", "--svg", str(svg), "--trace",
            str(trace),
        )  # fmt: skip

        assert 1 == code
        assert ">1W2<" in out
        assert svg.read_text().startswith("<svg")
        assert json.loads(trace.read_text())["traceEvents"]

    def test_every_shipped_table_is_accepted(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Every shipped table is accepted."""
        code, data = json_of(capsys, "check", "--fixtures")

        assert 0 == code
        assert list(fixture_names()) == [row["table"] for row in data["tables"]]

    def test_an_order_list_is_a_schedule_of_one_rank(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A Transformer Engine order list is a schedule of one rank."""
        assert 0 == run(capsys, "check", "--te-order", "1,1,-1,-1.5,-1,-1.5")[0]

    def test_a_picture_that_cannot_be_written_is_one_line(
        self, capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
    ) -> None:
        """A picture that cannot be written is one clear line."""
        code, _, err = run(capsys, "check", str(table), "--svg", str(tmp_path / "no" / "a.svg"))

        assert 2 == code
        assert 1 == len(err.splitlines())
        assert "there is no folder" in err

    @pytest.mark.slow
    def test_enough_random_schedules_are_accepted(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Random schedules run through the machine, and enough of them are accepted."""
        code, data = json_of(capsys, "check", "--random", "2000", "--seed", "0")

        assert 0 == code
        assert ("", "accepted") == (data["reason"], data["verdict"])
        assert data["schedules"] == 2000
        assert [] == data["uncovered"]

    def test_too_few_random_schedules(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Too few settle nothing: exit code 2, and no violation."""
        code, data = json_of(capsys, "check", "--random", "2")
        _, out, _ = run(capsys, "check", "--random", "2")
        first, second = out.splitlines()[:2]

        assert (2, "unusable") == (code, data["verdict"])
        assert "too few schedules" == data["reason"]
        assert data["uncovered"]
        assert not data["failure"]
        assert first.startswith(f"too few schedules: never exercised: {data['uncovered'][0]}")
        assert first.endswith("use --random 1000 or more")
        assert ": among these, every legal call was accepted" in second

    def test_wrong_random_schedules(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A contract that is wrong is a violation, not too few schedules."""
        wrong = machine.RandomReport(schedules=2, actions=9, seconds=1.0, failure="F was refused")
        monkeypatch.setattr(machine, "run", lambda *_, **__: wrong)

        code, data = json_of(capsys, "check", "--random", "2")
        _, out, _ = run(capsys, "check", "--random", "2")

        assert (1, "violation", "F was refused") == (code, data["reason"], data["failure"])
        assert "F was refused\n" == out

    def test_microbatches_of_a_table(self, capsys: pytest.CaptureFixture[str], table: Path) -> None:
        """With a file, ``--microbatches`` is what it must hold."""
        assert 0 == run(capsys, "check", str(table), "--microbatches", "4")[0]
        assert 1 == run(capsys, "check", str(table), "--microbatches", "5")[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["check"], "FILE.csv --torch --megatron --deepspeed --te-order --fixtures --random"),
        (["plan"], "of the arguments FILE.csv --torch --megatron --deepspeed --te-order is"),
        (["check", "a.csv", "--te-order", "1,-1"], "not allowed with FILE.csv"),
        (["check", "a.csv", "--fixtures"], "not allowed with FILE.csv"),
        (["check", "a.csv", "--random", "5"], "not allowed with FILE.csv"),
        (["check", "--random", "5", "--torch", "1F1B"], "not allowed with --random"),
        (["check", "--random", "5", "--fixtures"], "not allowed with --random"),
        (["check", "no-such-file.csv"], "cannot be read"),
        (["check", "--random", "0"], "at least 1"),
        (["check", "--random", "many"], "--random: expected a whole number, found 'many'"),
        (["check", "--torch", "ScheduleNone"], "ScheduleNone"),
        (["check", "--pairing", "lifo", "a.csv"], "expected one of contract, fifo, latest, global"),
        (["plan", "--te-order", "1,-1", "--hidden", "-3"], "hidden"),
        (["plan", "--te-order", "1,-1", "--hidden", "64", "--dtype", "int4"], "int4"),
        (["explore", "--scope", "none"], "no scope is named"),
        (["explore", "--slots", "0"], "slots"),
        (["explore", "--slots", "1000", "--keys", "1000", "--generations", "1000"], "64 keys"),
        (["explore", "--slots", "6"], "more than 20,000,000 states"),
        (
            ["explore", "--slots", "9" * 4000, "--keys", "2", "--symmetry"],
            "more than 20,000,000 states",
        ),
        (["plan", "--te-order", "1,-1", "--hidden", "9" * 4000], "at most"),
        (["plan", "--te-order", "1,-1", "--hidden", "100", "--ffn", "0"], "ffn"),
        (["prove", "--seeds", "9" * 4000], "at most"),
        (["check", "--js", "--fixtures"], "unrecognized arguments: --js"),
        (["prove", "--seeds", "0"], "at least 1"),
        (["ranks", "--seeds", "0"], "at least 1"),
        (["prove", "--depth", "0"], "at least 1 and at most 8"),
        (["prove", "--depth", "9" * 4000], "at least 1 and at most 8"),
        (["prove", "--programs", "out"], "add --mutants"),
        (["prove", "--mutants", "--programs", "pyproject.toml"], "expected a folder"),
        (["prove", "--only", "no such line"], "no mutant's description"),
        (["prove", "--promise", "ownership.dgrad-next"], "is an assumption or a condition of a"),
        (["prove", "--promise", "version.stale-cache"], "of the clause of this name lists what"),
        (["prove", "--promise", "launches.one-cause"], "`qeffect ranks` proves all promises about"),
        (["replay", "no-such-log.jsonl"], "no-such-log.jsonl"),
        (["failures", "none"], "no failure is named 'none'"),
        (["runtime"], "required"),
        (["runtime", "walk"], "unknown command 'walk'"),
        (["runtime", "demo", "--steps", "0"], "--steps must be at least 1"),
        (["runtime", "demo", "--step", "3"], "unrecognized arguments: --step"),
        (["runtime", "compare", "--device", "cpu", "--commit", "x"], "40 hexadecimal digits"),
        (["check", "--te-order", "1,-1", "--svg", "a", "--trace", "./a"], "a file of its own"),
        (["frobnicate"], "unknown command 'frobnicate'; expected one of check, "),
        ([], "required"),
    ],
)
def test_unusable_input_exits_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    """Bad input exits with 2 and one line that says what is wrong, never a traceback."""
    code, out, err = run(capsys, *argv)

    assert 2 == code
    assert "" == out
    assert 1 == len(err.splitlines())
    assert err.startswith("qeffect: ")
    assert said in err


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        ("check --fixtures --svg x.svg --trace x.json", "--svg x.svg and --trace x.json"),
        ("check --fixtures --pp 4", "--pp 4"),
        ("check --fixtures --seed 0", "--seed 0"),
        ("check a.csv --seed 1", "--seed 1"),
        ("check --random 5 --pairing latest", "--pairing latest"),
        ("check --random 5 --shared-pool", "--shared-pool"),
        ("check --random 5 --svg x.svg", "--svg x.svg"),
        ("check --fixtures --html x.html", "--html x.html"),
        ("check --random 5 --microbatches 0", "--microbatches 0"),
        ("check a.csv --pp 2", "--pp 2"),
        ("check a.csv --vpp 2 --comms", "--vpp 2 and --comms"),
        ("check --te-order 1,-1 --pp 2", "--pp 2"),
        ("check --torch 1F1B --messages plain", "--messages plain"),
        ("check --torch 1F1B --group 2 --stages 2", "--group 2"),
        ("check --megatron --comms", "--comms"),
        ("check --deepspeed a:B --pp 2 --vpp 2", "--pp 2 and --vpp 2"),
        ("plan --megatron --stages 2", "--stages 2"),
        ("check a.csv --defer-receives", "--defer-receives"),
        ("check --te-order 1,-1 --queues pair", "--queues pair"),
        ("check --te-order 1,-1 --rendezvous queue", "--rendezvous queue"),
        ("check --fixtures --rendezvous rank", "--rendezvous rank"),
        ("check --te-order 1,-1 --max-outstanding-sends 1", "--max-outstanding-sends 1"),
        ("check --torch 1F1B --queues direction", "--queues direction"),
        ("plan --torch 1F1B --max-outstanding-sends 0", "--max-outstanding-sends 0"),
        ("check --fixtures --max-outstanding-sends 2", "--max-outstanding-sends 2"),
        ("plan --te-order 1,-1 --microbatches 1", "--microbatches 1"),
        ("plan --te-order 1,-1 --ffn 10", "--ffn 10"),
        ("prove --only arena. --cvc5 --seeds 2", "--seeds 2 and --cvc5"),
        ("prove --promise version.one-fill --mutants --only arena.", "--mutants and --only arena."),
        ("explore --scope pool-2-2-2 --slots 2", "--scope pool-2-2-2"),
        ("plan --te-order 1,-1 --layers 2 --dtype fp32", "--layers 2 and --dtype fp32"),
    ],
)
def test_what_does_not_apply_is_unusable(
    capsys: pytest.CaptureFixture[str], argv: str, given: str
) -> None:
    """Nothing that was typed is ignored: what would have no effect is named, and what to do."""
    code, out, err = run(capsys, *argv.split())

    assert (2, "") == (code, out)
    assert 1 == len(err.splitlines())
    assert err.startswith(f"qeffect: {given} given, but ")
    assert "; leave out --" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--te-order", "1,-1", "--hidden", "9" * 5000],
        ["plan", "--te-order", "1,-1", "--hidden", "-" + "9" * 4000],
        ["check", "--pairing", "x " * 3000, "a.csv"],
        ["check", "--torch", "x" * 5000],
        ["check", "x" * 5000],
        ["replay", "x" * 5000],
        ["explore", "--scope", "x " * 3000],
        ["x" * 5000],
    ],
)
def test_long_values_are_shortened(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    """A line about a value of thousands of characters does not repeat them all."""
    code, _, err = run(capsys, *argv)

    assert 2 == code
    assert 1 == len(err.splitlines())
    assert "..." in err
    assert len(err) < 1_100


def test_paths_are_not_shortened(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A path of an ordinary length is repeated whole, since a person must find it."""
    path = tmp_path / ("a" * 70) / "table.svg"

    _, _, err = run(capsys, "check", "--te-order", "1,-1", "--svg", str(path))

    assert str(path) in err


def test_unusable_input_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json`` unusable input is an object too."""
    code, data = json_of(capsys, "check", "no-such-file.csv")

    assert 2 == code
    assert "unusable" == data["verdict"]


REFUSED = {
    "check": ["--te-order", "1,1,-1,-1,-1.5,-1.5", "--pairing", "latest"],
    "check --fixtures": ["--pairing", "latest"],
    "check --random": ["1"],
    "replay": ["spec/logs/rejected/ownership.unknown-key.jsonl"],
    "explore": ["--slots", "1", "--keys", "1"],
    "faults": [],
    "prove": [],
    "prove --promise": ["injective"],
}


def test_an_unknown_promise_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are those of the proofs' own goals."""
    monkeypatch.setattr(prove, "named", lambda _: ([], ["version.one-fill", "order.token"]))
    code, _, err = run(capsys, "prove", "--promise", "version.one-fil")

    assert 2 == code
    assert "no promise, lemma or theorem is named 'version.one-fil'" in err
    assert "did you mean version.one-fill?" in err


@pytest.mark.parametrize(("name", "told"), [("order.token", True), ("order.threaded", False)])
def test_a_promise_with_the_name_of_a_clause_is_told_apart(
    name: str,
    told: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The promise of this name states something else than the clause."""
    proved = SimpleNamespace(proved=True, solver="z3", text="unsat", asdict=dict)
    monkeypatch.setattr(prove, "named", lambda _: ([proved], [name]))
    code, out, _ = run(capsys, "prove", "--promise", name)

    assert 0 == code
    assert (f"{name} is also a clause; the line 'Raised by' of the clause" in out) == told


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever command refuses, its JSON has the same four names, null without a meaning."""
    walked = explorer.run(explorer.pool_scope(1, 1, 1))
    goal = Obligation("injective", "step", "full", "check_forward", "accepted", "z3", "sat", 0.1)
    monkeypatch.setattr(explorer, "run", lambda *_, **__: evolve(walked, violation="broken"))
    monkeypatch.setattr(prove, "run", lambda **_: ProofReport(obligations=[goal]))
    monkeypatch.setattr(prove, "named", lambda _: ([goal], ["injective"]))
    report = evolve(qeffect.faults.run(), verdict="refused")
    monkeypatch.setattr(qeffect.faults, "run", lambda: report)
    wrong = machine.RandomReport(schedules=1, actions=9, seconds=1.0, failure="F was refused")
    monkeypatch.setattr(machine, "run", lambda *_, **__: wrong)

    code, data = json_of(capsys, *name.split(), *REFUSED[name])

    assert (1, "refused") == (code, data["verdict"])
    assert {"clause", "rank", "step", "action"} <= data.keys()
    if name in ("check", "check --fixtures", "replay"):
        assert "ownership" in data["clause"]
        assert data["action"]
    if name.startswith("prove"):
        assert "check_forward" == data["action"]


@pytest.mark.parametrize(
    ("argv", "shown"), [([], True), (["--json"], True), (["--json", "--quiet"], False)]
)
def test_long_work_shows_progress_unless_quiet(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    shown: bool,
) -> None:
    """Long work shows progress on stderr, with ``--json`` too; only ``--quiet`` turns it off."""
    seconds = itertools.count()
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    code, out, err = run(capsys, "check", "--fixtures", *argv)

    assert 0 == code
    assert shown == err.startswith("Checking: ")
    assert shown or "" == err
    assert "--json" not in argv or "accepted" == json.loads(out)["verdict"]


def test_the_fault_table_has_seven_rows_all_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The fault table as JSON has its seven rows, every one refused."""
    code, data = json_of(capsys, "faults")

    assert 0 == code
    assert 7 == len(data["rows"])
    columns = {"injection", "family", "detected_at", "result", "clause", "refused", "preserved"}
    assert all(columns <= row.keys() and row["refused"] for row in data["rows"])


def test_a_pool_has_the_states_that_the_plain_explorer_finds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command finds what the plain explorer finds; ``--batch`` changes nothing."""
    arguments = ("explore", "--slots", "2", "--keys", "2", "--generations", "2")
    plain = PlainExplorer(Space(explorer.pool_scope(2, 2, 2))).explore()

    for more in ((), ("--batch",)):
        code, found = json_of(capsys, *arguments, *more)
        (walked,) = found["scopes"]
        assert 0 == code
        assert (len(plain.parents), plain.accepted.total(), plain.refused.total(), plain.depth) == (
            tuple(walked[count] for count in ("states", "transitions", "refused", "depth"))
        )


_REPLAY = ("replay", "spec/logs/valid/aborts-and-restores.jsonl")
_FULL, _CLOSED = "No space left on device", "Bad file descriptor"


@pytest.mark.parametrize(
    ("argv", "into", "said"),
    [
        (_REPLAY, ">/dev/full", f"standard output cannot be written: {_FULL}"),
        ((*_REPLAY, "--json"), ">/dev/full", f"standard output cannot be written: {_FULL}"),
        (_REPLAY, ">&-", f"standard output cannot be written: {_CLOSED}"),
        ((*_REPLAY, "--json"), ">&-", f"standard output cannot be written: {_CLOSED}"),
        (
            ("replay", "none", "--json"),
            ">/dev/full",
            "none: cannot be read: No such file or directory; check its name",
        ),
    ],
)
def test_an_output_that_takes_nothing_is_unusable(
    argv: tuple[str, ...], into: str, said: str
) -> None:
    """A full disk or a closed standard output ends in one plain line, with no verdict lost."""
    words = [sys.executable, "-m", "qeffect", *argv]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {into}', "sh", *words], capture_output=True, text=True, check=False
    )

    assert (2, f"qeffect: {said}\n") == (done.returncode, done.stderr)


def test_two_pictures_are_two_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A link to the other picture's file is that file, and is not written over."""
    picture, link = tmp_path / "picture", tmp_path / "link"
    picture.write_text("mine")
    link.hardlink_to(picture)
    order = ("check", "--te-order", "1,-1")
    code, out, err = run(capsys, *order, "--svg", str(picture), "--trace", str(link))

    assert (2, "") == (code, out)
    assert "--svg and --trace both name" in err
    assert "mine" == picture.read_text()


@pytest.mark.parametrize("option", ["--svg", "--trace"])
def test_no_picture_is_written_over_what_it_is_drawn_from(
    option: str, capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
) -> None:
    """The table, by another name too, and the durations of a plan."""
    before, link, times = table.read_text(), tmp_path / "link", tmp_path / "times.json"
    link.symlink_to(table)
    times.write_text('{"unit": "ms", "F": 1, "I": 1, "W": 1}')
    plan = ("plan", str(table), "--durations", str(times))
    for words, over in (
        (("check", str(table)), table),
        (("check", str(table)), link),
        (plan, table),
        (plan, times),
    ):
        code, out, err = run(capsys, *words, option, str(over))
        assert (2, "") == (code, out)
        assert f"and {option} both name {over}" in err
    assert before == table.read_text()
    assert "unit" in times.read_text()


def test_a_picture_without_a_place_leaves_the_other_one_unwritten(
    capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
) -> None:
    """Both places are checked before the schedule is."""
    picture = tmp_path / "a.svg"
    nowhere = str(tmp_path / "no" / "b.json")
    code, out, err = run(capsys, "check", str(table), "--svg", str(picture), "--trace", nowhere)

    assert (2, "") == (code, out)
    assert f"--trace {nowhere}: there is no folder" in err
    assert not picture.exists()


def test_what_the_help_names_is_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Every scope, and the depth of the bounded proof, without loading either."""
    with pytest.raises(SystemExit):
        main(["explore", "--help"])

    said = capsys.readouterr().out.replace(",", " ").split()

    assert [*explorer.standard_scopes(), *explorer.large_scopes()] == list(SCOPES)
    assert set(SCOPES) <= set(said)
    assert DEPTH == bounded.DEPTH


@pytest.mark.parametrize("name", SCOPES)
def test_the_states_of_a_named_scope_are_known(name: str) -> None:
    """The totals that progress lines show are the states that the explorer finds."""
    if name in explorer.standard_scopes():
        assert COUNTS[name][0] == SCOPE_STATES[name]  # what the exploration itself is held to
    elif name.startswith("pool-"):
        scope = explorer.large_scopes()[name]
        shape = (*scope.slots, *scope.cells, scope.generation_max)
        assert pool_states(*shape) == SCOPE_STATES[name]
    elif SCOPE_STATES[name] != UNKNOWN:
        found = explorer.run(explorer.large_scopes()[name], witnesses=False)
        assert found.states == SCOPE_STATES[name]
    assert (SCOPE_STATES[name] == UNKNOWN) == (name == "stage-large")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--scope stage-epochs", " of 980 states"),
        ("--scope stage-epochs --symmetry", "Exploring: states="),
        ("--scope pool-4-4-3 --symmetry", " of 1,820 states"),
        ("--slots 2 --generations 2", " of 153 states"),
    ],
)
def test_an_exploration_says_how_many_states_are_left(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The total is shown where it is known, and the plain counter where it is not."""
    monkeypatch.setattr(command.Progress, "__call__", command.Progress.note)
    code, out, err = run(capsys, "explore", *words.split())

    assert (0, 1) == (code, len(out.splitlines()))
    assert said in err
    assert "transitions=" in err


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 2), (2, 2, 2), (3, 2, 2), (2, 3, 3)])
@pytest.mark.parametrize("symmetry", [False, True])
def test_states_are_estimated_exactly(shape: tuple[int, int, int], symmetry: bool) -> None:
    """What decides whether a pool is too large is the number of states that the walk finds."""
    walked = explorer.run(explorer.pool_scope(*shape), symmetry=symmetry)

    assert walked.states == pool_states(*shape, symmetry=symmetry)


def test_the_largest_named_pool_is_not_too_large() -> None:
    """The README's five million states stay within the limit."""
    assert 5_000_000 < pool_states(4, 5, 4) < MOST_STATES


def test_the_plan_of_zbv_has_four_live_tapes_and_five_slots(
    capsys: pytest.CaptureFixture[str], table: Path
) -> None:
    """The plan of ZB-V at PP=2, M=4 keeps four tapes live a rank and needs five slots."""
    code, data = json_of(capsys, "plan", str(table), "--hidden", "4096", "--ffn", "11008")

    assert 0 == code
    assert [(4, 5), (4, 5)] == [(r["peak_live"], r["slots"]) for r in data["plan"]["ranks"]]


AWAITED = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1
"""


@pytest.fixture
def awaited(tmp_path: Path) -> Path:
    """A table that says where its sends end; both ranks have two outstanding at most."""
    path = tmp_path / "awaited.csv"
    path.write_text(AWAITED)
    return path


def test_outstanding_sends(capsys: pytest.CaptureFixture[str], awaited: Path) -> None:
    """The limit on outstanding sends is kept by `check` and `plan` alike, and planned for."""
    code, data = json_of(capsys, "check", str(awaited), "--max-outstanding-sends", "2")
    tight, refused = json_of(capsys, "check", str(awaited), "--max-outstanding-sends", "1")
    planned, plan = json_of(capsys, "plan", str(awaited), "--max-outstanding-sends", "2")
    unplanned, _, said = run(capsys, "plan", str(awaited), "--max-outstanding-sends", "1")

    assert (0, "accepted", 2) == (code, data["verdict"], data["transport"]["max_outstanding_sends"])
    assert (1, "schedule.outstanding-sends", 0, "0SEND_F1") == (
        tight,
        refused["clause"],
        refused["rank"],
        refused["action"],
    )
    assert 0 == planned
    assert [2, 2] == [rank["outstanding_sends"] for rank in plan["plan"]["ranks"]]
    assert [0, 1] == [rank["stages"][0]["held_by_sends"] for rank in plan["plan"]["ranks"]]
    assert 2 == unplanned
    assert "schedule.outstanding-sends" in said


def test_outstanding_sends_of_a_table_without_waits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where nothing says when sends end, a limit on them is unusable; so is a negative one."""
    path = tmp_path / "silent.csv"
    path.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")

    assert 2 == run(capsys, "check", str(path), "--max-outstanding-sends", "1")[0]
    code, out, err = run(capsys, "plan", str(path), "--max-outstanding-sends", "-1")
    assert (2, "") == (code, out)
    assert "--max-outstanding-sends must be at least 0" in err


def test_plan_says_what_sends_hold(capsys: pytest.CaptureFixture[str], awaited: Path) -> None:
    """The printed plan names outstanding sends, and the slots that only they hold."""
    code, out, _ = run(capsys, "plan", str(awaited))

    assert 0 == code
    assert "open sends" in out
    assert "stage 1: 2 live, 1 deferred, 2 forwards, 1 held by sends" in out


@pytest.mark.ci
def test_the_bench_measures_every_figure_and_says_where(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's bench names where it ran and measures every figure."""
    out = tmp_path / "bench.json"
    once = partial(bench.prices.relations, rounds=1, turns=1, epochs=1, before=0)
    monkeypatch.setattr(bench.prices, "relations", once)

    code, data = json_of(capsys, "bench", "--kernel", "--out", str(out))

    assert 0 == code
    assert {"guarded_action_us", "refusal_us", "bytes_per_live_tape", "environment"} <= data.keys()
    assert data["guarded_action_us"] > 0
    assert all(part["with_us"] > 0 for part in data["relation_prices"]["order"].values())
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


def test_help_of_the_runtime_loads_no_torch() -> None:
    """What the runtime can do is listed on a machine without torch, and so is every command."""
    code = (
        "import sys; from qeffect.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )

    for argv in (["--help"], ["runtime", "--help"], ["runtime"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
        )

        assert "False" == done.stdout.splitlines()[-1]
        assert ("doctor" in done.stdout) is ("runtime" in argv and "--help" in argv)


@pytest.mark.parametrize("module", ["qeffect.gpu_runtime", "qeffect.gpu_runtime.lab"])
def test_modules_of_the_runtime_are_its_commands(module: str) -> None:
    """``python -m`` gives the same words as ``qeffect runtime``."""
    words = ["runtime", *(["report"] if module.endswith("lab") else [])]

    alias, command = (
        subprocess.run(
            [sys.executable, "-m", *start, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for start in ([module], ["qeffect", *words])
    )

    assert alias.startswith(f"usage: qeffect {' '.join(words)} ")
    assert alias == command

"""Mistakes that people made when they used the command line for the first time."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qeffect.cli
from qeffect import report
from qeffect.cli import main
from qeffect.countdown import Countdown
from qeffect.log.checker import LogError
from qeffect.log.joint import replay_together
from qeffect.report import UnusableError, environment
from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.tables import read_fixture, write_table
from qeffect.schedule.transport import Transport
from tests.cli.test_cli import json_of, run

OWN = '''
from torch.distributed.pipelining import ScheduleGPipe, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action


class Mine(ScheduleZBVZeroBubble):
    pass


class Loop(ScheduleGPipe):
    pass


class Early(PipelineScheduleMulti):
    """The last rank computes dW of microbatch 1 before its dI."""

    def __init__(self, stages, n_microbatches):
        super().__init__(stages, n_microbatches)
        row = lambda words: [_Action.from_str(word) for word in words.split()]
        self.pipeline_order = {
            0: row("0F0 0F1 0I0 0W0 0I1 0W1"), 1: row("1F0 1F1 1I0 1W0 1W1 1I1")
        }


class Exits(ScheduleGPipe):
    def __init__(self, *_, **__):
        raise SystemExit(0)


class Nothing:
    pass


class Bare(PipelineScheduleMulti):
    order = None

    def __init__(self, stages, n_microbatches):
        super().__init__(stages, n_microbatches)
        self.pipeline_order = self.order


class Five(Bare):
    order = 5


class Half(Bare):
    order = {0: ["0F0"]}


class Words(Bare):
    order = {0: ["forward"], 1: []}


class Large(Bare):
    order = {0: ["0F1234567"], 1: []}


class Alone(PipelineScheduleMulti):
    def __init__(self, stages):
        pass
'''


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """ZB-V at PP=2, M=4, as a file."""
    path = tmp_path / "zbv.csv"
    path.write_text(write_table(read_fixture("ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv")))
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's in the working folder."""
    (tmp_path / "ownschedules.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("ownschedules", None)


class TestOwnClasses:
    """`--torch module:Class`, and a schedule object handed to `check`."""

    def test_a_class_in_the_working_folder(
        self, capsys: pytest.CaptureFixture[str], own: None
    ) -> None:
        """Of several stages a rank, and of one."""
        for name in ("Mine", "Loop"):
            code, data = json_of(capsys, "check", "--torch", f"ownschedules:{name}")
            assert (0, "accepted") == (code, data["verdict"])
            assert name in data["source"]

    def test_a_wrong_one_is_refused(self, capsys: pytest.CaptureFixture[str], own: None) -> None:
        """By clause, as torch's own."""
        words = ("--torch", "ownschedules:Early", "--vpp", "1", "--microbatches", "2")
        code, data = json_of(capsys, "check", *words)

        assert (1, "1W1") == (code, data["action"])

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            (
                "ownschedules:Exits",
                "ownschedules:Exits pp=2 vpp=1 microbatches=4 cannot be constructed",
            ),
            ("./ownschedules:Mine", "./ownschedules:Mine: expected module:Class, with the module"),
            ("ownschedules:", "ownschedules:: expected module:Class"),
            (":Mine", "expected module:Class"),
            ("ownschedules:Mime", "has no class 'Mime'; did you mean Mine?"),
            ("ownschedules:Bare", "Bare.pipeline_order: expected a row of actions for each of 2"),
            ("ownschedules:Five", "as {rank: [actions]}, found 5; set self.pipeline_order in"),
            ("ownschedules:Half", "found no row for rank 1 among 0; set self.pipeline_order in"),
            ("ownschedules:Words", "--torch ownschedules:Words: rank 0, step 0: entry 'forward'"),
            ("ownschedules:Large", "'0F1234567': expected stages and microbatches of at most 6"),
            ("ownschedules:Alone", "TypeError: Alone.__init__() takes 2 positional arguments"),
            ("ownschedules:Nothing", "is not a schedule class; expected a subclass of"),
            ("ownschedules:Missing", "module ownschedules has no class 'Missing'"),
            ("nosuchmodule:Mine", "module nosuchmodule cannot be imported: ModuleNotFoundError"),
        ],
    )
    def test_another_name_is_one_line(
        self, capsys: pytest.CaptureFixture[str], own: None, name: str, said: str
    ) -> None:
        """It says what was expected."""
        code, _, err = run(capsys, "check", "--torch", name)

        assert 2 == code
        (line,) = err.splitlines()
        assert said in line

    def test_an_object(self, own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its table is read off it; anything else is refused."""
        monkeypatch.syspath_prepend(tmp_path)
        import ownschedules  # type: ignore[import-not-found]
        import torch

        from qeffect.schedule.torch_tables import _Stage

        stages = [_Stage(index, 0, 2, 2, torch.nn.Identity()) for index in (0, 3)]
        mine = ownschedules.Mine(stages, 4)
        loop = ownschedules.Loop(_Stage(0, 0, 2, 1, torch.nn.Identity()), 4)

        assert "accepted" == check(mine).verdict == check(loop).verdict
        assert "ownership.wrong-key" == check(mine, "latest").clause
        with pytest.raises(ScheduleError, match="int: expected a Schedule"):
            check(3)
        with pytest.raises(ScheduleError, match="Mine: expected a schedule object, found a class"):
            check(ownschedules.Mine)


class TestPython:
    """Wrong arguments of the Python functions behind the commands."""

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"schedule": "zbv.csv"}, "str: expected a Schedule .*; read a file with .*read_table"),
            ({"schedule": [["0F0"]]}, "list: expected a Schedule .*; read rows .*from_actions"),
            ({"pairing": ["latest"]}, r"unknown pairing \['latest'\]; expected one of contract"),
            ({"pairing": "latst"}, "did you mean latest?"),
            ({"steps": "2"}, "steps must be an integer, not '2'"),
            ({"steps": True}, "steps must be an integer, not True"),
            ({"shared_pool": "no"}, "shared_pool must be True or False, not 'no'"),
            ({"transport": "pair"}, "transport must be a Transport, not 'pair'; make one with"),
        ],
    )
    def test_check(self, given: dict[str, Any], said: str) -> None:
        """The argument is named, with what was expected; none of Python's own words."""
        table = read_fixture("ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv")
        with pytest.raises(ScheduleError, match=said):
            check(**{"schedule": table, **given})

    @pytest.mark.parametrize("limit", ["2", 1.5, True])
    def test_a_limit_of_sends(self, limit: Any) -> None:
        """Only an int of at least 0 is a limit."""
        with pytest.raises(ScheduleError, match="must be a non-negative integer, not"):
            Transport(max_outstanding_sends=limit)

    @pytest.mark.parametrize("paths", [[], "log.jsonl"])
    def test_logs_of_all_ranks(self, paths: Any) -> None:
        """A single path is refused, not read letter by letter."""
        with pytest.raises(LogError, match="expected the paths of the logs of all ranks"):
            replay_together(paths)


class TestWords:
    """Words of the command line."""

    def test_standard_input(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, table: Path
    ) -> None:
        """`-` is a table that a pipe brings."""
        for command in ("check", "plan"):
            given = io.TextIOWrapper(io.BytesIO(table.read_bytes()))
            monkeypatch.setattr(sys, "stdin", given)
            assert 0 == run(capsys, command, "-")[0]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        assert "standard input: empty" in run(capsys, "check", "-")[2]

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Of the package, and the commit of a checkout."""
        with pytest.raises(SystemExit) as ended:
            main(["--version"])

        assert 0 == ended.value.code
        assert capsys.readouterr().out.startswith("qeffect ")

    def test_a_list_that_begins_with_a_dash(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A value, and no option."""
        code, data = json_of(capsys, "check", "--te-order", "-1,1")

        assert (1, "0B0") == (code, data["action"])

    def test_exit_codes_are_in_every_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Interrupts too."""
        for words in (["--help"], ["check", "--help"], ["runtime", "--help"]):
            with pytest.raises(SystemExit):
                main(words)
            assert "130 interrupted by Ctrl-C" in " ".join(capsys.readouterr().out.split())

    def test_an_uninstalled_tree_says_what_to_do(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without entry points there is no `runtime` command."""
        monkeypatch.setattr(qeffect.cli, "entry_points", lambda **_: ())

        code, _, err = run(capsys, "runtime", "doctor")

        assert 2 == code
        assert "not installed here" in err
        assert "pip install -e ." in err
        assert "unknown command 'rumtine'" in run(capsys, "rumtine")[2]


class TestExitCodes:
    """Exit codes that scripts rely on."""

    def test_a_reader_that_leaves_early_does_not_change_the_verdict(self, table: Path) -> None:
        """`check REFUSED.csv | head -1` still says that it was refused."""
        words = [sys.executable, "-m", "qeffect", "check", str(table), "--pairing", "latest"]
        done = subprocess.run(
            ["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "bash", *words],
            capture_output=True,
            text=True,
            check=False,
        )

        assert (1, "") == (done.returncode, done.stderr)

    @pytest.mark.parametrize("cut", ["line", "lines"])
    def test_a_truncated_log_is_unusable(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, cut: str
    ) -> None:
        """The events before the end kept the contract, so the log is not refused."""
        whole = Path("spec/logs/valid/buckets.jsonl").read_bytes()
        end = 3000 if cut == "line" else whole.index(b"\n", 3000) + 1
        path = tmp_path / "log.jsonl"
        path.write_bytes(whole[:end])

        code, data = json_of(capsys, "replay", str(path))

        assert (2, "unusable", "log.closing") == (code, data["verdict"], data["clause"])
        assert "the log is truncated" in data["error"]
        assert 2 == run(capsys, "replay", str(path), "spec/logs/valid/buckets.jsonl")[0]


class TestMessages:
    """What messages name."""

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--hidden", "8", "--dtype", "int4"), "--dtype: expected one of"),
            (("--hidden", "8", "--layers", "0"), "--layers must be at least 1"),
            (("--dtype", "int4"), "--dtype: expected one of"),
            (("--ffn", "-1"), "--ffn must be at least 1"),
        ],
    )
    def test_a_bad_value_is_named_by_its_option(
        self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
    ) -> None:
        """Also where nothing would use it."""
        code, _, err = run(capsys, "plan", "--te-order", "1,-1", *words)

        assert 2 == code
        assert said in err

    def test_files_are_named_with_their_folders(
        self, capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
    ) -> None:
        """The whole path, as it was typed."""
        bad = tmp_path / "bad.csv"
        bad.write_text("0F0xyz\n")
        times = tmp_path / "times.json"
        times.write_text('{"unit": "ms"}')

        assert str(bad) in run(capsys, "check", str(bad))[2]
        assert str(times) in run(capsys, "plan", str(table), "--durations", str(times))[2]
        missing = str(tmp_path / "no.json")
        assert missing in run(capsys, "plan", str(table), "--durations", missing)[2]

    def test_one_is_singular(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Nothing is `1 microbatches`."""
        assert "1 microbatch, " in run(capsys, "check", "--te-order", "1,-1")[1]

    @pytest.mark.parametrize("columns", [60, 80, 250])
    def test_the_fault_table_fits_its_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
    ) -> None:
        """At most 100 columns where there is room."""
        monkeypatch.setenv("COLUMNS", str(columns))

        _, out, _ = run(capsys, "faults")

        assert max(map(len, out.splitlines())) <= min(columns, 100)

    @pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
    def test_a_path_is_spelled_under_every_locale(
        self, tmp_path: Path, table: Path, encoding: str
    ) -> None:
        """A path is readable even if the locale lacks one of its letters."""
        path = table.rename(tmp_path / "é.csv")
        plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PATH": "/usr/bin:/bin"}
        environ = plain | ({"PYTHONUTF8": "0"} if encoding == "ascii" else {})
        environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        spelled = "é.csv" if encoding == "utf-8" else "\\xe9.csv"

        def ended(*words: str | Path) -> tuple[int, str]:
            done = subprocess.run(
                [sys.executable, "-m", "qeffect", *words],
                capture_output=True,
                env=environ,
                check=False,
            )
            return done.returncode, (done.stdout + done.stderr).decode()

        code, said = ended("check", path, "--svg", tmp_path / "o.svg")
        assert (0, True) == (code, spelled in said), said
        assert "é.csv" in (tmp_path / "o.svg").read_text(encoding="utf-8")
        for words in (("replay", path), ("é.csv",), ("check", path, "--pp", "é.csv")):
            code, said = ended(*words)
            assert (2, True) == (code, spelled in said), said


class TestWrongWords:
    """What is typed wrongly is named by its option, with what was expected and what was found."""

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("check --te-order 1,-1 --svg ''", "--svg: expected a value, found an empty one"),
            ("check ''", "FILE.csv: expected a value, found an empty one"),
            ("check --torch ''", "--torch: expected a value, found an empty one"),
            ("prove --only ''", "--only: expected a value, found an empty one"),
            ("check --torch 1F1B --pp", "--pp: expected a value, found none"),
            ("check --torch 1F1B --pp two", "--pp: expected a whole number, found 'two'"),
            ("check a.csv --queues edges", "found 'edges'; did you mean edge?"),
            ("check a.csv --micro-batches 3", "did you mean --microbatches? (see 'qeffect check"),
            ("chek a.csv", "unknown command 'chek'; expected one of check, faults, plan"),
            ("chek a.csv", "did you mean check?"),
            ("runtime report tables --pp 0", "--pp must be at least 1, not 0"),
            ("runtime report scale --pp 0 --device cpu", "--pp must be at least 1, not 0"),
            ("check --torch zbv", "did you mean ScheduleZBVZeroBubble?"),
            ("check --te-order 1,x", "--te-order: rank 0, step 1: entry 'x'"),
            (
                "check a.csv --max-outstanding-sends -1",
                "--max-outstanding-sends must be at least 0",
            ),
            ("check a.csv --svg /proc/x.svg", "--svg: cannot write /proc/x.svg: No such file"),
            ("prove --out /proc/x.json", "--out: cannot write /proc/x.json: No such file"),
            ("prove --mutants --programs /proc/x", "--programs: cannot write /proc/x: No such"),
            ("runtime corpus --out /proc/x", "--out: cannot write /proc/x: No such file"),
            ("check --random 5 --seed -1", "--seed must be at least 0, not -1"),
            ("check --random 99999999999", "--random must be at most 1,000,000, not 99999999999"),
        ],
    )
    def test_one_line(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        table: Path,
        words: str,
        said: str,
    ) -> None:
        """Exit code 2."""
        monkeypatch.chdir(table.parent)
        table.rename("a.csv")

        code, out, err = run(capsys, *shlex.split(words))

        assert (2, "") == (code, out)
        (line,) = err.splitlines()
        assert said in line

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "not JSON: found an empty file; expected one object"),
            (b"\xff", "not JSON: found a byte that is not UTF-8, at byte 0"),
            (b'{"unit": "ms"', "found a mistake at line 1, column 14 (expecting ',' delimiter)"),
            (b'{"F": ' + b"9" * 5000 + b"}", "found an integer of thousands of digits"),
            (b"[" * 100_000, "found a deeply nested value"),
        ],
    )
    def test_durations_without_python_s_words(
        self,
        capsys: pytest.CaptureFixture[str],
        table: Path,
        tmp_path: Path,
        content: bytes,
        said: str,
    ) -> None:
        """Neither codecs nor limits of the interpreter are named."""
        path = tmp_path / "times.json"
        path.write_bytes(content)

        code, _, err = run(capsys, "plan", str(table), "--durations", str(path))

        assert 2 == code
        assert f"{path}: " in err
        assert said in err

    def test_two_logs_in_one_file(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """The second header is named, and what to do."""
        path = tmp_path / "two.jsonl"
        path.write_bytes(2 * Path("spec/logs/valid/buckets.jsonl").read_bytes())

        code, out, _ = run(capsys, "replay", str(path))

        assert 1 == code
        assert "found another log's header; expected the end of the log" in out
        assert "keep each log in a file of its own" in out

    def test_a_log_with_other_line_ends(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """Something on its way wrote CR LF."""
        path = tmp_path / "log.jsonl"
        whole = Path("spec/logs/valid/buckets.jsonl").read_bytes()
        path.write_bytes(whole.replace(b"\n", b"\r\n"))

        code, _, err = run(capsys, "replay", str(path))

        assert 2 == code
        assert "line 1 ends in CR LF (\\r\\n); expected LF" in err


class TestOutsideGit:
    """Reports of a tree outside a git checkout."""

    def test_the_commit_is_unknown_and_that_is_said_once(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A report of one's own needs no commit."""
        monkeypatch.setattr(report, "_git", lambda *_: None)
        report._say_unknown.cache_clear()

        found = [environment([], out=tmp_path / "r.json") for _ in range(2)]

        assert ["unknown", "unknown"] == [each["commit"] for each in found]
        (line,) = capsys.readouterr().err.splitlines()
        assert "commit is 'unknown'" in line

    @pytest.mark.parametrize("folder", ["verification/reports", "gpu_runtime/lab/reports"])
    def test_a_kept_report_needs_one(self, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        """Pages and tests quote it."""
        monkeypatch.setattr(report, "_git", lambda *_: None)
        root = Path(report.__file__).resolve().parents[1]

        with pytest.raises(UnusableError, match="needs a commit"):
            environment([], out=root / folder / "r.json")


@pytest.mark.parametrize("pairing", ["latest", "contract"])
def test_the_first_refusal_is_said_before_the_next_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pairing: str
) -> None:
    """A reader of `check --fixtures` need not wait for the last table; later ones are counted."""
    zbv = "ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv"
    said: list[str] = []

    def checked(*args: Any, **options: Any) -> Any:
        said.append(capsys.readouterr().err)
        return check(*args, **options)

    monkeypatch.setattr("qeffect.cli.check.fixture_names", lambda: [zbv, zbv, zbv])
    monkeypatch.setattr("qeffect.cli.check.check", checked)

    code, _, last = run(capsys, "check", "--fixtures", "--pairing", pairing)

    assert int(pairing == "latest") == code
    notes = [each.count(f"First refusal. {zbv}: rank 1, step 22 (1W2)") for each in (*said, last)]
    assert ([0, 1, 0, 0] if pairing == "latest" else [0, 0, 0, 0]) == notes


def test_make_check_begins_with_what_takes_seconds() -> None:
    """Tables, faults and failures fail at once; minutes of proofs come last."""
    recipe = Path("Makefile").read_text().partition("\ncheck: ")[2].partition("\n\n")[0]
    words = [line.removeprefix("\t$(BIN)/qeffect ") for line in recipe.splitlines()[1:]]

    assert {"check --fixtures", "faults", "failures"} == set(words[:3])
    assert "prove" == words[-1]
    assert {"ranks", "check --random 2000 --seed 0", "explore", "prove"} == set(words[3:])


def test_counters_have_a_total_and_an_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many of how many, and how long the rest takes."""
    count = Countdown("schedules", 10, clock=iter([0.0, 4.0]).__next__)
    assert "0 of 10 schedules" == count(0)
    assert "4 of 10 schedules, about 6 s left" == count(4)
    assert "10 of 10 schedules" == count(10)

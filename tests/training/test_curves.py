"""
Several runs after one another: each run is as if it ran alone, and the reports of parts are merged
into one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.runner.training_run import RunName
from qeffect.gpu_runtime.lab.statistics.curves import derive_curves
from qeffect.report import UnusableError
from tests.ranks.ranks import launch
from tests.runtime.report_samples import curve_run, curves_report

from . import curves_bodies as bodies
from .helpers import SMALL, text

RUN = (
    SMALL.format(vocabulary=128, layers=4)
    + """[parallel]
pp = 2
[data]
train = "train.npy"
held_out = "train.npy"
[optimizer]
rate = 0.02
warmup = 2
[run]
steps = 4
log_every = 2
evaluate_every = 3
evaluate_windows = 6
"""
)
COMMIT = "1" * 40
#: What of a run's record is its own, beside how long it took.
BITS = ("losses", "held_out", "state", "tensors", "parameters", "moved", "cut")


def file(folder: Path) -> Path:
    """A run that learns a sentence."""
    text(folder)
    path = folder / "run.toml"
    path.write_text(RUN)
    return path


def bits(record: dict[str, Any]) -> dict[str, Any]:
    """What a run's record says of its numbers."""
    return {name: record[name] for name in BITS}


@pytest.mark.ci
def test_a_run_is_the_same_whatever_ran_before_it(tmp_path: Path) -> None:
    """
    In processes that had others before, and in fresh ones: losses, held-out losses, every tensor.

    Native and guarded are the same under one schedule and seed, another seed or order is not. A run
    that ended leaves no pipeline behind, and one that was cut short is the beginning of the whole.
    """
    config = file(tmp_path)
    alone = RUN.replace("pp = 2", "pp = 1").replace("layers = 4", "layers = 2")
    config.write_text(alone.replace("[run]", '[run]\nbackend = "transformer-engine"'))
    path = str(config)
    names = ["guarded:il:0", "native:il:0", "guarded:zbv:1", "guarded:il:0"]
    (tmp_path / "one").mkdir()
    said = launch(1, tmp_path / "one", bodies.in_turn, path, names, [99] * 4)
    assert said.codes == [0]
    runs = said.words[0]
    assert [run["alive"] for run in runs] == [0] * 4
    assert bits(runs[0]) == bits(runs[3]) == bits(runs[1])
    assert runs[0]["losses"] != runs[2]["losses"]
    (tmp_path / "two").mkdir()
    fresh = launch(
        1, tmp_path / "two", bodies.in_turn, path, ["guarded:zbv:1", "native:zbv:1"], [99, 2]
    )
    assert fresh.codes == [0]
    alone, short = fresh.words[0]
    assert bits(alone) == bits(runs[2])
    assert short["losses"] == alone["losses"][:3]
    assert short["held_out"] == alone["held_out"][:1]

    run = runs[0]
    assert [step for step, _ in run["clock"]] == [2, 3, 4]
    assert [step for step, _ in run["held_out"]] == [3, 4]
    times = [seconds for _, seconds in run["clock"]]
    assert times == sorted(times)
    assert len(run["losses"]) == 4
    assert run["losses"][0] == pytest.approx(4.85, abs=0.1)  # ln 128
    assert run["moved"] == 0
    assert run["tensors"] > 100
    assert run["tokens_a_step"] == 4 * 16


@pytest.mark.nightly
def test_an_order_moves_scales_unless_a_history_is_whole_steps_long(tmp_path: Path) -> None:
    """Eight F a step and rank: a history of eight has the same window under every order."""
    file(tmp_path)
    cases = []
    for history in (8, 2):
        own = tmp_path / f"h{history}.toml"
        own.write_text(RUN.replace("history = 4", f"history = {history}"))
        out = str(tmp_path / f"h{history}.json")
        runs = ["--runs", "guarded:il:0", "guarded:zbv:0", "--steps", "6"]
        cases.append([str(own), *runs, "--out", out, "--commit", COMMIT, "--quiet"])
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.commands, cases)
    assert said.codes == [0, 0]
    same = []
    for case in cases:
        il, zbv = json.loads(Path(case[case.index("--out") + 1]).read_text())["raw"]["runs"]
        same.append((il["losses"], il["held_out"]) == (zbv["losses"], zbv["held_out"]))
    assert same == [True, False]


@pytest.mark.ci
def test_all_runs_of_a_report_have_one_measured_cut(tmp_path: Path) -> None:
    """Times are taken once: native and guarded are of one cut, whatever a second look finds."""
    config = file(tmp_path)
    config.write_text(RUN.replace("pp = 2", 'pp = 1\ncut = "measured"'))
    out = str(tmp_path / "out.json")
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.measured_apart, str(config), out)
    assert said.codes == [0]
    assert said.words[0] == [0, [[2, 2], [2, 2]], 1]
    jsonschema.Draft202012Validator(reports.schema()).validate(json.loads(Path(out).read_text()))


@pytest.mark.nightly
def test_parts_become_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command twice, as two launches would be, merged: it says that the bits are the same."""
    config = str(file(tmp_path))
    a, b, both = (tmp_path / f"{name}.json" for name in ("a", "b", "both"))
    words = ["--commit", COMMIT, "--quiet", "--json"]
    cases = [
        [config, "--runs", "native:il:0", "guarded:zbv:0", "--out", str(a), *words],
        [config, "--runs", "guarded:il:0", "--out", str(b), *words],
        [config, "--runs", "guarded:il:0", "--steps", "2", "--held-out-steps", "2",
         "--out", str(both), *words],
        [config, "--runs", "guarded:il:0", "--limit-s", "1e-9", "--out", str(both), *words],
        [config, "--runs", "guarded:il:0:nowhere", "--out", str(both), *words],
    ]  # fmt: skip
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.commands, cases)
    assert said.codes == [0, 0]
    codes, outs, _ = zip(*said.words[0], strict=True)
    assert [0, 0, 0, 2, 2] == [*codes]
    assert "no run could begin" in outs[3]
    assert "[model] head" in outs[4]
    short = json.loads(both.read_text())
    assert short["configuration"]["windows"] == 8
    assert len(short["raw"]["runs"][0]["losses"]) == 2

    assert 2 == main(
        ["runtime", "report", "curves", "--merge", str(a), str(both), "--out", str(both)]
    )
    assert "[run] steps is 2, expected" in capsys.readouterr().err
    assert 0 == main(["runtime", "report", "curves", "--merge", str(a), str(b), "--out", str(both)])
    assert "0 of 4 losses differ" in capsys.readouterr().out
    report = json.loads(both.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    assert report["complete"]
    assert report["environment"]["commit"] == COMMIT
    assert report["derived"] == json.loads(json.dumps(derive_curves(report["raw"])))
    order = [(run["side"], run["schedule"]) for run in report["raw"]["runs"]]
    assert order == [("native", "il"), ("guarded", "zbv"), ("guarded", "il")]
    assert [part["runs"] for part in report["configuration"]["parts"]] == [2, 1]
    (row,) = report["derived"]["same_order"]
    assert (row["losses_differ"], row["state_differs"]) == (0, False)
    (row,) = report["derived"]["non_inferiority"]
    assert row["schedule"] == "zbv"


@pytest.mark.ci
def test_a_report_that_the_limit_cut_short_is_not_complete(tmp_path: Path) -> None:
    """Ended in its first run, between its two runs, and at the end of the last one."""
    config = file(tmp_path)
    config.write_text(RUN.replace("pp = 2", "pp = 1").replace("layers = 4", "layers = 2"))
    out = str(tmp_path / "after")
    (tmp_path / "said").mkdir()
    # Looks at the clock: at the start; then before a run, and at its steps 2, 3 and 4.
    looks = [2, 4, 5, 8]
    runs = ["guarded:il:0", "guarded:il:1"]
    said = launch(1, tmp_path / "said", bodies.limited, str(config), runs, out, looks)
    assert said.codes == [0]
    told = {
        2: (
            [2],
            False,
            "did not end within --limit-s 9: guarded:il:0; did not begin within --limit-s",
        ),
        4: (
            [4],
            False,
            "did not begin within --limit-s 9: guarded:il:1; the report is NOT complete",
        ),
        5: (
            [4],
            False,
            "did not begin within --limit-s 9: guarded:il:1; the report is NOT complete",
        ),
        8: ([4, 4], True, "2 runs, reference on cpu"),
    }
    for limit, (code, shown) in zip(looks, said.words[0], strict=True):
        steps, complete, line = told[limit]
        report = json.loads(Path(f"{out}{limit}.json").read_text())
        assert code == 0
        assert [len(run["losses"]) for run in report["raw"]["runs"]] == steps
        assert report["complete"] is complete
        assert line in shown
        assert ("NOT complete" in shown) is not complete


def _other(place: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(report: dict[str, Any]) -> None:
        report[place][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_other("environment", "commit", "2" * 40), "commit is '222"),
        (_other("environment", "gpu", "another"), "gpu is 'another'"),
        (_other("environment", "packages", {"torch": "2.99"}), "packages is {'torch': '2.99'}"),
        (_other("configuration", "model", {"hidden": 64}), "[model] hidden is 64"),
        (_other("configuration", "windows", 3), "windows is 3"),
        (lambda report: report.update(kind="train"), "expected a report of kind 'curves'"),
        (lambda report: report["raw"]["runs"][0].update(seed=0), "guarded:il:0:te is in"),
        (lambda report: report.pop("environment"), "found one without environment"),
        (
            lambda report: report["raw"]["runs"][0].pop("clock"),
            "incomplete measurements (KeyError: 'cl",
        ),
        (_other("configuration", "windows", float("nan")), "found NaN, which is not a JSON number"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], None],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line that names the file, what differs and what to do; nothing is written."""
    a, b, out = (tmp_path / f"{name}.json" for name in ("a", "b", "out"))
    a.write_text(json.dumps(curves_report(curve_run("native"), curve_run())))
    other = copy.deepcopy(curves_report(curve_run(seed=1)))
    b.write_text(json.dumps(other))
    assert 0 == main(["runtime", "report", "curves", "--merge", str(a), str(b), "--out", str(out)])
    out.unlink()
    change(other)
    b.write_text(json.dumps(other))
    capsys.readouterr()
    assert 2 == main(["runtime", "report", "curves", "--merge", str(a), str(b), "--out", str(out)])
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert str(b) in line
    assert not out.exists()


def test_losses_that_differ_are_a_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and the report says how many, also where a part did not come to its end."""
    part, out = tmp_path / "part.json", tmp_path / "out.json"
    report = curves_report(curve_run("native"), curve_run(losses=[5.0] * 40))
    report["complete"] = False
    part.write_text(json.dumps(report))
    assert 1 == main(["runtime", "report", "curves", "--merge", str(part), "--out", str(out)])
    assert "39 of 40 losses differ" in capsys.readouterr().out


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_merged_report_is_complete_where_all_parts_are(
    first: bool, second: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that ended early leaves out runs, and so does what it is merged into."""
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for seed, (path, complete) in enumerate(zip(paths, (first, second), strict=True)):
        report = curves_report(curve_run("native", seed=seed), curve_run(seed=seed))
        report["complete"] = complete
        path.write_text(json.dumps(report))
    out = tmp_path / "out.json"
    assert 0 == main(
        ["runtime", "report", "curves", "--merge", *map(str, paths), "--out", str(out)]
    )
    assert ("NOT complete" in capsys.readouterr().out) is not (first and second)
    merged = json.loads(out.read_text())
    assert merged["complete"] is (first and second)
    assert merged["environment"]["argv"] == [
        "runtime",
        "report",
        "curves",
        "--merge",
        "a.json",
        "b.json",
    ]
    jsonschema.Draft202012Validator(reports.schema()).validate(merged)


@pytest.mark.parametrize(
    "name", ["", "guarded", "guarded:il", "guarded:il:x", "ours:il:0", "guarded:no:0",
             "guarded:il:0:", "guarded:il:-1", "guarded:il:0:te:1"],
)  # fmt: skip
def test_a_name_that_is_none_is_refused(name: str) -> None:
    """It says what a name is."""
    with pytest.raises(UnusableError, match="expected SIDE:SCHEDULE:SEED"):
        RunName.of(name)
    assert str(RunName.of("native:zbv:3:torchao")) == "native:zbv:3:torchao"


def test_what_cannot_be_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any rank waits for another."""
    config, out = str(file(tmp_path)), str(tmp_path / "out.json")
    alone = tmp_path / "alone.toml"
    alone.write_text(RUN.replace('held_out = "train.npy"\n', ""))
    most = tmp_path / "most.toml"
    most.write_text(RUN.replace("[model]", f"[model]\nseed = {2**47 - 1}"))
    run = ["--runs", "guarded:il:0"]
    for words, told in (
        ([], "expected a training file and --runs"),
        ([config], "expected a training file and --runs"),
        ([config, "--runs", "guarded:il:0", "guarded:il:0"], "--runs: expected each run once"),
        ([config, *run, "--steps", "0"], "--steps 0: expected a number above 0"),
        ([config, "--runs", "guarded:il:0", "guarded:il:0:te"], "--runs: expected each run once"),
        ([str(most), "--runs", "guarded:il:1"], "[model] seed: expected a whole number"),
        ([config, *run], "take 2 processes"),
        ([str(alone), *run], "[data] held_out"),
        (["--merge", out, *run], "--merge starts no runs"),
        (["--merge", out], "No such file"),
    ):
        commit = [] if "--merge" in words else ["--commit", COMMIT]
        assert 2 == main(["runtime", "report", "curves", *words, *commit, "--out", out])
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line

"""The training file: its defaults, and the error message for each bad file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.membership import Limits, join, launcher_ranks
from qeffect.gpu_runtime.training import config, config_page, fields
from qeffect.gpu_runtime.training.config import TABLES
from qeffect.gpu_runtime.training.config_file import differences, read
from qeffect.gpu_runtime.training.job_assembly import job_of
from qeffect.report import UnusableError
from tests.ranks.ranks import launch

from . import language_bodies as bodies
from .helpers import CONFIG, text


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    """The small run's file, with places of it changed."""
    body = CONFIG
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    path = folder / "run.toml"
    path.write_text(body)
    text(folder)
    return path


@pytest.mark.parametrize(
    ("bad", "words", "said"),
    [
        (("steps = 3", "steps = 0"), ("--steps", "2"), "[run] steps: expected a whole number"),
        (("steps = 3", "steps = 'all'"), ("--steps", "2"), "found 'all'"),
        (
            ("steps = 3", "steps = 3\ndevice = 'tpu'"),
            ("--device", "cpu"),
            "[run] device: expected one of 'cpu', 'cuda'",
        ),
    ],
)
def test_a_bad_value_is_refused_beside_an_option_that_replaces_it(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    bad: tuple[str, str],
    words: tuple[str, ...],
    said: str,
) -> None:
    """Otherwise the file would fail as soon as the option is left out."""
    code = main(["runtime", "train", str(written(tmp_path, bad)), *words])

    assert 2 == code
    assert said in capsys.readouterr().err


def test_every_field_has_a_default(tmp_path: Path) -> None:
    """An empty file is a run, and every field of every table knows what it expects."""
    (tmp_path / "empty.toml").write_text("")
    found = read(tmp_path / "empty.toml")

    for name, kind in TABLES.items():
        table = getattr(found, name)
        for field in attrs.fields(kind):
            assert field.metadata["fits"](getattr(table, field.name)), (name, field.name)
            assert f"{field.name}: " in (kind.__doc__ or ""), (name, field.name)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[model]", "[modle]", "unknown table [modle]; expected one of model, parallel"),
        ("[model]", "model = 3\n[x]", "unknown table [x]"),
        ("[model]", "[modle]", "did you mean model?"),
        ("layers = 2", "layres = 2", "did you mean layers?"),
        ("[model]", "steps = 5\n[model]", "run.toml: steps: expected fields below the name of a"),
        (
            "[model]",
            "steps = 5\n[model]",
            "found steps before the first table; move it below [run]",
        ),
        ("[model]", "model = 5\n[modle]", "unknown table [modle]"),
        ("[model]", "[[model]]", "model: expected a table, found [{"),
        ("layers = 2", "layers = true", "at least 1, found true"),
        ("layers = 2", "layers = 2020-01-02", "at least 1, found 2020-01-02"),
        ("layers = 2", "layers = 12:30:00", "at least 1, found 12:30:00"),
        ("steps = 3", "steps = 3 4", "found a mistake: expected newline or end of document"),
        ("layers = 2", "layer = 2", "[model] layer: unknown field; expected one of vocab"),
        ("layers = 2", "layers = 0", "[model] layers: expected a whole number of at least 1, fo"),
        ("layers = 2", "layers = true", "[model] layers: expected a whole number of at least 1"),
        ("layers = 2", 'layers = "two"', "found 'two'"),
        ("hidden = 32", "hidden = 33", "[model] hidden 33 is not a multiple of heads 2"),
        ("sequence = 16", "sequence = 1", "run.toml: [model] sequence and [parallel] batch: seq"),
        (
            "hidden = 32",
            "hidden = 36",
            "run.toml: [model] hidden is 36; FP8 products need a mul",
        ),
        ("vocabulary = 256", "vocabulary = 250", "[model] vocabulary: expected a multiple of 16"),
        ("vocabulary = 256", "vocabulary = 64", "expected tokens below the vocabulary of 64"),
        ('"1f1b"', '"2f2b"', "[parallel] schedule: expected one of il, izb"),
        ('"1f1b"', '"ScheduleNone"', "[parallel] "),
        ("batch = 2", "batch = 2\ncut = [1, 1]", "expected 1 stages with 2 layers together"),
        ("batch = 2", "batch = 2\nwalks = 3", "[parallel] microbatches is 2 and walks is 3; exp"),
        ("batch = 2", "batch = 2\nwalks = 2\nrule = 'copied'", "[parallel] walks is 2 and rule is"),
        ("batch = 2", 'batch = 2\ncut = "odd"', "[parallel] cut: expected 'even', 'balanced'"),
        (
            "batch = 2",
            "batch = 2\nembedding_cost = 0.5",
            "embedding_cost: expected cut = 'balanced' beside it, found cut = 'even'",
        ),
        (
            "batch = 2",
            "batch = 2\nhead_cost = 1.0\ncut = [2]",
            "found cut = [2]; leave head_cost out",
        ),
        ("batch = 2", "batch = 2\npp = 2", "torchrun --nproc-per-node 2"),
        ("batch = 2", "batch = 2\nvpp = 3", "[parallel] "),
        ("history = 4", "history = 0", "[model] history: expected a whole number"),
        ('"train.npy"', '"none.npy"', "none.npy: file not found"),
        ('"train.npy"', "3", "[data] train: expected a text, found 3"),
        ("rate = 0.02", "rate = 0", "[optimizer] rate: expected a number above 0, found 0"),
        ("rate = 0.02", "rate = nan", "[optimizer] rate: expected a number above 0, found nan"),
        ("steps = 3", "steps = 3\ndevice = 'tpu'", "[run] device: expected one of 'cpu', 'cuda'"),
        ("steps = 3", f"steps = {10**30}", "a whole number of at least 1 and at most 9,007,199,"),
        ("steps = 3", f"steps = 0x{16**6000:x}", "found a number of too many digits"),
        ("steps = 3", f"steps = {'9' * 6000}", "expected a TOML file, found"),
        (
            "steps = 3",
            f"steps = 3\n[limits]\ncommit_s = {10**400}",
            "above 0 and at most 1,000,000,000",
        ),
        (
            "steps = 3",
            "steps = 3\n[limits]\nstart_s = 1e300",
            "[limits] start_s: expected a number above",
        ),
        (
            "steps = 3",
            "steps = 3\n[limits]\ngrace_s = 0",
            "[limits] grace_s: expected a number above 0",
        ),
        (
            "steps = 3",
            "steps = 3\nstart_s = 60",
            "[run] start_s: this field has moved; write it",
        ),
        (
            "steps = 3",
            "steps = 3\ncommit_s = 60",
            "[run] commit_s: this field has moved; write it",
        ),
        ("layers = 2", f"layers = 2\nseed = {2**63}", "[model] seed: expected a whole number of"),
        ("hidden = 32", f"hidden = {2**40}", "[model] hidden: expected a whole number of at l"),
        ("rate = 0.02", "rate = 1e-5", "[optimizer] least_rate: expected at most rate, which is"),
        ('"train.npy"', '"a\\u0000b"', "[data] train: expected a text without NUL"),
        ("steps = 3", 'steps = 3\nlog = "a\\u0000b"', "[run] log: expected a text without NUL"),
        ('"train.npy"', '"train.npy"\nheld_out = "no.npy"', "[data] held_out: "),
        ("steps = 3", "steps = ", "expected a TOML file, found"),
        ("history = 4", 'history = 4\nscales = "step"', "[model] scales: expected one of 'action'"),
    ],
)
def test_a_file_that_cannot_be_used(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the file and the field; exit code 2, and nothing was trained."""
    code = main(["runtime", "train", str(written(tmp_path, (old, new)))])
    out, err = capsys.readouterr()

    assert 2 == code
    assert not out
    (line,) = [one for one in err.splitlines() if one]
    assert said in line
    assert line.count("run.toml") == 1 or "torchrun" in line
    assert "qeffect runtime corpus, or name another as [data] train" not in line


def test_epoch_scales_need_deterministic_kernels(tmp_path: Path) -> None:
    """The recipe implies them: a file that rules them out is refused."""
    text(tmp_path)
    file = tmp_path / "run.toml"
    given = CONFIG.replace("history = 4", 'history = 4\nscales = "epoch"')
    file.write_text(given)
    assert read(file).model.scales == "epoch"
    file.write_text(given.replace("steps = 3", "steps = 3\ndeterministic = false"))
    with pytest.raises(UnusableError, match=r"\[model\] scales: expected \[run\] deterministic"):
        read(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("", ""), ""),
        (('scales = "epoch"\n', ""), "expected scales = 'epoch'.*found scales = 'action'"),
        (("wgrad_group = 2", "wgrad_group = 3"), "expected a divisor of the 2 microbatches.*3"),
        (("wgrad_group = 2", "wgrad_group = 0"), "expected a whole number .* found 0"),
        (
            ("microbatches = 2", 'microbatches = 2\nrule = "copied"'),
            r"expected \[parallel\] rule = 'accumulate'.*'copied'",
        ),
    ],
)
def test_what_a_group_of_wgrads_needs(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    """Scales that stand still, one destination, and whole groups; the message names the field."""
    text(tmp_path)
    file = tmp_path / "run.toml"
    group = 'history = 4\nscales = "epoch"\nwgrad_group = 2'
    file.write_text(CONFIG.replace("history = 4", group).replace(*change))
    if not said:
        assert job_of(read(file)).wgrad_group == 2
        return
    with pytest.raises(UnusableError, match=rf"\[model\] wgrad_group: {said}"):
        job_of(read(file))


FOUR_STAGES = (("layers = 2", "layers = 4"), ('schedule = "1f1b"', 'schedule = "il"\nvpp = 4'))


@pytest.mark.parametrize(
    ("asked", "stages"),
    [('"none"', ()), ('"all"', (0, 1, 2, 3)), ("[3, 1]", (1, 3)), ("[0]", (0,))],
)
def test_stages_that_recompute(asked: str, stages: tuple[int, ...], tmp_path: Path) -> None:
    """By their numbers in the model; none of them by default."""
    assert job_of(read(written(tmp_path))).recompute == ()
    file = written(tmp_path, *FOUR_STAGES, ("[parallel]", f"[parallel]\nrecompute = {asked}"))
    assert job_of(read(file)).recompute == stages


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"[parallel]": "recompute = [4]"}, "expected stages 0 to 3, found 4"),
        ({"[parallel]": "recompute = []"}, "expected 'none', 'all', or a list .* found"),
        ({"[parallel]": "recompute = [1, 1]"}, "expected 'none', 'all', or a list .* found"),
        ({"[parallel]": "recompute = true"}, "expected 'none', 'all', or a list .* found"),
        (
            {"[parallel]": 'recompute = [1]\ncut = "measured"'},
            "expected 'all' or 'none', because cut = 'measured'",
        ),
        (
            {
                "[parallel]": 'recompute = "all"',
                "[model]": "dropout = 0.1",
                "[run]": 'backend = "transformer-engine"',
            },
            r"expected \[model\] dropout = 0.0.* found 0.1",
        ),
    ],
)
def test_stages_that_cannot_recompute(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    """The message names the field, what was expected, and what was found."""
    lines = ((table, f"{table}\n{line}") for table, line in changes.items())
    file = written(tmp_path, *FOUR_STAGES, *lines)
    with pytest.raises(UnusableError, match=rf"\[parallel\] recompute: {said}"):
        job_of(read(file))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "cannot be read: Is a directory; name a file in it"),
        (lambda path: None, "cannot be read: No such file or directory; check its name"),
        (lambda path: path.write_bytes(b"\xff"), "found a byte that is not UTF-8, at byte 0"),
    ],
)
def test_what_is_no_text(
    make: Callable[[Path], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named, what was found, and what to do."""
    path = tmp_path / "run.toml"
    make(path)

    assert 2 == main(["runtime", "train", str(path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: " in line
    assert said in line


@pytest.mark.parametrize("below", ["", "/inside"])
def test_a_corpus_is_not_read_for_a_place_that_is_a_file(
    below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place is refused before anything is read or encoded."""
    (tmp_path / "file").write_text("kept")

    assert 2 == main(["runtime", "corpus", "--out", f"{tmp_path}/file{below}"])

    (line,) = capsys.readouterr().err.splitlines()
    assert f"expected a folder, found the file {tmp_path}/file; name a folder" in line
    assert "kept" == (tmp_path / "file").read_text()


EXAMPLES = Path(config.__file__).parent / "examples"


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("h200_short", "[optimizer] warmup was 100, is 10"),
        ("h200_history", "[model] history was 16, is 12"),
        ("h200_launched", "[parallel] mode was 'replays', is 'one launch'"),
    ],
)
def test_an_example_differs_from_its_base_in_one_field(name: str, differs: str) -> None:
    """What one of them shows is then shown of that field."""
    base, own = (read(EXAMPLES / f"{n}.toml").record() for n in ("h200", name))
    assert [differs] == differences(base, own)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ("captured = true", "replays"),
        ("captured = false", "eager"),
        ("one_launch = true", "one launch"),
        ("one_launch = false\ncaptured = false", "eager"),
    ],
)
def test_flags_of_an_earlier_release_are_a_mode(flags: str, mode: str, tmp_path: Path) -> None:
    """A file that has them is read with a warning, which says what to write."""
    path = written(tmp_path, ("batch = 2", f"batch = 2\n{flags}"))
    with pytest.warns(DeprecationWarning, match=f'write mode = "{mode}"'):
        found = read(path)
    assert found.parallel.mode == mode


def test_limits_of_the_file_are_those_of_every_wait(tmp_path: Path) -> None:
    """Each of the four reaches the ranks; a file without them has the ranks' own defaults."""
    (tmp_path / "own.toml").write_text(
        "[limits]\nstart_s = 1\nmessage_s = 2.5\ncommit_s = 3\ngrace_s = 4\n"
    )
    (tmp_path / "none.toml").write_text("")

    assert read(tmp_path / "own.toml").waits() == Limits(start=1, message=2.5, commit=3, grace=4)
    assert read(tmp_path / "none.toml").waits() == Limits()


def test_limits_of_an_earlier_release_are_compared() -> None:
    """Which of them a run has changed since its checkpoint was written."""
    saved = {"run": {"steps": 3, "start_s": 60.0, "commit_s": 30.0}}
    own = {"run": {"steps": 3}, "limits": {"start_s": 60.0, "commit_s": 40.0}}

    assert differences(saved, own) == ["[limits] commit_s was 30.0, is 40.0"]


def test_a_checkpoint_of_an_earlier_release_has_a_mode(tmp_path: Path) -> None:
    """Its record has the flags; a run that goes on from it differs only where it does."""
    own = read(written(tmp_path)).record()
    parallel = {k: v for k, v in own["parallel"].items() if k != "mode"}
    saved = {**own, "parallel": {**parallel, "captured": True, "one_launch": False}}

    assert differences(saved, own) == []
    saved["parallel"]["one_launch"] = True
    assert differences(saved, own) == ["[parallel] mode was 'one launch', is 'replays'"]


def test_a_cost_is_used_where_stages_are_balanced(tmp_path: Path) -> None:
    """Beside any other cut it is refused, as the table of files above has it."""
    path = written(tmp_path, ("batch = 2", 'batch = 2\ncut = "balanced"\nembedding_cost = 0.5'))
    assert 0.5 == read(path).parallel.embedding_cost


def test_a_launcher_that_says_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and 2, of both commands, also where it is the rank itself."""
    path = written(tmp_path)
    monkeypatch.setattr("qeffect.gpu_runtime.ranks.processes._LAST_WORD_S", 0.0)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "abc")
        for command in (["train", str(path)], ["pipeline"]):
            assert main(["runtime", *command]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{name}: expected a whole number" in line
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"RANK": "5", "WORLD_SIZE": "1"}, "below WORLD_SIZE, which is 1, found 5"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "below WORLD_SIZE, which is 0, found 0"),
        ({"RANK": "9" * 5000}, "RANK: expected a whole number"),
        ({"MASTER_PORT": "999999"}, "MASTER_PORT: expected a whole number"),
        (
            {"MASTER_PORT": "x"},
            "of at most 65535, as torchrun sets it, found 'x'; start the ranks with torchrun",
        ),
    ],
)
def test_a_launcher_that_cannot_be(
    given: dict[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line and 2 at once; a rank that is none of so many would wait for the others."""
    path = written(tmp_path)
    for name, value in ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "1"} | given).items():
        monkeypatch.setenv(name, value)
    for command in (["train", str(path)], ["pipeline", "--pp", "1", "--schedule", "1f1b"]):
        assert main(["runtime", *command]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
    with pytest.raises(BackendError, match=re.escape(told)):
        join("cpu")


def test_without_a_launcher_its_port_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets one like this for a service that is called master."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    assert launcher_ranks() == (0, None)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Named, as every path is."""
    with pytest.raises(UnusableError, match=r"none\.toml: cannot be read: No such file"):
        read(tmp_path / "none.toml")


def test_the_command_line_overrides(tmp_path: Path) -> None:
    """A typed value replaces the file's value and is checked in the same way."""
    path = written(tmp_path)

    assert 7 == read(path, run={"steps": 7, "device": None}).run.steps
    with pytest.raises(UnusableError, match=r"\[run\] steps: expected a whole number"):
        read(path, run={"steps": 0})


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which is then the only rank."""
    command = [sys.executable, "-m", "qeffect", "runtime", "train", str(path), *options]
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(command, capture_output=True, text=True, env=clean, check=False)


def test_one_process_trains_alone(tmp_path: Path) -> None:
    """PP=1 needs no torchrun; its losses are the native run's, which it compares bit for bit."""
    path = written(tmp_path)
    done = run(path, "--json", "--quiet", "--compare", "all")
    said = json.loads(done.stdout)

    assert 0 == done.returncode, done.stderr
    assert "accepted" == said["verdict"]
    assert said["losses"] == said["native_losses"]
    assert 3 == len(said["losses"])
    assert said["categories"]["parameters"] == {"compared": 3 * 29, "differ": 0}


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ('steps = 3\nlog = "train.npy/log"', "[run] log: "),
        ('steps = 3\nevent_logs = "train.npy/log"', "[run] event_logs: "),
        ('steps = 3\ntensorboard = "board"', "[run] tensorboard: the package tensorboard"),
    ],
)
def test_a_place_that_cannot_be_written(new: str, said: str, tmp_path: Path) -> None:
    """What only a rank can find is one line and exit code 2 too."""
    path = written(tmp_path, ("steps = 3", new))
    (tmp_path / "said").mkdir()
    told = launch(1, tmp_path / "said", bodies.trained, str(path))

    code, out, err = told.words[0]
    assert (2, "") == (code, out)
    (line,) = err.splitlines()
    assert said in line
    assert "run.toml" in line


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    """Some editors write one; a training file may begin with it."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\nsteps = 7\n")
    assert read(path).run.steps == 7


def test_a_folder_with_a_name_that_no_file_may_have_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cause of the start looks for checkpoints there, and must not fail itself."""
    text(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG + f'[checkpoint]\nfolder = "{"k" * 300}"\n')
    (tmp_path / "said").mkdir()
    told = launch(1, tmp_path / "said", bodies.trained, str(tmp_path / "run.toml"))
    code, out, err = told.words[0]
    assert (2, "") == (code, out)
    (line,) = err.splitlines()
    assert "internal error" not in line
    assert "[checkpoint] folder: " in line
    assert "File name too long" in line


PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_has_every_field_as_it_is() -> None:
    """`python -m qeffect.gpu_runtime.training.config_page` writes it."""
    assert PAGE.read_text(encoding="utf-8") == config_page.page()


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_the_page_has_every_column(name: str) -> None:
    """Type, default, unit, what is allowed, what holds on resume, and what it does."""
    names = [field.name for field in attrs.fields(TABLES[name])]
    table = config_page.rows(TABLES[name])

    assert [f"`{field}`" for field in names] == [row[0] for row in table]
    for row in table:
        assert len(config_page.COLUMNS) == len(row)
        assert all(cell.strip() for cell in row), row
        assert not any("|" in cell or "\n" in cell for cell in row), row


def test_a_field_that_must_stay_is_compared_with_the_checkpoint() -> None:
    """What the page promises on resume of the model is what a load requires."""
    said = {field.name: field.metadata["resume"] for field in attrs.fields(config.Model)}

    assert {"seed", "start", "start_names"} == {
        name for name, resume in said.items() if resume != fields.SAME
    }

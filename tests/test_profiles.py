"""
The test suite's own options: the profile, the tests that a profile leaves out, and the record of a
run.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import profiles
from tests.conftest import selects_devices
from tests.device_lock import held
from tests.docs.record_block import row
from tests.record import COUNTED, CUT_OFF, RECORDS, main
from tests.record import _commit as commit_of
from tests.record import record as record_of
from tests.run_log import RunLog, bare_id

ROOT = Path(__file__).resolve().parents[1]
RUN = (sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider")


#: A shell that ignores interrupts, as it does for a background program, and becomes the program.
IN_THE_BACKGROUND = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")


def run(
    *words: str, path: Path | None = None, shell: tuple[str, ...] = (), **variables: str
) -> tuple[int, str]:
    """Run pytest with a folder first on the import path; return its exit code and output."""
    left = {n: v for n, v in os.environ.items() if n not in ("CI", "HYPOTHESIS_PROFILE")}
    paths = [str(p) for p in (path, ROOT) if p is not None]
    done = subprocess.run(
        [*shell, *RUN, *words],
        cwd=ROOT,
        env=left | variables | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.ci
def test_this_runs_where_matrices_are_whole() -> None:
    """The profile `dev` leaves this test out. Another test runs it under `ci`, by its name."""
    assert not profiles.THINNED


def test_what_a_test_starts_can_be_interrupted() -> None:
    """Programs of a test would inherit ignored interrupts, so the suite does not ignore them."""
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_a_suite_in_the_background_can_interrupt_what_it_starts() -> None:
    """A shell makes background programs ignore interrupts; the suite undoes this."""
    node = "tests/test_profiles.py::test_what_a_test_starts_can_be_interrupted"

    code, told = run(node, shell=IN_THE_BACKGROUND)

    assert code == 0, told


def test_a_run_says_its_profile_and_leaves_a_record(tmp_path: Path) -> None:
    """Under `ci` a test marked `ci` runs, even if a plugin warns when it is configured."""
    (tmp_path / "pytest_noisy.py").write_text(
        "import pytest, warnings\n"
        "def pytest_configure():\n"
        "    warnings.warn(pytest.PytestDeprecationWarning('an option is unset'))\n"
    )
    file = tmp_path / "records" / "run.json"
    node = "tests/test_profiles.py::test_this_runs_where_matrices_are_whole"
    options = ("-p", "pytest_noisy", "--record", str(file), "--commit", "1" * 40)

    code, told = run(*options, node, path=tmp_path, CI="1")

    assert code == 0, told
    assert "profile: ci (CI is set): 150 examples, matrices with the rows marked ci" in told
    record = json.loads(file.read_text())
    assert record["counts"] == {name: int(name == "passed") for name in COUNTED}
    assert (record["profile"], record["commit"], record["exit_status"]) == ("ci", "1" * 40, 0)
    assert record["versions"].keys() >= {"python", "pytest", "hypothesis", "attrs"}
    assert record["hardware"]["cores"] == os.cpu_count()


#: Stand-ins for two common plugins, which warn while pytest is configured. Without the filter in
#: `pyproject.toml`, pytest 9.1 ends at the warning of pytest_benchmark, which comes last.
COMMON_PLUGINS = {
    "pytest_benchmark": """
import pytest, warnings

class PytestBenchmarkWarning(pytest.PytestWarning):
    pass

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    warnings.warn(PytestBenchmarkWarning("Benchmarks are disabled because xdist is active."))
""",
    "pytest_asyncio": """
import pytest, warnings

def pytest_configure(config):
    warnings.warn(pytest.PytestDeprecationWarning("asyncio_default_fixture_loop_scope is unset."))
""",
}


@pytest.mark.parametrize("name", COMMON_PLUGINS)
def test_a_plugin_that_is_installed_does_not_end_the_suite(tmp_path: Path, name: str) -> None:
    """Pytest loads the plugin by its entry point, and the plugin's warning is not an error."""
    installed = tmp_path / f"{name}-1.0.dist-info"
    for file, content in (
        (tmp_path / name / "__init__.py", ""),
        (tmp_path / name / "plugin.py", COMMON_PLUGINS[name]),
        (installed / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"),
        (installed / "entry_points.txt", f"[pytest11]\n{name} = {name}.plugin\n"),
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)

    node = "tests/test_profiles.py::test_what_a_test_starts_can_be_interrupted"
    code, told = run("--trace-config", node, path=tmp_path)

    assert code == 0, told
    assert str(tmp_path / name / "plugin.py") in told, "expected pytest to load the plugin"


def test_one_worker_runs_a_group(tmp_path: Path) -> None:
    """`make slow` relies on it: pytest-xdist 3.8.0 silently splits groups with pytest 9.2.0."""
    (tmp_path / "test_sweep.py").write_text(
        "import os, pathlib, pytest, time\n"
        "@pytest.fixture(scope='module', params=[\n"
        "    pytest.param(n, marks=pytest.mark.xdist_group(f'sweep-{n}')) for n in range(2)])\n"
        "def sweep(request):\n"
        "    with open('made', 'a') as file:\n"
        "        file.write(f'{request.param}')\n"
        "@pytest.mark.parametrize('case', range(4))\n"
        "def test(sweep, case):\n"
        "    time.sleep(0.02)\n"
    )
    command = [sys.executable, "-m", "pytest", "-n2", "--dist", "loadgroup", "test_sweep.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stdout
    assert sorted((tmp_path / "made").read_text()) == ["0", "1"], "expected one set-up per sweep"


def test_an_unknown_profile_is_refused() -> None:
    """The error is one line that lists the profiles."""
    code, told = run("--collect-only", "tests/test_profiles.py", HYPOTHESIS_PROFILE="hourly")

    assert code == 4
    assert "HYPOTHESIS_PROFILE is 'hourly'; choose from dev, ci, nightly" in told


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        (
            "not gpu and not slow and not nightly and not browser and not deepspeed "
            "and not megatron and not torchtitan",
            False,
        ),
        ("slow", False),
        ("nightly and not gpu", False),
        ("gpu", True),
        ("gpu or slow", True),
        ("not slow", True),
        ("", True),
    ],
)
def test_gpus_are_hidden_from_tests_that_need_none(expression: str, shown: bool) -> None:
    """Only a run that may select a test of `tests/gpu` sees the devices of its machine."""
    assert selects_devices(expression) == shown


def test_this_run_sees_no_gpu(pytestconfig: pytest.Config) -> None:
    """Neither this process nor one that a test starts sees a GPU, unless device tests may run."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    assert hidden != selects_devices(pytestconfig.getoption("markexpr"))


def test_a_run_whose_time_is_over_leaves_its_record(tmp_path: Path) -> None:
    """`timeout` sends SIGTERM; the record then says that the run was cut off."""
    (tmp_path / "hangs.py").write_text(
        "import time\ndef pytest_runtest_call(item):\n    print('at it', flush=True)\n"
        "    time.sleep(100)\n"
    )
    file = tmp_path / "run.json"
    node = "tests/test_profiles.py::test_what_a_test_starts_can_be_interrupted"
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    with subprocess.Popen(
        [*RUN, "-s", "-p", "hangs", "--record", str(file), "--commit", "1" * 40, node],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("at it" in line for line in process.stdout)
        process.terminate()  # `timeout` sends it twice to a group of its own
        process.terminate()
        said = process.stdout.read()

    assert process.returncode == 2, said
    assert json.loads(file.read_text())["exit_status"] == 2


#: A plugin that never ends the second of two tests while HANGS is set.
HANGS_AT_THE_SECOND = """
import os, time

def pytest_runtest_call(item):
    if item.name == "test_this_runs_where_matrices_are_whole" and os.environ.get("HANGS"):
        print("at it", flush=True)
        time.sleep(100)
"""

TWO_TESTS = tuple(
    f"tests/test_profiles.py::{name}"
    for name in (
        "test_what_a_test_starts_can_be_interrupted",
        "test_this_runs_where_matrices_are_whole",
    )
)


def test_a_record_that_is_rewritten_is_no_change_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run that keeps its record in the tree could never be resumed."""
    kept, other = tmp_path / "tests" / "records" / "slow.json", tmp_path / "code.py"
    kept.parent.mkdir(parents=True)
    for file in (kept, other):
        file.write_text("")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "All")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr("tests.record.ROOT", tmp_path)
    clean = commit_of()
    assert clean is not None

    kept.write_text("rewritten")
    assert commit_of() == clean
    other.write_text("changed")
    assert commit_of() == f"{clean}+"


@pytest.mark.ci
def test_a_run_that_was_cut_off_is_resumed_and_its_record_names_both_parts(tmp_path: Path) -> None:
    """The second part runs what the first did not reach, over workers too; then nothing is left."""
    (tmp_path / "hangs.py").write_text(HANGS_AT_THE_SECOND)
    file = tmp_path / "run.json"
    options = ("-p", "hangs", "--record", str(file), "--commit", "1" * 40, *TWO_TESTS)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    with subprocess.Popen(
        [*RUN, "-s", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "HYPOTHESIS_PROFILE": "ci", "HANGS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("at it" in line for line in process.stdout)
        process.terminate()
    first = json.loads(file.read_text())
    assert (first["counts"]["passed"], first["exit_status"]) == (1, 2)

    other = run("--resume", *options, path=tmp_path, HYPOTHESIS_PROFILE="dev")
    chosen = run("--resume", "-k", "whole", *options, path=tmp_path, CI="1")
    code, told = run("--resume", "-n", "2", *options, path=tmp_path, CI="1")
    again = run("--resume", *options, path=tmp_path, CI="1")

    assert other[0] == 4
    assert "has profile 'ci', this run has 'dev'" in other[1]
    assert chosen[0] == 4
    assert "resume at the same commit, without changed files and with the same options" in chosen[1]
    assert code == 0, told
    assert "1 passed" in told
    record = json.loads(file.read_text())
    assert (record["counts"]["passed"], record["exit_status"]) == (2, 0)
    assert record["began"] == first["began"]
    assert [part["hardware"] for part in record["later_parts"]] == [record["hardware"]]
    assert "(2 parts)" in row("run", record)[3]
    assert again[0] == 4
    assert "ended by itself" in again[1]


PART = {
    **{"began": "2026-01-01T00:00:00+00:00", "commit": "1" * 40, "profile": "ci"},
    **{"markers": "slow", "arguments": ["tests"], "hardware": {}, "versions": {}},
}


def test_the_log_of_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    """A test whose line was cut runs again; a malformed line before it is an error."""
    file = tmp_path / "run.log.jsonl"
    log = RunLog(file)
    log.begin(PART)
    log.test_ended("a", ["passed"], 1.0)
    log.test_ended("b", ["passed", "errors"], 2.5)
    with file.open("a") as stream:
        stream.write('{"test": "c", "outc')

    read = RunLog.read(file)

    assert read.ended == {"a": ["passed"], "b": ["passed", "errors"]}
    assert read.parts == [PART | {"seconds": 2.5}]
    assert read.counts() == {"passed": 2, "errors": 1}
    assert main([str(file)]) == 0, "the record that a killed run could not write"
    assert json.loads((tmp_path / "run.json").read_text())["exit_status"] == CUT_OFF
    read.begin(PART)
    assert len(RunLog.read(file).parts) == 2, "a later part begins on a line of its own"
    file.write_text('{"test": "c", "outc\n' + file.read_text())
    with pytest.raises(ValueError, match="line 1: malformed"):
        RunLog.read(file)
    assert main([str(file)]) == main([]) == 2


def test_a_resumed_run_does_not_hide_what_failed_before(tmp_path: Path) -> None:
    """Nothing is left to run; the exit status is that of the tests that ended in the first part."""
    file = tmp_path / "run.json"
    options = ("--record", str(file), "--commit", "1" * 40, *TWO_TESTS)
    for outcomes, status in (["passed"], 0), (["failed"], 1):
        assert run(*options, CI="1")[0] == 0
        log = file.with_suffix(".log.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines[-2]["outcomes"], lines[-1]["exit_status"] = outcomes, CUT_OFF
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))

        code, told = run("--resume", *options, CI="1")

        assert (code, json.loads(file.read_text())["exit_status"]) == (status, status), told


def test_a_test_that_ends_its_worker_is_in_the_record(tmp_path: Path) -> None:
    """xdist reports such a test once, without its phases."""
    (tmp_path / "ends.py").write_text(
        "import os\ndef pytest_runtest_call(item):\n"
        "    if item.name == 'test_this_runs_where_matrices_are_whole':\n        os._exit(3)\n"
    )
    file = tmp_path / "run.json"
    options = ("-p", "ends", "-n", "2", "--record", str(file), "--commit", "1" * 40)

    code, told = run(*options, *TWO_TESTS, path=tmp_path, CI="1")

    counts = json.loads(file.read_text())["counts"]
    assert (code, counts["passed"], counts["failed"] + counts["errors"]) == (1, 1, 1), told


def test_only_the_last_part_says_what_cannot_be_collected(tmp_path: Path) -> None:
    """Each part collects every module again. A test that failed stays failed."""
    log = RunLog(tmp_path / "run.log.jsonl")
    log.begin(PART)
    log.test_ended("tests/test_a.py", ["errors"], 0.5)
    log.test_ended("tests/test_b.py::test_it", ["failed"], 1.0)
    log.end(1.5, CUT_OFF)
    log.begin(PART)
    log.test_ended("tests/test_a.py::test_it", ["passed"], 0.5)
    log.end(1.0, 0)

    found = record_of(RunLog.read(log.file))

    assert {n: c for n, c in found["counts"].items() if c} == {"failed": 1, "passed": 1}
    assert (found["seconds"], found["exit_status"]) == (2.5, 1)


def test_devices_are_shared_or_held_alone(tmp_path: Path) -> None:
    """Two tests share the devices; a test that is to have them alone waits for both."""
    file = tmp_path / "devices"

    def is_free(kind: int) -> bool:
        with file.open("w") as lock:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with held(alone=False, file=file):
        assert (is_free(fcntl.LOCK_SH), is_free(fcntl.LOCK_EX)) == (True, False)
    with held(alone=True, file=file):
        assert (is_free(fcntl.LOCK_SH), is_free(fcntl.LOCK_EX)) == (False, False)
    assert is_free(fcntl.LOCK_EX)


def test_a_group_is_not_part_of_the_name_of_a_test() -> None:
    """`--dist loadgroup` appends it in the worker. A parameter can hold the same sign."""
    assert bare_id("tests/a.py::test_b[x@y]@a-3") == "tests/a.py::test_b[x@y]"
    assert bare_id("tests/a.py::test_b[x@y]") == "tests/a.py::test_b[x@y]"


def test_a_kept_record_is_of_a_commit_and_its_row_says_how_the_run_ended() -> None:
    """A kept record names a commit, and its row shows whether a time limit cut the run off."""
    for file in RECORDS.glob("*.json"):
        record = json.loads(file.read_text())

        end = {0: "whole", 1: "whole", 2: "cut off"}[record["exit_status"]]
        assert row(file.stem, record)[-1] == end, file
        assert end == "whole" or file.stem in ("slow", "nightly"), file
        failures = record["counts"]["failed"] + record["counts"]["errors"]
        assert (record["exit_status"] == 0) <= (failures == 0), file
        assert len(record["commit"]) == 40, file
        assert set(record["counts"]) == set(COUNTED), file
        assert sum(record["counts"].values()) > 0, file

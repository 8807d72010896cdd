"""
What `pip install` puts on the import path: one package, whatever the current folder contains.

A wheel, a wheel of the source distribution and an editable install are made without a network. Each
is installed in an empty virtual environment. This environment sees the dependencies of the running
environment, but not its installed packages of this project. Everything runs in a folder whose own
``spec``, ``verification``, ``gpu_runtime`` and ``tests`` raise when they are imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

#: Three environments are made and filled: CI and nightly runs take the time, `make test` does not.
pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (
    "spec",
    "qeffect",
    "verification",
    "gpu_runtime",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)
EXAMPLES = ("cpu", "h200", "h200_short", "h200_history", "h200_launched", "scales")
#: Parts of the suite that the archive runs: the kernel, its specification, schedules, the pages.
FROM_THE_ARCHIVE = (
    *("tests/kernel", "tests/spec", "tests/schedule", "tests/test_imports.py"),
    *("tests/docs/test_pages.py", "tests/docs/test_readme.py", "tests/cli/test_newcomers.py"),
)
LINKS = ("spec", "verification", "gpu_runtime", "guards")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
#: What the dependencies are found by; none of it is in a standard library.
DEPENDENCIES = ("attrs", "torch", "z3", "numpy", "setuptools")


def run(
    command: Sequence[str | Path], folder: Path, *, code: int = 0, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder with nothing of ours in its environment; expect its exit code."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    if path:
        clean["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert code == done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def build(source: Path, kind: str) -> Path:
    """Build a wheel or a source distribution of a source tree."""
    out = source.parent / f"{source.name}-{kind}"
    out.mkdir()
    # Without isolation: the build's one requirement is among the tests' own.
    run([sys.executable, "-P", "-c", BUILD.format(kind), out], source, path=dependencies())
    (made,) = out.iterdir()
    return made


def dependencies() -> list[Path]:
    """Folders of the running environment that hold the dependencies."""
    folders = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    standard = Path(os.__file__).parent
    return [
        folder
        for folder in folders
        if folder != standard and any((folder / name).is_dir() for name in DEPENDENCIES)
    ]


def environment(folder: Path) -> Path:
    """Make a virtual environment that sees the dependencies; return its interpreter."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path file adds folders and runs nothing of theirs, so an editable install of the running
    # environment does not reach this one.
    lines = [str(path) for path in dependencies()]
    (packages / "dependencies.pth").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    """Install without a network, by the pip of the running environment."""
    # What the running environment has of ours is on the path too, and is not what is installed.
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run([*pip, "install", "--quiet", *offline, *what], python.parent)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, its links still links, as the first commit of a repository."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    folder.mkdir()
    for name in SOURCE:
        origin = ROOT / name
        if origin.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(origin, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(origin, folder / name)
    assert all((folder / "qeffect" / name).is_symlink() for name in LINKS)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "first")):
        git(folder, *words)
    return folder


def git(folder: Path, *words: str) -> str:
    """Run git in a repository, without the user's configuration; return what it prints."""
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return run(["git", "-C", folder, *author, *words], folder).stdout.strip()


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel of the source tree."""
    return build(source, "wheel")


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the wheel is installed."""
    python = environment(tmp_path_factory.mktemp("installed"))
    install(python, wheel)
    return python


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules of our old names, each of which raises when it is imported."""
    raises = "raise ImportError(f'{__name__} of the working folder was imported')\n"
    (tmp_path / "spec.py").write_text(raises)
    for name in ("verification", "gpu_runtime", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(raises)
    return tmp_path


def names(wheel: Path) -> set[str]:
    """Every file of a wheel but its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if ".dist-info/" not in n and not n.endswith("/")}


class TestContents:
    """The files of a wheel."""

    def test_every_module_is_there_under_one_name(self, wheel: Path, source: Path) -> None:
        """The folders that the links lead to are in the package as files, and nothing else is."""
        modules = {
            path.relative_to(source).as_posix()
            for path in (source / "qeffect").rglob("*.py")
            if not any(part.is_symlink() for part in path.parents)
        } | {
            f"qeffect/{name}/{path.relative_to(source / 'qeffect' / name).as_posix()}"
            for name in LINKS
            for path in (source / "qeffect" / name).rglob("*.py")
            if name != "gpu_runtime" or "guards" not in path.parts
        }

        assert modules == {name for name in names(wheel) if name.endswith(".py")}
        assert {"qeffect"} == {name.partition("/")[0] for name in names(wheel)}
        assert len(modules) > 200

    def test_reports_logs_and_pictures_stay_out(self, wheel: Path, source: Path) -> None:
        """Only data that a command reads is installed."""
        data = {name for name in names(wheel) if not name.endswith(".py")}
        kept = {
            *(f"qeffect/spec/{n}.json" for n in ("faults", "kept", "event-log.schema")),
            "qeffect/gpu_runtime/lab/reports/report.schema.json",
            "qeffect/schedule/durations.schema.json",  # the help of `plan` points there
            "qeffect/gpu_runtime/training/corpora/cpython-3.11.7.txt",
            *(f"qeffect/gpu_runtime/training/examples/{n}.toml" for n in EXAMPLES),
        }
        tables = {n for n in data if n.startswith("qeffect/schedule/fixtures/")}
        texts = {n for n in data if n.startswith("qeffect/spec/") and n.endswith(".md")}

        typed = {n for n in data if n.endswith("/py.typed")}
        assert data == kept | tables | texts | typed
        on_disk = source.joinpath("qeffect", "schedule", "fixtures").rglob("*.csv")
        assert len(list(on_disk)) == len(tables) > 20
        assert 5 == len(typed)

    def test_a_wheel_of_the_source_distribution_has_the_same_files(
        self, wheel: Path, source: Path, tmp_path: Path
    ) -> None:
        """Who builds from the source distribution gets what we built."""
        with tarfile.open(build(source, "sdist")) as archive:
            # Python 3.11.0 to 3.11.3 have no filters.
            safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(tmp_path, **safe)
        (unpacked,) = tmp_path.iterdir()

        links = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_symlink()}
        assert {Path("qeffect", name) for name in LINKS} == links
        again = build(unpacked, "wheel")
        assert names(wheel) == names(again)
        assert wheel.name == again.name, "expected the archive's wheel to keep the version from git"


class TestArchive:
    """The source distribution, unpacked where a user may unpack it."""

    @pytest.mark.nightly
    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as another user")
    def test_the_suite_runs_from_it_as_another_user(self) -> None:
        """In a path with a space, without git, in a tree that its user may not write."""
        # Another user may not read pytest's own temporary folders.
        with tempfile.TemporaryDirectory(prefix="qeffect-archive-") as folder:
            Path(folder).chmod(0o755)
            self.run_in(Path(folder))

    def run_in(self, tmp_path: Path) -> None:
        """Build, unpack, install and run in this folder."""
        listed = run(["git", "-C", ROOT, "ls-files"], ROOT).stdout.splitlines()
        for name in (Path(name) for name in listed if (ROOT / name).exists()):
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "tree" / name, follow_symlinks=False)
        with tarfile.open(build(tmp_path / "tree", "sdist")) as archive:
            archive.extractall(tmp_path / "a b", filter="data")
        (tree,) = (tmp_path / "a b").iterdir()
        python = environment(tmp_path / "env")
        install(python, "--editable", tree)
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FROM_THE_ARCHIVE],
            cwd=tree,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TMPDIR": "/tmp"},
            user="nobody",
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 1_000  # type: ignore[index]


class TestVersion:
    """The version comes from git; an archive keeps it."""

    def told(self, folder: Path) -> str:
        """The version that a build of this folder would have."""
        # Build tools write a folder of metadata, which git does not see as a change.
        done = run([sys.executable, "setup.py", "-q", "--version"], folder, path=dependencies())
        return done.stdout.split()[-1]

    def test_an_installed_package_names_its_commit(
        self, python: Path, source: Path, hostile: Path
    ) -> None:
        """The commit that the wheel was built from, though no checkout is near."""
        head = git(source, "rev-parse", "HEAD")

        done = run([python, "-m", "qeffect", "--version"], hostile)

        assert done.stdout == f"qeffect 0.1.0.dev1, commit {head}\n"

    def test_a_tag_makes_a_release_and_a_change_unmakes_it(
        self, source: Path, tmp_path: Path
    ) -> None:
        """A tagged commit has the tag's version; with changes it is a commit like any other."""
        tree = tmp_path / "tree"
        git(tmp_path, "clone", "-q", str(source), str(tree))
        head = git(tree, "rev-parse", "HEAD")

        assert self.told(tree) == f"0.1.0.dev1+g{head}"
        git(tree, "tag", "-a", "-m", "release", "v0.1.0")
        assert self.told(tree) == "0.1.0"
        (tree / "README.md").write_text("changed\n")
        assert self.told(tree) == f"0.1.0.dev1+g{head}.changes"

    def test_a_tree_without_git_has_a_version(self, source: Path, tmp_path: Path) -> None:
        """That of its archive, or the next release's; a repository around it does not count."""
        git(tmp_path, "init", "-q")
        tree = tmp_path / "tree"
        shutil.copytree(source, tree, symlinks=True, ignore=shutil.ignore_patterns(".git"))

        assert self.told(tree) == "0.1.0"
        (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: qeffect\nVersion: 7.1\n")
        assert self.told(tree) == "7.1"


class TestHostileFolder:
    """The installed package in a folder with modules of the names that it once had."""

    def test_the_folder_is_hostile(self, python: Path, hostile: Path) -> None:
        """Each of its modules is what an import finds, and raises."""
        for name in ("spec", "verification", "gpu_runtime", "tests"):
            done = run([python, "-c", f"import {name}"], hostile, code=1)
            assert f"{name} of the working folder was imported" in done.stderr

    def test_the_wheel_is_what_runs(self, python: Path, hostile: Path) -> None:
        """Not the checkout that the tests themselves run from."""
        code = "import qeffect.gpu_runtime, qeffect.spec; print(qeffect.__file__)"

        path = Path(run([python, "-c", code], hostile).stdout.strip())

        assert path.is_relative_to(python.parents[1])
        assert ROOT not in path.parents

    @pytest.mark.parametrize("how", ["module", "script"])
    def test_every_shipped_table_is_found_and_accepted(
        self, python: Path, hostile: Path, how: str
    ) -> None:
        """Every shipped table is found and accepted, by either way in."""
        command = [python, "-m", "qeffect"] if how == "module" else [python.parent / "qeffect"]

        done = run([*command, "check", "--fixtures", "--json"], hostile)

        data = json.loads(done.stdout)
        assert "accepted" == data["verdict"]
        assert len(data["tables"]) > 20

    def test_a_refusal_has_its_text(self, python: Path, hostile: Path) -> None:
        """Clause, expected, found and what to do are all in the package."""
        code = (
            "from qeffect import Contract, Refused, StageConfig, TapeKey\n"
            "contract = Contract([StageConfig(0, microbatches=1, slots=1)])\n"
            "try: contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))\n"
            "except Refused as refused: print(refused)"
        )

        said = run([python, "-c", code], hostile).stdout

        assert said.startswith("version.stale-cache in check_forward: ")
        assert "expected a cache of epoch 0" in said
        assert "What to do: Refresh" in said

    def test_the_fault_table_reads_its_data(self, python: Path, hostile: Path) -> None:
        """The fault table reads the specification's data."""
        done = run([python, "-m", "qeffect", "faults"], hostile)

        assert "7 of 7 injections (6 kinds of fault) refused" in done.stdout

    @pytest.mark.nightly
    def test_the_demo_gives_the_bits_of_native(self, python: Path, hostile: Path) -> None:
        """Guarded steps on this machine, in processes of their own, give native's bits."""
        done = run([python, "-m", "qeffect", "runtime", "demo", "--steps", "1"], hostile)

        assert "The same bits" in done.stdout

    def test_pytest_loads_the_plugin_of_the_wheel(self, python: Path, hostile: Path) -> None:
        """Whoever has the wheel has the fixtures, without a line of configuration, strictly."""
        test = 'def test_it(check_schedule):\n    check_schedule(["0F0", "0B0"])\n'
        (hostile / "test_ours.py").write_text(test)
        strict = ("-W", "error", "--strict-config", "--strict-markers", "-p", "no:cacheprovider")
        done = run([python, "-m", "pytest", "-q", *strict, "test_ours.py"], hostile)

        assert "1 passed" in done.stdout

    def test_what_is_not_installed_is_said_to_be_missing(self, python: Path, hostile: Path) -> None:
        """Reports are of the checkout: without them the pictures are a clear line."""
        words = ["runtime", "report", "plots", "--out", "pictures"]

        done = run([python, "-m", "qeffect", *words], hostile, code=2)

        assert "make one with qeffect runtime report bench" in done.stderr
        assert 1 == len(done.stderr.splitlines())

    @pytest.mark.slow(minutes=5)
    def test_every_obligation_is_proved_from_the_installed_sources(
        self, python: Path, hostile: Path
    ) -> None:
        """Every unbounded obligation and every witness, from the installed sources."""
        done = run([python, "-m", "qeffect", "prove", "--depth", "1", "--json"], hostile)

        data = json.loads(done.stdout)
        assert "accepted" == data["verdict"]
        assert (len(data["obligations"]), 0) == (data["unsat"], data["unknown"])
        assert data["unsat"] > 10_000

    def test_an_editable_install_runs_the_checkout(
        self, source: Path, hostile: Path, tmp_path: Path
    ) -> None:
        """A contributor's install runs the checkout, links and all."""
        python = environment(tmp_path / "editable")
        install(python, "--editable", source)
        code = (
            "import qeffect, qeffect.gpu_runtime.commands as commands\n"
            "print(qeffect.__file__, commands.__name__)"
        )

        path, name = run([python, "-c", code], hostile).stdout.split()
        done = run([python, "-m", "qeffect", "check", "--fixtures"], hostile)

        assert source / "qeffect" / "__init__.py" == Path(path)
        assert "qeffect.gpu_runtime.commands" == name
        assert "shipped tables accepted." in done.stdout

"""Reports: one record of the environment, and files that are never half written."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qeffect import report
from qeffect.cli import bench, main
from qeffect.report import (
    UnusableError,
    commit,
    environment,
    require_place,
    write_json,
    write_text,
)
from qeffect.verification.proofs import prove


class TestEnvironment:
    """Where a report was made."""

    def test_names_hardware_versions_commit_and_arguments(self) -> None:
        """All of it is in every report, and no folder of the machine is."""
        found = environment(["bench", "--out", "a/b.json", "--x=/c/d"])

        assert {
            *(
                "cpu",
                "cores",
                "load_1min",
                "python",
                "packages",
                "commit",
                "sources",
                "program",
                "argv",
                "date",
            )
        } == found.keys()
        assert ["bench", "--out", "b.json", "--x=d"] == found["argv"]
        assert "not installed" != found["packages"]["attrs"]
        assert found == json.loads(json.dumps(found))

    @pytest.mark.parametrize(
        ("words", "environ", "said"),
        [
            ("/bin/python3 -m qeffect bench", {}, "python -m qeffect"),
            ("python -X dev -W error -u -m a.b --out F", {}, "python -m a.b"),
            ("python /opt/bin/qeffect bench", {}, "qeffect"),
            ("python -c pass", {}, "python -c"),
            ("python", {}, ""),
            ("python -u run.py", {"LOCAL_WORLD_SIZE": "2"}, "torchrun --nproc-per-node 2 run.py"),
            (
                "python -u -m qeffect runtime",
                {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
                "torchrun --nnodes 2 --nproc-per-node 4 -m qeffect",
            ),
        ],
    )
    def test_names_what_stands_before_the_arguments(
        self, words: str, environ: dict[str, str], said: str
    ) -> None:
        """The interpreter's options and folders are left out, torchrun's ranks are not."""
        run = {"TORCHELASTIC_RUN_ID": "none", **environ} if environ else {}

        assert said == " ".join(report.program(words.split(), run))

    def test_a_package_that_is_missing_is_said_to_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither left out nor guessed."""
        monkeypatch.setattr(report, "PACKAGES", ("no-such-package",))

        assert {"no-such-package": "not installed"} == environment([])["packages"]

    def test_a_commit_is_forty_digits(self) -> None:
        """A branch's name moves."""
        assert "0" * 40 == commit("0" * 40)
        with pytest.raises(UnusableError, match="40 hexadecimal digits, not 'main'"):
            commit("main")

    @pytest.mark.skipif(shutil.which("git") is None, reason="needs git, to make a checkout")
    def test_code_in_a_checkout_of_somebody_else_is_at_no_commit_of_theirs(
        self, tmp_path: Path
    ) -> None:
        """An environment inside a user's own repository does not report the user's commit."""
        inside = tmp_path / "venv" / "qeffect"
        inside.mkdir(parents=True)
        source = Path(report.__file__).read_text(encoding="utf-8")
        (inside / "report.py").write_text(source, encoding="utf-8")
        for command in (
            ["init", "-q"],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-mx"],
        ):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
        code = "import report; print(report.commit())"

        done = subprocess.run(
            [sys.executable, "-c", code], cwd=inside, capture_output=True, text=True, check=True
        )

        assert "unknown" == done.stdout.strip()


class TestWriting:
    """A reader sees the old file or the whole new one."""

    def test_threads_may_write_one_file(self, tmp_path: Path) -> None:
        """Each its own text; the file is one of them, and nothing stays beside it."""
        path = tmp_path / "out.json"

        def write(number: int) -> None:
            for _ in range(100):
                write_json(path, {"by": number})

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(write, n) for n in range(4)]:
                done.result()
        assert json.loads(path.read_text())["by"] in range(4)
        assert list(tmp_path.iterdir()) == [path]

    def test_a_write_that_fails_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A full disk costs the new report, not the old one, and leaves no piece behind."""
        path = tmp_path / "report.json"
        write_json(path, {"old": 1})

        def fails(self: Path, *_: object, **__: object) -> int:
            self.touch()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", fails)
        with pytest.raises(UnusableError, match=r"cannot write .*report\.json: No space left"):
            write_json(path, {"new": 2})

        assert {"old": 1} == json.loads(path.read_text())
        assert [path] == list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("no/report.json", "--out .*report.json: there is no folder .*no; make it"),
            ("", "expected a file, found a folder; name a file in it"),
            ("x" * 300, "cannot write .*: File name too long"),
            ("a\0b", "cannot write .*: embedded null byte"),
            ("file/report.json", "there is no folder|cannot write .*: Not a directory"),
        ],
    )
    def test_a_place_is_looked_at_beforehand(self, name: str, told: str, tmp_path: Path) -> None:
        """In one line; nothing is left there."""
        (tmp_path / "file").write_text("old")
        with pytest.raises(UnusableError, match=told):
            require_place(tmp_path / name)
        assert [tmp_path / "file"] == list(tmp_path.iterdir())

    def test_a_folder_that_takes_nothing_is_said_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that only others may write, or even enter."""

        def denied(self: Path, *_: object, **__: object) -> bool:
            raise PermissionError(13, "Permission denied")

        for name in ("touch", "is_dir"):
            with monkeypatch.context() as patch:
                patch.setattr(Path, name, denied)
                with pytest.raises(UnusableError, match=r"cannot write .*r: Permission denied; ch"):
                    require_place(tmp_path / "r")

    def test_a_good_place_stays_as_it_is(self, tmp_path: Path) -> None:
        """An old report is kept until the new one is complete; a device is not replaced."""
        path = tmp_path / "report.json"
        require_place(path)
        assert [] == list(tmp_path.iterdir())
        path.write_text("old")
        (tmp_path / "link").symlink_to(path)
        for place in (path, tmp_path / "link", Path(os.devnull), None):
            require_place(place)
        assert "old" == path.read_text()
        assert 2 == len(list(tmp_path.iterdir()))

    @pytest.mark.parametrize("words", [["bench", "--kernel"], ["prove"]])
    def test_long_work_looks_at_its_place_first(
        self,
        words: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Minutes of work do not end in a wrong path."""

        def begun(*_: object, **__: object) -> None:
            raise AssertionError("measured")

        monkeypatch.setattr(bench, "actions", begun)
        monkeypatch.setattr(prove, "run", begun)
        assert 2 == main([*words, "--out", str(tmp_path / "no" / "f.json")])
        (line,) = capsys.readouterr().err.splitlines()
        assert "there is no folder" in line

    def test_data_that_is_not_json_leaves_the_old_file(self, tmp_path: Path) -> None:
        """JSON has no NaN, so nothing is written."""
        path = tmp_path / "report.json"
        write_json(path, {"old": 1})

        with pytest.raises(ValueError, match="JSON compliant"):
            write_json(path, {"new": float("nan")})

        assert {"old": 1} == json.loads(path.read_text())

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        """What it leads to is replaced."""
        target, link = tmp_path / "target.json", tmp_path / "link.json"
        target.write_text("old")
        link.symlink_to(target)

        write_text(link, "new")

        assert link.is_symlink()
        assert "new" == target.read_text()

    def test_a_device_is_written_and_not_replaced(self) -> None:
        """``--svg /dev/null`` writes nowhere and leaves the device what it is."""
        path = Path("/dev/null")

        write_text(path, "text")

        assert stat.S_ISCHR(path.stat().st_mode)

    def test_a_folder_that_is_missing_is_one_line(self, tmp_path: Path) -> None:
        """The message names the path and says what to do."""
        with pytest.raises(UnusableError, match=r"no/report\.json.*choose another place"):
            write_json(tmp_path / "no" / "report.json", {})

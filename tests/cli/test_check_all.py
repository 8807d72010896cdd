"""
``qeffect check-all``, and the GitHub Action and the pre-commit hook that call it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.schedule.tables import fixture_names, read_fixture, write_table

ROOT = Path(__file__).resolve().parents[2]
GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
#: Rank 1 computes microbatch 1 twice.
BAD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1F1,1B1\n"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with an accepted table. Below it are a refused table and a file that is not a
    table."""
    folder = tmp_path / "tables"
    (folder / "more").mkdir(parents=True)
    (folder / "good.csv").write_text(GOOD, "utf-8")
    (folder / "more" / "bad.csv").write_text(BAD, "utf-8")
    (folder / "more" / "a,b%.csv").write_text("0F0,oops\n", "utf-8")
    (folder / "more" / "notes.txt").write_text("no table", "utf-8")
    return folder


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Run ``check-all``; return its exit code and what it printed."""
    code = main(["check-all", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_table_is_checked_and_named(capsys: pytest.CaptureFixture[str], tables: Path) -> None:
    """A refusal or an unreadable table stops no other one; each has a line with its place."""
    code, out, err = told(capsys, tables)
    lines = out.splitlines()

    assert (1, "") == (code, err)
    assert 4 == len(lines)
    assert lines[0] == f"accepted  {tables}/good.csv"
    assert lines[1].startswith(f"unusable  {tables}/more/a,b%.csv: rank 0, step 1: entry 'oops'")
    assert lines[2].startswith(
        f"refused   {tables}/more/bad.csv: rank 1, step 3 (1F1): schedule.duplicate-action: "
    )
    assert lines[3] == "3 checked: 1 accepted, 1 refused, 1 unusable."


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["good.csv"], 0),
        (["good.csv", "good.csv"], 0),
        (["more/bad.csv"], 1),
        (["more/a,b%.csv", "good.csv"], 2),
        (["absent.csv"], 2),
        (["*.csv"], 0),
        (["**/b*.csv"], 1),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], tables: Path, names: list[str], code: int
) -> None:
    """0 accepted, 1 a refusal, 2 only unusable tables; each file is checked once."""
    found, out, _ = told(capsys, *(tables / name for name in names))

    assert code == found
    assert out.splitlines()[-1].startswith(f"{len(set(names))} checked")


@pytest.mark.parametrize("name", ["more/empty", "none*.csv"])
def test_a_place_without_tables_is_unusable(
    capsys: pytest.CaptureFixture[str], tables: Path, name: str
) -> None:
    """Without a table to check the command fails."""
    (tables / "more" / "empty").mkdir()
    code, out, err = told(capsys, tables / name)

    assert (2, "") == (code, out)
    assert err == (
        f"qeffect: {tables / name}: expected files that end in .csv, found none; name a table, or "
        "a folder or pattern with tables\n"
    )


def test_the_rules_are_those_of_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """``--pairing`` and ``--queues`` reach the check."""
    table = tmp_path / "zbv.csv"
    name = next(name for name in fixture_names() if "ZBV" in name and "pp2" in name)
    table.write_text(write_table(read_fixture(name.replace("comms", "compute"))), "utf-8")

    assert 0 == told(capsys, table)[0]
    code, out, _ = told(capsys, table, "--pairing", "latest")
    assert 1 == code
    assert "ownership.wrong-key" in out
    code, out, _ = told(capsys, table, "--queues", "edge", "--json")
    assert "edge" == json.loads(out)["tables"][0]["transport"]["queues"]


def test_json_has_the_first_refusal(capsys: pytest.CaptureFixture[str], tables: Path) -> None:
    """One object: all tables, and the place of the first refusal."""
    data = json.loads(told(capsys, tables, "--json")[1])

    assert ("refused", "schedule.duplicate-action", 1, 3, "1F1") == tuple(
        data[name] for name in ("verdict", "clause", "rank", "step", "action")
    )
    assert ["accepted", "unusable", "refused"] == [row["verdict"] for row in data["tables"]]


def test_annotations_are_at_the_line_of_the_rank(
    capsys: pytest.CaptureFixture[str], tables: Path
) -> None:
    """Rank 1 is line 2 of its file; nothing in a name ends the annotation."""
    out = told(capsys, tables, "--github")[1]
    errors = [line for line in out.splitlines() if line.startswith("::error ")]

    assert 2 == len(errors)
    assert "/more/a%2Cb%25.csv,line=1,title=unusable table::" in errors[0]
    assert "/more/bad.csv,line=2,title=schedule.duplicate-action::rank 1, step 3" in errors[1]
    assert "%0A" in errors[1]


def test_a_page_for_each_refused_table(
    capsys: pytest.CaptureFixture[str], tables: Path, tmp_path: Path
) -> None:
    """The folder is made; two tables of one name get two pages."""
    shutil.copytree(tables / "more", tables / "again")
    pages = tmp_path / "deep" / "pages"
    out = told(capsys, tables, "--html", pages)[1]

    assert ["tables_again_bad.html", "tables_more_bad.html"] == sorted(
        path.name for path in pages.iterdir()
    )
    for page in pages.iterdir():
        assert f"(page: {page})" in out
        assert "schedule.duplicate-action" in page.read_text("utf-8")
    assert 2 == told(capsys, tables, "--html", tables / "good.csv")[0]


def yaml(name: str) -> str:
    """The text of a file at the top of the tree; the tests need no parser of YAML."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_hook_runs_on_the_files_that_it_is_given(tables: Path) -> None:
    """The hook's entry, with the files after it as pre-commit passes them."""
    text = yaml(".pre-commit-hooks.yaml")
    found = dict(re.findall(r"^(?:- |  )(\w+): (.*)$", text, re.MULTILINE))

    assert {"id", "name", "description", "entry", "language", "files"} == set(found)
    assert ("qeffect-check", "python") == (found["id"], found["language"])
    assert re.search(found["files"], "schedules/ours.csv")
    assert not re.search(found["files"], "schedules/ours.csv.txt")
    words = shlex.split(found["entry"])
    assert "qeffect" == words[0]
    for name, code in (("good.csv", 0), ("more/bad.csv", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "qeffect", *words[1:], name],
            cwd=tables,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (code, "") == (done.returncode, done.stderr)


def action() -> dict[str, Any]:
    """The inputs of the action with their defaults, the script's variables, and the script."""
    text = yaml("action.yml")
    inputs = text[text.index("inputs:\n") : text.index("runs:\n")]
    names = re.findall(r"^  ([\w-]+):$", inputs, re.MULTILINE)
    last = text[text.index("- name: Check the tables") :]
    return {
        "inputs": names,
        "defaults": dict(re.findall(r"^  ([\w-]+):\n.*\n    default: (.*)$", inputs, re.MULTILINE)),
        "env": dict(re.findall(r"^        ([A-Z]+): \$\{\{ inputs\.([\w-]+) \}\}$", last, re.M)),
        "script": re.sub(r"^ {8}", "", last.partition("run: |\n")[2], flags=re.MULTILINE),
    }


def test_the_action_checks_what_it_is_given(tables: Path) -> None:
    """The action's own script, with its defaults: annotations, pages and the exit code."""
    parts = action()
    assert {"tables", "pairing", "queues", "html", "python-version"} == set(parts["inputs"])
    assert set(parts["env"].values()) == set(parts["inputs"]) - {"python-version"}
    assert "${{" not in parts["script"], (
        "expected inputs as environment variables: in the script, an input could run as a command"
    )
    assert "GITHUB_ACTION_PATH" in yaml("action.yml")

    commands = tables.parent / "bin"
    commands.mkdir()
    script = f'#!/bin/sh\nexec "{sys.executable}" -m qeffect "$@"\n'
    (commands / "qeffect").write_text(script, "utf-8")
    (commands / "qeffect").chmod(0o755)
    for given, code in (("good.csv\n", 0), ("good.csv\n$(touch owned)\n\nmore\n", 1)):
        values = {**parts["defaults"], "tables": given}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", parts["script"]],
            cwd=tables,
            env={
                **os.environ,
                "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                **{name: values[source] for name, source in parts["env"].items()},
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert code == done.returncode, done.stderr
    assert "::error file=more/bad.csv,line=2" in done.stdout
    assert "unusable  $(touch owned)" in done.stdout
    assert not (tables / "owned").exists()
    assert ["bad.html"] == [path.name for path in (tables / "qeffect-pages").iterdir()]

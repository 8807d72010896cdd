"""A report's digest of sources equals that of the report's commit, computed from git."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qeffect.report import environment, sources
from tests.docs.blocks import KERNEL_REPORTS, RUNTIME_REPORTS, load
from tests.docs.history import AGE, FOLDERS, age, git, of_commit


def reports() -> list[tuple[str, Any]]:
    """Every kept report with a digest of its sources."""
    found = [*KERNEL_REPORTS.glob("*.json"), *RUNTIME_REPORTS.glob("*.json")]
    read = [(path.name, load(path)) for path in sorted(found)]
    return [(n, d["environment"]) for n, d in read if "sources" in d.get("environment", {})]


def test_each_report_was_made_by_the_sources_of_its_commit() -> None:
    """Also if the command was given its commit, as on a machine without git."""
    known = [(name, env, of_commit(env["commit"])) for name, env in reports()]
    assert [name for name, env, found in known if found not in (None, env["sources"])] == []


def test_a_digest_is_that_of_the_tree() -> None:
    """The digest from files equals the digest from git."""
    own = sources()
    assert environment([])["sources"] == own
    changed = git("status", "--porcelain", "--", *{name.split("/")[0] for name in FOLDERS})
    if changed == "":
        assert own == of_commit("HEAD")


@pytest.mark.parametrize(
    "module", ["contract.py", "transitions.py", "prove.py", "worker.py", "pipelining.py"]
)
def test_a_change_of_a_module_changes_the_digest(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each folder of the package."""
    own = sources.__wrapped__()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == module))
    assert sources.__wrapped__() != own


def test_the_age_of_a_report_counts_commits() -> None:
    """Zero after the last commit; more after its first parent, or unknown."""
    if git("rev-parse", "HEAD~20") is None:
        assert AGE.fullmatch(age("0" * 40))
    else:
        assert age("HEAD") == "0 later"
        assert AGE.fullmatch(age("HEAD~20"))
        assert age("HEAD~20") != "0 later"
    assert age("f" * 40) == "an unknown number later"

"""
Logs of the first version, which contain no reports, are still read, and still refused by clause
name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.log.checker import LogError
from qeffect.log.replayer import replay_lines
from qeffect.verification.logs.edits import reseal

FIRST = sorted((Path(__file__).parent / "first").glob("*.jsonl"))


def bodies(path: Path) -> list[str]:
    """The lines of a log without their digests."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line[: line.rindex(',"digest"')] for line in lines]


#: Those that did what is refused today, each by which clause.
STRICTER = {
    "readers": "completion.caller-to-graph",
    "without-version-order-arena": "completion.update-to-graph",
}


@pytest.mark.parametrize(
    "path", [path for path in FIRST if path.stem not in STRICTER], ids=lambda path: path.stem
)
def test_a_log_of_the_first_version_is_accepted(path: Path) -> None:
    """As it was when it was written, up to its closing line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)

    assert lines[0].startswith('{"qeffect":"event-log","version":1,')
    assert "accepted" == replay_lines(lines).verdict


@pytest.mark.parametrize("name", STRICTER)
def test_a_log_of_the_first_version_is_held_to_the_rules_of_today(name: str) -> None:
    """
    It told on no link when a read ended, so that the next F is not known to come after it; and it
    told of no wait between the optimizer's update and the next F.
    """
    (path,) = [path for path in FIRST if path.stem == name]
    report = replay_lines(path.read_text(encoding="utf-8").splitlines(keepends=True))

    assert STRICTER[name] == report.clause


def test_it_is_refused_by_the_same_clauses() -> None:
    """A commit that is not there leaves its domain busy, in the first version too."""
    (path,) = [path for path in FIRST if path.stem == "readers"]
    lines = bodies(path)
    at = next(n for n, line in enumerate(lines) if '"commit_forward"' in line)
    lines[at] = lines[at].replace('"ticket":', '"ticket":1')
    report = replay_lines(reseal(lines))

    assert ("ownership.unknown-ticket", at + 1) == (report.clause, report.line)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ('"commit_dgrad"', ',"queued"', ',"updates":1,"queued"'),
        ('"qeffect"', ',"pool"', ',"reports_fills":false,"pool"'),
    ],
)
def test_what_only_the_second_version_has_is_not_in_the_first(
    text: str, old: str, new: str
) -> None:
    """A line of both versions is of none."""
    lines = bodies(next(path for path in FIRST if path.stem == "lost-cache"))
    at = next(n for n, line in enumerate(lines) if text in line)
    lines[at] = lines[at].replace(old, new, 1)

    with pytest.raises(LogError, match=rf"line {at + 1} is not a line of version 1"):
        replay_lines(reseal(lines))


def test_the_closing_line_is_compared() -> None:
    """The state that the first version knew is held against the replayed one."""
    lines = bodies(next(path for path in FIRST if path.stem == "lost-cache"))
    before, _, digest = lines[-1].partition('"token":"')
    lines[-1] = f'{before}"token":"{"0" * 16}{digest[16:]}'
    report = replay_lines(reseal(lines))

    assert ("log.state", "state.token") == (report.clause, report.field)

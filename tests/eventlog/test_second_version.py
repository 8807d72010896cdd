"""
Logs of the second version, in which one line without a ticket checks and commits the update of an
epoch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.log.checker import LogError
from qeffect.log.replayer import replay_lines
from qeffect.verification.logs.edits import reseal

SECOND = Path(__file__).parent / "second"
VALID = sorted((SECOND / "valid").glob("*.jsonl"))
REJECTED = sorted((SECOND / "rejected").glob("*.jsonl"))


def bodies(name: str) -> list[str]:
    """The lines of a valid log without their digests."""
    lines = (SECOND / "valid" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [line[: line.rindex(',"digest"')] for line in lines]


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_a_log_of_the_second_version_is_accepted(path: Path) -> None:
    """Up to its closing line, also where commits come before further tickets."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)

    assert lines[0].startswith('{"qeffect":"event-log","version":2,')
    assert "accepted" == replay_lines(lines).verdict


@pytest.mark.parametrize("path", REJECTED, ids=lambda path: path.stem)
def test_a_log_of_the_second_version_is_refused_by_the_same_clause(path: Path) -> None:
    """A wrong commit is refused as the check of its update."""
    report = replay_lines(path.read_text(encoding="utf-8").splitlines(keepends=True))

    assert path.stem == report.clause


def test_a_transition_of_the_third_version_is_not_in_the_second() -> None:
    """A line of both versions is of none."""
    lines = bodies("last-generation")
    at = next(n for n, line in enumerate(lines) if '"commit_epoch"' in line)
    lines[at] = lines[at].replace('"commit_epoch"', '"check_update"') + ',"result":1'

    with pytest.raises(LogError, match=rf"line {at + 1} is not a line of version 2: check_update"):
        replay_lines(reseal(lines))


def test_a_commit_of_the_second_version_is_not_in_the_third() -> None:
    """The third version has the check and the commit of an update, in two lines."""
    lines = bodies("last-generation")
    at = next(n for n, line in enumerate(lines) if '"commit_epoch"' in line)
    lines[0] = lines[0].replace('"version":2', '"version":3')

    with pytest.raises(LogError, match=rf"line {at + 1}, field transition: found 'commit_epoch'"):
        replay_lines(reseal(lines))


def test_the_closing_line_is_compared() -> None:
    """The state that the second version knew is held against the replayed one."""
    lines = bodies("last-generation")
    before, _, digest = lines[-1].partition('"serial":"')
    lines[-1] = f'{before}"serial":"{"0" * 16}{digest[16:]}'
    report = replay_lines(reseal(lines))

    assert ("log.state", "state.serial") == (report.clause, report.field)

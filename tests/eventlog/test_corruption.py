"""
No corrupted log passes: one-field edits, lost, doubled and moved lines, damaged bytes.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from qeffect.log.recorder import Recorder
from qeffect.log.replayer import LogError, ReplayReport, replay_lines
from qeffect.spec.clauses import CLAUSES
from qeffect.verification.logs.edits import reseal
from qeffect.verification.logs.examples import outcomes, valid
from qeffect.verification.logs.scenarios import SCENARIOS

LOGS = sorted(SCENARIOS)
_DIGEST = re.compile(r',"digest":"[0-9a-f]{16}"}\n')

#: Edits that no rule of the contract refuses once every digest is computed anew: for each log and
#: field, why. The field is protected by the digests alone.
CHAIN_ONLY = {
    "callers": "a caller's name means nothing to the contract",
    "domain": "nor does a domain's, as long as the same stages share one",
    "pool": "nor does a pool's, as long as the same slots share one",
    "epoch": "the scenario restores its first epoch before any key is used",
    "transition": "a wait that nothing depends on, or what a later restore undoes",
    "incarnation": "no reference of that incarnation is used",
    "key": "what a later restore undoes",
    "link": "two callers that have waited for the same",
    "destination": "equal descriptors of two symbolic buffers, or no arena that compares them",
    "token": "order is left out",
    "refresh": "version is left out",
    "first": "arena is left out",
}


def body(line: str) -> str:
    """A line without its digest."""
    return _DIGEST.sub("", line)


def verdict(lines: list[str]) -> str | None:
    """The clause that refuses a log, ``unusable``, or None where it is accepted."""
    try:
        return replay_lines(lines).clause
    except LogError:
        return "unusable"


@pytest.mark.parametrize("log", LOGS)
class TestOneField:
    def test_the_digests_refuse_every_edit(self, log: str) -> None:
        """Any one-field edit without new digests is refused, at that line or the next."""
        for edit, _ in outcomes(log):
            lines = edit.apply(valid()[log], sealed=False)
            if edit.line < len(lines):
                # The edited line and those before are all that is needed to see it.
                lines = lines[: edit.line]

            assert verdict(lines) in ("log.chain", "unusable"), edit

    def test_with_new_digests_the_rules_refuse_what_is_not_listed(self, log: str) -> None:
        """With every digest computed anew a rule refuses the edit, or the field is listed above."""
        for edit, outcome in outcomes(log):
            if isinstance(outcome, ReplayReport) and outcome.clause is None:
                named = {part for part in edit.path if isinstance(part, str)}
                assert named & CHAIN_ONLY.keys(), edit

    def test_every_refusal_names_line_field_and_clause(self, log: str) -> None:
        """A refusal names a clause, a line no earlier than the edit, and what to do."""
        for edit, outcome in outcomes(log):
            if isinstance(outcome, LogError):
                assert "\n" not in str(outcome)
                named = re.search(r"line (\d+)", str(outcome))
                assert named is not None, edit
                assert int(named[1]) >= edit.line
            elif outcome.clause is not None:
                assert outcome.clause in CLAUSES
                assert outcome.line is not None
                assert outcome.line >= edit.line
                assert all((outcome.field, outcome.presented, outcome.expected, outcome.remedy))

    def test_lost_doubled_and_moved_lines_are_refused(self, log: str) -> None:
        """A line that is gone, stands twice or changed places is refused, though sealed anew."""
        bodies = [body(line) for line in valid()[log]]
        for place in range(1, len(bodies)):
            before, line, after = bodies[:place], bodies[place], bodies[place + 1 :]
            lost = verdict(reseal([*before, *after]))
            doubled = verdict(reseal([*before, line, line, *after]))
            moved = verdict(reseal([*before[:-1], line, before[-1], *after]))

            assert lost in ("log.sequence", "log.closing"), place
            assert doubled in ("log.sequence", "log.closing", "unusable"), place
            assert moved in ("log.sequence", "log.closing", "unusable"), place

    def test_damaged_bytes_are_refused(self, log: str) -> None:
        """A flipped bit, a removed byte or a byte too many, anywhere, is refused."""
        rng = random.Random(7)
        whole = "".join(valid()[log]).encode()
        for _ in range(150):
            place = rng.randrange(len(whole))
            flipped = bytes([whole[place] ^ (1 << rng.randrange(8))])
            for damage in (flipped, b"", whole[place : place + 1] * 2):
                damaged = whole[:place] + damage + whole[place + 1 :]
                assert damaged != whole
                assert verdict_of_bytes(damaged) is not None, (place, damage)

    def test_a_log_cut_off_anywhere_is_refused(self, log: str) -> None:
        """Every proper prefix of a log is refused."""
        whole = "".join(valid()[log]).encode()
        for end in range(0, len(whole), 97):
            assert verdict_of_bytes(whole[:end]) in ("log.closing", "unusable"), end


def verdict_of_bytes(data: bytes) -> str | None:
    """Likewise for a log's bytes."""
    try:
        return replay_lines(data.splitlines(keepends=True)).clause
    except LogError:
        return "unusable"


def test_every_listed_field_is_needed_in_the_list() -> None:
    """Each field listed as protected by the digests alone occurs among the accepted edits."""
    found = Counter(
        part
        for log in LOGS
        for edit, outcome in outcomes(log)
        if isinstance(outcome, ReplayReport) and outcome.clause is None
        for part in edit.path
        if part in CHAIN_ONLY
    )

    assert set(CHAIN_ONLY) == set(found)


def test_most_edits_are_refused_by_a_rule() -> None:
    """Under two per cent of all one-field edits are left to the digests."""
    verdicts = [outcome for log in LOGS for _, outcome in outcomes(log)]
    accepted = [v for v in verdicts if isinstance(v, ReplayReport) and v.clause is None]

    assert len(verdicts) > 5000
    assert len(accepted) < 0.02 * len(verdicts)


def test_scenarios_are_recorded_the_same_twice() -> None:
    """A scenario's log depends on nothing but the scenario."""
    assert {name: scenario() for name, scenario in SCENARIOS.items()} == dict(valid())


def lines_of_a_long_run(epochs: int) -> Iterator[str]:
    """A log of many epochs."""
    from qeffect import Contract, StageConfig, TapeKey

    contract = Contract([StageConfig(0, 1, 1, matrices=("w",))])
    with Recorder(contract) as log:
        for epoch in range(epochs):
            key = TapeKey(epoch, 0, 0)
            with contract.forward(key, refresh=True) as f:
                pass
            contract.bind(key)
            contract.wait()
            with contract.dgrad(key, f.ref) as i:
                i.queued = ("w",)
            with contract.wgrad(key, f.ref) as w:
                w.covered = ("w",)
            contract.wait()
            contract.finalize(0)
            contract.commit_epoch()
    yield from log.lines


def test_an_edit_late_in_a_long_log_is_found() -> None:
    """A stale generation in the last of many epochs is refused at its own line."""
    lines = list(lines_of_a_long_run(300))
    number = max(n for n, line in enumerate(lines) if '"check_wgrad"' in line)
    assert '"ref":[0,299,' in lines[number]
    bodies = [body(line) for line in lines]
    bodies[number] = bodies[number].replace('"ref":[0,299,', '"ref":[0,298,')
    report = replay_lines(reseal(bodies))

    assert ("ownership.stale-reference", number + 1, "ref.generation") == (
        report.clause,
        report.line,
        report.field,
    )
    assert report.epoch == 299

"""
No corrupted log is accepted: edits of one field, lost, duplicated and moved lines, damaged bytes.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest

from qeffect import Refused
from qeffect.engine.stage import TRANSITIONS, transitions
from qeffect.log.format import MARKS
from qeffect.log.reader import Converters
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import LogError, ReplayReport, replay_lines
from qeffect.spec.clauses import CLAUSES
from qeffect.verification.logs.edits import Edit, reseal
from qeffect.verification.logs.examples import outcomes, valid
from qeffect.verification.logs.harmless import REASONS, history, proof, unread
from qeffect.verification.logs.scenarios import SCENARIOS
from tests.profiles import by_profile, few

LOGS = sorted(SCENARIOS)
#: Half of the logs, those with the fewest edits: `dev` edits every second; nightly the long ones.
SHORT = {
    *("last-generation", "lost-cache", "messages", "readers", "shared-pool-in-declared-order"),
    *("without-version-order-arena",),
}
EDITED = few(
    LOGS,
    [n for n, log in enumerate(LOGS) if log in SHORT][::2],
    [n for n, log in enumerate(LOGS) if log in SHORT][1::2],
)
_DIGEST = re.compile(r',"digest":"[0-9a-f]{16}"}\n')

#: How edits that no rule of the contract refuses once every digest is computed anew are proved
#: harmless, by the innermost name of the edited place. The digests alone protect these.
CHAIN_ONLY = {
    "callers": {"name"},
    "domain": {"name"},
    "pool": {"name"},
    "name": {"name"},
    # Weights in the lines are parts of the declared sum, so replaying them needs only that one is.
    "weights_sum": {"name"},
    "transition": {"same effect", "needless", "undone"},
    "key": {"undone"},
    "link": {"same effect", "needless", "undone"},
    "token": {"unread"},
    # Evidence of a stage whose backend does not report it, or of an F that fills no cache.
    "fill_epoch": {"same effect", "unread"},
    "updates": {"same effect", "unread"},
    "scales": {"same effect", "unread"},
    "draws": {"same effect"},
    "refresh": {"unread"},
    # A movement of scales may be told of any stage of its domain.
    "stage": {"same effect"},
    # The part of a tape that was lost while its grouped dW ran: no gradient is counted for it.
    "covered": {"same effect"},
    # An evaluation at weights that no update has changed since the cache was filled.
    "cached": {"same effect", "unread"},
    # An epoch that failed, in a log that restores an earlier one afterwards.
    "epoch": {"undone"},
    "first": {"unread"},
    "destination": {"same call", "unread"},
    "matrix": {"unread"},
    "microbatch": {"unread"},
    "shape": {"unread"},
    "dtype": {"unread"},
    "device": {"unread"},
    "address": {"unread"},
    "nbytes": {"unread"},
}
#: What a backend may report or not; where it does not, nothing reads it.
EVIDENCE = {"fill_epoch", "updates", "scales", "draws"}
#: An accepted edit that is not proved harmless: a checkpoint's epoch stands in no line, so whoever
#: changes the header's, in a log that restores an older one before anything runs, changes it.
OPEN = {("aborts-and-restores", 1, "epoch")}
#: The edits of these fields that are left, counted; each is one of the proved ones.
LEFT = {"key": 1, "link": 68, "token": 7}


def accepted(log: str) -> Iterator[Edit]:
    """The edits of a log that no rule refuses."""
    for edit, outcome in outcomes(log):
        if isinstance(outcome, ReplayReport) and outcome.clause is None:
            yield edit


def named(edit: Edit) -> str:
    """The innermost name in an edit's place."""
    return [part for part in edit.path if isinstance(part, str)][-1]


def body(line: str) -> str:
    """A line without its digest."""
    return _DIGEST.sub("", line)


def verdict(lines: list[str]) -> str | None:
    """The clause that refuses a log, ``unusable``, or None where it is accepted."""
    try:
        return replay_lines(lines).clause
    except LogError:
        return "unusable"


@pytest.mark.parametrize("log", EDITED)
class TestOneField:
    def test_the_digests_refuse_every_edit(self, log: str) -> None:
        """Any one-field edit is refused there or at the next line; `dev` tries every seventh."""
        for edit, _ in islice(outcomes(log), 0, None, by_profile(dev=7, ci=3)):
            lines = edit.apply(valid()[log], sealed=False)
            if edit.line < len(lines):
                # The edited line and those before are all that is needed to see it.
                lines = lines[: edit.line]

            assert verdict(lines) in ("log.chain", "unusable"), edit

    def test_with_new_digests_a_rule_refuses_every_edit_that_is_not_harmless(
        self, log: str
    ) -> None:
        """With every digest computed anew a rule refuses an edit, or it is proved harmless."""
        for edit in accepted(log):
            if (log, edit.line, edit.field) not in OPEN:
                assert proof(valid()[log], edit) in CHAIN_ONLY.get(named(edit), ()), edit

    def test_no_refused_key_link_or_token_would_be_proved_harmless(self, log: str) -> None:
        """The proofs tell the edits of these fields apart as the replayer does."""
        for edit, outcome in outcomes(log):
            if isinstance(outcome, ReplayReport) and outcome.clause and named(edit) in LEFT:
                assert proof(valid()[log], edit) is None, edit

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
                assert all((outcome.field, outcome.found, outcome.expected, outcome.remedy))

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


@pytest.mark.nightly
def test_every_listed_field_and_proof_is_needed_in_the_list() -> None:
    """Each occurs among the accepted edits; of keys, links and tokens no more than counted."""
    found: dict[str, set[str | None]] = {}
    places = Counter[str]()
    unproved = set()
    for log in LOGS:
        for edit in accepted(log):
            reason = proof(valid()[log], edit)
            places[named(edit)] += 1
            if reason is None:
                unproved.add((log, edit.line, edit.field))
            else:
                found.setdefault(named(edit), set()).add(reason)

    assert found == CHAIN_ONLY
    assert unproved == OPEN
    assert {field: places[field] for field in LEFT} == LEFT
    assert {reason for reasons in found.values() for reason in reasons} == set(REASONS)


def any_link(function: Callable[..., Any], names: tuple[str, ...], st: Any, *given: Any) -> Any:
    """Run a transition with the given link or, where that is refused, with any other."""
    at = names.index("link")
    for link in (given[at], *range(len(st.domain_at))):
        try:
            return function(st, *given[:at], link, *given[at + 1 :])
        except Refused as refused:
            first = refused
    raise first


def own_token(function: Callable[..., Any], names: tuple[str, ...], st: Any, *given: Any) -> Any:
    """Run a transition with the domain's own token, whatever is given."""
    at = names.index("token")
    own = st.token[st.domain_of[given[0].stage]]
    return function(st, *given[:at], own, *given[at + 1 :])


def own_key(function: Callable[..., Any], names: tuple[str, ...], st: Any, *given: Any) -> Any:
    """Run a transition with the key of the reference's slot, whatever is given."""
    if "ref" in names:
        key, ref = given[:2]
        key.cell, key.epoch = st.cell_at[ref.slot], st.epoch_at[ref.slot]
        key.stage = key.cell[0]
    return function(st, *given)


@pytest.mark.parametrize(
    ("field", "careless"), [("link", any_link), ("token", own_token), ("key", own_key)]
)
def test_a_replayer_that_overlooks_a_field_is_found(
    field: str, careless: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a replayer accepts is not what the proofs excuse."""
    honest = Converters.plans

    def plans(self: Converters, marks: Any, *, former: bool = False) -> dict[str, Any]:
        return {
            name: (spelled, partial(careless, function, names), *rest)
            if field in (names := {**TRANSITIONS, **MARKS}[name])
            else (spelled, function, *rest)
            for name, (spelled, function, *rest) in honest(self, marks, former=former).items()
        }

    lines = valid()["readers"]
    edits = [edit for edit, _ in outcomes("readers") if edit.path[0] == field]
    monkeypatch.setattr(Converters, "plans", plans)
    assert verdict(lines) is None
    overlooked = [edit for edit in edits if verdict(edit.apply(lines)) is None]

    assert overlooked
    assert any(proof(lines, edit) is None for edit in overlooked)


class TestProofs:
    def test_an_argument_that_is_read_is_not_unread(self) -> None:
        """A composed function reads what its parts check, and nothing of a part left out."""
        assert "token" not in unread(transitions().functions["check_forward"])
        assert "token" in unread(transitions(("order",)).functions["check_forward"])

    def test_an_entry_that_is_read_later_is_not_left_over(self) -> None:
        """A log whose entry is made unreadable runs on until the entry is read, and no further."""
        lines = valid()["readers"]
        whole = history(lines)
        assert whole is not None
        after = next(n for n, e in enumerate(whole.events, 1) if e["transition"] == "check_dgrad")

        assert history(lines, (after, [("held", 0)])) is None
        assert history(lines, (after, [])) is not None

    def test_a_log_that_breaks_the_contract_has_no_history(self) -> None:
        """Nothing is proved of a log that is refused, or that names what is not configured."""
        lines = valid()["readers"]

        assert history([lines[0], *lines[2:]]) is None
        assert history([line.replace('"link":1', '"link":7') for line in lines]) is None


@pytest.mark.nightly
def test_most_edits_are_refused_by_a_rule() -> None:
    """
    Under two per cent of all one-field edits are left to the digests.

    Beside them stands the evidence that a stage's backend does not report: null, and read by no
    transition.
    """
    edits = [edit for log in LOGS for edit, _ in outcomes(log)]
    left = Counter(named(edit) in EVIDENCE for log in LOGS for edit in accepted(log))

    assert len(edits) > 5000
    assert left[False] < 0.02 * len(edits)
    assert left[True] < 0.02 * len(edits)


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
            contract.join()
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

"""
One rank cannot continue: all ranks stop, with one cause in the same words, and no weights have
changed.

A limit given here bounds every wait. If every rank survives the cause, the epoch is rebuilt, and
the run continues bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import Limits
from tests.ranks import bodies
from tests.ranks.ranks import Said, launch
from tests.training.helpers import language, noise

LIMITS = Limits(start=60.0, message=30.0, commit=30.0, grace=4.0)
#: Where a message never comes: as long as is waited for it.
SHORT = attrs.evolve(LIMITS, message=5.0)
JOB = Job(schedule="zbv", pp=2, microbatches=4)


def one_cause(words: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say alike."""
    causes = [word["cause"] for word in words]
    assert causes[0] is not None
    assert all(cause == causes[0] for cause in causes)
    assert all(word["moved"] == [] for word in words)
    found: dict[str, Any] = causes[0]
    return found


def place(cause: dict[str, Any]) -> tuple[Any, ...]:
    """Kind, rank, stage, action and clause."""
    return tuple(cause[name] for name in ("kind", "rank", "stage", "action", "clause"))


def survivors(said: Said, dead: int) -> list[dict[str, Any]]:
    """What all ranks but one say; that one was killed."""
    assert said.codes == [-9 if n == dead else 0 for n in range(len(said.codes))]
    return [said.words[n] for n in said.words if n != dead]


@pytest.mark.ci
def test_after_a_cause_that_all_survive_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """
    A refusal, an exception, a lost and a doubled message; each is rebuilt and run again.

    The model of ranks takes the run up to the message that leaves twice.
    """
    faults = [
        (1, ("twice", "2W1")),
        (0, ("raising", "3W2")),
        (1, ("dropped", "1SEND_B0")),
        (1, ("twice", "1RECV_F2")),
        (0, ("doubled", "0SEND_F1")),
    ]
    said = launch(2, tmp_path, bodies.recovering, JOB, faults, SHORT, refused="ranks.planned-sends")
    assert said.codes == [0, 0]
    words = [said.words[rank] for rank in range(2)]
    found = []
    for n in range(len(faults)):
        stops = [word["stops"][n] for word in words]
        cause = one_cause(stops)
        assert cause["recoverable"]
        assert [stop["epoch"] for stop in stops] == [n, n]
        assert [stop["again"]["epoch"] for stop in stops] == [n + 1, n + 1]
        found.append(place(cause))
    assert found == [
        ("refused", 1, 2, "2W1", "ownership.duplicate-wgrad"),
        ("raised", 0, 3, "3W2", None),
        ("dropped", 1, 1, "1SEND_B0", None),
        ("refused", 1, 1, "1RECV_F2", "ownership.slot-busy"),
        ("disagreed", 0, 0, "0SEND_F1", None),
    ]
    for word in words:
        assert word["differ"] == []
        assert word["of"] > 0
        assert word["same losses"]


@pytest.mark.ci
def test_replicas_stop_and_go_on_together(tmp_path: Path) -> None:
    """A rank of one replica raises, also while gradients are summed: all four rebuild."""
    job = Job(schedule="il", pp=2, dp=2, microbatches=2)
    faults = [(3, ("raising", "1W1")), (0, ("raising", "0W1"))]
    said = launch(4, tmp_path, bodies.recovering, job, faults, LIMITS)
    assert said.codes == [0] * 4
    for n, (victim, (_, action)) in enumerate(faults):
        cause = one_cause([said.words[rank]["stops"][n] for rank in range(4)])
        assert (cause["kind"], cause["rank"], cause["action"]) == ("raised", victim, action)
    for rank in range(4):
        assert said.words[rank]["differ"] == []
        assert said.words[rank]["same losses"]


def test_a_killed_process_is_named_by_what_it_owed(tmp_path: Path) -> None:
    """In the middle of four ranks, in the middle of a step: the others say the same of it."""
    job = Job(schedule="zbv", pp=4, microbatches=4)
    said = launch(4, tmp_path, bodies.stopping, job, 2, ("killed", "2F1"), LIMITS)
    words = survivors(said, 2)
    cause = one_cause(words)
    assert (cause["kind"], cause["rank"]) == ("gone", 2)
    # Which of them woke up first is not the same each time: all were owed by rank 2, behind 2F1.
    assert cause["stage"] in (2, 5)
    assert f"rank 2, step 1, {cause['action']}: the process has ended" in cause["text"]
    assert [word["rebuild"] for word in words] == [cause["text"]] * 3


@pytest.mark.ci
def test_a_rank_that_is_killed_in_the_sum_over_copies_stops_all(tmp_path: Path) -> None:
    """The other copy's rank waits in that sum; those of the other replica have ended theirs."""
    (tmp_path / "said").mkdir()
    job = language(noise(tmp_path), tied=True, schedule="il", pp=2, dp=2, microbatches=2)
    fault = ("killed_in_sum", job.ties[0].name)
    said = launch(4, tmp_path / "said", bodies.stopping, job, 3, fault, LIMITS)
    words = survivors(said, 3)
    cause = one_cause(words)
    assert (cause["kind"], cause["rank"], cause["recoverable"]) == ("gone", 3, False)
    assert [word["rebuild"] for word in words] == [cause["text"]] * 3


def test_a_rank_that_the_launcher_ends_says_so_first(tmp_path: Path) -> None:
    """torchrun ends all that are left when one has died: without this they would say nothing."""
    said = launch(2, tmp_path, bodies.stopping, JOB, 0, ("terminated", "3F1"), LIMITS)
    assert said.codes == [0, 0]
    cause = one_cause([said.words[0], said.words[1]])
    assert place(cause) == ("ended", 0, 3, "3F1", None)
    assert not cause["recoverable"]


@pytest.mark.ci
def test_a_stalled_process_is_named_and_hears_of_it(tmp_path: Path) -> None:
    """Nobody waits for a transport's own limit, and the late one stops when it wakes up."""
    limits = Limits(start=60.0, message=3.0, commit=6.0, grace=2.0)
    said = launch(2, tmp_path, bodies.stopping, JOB, 1, ("late", "1I1", 7.0), limits)
    assert said.codes == [0, 0]
    cause = one_cause([said.words[0], said.words[1]])
    assert place(cause) == ("late", 1, 1, "1SEND_B1", None)


def test_an_update_that_fails_half_way_is_not_rebuilt(tmp_path: Path) -> None:
    """All had consented, so other ranks have moved on: only a checkpoint leads back."""
    said = launch(2, tmp_path, bodies.updating, JOB, LIMITS)
    assert said.codes == [0, 0]
    causes = [said.words[rank]["cause"] for rank in range(2)]
    assert causes[0] == causes[1]
    assert place(causes[0]) == ("raised", 1, None, "commit", None)
    assert not causes[0]["recoverable"]


def test_a_rank_an_epoch_behind_is_named_at_the_commit(tmp_path: Path) -> None:
    """One rank went back to an older checkpoint; its own guards accept that."""
    said = launch(2, tmp_path, bodies.behind, JOB, LIMITS, refused="ranks.as-recorded")
    assert said.codes == [0, 0]
    cause = one_cause([said.words[0], said.words[1]])
    assert "rank 1 is at epoch 1" in cause["text"]
    assert cause["kind"] == "disagreed"
    assert not cause["recoverable"]


def test_digests_name_two_sends_that_changed_places(tmp_path: Path) -> None:
    """Without tags a channel's order is all that pairs messages, as on NCCL."""
    said = launch(2, tmp_path, bodies.exchange, JOB, "0SEND_F0", "0SEND_F1", True)
    assert said.codes == [0, 0]
    cause = one_cause([said.words[0], said.words[1]])
    assert place(cause) == ("disagreed", 0, 0, "0SEND_F1", None)
    assert "the sender posted 0SEND_F1, the receiver posted 1RECV_F0" in cause["text"]


def test_without_digests_two_sends_that_changed_places_commit_other_bits(tmp_path: Path) -> None:
    """Nothing else refuses it: this is what the comparison and the digests are for."""
    mixed = "ranks.same-messages"
    said = launch(2, tmp_path, bodies.exchange, JOB, "0SEND_F0", "0SEND_F1", False, refused=mixed)
    assert said.codes == [0, 0]
    assert [said.words[rank]["cause"] for rank in range(2)] == [None, None]
    assert all(len(said.words[rank]["differ"]) > 10 for rank in range(2))


def test_late_counts_let_no_rank_update_alone(tmp_path: Path) -> None:
    """One rank's device ran something twice: all stop before the update, for that, and go on."""
    said = launch(2, tmp_path, bodies.late_counts, Job(schedule="zbv"))
    assert said.codes == [0, 0]
    for rank in range(2):
        words = said.words[rank]
        assert ("epoch.device-count", 0) == (words["cause"]["clause"], words["cause"]["rank"])
        assert words["moved"] == []
        assert words["again"] == {"cause": None, "moved": [], "epoch": 2}

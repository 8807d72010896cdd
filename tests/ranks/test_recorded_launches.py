"""
A step that is one launch, with a stand-in for the device's graphs: its bits, and its recovery.

`tests.ranks.recorded` does the work of the device; everything else is the real code of a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks import recorded_bodies
from tests.ranks.ranks import launch
from tests.training.helpers import language, noise

PIPE = Job(schedule="zbv", pp=2, microbatches=2)
REPLICAS = Job(schedule="il", pp=1, vpp=2, dp=2, microbatches=2)
FOUR = Job(schedule="izb", pp=2, dp=2, microbatches=2, amax="replicas")

#: What replays of so many steps of a job leave on each rank.
Replayed = Callable[[Job, int, dict[str, Any]], dict[int, Any]]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """Run a job by replays, without a fault; once, however many tests compare with it."""
    found: dict[str, dict[int, Any]] = {}

    def run(job: Job, steps: int, options: dict[str, Any]) -> dict[int, Any]:
        key = repr((job, steps, options))
        if key not in found:
            folder = tmp_path_factory.mktemp("replayed")
            said = launch(job.world, folder, recorded_bodies.replayed, job, steps, options)
            assert said.codes == [0] * job.world
            found[key] = said.words
        return found[key]

    return run


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (PIPE, {}),
        (REPLICAS, {"clip_norm": 0.01, "mean": True}),
        pytest.param(FOUR, {"clip_norm": 0.01}, marks=pytest.mark.ci),
        (attrs.evolve(PIPE, rule="per_microbatch"), {}),
        (attrs.evolve(REPLICAS, rule="per_microbatch"), {"mean": True}),
        (attrs.evolve(PIPE, scales="epoch"), {"clip_norm": 0.01}),
        (attrs.evolve(PIPE, scales="epoch", wgrad_group=2), {"clip_norm": 0.01}),
        pytest.param(
            attrs.evolve(FOUR, scales="epoch"), {"clip_norm": 0.01}, marks=pytest.mark.nightly
        ),
    ],
    ids=[
        *("pipeline", "replicas", "both", "one buffer per microbatch", "replicas of such buffers"),
        *("epoch scales", "grouped", "both, epoch scales"),
    ],
)
def test_launches_leave_the_bits_of_replays(
    job: Job, options: dict[str, Any], tmp_path: Path
) -> None:
    """Parameters, AdamW, histories and scales, with gradients reduced and norms taken inside."""
    said = launch(job.world, tmp_path, recorded_bodies.launched, job, 6, options)
    assert said.codes == [0] * job.world
    assert said.replay.launches == 5 * job.world  # of their rank logs, through the model of ranks
    for rank in range(job.world):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["of"] > 20
        assert word["launches"] == 5
        assert word["rehearsed and as one"] == [2, 2]
        assert word["norms"][0] == word["norms"][1] == said.words[0]["norms"][0]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"schedule": "zbv", "pp": 1}, {"clip_norm": 0.01}),
        pytest.param({"schedule": "zbv", "pp": 2}, {"clip_norm": 0.01}, marks=pytest.mark.ci),
        ({"schedule": "il", "pp": 2}, {"clip_norm": 0.01}),
        pytest.param(
            {"schedule": "il", "pp": 2, "dp": 2, "amax": "replicas"},
            {"clip_norm": 0.01, "mean": True},
            marks=pytest.mark.ci,
        ),
    ],
    ids=["one rank", "both on one of two", "one each", "one each, in two replicas"],
)
def test_launches_of_a_tied_model_leave_the_bits_of_replays(
    given: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Its copies' gradients are added inside, before the norm, in which the weight counts once."""
    job = language(noise(tmp_path), tied=True, microbatches=2, **given)
    said = launch(job.world, tmp_path, recorded_bodies.launched, job, 6, options)
    assert said.codes == [0] * job.world
    copies = []
    for rank in range(job.world):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["launches"] == 5
        assert word["rehearsed and as one"] == [2, 2]
        assert word["norms"][0] == word["norms"][1] == said.words[0]["norms"][0]
        copies += word["copies"]
    assert len(copies) == 2 * job.dp
    assert all(copy == copies[0] for copy in copies)


STEPS = 8

#: Faults before an epoch (0 is a guarded step, 1 is captured, 2 and 3 are rehearsed, later ones are
#: checked as one): its rank, what it is, and the action; by which clause and where all ranks stop.
STOPS: dict[str, tuple[Job, list[tuple[int, int, str, str]], list[tuple[str, int]]]] = {
    "a refusal before a launch": (
        PIPE,
        [(6, 1, "twice", "1W1")],
        [("ownership.duplicate-wgrad", 6)],
    ),
    "a refusal while it is captured": (
        PIPE,
        [(1, 0, "twice", "0W1")],
        [("ownership.duplicate-wgrad", 1)],
    ),
    "a device that counted otherwise": (
        PIPE,
        [(6, 0, "miscounted", "")],
        [("epoch.device-count", 6)],
    ),
    "the last launch of all": (
        REPLICAS,
        [(7, 1, "miscounted", "")],
        [("epoch.device-count", 7)],
    ),
    "three, over replicas": (
        FOUR,
        [(0, 3, "twice", "1W1"), (2, 2, "twice", "0W1"), (6, 1, "miscounted", "")],
        [
            ("ownership.duplicate-wgrad", 0),
            ("ownership.duplicate-wgrad", 2),
            ("epoch.device-count", 6),
        ],
    ),
}


#: Cases that the profile dev runs too: one before a launch, one behind it.
EVERYWHERE = ("a refusal before a launch", "a device that counted otherwise")


@pytest.mark.parametrize(
    "case", [c if c in EVERYWHERE else pytest.param(c, marks=pytest.mark.ci) for c in STOPS]
)
def test_after_a_stop_launches_go_on_bit_for_bit(
    case: str, tmp_path: Path, replayed: Replayed
) -> None:
    """No update is lost and none is made twice: the end is that of replays without a fault."""
    require_undisturbed(*STOPS[case], tmp_path, replayed)


@pytest.mark.ci
def test_a_tied_model_goes_on_bit_for_bit(tmp_path: Path, replayed: Replayed) -> None:
    """After stops before a launch, in a capture, and behind one: the copies' group is made anew."""
    job = language(noise(tmp_path), tied=True, schedule="il", pp=2, microbatches=2)
    faults = [(1, 0, "twice", "0W1"), (3, 1, "twice", "1W1"), (7, 0, "miscounted", "")]
    clauses = ["ownership.duplicate-wgrad"] * 2 + ["epoch.device-count"]
    stops = [(clause, fault[0]) for clause, fault in zip(clauses, faults, strict=True)]
    require_undisturbed(job, faults, stops, tmp_path, replayed)


def require_undisturbed(
    job: Job,
    faults: list[tuple[int, int, str, str]],
    stops: list[tuple[str, int]],
    folder: Path,
    replayed: Replayed,
) -> None:
    """Require the stops, and behind them what replays without a fault leave."""
    options: dict[str, Any] = {"clip_norm": 0.01}
    said = launch(job.world, folder, recorded_bodies.recovering, job, STEPS, options, faults)
    whole = replayed(job, STEPS, options)
    assert said.codes == [0] * job.world
    for rank in range(job.world):
        word = said.words[rank]
        assert [stop["cause"] for stop in word["stops"]] == [
            stop["cause"] for stop in said.words[0]["stops"]
        ]
        assert [(stop["cause"]["clause"], stop["again"]) for stop in word["stops"]] == stops
        assert [stop["cause"]["rank"] for stop in word["stops"]] == [f[1] for f in faults]
        assert all(stop["moved"] == [] for stop in word["stops"])
        assert word["epoch"] == STEPS
        assert word["left"] == whole[rank]


@pytest.mark.parametrize(
    "behind",
    [False, pytest.param(True, marks=pytest.mark.ci)],
    ids=["before its word", "behind it"],
)
def test_a_rank_that_fails_in_the_warm_up_is_heard_by_those_that_wait(
    behind: bool, tmp_path: Path, replayed: Replayed
) -> None:
    """On the device for its word, or on the host for all to capture; and all begin again."""
    said = launch(2, tmp_path, recorded_bodies.unwarmed, PIPE, 5, behind)
    whole = replayed(PIPE, 5, {})
    assert said.codes == [0, 0]
    for rank in range(2):
        word = said.words[rank]
        (cause,) = word["causes"]
        assert (cause["kind"], cause["rank"], cause["recoverable"]) == ("raised", 1, True)
        assert word["captured"] == 2
        assert word["left"] == whole[rank]


def test_nothing_is_posted_on_a_connection_that_the_host_has_ended(tmp_path: Path) -> None:
    """Nor on that of all ranks, where no peer ever comes to it; the host waits for who posts."""
    said = launch(1, tmp_path, recorded_bodies.ended_while_posting)
    assert said.codes == [0]
    message, bucket = said.words[0]
    assert message == ["its own"]
    assert bucket == ["its own", "its own"]


def test_a_launch_behind_one_that_was_skipped_moves_no_weights(
    tmp_path: Path, replayed: Replayed
) -> None:
    """It is under way before the host has heard; replicas agree again, and still none runs."""
    job, options = REPLICAS, {"clip_norm": 0.01}
    faults = [(5, 1, "unlike", "")]
    said = launch(2, tmp_path, recorded_bodies.recovering, job, STEPS, options, faults)
    whole = replayed(job, STEPS, options)
    assert said.codes == [0, 0]
    for rank in range(2):
        (stop,) = said.words[rank]["stops"]
        assert stop["cause"]["kind"] == "disagreed"
        assert "the replica of rank 1 differ from the first" in stop["cause"]["text"]
        assert stop["again"] == 5
        assert said.words[rank]["left"] == whole[rank]


def test_a_step_that_cannot_be_captured_is_taken_by_replays(
    tmp_path: Path, replayed: Replayed
) -> None:
    """One rank's library refuses it: all ranks go on without a gate, and say why."""
    said = launch(2, tmp_path, recorded_bodies.uncaptured, PIPE, 5)
    whole = replayed(PIPE, 5, {})
    assert said.codes == [0, 0]
    for rank in range(2):
        assert said.words[rank]["left"] == whole[rank]
        (note,) = said.words[rank]["notes"]
        assert note.startswith("the step could not be captured: rank 1, step 1")
        assert "operation not permitted when stream is capturing" in note
        assert said.words[rank]["gates"] == 1


def test_a_rank_that_cannot_capture_its_actions_ends_all_ranks(tmp_path: Path) -> None:
    """At once, and with one cause: no rank waits for it in a later step."""
    said = launch(2, tmp_path, recorded_bodies.unreplayed, PIPE)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1] == ["rank 1 cannot capture its actions: out of memory"]

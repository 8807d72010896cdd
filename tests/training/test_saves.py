"""A save happens between two steps on all ranks or on no rank; earlier checkpoints stay usable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.training.checkpoint import Checkpoints, plain, sizes
from qeffect.gpu_runtime.training.checkpoint.files import (
    FACTS,
    MANIFEST,
    Writer,
    checkpoint_name,
    partial_of,
)
from tests.ranks.ranks import launch
from tests.training import bodies

JOB = Job(schedule="zbv", pp=2, microbatches=4)


def run(tmp_path: Path, job: Job, body: Any, *args: Any, **options: Any) -> dict[int, Any]:
    """One launch, which ends well; `options` say how its logs are checked."""
    words, folder = tmp_path / "words", tmp_path / "checkpoints"
    words.mkdir()
    found = launch(job.world, words, body, job, str(folder), *args, **options)
    assert found.codes == [0] * job.world
    return found.words


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and their folder are synced before the rename, the folder of all checkpoints after."""
    final = tmp_path / checkpoint_name(1)
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def noted(handle: int) -> None:
        place = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((str(place.relative_to(tmp_path)), final.exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    facts = {"epoch": 1}
    state_dict_saver.save(
        {"a": torch.ones(3)}, storage_writer=Writer(final, facts, keep=1), no_dist=True
    )

    hidden = partial_of(final).name
    files = {path.name for path in final.iterdir()}
    assert {FACTS, MANIFEST, ".metadata"} < files
    assert all((f"{hidden}/{name}", False) in synced for name in files)
    assert [(hidden, False), (".", True)] == synced[-2:]


def test_a_save_in_the_middle_is_refused_on_all_ranks_with_one_cause(tmp_path: Path) -> None:
    """A tape that lives, an epoch half done or spoiled, a message away; each is rebuilt from."""
    said = run(tmp_path, JOB, bodies.refused, refused="ranks.order")  # a row run by hand
    for name, clause in (
        ("live tape", "persistence.live-tape"),
        ("mid-epoch", "persistence.mid-epoch"),
        ("spoiled", "persistence.mid-epoch"),
        ("message away", None),
    ):
        found = [said[rank][name] for rank in range(2)]
        assert found[0]["cause"] == found[1]["cause"], name
        assert found[0]["cause"]["clause"] == clause, name
        assert found[0]["cause"]["recoverable"], name
        for one in found:
            assert (one["moved"], one["epoch"]) == ([], 0), name
            assert one["files"] == ["step-00000001"], name
    assert "checkpoint" in said[0]["live tape"]["cause"]["text"]
    away = said[0]["message away"]["cause"]
    assert (away["kind"], away["action"]) == ("disagreed", "0SEND_F0")
    for rank in range(2):
        assert said[rank]["after"] == {"epoch": 2, "saved": "step-00000002"}
        again = said[rank]["at once again"]
        assert "step-00000002 is of this epoch or a later one" in again["error"]
        assert "free.rate is tensor(1.)" in said[rank]["no JSON"]["error"]


def test_a_save_while_gradients_are_summed_is_refused(tmp_path: Path) -> None:
    """All forwards of the epoch have run, its commit has not; reductions are under way."""
    job = Job(schedule="1f1b", pp=1, dp=2, microbatches=2)
    said = run(tmp_path, job, bodies.reducing)
    assert said[0]["cause"] == said[1]["cause"]
    assert said[0]["cause"]["clause"].startswith("persistence.")
    for words in said.values():
        assert words["started"] > 0
        assert words["files"] == []


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_half_updated_weights_are_not_saved(tmp_path: Path, ranks: int) -> None:
    """The update failed half way on one rank; it is whole on the other."""
    job = Job(schedule="1f1b" if ranks > 1 else "gpipe", pp=ranks, microbatches=2)
    said = run(tmp_path, job, bodies.half_updated)

    assert said[ranks - 1]["stepped"]
    for words in said.values():
        assert "an injected failure" in words["cause"]["text"]  # the first cause, on every rank
        assert words["files"] == []


@pytest.mark.parametrize("place", ["confirm", pytest.param("collect", marks=pytest.mark.ci)])
def test_an_error_of_one_rank_alone_is_told_to_the_other(tmp_path: Path, place: str) -> None:
    """In the contract's question, and while tensors are collected for the first save."""
    job = Job(schedule="1f1b", pp=2, microbatches=2)
    said = run(tmp_path, job, bodies.failed_alone, place)

    for words in said.values():
        if place == "confirm":
            assert "BackendError: an injected failure" in words["cause"]["text"]
            assert (words["cause"]["rank"], words["cause"]["recoverable"]) == (1, True)
        else:
            assert "rank 1 cannot save step-00000001: TypeError: an" in words["error"]
        assert (words["files"], words["moved"]) == ([], [])
        assert words["then"] == "step-00000001"


def test_an_error_of_one_rank_alone_in_a_load_is_told_to_the_other(tmp_path: Path) -> None:
    """No rank has written anything, and the next load succeeds."""
    job = Job(schedule="1f1b", pp=2, microbatches=2)
    said = run(tmp_path, job, bodies.load_failed_alone)

    for words in said.values():
        assert words["error"] == "TypeError: an injected failure"
        assert words["moved"] == []


def test_without_the_question_half_a_step_is_saved(tmp_path: Path) -> None:
    """Scaling state of the middle of an epoch, under the name of the one before: it is needed."""
    said = run(tmp_path, JOB, bodies.unasked, refused="ranks.as-recorded")
    for words in said.values():
        assert words["saved"]
        assert words["moved"]
        assert all(name.startswith("fp8.") for name in words["moved"])


def test_a_load_that_fails_half_way_stops_all_ranks_for_good(tmp_path: Path) -> None:
    """The run cannot restart from the state in memory. It must be relaunched, and must load a
    checkpoint."""
    said = run(tmp_path, JOB, bodies.half_loaded)
    assert said[0]["cause"] == said[1]["cause"]
    cause = said[0]["cause"]
    assert (cause["kind"], cause["rank"], cause["recoverable"]) == ("raised", 1, False)
    assert "step-00000001 is half loaded (MemoryError" in cause["text"]


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_disk_that_is_full_is_named_on_all_ranks(tmp_path: Path, asynchronous: bool) -> None:
    """The system refuses a write of one rank; the run goes on, and so does the save after it."""
    said = run(tmp_path, JOB, bodies.full, asynchronous, beside=False)
    for rank, words in said.items():
        for victim in ("0", "1"):
            found = words[victim]
            assert found["error"] == said[0][victim]["error"], rank
            assert f"rank {victim}: __{victim}_0.distcp cannot be written" in found["error"]
            assert "File too large" in found["error"]
            assert "step-00000001" in found["error"]
            assert (found["moved"], found["latest"]) == ([], True)
            assert found["left"] == [], (
                "expected the failed save to remove its files; they keep the disk full"
            )
        assert words["then"]
        assert words["files"] == ["step-00000001", "step-00000002"]


def test_a_save_that_failed_does_not_cost_the_next_one(tmp_path: Path) -> None:
    """All ranks report the failure when the next save begins; that save is written."""
    said = run(tmp_path, JOB, bodies.lost_before)
    for words in said.values():
        assert words["told"] == said[0]["told"]
        assert "step-00000001 was not saved: rank 1: __1_0.distcp cannot be" in words["told"]
        assert words["told"].endswith("step-00000002 is being written")
        assert words["latest"] == "step-00000002"


def test_what_is_not_ours_stays_and_a_removal_that_fails_is_no_failed_save(tmp_path: Path) -> None:
    """Only the folder of a killed save is removed. A folder that cannot be removed is reported
    beside the save."""
    said = run(tmp_path, JOB, bodies.untidy)
    for words in said.values():
        assert words["error"] is None
    (told,) = said[0]["untidy"]
    assert "step-00000001 is older than the 1 kept checkpoints and cannot be removed: Not a" in told
    assert said[0]["names"] == sorted([
        "step-7", "step-\u00b2", ".partial-mine", ".removed-step-1", "step-00000000",
        "step-00000008", "step-00000001", "step-00000002", ".removed-step-00000001",
    ])  # fmt: skip


def test_replicas_that_drifted_apart_are_not_written_as_one(tmp_path: Path) -> None:
    """Their weights have one name, and one of them would be lost."""
    job = Job(schedule="1f1b", pp=1, dp=2, microbatches=2)
    said = run(tmp_path, job, bodies.drifted)
    for words in said.values():
        assert "differs between ranks 0 and 1" in words["error"]
        assert "model.layers.0" in words["error"]
        assert words["files"] == []


def test_the_newest_stay_and_no_other_run_is_overtaken(tmp_path: Path) -> None:
    """Who goes back behind a checkpoint cannot save beneath it: `latest` would be the wrong one."""
    said = run(tmp_path, JOB, bodies.kept)
    for words in said.values():
        assert words["names"] == ["step-00000003", "step-00000004"]
        assert "step-00000004 is of this epoch or a later one" in words["behind"]


@pytest.mark.parametrize(("copied", "loaded"), [(True, "saved"), (False, "moved")])
def test_an_asynchronous_save_has_what_was_there_when_it_began(
    tmp_path: Path, copied: bool, loaded: str
) -> None:
    """It writes behind the next step; without its copy it would write what that step left."""
    said = run(tmp_path, JOB, bodies.behind_the_next_step, copied)
    for words in said.values():
        assert words == {"named before": False, "moved": True, "loaded": loaded}


def test_a_save_under_way_outlives_a_stop(tmp_path: Path) -> None:
    """What it writes is of an epoch that all had committed: the next one begins again."""
    said = run(tmp_path, JOB, bodies.stopped_under_way)
    for words in said.values():
        assert words == {"same": True, "second": "step-00000002", "there": True}


def test_generators_and_tensors_of_the_caller_come_back(tmp_path: Path) -> None:
    """In other processes the next numbers are those that the first would have drawn."""
    words, folder = (tmp_path / name for name in ("words", "checkpoints"))
    words.mkdir()
    said = [launch(2, words, bodies.carried, JOB, str(folder)).words for _ in range(2)]
    for rank in range(2):
        assert said[1][rank]["drawn"] == said[0][rank]["drawn"]
        assert said[1][rank]["counts"] == [2.0] * 3
        assert said[1][rank]["free"] == {"rate": 0.1}
    assert said[0][0]["drawn"] != said[0][1]["drawn"]


def test_sizes_say_what_the_bytes_are(tmp_path: Path) -> None:
    """Histories and scales are a small part; the sum of the files is the folder's."""
    job = Job(schedule="il", pp=2, microbatches=2)
    run(tmp_path, job, bodies.started, {"until": 1, "save_at": (1,)})
    path = Checkpoints(tmp_path / "checkpoints").latest()
    assert path is not None
    found = sizes(path)
    assert found["total"] == sum(file.stat().st_size for file in path.iterdir())
    # Two histories of 4 entries and two scales, of 11 tensors a layer in float32, four layers.
    assert found["numerical"] == 4 * 4 * (4 + 1) * _tensors_a_layer(path)
    assert found["optimizer"] > 2 * found["weights"]
    assert 0 < found["numerical"] < found["weights"] < found["total"]


def _tensors_a_layer(path: Path) -> int:
    """How many scaled tensors a layer has."""
    import json

    tensors = json.loads((path / "facts.json").read_text())["tensors"]
    ways = ("forward", "backward")
    return sum(tensors[f"fp8.dp0.layers.0.{way}.scale"][1][0] for way in ways)


def test_another_rule_is_a_short_word(tmp_path: Path) -> None:
    """The rule for where dW writes may differ from the checkpoint's; the difference is reported as
    one field and two short values."""
    words, folder = (tmp_path / name for name in ("words", "checkpoints"))
    words.mkdir()
    saved = launch(2, words, bodies.started, JOB, str(folder), {"until": 1, "save_at": (1,)})
    assert saved.codes == [0, 0]
    job = attrs.evolve(JOB, rule="per_microbatch")
    said = launch(2, words, bodies.gone_on, job, str(folder), {"until": 2})
    assert said.codes == [0, 0]
    for one in said.words.values():
        (told,) = one["changed"]
        assert told.startswith("contract.stages[0].")
        assert " -> " in told
        assert len(told) < 120


def test_what_is_no_plain_data_is_named() -> None:
    """Facts are JSON: a tensor, a NaN or a number as a key would come back as something else."""
    assert plain({"a": (1, None, 2.5, "x")}, "free") == {"a": [1, None, 2.5, "x"]}
    for value, text in (
        ({"a": {"b": float("nan")}}, "free.a.b is nan"),
        ({"a": [object]}, r"free.a\[0\] is <class"),
        ({"a": {3: 1}}, "free.a: expected strings as keys, found 3"),
    ):
        with pytest.raises(BackendError, match=text):
            plain(value, "free")


def test_at_least_one_checkpoint_stays(tmp_path: Path) -> None:
    """Keeping none would remove what was just written."""
    with pytest.raises(BackendError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(BackendError, match="keep_every is -1"):
        Checkpoints(tmp_path, keep_every=-1)
    assert Checkpoints(tmp_path / "nowhere").latest() is None

"""
A checkpoint does not depend on the mapping: other ranks, stages, tables, replicas and splits load
it, bit for bit.

After a load under another mapping, only results that the mapping itself determines may change.
Every F and dI rolls the amax histories of all stages of its process. So after a change of mapping,
later steps roll histories in another order than steps of the old mapping. Sums over microbatches
and replicas are also taken in another order. The loaded state, and the result of one step from this
state, must not change; both are compared with a pipeline whose state was copied by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from tests.profiles import few
from tests.ranks.ranks import launch
from tests.training import bodies
from tests.training.helpers import language, noise


def job(schedule: str, pp: int, vpp: int, dp: int = 1) -> Job:
    """Eight layers and eight microbatches a step, however they lie."""
    return Job(
        schedule=schedule, pp=pp, vpp=vpp, dp=dp, microbatches=8 // dp, layers=8 // (pp * vpp)
    )


FIRST = job("il", 2, 2)
#: Each is loaded from what the one before it saved; with whose scaling state replicas take.
CHAIN = [
    (job("zbv", 4, 2), "same"),
    (job("1f1b", 1, 1), "same"),
    (job("zbv", 2, 2), "same"),
    (job("il", 2, 4), "same"),
    (job("izb", 2, 2, dp=2), "modulo"),
    (job("il", 1, 2, dp=2), "same"),
    (job("1f1b", 2, 1), "modulo"),
]


def merged(words: dict[int, Any], key: str, epoch: int | None = None) -> dict[str, str]:
    """The tensors of all ranks by name; what several have they have alike."""
    found: dict[str, str] = {}
    for rank in sorted(words):
        held = words[rank][key] if epoch is None else words[rank][key][str(epoch)]
        for name, bits in held.items():
            assert found.setdefault(name, bits) == bits, name
    return found


def launched(tmp_path: Path, number: int, mapping: Job, body: Any, options: Any) -> dict[int, Any]:
    """One part in fresh processes."""
    words = tmp_path / f"words {number}"
    words.mkdir()
    given = () if options is None else (options,)
    found = launch(mapping.world, words, body, mapping, str(tmp_path / "checkpoints"), *given)
    assert found.codes == [0] * mapping.world
    return found.words


def chained(tmp_path: Path, first: Job, chain: list[tuple[Job, str]], steps: int) -> None:
    """Train under the first mapping, then a step under each of the others, every bit compared."""
    options = {"until": steps, "save_at": (steps,)}
    saved = merged(launched(tmp_path, 0, first, bodies.started, options), "saved", steps)
    there = first
    for number, (mapping, replicas) in enumerate(chain, start=1):
        given = {"replicas": replicas, "save": True}
        words = launched(tmp_path, number, mapping, bodies.remapped, given)
        loaded = merged(words, "first")
        for name, bits in loaded.items():
            kind, scope, *_ = name.split(".")
            if kind == "fp8":  # replica r takes the state of replica r modulo their number
                source = f"fp8.dp{int(scope[2:]) % there.dp}"
                name = name.replace(f"fp8.{scope}", source)
            assert bits == saved[name], name
        own = {name for name in loaded if not name.startswith("fp8.")}
        assert own == {name for name in saved if not name.startswith("fp8.")}
        for one in words.values():
            assert one["loaded otherwise"] == one["differ"] == []
            assert one["moved"] > 0
            assert one["same losses"]
            assert one["free"] == {"position": (steps + number - 1) * 8}
            assert one["changed"][0].startswith("schedule: ")
        assert any(one["losses"][str(steps + number - 1)] for one in words.values())
        saved, there = merged(words, "saved", steps + number), mapping


@pytest.mark.nightly
def test_pp_2_to_4_to_1_and_back(tmp_path: Path) -> None:
    """Interleaved, ZB-V and 1F1B, of 4, 8 and 1 stages."""
    chained(tmp_path, FIRST, CHAIN[:3], 2)


@pytest.mark.nightly
def test_other_chunks_replicas_and_splits(tmp_path: Path) -> None:
    """Four chunks a rank; two replicas of half the microbatches; another pipeline of two; one."""
    chained(tmp_path, FIRST, CHAIN[3:], 2)


@pytest.mark.parametrize("mapping", few([job("zbv", 4, 2), job("1f1b", 2, 1)], [0]))
@pytest.mark.ci
def test_steps_after_a_remap_are_those_of_torchs_own_pipeline(tmp_path: Path, mapping: Job) -> None:
    """Torch's pipeline over native full backwards, which knows nothing of slots and checkpoints."""
    launched(tmp_path, 0, FIRST, bodies.started, {"until": 2, "save_at": (2,)})
    words = tmp_path / "words 1"
    words.mkdir()
    found = launch(
        mapping.world, words, bodies.beside_torch, mapping, str(tmp_path / "checkpoints")
    )
    assert found.codes == [0] * mapping.world
    for one in found.words.values():
        assert one["differ"] == []
        assert one["of"] > 50
        assert one["same losses"]


def test_another_number_of_replicas_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """Each replica has its own scaling state: it is ambiguous which a new replica should load."""
    launched(tmp_path, 0, job("1f1b", 1, 1), bodies.started, {"until": 1, "save_at": (1,)})
    two = job("1f1b", 1, 1, dp=2)
    words = launched(tmp_path, 1, two, bodies.refused_load, {})
    for one in words.values():
        assert "has the scaling state of 1 replicas, this run has 2" in one["error"]
        assert 'replicas="modulo"' in one["error"]
        assert one["moved"] == []


@pytest.mark.parametrize("masters", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_remap_changes_what_the_next_steps_make_of_histories(
    tmp_path: Path, masters: bool
) -> None:
    """
    The order of F and dI on a process decides which scale each uses: equal state, other steps.

    It is why bits of a remapped run are compared with its own mapping's, not with the old one's.
    """
    first, other = job("il", 2, 2), job("zbv", 2, 2)
    options = {"until": 4, "save_at": (2,)}
    folder = str(tmp_path / "checkpoints")
    found = []
    for number, (mapping, body, given) in enumerate(
        [(first, bodies.started, options), (other, bodies.gone_on, {"until": 4})]
    ):
        words = tmp_path / f"words {number}"
        words.mkdir()
        said = launch(2, words, bodies.with_masters, body.__name__, mapping, folder, given, masters)
        assert said.codes == [0, 0]
        found.append(said.words)
    assert merged(found[0], "saved", 2) == merged(found[1], "first")
    theirs, ours = merged(found[0], "last"), merged(found[1], "last")
    assert theirs.keys() == ours.keys()
    assert any(name.endswith(".master") for name in ours) == masters
    differ = {name.split(".")[0] for name in ours if ours[name] != theirs[name]}
    assert "fp8" in differ


def test_a_language_model_is_cut_elsewhere(tmp_path: Path) -> None:
    """Embedding, norm, head and uneven stages: three layers as 2 and 1, as 3, and as 1, 1 and 1."""
    path = noise(tmp_path)
    saved: dict[str, str] = {}
    for number, (pp, cut) in enumerate([(2, (2, 1)), (1, (3,)), (3, (1, 1, 1))]):
        model = language(path, schedule="1f1b", pp=pp, microbatches=3, cut=cut)
        words = tmp_path / f"words {number}"
        words.mkdir()
        said = launch(pp, words, bodies.language, model, str(tmp_path / "checkpoints"))
        assert said.codes == [0] * pp
        assert {said.words[rank]["epoch"] for rank in range(pp)} == {3 if number else 2}
        found = merged(said.words, "bits")
        saved = saved or found
        assert found == saved
    names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert {"embedding.weight", "head.weight", "layers.2.qkv.weight"} <= names

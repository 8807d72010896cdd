"""
Embedding and head as one weight: two copies, one sum of their gradients, one update of each copy.

The reference is a single process with one `torch.nn.Parameter`. Autograd adds the two uses of the
parameter in turn: for each microbatch the head's gradient, then the embedding's. A pipeline cannot
do this, because its ranks would have to meet for every microbatch. The pipeline therefore sums each
use separately and then adds both sums. With one microbatch this is autograd's own sum
(`test_one_microbatch_has_the_bits_of_autograd`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.ties import Reducers, Tie, require_declared
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.refusals import Refused
from tests.profiles import by_profile
from tests.ranks.ranks import Said, launch

from . import language_bodies
from . import tied_bodies as bodies
from .helpers import language, noise

STEPS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the ranks leave their words."""
    (tmp_path / "said").mkdir()
    return tmp_path / "said"


def tied(path: Path, **options: Any) -> LanguageJob:
    """A model of which embedding and head are one."""
    return language(path, tied=True, **options)


def require_plain(said: Said, n: int) -> None:
    """Every rank has the losses, the norms and the bits of the plain model."""
    plain = said.words[0][n]["plain"]
    ranks = [words[n] for words in said.words.values()]
    found: dict[str, str] = {}
    for words in ranks:
        assert words["norms"] in (plain["norms"], [None] * len(plain["norms"]))
        for name, bits in words["bits"].items():
            assert found.setdefault(name, bits) == bits, name
    assert found == plain["bits"]
    assert "model.head.weight" not in found
    for step, loss in enumerate(plain["losses"]):
        assert sum(sum(words["losses"][step]) for words in ranks) == pytest.approx(loss, rel=1e-12)


def test_ranks_have_the_bits_of_one_shared_parameter(tmp_path: Path, folder: Path) -> None:
    """
    Interleaved, where two ranks have a copy each; ZB-V, where one has both; two replicas.

    Losses are shares, added in float64 in different orders, so their sums may differ in the last
    bit there; the shares themselves are those of the parameters, which do not.
    """
    path = noise(tmp_path)
    jobs = [
        tied(path, schedule="il", pp=2, clip_norm=0.05),
        tied(path, schedule="zbv", pp=2, weight_decay=0.3),
        tied(path, schedule="zbv", pp=1, dp=2, clip_norm=0.05),
    ][: by_profile(2, 3)]
    said = launch(2, folder, bodies.against_plain, jobs, STEPS)
    assert said.codes == [0, 0]
    for n in range(len(jobs)):
        require_plain(said, n)
    declared = [said.words[rank][0]["tied"] for rank in range(2)]
    assert declared[1]["3"] == [["head.weight"], {"head.weight": "embedding.weight"}]
    assert declared[0]["0"] == [[], {}]  # what comes out of dI is no matrix of the kernel


@pytest.mark.ci
def test_four_ranks_of_two_replicas(tmp_path: Path, folder: Path) -> None:
    """Copies on two ranks in each of two replicas: summed over replicas, then over copies."""
    jobs = [tied(noise(tmp_path), schedule="il", pp=2, dp=2, clip_norm=0.05)]
    said = launch(4, folder, bodies.against_plain, jobs, STEPS)
    assert said.codes == [0] * 4
    require_plain(said, 0)


def test_torchs_pipeline_has_the_same_bits(tmp_path: Path, folder: Path) -> None:
    """`--compare`: gradients, scales and caches too, clipped, in other destinations, masters."""
    path = noise(tmp_path)
    jobs = [
        tied(path, schedule="izb", pp=2, clip_norm=0.05),
        tied(path, schedule="zbv", pp=2, rule="per_microbatch"),
        tied(path, schedule="il", pp=2, rule="copied", master=True),
    ][: by_profile(1, 3)]
    said = launch(2, folder, bodies.against_torch, jobs, STEPS)
    assert said.codes == [0, 0]
    for words in said.words.values():
        for one in words:
            assert one["same"], one["totals"]
            assert one["totals"]["parameters"][0] > 0


def test_the_librarys_stages_too(tmp_path: Path, folder: Path) -> None:
    """Over a stand-in for Transformer Engine: a `LayerNormLinear`'s matrix and the token table."""
    jobs = [
        tied(noise(tmp_path), schedule="il", pp=2),
        tied(noise(tmp_path), schedule="zbv", pp=2, clip_norm=0.05),
    ][: by_profile(1, 2)]
    said = launch(2, folder, language_bodies.library, jobs, 2)
    assert said.codes == [0, 0]
    for words in said.words.values():
        for one in words:
            assert one["same"], one["totals"]


def test_without_the_sum_the_copies_drift_apart(tmp_path: Path, folder: Path) -> None:
    """A sum that does nothing gives other bits; one that nobody begins ends the step by clause."""
    job = tied(noise(tmp_path), schedule="il", pp=2)
    said = launch(2, folder, bodies.without_the_sum, job)
    assert said.codes == [0, 0]
    first, second = (said.words[rank] for rank in range(2))
    name = "model.embedding.weight"
    assert first["bits"][name] != second["bits"][name]
    assert first["clause"] == second["clause"] == "reduction.missing"


def test_without_the_sum_on_one_rank_nothing_is_saved(tmp_path: Path, folder: Path) -> None:
    """Both copies on one rank: they are compared before they are written once."""
    job = tied(noise(tmp_path), schedule="zbv", pp=2)
    said = launch(2, folder, bodies.without_the_sum, job)
    assert said.codes == [0, 0]
    assert "expected equal copies of model.embedding.weight" in said.words[0]["drifted"]
    assert said.words[0]["clause"] == said.words[1]["clause"] == "reduction.missing"


def test_what_is_begun_behind_the_sum_over_copies_waits_for_it() -> None:
    """Each sum ends before the next group's begins: replicas, copies, then the scaling state."""
    told: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, bucket: int | str, gradients: Any) -> Noted:
            told.append(f"{self.name} {bucket}")
            return self

        def largest(self, words: Any) -> Noted:
            return self("amax", words)

        def wait(self) -> None:
            told.append(f"{self.name} ends")

    reducers = Reducers(Noted("replicas"), {"table": Noted("copies")})  # type: ignore[arg-type, dict-item]
    assert reducers("table", {"embedding.weight": torch.ones(2)}) is None
    reducers.largest(torch.ones(2, dtype=torch.int32)).wait()
    assert told == [
        "replicas table", "replicas ends", "copies table", "copies ends",
        "replicas amax", "replicas ends",
    ]  # fmt: skip


def test_ranks_that_do_not_declare_the_same_are_refused(tmp_path: Path, folder: Path) -> None:
    """By clause on every rank before the first step; copies that begin differently in words."""
    path = noise(tmp_path)
    given = attrs.asdict(tied(path, schedule="il", pp=2), recurse=False)
    whole = Tie("embedding.weight", ((0, "embedding.weight"), (3, "head.weight")))
    other = Tie("table", ((0, "embedding.weight"), (3, "head.weight")))
    half = Tie("embedding.weight", ((0, "embedding.weight"), (2, "layers.0.fc1.weight")))
    said_of = [bodies.Said(**given, said=ties) for ties in ((), (whole,), (other,), (half,))]
    apart = bodies.Apart(**given)
    # Destinations are bfloat16, and so the head's gradient; the embedding's is what it is itself.
    wide = attrs.evolve(said_of[1], config=attrs.evolve(said_of[1].config, dtype=torch.float32))
    cases = [
        [said_of[1], said_of[0]],
        [said_of[0], said_of[1]],
        [said_of[1], said_of[2]],
        [said_of[1], said_of[3]],
        [apart, apart],
        [wide, wide],
    ]
    said = launch(2, folder, bodies.undeclared, cases)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    clauses, words = zip(*said.words[0], strict=True)
    assert clauses == ("arena.overlapping-destinations",) * 4 + ("",) * 2
    assert "'head.weight' of stage 3, not declared tied, in 'embedding.weight'" in words[0]
    assert "differ at the start; initialize both from one seed" in words[4]
    assert "are torch.float32 on rank 0 and torch.bfloat16 on rank 1" in words[5]


def test_a_tie_without_its_second_copy_is_refused() -> None:
    """A stage that is not there, and a rank in the middle that declares something else."""
    tie = Tie("table", ((0, "embedding.weight"), (3, "head.weight")))
    with pytest.raises(BackendError, match="tied in stage 3, but the pipeline has no such stage"):
        require_declared([[tie]], {0: 0}, [0])
    with pytest.raises(BackendError, match="expected two different copies"):
        Tie("table", ((0, "embedding.weight"),))
    homes = {0: 0, 1: 1, 2: 2, 3: 3}
    with pytest.raises(Refused, match=r"arena\.overlapping-destinations"):
        require_declared([[tie], [tie], [tie], []], homes, [0, 1, 2, 3])
    with pytest.raises(BackendError, match=r"on rank 0 and \[\] on rank 1"):
        require_declared([[tie], [], [tie], [tie]], homes, [0, 1, 2, 3])
    require_declared([[tie]] * 4, homes, [0, 1, 2, 3])


@pytest.mark.ci
def test_it_is_saved_once_and_loaded_under_other_mappings(tmp_path: Path, folder: Path) -> None:
    """From two ranks with a copy each to one rank with both, and back; not into two weights."""
    path = noise(tmp_path)
    jobs = [
        tied(path, schedule="il", pp=2, master=True),
        tied(path, schedule="il", pp=2, master=True),
        tied(path, schedule="zbv", pp=2, master=True),
        tied(path, schedule="1f1b", pp=2, cut=(3, 1), master=True),
        language(path, schedule="il", pp=2, master=True),
    ]
    said = launch(2, folder, bodies.kept, jobs, str(tmp_path / "kept"))
    assert said.codes == [0, 0]
    ranks = [said.words[rank] for rank in range(2)]
    whole: list[dict[str, str]] = []
    for n in range(4):
        assert [rank[n]["error"] for rank in ranks] == ["", ""]
        whole.append({**ranks[0][n]["held"], **ranks[1][n]["held"]})
        assert whole[n] == whole[0]
        assert ranks[0][n]["bits"]["model.embedding.weight"]
    assert "model.embedding.weight" in ranks[0][0]["held"].keys() & ranks[1][0]["held"].keys()
    assert "optim.embedding.weight.master" in whole[0]
    assert not [name for name in whole[0] if name.endswith("head.weight")]
    assert ranks[1][0]["bits"] == ranks[1][1]["bits"]  # the step after is that of one that stayed
    assert all("was saved with tied True, this run has False" in rank[4]["error"] for rank in ranks)


def test_an_untied_checkpoint_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    """Also where nobody says whether it is tied: there is a weight too many."""
    path = noise(tmp_path)
    jobs = [language(path, schedule="il", pp=2), tied(path, schedule="zbv", pp=2)]
    said = launch(2, folder, bodies.kept, jobs, str(tmp_path / "kept"))
    assert said.codes == [0, 0]
    for rank in range(2):
        assert "was saved with tied False, this run has True" in said.words[rank][1]["error"]


def test_a_sum_that_fails_is_begun_again(tmp_path: Path, folder: Path) -> None:
    """All ranks stop for one cause, rebuild, and have the bits of a run that did not."""
    said = launch(2, folder, bodies.stumbling, tied(noise(tmp_path), schedule="il", pp=2))
    assert said.codes == [0, 0]
    for rank in range(2):
        assert said.words[rank] == {"stops": [0, 1], "same": True}


def test_one_microbatch_has_the_bits_of_autograd(tmp_path: Path) -> None:
    """With one microbatch `.grad` of the shared parameter, as autograd leaves it, is the sum."""
    job = tied(noise(tmp_path), schedule="gpipe", pp=1, microbatches=1)
    plain = bodies.Plain(job)
    found, _ = plain._gradients(plain.replicas[0], 0, 0)
    by_hand = found["rows"] + found["product"]

    (stage,) = bodies.Plain(job).replicas[0].values()
    tokens, target = job.batch(bodies.CPU)(0, 0)
    stage.native_bind(None)
    (loss,) = stage.native_forward((tokens, target), first=True)
    loss.backward()
    assert stage.embedding is not None
    grad = stage.embedding.weight.grad
    assert grad is not None
    assert torch.equal(grad.view(torch.int16), by_hand.view(torch.int16))

"""The peers: whose gradients are right, how a mode's processes are ended, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect.cli import main
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import parameters
from qeffect.gpu_runtime.backends.te import domain as te
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.comparisons.gradients import distance_sums
from qeffect.gpu_runtime.lab.reports.text import peer_lines
from qeffect.gpu_runtime.lab.runner.ranks import RankExits, last_words, run_ranks
from qeffect.gpu_runtime.lab.sides import megatron
from qeffect.gpu_runtime.lab.statistics.peers import FAR, combine_distances, has_owed_bits, verdict
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.report import UnusableError

from . import report_samples as samples
from .test_te import install

CPU = torch.device("cpu")


class TestGradients:
    """How far two sets of gradients are apart."""

    def test_the_distance_is_that_of_all_tensors_of_all_ranks(self) -> None:
        """(3, 4) and (3, 0): 4 of 5, and beside a tensor that is the same."""
        theirs = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
        own = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([4.0])}
        found = combine_distances([distance_sums(own, theirs), {}])
        assert (found["compared"], found["different"], found["not_finite"]) == (2, 1, 0)
        assert found["relative"] == pytest.approx(4 / 5)
        assert found["cosine"] == pytest.approx((9 + 16) / (5 * 41**0.5), abs=1e-6)
        assert found["worst"] == ["rank 0: a", pytest.approx(4 / 3, abs=1e-6)]

    def test_bits_are_compared_raw(self) -> None:
        """Zeros of two signs have distance 0, and are two values."""
        found = combine_distances(
            [distance_sums({"a": torch.tensor([-0.0, 1.0])}, {"a": torch.tensor([0.0, 1.0])})]
        )
        assert (found["different"], found["relative"]) == (1, 0.0)

    def test_a_number_that_is_not_finite_has_no_distance(self) -> None:
        """However many others are right."""
        own = {"a": torch.tensor([float("nan"), 1.0]), "b": torch.tensor([float("inf")])}
        found = combine_distances([distance_sums(own, {"a": torch.ones(2), "b": torch.ones(1)})])
        assert (found["not_finite"], found["relative"], found["worst"]) == (2, None, None)

    def test_names_and_shapes_have_to_agree(self) -> None:
        """A missing gradient does not count as a small distance."""
        with pytest.raises(ValueError, match="found 1 on one side only, such as b"):
            distance_sums({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
        with pytest.raises(
            ValueError, match=r"a: expected the same shape on both sides, found \(1,\) and \(2,\)"
        ):
            distance_sums({"a": torch.ones(1)}, {"a": torch.ones(2)})

    @pytest.mark.parametrize("microbatches", [4, 8])
    def test_a_microbatch_left_out_is_farther_than_the_bound(self, microbatches: int) -> None:
        """Of independent gradients: what is missing is a share of the norm."""
        g = torch.Generator().manual_seed(0)
        parts = torch.randn(microbatches, 4096, generator=g)
        found = combine_distances([distance_sums({"a": parts[1:].sum(0)}, {"a": parts.sum(0)})])
        assert found["relative"] == pytest.approx(microbatches**-0.5, rel=0.1)
        assert found["relative"] > FAR

    def test_how_far_megatron_is_from_native(self) -> None:
        """Every gradient differs, by about a sixth of the norm, which the bound leaves room for."""
        folder = Path(reports.__file__).parent
        report = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
        far = [
            row["from_native"]
            for row in report["derived"]["rows"]
            if row["side"].startswith("megatron") and row["error"] is None
        ]
        assert len(far) > 1
        assert FAR > max(far)
        assert min(far) > 0.1
        assert statistics.median(far) == pytest.approx(1 / 6, rel=0.15)

    @pytest.mark.parametrize(
        ("side", "compared", "said"),
        [
            ("native", [], "not compared"),
            ("replays", [samples.against("native", 0, 0.0)], "same bits"),
            ("replays", [samples.against("native", 1, 0.0)], "close"),
            ("megatron local", [samples.against("megatron none", 0, 0.0)], "same bits"),
            ("megatron local", [samples.against("megatron none", 3, 0.01)], "close"),
            ("megatron local", [samples.against("native", 0, 0.0)], "close"),
            ("megatron local", [samples.against("megatron none", 30, 0.3)], "wrong"),
            ("megatron local", [samples.against("megatron none", 1, None, 7)], "wrong"),
            ("megatron none", [samples.against("native", 30, 0.05)], "close"),
            ("megatron none", [samples.against("native", 30, 1.0)], "wrong"),
        ],
    )
    def test_verdicts(self, side: str, compared: list[dict[str, Any]], said: str) -> None:
        """A mode has its own framework's bits, or is close to it, or is wrong, however fast."""
        assert verdict(samples.peer_row(side, 10.0, *compared)) == said


def test_ours_owes_bits_and_another_schedule_closeness() -> None:
    """One bit of replays or of one launch is a failure; ZB-V's scales are its own."""
    rows = samples.peers_report()["derived"]["rows"]
    own = [row for row in rows if not row["side"].startswith("megatron")]
    same, close = "same bits", "close"
    assert [row["verdict"] for row in own] == [same, same, close, same, close, close]
    assert all(map(has_owed_bits, own))
    for row in own:
        held = row["schedule"] == "zbv" or row["main_grad"] == "fp32"
        assert has_owed_bits({**row, "verdict": "close"}) == held
        assert not has_owed_bits({**row, "verdict": "wrong"})
        assert not has_owed_bits({**row, "verdict": "failed"})


class TestDerived:
    """What follows from a run."""

    def test_a_wrong_mode_is_not_the_best(self) -> None:
        """Megatron's local graphs take half the time and have other gradients."""
        derived = samples.peers_report()["derived"]
        bf16 = [row for row in derived["rows"] if row["main_grad"] == "bf16"]
        rows = {(row["side"], row["schedule"]): row for row in bf16}
        own = rows["one launch", "il"]
        assert rows["megatron local", "il"]["verdict"] == "wrong"
        assert own["best_graphs"] == "megatron transformer_engine"
        assert (own["best_graphs_over_this"], own["native_over_this"]) == (4.0, 10.0)
        assert own["over_busiest"] == pytest.approx(10 / 6, abs=1e-4)
        assert rows["megatron full_iteration", "il"]["error"] == "RuntimeError: no capture"

    def test_goals_are_of_the_best_of_ours(self) -> None:
        """The large cell's four; the small cell was not measured."""
        targets = samples.peers_report()["derived"]["targets"]
        assert [(t["measured"], t["met"]) for t in targets] == [
            (4.0, True),
            (2.0, True),
            (10.0, True),
            (pytest.approx(10 / 6, abs=1e-4), False),
        ]

    def test_the_capability_table_says_what_was_observed(self) -> None:
        """What ran with its verdict, what failed with its error, a refusal with its words."""
        derived = samples.peers_report()["derived"]
        found = {row["path"]: row["observed"] for row in derived["capability"]}
        assert found["Megatron local graphs"] == "h4096-s256-m8, il, bf16: wrong, 5.00x native"
        assert "failed, RuntimeError: no capture" in found["Megatron full iteration"]
        assert found["Megatron delayed dW"] == "refused before training: no"
        assert "zbv, bf16: close" in found["ours, replays"]
        text = "\n".join(peer_lines(derived))
        assert "goals: 3 of 4 met" in text


class TestNames:
    """Ours and Megatron's names of one parameter."""

    def test_every_parameter_of_a_stage_has_one_name_there(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All four stages of a model, and no name twice within a chunk."""
        install(monkeypatch)
        shape = LayerConfig(32, 64, 2, 16)
        job = LanguageJob(pp=2, vpp=2, config=shape, vocabulary=64, head="bf16")
        counts = []
        for index in range(4):
            stages = job.stages([index], CPU, "transformer-engine", loss=False)
            named = [job.name_of(index, name) for name in parameters(stages[0])]
            found = {megatron.megatron_name(name, index) for name in named}
            assert len(found) == len(named)
            assert sum(name.startswith("decoder.layers.0.") for name in found) == 12
            counts.append(len(named))
        assert counts == [14, 12, 12, 15]
        te.library.cache_clear()

    def test_a_decoder_of_the_common_kind_has_its_names_and_options_there(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without biases and positions of its own, and with several layers in a stage."""
        install(monkeypatch)
        row = megatron.MegatronModelRow(
            "tiny-s16-m4", "megatron full_iteration", "il", cut=(1, 2, 2, 1)
        )
        job = row.job()
        (stage,) = job.stages([2], CPU, "transformer-engine", loss=False)
        named = [job.name_of(2, name) for name in parameters(stage)]
        layers = [
            *("self_attention.linear_proj.weight", "self_attention.linear_qkv.layer_norm_weight"),
            *("self_attention.linear_qkv.weight", "mlp.linear_fc1.layer_norm_weight"),
            *("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
        ]
        assert sorted(megatron.megatron_name(name, 3) for name in named) == sorted(
            f"decoder.layers.{n}.{name}" for n in (0, 1) for name in layers
        )
        assert row.mode == "full_iteration"
        asked = megatron.options(job)
        assert (asked["normalization"], asked["num_query_groups"]) == ("RMSNorm", 1)
        assert (asked["gated_linear_unit"], asked["add_bias_linear"]) == (True, False)
        assert asked["fp8_amax_history_len"] == 16
        te.library.cache_clear()

    def test_layers_are_counted_from_the_chunks_first(self) -> None:
        """Both matrices of the MLP are modules of their own there."""
        assert megatron.megatron_name("layers.5.layernorm_mlp.fc2_bias", 4) == (
            "decoder.layers.1.mlp.linear_fc2.bias"
        )
        assert megatron.megatron_name("head.norm.weight", 3) == "decoder.final_layernorm.weight"
        with pytest.raises(KeyError):
            megatron.megatron_name("layers.0.layernorm_mlp.fc3_bias", 0)


class TestProcesses:
    """A mode's processes, and how they end."""

    @staticmethod
    def run(folder: Path, code: str, limit: float = 30.0) -> RankExits:
        """Two ranks of a program."""
        return run_ranks([sys.executable, "-c", code], 2, limit, folder, "words")

    def test_ranks_know_each_other(self, tmp_path: Path) -> None:
        """torchrun's variables, and nothing wrong."""
        code = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
        ended = self.run(tmp_path, code)
        assert (ended.codes, ended.error) == ([0, 0], None)
        assert [(tmp_path / f"words.{n}.txt").read_text().split() for n in (0, 1)] == [
            ["0", "2"],
            ["1", "2"],
        ]

    def test_one_that_hangs_is_ended_at_the_limit(self, tmp_path: Path) -> None:
        """With what it had said."""
        code = "import time; print('here', flush=True); time.sleep(600)"
        began = time.monotonic()
        ended = self.run(tmp_path, code, limit=1.0)
        assert time.monotonic() - began < 60
        assert ended.codes == [None, None]
        assert ended.error is not None
        assert ended.error.startswith("did not end within")
        assert ended.words == ["here"]

    @pytest.mark.ci
    def test_one_that_fails_ends_the_others_and_says_its_error(self, tmp_path: Path) -> None:
        """The error of the rank that failed, not of a rank that waited for it."""
        code = (
            "import os, time\n"
            "if os.environ['RANK'] == '0': time.sleep(600)\n"
            "raise ValueError('not /usr/lib/this today')"
        )
        ended = self.run(tmp_path, code)
        assert ended.codes[1] == 1
        assert ended.codes[0] not in (0, None)
        assert ended.error == "ValueError: not this today"

    def test_an_error_that_comes_again_is_still_the_last(self) -> None:
        """Another one between does not take its place; what went wrong first is named beside it."""
        words = last_words("OSError: full\nin between\nValueError: c\nOSError: full", lines=2)
        assert words == ["OSError: full", "ValueError: c", "OSError: full"]
        assert RankExits([1, 0], words, 1.0).error == "OSError: full"
        assert RankExits([1, 0], words[:2], 1.0).error == "ValueError: c (first: OSError: full)"

    def test_last_words_name_no_folder_of_the_machine(self) -> None:
        """A traceback's files keep their names."""
        said = last_words('a\n\n  File "/usr/lib/x.py", line 3\nx = a / b\n', lines=2)
        assert said == ['File "x.py", line 3', "x = a / b"]


class TestRefusals:
    """What cannot run is one line."""

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["--modes", "local"], "Megatron-core, which is not installed: pip install"),
            (["--modes", "none", "--device", "cpu"], "needs --device cuda"),
            (
                ["--cells", "h64-m4"],
                "LAYERS one of h2048-s256, h4096-s256, h4096-s1024, h4096-s4096, tiny",
            ),
            (["--cells", "tiny-m0"], "found 'tiny-m0'"),
            (["--limit", "0"], "--limit must be positive"),
            (["--modes", "ours"], "expected a GPU"),
            (["--modes", "ours", "--out", "nowhere/f.json"], "there is no folder nowhere"),
        ],
    )
    def test_before_anything_is_started(
        self,
        argv: list[str],
        words: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Exit code 2, and nothing measured."""
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "megatron" else find(name)
        )
        assert main(["runtime", "report", "peers", *argv]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert words in line

    def test_an_absent_library_is_named_with_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As its import says it."""
        monkeypatch.setitem(sys.modules, "megatron", None)
        with pytest.raises(UnusableError, match=r"pip install --no-deps megatron-core==0\.19\.2"):
            megatron.library()

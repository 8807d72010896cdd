"""
Recomputed activations over Transformer Engine: dI runs the layers again, eager and in its graph.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.lab.comparisons.cases import Case, Scaling
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import compare
from qeffect.gpu_runtime.lab.comparisons.sides import fresh_stages, fuse_for, optimizer_of
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Mode, Runtime, RuntimeConfig

from ..runtime.injection import FINAL, NUM_STEPS
from .helpers import SMALL, TE, final_of, native_final
from .test_language import COMMON, ran

TWO_LAYERS = attrs.evolve(SMALL, num_layers=2)


def recomputing_run(case: Case, mode: Mode, *, recompute: bool = True) -> GuardedRun:
    """A fresh guarded run of a case in which every stage recomputes, or none does."""
    stages = fresh_stages(case, TE, fuse=fuse_for(case.rule))
    for stage in stages:
        assert isinstance(stage, TransformerEngineStage)
        stage.recompute = recompute
    config = RuntimeConfig(rule=case.rule, dtype=case.torch_dtype, mode=mode, readers=True)
    runtime = Runtime(stages, case.order(), config)
    return GuardedRun(runtime, Workload(), optimizer_of(case, stages))


@pytest.mark.parametrize("mode", ["eager", "replays"])
def test_recomputed_training_has_native_bits(mode: Mode) -> None:
    """Of native full backward that keeps its activations; scales and histories included."""
    run = recomputing_run(TWO_LAYERS, mode)
    run.run(NUM_STEPS)

    found = final_of(list(run.runtime.stages.values()), run.optimizer)
    result = compare(native_final(TWO_LAYERS), found, categories=FINAL)
    assert result.compared > 0
    assert result.mismatched == 0, str(result)


@pytest.mark.parametrize("scaling", ["current", "block"])
def test_recipes_without_state_recompute_too(scaling: Scaling) -> None:
    """In graphs; bits of the same runtime that keeps activations."""
    case = attrs.evolve(TWO_LAYERS, scaling=scaling, rule="copied")
    found = []
    for recompute in (False, True):
        run = recomputing_run(case, "replays", recompute=recompute)
        run.run(NUM_STEPS)
        found.append(final_of(list(run.runtime.stages.values()), run.optimizer))
        run.runtime.close()
    result = compare(*found, categories=("parameters", "AdamW state"))
    assert result.compared > 0
    assert result.mismatched == 0, str(result)


def test_without_the_copied_scales_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recomputation that quantizes with the scales of the moment, and records amaxes again."""

    def plain(self: TransformerEngineDomain, _: torch.nn.Module) -> tuple[Any, Any]:
        return nullcontext(), self._recompute([], [])

    monkeypatch.setattr(TransformerEngineDomain, "around_recomputation", plain)
    run = recomputing_run(TWO_LAYERS, "replays")
    run.run(NUM_STEPS)

    found = final_of(list(run.runtime.stages.values()), run.optimizer)
    assert compare(native_final(TWO_LAYERS), found, categories=FINAL).mismatched > 0


def test_one_digest_with_and_without(tmp_path: Path) -> None:
    """Of training with epoch scales through the command, in each mode, with a head in bf16."""
    found = {}
    for n, (mode, recompute) in enumerate(
        [("replays", '"none"'), ("eager", '"all"'), ("replays", "[1]"), ("one launch", '"all"')]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        parallel = f'schedule = "zbv"\nmode = "{mode}"\nmicrobatches = 8\nrecompute = {recompute}'
        model = f'scales = "epoch"\nhead = "bf16"\n{COMMON}'
        said = ran(folder, model, parallel, "--digest", ranks=1)
        assert said["verdict"] == "accepted"
        found[mode, recompute] = said["digest"]
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_every_value_is_natives(schedule: str, tmp_path: Path) -> None:
    """Through the command, whose native side keeps all activations; scales move at every action."""
    parallel = f'schedule = "{schedule}"\nmicrobatches = 8\nrecompute = "all"'
    said = ran(tmp_path, "", parallel, "--compare", "all", ranks=1)
    assert said["verdict"] == "accepted"
    assert said["differ"] == 0
    assert said["compared"] > 1000

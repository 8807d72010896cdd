"""
`deepspeed.guard(engine)` over DeepSpeed's own engine: `make deepspeed`. On CPUs, over gloo.

The ranks of a launch run many cases one after another, each with an engine of its own. The manner
``report`` never ends a rank, so that faults can follow each other; ``refuse`` has launches of its
own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from qeffect.log.joint import replay_together
from tests.deepspeed.faults import FAULTS, FAULTY_STEP, STEPS
from tests.deepspeed.ranks import launch, run
from tests.docs.code import blocks

pytestmark = pytest.mark.deepspeed

BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
WARMUP = {
    "gradient_clipping": 0.5,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}
#: Legal runs of two ranks, by name.
LEGAL: dict[str, dict[str, Any]] = {
    "1F1B": {"steps": 40},
    "three microbatches": {"microbatches": 3},
    "seven microbatches": {"microbatches": 7},
    "tuples": {"model": "tuples"},
    "tied": {"model": "tied"},
    "recomputation": {"recompute": True},
    "evaluation between": {"evaluate": True},
    "checkpoints between": {"save": True},
    "another batch size": {"resize": True},
    "clipping and warm-up": {"config": WARMUP},
    "a scheduler made before the guard": {"scheduler": "before"},
    "a scheduler made after the guard": {"scheduler": "after"},
    "compiled layers": {"compiled": True},
    "ZeRO 1": {"config": {"zero_optimization": {"stage": 1}}},
    "bf16, ZeRO 1": {"config": BF16},
    "replicas": {"stages": 1},
    "replicas, ZeRO 1": {"stages": 1, "config": {"zero_optimization": {"stage": 1}}},
    "DualPipeV": {"model": "folded"},
}
#: Legal runs of four ranks.
WIDE: dict[str, dict[str, Any]] = {
    "four stages": {"stages": 4, "microbatches": 8},
    "two replicas of two stages": {"stages": 2},
    "two replicas, bf16, ZeRO 1": {"stages": 2, "config": BF16},
}


def case(folder: Path, **given: Any) -> dict[str, Any]:
    return {"model": "pipeline", "folder": str(folder / "saved"), **given}


@cache
def legal(wide: bool) -> tuple[Path, dict[tuple[str, bool], list[dict[str, Any]]]]:
    """What the ranks say of each legal run, without a guard and with one that refuses."""
    folder, cases, keys = Path(mkdtemp()), [], []
    for name, given in (WIDE if wide else LEGAL).items():
        keys += [(name, False), (name, True)]
        cases.append(case(folder, **given))
        cases.append(case(folder, manner="refuse", log=str(folder / name), **given))
    said = launch(4 if wide else 2, folder, cases)
    return folder, {key: [rank[n] for rank in said] for n, key in enumerate(keys)}


@pytest.mark.parametrize(("name", "wide"), [(n, False) for n in LEGAL] + [(n, True) for n in WIDE])
def test_a_legal_run_keeps_its_bits(name: str, wide: bool) -> None:
    """Losses and parameters of every step are those without a guard, and the logs replay."""
    folder, said = legal(wide)
    plain, guarded = said[name, False], said[name, True]
    steps = (WIDE if wide else LEGAL)[name].get("steps", STEPS)

    for one, two in zip(plain, guarded, strict=True):
        assert "refused" not in two, two
        assert one["bits"] == two["bits"]
        assert steps == len(one["bits"]) == len(set(map(str, one["bits"])))  # it does train
        assert (steps, 0, []) == (two["epoch"], two["live"], two["violations"])
        assert one["left"] == two["left"]  # the engine's attributes after `remove`
    logs: dict[Path, list[Path]] = {}
    for path in sorted((folder / name).rglob("*.jsonl")):
        if "contract" not in path.name:
            logs.setdefault(path.parent, []).append(path)
    assert sum(map(len, logs.values())) == len(plain)
    for paths in logs.values():
        assert "accepted" == replay_together(paths).verdict


def test_the_engines_are_deepspeeds() -> None:
    """The runs above had the classes that they are named after."""
    said = legal(False)[1]

    assert "PipelineEngine" == said["1F1B", True][0]["class"]
    assert "DualPipeVEngine" == said["DualPipeV", True][0]["class"]
    assert "DeepSpeedZeroOptimizer" == said["replicas, ZeRO 1", True][0]["optimizer"]
    assert [0, 1] == [rank["stage"] for rank in said["1F1B", True]]
    assert "ReduceTiedGrads reduces the gradients of tied weights" in said["tied", True][0]["trust"]


@cache
def faulty(model: str) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """What both ranks say of a run without fault, and of each fault, unguarded and reported."""
    folder = Path(mkdtemp())
    stages = 1 if model == "replicas" else 2
    cases, keys = [case(folder, model=model, stages=stages)], [("", False)]
    for name, fault in FAULTS.items():
        if fault.model == model:
            for manner in (None, "report"):
                keys.append((name, manner is not None))
                cases.append(case(folder, model=model, stages=stages, fault=name, manner=manner))
    said = launch(2, folder, cases)
    return {key: [rank[n] for rank in said] for n, key in enumerate(keys)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_passes_in_silence(name: str) -> None:
    """DeepSpeed ends every step; the run trains on, with other numbers unless it is harmless."""
    fault = FAULTS[name]
    said = faulty(fault.model)
    right, wrong = said["", False], said[name, False]

    assert [STEPS, STEPS] == [len(rank["bits"]) for rank in wrong]
    same = [one["bits"] == two["bits"] for one, two in zip(right, wrong, strict=True)]
    assert fault.harmless is all(same)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_where_it_happens(name: str) -> None:
    """The clause, on the rank of the fault and in its step alone; the run keeps its bits."""
    fault = FAULTS[name]
    said = faulty(fault.model)

    for rank, (plain, found) in enumerate(zip(said[name, False], said[name, True], strict=True)):
        assert plain["bits"] == found["bits"]
        if rank not in fault.ranks:
            assert [] == found["violations"]
            continue
        clause, stage, step, action, _ = found["violations"][0]
        assert (fault.clause, found["stage"], FAULTY_STEP) == (clause, stage, step)
        assert action.startswith(fault.at)


@pytest.mark.parametrize(
    "name",
    ["doubled_forward", "left_out_inside", "update_by_hand", "reduction_early", "weight_written"],
)
def test_a_fault_is_refused_where_it_happens(name: str, tmp_path: Path) -> None:
    """In manner refuse the rank of the fault ends; its peer ends with it or waits in vain."""
    fault = FAULTS[name]
    stages = 1 if fault.model == "replicas" else 2
    given = {"model": fault.model, "stages": stages, "fault": name, "manner": "refuse"}
    said = launch(2, tmp_path, [case(tmp_path, **given)], whole=False)

    for rank in fault.ranks:
        (found,) = said[rank]
        assert fault.clause == found["refused"]
        assert found["notes"][0].startswith(f"at pipeline rank {found['stage']}: {fault.at}")
        assert FAULTY_STEP == len(found["bits"])
    for rank in {0, 1} - set(fault.ranks):
        assert not said[rank] or "refused" not in said[rank][0]


def test_the_pages_example_runs(tmp_path: Path) -> None:
    """The example trains for two steps on both ranks, and nothing is reported."""
    example = tmp_path / "train.py"
    example.write_text(blocks("docs/deepspeed.md", "python")[0].text)
    codes = run(tmp_path, [[str(example)]] * 2)

    assert [0, 0] == codes
    for rank in range(2):
        assert "()" in (tmp_path / f"rank{rank}.txt").read_text().splitlines()

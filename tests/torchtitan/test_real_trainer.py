"""
`torchtitan.guarded(spec)` over TorchTitan's own trainer: `make torchtitan`. On CPUs, over gloo.

The ranks of a launch run many cases one after another, each with a trainer of its own. The manner
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
from tests.docs.code import blocks
from tests.torchtitan.faults import FAULTS, FAULTY_STEP, STEPS
from tests.torchtitan.ranks import launch, run

pytestmark = pytest.mark.torchtitan

#: Legal runs of two ranks, by name.
LEGAL: dict[str, dict[str, Any]] = {
    "Interleaved 1F1B": {"schedule": "Interleaved1F1B", "steps": 20, "microbatches": 4},
    "ZB-V": {"schedule": "ZBVZeroBubble"},
    "DualPipeV": {"schedule": "DualPipeV"},
    "Interleaved Zero Bubble": {"schedule": "InterleavedZeroBubble", "microbatches": 4},
    "1F1B": {"schedule": "1F1B", "microbatches": 4},
    "GPipe": {"schedule": "GPipe", "microbatches": 4},
    "two walks": {"schedule": "Interleaved1F1B", "microbatches": 4, "walks": 2},
    "three walks of ZB-V": {"schedule": "ZBVZeroBubble", "microbatches": 4, "walks": 3},
    "three microbatches": {"schedule": "Interleaved1F1B", "microbatches": 3},
    "selective recomputation": {
        "schedule": "Interleaved1F1B",
        "microbatches": 4,
        "recompute": True,
    },
    "evaluation between": {"schedule": "1F1B", "microbatches": 4, "validate": True},
    "checkpoints between": {"schedule": "ZBVZeroBubble", "microbatches": 4, "save": True},
}
#: Legal runs of four ranks: FSDP and a pipeline.
SHARDED: dict[str, dict[str, Any]] = {
    "FSDP": {"schedule": "Interleaved1F1B", "microbatches": 4, "shards": 2},
    "FSDP, two walks": {
        "schedule": "ZBVZeroBubble",
        "microbatches": 4,
        "shards": 2,
        "walks": 2,
    },
}


@cache
def legal(sharded: bool) -> tuple[Path, dict[tuple[str, bool], list[dict[str, Any]]]]:
    """What the ranks say of each legal run, without a guard and with one that refuses."""
    folder, cases, keys = Path(mkdtemp()), [], []
    for name, given in (SHARDED if sharded else LEGAL).items():
        keys += [(name, False), (name, True)]
        cases.append(given)
        cases.append({**given, "manner": "refuse", "log": str(folder / name)})
    if not sharded:
        said = launch(2, folder, cases)
        return folder, {key: [rank[n] for rank in said] for n, key in enumerate(keys)}
    found = {}
    for number, (key, own) in enumerate(zip(keys, cases, strict=True)):
        place = folder / str(number)  # torch keeps meshes: a process has one sharded run
        place.mkdir()
        found[key] = [rank[0] for rank in launch(4, place, [own])]
    return folder, found


@pytest.mark.parametrize(
    ("name", "sharded"), [(n, False) for n in LEGAL] + [(n, True) for n in SHARDED]
)
def test_a_legal_run_keeps_its_bits(name: str, sharded: bool) -> None:
    """Losses and parameters of every step are those without a guard, and the logs replay."""
    folder, said = legal(sharded)
    plain, guarded = said[name, False], said[name, True]
    steps = (SHARDED if sharded else LEGAL)[name].get("steps", STEPS)

    for one, two in zip(plain, guarded, strict=True):
        assert "refused" not in two, two
        assert one["bits"] == two["bits"]
        assert steps == len(one["bits"]) == len(set(map(str, one["bits"])))  # it does train
        assert (steps, 0, []) == (two["epoch"], two["live"], two["violations"])
    logs: dict[Path, list[Path]] = {}
    for path in sorted((folder / name).rglob("*.jsonl")):
        logs.setdefault(path.parent, []).append(path)
    assert sum(map(len, logs.values())) == len(plain)
    for paths in logs.values():
        assert "accepted" == replay_together(paths).verdict


def test_the_schedules_are_torchs() -> None:
    """The runs above had the classes that they are named after."""
    said = legal(False)[1]

    assert "ScheduleDualPipeV" == said["DualPipeV", True][0]["schedule"]
    assert "Schedule1F1B" == said["1F1B", True][0]["schedule"]


def test_the_weights_of_sharded_stages_are_watched() -> None:
    """The optimizer's shards are, so that nothing of them is taken on trust."""
    for rank in legal(True)[1]["FSDP", True]:
        assert not any("is sharded" in claim for claim in rank["trust"])


def case(name: str, **given: Any) -> dict[str, Any]:
    fault = FAULTS[name]
    return {"schedule": fault.schedule, "walks": fault.walks, "microbatches": 4, **given}


@cache
def faulty() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What both ranks say of runs without fault, and of each fault, unguarded and reported."""
    folder, cases, keys = Path(mkdtemp()), [], []
    for name, fault in FAULTS.items():
        kind = f"{fault.schedule} {fault.walks}"
        if (kind, "") not in keys:
            keys.append((kind, ""))
            cases.append(case(name))
        keys += [(name, ""), (name, "report")]
        cases += [case(name, fault=name), case(name, fault=name, manner="report")]
    said = launch(2, folder, cases)
    return {key: [rank[n] for rank in said] for n, key in enumerate(keys)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_passes_in_silence(name: str) -> None:
    """TorchTitan ends every step; the run trains on, with other numbers unless it is harmless."""
    fault, said = FAULTS[name], faulty()
    right, wrong = said[f"{fault.schedule} {fault.walks}", ""], said[name, ""]

    assert [STEPS, STEPS] == [len(rank["bits"]) for rank in wrong]
    same = [one["bits"] == two["bits"] for one, two in zip(right, wrong, strict=True)]
    assert fault.harmless is all(same)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_where_it_happens(name: str) -> None:
    """The clause, on the rank of the fault and in its step alone; the run keeps its bits."""
    fault, said = FAULTS[name], faulty()

    for rank, (plain, found) in enumerate(zip(said[name, ""], said[name, "report"], strict=True)):
        assert plain["bits"] == found["bits"]
        if rank not in fault.ranks:
            assert [] == found["violations"]
            continue
        clause, pipeline_rank, step, action, _ = found["violations"][0]
        assert (fault.clause, rank, FAULTY_STEP) == (clause, pipeline_rank, step)
        assert fault.at == action


@pytest.mark.parametrize("name", ["left_out_backward", "update_early"])
def test_a_fault_is_refused_where_it_happens(name: str, tmp_path: Path) -> None:
    """In manner refuse the rank of the fault ends; its peer ends with it or waits in vain."""
    fault = FAULTS[name]
    said = launch(2, tmp_path, [case(name, fault=name, manner="refuse")], whole=False)

    for rank in fault.ranks:
        (found,) = said[rank]
        assert fault.clause == found["refused"]
        assert found["notes"][0].startswith(f"at pipeline rank {rank}")
        assert found["notes"][0].endswith(fault.at)
        assert FAULTY_STEP == len(found["bits"])
    for rank in {0, 1} - set(fault.ranks):
        assert not said[rank] or "refused" not in said[rank][0]


def test_a_gradient_that_a_split_backward_loses_is_named(tmp_path: Path) -> None:
    """Under the chunked loss of TorchTitan's own configuration the last norm is not trained."""
    given = {"schedule": "ZBVZeroBubble", "loss": "chunked", "manner": "report"}
    said = [rank[0] for rank in launch(2, tmp_path, [given])]

    assert [] == said[1]["violations"]
    ((clause, rank, step, action, found),) = said[0]["violations"]
    assert ("ownership.work-not-queued", 0, 0) == (clause, rank, step)
    assert action.startswith("3I")
    assert found == (
        "no deferred work for 1 of 1 weights in the graph of stage 3, microbatch 0: norm.weight"
    )


def test_the_pages_example_runs(tmp_path: Path) -> None:
    """The example's configuration trains on both ranks, and nothing is reported."""
    module = tmp_path / "my_llama"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "config_registry.py").write_text(blocks("docs/torchtitan.md", "python")[0].text)
    start = tmp_path / "start.py"
    start.write_text(
        "import os\n"
        "from qeffect.gpu_runtime.lab.sides.titan_cpu import install, on_a_cpu\n"
        "install()\n"
        "import my_llama.config_registry as own\n"
        "function = own.guarded_debugmodel\n"
        "own.guarded_debugmodel = lambda: on_a_cpu(function())\n"
        "from torchtitan.train import main\n"
        "main()\n"
    )
    options = ["--module", "my_llama", "--config", "guarded_debugmodel"]
    commands = [[str(start), *options, "--dump_folder", str(tmp_path / "out")]] * 2
    paths = f"{tmp_path}:{Path(__file__).parents[2]}"
    codes = run(tmp_path, commands, PYTHONPATH=paths)

    assert [0, 0] == codes
    for rank in range(2):
        text = (tmp_path / f"rank{rank}.txt").read_text()
        assert "not guarded" not in text
        assert "guarded() has no effect" not in text
        assert "qeffect" not in text.lower()  # it reports nothing

"""
`torchtitan.guarded(spec)` over TorchTitan's own trainer under GraphPP, the experiment in which each
stage computes with graphs of its own: `make torchtitan`. On CPUs, over gloo.

GraphPP's stages, runtime and graphs are those of the installed TorchTitan. `graphs.keep_outputs`
gives each stage an attribute that GraphPP of TorchTitan 0.3 expects and torch 2.15 lacks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from qeffect.log.joint import replay_together
from tests.torchtitan.faults import FAULTY_STEP, GRAPH_FAULTS
from tests.torchtitan.ranks import launch

pytestmark = pytest.mark.torchtitan

#: Time limit of each launch, and so of each process.
LIMIT_S = 115.0
#: A fault happens in the last step.
STEPS = FAULTY_STEP + 1
#: Legal runs by name: the schedule, the number of microbatches, and the walks of an update.
LEGAL: dict[str, tuple[str, int, int]] = {
    "Interleaved 1F1B": ("Interleaved1F1B", 4, 1),
    "ZB-V": ("ZBVZeroBubble", 4, 1),
    "DualPipeV": ("DualPipeV", 6, 1),
    "two walks": ("Interleaved1F1B", 4, 2),
}


def case(name: str, **given: Any) -> dict[str, Any]:
    schedule, microbatches, walks = LEGAL[name]
    return {
        "graphs": True,
        "schedule": schedule,
        "microbatches": microbatches,
        "walks": walks,
        "steps": STEPS,
        **given,
    }


def runs(*cases: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run each case in processes of its own; return what each rank says of every case."""
    said = [launch(2, Path(mkdtemp()), [each], limit_s=LIMIT_S) for each in cases]
    return [[ranks[rank][0] for ranks in said] for rank in range(2)]


@cache
def legal(name: str) -> tuple[Path, list[list[dict[str, Any]]]]:
    """What each rank says of a legal run under GraphPP: without a guard, and with one."""
    folder = Path(mkdtemp())
    return folder, runs(case(name), case(name, manner="refuse", log=str(folder / "log")))


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_run_keeps_its_bits(name: str) -> None:
    """Losses, gradients and parameters are those without a guard, and the logs replay."""
    folder, said = legal(name)

    for plain, guarded in said:
        assert "refused" not in guarded, guarded
        assert "GraphPipelineRuntime" == plain["schedule"]
        assert plain["bits"] == guarded["bits"]
        assert STEPS == len(plain["bits"]) == len(set(map(str, plain["bits"])))  # it does train
        assert (STEPS, 0, []) == (guarded["epoch"], guarded["live"], guarded["violations"])
    logs = sorted((folder / "log").rglob("*.jsonl"))
    assert 2 == len(logs)
    assert "accepted" == replay_together(logs).verdict


def test_the_bits_are_those_without_graphs() -> None:
    """TorchTitan's ordinary stages compute the same on a CPU; a report of GraphPP is empty."""
    said = runs(case("ZB-V", graphs=False), case("ZB-V", manner="report"))

    for (plain, _), (ordinary, reported) in zip(legal("ZB-V")[1], said, strict=True):
        assert "ScheduleZBVZeroBubble" == ordinary["schedule"]
        assert plain["bits"] == ordinary["bits"] == reported["bits"]
        assert [] == reported["violations"]


def test_only_what_leaves_no_record_is_trusted() -> None:
    """GraphPP's functions for UNSHARD and RESHARD leave no record; no stage is trusted."""
    for _, guarded in legal("DualPipeV")[1]:
        trust = guarded["trust"]
        assert not any("in its own graphs" in claim for claim in trust)
        unseen = [claim for claim in trust if claim.endswith("runs its action")]
        assert ["RESHARD", "UNSHARD"] == [claim.split()[6] for claim in unseen]


@cache
def faulty(fault: str) -> tuple[str, list[list[dict[str, Any]]]]:
    """What each rank says of a fault: without a guard, and in manner ``report``."""
    given = GRAPH_FAULTS[fault]
    name = next(
        n for n, (s, _, walks) in LEGAL.items() if (s, walks) == (given.schedule, given.walks)
    )
    return name, runs(case(name, fault=fault), case(name, fault=fault, manner="report"))


@pytest.mark.parametrize("fault", GRAPH_FAULTS)
def test_a_fault_is_reported_where_it_happens(fault: str) -> None:
    """GraphPP ends every step in silence; the guard names the clause on the rank of the fault."""
    given, (name, said) = GRAPH_FAULTS[fault], faulty(fault)
    right = [plain["bits"] for plain, _ in legal(name)[1]]

    assert given.harmless is (right == [plain["bits"] for plain, _ in said])
    for rank, (plain, found) in enumerate(said):
        assert plain["bits"] == found["bits"]
        if rank not in given.ranks or not given.clause:
            assert [] == found["violations"]
            continue
        clause, pipeline_rank, step, action, _ = found["violations"][0]
        assert (given.clause, rank, FAULTY_STEP) == (clause, pipeline_rank, step)
        assert given.at == action


def test_a_fault_is_refused_where_it_happens(tmp_path: Path) -> None:
    """In manner ``refuse`` the rank ends at the action whose graph did not run."""
    fault = "graph_backward_left_out"
    cases = [case("Interleaved 1F1B", fault=fault, manner="refuse")]
    said = launch(2, tmp_path, cases, whole=False, limit_s=LIMIT_S)

    (found,) = said[0]
    assert "epoch.device-count" == found["refused"]
    assert found["notes"][0].startswith("at pipeline rank 0")
    assert found["notes"][0].endswith("0B2")
    assert FAULTY_STEP == len(found["bits"])
    assert not said[1] or "refused" not in said[1][0]

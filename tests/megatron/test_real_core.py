"""
`megatron.guard()` over Megatron-core itself, on CPUs over gloo (`make megatron`).

Two ranks of each release import Megatron-core once, and run each case with its own model in a
forked process. The newest release runs every case; the other releases run a few cases of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from qeffect.log.joint import replay_together
from tests.deepspeed.ranks import run
from tests.docs.code import blocks
from tests.megatron.faults import CASES, FAULTS, STEPS, WIDE_FAULTS, Fault
from tests.megatron.ranks import NEWEST, RELEASES, folder_of, launch

pytestmark = pytest.mark.megatron

#: Legal runs of two ranks, by name.
LEGAL: dict[str, dict[str, Any]] = {
    "without pipelining": {"stages": 1},
    "1F1B": {},
    "interleaved": {"chunks": 2},
    "interleaved, quantized": {"chunks": 2, "quantized": True, "compare": 1},
    "distributed, overlapped": {"stages": 1, "distributed": True, "overlap": True, "gather": True},
    "loaded in mid-run": {
        "stages": 1,
        "distributed": True,
        "overlap": True,
        "gather": True,
        "reload": True,
    },
    "interleaved, deferred": {"chunks": 2, "config": {"overlap_p2p_comm_warmup_flush": True}},
    "seven microbatches": {"microbatches": 7},
    "groups of three": {
        "chunks": 2,
        "microbatches": 6,
        "config": {"microbatch_group_size_per_vp_stage": 3},
    },
    "outputs kept": {"deallocate": False},
    "messages one by one": {"config": {"batch_p2p_comm": False}},
    "quantized": {"quantized": True, "compare": 1},
    "quantized, distributed": {
        "stages": 1,
        "distributed": True,
        "overlap": True,
        "gather": True,
        "quantized": True,
        "compare": 1,
    },
    "an optimizer of torch": {"plain": True},
    "clipping": {"clip": 0.5},
    "sums": {"stages": 1, "config": {"calculate_per_token_loss": True}},
    "overlapped reduction": {"stages": 1, "overlap": True},
    "aligned reduction": {"chunks": 2, "overlap": True, "aligned": True},
    "fused, overlapped": {"chunks": 2, "overlap": True, "fused": True},
    "distributed optimizer": {"stages": 1, "distributed": True},
    "evaluation between": {"evaluate": True},
    "checkpoints between": {"save": True},
    "another batch size": {"resize": True},
}
#: Those that every release runs.
EVERYWHERE = list(LEGAL)[:6]
#: Legal runs of four ranks.
WIDE: dict[str, dict[str, Any]] = {
    "four stages": {"stages": 4, "microbatches": 8},
    "four stages, interleaved": {"stages": 4, "chunks": 2, "microbatches": 8},
    "four stages, batched": {"stages": 4, "chunks": 2, "microbatches": 8, "batched": True},
    "two replicas of two stages": {"overlap": True},
    "two replicas, interleaved": {"chunks": 2, "overlap": True, "distributed": True},
    "two optimizers": {"stages": 1, "distributed": True, "instances": 2, "overlap": True},
}
#: Legal runs of 1,000 steps.
LONG = ("without pipelining", "1F1B", "interleaved, quantized")
#: Faults that every release has.
OLD_FAULTS = ("left_out_inside", "another_output", "bucket_never", "skipped_refresh")

Key = tuple[str, str, str | None]
"""A kind of run, its name, and the manner of its guard."""


def cases(release: str) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The runs of two ranks."""
    newest = release == NEWEST
    for name in LEGAL if newest else EVERYWHERE:
        yield ("legal", name, None), LEGAL[name]
        yield ("legal", name, "refuse"), {"log": name, **LEGAL[name]}
    faults = list(FAULTS) if newest else OLD_FAULTS
    for name in dict.fromkeys(FAULTS[fault].case for fault in faults):
        yield ("right", name, None), CASES[name]
    for fault in faults:
        given = {"fault": fault, "limit_s": 100, **CASES[FAULTS[fault].case]}
        for manner in (None, "report", "refuse"):
            yield ("fault", fault, manner), given
    for stages in (1, 2):
        given = {"stages": stages, "steps": 4, "quantized": True, "graphs": True, "limit_s": 100}
        for manner in (None, "report", "refuse"):
            yield ("graphs", str(stages), manner), given
    for name in LONG if newest else ():
        given = {"steps": 1000, "brief": True, "limit_s": 600, **LEGAL[name]}
        yield ("long", name, "refuse"), given


@cache
def ran(release: str) -> tuple[Path, dict[Key, list[dict[str, Any]]]]:
    """What two ranks say of each run."""
    return _ran(release, 2, dict(cases(release)))


@cache
def wide() -> tuple[Path, dict[Key, list[dict[str, Any]]]]:
    """What four ranks say of each run."""
    given: dict[Key, dict[str, Any]] = {}
    for name, each in WIDE.items():
        given["legal", name, None] = each
        given["legal", name, "refuse"] = {"log": name, **each}
    for name in dict.fromkeys(fault.case for fault in WIDE_FAULTS.values()):
        given["right", name, None] = CASES[name]
    for name, fault in WIDE_FAULTS.items():
        for manner in (None, "report", "refuse"):
            given["fault", name, manner] = {"fault": name, "limit_s": 100, **CASES[fault.case]}
    return _ran(NEWEST, 4, given)


def faulty(release: str, name: str) -> tuple[Fault, dict[Key, list[dict[str, Any]]]]:
    """A fault, and what its ranks say of each run."""
    if name in WIDE_FAULTS:
        return WIDE_FAULTS[name], wide()[1]
    return FAULTS[name], ran(release)[1]


def _ran(
    release: str, world: int, given: dict[Key, dict[str, Any]]
) -> tuple[Path, dict[Key, list[dict[str, Any]]]]:
    folder = Path(mkdtemp())
    each = []
    for (_, _, manner), case in given.items():
        more = {"log": str(folder / case["log"])} if "log" in case else {}
        each.append({"manner": manner, "folder": str(folder / "saved"), **case, **more})
    said = launch(world, folder, each, release=release, whole=False)
    return folder, {key: [rank[n] for rank in said] for n, key in enumerate(given)}


@pytest.mark.parametrize(
    ("release", "name", "world"),
    [(release, name, 2) for release in RELEASES for name in EVERYWHERE]
    + [(NEWEST, name, 2) for name in LEGAL if name not in EVERYWHERE]
    + [(NEWEST, name, 4) for name in WIDE],
)
def test_a_legal_run_keeps_its_bits(release: str, name: str, world: int) -> None:
    """Losses and parameters of every step are those without a guard, and the logs replay."""
    folder, said = ran(release) if world == 2 else wide()
    plain, guarded = said["legal", name, None], said["legal", name, "refuse"]

    for one, two in zip(plain, guarded, strict=True):
        assert "refused" not in two, two
        assert one["bits"] == two["bits"]
        assert STEPS == len(one["bits"]) == len(set(map(str, one["bits"])))  # it does train
        assert (STEPS, 0, []) == (two["epoch"], two["live"], two["violations"])
        assert [] == two["left"]  # every replaced name is as it was
        case = {**LEGAL, **WIDE}[name]
        assert two["compared"] == STEPS * case.get("compare", 0) * case.get("chunks", 1)
    logs: dict[Path, list[Path]] = {}
    for path in sorted((folder / name).rglob("*.jsonl")):
        if "contract" not in path.name:
            logs.setdefault(path.parent, []).append(path)
    assert sum(map(len, logs.values())) == len(plain)
    for paths in logs.values():
        assert "accepted" == replay_together(paths).verdict


@pytest.mark.parametrize("name", LONG)
def test_a_thousand_steps_are_never_refused(name: str) -> None:
    for rank in ran(NEWEST)[1]["long", name, "refuse"]:
        assert "refused" not in rank, rank
        assert (1000, []) == (rank["epoch"], rank["violations"])


FAULTY = pytest.mark.parametrize(
    ("release", "name"),
    [(release, name) for release in RELEASES[:-1] for name in OLD_FAULTS]
    + [(NEWEST, name) for name in (*FAULTS, *WIDE_FAULTS)],
)


@FAULTY
def test_a_fault_passes_in_silence(release: str, name: str) -> None:
    """Megatron-core ends every step; the run trains on, with other numbers unless harmless."""
    fault, said = faulty(release, name)
    right, wrong = said["right", fault.case, None], said["fault", name, None]

    assert {STEPS} == {len(rank["bits"]) for rank in wrong}
    same = [one["bits"] == two["bits"] for one, two in zip(right, wrong, strict=True)]
    assert fault.harmless in (None, all(same))


@FAULTY
def test_a_fault_is_reported_where_it_happens(release: str, name: str) -> None:
    """The clause, on the rank of the fault and in its step alone; the run keeps its bits."""
    fault, said = faulty(release, name)
    both = zip(said["fault", name, None], said["fault", name, "report"], strict=True)

    for rank, (plain, found) in enumerate(both):
        assert fault.racing or plain["bits"] == found["bits"]
        assert [] == found["left"]
        if rank not in fault.ranks:
            assert [] == found["violations"]
            continue
        clause, stage, step, action, _ = found["violations"][0]
        assert (fault.clause, found["stage"], fault.step) == (clause, stage, step)
        assert action.startswith(fault.at)


@FAULTY
def test_a_fault_is_refused_where_it_happens(release: str, name: str) -> None:
    """In manner refuse the rank of the fault ends, and its peer with it."""
    fault, runs = faulty(release, name)
    said = runs["fault", name, "refuse"]

    assert any("refused" in said[rank] for rank in fault.ranks)
    for rank, found in enumerate(said):
        if "refused" not in found:  # its peer was refused first, and closed its connections
            assert "failed" in found
            continue
        assert rank in fault.ranks
        assert fault.clause == found["refused"]
        assert found["notes"][0].startswith(f"at pipeline rank {found['stage']}: {fault.at}")
        assert fault.step == len(found["bits"])


@pytest.mark.parametrize("release", RELEASES)
def test_stale_weights_of_local_graphs(release: str) -> None:
    """
    Megatron-core's own replays over graphs that read the flag: the third step is stale.

    With several pipeline ranks each microbatch has a graph of its own, and each remembers what it
    wrote into the flag that all share. Nothing raises.
    """
    said = ran(release)[1]
    runs = [said["graphs", "2", manner] for manner in (None, "report", "refuse")]

    for plain, reported, ended in zip(*runs, strict=True):
        assert [[False, True, True, True], [True] * 4, [True] * 4] == plain["flags"]
        assert plain["bits"] == reported["bits"]
        clause, _, step, action, _ = reported["violations"][0]
        assert ("version.stale-cache", 2) == (clause, step)
        assert action.startswith("F of stage")
        assert "failed" in ended or ("version.stale-cache", 2) == (ended["refused"], ended["step"])
    assert any("refused" in rank for rank in runs[-1])


@pytest.mark.parametrize("release", RELEASES)
def test_local_graphs_of_one_rank_are_right(release: str) -> None:
    said = ran(release)[1]

    for plain, ended in zip(said["graphs", "1", None], said["graphs", "1", "refuse"], strict=True):
        assert [[False, True, True, True]] * 3 == plain["flags"]
        assert plain["bits"] == ended["bits"]
        assert "refused" not in ended


def test_the_pages_example_runs(tmp_path: Path) -> None:
    """The example trains for two steps on both ranks, and nothing is reported."""
    text = blocks("docs/megatron.md", "python")[0].text
    example = tmp_path / "train.py"
    example.write_text(text.replace('"nccl"', '"gloo"').replace(".cuda()", ""))
    command = ["-W", "ignore", "-m", "tests.megatron.example", str(example)]
    codes = run(tmp_path, [command] * 2, limit_s=300, path=folder_of(NEWEST))

    assert [0, 0] == codes
    for rank in range(2):
        assert "()" in (tmp_path / f"rank{rank}.txt").read_text().splitlines()

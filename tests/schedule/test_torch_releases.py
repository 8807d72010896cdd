"""
The tables of torch 2.11 to 2.15, each written by the schedule classes of that release.

`make_torch_tables.py` says how the tables were made. Each table is read and given a verdict, and
torch 2.15's own activation slots are compared with the planner's.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.gpu_runtime.step.plan.slots import plan_slots
from qeffect.schedule.actions import RECEIVES, WAITS, Kind, ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.plan import plan
from qeffect.schedule.tables import read_table, write_table
from qeffect.schedule.torch_tables import CLASSES, LOOPED, SINGLE, V_SHAPED, torch_schedule
from qeffect.schedule.transport import Transport
from tests.torch_release import NEEDS_DEFERRED

from . import make_torch_tables
from .make_torch_tables import FOLDER, SHAPES, VARIANTS

RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
LATEST = FOLDER / "2.15.0"
TABLES = sorted(FOLDER.glob("*/*.csv"))
#: Deferred receives that come in another order than their sends.
EXCHANGED = {
    "ScheduleDualPipeV_pp4_vpp2_m8.defer.comms.csv",
    "ScheduleInterleavedZeroBubble_pp2_vpp2_m4.defer.comms.csv",
    "ScheduleZBVZeroBubble_pp2_vpp2_m4.defer.comms.csv",
    "ScheduleZBVZeroBubble_pp4_vpp2_m8.defer.comms.csv",
}
LIVENESS: dict[str, list[dict[str, Any]]] = json.loads((LATEST / "liveness.json").read_text())


def name_of(path: Path) -> str:
    """A table's release and name."""
    return f"{path.parent.name}/{path.name}"


def test_every_release_has_its_tables() -> None:
    """Fourteen tables a release, ten with deferred receives from 2.13 on, ten limited in 2.15."""
    counts = {r: len(list((FOLDER / r).glob("*.csv"))) for r in RELEASES}

    assert {"2.11.0": 14, "2.12.1": 14, "2.13.0": 24, "2.14.1": 24, "2.15.0": 34} == counts
    assert set(RELEASES) == {path.parent.name for path in TABLES}
    assert (14, 10) == (len(CLASSES) * len(SHAPES), len(LOOPED + V_SHAPED) * len(SHAPES))
    assert {"", ".defer", ".sends2"} == set(VARIANTS)


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_verdict(path: Path) -> None:
    """Every table keeps the contract, except if deferred receives swap two messages."""
    schedule = read_table(path)
    verdict = check(schedule)

    if path.name in EXCHANGED:
        assert "schedule.message-order" == verdict.clause
        assert verdict.finding is not None
        assert "the tensors would be swapped" in verdict.finding.message
    else:
        assert ("accepted", ()) == (verdict.verdict, verdict.findings)
        assert 2 * 3 * schedule.num_stages * schedule.num_microbatches == verdict.actions
    waits = path.parent.name == "2.15.0" and not path.name.startswith(SINGLE)
    assert waits is schedule.awaits_sends is schedule.awaits_reductions


@pytest.mark.parametrize("path", [path for path in TABLES if path.name in EXCHANGED], ids=name_of)
def test_direction_groups_accept_deferred_receives(path: Path) -> None:
    """With a queue per direction, as torch 2.14 offers, no messages are swapped."""
    schedule = read_table(path)

    assert "accepted" == check(schedule, transport=Transport("direction")).verdict
    # What was refused with one queue is an activation in the place of a gradient, or vice versa.
    finding = check(schedule).finding
    assert finding is not None
    assert {"RECV_F", "RECV_B"} == {
        kind for kind in ("RECV_F", "RECV_B") if kind in finding.expected + finding.found
    }


@pytest.mark.parametrize("release", RELEASES[1:4])
def test_releases_before_waits_write_the_same_tables(release: str) -> None:
    """torch 2.11 to 2.14 write the same tables, byte for byte; deferred ones since 2.13."""
    for path in (FOLDER / release).glob("*.csv"):
        first = FOLDER / ("2.13.0" if ".defer" in path.name else "2.11.0") / path.name

        assert first.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", sorted(LATEST.glob("*m?.comms.csv")), ids=name_of)
def test_the_latest_tables_add_only_waits(path: Path) -> None:
    """Without its waits, a table of torch 2.15 is that of 2.11, save for places of receives."""
    for old, new in zip(
        read_table(FOLDER / "2.11.0" / path.name).rows, read_table(path).rows, strict=True
    ):
        kept = [action for action in new if action is not None and action.kind not in WAITS]
        fixed = [action for action in kept if action.kind not in RECEIVES]

        assert sorted(map(str, old)) == sorted(map(str, kept))
        assert [a for a in old if a is not None and a.kind not in RECEIVES] == fixed


@pytest.mark.parametrize("ending", ["", pytest.param(".defer", marks=NEEDS_DEFERRED)])
def test_the_installed_release_writes_the_same(ending: str) -> None:
    """The fixtures of the installed release, if there are any, are what it writes."""
    import torch

    folder = FOLDER / str(torch.__version__).split("+")[0]
    if not folder.is_dir():
        pytest.skip(f"tests have no fixtures of torch {folder.name}")
    for cls in LOOPED + V_SHAPED if ending else CLASSES:
        for pp, microbatches in SHAPES:
            made = torch_schedule(
                cls, pp=pp, microbatches=microbatches, comms=True, **VARIANTS[ending]
            )
            vpp = made.num_stages // pp
            path = folder / f"{cls}_pp{pp}_vpp{vpp}_m{microbatches}{ending}.comms.csv"

            assert path.read_bytes().decode() == write_table(made)


class TestGenerator:
    """`make_torch_tables` on the installed release, which must have fixtures to compare with."""

    def test_from_a_wheel(self, tmp_path: Path) -> None:
        """From a wheel, only the pipelining modules are read, and the tables are the fixtures."""
        import torch

        version = str(torch.__version__)
        installed = Path(torch.__file__).parent / "distributed" / "pipelining"
        wheel = tmp_path / f"torch-{version}-cp3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("torch/__init__.py", "raise RuntimeError('read')")
            for module in installed.glob("*.py"):
                archive.write(module, f"torch/distributed/pipelining/{module.name}")
        release, schedules, replaced = make_torch_tables.load(wheel, tmp_path / "unpacked")
        if not (FOLDER / release).is_dir():
            pytest.skip(f"tests have no fixtures of torch {release}")
        made = make_torch_tables.tables(release, schedules)

        assert (version.split("+")[0], []) == (release, replaced)
        assert not (tmp_path / "unpacked" / "torch" / "__init__.py").exists()
        assert {p.name for p in (FOLDER / release).glob("*.csv")} == set(made)
        for name, schedule in made.items():
            assert (FOLDER / release / name).read_bytes().decode() == write_table(schedule)

    def test_names_that_are_missing(self, tmp_path: Path) -> None:
        """What a release imports and the installed torch lacks cannot be called, and is listed."""
        package = tmp_path / "9.9.0" / "torch" / "distributed" / "pipelining"
        package.mkdir(parents=True)
        (package / "schedules.py").write_text(
            "from torch.nowhere import thing\nfrom torch.nn import NoSuchLayer\n"
        )
        release, schedules, replaced = make_torch_tables.load(tmp_path / "9.9.0", tmp_path)
        try:
            assert "9.9.0" == release
            assert ["torch.nowhere", "torch.nowhere.thing", "torch.nn.NoSuchLayer"] == replaced
            with pytest.raises(RuntimeError, match=r"torch\.nn\.NoSuchLayer is not in"):
                schedules.NoSuchLayer()
        finally:
            del sys.modules["torch.nowhere"]
            del sys.modules["torch.nn"].NoSuchLayer  # type: ignore[attr-defined]

    def test_without_a_wheel(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without an argument it says what it wants."""
        assert 2 == make_torch_tables.main([])
        assert "wheels or folders" in capsys.readouterr().out


class TestOptions:
    def test_options_of_later_releases(self) -> None:
        """An option that a release lacks is refused; the message names the release that has the
        option."""
        from torch.distributed.pipelining import schedules

        with pytest.raises(ScheduleError, match=r"torch 2\.13\.0's .* 2\.15 and later"):
            torch_schedule(
                "ZBVZeroBubble",
                pp=2,
                microbatches=4,
                comms=True,
                max_outstanding_sends=2,
                release=("2.13.0", without_options(schedules)),
            )

    def test_never_for_single_stages(self) -> None:
        """1F1B and GPipe wait within their loop, and no release limits their sends."""
        with pytest.raises(ScheduleError, match="no release so far"):
            torch_schedule("1F1B", pp=2, microbatches=4, comms=True, max_outstanding_sends=2)

    def test_only_with_messages(self) -> None:
        """Options about messages say nothing about a table without them."""
        with pytest.raises(ScheduleError, match="a table without comms has no messages"):
            torch_schedule("ZBVZeroBubble", pp=2, microbatches=4, defer_receives=True)

    @NEEDS_DEFERRED
    def test_the_source_names_them(self) -> None:
        """The source of a table names the options with which the table was made."""
        made = torch_schedule(
            "Interleaved1F1B", pp=2, microbatches=4, comms=True, defer_receives=True
        )

        assert made.source.endswith("comms defer_pp_recv=True")


def without_options(schedules: Any) -> Any:
    """The installed schedules, as a release whose classes know no options."""

    class ScheduleZBVZeroBubble(schedules.ScheduleZBVZeroBubble):  # type: ignore[misc]
        def __init__(self, stages: Any, n_microbatches: int) -> None:
            super().__init__(stages, n_microbatches)

    older = ModuleType("older")
    vars(older).update(vars(schedules) | {"ScheduleZBVZeroBubble": ScheduleZBVZeroBubble})
    return older


class TestLiveness:
    """torch 2.15's `analyze_pipeline_activation_liveness` beside the planner."""

    @pytest.mark.parametrize("name", sorted(LIVENESS))
    def test_a_stage_has_torchs_slots_and_those_that_sends_hold(self, name: str) -> None:
        """torch's slots end at B or W: stage by stage they are ours, less what sends hold."""
        planned = plan(read_table(LATEST / name))

        for rank, torchs in zip(planned.ranks, LIVENESS[name], strict=True):
            assert torchs["stages"] == {
                str(s.stage): s.peak_live - s.held_by_sends for s in rank.stages
            }

    @pytest.mark.parametrize("name", sorted(LIVENESS))
    def test_torch_shares_slots_between_stages(self, name: str) -> None:
        """
        torch counts the rank's tapes; a slot of ours has graphs of one stage, so that stages add.

        An overlapped pair stands at one place of torch's table: there it counts a tape that ends
        in the pair's backward beside the one that begins in its forward.
        """
        schedule = read_table(LATEST / name)
        for rank, torchs in zip(plan(schedule).ranks, LIVENESS[name], strict=True):
            live = most = 0
            for atom in schedule.atoms[rank.rank]:
                live += (atom.kind is Kind.FORWARD) - (atom.kind is Kind.WGRAD)
                most = max(most, live)
            overlaps = any(a is not None and a.parts for a in schedule.rows[rank.rank])

            assert most <= torchs["rank"] <= most + overlaps
            assert torchs["rank"] <= sum(torchs["stages"].values()) <= rank.slots

    @pytest.mark.parametrize("name", sorted(LIVENESS))
    def test_the_runtimes_planner(self, name: str) -> None:
        """Without neighbours on its rank, a stage gets torch's slots from the runtime too."""
        schedule = read_table(LATEST / name)
        for rank, torchs in enumerate(LIVENESS[name]):
            provided = plan_slots(Order.of_rank(schedule, rank)).num_slots

            assert torchs["stages"] == {str(stage): n for stage, n in provided.items()}

    def test_default_tables_hold_every_tape(self) -> None:
        """torch 2.15 awaits a gradient's send at the row's end: then all microbatches are live."""
        for path in LATEST.glob("*vpp2_m?.comms.csv"):
            schedule = read_table(path)
            planned = plan(schedule)
            for atoms in schedule.atoms:
                for stage in {a.stage for a in atoms if a.kind is Kind.SEND_B}:
                    assert schedule.num_microbatches == planned.slots[stage]

    def test_recorded_slots_are_those_of_an_installed_release(self) -> None:
        """The installed torch computes the recorded slots; before 2.15 it computes none."""
        from torch.distributed.pipelining import schedules

        tables = {name: read_table(LATEST / name) for name in LIVENESS}
        found = make_torch_tables.liveness(schedules, tables)
        computes = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 15)

        assert found == (LIVENESS if computes else None)

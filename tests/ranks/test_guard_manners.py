"""
`guard(schedule)` in its two manners, refuse and report, and the event logs of both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from qeffect.cli import main
from qeffect.guards.pipelining import Violation, guard
from qeffect.log.joint import replay_together
from qeffect.log.replayer import replay
from qeffect.refusals import Refused
from qeffect.schedule.actions import ScheduleError
from tests.ranks import guard_bodies as bodies
from tests.ranks.guard_bodies import Run, leave_out
from tests.ranks.ranks import launch
from tests.ranks.test_guard_evidence import BACKWARD, IL, NAMES, WALKS, ZBV


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One rank, which is the whole pipeline."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def runs(name: str) -> tuple[Run, Run]:
    """The same model twice: without a guard, and for one."""
    return Run(name, ranks=1), Run(name, ranks=1)


class TestReport:
    """A guard that reports never raises, and the run keeps its bits."""

    @pytest.mark.parametrize("name", WALKS)
    def test_the_first_violation_of_a_clause(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It goes to the log and to the callable, once; the run goes on, wrong as it is."""
        plain, run = runs(name)
        seen: list[Violation] = []
        guarded = guard(run.schedule, manner="report", on_violation=seen.append)
        bits = [(plain.step(0), run.step(0))]
        for faulty in (plain, run):
            leave_out(faulty, BACKWARD)
        with caplog.at_level(logging.ERROR, "qeffect.guards"):
            bits += [(plain.step(n), run.step(n)) for n in (1, 2, 3)]

        assert all(a == b for a, b in bits)
        (violation,) = seen
        assert (violation,) == guarded.violations
        assert ("epoch.device-count", 0, 1) == (violation.clause, violation.rank, violation.step)
        assert "microbatch 2: its computation did not run" in violation.found
        assert "one run of each action that is committed" == violation.expected
        assert violation.action[0] in "1("
        (record,) = [r for r in caplog.records if r.name == "qeffect.guards"]
        assert str(violation) == record.getMessage()

    @pytest.mark.parametrize("name", NAMES)
    def test_the_next_step_has_a_contract_of_its_own(self, name: str) -> None:
        """After a violation the guard is silent until the next step, and judges that one."""
        plain, run = runs(name)
        guarded = guard(run.schedule, manner="report")
        own = [vars(r.stages[-1]).get(BACKWARD) for r in (plain, run)]
        for faulty in (plain, run):
            leave_out(faulty, BACKWARD, 1)
        bits = [(plain.step(0), run.step(0))]
        assert 1 == len(guarded.violations)
        del plain.stages[-1].backward_one_chunk
        run.stages[-1].backward_one_chunk = own[1]
        before = guarded.contract
        bits += [(plain.step(n), run.step(n)) for n in (1, 2)]

        assert all(a == b for a, b in bits)
        assert guarded.contract is not before
        assert 3 == guarded.contract.epoch  # as many as the steps of a rank without violations
        assert 1 == len(guarded.violations)

    @pytest.mark.parametrize("name", [IL, "Schedule1F1B"])
    def test_each_clause_is_reported(self, name: str) -> None:
        """A second clause is reported although the first came before it."""
        run = Run(name, ranks=1)
        guarded = guard(run.schedule, manner="report")
        leave_out(run, BACKWARD)
        run.step(0)
        first = [v.clause for v in guarded.violations]
        # The first stage: torch 2.15 hands what a later stage receives to one forward only.
        stage, forward = run.stages[0], run.stages[0].forward_one_chunk

        def twice(m: int, *args: Any, **kwargs: Any) -> Any:
            forward(m, *args, **kwargs)
            return forward(m, *args, **kwargs)

        stage.forward_one_chunk = twice
        stage.output_chunks = _Last(run.microbatches)
        run.step(1)

        assert [*first, "ownership.key-live"] == [v.clause for v in guarded.violations]
        assert 1 == guarded.violations[-1].step

    def test_a_callable_that_raises(self, caplog: pytest.LogCaptureFixture) -> None:
        """What the callable raises is logged; the run goes on."""
        plain, run = runs(ZBV)
        guard(run.schedule, manner="report", on_violation=lambda _: 1 / 0)
        for faulty in (plain, run):
            leave_out(faulty, BACKWARD)

        assert plain.step(0) == run.step(0)
        assert "the callable on_violation raised" in caplog.text

    def test_a_guard_that_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        """An error of the guard itself is logged once, and is nobody else's."""
        plain, run = runs(ZBV)
        guarded = guard(run.schedule, manner="report")

        def fail(*_: Any) -> None:
            raise KeyError("a mistake of ours")

        guarded._actions.evidence.check_weights = fail  # type: ignore[method-assign]
        bits = [(plain.step(n), run.step(n)) for n in range(2)]

        assert all(a == b for a, b in bits)
        assert () == guarded.violations
        assert 1 == caplog.text.count("the guard failed at 0F0")

    def test_a_log_that_cannot_be_written(self, caplog: pytest.LogCaptureFixture) -> None:
        """A full disk ends the judging of the step, and nothing else."""
        plain, run = runs(ZBV)
        guarded = guard(run.schedule, manner="report")

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        guarded.contract.observer = full

        assert plain.step(0) == run.step(0)
        assert "No space left on device" in caplog.text
        assert plain.step(1) == run.step(1)
        assert () == guarded.violations

    def test_the_runs_own_exceptions_are_raised(self) -> None:
        """A module's exception goes through; the next step is judged from its beginning."""
        run = Run("ScheduleGPipe", ranks=1)
        guarded = guard(run.schedule, manner="report")
        broken = run.blocks[0].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="failed to run forward"):
            run.step(0)
        broken.remove()
        run.step(1)

        assert () == guarded.violations
        assert 2 == guarded.contract.epoch

    def test_a_wrong_table(self, caplog: pytest.LogCaptureFixture) -> None:
        """It is reported once and never judged; the manner refuse raises."""
        plain, run = runs(ZBV)
        for wrong in (plain, run):
            bodies.edit_row(wrong, lambda row: row.remove("1W3"))
        with pytest.raises(ScheduleError):
            guard(run.schedule)
        guarded = guard(run.schedule, manner="report")
        bits = [(plain.step(n), run.step(n)) for n in range(2)]

        assert all(a == b for a, b in bits)
        (violation,) = guarded.violations
        assert violation.clause.startswith("schedule.")
        assert ZBV == violation.action

    def test_remove(self) -> None:
        """One line takes the guard off: nothing is reported any more."""
        run = Run(ZBV, ranks=1)
        guarded = guard(run.schedule, manner="report")
        guarded.remove()
        leave_out(run, BACKWARD)
        run.step(0)

        assert () == guarded.violations

    def test_an_unknown_manner(self) -> None:
        """Another word is named."""
        with pytest.raises(ValueError, match="manner must be 'refuse' or 'report', got 'loud'"):
            guard(Run(ZBV, ranks=1).schedule, manner="loud")  # type: ignore[arg-type]

    def test_over_ranks_nobody_waits(self, tmp_path: Path) -> None:
        """Rank 1 leaves a backward out twice: both ranks end with the bits of no guard."""
        said = launch(2, tmp_path, bodies.reported, ZBV, str(tmp_path / "logs")).words

        assert [[True] * 3] * 2 == [said[rank]["same"] for rank in (0, 1)]
        assert [] == said[0]["seen"]
        ((clause, rank, step, action),) = said[1]["seen"]
        assert ("epoch.device-count", 1, 1) == (clause, rank, step)
        assert action.endswith("2")
        assert 3 == said[0]["epoch"]
        names = sorted(path.name for path in (tmp_path / "logs").iterdir())
        assert ["rank0.jsonl", "rank1.contract1.jsonl", "rank1.jsonl"] == names
        for name in names:
            assert "accepted" == replay(tmp_path / "logs" / name).verdict


class TestName:
    """The short name, and what a guard takes on trust."""

    def test_the_short_name_is_the_module(self) -> None:
        """There is one module, whichever way it is imported."""
        from qeffect.guards import pipelining

        assert pipelining.guard is guard
        assert "qeffect.guards.pipelining" == pipelining.__name__

    def test_what_is_on_trust(self) -> None:
        """A registered function and a sharded stage are named."""
        run = Run(ZBV, ranks=1)
        guarded = guard(run.schedule)
        always = guarded.on_trust()
        kind = bodies.torch_schedules._ComputationType.BACKWARD_WEIGHT
        run.schedule.register_custom_function(kind, lambda *_: None)
        run.stages[1].submod = type("Sharded", (type("FSDPModule", (bodies.Block,), {}),), {})(1)

        assert 3 == len(always)
        assert {
            "the function that is registered for W runs its whole action",
            "no weight of stage 1 is written in the middle of a step; not checked, because its "
            "module is sharded",
        } == {*guarded.on_trust()} - {*always}


class _Last(list[Any]):
    """Output chunks of which the later of two for one microbatch is left out."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def append(self, value: Any) -> None:
        if len(self) < self.most:
            super().append(value)


class TestLogs:
    """The event log of each rank, alone and together."""

    @pytest.mark.parametrize("name", [IL, "Schedule1F1B"])
    def test_logs_of_all_ranks_replay(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`qeffect replay` accepts the logs of three steps of two ranks."""
        folder = tmp_path / "logs"
        said = launch(2, tmp_path, bodies.logged, name, str(folder)).words
        assert {0: 3, 1: 3} == said
        paths = sorted(folder.iterdir())
        report = replay_together(paths)

        assert ["rank0.jsonl", "rank1.jsonl"] == [path.name for path in paths]
        assert "accepted" == report.verdict
        assert 3 == report.epochs
        assert report.messages > 0
        assert 0 == main(["replay", *map(str, paths)])
        assert "accepted" in capsys.readouterr().out

    def test_a_refusal_is_the_end_of_a_log(self, tmp_path: Path) -> None:
        """The log of a refused step shows the abort; `rebuild` begins another file."""
        run = Run(ZBV, ranks=1)
        guarded = guard(run.schedule, log=tmp_path)
        run.step(0)
        own = run.stages[-1].backward_one_chunk
        leave_out(run, BACKWARD)
        with pytest.raises(Refused, match="its computation did not run"):
            run.step(1)
        guarded.rebuild()
        run.stages[-1].backward_one_chunk = own
        run.step(1)
        guarded.remove()

        first, second = (tmp_path / name for name in ("rank0.jsonl", "rank0.contract1.jsonl"))
        assert "abort_dgrad" in first.read_text()
        assert ["accepted"] * 2 == [replay(path).verdict for path in (first, second)]
        assert 2 == guarded.contract.epoch

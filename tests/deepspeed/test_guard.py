"""
`deepspeed.guard(engine)` over a stand-in for the engine, without the package.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.guards import deepspeed
from qeffect.guards.deepspeed_step import EngineStep
from qeffect.guards.releases import UntestedReleaseError
from qeffect.log.joint import replay_together
from qeffect.log.replayer import replay
from qeffect.refusals import Refused
from qeffect.schedule.actions import ScheduleError
from tests.deepspeed.faults import FAULTS, FAULTY_STEP, STEPS, Edited, edit_method
from tests.deepspeed.rank import data, put_under
from tests.deepspeed.stand_in import CLASSES, PACKAGE, PipelineEngine

#: The stand-in has no tied weights and no folded pipeline.
ALONE = {n: fault for n, fault in FAULTS.items() if fault.model in ("pipeline", "replicas")}


def engine_of(name: str, rank: int) -> Any:
    """The engine that a fault needs."""
    return PipelineEngine(rank, 2) if FAULTS[name].model == "pipeline" else PipelineEngine(0, 1)


def steps(engine: Any, number: int = STEPS) -> list[list[Tensor]]:
    """Run steps; return the bits of loss and parameters after each."""
    batches, found = data(3, torch.float32), []
    torch.manual_seed(9)
    for _ in range(number):
        loss = torch.tensor(engine.train_batch(batches))
        found.append([loss, *(p.detach().clone() for p in engine.module.parameters())])
    return found


def same(one: list[list[Tensor]], two: list[list[Tensor]]) -> bool:
    """Whether two runs have the same bits."""
    flat = [[t for step in run for t in step] for run in (one, two)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


class TestLegal:
    """Runs without a fault."""

    @pytest.mark.parametrize("microbatches", [3, 4, 6])
    @pytest.mark.parametrize("stage", [0, 1])
    def test_a_guard_changes_no_bit(self, stage: int, microbatches: int, tmp_path: Path) -> None:
        plain = steps(PipelineEngine(stage, 2, microbatches))
        engine = PipelineEngine(stage, 2, microbatches)
        before = dict(vars(engine))
        guarded = deepspeed.guard(engine, manner="refuse", log=tmp_path)
        found = steps(engine)
        guarded.remove()

        assert same(plain, found)
        assert STEPS == guarded.contract.epoch
        assert not guarded.contract.live()
        assert set(before) == set(vars(engine))
        assert "step" not in vars(engine.optimizer)
        assert "accepted" == replay(tmp_path / f"rank{stage}.jsonl").verdict

    def test_logs_of_both_ranks_replay_together(self, tmp_path: Path) -> None:
        for stage in (0, 1):
            engine = PipelineEngine(stage, 2)
            guarded = deepspeed.guard(engine, log=tmp_path)
            steps(engine)
            guarded.remove()
        report = replay_together(sorted(tmp_path.iterdir()))

        assert "accepted" == report.verdict
        assert STEPS == report.epochs
        assert STEPS * 8 == report.messages

    def test_evaluation_is_not_guarded(self) -> None:
        engine = PipelineEngine(0, 1)
        guarded = deepspeed.guard(engine, manner="refuse")
        steps(engine, 1)
        engine.eval_batch(data(5, torch.float32))
        steps(engine, 1)

        assert 2 == guarded.contract.epoch

    def test_another_number_of_microbatches(self) -> None:
        """`set_train_batch_size` changes it between steps: the guard declares the new order."""
        engine = PipelineEngine(0, 2, 4)
        guarded = deepspeed.guard(engine, manner="refuse")
        steps(engine, 2)
        for held in engine.pipe_buffers.values():
            held.extend([None] * 2)
        engine.micro_batches = 6
        steps(engine, 2)

        assert 4 == guarded.contract.epoch

    def test_a_checkpoint_between_steps(self) -> None:
        engine = PipelineEngine(0, 2)
        deepspeed.guard(engine, manner="refuse")
        for _ in range(2):
            engine.save_checkpoint("")
            steps(engine, 1)

        assert 2 == engine.saved

    def test_a_step_of_two_hundred_is_as_legal_as_the_first(self) -> None:
        engine = PipelineEngine(1, 2)
        guarded = deepspeed.guard(engine, manner="refuse")
        steps(engine, 200)

        assert 200 == guarded.contract.epoch


class TestFaults:
    """Every fault passes without the guard, and has its name with it."""

    @pytest.mark.parametrize("name", ALONE)
    def test_is_reported_where_it_happens(self, name: str) -> None:
        fault = FAULTS[name]
        for rank in fault.ranks[:1]:
            plain, engine = (engine_of(name, rank) for _ in range(2))
            fault.put(plain)
            guarded = deepspeed.guard(engine)
            put_under(guarded, engine, fault.put)

            assert same(steps(plain), steps(engine))
            first = guarded.violations[0]
            assert (fault.clause, rank, FAULTY_STEP) == (first.clause, first.rank, first.step)
            assert first.action.startswith(fault.at)

    @pytest.mark.parametrize("name", ALONE)
    def test_is_refused_where_it_happens(self, name: str) -> None:
        fault = FAULTS[name]
        engine = engine_of(name, fault.ranks[0])
        guarded = deepspeed.guard(engine, manner="refuse")
        put_under(guarded, engine, fault.put)
        with pytest.raises(Refused) as refused:
            steps(engine)

        assert fault.clause == refused.value.clause
        (note,) = refused.value.__notes__
        assert note.startswith(f"at pipeline rank {fault.ranks[0]}: {fault.at}")
        assert () == guarded.contract.outstanding()

    def test_a_reduction_by_hand(self) -> None:
        """A reduction that a person calls in mid-batch is seen outside its instruction."""
        engine = PipelineEngine(0, 2)
        guarded = deepspeed.guard(engine)

        def around(method: Any, call: int, self: Any, **given: Any) -> None:
            method(self, **given)
            if call == 1:
                self.buffered_allreduce_fallback()

        put_under(guarded, engine, lambda e: edit_method(e, "BackwardPass", around))
        steps(engine)

        first = guarded.violations[0]
        assert ("reduction.incomplete", "a reduction") == (first.clause, first.action)

    def test_an_update_between_steps(self) -> None:
        engine = PipelineEngine(0, 2)
        guarded = deepspeed.guard(engine)
        steps(engine, 1)
        engine.optimizer.step()
        steps(engine, 1)

        (violation,) = guarded.violations
        assert ("epoch.not-final", "optimizer.step()") == (violation.clause, violation.action)
        assert 2 == guarded.contract.epoch  # the step after it is judged


class TestReport:
    """The default manner."""

    def test_a_violation_goes_to_the_log_and_to_the_callable(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine, seen = PipelineEngine(0, 2), list[Any]()
        guarded = deepspeed.guard(engine, on_violation=seen.append)
        put_under(guarded, engine, FAULTS["left_out_inside"].put)
        with caplog.at_level(logging.ERROR, "qeffect.guards"):
            steps(engine)

        assert tuple(seen) == guarded.violations
        assert [str(seen[0])] == [r.getMessage() for r in caplog.records]
        assert "microbatch 1: its computation did not run" in seen[0].found

    def test_the_next_step_has_a_contract_of_its_own(self, tmp_path: Path) -> None:
        engine = PipelineEngine(0, 2)
        guarded = deepspeed.guard(engine, log=tmp_path)
        put_under(guarded, engine, FAULTS["another_output"].put)
        before = guarded.contract
        steps(engine, FAULTY_STEP + 3)
        guarded.remove()

        assert guarded.contract is not before
        assert FAULTY_STEP + 3 == guarded.contract.epoch
        names = ["rank0.contract1.jsonl", "rank0.jsonl"]
        assert names == sorted(path.name for path in tmp_path.iterdir())
        assert {"accepted"} == {replay(tmp_path / name).verdict for name in names}

    def test_a_failure_of_the_guard_is_nobody_elses(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, engine = PipelineEngine(0, 2), PipelineEngine(0, 2)
        guarded = deepspeed.guard(engine)

        def fail(*_: Any) -> None:
            raise KeyError("a mistake of ours")

        monkeypatch.setattr(EngineStep, "_check_weights", fail)

        assert same(steps(plain), steps(engine))
        assert () == guarded.violations
        assert 1 == caplog.text.count("the guard failed at ForwardPass")

    def test_an_exception_of_the_run_is_raised(self) -> None:
        """The next step is judged from its beginning."""
        engine = PipelineEngine(0, 2)
        guarded = deepspeed.guard(engine)
        broken = engine.module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps(engine, 1)
        broken.remove()
        steps(engine, 1)

        assert () == guarded.violations
        assert 2 == guarded.contract.epoch


class TestPuttingOn:
    """What is refused before the first step."""

    def test_another_object(self) -> None:
        with pytest.raises(TypeError, match=r"expects a PipelineEngine.*found object without"):
            deepspeed.guard(object())

    def test_a_second_guard(self) -> None:
        engine = PipelineEngine()
        guarded = deepspeed.guard(engine)
        with pytest.raises(ValueError, match="guarded already"):
            deepspeed.guard(engine)
        guarded.remove()
        deepspeed.guard(engine).remove()

    def test_no_optimizer(self) -> None:
        engine = PipelineEngine()
        engine.optimizer = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match="has no optimizer"):
            deepspeed.guard(engine)

    def test_an_unknown_manner(self) -> None:
        with pytest.raises(ValueError, match="manner must be 'refuse' or 'report', got 'loud'"):
            deepspeed.guard(PipelineEngine(), manner="loud")  # type: ignore[arg-type]

    def test_a_schedule_that_is_wrong(self, caplog: pytest.LogCaptureFixture) -> None:
        """One buffer for every microbatch: refused, or reported once and never judged."""

        class OneBuffer(PipelineEngine.schedule):  # type: ignore[name-defined, misc]
            __name__ = "OneBuffer"

            def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
                base = PipelineEngine.schedule(micro_batches, stages, stage_id)
                self._base: Any = base

            def num_pipe_buffers(self) -> int:
                return int(self._base.num_pipe_buffers())

            def steps(self) -> Iterator[list[Any]]:
                for step in self._base.steps():
                    for each in step:
                        if "buffer_id" in each.kwargs:
                            each.kwargs = {"buffer_id": 0}
                    yield step

        engine = PipelineEngine(0, 2)
        engine.schedule = OneBuffer
        with pytest.raises(ScheduleError, match="slot-busy"):
            deepspeed.guard(engine, manner="refuse")
        assert "train_batch" not in vars(engine)
        guarded = deepspeed.guard(engine)
        (violation,) = guarded.violations
        assert "ownership.slot-busy" == violation.clause
        assert "num_pipe_buffers()" in violation.remedy
        assert "qeffect plan" not in str(violation)

    def test_a_schedule_without_an_update(self) -> None:
        engine = PipelineEngine(0, 2)
        schedule = engine.schedule

        class NoUpdate(schedule):  # type: ignore[misc, valid-type]
            def __init__(self, *sizes: int) -> None:
                self._base = schedule(*sizes)

            def num_pipe_buffers(self) -> int:
                return int(self._base.num_pipe_buffers())

            def steps(self) -> Iterator[list[Any]]:
                edited = Edited(self._base, lambda row: row[:-1])
                yield from edited.steps()

        engine.schedule = NoUpdate
        with pytest.raises(ScheduleError, match="rank 0 has no OptimizerStep"):
            deepspeed.guard(engine)

    @pytest.mark.parametrize("release", ["0.18.2", "0.20.0", "1.0", "unknown"])
    def test_an_untested_release(
        self, release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(sys.modules[PACKAGE], "__version__", release)
        with pytest.raises(UntestedReleaseError, match=f"tested with deepspeed.*{release}"):
            deepspeed.guard(PipelineEngine(), manner="refuse")
        deepspeed.guard(PipelineEngine(), manner="refuse", untested=True).remove()
        deepspeed.guard(PipelineEngine())

        assert [release in record.message for record in caplog.records] == [True, True]


class TestTrust:
    """What `on_trust` says."""

    def test_what_every_engine_has(self) -> None:
        always = deepspeed.guard(PipelineEngine()).on_trust()

        assert 5 == len(always)
        assert "all sent messages arrive, with their contents unchanged" in always

    def test_a_reduction_that_is_switched_off(self) -> None:
        """Some optimizers of DeepSpeed reduce by themselves; the guard then trusts them."""
        engine: Any = PipelineEngine(0, 1)
        engine.pipeline_enable_backward_allreduce = False
        guarded = deepspeed.guard(engine, manner="refuse")
        put_under(guarded, engine, FAULTS["reduction_left_out_inside"].put)
        steps(engine)

        assert STEPS == guarded.contract.epoch
        assert any("ReduceGrads is switched off" in claim for claim in guarded.on_trust())

    def test_logs_of_replicas_have_folders_of_their_own(self, tmp_path: Path) -> None:
        engine: Any = PipelineEngine(0, 1)
        engine.is_data_parallel = True
        engine.grid = type("Grid", (), {"data_parallel_id": 1})()
        guarded = deepspeed.guard(engine, log=tmp_path)
        steps(engine, 1)
        guarded.remove()

        assert "accepted" == replay(tmp_path / "replica1" / "rank0.jsonl").verdict


def test_a_method_that_is_exchanged_later_is_guarded() -> None:
    """The guard looks the method up at each instruction."""
    engine, kind = PipelineEngine(0, 2), CLASSES["BackwardPass"]
    guarded = deepspeed.guard(engine)
    own = PipelineEngine._INSTRUCTION_MAP[kind]
    try:
        PipelineEngine._INSTRUCTION_MAP[kind] = lambda *_, **__: None
        steps(engine, 1)
    finally:
        PipelineEngine._INSTRUCTION_MAP[kind] = own

    assert "epoch.device-count" == guarded.violations[0].clause


def test_a_map_that_is_exchanged_later_leaves_an_empty_step() -> None:
    """Then the guard sees no instruction, and says at the update that nothing ran."""
    engine: Any = PipelineEngine(0, 2)
    guarded = deepspeed.guard(engine)
    engine._INSTRUCTION_MAP = dict(PipelineEngine._INSTRUCTION_MAP)
    steps(engine, 1)

    assert guarded.violations[0].clause in ("reduction.incomplete", "epoch.not-final")

"""
Dropout: each F draws new random numbers and reports the generator's position, bit for bit with
native.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import combinations
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

import qeffect.contract
from qeffect.engine.stage import transitions
from qeffect.gpu_runtime.backends.protocol import Reports
from qeffect.gpu_runtime.backends.random_streams import require_probability
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.backends.reference.dropout import RandomNumbers
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.step.eager import EagerExecutor, StageMemory
from qeffect.gpu_runtime.step.effects import Effects
from qeffect.gpu_runtime.step.memory.slots import Slot
from qeffect.log.replayer import replay_lines
from qeffect.refusals import Refused
from qeffect.verification.mutants import sites
from qeffect.verification.mutants.sites import Mutant

from .helpers import TINY, assert_same, guarded_run, native, run_and_repeat
from .orders import table_order

ORDER = table_order("ScheduleZBVZeroBubble", 1)
DROPOUT = 0.25


def dropping(monkeypatch: pytest.MonkeyPatch, *, recompute: bool = False) -> GuardedRun:
    """A guarded run over stages that drop elements."""
    with monkeypatch.context() as patched:
        if recompute:
            made = ReferenceStage.__init__

            def recomputing(self: ReferenceStage, *args: object, **options: object) -> None:
                made(self, *args, recompute=True, **options)  # type: ignore[arg-type]

            patched.setattr(ReferenceStage, "__init__", recomputing)
        run = guarded_run(ORDER, num_layers=2, dropout=DROPOUT)
    run.recording = Recording("dropping")
    return run


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_has_the_bits_of_native(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native full backward that keeps its activations, against guarded F, dI and dW."""
    plain = native(ORDER, 4, "accumulate", torch.bfloat16, 3, TINY, num_layers=2, dropout=DROPOUT)
    run = dropping(monkeypatch, recompute=recompute)
    run.run(3)

    assert run.recording is not None
    assert_same(plain, run.recording)
    assert [recompute] * 2 == [c.recomputes_draws for c in run.runtime.contract.stages]
    drawn = run.runtime.contract.memory.drawn
    assert drawn[0] > 0


def test_dropout_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not blind: without dropout the bits are others."""
    plain = native(ORDER, 4, "accumulate", torch.bfloat16, 1, TINY, num_layers=2)
    run = dropping(monkeypatch)
    run.run(1)

    assert run.recording is not None
    assert compare(plain, run.recording).mismatched > 0


def test_a_generator_that_does_not_advance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph that replays the offset of its capture: the second F drops the same elements."""
    run = dropping(monkeypatch)
    drop = RandomNumbers.drop

    def baked(self: RandomNumbers, value: Tensor, p: float, at: Tensor | None = None) -> Tensor:
        return drop(self, value, p, self.position.clone())

    monkeypatch.setattr(RandomNumbers, "drop", baked)
    with pytest.raises(Refused) as caught:
        run.run(1)

    assert "order.draws-again" == caught.value.clause
    assert "random numbers drawn from position 0" == caught.value.found


def test_a_recomputation_with_fresh_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As activation checkpointing that does not keep the generator's state."""
    run = dropping(monkeypatch, recompute=True)

    def fresh(self: ReferenceDomain, value: Tensor, probability: float, *_: int) -> Tensor:
        return self.random.drop(value, probability)

    monkeypatch.setattr(ReferenceDomain, "drop", fresh)
    with pytest.raises(Refused, match=r"^order\.wrong-draws in commit_dgrad"):
        run.run(1)


def test_an_evaluation_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations of one input are equal, and leave the generator where it was."""
    run = dropping(monkeypatch)
    run.run(1)
    runtime = run.runtime
    stage = next(iter(runtime.stages.values()))
    assert isinstance(stage, ReferenceStage)
    spec = stage.inputs[0]
    x = torch.linspace(-1, 1, spec.buffer().numel()).reshape(spec.shape).to(spec.dtype)
    before = stage.domain.random.position.clone()
    first, again = (runtime.actions.evaluate(stage.index, [x])[0] for _ in range(2))

    assert torch.equal(first, again)
    assert torch.equal(before, stage.domain.random.position)


def test_the_position_is_numerical_state() -> None:
    """A restore puts the generator back, so that a repeated epoch drops the same elements."""
    domain = ReferenceDomain(4)
    assert {} == domain.extra_state()
    ReferenceStage(0, domain, TINY, dropout=DROPOUT)

    assert domain.extra_state() == {"generator.position": domain.random.position}
    assert ("dropout of the reference backend draws on the host",) == domain.capture_obstacles()


def test_a_repeated_epoch_drops_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild puts the generator back, and the contract forgets where the lost epoch drew."""
    plain = native(ORDER, 4, "accumulate", torch.bfloat16, 2, TINY, num_layers=2, dropout=DROPOUT)
    run = dropping(monkeypatch)
    run_and_repeat(run)

    assert run.recording is not None
    assert_same(plain, run.recording)


def test_a_log_has_the_positions() -> None:
    """The event log of such a run names where each F drew, and replays."""
    run = guarded_run(ORDER, dropout=DROPOUT, event_log=True)
    run.run(1)
    run.runtime.close()
    assert run.runtime.recorder is not None
    lines = run.runtime.recorder.lines

    assert '"reports_draws":true' in lines[0]
    assert '"draws":0,' in "".join(lines)
    assert "accepted" == replay_lines(lines).verdict


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan"), True, False, "0.1", None])
def test_dropout_is_a_probability_below_one(dropout: Any) -> None:
    """A stage that drops everything computes nothing. Text and truth values are refused."""
    said = f"dropout: expected a number of at least 0 and below 1, found {dropout!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        ReferenceStage(0, ReferenceDomain(4), TINY, dropout=dropout)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        Job(dropout=dropout)


@pytest.mark.parametrize("dropout", [0, 0.5, np.float32(0.1), Fraction(1, 2)])
def test_dropout_is_any_real_number(dropout: Any) -> None:
    require_probability(dropout)


class TestAGeneratorThatIsSetBack:
    """Between two F of one step, the generator goes back to where the first began."""

    @staticmethod
    def faulty(monkeypatch: pytest.MonkeyPatch) -> GuardedRun:
        """A run whose second F begins at the position of the first."""
        run = dropping(monkeypatch)
        executor = run.runtime.performer.executor
        assert isinstance(executor, EagerExecutor)
        forward, begun = executor.forward, list[int]()

        def set_back(memory: StageMemory, slot: Slot) -> Effects:
            assert isinstance(memory.stage, ReferenceStage)
            position = memory.stage.domain.random.position
            begun.append(int(position))
            if len(begun) == 2:
                position.fill_(begun[0])
            return forward(memory, slot)

        monkeypatch.setattr(executor, "forward", set_back)
        return run

    def test_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.faulty(monkeypatch)
        with pytest.raises(Refused, match=r"^order\.draws-again in commit_forward"):
            run.run(1)

    @pytest.mark.parametrize("off", ["guard", "report"])
    def test_passes_in_silence_without(self, off: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the guard, or the report that it reads, the step commits with other bits."""
        plain = native(
            ORDER, 4, "accumulate", torch.bfloat16, 1, TINY, num_layers=2, dropout=DROPOUT
        )
        if off == "guard":
            (site,) = (
                site
                for site in sites()
                if (site.kind, site.transition, site.clause)
                == ("guard", "commit_forward", "order.draws-again")
            )
            own = transitions
            replaced = Mutant((site,)).replaced
            monkeypatch.setattr(
                qeffect.contract, "transitions", lambda omit: own(omit, replaced=replaced)
            )
        else:
            monkeypatch.setattr(ReferenceStage, "reports", silent(ReferenceStage.reports))
        run = self.faulty(monkeypatch)
        run.run(1)

        assert 1 == run.runtime.epoch
        assert run.recording is not None
        assert compare(plain, run.recording).mismatched > 0
        claims = {"guard": (), "report": ("each F draws new random numbers",)}[off]
        assert {claims} == set(run.runtime.on_trust().values())


def silent(reports: property) -> property:
    """Reports of a backend that draws and does not say where."""

    def told(stage: ReferenceStage) -> Reports:
        own: Reports = reports.__get__(stage)
        again = None if own.recomputes else False
        return attrs.evolve(own, draws=None, recomputes=again)

    return property(told)


class TestOnTrust:
    def test_draws_that_are_reported_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = dropping(monkeypatch, recompute=True)

        assert {()} == set(run.runtime.on_trust().values())

    def test_draws_that_are_not_reported_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ReferenceStage, "reports", silent(ReferenceStage.reports))
        run = dropping(monkeypatch, recompute=True)
        claims = (
            "each F draws new random numbers",
            "a recomputation draws the same random numbers as its F",
        )

        assert {claims} == set(run.runtime.on_trust().values())

    def test_a_graph_reports_no_draws(self) -> None:
        """The host sees where a capture drew, and no replay."""
        told = Reports(draws=True, recomputes=True, recorded=True)
        placed = Reports(draws=True, places_draws=True)

        assert (True, None) == (placed.captured().draws, placed.without_order().draws)
        assert (None, None) == (told.captured().draws, told.captured().recomputes)
        assert (None, None) == (told.without_order().draws, told.without_order().recomputes)
        assert (False, False) == (Reports().captured().draws, Reports().captured().recomputes)
        assert 2 == len(told.captured().on_trust())


class TestStreams:
    def test_replicas_and_ranks_drop_other_elements(self) -> None:
        """One position, one seed: each process of a job has numbers of its own."""
        ones = torch.ones(64, 64)
        job = Job(schedule="zbv", pp=2, dropout=DROPOUT)
        dropped = []
        for indices, replica in (((0, 3), 0), ((1, 2), 0), ((0, 3), 1)):
            stage = job.stages(indices, torch.device("cpu"), "reference", replica=replica)[0]
            assert isinstance(stage, ReferenceStage)
            dropped.append(stage.domain.random.drop(ones, 0.5))
        assert not any(torch.equal(a, b) for a, b in combinations(dropped, 2))

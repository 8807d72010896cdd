"""
`torchtitan.guarded(spec)` over a stand-in for TorchTitan: each epoch ends with the update.

`test_real_trainer` runs the same tests over the real package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect.guards import pipelining, torchtitan
from qeffect.guards.pipelining_rebuild import UNFINISHED
from qeffect.guards.releases import UntestedReleaseError
from qeffect.guards.torchtitan import guard_of, guarded
from qeffect.log.joint import replay_together
from qeffect.refusals import Refused
from tests.ranks.guard_bodies import SINGLE, V, leave_out
from tests.ranks.test_guard_evidence import IL, NAMES, ZBV
from tests.torchtitan.stand_in import Training, spec_of

OPTIMIZERS = ("fused", "foreach", "plain", "fused without state")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One rank, which is the whole pipeline."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pair(
    name: str, *, manner: Any = "refuse", log: Path | None = None, **options: Any
) -> tuple[Training, Training, Any]:
    """The same training twice, and the guard of the second."""
    plain = Training(spec_of(name), **options)
    own = Training(guarded(spec_of(name), manner=manner, log=log), **options)
    return plain, own, guard_of(own)


class TestLegalRuns:
    """What TorchTitan does runs as without a guard, and is never refused."""

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("walks", [1, 3])
    def test_an_epoch_for_each_update(self, name: str, walks: int, tmp_path: Path) -> None:
        """Also where gradients accumulate; the bits are the same, and the log replays."""
        plain, own, guard = pair(name, walks=walks, log=tmp_path)

        assert [plain.train_step() for _ in range(3)] == [own.train_step() for _ in range(3)]
        assert 3 == guard.contract.epoch
        assert not guard.contract.live()
        guard.remove()
        assert "accepted" == replay_together([tmp_path / "rank0.jsonl"]).verdict

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_optimizers(self, optimizer: str) -> None:
        """Fused ones raise no version counter, which must not count as a missing update."""
        plain, own, guard = pair(IL, optimizer=optimizer, walks=2)

        assert [plain.train_step() for _ in range(3)] == [own.train_step() for _ in range(3)]
        assert 3 == guard.contract.epoch

    def test_a_number_of_walks_that_nobody_declares(self) -> None:
        """Then any number of walks may come before an update."""
        _, own, guard = pair(IL, declared=False)
        for own.walks in (1, 3, 2):
            own.train_step()

        assert 3 == guard.contract.epoch
        assert any("is left out before its update" in claim for claim in guard.on_trust())

    @pytest.mark.parametrize("manner", ["refuse", "report"])
    def test_evaluations_between_steps(self, manner: str) -> None:
        plain, own, guard = pair("Schedule1F1B", manner=manner, walks=2)
        found = []
        for each in (plain, own):
            each.validate()
            found.append([each.train_step(), each.validate(), each.train_step()])

        assert found[0] == found[1]
        assert (2, ()) == (guard.contract.epoch, guard.violations)

    def test_microbatches_of_another_number(self) -> None:
        for number in (3, 5):
            own = Training(guarded(spec_of(ZBV, microbatches=number), manner="refuse"), walks=2)
            for _ in range(2):
                own.train_step()
            assert 2 == guard_of(own).contract.epoch

    def test_gradients_that_are_zeroed_in_place(self) -> None:
        _, own, guard = pair(IL)
        own.zero_grad = lambda: own.optimizers.zero_grad(set_to_none=False)  # type: ignore[method-assign]
        for _ in range(3):
            own.train_step()

        assert 3 == guard.contract.epoch

    def test_a_runtime_around_the_schedule(self) -> None:
        """`GraphPipelineRuntime` holds the schedule, and registers functions on it."""

        class GraphPipelineRuntime:
            def __init__(self, schedule: Any) -> None:
                self.schedule, self.step = schedule, lambda *a, **k: schedule.step(*a, **k)

        spec = spec_of(IL)
        build = spec.pipelining_fn
        assert build is not None

        def pipelining_fn(*args: Any, **kwargs: Any) -> Any:
            schedule, *rest = build(*args, **kwargs)
            return GraphPipelineRuntime(schedule), *rest

        own = Training(guarded(replace(spec, pipelining_fn=pipelining_fn), manner="refuse"))
        own.train_step()

        assert 1 == guard_of(own).contract.epoch


@pytest.mark.parametrize("drops", [False, True])
def test_a_runtime_that_writes_gradients_after_the_schedules_step(drops: bool) -> None:
    """The guard sees gradients of the first walk that are dropped before the second."""

    class Runtime:
        """Adds a step's gradients to `.grad` after the schedule's step, as GraphPP does."""

        def __init__(self, schedule: Any, parts: list[Any]) -> None:
            self.schedule, self._step = schedule, schedule.step
            self._parameters = [p for part in parts for p in part.parameters()]
            self._made: list[Any] = []
            schedule.step = self._computes

        def _swap(self, grads: list[Any]) -> list[Any]:
            before = [p.grad for p in self._parameters]
            for p, grad in zip(self._parameters, grads, strict=True):
                p.grad = grad
            return before

        def _computes(self, *args: Any, **kwargs: Any) -> None:
            earlier = self._swap([None] * len(self._parameters))
            self._step(*args, **kwargs)
            self._made = self._swap(earlier)

        def step(self, *args: Any, **kwargs: Any) -> None:
            self.schedule.step(*args, **kwargs)
            for p, made in zip(self._parameters, self._made, strict=True):
                p.grad = made if p.grad is None else p.grad + made

    spec = spec_of(IL)
    build = spec.pipelining_fn
    assert build is not None

    def pipelining_fn(*args: Any, **kwargs: Any) -> Any:
        schedule, parts, *rest = build(*args, **kwargs)
        return Runtime(schedule, parts), parts, *rest

    spec = guarded(replace(spec, pipelining_fn=pipelining_fn), manner="refuse")
    own = Training(spec, walks=2)
    own.train_step()
    if not drops:
        own.train_step()
        assert 2 == guard_of(own).contract.epoch
        guard_of(own).remove()
        assert "step" not in vars(own.pp_schedule)
        return
    own.between = own.optimizers.zero_grad
    with pytest.raises(Refused) as caught:
        own.train_step()
    assert "arena.overwrite" == caught.value.clause


def _twice(own: Training) -> None:
    update = own.update
    own.update = lambda: (update(), update())  # type: ignore[method-assign, func-returns-value, return-value, assignment]


def _update_left_out(own: Training) -> None:
    own.update = lambda: None  # type: ignore[method-assign]


def _step_replaced(own: Training) -> None:
    """The container's step runs, and updates nothing."""
    for optimizer in own.optimizers:
        optimizer.step = lambda: None  # type: ignore[assignment, misc]


def _one_part_left_out(own: Training) -> None:
    own.optimizers.optimizers[0].step = lambda: None  # type: ignore[assignment, misc]


def _early(own: Training) -> None:
    own.between = own.optimizers.step


def _part_early(own: Training) -> None:
    own.between = own.optimizers.optimizers[0].step


def _dropped(own: Training) -> None:
    own.between = own.optimizers.zero_grad


def _dropped_before_the_update(own: Training) -> None:
    update = own.update
    own.update = lambda: (own.optimizers.zero_grad(), update())  # type: ignore[method-assign, func-returns-value, return-value, assignment]


def _kept(own: Training) -> None:
    own.zero_grad = lambda: None  # type: ignore[method-assign]


def _written(own: Training) -> None:
    weight = own.model_parts[-1].linear.weight

    def write() -> None:
        with torch.no_grad():
            weight.mul_(0.5)  # type: ignore[operator]

    own.between = write


def _written_before_the_update(own: Training) -> None:
    _written(own)
    write, own.between, update = own.between, lambda: None, own.update
    own.update = lambda: (write(), update())  # type: ignore[method-assign, func-returns-value, return-value, assignment]


def _left_out(own: Training) -> None:
    leave_out(own, "backward_one_chunk")  # type: ignore[arg-type]


#: Faults, the clause that names each, and where.
FAULTS: list[tuple[Callable[[Training], None], str, str]] = [
    (_twice, "epoch.not-final", "the optimizer's update"),
    (_update_left_out, "epoch.device-count", "the beginning of the step"),
    (_step_replaced, "epoch.device-count", "the optimizer's update"),
    (_one_part_left_out, "epoch.device-count", "the optimizer's update"),
    (_early, "epoch.not-final", "the optimizer's update"),
    (_part_early, "version.wrong-epoch", "the update of one optimizer"),
    (_dropped, "arena.overwrite", "the beginning of the step"),
    (_dropped_before_the_update, "arena.overwrite", "the optimizer's update"),
    (_kept, "arena.stale-accumulation", "the beginning of the step"),
    (_written, "version.wrong-epoch", "1F0"),
    (_written_before_the_update, "version.wrong-epoch", "the optimizer's update"),
    (_left_out, "epoch.device-count", "1B2"),
]


def _two_steps(own: Training) -> None:
    own.train_step()
    own.train_step()


def _faulty(own: Training, put: Callable[[Training], None]) -> None:
    own.train_step()
    own.stages = own.stages[-1:] if put is _left_out else own.stages
    put(own)


@pytest.mark.parametrize(("put", "clause", "at"), FAULTS)
class TestFaults:
    """What a trainer does wrong is named; torch and the stand-in let all of it pass."""

    def test_refused(self, put: Callable[[Training], None], clause: str, at: str) -> None:
        plain, own, _ = pair(IL, walks=2, optimizer="foreach")
        _faulty(plain, put)
        for _ in range(2):
            plain.train_step()  # in silence
        _faulty(own, put)
        with pytest.raises(Refused) as caught:
            _two_steps(own)

        assert clause == caught.value.clause
        assert caught.value.__notes__[0].endswith(at)

    def test_reported(self, put: Callable[[Training], None], clause: str, at: str) -> None:
        """Once; the run keeps its wrong bits and goes on."""
        plain, own, guard = pair(IL, walks=2, optimizer="foreach", manner="report")
        for each in (plain, own):
            _faulty(each, put)

        assert [plain.train_step() for _ in range(3)] == [own.train_step() for _ in range(3)]
        assert (clause, 1) == (guard.violations[0].clause, guard.violations[0].step)
        assert at == guard.violations[0].action


class TestGoingOn:
    """A guard that reports judges again in the step after a violation."""

    @pytest.mark.parametrize("name", [IL, ZBV, "Schedule1F1B"])
    def test_the_step_after(self, name: str) -> None:
        plain, own, guard = pair(name, walks=2, manner="report", optimizer="foreach")
        for each in (plain, own):
            each.train_step()
            weight = each.model_parts[0].linear.weight
            each.between = lambda weight=weight: weight.detach().mul_(0.5)
        bits = [(plain.train_step(), own.train_step())]
        for each in (plain, own):
            each.between = lambda: None
        bits += [(plain.train_step(), own.train_step()) for _ in range(2)]

        assert all(a == b for a, b in bits)
        assert ["version.wrong-epoch"] == [v.clause for v in guard.violations]
        assert 4 == guard.contract.epoch

    @pytest.mark.parametrize("manner", ["refuse", "report"])
    def test_an_exception_in_the_second_walk(self, manner: str) -> None:
        """The epoch begins again, with all of its walks; refuse wants a rebuild first."""
        plain, own, guard = pair(IL, walks=2, manner=manner)
        for each in (plain, own):
            each.train_step()
            hook = []

            def fail(*_: Any, hook: list[Any] = hook) -> None:
                hook[0].remove()
                raise ArithmeticError("in a forward")

            each.between = lambda each=each, hook=hook, fail=fail: hook.append(
                each.model_parts[0].register_forward_hook(fail)
            )
            with pytest.raises(RuntimeError):
                each.train_step()
            each.between = lambda: None
            for owner in (each.pp_schedule, *each.stages):
                for left in UNFINISHED:
                    getattr(owner, left, {}).clear()  # torch keeps them
        if manner == "refuse":
            guard.rebuild(alone=True)

        assert [plain.train_step() for _ in range(2)] == [own.train_step() for _ in range(2)]
        assert ((3 if manner == "refuse" else 4), ()) == (guard.contract.epoch, guard.violations)


class TestPutOn:
    """`guarded` itself."""

    def test_off_again(self) -> None:
        """After `remove` the schedule, its stages and the optimizers are as before."""
        plain, own, guard = pair(IL)
        own.train_step()
        guard.remove()
        plain.train_step()

        for a, b in zip(
            [plain.pp_schedule, plain.optimizers, *plain.stages],
            [own.pp_schedule, own.optimizers, *own.stages],
            strict=True,
        ):
            assert sorted(vars(a)) == sorted(vars(b))
        for optimizer in (own.optimizers, *own.optimizers.optimizers):
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
        with pytest.raises(ValueError, match="has no guarded schedule"):
            guard_of(own)

    def test_what_is_no_specification(self) -> None:
        spec = spec_of(IL)
        with pytest.raises(TypeError, match=r"expects a ModelSpec.*found int"):
            guarded(3)
        with pytest.raises(ValueError, match="manner must be"):
            guarded(spec, manner="warn")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has no pipelining_fn"):
            guarded(replace(spec, pipelining_fn=None))
        with pytest.raises(ValueError, match="guarded already"):
            guarded(guarded(spec))

    def test_releases(self, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(UntestedReleaseError, match=r"torchtitan 0\.3 to 0\.3; 0\.4\.1"):
            guarded(spec_of(IL, release="0.4.1"), manner="refuse")
        guarded(spec_of(IL, release="0.4.1"), manner="refuse", untested=True)
        with caplog.at_level(logging.WARNING, "qeffect.guards"):
            guarded(spec_of(IL, release="0.2.0"))
        assert "0.2.0 is installed" in caplog.text

    def test_a_run_without_a_pipeline(self, caplog: pytest.LogCaptureFixture) -> None:
        """The hook of the optimizers is called all the same; it says that nothing is guarded."""
        called: list[Any] = []
        spec = replace(spec_of(IL), post_optimizer_build_fn=lambda *given: called.append(given))
        with caplog.at_level(logging.WARNING, "qeffect.guards"):
            guarded(spec).post_optimizer_build_fn("optimizers", [], None)

        assert [("optimizers", [], None)] == called
        assert "guarded() has no effect" in caplog.text

    def test_a_pipeline_that_cannot_be_guarded(self, caplog: pytest.LogCaptureFixture) -> None:
        """In manner report the run continues without a guard, and the log reports this."""
        spec = replace(spec_of(IL), pipelining_fn=lambda *_, **__: (object(), [], True, True))
        with caplog.at_level(logging.ERROR, "qeffect.guards"):
            guarded(spec).pipelining_fn(None)
        assert "the pipeline is not guarded: TypeError" in caplog.text
        with pytest.raises(TypeError, match="guard expects a schedule"):
            guarded(spec, manner="refuse").pipelining_fn(None)

    def test_what_is_no_optimizer(self) -> None:
        guard = guard_of(Training(guarded(spec_of(IL))))
        with pytest.raises(ValueError, match="follows an optimizer already"):
            guard.follow_optimizer(None)
        guard.remove()
        own = Training(spec_of(IL))
        plain = pipelining.guard(own.pp_schedule)
        with pytest.raises(TypeError, match=r"expects a torch\.optim\.Optimizer.*found NoneType"):
            plain.follow_optimizer(None)
        for walks, error in (("2", TypeError), (True, TypeError), (0, ValueError)):
            with pytest.raises(error, match="walks must be"):
                plain.follow_optimizer(own.optimizers, walks=walks)  # type: ignore[arg-type]

    def test_schedules_are_those_that_torch_has(self) -> None:
        assert {IL, ZBV, *SINGLE, *V} <= set(NAMES)
        assert ("0.3",) == torchtitan.TESTED

"""
Legal uses of torch's pipeline run under `guard(schedule)` with the same bits: uneven microbatches,
evaluations, exceptions, accumulated gradients, and the options of `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.guards.pipelining import guard
from qeffect.schedule.tables import read_table
from tests.profiles import few
from tests.ranks import guard_bodies as bodies
from tests.ranks.guard_bodies import WIDTH, Run, V
from tests.ranks.ranks import launch
from tests.ranks.test_guard_evidence import IL, NAMES, ZBV
from tests.ranks.test_guard_releases import RELEASES, TABLES, Walk

MANNERS = ("refuse", "report")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One rank, which is the whole pipeline."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pair(name: str, manner: Any = "refuse", **options: Any) -> tuple[Run, Run, Any]:
    """The same model twice, and the guard of the second."""
    plain, run = (Run(name, ranks=1, **options) for _ in range(2))
    return plain, run, guard(run.schedule, manner=manner)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("microbatches", "rows"), [(2, 4), (3, 6), (5, 10), (4, 7)])
def test_numbers_of_microbatches(name: str, microbatches: int, rows: int) -> None:
    """Few, odd ones, and a batch that does not divide: its last microbatches are smaller."""
    plain, run, guarded = pair(name, microbatches=microbatches, rows=rows)

    assert [plain.step(n) for n in range(2)] == [run.step(n) for n in range(2)]
    assert 2 == guarded.contract.epoch


@pytest.mark.parametrize("microbatches", [5, pytest.param(6, marks=pytest.mark.ci)])
def test_numbers_of_microbatches_over_ranks(microbatches: int, tmp_path: Path) -> None:
    """More microbatches than warm-up and cool-down need, also odd ones where torch takes them."""
    said = launch(2, tmp_path, bodies.uneven, [*NAMES], microbatches).words

    assert sorted(said[0]) == sorted(said[1])
    assert len(said[0]) >= (3 if microbatches % 2 else 6)
    assert {(True, 2)} == {tuple(v) for words in said.values() for v in words.values()}


@pytest.mark.parametrize("manner", few(MANNERS, (0,)))
def test_evaluations(manner: str, tmp_path: Path) -> None:
    """Before the first step, between steps and under `no_grad`, with the same outputs."""
    names = [name for name in NAMES if name not in V]
    said = launch(2, tmp_path, bodies.evaluated, names, manner).words

    for words in said.values():
        assert names == list(words)
        assert {(True, 3, 0)} == {tuple(found) for found in words.values()}


@pytest.mark.parametrize("manner", MANNERS)
def test_an_evaluation_that_torch_cannot_run(manner: str) -> None:
    """torch evaluates no two neighbours on one rank; the steps around its error are guarded."""
    plain, run, guarded = pair(IL, manner)
    bits = [(plain.step(0), run.step(0))]
    x = torch.ones(run.rows, WIDTH)
    for own in (plain, run):
        with pytest.raises(AssertionError, match="doesn't have backward"):
            own.schedule.eval(x, target=x)
        for left in own.schedule._internal_losses, bodies.retained(own.stages[-1]):
            left.clear()  # torch keeps them
    bits += [(plain.step(n), run.step(n)) for n in (1, 2)]

    assert all(a == b for a, b in bits)
    assert 3 == guarded.contract.epoch
    assert () == guarded.violations


def _in_forward(run: Run) -> Callable[[], None]:
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise ArithmeticError("in a forward")

    return run.blocks[-1].register_forward_hook(fail).remove


def _in_backward(run: Run) -> Callable[[], None]:
    def fail(_: Tensor) -> None:
        raise ArithmeticError("in a backward")

    return run.blocks[0].norm.weight.register_hook(fail).remove


def _in_loss(run: Run) -> Callable[[], None]:
    loss, calls = run.schedule._loss_fn, [0]

    def fail(*given: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ArithmeticError("in a loss")
        found: Tensor = loss(*given)
        return found

    run.schedule._loss_fn = fail
    return lambda: setattr(run.schedule, "_loss_fn", loss)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fail", [_in_forward, _in_backward, _in_loss])
def test_exceptions_in_mid_step(name: str, fail: Callable[[Run], Callable[[], None]]) -> None:
    """The exception is the caller's own; after `rebuild` the step runs with its own bits."""
    plain, run, guarded = pair(name)
    bits = [(plain.step(0), run.step(0))]
    mend = fail(run)
    with pytest.raises((ArithmeticError, RuntimeError)) as caught:
        run.step(1, update=False)
    mend()
    causes = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert any(isinstance(cause, ArithmeticError) for cause in causes)
    guarded.rebuild()
    bits += [(plain.step(n), run.step(n)) for n in (1, 2)]

    assert all(a == b for a, b in bits)
    assert 3 == guarded.contract.epoch


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("name", NAMES)
def test_accumulated_gradients_and_options(name: str, manner: str) -> None:
    """Two steps for one update, without outputs, and with options of the loss."""
    found: list[list[str]] = []
    plain, run, guarded = pair(name, manner)
    for own in (plain, run):
        loss = own.schedule._loss_fn
        own.schedule._loss_fn = lambda y, t, loss=loss, factor=1.0: loss(y, t) * factor
        generator = torch.Generator().manual_seed(0)
        for factor in (0.5, 2.0):
            x = torch.randn(own.rows, WIDTH, generator=generator)
            out = own.schedule.step(
                x, target=x, return_outputs=False, loss_kwargs={"factor": factor}
            )
            assert out is None
        found.append([bodies._digest(p.grad) for part in own.blocks for p in part.parameters()])
        own.optimizer.step()
        found[-1] += own.step(1)

    assert found[0] == found[1]
    assert 3 == guarded.contract.epoch
    assert () == guarded.violations


@pytest.mark.parametrize("name", [IL, ZBV])
def test_microbatches_that_were_cut_before(name: str) -> None:
    """`step(arg_mbs=..., target_mbs=...)` of torch 2.14 and later reaches torch as it was given."""

    class Cut(Walk):
        given: Any = None

        def step(self, *args: Any, **options: Any) -> str:  # type: ignore[override]
            self.given = args, options
            super().step()
            return "outputs"

    release = next(r for r in RELEASES if r >= "2.14")
    (path,) = [
        p for p in (TABLES / release).glob(f"{name}_*comms.csv") if "_pp2_vpp2_m4.comms" in p.name
    ]
    walk = Cut(read_table(path), 0)
    guarded = guard(walk)
    options = {"arg_mbs": [(1,), (2,), (3,), (4,)], "target_mbs": [5, 6, 7, 8], "losses": []}

    assert "outputs" == walk.step(**options)
    assert ((), options) == walk.given
    assert 1 == guarded.contract.epoch


def test_an_overlap_that_no_row_has() -> None:
    """TorchTitan's GraphPP registers a function for overlaps under every schedule."""
    plain, run, guarded = pair(IL)
    for own in (plain, run):
        overlap = bodies.torch_schedules._ComputationType.OVERLAP_F_B
        own.schedule.register_custom_function(overlap, lambda *_: None)

    assert [plain.step(n) for n in range(2)] == [run.step(n) for n in range(2)]
    assert 2 == guarded.contract.epoch
    assert "the function that is registered for OVERLAP_F_B runs its action" in guarded.on_trust()


def test_an_overlap_that_a_row_has() -> None:
    """Its two actions run in a function whose order the guard cannot see."""
    _, run, _ = pair("ScheduleDualPipeV", microbatches=6)
    overlap = bodies.torch_schedules._ComputationType.OVERLAP_F_B
    run.schedule.register_custom_function(overlap, lambda *_: None)
    with pytest.raises(ValueError, match="whose order the guard cannot see"):
        run.step(0)


def test_a_runtime_around_a_schedule() -> None:
    """The guard guards the schedule that TorchTitan's `GraphPipelineRuntime` holds."""

    class Around:
        def __init__(self, schedule: Any) -> None:
            self.schedule = schedule

    run = Run(IL, ranks=1)
    guarded = guard(Around(run.schedule))
    run.step(0)

    assert guarded.schedule is run.schedule
    assert 1 == guarded.contract.epoch

"""A forward reads parameters only after they were gathered; see also `test_real_core`."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from qeffect.guards import megatron
from qeffect.guards.evidence import Weights
from qeffect.guards.megatron_buckets import check_gathered, reduced_and_gathered
from qeffect.refusals import Refused
from tests.megatron.stand_in import StandIn

CASE = {"stages": 1, "overlap": True, "gather": True}


def hooks_off(chunk: Any) -> None:
    chunk.gathers = False


def not_awaited(chunk: Any) -> None:
    chunk.bucket_groups[-1].param_gather_handle = object()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (hooks_off, r"(\d+) buckets of parameters, \1 not gathered since the update, 0 whose"),
        (not_awaited, "0 not gathered since the update, 1 whose gather was not waited for"),
    ],
)
def test_a_gather_is_missing(
    fault: Callable[[Any], None], said: str, made: dict[str, ModuleType]
) -> None:
    """After an update, in a step that would repeat the recorded one; with advice of its own."""
    megatron.guard(manner="refuse")
    run = StandIn(made, CASE, 0)
    for _ in range(4):
        run.step()
    fault(run.model[0])
    with pytest.raises(Refused) as refused:
        run.step()
    assert refused.value.clause == "version.wrong-epoch"
    assert re.search(said, str(refused.value))
    assert "enable_forward_pre_hook()" in refused.value.record().remedy
    assert "F of stage 0, microbatch 0" in refused.value.__notes__[0]


def test_before_the_first_update_nothing_is_to_be_gathered(made: dict[str, ModuleType]) -> None:
    """Megatron's training loop switches the hooks off in its first step."""
    guarded = megatron.guard(manner="refuse")
    run = StandIn(made, CASE, 0)
    hooks_off(run.model[0])
    run.step()
    assert guarded.epochs == 1


def test_an_update_that_was_skipped_scatters_nothing(made: dict[str, ModuleType]) -> None:
    """Megatron-core skips the update if a gradient overflows; hooks may stay off until then."""
    guarded = megatron.guard(manner="refuse")
    run = StandIn(made, CASE, 0)
    hooks_off(run.model[0])
    update, run.optimizer.step = run.optimizer.step, lambda: (False, None, None)
    run.step()
    run.step()
    run.optimizer.step = update
    run.step()
    with pytest.raises(Refused, match="not gathered since the update"):
        run.step()
    assert guarded.epochs == 3


def two_buckets(dispatched: bool, handle: Any) -> tuple[list[Any], list[torch.nn.Parameter]]:
    """A bucket that was gathered, and another one, each with one parameter."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    states = (True, None), (dispatched, handle)
    groups = [
        SimpleNamespace(params={p}, param_gather_dispatched=started, param_gather_handle=runs)
        for p, (started, runs) in zip(parameters, states, strict=True)
    ]
    return groups, parameters


def weights_of(*parameters: torch.nn.Parameter) -> Weights:
    """The weights of a module that has these parameters."""
    return Weights(torch.nn.ParameterList(parameters))


UNGATHERED = pytest.mark.parametrize(("dispatched", "handle"), [(False, None), (True, object())])


@UNGATHERED
def test_a_bucket_that_the_forward_did_not_read_may_be_gathered_later(
    dispatched: bool, handle: Any
) -> None:
    """The hook of one module starts the gather of the next, and the next module waits for it."""
    groups, (used, _) = two_buckets(dispatched, handle)
    check_gathered(groups, weights_of(used), (0, 0), [None, (used * 2).sum()])


@UNGATHERED
def test_a_bucket_that_the_forward_read_was_gathered(dispatched: bool, handle: Any) -> None:
    groups, (used, other) = two_buckets(dispatched, handle)
    weights = weights_of(used, other)
    with torch.no_grad():
        used.copy_(torch.zeros(2))  # the parameters of the other bucket are not written
    with pytest.raises(Refused, match="of 2 buckets of parameters") as refused:
        check_gathered(groups, weights, (0, 0), [None, (used * other).sum()])
    assert refused.value.clause == "version.wrong-epoch"


@UNGATHERED
def test_parameters_that_were_loaded_need_no_gather(dispatched: bool, handle: Any) -> None:
    """Loading a checkpoint writes the whole parameters on every rank."""
    groups, (used, other) = two_buckets(dispatched, handle)
    weights = weights_of(used, other)
    with torch.no_grad():
        other.copy_(torch.zeros(2))
    check_gathered(groups, weights, (0, 0), [None, (used * other).sum()])


def test_one_replica_gathers_nothing(made: dict[str, ModuleType]) -> None:
    """Each rank has the whole parameters after an update."""
    chunk = StandIn(made, {**CASE, "stages": 2}, 0).model[0]
    assert chunk.use_forward_hook
    assert reduced_and_gathered(chunk) == ([], [])


def test_a_reduction_that_did_not_end_is_named_first(made: dict[str, ModuleType]) -> None:
    """Its buckets still say that the step's own forward gathered them."""
    megatron.guard(manner="refuse")
    run = StandIn(made, CASE, 0)
    for _ in range(3):
        run.step()
    run.config.finalize_model_grads_func = lambda *_: None
    with pytest.raises(Refused) as refused:
        run.step()
    assert refused.value.clause == "reduction.in-flight"


def test_a_gather_before_the_update(made: dict[str, ModuleType]) -> None:
    """The hooks then gather nothing, and the next step reads parameters of the last."""
    megatron.guard(manner="refuse")
    run = StandIn(made, CASE, 0)
    run.step()
    update = run.update

    def early() -> None:
        for group in run.model[0].bucket_groups:
            group.param_gather_dispatched = True
        update()

    run.update = early  # type: ignore[method-assign]
    with pytest.raises(Refused, match="gathered between the reduction") as refused:
        run.step()
    assert refused.value.clause == "version.wrong-epoch"
    assert "after `optimizer.step()`" in refused.value.record().remedy


def test_gathers_that_the_update_makes_itself_are_not_looked_at(
    made: dict[str, ModuleType],
) -> None:
    """Without `overlap_param_gather`, `optimizer.step()` gathers, and buckets do not say so."""
    guarded = megatron.guard(manner="refuse")
    run = StandIn(made, {**CASE, "gather": False}, 0)
    for _ in range(3):
        run.step()
    assert guarded.epochs == 3

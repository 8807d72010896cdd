"""
What a graph records of an optimizer: which values may change later, and which changes are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.ranks.baked_optimizer import BakedOptimizer
from qeffect.gpu_runtime.step.optimizer import Optimizer


def optimizer(rate: Any = 1e-3, **options: Any) -> Any:
    """One over two parameters, of which one decays, behind a first step."""
    made: Any = object.__new__(Optimizer)
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    made.adamw = torch.optim.AdamW(groups, lr=rate, fused=True, **options)
    made.named, made._pairs = {"a": weights[0], "b": weights[1]}, []
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    made.adamw.step()
    return made


def first(own: Any) -> Any:
    """The state of the first parameter."""
    return own.adamw.state[own.named["a"]]


def replaced(own: Any) -> None:
    """Another tensor of the same values."""
    first(own)["exp_avg"] = first(own)["exp_avg"].clone()


def moved(own: Any) -> None:
    """The same tensor, elsewhere."""
    first(own)["exp_avg_sq"].data = first(own)["exp_avg_sq"].clone()


def dropped(own: Any) -> None:
    """A parameter without a state."""
    del own.adamw.state[own.named["b"]]


def lost(own: Any) -> None:
    """A part of it that is a number of the host."""
    first(own)["step"] = 1.0


def master(own: Any) -> None:
    """Master weights that there were not."""
    own._pairs = [(own.named["a"], own.named["a"])]


def rate(own: Any) -> None:
    """A learning rate."""
    own.set_rate(2e-3)


def decay(own: Any) -> None:
    """A number of the second group alone."""
    own.adamw.param_groups[1]["weight_decay"] = 0.1


def tensor(own: Any) -> None:
    """A number becomes a tensor of that value."""
    own.adamw.param_groups[0]["eps"] = torch.tensor(own.adamw.param_groups[0]["eps"]).double()


def renamed(own: Any) -> None:
    """A number is of another name."""
    group = own.adamw.param_groups[0]
    own.adamw.param_groups[0] = {"other" if n == "foreach" else n: v for n, v in group.items()}


def added(own: Any) -> None:
    """Another group."""
    own.adamw.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    "happens",
    [replaced, moved, dropped, lost, master, rate, decay, tensor, renamed, added],
    ids=lambda happens: happens.__name__,
)
def test_whatever_has_changed_is_found(happens: Callable[[Any], None]) -> None:
    """At every look from then on, and at none before."""
    own = optimizer()
    baked = BakedOptimizer(own)
    assert [baked.unmoved() for _ in range(2)] == [True, True]
    happens(own)
    assert [baked.unmoved() for _ in range(2)] == [False, False]


def test_a_master_weight_that_moved_is_found() -> None:
    """The graph writes it back into the parameter."""
    own = optimizer()
    own._pairs = [(own.named["a"], own.named["a"])]
    baked = BakedOptimizer(own)
    assert baked.unmoved()
    own.named["a"].data = own.named["a"].detach().clone()
    assert not baked.unmoved()


def test_the_values_of_what_a_graph_reads_may_change() -> None:
    """Steps, moments, and a learning rate that is a tensor."""
    own = optimizer(torch.tensor(1e-3), capturable=True)
    baked = BakedOptimizer(own)
    own.set_rate(5e-4)
    own.adamw.step()
    assert baked.unmoved()


def test_a_number_in_a_list_is_found_where_it_changes_in_place() -> None:
    """The list is the very object that it was."""
    own = optimizer()
    own.adamw.param_groups[1]["betas"] = [0.9, 0.999]  # as a state that was loaded from text has it
    baked = BakedOptimizer(own)
    assert [baked.unmoved() for _ in range(2)] == [True, True]
    own.adamw.param_groups[1]["betas"][0] = 0.8
    assert [baked.unmoved() for _ in range(2)] == [False, False]


@pytest.mark.parametrize("how", ["replaced", "moved", "a number"])
def test_the_place_of_a_learning_rate_may_not(how: str) -> None:
    """Not even if its value stays the same."""
    own = optimizer(torch.tensor(1e-3), capturable=True)
    baked = BakedOptimizer(own)
    group = own.adamw.param_groups[0]
    if how == "replaced":
        group["lr"] = group["lr"].clone()
    elif how == "moved":
        group["lr"].data = group["lr"].clone()
    else:
        group["lr"] = float(group["lr"])
    assert [baked.unmoved() for _ in range(2)] == [False, False]


def test_a_number_that_is_set_to_what_it_was_is_no_change() -> None:
    """As schedules do that set a rate at every step; what comes later is still found."""
    own = optimizer()
    baked = BakedOptimizer(own)
    for _ in range(3):
        own.set_rate(float("0.001"))
        assert baked.unmoved()
    own.set_rate(2e-3)
    assert not baked.unmoved()

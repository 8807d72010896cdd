"""
Tied weights in the runtime: one parameter in two products, one gradient destination, one update.

The native reference is autograd on the tied parameter. A destination that both products accumulate
into holds their gradients in the order of dW. If dW follows dI, this is also the order in which the
full backward adds to `.grad`; for any other order, native's own gradients are added in the order of
dW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import pytest
import torch
from torch import Tensor

from qeffect import Refused
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.workload import Workload, by_index
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.arena import Rule
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import Kind, Order
from qeffect.gpu_runtime.step.plan.slots import WgradVariant

FP32 = torch.float32
EXACT = LayerConfig(hidden=32, ffn=64, heads=2, sequence=16, dtype=FP32)
ACROSS = ((0, "layers.0.fc1.weight"), (1, "layers.0.fc1.weight"))
WITHIN = ((0, "layers.0.proj.weight"), (0, "layers.1.proj.weight"))
STEPS = 3

FOLLOWS = "0F0 1F0 1I0 1W0 0I0 0W0 0F1 1F1 1I1 1W1 0I1 0W1"
#: The other stage first, and dW in another order than dI.
DELAYED = "0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 0W1 1W0 1W1 0W0"
ONE = "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"


def _stages(order: Order, tie: bool = True) -> list[ReferenceStage]:
    """Two stages whose first products of the MLP have one weight, or one that has it twice."""
    domain = ReferenceDomain(4)
    layers = 2 if order.stages == (0,) else 1
    made = [
        ReferenceStage(index, domain, EXACT, num_layers=layers, seed=index)
        for index in order.stages
    ]
    if tie:
        first = made[0].linears[1 if layers == 2 else 2]
        made[-1].tie("layers.1.proj" if layers == 2 else "layers.0.fc1", first)
    return made


def _runtime(
    order: Order, stages: Sequence[ReferenceStage], rule: Rule = "accumulate", **options: object
) -> Runtime:
    group = WITHIN if order.stages == (0,) else ACROSS
    given = {"rule": rule, "dtype": FP32, "tied": (group,), **options}
    return Runtime(stages, order, RuntimeConfig(**given))  # type: ignore[arg-type]


def _guarded(order: Order, rule: Rule) -> dict[str, Tensor]:
    """The parameters after some guarded steps."""
    stages = _stages(order)
    GuardedRun(_runtime(order, stages, rule), Workload(), Optimizer(stages)).run(STEPS)
    return _weights(stages)


def _weights(stages: Sequence[ReferenceStage]) -> dict[str, Tensor]:
    return {
        f"{stage.index}.{name}": parameter.detach().clone()
        for stage in stages
        for name, parameter in parameters(stage).items()
    }


def _full_backward(stage: ReferenceStage, step: int, m: int, outputs: Sequence[Tensor]) -> None:
    torch.autograd.backward(outputs, Workload().output_gradients(stage, step, m))


def _native(order: Order, summed: Callable[[Order, dict], Tensor] | None) -> dict[str, Tensor]:
    """
    The parameters after some steps of the full backward.

    Args:
        order: Order of F and dI.
        summed: Adds up the tied parameter's gradients by (stage, microbatch); None takes `.grad`
            as autograd has accumulated it.
    """
    stages = _stages(order)
    optimizer = Optimizer(stages)
    owners = by_index(stages)
    tied = parameters(stages[0])[(WITHIN if order.stages == (0,) else ACROSS)[0][1]]
    for step in range(STEPS):
        outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        alone: dict[tuple[int, int], Tensor] = {}
        refreshed: set[int] = set()
        for kind, index, m in order.steps:
            stage = owners[index]
            assert isinstance(stage, ReferenceStage)
            if kind is Kind.FORWARD:
                given = [x.requires_grad_() for x in Workload().inputs(stage, step, m)]
                outputs[index, m] = stage.native_forward(given, first=index not in refreshed)
                refreshed.add(index)
            elif kind is Kind.DGRAD:
                before, tied.grad = tied.grad, None if summed else tied.grad
                _full_backward(stage, step, m, outputs.pop((index, m)))
                if summed:
                    assert tied.grad is not None
                    alone[index, m], tied.grad = tied.grad, before
        if summed:
            tied.grad = summed(order, alone)
        optimizer.step(
            {
                stage.index: {
                    name: parameter.grad.clone()
                    for name, parameter in parameters(stage).items()
                    if f"stages.{stage.index}.{name}" in optimizer.named
                    and parameter.grad is not None
                }
                for stage in stages
            }
        )
        for stage in stages:
            for parameter in stage.parameters():
                parameter.grad = None
    return _weights(stages)


def _in_order_of_wgrad(order: Order, found: dict[tuple[int, int], Tensor]) -> Tensor:
    """One sum, in the order of dW."""
    terms = [found[index, m] for kind, index, m in order.steps if kind is Kind.WGRAD]
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _by_microbatch(order: Order, found: dict[tuple[int, int], Tensor]) -> Tensor:
    """A sum for each microbatch, and the sum of those in dI order of the first stage."""
    sums = [
        found[0, m] + found[1, m] if (1, m) in found else found[0, m]
        for m in order.microbatches(0, Kind.DGRAD)
    ]
    return _in_order_of_wgrad(
        Order.parse(" ".join(f"0F{m} 0I{m} 0W{m}" for m in range(len(sums)))),
        {(0, m): term for m, term in enumerate(sums)},
    )


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [] == [name for name in one if not torch.equal(one[name], other[name])]


class TestBits:
    @pytest.mark.parametrize(
        ("text", "rule", "summed"),
        [
            (FOLLOWS, "accumulate", None),
            (FOLLOWS, "accumulate", _in_order_of_wgrad),
            (DELAYED, "accumulate", _in_order_of_wgrad),
            (FOLLOWS, "per_microbatch", _by_microbatch),
            (DELAYED, "per_microbatch", _by_microbatch),
        ],
    )
    def test_two_stages(
        self, text: str, rule: Rule, summed: Callable[[Order, dict], Tensor] | None
    ) -> None:
        """Two stages with one weight have the bits of autograd on the tied parameter, summed in the
        order that the rule states."""
        order = Order.parse(text)

        _same(_native(order, summed), _guarded(order, rule))

    def test_one_stage(self) -> None:
        """One stage that has a weight twice, with a destination each microbatch, has the bits of
        `.grad`: autograd adds the two uses of a microbatch before it adds to the sum as well."""
        order = Order.parse(ONE)

        _same(_native(order, None), _guarded(order, "per_microbatch"))

    def test_one_stage_that_accumulates(self) -> None:
        """With one microbatch the order of the sum is autograd's too."""
        order = Order.parse("0F0 0I0 0W0")

        _same(_native(order, None), _guarded(order, "accumulate"))

    def test_the_order_of_the_sum_shows(self) -> None:
        """What is compared would see another order, and a tie that is missing."""
        order = Order.parse(DELAYED)
        right = _native(order, _in_order_of_wgrad)

        for wrong in (_native(order, None), _native(order, lambda _, found: found[0, 0])):
            assert not torch.equal(right["0.layers.0.fc1.weight"], wrong["0.layers.0.fc1.weight"])


class TestOneDestination:
    def test_it_is_one_memory_and_one_update(self) -> None:
        """Both stages write one buffer, which is summed, reserved and handed on once."""
        order = Order.parse(FOLLOWS)
        stages = _stages(order)
        runtime = _runtime(order, stages)
        mine, theirs = (memory.arena for memory in runtime.memories.values())
        apart = _runtime(order, _stages(order, tie=False), tied=())
        size = 4 * 32 * 64

        assert mine.buffers(0)["layers.0.fc1"] is theirs.buffers(0)["layers.0.fc1"]  # type: ignore[index]
        assert theirs.num_bytes == mine.num_bytes - size
        assert sum(m.arena.num_bytes for m in apart.memories.values()) == 2 * mine.num_bytes
        run = GuardedRun(runtime, Workload(), Optimizer(stages))
        run.step()
        assert "stages.1.layers.0.fc1.weight" not in run.optimizer.named
        assert stages[0].linears[2].weights[0] is stages[1].linears[2].weights[0]

    def test_who_overwrites(self) -> None:
        """The first dW of all overwrites; the other stage's first adds to what is shared."""
        order = Order.parse(DELAYED)
        memories = _runtime(order, _stages(order)).memories

        assert tuple(memories[0].variants) == (WgradVariant(0, True), WgradVariant(0, False))
        assert tuple(memories[1].variants) == (
            WgradVariant(0, False, joins=True),
            WgradVariant(0, True),
        )
        memories = _runtime(order, _stages(order), "per_microbatch").memories
        assert [v.joins for v in memories[0].variants] == [True, False]
        assert [v.joins for v in memories[1].variants] == [False, True]

    @pytest.mark.parametrize("rule", ["accumulate", "per_microbatch"])
    def test_a_dw_that_would_erase_the_other_is_refused(self, rule: Rule) -> None:
        """A plan that lets both stages overwrite is refused before the second one writes."""
        order = Order.parse(FOLLOWS)
        runtime = _runtime(order, _stages(order), rule)
        place = runtime.actions._places[0, 0, 0, 0]
        runtime.actions._places[0, 0, 0, 0] = attrs.evolve(
            place, variant=WgradVariant(0, False), opens=True
        )
        run = GuardedRun(runtime, Workload(), Optimizer([*runtime.stages.values()]))

        with pytest.raises(Refused, match=r"arena\.overwrite.*tied buffer's first write"):
            run.step()


class TestRefused:
    def test_undeclared(self) -> None:
        """One parameter of two stages that is not declared tied is refused, by name."""
        order = Order.parse(FOLLOWS)

        with pytest.raises(Refused, match=r"arena\.overlapping-destinations.*declared tied"):
            _runtime(order, _stages(order), tied=())

    def test_declared_and_two_parameters(self) -> None:
        """What is declared tied is one parameter."""
        order = Order.parse(FOLLOWS)

        with pytest.raises(BackendError, match="are declared tied but are two parameters"):
            _runtime(order, _stages(order, tie=False))
        with pytest.raises(BackendError, match="which is declared tied, does not exist"):
            _runtime(order, _stages(order), tied=(((0, "w"), ACROSS[1]),))

    def test_copies_have_no_destination(self) -> None:
        """The rule `copied` has no place that two could share."""
        order = Order.parse(FOLLOWS)

        with pytest.raises(BackendError, match="rule='accumulate' or 'per_microbatch'"):
            _runtime(order, _stages(order), "copied")

    def test_a_reducer_of_two_stages(self) -> None:
        """The runtime reduces by stage; it refuses a gradient of two stages, with this reason."""
        order = Order.parse(FOLLOWS)
        config = RuntimeConfig(dtype=FP32, tied=(ACROSS,))

        with pytest.raises(BackendError, match="belongs to one stage"):
            Runtime(_stages(order), order, config, reducer=lambda bucket, gradients: None)

    def test_a_reducer_of_one_stage(self) -> None:
        """Within a stage the gradient is reduced once."""
        order = Order.parse(ONE)
        stages = _stages(order)
        told: list[str] = []
        config = RuntimeConfig(dtype=FP32, tied=(WITHIN,))
        runtime = Runtime(
            stages, order, config, reducer=lambda bucket, gradients: told.extend(gradients)
        )

        GuardedRun(runtime, Workload(), Optimizer(stages)).step()

        assert told.count(WITHIN[0][1]) == 1
        assert WITHIN[1][1] not in told

    def test_weights_that_do_not_fit(self) -> None:
        """Two weights of different shapes cannot be tied."""
        stages = _stages(Order.parse(FOLLOWS), tie=False)

        with pytest.raises(BackendError, match="cannot tie the weights of"):
            stages[1].tie("layers.0.fc2", stages[0].linears[2])
        with pytest.raises(BackendError, match="has no unit"):
            partial(stages[1].tie, "layers.0.fc9")(stages[0].linears[2])

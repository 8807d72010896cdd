"""
Grouped dW in the runtime: one product over several microbatches, compared with an oracle and with
separate products.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, Tape, parameters, products
from qeffect.gpu_runtime.backends.reference import ReferenceStage
from qeffect.gpu_runtime.backends.reference.linear import ScaledLinear, deferred_product
from qeffect.gpu_runtime.backends.reference.scaling import QuantizedTensor
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.operators import Session
from qeffect.gpu_runtime.runtime import RuntimeConfig
from qeffect.gpu_runtime.step.graphs import GraphExecutor
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.keys import TapeKey
from qeffect.refusals import Refused
from qeffect.schedule.actions import ScheduleError

from .epoch_oracle import Oracle, state_of
from .helpers import TINY, differing, guarded_run, reference_stages, state_after
from .orders import table_order
from .stand_ins import install

GPIPE = Order.parse("0F0 0F1 0F2 0F3 0I0 0I1 0I2 0I3 0W0 0W1 0W2 0W3")
ONE_BY_ONE = Order.parse("0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2 0F3 0I3 0W3")
MIXED = Order.parse("0F2 0F0 0I0 0F1 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3")
LATE = Order.parse("0F0 0F1 0F2 0F3 0I0 0I1 0I2 0I3 0W2 0W0 0W3 0W1")
ZBV = table_order("ScheduleZBVZeroBubble", 1)
LEFT, RIGHT = torch.tensor(0.3), torch.tensor(0.7)


def grouped_run(order: Order, group: int, **options: Any) -> GuardedRun:
    """A guarded run under epoch scales, whose dW are products of several microbatches."""
    return guarded_run(order.grouped(group), scales="epoch", group=group, **options)


class TestBits:
    @pytest.mark.parametrize("group", [1, 2, 4])
    @pytest.mark.parametrize("order", [GPIPE, MIXED], ids=["gpipe", "mixed"])
    def test_a_group_has_the_bits_of_the_oracle(self, order: Order, group: int) -> None:
        """Parameters, histories and scales after four steps, as an oracle of plain torch."""
        run, workload = grouped_run(order, group, num_layers=2), Workload()
        stage = run.runtime.stages[0]
        oracle = Oracle(parameters(stage), TINY.heads, 4, group)
        run.run(4)
        for step in range(4):

            def batch(of: Oracle, m: int, step: int = step) -> None:
                (x,) = workload.inputs(stage, step, m)
                y = of.forward(x.requires_grad_())
                y.backward(*workload.output_gradients(stage, step, m))

            oracle.step([lambda of, m=m, batch=batch: batch(of, m) for m in range(4)])  # type: ignore[misc]

        held = {n: p.detach() for n, p in parameters(stage).items()}
        assert differing({n: v.detach() for n, v in oracle.named.items()}, held) == []
        assert differing(state_of(oracle), dict(stage.numerical_state())) == []

    @pytest.mark.parametrize("group", [2, 4])
    def test_the_order_changes_no_bit(self, group: int) -> None:
        """Groups do not depend on the order; another group is another recipe in bf16."""
        first, *others = (
            state_after(grouped_run(order, group)) for order in (GPIPE, ONE_BY_ONE, MIXED)
        )
        assert [differing(first, other) for other in others] == [[], []]
        alone = state_after(grouped_run(GPIPE, 1))
        assert len(differing(first, alone)) > 20

    def test_one_group_of_all_needs_no_order_of_dw(self) -> None:
        """One product adds its microbatches in ascending order, whatever the order of the table."""
        assert (
            differing(state_after(grouped_run(GPIPE, 4)), state_after(grouped_run(LATE, 4))) == []
        )
        with pytest.raises(BackendError, match="runs its dW in the order 2, 0, 3, 1"):
            grouped_run(LATE, 1)

    def test_fp32_is_no_further_from_the_exact_sum(self) -> None:
        """The distance from a product in fp64, of one product and of one for each microbatch."""
        draw = torch.Generator().manual_seed(1)
        parts = [
            tuple(
                QuantizedTensor((torch.randn(512, 64, generator=draw) * 9.0).to(dtype), scale)
                for dtype, scale in ((torch.float8_e5m2, LEFT), (torch.float8_e4m3fn, RIGHT))
            )
            for _ in range(4)
        ]
        exact = sum(_exact(*part) for part in parts)
        each = deferred_product(*parts[0])
        for part in parts[1:]:
            each = each + deferred_product(*part)
        one = deferred_product(*ScaledLinear.join(parts))  # type: ignore[arg-type]
        apart = [float((value.double() - exact).norm()) for value in (one, each)]
        assert 0.0 < apart[0] <= apart[1] * 1.1

    def test_stages_that_feed_each_other(self) -> None:
        """Two stages of one process, in ZB-V: their groups of two have the bits of GPipe's."""
        order = Order.parse("0F0 0F1 1F0 1F1 1I0 1I1 0I0 0I1 1W0 1W1 0W0 0W1")
        late = Order.parse("0F0 1F0 1I0 0I0 0W0 0F1 1W0 1F1 1I1 0I1 1W1 0W1")
        runs = [grouped_run(one, 2) for one in (order, late)]
        assert differing(*(state_after(run) for run in runs)) == []


class TestGraphs:
    @pytest.mark.parametrize("group", [2, 4])
    def test_replays_have_the_bits_of_eager(
        self, group: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One graph per group, in a pool that no slot has; each replay reads its group's slots."""
        eager = state_after(grouped_run(ZBV, group))
        made = install(monkeypatch)
        run = grouped_run(ZBV, group, captured=True)
        executor = run.runtime.executor
        assert isinstance(executor, GraphExecutor)
        stages = len(ZBV.stages)

        assert differing(eager, state_after(run)) == []
        assert len(executor.wgrads) == stages * ZBV.num_microbatches // group
        of_slots = {
            graph.pool  # type: ignore[attr-defined]
            for slot in executor.slots.values()
            for graph in (slot.forward, slot.dgrad)
        }
        of_groups: list[Any] = [w.graph for w in executor.wgrads.values()]
        assert of_slots.isdisjoint(graph.pool for graph in of_groups)
        assert len(made) == len(executor.wgrads) + 2 * len(executor.slots) + stages
        assert [len(product.slots) for product in executor.wgrads] == [group] * len(of_groups)

    def test_the_device_counts_one_product(self) -> None:
        """The device counts a group's product once, and the commit expects exactly that."""
        run = grouped_run(GPIPE, 4, counts="commit")
        run.run(2)
        assert run.runtime.epoch == 2

    def test_a_product_that_the_device_left_out(self) -> None:
        """The commit refuses a step whose last product did not run."""
        run = grouped_run(GPIPE, 2, counts="commit")
        runtime, executor = run.runtime, run.runtime.executor
        ran: list[int] = []
        wgrad = executor.wgrad

        def once(memory: Any, slot: Any, variant: Any, others: Any = ()) -> tuple[str, ...]:
            ran.append(slot.index)
            return memory.all_matrices if len(ran) == 2 else wgrad(memory, slot, variant, others)  # type: ignore[no-any-return]

        executor.wgrad = once  # type: ignore[method-assign]
        with pytest.raises(Refused, match=r"^epoch\.device-"):
            run.step()
        assert runtime.epoch == 0
        runtime.rebuild()
        run.run(2)
        assert runtime.epoch == 2


class TestFailure:
    @pytest.mark.parametrize("captured", [False, True])
    def test_a_product_that_fails_loses_every_tape(
        self, captured: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All tapes of the group are aborted; after a rebuild the run has the same bits."""
        whole = state_after(grouped_run(GPIPE, 4))
        if captured:
            install(monkeypatch)
        run = grouped_run(GPIPE, 4, captured=captured)
        run.run(2)
        runtime, executor = run.runtime, run.runtime.executor
        wgrad = executor.wgrad

        def fails(*_: Any) -> tuple[str, ...]:
            raise RuntimeError("the device failed")

        executor.wgrad = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="the device failed"):
            run.step()
        assert runtime.contract.live() == {}
        assert [slot.tape.work for slot in runtime.memories[0].table] == [[], [], [], []]
        executor.wgrad = wgrad  # type: ignore[method-assign]
        runtime.rebuild()
        assert differing(whole, state_after(run, 2)) == []

    def test_a_group_that_covers_a_matrix_twice(self) -> None:
        """Evidence of the product is evidence of each tape."""
        run = grouped_run(GPIPE, 2)
        executor = run.runtime.executor
        wgrad = executor.wgrad

        def twice(memory: Any, *given: Any) -> tuple[str, ...]:
            covered: tuple[str, ...] = wgrad(memory, *given)
            return (*covered, covered[0])

        executor.wgrad = twice  # type: ignore[method-assign]
        with pytest.raises(Refused, match=r"^ownership\.matrix-coverage"):
            run.step()
        assert run.runtime.contract.live() == {}


class TestRefused:
    def test_scales_that_move_in_between(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The assembly refuses them; were it wrong about a backend, the contract would."""
        order = GPIPE.grouped(2)
        with pytest.raises(
            BackendError, match=r"group is 2.*make the stage's domain with scales='epoch'"
        ):
            guarded_run(order, group=2)
        monkeypatch.setattr(ReferenceStage, "groups_wgrads", True)
        with pytest.raises(Refused, match=r"^order\.unequal-scales"):
            guarded_run(order, group=2).step()

    def test_without_the_guard_the_bits_are_wrong(self) -> None:
        """A product of operands with two scales takes the first scale for both."""
        _, tapes = _retained(2)
        work, other = tapes[0].work[0], tapes[1].work[0]
        wanted, given = other.operands
        moved = attrs.evolve(wanted, scale_inv=wanted.scale_inv * 2.0)
        assert work.join is not None
        right = _exact(*work.operands) + _exact(moved, given)
        product = deferred_product(*work.join([work.operands, (moved, given)]))
        assert float((product.double() - right).norm()) > 0.1 * float(right.norm())

    @pytest.mark.parametrize("group", [0, -1, True, 2.0, "2"])
    def test_what_is_no_group(self, group: Any) -> None:
        """Only a positive integer is."""
        with pytest.raises(BackendError, match=r"group is .*; expected a positive integer"):
            RuntimeConfig(group=group)

    @pytest.mark.parametrize("rule", ["per_microbatch", "copied"])
    def test_several_destinations(self, rule: Any) -> None:
        """One product writes one destination."""
        with pytest.raises(BackendError, match="writes one destination; set rule='accumulate'"):
            RuntimeConfig(group=2, rule=rule)

    def test_a_group_that_does_not_divide(self) -> None:
        """Every group is whole."""
        with pytest.raises(ScheduleError, match="expected a divisor of the 4 microbatches"):
            GPIPE.grouped(3)
        with pytest.raises(BackendError, match="expected a divisor of the 4 microbatches"):
            guarded_run(GPIPE, scales="epoch", group=3)

    def test_an_order_whose_groups_are_apart(self) -> None:
        """The message names the group, the order's actions, and what makes a right order."""
        with pytest.raises(BackendError, match=r"\[0, 1\] of stage 0.*found 0W0 0F1.*Order.group"):
            guarded_run(ONE_BY_ONE, scales="epoch", group=2)

    def test_a_dw_without_its_group(self) -> None:
        """A call with other tapes than the group's changes nothing."""
        run = grouped_run(GPIPE, 2)
        for step in run.runtime.order.steps[:8]:
            run.advance(step)
        actions, keys = run.runtime.actions, [run.runtime.key(0, m) for m in range(4)]
        pair = [(key, run.ref(key)) for key in keys]
        with pytest.raises(BackendError, match=r"one dW of microbatches \[0, 1\].*found \[0\]"):
            actions.wgrad(*pair[0])
        with pytest.raises(BackendError, match=r"found \[0, 2\]"):
            actions.wgrad(*pair[0], group=[pair[2]])
        with pytest.raises(BackendError, match="microbatch 1 has no dW of its own"):
            actions.wgrad(*pair[1])
        assert len(run.runtime.contract.live()) == 4
        actions.wgrad(*pair[0], group=[pair[1]])
        assert sorted(key.microbatch for key in run.runtime.contract.live()) == [2, 3]

    def test_a_group_that_can_be_read_once(self) -> None:
        """A generator is a group like any other."""
        run = grouped_run(GPIPE, 2)
        for step in run.runtime.order.steps[:8]:
            run.advance(step)
        first, second = (run.runtime.key(0, m) for m in range(2))
        pairs = ((key, run.ref(key)) for key in [second])
        run.runtime.actions.wgrad(first, run.ref(first), group=pairs)  # type: ignore[arg-type]
        assert sorted(key.microbatch for key in run.runtime.contract.live()) == [2, 3]

    @pytest.mark.parametrize("group", [1, 2])
    @pytest.mark.parametrize("wrong", [None, 5, "ab", ["ab"], [()], [(1, 2)]], ids=str)
    def test_no_pairs(self, group: int, wrong: Any) -> None:
        """The message says what a member is; nothing has changed."""
        run = grouped_run(GPIPE, group)
        for step in run.runtime.order.steps[:8]:
            run.advance(step)
        first = run.runtime.key(0, 0)
        for given in (wrong, [first], [(run.ref(first), first)]):
            with pytest.raises(TypeError, match=r"wgrad: expected a group of pairs \(key, ref\)"):
                run.runtime.actions.wgrad(first, run.ref(first), group=given)
        assert len(run.runtime.contract.live()) == 4

    def test_a_tape_of_another_stage(self) -> None:
        """The message names it."""
        order = Order.parse("0F0 0F1 1F0 1F1 1I0 1I1 0I0 0I1 1W0 1W1 0W0 0W1")
        run = grouped_run(order, 2)
        for step in order.steps[:8]:
            run.advance(step)
        own, other = run.runtime.key(0, 0), run.runtime.key(1, 1)
        with pytest.raises(BackendError, match=r"found .*microbatch 1 of stage 1"):
            run.runtime.actions.wgrad(own, run.ref(own), group=[(other, run.ref(other))])

    def test_operators(self) -> None:
        """The operator of dW takes one tape."""
        with pytest.raises(BackendError, match="the operator of dW takes one microbatch"):
            Session(grouped_run(GPIPE, 2).runtime)

    def test_a_reference_of_an_earlier_epoch(self) -> None:
        """The contract checks every member before anything runs."""
        run = grouped_run(GPIPE, 2)
        run.step()
        old = run.ref(TapeKey(0, 0, 1))
        run.begin()
        for step in run.runtime.order.steps[:8]:
            run.advance(step)
        first, second = (run.runtime.key(0, m) for m in range(2))
        with pytest.raises(Refused, match=r"^ownership\.stale-reference"):
            run.runtime.actions.wgrad(first, run.ref(first), group=[(second, old)])
        run.runtime.actions.wgrad(first, run.ref(first), group=[(second, run.ref(second))])

    def test_a_short_walk(self) -> None:
        """A group takes all its microbatches."""
        run = grouped_run(GPIPE, 2)
        with pytest.raises(BackendError, match="shorten_walk: group is 2; set group=1"):
            run.runtime.shorten_walk(2)

    def test_tapes_of_other_stages(self) -> None:
        """A product joins the work of one stage."""
        _, (tape, other) = _retained(2)
        other.work.pop()
        with pytest.raises(BackendError, match="in slot 1, but"):
            list(products(tape, [other]))


def _retained(tapes: int) -> tuple[ReferenceStage, list[Tape]]:
    """A stage with the work of several microbatches, after their dI."""
    (stage,) = reference_stages(GPIPE, 4, TINY, scales="epoch")
    stage.refresh_cache()
    made = [stage.new_tape(slot) for slot in range(tapes)]
    workload = Workload()
    for m, tape in enumerate(made):
        stage.forward(tape, [x.requires_grad_() for x in workload.inputs(stage, 0, m)])
        stage.dgrad(tape, workload.output_gradients(stage, 0, m))
    return stage, made


def _exact(wanted: Any, given: Any) -> Tensor:
    """A weight gradient in fp64."""
    left, right = (x.data.float().double() * x.scale_inv.double() for x in (wanted, given))
    return left.t() @ right

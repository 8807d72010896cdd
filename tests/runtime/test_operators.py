"""
The guarded actions as torch operators: torch checks them, the contract kernel refuses misuse, and
the bits are the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.operators import Session
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, same_bits
from qeffect.gpu_runtime.step.plan.order import Kind, Order
from qeffect.refusals import Refused

from .helpers import guarded_run
from .orders import random_order

OPS: Any = torch.ops.qeffect
ORDER = Order.parse("0F0 1F0 1I0 0F1 0I0 1W0 1F1 0W0 0I1 1I1 0W1 1W1")


def session_at(cell: str, *, rehearsal: bool) -> tuple[Session, torch.Tensor, GuardedRun]:
    """A session that has run an epoch up to an action, with its token."""
    run = guarded_run(ORDER)
    session = Session(run.runtime, rehearsal=rehearsal)
    token = session.token()
    stop = Order.parse(cell).steps[0] if cell else None
    for step in ORDER.steps:
        if step == stop:
            break
        call(session, token, run, *step)
    return session, token, run


def call(
    session: Session, token: torch.Tensor, run: GuardedRun, kind: Kind, stage: int, m: int
) -> None:
    """One action through its operator, the refresh before a stage's first F included."""
    place = session.handle, stage
    if kind is Kind.FORWARD:
        if m == run.runtime.order.microbatches(stage, kind)[0]:
            OPS.refresh(token, session.sums(stage), *place)
        OPS.forward.n1(token, inputs_of(run, stage, m), *place, m)
    elif kind is Kind.DGRAD:
        OPS.dgrad.n1(token, session.sums(stage), gradients_of(run, stage, m), *place, m)
    else:
        OPS.wgrad(token, session.destinations(stage, m), *place, m)


def inputs_of(run: GuardedRun, stage: int, m: int) -> list[torch.Tensor]:
    """What F takes."""
    return list(Workload().inputs(run.runtime.stages[stage], run.runtime.epoch, m))


def gradients_of(run: GuardedRun, stage: int, m: int) -> list[torch.Tensor]:
    """What dI takes."""
    return list(Workload().output_gradients(run.runtime.stages[stage], run.runtime.epoch, m))


class TestOpcheck:
    """Schema, aliasing, fake implementation and functionalization, as torch checks them."""

    def test_opcheck_passes_a_refresh(self) -> None:
        """The refresh of a stage before its first F."""
        session, token, _ = session_at("0F0", rehearsal=True)

        results = opcheck(OPS.refresh.default, (token, session.sums(0), session.handle, 0))

        assert {"SUCCESS"} == set(results.values())
        assert 4 == len(results)

    def test_opcheck_passes_a_forward(self) -> None:
        """F in the middle of an epoch."""
        session, token, run = session_at("0F1", rehearsal=True)

        results = opcheck(OPS.forward.n1, (token, inputs_of(run, 0, 1), session.handle, 0, 1))

        assert {"SUCCESS"} == set(results.values())

    def test_opcheck_passes_a_dgrad(self) -> None:
        """dI of a retained tape."""
        session, token, run = session_at("0I1", rehearsal=True)

        results = opcheck(
            OPS.dgrad.n1,
            (token, session.sums(0), gradients_of(run, 0, 1), session.handle, 0, 1),
        )

        assert {"SUCCESS"} == set(results.values())

    def test_opcheck_passes_a_wgrad(self) -> None:
        """dW into its destination; it returns nothing but the token."""
        session, token, _ = session_at("1W0", rehearsal=True)

        results = opcheck(
            OPS.wgrad.default, (token, session.destinations(1, 0), session.handle, 1, 0)
        )

        assert {"SUCCESS"} == set(results.values())

    def test_rehearsal_changes_nothing(self) -> None:
        """A rehearsed operator gives the same bits each time, and the epoch ends as it would."""
        session, token, run = session_at("0I1", rehearsal=True)
        for _ in range(2):
            OPS.dgrad.n1(
                token.clone(), session.sums(0), gradients_of(run, 0, 1), session.handle, 0, 1
            )
        for step in ORDER.steps[ORDER.steps.index(Order.parse("0I1").steps[0]) :]:
            call(session, token, run, *step)
        session.finish(run.optimizer)

        plain = guarded_run(ORDER)
        plain.step()

        assert_same_state(plain, run)


class TestGuards:
    """An ordinary session refuses what a rehearsal allows."""

    @pytest.mark.parametrize("kind", ["forward", "dgrad"])
    def test_an_effect_twice(self, kind: str) -> None:
        """The same token twice is refused: the effect has happened."""
        cell = {"forward": "0F1", "dgrad": "0I1"}[kind]
        session, token, run = session_at(cell, rehearsal=False)
        values = inputs_of if kind == "forward" else gradients_of
        old = token.clone()
        more = [] if kind == "forward" else [session.sums(0)]
        getattr(OPS, kind).n1(token, *more, values(run, 0, 1), session.handle, 0, 1)

        with pytest.raises(Refused) as caught:
            getattr(OPS, kind).n1(old, *more, values(run, 0, 1), session.handle, 0, 1)

        assert caught.value.relation in ("order", "ownership", "arena")

    def test_a_skipped_effect(self) -> None:
        """A token from ahead is refused by its number alone."""
        session, token, run = session_at("0F1", rehearsal=False)
        token[0] += 1

        with pytest.raises(Refused) as caught:
            OPS.forward.n1(token, inputs_of(run, 0, 1), session.handle, 0, 1)

        assert "order.token" == caught.value.clause

    def test_wgrad_is_no_effect(self) -> None:
        """dW leaves the token's first number alone."""
        session, token, _ = session_at("1W0", rehearsal=False)
        before = token.clone()

        OPS.wgrad(token, session.destinations(1, 0), session.handle, 1, 0)

        assert [0, 1] == (token - before).tolist()

    def test_a_second_wgrad_is_refused_by_ownership(self) -> None:
        """dW twice is refused by ownership: its reference died."""
        session, token, _ = session_at("1W0", rehearsal=False)
        OPS.wgrad(token, session.destinations(1, 0), session.handle, 1, 0)

        with pytest.raises(Refused) as caught:
            OPS.wgrad(token, session.destinations(1, 0), session.handle, 1, 0)

        assert "ownership.stale-reference" == caught.value.clause

    def test_an_unknown_session_is_a_clear_line(self) -> None:
        """An unknown session is a clear line."""
        with pytest.raises(BackendError, match="keep the Session alive"):
            OPS.refresh(torch.zeros(2, dtype=torch.int64), [], -5, 0)

    def test_a_dgrad_without_its_forward_is_a_clear_line(self) -> None:
        """dI of a microbatch that was not forwarded is a clear line."""
        session, token, run = session_at("0F1", rehearsal=False)

        with pytest.raises(BackendError, match="run its forward first"):
            OPS.dgrad.n1(token, session.sums(0), gradients_of(run, 0, 1), session.handle, 0, 1)

    def test_a_wrong_overload_names_the_right_one(self) -> None:
        """An overload with another number of results names the right one, and nothing runs."""
        session, token, run = session_at("0F1", rehearsal=False)
        before = run.runtime.contract.snapshot()

        with pytest.raises(BackendError, match="call overload n1"):
            OPS.forward.n2(token, inputs_of(run, 0, 1), session.handle, 0, 1)

        assert before == run.runtime.contract.snapshot()


class TestGradientMemory:
    """The arena and the sums are declared as mutated, and a declaration must be true."""

    @pytest.mark.parametrize(
        ("operator", "argument"),
        [
            ("refresh.default", "sums"),
            ("dgrad.n1", "sums"),
            ("wgrad.default", "arena"),
        ],
    )
    def test_is_declared(self, operator: str, argument: str) -> None:
        """The schema says that the operator writes the token and its gradient memory, no more."""
        name, overload = operator.split(".")
        schema = getattr(getattr(OPS, name), overload)._schema

        written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}

        assert {"token", argument} == written

    @pytest.mark.parametrize("rule", ["per_microbatch", "accumulate", "copied"])
    def test_is_what_the_action_writes(self, rule: Any) -> None:
        """dW changes the tensors that it is given: the configured destinations themselves."""
        run = guarded_run(ORDER, rule=rule)
        session = Session(run.runtime)
        token = session.token()
        for step in ORDER.steps[: ORDER.steps.index(Order.parse("1W0").steps[0])]:
            call(session, token, run, *step)
        arena = session.destinations(1, 0)
        before = [tensor._version for tensor in arena]
        assert not any(tensor.any() for tensor in arena)

        OPS.wgrad(token, arena, session.handle, 1, 0)

        units = run.runtime.stages[1].units if rule != "copied" else ()
        assert len(units) == len(arena)
        assert all(tensor.any() for tensor in arena)
        assert all(old < tensor._version for old, tensor in zip(before, arena, strict=True))

    def test_a_copy_is_brought_up_to_date(self) -> None:
        """A functionalizing compiler passes clones: they hold afterwards what the arena holds."""
        session, token, _ = session_at("1W0", rehearsal=False)
        arena = session.destinations(1, 0)
        copies = [tensor.clone() for tensor in arena]

        OPS.wgrad(token, copies, session.handle, 1, 0)

        assert all(same_bits(a, b) for a, b in zip(arena, copies, strict=True))
        assert all(tensor.any() for tensor in arena)

    def test_other_memory(self) -> None:
        """Memory that is not the microbatch's is refused before anything runs."""
        session, token, run = session_at("1W0", rehearsal=False)
        before = run.runtime.contract.snapshot()

        with pytest.raises(BackendError, match=r"pass session.destinations\(1, 0\)"):
            OPS.wgrad(token, session.sums(1), session.handle, 1, 0)

        assert before == run.runtime.contract.snapshot()

    def test_a_compiled_reader_comes_after(self) -> None:
        """What a compiled function reads of the arena after dW is what dW wrote."""
        session, token, run = session_at("1W0", rehearsal=False)
        handle = session.handle

        def write(token: torch.Tensor, arena: list[torch.Tensor]) -> torch.Tensor:
            before = arena[0].float().abs().sum()
            OPS.wgrad(token, arena, handle, 1, 0)
            return torch.stack([before, arena[0].float().abs().sum()])

        arena = session.destinations(1, 0)
        compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
        before, after = compiled(token, arena).tolist()

        assert before == 0.0 < after
        assert after == float(arena[0].float().abs().sum())
        assert [int(t) for t in session.token()] == token.tolist()
        assert run.runtime.memories[1].arena.destinations(0)


class TestSameBits:
    @pytest.mark.parametrize("seed", range(3))
    def test_operators_and_methods(self, seed: int) -> None:
        """Training through the operators and through the methods gives the same bits."""
        order = random_order(seed)
        plain, run = guarded_run(order), guarded_run(order, readers=bool(seed % 2))
        session = Session(run.runtime)
        for _ in range(2):
            token = session.token()
            for step in order.steps:
                call(session, token, run, *step)
            session.finish(run.optimizer)
        plain.run(2)

        assert_same_state(plain, run)

    def test_a_compiled_function_keeps_the_order_of_operators(self) -> None:
        """A compiled function of the operators keeps their order: the token is mutated."""
        run, plain = guarded_run(ORDER), guarded_run(ORDER)
        session = Session(run.runtime)
        x, dy = inputs_of(run, 0, 0), gradients_of(run, 0, 0)
        handle, sums = session.handle, session.sums(0)

        def start(token: torch.Tensor) -> list[torch.Tensor]:
            OPS.refresh(token, sums, handle, 0)
            return [OPS.forward.n1(token, x, handle, 0, 0)]

        token = session.token()
        (compiled,) = torch.compile(start, backend="aot_eager", fullgraph=True)(token)

        plain.runtime.actions.refresh(0)
        key = plain.runtime.key(0, 0)
        ref = plain.runtime.actions.forward(key, x)
        (expected,) = plain.runtime.actions.outputs(key, ref)
        assert same_bits(expected, compiled)
        assert [1, 2] == token.tolist()
        assert dy[0].shape == expected.shape


def assert_same_state(a: GuardedRun, b: GuardedRun) -> None:
    """Two runs end with the same parameters and numerical state."""
    for name, tensor in live_state(a.runtime.domain).items():
        assert same_bits(tensor, live_state(b.runtime.domain)[name]), name
    for index, stage in a.runtime.stages.items():
        other = parameters(b.runtime.stages[index])
        for name, parameter in parameters(stage).items():
            assert same_bits(parameter, other[name]), name

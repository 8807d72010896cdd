"""The guarded actions as torch operators on CUDA tensors, eager and over captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.operators import Session
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.refusals import Refused

from ..runtime.test_operators import ORDER, assert_same_state, call, gradients_of, inputs_of
from .helpers import given, guarded_run

OPS: Any = torch.ops.qeffect
CASE = given(" ".join(map(str, ORDER.steps)), steps=1)


def session_at(
    cell: str, *, captured: bool, rehearsal: bool = True
) -> tuple[Session, torch.Tensor, GuardedRun]:
    """A session that has run an epoch up to an action, with its token."""
    run = guarded_run(CASE, captured=captured)
    session = Session(run.runtime, rehearsal=rehearsal)
    token = session.token()
    stop = Order.parse(cell).steps[0]
    for step in ORDER.steps:
        if step == stop:
            break
        call(session, token, run, *step)
    return session, token, run


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
class TestOpcheck:
    """Schema, aliasing, fake implementation and functionalization, as torch checks them."""

    def test_refresh(self, captured: bool) -> None:
        """The refresh of a stage before its first F."""
        session, token, _ = session_at("0F0", captured=captured)

        results = opcheck(OPS.refresh.default, (token, session.sums(0), session.handle, 0))

        assert {"SUCCESS"} == set(results.values())

    def test_forward(self, captured: bool) -> None:
        """F in the middle of an epoch."""
        session, token, run = session_at("0F1", captured=captured)

        results = opcheck(OPS.forward.n1, (token, inputs_of(run, 0, 1), session.handle, 0, 1))

        assert {"SUCCESS"} == set(results.values())

    def test_dgrad(self, captured: bool) -> None:
        """dI of a retained tape."""
        session, token, run = session_at("0I1", captured=captured)

        results = opcheck(
            OPS.dgrad.n1,
            (token, session.sums(0), gradients_of(run, 0, 1), session.handle, 0, 1),
        )

        assert {"SUCCESS"} == set(results.values())

    def test_wgrad(self, captured: bool) -> None:
        """dW into its destination."""
        session, token, _ = session_at("1W0", captured=captured)

        results = opcheck(
            OPS.wgrad.default, (token, session.destinations(1, 0), session.handle, 1, 0)
        )

        assert {"SUCCESS"} == set(results.values())


class TestGuards:
    def test_an_effect_twice(self) -> None:
        """An ordinary session refuses the same token twice."""
        session, token, run = session_at("0F1", captured=True, rehearsal=False)
        old = token.clone()
        OPS.forward.n1(token, inputs_of(run, 0, 1), session.handle, 0, 1)

        with pytest.raises(Refused) as caught:
            OPS.forward.n1(old, inputs_of(run, 0, 1), session.handle, 0, 1)

        assert caught.value.relation in ("order", "ownership", "arena")

    def test_operators_and_methods(self) -> None:
        """Training through the operators and through the methods gives the same bits."""
        run = guarded_run(CASE)
        session = Session(run.runtime)
        for _ in range(2):
            token = session.token()
            for step in ORDER.steps:
                call(session, token, run, *step)
            session.finish(run.optimizer)
        # One runtime at a time: making the next forgets the process's registered modules.
        plain = guarded_run(CASE)
        plain.run(2)

        assert_same_state(plain, run)

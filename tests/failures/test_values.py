"""
What the contract does not see: values that are wrong although every action happens at the right
time.

Two linear stages train under the contract in plain torch, once with the reported fault and once
without. Both runs ask the contract the same calls, one for one, and all calls are accepted; the
gradients differ. `qeffect failures` therefore has no re-enactment of most of these faults, and says
why. In two faults only a factor is wrong: these faults are accepted too, unless dI reports the
factor.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect import Contract, Refused, StageConfig, TapeKey, TapeRef
from qeffect.verification.failures.catalogue import FAILURES

MICROBATCHES = 2
#: Failures shown here, by the name that `qeffect failures` knows them by.
SHOWN = ("transformer-engine-545", "megatron-lm-6565")
#: Those that are refused if dI reports by which factor the gradient of its microbatch is weighted.
WEIGHED = ("deepspeed-8154", "torchtitan-4194")
#: The same of numbers that were saved, or not restored.
RESUMED = ("megatron-bridge-1730", "megatron-lm-3062")
Calls = list[tuple[str, tuple[Any, ...]]]


def batch() -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of the microbatches, and the weights of the two stages."""
    torch.manual_seed(11)
    inputs = [torch.randn(4, 3, dtype=torch.float64) for _ in range(MICROBATCHES)]
    weights = [torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)]
    return inputs, weights


def expected() -> list[Tensor]:
    """Gradients of the loss, the mean of the microbatches' sums, by autograd."""
    inputs, weights = batch()
    leaves = [weight.clone().requires_grad_() for weight in weights]
    loss = torch.stack([(x @ leaves[0] @ leaves[1]).sum() for x in inputs]).sum() / MICROBATCHES
    return list(torch.autograd.grad(loss, leaves))


class Run:
    """One optimizer step of two linear stages, guarded by the contract."""

    def __init__(self, fault: str | None, *, reports: bool = False) -> None:
        self.fault = fault
        told: dict[str, Any] = {"weights_sum": (1, 1)} if reports else {}
        self.calls: Calls = []
        self.contract = Contract(
            [
                StageConfig(s, microbatches=MICROBATCHES, slots=2, matrices=("w",), **told)
                for s in (0, 1)
            ],
            observer=self._note,
        )
        self.inputs, self.weights = batch()
        self.gradients = [torch.empty_like(weight) for weight in self.weights]
        self.refs: dict[tuple[int, int], TapeRef] = {}

    def _note(self, transition: str, arguments: tuple[Any, ...], result: Any) -> None:
        plain = (
            (argument.slot, argument.generation) if isinstance(argument, TapeRef) else argument
            for argument in arguments
        )
        self.calls.append((transition, tuple(plain)))

    def forward(self, stage: int, microbatch: int, x: Tensor) -> Tensor:
        """F, guarded."""
        with self.contract.forward(TapeKey(0, stage, microbatch)) as action:
            y = x @ self.weights[stage]
        self.refs[stage, microbatch] = action.ref
        self.contract.wait()
        return y

    def backward(self, stage: int, microbatch: int, x: Tensor, gradient: Tensor) -> Tensor:
        """dI, then dW into the one accumulating buffer of the stage, both guarded."""
        key, ref = TapeKey(0, stage, microbatch), self.refs[stage, microbatch]
        # The loss is normalised where its backward begins, unless that had already run.
        divisors = [1 if self.fault == "torchtitan-4194" else MICROBATCHES]
        if stage == 1:
            gradient = gradient / divisors[0]
        elif self.fault == "deepspeed-8154":
            divisors.append(MICROBATCHES)  # the hook that every stage has, not the last alone
            gradient = gradient / MICROBATCHES
        self.contract.bind(key)
        with self.contract.dgrad(key, ref) as dgrad:
            out = gradient @ self.weights[stage].T
            dgrad.queued = ("w",)
            # Every gradient is over one number, MICROBATCHES squared.
            dgrad.weight = MICROBATCHES**2 // prod(divisors), MICROBATCHES**2
        self.contract.wait()
        first = self.contract.first_writer(key)
        with self.contract.wgrad(key, ref, first=first) as wgrad:
            product = x.T @ gradient
            if first:
                self.gradients[stage].copy_(product)
            else:
                self.gradients[stage].add_(product)
            wgrad.covered = ("w",)
        self.contract.wait()
        return out

    def step(self) -> list[Tensor]:
        """A whole step up to the optimizer's update; return the gradients that it would use."""
        for stage in (0, 1):
            # The refresh comes directly before the stage's first F.
            with self.contract.refresh(stage):
                pass
            if stage == 0:
                hidden = [self.forward(0, m, x) for m, x in enumerate(self.inputs)]
        outputs = [self.forward(1, m, h) for m, h in enumerate(hidden)]
        for m, y in enumerate(outputs):
            gradient = torch.ones_like(y)
            self.backward(0, m, self.inputs[m], self.backward(1, m, hidden[m], gradient))
        if self.fault in ("transformer-engine-545", "megatron-lm-6565"):
            # Autograd wants a gradient though dW wrote the real one; its owner adds it.
            placeholder = torch.full_like(self.gradients[1], 0.25)  # what the memory held before
        else:
            placeholder = torch.zeros_like(self.gradients[1])
        self.gradients[1].add_(placeholder)
        for stage in (0, 1):
            self.contract.finalize(stage)
        self.contract.commit_epoch()
        return self.gradients


def test_the_mended_run_has_the_right_numbers() -> None:
    """The instrument: without a fault the step's gradients are those of autograd."""
    for expect, got in zip(expected(), Run(None).step(), strict=True):
        torch.testing.assert_close(got, expect)


@pytest.mark.parametrize("fault", [*SHOWN, *WEIGHED])
def test_wrong_numbers_are_accepted(fault: str) -> None:
    """The faulty run asks the very calls of the mended one, commits, and has other gradients."""
    mended, faulty = Run(None), Run(fault)
    right, wrong = mended.step(), faulty.step()

    assert mended.calls == faulty.calls
    assert "commit_update" == faulty.calls[-1][0]
    assert not all(torch.allclose(a, b) for a, b in zip(right, wrong, strict=True))


@pytest.mark.parametrize("fault", WEIGHED)
def test_a_wrong_factor_is_refused_if_it_is_reported(fault: str) -> None:
    """With the factors reported, the mended step commits and the faulty one never updates."""
    mended, faulty = Run(None, reports=True), Run(fault, reports=True)
    for expect, got in zip(expected(), mended.step(), strict=True):
        torch.testing.assert_close(got, expect)

    with pytest.raises(Refused) as refused:
        faulty.step()

    assert ("epoch.wrong-weights", "check_update") == (
        refused.value.clause,
        refused.value.transition,
    )
    assert "finalize" == faulty.calls[-1][0]


def resumed(fault: str | None) -> tuple[Calls, Tensor]:
    """
    Train a step, save, begin again from the checkpoint; return the calls since, and F's output.

    F quantizes its input with a scale that it has from the largest values of earlier inputs, as
    delayed scaling does. What is restored of those is the caller's affair.
    """
    first = Run(None)
    first.step()
    first.contract.drain()
    checkpoint = first.contract.checkpoint()
    own, other = [4.0], [0.5]  # of this layer, and of another one
    history = {None: own, "megatron-bridge-1730": [], "megatron-lm-3062": other}[fault]

    again = Run(None)
    again.contract.restore(checkpoint)
    again.calls.clear()
    scale = 448 / max(history, default=1.0)
    x = (again.inputs[0] * scale).round() / scale
    key = TapeKey(again.contract.epoch, 0, 0)
    with again.contract.refresh(0):
        pass
    with again.contract.forward(key):
        y = x.clamp(-448 / scale, 448 / scale) @ again.weights[0]
    return again.calls, y


@pytest.mark.parametrize("fault", RESUMED)
def test_numbers_that_were_not_restored_are_accepted(fault: str) -> None:
    """With another history, or none, the contract is asked the same and F's output is another."""
    calls, right = resumed(None)
    asked, wrong = resumed(fault)

    assert calls == asked
    assert "commit_forward" == asked[-1][0]
    assert not torch.allclose(right, wrong)


def test_the_list_names_these() -> None:
    """Exactly these failures are said to be shown here, and to be wrong in numbers alone."""
    here = {f.name: f for f in FAILURES if f.shown == "tests/failures/test_values.py"}

    assert {*SHOWN, *WEIGHED, *RESUMED} == set(here)
    assert {"refused"} == {here[name].verdict for name in WEIGHED}
    assert {"not caught"} == {here[name].verdict for name in (*SHOWN, *RESUMED)}
    assert {"values"} == {here[name].kind for name in SHOWN}
    assert {"state"} == {here[name].kind for name in RESUMED}

"""
Effects that the reference backend reports, compared with what the backend did; and the wrong
gradients that live scales give where no contract refuses them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qeffect import Contract, Refused, StageConfig, TapeKey, TapeRef
from qeffect.gpu_runtime.backends.protocol import Tape, matrices
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage

from .helpers import TINY

#: Two microbatches whose forwards overlap, and the same one after the other.
OVERLAPPING = ("F0", "F1", "I0", "W0", "I1", "W1")
IN_TURN = ("F0", "I0", "W0", "F1", "I1", "W1")


def an_input(microbatch: int) -> Tensor:
    """A leaf for F; the second microbatch is much larger, so that scales move."""
    made = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(microbatch))
    return (made * 50.0**microbatch).bfloat16().requires_grad_()


def output_gradient() -> Tensor:
    """What dI is given."""
    return torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(9)).bfloat16()


class Run:
    """One stage with two slots, and what its dW wrote of each microbatch."""

    def __init__(self, kind: str, *, guarded: bool) -> None:
        self.domain = ReferenceDomain(tape_scales=kind)
        self.stage = ReferenceStage(0, self.domain, TINY, seed=0)
        self.names = tuple(sorted(m.name for m in matrices(self.stage)))
        config = StageConfig(
            0,
            2,
            2,
            matrices=self.names,
            reports_fills=True,
            reports_updates=True,
            tape_scales=kind,
        )
        self.contract = Contract([config]) if guarded else None
        self.tapes: dict[int, Tape] = {}
        self.scaled_at: dict[int, int] = {}
        self.refs: dict[int, TapeRef] = {}
        self.gradients: dict[int, list[Tensor]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Fill the cache."""
        if self.contract is None:
            self.stage.refresh_cache()
            return
        with self.contract.refresh(0) as r:
            self.stage.refresh_cache()
            r.filled = [(name, 0) for name in self.stage.filled()]

    def counted(self, action: Callable[[], None]) -> int:
        """Run something; return the scaling updates that it made."""
        before = self.domain.rolls
        action()
        return self.domain.rolls - before

    def step(self, action: str) -> None:
        """Run F, dI or dW of a microbatch, guarded where there is a contract."""
        kind, microbatch = action[0], int(action[1])
        physical = {"F": self.forward, "I": self.dgrad, "W": self.wgrad}[kind]
        if self.contract is None:
            physical(microbatch)
            return
        key = TapeKey(0, 0, microbatch)
        if kind == "F":
            with self.contract.forward(key) as f:
                f.updates = self.counted(lambda: physical(microbatch))
            self.refs[microbatch] = f.ref
        elif kind == "I":
            self.contract.bind(key)
            self.contract.wait()
            with self.contract.dgrad(key, self.refs[microbatch]) as i:
                i.updates = self.counted(lambda: physical(microbatch))
                units = {unit.name: unit for unit in self.stage.units}
                tape = self.tapes[microbatch]
                i.queued = [m.name for name in tape.queued for m in units[name].matrices]
                i.scales = self.scaled_at[microbatch]
        else:
            with self.contract.wgrad(key, self.refs[microbatch]) as w:
                physical(microbatch)
                w.covered = self.names

    def forward(self, microbatch: int) -> None:
        self.scaled_at[microbatch] = self.domain.rolls
        tape = self.tapes[microbatch] = self.stage.new_tape(microbatch)
        self.stage.forward(tape, [an_input(microbatch)])

    def dgrad(self, microbatch: int) -> None:
        tape = self.tapes[microbatch]
        self.stage.bind(tape, None)
        self.stage.dgrad(tape, [output_gradient()])

    def wgrad(self, microbatch: int) -> None:
        by_unit = self.stage.wgrad(self.tapes[microbatch], accumulate=False).by_unit
        self.gradients[microbatch] = [by_unit[unit.name] for unit in self.stage.units]


def native(order: tuple[str, ...]) -> dict[int, list[Tensor]]:
    """The same forwards and backwards by the library's ordinary full backward."""
    stage = ReferenceStage(0, ReferenceDomain(), TINY, seed=0)
    outputs: dict[int, Tensor] = {}
    found: dict[int, list[Tensor]] = {}
    for action in order:
        kind, microbatch = action[0], int(action[1])
        if kind == "F":
            (outputs[microbatch],) = stage.native_forward(
                [an_input(microbatch)], first=microbatch == 0
            )
        elif kind == "I":
            for matrix in matrices(stage):
                matrix.parameter.grad = None
            outputs[microbatch].backward(output_gradient())
            found[microbatch] = []
            for unit in stage.units:
                grads = [m.parameter.grad for m in unit.matrices]
                found[microbatch].append(torch.cat([g for g in grads if g is not None]))
    return found


def same(a: dict[int, list[Tensor]], b: dict[int, list[Tensor]]) -> bool:
    """Whether all gradients have the same bits."""
    assert a.keys() == b.keys()
    return all(torch.equal(x, y) for m in a for x, y in zip(a[m], b[m], strict=True))


@pytest.mark.parametrize("order", [OVERLAPPING, IN_TURN])
def test_carried_scales_are_native(order: tuple[str, ...]) -> None:
    """With carried scales every order is accepted and has native's bits."""
    run = Run("carried", guarded=True)
    for action in order:
        run.step(action)

    assert same(native(order), run.gradients)


def test_live_scales_in_turn_are_native() -> None:
    """With live scales F, dI, F, dI is accepted and has native's bits."""
    run = Run("live", guarded=True)
    for action in IN_TURN:
        run.step(action)

    assert same(native(IN_TURN), run.gradients)


def test_live_scales_that_moved_are_refused_and_would_have_been_wrong() -> None:
    """Guards on: the first dI is refused, nothing ran. Guards off: other gradients than native."""
    guarded = Run("live", guarded=True)
    guarded.step("F0")
    guarded.step("F1")
    before = guarded.domain.rolls
    with pytest.raises(Refused, match=r"^order\.scales-moved in check_dgrad"):
        guarded.step("I0")
    assert before == guarded.domain.rolls

    unguarded = Run("live", guarded=False)
    for action in OVERLAPPING:
        unguarded.step(action)
    right = native(OVERLAPPING)

    assert not same({0: right[0]}, {0: unguarded.gradients[0]})
    assert same({1: right[1]}, {1: unguarded.gradients[1]})
    ratio = unguarded.gradients[0][0].float().norm() / right[0][0].float().norm()
    assert ratio > 1.5 or ratio < 0.67


def test_a_skipped_cast_is_refused() -> None:
    """A refresh that left one product's cache alone reports the others, and fails."""
    run = Run("carried", guarded=False)
    of = Contract([StageConfig(0, 2, 2, matrices=run.names, reports_fills=True)])
    run.stage.filled()
    *filled, skipped = run.stage.linears
    ticket = of.check_refresh(0)
    for linear in filled:
        linear.refresh()
    report = [(name, 0) for name in run.stage.filled()]
    with pytest.raises(Refused) as caught:
        of.commit(ticket, filled=report)

    assert "version.fill-missing" == caught.value.clause
    assert skipped.unit.matrices[0].name not in caught.value.found


def test_a_second_scaling_update_is_refused() -> None:
    """An F whose region was entered twice rolls twice, and fails."""
    run = Run("carried", guarded=True)
    assert run.contract is not None

    def twice() -> None:
        run.forward(0)
        run.domain.roll(forward=True)

    found = r"^order\.scaling-updates.*found 2 scaling updates"
    with pytest.raises(Refused, match=found), run.contract.forward(TapeKey(0, 0, 0)) as f:
        f.updates = run.counted(twice)

    assert [1] == run.contract.memory.poisoned

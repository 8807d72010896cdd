"""
The guarded actions as `torch.library` operators that take and return explicit tensors.

A graph compiler sees four operators: refresh (of a stage's FP8 weight cache), forward (F), dgrad
(dI) and wgrad (dW). Each operator mutates the effect token, a tensor of two integers on the CPU.
The first integer counts the F and dI in this epoch (an optimizer step); the second counts all
actions. The contract checks the first integer, and therefore refuses an operator that runs twice,
was dropped or was moved. Because the mutation is declared, a compiler may not repeat, drop or move
an operator. Outputs are independent of the runtime's static buffers.

Gradient memory is an argument too, and declared as mutated. dW writes the gradients of weight
matrices (`Session.destinations`). dI adds to the sums of all other gradients, and a refresh empties
these sums (`Session.sums`). So a compiler sees that a read of a gradient must follow the last
operator that writes it. Pass the gradient memory itself. A compiler may pass a copy instead, to
keep the graph functional; the operator then also updates the copy.

`torch.library.opcheck` runs an operator several times on clones of one token. An ordinary session
refuses every run but the first, as the contract demands. A session in *rehearsal* instead goes back
to the point of the epoch that the token names: it restarts the epoch and repeats the actions up to
this point. So `opcheck` can check schema, aliasing, fake implementation and functionalization.

Operators are defined with `Library.define`, not `custom_op`: bodies of `custom_op` do not record
autograd. F and dI have an overload for each number of results (`forward.n1`), because a compiler
cannot functionalize a returned list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from qeffect.keys import TapeKey, TapeRef

from .backends.protocol import BackendError, TensorSpec
from .runtime import Runtime
from .step.optimizer import Gradients, Optimizer

NAMESPACE = "qeffect"

MAX_RESULTS = 4
"""Largest number of outputs, or of differentiable inputs, of a stage."""


class Session:
    """
    Connects the operators to a runtime. Pass the session's integer `handle` to each operator. The
    session keeps the reference that each F returned, for dI and dW.

    Args:
        runtime: The runtime whose actions the operators run.
        rehearsal: For `opcheck`. If True, an operator that gets an old token goes back to the point
            of the epoch that the token names; the session then keeps the epoch's inputs alive. If
            False, an old token is refused.

    Raises:
        BackendError: The runtime computes the dW of several microbatches as one product; the dW
            operator takes only one microbatch.
    """

    def __init__(self, runtime: Runtime, *, rehearsal: bool = False) -> None:
        if runtime.config.group > 1:
            raise BackendError(
                f"group is {runtime.config.group}: expected 1, because the operator of dW takes "
                "one microbatch; make the runtime with group=1"
            )
        self.runtime = runtime
        self.rehearsal = rehearsal
        self.handle = next(_HANDLES)
        self._refs: dict[TapeKey, TapeRef] = {}
        self._journal: list[Callable[[], object]] = []
        self._base = self._effects()
        _SESSIONS[self.handle] = self

    def token(self) -> Tensor:
        """The current token of this epoch: the count of F and dI, and the count of all actions."""
        return torch.tensor([self._effects() - self._base, len(self._journal)])

    def destinations(self, stage: int, microbatch: int) -> list[Tensor]:
        """
        Return the tensors to which a microbatch's dW writes gradients, one per deferred matrix
        product. Pass them to the operator `wgrad` as `arena`.

        The list is empty with ``rule="copied"`` of `RuntimeConfig`: the library then writes its
        gradients to its own memory.
        """
        memory = self.runtime.memories[stage]
        held = memory.arena.destinations(microbatch) or {}
        return [held[unit.name] for unit in memory.stage.units if unit.name in held]

    def sums(self, stage: int) -> list[Tensor]:
        """
        Return the gradient sums of a stage's parameters that are not matrices (norms, biases, the
        embedding). The stage's refresh empties these sums, and dI adds to them.
        """
        return list(self.runtime.memories[stage].sums)

    def finish(self, optimizer: Optimizer) -> Gradients:
        """Update the weights and end the epoch. For the next epoch, get a new `token`: its counts
        start at zero."""
        gradients = self.runtime.finish(optimizer)
        self._begin()
        return gradients

    def _effects(self) -> int:
        return self.runtime.contract.token(next(iter(self.runtime.stages)))

    def _begin(self) -> None:
        self._refs.clear()
        self._journal.clear()
        self._base = self._effects()

    def _go_to(self, token: Tensor) -> int:
        """
        Go back to the point of the epoch that the token names, if `rehearsal` allows it. Return the
        contract's count of F and dI at this point.
        """
        effects, position = token.tolist()
        if self.rehearsal and position != len(self._journal):
            past = self._journal[:position]
            self.runtime.rebuild()
            self._begin()
            for repeat in past:
                self._journal.append(repeat)
                repeat()
        return self._base + int(effects)

    def _done(self, token: Tensor, repeat: Callable[[], object], *, effect: bool) -> None:
        # Without rehearsal only the count is needed, and inputs must not be kept alive.
        self._journal.append(repeat if self.rehearsal else _nothing)
        token.add_(torch.tensor([int(effect), 1]))

    def refresh(self, token: Tensor, sums: Sequence[Tensor], stage: int) -> None:
        """Refresh a stage's weight cache."""
        with _written(sums, self.sums(stage), f"sums({stage})"):
            self._go_to(token)
            self._refresh(stage)
        self._done(token, lambda: self._refresh(stage), effect=False)

    def _refresh(self, stage: int) -> None:
        self.runtime.actions.refresh(stage)

    def forward(
        self, token: Tensor, inputs: Sequence[Tensor], stage: int, microbatch: int
    ) -> list[Tensor]:
        """Run F of a stage on one microbatch; return its outputs."""
        effects = self._go_to(token)
        outputs = self._forward(inputs, stage, microbatch, effects)
        kept = [value.clone() for value in inputs] if self.rehearsal else []
        self._done(token, lambda: self._forward(kept, stage, microbatch, None), effect=True)
        return outputs

    def _forward(
        self, inputs: Sequence[Tensor], stage: int, microbatch: int, effects: int | None
    ) -> list[Tensor]:
        key = self.runtime.key(stage, microbatch)
        actions = self.runtime.actions
        with _recording():
            ref = self._refs[key] = actions.forward(key, inputs, token=effects)
        if not self.runtime.config.readers:
            return _independent(self.runtime.memories[stage].table[ref.slot].outputs)
        outputs = _independent(actions.outputs(key, ref))
        actions.finish_outputs(key, ref)
        return outputs

    def dgrad(
        self,
        token: Tensor,
        sums: Sequence[Tensor],
        output_gradients: Sequence[Tensor],
        stage: int,
        microbatch: int,
    ) -> list[Tensor]:
        """Bind the gradient destinations, then run dI; return the input gradients."""
        with _written(sums, self.sums(stage), f"sums({stage})"):
            effects = self._go_to(token)
            found = self._dgrad(output_gradients, stage, microbatch, effects)
        kept = [value.clone() for value in output_gradients] if self.rehearsal else []
        self._done(token, lambda: self._dgrad(kept, stage, microbatch, None), effect=True)
        return found

    def _dgrad(
        self, gradients: Sequence[Tensor], stage: int, microbatch: int, effects: int | None
    ) -> list[Tensor]:
        key = self.runtime.key(stage, microbatch)
        ref, actions = self._ref(key), self.runtime.actions
        actions.bind(key)
        with _recording():
            actions.dgrad(key, ref, gradients, token=effects)
        memory = self.runtime.memories[stage]
        if not (self.runtime.config.readers and _with_gradients(memory.stage.inputs)):
            return _independent(memory.table[ref.slot].dgrads)
        found = _independent(actions.dgrads(key, ref))
        actions.finish_dgrads(key, ref)
        return found

    def wgrad(self, token: Tensor, arena: Sequence[Tensor], stage: int, microbatch: int) -> None:
        """
        Run dW. A dW changes no FP8 scaling state, so only the token's second number rises.
        """
        own = self.destinations(stage, microbatch)
        with _written(arena, own, f"destinations({stage}, {microbatch})"):
            self._go_to(token)
            self._wgrad(stage, microbatch)
        self._done(token, lambda: self._wgrad(stage, microbatch), effect=False)

    def _wgrad(self, stage: int, microbatch: int) -> None:
        key = self.runtime.key(stage, microbatch)
        self.runtime.actions.wgrad(key, self._ref(key))

    def _ref(self, key: TapeKey) -> TapeRef:
        try:
            return self._refs[key]
        except KeyError:
            raise BackendError(
                f"{key} has no tape (data kept from F to dW) in this epoch; run its forward first"
            ) from None


_HANDLES = itertools.count(1)
_SESSIONS: WeakValueDictionary[int, Session] = WeakValueDictionary()


def session_of(handle: int) -> Session:
    """
    Return the session with this integer handle, the argument of an operator.

    Raises:
        BackendError: No session has this handle. A session ends once no reference to it is left.
    """
    found = _SESSIONS.get(handle)
    if found is None:
        raise BackendError(f"no session {handle}; keep the Session alive while its operators run")
    return found


def _nothing() -> None:
    """Do nothing, in place of an action that will not be repeated."""


@contextmanager
def _recording() -> Iterator[None]:
    """
    Record autograd, even if the dispatcher called from below the autograd keys.

    F's own autograd graph connects F and dI of one tape; the caller does not see it.
    """
    below = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for key in below:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


@contextmanager
def _written(given: Sequence[Tensor], own: Sequence[Tensor], where: str) -> Iterator[None]:
    """
    Let an operator write the session's memory, then update the passed tensors from it.

    Args:
        given: The tensors that the call declares as mutated.
        own: The session's memory, which the operator mutates.
        where: The session's method that returns this memory.

    Raises:
        BackendError: `given` and `own` differ in number, shape, dtype or device; nothing ran.
    """
    forms = [[(t.shape, t.dtype, t.device) for t in tensors] for tensors in (given, own)]
    if forms[0] != forms[1]:
        raise BackendError(
            f"expected the session's {len(own)} gradient tensors; found {len(given)} tensors, or "
            f"tensors of another shape, dtype or device; pass session.{where}"
        )
    yield
    with torch.no_grad():
        for copy, held in zip(given, own, strict=True):
            if copy.data_ptr() != held.data_ptr():
                copy.copy_(held)


def _independent(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _with_gradients(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs if spec.differentiable]


def _refresh(token: Tensor, sums: list[Tensor], session: int, stage: int) -> None:
    session_of(session).refresh(token, sums, stage)


def _forward(
    token: Tensor, inputs: list[Tensor], session: int, stage: int, microbatch: int
) -> list[Tensor]:
    return session_of(session).forward(token, inputs, stage, microbatch)


def _dgrad(
    token: Tensor,
    sums: list[Tensor],
    output_gradients: list[Tensor],
    session: int,
    stage: int,
    microbatch: int,
) -> list[Tensor]:
    return session_of(session).dgrad(token, sums, output_gradients, stage, microbatch)


def _wgrad(token: Tensor, arena: list[Tensor], session: int, stage: int, microbatch: int) -> None:
    session_of(session).wgrad(token, arena, stage, microbatch)


def _fake_nothing(token: Tensor, *_: Any) -> None:
    """Stand in for an operator without results when a compiler traces it."""


def _fake_forward(
    token: Tensor, inputs: list[Tensor], session: int, stage: int, microbatch: int
) -> list[Tensor]:
    return _empty(session_of(session).runtime.stages[stage].outputs)


def _fake_dgrad(
    token: Tensor,
    sums: list[Tensor],
    output_gradients: list[Tensor],
    session: int,
    stage: int,
    microbatch: int,
) -> list[Tensor]:
    return _empty(_with_gradients(session_of(session).runtime.stages[stage].inputs))


def _empty(specs: Sequence[TensorSpec]) -> list[Tensor]:
    return [torch.empty(spec.shape, dtype=spec.dtype, device=spec.device) for spec in specs]


def _with_arity(function: Callable[..., list[Tensor]], arity: int) -> Callable[..., Any]:
    """Wrap an operator's body so that it returns `arity` tensors, in the form that torch needs."""

    @wraps(function)
    def call(token: Tensor, *given: Any) -> Any:
        session, stage, _ = given[-3:]
        runtime = session_of(session).runtime
        specs = runtime.stages[stage].outputs if "forward" in function.__name__ else None
        wanted = len(_with_gradients(runtime.stages[stage].inputs) if specs is None else specs)
        if wanted != arity:
            raise BackendError(
                f"overload n{arity} returns {arity} tensors, but stage {stage} gives {wanted} "
                f"here; call overload n{wanted}"
            )
        found = function(token, *given)
        return found[0] if arity == 1 else tuple(found) if found else None

    return call


def _define(
    library: Any, signature: str, real: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    name = signature.partition("(")[0]
    library.define(signature)
    # A token alone is on the CPU; with inputs on a device, torch dispatches to that device.
    for key in ("CPU", "CUDA"):
        library.impl(name, real, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


def _define_all() -> Any:
    library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    place = "int session, int stage"
    tape = f"{place}, int microbatch"
    token, sums = "Tensor(a!) token", "Tensor(b!)[] sums"
    _define(library, f"refresh({token}, {sums}, {place}) -> ()", _refresh, _fake_nothing)
    _define(
        library,
        f"wgrad({token}, Tensor(b!)[] arena, {tape}) -> ()",
        _wgrad,
        _fake_nothing,
    )
    for name, given, real, fake in (
        ("forward", "Tensor[] inputs", _forward, _fake_forward),
        (
            "dgrad",
            f"{sums}, Tensor[] output_gradients",
            _dgrad,
            _fake_dgrad,
        ),
    ):
        for arity in range(MAX_RESULTS + 1):
            results = "Tensor" if arity == 1 else f"({', '.join(['Tensor'] * arity)})"
            signature = f"{name}.n{arity}({token}, {given}, {tape}) -> {results}"
            _define(library, signature, _with_arity(real, arity), _with_arity(fake, arity))
    return library


_LIBRARY = _define_all()

"""
AdamW over the stages of one process, with master weights if gradient destinations (the memory that
dW writes) are not bf16.

Torch's AdamW refuses parameters and gradients of different types. Therefore fp32 destinations need
fp32 master weights. The optimizer updates the master weights, rounds them, and writes them back to
the parameters. Every parameter then has a master weight, even if its gradient is bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from qeffect.text import shown

from ..backends.protocol import BackendError, StageBackend, parameters

_address = Tensor.data_ptr

Gradients = Mapping[int, Mapping[str, Tensor]]
"""Parameter gradients of an epoch: by stage, then by parameter name."""


class Optimizer:
    """
    One fused AdamW over every stage.

    Args:
        stages: The stages whose parameters the optimizer owns; a parameter of several stages
            belongs to the stage with the lowest index.
        lr: Learning rate. If the update is captured in a graph and the rate must be changeable
            (`set_rate`), pass a scalar tensor on the parameters' device.
        weight_decay: AdamW's decoupled decay.
        decays: Function that takes a parameter's name within the stage and the parameter, and
            returns whether it gets weight decay. None gives all parameters weight decay.
        master_dtype: Type of the master weights; None updates the parameters themselves.
        capturable: Whether to keep the step count on the device, so that a graph can contain the
            update; see `make_capturable`.
    """

    def __init__(
        self,
        stages: Sequence[StageBackend],
        *,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.01,
        decays: Callable[[str, Tensor], bool] | None = None,
        master_dtype: torch.dtype | None = None,
        capturable: bool = False,
    ) -> None:
        self.master_dtype = master_dtype
        self.capturable = capturable
        self.named: dict[str, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._parameters: list[Tensor] = []
        owner: dict[int, tuple[int, str]] = {}
        for stage in sorted(stages, key=lambda one: one.index):
            for name, parameter in parameters(stage).items():
                owner.setdefault(id(parameter), (stage.index, name))
        self._targets: dict[int, list[tuple[str, Tensor]]] = {}
        decayed: list[Tensor] = []
        others: list[Tensor] = []
        for stage in stages:
            targets = self._targets[stage.index] = []
            for name, parameter in parameters(stage).items():
                if owner[id(parameter)] != (stage.index, name):
                    continue
                self._parameters.append(parameter)
                target: Tensor = parameter
                if master_dtype is not None:
                    target = parameter.detach().to(master_dtype, copy=True).requires_grad_()
                    self._pairs.append((parameter, target))
                self.named[f"stages.{stage.index}.{name}"] = target
                targets.append((name, target))
                (decayed if decays is None or decays(name, parameter) else others).append(target)
        self._expected = {i: {name for name, _ in own} for i, own in self._targets.items()}
        groups: list[dict[str, Any]] = [{"params": decayed}]
        if others:
            groups.append({"params": others, "weight_decay": 0.0})
        self.adamw = torch.optim.AdamW(
            groups if decayed else groups[1:],
            lr=lr,
            weight_decay=weight_decay,
            fused=True,
            capturable=capturable,
        )

    @property
    def places(self) -> list[tuple[int, str]]:
        """Stage and name of each parameter that the optimizer owns."""
        return [(index, name) for index, own in self._targets.items() for name, _ in own]

    def make_capturable(self) -> None:
        """
        Prepare the update for capture in a graph. A worker in mode ``one launch`` calls this
        method.
        """
        self.capturable = True
        for group in self.adamw.param_groups:
            group["capturable"] = True

    @property
    def rate(self) -> float:
        """The learning rate; waits for the device if the rate is a tensor on the device."""
        return float(self.adamw.param_groups[0]["lr"])

    def set_rate(self, rate: float) -> None:
        """Set the learning rate for the next step and later ones."""
        held = {id(group["lr"]): group["lr"] for group in self.adamw.param_groups}
        for one in held.values():
            if isinstance(one, Tensor):  # all groups share this tensor
                one.fill_(rate)
        for group in self.adamw.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate

    def step(
        self, gradients: Gradients, *, skip: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """
        Update every parameter from the gradients of one step.

        Args:
            gradients: The gradients by stage and parameter name; every parameter needs a gradient.
            skip: Float32 scalar on the parameters' device. If this scalar is 1, the device leaves
                parameters, moments and step counts unchanged. The host does not read the scalar.
            scale: Float32 scalar on the parameters' device by which the gradients are multiplied.
                The gradients are changed in place if they have the dtype of the weights that they
                update.

        Raises:
            BackendError: A parameter has no gradient; nothing was updated.
        """
        if {index: named.keys() for index, named in gradients.items()} != self._expected:
            self._refuse(gradients)
        for index, targets in self._targets.items():
            named = gradients[index]
            for name, target in targets:
                target.grad = named[name].to(target.dtype)
        if scale is not None:
            _multiply([t.grad for t in self.named.values() if t.grad is not None], scale)
        self.adamw.found_inf = skip  # type: ignore[attr-defined]
        try:
            self.update()
        finally:
            self.adamw.found_inf = None  # type: ignore[attr-defined]

    def _refuse(self, gradients: Gradients) -> None:
        found = {f"stages.{i}.{name}" for i, named in gradients.items() for name in named}
        odd = sorted(self.named.keys() ^ found) or ["a stage without parameters"]
        raise BackendError(
            f"gradients and parameters differ in {len(odd)} names, first {odd[0]}; "
            "finalize every stage before the optimizer step"
        )

    def update(self) -> None:
        """
        Run AdamW on the gradients that are set, and write the master weights back to the
        parameters.
        """
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_(
                    [parameter for parameter, _ in self._pairs],
                    [master for _, master in self._pairs],
                )
        # Fused AdamW changes weights without moving their version counters. A backend needs the
        # counters to see that its cache is stale.
        torch.autograd.graph.increment_version(self._parameters)

    def take_parameters(self) -> None:
        """
        Copy each parameter's value into its master weight. Call this method after other code has
        changed parameters.
        """
        with torch.no_grad():
            for parameter, master in self._pairs:
                master.copy_(parameter)

    def state_tensors(self) -> Mapping[str, Tensor]:
        """
        Return AdamW's state and the master weights. A name consists of the parameter and the kind
        of state.
        """
        state = {
            f"{name}.{key}": value
            for name, target in self.named.items()
            for key, value in self.adamw.state[target].items()
            if isinstance(value, Tensor)
        }
        if self._pairs:
            state.update((f"{name}.master", target.detach()) for name, target in self.named.items())
        return state

    def addresses(self) -> list[int]:
        """Return the addresses of all `state_tensors`, which a captured update contains."""
        # In AdamW's order of creation: a lookup by parameter took as long as a step.
        held = [*chain.from_iterable(map(dict.values, self.adamw.state.values()))]
        try:
            found = [*map(_address, held)]
        except TypeError:  # a value of the state is not a tensor
            found = [value.data_ptr() for value in held if isinstance(value, Tensor)]
        if self._pairs:
            found += map(_address, self.named.values())
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """
        Load the `state_tensors` of another optimizer over the same stages.

        Raises:
            BackendError: A name is missing or unexpected, or a value is not a tensor or has
                another shape or type; nothing was loaded.
        """
        if not isinstance(state, Mapping):
            raise BackendError(f"expected tensors by name, found {shown(state)}")
        expected = {f"{name}.{key}" for name in self.named for key in _ADAMW_STATE}
        if self._pairs:
            expected |= {f"{name}.master" for name in self.named}
        if odd := sorted(expected ^ state.keys()):
            raise BackendError(
                f"the loaded state and this optimizer differ in {len(odd)} names, first {odd[0]}; "
                "build the optimizer over the same stages with the same master weights"
            )
        for name, target in self.named.items():
            for key in (*_ADAMW_STATE, *["master"] * bool(self._pairs)):
                _require_like(f"{name}.{key}", state[f"{name}.{key}"], target, key)
        for name, target in self.named.items():
            if self._pairs:
                with torch.no_grad():
                    target.copy_(state[f"{name}.master"])
            held = self.adamw.state[target]
            for key in _ADAMW_STATE:
                saved = state[f"{name}.{key}"].detach()
                if key in held:  # in place: a graph that holds the update reads this address
                    held[key].copy_(saved)
                else:
                    held[key] = saved.to(target.device, copy=True)


def _require_like(name: str, value: Any, target: Tensor, key: str) -> None:
    """
    Raise an error unless the value has the form that AdamW keeps: a step count, or a tensor with
    the target's shape and type.
    """
    shape, dtype = ((), torch.float32) if key == "step" else (tuple(target.shape), target.dtype)
    if not isinstance(value, Tensor):
        raise BackendError(f"optimizer state {name}: expected a tensor, found {shown(value)}")
    if (tuple(value.shape), value.dtype) != (shape, dtype):
        raise BackendError(
            f"optimizer state {name}: expected shape {shape} of {dtype}, found "
            f"{tuple(value.shape)} of {value.dtype}; load what this model's optimizer saved"
        )


def _multiply(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply in place, in float32: a device would round the factor to the gradients' type."""
    same = [g for g in gradients if g.dtype == scale.dtype]
    if same:
        torch._foreach_mul_(same, scale)
    for gradient in gradients:
        if gradient.dtype != scale.dtype:
            gradient.copy_(gradient.to(scale.dtype) * scale)


_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")

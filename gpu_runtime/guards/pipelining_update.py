"""The update that ends a guarded epoch, after one step of a schedule or after several steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from qeffect.refusals import refused
from qeffect.text import shown

from .evidence import counters, not_run

__all__ = ["Updates"]


class Updates:
    """
    The optimizer whose updates end a guarded schedule's epochs, and the evidence in its tensors.

    Each step of the schedule is a walk (one pass over the schedule). The walks between two updates
    are one epoch. A write to a parameter, or to its state in the optimizer, shows that the update
    ran. The state is also watched, because fused optimizers write parameters without increasing
    their version counters. If a gradient disappears before the update, the gradients of earlier
    walks are lost. If a gradient stays unchanged after the update, the next epoch would add to it.

    Args:
        optimizer: A `torch.optim.Optimizer`, or a container of optimizers that is itself an
            `Optimizer`.
        walks: How many steps of the schedule belong to one update; None if this number is not
            declared.
        stages: torch's stages of the rank.

    Attributes:
        walked: Number of finished walks of the epoch.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `walks` is not an ``int``.
        ValueError: `walks` is below 1.
    """

    def __init__(self, optimizer: Any, walks: int | None, stages: list[Any]) -> None:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(
                "follow_optimizer expects a torch.optim.Optimizer, whose hooks report its "
                f"updates; found {type(optimizer).__name__}"
            )
        if walks is not None and (not isinstance(walks, int) or isinstance(walks, bool)):
            raise TypeError(f"walks must be an int or None, got {shown(walks)}")
        if walks is not None and walks < 1:
            raise ValueError(f"walks must be at least 1, got {walks}")
        self.walked = 0
        self._optimizer, self._walks = optimizer, walks
        #: The optimizers that hold state: those of a container, or the optimizer itself.
        self._parts = list(optimizer) if hasattr(type(optimizer), "__iter__") else [optimizer]
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        #: By stage, the parameters that the optimizer updates, by name.
        self.parameters: Mapping[int, Mapping[str, Any]] = {
            stage.stage_index: {
                name: p for name, p in stage.submod.named_parameters() if id(p) in updated
            }
            for stage in stages
        }
        self._made: list[tuple[int, str, Any]] = []
        self._used: list[tuple[int, str, Any, weakref.ref[Any], int]] = []
        self._before: dict[int, list[int]] = {}
        self._hooks: list[Any] = []

    @property
    def declared(self) -> bool:
        """Whether the number of walks (passes over the schedule) per update is declared."""
        return self._walks is not None

    def watch(
        self,
        before: Callable[..., None],
        after: Callable[..., None],
        part: Callable[..., None],
    ) -> None:
        """
        Register functions that are called before and after each update, and before the update of
        each optimizer in a container.
        """
        self._hooks = [
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
            *(p.register_step_pre_hook(part) for p in self._parts if p is not self._optimizer),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def check_first_walk(self) -> None:
        """
        Check that every gradient used by the last update has since been dropped or changed.

        Raises:
            Refused: ``arena.stale-accumulation``: a gradient is unchanged since the last update.
        """
        used, self._used = self._used, []
        for stage, name, parameter, grad, version in used:
            left: Any = parameter.grad
            if left is not None and left._version == version and left is grad():
                raise refused(
                    "arena.stale-accumulation",
                    "check_wgrad",
                    f"the gradient of {name}, stage {stage}, which the last update has used",
                    "no gradient of an earlier epoch: zero_grad() after each update",
                )

    def check_next_walk(self) -> None:
        """
        Check that another walk (pass over the schedule) of the epoch may begin.

        Raises:
            Refused: ``epoch.device-count`` if the update is due; ``arena.overwrite`` if the
                gradients of the earlier walks are gone.
        """
        if self._walks is not None and self.walked >= self._walks:
            raise not_run("commit_update", f"the update after {_walks(self.walked)}")
        self._check_kept(f"another walk after {_walks(self.walked)}")

    def check_due(self) -> None:
        """
        Check that every walk (pass over the schedule) of the epoch has finished.

        Raises:
            Refused: ``epoch.not-final`` if walks are missing; ``arena.overwrite`` if gradients of
                the epoch are gone.
        """
        if self._walks is not None and self.walked < self._walks:
            raise refused(
                "epoch.not-final",
                "check_update",
                f"an update after {self.walked} of {_walks(self._walks)}",
                f"{_walks(self._walks)} (steps of the schedule) before each update",
            )
        self._check_kept("the update")

    def _check_kept(self, what: str) -> None:
        for stage, name, parameter in self._made:
            if parameter.grad is None:
                raise refused(
                    "arena.overwrite",
                    "check_wgrad",
                    f"{what} without the gradient of {name} (stage {stage}), which an earlier walk "
                    "made",
                    "the gradients of all walks, kept until the update",
                )

    def check_part(self) -> None:
        """
        Check that no single optimizer in a container updates its weights before the epoch's update.

        Raises:
            Refused: ``version.wrong-epoch``.
        """
        if self._walks is None or self.walked < self._walks:
            raise refused(
                "version.wrong-epoch",
                "check_update",
                "one optimizer of the container updates its weights without the other "
                f"optimizers, after {_walks(self.walked)}",
                "weights that do not change between the epoch's first F and its update",
            )

    def finish_walk(self) -> None:
        """Record which gradients exist at the end of a walk (pass over the schedule)."""
        self._made = [
            (stage, name, parameter)
            for stage, named in self.parameters.items()
            for name, parameter in named.items()
            if parameter.grad is not None
        ]

    def begin_update(self) -> None:
        """Record the versions of the parameters that the update must write."""
        self._before = {
            stage: self._versions(named)
            for stage, named in self.parameters.items()
            if any(parameter.grad is not None for parameter in named.values())
        }

    def finish_update(self) -> None:
        """
        Check that the update has written parameters of each stage, or the optimizer's state of
        these parameters.

        Raises:
            Refused: ``epoch.device-count``: the update of a stage did not run.
        """
        for stage, before in self._before.items():
            named = self.parameters[stage]
            if self._versions(named) == before and not self._is_blind(named):
                raise not_run("commit_update", f"the update of stage {stage}")
        self._used = [
            (stage, name, parameter, weakref.ref(parameter.grad), parameter.grad._version)
            for stage, named in self.parameters.items()
            for name, parameter in named.items()
            if parameter.grad is not None
        ]

    def forget(self) -> None:
        """Begin an epoch. Forget the last epoch, even if it has not ended."""
        self.walked = 0
        self._made = []

    def _versions(self, named: Mapping[str, Any]) -> list[int]:
        """Return the versions of parameters, and of their state in the optimizer."""
        found = []
        for parameter in named.values():
            found += [each._version for each in counters(parameter)]
            for part in self._parts:
                for value in part.state.get(parameter, {}).values():
                    if hasattr(value, "_version"):
                        found += [each._version for each in counters(value)]
        return found

    def _is_blind(self, named: Mapping[str, Any]) -> bool:
        """Whether nothing shows an update of these parameters: a fused optimizer without state."""
        own = set(map(id, named.values()))
        return any(
            group.get("fused") and not any(part.state.get(p) for p in group["params"])
            for part in self._parts
            for group in part.param_groups
            if not own.isdisjoint(map(id, group["params"]))
        )


def _walks(number: int) -> str:
    return f"{number} walk" + ("s" if number != 1 else "")

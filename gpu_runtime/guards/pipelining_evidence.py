"""What shows that the actions of torch's stages ran, and on which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qeffect.refusals import Refused

from .evidence import BackwardPasses, ForwardCalls, GradientWrites, Weights, is_sharded, not_run
from .works import Event

__all__ = ["METHODS", "StageEvidence"]

#: The stage's method that runs each kind of action.
METHODS: Mapping[str, str] = {
    "F": "forward_one_chunk",
    "I": "backward_one_chunk",
    "B": "backward_one_chunk",
    "W": "backward_weight_one_chunk",
    "REDUCE_GRAD": "perform_reduce_grad",
}
_CHECKS = {"F": "check_forward", "I": "check_dgrad", "B": "check_dgrad"}
_COMMITS = {"F": "commit_forward", "I": "commit_dgrad", "B": "commit_dgrad", "W": "commit_wgrad"}


class StageEvidence:
    """
    Evidence of the actions of one rank's stages.

    An action ran if the stage's own method ran, the one that the guard found. If another method
    has taken its place, something else has to show that the action ran: a call of the stage's
    module for F, a backward through the graph of its forward for I and B, a written gradient for B,
    W and for the scaling of gradients. In either case a backward that leaves the graph of its
    forward untouched did not run.

    Args:
        stages: torch's stages of the rank.
    """

    def __init__(self, stages: list[Any]) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._own: dict[tuple[int, str], Any] = {}
        self._passes = BackwardPasses()
        self._weights: dict[int, Weights] = {}
        self._watched: dict[Event, Callable[[], bool]] = {}

    def own(self, stage: int, name: str, method: Any) -> None:
        """Record the guard's method in a stage, which runs the one that the guard found."""
        self._own[stage, name] = method

    def begin_step(self) -> None:
        """Forget the last step."""
        self._passes.clear()
        self._weights.clear()
        for seen in self._watched.values():
            seen()
        self._watched.clear()

    def sharded(self) -> list[int]:
        """Return the stages whose weights are not watched, since FSDP gathers them in place."""
        return [stage for stage in self._stages if is_sharded(self._module(stage))]

    def check_weights(self, event: Event) -> None:
        """
        Check that no weight was written since the stage's first F of the step.

        Raises:
            Refused: ``version.wrong-epoch``.
        """
        kind, stage, _ = event
        if kind not in _CHECKS:
            return
        weights = self._weights.get(stage)
        if weights is None:
            self._weights[stage] = Weights(self._module(stage))
        else:
            weights.check(_CHECKS[kind], stage)

    def watch(self, event: Event) -> None:
        """Watch an action whose method is no longer the guard's."""
        kind, stage, _ = event
        name = METHODS[kind]
        if vars(self._stages[stage]).get(name) is self._own.get((stage, name)):
            return
        if kind == "F":
            self._watched[event] = ForwardCalls(self._module(stage)).seen
        elif kind == "I" and self._stages[stage].is_first:  # see `untouched`
            self._watched[event] = lambda: True
        elif kind in ("W", "REDUCE_GRAD"):
            self._watched[event] = GradientWrites(self._module(stage)).seen
        else:
            self._watched[event] = self._backward(event)

    def _backward(self, event: Event) -> Callable[[], bool]:
        """Return what tells whether a backward has passed, and a full one written gradients."""
        kind, stage, microbatch = event
        before = self._passes.of((stage, microbatch)) or 0
        module = self._module(stage)
        writes = GradientWrites(module) if kind == "B" and not is_sharded(module) else None

        def seen() -> bool:
            passed = (self._passes.of((stage, microbatch)) or 0) > before
            return passed and (writes is None or writes.seen())

        return seen

    def replaced(self, event: Event) -> bool:
        """Whether another method than the guard's was in its place, and showed nothing."""
        seen = self._watched.pop(event, None)
        return seen is None or not seen()

    def forget(self, event: Event) -> None:
        """Stop to watch an action, which the guard's method has run."""
        if (seen := self._watched.pop(event, None)) is not None:
            seen()

    def forwarded(self, event: Event) -> None:
        """Count backward passes through what a forward left in its stage, from now on."""
        _, stage, microbatch = event
        left = getattr(self._stages[stage], "fwd_cache", {}).get(microbatch)
        if isinstance(left, tuple) and left:
            self._passes.watch((stage, microbatch), left[0])

    def untouched(self, event: Event) -> bool:
        """Whether a backward left the graph of its forward untouched."""
        kind, stage, microbatch = event
        # torch runs no dI of the model's first stage: its dW runs the whole backward.
        if kind == "F" or (kind == "I" and self._stages[stage].is_first):
            return False
        return self._passes.of((stage, microbatch)) == 0

    def not_run(self, event: Event) -> Refused:
        """Return the refusal of an action whose computation did not run."""
        kind, stage, microbatch = event
        which = f", microbatch {microbatch}" if microbatch >= 0 else ""
        return not_run(_COMMITS.get(kind, "finalize"), f"{kind} of stage {stage}{which}")

    def _module(self, stage: int) -> Any:
        return getattr(self._stages[stage], "submod", None)

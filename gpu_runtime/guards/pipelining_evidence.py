"""Evidence that the actions of torch's pipeline stages ran, and on which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qeffect.refusals import Refused, refused

from .evidence import (
    BackwardPasses,
    ForwardCalls,
    GradientWrites,
    ReplicaHooks,
    Weights,
    is_replicated,
    is_sharded,
    leaves,
    not_run,
)
from .pipelining_graphs import keeps_records, recorded
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
#: Attributes of stages that compute with graphs of their own: TorchTitan's `GraphPipelineStage` and
#: AutoParallel's.
OWN_GRAPHS = ("graphs", "graph_callables")
_CHECKS = {"F": "check_forward", "I": "check_dgrad", "B": "check_dgrad"}
_COMMITS = {"F": "commit_forward", "I": "commit_dgrad", "B": "commit_dgrad", "W": "commit_wgrad"}


class StageEvidence:
    """
    Collects evidence that the actions of one rank's stages ran.

    An action counts as run if the stage's own method ran, that is, the method that the stage had
    before the guard. If another method or a registered function has replaced this method, other
    evidence is needed. For F, the stage's module must have been called. For I and B, a backward
    must have passed through the graph of the forward. For B, W and the scaling of gradients, a
    gradient must have been written. In all cases, a backward that did not pass through the graph of
    its forward counts as not run. For a stage of TorchTitan's GraphPP, the evidence is what the
    stage keeps of each action (`pipelining_graphs`).

    Args:
        stages: torch's stages of the rank.
    """

    def __init__(self, stages: list[Any]) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._own: dict[tuple[int, str], Any] = {}
        self._passes = BackwardPasses()
        self._weights: dict[int, Weights] = {}
        self._watched: dict[Event, Callable[[], bool]] = {}
        #: The module's output in a forward that ran without the guard's method.
        self._returned: dict[Event, Any] = {}
        #: By stage, the optimizer's parameters of a sharded module, by name.
        self._shards: dict[int, Mapping[str, Any]] = {}
        #: For each stage under DistributedDataParallel: the nodes where it reduces. `_wrote` has
        #: the backwards that wrote gradients in this step, each with whether it passed these nodes.
        self._replicas = {
            index: ReplicaHooks(self._module(index))
            for index in self._stages
            if is_replicated(self._module(index)) and not self.keeps_graphs(index)
        }
        self._wrote: dict[int, list[tuple[Event, bool]]] = {}
        #: The leaves of each split dI's graph, and the stages whose leaves were read in this step.
        self._leaves: dict[Event, set[Any]] = {}
        self._split: set[int] = set()

    def remove(self) -> None:
        """Remove all hooks that remain between steps."""
        for hooks in self._replicas.values():
            hooks.remove()

    def own(self, stage: int, name: str, method: Any) -> None:
        """Record the method with which the guard has replaced a stage's own method."""
        self._own[stage, name] = method

    def watch_shards(self, shards: Mapping[int, Mapping[str, Any]]) -> None:
        """
        From now on, watch the weights of sharded stages. `shards` gives the weights by stage and
        name.
        """
        self._shards = {stage: shards.get(stage, {}) for stage in self.sharded()}

    def stop_watching(self) -> None:
        """Watch no unfinished action any longer."""
        for seen in self._watched.values():
            seen()
        self._watched.clear()

    def begin_step(self, *, begins_epoch: bool = True) -> None:
        """
        Forget the last step. If an epoch (optimizer step) begins, also forget the weights'
        versions.
        """
        self._passes.clear()
        if begins_epoch:
            self._weights.clear()
        self.stop_watching()
        self._returned.clear()
        self._wrote.clear()
        self._leaves.clear()
        self._split.clear()
        for hooks in self._replicas.values():
            hooks.passed()

    def begin_split(self, event: Event, loss: Any) -> None:
        """
        Read the leaf tensors of a dI's autograd graph, once per step and stage.

        Args:
            event: The dI.
            loss: The loss, from which the dI of the last stage starts.
        """
        _, stage, microbatch = event
        own = self._stages[stage]
        if own.is_first or stage in self._split or getattr(own, "dw_builder", None):
            return
        self._split.add(stage)
        self._leaves[event] = leaves(loss if own.is_last else _outputs(own, microbatch))

    def check_split(self, event: Event) -> None:
        """
        Check that a dI deferred work for the weight gradient of each leaf tensor in its graph.

        torch looks for the module's parameters in the graph. If a parameter was replaced since the
        forward, for example by FSDP, torch does not find it and never computes its gradient. If
        `begin_split` has not read the graph of the action, the action is not checked.

        Raises:
            Refused: ``ownership.work-not-queued``: a leaf tensor has no deferred work.
        """
        found = self._leaves.pop(event, None)
        if found is None:
            return
        _, stage, microbatch = event
        state = getattr(self._stages[stage], "backward_state", {}).get(microbatch)
        if state is None or state[1] is None:
            return
        inputs = {id(value) for value in state[0]}
        weights = {node for node in found if id(node.variable) not in inputs}
        queued = {node for group in state[1] for node in group["params"]}
        left = [node.variable for node in weights - queued]
        if left:
            names = {id(value): name for name, value in self._module(stage).named_parameters()}
            said = sorted(
                names.get(id(v)) or f"one of shape {tuple(v.shape)} that is no longer a parameter"
                for v in left
            )
            raise refused(
                "ownership.work-not-queued",
                "commit_dgrad",
                f"no deferred work for {len(left)} of {len(weights)} weights in the graph of stage "
                f"{stage}, microbatch {microbatch}: {', '.join(said[:3])}",
                "deferred work for every weight that the forward has used",
            )

    def wrote(self, event: Event, microbatches: int) -> None:
        """
        Record that an action has run and may have written gradients.

        Args:
            event: The action.
            microbatches: Number of microbatches in the step. The backward of the last microbatch
                reduces the gradients.

        Raises:
            Refused: ``reduction.incomplete``: the action has reduced gradients, but is not the last
                backward.
        """
        kind, stage, _ = event
        hooks = self._replicas.get(stage)
        if hooks is None or kind not in ("B", "W"):
            return
        wrote = self._wrote.setdefault(stage, [])
        wrote.append((event, hooks.passed()))
        early = hooks.armed and wrote[-1][1] and len(wrote) < microbatches
        hooks.armed = hooks.armed and not wrote[-1][1]
        if early:
            raise refused(
                "reduction.incomplete",
                "start_reduction",
                f"gradients of stage {stage} reduced over its replicas by {_text(event)}: a "
                "forward before the step had prepared this reduction in DistributedDataParallel",
                f"one reduction, by the last of {microbatches} backwards",
            )

    def check_replicas(self) -> None:
        """
        Check that DistributedDataParallel reduced the gradients of each stage in the stage's last
        backward.

        Raises:
            Refused: ``reduction.missing``: the gradients of a stage were not reduced.
        """
        for stage, wrote in self._wrote.items():
            event, passed = wrote[-1]
            if not passed:
                raise refused(
                    "reduction.missing",
                    "check_update",
                    f"gradients of stage {stage}: its last backward, {_text(event)}, passed none "
                    "of the nodes where DistributedDataParallel reduces them",
                    "one reduction over the replicas, by the stage's last backward",
                )

    def forget_weights(self) -> None:
        """Forget the weights' versions after an update has written the weights."""
        self._weights.clear()

    def sharded(self) -> list[int]:
        """Return the stages whose weights are not watched, because FSDP replaces them."""
        return [
            stage
            for stage in self._stages
            if is_sharded(self._module(stage)) and not self._shards.get(stage)
        ]

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
            self._weights[stage] = Weights(self._module(stage), shards=self._shards.get(stage))
        else:
            weights.check(_CHECKS[kind], stage)

    def check_update(self) -> None:
        """
        Check that no weight was written since its stage's first F of the epoch.

        Raises:
            Refused: ``version.wrong-epoch``.
        """
        for stage, weights in self._weights.items():
            weights.check("check_update", stage)

    def keeps_graphs(self, stage: int) -> bool:
        """Whether a stage computes with its own graphs, without autograd."""
        return any(hasattr(self._stages[stage], name) for name in OWN_GRAPHS)

    def keeps_records(self, stage: int) -> bool:
        """Whether a stage computes with its own graphs and keeps records of their runs."""
        return self.keeps_graphs(stage) and keeps_records(self._stages[stage])

    def still_reduces(self, stage: int) -> bool:
        """Whether torch (2.15 and later) has not yet waited for a reduction that it started."""
        return getattr(self._stages[stage], "_gradient_reduction_handle", None) is not None

    def watch(self, event: Event, *, registered: bool = False) -> None:
        """
        Watch an action if its method is no longer the guard's method.

        Args:
            event: The action.
            registered: Whether a function registered with torch runs the action.
        """
        kind, stage, _ = event
        name = METHODS[kind]
        if not registered and vars(self._stages[stage]).get(name) is self._own.get((stage, name)):
            return
        if registered and self.keeps_records(stage):
            self._watched[event] = recorded(self._stages[stage], event)
        elif kind == "F":
            self._watched[event] = self._forward(event)
        elif kind == "I" and self._stages[stage].is_first:  # see `untouched`
            self._watched[event] = lambda: True
        elif kind in ("W", "REDUCE_GRAD"):
            self._watched[event] = GradientWrites(self._module(stage)).seen
        else:
            self._watched[event] = self._backward(event)

    def _forward(self, event: Event) -> Callable[[], bool]:
        """Return a function that tells whether the module was called, and keeps the output."""
        calls = ForwardCalls(self._module(event[1]))

        def seen() -> bool:
            called = calls.seen()
            self._returned[event] = calls.output
            return called

        return seen

    def _backward(self, event: Event) -> Callable[[], bool]:
        """Return a function that tells whether a backward ran; a full one must write gradients."""
        kind, stage, microbatch = event
        before = self._passes.of((stage, microbatch)) or 0
        module = self._module(stage)
        writes = GradientWrites(module) if kind == "B" and not is_sharded(module) else None

        def seen() -> bool:
            passed = (self._passes.of((stage, microbatch)) or 0) > before
            return passed and (writes is None or writes.seen())

        return seen

    def replaced(self, event: Event) -> bool:
        """
        Whether there is no evidence that an action ran. The guard's method did not run this action.
        """
        seen = self._watched.pop(event, None)
        return seen is None or not seen()

    def forget(self, event: Event) -> None:
        """Stop watching an action, because the guard's method has run the action."""
        if (seen := self._watched.pop(event, None)) is not None:
            seen()

    def forwarded(self, event: Event) -> None:
        """
        Start to count backward passes through the outputs of a forward, which are stored in its
        stage.
        """
        _, stage, microbatch = event
        returned = self._returned.pop(event, None)
        outputs = _outputs(self._stages[stage], microbatch)
        if outputs is None:
            outputs = returned
        if outputs is not None:
            self._passes.watch((stage, microbatch), outputs)

    def untouched(self, event: Event) -> bool:
        """Whether a backward did not pass through the graph of its forward."""
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


def _text(event: Event) -> str:
    """An action in torch's notation."""
    return f"{event[1]}{event[0]}{event[2]}"


def _outputs(stage: Any, microbatch: int) -> Any:
    """Return the values in a stage from which a forward's backward starts, if there are any."""
    states = getattr(stage, "_forward_chunk_states", None)  # torch 2.15
    if states is not None:
        state = states.get(microbatch)
        return None if state is None else state.stage_output_for_backward()
    left = getattr(stage, "fwd_cache", {}).get(microbatch)
    return left[0] if isinstance(left, tuple) and left else None

"""
Delayed scaling: amax histories, scales, and the domain that updates them. An amax is the largest
absolute value of a tensor.

Quantizing a tensor records its amax in row 0 of its history and uses the *previous* scale. The roll
at the end of an action computes the next scales from the histories, and shifts the histories by one
row. Therefore each quantization belongs to an interval between two rolls. If a quantization moves
to another interval, numbers change; this happens, for example, if a weight cache is refreshed too
early. With epoch scales the interval is the whole epoch (optimizer step).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.text import shown

from ..devices import placed
from ..epoch_scales import Scales, require_scales, unnamed
from ..protocol import BackendError, StageBackend
from ..random_streams import POSITION
from .dropout import RandomNumbers

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
_FP32_MAX = torch.finfo(torch.float32).max


@attrs.frozen(eq=False)
class QuantizedTensor:
    """FP8 data, with the factor that converts the data back to the original values."""

    data: Tensor
    scale_inv: Tensor


@attrs.define(eq=False)
class ScalingState:
    """
    Amax histories and scales of the tensors that one layer quantizes in one direction (forward or
    backward).

    Args:
        history: The amaxes, with one row per interval and one column per tensor. Row 0 belongs to
            the current interval.
        scale: For each tensor, the factor that the next quantization uses.
        dtype: The FP8 type of this direction (HYBRID: E4M3 forward, E5M2 backward).
        live: For each tensor, the factor that converts its latest quantization back to the original
            values. Tapes refer to this factor. None if tapes contain a copy of the factor instead.
    """

    history: Tensor
    scale: Tensor
    dtype: torch.dtype
    live: Tensor | None = None

    @classmethod
    def empty(
        cls, length: int, tensors: int, dtype: torch.dtype, device: torch.device
    ) -> ScalingState:
        """Make a new state with histories of zeros and scales of 1."""
        return cls(
            history=torch.zeros(length, tensors, device=device),
            scale=torch.ones(tensors, device=device),
            dtype=dtype,
        )

    def requantize(self, value: Tensor, index: int, scale: Tensor) -> QuantizedTensor:
        """Quantize a tensor again with the scales of its F, without recording an amax."""
        limit = torch.finfo(self.dtype).max
        scaled = (value.float() * scale[index]).clamp_(-limit, limit)
        return QuantizedTensor(scaled.to(self.dtype), scale[index].reciprocal())

    def quantize(self, value: Tensor, index: int) -> QuantizedTensor:
        """
        Record a tensor's amax in the current interval, and quantize the tensor with the previous
        scale.
        """
        seen = self.history[0, index]
        torch.maximum(seen, value.abs().amax().float(), out=seen)
        limit = torch.finfo(self.dtype).max
        scaled = (value.float() * self.scale[index]).clamp_(-limit, limit)
        inverse = self.scale[index].reciprocal()
        if self.live is not None:
            inverse = self.live[index].copy_(inverse)
        return QuantizedTensor(scaled.to(self.dtype), inverse)

    def roll(self, margin: int) -> None:
        """
        End the current interval, and compute the next scale from the largest amax of the history.
        """
        amax = self.history.amax(0)
        if self.history.shape[0] > 1:
            self.history.copy_(self.history.roll(-1, 0))
        self.history[0].zero_()
        fresh = torch.finfo(self.dtype).max / amax / 2.0**margin
        fresh = torch.where((amax > 0.0) & torch.isfinite(amax), fresh, self.scale)
        self.scale.copy_(fresh.clamp_(max=_FP32_MAX))


@attrs.frozen(eq=False)
class Recomputation:
    """
    Data of a layer's F that are needed for the recomputation of its activations.

    Args:
        at: The value of the domain's `rolls` when F ran.
        scales: Copies of the scales that F used, by the identity (`id`) of their scaling state.
        position: The random generator's position at which F began to draw for the layer. dI
            advances this position when it draws again.
        microbatch: With epoch scales, the epoch and the microbatch of the F.
    """

    at: int
    scales: Mapping[int, Tensor]
    position: Tensor
    microbatch: tuple[int, int] | None = None


@attrs.define(eq=False)
class ReferenceDomain:
    """
    The state domain of a process: all reference stages, whose scales are updated together.

    Args:
        history_length: Number of entries of each amax history.
        device: Device of the stages; `cuda` without an index is the current CUDA device.
        margin: Number of powers of two that scaling leaves free below the largest FP8 value.
        tape_scales: With ``carried``, a tape keeps a copy of the scales of its F. With ``live``, a
            tape refers to the scales of the latest F, as in old libraries. The contract is
            configured with the same value.
        scales: When scales are updated: with ``action`` at the end of every F and dI, with
            ``epoch`` once an epoch, when `move_scales` is called. With ``epoch``, dropout's random
            numbers depend on layer, microbatch and epoch.

    Attributes:
        rolls: Number of scaling updates that the host has made so far: one per F and dI, successful
            or not; with epoch scales one per `move_scales`. This count is never reset.
        drops: Whether any stage of the domain uses dropout.
        random: The random numbers of the domain's dropout.

    Raises:
        ValueError: `history_length` is not an int of at least 1, or `tape_scales` or `scales` is
            unknown.
    """

    history_length: int = 4
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"), converter=placed)
    margin: int = 0
    tape_scales: str = "carried"
    scales: Scales = "action"
    drops: bool = attrs.field(default=False, init=False)
    rolls: int = attrs.field(default=0, init=False)
    frozen: bool = attrs.field(default=False, init=False)
    _stages: list[StageBackend] = attrs.field(factory=list, init=False)
    _forward: list[ScalingState] = attrs.field(factory=list, init=False)
    _backward: list[ScalingState] = attrs.field(factory=list, init=False)
    _depth: int = attrs.field(default=0, init=False)
    _first_unclaimed: bool = attrs.field(default=False, init=False)
    _used: set[int] = attrs.field(factory=set, init=False)
    recomputing: Recomputation | None = attrs.field(default=None, init=False)
    random: RandomNumbers = attrs.field(factory=RandomNumbers, init=False)
    _dropping: bool = attrs.field(default=True, init=False)
    _microbatch: tuple[int, int] | None = attrs.field(default=None, init=False)

    name = "reference"

    def __attrs_post_init__(self) -> None:
        if self.history_length.__class__ is not int or self.history_length < 1:
            raise ValueError(
                f"history_length must be an int of at least 1, got {shown(self.history_length)}"
            )
        if self.tape_scales not in ("carried", "live"):
            raise ValueError(
                f"tape_scales must be 'carried' or 'live', got {shown(self.tape_scales)}"
            )
        require_scales(self.scales)

    @property
    def stages(self) -> tuple[StageBackend, ...]:
        """The stages of the domain, in the order in which they joined."""
        return tuple(self._stages)

    def join(self, stage: StageBackend) -> None:
        """
        Add a stage and its scaling state to the domain.

        Raises:
            BackendError: The domain is frozen, so captured graphs would not update the new stage's
                scales.
        """
        if self.frozen:
            raise BackendError(
                f"stage {stage.index} joins a frozen state domain; build every stage of the "
                "process before capture"
            )
        self._stages.append(stage)

    def scaling(self, *, forward: bool, tensors: int) -> ScalingState:
        """
        Make the amax histories of one layer for one direction. They are rolled together with all
        other histories of that direction.
        """
        held = self._forward if forward else self._backward
        state = ScalingState.empty(
            self.history_length, tensors, E4M3 if forward else E5M2, self.device
        )
        if forward and self.tape_scales == "live":
            state.live = torch.ones(tensors, device=self.device)
        held.append(state)
        return state

    @contextmanager
    def forward_interval(self) -> Iterator[None]:
        """
        A context around a stage's F. Contexts may be nested. The exit of the outermost context
        rolls the forward histories, even if F raised an error.

        With epoch scales, histories are rolled neither at the exit of the outermost context nor in
        the backward of the first module.
        """
        by_action = self.scales == "action"
        if self._depth == 0:
            self._first_unclaimed = by_action
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and by_action:
                self.roll(forward=True)

    @property
    def in_forward(self) -> bool:
        """Whether the caller is inside a context of an F."""
        return self._depth > 0

    def around_recomputation(
        self, states: Sequence[ScalingState]
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """
        Return the two contexts that `torch.utils.checkpoint.checkpoint` needs for a layer's F.

        Args:
            states: The layer's forward scaling state.

        Returns:
            A context for the layer's F, and a context for the recomputation. The first context
            changes nothing. The second context quantizes with copies of the current scales, and
            records no amax.
        """
        scales = {id(state): state.scale.detach().clone() for state in states}
        drawn = self.random.position.clone()
        what = Recomputation(self.rolls, scales, drawn, self._microbatch)
        return nullcontext(), self._recompute(what)

    @contextmanager
    def _recompute(self, what: Recomputation) -> Iterator[None]:
        own = attrs.evolve(what, position=what.position.clone())
        outer, self.recomputing = self.recomputing, own
        try:
            yield
        finally:
            self.recomputing = outer

    def begin_forward(self, epoch: int, microbatch: int) -> None:
        """
        Set the microbatch of the next F. With epoch scales, dropout's random numbers depend on the
        microbatch.
        """
        self._microbatch = epoch, microbatch

    def drop(self, value: Tensor, probability: float, layer: int = 0, branch: int = 0) -> Tensor:
        """
        Apply dropout. A recomputation drops the same elements as its F.

        Args:
            value: The tensor.
            probability: Probability that an element is dropped.
            layer: The layer's number in the model.
            branch: The number of the residual branch within the layer.
        """
        if not self._dropping or probability == 0.0:
            return value
        again = self.recomputing
        if self.scales == "epoch":
            of = self._microbatch if again is None else again.microbatch
            if of is None:
                raise unnamed()
            return self.random.drop_named(value, probability, (*of, layer, branch))
        return self.random.drop(value, probability, None if again is None else again.position)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """A context without dropout, for an evaluation."""
        before, self._dropping = self._dropping, False
        try:
            yield
        finally:
            self._dropping = before

    def claim_first(self) -> bool:
        """
        Return whether the caller is the first FP8 module of this F. The backward of this first
        module rolls the backward histories.
        """
        claimed, self._first_unclaimed = self._first_unclaimed, False
        return claimed

    def use_scales(self, at: int) -> None:
        """Record that dI used the scales of the F that began when `rolls` was `at`."""
        if len(self._used) < 2:  # two are enough to see a mix
            self._used.add(at)

    def take_used(self) -> int | None:
        """
        Return which scales dI has used since the last call, as the value of `rolls` at their F.
        None if dI used the scales of no F or of several F.
        """
        used, self._used = self._used, set()
        return used.pop() if len(used) == 1 else None

    def roll(self, *, forward: bool) -> None:
        """
        End the current interval of every history of one direction (forward or backward), in every
        stage of the domain.
        """
        self.rolls += 1
        self._close(forward=forward)

    def move_scales(self) -> None:
        """
        End the current interval of every forward and backward history once, at the end of an epoch.

        Raises:
            BackendError: The scales of the domain are updated at every F and dI.
        """
        if self.scales != "epoch":
            raise BackendError(
                "the scales of this domain are updated at the end of every F and dI; make the "
                "domain with scales='epoch' to update its scales once an epoch"
            )
        self.rolls += 1
        self._close(forward=True)
        self._close(forward=False)

    def _close(self, *, forward: bool) -> None:
        with torch.no_grad():
            for state in self._forward if forward else self._backward:
                state.roll(self.margin)

    def freeze(self) -> None:
        """Close the set of stages before capture."""
        self.frozen = True

    def check_membership(self) -> None:
        """Do nothing, because `join` refuses every stage after `freeze`."""

    def extra_state(self) -> Mapping[str, Tensor]:
        """Return the position of the random generator, if a stage uses dropout by position."""
        drawn = self.drops and self.scales == "action"
        return {POSITION: self.random.position} if drawn else {}

    def capture_obstacles(self) -> tuple[str, ...]:
        """
        Return what prevents a capture: a device other than CUDA, or dropout, which draws on the
        host.
        """
        if self.drops:
            return ("dropout of the reference backend draws on the host",)
        if self.device.type != "cuda":
            return (f"device {self.device} has no CUDA graphs",)
        return ()

    def environment(self) -> Mapping[str, str]:
        """
        Return torch's version and torch's number of threads, because results on a CPU depend on
        both.
        """
        return {"torch": torch.__version__, "threads": str(torch.get_num_threads())}

    def recipe(self) -> Mapping[str, Any]:
        """
        Return the recipe (delayed scaling, HYBRID) as plain data. With epoch scales, the recipe
        also says when the scales are updated.
        """
        found = {
            "recipe": "DelayedScaling",
            "format": "HYBRID",
            "amax_history_len": self.history_length,
            "amax_compute_algo": "max",
            "margin": self.margin,
        }
        return found if self.scales == "action" else {**found, "scales": self.scales}

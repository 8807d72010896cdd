"""
Delayed scaling: amax histories, scales, and the domain that rolls them.

Quantizing a tensor records its amax in row 0 of its history and uses the *previous* scale; the roll
at the end of the action turns histories into the next scales. So each quantization belongs to an
interval between two rolls: moving a quantization into another interval (for example by refreshing a
weight cache too early) changes numbers. With epoch scales the interval is the whole epoch.
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
    """FP8 data, with the factor that converts these data back into values."""

    data: Tensor
    scale_inv: Tensor


@attrs.define(eq=False)
class ScalingState:
    """
    Histories and scales of the tensors that one layer quantizes in one direction.

    Args:
        history: The amaxes, by age (rows) and tensor (columns); row 0 is the open interval.
        scale: The factor that each tensor's next quantization uses.
        dtype: The FP8 type of this direction (HYBRID: E4M3 forward, E5M2 backward).
        live: The factor that converts each tensor's latest quantization back into values, if tapes
            refer to this factor; None if tapes carry a copy of the factor.
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
        """Record a tensor's amax in the open interval, and quantize it with the previous scale."""
        seen = self.history[0, index]
        torch.maximum(seen, value.abs().amax().float(), out=seen)
        limit = torch.finfo(self.dtype).max
        scaled = (value.float() * self.scale[index]).clamp_(-limit, limit)
        inverse = self.scale[index].reciprocal()
        if self.live is not None:
            inverse = self.live[index].copy_(inverse)
        return QuantizedTensor(scaled.to(self.dtype), inverse)

    def roll(self, margin: int) -> None:
        """Close the interval; the largest amax of the history gives the next scale."""
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
    Data of a layer's F that the recomputation of its activations needs.

    Args:
        at: The value of the domain's `rolls` when F ran.
        scales: Copies of the scales with which F quantized, by the identity of their scaling state.
        position: The generator's position at which F began to draw for the layer; dI advances this
            position as it draws again.
        microbatch: With epoch scales, the epoch and the microbatch of the F.
    """

    at: int
    scales: Mapping[int, Tensor]
    position: Tensor
    microbatch: tuple[int, int] | None = None


@attrs.define(eq=False)
class ReferenceDomain:
    """
    The state domain of a process: all reference stages, whose scaling state moves together.

    Args:
        history_length: Entries of each amax history.
        device: Device of the stages; `cuda` without an index is the current CUDA device.
        margin: Number of powers of two that scaling leaves free below the largest FP8 value.
        tape_scales: ``carried`` if a tape copies the scales of its F; ``live`` if a tape refers to
            the scales of the latest F, as in old libraries. The contract is configured with the
            same value.
        scales: When scales move: ``action`` at the end of every F and dI; ``epoch`` once an epoch,
            when `move_scales` is called. With ``epoch``, dropout's random numbers follow from
            layer, microbatch and epoch.

    Attributes:
        rolls: Number of scaling updates that the host has seen so far: one per F and dI, successful
            or not; with epoch scales one per `move_scales`. This count is never reset, so a reader
            that wants differences must remember an earlier value.
        drops: Whether a stage of the domain uses dropout.
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
        Take a stage's scaling state into the domain.

        Raises:
            BackendError: The domain is frozen: captured graphs would not roll the new stage.
        """
        if self.frozen:
            raise BackendError(
                f"stage {stage.index} joins a frozen state domain; build every stage of the "
                "process before capture"
            )
        self._stages.append(stage)

    def scaling(self, *, forward: bool, tensors: int) -> ScalingState:
        """
        Make the histories of one layer; they roll together with all other histories of their
        direction.
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
        A context around a stage's F. Contexts may be nested; the exit of the outermost context
        rolls the forward histories, even if F raised.

        With epoch scales no history rolls, neither at the exit of the outermost context nor in the
        backward of the first module.
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
        Announce the microbatch of the next F; with epoch scales, dropout's random numbers depend on
        the microbatch.
        """
        self._microbatch = epoch, microbatch

    def drop(self, value: Tensor, probability: float, layer: int = 0, branch: int = 0) -> Tensor:
        """
        Apply dropout; a recomputation drops the same elements as its F.

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
        Return whether the caller is the first FP8 module of this F. The backward of the first
        module rolls the histories.
        """
        claimed, self._first_unclaimed = self._first_unclaimed, False
        return claimed

    def use_scales(self, at: int) -> None:
        """Record that dI used the scales of the F that began when `rolls` was `at`."""
        if len(self._used) < 2:  # two are enough to see a mix
            self._used.add(at)

    def take_used(self) -> int | None:
        """
        Return the value of `rolls` at the F whose scales dI used since the last call; None if dI
        used scales of no F or of several F.
        """
        used, self._used = self._used, set()
        return used.pop() if len(used) == 1 else None

    def roll(self, *, forward: bool) -> None:
        """
        Close the interval of every history of one direction (forward or backward), in every stage
        of the domain.
        """
        self.rolls += 1
        self._close(forward=forward)

    def move_scales(self) -> None:
        """
        Close the interval of every forward and backward history once, at the end of an epoch.

        Raises:
            BackendError: The scales of the domain move at every F and dI.
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
        """Do nothing: no stage can join unseen, because `join` refuses after `freeze`."""

    def extra_state(self) -> Mapping[str, Tensor]:
        """The position of the random generator, if a stage drops elements and draws by position."""
        drawn = self.drops and self.scales == "action"
        return {POSITION: self.random.position} if drawn else {}

    def capture_obstacles(self) -> tuple[str, ...]:
        """
        Return obstacles to capture: a device other than CUDA, and dropout, which draws on the host.
        """
        if self.drops:
            return ("dropout of the reference backend draws on the host",)
        if self.device.type != "cuda":
            return (f"device {self.device} has no CUDA graphs",)
        return ()

    def environment(self) -> Mapping[str, str]:
        """Return torch's version and its number of threads; results on a CPU depend on both."""
        return {"torch": torch.__version__, "threads": str(torch.get_num_threads())}

    def recipe(self) -> Mapping[str, Any]:
        """
        Return the recipe (delayed scaling, HYBRID) as plain data. With epoch scales, the recipe
        also says when the scales move.
        """
        found = {
            "recipe": "DelayedScaling",
            "format": "HYBRID",
            "amax_history_len": self.history_length,
            "amax_compute_algo": "max",
            "margin": self.margin,
        }
        return found if self.scales == "action" else {**found, "scales": self.scales}

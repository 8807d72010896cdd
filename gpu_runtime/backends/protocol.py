"""
What a stateful layer library must reveal so that its F, dI and dW can be guarded.

Two protocols. A `StateDomain` is the numerical state that every F and every dI moves, with all the
stages that share it: in Transformer Engine it is the whole process, because each update goes over
every registered module and rolls what has a new entry. A `StageBackend` is one pipeline stage (one
chunk): it maps a tuple of tensors to a tuple of tensors, keeps the work between dI and dW on a
`Tape`, and says which of the kernel's relations it needs. The paper lists the same questions in
"What a backend contract would need" (Section VI).

A backend guards nothing and knows no epoch, key or generation. It answers, and the runtime asks the
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

RELATIONS = (
    "ownership",
    "version",
    "order",
    "arena",
    "capture",
    "completion",
    "reduction",
    "persistence",
)
"""The kernel's relations by name; a backend lists those that it uses."""


TAPE_SCALES = ("carried", "live")
"""What dI can dequantize its tape with; see `Reports.tape_scales`."""


class BackendError(RuntimeError):
    """A backend cannot do what was asked; the message says what is missing and what to do."""


@attrs.frozen
class TensorSpec:
    """
    Shape, type and place of one tensor that crosses a stage boundary.

    Args:
        shape: The fixed shape; captured graphs need one.
        dtype: The element type.
        device: Where the tensor lives.
        differentiable: Whether a gradient flows back through it. Token ids, targets and the input
            of a first stage are not.
    """

    shape: tuple[int, ...] = attrs.field()
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = True

    def buffer(self) -> Tensor:
        """A zeroed static buffer, a leaf of autograd where a gradient flows through it."""
        made = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_() if self.differentiable else made

    def mismatch(self, tensor: Tensor) -> str | None:
        """What differs between a tensor and this, in words; None when nothing does."""
        if tensor.shape != self.shape:
            return f"expected shape {self.shape}, found {tuple(tensor.shape)}"
        if tensor.dtype != self.dtype:
            return f"expected dtype {self.dtype}, found {tensor.dtype}"
        if tensor.device != self.device:
            return f"expected device {self.device}, found {tensor.device}"
        return None


@attrs.frozen(eq=False)
class Matrix:
    """
    A parameter whose gradient comes out of dW.

    Args:
        name: Its name within the stage.
        parameter: The parameter itself.
        start: First row of its gradient within its unit's.
        stop: One past the last.
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int


@attrs.frozen(eq=False)
class WgradUnit:
    """
    One piece of deferred work: one matrix product whose result is the gradient of its matrices.

    Split QKV has one unit for three matrices, because the library multiplies the three as one; so a
    destination belongs to a unit, and its matrices are adjacent rows of it.
    """

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all matrices together, and their common width."""
        return self.matrices[-1].stop, int(self.matrices[0].parameter.shape[1])

    def rows(self, gradient: Tensor) -> Iterable[tuple[Matrix, Tensor]]:
        """Each matrix with its rows of the unit's gradient."""
        for matrix in self.matrices:
            yield matrix, gradient[matrix.start : matrix.stop]


@attrs.frozen(eq=False)
class NonMatrix:
    """A parameter whose gradient comes out of dI (norm weights, biases, an embedding)."""

    name: str
    parameter: torch.nn.Parameter


@attrs.define(eq=False)
class DeferredWork:
    """One unit's retained operands and the function that multiplies them."""

    unit: WgradUnit
    operands: Sequence[Any]
    compute: Callable[..., Any]


@attrs.define(eq=False)
class Tape:
    """
    What one slot retains from its F until its dW: outputs with their graph, then deferred work.

    Args:
        slot: The slot that owns it.
        stores: Where the library queues deferred work; one private set for each slot, because a
            store is a bare FIFO queue without key or owner.
    """

    slot: int
    stores: tuple[Any, ...]
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    work: list[DeferredWork] = attrs.field(factory=list)
    bound: Mapping[str, Tensor] | None = None

    @property
    def queued(self) -> tuple[str, ...]:
        """Names of the units whose work waits, in the order in which dI queued them."""
        return tuple(w.unit.name for w in self.work)

    def clear(self) -> None:
        """Drop everything retained, as after dW or an abort."""
        self.inputs = ()
        self.outputs = ()
        self.work.clear()
        self.bound = None


@attrs.frozen(eq=False, kw_only=True)
class Reports:
    """
    What a stage's backend can say of its own effects, from the host alone: no device read.

    What is left out is taken on trust (`qeffect.StageConfig.on_trust`).

    Args:
        filled: Names of the matrices whose cache, the one that F reads now, was filled since the
            last call, each as often as it was.
        updates: How often the domain's scaling state was updated so far, by any stage.
        tape_scales: ``carried`` where a tape keeps the scales of its F and dI says in
            `Dgrads.scales` which it used; ``live`` where dI reads what the domain has by then.
        recorded: Whether what `filled` and `updates` say while an action is captured is true of
            each replay of its graph. False where the device decides, by a flag in its memory for
            one, whether a captured kernel does anything.

    Raises:
        ValueError: ``carried`` without `updates`, in which positions are counted.
    """

    filled: Callable[[], Sequence[str]] | None = None
    updates: Callable[[], int] | None = None
    tape_scales: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.in_(TAPE_SCALES))
    )
    recorded: bool = False

    def __attrs_post_init__(self) -> None:
        if self.tape_scales == "carried" and self.updates is None:
            raise ValueError("tape_scales='carried' needs updates: positions are counted in them")

    def captured(self) -> Reports:
        """
        What is left of it where graphs are replayed.

        The host sees a capture and no replay. So what was recorded is reported where it holds for
        every replay, and the position of a tape's scales never is.
        """
        live = "live" if self.tape_scales == "live" else None
        if not self.recorded:
            return Reports(tape_scales=live)
        return Reports(filled=self.filled, updates=self.updates, tape_scales=live, recorded=True)


@attrs.frozen(eq=False)
class Dgrads:
    """
    What dI returned.

    Args:
        inputs: One gradient for each differentiable input, in order; empty on a first stage.
        non_matrix: One for each of the stage's `non_matrix` parameters, in order.
        queued: The units whose work is now deferred.
        scales: What `Reports.updates` said when the F ran whose scales dI used; None where the
            backend does not report it, or used those of more than one.
    """

    inputs: tuple[Tensor, ...]
    non_matrix: tuple[Tensor, ...]
    queued: tuple[str, ...]
    scales: int | None = None


@attrs.frozen(eq=False)
class Wgrads:
    """
    What dW covered.

    Args:
        covered: Names of the matrices whose gradient was computed, in order, each as often as it
            was computed: the runtime checks that this is every matrix once.
        by_unit: The gradients by unit, in the bound destination or in the backend's own memory,
            which is valid until the slot is used again.
    """

    covered: tuple[str, ...]
    by_unit: Mapping[str, Tensor]


class Adding:
    """
    Whether each product of one dW adds to its destination: the second into one destination does.

    Args:
        accumulate: Whether the dW adds.
        joining: Units that add in any case: what they write, another stage has opened.
    """

    def __init__(self, accumulate: bool, joining: Collection[str] = ()) -> None:
        self.accumulate = accumulate
        self.joining = joining
        self._written: set[int] = set()

    def __call__(self, unit: WgradUnit, destination: Tensor | None) -> bool:
        """Whether the next product adds; without a destination it is in memory of its own."""
        if destination is None:
            return self.accumulate
        again = destination.data_ptr() in self._written
        self._written.add(destination.data_ptr())
        return again or self.accumulate or unit.name in self.joining


@runtime_checkable
class StateDomain(Protocol):
    """The numerical state that F and dI move, and every stage that shares it; it owns capture."""

    @property
    def name(self) -> str:
        """The library's name, as reports show it."""

    @property
    def device(self) -> torch.device:
        """Where the domain's stages run."""

    @property
    def stages(self) -> Sequence[StageBackend]:
        """Every stage of the domain, in the order in which they joined."""

    @property
    def frozen(self) -> bool:
        """Whether the set of modules is closed: captured graphs bake it in."""

    def freeze(self) -> None:
        """
        Close the set of modules before capture.

        Raises:
            BackendError: A stage is not warm yet, or a module outside the domain shares its state.
        """

    def check_membership(self) -> None:
        """
        Look whether a module has joined the shared state since `freeze`.

        Raises:
            BackendError: One has; captured graphs would not move its state.
        """

    def extra_state(self) -> Mapping[str, Tensor]:
        """Live numerical state that belongs to no single stage."""

    def capture_obstacles(self) -> tuple[str, ...]:
        """Why the domain cannot be captured, each in one line; empty when it can."""

    def environment(self) -> Mapping[str, str]:
        """Versions and settings that results depend on, for reports."""

    def recipe(self) -> Mapping[str, Any]:
        """The precision recipe as plain data: a restart under another one is refused."""


@runtime_checkable
class StageBackend(Protocol):
    """One pipeline stage of a stateful library."""

    @property
    def index(self) -> int:
        """The stage's index in the pipeline."""

    @property
    def domain(self) -> StateDomain:
        """The numerical state that this stage's F and dI move."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What F takes."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What F returns; dI takes one gradient for each differentiable one."""

    @property
    def units(self) -> tuple[WgradUnit, ...]:
        """The deferred products of one dW."""

    @property
    def non_matrix(self) -> tuple[NonMatrix, ...]:
        """The parameters whose gradients come out of dI, in a fixed order."""

    @property
    def relations(self) -> frozenset[str]:
        """The kernel's relations that this backend uses; the others are left out."""

    @property
    def reports(self) -> Reports:
        """What the stage says of its effects; `Reports()` for nothing, which is then trusted."""

    @property
    def survives_restart(self) -> frozenset[str]:
        """What a checkpoint keeps; everything else is rebuilt."""

    def new_tape(self, slot: int) -> Tape:
        """Empty retained work for one slot, with stores of its own."""

    def warm(self) -> None:
        """Create whatever the library creates on first use. Moves numerical state: restore it."""

    def forward(self, tape: Tape, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """F: the outputs, with everything that dI needs left on the tape."""

    def bind(self, tape: Tape, destinations: Mapping[str, Tensor] | None) -> None:
        """Say where the gradient of each unit goes, before dI; None lets the library allocate."""

    def dgrad(self, tape: Tape, output_gradients: Sequence[Tensor]) -> Dgrads:
        """dI: input and non-matrix gradients; matrix work is left on the tape."""

    def wgrad(
        self,
        tape: Tape,
        *,
        accumulate: bool,
        keep: bool = False,
        joining: Collection[str] = (),
    ) -> Wgrads:
        """
        dW: run the tape's deferred work into its bound destinations.

        Two units may be bound to one destination, as tied weights are: the second then adds.

        Args:
            tape: The tape that its own dI filled.
            accumulate: Add to the destination instead of overwriting it.
            keep: Leave the work on the tape, to capture it a second time.
            joining: Units that add in any case; given only where weights of two stages are tied.
        """

    def refresh_cache(self) -> None:
        """Quantize every weight into its cache again, in place, with this stage's current scale."""

    def cache_was_refreshed(self) -> None:
        """Note a refresh that a graph's replay has just enqueued; the host saw no call."""

    def cache_is_current(self) -> bool:
        """Whether no parameter has changed since the cache was last refreshed, as the host saw."""

    def cached_weights(self) -> Mapping[str, Tensor]:
        """Live tensors of the weight cache by name."""

    def numerical_state(self) -> Mapping[str, Tensor]:
        """Live tensors of the numerical state by name, in a form any rank can load."""

    def addresses(self) -> Mapping[str, int]:
        """Addresses that a captured graph bakes in: parameters, numerical state, caches."""

    def address_probe(self) -> Callable[[], Sequence[int]]:
        """
        Prepare a cheap look at everything that `addresses` names, for every step.

        Returns:
            A function whose result differs from its earlier ones whenever `addresses` would:
            something moved, was replaced, came or went. It may differ where `addresses` does not,
            so a difference is only a reason to ask that.
        """

    def capture_obstacles(self) -> tuple[str, ...]:
        """Why this stage cannot be captured, each in one line; empty when it can."""

    def native_forward(self, inputs: Sequence[Tensor], *, first: bool) -> tuple[Tensor, ...]:
        """F of the library's ordinary full backward, refreshing its cache on `first`."""

    def native_bind(self, destinations: Mapping[str, Tensor] | None) -> None:
        """Let the full backward accumulate into these instead of `.grad`."""


def module_probe(root: torch.nn.Module) -> Callable[[], list[int]]:
    """
    A look at a module tree: which modules it has, and where their parameters are.

    The tables of every module are looked up once; each look reads what they hold by then.
    """
    # Held here, so that no later module can have the identity of one of these.
    tree = list(root.modules())
    children = [module._modules for module in tree]
    parameters = [module._parameters for module in tree]

    def look() -> list[int]:
        found = [*map(id, chain.from_iterable(map(dict.values, children)))]
        held = chain.from_iterable(map(dict.values, parameters))
        found += map(Tensor.data_ptr, [p for p in held if p is not None])
        return found

    return look


def matrices(stage: StageBackend) -> tuple[Matrix, ...]:
    """Every matrix parameter of a stage, in the order of its units."""
    return tuple(matrix for unit in stage.units for matrix in unit.matrices)


def parameters(stage: StageBackend) -> dict[str, torch.nn.Parameter]:
    """Every parameter of a stage by name: matrices first, then the others."""
    found = {m.name: m.parameter for m in matrices(stage)}
    found.update((p.name, p.parameter) for p in stage.non_matrix)
    return found

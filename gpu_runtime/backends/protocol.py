"""
What a stateful layer library must reveal so that its F, dI and dW can be guarded.

A `StateDomain` is the numerical state that every F and every dI moves, with all stages that share
it. In Transformer Engine it is the whole process, because each update goes over every registered
module and rolls each history with a new entry. A `StageBackend` is one pipeline stage (one chunk):
it maps a tuple of tensors to a tuple of tensors, keeps the work between dI and dW on a `Tape`, and
lists the kernel's relations that it needs. The paper asks for these parts in "What a backend
contract would need" (Section VI).

A backend guards nothing and does not know epochs, keys or generations: it acts and reports, and the
runtime asks the kernel.
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
"""The scales with which dI dequantizes its tape; see `Reports.tape_scales`."""


class BackendError(RuntimeError):
    """A backend cannot do what it was asked; the message says what is missing and what to do."""


@attrs.frozen
class TensorSpec:
    """
    Shape, type and device of one tensor that crosses a stage boundary.

    Args:
        shape: The fixed shape; captured graphs need one.
        dtype: The element type.
        device: Device of the tensor.
        differentiable: Whether a gradient flows back through it. Token ids, targets and the input
            of a first stage are not differentiable.
    """

    shape: tuple[int, ...] = attrs.field()
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = True

    def buffer(self) -> Tensor:
        """A zeroed static buffer; a leaf of autograd if a gradient flows through it."""
        made = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_() if self.differentiable else made

    def mismatch(self, tensor: Tensor) -> str | None:
        """How a tensor differs from this specification, in words; None if it does not."""
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
        start: First row of the matrix's gradient within its unit's gradient.
        stop: One past the last row.
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int


@attrs.frozen(eq=False)
class WgradUnit:
    """
    One piece of deferred work: one matrix product whose result is the gradient of its matrices.

    Split QKV has one unit for three matrices, because the library multiplies all three in one
    product. So a destination belongs to a unit, and each matrix is a range of the destination's
    rows.
    """

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Total rows of all matrices, and their common width."""
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
    """
    One unit's retained operands and the function that multiplies them.

    Args:
        unit: The unit.
        operands: The operands, as `compute` takes them.
        compute: The function.
        join: Makes the operands of one product over several microbatches: it appends the rows
            (tokens) of the given operands in the given order, and may assume that all were
            quantized with the same scales. None if each microbatch has its own scales, and
            therefore needs its own product.
    """

    unit: WgradUnit
    operands: Sequence[Any]
    compute: Callable[..., Any]
    join: Callable[[Sequence[Any]], Sequence[Any]] | None = None


@attrs.define(eq=False)
class Tape:
    """
    What one slot retains from F to dW: outputs with their autograd graph, then deferred work.

    Args:
        slot: The slot that owns the tape.
        stores: Where the library queues deferred work; one private set per slot, because a store
            is a bare FIFO queue without key or owner.
        drawn: Where its F drew random numbers: positions of the generator, in order.
        weight: The factor by which its F weighted the microbatch's loss, as (numerator,
            denominator); None if the loss did not report it.
    """

    slot: int
    stores: tuple[Any, ...]
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    work: list[DeferredWork] = attrs.field(factory=list)
    bound: Mapping[str, Tensor] | None = None
    drawn: tuple[int, ...] = ()
    weight: tuple[int, int] | None = None

    @property
    def queued(self) -> tuple[str, ...]:
        """Names of the units with deferred work, in the order in which dI queued them."""
        return tuple(w.unit.name for w in self.work)

    def clear(self) -> None:
        """Drop everything retained, as after dW or an abort."""
        self.inputs = ()
        self.outputs = ()
        self.work.clear()
        self.bound = None
        self.drawn = ()
        self.weight = None


@attrs.frozen(eq=False, kw_only=True)
class Reports:
    """
    What a stage's backend reports about its own effects. The host has these reports without reading
    from the device.

    Effects that are not reported are taken on trust (`qeffect.StageConfig.on_trust`).

    Args:
        filled: Names of the matrices whose current cache (the cache that F reads now) was filled
            since the last call, one entry per fill.
        updates: Number of updates of the domain's scaling state so far, by any stage.
        tape_scales: ``carried`` if a tape keeps the scales of its F and dI reports in
            `Dgrads.scales` which scales it used; ``live`` if dI reads the domain's current scales.
        recorded: Whether the reports of `filled` and `updates` during a capture hold for each
            replay of the graph. False if the device decides whether a captured kernel acts, for
            example by a flag in its memory.
        draws: Whether F draws random numbers and notes the generator's positions on its tape
            (`Tape.drawn`). False if F draws no random numbers; None if F draws them without
            reporting the positions.
        places_draws: Whether the domain sets the random generator's position before each F, eager
            or replayed (its method `drawing`), so that the position is also known for a replay.
        recomputes: Whether dI recomputes F and reports in `Dgrads.draws` the position at which it
            draws again; requires `draws`. False if dI draws nothing again; None if dI draws without
            reporting the position.
        weights: Whether dI reports in `Dgrads.weight` by which factor the microbatch's gradient is
            weighted. A captured graph has the factor of its capture.

    Raises:
        ValueError: `tape_scales` is ``carried`` without `updates`, in which the position of an F is
            counted.
    """

    filled: Callable[[], Sequence[str]] | None = None
    updates: Callable[[], int] | None = None
    tape_scales: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.in_(TAPE_SCALES))
    )
    recorded: bool = False
    draws: bool | None = False
    places_draws: bool = False
    recomputes: bool | None = False
    weights: bool = False

    def __attrs_post_init__(self) -> None:
        if self.tape_scales == "carried" and self.updates is None:
            raise ValueError(
                "tape_scales='carried' needs updates=, the number by which dI names the scales "
                "of its F"
            )

    def captured(self) -> Reports:
        """
        The reports that remain if graphs are replayed.

        The host sees a capture, but no replay. A recorded effect is reported only if it holds for
        every replay. The position of random numbers is reported only if the domain sets it before
        each replay. The position of a tape's scales is never reported.
        """
        live = "live" if self.tape_scales == "live" else None
        unseen = attrs.evolve(self, tape_scales=live, **self._unseen())
        if self.places_draws:
            unseen = attrs.evolve(unseen, draws=self.draws)
        return unseen if self.recorded else attrs.evolve(unseen, filled=None, updates=None)

    def without_order(self) -> Reports:
        """The reports that remain if the order relation is left out."""
        return attrs.evolve(self, updates=None, tape_scales=None, **self._unseen())

    def _unseen(self) -> dict[str, Any]:
        """The reports about random numbers that remain if their positions are not reported."""
        return {
            "draws": None if self.draws is not False else False,
            "recomputes": None if self.recomputes is not False else False,
        }

    def on_trust(self) -> tuple[str, ...]:
        """Return what is taken on trust about random numbers."""
        claims = (
            (self.draws, "each F draws new random numbers"),
            (self.recomputes, "a recomputation draws the same random numbers as its F"),
        )
        return tuple(claim for reported, claim in claims if reported is None)


@attrs.frozen(eq=False)
class Dgrads:
    """
    Results of dI.

    Args:
        inputs: One gradient per differentiable input, in order; empty on a first stage.
        non_matrix: One gradient per `non_matrix` parameter of the stage, in order.
        queued: The units whose work is now deferred.
        scales: Value of `Reports.updates` at the F whose scales dI used; None if the backend does
            not report it, or if dI used the scales of more than one F.
        draws: Where the recomputation of F began to draw random numbers; None if not reported.
        weight: The factor by which the microbatch's gradient is weighted, as (numerator,
            denominator); None if not reported.
    """

    inputs: tuple[Tensor, ...]
    non_matrix: tuple[Tensor, ...]
    queued: tuple[str, ...]
    scales: int | None = None
    draws: int | None = None
    weight: tuple[int, int] | None = None


@attrs.frozen(eq=False)
class Wgrads:
    """
    Results of dW.

    Args:
        covered: Names of the matrices whose gradient was computed, in order, one entry per
            computation: the runtime checks that every matrix occurs once.
        by_unit: The gradients by unit, in the bound destination or in the backend's own memory,
            which is valid until the slot is used again.
    """

    covered: tuple[str, ...]
    by_unit: Mapping[str, Tensor]


def products(tape: Tape, others: Sequence[Tape]) -> Iterable[DeferredWork]:
    """
    The products of a dW over one or several tapes of a stage, in the order of the first tape.

    With several tapes, a unit has one product if its operands can be joined, else one per tape.

    Args:
        tape: The first tape.
        others: Further tapes, whose rows follow in this order.

    Raises:
        BackendError: A tape has deferred other units than the first.
    """
    for at, work in enumerate(tape.work):
        if not others:
            yield work
            continue
        parts = [work]
        for other in others:
            if other.queued != tape.queued:
                raise BackendError(
                    f"dI deferred {other.queued} in slot {other.slot}, but {tape.queued} in slot "
                    f"{tape.slot} of the same dW; group only tapes of one stage, after their dI"
                )
            parts.append(other.work[at])
        if work.join is None:
            yield from parts
        else:
            joined = work.join([part.operands for part in parts])
            yield DeferredWork(work.unit, joined, work.compute)


class Accumulation:
    """
    Whether each product of a dW adds to its destination; a second product into it always adds.

    Args:
        accumulate: Whether the dW adds to its destinations.
        joining: Units that add in any case, because another stage has written their destination.
    """

    def __init__(self, accumulate: bool, joining: Collection[str] = ()) -> None:
        self.accumulate = accumulate
        self.joining = joining
        self._written: set[int] = set()

    def __call__(self, unit: WgradUnit, destination: Tensor | None) -> bool:
        """
        Whether the next product adds to its destination; a product without a destination gets fresh
        memory.
        """
        if destination is None:
            return self.accumulate
        again = destination.data_ptr() in self._written
        self._written.add(destination.data_ptr())
        return again or self.accumulate or unit.name in self.joining


@runtime_checkable
class StateDomain(Protocol):
    """The numerical state that F and dI move, and every stage that shares it."""

    @property
    def name(self) -> str:
        """The library's name in reports."""

    @property
    def device(self) -> torch.device:
        """Device of the domain's stages."""

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
        Check that no module has joined the shared state since `freeze`.

        Raises:
            BackendError: A module has joined; captured graphs would not update its state.
        """

    def extra_state(self) -> Mapping[str, Tensor]:
        """Live numerical state that belongs to no single stage."""

    def capture_obstacles(self) -> tuple[str, ...]:
        """Why the domain cannot be captured, one line per obstacle; empty if it can."""

    def environment(self) -> Mapping[str, str]:
        """Versions and settings that affect results, for reports."""

    def recipe(self) -> Mapping[str, Any]:
        """The precision recipe as plain data: a restart under another recipe is refused."""


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
        """Specifications of F's inputs."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specifications of F's outputs; dI takes one gradient per differentiable output."""

    @property
    def units(self) -> tuple[WgradUnit, ...]:
        """The deferred products of one dW."""

    @property
    def non_matrix(self) -> tuple[NonMatrix, ...]:
        """The parameters whose gradients come out of dI, in a fixed order."""

    @property
    def relations(self) -> frozenset[str]:
        """The kernel's relations that this backend uses; all others are left out."""

    @property
    def reports(self) -> Reports:
        """The stage's reports of its effects; with `Reports()` all effects are taken on trust."""

    @property
    def survives_restart(self) -> frozenset[str]:
        """State that a checkpoint keeps; everything else is rebuilt."""

    def new_tape(self, slot: int) -> Tape:
        """An empty tape for one slot, with its own stores."""

    def warm(self) -> None:
        """
        Create what the library creates on first use. This changes numerical state: restore the
        state.
        """

    def forward(self, tape: Tape, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """F: return the outputs; everything that dI needs stays on the tape."""

    def bind(self, tape: Tape, destinations: Mapping[str, Tensor] | None) -> None:
        """Set each unit's gradient destination, before dI; None lets the library allocate."""

    def dgrad(self, tape: Tape, output_gradients: Sequence[Tensor]) -> Dgrads:
        """dI: return input and non-matrix gradients; matrix work stays on the tape."""

    def wgrad(
        self,
        tape: Tape,
        *,
        accumulate: bool,
        keep: bool = False,
        joining: Collection[str] = (),
        others: Sequence[Tape] = (),
    ) -> Wgrads:
        """
        dW: run the tape's deferred work into its bound destinations.

        Two units may be bound to one destination, for tied weights: the second unit then adds.

        Args:
            tape: The tape that the same microbatch's dI filled.
            accumulate: Add to the destination instead of overwriting it.
            keep: Leave the work on the tape, to capture it a second time.
            joining: Units that add in any case; passed only if weights of two stages are tied.
            others: Further tapes of the stage, whose dI have run under the same scales. Where
                possible, one product does the work of all tapes (`products`); it writes to the
                first tape's destinations. Only stages whose `groups_wgrads` is True get further
                tapes.
        """

    def refresh_cache(self) -> None:
        """Quantize every weight into its cache again, in place, with this stage's current scale."""

    def cache_was_refreshed(self) -> None:
        """Note a refresh that a graph replay has just enqueued without a call of the backend."""

    def cache_is_current(self) -> bool:
        """Whether, as far as the host saw, no parameter has changed since the last refresh."""

    def cached_weights(self) -> Mapping[str, Tensor]:
        """Live tensors of the weight cache by name."""

    def numerical_state(self) -> Mapping[str, Tensor]:
        """Live tensors of the numerical state by name, in a form that any rank can load."""

    def addresses(self) -> Mapping[str, int]:
        """Addresses that a captured graph bakes in: parameters, numerical state, caches."""

    def address_probe(self) -> Callable[[], Sequence[int]]:
        """
        Prepare a cheap check, for every step, of everything that `addresses` names.

        Returns:
            A function whose result differs from its earlier results whenever `addresses` would
            differ: a tensor was moved, replaced, added or removed. The result may differ although
            `addresses` does not; so after a difference, compare `addresses`.
        """

    def capture_obstacles(self) -> tuple[str, ...]:
        """Why this stage cannot be captured, one line per obstacle; empty if it can."""

    def native_forward(self, inputs: Sequence[Tensor], *, first: bool) -> tuple[Tensor, ...]:
        """F for the library's ordinary full backward; refreshes the cache if `first`."""

    def native_bind(self, destinations: Mapping[str, Tensor] | None) -> None:
        """Let the full backward accumulate into these tensors instead of `.grad`."""


def module_probe(root: torch.nn.Module) -> Callable[[], list[int]]:
    """
    A cheap check of a module tree: its modules, and the addresses of their parameters.

    The tables of every module are looked up once; each check reads their current contents.
    """
    # Kept alive here, so that no later module can reuse the identity of one of these.
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

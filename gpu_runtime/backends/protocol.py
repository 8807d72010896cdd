"""
The interface that a stateful layer library must offer so that the contract can guard its F, dI and
dW (a stage's forward, input gradient and weight gradient for one microbatch).

A `StateDomain` is the numerical state (FP8 scales and amax histories) that every F and every dI
changes, with all stages that share this state. In Transformer Engine the domain is the whole
process, because each update goes over every registered module. The update rolls (shifts by one
entry) each history with a new entry. A `StageBackend` is one pipeline stage: it maps a tuple of
tensors to a tuple of tensors, and keeps the work between dI and dW on a `Tape`. It also lists the
contract's relations (groups of clauses) that it needs. The paper lists these requirements in "What
a backend contract would need" (Section VI).

A backend checks nothing, and does not know the contract's epochs, keys (an epoch, stage and
microbatch) or slot generations (counters of a slot's uses). A backend acts and reports; the runtime
asks the contract.
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
"""The contract's relations (groups of clauses) by name; a backend lists those that it uses."""


TAPE_SCALES = ("carried", "live")
"""Which scales dI uses to dequantize its tape; see `Reports.tape_scales`."""


class BackendError(RuntimeError):
    """
    A backend cannot do what the caller asked; the message says what is missing and what to do.
    """


@attrs.frozen
class TensorSpec:
    """
    Shape, type and device of one tensor that crosses a stage boundary.

    Args:
        shape: The fixed shape, which captured graphs need.
        dtype: The element type.
        device: Device of the tensor.
        differentiable: Whether a gradient flows back through the tensor. Token ids, targets and the
            input of a first stage are not differentiable.
    """

    shape: tuple[int, ...] = attrs.field()
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = True

    def buffer(self) -> Tensor:
        """
        Make a zeroed static buffer; the buffer is a leaf of autograd if a gradient flows through
        it.
        """
        made = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_() if self.differentiable else made

    def mismatch(self, tensor: Tensor) -> str | None:
        """Say how a tensor differs from this specification; None if it fits."""
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
    A parameter whose gradient dW computes.

    Args:
        name: The parameter's name within the stage.
        parameter: The parameter itself.
        start: One matrix product may compute the gradients of several matrices; `start` is the
            first row of this matrix's gradient in the result of that product.
        stop: One past the last row of this matrix's gradient.
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int


@attrs.frozen(eq=False)
class WgradUnit:
    """
    A deferred matrix product whose result is the gradient of one or more matrices.

    Split QKV has one unit for three matrices, because the library multiplies all three in one
    product. So the three gradients share one destination (the tensor that the product is written
    to), and each gradient takes a range of its rows (`start` to `stop`).
    """

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The total number of rows of all matrices, and their common width."""
        return self.matrices[-1].stop, int(self.matrices[0].parameter.shape[1])

    def rows(self, gradient: Tensor) -> Iterable[tuple[Matrix, Tensor]]:
        """Yield each matrix with its rows of the unit's gradient."""
        for matrix in self.matrices:
            yield matrix, gradient[matrix.start : matrix.stop]


@attrs.frozen(eq=False)
class NonMatrix:
    """A parameter whose gradient dI computes (norm weights, biases, an embedding)."""

    name: str
    parameter: torch.nn.Parameter


@attrs.define(eq=False)
class DeferredWork:
    """
    The operands of a unit's deferred product, and the function that multiplies them.

    Args:
        unit: The unit.
        operands: The arguments of `compute`.
        compute: The function that multiplies the operands.
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
    The data that one slot retains from F to dW: outputs with their autograd graph, then deferred
    work.

    Args:
        slot: The slot that owns the tape.
        stores: The library's queues of deferred work. Each slot has private stores, because a store
            is a plain FIFO queue without key or owner.
        drawn: The positions of the generator at which F drew random numbers, in order.
        weight: The factor by which F weighted the microbatch's loss, as (numerator, denominator);
            None if the loss did not report the factor.
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
        """Drop all retained data, after dW or an abort."""
        self.inputs = ()
        self.outputs = ()
        self.work.clear()
        self.bound = None
        self.drawn = ()
        self.weight = None


@attrs.frozen(eq=False, kw_only=True)
class Reports:
    """
    Which effects of its F, dI and dW a stage's backend reports. The host gets these reports without
    reading from the device.

    The contract takes all other effects on trust (`qeffect.StageConfig.on_trust`).

    Args:
        filled: Function that returns the matrices whose current cache (the cache that F reads now)
            was filled since the last call, one entry per fill.
        updates: Function that returns the number of updates of the domain's scaling state so far,
            by any stage.
        tape_scales: ``carried`` if a tape keeps the scales of its F, and dI reports in
            `Dgrads.scales` which scales it used; ``live`` if dI reads the domain's current scales.
        recorded: Whether the reports of `filled` and `updates` during a capture are also true for
            each replay of the graph. False if the device decides whether a captured kernel acts,
            for example by a flag in its memory.
        draws: Whether F draws random numbers and notes the generator's positions on its tape
            (`Tape.drawn`). False if F draws no random numbers; None if F draws them without
            reporting the positions.
        places_draws: Whether the domain's method `drawing` sets the random generator's position
            before each F, so that the position is known even if F is a replay.
        recomputes: Whether dI recomputes F and reports in `Dgrads.draws` the position at which it
            draws again; requires `draws`. False if dI draws no random numbers again; None if dI
            draws without reporting the position.
        weights: Whether dI reports in `Dgrads.weight` the factor of the microbatch's gradient. A
            captured graph keeps the factor of its capture.

    Raises:
        ValueError: `tape_scales` is ``carried`` without `updates`, whose counts identify the scales
            of an F.
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
        Return those reports that are still valid if graphs are replayed.

        The host sees a capture, but no replay. Fills and updates are reported only if `recorded`
        says that they hold for every replay. The position of random numbers is reported only if the
        domain sets this position before each replay. The scales that dI used are never reported.
        """
        live = "live" if self.tape_scales == "live" else None
        unseen = attrs.evolve(self, tape_scales=live, **self._unseen())
        if self.places_draws:
            unseen = attrs.evolve(unseen, draws=self.draws)
        return unseen if self.recorded else attrs.evolve(unseen, filled=None, updates=None)

    def without_order(self) -> Reports:
        """Return the reports without those that only the relation ``order`` uses."""
        return attrs.evolve(self, updates=None, tape_scales=None, **self._unseen())

    def _unseen(self) -> dict[str, Any]:
        """Return the reports about random numbers without the positions of the draws."""
        return {
            "draws": None if self.draws is not False else False,
            "recomputes": None if self.recomputes is not False else False,
        }

    def on_trust(self) -> tuple[str, ...]:
        """Return the assumptions about random numbers that the contract does not check."""
        claims = (
            (self.draws, "each F draws new random numbers"),
            (self.recomputes, "a recomputation draws the same random numbers as its F"),
        )
        return tuple(claim for reported, claim in claims if reported is None)


@attrs.frozen(eq=False)
class Dgrads:
    """
    The results of dI.

    Args:
        inputs: One gradient per differentiable input of the stage, in order; empty on a first
            stage.
        non_matrix: One gradient per `non_matrix` parameter of the stage, in order.
        queued: The units whose dW is now deferred.
        scales: Value of `Reports.updates` at the F whose scales dI used; None if the backend does
            not report this value, or if dI used the scales of more than one F.
        draws: The generator's position at which the recomputation of F began to draw random
            numbers; None if not reported.
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
    The results of dW.

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
    Return the products of a dW over one or several tapes of a stage, in the first tape's order.

    With several tapes, a unit has one product if its operands can be joined, else one per tape.

    Args:
        tape: The first tape.
        others: Further tapes; the rows of their operands follow in this order.

    Raises:
        BackendError: A tape has deferred other units than the first tape.
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
    Decides whether each product of a dW adds to its destination; a second product into the same
    destination always adds.

    Args:
        accumulate: Whether the dW adds to its destinations.
        joining: Units that always add, because another stage has already written their destination.
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
    """The numerical state that F and dI change, and every stage that shares this state."""

    @property
    def name(self) -> str:
        """The name of the layer library, for reports."""

    @property
    def device(self) -> torch.device:
        """Device of the domain's stages."""

    @property
    def stages(self) -> Sequence[StageBackend]:
        """Every stage of the domain, in the order in which the stages joined."""

    @property
    def frozen(self) -> bool:
        """Whether the set of modules is closed; captured graphs depend on this set."""

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
        """Return the live tensors of numerical state that belong to no single stage."""

    def capture_obstacles(self) -> tuple[str, ...]:
        """
        Return why the domain cannot be captured, one line per obstacle; empty if it can be
        captured.
        """

    def environment(self) -> Mapping[str, str]:
        """Return the versions and settings that affect results, for reports."""

    def recipe(self) -> Mapping[str, Any]:
        """Return the precision recipe as plain data; a restart under another recipe is refused."""


@runtime_checkable
class StageBackend(Protocol):
    """One pipeline stage of a stateful library."""

    @property
    def index(self) -> int:
        """The stage's index in the pipeline."""

    @property
    def domain(self) -> StateDomain:
        """The domain with the numerical state that this stage's F and dI change."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Specifications of F's inputs."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specifications of F's outputs; dI takes one gradient per differentiable output."""

    @property
    def units(self) -> tuple[WgradUnit, ...]:
        """
        The stage's units: the matrix products that one dW computes. The result of a unit is the
        gradient of one or more matrices.
        """

    @property
    def non_matrix(self) -> tuple[NonMatrix, ...]:
        """The parameters whose gradients dI computes, in a fixed order."""

    @property
    def relations(self) -> frozenset[str]:
        """
        The contract's relations (groups of clauses) that this backend uses; all others are left
        out.
        """

    @property
    def reports(self) -> Reports:
        """
        The stage's reports of its effects; `Reports()` reports none, so all effects are taken on
        trust.
        """

    @property
    def survives_restart(self) -> frozenset[str]:
        """Return the names of the state that a checkpoint keeps; all other state is rebuilt."""

    def new_tape(self, slot: int) -> Tape:
        """Make an empty tape for one slot, with its own stores."""

    def warm(self) -> None:
        """
        Run the stage once, so that the library creates its buffers. This changes numerical state;
        the caller restores it.
        """

    def forward(self, tape: Tape, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """F: return the outputs, and leave on the tape everything that dI needs."""

    def bind(self, tape: Tape, destinations: Mapping[str, Tensor] | None) -> None:
        """Set each unit's gradient destination, before dI; None lets the library allocate."""

    def dgrad(self, tape: Tape, output_gradients: Sequence[Tensor]) -> Dgrads:
        """
        dI: return the input gradients and the non-matrix gradients; the work for dW stays on the
        tape.
        """

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
        dW: run the tape's deferred products, which write the bound destinations.

        Two units may be bound to one destination, for tied weights: the second unit then adds.

        Args:
            tape: The tape that the same microbatch's dI filled.
            accumulate: Add to the destination instead of overwriting it.
            keep: Leave the work on the tape, so that dW can be captured a second time.
            joining: Units that add even if `accumulate` is False; passed only if weights of two
                stages are tied.
            others: Further tapes of the stage, whose dI have run under the same scales. Where
                possible, one product does the work of all tapes (`products`); it writes to the
                first tape's destinations. Only stages whose `groups_wgrads` is True get further
                tapes.
        """

    def refresh_cache(self) -> None:
        """Quantize every weight into its cache again, in place, with the stage's current scale."""

    def cache_was_refreshed(self) -> None:
        """
        Record that a graph replay has just enqueued a refresh, without a call of `refresh_cache`.
        """

    def cache_is_current(self) -> bool:
        """Whether no parameter has changed since the last refresh, as far as the host knows."""

    def cached_weights(self) -> Mapping[str, Tensor]:
        """Return the live tensors of the weight cache by name."""

    def numerical_state(self) -> Mapping[str, Tensor]:
        """
        Return the live tensors of the numerical state, by names that are the same on every rank.
        """

    def addresses(self) -> Mapping[str, int]:
        """
        Return the addresses that a captured graph contains: parameters, numerical state, caches.
        """

    def address_probe(self) -> Callable[[], Sequence[int]]:
        """
        Prepare a check of all `addresses` that is cheap enough for every step.

        Returns:
            A function whose result differs from its earlier results whenever `addresses` would
            differ: a tensor was moved, replaced, added or removed. The result may differ even if
            `addresses` does not; so after a difference, compare `addresses`.
        """

    def capture_obstacles(self) -> tuple[str, ...]:
        """
        Return why this stage cannot be captured, one line per obstacle; empty if it can be
        captured.
        """

    def native_forward(self, inputs: Sequence[Tensor], *, first: bool) -> tuple[Tensor, ...]:
        """Run F for the library's ordinary full backward; `first` refreshes the cache."""

    def native_bind(self, destinations: Mapping[str, Tensor] | None) -> None:
        """Let the full backward accumulate into these tensors instead of `.grad`."""


def module_probe(root: torch.nn.Module) -> Callable[[], list[int]]:
    """
    Return a function that cheaply lists the identities of a tree's modules and the addresses of its
    parameters. If two lists differ, the tree has changed.

    Each module's tables of parameters and submodules are looked up once; each call reads their
    current contents.
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
    """Return every matrix parameter of a stage, in the order of the stage's units."""
    return tuple(matrix for unit in stage.units for matrix in unit.matrices)


def parameters(stage: StageBackend) -> dict[str, torch.nn.Parameter]:
    """Return every parameter of a stage by name: matrices first, then all others."""
    found = {m.name: m.parameter for m in matrices(stage)}
    found.update((p.name, p.parameter) for p in stage.non_matrix)
    return found

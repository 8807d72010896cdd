"""
The interface that a layer library with state must offer. The contract can then guard the library's
F, dI and dW (a stage's forward, input gradient and weight gradient for one microbatch).

A `StateDomain` consists of the numerical state (FP8 scales and amax histories) that every F and
every dI changes, and of all stages that share this state. In Transformer Engine the domain is the
whole process, because each update covers every registered module. An update rolls (shifts by one
entry) each history that has a new entry. A `StageBackend` is one pipeline stage: it maps a tuple of
tensors to a tuple of tensors, and keeps the work between dI and dW on a `Tape`. A `StageBackend`
also lists the relations (groups of clauses) of the contract that apply to it. The paper lists these
requirements in "What a backend contract would need" (Section VI).

A backend checks nothing. It does not know the contract's epochs, keys (an epoch, stage and
microbatch) or slot generations (counts of a slot's uses). A backend acts and reports; the runtime
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
    A backend or the runtime cannot do what the caller requested. The message says what is missing
    and what to do.
    """


@attrs.frozen
class TensorSpec:
    """
    Shape, type and device of one tensor that crosses a stage boundary.

    Args:
        shape: The shape. It is fixed, because captured graphs need fixed shapes.
        dtype: The element type.
        device: Device of the tensor.
        differentiable: Whether the backward computes a gradient for the tensor. Token ids, targets
            and the input of a first stage have no gradient.
    """

    shape: tuple[int, ...] = attrs.field()
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = True

    def buffer(self) -> Tensor:
        """
        Make a static buffer of zeros. If the tensor is differentiable, the buffer requires a
        gradient.
        """
        made = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_() if self.differentiable else made

    def mismatch(self, tensor: Tensor) -> str | None:
        """Describe how a tensor differs from this specification; None if it does not differ."""
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
        start: First row of this matrix's gradient in the result of the matrix product. One product
            may compute the gradients of several matrices.
        stop: The row after the last row of this matrix's gradient.
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int


@attrs.frozen(eq=False)
class WgradUnit:
    """
    A deferred matrix product whose result is the gradient of one or more matrices.

    For example, with split QKV the matrices of query, key and value are one unit, because the
    library computes their gradients in one product. The three gradients then share one destination
    (the tensor to which the product is written). Each gradient has a range of the rows of this
    tensor, from `start` to `stop`.
    """

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """
        The shape of the product: the total number of rows of all matrices, and their common width.
        """
        return self.matrices[-1].stop, int(self.matrices[0].parameter.shape[1])

    def rows(self, gradient: Tensor) -> Iterable[tuple[Matrix, Tensor]]:
        """Yield each matrix with its rows of the unit's gradient."""
        for matrix in self.matrices:
            yield matrix, gradient[matrix.start : matrix.stop]


@attrs.frozen(eq=False)
class NonMatrix:
    """A parameter whose gradient dI computes, such as a norm weight, a bias or an embedding."""

    name: str
    parameter: torch.nn.Parameter


@attrs.define(eq=False)
class DeferredWork:
    """
    The operands of a unit's deferred product, and the function that multiplies them.

    Args:
        unit: The unit that the product belongs to.
        operands: The arguments of `compute`.
        compute: The function that multiplies the operands.
        join: Function that makes the operands of one product from the operands of several
            microbatches: it appends their rows (tokens) in the given order. All operands must have
            been quantized with the same scales. None if each microbatch has its own scales, and
            therefore needs its own product.
    """

    unit: WgradUnit
    operands: Sequence[Any]
    compute: Callable[..., Any]
    join: Callable[[Sequence[Any]], Sequence[Any]] | None = None


@attrs.define(eq=False)
class Tape:
    """
    The data that one slot (the buffers of one microbatch) keeps from F to dW. After F these are the
    outputs with their autograd graph, after dI the deferred work.

    Args:
        slot: The slot that owns the tape.
        stores: The library's queues of deferred work. Each slot has its own stores, because a store
            is a plain FIFO queue that does not know which microbatch an entry belongs to.
        drawn: The positions of the random generator at which F drew numbers, in order.
        weight: The factor by which F multiplied the microbatch's loss, as (numerator, denominator);
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
        """
        Names of the units (deferred matrix products) on the tape, in the order in which dI queued
        them.
        """
        return tuple(w.unit.name for w in self.work)

    def clear(self) -> None:
        """Drop all data of the tape, after dW or an abort."""
        self.inputs = ()
        self.outputs = ()
        self.work.clear()
        self.bound = None
        self.drawn = ()
        self.weight = None


@attrs.frozen(eq=False, kw_only=True)
class Reports:
    """
    Says which effects of F, dI and dW a stage's backend reports. The host gets these reports
    without reading from the device.

    The contract cannot check any other effect (`qeffect.StageConfig.on_trust`).

    Args:
        filled: Function that returns the matrices whose weight cache was filled since the last
            call, one entry per fill. Only fills of the cache that F currently reads count.
        updates: Function that returns the number of updates of the domain's scaling state so far,
            by any stage.
        tape_scales: With ``carried``, a tape keeps the scales of its F, and dI reports in
            `Dgrads.scales` which scales it used. With ``live``, dI reads the domain's current
            scales.
        recorded: Whether the reports of `filled` and `updates` at a capture are also true for each
            replay of the graph. False if the device decides in each replay whether a kernel acts,
            for example by a flag in device memory.
        draws: True if F draws random numbers and writes the generator's positions to its tape
            (`Tape.drawn`). False if F draws no random numbers. None if F draws random numbers
            without reporting the positions.
        places_draws: Whether the domain's method `drawing` sets the random generator's position
            before each F. Then the position is known even if F is a replay.
        recomputes: True if dI recomputes F, draws the random numbers again, and reports the
            position in `Dgrads.draws`; this requires `draws`. False if dI draws no random numbers.
            None if dI draws random numbers without reporting the position.
        weights: Whether dI reports in `Dgrads.weight` the factor by which the microbatch's gradient
            is multiplied. In a captured graph this factor is fixed at the capture.

    Raises:
        ValueError: `tape_scales` is ``carried`` and `updates` is missing. The counts of `updates`
            are needed to identify the scales of an F.
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
        Return the reports that remain valid if graphs are replayed.

        The host's code runs at a capture, but not at a replay. Fills and updates are reported only
        if `recorded` says that they are true for every replay. The position of random numbers is
        reported only if the domain sets this position before each replay. The scales that dI used
        are never reported.
        """
        live = "live" if self.tape_scales == "live" else None
        unseen = attrs.evolve(self, tape_scales=live, **self._unseen())
        if self.places_draws:
            unseen = attrs.evolve(unseen, draws=self.draws)
        return unseen if self.recorded else attrs.evolve(unseen, filled=None, updates=None)

    def without_order(self) -> Reports:
        """
        Return the reports without the reports that only the contract's relation ``order`` uses.
        """
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
        inputs: One gradient per differentiable input of the stage, in order; empty for a first
            stage.
        non_matrix: One gradient per `non_matrix` parameter of the stage, in order.
        queued: Names of the units (matrix products) whose dW is now deferred.
        scales: Which scales dI used: the value of `Reports.updates` at the F that computed these
            scales. None if the backend does not report this value, or if dI used the scales of more
            than one F.
        draws: The random generator's position at which the recomputation of F began to draw; None
            if not reported.
        weight: The factor by which the microbatch's gradient is multiplied, as (numerator,
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
        covered: Names of the matrices whose gradients were computed, in order, with one entry per
            computation. The runtime checks that every matrix occurs exactly once.
        by_unit: The gradients by unit (matrix product). They are in the memory that `bind` has set,
            or in the backend's own memory, which is valid until the slot is used again.
    """

    covered: tuple[str, ...]
    by_unit: Mapping[str, Tensor]


def products(tape: Tape, others: Sequence[Tape]) -> Iterable[DeferredWork]:
    """
    Return the matrix products of a dW over one or several tapes of a stage, in the order of the
    first tape.

    With several tapes, a unit has one product if its operands can be joined. Otherwise it has one
    product per tape.

    Args:
        tape: The first tape.
        others: Further tapes. The rows of their operands are appended in this order.

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
    Decides whether each product of a dW adds to its destination or overwrites it. A second product
    into the same destination always adds.

    Args:
        accumulate: Whether the dW adds to its destinations (the memory for gradients).
        joining: Units that always add, because another stage has already written their destination.
    """

    def __init__(self, accumulate: bool, joining: Collection[str] = ()) -> None:
        self.accumulate = accumulate
        self.joining = joining
        self._written: set[int] = set()

    def __call__(self, unit: WgradUnit, destination: Tensor | None) -> bool:
        """
        Whether the next product adds to its destination. A product without a destination gets new
        memory.
        """
        if destination is None:
            return self.accumulate
        again = destination.data_ptr() in self._written
        self._written.add(destination.data_ptr())
        return again or self.accumulate or unit.name in self.joining


@runtime_checkable
class StateDomain(Protocol):
    """
    The numerical state (FP8 scales and amax histories) that F and dI change, and every stage that
    shares this state.
    """

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
        """Whether the set of modules is closed. Captured graphs depend on this set."""

    def freeze(self) -> None:
        """
        Close the set of modules before capture.

        Raises:
            BackendError: A stage has not been warmed up, or a module outside the domain shares its
                state.
        """

    def check_membership(self) -> None:
        """
        Check that no module has joined the shared state since `freeze`.

        Raises:
            BackendError: A module has joined. Captured graphs would not update the state of this
                module.
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
        """Return the FP8 recipe as plain data. A restart under another recipe is refused."""


@runtime_checkable
class StageBackend(Protocol):
    """One pipeline stage of a stateful library."""

    @property
    def index(self) -> int:
        """The stage's index in the pipeline."""

    @property
    def domain(self) -> StateDomain:
        """
        The domain that contains the numerical state (FP8 scales and amax histories) of this stage.
        """

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
        The contract's relations (groups of clauses) that apply to this backend. The contract does
        not check other relations.
        """

    @property
    def reports(self) -> Reports:
        """
        Says which of its effects the stage reports. `Reports()` reports no effects, so the contract
        cannot check them.
        """

    @property
    def survives_restart(self) -> frozenset[str]:
        """
        Return the names of the state that a checkpoint contains. All other state is rebuilt after a
        restart.
        """

    def new_tape(self, slot: int) -> Tape:
        """
        Make an empty tape (for the data from F to dW) for one slot, with its own queues of deferred
        work.
        """

    def warm(self) -> None:
        """
        Run the stage once, so that the library creates its buffers. This changes the numerical
        state, which the caller restores.
        """

    def forward(self, tape: Tape, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """F: return the outputs, and leave on the tape everything that dI needs."""

    def bind(self, tape: Tape, destinations: Mapping[str, Tensor] | None) -> None:
        """
        Set, before dI, the memory to which dW will write each unit's gradient. With None the
        library allocates the gradients.
        """

    def dgrad(self, tape: Tape, output_gradients: Sequence[Tensor]) -> Dgrads:
        """
        dI: return the input gradients and the non-matrix gradients. The work for dW stays on the
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

        If weights are tied, two units may be bound to one destination. The second unit then adds to
        it.

        Args:
            tape: The tape that the same microbatch's dI filled.
            accumulate: Whether to add to the destination instead of overwriting it.
            keep: Whether to leave the work on the tape, so that dW can be captured a second time.
            joining: Units that add even if `accumulate` is False. Passed only if weights of two
                stages are tied.
            others: Further tapes of the stage, whose dI have run under the same scales. Where
                possible, one product does the work of all tapes (`products`), and writes to the
                destinations of the first tape. Only stages whose `groups_wgrads` is True get
                further tapes.
        """

    def refresh_cache(self) -> None:
        """Quantize every weight into its cache again, in place, with the stage's current scale."""

    def cache_was_refreshed(self) -> None:
        """
        Record that a graph replay has just queued a refresh, without a call of `refresh_cache`.
        """

    def cache_is_current(self) -> bool:
        """Whether the parameters are unchanged since the last refresh, as far as the host knows."""

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
        Return a function for a check of all `addresses` that is fast enough for every step.

        Returns:
            A function whose result changes whenever `addresses` would change, because a tensor was
            moved, replaced, added or removed. The result may also change although `addresses` does
            not. Therefore compare `addresses` after a change.
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
    Return a fast function that lists the identities of all modules below `root` and the addresses
    of their parameters. If two lists differ, a module or parameter has changed.

    Each module's tables of parameters and submodules are looked up once. Each call of the function
    reads the current contents of these tables.
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
    """
    Return every matrix parameter of a stage, in the order of the stage's units (matrix products).
    """
    return tuple(matrix for unit in stage.units for matrix in unit.matrices)


def parameters(stage: StageBackend) -> dict[str, torch.nn.Parameter]:
    """Return every parameter of a stage by name: matrices first, then all others."""
    found = {m.name: m.parameter for m in matrices(stage)}
    found.update((p.name, p.parameter) for p in stage.non_matrix)
    return found

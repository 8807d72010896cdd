"""
One pipeline stage of reference layers: a `StageBackend` that also runs without a GPU.

The same modules run the ordinary full backward (`native_forward`, then `torch.autograd.backward`)
and the split backward (F, dI, dW). The tests compare the bits of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..ends import Ends, TokenEmbedding, part_seed, stage_ends, tie_head, weight_of
from ..heads import split_head_of
from ..layers import LayerConfig
from ..protocol import (
    RELATIONS,
    Accumulation,
    BackendError,
    DeferredWork,
    Dgrads,
    NonMatrix,
    Reports,
    Tape,
    TensorSpec,
    Wgrads,
    WgradUnit,
    module_probe,
    products,
)
from ..random_streams import reported_draws, require_probability
from ..split_head import SplitHead
from .layer import ReferenceHead, ReferenceLayer
from .linear import (
    ScaledLinear,
    Store,
    write_gradient,
)
from .scaling import ReferenceDomain

Loss = Callable[..., Tensor]


class ReferenceStage(torch.nn.Module):
    """
    Layers of one stage in one state domain.

    Args:
        index: The stage's index in the pipeline.
        domain: The state domain (stages whose FP8 scales are updated together) that the new stage
            joins.
        config: Dimensions of every layer.
        num_layers: Number of layers in the stage.
        first: Whether the stage takes data, and therefore has no input gradient.
        loss: Function of a last stage that takes the hidden states (the logits if the stage has a
            head) and the stage's further inputs, and returns a scalar.
        extra_inputs: Specifications of the further inputs of `loss`, such as targets.
        seed: Seed of the initial parameters, which are drawn on the CPU so that all devices get the
            same bits.
        ends: The ends of a language model (embedding, head) that the stage has; None for a stage of
            layers alone.
        recompute: Whether a tape keeps only the inputs of its layers, so that dI recomputes the
            activations (`torch.utils.checkpoint`, non-reentrant).
        dropout: Probability with which each layer drops elements of its two residual branches. The
            domain's random generator draws on the host. With epoch scales the numbers depend on the
            layer, the microbatch and the epoch.
        first_layer: Number of the model's layers in earlier stages. Each layer then has its own
            seed. None takes the number from `ends`; if `ends` is None too, the whole stage has one
            seed.

    Raises:
        ValueError: The probability of dropout is not in [0, 1).
        ValueError: A stage recomputes in a domain of live scales, so the scales of F no longer
            exist when dI recomputes.
    """

    relations = frozenset(RELATIONS)
    survives_restart = frozenset({"parameters", "numerical-state", "recipe"})

    def __init__(
        self,
        index: int,
        domain: ReferenceDomain,
        config: LayerConfig,
        *,
        num_layers: int = 1,
        first: bool = False,
        loss: Loss | None = None,
        extra_inputs: Sequence[TensorSpec] = (),
        seed: int = 0,
        ends: Ends | None = None,
        recompute: bool = False,
        dropout: float = 0.0,
        first_layer: int | None = None,
    ) -> None:
        super().__init__()
        require_probability(dropout)
        if recompute and domain.tape_scales == "live":
            raise ValueError(
                "recompute=True needs a domain with tape_scales='carried': under 'live' the scales "
                "of F are gone when dI recomputes"
            )
        self.recompute = recompute
        self.dropout = dropout
        domain.drops = domain.drops or dropout > 0.0
        self.index = index
        self.domain = domain
        self.config = config
        self.loss = loss
        self._weight: tuple[int, int] | None = None  # of the latest F
        domain.join(self)
        generator = torch.Generator().manual_seed(seed)
        self.embedding: TokenEmbedding | None = None
        if ends is not None and ends.embedding:
            self.embedding = TokenEmbedding(
                config, ends.vocabulary, domain.device, part_seed(seed, 0)
            )
        if first_layer is None and ends is not None:
            first_layer = ends.first_layer
        layers = []
        for n in range(num_layers):
            number = (index * num_layers if first_layer is None else first_layer) + n
            if first_layer is not None:
                generator.manual_seed(part_seed(seed, 2 + number))
            layers.append(ReferenceLayer(f"layers.{n}", config, domain, generator, dropout, number))
        self.layers = torch.nn.ModuleList(layers)
        self.head: ReferenceHead | SplitHead | None = split_head_of(
            ends, config, domain.device, seed
        )
        if ends is not None and ends.head and self.head is None:
            generator.manual_seed(part_seed(seed, 1))
            self.head = ReferenceHead(config, ends.vocabulary, domain, generator)
        self.inputs, self.outputs = stage_ends(
            config, domain.device, ends, first=first, loss=loss is not None, extra=extra_inputs
        )
        self.units: tuple[WgradUnit, ...] = tuple(u for layer in self._layers for u in layer.units)
        tie_head(self.units, ends, config, seed)
        embedded = () if self.embedding is None else self.embedding.named_parameters()
        self.non_matrix: tuple[NonMatrix, ...] = (
            *(NonMatrix(f"embedding.{name}", parameter) for name, parameter in embedded),
            *(p for layer in self._layers for p in layer.non_matrix()),
        )
        self._direct = [p.parameter for p in self.non_matrix]
        self._matrices = [m.parameter for unit in self.units for m in unit.matrices]
        self._refreshed_at: list[int] | None = None
        self._uncached = 0

    @property
    def groups_wgrads(self) -> bool:
        """
        Whether one dW can take several tapes. This requires scales that stay the same until the
        update.
        """
        return self.domain.scales == "epoch"

    @property
    def _layers(self) -> tuple[ReferenceLayer | ReferenceHead | SplitHead, ...]:
        """All parts of the stage that have products, in the order of F."""
        layers = tuple(layer for layer in self.layers if isinstance(layer, ReferenceLayer))
        return layers if self.head is None else (*layers, self.head)

    @property
    def _scaled(self) -> tuple[ReferenceLayer | ReferenceHead, ...]:
        """All parts of the stage that have scaling state and caches, in the order of F."""
        return tuple(layer for layer in self._layers if not isinstance(layer, SplitHead))

    @property
    def _all_linears(self) -> tuple[ScaledLinear | SplitHead, ...]:
        """Every product of the stage, in the order of F."""
        return tuple(linear for layer in self._layers for linear in layer.linears)

    @property
    def linears(self) -> tuple[ScaledLinear, ...]:
        """Every product of the stage that has a cache, in the order of F."""
        return tuple(linear for layer in self._scaled for linear in layer.linears)

    @property
    def reports(self) -> Reports:
        """
        The stage reports casts, scaling updates, the scales that dI used, and the factor by which
        the loss was multiplied.

        The device never decides whether a captured cast or update runs, so each replay does what
        was recorded at capture. With epoch scales the random numbers depend on the microbatch, so
        no position is reported.
        """
        draws = self.dropout > 0.0 and len(self.layers) > 0
        scales = self.domain.scales
        return Reports(
            filled=self.filled,
            updates=lambda: self.domain.rolls,
            tape_scales=self.domain.tape_scales,
            recorded=True,
            draws=reported_draws(scales, draws=draws),
            recomputes=reported_draws(scales, draws=draws and self.recompute),
            weights=weight_of(self.loss) is not None,
        )

    def _versions(self) -> list[int]:
        """Autograd's version counters of the matrices; every in-place update increments them."""
        return [parameter._version for parameter in self._matrices]

    def new_tape(self, slot: int) -> Tape:
        """Make a tape with one queue per product."""
        return Tape(slot, tuple(deque() for _ in self._all_linears))

    def warm(self) -> None:
        """
        Fill the weight cache, which is empty before the first refresh. This stage creates nothing
        else on first use.
        """
        self.refresh_cache()

    def forward(self, tape: Tape, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """
        Run F with deferred weight gradients. The outputs and their autograd graph stay on the tape.
        """
        for linear, store in zip(self._all_linears, tape.stores, strict=True):
            linear.store = store
        tape.inputs = tuple(inputs)
        self.domain.random.take()
        tape.outputs = self._run(inputs)
        tape.drawn = self.domain.random.take()
        tape.weight = self._weight
        return tape.outputs

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        hidden, *extra = inputs
        with self.domain.forward_interval():
            if self.embedding is not None:
                hidden = self.embedding(hidden)
            for layer in self._layers:
                hidden = self._through(layer, hidden)
        if self.loss is None:
            return (hidden,)
        outputs = (self.loss(hidden, *extra),)
        self._weight = weight_of(self.loss)
        return outputs

    def _through(self, layer: ReferenceLayer | ReferenceHead | SplitHead, hidden: Tensor) -> Tensor:
        """Run one layer, whose activations are kept, or recomputed in dI."""
        if not self.recompute or not isinstance(layer, ReferenceLayer):
            return cast(Tensor, layer(hidden))
        contexts = partial(self.domain.around_recomputation, (layer.forward_scaling,))
        return cast(
            Tensor,
            checkpoint(
                layer, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            ),
        )

    def bind(self, tape: Tape, destinations: Mapping[str, Tensor] | None) -> None:
        """Record the memory to which dW will write its gradients."""
        tape.bound = destinations

    def dgrad(self, tape: Tape, output_gradients: Sequence[Tensor]) -> Dgrads:
        """
        Run dI, and move the products' operands from the queues to the tape's list of deferred work.
        """
        if not tape.outputs:
            raise BackendError(
                f"slot {tape.slot} of stage {self.index} holds no outputs of a forward; run F of "
                "this tape before its dI"
            )
        wanted = [x for x in tape.inputs if x.requires_grad]
        self.domain.take_used()
        self.domain.random.take()
        gradients = torch.autograd.grad(
            tape.outputs, [*wanted, *self._direct], list(output_gradients)
        )
        tape.outputs = ()
        tape.work = [
            DeferredWork(linear.unit, operands, linear.product, linear.join)
            for store in tape.stores
            for linear, operands in _drain(store)
        ]
        return Dgrads(
            gradients[: len(wanted)],
            gradients[len(wanted) :],
            tuple(tape.queued),
            self.domain.take_used(),
            self._drawn_again(tape),
            tape.weight,
        )

    def _drawn_again(self, tape: Tape) -> int | None:
        """
        Return the position at which dI drew again. If dI drew at a position at which F did not
        draw, return that wrong position; otherwise return the first position.
        """
        again = self.domain.random.take()
        other = [position for position in again if position not in tape.drawn]
        return next(iter(other), min(again, default=None))

    def tie(self, unit: str, other: ScaledLinear) -> None:
        """
        Let a product of this stage use the weight of another product, instead of its own weight.

        Args:
            unit: Name of a unit of this stage that has one matrix.
            other: The other product, of any stage. Its weight must have the same shape.

        Raises:
            BackendError: The stage has no unit with this name, or the weights do not fit each
                other.
        """
        own = next((linear for linear in self.linears if linear.unit.name == unit), None)
        if own is None:
            raise BackendError(f"stage {self.index} has no unit {unit!r}")
        own.tie(other)
        self.units = tuple(u for layer in self._layers for u in layer.units)
        self._matrices = [m.parameter for u in self.units for m in u.matrices]
        self._refreshed_at = None

    def wgrad(
        self,
        tape: Tape,
        *,
        accumulate: bool,
        keep: bool = False,
        joining: Collection[str] = (),
        others: Sequence[Tape] = (),
    ) -> Wgrads:
        """Run dW: each retained product once, into its destination or into new memory."""
        by_unit: dict[str, Tensor] = {}
        adds = Accumulation(accumulate, joining)
        with torch.no_grad():
            for work in products(tape, others):
                value = work.compute(*work.operands)
                if tape.bound is None:
                    by_unit[work.unit.name] = value.to(self.config.dtype)
                else:
                    destination = by_unit[work.unit.name] = tape.bound[work.unit.name]
                    write_gradient(value, destination, accumulate=adds(work.unit, destination))
        covered = tuple(m.name for work in tape.work for m in work.unit.matrices)
        if not keep:
            for used in (tape, *others):
                used.clear()
        return Wgrads(covered, by_unit)

    def refresh_cache(self) -> None:
        """
        Quantize every weight again, and record the amaxes (largest absolute values) in the current
        interval.
        """
        for linear in self.linears:
            linear.refresh()
        if isinstance(self.head, SplitHead):
            self._uncached += 1
        self.cache_was_refreshed()

    def filled(self) -> tuple[str, ...]:
        """
        Return the matrices whose cache was filled since the last call, one entry per fill.

        The host counts the casts that it launched into the current cache. Casts into a cache that
        was later replaced do not count, and the host does not see the casts of a replayed graph. F
        reads the weight of a head without a cache directly, so this head is always current. Each
        refresh lists such a head as filled.
        """
        uncached, self._uncached = self._uncached, 0
        found = [
            m.name
            for linear in self.linears
            for _ in range(linear.take_fills())
            for m in linear.unit.matrices
        ]
        if isinstance(self.head, SplitHead):
            found += [m.name for _ in range(uncached) for m in self.head.unit.matrices]
        return tuple(found)

    def cache_was_refreshed(self) -> None:
        """Record the current version counters of the parameters."""
        self._refreshed_at = self._versions()

    def cache_is_current(self) -> bool:
        """Whether autograd's version counters are the same as at the last refresh."""
        return self._refreshed_at == self._versions()

    def cached_weights(self) -> Mapping[str, Tensor]:
        """Return the FP8 data and the scale of every cached weight."""
        cached: dict[str, Tensor] = {}
        for linear in self.linears:
            cached[f"{linear.unit.name}.data"] = linear.cache.data
            cached[f"{linear.unit.name}.scale_inv"] = linear.cache.scale_inv
        return cached

    def numerical_state(self) -> Mapping[str, Tensor]:
        """Return the histories and scales of every layer, forward and backward."""
        state: dict[str, Tensor] = {}
        for layer in self._scaled:
            for way, scaling in (
                ("forward", layer.forward_scaling),
                ("backward", layer.backward_scaling),
            ):
                state[f"{layer.name}.{way}.amax_history"] = scaling.history
                state[f"{layer.name}.{way}.scale"] = scaling.scale
        return state

    def addresses(self) -> Mapping[str, int]:
        """Return the addresses of parameters, numerical state and caches, by kind and name."""
        kinds: dict[str, Mapping[str, Tensor]] = {
            "parameter": dict(self.named_parameters()),
            "state": self.numerical_state(),
            "cache": self.cached_weights(),
        }
        return {
            f"{kind}:{name}": tensor.data_ptr()
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        }

    def address_probe(self) -> Callable[[], Sequence[int]]:
        """
        Return a function for a fast check of the modules, the layers' scaling state, and the
        products' caches.
        """
        tree = module_probe(self)
        layers, linears = self._scaled, self.linears

        def look() -> list[int]:
            found = tree()
            for layer in layers:
                for scaling in (layer.forward_scaling, layer.backward_scaling):
                    found += (scaling.history.data_ptr(), scaling.scale.data_ptr())
            for linear in linears:
                found += (linear.cache.data.data_ptr(), linear.cache.scale_inv.data_ptr())
            return found

        return look

    def capture_obstacles(self) -> tuple[str, ...]:
        """Return an empty tuple, because only the domain can prevent a capture."""
        return ()

    def native_forward(self, inputs: Sequence[Tensor], *, first: bool) -> tuple[Tensor, ...]:
        """
        Run F for the full backward. The first microbatch of an optimizer step refreshes the weight
        cache.
        """
        for linear in self._all_linears:
            linear.store = None
            linear.overwrite = first
            if first:
                linear.refresh()
        if first:
            self.cache_was_refreshed()
        return self._run(inputs)

    def native_bind(self, destinations: Mapping[str, Tensor] | None) -> None:
        """Let the full backward accumulate into these buffers; None means `.grad`."""
        for linear in self._all_linears:
            linear.main_grad = None if destinations is None else destinations[linear.unit.name]


def _drain(store: Store) -> list[tuple[ScaledLinear | SplitHead, tuple[object, ...]]]:
    drained = list(store)
    store.clear()
    return list(drained)

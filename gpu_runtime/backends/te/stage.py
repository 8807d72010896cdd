"""
One pipeline stage of Transformer Engine layers, as a backend of the runtime.

The stage depends on these facts about versions 2.18 to 2.20 of the library. The library reads a
module's attribute for the store of deferred work at F, and fills the store at dI. It reads
`main_grad` at dI. An F under autocast updates scales even when F raises an error. The weight caches
are the modules' `_fp8_workspaces`. The library silently replaces a cache that does not fit, so the
runtime checks the caches' addresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..ends import Ends, TokenEmbedding, part_seed, stage_ends, tie_head, weight_of
from ..heads import split_head_of
from ..layers import LayerConfig, rotary_angles
from ..protocol import (
    RELATIONS,
    Accumulation,
    BackendError,
    DeferredWork,
    Dgrads,
    Matrix,
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
from . import deferred_gradients
from .domain import (
    TransformerEngineDomain,
    library,
    refuse_missing,
)
from .internals import (
    EPOCH,
    STATE,
    STORES,
    missing_imports,
    missing_in_head,
    missing_members,
    missing_state,
)

_DIRECTIONS = (("forward", "scaling_fwd"), ("backward", "scaling_bwd"))
NORMALIZATION = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
"""The library's names of norms."""


class TransformerEngineStage:
    """
    Transformer layers of one stage in one state domain.

    Args:
        index: The stage's index in the pipeline.
        domain: The state domain (stages whose FP8 scales are updated together) that the new stage
            joins.
        config: Dimensions of every layer.
        num_layers: Number of layers in the stage.
        fuse_wgrad_accumulation: Whether the library gets the gradient destinations as `main_grad`
            at dI, which is possible only with fused QKV. If False, destinations are bound at dW,
            which split QKV requires.
        first: Whether the stage takes data, and therefore has no input gradient.
        loss: Function of a last stage that takes the hidden states (the logits if the stage has a
            head) and the stage's further inputs, and returns a scalar.
        extra_inputs: Specifications of the further inputs of `loss`, such as targets.
        seed: Seed of the initial parameters.
        ends: The ends of a language model (embedding, head) that the stage has; None for a stage of
            layers alone. The head, with the final norm, is one `LayerNormLinear` of the library, or
            a `SplitHead`.
        first_layer: Number of the model's layers in earlier stages. Each layer then has its own
            seed. None takes the number from `ends`; if `ends` is None too, the whole stage has one
            seed.
        dropout: Probability with which each layer drops elements of its two residual branches. The
            library's attention uses no dropout. The domain sets the random generator's position
            (`device_numbers`).
        recompute: Whether a tape keeps only the inputs of its layers, so that dI recomputes the
            activations (`torch.utils.checkpoint`, non-reentrant). Embedding, head and loss are not
            recomputed.

    Raises:
        ValueError: The probability of dropout is not in [0, 1), or a stage uses both recomputation
            and dropout. dI could not draw the random numbers of its F again.
        BackendError: Fused accumulation was requested with split QKV, which the library refuses; or
            the library's layers lack an attribute that the runtime uses.
    """

    survives_restart = frozenset({"parameters", "numerical-state", "recipe"})

    def __init__(
        self,
        index: int,
        domain: TransformerEngineDomain,
        config: LayerConfig,
        *,
        num_layers: int = 1,
        fuse_wgrad_accumulation: bool | None = None,
        first: bool = False,
        loss: Callable[..., Tensor] | None = None,
        extra_inputs: Sequence[TensorSpec] = (),
        seed: int = 0,
        ends: Ends | None = None,
        first_layer: int | None = None,
        dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        require_probability(dropout)
        if recompute and dropout > 0.0:
            raise ValueError(
                "recompute=True needs dropout=0.0: dI cannot draw the random numbers of its F "
                f"again, found dropout={dropout}"
            )
        fuse = config.fused_qkv if fuse_wgrad_accumulation is None else fuse_wgrad_accumulation
        if fuse and not config.fused_qkv:
            raise BackendError(
                "the library refuses fused accumulation with split QKV; "
                "leave fuse_wgrad_accumulation out: destinations are then bound at dW"
            )
        self._lib = library()
        self.index = index
        self.domain = domain
        self.config = config
        self.fuse = fuse
        self.dropout = dropout
        self.recompute = recompute
        self.loss = loss
        self._weight: tuple[int, int] | None = None  # of the latest F
        domain.join(self)
        torch.manual_seed(seed)
        # One tree of all modules, from which names, parameters, caches and FP8 state are read.
        self.root = torch.nn.Module()
        self.embedding: TokenEmbedding | None = None
        if ends is not None and ends.embedding:
            self.embedding = self.root.embedding = TokenEmbedding(
                config, ends.vocabulary, domain.device, part_seed(seed, 0)
            )
        if first_layer is None and ends is not None:
            first_layer = ends.first_layer
        # Graphs read the angles at this address. A checkpoint does not hold them.
        self._given: dict[str, Tensor] = {}
        if config.positions == "rotary":
            self._given["rotary_pos_emb"] = rotary_angles(config, domain.device)
        layers = []
        for n in range(num_layers):
            if first_layer is not None:
                torch.manual_seed(part_seed(seed, 2 + first_layer + n))
            layers.append(self._layer((first_layer or 0) + n, fuse))
        # The number of the stage's first layer in the model, as far as the stage was told.
        self._first_layer = index * num_layers if first_layer is None else first_layer
        self.layers = self.root.layers = torch.nn.ModuleList(layers)
        self.head: Any = None
        self.split_head: SplitHead | None = split_head_of(ends, config, domain.device, seed)
        if self.split_head is not None:
            self.root.head = self.split_head
        elif ends is not None and ends.head:
            torch.manual_seed(part_seed(seed, 1))
            self.head = self.root.head = self._lib.te.LayerNormLinear(
                config.hidden,
                ends.vocabulary,
                bias=False,
                normalization=NORMALIZATION[config.norm],
                params_dtype=config.dtype,
                fuse_wgrad_accumulation=fuse,
                device=domain.device,
            )
            refuse_missing(self._lib.version, missing_in_head(self.head))
        refuse_missing(self._lib.version, missing_members(self.layers[0]))
        if recompute:
            refuse_missing(self._lib.version, missing_imports(EPOCH))
        self.inputs, self.outputs = stage_ends(
            config, domain.device, ends, first=first, loss=loss is not None, extra=extra_inputs
        )
        self._holders: list[torch.nn.Module] = []
        self._queued: list[tuple[WgradUnit, ...]] = []
        for n, layer in enumerate(self.layers):
            for path, parts in STORES:
                module = layer.get_submodule(path)
                self._holders.append(module)
                self._queued.append(
                    tuple(_unit(f"layers.{n}.{path}", module, part) for part in parts)
                )
        if self.head is not None:
            self._holders.append(self.head)
            self._queued.append((_unit("head", self.head, "head"),))
        last = () if self.split_head is None else self.split_head.units
        self.units: tuple[WgradUnit, ...] = (*(u for units in self._queued for u in units), *last)
        tie_head(self.units, ends, config, seed)
        deferred_names = {m.name for unit in self.units for m in unit.matrices}
        self.non_matrix: tuple[NonMatrix, ...] = tuple(
            NonMatrix(name, parameter)
            for name, parameter in self.root.named_parameters()
            if name not in deferred_names
        )
        self._direct = [p.parameter for p in self.non_matrix]
        self._off = tuple(self._lib.WeightGradStore(False) for _ in self._holders)
        self._refreshed_at: tuple[int, ...] | None = None

    def _layer(self, n: int, fuse: bool) -> torch.nn.Module:
        config = self.config
        layer: torch.nn.Module = self._lib.te.TransformerLayer(
            config.hidden,
            config.ffn,
            config.heads,
            layer_number=n + 1,
            num_gqa_groups=config.groups,
            normalization=NORMALIZATION[config.norm],
            activation=config.activation,
            bias=config.bias,
            self_attn_mask_type="causal",
            hidden_dropout=self.dropout,
            attention_dropout=0.0,
            params_dtype=config.dtype,
            fuse_qkv_params=config.fused_qkv,
            fuse_wgrad_accumulation=fuse,
            device=self.domain.device,
        )
        return layer

    @property
    def relations(self) -> frozenset[str]:
        """
        All relations (groups of clauses) of the contract. With other recipes than delayed scaling,
        `order` is left out.
        """
        unused = set() if self.domain.scaling == "delayed" else {"order"}
        return frozenset(RELATIONS) - unused

    @property
    def reports(self) -> Reports:
        """
        The stage reports the factor by which the loss was multiplied, and the positions at which F
        draws random numbers. It does not report casts and scaling updates, because they happen
        inside the library's modules.
        """
        draws = self.dropout > 0.0 and len(self.layers) > 0
        return Reports(
            draws=reported_draws(self.domain.scales, draws=draws),
            places_draws=True,
            weights=weight_of(self.loss) is not None,
        )

    @property
    def groups_wgrads(self) -> bool:
        """
        Whether one dW can take several tapes. This requires scales that stay the same until the
        update.
        """
        return self.domain.scaling == "delayed" and self.domain.scales == "epoch"

    def fp8_modules(self) -> Iterator[tuple[str, Any]]:
        """The modules that have FP8 state after the warm-up, with their names."""
        for name, module in self.root.named_modules():
            if getattr(module, "fp8_meta", None):
                yield name, module

    def new_tape(self, slot: int) -> Tape:
        """Make a tape with its own stores (queues of deferred work)."""
        last = () if self.split_head is None else (deque[Any](),)
        store = deferred_gradients.tape_store(self._lib.WeightGradStore)
        return Tape(slot, (*(store(True) for _ in self._holders), *last))

    def _install(self, stores: Sequence[Any]) -> None:
        if self.split_head is not None:  # without a store the library's own backward runs
            self.split_head.store = stores[-1] if len(stores) > len(self._holders) else None
        for module, store in zip(self._holders, stores, strict=False):
            module.wgrad_store = store

    def _run(
        self, inputs: Sequence[Tensor], *, first: bool, registers: bool = False
    ) -> tuple[Tensor, ...]:
        hidden, *extra = inputs
        recompute = self.recompute and torch.is_grad_enabled() and not registers
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        with self.domain.autocast(registers=registers):
            for n, layer in enumerate(self.layers, self._first_layer):
                with self.domain.drawing_layer(n):
                    run = self._recomputed if recompute else self._through
                    hidden = run(layer, hidden, first)
            if self.head is not None:
                hidden = self.head(hidden, is_first_microbatch=first)
        if self.split_head is not None:
            hidden = self.split_head(hidden)
        if self.loss is None:
            return (hidden,)
        outputs = (self.loss(hidden, *extra),)
        self._weight = weight_of(self.loss)
        return outputs

    def _through(self, layer: torch.nn.Module, hidden: Tensor, first: bool) -> Tensor:
        # A recomputation uses the cached weights, also after an F that has filled the caches.
        fills = first and not self.domain.recomputing
        result: Tensor = layer(hidden, is_first_microbatch=fills, **self._given)
        return result

    def _recomputed(self, layer: torch.nn.Module, hidden: Tensor, first: bool) -> Tensor:
        result: Tensor = checkpoint(
            partial(self._through, layer, first=first),
            hidden,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(self.domain.around_recomputation, layer),
        )
        return result

    def warm(self) -> None:
        """
        Run one F. This creates FP8 state and weight caches, and changes scales and amax histories.

        Raises:
            BackendError: F did not create FP8 state or weight caches, or created them under unknown
                names.
        """
        self._install(self._off)
        with self.domain.without_dropout():
            self._run([spec.buffer() for spec in self.inputs], first=True, registers=True)
        self._install(self._off)
        delayed = self.domain.scaling == "delayed"
        refuse_missing(self._lib.version, missing_state(self.layers[0], delayed=delayed))
        self.require_warm()

    def require_warm(self) -> None:
        """
        Check that FP8 state and weight caches exist.

        Raises:
            BackendError: FP8 state or caches are missing. Their first use would create them inside
                a captured graph.
        """
        cached = len(list(self._caches()))
        expected = len(self.units) - (self.split_head is not None)
        if cached != expected:
            raise BackendError(
                f"stage {self.index} has {cached} weight caches, expected {expected}: the stage "
                "was not warmed, or its layers create caches under names that this backend does "
                "not know; call warm() before capture; if you did, run qeffect runtime doctor"
            )

    def forward(self, tape: Tape, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run F with cached weights. The modules use the tape's stores for deferred work."""
        self._install(tape.stores)
        tape.inputs = tuple(inputs)
        with self.domain.drawing() as begun:
            tape.outputs = self._run(inputs, first=False)
        tape.drawn = () if begun is None else (begun,)
        tape.weight = self._weight
        return tape.outputs

    def bind(self, tape: Tape, destinations: Mapping[str, Tensor] | None) -> None:
        """
        Set the memory to which dW will write each unit's gradient. Call this method before dI,
        because the library reads `main_grad` at dI.

        Raises:
            BackendError: A unit has no destination, or the stage needs destinations but got None.
        """
        if destinations is not None:
            deferred_gradients.check_bound(self.units, destinations)
        elif self.fuse:
            raise BackendError(
                "copied gradients need a stage made with fuse_wgrad_accumulation=False: otherwise "
                "the library writes into main_grad"
            )
        tape.bound = destinations

    def _set_main_grad(self, destinations: Mapping[str, Tensor]) -> None:
        for unit in self.units:
            (matrix,) = unit.matrices
            matrix.parameter.main_grad = destinations[unit.name]  # type: ignore[attr-defined]

    def dgrad(self, tape: Tape, output_gradients: Sequence[Tensor]) -> Dgrads:
        """Run dI, and move the deferred products from the stores onto the tape."""
        if not tape.outputs:
            raise BackendError(
                f"slot {tape.slot} of stage {self.index} holds no outputs of a forward; run F of "
                "this tape before its dI"
            )
        self._install(tape.stores)
        if self.fuse:
            if tape.bound is None:
                raise BackendError("no gradient destination is bound; bind it before dI")
            self._set_main_grad(tape.bound)
        wanted = [x for x in tape.inputs if x.requires_grad]
        gradients = torch.autograd.grad(
            tape.outputs, [*wanted, *self._direct], list(output_gradients)
        )
        tape.outputs = ()
        tape.work = [
            work
            for store, units in zip(tape.stores, self._queued, strict=False)
            for work in deferred_gradients.take(store, units)
        ]
        if self.split_head is not None:
            for head, operands in tape.stores[-1]:
                tape.work.append(DeferredWork(head.unit, operands, head.product, head.join))
            tape.stores[-1].clear()
        return Dgrads(
            gradients[: len(wanted)], gradients[len(wanted) :], tape.queued, weight=tape.weight
        )

    def wgrad(
        self,
        tape: Tape,
        *,
        accumulate: bool,
        keep: bool = False,
        joining: Collection[str] = (),
        others: Sequence[Tape] = (),
    ) -> Wgrads:
        """Run dW: each retained product once, into its destination or the library's memory."""
        by_unit: dict[str, Tensor] = {}
        adds = Accumulation(accumulate, joining)
        with torch.no_grad():
            for work in products(tape, others):
                name = work.unit.name
                destination = None if tape.bound is None else tape.bound[name]
                adding = adds(work.unit, destination)
                gradient = self._run_deferred(work, destination, adding)
                if destination is None and name in by_unit:  # a unit with one product per tape
                    by_unit[name].add_(gradient)
                else:
                    by_unit[name] = gradient
        covered = tuple(m.name for work in tape.work for m in work.unit.matrices)
        if not keep:
            for used in (tape, *others):
                used.clear()
        return Wgrads(covered, by_unit)

    def _run_deferred(self, work: DeferredWork, destination: Tensor | None, adds: bool) -> Tensor:
        if self.split_head is None or work.unit is not self.split_head.unit:
            return deferred_gradients.run(work, destination, accumulate=adds)
        value: Tensor = work.compute(*work.operands)
        if destination is None:
            return value
        return self.split_head.write(value, destination, accumulate=adds)

    def _caches(self) -> Iterator[tuple[str, Any, Tensor]]:
        for path, module in self.root.named_modules():
            for name, workspace in getattr(module, "_fp8_workspaces", {}).items():
                if name == "weight":
                    weight = self._lib.noop_cat(module._get_weight_tensors())
                else:
                    weight = getattr(module, name)
                yield f"{path}.{name}", workspace, weight

    def refresh_cache(self) -> None:
        """Quantize every weight again, in place, into its cache (the library's workspace)."""
        with torch.no_grad():
            for _, workspace, weight in self._caches():
                workspace.quantize_(weight)
        self.cache_was_refreshed()

    def cache_was_refreshed(self) -> None:
        """Record the current version counters of the parameters."""
        self._refreshed_at = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(m.parameter._version for unit in self.units for m in unit.matrices)

    def cache_is_current(self) -> bool:
        """Whether autograd's version counters are the same as at the last refresh."""
        return self._refreshed_at == self._versions()

    def cached_weights(self) -> Mapping[str, Tensor]:
        """Return the FP8 data, transposes and scales of every cached weight."""
        return {
            f"{name}.{key}": value
            for name, workspace, _ in self._caches()
            for key, value in workspace.get_metadata().items()
            if isinstance(value, Tensor)
        }

    def numerical_state(self) -> Mapping[str, Tensor]:
        """Return the histories and scales of every module; empty for recipes without state."""
        state: dict[str, Tensor] = {}
        for name, module in self.fp8_modules():
            for way, key in _DIRECTIONS:
                held = module.fp8_meta.get(key)
                for kind in STATE:
                    tensor = getattr(held, kind, None)
                    if isinstance(tensor, Tensor):
                        state[f"{name}.{way}.{kind}"] = tensor
        return state

    def addresses(self) -> Mapping[str, int]:
        """Return the addresses of parameters, numerical state and caches, by kind and name."""
        kinds: dict[str, Mapping[str, Tensor]] = {
            "parameter": dict(self.root.named_parameters()),
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
        Return a function for a fast check of the modules, and of their current FP8 state and weight
        caches.
        """
        tree = module_probe(self.root)
        modules: list[Any] = list(self.root.modules())
        stateful = [module for module in modules if hasattr(module, "fp8_meta")]
        caching = [module for module in modules if hasattr(module, "_fp8_workspaces")]

        def look() -> list[int]:
            found = tree()
            for module in stateful:
                meta = module.fp8_meta
                for _, key in _DIRECTIONS:
                    held = meta.get(key)
                    found += (
                        tensor.data_ptr()
                        for kind in STATE
                        if isinstance(tensor := getattr(held, kind, None), Tensor)
                    )
            for module in caching:
                for workspace in module._fp8_workspaces.values():
                    found += (
                        value.data_ptr() if isinstance(value, Tensor) else 0
                        for value in workspace.get_metadata().values()
                    )
            return found

        return look

    def capture_obstacles(self) -> tuple[str, ...]:
        """
        Return why this stage cannot be captured. Obstacles are modules in evaluation mode, tensor
        parallelism, and primary weights in FP8.
        """
        found = []
        for name, module in self.root.named_modules():
            if not module.training:
                found.append(f"{name} is in evaluation mode, which records no amax")
            if getattr(module, "tp_size", 1) > 1:
                found.append(f"{name} is tensor parallel; only tp_size 1 is supported")
            if getattr(module, "primary_weights_in_fp8", False):
                found.append(f"{name} has FP8 primary weights, which have no weight cache")
        return tuple(found)

    def native_forward(self, inputs: Sequence[Tensor], *, first: bool) -> tuple[Tensor, ...]:
        """Run F for the library's full backward, with weight caching."""
        self._install(self._off)
        if self.split_head is not None:
            self.split_head.overwrite = first
        with self.domain.drawing():
            outputs = self._run(inputs, first=first)
        if first:
            self._refreshed_at = self._versions()
        return outputs

    def native_bind(self, destinations: Mapping[str, Tensor] | None) -> None:
        """
        Let the full backward add to `destinations` as `main_grad`. With None it adds to `.grad`.

        Raises:
            BackendError: The stage was made for `main_grad` but got None, or was made for `.grad`
                but got destinations.
        """
        if (destinations is not None) != self.fuse:
            raise BackendError(
                f"this stage was made with fuse_wgrad_accumulation={self.fuse}; make the "
                f"stage with {not self.fuse} for native accumulation into "
                f"{'main_grad' if destinations is not None else '.grad'}"
            )
        if destinations is not None:
            self._set_main_grad(destinations)
        if self.split_head is not None:
            unit = self.split_head.unit.name
            self.split_head.main_grad = None if destinations is None else destinations[unit]


def _unit(path: str, module: Any, part: str) -> WgradUnit:
    names = [f"{part}_weight"] if part.startswith("fc") else list(module.weight_names)
    rows: list[Matrix] = []
    start = 0
    for name in names:
        parameter = getattr(module, name)
        stop = start + int(parameter.shape[0])
        rows.append(Matrix(f"{path}.{name}", parameter, start, stop))
        start = stop
    return WgradUnit(f"{path}.{part}", tuple(rows))

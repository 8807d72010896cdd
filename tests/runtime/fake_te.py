"""
A stand-in for Transformer Engine 2.18 to 2.20 on a CPU: it has the library's structure and
behaviour, but no kernels.

With the stand-in, the backend's own code runs in a test without a GPU: which stores are installed
when, what is drained, where a destination is bound, and which stage owns which state. The stand-in
copies these behaviours of the real library. Stores are read at F and filled at dI. `main_grad` is
read at dI. `LayerNormMLP` queues FC2 before FC1 in one store. Leaving autocast updates every
registered forward history, and the backward of the first FP8 module updates every backward history.
A workspace is made on first use. In an update all histories roll (shift by one entry), as in the
library's unfused update; the library's fused update skips histories without a new entry. No such
behaviour differs between 2.18 and 2.20 (see the runtime's README); `Graphs` has the differences.
The arithmetic is that of the reference backend, with two differences. The rows of the fused product
are ordered head by head (queries, keys and values of each head). GELU is the approximation. The
stand-in proves nothing about the real library's numerics.
"""

from __future__ import annotations

import inspect
import queue
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qeffect.gpu_runtime.backends.reference.linear import product, write_gradient
from qeffect.gpu_runtime.backends.reference.scaling import E4M3, E5M2, QuantizedTensor, ScalingState

VERSION = "2.18.0"
_BUFFER_INFO = "buffer_index_and_autocast_key"


class DelayedScaling:
    """The recipe; only its history length matters here."""

    def __init__(self, **options: Any) -> None:
        self.amax_history_len = options["amax_history_len"]


class StatelessScaling:
    """A recipe without state, which code only tests for."""


class Meta(ScalingState):
    """A module's FP8 state in one direction, under the library's attribute names."""

    @property
    def amax_history(self) -> Tensor:
        """The library's name of the history."""
        return self.history


class GlobalState:
    """The process's registered states."""

    def __init__(self) -> None:
        self.global_amax_buffer: dict[str, list[Tensor]] = {}
        self.states: dict[bool, list[Meta]] = {True: [], False: []}
        self.skip_fp8_weight_update_tensor: Tensor | None = None
        self.recipe: DelayedScaling | None = None
        self.is_first_fp8_module = False
        self.gathers = False


class FP8GlobalStateManager:
    """Registration and rolling."""

    quantization_state = GlobalState()

    @classmethod
    def reset(cls) -> None:
        """Forget every module."""
        cls.quantization_state = GlobalState()

    @classmethod
    def get_buffer_info(cls) -> str:
        """The name under which a module is registered."""
        return _BUFFER_INFO

    @classmethod
    def register(cls, meta: dict[str, Any]) -> None:
        """Register a module once."""
        if _BUFFER_INFO in meta:
            return
        state = cls.quantization_state
        meta[_BUFFER_INFO] = []
        for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            name = "forward" if forward else "backward"
            held = state.global_amax_buffer.setdefault(name, [])
            held.append(meta[key].amax_history[0])
            state.states[forward].append(meta[key])
            meta[_BUFFER_INFO] += [len(held) - 1, name]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Roll every registered history of one direction."""
        with torch.no_grad():
            for meta in cls.quantization_state.states[forward]:
                meta.roll(0)


@contextmanager
def autocast(enabled: bool, recipe: DelayedScaling, _graph: bool = False) -> Iterator[None]:
    """
    An FP8 region. Leaving the region rolls histories, also after an error, but not during capture.
    """
    state = FP8GlobalStateManager.quantization_state
    state.recipe, state.is_first_fp8_module, state.gathers = recipe, enabled, _graph
    try:
        yield
    finally:
        state.gathers = False
        if not _graph:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


class WeightGradStore:
    """A bare FIFO of deferred products."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        self.enabled = delay_wgrad_compute
        self.context: Any = queue.Queue() if delay_wgrad_compute else None

    def delay_wgrad_compute(self) -> bool:
        """Whether products are deferred."""
        return self.enabled

    def put(self, operands: Sequence[Any], compute: Callable[..., Any]) -> None:
        """Queue a product."""
        self.context.put([operands, compute])


class Workspace:
    """A cached quantized weight."""

    def __init__(self, weight: Tensor, meta: Meta, index: int) -> None:
        self.meta, self.index = meta, index
        self.cached = QuantizedTensor(torch.zeros(weight.shape, dtype=E4M3), torch.ones(()))
        self.quantize_(weight)

    def quantize_(self, weight: Tensor) -> Workspace:
        """Quantize again, in place."""
        fresh = self.meta.quantize(weight, self.index)
        self.cached.data.copy_(fresh.data)
        self.cached.scale_inv.copy_(fresh.scale_inv)
        return self

    def get_metadata(self) -> dict[str, Any]:
        """Return tensors and other objects."""
        return {
            "data": self.cached.data,
            "fp8_scale_inv": self.cached.scale_inv,
            "data_transpose": None,
            "quantizer": self.meta,
        }


class Float8TensorStorage:
    """A quantized operand of a deferred product, with the library's names and usages."""

    def __init__(
        self,
        *,
        data: Tensor | None,
        fp8_scale_inv: Tensor,
        fp8_dtype: torch.dtype,
        data_transpose: Tensor | None = None,
        quantizer: Any = None,
    ) -> None:
        self._data, self._transpose = data, data_transpose
        self._transpose_invalid = data_transpose is None
        self._scale_inv, self._fp8_dtype, self._quantizer = fp8_scale_inv, fp8_dtype, quantizer

    @classmethod
    def of(cls, operand: QuantizedTensor, *, rowwise: bool) -> Float8TensorStorage:
        """An operand of dW, with its transpose, and with or without its rows."""
        found = cls(
            data=operand.data.view(torch.uint8),
            fp8_scale_inv=operand.scale_inv,
            fp8_dtype=operand.data.dtype,
        )
        found.update_usage(columnwise_usage=True)
        if not rowwise:
            found._data = None
        return found

    def update_usage(
        self, *, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Create or drop data, as the library does for a product that reads the transpose."""
        if rowwise_usage is False:
            self._data = None
        if columnwise_usage and (self._transpose is None or self._transpose_invalid):
            assert self._data is not None
            self._transpose, self._transpose_invalid = self._data.t().contiguous(), False

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "data_transpose": self._transpose,
            "quantizer": self._quantizer,
        }

    def transposed(self) -> QuantizedTensor:
        """The transpose, which a product of layout NT reads."""
        assert self._transpose is not None
        assert not self._transpose_invalid
        values = self._transpose.view(self._fp8_dtype).t().contiguous()
        return QuantizedTensor(values, self._scale_inv)


def general_gemm(
    x: Float8TensorStorage,
    dy: Float8TensorStorage,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    layout: str = "NT",
) -> tuple[Tensor, None]:
    """A weight-gradient product."""
    value = product(dy.transposed(), x.transposed(), a_t=True)
    if out is None:
        return value.to(out_dtype), None
    write_gradient(value, out, accumulate=accumulate)
    return out, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Tensor) -> Tensor:
        state = FP8GlobalStateManager.quantization_state
        quantized = call.forward_meta.quantize(x, call.index)
        # As the library: a checkpoint recomputes what is saved for the backward.
        ctx.save_for_backward(quantized.data, quantized.scale_inv)
        ctx.kept = (call, call.module.wgrad_store)
        ctx.rolls, state.is_first_fp8_module = state.is_first_fp8_module, False
        # As the library: sampled now, although the gradient is computed much later.
        ctx.overwrite = getattr(call.weights[0], "overwrite_main_grad", False)
        made = product(quantized, call.workspace.cached, b_t=True)
        if call.biases:
            made.add_(torch.cat(parameters[len(call.weights) :]))
        return made.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        call, store = ctx.kept
        quantized = QuantizedTensor(*ctx.saved_tensors)
        module = call.module
        dy = call.backward_meta.quantize(gradient, call.index // 2)
        dx = product(dy, call.workspace.cached).to(gradient.dtype)
        db = gradient.float().sum(0).to(gradient.dtype)
        fuse = module.fuse_wgrad_accumulation
        main_grad = call.weights[0].main_grad if fuse else None
        accumulate = fuse and not call.first
        wgrad_gemm_kwargs: dict[str, Any] = {
            "out": main_grad,
            "accumulate": accumulate and not ctx.overwrite,
            "out_dtype": gradient.dtype if main_grad is None else main_grad.dtype,
            "layout": "NT",
        }

        def wgrad_gemm(x: Float8TensorStorage, dy: Float8TensorStorage) -> tuple[Tensor, None]:
            return general_gemm(x, dy, **wgrad_gemm_kwargs)

        # The input keeps its transpose alone; dI has read the rows of the output gradient.
        operands = [
            Float8TensorStorage.of(quantized, rowwise=False),
            Float8TensorStorage.of(dy, rowwise=True),
        ]

        sizes = [weight.shape[0] for weight in call.weights]
        weights: Sequence[Tensor | None] = [None] * len(sizes)
        if store.delay_wgrad_compute():
            store.put(operands, wgrad_gemm)
        else:
            dw, _ = wgrad_gemm(*operands)
            if not fuse:
                weights = torch.split(dw, sizes)
        if ctx.rolls:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, None, *weights, *(torch.split(db, sizes) if call.biases else ())


class Call:
    """One product of one module call."""

    def __init__(self, module: FP8Module, names: Sequence[str], slot: str, index: int) -> None:
        self.module, self.index = module, index
        self.weights = [getattr(module, f"{name}weight") for name in names]
        self.biases = [getattr(module, f"{name}bias") for name in names if module.biased]
        self.forward_meta: Meta = module.fp8_meta["scaling_fwd"]
        self.backward_meta: Meta = module.fp8_meta["scaling_bwd"]
        self.first = module.is_first
        weight = torch.cat([w.detach() for w in self.weights])
        held = module._fp8_workspaces.get(slot)
        if held is None:
            held = module._fp8_workspaces[slot] = Workspace(weight, self.forward_meta, index + 1)
        elif self.first:
            held.quantize_(weight)
        self.workspace: Workspace = held

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        made = _Product.apply(flat, self, *self.weights, *self.biases)  # type: ignore[no-untyped-call]
        return made.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class FP8Module(torch.nn.Module):
    """The common base of linear modules."""

    tp_size = 1
    primary_weights_in_fp8 = False

    def __init__(
        self,
        pieces: dict[str, tuple[int, int]],
        norm: int | None,
        fuse: bool,
        bias: bool = True,
        normalization: str = "LayerNorm",
    ) -> None:
        super().__init__()
        self.biased = bias
        self.fp8_meta: dict[str, Any] = {}
        self._fp8_workspaces: dict[str, Workspace] = {}
        self.wgrad_store = WeightGradStore()
        self.fuse_wgrad_accumulation = fuse
        self.is_first = False
        self.pieces = pieces
        for name, (rows, width) in pieces.items():
            weight = (torch.randn(rows, width) * 0.02).bfloat16()
            self.register_parameter(f"{name}weight", torch.nn.Parameter(weight))
            if bias:
                zeros = torch.zeros(rows).bfloat16()
                self.register_parameter(f"{name}bias", torch.nn.Parameter(zeros))
        if norm is not None:
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(norm).bfloat16())
            self.layer_norm_bias: torch.nn.Parameter | None = None
            if normalization == "LayerNorm":
                self.layer_norm_bias = torch.nn.Parameter(torch.zeros(norm).bfloat16())

    @property
    def weight_names(self) -> list[str]:
        """Names of the weights that one product stacks."""
        return [f"{name}weight" for name in self.pieces]

    def _get_weight_tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.weight_names]

    def begin(self, first: bool, num_products: int) -> None:
        """Make state on first use, and register it."""
        self.is_first = first
        if not self.fp8_meta:
            recipe = FP8GlobalStateManager.quantization_state.recipe
            assert recipe is not None
            for key, per, dtype in (("scaling_fwd", 2, E4M3), ("scaling_bwd", 1, E5M2)):
                self.fp8_meta[key] = Meta.empty(
                    recipe.amax_history_len, per * num_products, dtype, torch.device("cpu")
                )
        if not FP8GlobalStateManager.quantization_state.gathers:
            FP8GlobalStateManager.register(self.fp8_meta)

    def norm(self, x: Tensor) -> Tensor:
        """The fused norm."""
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if bias is None:
            return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)
        return functional.layer_norm(x, x.shape[-1:], weight, bias)


class LayerNormLinear(FP8Module):
    """Norm and one product."""

    def forward(self, x: Tensor, first: bool) -> Tensor:
        """F."""
        self.begin(first, 1)
        return Call(self, list(self.pieces), "weight", 0)(self.norm(x))


class Head(LayerNormLinear):
    """The library's own `LayerNormLinear`, as a user makes a single one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        normalization: str,
        bias: bool,
        params_dtype: torch.dtype,
        fuse_wgrad_accumulation: bool,
        device: torch.device,
    ) -> None:
        pieces = {"": (out_features, in_features)}
        super().__init__(pieces, in_features, fuse_wgrad_accumulation, bias, normalization)

    def forward(self, x: Tensor, is_first_microbatch: bool) -> Tensor:
        """F."""
        return super().forward(x, is_first_microbatch)


class Linear(FP8Module):
    """One product."""

    def forward(self, x: Tensor, first: bool) -> Tensor:
        """F."""
        self.begin(first, 1)
        return Call(self, list(self.pieces), "weight", 0)(x)


class LayerNormMLP(FP8Module):
    """Norm and two products over one store."""

    activation = "gelu"

    def forward(self, x: Tensor, first: bool) -> Tensor:
        """F."""
        self.begin(first, 2)
        hidden = Call(self, ["fc1_"], "fc1_weight", 0)(self.norm(x))
        if self.activation == "swiglu":
            gate, up = hidden.chunk(2, -1)
            hidden = functional.silu(gate) * up
        else:
            hidden = functional.gelu(hidden, approximate="tanh")
        return Call(self, ["fc2_"], "fc2_weight", 2)(hidden)


class SelfAttention(torch.nn.Module):
    """The module in which the library keeps the attention's two linear modules."""

    def __init__(
        self, hidden: int, kv: int, *, fused_qkv: bool, fuse: bool, bias: bool, normalization: str
    ) -> None:
        super().__init__()
        qkv = {"": (hidden + 2 * kv, hidden)}
        if not fused_qkv:
            rows = {"query": hidden, "key": kv, "value": kv}
            qkv = {f"{part}_": (each, hidden) for part, each in rows.items()}
        self.layernorm_qkv = LayerNormLinear(qkv, hidden, fuse, bias, normalization)
        self.proj = Linear({"": (hidden, hidden)}, None, fuse, bias)


class TransformerLayer(torch.nn.Module):
    """A layer with the library's module paths and its refusal."""

    def __init__(
        self,
        hidden: int,
        ffn: int,
        heads: int,
        *,
        fuse_qkv_params: bool,
        fuse_wgrad_accumulation: bool,
        num_gqa_groups: int | None = None,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        bias: bool = True,
        hidden_dropout: float = 0.1,
        **_: Any,
    ) -> None:
        super().__init__()
        self.hidden_dropout = hidden_dropout
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError("Gradient accumulation fusion requires fuse_qkv_params=True")
        self.groups, self.interleaved = num_gqa_groups or heads, fuse_qkv_params
        self.shared, self.width = heads // self.groups, hidden // heads
        self.self_attention = SelfAttention(
            hidden,
            self.groups * self.width,
            fused_qkv=fuse_qkv_params,
            fuse=fuse_wgrad_accumulation,
            bias=bias,
            normalization=normalization,
        )
        rows = 2 * ffn if activation == "swiglu" else ffn
        mlp = {"fc1_": (rows, hidden), "fc2_": (hidden, ffn)}
        self.layernorm_mlp = LayerNormMLP(mlp, hidden, fuse_wgrad_accumulation, bias, normalization)
        self.layernorm_mlp.activation = activation

    def forward(
        self, x: Tensor, is_first_microbatch: bool, rotary_pos_emb: Tensor | None = None
    ) -> Tensor:
        """F."""
        sequence, batch, _ = x.shape
        mixed = self.self_attention.layernorm_qkv(x, is_first_microbatch)
        parts = (self.shared, 1, 1)
        if self.interleaved:
            mixed = mixed.view(sequence, batch, self.groups, sum(parts), self.width)
            split = [part.flatten(2, 3) for part in mixed.split(parts, -2)]
        else:
            whole = mixed.split([self.groups * part * self.width for part in parts], -1)
            split = [part.unflatten(-1, (-1, self.width)) for part in whole]
        if rotary_pos_emb is not None:
            split[:2] = (_turned(part, rotary_pos_emb) for part in split[:2])
        query, key, value = (part.permute(1, 2, 0, 3) for part in split)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.shared > 1
        )
        attended = attended.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
        p = self.hidden_dropout
        x = x + generator.drop(self.self_attention.proj(attended, is_first_microbatch), p)
        result: Tensor = x + generator.drop(self.layernorm_mlp(x, is_first_microbatch), p)
        return result


class DeviceGenerator:
    """A stand-in for a device's default generator, whose numbers follow from seed and offset."""

    def __init__(self) -> None:
        self._seed, self._offset = 1, 8

    def initial_seed(self) -> int:
        """The seed."""
        return self._seed

    def get_offset(self) -> int:
        """The offset."""
        return self._offset

    def set_offset(self, offset: int) -> None:
        """Move the generator."""
        assert offset % 4 == 0
        self._offset = offset

    def manual_seed(self, seed: int) -> None:
        """Seed the generator, which sets the offset to 0."""
        self._seed, self._offset = seed, 0

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """Apply dropout; with a probability of zero no random number is drawn."""
        if probability == 0.0:
            return x
        drawn = torch.Generator().manual_seed((self._seed + self._offset) % 2**63)
        numbers = torch.rand(x.shape, generator=drawn)
        self._offset += 4 * x.numel()
        return x * (numbers >= probability).to(x.dtype) / (1.0 - probability)


generator = DeviceGenerator()


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """
    The same as the library's fused kernel: in fp32, each pair is turned by one rotation of the
    plane.
    """
    half = x.shape[-1] // 2
    pairs = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1).float())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[..., :half]
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def noop_cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate weights."""
    return torch.cat(list(tensors))


class Graphs:
    """A stand-in for `make_graphed_callables` that records its arguments and captures nothing."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def of(self, version: str) -> Callable[..., tuple[Any, ...]]:
        """
        The function with the parameters of a version; from 2.19 on the function can omit clones.
        """

        def make_graphed_callables(
            modules: Any,
            sample_args: Any,
            num_warmup_iters: int = 3,
            allow_unused_input: bool = False,
            enabled: bool | None = None,
            recipe: Any = None,
            cache_quantized_params: bool | None = None,
            _order: Any = None,
            _num_layers_per_chunk: Any = None,
        ) -> tuple[Any, ...]:
            return tuple(sample_args)

        def make_graphed_callables_from_2_19(
            *arguments: Any,
            num_warmup_iters: int = 3,
            allow_unused_input: bool = False,
            enabled: bool | None = None,
            recipe: Any = None,
            cache_quantized_params: bool | None = None,
            _order: Any = None,
            _num_layers_per_chunk: Any = None,
            clone_param_grads_on_return: bool = True,
        ) -> tuple[Any, ...]:
            self.asked["clone_param_grads_on_return"] = clone_param_grads_on_return
            return tuple(arguments[1])

        old = version.startswith("2.18")
        return make_graphed_callables if old else make_graphed_callables_from_2_19


graphs = Graphs()


class _Overwriting(torch.autograd.Function):
    """The mean cross entropy of 2.20, whose backward writes the gradient into a saved tensor."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, target: Tensor, ignored: int, saved: Tensor) -> Tensor:
        ctx.ignored, ctx.kept = ignored, (saved, target)
        mean, _ = cross_entropy_forward(inp, target, 0.0, True, None, ignored)
        return mean

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor, None, None, None]:
        saved, target = ctx.kept
        _, gradient = cross_entropy_forward(saved, target, 0.0, True, None, ctx.ignored)
        with torch.no_grad():
            saved.copy_(gradient * output_gradients[0])
        return saved, None, None, None


def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
) -> tuple[Tensor, Tensor]:
    """The kernels of 2.18: the mean, and its gradient in fp32."""
    assert (label_smoothing, reduce_loss, dist_process_group) == (0.0, True, None)
    assert _input.dim() == 3
    assert target.numel() == _input.shape[0] * _input.shape[1]
    with torch.enable_grad():
        logits = _input.detach().float().requires_grad_()
        mean = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=ignore_idx
        )
    (gradient,) = torch.autograd.grad(mean, logits)
    return mean.detach(), gradient


def multi_tensor_scale_tensor(
    chunk_size: int, flag: Tensor, tensors: list[list[Tensor]], scale: Tensor
) -> None:
    """Multiply each tensor by a scale, into another tensor, to whose type it rounds."""
    assert flag.dtype == torch.int32
    for given, wanted in zip(*tensors, strict=True):
        wanted.copy_(given * scale)


class CrossEntropy:
    """
    The function of the mean cross entropy, with the options of a version; the options are recorded.

    2.18 takes `is_cg_capturable`; 2.20 takes it too, with a warning, and `overwrite_input`.
    """

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def of(self, version: str) -> Any:
        """The function of a version; 2.18 has no `overwrite_input`."""
        old = version.startswith("2.18")

        def function(
            inp: Tensor,
            target: Tensor,
            label_smoothing: float = 0.0,
            reduce_loss: bool = False,
            dist_process_group: Any = None,
            ignore_idx: int = -100,
            is_cg_capturable: bool = False,
            overwrite_input: bool = False,
        ) -> Tensor:
            self.asked.append(overwrite_input)
            assert reduce_loss
            if is_cg_capturable:
                warnings.warn("deprecated", FutureWarning, stacklevel=2)
            saved = inp.detach() if overwrite_input else inp.detach().clone()
            found: Tensor = _Overwriting.apply(inp, target, ignore_idx, saved)
            return found.reshape(1)

        if old:
            *parameters, _ = inspect.signature(function).parameters.values()
            vars(function)["__signature__"] = inspect.Signature(parameters)
        return function


cross_entropies = CrossEntropy()


def modules(version: str = VERSION) -> dict[str, types.ModuleType]:
    """What to put into `sys.modules`."""
    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.common",
        "transformer_engine.common.recipe",
        "transformer_engine.pytorch.module",
        "transformer_engine.pytorch.module._common",
        "transformer_engine.pytorch.optimizers",
        "transformer_engine.pytorch.quantization",
        "transformer_engine.pytorch.triton",
        "transformer_engine.pytorch.triton.cross_entropy",
    )
    made: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    made["transformer_engine"].__version__ = version
    te = made["transformer_engine.pytorch"]
    te.TransformerLayer, te.LayerNormLinear, te.autocast = TransformerLayer, Head, autocast
    graphs.asked.clear()
    te.make_graphed_callables = graphs.of(version)
    cross_entropies.asked.clear()
    te.parallel_cross_entropy = cross_entropies.of(version)
    kernels: Any = made["transformer_engine.pytorch.triton.cross_entropy"]
    kernels.cross_entropy_forward = cross_entropy_forward if version.startswith("2.18") else None
    optimizers: Any = made["transformer_engine.pytorch.optimizers"]
    optimizers.multi_tensor_scale_tensor = multi_tensor_scale_tensor
    recipe = made["transformer_engine.common.recipe"]
    recipe.DelayedScaling = DelayedScaling
    recipe.Float8CurrentScaling = recipe.Float8BlockScaling = StatelessScaling
    recipe.Format = types.SimpleNamespace(HYBRID="HYBRID")
    common = made["transformer_engine.pytorch.module._common"]
    common.WeightGradStore, common.noop_cat = WeightGradStore, noop_cat
    quantization = made["transformer_engine.pytorch.quantization"]
    quantization.FP8GlobalStateManager = FP8GlobalStateManager
    return made

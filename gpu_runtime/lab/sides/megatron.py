"""
Run the same model under Megatron-core, in each of Megatron's graph modes; only this module imports
Megatron-core.

This module is written for megatron-core 0.19.2, which needs only torch and Transformer Engine.
Megatron's model starts from the bits of our model: parameters are copied by name (`megatron_name`),
and in both models one matrix holds query, key and value, with rows ordered head by head. The models
differ in one point: Megatron approximates the activation in the same way as our model, but rounds
the result to bf16 before quantization. The heads of both models are bf16. The model is that of
`report peers` with one layer per stage, or a whole decoder with the same division into stages as
ours. Over one rank Megatron has no stages: the model is one chunk, and each microbatch's backward
follows its forward. Every mode runs under Megatron's own DistributedDataParallel, whose main_grad
(bf16 or fp32) is the gradient. With fp32, both Megatron's optimizer and ours have fp32 master
weights. All of Megatron's fusions that do not need APEX are on (`OPTIONS`). Messages are not
batched, because with two ranks a batch has a send in each direction between the same ranks. NCCL
would pair the two sends by order, so Megatron-LM refuses such batches.
"""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from qeffect.report import UnusableError

from ...backends.protocol import parameters
from ...ranks.membership import Member, all_gather
from ...step.optimizer import Gradients
from ...step.plan.order import Order
from ..comparisons.gradients import compare_gradients, save_gradients
from ..runner.rank_process import Findings
from ..runner.rank_rows import RankRun, measure_rows
from ..runner.timing import RoundPlan
from ..statistics.peers import EAGER
from .language import MAIN_GRADS, PP, VPP, DrawnLanguage, PeerRow
from .model_rows import ModelRow
from .pipelines import drawn_batches

__all__ = [
    "GRAPH_MODES",
    "MODES",
    "MODULES",
    "OPTIONS",
    "VERSION",
    "MegatronModelRow",
    "MegatronRow",
    "MegatronSide",
    "gpt_chunk",
    "library",
    "measure_models",
    "measure_modes",
    "meet",
    "megatron_name",
    "options",
]

VERSION = "megatron-core==0.19.2"
GRAPH_MODES = ("none", "transformer_engine", "local", "full_iteration")
"""Values of Megatron's `cuda_graph_impl`."""
CAPTURED_AT = 3
"""Number of steps before Transformer Engine's graphs are made, as in Megatron's own loop."""
MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.tensor_parallel",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.cuda_graphs",
    "megatron.core.full_cuda_graph",
)
OPTIONS: Mapping[str, Any] = {
    "gradient_accumulation_fusion": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_compute_algo": "max",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""
Options of every mode. Gradient accumulation is fused in the layers, which Transformer Engine
computes, but not in the head, where this fusion would need APEX.
"""
MODES = (
    "megatron.core.parallel_state",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.module",
    "megatron.core.transformer.transformer_config",
)
"""Modules that `report modes` needs on a CPU, where `MODULES` cannot be imported."""
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_PAIRS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "self_attention.layernorm_qkv.": (
        "self_attention.linear_qkv.",
        ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    ),
    "self_attention.proj.": ("self_attention.linear_proj.", ("weight", "bias")),
    "layernorm_mlp.": ("mlp.linear_fc1.", ("layer_norm_weight", "layer_norm_bias")),
    "layernorm_mlp.fc1_": ("mlp.linear_fc1.", ("weight", "bias")),
    "layernorm_mlp.fc2_": ("mlp.linear_fc2.", ("weight", "bias")),
}
"""
For each prefix of our parameter names: Megatron's prefix, and the endings of names that may follow
both prefixes.
"""
_OF_LAYER = {our + part: other + part for our, (other, parts) in _PAIRS.items() for part in parts}
_OF_ENDS: Mapping[str, str] = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "embedding.position": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}


def options(job: DrawnLanguage) -> dict[str, Any]:
    """The Megatron options of a job: `OPTIONS`, and those that its layers and history determine."""
    c = job.config
    swiglu = c.activation == "swiglu"
    return {
        **OPTIONS,
        "fp8_amax_history_len": job.history,
        "normalization": _NORMS[c.norm],
        "num_query_groups": c.groups,
        "gated_linear_unit": swiglu,
        "add_bias_linear": c.bias,
    }


def megatron_name(name: str, first_layer: int) -> str:
    """
    Return Megatron's name within a chunk for one of our parameters.

    Args:
        name: The parameter's name in our model, such as `layers.5.self_attention.proj.weight` or
            `head.weight`.
        first_layer: The index in the model of the chunk's first layer.

    >>> megatron_name("layers.3.layernorm_mlp.fc1_weight", 3)
    'decoder.layers.0.mlp.linear_fc1.weight'

    Raises:
        KeyError: The parameter is unknown.
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        return _OF_ENDS[name]
    return f"decoder.layers.{int(found[1]) - first_layer}.{_OF_LAYER[found[2]]}"


def library(names: Sequence[str] = MODULES) -> SimpleNamespace:
    """
    Megatron-core's modules, by the last part of their names.

    Args:
        names: Full names of the modules.

    Raises:
        UnusableError: Megatron-core or one of its modules is missing.
    """
    import importlib

    found = {}
    for name in names:
        try:
            found[name.rsplit(".", 1)[1]] = importlib.import_module(name)
        except ImportError as error:
            raise UnusableError(
                f"{name} cannot be imported ({error}): pip install --no-deps {VERSION}"
            ) from error
    return SimpleNamespace(**found)


def delayed_wgrad_answer() -> dict[str, str]:
    """How Megatron reacts to a dense model with delayed weight gradients."""
    lib = library()
    try:
        lib.transformer_config.TransformerConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=2,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            pipeline_model_parallel_size=PP,
            virtual_pipeline_model_parallel_size=VPP,
            delay_wgrad_compute=True,
        )
    except (AssertionError, ValueError) as error:
        return {"megatron delayed dW": f"refused before training: {error}"}
    return {"megatron delayed dW": "accepted by the configuration; not trained"}


def gpt_chunk(
    lib: SimpleNamespace,
    config: Any,
    vocabulary: int,
    sequence: int,
    v: int | None,
    positions: str = "learned_absolute",
) -> Any:
    """
    Build a chunk of Megatron's GPT with Transformer Engine's layers.

    Args:
        lib: The modules of Megatron-core, by the last part of their names.
        config: Megatron's `TransformerConfig`.
        vocabulary: Number of tokens.
        sequence: Length of a sequence.
        v: The chunk's number on this rank; None if the rank has only one chunk.
        positions: Megatron's `position_embedding_type`.
    """
    state = lib.parallel_state
    if v is not None:
        state.set_virtual_pipeline_model_parallel_rank(v)
    place = {"ignore_virtual": v is None, "vp_stage": v}
    return lib.gpt_model.GPTModel(
        config,
        lib.gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(),
        vocabulary,
        sequence,
        pre_process=state.is_pipeline_first_stage(**place),
        post_process=state.is_pipeline_last_stage(**place),
        position_embedding_type=positions,
        vp_stage=v,
        share_embeddings_and_output_weights=False,
    )


def meet(mode: str, pp: int = PP) -> Member:
    """
    Connect to the other ranks under NCCL, as Megatron requires.

    Args:
        mode: One of `GRAPH_MODES`.
        pp: Number of ranks.

    Raises:
        UnusableError: Megatron-core is not installed.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lib = library()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    member = Member(rank, world, rank, device, dist.distributed_c10d._get_default_store())
    lib.parallel_state.initialize_model_parallel(1, pp, VPP if pp > 1 else None)
    graphs = mode != "none"
    lib.tensor_parallel.model_parallel_cuda_manual_seed(
        0, te_rng_tracker=graphs, use_cudagraphable_rng=graphs
    )
    return member


class _ModeRow:
    """A row of the report (a workload under one schedule) in one of Megatron's modes."""

    side: str

    @property
    def mode(self) -> str:
        """`none`, `transformer_engine`, `local` or `full_iteration`."""
        return self.side.removeprefix("megatron ")


@attrs.frozen
class MegatronModelRow(_ModeRow, ModelRow):
    """A whole model in one of Megatron's modes; Megatron's schedule is Interleaved 1F1B."""

    settling_steps = CAPTURED_AT + 2

    def make(self, member: Member) -> MegatronSide:  # type: ignore[override]
        """Build Megatron's side for this row."""
        return MegatronSide(member, self.mode, self.job(), MAIN_GRADS[self.main_grad])


@attrs.frozen
class MegatronRow(_ModeRow, PeerRow):
    """A row of `report peers` in one of Megatron's modes."""

    @property
    def label(self) -> str:
        """The name in progress lines, without a schedule, because a mode has only one schedule."""
        return f"{self.cell}, {self.side}, {self.main_grad}"

    def make(  # type: ignore[override]
        self, member: Member, look: Callable[[Gradients], None] = lambda _: None
    ) -> MegatronSide:
        """Build the side, whose gradients stay in main_grad."""
        return MegatronSide(member, self.mode, self.job(), MAIN_GRADS[self.main_grad])


def measure_modes(rows: Sequence[MegatronRow], folder: Path, findings: Findings) -> None:
    """
    Measure the rows of one mode on one rank; a row is one cell (workload). For the mode without
    graphs, also record how Megatron reacts to delayed weight gradients.

    Args:
        rows: Rows to measure.
        folder: Folder in which gradients are saved for comparison.
        findings: Receives each row once it is measured.
    """
    mode = rows[0].mode
    if mode == "none":
        findings.add({"refusals": delayed_wgrad_answer()})
    member = meet(mode)

    def measure(row: MegatronRow) -> dict[str, Any]:
        return {"rows": _measure_row(member, row, folder)}

    measure_rows(member, rows, findings, measure)


def measure_models(row: MegatronModelRow, plan: RoundPlan, findings: Findings) -> None:
    """
    Measure one whole model on one rank; the reported loss is the loss of the initial weights.

    Args:
        row: The row to measure.
        plan: How the model is timed.
        findings: Receives the row's times, loss and further numbers.
    """
    member = meet(row.mode, row.pp)

    def measure(row: MegatronModelRow) -> dict[str, Any]:
        run = RankRun.of(member, row.make)
        run.settle(row.settling_steps)
        loss = sum(all_gather(member, run.side.loss()))
        return {"loss": loss, **run.time(plan, run.side.facts())}

    measure_rows(member, [row], findings, measure)


def _measure_row(member: Member, row: MegatronRow, folder: Path) -> dict[str, Any]:
    run = RankRun.of(member, row.make)
    side = run.side
    run.settle(row.settling_steps)
    member.synchronize()
    own = {name: parameter.main_grad for name, parameter in side.names}
    eager = f"{EAGER} {row.main_grad}"
    references = ["native", eager]
    if row.side == EAGER:
        save_gradients(folder, row.cell, eager, member.rank, own)
        references = ["native"]
    gradients = compare_gradients(member, folder, row.cell, references, own)
    for one in gradients:
        one["with"] = one["with"].removesuffix(f" {row.main_grad}")
    loss = sum(all_gather(member, side.loss()))
    plan = row.settings.rounds_of("eager" if row.side == EAGER else "replays")
    found = run.time(plan, side.facts())
    return row.measured(gradients, loss, found)


class MegatronSide:
    """
    Megatron's model of a job, its optimizer and its step.

    Transformer Engine's graphs are made before the step of number `CAPTURED_AT`.

    Args:
        member: This rank.
        mode: `none`, `transformer_engine`, `local` or `full_iteration`.
        job: The dimensions of the model, and its number of microbatches.
        dtype: Data type of main_grad, and of the weights that the optimizer updates.
    """

    def __init__(
        self, member: Member, mode: str, job: DrawnLanguage, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        lib = library()
        self.lib, self.mode, self.job, self.dtype = lib, mode, job, dtype
        self.number, self.capture_s = 0, 0.0
        calculator = lib.num_microbatches_calculator
        calculator.destroy_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(member.rank, None, job.microbatches, 1, 1)
        self.indices = Order.of_rank(job.table(), member.rank).stages
        parts: list[tuple[int | None, Sequence[int]]] = [(None, self.indices)]
        if job.pp > 1:
            parts = [(v, [index]) for v, index in enumerate(self.indices)]
        own = self._ours(member)
        self.config = self._config()
        chunks: list[Any] = []
        self.names: list[tuple[str, Any]] = []
        for v, indices in parts:
            chunk = self._chunk(v).cuda().bfloat16()  # as its Float16Module does
            held = dict(chunk.named_parameters())
            ours = {name: value for index in indices for name, value in own[index].items()}
            first = sum(job.cut[: indices[0]])
            theirs = {name: megatron_name(name, first) for name in ours}
            if odd := sorted(held.keys() ^ set(theirs.values())):
                raise ValueError(
                    f"expected the same parameters in our model and Megatron's, found {len(odd)} "
                    f"in only one of them, such as {odd[0]}"
                )
            with torch.no_grad():
                for name, value in ours.items():
                    held[theirs[name]].copy_(value)
            self.names += [(name, held[other]) for name, other in theirs.items()]
            chunks.append(chunk)
        del own
        self.model = self._replicated(chunks)
        self.parameters = [parameter for _, parameter in self.names]
        self.targets = self.parameters
        if dtype is not torch.bfloat16:
            self.targets = [p.detach().to(dtype, copy=True) for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.targets, lr=0.0, weight_decay=0.0, fused=True)
        self.run = lib.pipeline_parallel.get_forward_backward_func()
        if mode == "full_iteration":
            self.run = lib.full_cuda_graph.FullCudaGraphWrapper(
                self.run, cuda_graph_warmup_steps=CAPTURED_AT
            )
        self.data = self._data(member)
        self.losses: list[dict[str, Tensor]] = []

    def _ours(self, member: Member) -> dict[int, dict[str, Tensor]]:
        """
        Copies of this rank's parameters, by stage and by the model's names; the stages themselves
        are freed.
        """
        from ...backends.te.domain import reset_process

        stages = self.job.stages(self.indices, member.device, "transformer-engine", loss=False)
        found = {
            stage.index: {
                self.job.name_of(stage.index, name): parameter.detach().clone()
                for name, parameter in parameters(stage).items()
            }
            for stage in stages
        }
        reset_process()
        return found

    def _config(self) -> Any:
        c = self.job.config
        graphs: dict[str, Any] = {}
        stages: dict[str, Any] = {}
        if self.job.pp > 1:
            stages = {
                "virtual_pipeline_model_parallel_size": VPP,
                "pipeline_model_parallel_layout": self._layout(),
            }
        if self.mode != "none":
            graphs = {"cuda_graph_impl": self.mode, "cuda_graph_warmup_steps": CAPTURED_AT}
        if self.mode == "full_iteration":
            graphs["cuda_graph_modules"] = []
        return self.lib.transformer_config.TransformerConfig(
            num_layers=sum(self.job.cut),
            hidden_size=c.hidden,
            ffn_hidden_size=c.ffn,
            num_attention_heads=c.heads,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            pipeline_model_parallel_size=self.job.pp,
            **stages,
            # The fusion of GELU with the bias computes the approximation by tanh.
            activation_func=functional.silu if c.activation == "swiglu" else functional.gelu,
            **options(self.job),
            deallocate_pipeline_outputs=self.mode == "none",
            **graphs,
        )

    def _layout(self) -> list[list[str]]:
        """For each stage, the parts that it contains: embedding, layers and loss."""
        stages = [["decoder"] * layers for layers in self.job.cut]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        return stages

    def _chunk(self, v: int | None) -> Any:
        layers, job = self.lib.layers, self.job
        # The option is one for layers and head, and the head refuses it without APEX.
        has_apex = layers._grad_accum_fusion_available
        layers._grad_accum_fusion_available = True
        try:
            chunk = gpt_chunk(
                self.lib, self.config, job.vocabulary, job.config.sequence, v,
                positions="rope" if job.config.positions == "rotary" else "learned_absolute",
            )  # fmt: skip
        finally:
            layers._grad_accum_fusion_available = has_apex
        if not has_apex and hasattr(chunk, "output_layer"):
            chunk.output_layer.gradient_accumulation_fusion = False
        return chunk

    def _replicated(self, chunks: list[Any]) -> list[Any]:
        """
        Wrap chunks in Megatron's DistributedDataParallel, on a separate stream.

        DistributedDataParallel keeps autograd's node of each parameter, and a node keeps the stream
        on which it was made. With the default stream, every backward in a capture would fail.
        Megatron's own loop uses a separate stream too.
        """
        distributed = self.lib.distributed
        settings = distributed.DistributedDataParallelConfig(
            overlap_grad_reduce=False, grad_reduce_in_fp32=self.dtype is torch.float32
        )
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            made = [
                distributed.DistributedDataParallel(self.config, settings, chunk)
                for chunk in chunks
            ]
        torch.cuda.current_stream().wait_stream(aside)
        return made

    def _data(self, member: Member) -> list[dict[str, Tensor]]:
        """The microbatches of every step, batch dimension first, as in Megatron."""
        batch = drawn_batches(self.job, member.device)
        found = []
        for m in range(self.job.microbatches):
            tokens, labels = (part.t().contiguous() for part in batch(0, m))
            places = torch.arange(tokens.shape[1], device=member.device).expand_as(tokens)
            found.append({"tokens": tokens, "labels": labels, "places": places.contiguous()})
        return found

    def _forward(self, data: Any, chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(data)
        out = chunk(batch["tokens"], batch["places"], None, labels=batch["labels"])

        def loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = per_token.float().mean()
            return mean, {"loss": mean.detach().clone()}  # theirs divides the mean in place

        return out, loss

    def gradients_of_a_step(self) -> None:
        """Run forward and backward of every microbatch, which accumulate into main_grad."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.losses = self.run(
            forward_step_func=self._forward,
            data_iterator=[iter(self.data) for _ in self.model],
            model=self.model,
            num_microbatches=self.job.microbatches,
            seq_length=self.job.config.sequence,
            micro_batch_size=self.job.config.batch,
            forward_only=False,
        )

    def step(self) -> None:
        """Run one optimizer step."""
        if self.number == CAPTURED_AT:
            self._capture()
        self.number += 1
        self.gradients_of_a_step()
        for target, parameter in zip(self.targets, self.parameters, strict=True):
            target.grad = parameter.main_grad
        self.adamw.step()
        if self.targets is not self.parameters:
            torch._foreach_copy_([p.detach() for p in self.parameters], self.targets)
        for target in self.targets:
            target.grad = None

    def _capture(self) -> None:
        """
        Make Transformer Engine's graphs if the mode has such graphs, and record how many seconds
        the host needs.
        """
        if self.mode != "transformer_engine":
            return
        began = time.perf_counter()
        helper = self.lib.cuda_graphs.TECudaGraphHelper(
            self.model, self.config, self.job.config.sequence, self.job.config.batch, []
        )
        helper.create_cudagraphs()
        self.capture_s = time.perf_counter() - began

    def facts(self) -> dict[str, Any]:
        """The seconds that the host needed to capture graphs."""
        return {"capture_s": self.capture_s}

    def close(self) -> None:
        """Do nothing: Megatron's groups last as long as the process."""

    def loss(self) -> float:
        """The loss of the last step; 0 on ranks without the last stage."""
        if not isinstance(self.losses, list) or not self.losses:
            return 0.0
        return float(sum(float(one["loss"]) for one in self.losses)) / self.job.microbatches

"""
A small model in one of Megatron-core's modes, for `report modes`: toy layers on a CPU, a GPT on
GPUs.

On a CPU, `as_cpu` lets Megatron's loops run, and a chunk consists of the toy layers of `mode_runs`.
On GPUs, a chunk is a GPT of Transformer Engine's layers in FP8. In both cases the initial weights
depend only on a parameter's place in the model, not on the division into stages.
"""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .megatron import CAPTURED_AT, MODES, MODULES, gpt_chunk, library
from .mode_runs import LAYERS, RATE, ROWS, WIDTH, Block, layout_of

__all__ = ["MegatronRun"]

_SEQUENCE = 2
_GPT = {"hidden": 256, "ffn": 512, "heads": 4, "vocabulary": 512, "sequence": 128}
_RECIPES = {"delayed": "delayed", "current": "tensorwise", "block": "blockwise"}
_MESSAGES: Mapping[str, Mapping[str, bool]] = {
    "plain": {"batch_p2p_comm": False, "overlap_p2p_comm": False},
    "batched": {"batch_p2p_comm": True, "overlap_p2p_comm": False},
    "overlapped": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
    "overlapped, flushed": {
        "batch_p2p_comm": False,
        "overlap_p2p_comm": True,
        "overlap_p2p_comm_warmup_flush": True,
    },
}


class MegatronRun:
    """A model under Megatron-core's loops; see `ModeRun`."""

    def __init__(self, row: Mapping[str, Any], device: torch.device) -> None:
        self.row, self.device, self.number = row, device, 0
        self.cuda = device.type == "cuda"
        self.lib = library((*MODULES, *MODES) if self.cuda else MODES)
        self.pp, _ = layout_of(row)
        self.microbatches = 4 * self.pp  # two groups of the larger size
        self.graphs = row.get("graphs", "none")
        state, vpp = self.lib.parallel_state, row["vpp"]
        state.initialize_model_parallel(
            1, self.pp, vpp if vpp > 1 else None, create_gloo_process_groups=False
        )
        self.place = state.get_pipeline_model_parallel_rank()
        self.replica = state.get_data_parallel_rank()
        if self.cuda:
            graphed = self.graphs != "none"
            self.lib.tensor_parallel.model_parallel_cuda_manual_seed(
                0,
                te_rng_tracker=graphed,
                use_cudagraphable_rng=graphed,
                force_reset_rng=True,
            )
        calculator = self.lib.num_microbatches_calculator
        calculator.destroy_num_microbatches_calculator()
        replicas = state.get_data_parallel_world_size()
        calculator.init_num_microbatches_calculator(
            dist.get_rank(), None, self.microbatches * ROWS * replicas, ROWS, replicas
        )
        self.config = self._config()
        distributed = self.lib.distributed
        sharded = row["optimizer"] != "adam"
        gathers = row["optimizer"].endswith("gathered")
        settings = distributed.DistributedDataParallelConfig(
            overlap_grad_reduce=row["reduction"] != "at the end",
            use_distributed_optimizer=sharded,
            overlap_param_gather=gathers,
            bucket_size=None if self.cuda or row["reduction"] == "at the end" else 40,
            fp8_param_gather=bool(row.get("fp8_param")),
        )
        self.named: dict[str, Any] = {}
        chunks = [self._chunk(v) for v in range(vpp)]
        self.model = self._aside(
            lambda: [distributed.DistributedDataParallel(self.config, settings, c) for c in chunks]
        )
        self.config.finalize_model_grads_func = distributed.finalize_model_grads
        if row["reduction"] != "at the end":
            syncs = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = syncs if vpp > 1 else syncs[0]
        if row["reduction"] == "aligned":
            starts = [chunk.start_grad_sync for chunk in self.model]
            self.config.grad_sync_func = starts if vpp > 1 else starts[0]
        adam = self.lib.optimizer.OptimizerConfig(
            fp8_recipe=_RECIPES[row["scaling"]] if self.cuda else None,
            optimizer="adam",
            lr=RATE / 10,
            clip_grad=0.0,
            bf16=self.cuda,
            params_dtype=torch.bfloat16 if self.cuda else torch.float32,
            use_distributed_optimizer=sharded,
            overlap_param_gather=gathers,
        )
        self.optimizer = self.lib.optimizer.get_megatron_optimizer(
            adam, self.model, use_gloo_process_groups=False
        )
        self.loop: Callable[..., Any] | None = None
        self.helper: Any = None

    def _config(self) -> Any:
        row, given = self.row, dict[str, Any]()
        if self.cuda:
            given = {
                "num_layers": LAYERS * self.pp,
                "hidden_size": _GPT["hidden"],
                "ffn_hidden_size": _GPT["ffn"],
                "num_attention_heads": _GPT["heads"],
                "bf16": True,
                "params_dtype": torch.bfloat16,
                "pipeline_dtype": torch.bfloat16,
                "fp8": "hybrid",
                "fp8_recipe": _RECIPES[row["scaling"]],
                "fp8_param": row["fp8_param"],
                "fp8_amax_history_len": 4,
                "fp8_amax_compute_algo": "max",
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "gradient_accumulation_fusion": False,
                "deallocate_pipeline_outputs": self.graphs == "none",
            }
            if self.graphs != "none":
                given |= {"cuda_graph_impl": self.graphs, "cuda_graph_warmup_steps": CAPTURED_AT}
            if self.graphs == "full_iteration":
                # Megatron waits for the device after batched messages, which no capture allows.
                given |= {"cuda_graph_modules": [], "batch_p2p_sync": False}
        else:
            given = {
                "num_layers": LAYERS * self.pp,
                "hidden_size": WIDTH,
                "num_attention_heads": 1,
                "pipeline_dtype": torch.float,
                "variable_seq_lengths": row["variable_seq_lengths"],
                "moe_token_dispatcher_type": "alltoall",  # for variable lengths
                "deallocate_pipeline_outputs": row["deallocate"],
            }
        if "delay_wgrad_compute" in row:
            given["delay_wgrad_compute"] = row["delay_wgrad_compute"]
        if row["vpp"] > 1:
            given["virtual_pipeline_model_parallel_size"] = row["vpp"]
            given["microbatch_group_size_per_vp_stage"] = self.pp * row["group"]
        return self.lib.transformer_config.TransformerConfig(
            pipeline_model_parallel_size=self.pp, **_MESSAGES[row["messages"]], **given
        )

    def _chunk(self, v: int) -> Any:
        vpp = self.row["vpp"]
        index, each = v * self.pp + self.place, LAYERS // vpp
        chunk = self._gpt(v) if self.cuda else self._toy(index, each, self.pp * vpp)
        for name, parameter in chunk.named_parameters():
            whole = re.sub(
                r"layers\.(\d+)", lambda found: f"layers.{index * each + int(found[1])}", name
            )
            self.named[f"{self.replica}/{whole}"] = parameter
            if self.cuda:
                seed = int.from_bytes(hashlib.sha256(whole.encode()).digest()[:4], "big")
                drawn = torch.Generator().manual_seed(seed)
                norm = name.endswith(("layer_norm_weight", "layernorm.weight"))
                value = torch.full(parameter.shape, float(norm))
                if parameter.dim() > 1:
                    value = torch.randn(parameter.shape, generator=drawn) * 0.02
                value = value.bfloat16()
                amax = getattr(getattr(parameter, "_quantizer", None), "amax", None)
                with torch.no_grad():
                    if amax is not None:  # of the first values, whose draws depend on the cut
                        amax.zero_()
                    parameter.copy_(value)
                if hasattr(parameter, "_high_precision_init_val"):
                    parameter._high_precision_init_val = value  # the first fp32 master weight
        return chunk

    def _toy(self, index: int, each: int, total: int) -> Any:
        class Chunk(self.lib.module.MegatronModule):  # type: ignore[misc, name-defined]
            """A chunk of the toy layers of `mode_runs`."""

            def __init__(self, config: Any) -> None:
                super().__init__(config)
                self.layers = nn.ModuleList([Block(index * each + n) for n in range(each)])
                self.model_type = "toy"
                self.pre_process, self.post_process = index == 0, index == total - 1
                self.share_embeddings_and_output_weights = False
                self.given: Any = None

            def set_input_tensor(self, given: Any) -> None:
                self.given = given[0] if isinstance(given, list) else given

            def forward(self, x: Tensor) -> Tensor:
                x = x if self.pre_process else self.given
                for layer in self.layers:
                    x = layer(x)
                return x

        return Chunk(self.config)

    def _gpt(self, v: int) -> Any:
        own = v if self.row["vpp"] > 1 else None
        chunk = gpt_chunk(self.lib, self.config, _GPT["vocabulary"], _GPT["sequence"], own)
        return chunk.cuda().bfloat16()  # as Megatron's Float16Module does, FP8 parameters too

    def _aside(self, make: Callable[[], Any]) -> Any:
        """Call `make` on a separate stream, as Megatron does, because later captures need it."""
        if not self.cuda:
            return make()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            found = make()
        torch.cuda.current_stream().wait_stream(aside)
        return found

    def guard(self) -> Any:
        from qeffect.guards import megatron

        return megatron.guard(manner="report")

    def _data(self) -> Iterator[Any]:
        """Yield microbatches; a graph of a whole iteration needs named tensors."""
        generator = torch.Generator().manual_seed(self.number * 10 + self.replica)
        for _ in range(self.microbatches):
            if self.cuda:
                length = _GPT["sequence"]
                words = torch.randint(
                    0, _GPT["vocabulary"], (ROWS, length + 1), generator=generator
                )
                named = {
                    "tokens": words[:, :-1],
                    "labels": words[:, 1:],
                    "places": torch.arange(length).expand(ROWS, length),
                }
                yield {name: one.contiguous().to(self.device) for name, one in named.items()}
            else:
                x, y = torch.randn(2, _SEQUENCE, ROWS, WIDTH, generator=generator)
                yield {"x": x, "y": y}

    def _forward(self, batches: Any, chunk: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        if self.cuda:
            out = chunk(batch["tokens"], batch["places"], None, labels=batch["labels"])
        else:
            out = chunk(batch["x"])

        def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = output.float().mean
            found = mean() if self.cuda else nn.functional.mse_loss(output, batch["y"])
            return found, {"loss": found.detach().clone()}

        return out, loss

    def _take_loop(self) -> Callable[..., Any]:
        run: Callable[..., Any] = self.lib.pipeline_parallel.get_forward_backward_func()
        if self.graphs == "full_iteration":
            wrapped = self.lib.full_cuda_graph.FullCudaGraphWrapper
            run = wrapped(run, cuda_graph_warmup_steps=CAPTURED_AT)
        return run

    def step(self) -> list[float]:
        """
        Train a step. The first step looks up Megatron's loop, so that a guard attached before then
        takes effect.
        """
        self.loop = self.loop or self._take_loop()
        if self.graphs == "transformer_engine" and self.number == CAPTURED_AT:
            self.helper = self.lib.cuda_graphs.TECudaGraphHelper(
                self.model, self.config, _GPT["sequence"], ROWS, []
            )
            gathers = [chunk for chunk in self.model if chunk.use_forward_hook]
            for chunk in gathers:  # as Megatron's training loop does
                chunk.disable_forward_pre_hook(param_sync=False)
            self.helper.create_cudagraphs()
            for chunk in gathers:
                chunk.enable_forward_pre_hook()
            if gathers:
                self.helper.cuda_graph_set_manual_hooks()
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        several = len(self.model) > 1
        batches = [self._data() for _ in self.model]
        found = self.loop(
            forward_step_func=self._forward,
            data_iterator=batches if several else batches[0],
            model=self.model if several else self.model[0],
            num_microbatches=self.microbatches,
            seq_length=_GPT["sequence"] if self.cuda else _SEQUENCE,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        # Keep the gradients: a step would zero the buffers that a gather of parameters uses.
        self.kept = {n: p.main_grad.detach().clone() for n, p in self.named.items()}
        self.optimizer.step()
        self.number += 1
        return [float(one["loss"]) for one in found] if isinstance(found, list) else []

    def gradients(self) -> Mapping[str, Tensor]:
        """
        Reduced gradients; empty if replicas share an optimizer, because each replica then has only
        a part of the gradients.
        """
        shares = self.row["optimizer"] != "adam" and layout_of(self.row)[1] > 1
        return {} if shares else self.kept

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters after the last step, once replicas have gathered them."""
        if self.row["optimizer"].endswith("gathered"):
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        return {
            name: p.dequantize() if hasattr(p, "dequantize") and self.row.get("fp8_param") else p
            for name, p in self.named.items()
        }

    def close(self) -> None:
        """Release the model, graphs and process groups."""
        if self.graphs == "local":
            self.lib.cuda_graphs.delete_cuda_graphs()
        if self.helper is not None:
            self.helper.delete_cuda_graphs()
        if self.graphs == "full_iteration":  # the class keeps the graph, its steps and its data
            self.loop.reset_cuda_graph()  # type: ignore[union-attr]
            self.lib.full_cuda_graph.StaticBufferLoader.static_buffers["training"].clear()
        self.loop, self.model, self.named, self.optimizer = None, [], {}, None
        self.helper = None
        self.kept = {}
        gc.collect()
        if self.cuda:
            from ...backends.te.domain import reset_process

            reset_process()
        self.lib.parallel_state.destroy_model_parallel()

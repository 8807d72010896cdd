"""
One rank of a real Megatron-core run on a CPU, over gloo; `tests.megatron.ranks` starts it.

    python -m tests.megatron.rank RANK WORLD STORE OUT CASES

`CASES` is JSON: a list of runs, one after another, each in a fork of its own. Each run has a model
of its own with the same first weights; what the rank says of each goes to `OUT` as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qeffect.gpu_runtime.lab.sides import as_cpu
from tests.megatron.model import WIDTH, Layer, Training, data, fuse

#: No case lives longer; a hung rank prints where it hangs.
LIMIT_S = 100


class Run(Training):
    """A run of a case on this rank."""

    def __init__(self, case: dict[str, Any], rank: int) -> None:
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.distributed import param_and_grad_buffer as buffers
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import p2p_communication, schedules
        from megatron.core.transformer.module import MegatronModule
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.schedules, self.p2p, self.buffers = schedules, p2p_communication, buffers
        self.saves, self.state = dist_checkpointing, parallel_state
        self.case, self.rank, self.number = case, rank, 0
        self.stages, vpp = case.get("stages", 2), case.get("chunks", 1)
        self.microbatches = case.get("microbatches", 4)
        parallel_state.initialize_model_parallel(
            1,
            self.stages,
            vpp if vpp > 1 else None,
            create_gloo_process_groups=False,
            num_distributed_optimizer_instances=case.get("instances", 1),
        )
        self.pipeline = parallel_state.get_pipeline_model_parallel_rank()
        self.replica = parallel_state.get_data_parallel_rank()
        quantized, options = case.get("quantized", False), dict(case.get("config", {}))
        if vpp > 1 and not case.get("batched"):
            options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        last = self.stages * vpp - 1
        self.config = TransformerConfig(
            num_layers=self.stages * vpp,
            hidden_size=WIDTH,
            num_attention_heads=1,
            pipeline_dtype=torch.float,
            pipeline_model_parallel_size=self.stages,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            **options,
        )
        if quantized:
            self.config.fp8 = "hybrid"
        if case.get("deallocate", True):
            self.config.deallocate_pipeline_outputs = True

        class Chunk(MegatronModule):  # type: ignore[misc]
            """A virtual stage: one layer."""

            def __init__(self, index: int, config: Any) -> None:
                super().__init__(config)
                torch.manual_seed(index)
                self.decoder = nn.Module()
                self.decoder.layers = nn.ModuleList([Layer(quantized)])
                self.model_type = "toy"
                self.pre_process, self.post_process = index == 0, index == last
                self.share_embeddings_and_output_weights = False
                self.given: Any = None

            def set_input_tensor(self, given: Any) -> None:
                self.given = given[0] if isinstance(given, list) else given

            def forward(self, x: Tensor) -> Tensor:
                x = x if self.pre_process else self.given
                for layer in self.decoder.layers:
                    x = layer(x)
                return x

        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=case.get("overlap", False),
            use_distributed_optimizer=case.get("distributed", False),
            overlap_param_gather=case.get("gather", False),
            bucket_size=40 if case.get("overlap") else None,
            num_distributed_optimizer_instances=case.get("instances", 1),
        )
        self.model: list[Any] = []
        for v in range(vpp):
            chunk = Chunk(v * self.stages + self.pipeline, self.config)
            if not case.get("plain"):
                chunk = DistributedDataParallel(self.config, settings, chunk)
            self.model.append(chunk)
        if case.get("plain"):
            parameters = [p for chunk in self.model for p in chunk.parameters()]
            self.optimizer: Any = torch.optim.AdamW(parameters, lr=1e-2)
        else:
            self.config.finalize_model_grads_func = finalize_model_grads
            if case.get("overlap"):
                syncs = [chunk.no_sync for chunk in self.model]
                self.config.no_sync_func = syncs if vpp > 1 else syncs[0]
                if case.get("aligned"):
                    starts = [chunk.start_grad_sync for chunk in self.model]
                    self.config.grad_sync_func = starts if vpp > 1 else starts[0]
            adam = OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                clip_grad=case.get("clip", 0.0),
                use_distributed_optimizer=case.get("distributed", False),
                overlap_param_gather=case.get("gather", False),
            )
            self.optimizer = get_megatron_optimizer(adam, self.model, use_gloo_process_groups=False)
        if case.get("fused"):
            fuse(p for chunk in self.model for p in chunk.parameters())
        self.data = [data(7 + self.replica) for _ in self.model]

    def save(self, name: str) -> None:
        """Save this rank's weights as Megatron-core's distributed checkpoint."""
        self.saves.save(*self._checkpoint(name))

    def copies(self) -> dict[str, Tensor]:
        """Copies of the first chunk's weights."""
        return {name: value.clone() for name, value in self.model[0].state_dict().items()}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load weights, and let the next step's forwards gather nothing."""
        self.model[0].disable_forward_pre_hook(param_sync=False)
        self.model[0].load_state_dict(weights)

    def ask(self, name: str) -> Any:
        """Ask for an asynchronous save."""
        known = signature(self.saves.serialization.save).parameters
        options = {"async_strategy": "mcore"} if "async_strategy" in known else {}
        return self.saves.save(*self._checkpoint(name), async_sharded_save=True, **options)

    def schedule(self, request: Any) -> None:
        """Schedule an asynchronous save, and wait until it has ended."""
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)

    def _checkpoint(self, name: str) -> tuple[dict[str, Any], str]:
        folder = Path(self.case["folder"]) / name
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        weight = next(self.model[0].parameters()).detach()
        entry = self.saves.ShardedTensor.from_rank_offsets(
            "weight", weight, (0, self.pipeline, self.stages), replica_id=self.replica
        )
        return {"weight": entry}, str(folder)


def names(run: Run) -> dict[str, int]:
    """What the guard replaces, by name: the identity of each."""
    from megatron.core.optimizer import optimizer
    from megatron.core.transformer import cuda_graphs

    owners = [
        run.schedules,
        run.p2p.P2PCommunicator,
        run.buffers._ParamAndGradBucketGroup,
        run.saves,
        run.saves.serialization,
        optimizer.FP32Optimizer,
        optimizer.MixedPrecisionOptimizer,
        optimizer.ChainedOptimizer,
        cuda_graphs,
        cuda_graphs._CudagraphReplayNode,
    ]
    return {
        f"{owner.__name__}.{name}": id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value) or isinstance(value, staticmethod | classmethod)
    }


def run_case(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run a case; return what happened."""
    from qeffect.guards import megatron
    from qeffect.refusals import Refused
    from tests.megatron.faults import FAULTS, STEPS, WIDE_FAULTS, Undo
    from tests.megatron.stale import graph_layers

    run = Run(case, rank)
    torch.manual_seed(31 + rank)
    fault = (FAULTS | WIDE_FAULTS)[case["fault"]] if case.get("fault") else None
    undo, guarded = Undo(), None
    flags = graph_layers(run) if case.get("graphs") else []
    before = names(run)
    if fault is not None and rank in fault.ranks and not fault.above:
        fault.put(run, undo)
    if manner := case.get("manner"):
        guarded = megatron.guard(
            manner=manner, log=case.get("log"), compare_caches=case.get("compare", 0)
        )
    if fault is not None and rank in fault.ranks and fault.above:
        fault.put(run, undo)
    said: dict[str, Any] = {"bits": [], "stage": run.pipeline, "replica": run.replica}
    began = time.perf_counter()
    try:
        for step in range(case.get("steps", STEPS)):
            if case.get("resize") and step == 1:
                run.microbatches += 2
            weights = run.copies() if case.get("reload") and step == 1 else None
            bits = run.step()
            if weights is not None:
                run.load(weights)
            elif case.get("reload") and step == 2:
                run.model[0].enable_forward_pre_hook()
            if case.get("brief") is None or step == case["steps"] - 1:
                said["bits"].append(bits)
            if case.get("evaluate"):
                with torch.no_grad():
                    run.loop(forward_only=True)
            if case.get("save"):
                run.save(f"step{step}")
    except Refused as error:
        said["refused"] = error.clause
        said["notes"] = error.__notes__
        said["step"] = run.number
    said["flags"] = flags
    said["seconds"] = time.perf_counter() - began
    if guarded is not None:
        said["violations"] = [
            [v.clause, v.rank, v.step, v.action, v.found] for v in guarded.violations
        ]
        said["epoch"], said["trust"] = guarded.epochs, guarded.on_trust()
        said["compared"] = guarded.values.compared
        said["live"] = 0 if guarded.contract is None else len(guarded.contract.live())
        undo()
        guarded.remove()
    undo()
    said["left"] = sorted(name for name, value in names(run).items() if before.get(name) != value)
    return said


def child(rank: int, world: int, store: str, out: Path, case: dict[str, Any]) -> None:
    """Run a case in a process of its own; never returns."""
    faulthandler.dump_traceback_later(case.get("limit_s", LIMIT_S), exit=True)
    code = 1
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world
        )
        out.write_text(json.dumps(run_case(case, rank)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for process in multiprocessing.active_children():  # Megatron-core starts some for a save
            process.kill()
        os._exit(code)  # without a barrier: a run that was refused has no group to meet in


def main(rank: int, world: int, store: str, out: str, cases: list[dict[str, Any]]) -> None:
    """Import Megatron-core once; run each case in a fork."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    as_cpu.install()
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.full_cuda_graph
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules

    from qeffect.guards import megatron as guard

    said: list[dict[str, Any]] = []
    for n, case in enumerate(cases):
        print(f"case {case}", flush=True)
        part = Path(f"{out}.{n}")
        if (pid := os.fork()) == 0:
            child(rank, world, f"{store}.{n}", part, case)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.append(json.loads(part.read_text()) if part.exists() else {"failed": code})
        Path(out).write_text(json.dumps(said))
    print(megatron.core.__version__, guard.TESTED)


if __name__ == "__main__":
    own, ranks, *paths, given = sys.argv[1:]
    main(int(own), int(ranks), *paths, json.loads(given))

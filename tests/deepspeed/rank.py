"""
One rank of a real DeepSpeed run on a CPU, over gloo; `launch` in `tests.deepspeed.ranks` starts it.

    python -m tests.deepspeed.rank RANK WORLD STORE OUT CASES

`CASES` is JSON: a list of runs, one after another. Each run has a model of its own with the same
first weights; what the rank says of each goes to `OUT` as JSON.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

WIDTH, ROWS = 8, 2
#: No process lives longer; a hung rank prints where it hangs.
LIMIT_S = 55


class Block(nn.Module):
    """A layer with random numbers of its own, so that a forward too many changes the run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(self.linear(x)))


class Pair(nn.Module):
    """A layer that passes a tuple on: a mask that all microbatches share, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mask = Block(), torch.ones(ROWS, dtype=torch.long)

    def forward(self, given: Any) -> Any:
        return self.mask, self.block(given[-1] if isinstance(given, tuple) else given)


def loss_of_pair(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[1], target)


def data(seed: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        yield x.to(dtype), y


def build(case: dict[str, Any]) -> Any:
    """The engine of a run."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    stages, microbatches = case.get("stages", 2), case.get("microbatches", 4)
    layers: list[Any] = [Block() for _ in range(4)]
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss}
    kind: Any = PipelineModule
    if case["model"] == "tied":
        layers = [
            TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH),
            *(LayerSpec(Block) for _ in range(2)),
            TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH),
        ]
    elif case["model"] == "tuples":
        layers, options["loss_fn"] = [Pair() for _ in range(4)], loss_of_pair
    elif case["model"] == "folded":
        kind = deepspeed.DualPipeVModule
        layers = [LayerSpec(Block) for _ in range(2 * stages)]
    if case.get("recompute"):
        options["activation_checkpoint_interval"] = 1
    net = kind(layers, num_stages=stages, partition_method="uniform", **options)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "gradient_clipping": 0.0,  # else every update asks all stages for the norm
        "steps_per_print": 10**6,
        **case.get("config", {}),
    }
    parameters = [p for p in net.parameters() if p.requires_grad]
    own: dict[str, Any] = {}
    if case.get("scheduler") == "before":
        del config["optimizer"]
        own["optimizer"] = torch.optim.SGD(parameters, lr=0.1)
        own["lr_scheduler"] = StepLR(own["optimizer"], 1, 0.5)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=config, **own)
    if case.get("compiled"):
        engine.compile(backend="eager")
    return engine


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run a case; return what happened."""
    from qeffect.guards import deepspeed as guards
    from qeffect.refusals import Refused
    from tests.deepspeed.faults import FAULTS, STEPS

    engine = build(case)
    engine.folder = case.get("folder", "")
    fault = FAULTS[case["fault"]] if case.get("fault") else None
    guarded = None
    if manner := case.get("manner"):
        guarded = guards.guard(engine, manner=manner, log=case.get("log"))
    if fault is not None and rank in fault.ranks:
        put_under(guarded, engine, fault.put)
    scheduler = StepLR(engine.optimizer, 1, 0.5) if case.get("scheduler") == "after" else None
    seed = 7 + (rank if engine.is_data_parallel else 0)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    batches = data(seed, dtype)
    said: dict[str, Any] = {"bits": [], "class": type(engine).__name__, "stage": engine.stage_id}
    said["optimizer"] = type(engine.optimizer).__name__
    try:
        for step in range(case.get("steps", STEPS)):
            if case.get("resize") and step == 1:
                engine.set_train_batch_size(engine.train_batch_size() * 3 // 2)
            loss = float(engine.train_batch(batches))
            if scheduler is not None:
                scheduler.step()
            if case.get("evaluate"):
                engine.eval_batch(batches)
            if case.get("save"):
                engine.save_checkpoint(engine.folder, tag=f"step{step}")
            said["bits"].append([loss.hex(), *map(digest, engine.module.parameters())])
    except Refused as error:
        said["refused"] = error.clause
        said["notes"] = error.__notes__
    if guarded is not None:
        said["violations"] = [
            [v.clause, v.rank, v.step, v.action, v.found] for v in guarded.violations
        ]
        said["epoch"], said["trust"] = guarded.contract.epoch, guarded.on_trust()
        said["live"] = len(guarded.contract.live())
        guarded.remove()
    said["left"] = sorted(vars(engine))
    return said


def put_under(guarded: Any, engine: Any, put: Any) -> None:
    """Put a fault into an engine that may be guarded: under the guard's own map of methods."""
    own = vars(engine).pop("_INSTRUCTION_MAP", None)
    put(engine)
    fault = vars(engine).pop("_INSTRUCTION_MAP", None)
    if own is not None:
        if fault is not None:
            own._before = fault
        engine._INSTRUCTION_MAP = own
    elif fault is not None:
        engine._INSTRUCTION_MAP = fault


def digest(value: Tensor) -> str:
    return hashlib.sha256(value.detach().float().numpy().tobytes()).hexdigest()[:12]


def main(rank: int, world: int, store: str, out: str, cases: list[dict[str, Any]]) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*optimizer.step")  # a scheduler of torch misses it
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    said: list[dict[str, Any]] = []
    try:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        for case in cases:
            print(f"case {case}", flush=True)
            said.append(run(case, rank))
            Path(out).write_text(json.dumps(said))
            if "refused" in said[-1]:
                break
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # without a barrier: a run that was refused has no group left to meet in


if __name__ == "__main__":
    own, ranks, *paths, given = sys.argv[1:]
    main(int(own), int(ranks), *paths, json.loads(given))

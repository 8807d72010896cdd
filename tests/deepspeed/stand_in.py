"""
A stand-in for DeepSpeed's pipeline engine: it has the engine's attributes and runs the engine's
recorded instructions.

The stand-in is one rank of a pipeline, in one process and without the package DeepSpeed. Every
message arrives, with random values; a reduction does nothing. The class has the name and release of
DeepSpeed's class, so that the guard treats the stand-in as the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qeffect.schedule.deepspeed import INSTRUCTIONS
from tests.deepspeed.rank import ROWS, WIDTH, Block, data
from tests.schedule.test_deepspeed import RELEASE, STREAMS

#: The instructions, one class each, as DeepSpeed has them.
CLASSES = {name: type(name, (), {}) for name in sorted(INSTRUCTIONS)}
PACKAGE = "deepspeed_stand_in"


class TrainSchedule:
    """DeepSpeed's schedule of this name, from a recording."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        name = f"{type(self).__name__} {stages} {micro_batches}"
        if name not in STREAMS:
            raise ValueError(f"{name} was not recorded")
        self._stream = STREAMS[name][stage_id]

    def steps(self) -> Iterator[list[Any]]:
        for step in self._stream["steps"]:
            made = []
            for name, given in step:
                each = CLASSES[name]()
                each.kwargs = given
                made.append(each)
            yield made

    def num_pipe_buffers(self) -> int:
        return int(self._stream["buffers"])

    __iter__ = steps


class DeepSpeedEngine:
    """The parts of the base class that the guard and the faults use."""

    is_data_parallel = is_model_parallel = False
    grid: Any = None

    def buffered_allreduce_fallback(self) -> None:
        """Reduce nothing: there is one replica."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def gradient_accumulation_steps(self) -> int:
        return int(self.micro_batches)  # type: ignore[attr-defined]


class PipelineEngine(DeepSpeedEngine):
    """
    One rank of a pipeline.

    Args:
        stage: Index of the rank's stage.
        stages: Number of stages.
        microbatches: Number of microbatches.
    """

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., Any]]] = {}
    schedule: type = TrainSchedule

    def __init__(self, stage: int = 0, stages: int = 2, microbatches: int = 4) -> None:
        torch.manual_seed(stage)
        self.module: Any = nn.Sequential(Block(), Block())
        self.module.loss_fn = nn.functional.mse_loss
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.stage_id, self.num_stages, self.micro_batches = stage, stages, microbatches
        self.pipe_buffers: dict[str, list[Any]] = {
            name: [None] * microbatches for name in ("inputs", "labels", "outputs")
        }
        self.loss = torch.tensor(0.0)
        self.grad_layer: Any = None
        self.global_steps = 0
        self.folder, self.saved = "", 0
        self._batches: Any = None
        self._total = 0.0
        self._arrives = data(11 + stage, torch.float32)

    def is_last_stage(self) -> bool:
        return bool(self.stage_id == self.num_stages - 1)

    def train_batch(self, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        self._batches, self._total = batches, 0.0
        self._exec_schedule(self._train_schedule())
        return self._total

    def eval_batch(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches
        row = [CLASSES[name]() for name in ("LoadMicroBatch", "ForwardPass")]
        for each in row:
            each.kwargs = {"buffer_id": 0}
        with torch.no_grad():
            self._exec_schedule([row])

    def save_checkpoint(self, folder: str, tag: str = "") -> None:
        self.saved += 1

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _train_schedule(self) -> Any:
        return self.schedule(self.micro_batches, self.num_stages, self.stage_id)

    def _exec_schedule(self, schedule: Any) -> None:
        for step in schedule:
            for each in step:
                MethodType(self._INSTRUCTION_MAP[type(each)], self)(**each.kwargs)

    def _load(self, buffer_id: int) -> None:
        x, y = next(self._batches)
        if self.stage_id == 0:
            self.pipe_buffers["inputs"][buffer_id] = x
        if self.is_last_stage():
            self.pipe_buffers["labels"][buffer_id] = y

    def _forward(self, buffer_id: int) -> None:
        outputs = self.module(self.pipe_buffers["inputs"][buffer_id])
        self.pipe_buffers["outputs"][buffer_id] = outputs
        if self.is_last_stage():
            self.loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
            self._total += float(self.loss.detach())

    def _backward(self, buffer_id: int) -> None:
        if self.is_last_stage():
            self.backward(self.loss)
            return
        self.pipe_buffers["outputs"][buffer_id].backward(self.grad_layer)
        self.pipe_buffers["outputs"][buffer_id] = None

    def _receive(self, buffer_id: int) -> None:
        self.pipe_buffers["inputs"][buffer_id] = next(self._arrives)[0].requires_grad_()

    def _receive_gradient(self, buffer_id: int) -> None:
        self.grad_layer = next(self._arrives)[0]

    def _send(self, buffer_id: int) -> None:
        assert self.pipe_buffers["outputs"][buffer_id].shape == (ROWS, WIDTH)

    def _send_gradient(self, buffer_id: int) -> None:
        assert self.pipe_buffers["inputs"][buffer_id].grad is not None
        self.pipe_buffers["inputs"][buffer_id] = None

    def _reduce(self) -> None:
        self.buffered_allreduce_fallback()

    def _reduce_tied(self) -> None:
        """Reduce nothing."""

    def _update(self) -> None:
        self.optimizer.step()
        self.zero_grad()
        self.global_steps += 1


PipelineEngine._INSTRUCTION_MAP = {
    CLASSES[name]: method
    for name, method in (
        ("LoadMicroBatch", PipelineEngine._load),
        ("ForwardPass", PipelineEngine._forward),
        ("BackwardPass", PipelineEngine._backward),
        ("RecvActivation", PipelineEngine._receive),
        ("RecvGrad", PipelineEngine._receive_gradient),
        ("SendActivation", PipelineEngine._send),
        ("SendGrad", PipelineEngine._send_gradient),
        ("ReduceGrads", PipelineEngine._reduce),
        ("ReduceTiedGrads", PipelineEngine._reduce_tied),
        ("OptimizerStep", PipelineEngine._update),
    )
}
PipelineEngine.__module__ = f"{PACKAGE}.runtime.pipe.engine"
_package = ModuleType(PACKAGE)
_package.__version__ = RELEASE  # type: ignore[attr-defined]
sys.modules[PACKAGE] = _package

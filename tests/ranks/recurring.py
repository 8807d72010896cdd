"""
Steps of one rank's actions without device work, in one process, to test steps that are recorded and
recur.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from qeffect.contract import Contract
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.channels import Channels, channels_of
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.pipeline import Pipeline
from qeffect.gpu_runtime.ranks.rehearsal import Rehearsal
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.effects import Effects
from qeffect.gpu_runtime.step.graphs import product_at
from qeffect.gpu_runtime.step.plan.rows import Row, walked
from qeffect.schedule.actions import Schedule

CPU = torch.device("cpu")
SMALL = LayerConfig(32, 64, 2, 16)


def _zeros(specs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(s.shape, dtype=s.dtype) for s in specs)


class Feed:
    """Data whose values do not matter."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[torch.Tensor, ...]] = {}

    def _of(self, key: Any, specs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        if key not in self.made:
            self.made[key] = _zeros(specs)
        return self.made[key]

    def inputs(self, stage: Any, step: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Zeros; for a later stage, only the inputs that no message brings."""
        return self._of(("in", stage.index), stage.inputs)[1 if stage.index else 0 :]

    def output_gradients(self, stage: Any, step: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Zeros."""
        return self._of(("out", stage.index), stage.outputs)

    def outputs(self, *_: Any) -> None:
        """Nothing to look at."""


class _Slot:
    """What the captures of a slot (the buffers of one microbatch) would have recorded, with the
    scales that an eager dI reports."""

    def __init__(self, runtime: Runtime, stage: int, index: int) -> None:
        memory = runtime.memories[stage]
        self.contract, self.index, self.matrices = runtime.contract, index, memory.all_matrices
        self.moves = int(memory.stage.domain.scales == "action")  # type: ignore[attr-defined]
        self.ran = Effects((), self.moves, None)

    @property
    def queued(self) -> tuple[tuple[str, ...], Effects]:
        return self.matrices, Effects((), self.moves, self.contract.memory.scaled_at[self.index])


class Told:
    """A stand-in for an executor of graphs that always reports success."""

    def __init__(self, runtime: Runtime) -> None:
        self.moved = False
        self.slots = {
            slot.index: _Slot(runtime, stage, slot.index)
            for stage, memory in runtime.memories.items()
            for slot in memory.table
        }
        self.wgrads = {
            product: SimpleNamespace(covered=memory.all_matrices)
            for memory in runtime.memories.values()
            for m in range(len(memory.slot_of))
            if (product := product_at(memory, m)) is not None
        }
        self.refreshed = {
            stage: Effects(memory.all_matrices, None, None)
            for stage, memory in runtime.memories.items()
        }

    def check_addresses(self, memory: Any) -> None:
        """Refuse if the test declares that an address has moved."""
        if self.moved:
            raise BackendError(f"stage {memory.stage.index}: a cache has moved")


class Rank:
    """
    One rank of a pipeline whose steps are rehearsed.

    Args:
        job: The pipeline.
        rank: The rank.
        table: The schedule table that the rank runs; None to make the table.
        late: Whether the device counts actions, and the counts arrive one step later.
        reduced: Whether gradients are reduced over replicas, and the contract knows of the
            reductions.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        *,
        table: Schedule | None = None,
        late: bool = False,
        reduced: bool = False,
    ) -> None:
        group = job.wgrad_group
        table = table or walked(job.table(), job.provisioning, group)
        row = Row.of(table, rank, job.provisioning, group)
        self.runtime = Runtime(
            job.stages(row.stages, CPU, "reference"),
            row.order,
            RuntimeConfig(
                rule=job.rule,
                provisioning=job.provisioning,
                counts="next step" if late else None,
                group=group,
                copies={t.name: own for t in job.ties if (own := t.of(row.stages))},
            ),
            reducer=(lambda bucket, gradients: None) if reduced else None,
            row=row,
            rank=rank,
        )
        ends = [e for e in channels_of(row.table, job.ranks(0)) if rank in e]
        # Channels without a connection: whatever is posted raises.
        channels = Channels(rank, dict.fromkeys(ends), host=True)
        self.pipeline = Pipeline(self.runtime, row, channels, Feed(), job.ranks(0))
        self.fill()
        self.told = Told(self.runtime)
        self.rehearsal = Rehearsal(self.pipeline, self.told)
        self.every_action = False  # never as one
        self.late, self.ran = late, {}

    def fill(self) -> None:
        """Write into every slot (the buffers of one microbatch) what F and dI would have
        written."""
        for memory in self.runtime.memories.values():
            for slot in memory.table:
                slot.outputs = _zeros(memory.stage.outputs)
                slot.dgrads = _zeros([s for s in memory.stage.inputs if s.differentiable])

    @property
    def contract(self) -> Contract:
        """The rank's contract."""
        return self.runtime.contract

    def ask(self) -> None:
        """The checks before a launch."""
        if self.every_action:
            self.rehearsal = Rehearsal(self.pipeline, self.told)
        self.rehearsal.run()

    def tell(self) -> None:
        """The calls after a launch: the counts of the previous step, then the commit."""
        contract = self.contract
        if contract.counts_awaited:
            contract.present_counts(self.ran)
        self.rehearsal.commit()
        if self.late:
            self.ran = contract.committed_counts()

    def step(self) -> bool:
        """Run one step; return whether it was checked and committed in one call."""
        self.ask()
        as_one = self.rehearsal.as_one
        self.tell()
        return as_one

"""
The gate is the device's check before an update. Each device compares its counts of actions with the
expected counts, sends its vote on the update to all ranks, and publishes votes and counts for the
host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.counts import DeviceCounts, advance

from ..step.clipping import DeviceNorm, square_sums
from ..step.memory.counters import DeviceCounters
from ..step.memory.numerical_state import GatedSnapshot, live_state
from ..step.optimizer import Gradients
from .channels import Abort, LostError, device_group, end_group
from .launch_stamps import LaunchStamps
from .worker import Worker

__all__ = ["UNLIKE", "UpdateGate"]

UNLIKE = 2
"""The number published for a rank whose replica's reduced gradients differ from the first
replica's.
"""
ROWS = 4
"""Number of published steps that are kept; the device is never that many steps ahead of the
host.
"""


class UpdateGate:
    """Compares the counters on the device in each step, and publishes every rank's vote."""

    def __init__(self, counters: DeviceCounters, worker: Worker) -> None:
        from . import gate_kernel

        self.kernels = gate_kernel
        self.counters, self.world = counters, worker.member.world
        self.replicas = self.world // worker.pp
        values = self.values = counters.values
        device = values.device
        self.group: Any = None
        if self.world > 1:
            ranks = list(range(self.world))
            self.group = device_group(ranks, device, worker.limits.start)
        self.wanted, self.factors, self.terms = (torch.zeros_like(values) for _ in range(3))
        self.own = torch.zeros(1, dtype=torch.float64, device=device)
        self.heard = torch.zeros(self.world, dtype=torch.float64, device=device)
        self.norm: DeviceNorm | None = None
        if worker.clipping:
            self.norm = DeviceNorm.on(device, worker.clipping)
            # A rank's vote, then each part's sum of squares; 0 for a part of another rank.
            self.places = {part: n for n, part in enumerate(worker.clipping.parts)}
            width = 1 + len(self.places)
            self.row = torch.zeros(width, dtype=torch.float64, device=device)
            self.rows = torch.zeros(self.world, width, dtype=torch.float64, device=device)
        self.skip = torch.ones((), device=device)
        self.updated = torch.zeros((), dtype=torch.int64, device=device)
        self.kept = GatedSnapshot(list(live_state(worker.runtime.domain).values()))
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        stages = sorted(worker.runtime.stages)
        self.stamps = LaunchStamps(gate_kernel.stamp, self.number, stages, ROWS)
        row = 1 + values.numel() + self.world
        pinned = device.type == "cuda"
        self.ring = torch.full((ROWS, row), -1, dtype=torch.int64, pin_memory=pinned)
        self.read_steps = 0
        self.ending: Abort | None = None
        self.open = True

    @property
    def scale(self) -> Tensor | None:
        """The factor for the gradients, on the device; None if gradients are not clipped."""
        if self.norm is None or self.norm.clipping.max_norm is None:
            return None
        return self.norm.factor

    def capture(self, gradients: Gradients | None, differs: Tensor | None = None) -> Tensor:
        """
        Queue the gate: compare the counts, exchange votes, and decide whether the update is
        skipped.

        Args:
            gradients: Gradients of this rank's stages, for the norm; None in a warm-up.
            differs: `DoubleRun.differs` if the step ran twice, otherwise None. If this scalar is
                not 0, the two runs differ: this rank votes no, and its vote says which tensors
                differ.

        Returns:
            Float32 scalar on the device: 1 to skip the update, else 0.
        """
        self.kernels.compare(
            self.values, self.wanted, self.factors, self.terms, self.number, self.own
        )
        # After a skipped step, every later update is skipped until the host stops the ranks.
        self.own.mul_(self.updated == self.number)
        if differs is not None:
            self.own.copy_(torch.where((self.own > 0) & (differs > 0), -1 - differs, self.own))
        if self.norm is None:
            self._gather(self.heard, self.own)
        else:
            elsewhere = self.norm.clipping.elsewhere  # copies of a weight, which counts once
            self.row[:1].copy_(self.own)
            for part, squares in square_sums(gradients or {}, elsewhere).items():
                self.row[1 + self.places[part]].copy_(squares)
            self._gather(self.rows, self.row)
            self.heard.copy_(self.rows[:, 0])
            # In a replica one rank has the part and all others add 0, so this sum is exact.
            width = self.rows.shape[1] - 1
            parts = self.rows[:, 1:].reshape(self.replicas, -1, width).sum(1)
            if self.replicas > 1:
                finite = parts.isfinite() & parts[:1].isfinite()
                unlike = ((parts != parts[:1]) & finite).any(1, keepdim=True)
                yes = self.heard.view(self.replicas, -1) == self.number + 1
                self.heard.view(self.replicas, -1).masked_fill_(yes & unlike, -1.0)
            # All replicas have the same sums, unless only one has a value that is not finite.
            self.norm.take(parts.amax(0))
        self.kernels.publish(self.values, self.heard, self.skip, self.ring, self.number)
        self.updated.add_(self.skip == 0)
        self.kept.take(self.skip)
        if self.norm is not None:
            self.skip.copy_(torch.maximum(self.skip, self.norm.skip))
        return self.skip

    def _gather(self, into: Tensor, own: Tensor) -> None:
        # A missing vote never counts as consent: before the votes arrive the buffer holds a no,
        # and a vote that an aborted group left there has the number of an earlier step.
        into.fill_(0.0)
        if self.world > 1 and self.group is None:  # one rank's vote would count for all
            raise LostError("commit", -1, False, "the connections of this rank are closed")
        if self.group is None:
            into.copy_(own)
        else:
            dist.all_gather_into_tensor(into.view(-1), own, group=self.group)

    def warm(self) -> None:
        """
        Run the gate once outside of a capture, because a capture cannot load kernels or open
        communicators.

        The device waits for every rank; the host does not wait for the device.
        """
        self.capture(None, self.own.new_zeros(()))
        self.stamps.warm()
        self.kept.take()
        self.updated.zero_()

    def begin(self, before: DeviceCounts, after: DeviceCounts) -> None:
        """
        Compute how a step changes the device's counters and the digest of the order of actions.
        `before` and `after` are the counts before and after one step.
        """
        first, then = self.counters.numbers_of(before), self.counters.numbers_of(after)
        factors, terms = advance(first, then)
        for tensor, numbers in ((self.wanted, first), (self.factors, factors), (self.terms, terms)):
            tensor.copy_(torch.tensor(numbers, dtype=torch.int64))
        self.number.zero_()
        self.ring.fill_(-1)
        self.stamps.clear()
        self.read_steps = 0

    def read(self) -> tuple[DeviceCounts, list[int]]:
        """
        Read the published results of the oldest unread step. The device must have finished this
        step.

        Returns:
            The counts, and a number per rank. The number is 0 for a yes; 1 for a no or a missing
            vote; `UNLIKE` if the gradients of the rank's replica differ; or a larger number if the
            rank's two runs differ (`double_run.first_of`).

        Raises:
            LostError: The device has not published this step's results.
        """
        row = self.ring[self.read_steps % ROWS].tolist()
        if row[0] != self.read_steps:
            raise LostError("commit", -1, False, f"step {self.read_steps} was not published")
        self.read_steps += 1
        size = self.values.numel()
        return self.counters.counts_of(row[1 : 1 + size]), row[1 + size :]

    def let_go(self) -> None:
        """
        Start to abort the gate's process group without waiting. A graph that contains kernels of
        this group can then end.
        """
        group, self.group = self.group, None
        if group is not None:
            self.ending = Abort(group)

    def close(self, *, abort: bool = False) -> None:
        """End the gate's process group. An abort ends the waits of all ranks in the group."""
        self.open = False
        ending, self.ending = self.ending, None
        if ending is not None:
            ending.join()
        if self.group is not None:
            group, self.group = self.group, None
            end_group(group, abort=abort)

"""
Two runs of one step before its update. The device compares the results of the two runs.

Every N-th step runs twice from the same numerical state (FP8 scales and amaxes). Both runs have the
same inputs, weights, scales and random numbers. If any bit of the gradients or of the numerical
state differs, memory or a computation was wrong in one of the runs. The comparison does not find
errors that are the same in both runs. Examples are a bit of a weight that flipped before the first
run, and a device that always computes the same wrong number. If a weight changes during the runs,
the error names this weight. Then the ranks must restart from a checkpoint, because the former
weight is lost.

The contract checks and counts the two runs as one step. The second run (`second_run.py`) repeats
only device work. It runs before this rank consents to the update, or in mode ``one launch`` before
this rank's device votes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..backends.protocol import parameters
from ..runtime import Runtime
from ..step.memory.gradient_digests import GradientDigests
from ..step.memory.numerical_state import Snapshot, live_state, raw_bits
from ..step.optimizer import Gradients
from .causes import WEIGHT, Difference, MismatchError
from .second_run import SecondRun

__all__ = ["STATE", "DoubleRun", "compared", "first_of", "is_due"]

WORD = 3
"""Smallest number that a device publishes instead of its vote (`gate.py`) if two runs differ."""


def is_due(every: int, epoch: int) -> bool:
    """
    Whether step number `epoch` runs twice. Every N-th step runs twice, beginning with step N - 1.

    >>> [epoch for epoch in range(7) if is_due(3, epoch)]
    [2, 5]
    """
    return every > 0 and (epoch + 1) % every == 0


def first_of(word: int, count: int) -> tuple[int, int]:
    """
    Decode a number that a rank's gate (`gate.py`) published after two runs that differ. Return the
    index of the first name whose tensors differ, and the number of names whose tensors differ.

    Args:
        word: The published 64-bit number, at least `WORD`.
        count: Number of names that `compared` returned on that rank.

    >>> first_of(3, 10), first_of(3 + 4 + 2 * 10, 10)
    ((0, 1), (4, 3))
    """
    more, first = divmod(word - WORD, count)
    return first, more + 1


STATE = "scaling state"
"""Replaces a gradient's name if the numerical state of a stage differs."""


def _by_stage(runtime: Runtime) -> dict[int, list[Tensor]]:
    """
    Return the live numerical state by stage; the first stage also has the domain's common state.
    """
    found: dict[int, list[Tensor]] = {}
    for stage in runtime.domain.stages:
        if own := list(stage.numerical_state().values()):
            found[stage.index] = own
    if extra := list(runtime.domain.extra_state().values()):
        found.setdefault(min(runtime.stages), []).extend(extra)
    return found


def compared(runtime: Runtime, gradients: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """
    Return the stage and the name of each weight, gradient and state tensor that must be equal in
    both runs.

    Args:
        runtime: The guarded runtime of this rank, after the first run of the step.
        gradients: The stage and the name of each gradient of the rank.
    """
    weights = [(stage, WEIGHT + name) for stage, name in _weights(runtime)]
    return [*weights, *gradients, *((stage, STATE) for stage in _by_stage(runtime))]


def _weights(runtime: Runtime) -> list[tuple[int, str]]:
    return [(i, name) for i, stage in runtime.stages.items() for name in parameters(stage)]


class Walk(Protocol):
    """The interface of a `Pipeline` that a second run needs."""

    runtime: Any
    channels: Any
    log: Any
    position: int
    program: list[Any]

    def run_actions(self) -> None:
        """Run every action and message of this rank, in the order of the schedule table."""


class DoubleRun:
    """
    The two runs of one rank's step.

    Args:
        runtime: The guarded runtime of this rank, which makes the first run.
        every: The number N: every N-th step runs twice.
        names: By rank, the names that `compared` returned on that rank.
        rank: The global rank of this process.
        log: Computes the gradients' digests of the second run for the training log; None if the log
            has no digests.

    Attributes:
        differs: Float64 scalar on the device, valid after the second run. 0 if both runs are equal,
            otherwise 1 + i + n * k. `i` is the index in this rank's `names` of the first tensor
            that differs. `n` is the number of these names. `k` is the number of further tensors
            that differ.
        between: Called between the two runs of a guarded step; for tests.
    """

    def __init__(
        self,
        runtime: Runtime,
        every: int,
        names: Sequence[Sequence[tuple[int, str]]],
        rank: int,
        log: GradientDigests | None = None,
    ) -> None:
        device = runtime.domain.device
        self.runtime, self.every, self.names, self.rank = runtime, every, names, rank
        self.log = log
        own, weights = names[rank], _weights(runtime)
        self._before, self._after = (GradientDigests(weights, device) for _ in range(2))
        rest = own[len(weights) :]
        self.first, self.second = (GradientDigests(rest, device) for _ in range(2))
        self._scaling = list(_by_stage(runtime).values())
        live = list(live_state(runtime.domain).values())
        if runtime.counters is not None:
            live.append(runtime.counters.values)
        self._state = Snapshot(live)
        self._places = torch.arange(len(own), dtype=torch.float64, device=device)
        self.differs = torch.zeros((), dtype=torch.float64, device=device)
        self._unlike = torch.zeros(len(own), dtype=torch.bool, device=device)
        # The host reads this copy without waiting for a launch that still runs.
        self._told = torch.zeros(len(own), dtype=torch.bool, pin_memory=device.type == "cuda")
        self.repeat = SecondRun(runtime)
        self.between: Callable[[], None] = lambda: None

    def due(self, epoch: int) -> bool:
        """Whether the step with the number `epoch` runs twice."""
        return is_due(self.every, epoch)

    # The device's part; a graph can hold each call

    def begin(self) -> None:
        """Copy the state before the first run, and compute the digests of the weights."""
        self._state.take()
        self._before.take(self._weights())

    def _weights(self) -> dict[int, Mapping[str, Tensor]]:
        return {index: parameters(stage) for index, stage in self.runtime.stages.items()}

    def keep_first(self, gradients: Gradients) -> None:
        """
        Compute the digests of the first run's gradients, and of the numerical state after the first
        run.
        """
        self.first.take(gradients, self._state_bytes())

    def _state_bytes(self) -> list[Tensor]:
        # The position of random numbers is on the host.
        device = self.runtime.domain.device
        return [torch.cat([raw_bits(held).to(device) for held in own]) for own in self._scaling]

    def restore(self) -> None:
        """Restore the state from before the first run."""
        self._state.restore()

    def compare(self, gradients: Gradients) -> None:
        """
        Compute the digests of the second run, and compare them with the digests of the first run.
        """
        self.second.take(gradients, self._state_bytes())
        if self.log is not None:
            self.log.values.copy_(self.second.values[: self.log.values.numel()])
        self._after.take(self._weights())
        before = torch.cat([self._before.values, self.first.values])
        now = before != torch.cat([self._after.values, self.second.values])
        count, size = now.sum(), len(self.names[self.rank])
        place = (self._places + (~now).double() * size).amin()
        self.differs.copy_((count > 0) * (1 + place + (count - 1) * size))
        self._unlike.logical_or_(now)
        self._told.copy_(self._unlike, non_blocking=True)

    def forget(self) -> None:
        """Forget earlier differences. Called when a step restarts."""
        self._unlike.zero_()
        self._told.zero_()
        self.differs.zero_()

    def warm(self, gradients: Gradients) -> None:
        """
        Run every kernel once, because a capture cannot load a kernel. The state stays unchanged.
        """
        self.begin()
        self.keep_first(gradients)
        self.restore()
        kept, self.log = self.log, None
        self.compare(gradients)
        self.log = kept
        self.forget()

    def again(self, pipeline: Walk) -> Gradients:
        """Run the rank's actions and the reductions once more, and return the gradients."""
        with self._repeating(pipeline):
            self.repeat.begin()
            pipeline.run_actions()
            return self.repeat.finalize()

    @contextmanager
    def _repeating(self, pipeline: Walk) -> Iterator[None]:
        """A context in which the pipeline neither asks the contract nor writes the rank log."""
        before = pipeline.runtime, pipeline.log, pipeline.channels.log
        reports = [memory.reports for memory in self.runtime.memories.values()]
        updates = [report.updates() for report in reports]
        pipeline.runtime = self.repeat
        pipeline.log = pipeline.channels.log = None
        try:
            yield
        finally:
            pipeline.runtime, pipeline.log, pipeline.channels.log = before
            for report, count in zip(reports, updates, strict=True):
                report.pass_over(count)  # the contract counts the first run's scaling updates
            # An error in the second run is at the commit: the contract has the whole row.
            pipeline.position = len(pipeline.program)

    # The host's part

    def of_guarded(self, pipeline: Walk, gradients: Gradients) -> Gradients:
        """
        Run a guarded step (whose actions the contract has checked) a second time. The device
        compares both runs; the host does not wait.

        Args:
            pipeline: The pipeline of this rank, whose step runs twice.
            gradients: The gradients of the first run.

        Returns:
            The gradients of the second run.
        """
        self.forget()
        self.keep_first(gradients)
        self.between()
        self.restore()
        found = self.again(pipeline)
        self.compare(found)
        counters = self.runtime.counters
        if counters is not None and not self.runtime.config.counts_late:
            counters.read()
        return found

    def require_equal(self) -> None:
        """
        Raise an error if the results of a guarded step's two runs differ. Waits for the device.

        Raises:
            MismatchError: A gradient, weight or state of this rank differs.
        """
        if float(self.differs):
            raise _mismatch(self._own())

    def _own(self) -> list[Difference]:
        names, told = self.names[self.rank], self._told.tolist()
        found = [Difference(self.rank, *name) for name, one in zip(names, told, strict=True) if one]
        return found

    def require_told_equal(self, words: Mapping[int, int]) -> None:
        """
        Raise an error if a rank's gate published that two runs differ.

        Args:
            words: By rank, the number that its gate published.

        Raises:
            MismatchError: A rank's two runs differ. The error names the first difference of each
                such rank. For this rank it names all differences.
        """
        found: list[Difference] = []
        for rank, word in words.items():
            if word >= WORD and rank == self.rank and any(self._told.tolist()):
                found += self._own()
            elif word >= WORD:
                first, count = first_of(word, len(self.names[rank]))
                found.append(Difference(rank, *self.names[rank][first], count))
        if found:
            raise _mismatch(found)


def _mismatch(found: Sequence[Difference]) -> MismatchError:
    """Make the error; it is marked as unrecoverable if a weight has changed."""
    error = MismatchError(found)
    error.unrecoverable = any(one.name.startswith(WEIGHT) for one in found)
    return error

"""
Reductions of a process's gradients over data-parallel ranks. The gradients of a bucket are reduced
together.

A bucket's reduction starts early, or at the end of the epoch (the optimizer step). `Reductions`
tells the contract when each reduction starts and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from qeffect.contract import Contract
from qeffect.stage_config import Bucket
from qeffect.text import counted

from ..backends.protocol import BackendError, StageBackend
from .memory.scaling import SharedScaling
from .memory.tied_weights import TiedWeights
from .memory.weight_copies import Copies, names_of

__all__ = ["SCALING", "Reducer", "Reduction", "Reductions", "require_buckets"]

SCALING = "amax"
"""Name of the bucket of the scaling state, which replicas may share; the bucket holds no gradient.
"""


class Reduction(Protocol):
    """A started reduction, such as the work object of torch's asynchronous collectives."""

    def wait(self) -> object:
        """Make the current stream, or the host, wait until the reduction is done."""


class Sender(Protocol):
    """An object that starts reductions, such as a performer (`performer.py`)."""

    def reduce(self, send: Callable[[], Reduction | None], *, waited: bool) -> Reduction | None:
        """Start a reduction, as `Performer.reduce` does."""


#: Reduces a bucket, given its name and its gradients.
Reducer = Callable[[int | str, Mapping[str, torch.Tensor]], Reduction | None]

#: A bucket's stage, and the gradients in the bucket.
Held = tuple[int, tuple[str, ...]]


def require_buckets(
    stages: Mapping[int, StageBackend],
    buckets: Mapping[int, Sequence[Bucket]],
    order: Sequence[int | str],
    tied: TiedWeights,
    copies: Copies,
    *,
    reduces: bool,
) -> dict[int | str, Held]:
    """
    Return each bucket's stage and gradients, in the order in which reductions start at the end of
    an epoch.

    Args:
        stages: The process's stages.
        buckets: Configured buckets; a stage that is not named has one bucket of all its gradients.
        order: The declared order of all buckets; empty if none is declared.
        tied: Which matrices are one parameter.
        copies: Copies of weights. Their gradients are reduced last, in separate buckets.
        reduces: Whether the runtime has a reducer.

    Raises:
        BackendError: A stage with buckets is not in this process, the runtime has no reducer, or a
            stage's buckets do not hold exactly the stage's gradients.
    """
    unknown = sorted(buckets.keys() - stages.keys())
    if unknown:
        raise BackendError(
            f"buckets name the stages {unknown}, which this process does not have; its stages are "
            f"{sorted(stages)}"
        )
    if SCALING in (*order, *(bucket.name for given in buckets.values() for bucket in given)):
        raise BackendError(
            f"a bucket of gradients is named {SCALING!r}, the name of the scaling state's bucket; "
            "choose another name"
        )
    if buckets and not reduces:
        raise BackendError("buckets are configured, but there is no reducer: pass reducer=")
    found: dict[int | str, Held] = {}
    for index in sorted(stages):
        others = tuple(p.name for p in stages[index].non_matrix)
        given = buckets.get(index, ())
        if not given:
            own = (m.name for u in stages[index].units for m in u.matrices)
            every = tuple(name for name in own if tied.owned(index, name))
            copied = names_of(copies, index)
            found[index] = index, tuple(n for n in (*every, *others) if n not in copied)
        rest = [bucket for bucket in given if not bucket.matrices]
        if given and len(rest) != bool(others):
            raise BackendError(
                f"stage {index} has {counted(len(others), 'parameter')} that are not matrices; for "
                f"their gradients, expected {counted(int(bool(others)), 'bucket')} without "
                f"matrices, found {len(rest)}"
            )
        for bucket in given:
            if bucket.name in found:
                raise BackendError(
                    f"stages {found[bucket.name][0]} and {index} share bucket {bucket.name!r}; "
                    "every bucket belongs to one stage here: choose another name"
                )
            held = tuple(n for n in bucket.matrices if tied.owned(index, n))
            found[bucket.name] = index, held if bucket.matrices else others
    return {name: found[name] for name in (order or found) if name in found}


class Reductions:
    """
    The reductions of one process in the current epoch.

    Args:
        contract: The contract of this process, which checks each reduction.
        buckets: The stage and the gradients of each bucket, from `require_buckets`.
        gradients: Function that returns the summed gradients of a stage, by name.
        performer: The object that starts the reductions on the device.
        told: Whether to report reductions to the contract. False if the contract does not check
            reductions for this backend.
        copies: Copies of weights. After all other gradients, the reducer gets this process's copies
            of each weight under the weight's name, and leaves the same sum in each copy.
        scaling: The FP8 scaling state if the replicas share it, else None. It is reduced after all
            gradients.
    """

    def __init__(
        self,
        contract: Contract,
        buckets: Mapping[int | str, Held],
        gradients: Callable[[int], Mapping[str, torch.Tensor]],
        performer: Sender,
        *,
        told: bool,
        copies: Copies | None = None,
        scaling: SharedScaling | None = None,
    ) -> None:
        self.contract = contract
        self.copies = {name: places for name, places in (copies or {}).items() if places}
        self.buckets = buckets
        self.told = told
        self.scaling = scaling
        self._gradients = gradients
        self.performer: Sender = performer
        self._waits: dict[int | str, bool] = {}  # whether the last reduction had to be waited for
        self._running: dict[int | str, Reduction | None] = {}
        self._ended: set[int | str] = set()

    def start(self, reducer: Reducer, bucket: int | str, link: int) -> None:
        """Start a bucket's reduction; if the reducer raises, the reduction counts as failed."""
        self.contract.start_reduction(bucket, link)
        try:
            self._running[bucket] = self.send(reducer, bucket)
        except BaseException:
            self.contract.fail_reduction(bucket)
            raise

    def start_of(self, reducer: Reducer, stage: int, link: int) -> None:
        """Start all reductions of a stage that have not started yet."""
        for bucket, (owner, _) in self.buckets.items():
            if owner == stage and bucket not in self._running:
                self.start(reducer, bucket, link)

    def end(self, reducer: Reducer, link: int) -> None:
        """Start the remaining reductions, and wait for all of them."""
        if not self.told:
            for bucket in self.every:
                work = self.send(reducer, bucket)
                if work is not None:
                    work.wait()
            return
        for bucket in self.every:
            if bucket not in self._running and bucket not in self._ended:
                self.start(reducer, bucket, link)
            if bucket in self._running and self._running[bucket] is None:
                self._finish(bucket, link)
        for bucket in list(self._running):
            self._finish(bucket, link)

    def _finish(self, bucket: int | str, link: int) -> None:
        work = self._running.pop(bucket)
        try:
            if work is not None:
                work.wait()
        except BaseException:
            self.contract.fail_reduction(bucket)
            raise
        self.contract.finish_reduction(bucket, link)
        self._ended.add(bucket)

    def fail(self) -> None:
        """Mark unfinished reductions as ended after a failure; their results are not used."""
        while self._running:
            bucket, work = self._running.popitem()
            if work is not None:
                with suppress(Exception):
                    work.wait()
            self.contract.fail_reduction(bucket)

    def forget(self) -> None:
        """Forget all reductions. Called when their epoch (optimizer step) ends or restarts."""
        self._ended.clear()

    @property
    def every(self) -> tuple[int | str, ...]:
        """All buckets in the order in which they start at the end of an epoch."""
        return (*self.buckets, *self.copies, *(() if self.scaling is None else (SCALING,)))

    def send(self, reducer: Reducer, bucket: int | str) -> Reduction | None:
        """
        Start a bucket's reduction without asking the contract. Return an object to wait for, or
        None if the reduction has already ended.
        """
        waited = self._waits.get(bucket, True)
        return self.performer.reduce(lambda: self._sent(reducer, bucket), waited=waited)

    def _sent(self, reducer: Reducer, bucket: int | str) -> Reduction | None:
        work: Reduction | None
        if self.scaling is not None and bucket == SCALING:
            work = self.scaling.start(reducer.largest)  # type: ignore[attr-defined]
        else:
            work = reducer(bucket, self._of(bucket))
        self._waits[bucket] = work is not None
        return work

    def _of(self, bucket: int | str) -> dict[str, torch.Tensor]:
        if isinstance(bucket, str) and bucket in self.copies:
            places = self.copies[bucket]
            return {
                f"stages.{index}.{name}": self._gradients(index)[name] for index, name in places
            }
        stage, names = self.buckets[bucket]
        total = self._gradients(stage)
        return {name: total[name] for name in names}

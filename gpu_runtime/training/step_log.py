"""
The log of steps: losses, norms, digests and times of all ranks, with one line per step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ..ranks.double_run import is_due
from ..ranks.membership import Member, all_gather
from ..ranks.worker import Worker
from ..step.clipping import Norm
from .config import Config
from .digest_log import DIGESTS, MATRICES, joined, padded
from .divergence import UpdateWatch
from .language_model import LanguageJob
from .metrics import Log, memory_bytes
from .saturation import SATURATED, GradientScales
from .step_runner import StepResult, StepRunner
from .step_times import SlowestRank

__all__ = ["StepLog"]

#: Number of blocks of steps over which the mean step time is taken, to estimate the time left.
_PACES: Final = 50


class StepLog:
    """
    Gathers the results of steps from all ranks. Every rank makes a `StepLog` and calls the same
    methods.

    Args:
        member: This process.
        config: The configuration of the run, from its training file.
        job: The job that the pipeline trains.
        worker: The worker (the pipeline of this rank) whose steps are logged.
        steps: The object that runs the steps, as replays of one graph per action or as launches of
            one graph per step.
        scales: The scales of this rank's gradients.
        log: The run's log, on rank 0.

    Attributes:
        losses: The loss of each step since the run began or was resumed.
        collected: Number of steps collected so far, including the steps before a resume.
        watch: The record of skipped updates.
    """

    def __init__(
        self,
        member: Member,
        config: Config,
        job: LanguageJob,
        worker: Worker,
        steps: StepRunner,
        scales: GradientScales,
        log: Log | None,
    ) -> None:
        self.member, self.config, self.job = member, config, job
        self.worker, self.steps, self.log = worker, steps, log
        self.losses: list[float] = []
        self.watch = UpdateWatch(config.optimizer.stop_after_skips)
        self.collected = self._began = worker.runtime.epoch
        self._since = 0.0  # when the first step that is not collected began
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._slowest, self._slowest_launch = SlowestRank(), SlowestRank()
        self._scales = all_gather(member, scales.names)
        kept = worker.zero_stages
        self._stages = all_gather(member, () if kept is None else kept.stages)
        self._matrices = self._digested()

    @property
    def tokens_a_step(self) -> int:
        """Number of tokens that one step trains on, over all replicas."""
        return self.job.windows_a_step * self.job.config.sequence

    def begin(self, now: float) -> None:
        """Record that the first step begins at `now`, in seconds of `time.perf_counter`."""
        self._since = now

    def pause(self, seconds: float) -> None:
        """Subtract these seconds from the measured time of steps."""
        self._since += seconds

    def agree(self) -> None:
        """
        After a stop, continue on all ranks from the first step that any rank has not collected.
        """
        self.collected = min(all_gather(self.member, self.collected))

    def log_launches(self) -> None:
        """Log whether steps run as one launch. If they do not, also log the reason."""
        if self.log is None:
            return
        why = self.steps.why_replays
        self.log({"one_launch": not why, **({"guarded_replays": why} if why else {})})
        if why:
            self.log.note(f"guarded replays, not one launch per step: {why}")

    def collect(self, end: int, mismatches: int) -> None:
        """
        Collect the losses of all steps before `end` from all ranks, and log a line for each.

        Args:
            end: Number of steps whose results are known.
            mismatches: Number of steps so far that ran twice with different results.

        Raises:
            DivergedError: A loss is not finite, or too many updates in a row were skipped.
            StoppedError: A rank is gone.
        """
        steps = range(self.collected, end)
        if self.steps.one_launch is None:
            # Launches have finished by now.
            limit = self.worker.limits.commit
            self.member.synchronize(limit, action="step log", step=end - 1)
        now = time.perf_counter()
        results = [self.steps.result(step) for step in steps]
        most = max(self._matrices), max(map(len, self._stages))
        columns = _Columns(self.job.microbatches, results, *most)
        memory = float(memory_bytes(self.member.device))
        ranks = self.steps.all_gather([memory, *columns.own])
        each = (now - self._since) / len(steps)
        self._paces.append(each)
        self.steps.forget(self.collected)  # keeps the latest: a rank may collect them again
        for n, step in enumerate(steps):
            if step < self._began + len(self.losses):
                continue  # logged before
            # In each replica the rank of the last stage has the losses of its microbatches.
            shares = [rank[columns.losses(n)] for rank in ranks]
            loss = math.fsum(share for rank in shares for share in rank)
            self.losses.append(loss)
            if self.log is not None:
                line = {**self._progress(step, loss, each), "memory_bytes": _most(ranks)}
                line.update(self._norm(results[n].norm))
                line.update(self._saturation([rank[columns.falls(n)] for rank in ranks]))
                if zero := self._zero_stages(
                    results[n], [rank[columns.zeros(n)] for rank in ranks]
                ):
                    line["zero_stages"] = zero
                if any(self._matrices):
                    line[DIGESTS] = [
                        joined(rank[columns.digests(n)][: 2 * own])
                        for rank, own in zip(ranks, self._matrices, strict=True)
                    ]
                if is_due(self.config.guard.replay_every, step):
                    line.update(runs=2, mismatches=mismatches)
                line.update(self._times([rank[columns.times(n)] for rank in ranks]))
                self.log(line)
            self.watch.take(step, shares, results[n].norm)
        self.collected, self._since = end, now

    def _progress(self, step: int, loss: float, each: float) -> dict[str, Any]:
        """
        Return the log's entries for a step's loss, learning rate, speed and remaining time; `each`
        is the time of a step in seconds.
        """
        pace = math.fsum(self._paces) / len(self._paces)
        return {
            "step": step,
            "loss": loss,
            "rate": self.job.rate.at(step),
            "tokens": self.job.position(step + 1) * self.job.config.sequence,
            "tokens_per_s": self.tokens_a_step / each,
            "step_ms": each * 1e3,
            "seconds_left": pace * (self.config.run.steps - step - 1),
        }

    def _norm(self, norm: Norm | None) -> dict[str, Any]:
        """Return the log's entries for the norm of the gradients."""
        if norm is None:
            return {}
        return {
            "norm": norm.total,
            "skipped": norm.skipped,
            "skipped_updates": self.watch.skipped + norm.skipped,
        }

    def _saturation(self, falls: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Return the log's entries for saturated gradients, if the recipe has scales."""
        if not any(self._scales):
            return {}
        rank, (factor, place) = max(enumerate(falls), key=lambda one: one[1][0])
        found: dict[str, Any] = {"saturation": factor}
        if factor >= SATURATED:
            found["saturated"] = self._scales[rank][int(place)]
        return found

    def _zero_stages(self, result: StepResult, ranks: Sequence[Sequence[float]]) -> list[int]:
        """
        Return the stages whose gradients are all zero. If the step has a norm, the sums of squares
        in the norm show these stages; otherwise the flags that all ranks have sent show them.
        """
        if result.norm is not None:
            return result.norm.zero_stages
        told = zip(self._stages, ranks, strict=True)
        pairs = (pair for own, flags in told for pair in zip(own, flags, strict=False))
        return sorted({stage for stage, zero in pairs if zero})

    def _times(self, ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Return the log's entries for a step's times by rank, and for the slowest rank."""
        computed, waited, launched, weights = (
            [round(ms, 3) if math.isfinite(ms) else None for ms in column]
            for column in zip(*ranks, strict=True)
        )
        found: dict[str, Any] = {"compute_ms": computed, "wait_ms": waited}
        if any(launched):
            found = {"launch_ms": launched, "wait_ms": waited}
        if any(weights):
            found["weights_ms"] = weights
        # Times of guarded steps and of launches are of different work.
        slowest = self._slowest.take([rank[0] for rank in ranks])
        slowest = slowest or self._slowest_launch.take([rank[3] for rank in ranks])
        if slowest is not None:
            found["slowest"] = {"rank": slowest[0], "times_median": round(slowest[1], 2)}
        return found

    def _digested(self) -> list[int]:
        """Log once which gradients have digests; return the number of these gradients by rank."""
        kept, naming = self.worker.gradient_digests, self.job.name_of
        if kept is None:
            return [0] * self.member.world
        every = all_gather(self.member, [(s, naming(s, name)) for s, name in kept.names])
        if self.log is not None:
            self.log({MATRICES: every})
        return [len(own) for own in every]


class _Columns:
    """
    The layout of the numbers that a rank sends for several steps; the first number is the rank's
    memory in bytes.

    Args:
        microbatches: Number of microbatches of a step.
        results: This rank's result of each step.
        matrices: The number of gradients with digests, on the rank with the most such gradients.
        stages: The number of stages checked for zero gradients, on the rank with the most such
            stages.
    """

    def __init__(
        self, microbatches: int, results: Sequence[StepResult], matrices: int, stages: int
    ) -> None:
        none = [0.0] * microbatches
        shares = [share for one in results for share in one.losses or none]
        falls = [number for one in results for number in one.saturation]
        zeros = [n for one in results for n in (*one.zeros, *[0.0] * (stages - len(one.zeros)))]
        digests = padded([one.digests for one in results], matrices)
        times = [ms for one in results for ms in one.times.spent]
        self.own = [*shares, *falls, *digests, *times, *zeros]
        self._shares, self._digests = microbatches, len(digests) // len(results)
        self._falls_at = 1 + len(shares)
        self._digests_at = self._falls_at + len(falls)
        self._times_at = self._digests_at + len(digests)
        self._stages, self._zeros_at = stages, self._times_at + len(times)

    def losses(self, n: int) -> slice:
        """Return the positions of the n-th step's losses, by microbatch."""
        return _slice(1, n, self._shares)

    def falls(self, n: int) -> slice:
        """
        Return the positions of the largest fall of a scale in the n-th step, and of that scale's
        index.
        """
        return _slice(self._falls_at, n, 2)

    def digests(self, n: int) -> slice:
        """
        Return the positions of the n-th step's digests. Each digest is two numbers. Every rank
        sends as many numbers as the rank with the most digests.
        """
        return _slice(self._digests_at, n, self._digests)

    def times(self, n: int) -> slice:
        """
        Return the positions of the n-th step's times, which are in ms and in the order of
        `StepTimes.spent`.
        """
        return _slice(self._times_at, n, 4)

    def zeros(self, n: int) -> slice:
        """
        Return the positions of the n-th step's flags, one per stage. Every rank sends as many flags
        as the rank with the most stages.
        """
        return _slice(self._zeros_at, n, self._stages)


def _slice(start: int, n: int, size: int) -> slice:
    return slice(start + n * size, start + (n + 1) * size)


def _most(ranks: Sequence[Sequence[float]]) -> int:
    """Return the largest memory of any rank, in bytes."""
    return int(max(rank[0] for rank in ranks))

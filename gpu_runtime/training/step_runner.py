"""
Run the steps of a training run. By default a step is a sequence of guarded replays: one CUDA graph
per action, each checked by the contract. If configured and possible, a step is one launch instead:
the whole step is one CUDA graph.

A launch is still running when `StepRunner.step` returns. After the launch the device copies the
step's losses and norm to the host. The host reads them one step later, when the devices of all
ranks have confirmed the step. Therefore no host waits for a step that it has just launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..ranks.consent import StoppedError, wait_for
from ..ranks.fallback import fall_back
from ..ranks.job import Batches, Job
from ..ranks.late_faults import record_fault
from ..ranks.membership import Member, all_gather
from ..ranks.obstacles import first_obstacle, obstacles
from ..ranks.one_launch import OneLaunch
from ..ranks.worker import Worker
from ..runtime import Mode, mode_on, one_launch_obstacles, without_launches
from ..step.clipping import DeviceNorm, Norm
from .checkpoint.agreement import lost
from .saturation import GradientScales
from .step_times import StepTimes, Stopwatch

__all__ = ["StepResult", "StepRunner", "mode_of"]


#: Steps between two exchanges of hosts that launch: each costs a collective on the CPU.
_ASK_EVERY = 8


@attrs.frozen
class StepResult:
    """
    The result of a step on one rank.

    Args:
        losses: This rank's loss of each microbatch; empty on a rank without the last stage.
        norm: The norm of all ranks' gradients; None if gradients are neither clipped nor checked
            for values that are not finite.
        saturation: The result of `GradientScales.take` on this rank.
        zeros: The result of `ZeroStages.take` on this rank, if there is no norm.
        times: The times of the step on this rank.
        digests: The digests of this rank's gradients, if digests are on.
    """

    losses: list[float]
    norm: Norm | None
    saturation: tuple[float, int] = (0.0, 0)
    zeros: tuple[float, ...] = ()
    digests: tuple[int, ...] = ()
    times: StepTimes = attrs.field(factory=lambda: StepTimes(0.0), eq=False)


def mode_of(member: Member, job: Job, wanted: Mode) -> tuple[Mode, str]:
    """
    Return the mode in which every rank can run the steps of a job. Every rank must call this
    function.

    Args:
        member: This process.
        job: The pipeline and its model, whose steps are run.
        wanted: The mode in the training file.

    Returns:
        The mode, and the reason why no step can be one launch. The reason is empty if steps can be
        launches, or if the training file has another mode.
    """
    why = ""
    if wanted == "one launch":
        found = one_launch_obstacles(member.device, job.rule, job.walks, draws=job.dropout > 0.0)
        why = first_obstacle(member, found)
        if not why:
            return wanted, ""
    return mode_on(member.device, without_launches(wanted)), why


class StepRunner:
    """
    Runs the steps of one rank. Every rank makes a runner and calls the same methods in the same
    order.

    Args:
        worker: The rank's worker, at the epoch (optimizer step) at which the run begins. Its feed
            must be a `Batches` object. In mode ``one launch`` the worker's steps are launches, if
            every rank can run launches.
        why: Why the steps are not launches, if `mode_of` has already found a reason.
        scales: The scales of the rank's gradients; None if saturation is not reported.

    Attributes:
        launches: Number of launches among the steps whose results have been read.
        why_replays: Why steps are guarded replays although launches were configured; empty
            otherwise.
    """

    def __init__(
        self, worker: Worker, *, why: str = "", scales: GradientScales | None = None
    ) -> None:
        self.worker, self.scales = worker, scales
        feed = worker.feed
        assert isinstance(feed, Batches)
        self.feed = feed
        self.launches = 0
        self.why_replays = why
        self.one_launch: OneLaunch | None = None
        if worker.runtime.config.mode == "one launch" and not why:
            self.why_replays = first_obstacle(worker.member, obstacles(worker))
            if self.why_replays:
                worker.replay_actions()
            else:
                self.one_launch = OneLaunch(worker)
        self._paused = False
        self._behind: dict[int, _PendingResults] = {}
        self._norms: dict[int, tuple[Norm | None, Tensor | None]] = {}
        self._digests: dict[int, Tensor] = {}
        self._zeros: dict[int, Tensor] = {}
        self._stopwatch = Stopwatch(worker)
        self._times: dict[int, StepTimes] = {}
        self._results: dict[int, StepResult] = {}

    def step(self) -> None:
        """
        Run one optimizer step. Depending on the mode, the step runs as guarded replays, eagerly, or
        as one launch (`OneLaunch.step`).

        Raises:
            StoppedError: All ranks stopped in this step with the same cause. With launches, the
                cause may come from the previous step.
        """
        epoch, whole = self.worker.runtime.epoch, self.one_launch
        if whole is None:
            with self._stopwatch.step(epoch):
                self.worker.step()
            self._times[epoch] = self._stopwatch.taken
            self._norms[epoch] = self.worker.norm, self._fall()
            if (taken := self._taken()) is not None:
                self._digests[epoch] = taken.clone()
            if (zeros := self._zero()) is not None:
                self._zeros[epoch] = zeros.clone()
            return
        if self._paused:
            whole.resume()
            self._paused = False
        with self._stopwatch.launch():
            whole.step()
        self._times[epoch] = self._stopwatch.taken
        self._times[epoch].wait = whole.host_ms.get("step before", 0.0)
        if whole.graph is None:
            found = self.feed.losses.pop(epoch, {})
            self._behind[epoch] = _PendingResults.of(
                found, self.worker.norm, self._fall(), self._taken(), self._zero()
            )
        else:
            self._behind[epoch] = _PendingResults.of_launch(
                whole.feed.losses, whole.device_norm, self._fall(), self._taken(), self._zero()
            )

    def stop(self, error: Exception) -> StoppedError:
        """
        Stop all ranks between two steps because of this rank's error. Return the error that the
        caller must raise.
        """
        worker, epoch = self.worker, self.worker.runtime.epoch
        if self.one_launch is not None and not self._paused:
            return self.one_launch.stop(error)
        record_fault(worker.runtime, error, epoch, worker.member.rank)
        stopped = worker.consent.stop(error, epoch, None, 0, at="step")
        worker.runtime.abort()
        return stopped

    def _fall(self) -> Tensor | None:
        """
        Return the factor by which the scales of gradients fell in the step that was just queued.
        """
        return None if self.scales is None else self.scales.take()

    def _taken(self) -> Tensor | None:
        """Return the digests of the step that was just queued; the next step overwrites them."""
        kept = self.worker.gradient_digests
        return None if kept is None else kept.values

    def _zero(self) -> Tensor | None:
        """Return which stages have only zero gradients; the next step overwrites this result."""
        kept = self.worker.zero_stages
        return None if kept is None else kept.values

    @property
    def known(self) -> int:
        """Number of steps, counted from step 0, that are known to have succeeded on all ranks."""
        ahead = 0 if self.one_launch is None else self.one_launch.ahead
        return self.worker.runtime.epoch - ahead

    def result(self, step: int) -> StepResult:
        """
        Return the result of a step that is `known`. For a guarded step, the call waits for the
        device.
        """
        if step not in self._results:
            found = self._result(step)
            times = self._times.pop(step, StepTimes(0.0)).read()
            if self.one_launch is not None:
                times.weights = self.one_launch.weights_ms(step)
            self._results[step] = attrs.evolve(found, times=times)
        return self._results[step]

    def _result(self, step: int) -> StepResult:
        behind = self._behind.pop(step, None)
        if behind is None:
            losses = self.feed.losses_of(step)
            self.feed.losses.pop(step, None)
            norm, fall = self._norms.pop(step, (None, None))
            taken, zeros = self._digests.pop(step, None), self._zeros.pop(step, None)
            return StepResult(
                losses,
                norm,
                _saturation(() if fall is None else fall.tolist()),
                () if zeros is None else tuple(zeros.tolist()),
                () if taken is None else tuple(taken.tolist()),
            )
        self.launches += behind.launched
        return behind.result(self.worker.limits.commit)

    def ending(self, step: int) -> int:
        """
        Return the largest request to end the run that any rank has made (`Consent.asks`). The
        result is the same on all ranks.

        In guarded steps the ranks exchange their requests when they agree on the update. With
        launches, the hosts exchange their requests after every eighth step; after other steps, the
        result is 0.

        Args:
            step: Number of steps taken so far.

        Raises:
            StoppedError: A rank has stopped in the current launch.
        """
        consent = self.worker.consent
        if self.one_launch is None:
            return consent.heard
        if step % _ASK_EVERY:
            return 0
        return int(max(asks for (asks,) in self.all_gather([float(consent.asks)])))

    def forget(self, until: int) -> None:
        """Drop the results of the steps before `until`."""
        self._results = {step: one for step, one in self._results.items() if step >= until}

    def leave(self) -> None:
        """
        Wait until every step is known to have succeeded. The worker can then be used for other
        work.

        Raises:
            StoppedError: All ranks stopped in the last step, with the same cause.
        """
        if self.one_launch is not None and not self._paused:
            self.one_launch.leave()
            self._paused = True

    def all_gather(self, own: Sequence[float]) -> list[list[float]]:
        """
        Gather values from every rank between two steps, the same number from each rank. Return the
        values by rank.

        Raises:
            StoppedError: A rank has stopped in the current launch, or is gone.
        """
        if self.one_launch is None:
            try:
                return all_gather(self.worker.member, list(own))
            except RuntimeError as error:
                raise self.stop(lost(error, "step")) from None
        found: list[list[float]] = self.one_launch.all_gather(
            torch.tensor(own, dtype=torch.float64)
        ).tolist()
        return found

    def rebuild(self, stopped: StoppedError) -> None:
        """
        Restart after a stop, at the runtime's current epoch (optimizer step). With launches, the
        restart may begin one epoch earlier.

        Raises:
            StoppedError: Not every rank survived: relaunch, and resume from a checkpoint.
            BackendError: A rank did not take part in the restart, or device work did not finish
                before the deadline.
        """
        (self.one_launch or self.worker).rebuild(stopped)
        self._rebuilt()

    def _rebuilt(self) -> None:
        """Forget the results of the restarted epoch and all later epochs."""
        self._paused = False
        if self.scales is not None:
            self.scales.reset()
        epoch = self.worker.runtime.epoch
        self._behind = {step: one for step, one in self._behind.items() if step < epoch}

    def uncaptured(self, stopped: StoppedError) -> bool:
        """
        Continue with guarded replays if a rank could not capture the step.

        Returns:
            Whether a failed capture was the cause of the stop. If not, nothing is changed.
        """
        why = fall_back(self.one_launch, stopped)
        if why is None:
            return False
        self._rebuilt()
        self.one_launch = None
        self.why_replays = why
        return True

    def close(self) -> None:
        """Drop the launch's graph, before the worker's connections are closed."""
        if self.one_launch is not None:
            self.one_launch.close()
            self.one_launch = None


@attrs.frozen
class _PendingResults:
    """
    Copies of a step's results in host memory; the copies are complete once the device has passed
    the event.

    Args:
        groups: The copied scalars, grouped by dtype: the losses by microbatch; how far scales fell;
            the digests of gradients; which stages have only zero gradients. For a launch whose norm
            is checked, also the norm with the sums of each stage, the gradients' factor, and
            whether the update was skipped.
        held: The copies in host memory, in the same groups.
        done: The event after the copies.
        norm: The norm of a guarded step, which the host already has.
        launched: Whether the step was a launch.
        looked: The norm of a launch, as device tensors.
    """

    groups: list[list[Tensor]]
    held: list[Tensor]
    done: Any
    norm: Norm | None
    launched: bool
    looked: DeviceNorm | None = None

    @classmethod
    def of(
        cls,
        losses: Mapping[int, Tensor],
        norm: Norm | None,
        fall: Tensor | None,
        digests: Tensor | None,
        zeros: Tensor | None,
    ) -> _PendingResults:
        """Queue the copies of a guarded step on the current stream, without waiting."""
        groups = [_in_order(losses), _each(fall), _each(digests), _each(zeros)]
        return cls._of(groups, norm, launched=False)

    @classmethod
    def of_launch(
        cls,
        losses: Mapping[int, Tensor],
        norm: DeviceNorm | None,
        fall: Tensor | None,
        digests: Tensor | None,
        zeros: Tensor | None,
    ) -> _PendingResults:
        """
        Queue the copies of a launch on the current stream, after this launch and before the next
        launch.
        """
        looked = [] if norm is None else [[norm.total, *norm.parts], [norm.factor, norm.skip]]
        groups = [_in_order(losses), _each(fall), _each(digests), _each(zeros), *looked]
        return cls._of(groups, None, launched=True, looked=norm)

    @classmethod
    def _of(
        cls,
        groups: list[list[Tensor]],
        norm: Norm | None,
        *,
        launched: bool,
        looked: DeviceNorm | None = None,
    ) -> _PendingResults:
        held = [_place(group) for group in groups]
        _copy(held, groups)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return cls(groups, held, done, norm, launched, looked)

    def result(self, deadline: float) -> StepResult:
        """Wait for the event, then return the results."""
        wait_for(self.done, None, deadline=deadline, grace=0.0)
        losses, fall, digests, zeros, *looked = (one.tolist() for one in self.held)
        norm = self.norm
        if looked:
            (total, *parts), (factor, skip) = looked
            assert self.looked is not None
            norm = self.looked.norm_of(total, 1.0 if skip else factor, bool(skip), parts)
        return StepResult(losses, norm, _saturation(fall), tuple(zeros), tuple(digests))


def _saturation(fall: Sequence[float]) -> tuple[float, int]:
    """Convert the result of `GradientScales.take` to numbers; a factor that is NaN counts as 0."""
    if not fall:
        return 0.0, 0
    factor, place = fall
    return (factor if factor >= 0.0 else 0.0), int(place)


def _each(found: Tensor | None) -> list[Tensor]:
    """Return the elements of a one-dimensional tensor as scalars."""
    return [] if found is None else list(found)


def _in_order(losses: Mapping[int, Tensor]) -> list[Tensor]:
    return [losses[m] for m in sorted(losses)]


def _place(group: Sequence[Tensor]) -> Tensor:
    """
    Allocate host memory for scalars of one dtype; the memory is pinned, so that the device can
    write to it.
    """
    if not group:
        return torch.empty(0)
    return torch.empty(len(group), dtype=group[0].dtype, pin_memory=group[0].is_cuda)


def _copy(held: Sequence[Tensor], groups: Sequence[Sequence[Tensor]]) -> None:
    """Queue a copy of each group into host memory."""
    for into, group in zip(held, groups, strict=True):
        if group:
            into.copy_(torch.stack(list(group)), non_blocking=True)

"""
The steps of a training run: guarded replays, or one launch each where that is asked for and can be.

A launch is under way when `Steps.step` returns. Its losses and its norm are copied to the host
behind it, in the device's own order, and read a step later, when all ranks' devices have said that
it went well: no host waits for a step that it has just launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..ranks.consent import StoppedError, wait_for
from ..ranks.fallback import capture_failed
from ..ranks.job import Batches, Job
from ..ranks.obstacles import first_obstacle, obstacles, obstacles_on
from ..ranks.one_launch import OneLaunch
from ..ranks.worker import Worker
from ..ranks.world import Member, gathered
from ..runtime import Mode, mode_on
from ..step.clipping import DeviceNorm, Norm

__all__ = ["Steps", "Word", "mode_of"]


@attrs.frozen
class Word:
    """
    What a step came to on one rank.

    Args:
        losses: By microbatch; none where the rank has no last stage.
        norm: The norm of all ranks' gradients, where it is clipped or looked at.
    """

    losses: list[float]
    norm: Norm | None


def mode_of(member: Member, job: Job, wanted: Mode) -> tuple[Mode, str]:
    """
    The mode in which every rank can run the steps of a job; every rank calls it.

    Args:
        member: This process.
        job: The job.
        wanted: The mode that is configured.

    Returns:
        The mode, and why no step can be one launch; empty if each can, or if none is to be.
    """
    why = ""
    if wanted == "one launch":
        why = first_obstacle(member, obstacles_on(member.device, job.rule))
        if not why:
            return wanted, ""
        wanted = "replays"
    return mode_on(member.device, wanted), why


class Steps:
    """
    The steps of one rank; every rank of the world makes one, and calls the same.

    Args:
        worker: The rank's worker, over `Batches`, at the epoch that it begins at. In mode
            ``one launch`` its steps are launches, if every rank's can be.
        why: Why they are not, if that is known already (`mode_of`).

    Attributes:
        launches: How many of the steps that were told were launches.
        replays: Why guarded replays are taken though launches were asked for; empty where not so.
    """

    def __init__(self, worker: Worker, *, why: str = "") -> None:
        self.worker = worker
        feed = worker.feed
        assert isinstance(feed, Batches)
        self.feed = feed
        self.launches = 0
        self.replays = why
        self.whole: OneLaunch | None = None
        if worker.runtime.config.mode == "one launch" and not why:
            self.replays = first_obstacle(worker.member, obstacles(worker))
            self.whole = None if self.replays else OneLaunch(worker)
        self._left = False
        self._behind: dict[int, _Behind] = {}
        self._norms: dict[int, Norm | None] = {}
        self._words: dict[int, Word] = {}

    def step(self) -> None:
        """
        One optimizer step; with launches the first is guarded, the second captured.

        Raises:
            StoppedError: It, or with launches the one before, ended on every rank, for one cause.
        """
        epoch, whole = self.worker.runtime.epoch, self.whole
        if whole is None:
            self.worker.step()
            self._norms[epoch] = self.worker.norm
            return
        if self._left:
            whole.resume()
            self._left = False
        whole.step()
        if whole.graph is None:
            found = self.feed.losses.pop(epoch, {})
            self._behind[epoch] = _Behind.of(found, self.worker.norm)
        else:
            self._behind[epoch] = _Behind.of_launch(whole.feed.losses, whole.device_norm)

    @property
    def known(self) -> int:
        """Steps since the first of all of which the host knows that they went well, everywhere."""
        ahead = 0 if self.whole is None else self.whole.ahead
        return self.worker.runtime.epoch - ahead

    def word(self, step: int) -> Word:
        """What a step that is `known` came to; guarded steps wait for the device."""
        if step not in self._words:
            self._words[step] = self._word(step)
        return self._words[step]

    def _word(self, step: int) -> Word:
        behind = self._behind.pop(step, None)
        if behind is None:
            losses = self.feed.losses_of(step)
            self.feed.losses.pop(step, None)
            return Word(losses, self._norms.pop(step, None))
        self.launches += behind.launched
        return behind.word(self.worker.limits.commit)

    def forget(self, until: int) -> None:
        """Drop the words of the steps before one."""
        self._words = {step: word for step, word in self._words.items() if step >= until}

    def leave(self) -> None:
        """
        Let every step be known, and the worker be free for what comes between two steps.

        Raises:
            StoppedError: The last step ended on every rank, for one cause.
        """
        if self.whole is not None:
            self.whole.leave()
            self._left = True

    def gathered(self, own: Sequence[float]) -> list[list[float]]:
        """
        What every rank brings between two steps, by rank, equally much of each.

        Raises:
            StoppedError: A rank has stopped in the launch that is under way.
        """
        if self.whole is None:
            return gathered(self.worker.member, list(own))
        found: list[list[float]] = self.whole.gathered(
            torch.tensor(own, dtype=torch.float64)
        ).tolist()
        return found

    def rebuild(self, stopped: StoppedError) -> None:
        """
        Begin again after a stop, at the runtime's epoch then: with launches it may be one less.

        Raises:
            StoppedError: Not every rank is there: relaunch, and resume from a checkpoint.
            BackendError: A rank did not come back, or its device came to no end.
        """
        (self.whole or self.worker).rebuild(stopped)
        self._left = False
        epoch = self.worker.runtime.epoch
        self._behind = {step: one for step, one in self._behind.items() if step < epoch}

    def uncaptured(self, stopped: StoppedError) -> bool:
        """
        Go on with guarded replays where some rank could not capture the step.

        Returns:
            Whether that was the cause; where not, nothing was done.
        """
        whole = self.whole
        if whole is None or not capture_failed(whole, stopped):
            return False
        self.rebuild(stopped)
        whole.close()
        self.whole = None
        self.replays = f"the step could not be captured: {stopped.cause.text}"
        return True

    def close(self) -> None:
        """Drop the launch's graph, before the worker's connections end."""
        if self.whole is not None:
            self.whole.close()
            self.whole = None


@attrs.frozen
class _Behind:
    """
    Copies on the host of what a step leaves, ready behind an event.

    Args:
        groups: What is copied: losses by microbatch; and of a launch whose norm is looked at the
            norm, and its factor and whether the update was skipped. Scalars of one type each.
        held: The copies.
        done: The event.
        norm: Of a guarded step, whose host has it.
        launched: Whether the step was a launch.
    """

    groups: list[list[Tensor]]
    held: list[Tensor]
    done: Any
    norm: Norm | None
    launched: bool

    @classmethod
    def of(cls, losses: Mapping[int, Tensor], norm: Norm | None) -> _Behind:
        """Of a guarded step: the copies are queued on the current stream; nobody waits."""
        return cls._of([_in_order(losses)], norm, launched=False)

    @classmethod
    def of_launch(cls, losses: Mapping[int, Tensor], norm: DeviceNorm | None) -> _Behind:
        """Likewise of a launch, which the current stream is behind and the next one is not."""
        looked = [] if norm is None else [[norm.total], [norm.factor, norm.skip]]
        return cls._of([_in_order(losses), *looked], None, launched=True)

    @classmethod
    def _of(cls, groups: list[list[Tensor]], norm: Norm | None, *, launched: bool) -> _Behind:
        held = [_place(group) for group in groups]
        _copy(held, groups)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return cls(groups, held, done, norm, launched)

    def word(self, deadline: float) -> Word:
        """What they say, when the event has come."""
        wait_for(self.done, None, deadline=deadline, grace=0.0)
        losses, *looked = (one.tolist() for one in self.held)
        if not looked:
            return Word(losses, self.norm)
        (total,), (factor, skip) = looked
        return Word(losses, Norm(total, 1.0 if skip else factor, bool(skip)))


def _in_order(losses: Mapping[int, Tensor]) -> list[Tensor]:
    return [losses[m] for m in sorted(losses)]


def _place(group: Sequence[Tensor]) -> Tensor:
    """Room on the host for scalars of one type; pinned, so that a device writes it by itself."""
    if not group:
        return torch.empty(0)
    return torch.empty(len(group), dtype=group[0].dtype, pin_memory=group[0].is_cuda)


def _copy(held: Sequence[Tensor], groups: Sequence[Sequence[Tensor]]) -> None:
    """Queue a copy of each group."""
    for into, group in zip(held, groups, strict=True):
        if group:
            into.copy_(torch.stack(list(group)), non_blocking=True)

"""
`Worker`: one rank's pipeline, with its messages and the consent of all ranks. It can be rebuilt
after a stop.
"""

from __future__ import annotations

import datetime
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import attrs
import torch
from torch.distributed.distributed_c10d import PrefixStore

from qeffect.destination_registry import DestinationRegistry
from qeffect.log.rank_log import RankLog
from qeffect.log.rotation import Rotation
from qeffect.schedule.actions import Kind, Schedule

from ..backends.epoch_scales import moves_once
from ..backends.protocol import BackendError, StageBackend, matrices, parameters
from ..runtime import Runtime, RuntimeConfig
from ..step.calibration import Calibration
from ..step.clipping import Clipping, Norm, Part, parts_of
from ..step.memory.digests import digests
from ..step.memory.gradient_digests import GradientDigests
from ..step.optimizer import Gradients, Optimizer
from ..step.plan.rows import Row, walked
from ..step.zero_stages import ZeroStages
from .bounded import bounded
from .calibration import calibrate_pipeline
from .channels import (
    Channels,
    LostError,
    channels_of,
    device_group,
    end_group,
    gloo_group,
    messages_of,
)
from .consent import Consent, StoppedError, TerminatedError, wait_for
from .double_run import DoubleRun, compared
from .feed import Feed
from .job import require_meeting
from .lost import within
from .membership import Limits, Member, agree_on, all_gather
from .pipeline import Pipeline
from .replicas import Replicas
from .side_stream_feed import feed_for
from .ties import Reducers, Tie, require_declared
from .wait_clock import WaitClock

__all__ = ["Worker"]

#: Seconds past a deadline after which this rank no longer waits for a store.
_MARGIN_S = 5.0
#: Numbers the workers of this process, equally on all ranks, so that each has its own store keys.
_WORKERS = itertools.count()
_T = TypeVar("_T")


class Worker:
    """
    One rank's pipeline, with its messages and the consent of all ranks. It can be rebuilt after a
    stop. Every rank makes a worker with the same table.

    Args:
        member: This process.
        schedule: The schedule table of all ranks, with messages. Every rank checks the table, with
            the same result.
        pp: Number of ranks of one pipeline; the number of all ranks must be a multiple of `pp`.
        build: Function that takes stage indices and returns the stages of this rank.
        feed: Function that takes a replica's index and returns the replica's data source.
        config: The configuration of the runtime.
        limits: Timeouts in seconds.
        optimizer: Function that takes the stages and returns their optimizer.
        event_log: Where to write this rank's event log: a path, a binary file, or True to keep the
            log in memory. None writes no log.
        rank_log: Where to write this rank's log of events between ranks (`qeffect.log.rank_log`): a
            path, True to keep the log in memory, or False for no log. By default there is a rank
            log if the event log has a path. For the event log ``rank0.jsonl`` its path is
            ``rank0.NAME.ranks.jsonl``. NAME is the first eight letters of the attempt's random
            name, on which all ranks agree when they connect. If the event log is split into several
            files, the rank log is split too.
        tagged: Whether messages carry tags, if the transport has tags.
        pipeline: The pipeline's class, for example a subclass that records the actions that it
            runs.
        clip_norm: Upper limit of the norm over the gradients of all ranks. If the norm is larger,
            every rank multiplies its gradients by the same factor. None leaves gradients unchanged.
        skip_nonfinite: Whether every rank skips the update if that norm is not finite. The epoch
            then commits, but weights and optimizer stay unchanged
            (`qeffect.gpu_runtime.step.clipping`).
        mean: Whether to divide the summed gradients by the number of replicas. Pass False if each
            loss is already a share of the mean.
        together: Whether one collective call reduces all gradients of a bucket. With None this is
            done only if it changes no bits (`qeffect.gpu_runtime.ranks.replicas`).
        ties: Tied weights; the gradients of their copies are added before the update
            (`qeffect.gpu_runtime.ranks.ties`).
        registry: Records the gradient destinations (the memory that dW writes) of all runtimes in
            this process. Destinations of two runtimes must not overlap.
        gradient_digests: Whether to compute the digest of each gradient in every step, before the
            update (`Worker.gradient_digests.values`).
        zero_stages: Whether to record in every step which stages have only zero gradients
            (`Worker.zero_stages.values`). Ignored if steps have a norm, which also shows zero
            stages.
        replay_every: With N above 0, every N-th step runs twice before its update, and all ranks
            stop if the gradients of both runs differ (`double_run`). With 0 no step runs twice. All
            ranks must pass the same number.

    Attributes:
        new: Whether the first step calibrates scales that are updated once an epoch (an optimizer
            step). False after a checkpoint was loaded, because a checkpoint contains scales.
        calibration: The result of the calibration; None without a calibration.

    Raises:
        ScheduleError: `qeffect check` refuses the table. No rank has begun to run it.
        Refused: One rank declares a weight as tied, but another rank that holds a copy does not.
            Every rank raises this error.
        BackendError: The number of ranks does not fit the table, a rank cannot build a stage, or
            the shapes of two neighbouring stages differ. Or ranks have different clipping limits or
            ties, or the copies of a tied weight differ at the start.
    """

    def __init__(
        self,
        member: Member,
        schedule: Schedule,
        pp: int,
        build: Callable[[tuple[int, ...]], list[StageBackend]],
        feed: Callable[[int], Feed],
        config: RuntimeConfig | None = None,
        *,
        limits: Limits | None = None,
        optimizer: Callable[[list[StageBackend]], Optimizer] = Optimizer,
        event_log: str | os.PathLike[str] | BinaryIO | bool | None = None,
        rank_log: str | os.PathLike[str] | bool | None = None,
        tagged: bool = True,
        pipeline: type[Pipeline] = Pipeline,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        mean: bool = False,
        together: bool | None = None,
        ties: Sequence[Tie] = (),
        registry: DestinationRegistry | None = None,
        gradient_digests: bool = False,
        zero_stages: bool = False,
        replay_every: int = 0,
    ) -> None:
        self.member, self.limits = member, limits or Limits()
        self.mean, self.together = mean, together
        self.waits = WaitClock()
        self.ties = tuple(ties)
        self.clipping = Clipping(
            max_norm=clip_norm,
            skip_nonfinite=skip_nonfinite,
            elsewhere=frozenset(place for tie in ties for place in tie.copies[1:]),
        )
        self.pp, self.tagged = pp, tagged
        config = config or RuntimeConfig()
        self._take_place(schedule, config)
        self.feed = feed(self.replica)
        require_declared(all_gather(member, self.ties), self.table.stage_to_rank, self.ranks)
        self._reduces = self._reducer()
        config = self._completed(config)
        self._require_one_end(config.amax, replay_every)
        self.runtime = self._runtime(build, config, event_log, registry)
        self.runtime.bound = self._await_device
        self.clipping = attrs.evolve(self.clipping, parts=self._parts())
        self.optimizer = optimizer(list(self.runtime.stages.values()))
        if config.mode == "one launch":
            self.optimizer.make_capturable()
        self._watch_gradients(gradient_digests, zero_stages, replay_every)
        self.new = True  # no step, no calibration and no checkpoint so far
        self.calibration: Calibration | None = None
        self._pipeline = pipeline
        self.attempt, self.name = 0, next(_WORKERS)
        self._stepping = False
        self._until: float | None = None
        self.rank_log = self._rank_log(event_log, rank_log)
        self.pipeline = self._connect()

    def _take_place(self, schedule: Schedule, config: RuntimeConfig) -> None:
        """
        Select this rank's line of the schedule table.

        Raises:
            ScheduleError: The table is refused.
            BackendError: The number of ranks does not fit the table.
        """
        member, pp = self.member, self.pp
        self.table = walked(schedule, config.provisioning, config.group)
        if self.table.num_ranks != pp:
            raise BackendError(
                f"{schedule.source} is for {self.table.num_ranks} ranks, this pipeline has {pp}; "
                f"give a table of {pp} ranks"
            )
        if member.world % pp:
            raise BackendError(
                f"{member.world} processes cannot hold pipelines of {pp} ranks; start a multiple "
                f"of {pp}"
            )
        self.replica, place = divmod(member.rank, pp)
        self.ranks = [self.replica * pp + rank for rank in range(pp)]
        self.every = [
            ends
            for replica in range(member.world // pp)
            for ends in channels_of(self.table, [replica * pp + rank for rank in range(pp)])
        ]
        self.row = Row.of(self.table, place, config.provisioning, config.group)

    def _completed(self, config: RuntimeConfig) -> RuntimeConfig:
        """
        Return the configuration with the fields filled in that follow from the rank's actions, its
        replicas and its tied weights.
        """
        copies = {tie.name: own for tie in self.ties if (own := tie.of(self.row.stages))}
        weights = config.weights_sum or (1, 1 if self.mean else self._replicas)
        config = attrs.evolve(config, copies=copies, weights_sum=weights)
        if self._reduces is not None and not config.reductions and not config.buckets:
            # Every replica walks the same row, and the contract holds it to that order.
            ends = [a.stage for a in self.row.atoms if a.kind is Kind.REDUCE_GRAD]
            if sorted(ends) == list(self.row.stages):
                return attrs.evolve(config, reductions=(*ends, *copies))
        elif config.reductions:
            return attrs.evolve(config, reductions=(*config.reductions, *copies))
        return config

    def _watch_gradients(self, digests: bool, zero_stages: bool, replay_every: int) -> None:
        """
        Make the objects that read gradients before an update (digests, zero stages, second runs);
        every rank calls this method.
        """
        member = self.member
        self.gradient_digests = (
            GradientDigests(self.optimizer.places, member.device) if digests else None
        )
        self.zero_stages: ZeroStages | None = None
        if zero_stages and not self.clipping:
            elsewhere = self.clipping.elsewhere
            self.zero_stages = ZeroStages(self.row.stages, member.device, elsewhere)
        self.double: DoubleRun | None = None
        if replay_every:
            places = all_gather(member, compared(self.runtime, self.optimizer.places))
            self.double = DoubleRun(
                self.runtime, replay_every, places, member.rank, self.gradient_digests
            )

    def _rank_log(self, event_log: Any, rank_log: Any) -> RankLog | None:
        """Begin the rank log; its first events say how the ranks connected."""
        member = self.member
        attempt = next((name for event, name in member.met if event == "connect"), None)
        if rank_log is None and isinstance(event_log, str | os.PathLike):
            rank_log = Path(event_log).with_suffix(f".{(attempt or 'attempt')[:8]}.ranks.jsonl")
            if isinstance(event_log, Rotation):
                rank_log = Rotation(rank_log, event_log.steps, event_log.keep)
        if rank_log is None or rank_log is False:
            return None
        sent: Counter[tuple[int, int]] = Counter()
        for first in range(0, member.world, self.pp):
            ranks = [first + place for place in range(self.pp)]
            for ends, count in messages_of(self.table, ranks).items():
                sent[ends] += count * self.runtime.config.walks
        log = RankLog(
            None if rank_log is True else rank_log,
            rank=member.rank,
            world=member.world,
            attempt=attempt,
            worker=self.name,
            epoch=self.runtime.epoch,
            channels=[[*ends, count] for ends, count in sorted(sent.items())],
        )
        for event, name in member.met:
            log(event, name=name)
        return log

    def _require_one_end(self, amax: str, replay_every: int) -> None:
        """Raise an error unless all ranks have the same options for the end of a step."""
        names = "clip_norm", "skip_nonfinite", "mean", "together", "amax", "replay_every"
        clipping = self.clipping.max_norm, self.clipping.skip_nonfinite
        own = (*clipping, self.mean, self.together, amax, replay_every)
        for rank, words in enumerate(said := all_gather(self.member, own)):
            for name, word, first in zip(names, words, said[0], strict=True):
                if word != first:
                    raise BackendError(
                        f"{name} is {first} on rank 0 and {word} on rank {rank}; give every rank "
                        "the same"
                    )

    @property
    def _replicas(self) -> int:
        return self.member.world // self.pp

    def _parts(self) -> tuple[Part, ...]:
        """Return every part of the model (embedding, layer, rest of a stage), in the model's order,
        from all ranks of this replica."""
        named = {index: parameters(stage) for index, stage in self.runtime.stages.items()}
        own = list(parts_of(named, self.clipping.elsewhere))
        said = all_gather(self.member, own)
        return tuple(sorted({part for rank in self.ranks for part in said[rank]}))

    def _runtime(
        self,
        build: Callable[[tuple[int, ...]], list[StageBackend]],
        config: RuntimeConfig,
        event_log: str | os.PathLike[str] | BinaryIO | bool | None,
        registry: DestinationRegistry | None,
    ) -> Runtime:
        problem, stages, failed = "", [], None
        try:
            stages = list(build(self.row.stages))
        except Exception as error:  # raised by the caller's code; the other ranks wait for this one
            failed = error
            problem = f"rank {self.member.rank} cannot build its stages: {_worded(error)}"
        if stages and moves_once(stages[0].domain) and self.together and self._replicas > 2:
            problem = (
                f"together=True sums several gradients of {self._replicas} replicas in one call. "
                "The order of additions then depends on where the model is cut, which is not "
                "allowed if scales are updated once an epoch; pass together=None or False"
            )
        agree_on(self.member, problem, failed)
        self._require_alike(stages, config.dtype)
        own = [
            (
                stage.index,
                [attrs.evolve(spec, device=torch.device("cpu")) for spec in stage.inputs],
                [attrs.evolve(spec, device=torch.device("cpu")) for spec in stage.outputs],
            )
            for stage in stages
        ]
        ends = all_gather(self.member, own)
        require_meeting([end for rank in self.ranks for end in ends[rank]])
        if "main" not in config.callers:
            problem = (
                f"expected 'main' among the callers of RuntimeConfig, found {config.callers}; add "
                "'main'"
            )
        agree_on(self.member, problem)
        return self._agreed(
            "make its runtime",
            lambda: Runtime(
                stages,
                self.row.order,
                config,
                event_log=event_log,
                reducer=self._reduces,
                row=self.row,
                rank=self.member.rank,
                registry=registry,
            ),
        )

    def _agreed(self, what: str, act: Callable[[], _T]) -> _T:
        """Run `act` on every rank; if it fails on a rank, every rank raises that rank's error."""
        found, problem, failed = [], "", None
        try:
            found.append(act())
        except Exception as error:
            failed = error
            problem = f"rank {self.member.rank} cannot {what}: {_worded(error)}"
        agree_on(self.member, problem, failed)
        return found[0]

    def replay_actions(self) -> None:
        """
        Capture one graph per action on every rank, and replay these graphs from now on; see
        `Runtime.replay_actions`.

        Every rank must call this method between the same two steps.

        Raises:
            BackendError: A rank cannot capture its actions; every rank raises this error.
        """
        self._agreed("capture its actions", self.runtime.replay_actions)

    def _require_alike(self, stages: Sequence[StageBackend], dtype: torch.dtype) -> None:
        """
        Raise an error if copies of a tied weight differ at the start, or their gradients differ in
        dtype.

        The gradient of a matrix has the dtype of the destinations; the gradient of any other
        parameter has the parameter's dtype.
        """
        held = {stage.index: parameters(stage) for stage in stages}
        units = {stage.index: {m.name for m in matrices(stage)} for stage in stages}
        own = {
            (index, name): (
                digests([held[index][name].detach().cpu()])[0],
                str(dtype if name in units[index] else held[index][name].dtype),
            )
            for tie in self.ties
            for index, name in tie.of(list(held))
            if name in held[index]
        }
        said = all_gather(self.member, own) if self.ties else []
        for tie in self.ties:
            every = [
                (n, words[p]) for n, words in enumerate(said) for p in tie.copies if p in words
            ]
            for rank, (bits, kind) in every:
                first, (wanted, other) = every[0]
                if bits != wanted:
                    raise BackendError(
                        f"the copies of {tie.name!r} on ranks {first} and {rank} differ at the "
                        "start; initialize both from one seed"
                    )
                if kind != other:
                    raise BackendError(
                        f"the gradients of the copies of {tie.name!r} are {other} on rank {first} "
                        f"and {kind} on rank {rank}; give RuntimeConfig the parameters' dtype"
                    )

    def _reducer(self) -> Reducers | Replicas | None:
        """
        Make the reducer over replicas and copies; every rank must take part in making every group.
        """
        member, pp = self.member, self.pp
        replicas = None
        if member.world > pp:
            group = self._group_of([range(place, member.world, pp) for place in range(pp)])
            replicas = self._summing(group, mean=self.mean, together=self.together)
        pairs: dict[str, Replicas | None] = {}
        for tie in self.ties:
            places = sorted({self.table.stage_to_rank[stage] for stage, _ in tie.copies})
            if len(places) > 1:
                every = [[r + p for p in places] for r in range(0, member.world, pp)]
                if (group := self._group_of(every)) is not None:
                    pairs[tie.name] = self._summing(group)
            elif tie.of(self.row.stages):
                pairs[tie.name] = None
        return Reducers(replicas, pairs) if pairs else replicas

    def _group_of(self, every: Iterable[Iterable[int]]) -> Any:
        """Make the groups, on every rank; return the group that contains this rank, or None."""
        member, own = self.member, None
        for ranks in map(list, every):
            group = device_group(ranks, member.device, self.limits.message)
            own = group if member.rank in ranks else own
            del group
        return own

    def _summing(self, group: Any, **options: Any) -> Replicas:
        host = self.member.device.type == "cpu"
        made = Replicas(group, host=host, deadline=self.limits.message, **options)
        made.waits = self.waits
        return made

    def _connect(self) -> Pipeline:
        member, limits = self.member, self.limits
        channels = Channels.open(
            self.every, device=member.device, deadline=limits.message, tagged=self.tagged
        )
        channels.log, channels.waits = self.rank_log, self.waits
        group = None
        if member.world > 1:
            group = gloo_group(list(range(member.world)), limits.start)
        self.consent = Consent(
            PrefixStore(f"qeffect/{self.name}/{self.attempt}", member.store),
            group,
            member.rank,
            member.world,
            self.every,
            channels,
            self.table,
            self.ranks,
            deadline=limits.commit,
            grace=limits.grace,
            replicas=self._reduces,
            log=self.rank_log,
        )
        self.consent.waits, self.consent.until = self.waits, self._until
        feed = feed_for(self.feed, member.device)
        made = self._pipeline(
            self.runtime, self.row, channels, feed, self.ranks, self.consent, self.clipping
        )
        made.digests, made.double = self.gradient_digests, self.double
        made.zeros = self.zero_stages
        return made

    @property
    def norm(self) -> Norm | None:
        """
        The norm of the last step's gradients; None if gradients are neither clipped nor checked for
        values that are not finite.
        """
        return self.pipeline.norm

    def step(self) -> Gradients:
        """
        Run one optimizer step. If scales are updated once an epoch (an optimizer step), they are
        calibrated before the first step of a new run.

        Returns:
            The gradients that were passed to the optimizer; valid until the next dW.

        Raises:
            StoppedError: All ranks stopped, with the same cause. This rank's weights have not
                changed. If the cause is recoverable, the weights of no rank have changed.
        """
        self.calibrate()
        with self.stepping():
            return self.pipeline.step(self.optimizer)

    def calibrate(self) -> None:
        """
        Calibrate scales that are updated once an epoch, before the first step of a new run. In all
        other cases, do nothing.

        Raises:
            StoppedError: All ranks stopped, with the same cause.
        """
        if self.new and not self.runtime.epoch and moves_once(self.runtime.domain):
            with self.stepping():
                self.calibration = calibrate_pipeline(self.pipeline)
                self.new = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """
        A context for a step. If `heed_termination` was called, SIGTERM ends the step with a cause.
        """
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def heed_termination(self) -> None:
        """
        Install a signal handler, so that SIGTERM ends a step with a cause. Call this method in the
        main thread.

        When a rank dies, torchrun sends SIGTERM to the other ranks, and kills them half a minute
        later. Without this handler a rank ends at once and publishes no cause.
        """
        signal.signal(signal.SIGTERM, self.terminate)

    @property
    def in_step(self) -> bool:
        """Whether a step runs."""
        return self._stepping

    def stop_until(self, moment: float) -> None:
        """
        Set the time at which a stop of this rank must have ended, even if the timeouts in `limits`
        are longer.

        Args:
            moment: The time, in seconds of `time.monotonic`.
        """
        self._until = self.consent.until = moment

    def terminate(self, *_: object) -> None:
        """Handle SIGTERM: end the step with a cause, or end the process if no step runs."""
        if self.consent.ending:
            return  # this rank is publishing its cause
        if self._stepping:
            raise TerminatedError("the launcher ended this rank with SIGTERM")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def rebuild(
        self,
        stopped: StoppedError,
        *,
        epoch: int | None = None,
        restore: Callable[[], None] | None = None,
    ) -> None:
        """
        Restart the epoch (the stopped optimizer step) after a stop that all ranks survived; every
        rank calls this method.

        All messages of the stopped step are dropped. The numerical state (FP8 scales and amax
        histories) of the last commit is restored.

        Args:
            stopped: The error of the stop.
            epoch: The epoch to restart, which is the device's count of updates. All ranks must pass
                the same epoch. With None the contract's epoch is restarted.
            restore: Function that restarts the epoch in the runtime; `Runtime.rebuild` by default.

        Raises:
            StoppedError: The cause is not recoverable: relaunch, and resume from a checkpoint.
            BackendError: A rank did not take part in time, or device work did not finish before the
                deadline.
        """
        if not stopped.cause.recoverable:
            raise stopped
        if self.member.device.type == "cuda":
            self.settle()
        self.attempt += 1
        if epoch is not None and self.rank_log is not None:
            self.rank_log("report", epoch=epoch)
        store = PrefixStore(f"qeffect/{self.name}/again/{self.attempt}", self.member.store)
        limit = datetime.timedelta(seconds=self.limits.start)

        def said_by_all() -> list[str]:
            store.set(str(self.member.rank), "ready" if epoch is None else str(epoch))
            store.wait([str(rank) for rank in range(self.member.world)], limit)
            return [store.get(str(rank)).decode() for rank in range(self.member.world)]

        try:
            said = bounded(said_by_all, self.limits.start + _MARGIN_S)
        except (RuntimeError, TimeoutError) as error:
            raise BackendError(
                f"not every rank was ready to rebuild within {self.limits.start:g} s of the stop; "
                "relaunch, and resume from a checkpoint"
            ) from error
        if odd := [rank for rank, word in enumerate(said) if word != said[0]]:
            raise StoppedError(
                attrs.evolve(
                    stopped.cause,
                    recoverable=False,
                    text=f"{stopped.cause.text}; the ranks cannot rebuild together: the "
                    f"epoch to restart is {said[0]} on rank 0, {said[odd[0]]} on rank {odd[0]}",
                )
            )
        (restore or self.runtime.rebuild)()
        if self.rank_log is not None:
            self.rank_log("rebuilt", epoch=self.runtime.epoch)
        self.runtime.reducer = self._reduces = self._reducer()
        self.pipeline = self._connect()

    def settle(self) -> None:
        """
        Wait for the device after a stop. The wait has a timeout: the time for which the other ranks
        wait for this rank.

        The stop has closed the connections, so device work that uses a connection can finish. If a
        communicator could not be aborted, the device never finishes.

        Raises:
            BackendError: Device work did not finish before the deadline.
        """
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self.runtime.handoff.scope():
            done.record()
        try:
            wait_for(done, None, deadline=self.limits.start, grace=0.0)
        except LostError:
            raise BackendError(
                f"device work of rank {self.member.rank} did not finish within "
                f"{self.limits.start:g} s of the stop; relaunch, and resume from a checkpoint"
            ) from None

    def _await_device(self, wait: Callable[[], None]) -> None:
        """
        Run a wait for the device between two steps, with a timeout of `limits.commit` seconds.

        Raises:
            UnansweredError: The device did not finish in time.
        """
        within(
            wait,
            self.limits.commit,
            rank=self.member.rank,
            action="drain",
            step=self.runtime.epoch,
            what=f"{self.member.device}",
        )

    def close(self) -> None:
        """
        Wait for the device, then close the connections and the event log. Call this method after
        the last step.
        """
        self.runtime.drain()
        self.runtime.close()
        self.pipeline.channels.close(abort=False)
        if self._reduces is not None:
            self._reduces.close(abort=False)
        group, self.consent.group = self.consent.group, None
        if group is not None:
            end_group(group, abort=False)
        if self.rank_log is not None:
            self.rank_log.close()


def _worded(error: Exception) -> str:
    """Return an error as one line; the class is named unless the message is written for users."""
    text = " ".join(str(error).split())
    named = isinstance(error, (BackendError, ValueError, RuntimeError, OSError))
    return text if named and text else f"{type(error).__name__}: {text}"

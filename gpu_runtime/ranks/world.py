"""
The ranks of a job: torchrun's environment, process groups, and a rank's pipeline put together.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from qeffect.schedule.actions import Kind, Schedule

from ..backends.protocol import (
    BackendError,
    StageBackend,
    matrices,
    parameters,
)
from ..lab.comparisons.recording import digests
from ..runtime import Runtime, RuntimeConfig
from ..step.clipping import Clipping, Norm
from ..step.optimizer import Optimizer
from ..step.plan.rows import Row, walked
from .channels import (
    Channels,
    LostError,
    channels_of,
    end_group,
    transport_of,
)
from .consent import Consent, StoppedError, TerminatedError, wait_for
from .executor import Feed, Pipeline
from .feeds import beside
from .job import require_meeting
from .replicas import Replicas
from .ties import Reducers, Tie, require_declared

__all__ = ["Limits", "Member", "Worker", "join", "launched", "leave"]

#: Workers of this process, counted alike on all ranks: each has names of its own in the store.
_WORKERS = itertools.count()
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS, _MOST_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE"), 999_999_999
_LAUNCH = "start the ranks with torchrun, or leave it out of the environment"


@attrs.frozen(kw_only=True)
class Limits:
    """
    How long anything may take, in seconds.

    Args:
        start: Until all ranks have met.
        message: A message, where the host waits for it.
        commit: Until all ranks have come to the commit, and this rank's device to what is read
            there.
        grace: Within which all ranks must have said why they stopped.
    """

    start: float = 120.0
    message: float = 60.0
    commit: float = 120.0
    grace: float = 5.0


@attrs.frozen
class Member:
    """
    This process among the others.

    Args:
        rank: Its global rank.
        world: How many there are.
        local: Its rank on this host.
        device: Where its tensors live.
        store: A store that all ranks reach.
    """

    rank: int
    world: int
    local: int
    device: torch.device
    store: Any

    def synchronize(self) -> None:
        """Wait for the device, where it is one that runs behind the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def launched() -> tuple[int, int | None]:
    """
    This process's rank and how many there are, as a launcher left them; 0 and None without one.

    Raises:
        BackendError: What it left in the environment cannot be: no number, or a rank that is none
            of so many.
    """
    found: dict[str, int] = {}
    wanted = dict.fromkeys(_NUMBERS, _MOST_RANKS)
    if (
        "WORLD_SIZE" in os.environ
    ):  # else nobody meets there: a cluster may mean another thing by it
        wanted["MASTER_PORT"] = 65535
    for name, most in wanted.items():
        value = os.environ.get(name)
        if value is None:
            continue
        digits = value.isascii() and value.isdigit() and len(value) <= len(str(most))
        if not digits or int(value) > most:
            raise BackendError(
                f"{name}: expected a whole number, as torchrun sets it, of at most {most}, found "
                f"{value!r}; {_LAUNCH}"
            )
        found[name] = int(value)
    rank, world = found.get("RANK", 0), found.get("WORLD_SIZE")
    if world is not None and rank >= world:
        raise BackendError(
            f"RANK: expected a number below WORLD_SIZE, which is {world}, found {rank}; {_LAUNCH}"
        )
    return rank, world


def join(device: str, limits: Limits | None = None) -> Member:
    """
    Meet the other ranks that torchrun started.

    The world's own group is gloo, on the CPU; channels of GPUs are NCCL groups of their own. At the
    end of the process `leave` ends what is left of them.

    Raises:
        BackendError: The device is neither, there is no torchrun environment or one that cannot
            be, no NCCL, or no GPU for this rank.
    """
    if device not in ("cpu", "cuda"):
        raise BackendError(
            f"device is {device!r}; expected 'cpu' or 'cuda': a rank takes the GPU of its place on "
            "the host"
        )
    launched()
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise BackendError(
            f"{missing[0]} is not set; start the ranks with torchrun: torchrun --nproc-per-node N "
            "-m qeffect runtime ..."
        )
    limits = limits or Limits()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if not dist.is_initialized():
        _meet(datetime.timedelta(seconds=limits.start))
    rank, world = dist.get_rank(), dist.get_world_size()
    place = torch.device("cpu")
    problem = ""
    if device == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not dist.is_nccl_available():
            problem = "this torch has no NCCL, which messages between GPUs need; use --device cpu"
        elif local >= found:
            problem = f"rank {rank} wants GPU {local} of this host, which has {found}"
        else:
            place = torch.device("cuda", local)
            torch.cuda.set_device(place)
            # A rank that is lost is the consent's to find: NCCL's watchdog would end the process.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    member = Member(rank, world, local, place, dist.distributed_c10d._get_default_store())
    agree_on(member, problem)
    return member


def _meet(timeout: datetime.timedelta) -> None:
    """
    Make the world's group, under names of this attempt alone.

    torchrun's agent keeps one store over all its restarts, and this torch makes no difference of
    attempts there: a rank would find the addresses of dead peers, and causes of the past.
    """
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"qeffect/attempt/{attempt}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    atexit.register(leave)


def leave() -> None:
    """
    End the groups on the CPU that are left, and their threads; called at the end of the process.

    A thread of gloo may hold the tensors of its last collective for a while after that has ended.
    One that gives them back while the interpreter ends waits for a lock that it never gets, and
    the process ends in `std::terminate`, after all its work (pytorch/pytorch#190489). A group ends
    with its last reference; it then waits for its threads, which is as long as what is under way in
    it, so no longer than its own timeout. No rank waits for another: what it had to say has been
    sent. Groups on GPUs are left to the driver, and the world's with them.
    """
    gc.collect()  # pipelines refer to themselves, and to groups
    held = dist.distributed_c10d._world.pg_map
    for group in [*held]:
        if group is not dist.group.WORLD and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)
        del group
    if len(held) == 1 and dist.is_initialized():
        dist.destroy_process_group()


def agree_on(member: Member, problem: str, failed: Exception | None = None) -> None:
    """
    Raise one rank's problem on every rank: all go on or none.

    Args:
        member: This process.
        problem: What is wrong here; empty where nothing is.
        failed: What was raised here.

    Raises:
        BackendError: A rank has a problem; the first one's words.
    """
    for text in gathered(member, problem):
        if text:
            raise BackendError(text) from failed


def _worded(error: Exception) -> str:
    """An error in a line, with its class where it is none that is made for people."""
    text = " ".join(str(error).split())
    named = isinstance(error, (BackendError, ValueError, RuntimeError, OSError))
    return text if named and text else f"{type(error).__name__}: {text}"


def gathered(member: Member, own: Any) -> list[Any]:
    """What every rank brings, by rank; all ranks call it."""
    found: list[Any] = [None] * member.world
    dist.all_gather_object(found, own)
    return found


class Worker:
    """
    One rank's pipeline, its messages and the consent of all, made again after a stop.

    Every rank of the world makes one, with the same table.

    Args:
        member: This process.
        schedule: The table with messages; every rank checks it and refuses it alike.
        pp: Ranks of the pipeline; the world has a multiple of them.
        build: Makes the stages of a row, by their indices.
        feed: Makes the data of a replica.
        config: How the runtime runs.
        limits: How long anything may take.
        optimizer: Makes the optimizer over the stages.
        event_log: Where this rank's event log goes, as for `Runtime`.
        tagged: Whether messages are tagged where the transport knows tags.
        pipeline: The class of pipeline; a subclass may record.
        clip_norm: Multiply all gradients by one factor, on every rank the same, so that the norm of
            all ranks' together is no more than this; None leaves them.
        skip_nonfinite: Skip the update on every rank where that norm is not finite; the epoch
            commits, weights and optimizer stay (`qeffect.gpu_runtime.step.clipping`).
        mean: Divide gradients by the number of replicas once they are summed. Without it they are
            the sum, which is right where each loss is a share of the whole.
        together: Whether the gradients of a bucket are reduced in one call; None where that moves
            no bit (`qeffect.gpu_runtime.ranks.replicas`).
        ties: Tied weights, whose copies' gradients are added before the update
            (`qeffect.gpu_runtime.ranks.ties`).

    Raises:
        ScheduleError: The table is refused; no rank has begun.
        Refused: A rank has a copy of a weight that another rank declares tied, and does not
            declare it so; every rank raises it.
        BackendError: The world has another size, a stage cannot be built on some rank, two stages
            do not meet, the ranks were given different limits of the norm or ties, or copies of a
            tied weight begin differently.
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
        tagged: bool = True,
        pipeline: type[Pipeline] = Pipeline,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        mean: bool = False,
        together: bool | None = None,
        ties: Sequence[Tie] = (),
    ) -> None:
        self.member, self.limits = member, limits or Limits()
        self.mean, self.together = mean, together
        self.ties = tuple(ties)
        self.clipping = Clipping(
            max_norm=clip_norm,
            skip_nonfinite=skip_nonfinite,
            elsewhere=frozenset(place for tie in ties for place in tie.copies[1:]),
        )
        config = config or RuntimeConfig()
        table = walked(schedule, config.provisioning)
        if table.num_ranks != pp:
            raise BackendError(
                f"{schedule.source} is for {table.num_ranks} ranks, this pipeline has {pp}; give "
                "the table of as many ranks"
            )
        if member.world % pp:
            raise BackendError(
                f"{member.world} processes cannot hold pipelines of {pp} ranks; start a multiple "
                f"of {pp}"
            )
        self.table = table
        self.replica, place = divmod(member.rank, pp)
        self.ranks = [self.replica * pp + rank for rank in range(pp)]
        self.every = [
            ends
            for replica in range(member.world // pp)
            for ends in channels_of(table, [replica * pp + rank for rank in range(pp)])
        ]
        self.tagged = tagged
        self.row = Row.of(table, place, config.provisioning)
        self.feed = feed(self.replica)
        self.pp = pp
        require_declared(gathered(member, self.ties), table.stage_to_rank, self.ranks)
        self._reduces = self._reducer()
        copies = {tie.name: own for tie in self.ties if (own := tie.of(self.row.stages))}
        config = attrs.evolve(config, copies=copies)
        if self._reduces is not None and not config.reductions and not config.buckets:
            # Every replica walks the same row, and the contract holds it to that order.
            ends = [a.stage for a in self.row.atoms if a.kind is Kind.REDUCE_GRAD]
            if sorted(ends) == list(self.row.stages):
                config = attrs.evolve(config, reductions=(*ends, *copies))
        elif config.reductions:
            config = attrs.evolve(config, reductions=(*config.reductions, *copies))
        self._require_one_end(config.amax)
        self.runtime = self._runtime(build, config, event_log)
        self.optimizer = optimizer(list(self.runtime.stages.values()))
        self._pipeline = pipeline
        self.attempt, self.name = 0, next(_WORKERS)
        self._stepping = False
        self.pipeline = self._connect()

    def _require_one_end(self, amax: str) -> None:
        """Refuse ranks that would do different things at the end of a step."""
        names = "clip_norm", "skip_nonfinite", "mean", "together", "amax"
        clipping = self.clipping.max_norm, self.clipping.skip_nonfinite
        own = (*clipping, self.mean, self.together, amax)
        for rank, words in enumerate(said := gathered(self.member, own)):
            for name, word, first in zip(names, words, said[0], strict=True):
                if word != first:
                    raise BackendError(
                        f"{name} is {first} on rank 0 and {word} on rank {rank}; give every rank "
                        "the same"
                    )

    def _runtime(
        self,
        build: Callable[[tuple[int, ...]], list[StageBackend]],
        config: RuntimeConfig,
        event_log: str | os.PathLike[str] | BinaryIO | bool | None,
    ) -> Runtime:
        problem, stages, failed = "", [], None
        try:
            stages = list(build(self.row.stages))
        except Exception as error:  # of the caller's; the other ranks wait for this one's word
            failed = error
            problem = f"rank {self.member.rank} cannot build its stages: {_worded(error)}"
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
        ends = gathered(self.member, own)
        require_meeting([end for rank in self.ranks for end in ends[rank]])
        if "main" not in config.callers:
            problem = f"callers are {config.callers}; a pipeline calls as 'main': name it too"
        agree_on(self.member, problem)
        made = None
        try:
            made = Runtime(
                stages,
                self.row.order,
                config,
                event_log=event_log,
                reducer=self._reduces,
                row=self.row,
                rank=self.member.rank,
            )
        except Exception as error:
            failed = error
            problem = f"rank {self.member.rank} cannot make its runtime: {_worded(error)}"
        agree_on(self.member, problem, failed)
        assert made is not None
        return made

    def _require_alike(self, stages: Sequence[StageBackend], dtype: torch.dtype) -> None:
        """
        Refuse copies of one weight that do not begin as one, or have no gradients of one type.

        A matrix has its gradient in a destination of this type, what is none in its own.
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
        said = gathered(self.member, own) if self.ties else []
        for tie in self.ties:
            every = [
                (n, words[p]) for n, words in enumerate(said) for p in tie.copies if p in words
            ]
            for rank, (bits, kind) in every:
                first, (wanted, other) = every[0]
                if bits != wanted:
                    raise BackendError(
                        f"the copies of {tie.name!r} on the ranks {first} and {rank} do not "
                        "begin with the same bits; draw both from one seed"
                    )
                if kind != other:
                    raise BackendError(
                        f"the gradients of the copies of {tie.name!r} are {other} on rank {first} "
                        f"and {kind} on rank {rank}; give RuntimeConfig the parameters' dtype"
                    )

    def _reducer(self) -> Reducers | Replicas | None:
        """What sums over replicas and copies; every rank of the world makes every group."""
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
        """Make these groups on every rank of the world; this rank's own, where it is in one."""
        member, own = self.member, None
        limit = datetime.timedelta(seconds=self.limits.message)
        for ranks in map(list, every):
            group = dist.new_group(
                ranks,
                backend=transport_of(member.device),
                timeout=limit if member.device.type == "cpu" else None,
            )
            own = group if member.rank in ranks else own
            del group
        return own

    def _summing(self, group: Any, **options: Any) -> Replicas:
        host = self.member.device.type == "cpu"
        return Replicas(group, host=host, deadline=self.limits.message, **options)

    def _connect(self) -> Pipeline:
        member, limits = self.member, self.limits
        channels = Channels.open(
            self.every, device=member.device, deadline=limits.message, tagged=self.tagged
        )
        group = None
        if member.world > 1:
            group = dist.new_group(
                list(range(member.world)),
                backend="gloo",
                timeout=datetime.timedelta(seconds=limits.start),
            )
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
        )
        feed = beside(self.feed, member.device)
        return self._pipeline(
            self.runtime, self.row, channels, feed, self.ranks, self.consent, self.clipping
        )

    @property
    def norm(self) -> Norm | None:
        """The norm of the last step's gradients, where it is clipped or looked at."""
        return self.pipeline.norm

    def step(self) -> None:
        """
        One optimizer step.

        Raises:
            StoppedError: It ended on every rank, for one cause, and no weights have moved.
        """
        with self.stepping():
            self.pipeline.step(self.optimizer)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """In it, a termination that is heeded ends the step with its cause."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def heed_termination(self) -> None:
        """
        Let SIGTERM end a step with its cause; for the main thread.

        torchrun sends it to all that are left as soon as one rank has died, and kills them half a
        minute later. Without this a rank ends there and then, and says nothing.
        """
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: object) -> None:
        if self.consent.ending:
            return  # it is about to say why
        if self._stepping:
            raise TerminatedError("the launcher ended it with SIGTERM")
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
        Begin the epoch again after a stop that all ranks survived.

        All ranks call it. Every message is dead by then; the numerical state is the last commit's.

        Args:
            stopped: What ended the step.
            epoch: The epoch that is begun again, where the device knows it better than the
                contract: all ranks have to say the same.
            restore: Begins it in the runtime; `Runtime.rebuild` where it is left out.

        Raises:
            StoppedError: The cause is not recoverable: relaunch, and resume from a checkpoint.
            BackendError: A rank did not come back, or its device came to no end.
        """
        if not stopped.cause.recoverable:
            raise stopped
        if self.member.device.type == "cuda":
            self.settle()
        self.attempt += 1
        store = PrefixStore(f"qeffect/{self.name}/again/{self.attempt}", self.member.store)
        store.set(str(self.member.rank), "ready" if epoch is None else str(epoch))
        limit = datetime.timedelta(seconds=self.limits.start)
        try:
            store.wait([str(rank) for rank in range(self.member.world)], limit)
        except RuntimeError as error:
            raise BackendError(
                f"not every rank came back within {self.limits.start:g} s of the stop; relaunch, "
                "and resume from a checkpoint"
            ) from error
        said = [store.get(str(rank)).decode() for rank in range(self.member.world)]
        if odd := [rank for rank, word in enumerate(said) if word != said[0]]:
            raise StoppedError(
                attrs.evolve(
                    stopped.cause,
                    recoverable=False,
                    text=f"{stopped.cause.text}; rank 0 begins again at {said[0]}, rank {odd[0]} "
                    f"at {said[odd[0]]}",
                )
            )
        (restore or self.runtime.rebuild)()
        self.runtime.reducer = self._reduces = self._reducer()
        self.pipeline = self._connect()

    def settle(self) -> None:
        """
        Wait for the device after a stop, for no longer than the other ranks wait for this one.

        What it was given ends when the connections that it uses have been let go, which the stop
        has done; a communicator that cannot be let go holds it for ever.

        Raises:
            BackendError: It came to no end.
        """
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self.runtime.handoff.scope():
            done.record()
        try:
            wait_for(done, None, deadline=self.limits.start, grace=0.0)
        except LostError:
            raise BackendError(
                f"the device of rank {self.member.rank} did not come to an end within "
                f"{self.limits.start:g} s of the stop; relaunch, and resume from a checkpoint"
            ) from None

    def close(self) -> None:
        """End connections and the event log, after the last step; waits for the device."""
        self.runtime.drain()
        self.runtime.close()
        self.pipeline.channels.close(abort=False)
        if self._reduces is not None:
            self._reduces.close(abort=False)
        group, self.consent.group = self.consent.group, None
        if group is not None:
            end_group(group, abort=False)

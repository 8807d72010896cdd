"""
The ranks of a job: the launcher's environment, the rendezvous, and data that all ranks exchange.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import os
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..backends.protocol import BackendError
from .attempt import UnreachableError, agree_on_attempt, first_line
from .bounded import bounded
from .lost import UnansweredError, within

__all__ = ["Limits", "Member", "agree_on", "all_gather", "join", "launcher_ranks", "leave"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS, _MOST_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE"), 999_999_999
#: How this process met the other ranks; kept because `join` may be called again.
_MET: list[tuple[str, str]] = []
#: Seconds past a deadline after which this rank no longer waits for a store.
_MARGIN_S = 5.0
_LAUNCH = "start the ranks with torchrun, or unset the variable"


@attrs.frozen(kw_only=True)
class Limits:
    """
    Timeouts, in seconds.

    Args:
        start: Timeout for all ranks to connect.
        message: Timeout for one message that the host waits for.
        commit: Timeout for all ranks to reach the commit of a step. Also the timeout for this
            rank's device to finish its work.
        grace: Timeout for all ranks to publish why they stopped.
        save: Timeout for all ranks to write or read their files of a checkpoint.
    """

    start: float = 120.0
    message: float = 60.0
    commit: float = 120.0
    grace: float = 5.0
    save: float = 1800.0


@attrs.frozen
class Member:
    """
    This process, one of the ranks of a job.

    Args:
        rank: The global rank of this process.
        world: The number of ranks.
        local: The rank of this process on its host.
        device: The device of this process's tensors.
        store: The key-value store that all ranks share.
        met: Events of this rank's connection to the other ranks, for the rank log. Each event comes
            with the attempt's name. Empty if another library connected the ranks.
    """

    rank: int
    world: int
    local: int
    device: torch.device
    store: Any
    met: tuple[tuple[str, str], ...] = ()

    def synchronize(
        self, seconds: float | None = None, *, action: str = "step", step: int | None = None
    ) -> None:
        """
        Wait for the device; a CPU needs no wait.

        Args:
            seconds: Timeout in seconds. None waits without a limit; use it only for measurements.
            action: What this rank is doing, for the error's text.
            step: The step; None outside of steps.

        Raises:
            UnansweredError: The device did not finish in time.
        """
        if self.device.type != "cuda":
            return
        if seconds is None:
            torch.cuda.synchronize(self.device)
            return
        wait = partial(torch.cuda.synchronize, self.device)
        within(wait, seconds, rank=self.rank, action=action, step=step, what=f"{self.device}")


def launcher_ranks() -> tuple[int, int | None]:
    """
    Read this process's rank and the number of ranks from the launcher's environment variables.

    Returns:
        The rank and the number of ranks; 0 and None without a launcher.

    Raises:
        BackendError: A variable is not a number or is too large, or the rank is not below the
            number of ranks.
    """
    found: dict[str, int] = {}
    wanted = dict.fromkeys(_NUMBERS, _MOST_RANKS)
    if "WORLD_SIZE" in os.environ:  # else no rank uses the port, and a cluster may set the variable
        wanted["MASTER_PORT"] = 65535
    for name, most in wanted.items():
        value = os.environ.get(name)
        if value is None:
            continue
        digits = value.isascii() and value.isdigit() and len(value) <= len(str(most))
        if not digits or int(value) > most:
            raise BackendError(
                f"{name}: expected a whole number of at most {most}, as torchrun sets it, found "
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
    Connect to the other ranks that torchrun started.

    The group of all ranks is a gloo group on the CPU; each channel between GPUs has its own NCCL
    group. At the end of the process, `leave` ends the remaining groups.

    Args:
        device: ``cpu`` or ``cuda``; with ``cuda`` a rank uses the GPU whose number is its local
            rank.
        limits: Timeouts; `Limits()` by default.

    Raises:
        BackendError: The device is unknown, or torchrun's environment variables are missing or
            malformed. Or the ranks did not connect in time, this torch has no NCCL, or the host has
            no GPU for this rank.
    """
    if device not in ("cpu", "cuda"):
        raise BackendError(
            f"device is {device!r}; expected 'cpu' or 'cuda': with 'cuda' a rank uses the GPU "
            "whose number is its local rank"
        )
    launcher_ranks()
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise BackendError(
            f"{missing[0]} is not set; start the ranks with torchrun: torchrun --nproc-per-node N "
            "-m qeffect runtime ..."
        )
    limits = limits or Limits()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if not dist.is_initialized():
        _MET[:] = _meet(datetime.timedelta(seconds=limits.start))
    rank, world = dist.get_rank(), dist.get_world_size()
    place = torch.device("cpu")
    problem = ""
    if device == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not dist.is_nccl_available():
            problem = "this torch has no NCCL, which messages between GPUs need; use --device cpu"
        elif local >= found:
            problem = (
                f"rank {rank} wants GPU {local} (counted from 0) of this host, which has {found}; "
                "start one rank per GPU"
            )
        else:
            place = torch.device("cuda", local)
            torch.cuda.set_device(place)
            # The consent finds a lost rank; NCCL's watchdog would end the process instead.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    store = dist.distributed_c10d._get_default_store()
    member = Member(rank, world, local, place, store, tuple(_MET))
    agree_on(member, problem)
    return member


def _meet(timeout: datetime.timedelta) -> list[tuple[str, str]]:
    """
    Make the group of all ranks, with store keys of this attempt only; return how the ranks
    connected.

    torchrun's agent keeps one store over all its restarts, and torch uses the same keys in every
    attempt. Without separate keys, a rank would find the addresses of dead peers and the causes of
    earlier stops.

    Raises:
        BackendError: The store or a rank cannot be reached in time.
    """
    limit = f"{timeout.total_seconds():g} s"
    most = timeout.total_seconds() + _MARGIN_S
    rank = int(os.environ["RANK"])
    try:
        store, rank, world = bounded(lambda: next(rendezvous("env://", timeout=timeout)), most)
    except TimeoutError:
        raise UnreachableError(
            f"rank {rank}: the launcher's store did not answer within {limit}"
        ) from None
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise BackendError(
            f"rank {os.environ['RANK']}: the ranks did not meet at {place} within {limit} "
            f"({first_line(error)})"
        ) from error
    met: list[tuple[str, str]] = []
    attempt = agree_on_attempt(store, rank, world, timeout.total_seconds(), met)
    own = PrefixStore(f"qeffect/attempt/{attempt}", store)

    def connect() -> None:
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=timeout)

    try:
        bounded(connect, most)
    except TimeoutError:
        raise UnreachableError(
            f"rank {rank}: the launcher's store did not answer within {limit}"
        ) from None
    except RuntimeError as error:
        raise BackendError(
            f"rank {rank}: the {world} ranks did not connect within {limit} ({first_line(error)})"
        ) from error
    atexit.register(leave)
    return met


def leave() -> None:
    """
    End the remaining groups on the CPU, and their threads; called at the end of the process.

    After a collective, a gloo thread may keep the tensors of this collective for a while. If the
    thread releases these tensors while the interpreter ends, the thread waits for a lock that it
    never gets. The process then ends in `std::terminate`, although all its work is done
    (pytorch/pytorch#190489). A group ends when its last reference is dropped. The group then waits
    for its threads, at most for the group's timeout. In this function no rank waits for another
    rank, because all messages have been sent. If groups on GPUs remain, the driver ends them, and
    the group of all ranks is kept too.
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
    If a rank has a problem, raise an error on every rank. If several ranks have problems, the error
    is about the lowest of these ranks.

    Args:
        member: This process.
        problem: The problem of this rank; empty without a problem.
        failed: The exception that caused this rank's problem.

    Raises:
        BackendError: A rank has a problem; the message describes the problem of the lowest such
            rank.
    """
    for text in all_gather(member, problem):
        if text:
            raise BackendError(text) from failed


def all_gather(member: Member, own: Any) -> list[Any]:
    """
    Gather one object from every rank, ordered by rank; every rank calls this function.

    Raises:
        UnansweredError: A rank is gone, or did not answer in time.
    """
    found: list[Any] = [None] * member.world
    try:
        dist.all_gather_object(found, own)
    except RuntimeError as error:
        library = first_line(error)
        error.__traceback__ = None  # its frames hold the group
        raise UnansweredError(
            "start",
            -1,
            "imed out" in library,
            f"rank {member.rank}: not every rank answered ({library})",
        ) from None
    return found

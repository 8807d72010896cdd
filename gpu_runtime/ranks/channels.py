"""
Messages of one rank, straight out of and into slot memory, over one communicator a direction.

A channel goes one way between two ranks and has a process group, so a communicator and a stream, of
its own: a receive that waits long holds up no send. Where the transport knows tags (gloo) a tag
names kind, stage and microbatch; NCCL ignores tags, and there order is all that pairs a send with
its receive. So both ends write down what they posted and roll it into a digest; two ends that
differ are found when all ranks consent to the step, before a weight moves.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.schedule.actions import SENDS, Kind, Schedule

__all__ = [
    "Channels",
    "Ends",
    "LostError",
    "Message",
    "Transfer",
    "channels_of",
    "first_difference",
    "transport_of",
]

_PRIME = (1 << 61) - 1
_BASE = 1_000_003
_STAGES = 1 << 20
#: Thread blocks of NCCL's kernels at most. Alone it would take twice as many for a message, and
#: while they wait for the other rank no kernel of a stage runs where they are.
_MOST_BLOCKS = 8
#: Seconds that an abort may take; where a graph still holds a communicator it takes for ever.
_ABORT_S = 10.0


class Ends(NamedTuple):
    """A channel: the global rank that sends, and the one that receives."""

    source: int
    to: int

    def __str__(self) -> str:
        return f"{self.source} to {self.to}"


class Message(NamedTuple):
    """
    What both ends call a message.

    Args:
        stage: The stage that it leaves.
        microbatch: Whose it is.
        gradient: Whether it is the gradient of the stage's input, not the stage's output.
    """

    stage: int
    microbatch: int
    gradient: bool

    @property
    def sent(self) -> str:
        """The action that sends it, as it stands in a table."""
        return f"{self.stage}{'SEND_B' if self.gradient else 'SEND_F'}{self.microbatch}"

    @property
    def received(self) -> str:
        """The action that receives it."""
        to = self.stage - 1 if self.gradient else self.stage + 1
        return f"{to}{'RECV_B' if self.gradient else 'RECV_F'}{self.microbatch}"

    @property
    def number(self) -> int:
        """A positive number of its own, which is also its tag."""
        return 1 + 2 * (self.microbatch * _STAGES + self.stage) + self.gradient

    @classmethod
    def of(cls, number: int) -> Message:
        """The message of a number."""
        place, gradient = divmod(number - 1, 2)
        microbatch, stage = divmod(place, _STAGES)
        return cls(stage, microbatch, bool(gradient))


class LostError(RuntimeError):
    """
    A transfer did not end: a connection broke, or the deadline passed.

    Args:
        action: Which action's transfer.
        peer: The rank at the other end; -1 where there are many.
        late: Whether the deadline passed.
        library: What the library said.
    """

    def __init__(self, action: str, peer: int, late: bool, library: str) -> None:
        super().__init__(action, peer, late, library)
        self.action, self.peer, self.late, self.library = action, peer, late, library

    def __str__(self) -> str:
        other = "all ranks" if self.peer < 0 else f"rank {self.peer}"
        how = "was late" if self.late else "was lost with the connection"
        return f"{self.action}, with {other}, {how}"


@attrs.define(eq=False)
class Transfer:
    """One posted transfer; its tensor lives until it was waited for."""

    work: Any
    tensor: Tensor
    action: str
    peer: int


@attrs.define(eq=False)
class _Channel:
    """One end of a channel: its group, what was posted in this step, the digest of all steps."""

    ends: Ends
    group: Any
    posted: list[int] = attrs.field(factory=list)
    digest: int = 0

    def roll(self) -> int:
        """The digest with what was posted since the last commit."""
        digest = self.digest
        for number in self.posted:
            digest = (digest * _BASE + number) % _PRIME
        return digest


def channels_of(table: Schedule, ranks: Sequence[int]) -> list[Ends]:
    """
    Every directed pair of ranks between which a table has messages, in one order for all ranks.

    Args:
        table: The table.
        ranks: The global rank of each rank of the table.
    """
    home, found = table.stage_to_rank, set()
    for atoms in table.atoms:
        for a in atoms:
            if a.kind in SENDS:
                to = a.stage + (1 if a.kind is Kind.SEND_F else -1)
                found.add(Ends(ranks[home[a.stage]], ranks[home[to]]))
    return sorted(found)


def first_difference(
    sent: Iterable[int], received: Iterable[int]
) -> tuple[int, Message | None, Message | None] | None:
    """
    The first place at which the two ends of a channel differ.

    >>> place, sent, received = first_difference([3, 5], [3, 7])
    >>> place, sent.sent, received.received
    (1, '2SEND_F0', '4RECV_F0')
    >>> first_difference([3], [3]) is None
    True

    Returns:
        Its number, what was sent there and what was received; None where nothing was.
    """
    for place, (a, b) in enumerate(zip_longest(sent, received)):
        if a != b:
            first, second = (None if n is None else Message.of(n) for n in (a, b))
            return place, first, second
    return None


class Channels:
    """
    Point-to-point transfers of one rank.

    Args:
        rank: The global rank.
        groups: The process group of each channel that ends here.
        host: Whether the host waits for a transfer (gloo), and tags are known; else the current
            stream waits (NCCL).
        deadline: Seconds that a wait of the host may take.
        tagged: Whether to use tags where they are known; without, order alone pairs messages, as
            on NCCL.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[Ends, Any],
        *,
        host: bool,
        deadline: float = 30.0,
        tagged: bool = True,
    ) -> None:
        self.rank = rank
        self.host = host
        self.tagged = tagged and host
        self.deadline = datetime.timedelta(seconds=deadline)
        self._channels = {ends: _Channel(ends, group) for ends, group in groups.items()}
        self._under_way: set[Transfer] = set()
        self._endings: list[Abort] = []

    @classmethod
    def open(
        cls,
        every: Sequence[Ends],
        *,
        device: torch.device,
        deadline: float = 30.0,
        tagged: bool = True,
    ) -> Channels:
        """
        Make a group for each channel, and send one number through each.

        Every rank of the world calls this, with the same channels. On a GPU a communicator comes
        into being at its first transfer, which blocks the host until both ends are there: so all
        of them come into being here, in one order.

        Args:
            every: Every channel of the world, in one order for all ranks.
            device: Where the tensors are; it decides the transport.
            deadline: Seconds that a wait of the host may take.
            tagged: As for the class.

        Raises:
            RuntimeError: What the library says where a group cannot be made.
        """
        host, rank = device.type == "cpu", dist.get_rank()
        limit = datetime.timedelta(seconds=deadline)
        own: dict[Ends, Any] = {}
        for ends in every:
            group = dist.new_group(
                [*ends],
                backend=transport_of(device),
                timeout=limit if host else None,
                pg_options=None if host else _small_kernels(),
            )
            if rank in ends:
                own[ends] = group
            del group
        made = cls(rank, own, host=host, deadline=deadline, tagged=tagged)
        token = torch.zeros(1, device=device)
        for ends, channel in made._channels.items():
            if rank == ends.source:
                work = dist.isend(token, ends.to, group=channel.group)
            else:
                work = dist.irecv(token, ends.source, group=channel.group)
            assert work is not None
            work.wait()
            del work
        if not host:
            torch.cuda.synchronize(device)
        return made

    # Transfers

    def send(self, tensor: Tensor, to: int, message: Message) -> Transfer:
        """
        Begin to send a tensor, which must not change until `wait`.

        Raises:
            LostError: The connection is broken.
        """
        channel = self._channels[Ends(self.rank, to)]
        transfer = Transfer(None, tensor.contiguous(), message.sent, to)
        self._post(dist.isend, transfer, channel, message.number)
        return transfer

    def receive(self, into: Tensor, source: int, message: Message) -> Transfer:
        """
        Begin to receive into a static buffer.

        Raises:
            LostError: The connection is broken.
        """
        channel = self._channels[Ends(source, self.rank)]
        transfer = Transfer(None, into, message.received, source)
        self._post(dist.irecv, transfer, channel, message.number)
        return transfer

    def _post(self, begin: Any, transfer: Transfer, channel: _Channel, number: int) -> None:
        if channel.group is None:  # which would mean the group of all ranks
            raise LostError(transfer.action, transfer.peer, False, "its connection is closed")
        self._under_way.add(transfer)
        tag = number if self.tagged else 0
        try:
            transfer.work = begin(transfer.tensor, transfer.peer, group=channel.group, tag=tag)
        except RuntimeError as error:
            raise self._lost(transfer, error) from None
        channel.posted.append(number)

    @staticmethod
    def _lost(transfer: Transfer, error: RuntimeError) -> LostError:
        library = str(error)
        error.__traceback__ = None  # its frames hold the transfer, and that a connection
        return LostError(transfer.action, transfer.peer, "imed out" in library, library)

    def wait(self, transfer: Transfer) -> None:
        """
        Completion: the host waits, or the current stream does.

        Raises:
            LostError: It did not come.
        """
        if self.host:
            try:
                transfer.work.wait(self.deadline)
            except RuntimeError as error:
                raise self._lost(transfer, error) from None
        else:
            transfer.work.wait()
        self._under_way.discard(transfer)

    # What was posted

    def digests(self) -> dict[Ends, int]:
        """The digest of each channel's end here, over everything that was posted."""
        return {ends: channel.roll() for ends, channel in self._channels.items()}

    def posted(self) -> dict[Ends, tuple[int, ...]]:
        """The numbers of what was posted since the last commit."""
        return {ends: tuple(channel.posted) for ends, channel in self._channels.items()}

    def commit(self) -> None:
        """Both ends agree: what was posted is of the past."""
        for channel in self._channels.values():
            channel.digest = channel.roll()
            channel.posted.clear()

    def close(self, *, abort: bool = True) -> None:
        """
        End every transfer and connection here: each peer that waits on one wakes up at once.

        Gloo closes a connection when the last reference to its group and its transfers goes; no
        call does it. An NCCL communicator is aborted, which frees a stream that waits in it.

        Args:
            abort: Whether transfers may be under way; False where all have ended.
        """
        groups = self._forget()
        endings, self._endings = self._endings, []
        for ending in endings:
            ending.join()
        end_groups(groups, abort=abort and not self.host)

    def let_go(self) -> None:
        """
        Begin to abort every connection, and do not wait: a graph may hold kernels of several, and
        of other groups; it ends when those of all have been let go. `close` waits.
        """
        if not self.host:
            groups = self._forget()
            while groups:
                self._endings.append(Abort(groups.pop()))

    def _forget(self) -> list[Any]:
        """Let go of all transfers, which hold connections, and return the groups."""
        for transfer in list(self._under_way):
            transfer.work = None
        self._under_way.clear()
        groups = [c.group for c in self._channels.values() if c.group is not None]
        for channel in self._channels.values():
            channel.group = None
        return groups


def _small_kernels() -> Any:
    """Options of an NCCL group whose kernels leave most of the device to others."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MOST_BLOCKS
    return options


def transport_of(device: torch.device) -> str:
    """Name what carries messages between tensors of a device: gloo on a CPU, else NCCL."""
    return "gloo" if device.type == "cpu" else "nccl"


class Abort:
    """
    The end of an NCCL group that other ranks may have left, in a thread of its own.

    A communicator first lets its kernels go, and then waits for every graph that holds one of them
    (NCCL's `commDestroySync`). A graph runs until the kernels of *all* its communicators have been
    let go, so that all are aborted at once, and the graph is dropped meanwhile.

    Args:
        group: The group; the caller keeps no other reference.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # One that was never used has nothing to abort.
        with suppress(AttributeError, RuntimeError):
            self._group.abort()

    def join(self) -> None:
        """Wait until it has ended, and destroy the group; what a graph still holds is left."""
        self._thread.join(_ABORT_S)
        group, self._group = self._group, None
        if group is not None and not self._thread.is_alive():
            dist.destroy_process_group(group)


def end_groups(groups: list[Any], *, abort: bool) -> None:
    """
    Destroy process groups; ones that other ranks may have left are aborted first, all at once.

    Args:
        groups: The groups; the list is emptied, as a group ends with its last reference.
        abort: Whether they may have been left.
    """
    aborts = []
    while groups:
        if abort:
            aborts.append(Abort(groups.pop()))
        else:
            dist.destroy_process_group(groups.pop())
    for one in aborts:
        one.join()


def end_group(group: Any, *, abort: bool) -> None:
    """As `end_groups`, of one."""
    held = [group]
    del group
    end_groups(held, abort=abort)

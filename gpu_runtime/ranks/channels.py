"""
Messages of one rank. A message is sent from, or received into, the memory of a slot (the buffers of
one microbatch).

A channel carries messages from one rank to another rank. Each channel has its own process group
with its own communicator and stream, so a waiting receive never delays a send. Under gloo, each
message has a tag for its kind, stage and microbatch. NCCL ignores tags and pairs sends with
receives by order alone. Therefore both ranks record the messages that they posted, and compute a
digest of these messages. The ranks compare the digests when they consent to the step, before any
weight changes.
"""

from __future__ import annotations

import datetime
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.log.rank_log import RankLog, order_digest
from qeffect.schedule.actions import SENDS, Kind, Schedule

from .attempt import first_line
from .bounded import bounded
from .lost import LostError, UnansweredError, within
from .wait_clock import WaitClock

__all__ = [
    "ChannelEnds",
    "Channels",
    "LostError",
    "Message",
    "Transfer",
    "UnansweredError",
    "channels_of",
    "device_group",
    "first_different_message",
    "gloo_group",
    "messages_of",
    "transport_of",
]

_STAGES = 1 << 20
#: Largest number of thread blocks of an NCCL kernel. NCCL's own choice for a message is twice as
#: many. While the blocks wait for the other rank, no kernel of a stage can run in their place.
_MOST_BLOCKS = 8
#: Timeout of an abort in seconds; an abort never ends while a graph holds the communicator.
_ABORT_S = 10.0


class ChannelEnds(NamedTuple):
    """A channel: the global ranks of its sender and its receiver."""

    source: int
    to: int

    def __str__(self) -> str:
        return f"{self.source} to {self.to}"


class Message(NamedTuple):
    """
    The identity of a message, the same on both ranks.

    Args:
        stage: The stage that sends the message.
        microbatch: The microbatch that the output or gradient belongs to.
        gradient: Whether the message is the gradient of the stage's input; otherwise it is the
            stage's output.
    """

    stage: int
    microbatch: int
    gradient: bool

    @property
    def sent(self) -> str:
        """The table entry that sends the message, such as ``1SEND_F2``."""
        return f"{self.stage}{'SEND_B' if self.gradient else 'SEND_F'}{self.microbatch}"

    @property
    def received(self) -> str:
        """The table entry that receives the message, such as ``2RECV_F2``."""
        to = self.stage - 1 if self.gradient else self.stage + 1
        return f"{to}{'RECV_B' if self.gradient else 'RECV_F'}{self.microbatch}"

    @property
    def number(self) -> int:
        """A positive number that identifies the message; gloo uses it as the tag."""
        return 1 + 2 * (self.microbatch * _STAGES + self.stage) + self.gradient

    @classmethod
    def of(cls, number: int) -> Message:
        """Return the message that has the given number."""
        place, gradient = divmod(number - 1, 2)
        microbatch, stage = divmod(place, _STAGES)
        return cls(stage, microbatch, bool(gradient))


@attrs.define(eq=False)
class Transfer:
    """One posted send or receive. This object keeps the tensor alive until `wait` returns."""

    work: Any
    tensor: Tensor
    action: str
    peer: int


@attrs.define(eq=False)
class _Channel:
    """
    This rank's end of a channel: the process group, the messages posted in this step, and the
    digest of earlier messages.
    """

    ends: ChannelEnds
    group: Any
    posted: list[int] = attrs.field(factory=list)
    digest: int = 0

    def roll(self) -> int:
        """Return the digest of all messages, including those since the last commit."""
        return order_digest(self.posted, self.digest)


def channels_of(table: Schedule, ranks: Sequence[int]) -> list[ChannelEnds]:
    """
    Return the channels of a schedule table: every pair of sending and receiving rank that has
    messages, in the same order on all ranks.

    Args:
        table: The schedule table of all ranks, with messages.
        ranks: The global rank of each rank of the table, by its index in the table.
    """
    return sorted(messages_of(table, ranks))


def messages_of(table: Schedule, ranks: Sequence[int]) -> Counter[ChannelEnds]:
    """
    Return the number of messages in a step, by channel. The arguments are the same as for
    `channels_of`.
    """
    home = table.stage_to_rank
    found: Counter[ChannelEnds] = Counter()
    for atoms in table.atoms:
        for a in atoms:
            if a.kind in SENDS:
                to = a.stage + (1 if a.kind is Kind.SEND_F else -1)
                found[ChannelEnds(ranks[home[a.stage]], ranks[home[to]])] += 1
    return found


def first_different_message(
    sent: Iterable[int], received: Iterable[int]
) -> tuple[int, Message | None, Message | None] | None:
    """
    Find the first place (index from 0) at which sender and receiver recorded different messages.

    >>> place, sent, received = first_different_message([3, 5], [3, 7])
    >>> place, sent.sent, received.received
    (1, '2SEND_F0', '4RECV_F0')
    >>> first_different_message([3], [3]) is None
    True

    Returns:
        The place, the sent message and the received message; a missing message is None. If sender
        and receiver recorded the same messages, the result is None.
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
        rank: The global rank of this process.
        groups: The process group of each channel on which this rank sends or receives.
        host: True for gloo: the host waits for a transfer, and tags are used. False for NCCL: the
            current stream waits, and tags are ignored.
        deadline: Timeout of a host's wait, in seconds.
        tagged: Whether to use tags if the transport has tags. Without tags, sends and receives are
            paired by order alone, as with NCCL.

    Attributes:
        log: The rank log, which records posted and ended messages; None for no log.
        waits: Measures the time that the host waits.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[ChannelEnds, Any],
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
        self.log: RankLog | None = None
        self.waits = WaitClock()
        self._under_way: set[Transfer] = set()
        self._endings: list[Abort] = []

    @classmethod
    def open(
        cls,
        every: Sequence[ChannelEnds],
        *,
        device: torch.device,
        deadline: float = 30.0,
        tagged: bool = True,
    ) -> Channels:
        """
        Make a process group for each channel, and connect the channel's two ranks by sending a
        number.

        Every rank of the job calls this method, with the same channels. On a GPU, a channel's first
        transfer creates the communicator and blocks the host until both ranks take part. Therefore
        this method makes the first transfer of every channel, in the same order on all ranks. NCCL
        has no timeout for this wait, so a separate thread waits.

        Args:
            every: Every channel between ranks of the job, in the same order on all ranks.
            device: Device of the tensors; it decides the transport.
            deadline: Timeout of a host's wait, and of each connection, in seconds.
            tagged: Whether to use tags where the transport has tags.

        Raises:
            RuntimeError: The communication library could not create a process group.
            LostError: The rank at the other end of a channel is gone, or did not answer in time.
        """
        host, rank = device.type == "cpu", dist.get_rank()
        own: dict[ChannelEnds, Any] = {}
        for ends in every:
            if host:
                group = gloo_group([*ends], deadline)
            else:
                group = _nccl_group([*ends], deadline, pg_options=_small_kernels())
            if rank in ends:
                own[ends] = group
            del group
        made = cls(rank, own, host=host, deadline=deadline, tagged=tagged)
        made.meet(torch.zeros(1, device=device))
        return made

    def meet(self, token: Tensor) -> None:
        """
        Connect the two ranks of each channel of this rank, by sending one number.

        Args:
            token: The number, on the channels' device.

        Raises:
            LostError: The rank at the other end of a channel is gone, or did not answer in time.
        """
        seconds = self.deadline.total_seconds()
        for ends, channel in self._channels.items():
            sends = self.rank == ends.source
            peer = ends.to if sends else ends.source
            post = partial(_transfer, dist.isend if sends else dist.irecv, token, peer, channel)
            try:
                if self.host:
                    post()
                else:
                    within(
                        post,
                        seconds,
                        rank=self.rank,
                        peer=peer,
                        action="connect",
                        what=f"a connection {'to' if sends else 'from'} rank {peer}",
                    )
            except LostError:
                raise
            except RuntimeError as error:
                raise self._lost(Transfer(None, token, "connect", peer), error) from None
        if token.is_cuda:
            within(
                partial(torch.cuda.synchronize, token.device),
                seconds,
                rank=self.rank,
                action="connect",
                what="the first transfers of its connections",
            )

    # Transfers

    def send(self, tensor: Tensor, to: int, message: Message) -> Transfer:
        """
        Begin to send a tensor, which must not change before `wait` returns.

        Raises:
            LostError: The connection is broken.
        """
        channel = self._channels[ChannelEnds(self.rank, to)]
        transfer = Transfer(None, tensor.contiguous(), message.sent, to)
        self._post(dist.isend, transfer, channel, message.number)
        if self.log is not None:
            self.log.posted("post_send", to, message)
        return transfer

    def receive(self, into: Tensor, source: int, message: Message) -> Transfer:
        """
        Begin to receive a message into a static buffer.

        Raises:
            LostError: The connection is broken.
        """
        channel = self._channels[ChannelEnds(source, self.rank)]
        transfer = Transfer(None, into, message.received, source)
        self._post(dist.irecv, transfer, channel, message.number)
        if self.log is not None:
            self.log.posted("post_receive", source, message)
        return transfer

    def _post(self, begin: Any, transfer: Transfer, channel: _Channel, number: int) -> None:
        if channel.group is None:  # torch would take None for the group of all ranks
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
        error.__traceback__ = None  # its frames hold the transfer, and the transfer a connection
        return LostError(transfer.action, transfer.peer, "imed out" in library, library)

    def wait(self, transfer: Transfer) -> None:
        """
        Wait for a transfer's completion, on the host (gloo) or on the current stream (NCCL).

        Raises:
            LostError: The connection broke, or the deadline passed.
        """
        if self.host:
            try:
                with self.waits.waiting(transfer.action, transfer.peer):
                    transfer.work.wait(self.deadline)
            except RuntimeError as error:
                raise self._lost(transfer, error) from None
        else:
            transfer.work.wait()
        self._under_way.discard(transfer)
        if self.log is not None:
            sends = "SEND" in transfer.action
            if self.host:
                event = "sent" if sends else "received"
            else:  # the stream waits; the host does not know when the transfer ends
                event = "behind_send" if sends else "behind_receive"
            self.log(event, peer=transfer.peer, action=transfer.action)

    # What was posted

    def digests(self) -> dict[ChannelEnds, int]:
        """
        Return the digest of all messages that this rank posted, for each channel of this rank.
        """
        return {ends: channel.roll() for ends, channel in self._channels.items()}

    def posted(self) -> dict[ChannelEnds, tuple[int, ...]]:
        """The numbers of the messages posted since the last commit, by channel."""
        return {ends: tuple(channel.posted) for ends, channel in self._channels.items()}

    def orders(self, before: Mapping[ChannelEnds, tuple[int, ...]]) -> list[list[int]]:
        """
        Return the messages posted since an earlier call of `posted`, in the form of a rank log.

        Args:
            before: What `posted` returned.

        Returns:
            One list of three numbers for each rank with a channel to or from this rank: the other
            rank, the digest of the messages to this other rank, and the digest of the messages from
            it. The digests depend on the order of the messages.
        """
        found: dict[int, list[int]] = {}
        for ends, channel in self._channels.items():
            sends = ends.source == self.rank
            peer = ends.to if sends else ends.source
            digest = order_digest(channel.posted[len(before[ends]) :])
            found.setdefault(peer, [peer, 0, 0])[1 if sends else 2] = digest
        return [found[peer] for peer in sorted(found)]

    def commit(self) -> None:
        """
        Add the step's messages to the digests. Called once both ranks of each channel agree.
        """
        for channel in self._channels.values():
            channel.digest = channel.roll()
            channel.posted.clear()

    def close(self, *, abort: bool = True) -> None:
        """
        End every transfer and connection of this rank. Peers that wait on a connection stop waiting
        at once.

        Gloo has no call that closes a connection: a connection closes when the last reference to
        its group and its transfers is dropped. An NCCL communicator is aborted, which frees a
        stream that waits in the communicator.

        Args:
            abort: Whether transfers may still be in progress; False if all transfers have
                completed.
        """
        groups = self._forget()
        endings, self._endings = self._endings, []
        for ending in endings:
            ending.join()
        end_groups(groups, abort=abort and not self.host)

    def let_go(self) -> None:
        """
        Begin to abort every connection, but do not wait; `close` waits.

        A graph may contain kernels of several process groups. The graph can end only when all these
        groups are aborted.
        """
        if not self.host:
            groups = self._forget()
            while groups:
                self._endings.append(Abort(groups.pop()))

    def _forget(self) -> list[Any]:
        """Drop all transfers, because they keep connections open, and return the groups."""
        for transfer in list(self._under_way):
            transfer.work = None
        self._under_way.clear()
        groups = [c.group for c in self._channels.values() if c.group is not None]
        for channel in self._channels.values():
            channel.group = None
        return groups


def _transfer(begin: Any, token: Tensor, peer: int, channel: _Channel) -> None:
    """
    Post a transfer and wait for it; runs in its own thread, so the function sets the current
    device.
    """
    with torch.cuda.device(token.device) if token.is_cuda else nullcontext():
        work = begin(token, peer, group=channel.group)
        assert work is not None
        work.wait()


def _small_kernels() -> Any:
    """Return options for an NCCL group whose kernels use only a small part of the device."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MOST_BLOCKS
    return options


#: Seconds past the deadline after which a group whose store does not answer is given up.
_MARGIN_S = 5.0


def gloo_group(ranks: list[int], seconds: float) -> Any:
    """
    Make a gloo group of ranks on the CPU; every rank of the job calls this function.

    Args:
        ranks: The global ranks of the members of the group.
        seconds: Timeout in seconds for making the group, and for each of its collectives.

    Raises:
        UnansweredError: A rank did not connect in time, or the ranks' common store did not answer.
    """
    limit, own = datetime.timedelta(seconds=seconds), dist.get_rank()
    try:
        return bounded(
            lambda: dist.new_group(ranks, backend="gloo", timeout=limit), seconds + _MARGIN_S
        )
    except TimeoutError:
        raise UnansweredError(
            "connect", -1, True,
            f"rank {own}: the ranks' common store did not answer within {seconds:g} s",
        ) from None  # fmt: skip
    except RuntimeError as error:
        library = first_line(error)
        raise UnansweredError(
            "connect", -1, "timeout" in library or "imed out" in library,
            f"rank {own}: ranks {ranks} did not connect within {seconds:g} s ({library})",
        ) from None  # fmt: skip


def device_group(ranks: list[int], device: torch.device, seconds: float) -> Any:
    """
    Make a group of ranks for collectives; every rank of the job calls this function.

    On a GPU the group's first collective creates a communicator and blocks the host until all ranks
    of the group take part. Therefore this function runs a first collective, with a timeout.

    Args:
        ranks: The global ranks of the members of the group.
        device: Device of the tensors; it decides the transport.
        seconds: Timeout in seconds for making the group; under gloo also for each of its
            collectives.

    Raises:
        UnansweredError: A rank did not connect in time, or the ranks' common store did not answer.
    """
    if device.type == "cpu":
        return gloo_group(ranks, seconds)
    group, own = _nccl_group(ranks, seconds), dist.get_rank()
    if own in ranks:
        token = torch.zeros(1, device=device)

        def meet() -> None:
            with torch.cuda.device(device):
                dist.all_reduce(token, group=group)
                torch.cuda.synchronize(device)

        within(meet, seconds, rank=own, action="connect", what=f"a connection of ranks {ranks}")
    return group


def _nccl_group(ranks: list[int], seconds: float, **options: Any) -> Any:
    """Make an NCCL group; its first transfer creates the communicator."""
    return within(
        lambda: dist.new_group(ranks, backend="nccl", **options),
        seconds + _MARGIN_S,
        rank=dist.get_rank(),
        action="connect",
        what=f"the ranks' common store, to make a group of ranks {ranks}",
    )


def transport_of(device: torch.device) -> str:
    """Return the transport for tensors of a device: gloo for a CPU, otherwise NCCL."""
    return "gloo" if device.type == "cpu" else "nccl"


class Abort:
    """
    Aborts, in its own thread, an NCCL group that other ranks may have left.

    NCCL first stops the communicator's kernels, then waits until no graph contains one of these
    kernels (`commDestroySync`). A graph runs until the kernels of *all* its communicators have
    stopped. Therefore all groups must be aborted at the same time, and the graph must be dropped
    meanwhile.

    Args:
        group: The process group. The caller must keep no other reference to this group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A group that was never used has nothing to abort.
        with suppress(AttributeError, RuntimeError):
            self._group.abort()

    def join(self) -> None:
        """Wait for the abort and destroy the group, unless a graph still contains its kernels."""
        self._thread.join(_ABORT_S)
        group, self._group = self._group, None
        if group is not None and not self._thread.is_alive():
            dist.destroy_process_group(group)


def end_groups(groups: list[Any], *, abort: bool) -> None:
    """
    Destroy process groups. If other ranks may have left the groups, first abort all groups at the
    same time.

    Args:
        groups: The groups. This function empties the list, because a group ends with its last
            reference.
        abort: Whether other ranks may have left the groups.
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
    """Destroy one group, as `end_groups` does."""
    held = [group]
    del group
    end_groups(held, abort=abort)

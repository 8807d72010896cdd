"""
Consent of all ranks to a step: no rank updates its weights before all ranks agree to the update.

Consent is one small all-reduce of all ranks on the CPU, which waits for no device. Each rank
contributes its epoch (the number of the optimizer step). For each of its channels (messages to or
from one other rank), it also contributes the digest of the messages that it posted. If a rank
cannot continue, it first publishes the reason in the store, then closes its connections. The rank's
peers stop waiting at once and publish the error that they saw. A rank chooses the cause of the stop
as soon as it has the reports of all other ranks, or has waited for `grace` seconds. All ranks use
the cause of the first rank that chooses.

If a rank stops during the all-reduce, the all-reduce may succeed on some ranks and fail on others.
Then some ranks have updated their weights and others have not. The epochs in the ranks' reports
then differ, so all ranks must restart from a checkpoint.
"""

from __future__ import annotations

import datetime
import json
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.log.rank_log import RankLog
from qeffect.schedule.actions import Atom, Schedule

from ..step.clipping import Part
from .bounded import bounded
from .causes import (
    Cause,
    DisagreementError,
    StoppedError,
    TerminatedError,
    Verdicts,
    action_name,
    verdict_of,
)
from .channels import ChannelEnds, Channels, LostError, UnansweredError, end_group
from .replicas import Replicas
from .ties import Reducers
from .wait_clock import WaitClock

__all__ = [
    "Cause",
    "Consent",
    "DisagreementError",
    "StoppedError",
    "TerminatedError",
    "UnansweredError",
    "action_name",
    "wait_for",
]

_UNSAID = -1
_POLL_S = 1e-3
_MARGIN_S = 10.0
"""Seconds after the grace period until the rank stops waiting for a store that does not answer."""
_LEAST_S = 0.5
"""Smallest timeout in seconds for each part of a stop that must end at a given time."""
_ASIDE_S = 60.0
"""Seconds for which the main thread lets another thread report the cause and end the process."""
_DEVICE_POLL_S = 2e-5
_PATIENCE = 50
"""Number of queries of the device for each query of the store."""


def wait_for(done: Any, consent: Consent | None, *, deadline: float, grace: float) -> None:
    """
    Wait for this rank's device, but give up soon after another rank has stopped.

    Args:
        done: A device event that was recorded after the work.
        consent: The consent, which knows whether another rank has stopped. With None this is not
            checked.
        deadline: Timeout for the work, in seconds.
        grace: Time in seconds. After another rank has stopped, the wait continues for at most a
            quarter of this time, because the work may finish without the other rank.

    Raises:
        LostError: The work did not finish in time.
        UnansweredError: The work did not finish in time, and the store did not answer meanwhile.
    """
    until = time.monotonic() + deadline
    given_up = None
    looks = 0
    while not done.query():
        looks += 1
        if looks % _PATIENCE == 0 and consent is not None:
            try:
                stopped = bounded(consent.stopped, max(until - time.monotonic(), 0.0))
            except TimeoutError:
                if done.query():
                    return
                raise UnansweredError(
                    "commit", -1, True,
                    f"commit: rank {consent.rank} waited {deadline:g} s for its device; meanwhile "
                    "the ranks' common store did not answer",
                ) from None  # fmt: skip
            if stopped:
                given_up = given_up or time.monotonic() + grace / 4
                if time.monotonic() > given_up:
                    raise LostError("commit", -1, False, "another rank has stopped")
        if time.monotonic() > until:
            raise LostError("commit", -1, True, "device work did not finish before the deadline")
        time.sleep(_DEVICE_POLL_S)


@attrs.define(eq=False)
class Consent:
    """
    The agreement of all ranks to commit or to stop.

    Args:
        store: A key-value store that outlives every rank, such as the store of torchrun's agent.
            Its keys must belong to this attempt only.
        group: A gloo group of all ranks that is used only for consent; None if there is only one
            rank.
        rank: The global rank of this process.
        world: Number of ranks.
        every: Every channel (pair of sending and receiving rank) of the job, in the same order on
            all ranks.
        channels: The channels on which this rank sends or receives.
        table: The schedule table, with one row of actions and messages per rank.
        ranks: Global rank of each row of the table, in this replica.
        deadline: Timeout in seconds for all ranks to reach the commit.
        grace: How long to wait, in seconds, until the other ranks have published why they stopped.
        replicas: The reducer over replicas; a stop also closes its connections.
        log: The rank log, which records a stop; None for no log.
        release: Function that drops the captured graph of the step. It is called before the
            connections are closed, because the graph contains kernels of the connections and
            closing would wait for the graph.
        ending: Whether this rank has begun to stop.
        asks: This rank's request for what to do after the step, such as to end the run: a number of
            at least 0 (`training/ending.py`). The next `agree` sends it to all ranks.
        heard: The largest `asks` that any rank sent in the last agreement.
        waits: Measures the time that the host waits.
        until: The time at which a stop must have ended, in seconds of `time.monotonic`; None for no
            limit.
    """

    store: Any
    group: Any
    rank: int
    world: int
    every: Sequence[ChannelEnds]
    channels: Channels
    table: Schedule
    ranks: Sequence[int]
    deadline: float = 60.0
    grace: float = 2.0
    replicas: Reducers | Replicas | None = None
    log: RankLog | None = None
    release: Callable[[], None] | None = attrs.field(default=None, init=False)
    ending: bool = attrs.field(default=False, init=False)
    asks: int = attrs.field(default=0, init=False)
    heard: int = attrs.field(default=0, init=False)
    waits: WaitClock = attrs.field(factory=WaitClock, init=False)
    until: float | None = attrs.field(default=None, init=False)
    _choice: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _speaker: str = attrs.field(default="", init=False)

    def agree(
        self,
        epoch: int,
        parts: Mapping[Part, float] | None = None,
        places: Sequence[Part] = (),
    ) -> list[float]:
        """
        Consent to the update, and wait until all ranks have consented to the same step.

        If a rank stops during the exchange, this rank may return while another rank raises an
        error.

        Args:
            epoch: The number of the optimizer step that ends.
            parts: The sum of squared gradients of each part of the model (embedding, layer, rest of
                a stage) on this rank. Either all ranks pass these sums or no rank does. The
                all-reduce also exchanges these sums.
            places: Every part of the model, in the model's order; the same on all ranks.

        Returns:
            The sums of all parts in the model's order, with the same bits on every rank; empty
            without parts.

        Raises:
            LostError: A rank is gone or late.
            DisagreementError: The ranks' epochs differ, sender and receiver of a channel recorded
                different messages, or two replicas have different finite sums of squares for one
                part.
        """
        if self.world == 1:
            self.channels.commit()
            self.heard = self.asks
            return [] if parts is None else [parts[part] for part in sorted(parts)]
        if self.group is None:
            raise LostError("commit", -1, False, "the connections of this rank are closed")
        digests = self.channels.digests()
        said = [_UNSAID] * (self.world + 2 * len(self.every)) + [self.asks]
        said[self.rank] = epoch
        for place, ends in enumerate(self.every):
            if ends in digests:
                said[self.world + 2 * place + (self.rank != ends.source)] = digests[ends]
        count, replicas = len(places), self.world // len(self.ranks)
        words = len(said)
        if parts is not None:
            said += [_UNSAID] * (count * replicas)
            own = words + self.ranks[0] // len(self.ranks) * count
            for part, squares in parts.items():
                said[own + places.index(part)] = _bits_of(squares)
        heard = self._exchange(said)
        epochs = heard[: self.world]
        if len(set(epochs)) > 1:
            raise DisagreementError(_odd_epochs(epochs))
        for place, ends in enumerate(self.every):
            sent, received = heard[self.world + 2 * place : self.world + 2 * place + 2]
            if sent != received:
                raise DisagreementError(
                    f"sender and receiver of the channel from rank {ends} recorded different "
                    "messages"
                )
        told = [_of_bits(word) for word in heard[words:]]
        each = [told[r : r + count] for r in range(0, len(told), max(count, 1))]
        agreed = _one_of_replicas(each, places)
        self.channels.commit()
        self.heard = heard[words - 1]
        return agreed

    def all_gather(self, own: Tensor) -> Tensor:
        """
        Gather a tensor from every rank, over the connection that consent uses. The wait ends if a
        rank stops.

        Args:
            own: This rank's tensor, on the CPU, with the same shape and type on all ranks.

        Returns:
            The tensors of all ranks, stacked by rank in a new first dimension.

        Raises:
            LostError: A rank is gone or late.
        """
        if self.world == 1:
            return own[None]
        if self.group is None:
            raise LostError("commit", -1, False, "the connections of this rank are closed")
        found = [torch.empty_like(own) for _ in range(self.world)]
        self._ended(lambda: dist.all_gather(found, own, group=self.group, async_op=True))
        return torch.stack(found)

    def _exchange(self, said: list[int]) -> list[int]:
        vector = torch.tensor(said)
        self._ended(
            lambda: dist.all_reduce(vector, dist.ReduceOp.MAX, group=self.group, async_op=True)
        )
        heard: list[int] = vector.tolist()
        return heard

    def _ended(self, begin: Callable[[], Any]) -> None:
        """Begin a collective on the group, and wait until it ends."""
        work = None
        try:
            with self.waits.waiting("commit"):
                work = begin()
                work.wait(datetime.timedelta(seconds=self.deadline))
        except RuntimeError as error:
            library = str(error)
            error.__traceback__ = None  # its frames hold the group, and the group its connections
            work = None
            raise LostError("commit", -1, "imed out" in library, library) from None

    # Stopping

    def stop(
        self,
        error: BaseException,
        epoch: int,
        atom: Atom | None,
        passed: int,
        *,
        at: str = "commit",
    ) -> StoppedError:
        """
        Publish why this rank cannot continue, end the waits of its peers, and agree on one cause
        with all ranks.

        Args:
            error: The error for which this rank stops.
            epoch: The epoch (optimizer step) in which the error occurred.
            atom: This rank's action or message that raised the error; None if no action or message
                did.
            passed: How many actions and messages of its row in the schedule table this rank has
                completed.
            at: What the rank was doing, if `atom` is None.
        """
        if isinstance(error, StoppedError):
            return error
        if not self.claim("main"):
            time.sleep(_ASIDE_S)  # another thread tells the cause, and ends this process
        log = None if self.ending else self.log  # a rank stops once
        self.ending = True
        verdict = self._verdict(verdict_of(error, epoch, atom, passed, self.channels.posted(), at))
        if log is not None:
            peer = getattr(error, "peer", -1)
            log("stop", kind=verdict["kind"], peer=peer, in_row=atom is not None)
        said_so = False
        with suppress(RuntimeError, TimeoutError):  # the store may have died with a rank
            bounded(lambda: self._say(verdict), self._at_most(self.grace))
            said_so = True
            if log is not None:
                log("say")
        if self.until is None:
            self.close()
        else:  # gloo ends a group only once its waits have ended
            with suppress(TimeoutError):
                bounded(self.close, self._at_most(self.grace))
        if log is not None and said_so:
            log("close")
        grace = self._at_most(self.grace)
        most = self._at_most(self.grace + _MARGIN_S)
        cause, agreed = self._cause(verdict, epoch, grace, most)
        if log is not None and agreed:
            log("end", cause=cause.rank, kind=cause.kind)
        return StoppedError(cause)

    def claim(self, speaker: str) -> bool:
        """
        Return whether the calling thread must report why this process stops. Only the first thread
        that calls this method gets True.

        Args:
            speaker: ``main``, the thread that trains, or ``aside``, another thread.
        """
        with self._choice:
            self._speaker = self._speaker or speaker
            return self._speaker == speaker

    @property
    def claimed(self) -> bool:
        """Whether a thread of this rank has taken over the report of why this rank stops."""
        return bool(self._speaker)

    def publish(self, error: BaseException, epoch: int, at: str, *, seconds: float) -> None:
        """
        Publish why this rank cannot continue, while its main thread waits in a library.

        This method closes no connection. If the store does not answer in time, the method returns
        without an error.

        Args:
            error: The error for which this rank stops.
            epoch: The epoch (optimizer step) in which the error occurred.
            at: What the rank was doing.
            seconds: Timeout in seconds.
        """
        verdict = self._verdict(verdict_of(error, epoch, None, 0, self.channels.posted(), at))
        with suppress(RuntimeError, TimeoutError):
            bounded(lambda: self._say(verdict), seconds)

    def cause_aside(self, error: BaseException, epoch: int, at: str, *, seconds: float) -> Cause:
        """
        Choose the cause of all ranks while this rank's main thread waits in a library.

        Args:
            error: The error that this rank published.
            epoch: The epoch (optimizer step) in which the error occurred.
            at: What the rank was doing.
            seconds: Timeout in seconds.
        """
        verdict = verdict_of(error, epoch, None, 0, self.channels.posted(), at)
        return self._cause(verdict, epoch, min(self.grace, seconds / 2), seconds)[0]

    def _at_most(self, seconds: float) -> float:
        """Return `seconds`, or the time left if a stop must have ended earlier."""
        if self.until is None:
            return seconds
        return min(seconds, max(self.until - time.monotonic(), _LEAST_S))

    def _verdict(self, verdict: dict[str, Any]) -> dict[str, Any]:
        verdict["row"] = self.ranks.index(self.rank) if self.rank in self.ranks else None
        return verdict

    def _say(self, verdict: Mapping[str, Any]) -> None:
        self.store.set(f"verdict/{self.rank}", json.dumps(verdict))

    def _cause(
        self, verdict: Mapping[str, Any], epoch: int, grace: float, seconds: float
    ) -> tuple[Cause, bool]:
        """
        Return the common cause and True; if the store does not answer, this rank's own cause and
        False.
        """
        try:
            return bounded(lambda: self._decide(epoch, grace), seconds), True
        except (RuntimeError, TimeoutError) as broken:
            text = f"rank {self.rank}, step {epoch}, {verdict['action']}: {verdict['text']}"
            lost = " ".join(str(broken).split())[:80]
            gone = f"{text}; the ranks' common store is gone ({lost})"
            return Cause("lost", self.rank, None, verdict["action"], None, gone, False), False

    def _decide(self, epoch: int, grace: float) -> Cause:
        """Choose a cause; all ranks read the cause of the first rank that chose."""
        verdicts = Verdicts(self._collect(grace), self.world, self.every, self.table)
        mine = json.dumps(attrs.asdict(verdicts.cause(epoch)))
        return Cause(**json.loads(self.store.compare_set("cause", "", mine)))

    def stopped(self) -> bool:
        """Whether any rank has published why it cannot continue."""
        return any(self.store.check([f"verdict/{rank}"]) for rank in range(self.world))

    def close(self) -> None:
        """Close every connection of this rank. Peers that wait on a connection stop waiting."""
        # All at once: dropping a graph may wait for its end, and it ends only once every group
        # whose kernels it holds is aborted.
        self.channels.let_go()
        if self.replicas is not None:
            self.replicas.let_go()
        release, self.release = self.release, None
        if release is not None:
            release()
        self.channels.close()
        if self.replicas is not None:
            self.replicas.close()
        if self.group is not None:
            group, self.group = self.group, None
            end_group(group, abort=False)

    def _collect(self, grace: float) -> dict[int, dict[str, Any]]:
        """Collect the verdicts that ranks publish within `grace` seconds."""
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + grace
        while True:
            for rank in set(range(self.world)) - found.keys():
                if self.store.check([f"verdict/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"verdict/{rank}"))
            if len(found) == self.world or time.monotonic() > until:
                return found
            time.sleep(_POLL_S)


def _bits_of(part: float) -> int:
    """Return the bits of a sum of squares as a non-negative integer, even for a NaN."""
    held = math.nan if math.isnan(part) else abs(part)
    return int.from_bytes(struct.pack(">d", held), "big")


def _of_bits(word: int) -> float:
    found: float = struct.unpack(">d", word.to_bytes(8, "big", signed=True))[0]
    return found


def _one_of_replicas(told: Sequence[Sequence[float]], places: Sequence[Part]) -> list[float]:
    """
    Return the sum of squares that all replicas have in common, for each part of the model
    (embedding, layer, rest of a stage). If a replica's sum is not finite, return that sum.

    Raises:
        DisagreementError: Two replicas have different finite sums: their reduced gradients differ.
    """
    if not told:
        return []
    agreed = list(told[0])
    for replica, parts in enumerate(told):
        for n, part in enumerate(parts):
            if not math.isfinite(part):
                agreed[n] = part
            elif math.isfinite(agreed[n]) and part != agreed[n]:
                raise DisagreementError(
                    f"the reduced gradients of stage {places[n][0]} differ between replicas: the "
                    f"sum of squares is {agreed[n]!r} in replica 0 and {part!r} in replica "
                    f"{replica}"
                )
    return agreed


def _odd_epochs(epochs: Sequence[int]) -> str:
    """Say which ranks have a different epoch than most ranks."""
    most = max(Counter(epochs).items(), key=lambda item: (item[1], item[0]))[0]
    odd = ", ".join(f"rank {r} is at epoch {e}" for r, e in enumerate(epochs) if e != most)
    return f"{odd}; the others are at epoch {most}"

"""
Consent of all ranks to a step: all update their weights, or all stop with the same cause.

Consent is one small all-reduce on the CPU over a group of all ranks; it waits for no device. Each
rank contributes its epoch and the digest of its end of each channel. Weights are updated only if
all ranks agree. A rank that cannot continue first publishes the reason in the store, then closes
its connections. Its peers wake up at once and publish what they saw. The first rank that has heard
all the others, or has waited for its grace, writes the one cause that all ranks read.
"""

from __future__ import annotations

import datetime
import json
import math
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.refusals import Refused
from qeffect.schedule.actions import SENDS, Atom, Schedule

from .channels import (
    Channels,
    Ends,
    LostError,
    Message,
    end_group,
    first_difference,
)
from .replicas import Replicas
from .ties import Reducers

__all__ = ["Cause", "Consent", "DisagreementError", "StoppedError", "TerminatedError", "wait_for"]

_UNSAID = -1
_POLL_S = 1e-3
_DEVICE_POLL_S = 2e-5
_PATIENCE = 50
"""Queries of the device per query of the store."""


class DisagreementError(RuntimeError):
    """All ranks came to the commit, with different epochs, messages or gradients."""


class TerminatedError(RuntimeError):
    """The launcher ends this rank, as it does when another rank has died."""

    unrecoverable = True


@attrs.frozen
class Cause:
    """
    Why a step ended on every rank.

    Args:
        kind: `refused` (by the contract), `raised`, `dropped` (a message was skipped), `disagreed`
            (epochs, messages or gradients differ), `gone` (a process ended), `late` (a rank missed
            the deadline), `ended` (by the launcher) or `lost` (a connection broke).
        rank: The rank where the cause began.
        stage: The action's stage, or None.
        action: The action in the table's notation, or `commit`.
        clause: The clause that refused the action, or None.
        text: The whole cause in one line.
        recoverable: Whether every rank is still there to rebuild the epoch from the last commit.
    """

    kind: str
    rank: int
    stage: int | None
    action: str | None
    clause: str | None
    text: str
    recoverable: bool


class StoppedError(RuntimeError):
    """The step stopped on every rank for one cause; no rank has updated its weights."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


def wait_for(done: Any, consent: Consent | None, *, deadline: float, grace: float) -> None:
    """
    Wait for this rank's device, but give up soon after another rank has stopped.

    Args:
        done: An event after the work.
        consent: Reports whether another rank has stopped; None does not ask.
        deadline: Timeout of the work, in seconds.
        grace: Once another rank has stopped, the work gets a quarter of this, in seconds: it may
            already have all that it needs to finish.

    Raises:
        LostError: The work did not finish in time.
    """
    until = time.monotonic() + deadline
    given_up = None
    looks = 0
    while not done.query():
        looks += 1
        if looks % _PATIENCE == 0 and consent is not None and consent.stopped():
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
        store: A store that outlives every rank, with a prefix for this attempt only; torchrun's
            agent keeps one.
        group: A gloo group of all ranks, used for consent only; None with one rank.
        rank: The global rank.
        world: Number of ranks.
        every: Every channel of the world, in the same order on all ranks.
        channels: The channels that end on this rank.
        table: The table that the ranks walk.
        ranks: Global rank of each of the table's ranks, in this replica.
        deadline: Timeout in seconds for all ranks to reach the commit.
        grace: Timeout in seconds for the other ranks to publish why they stopped.
        replicas: The reducer, which also holds connections.
        release: Drops a graph that holds kernels of the connections; without this, ending the
            connections would wait for the graph.
        ending: Whether this rank has begun to stop.
    """

    store: Any
    group: Any
    rank: int
    world: int
    every: Sequence[Ends]
    channels: Channels
    table: Schedule
    ranks: Sequence[int]
    deadline: float = 60.0
    grace: float = 2.0
    replicas: Reducers | Replicas | None = None
    release: Callable[[], None] | None = attrs.field(default=None, init=False)
    ending: bool = attrs.field(default=False, init=False)

    def agree(self, epoch: int, parts: Mapping[int, float] | None = None) -> list[float]:
        """
        Consent to the update, and wait until all ranks have consented to the same step.

        Args:
            epoch: The epoch that ends.
            parts: Sum of squared gradients of each stage of this rank; either all ranks give parts
                or none does. They travel in the same all-reduce.

        Returns:
            The parts of all stages in the model's order, the same bits on every rank; empty without
            parts.

        Raises:
            LostError: A rank is gone or late.
            DisagreementError: Epochs differ, the two ends of a channel differ, or two replicas
                have different finite parts of one stage.
        """
        if self.world == 1:
            self.channels.commit()
            return [] if parts is None else [parts[stage] for stage in sorted(parts)]
        if self.group is None:
            raise LostError("commit", -1, False, "the connections of this rank are closed")
        digests = self.channels.digests()
        said = [_UNSAID] * (self.world + 2 * len(self.every))
        said[self.rank] = epoch
        for place, ends in enumerate(self.every):
            if ends in digests:
                said[self.world + 2 * place + (self.rank != ends.source)] = digests[ends]
        stages, replicas = self.table.num_stages, self.world // len(self.ranks)
        words = len(said)
        if parts is not None:
            said += [_UNSAID] * (stages * replicas)
            for stage, part in parts.items():
                said[words + self.ranks[0] // len(self.ranks) * stages + stage] = _bits_of(part)
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
        agreed = _one_of_replicas([told[r : r + stages] for r in range(0, len(told), stages)])
        self.channels.commit()
        return agreed

    def gathered(self, own: Tensor) -> Tensor:
        """
        Gather a tensor from every rank over consent's connection: a rank that stops ends the wait.

        Args:
            own: This rank's tensor, on the CPU, with the same shape and type on all ranks.

        Returns:
            The tensors of all ranks, stacked in a new first dimension by rank.

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
        """Begin a collective, and wait for its end."""
        work = None
        try:
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
        Publish why this rank cannot continue, wake its peers, and agree on one cause.

        Args:
            error: The reason.
            epoch: The epoch of the error.
            atom: The action of the error; None outside the row.
            passed: Steps of its row that this rank has completed.
            at: Name of the place of the error if `atom` is None.
        """
        if isinstance(error, StoppedError):
            return error
        self.ending = True
        verdict = _verdict(error, epoch, atom, passed, self.channels.posted(), at)
        verdict["row"] = self.ranks.index(self.rank) if self.rank in self.ranks else None
        with suppress(RuntimeError):  # the store may have died with a rank
            self.store.set(f"verdict/{self.rank}", json.dumps(verdict))
        self.close()
        try:
            mine = self._root(self._collect(), epoch)
            # The first to decide writes the cause, everybody reads it.
            agreed = self.store.compare_set("cause", "", json.dumps(attrs.asdict(mine)))
            return StoppedError(Cause(**json.loads(agreed)))
        except RuntimeError as broken:
            text = f"rank {self.rank}, step {epoch}, {verdict['action']}: {verdict['text']}"
            lost = " ".join(str(broken).split())[:80]
            return StoppedError(
                Cause("lost", self.rank, None, verdict["action"], None,
                      f"{text}; the ranks' common store is gone ({lost})", False)
            )  # fmt: skip

    def stopped(self) -> bool:
        """Whether any rank has published why it cannot continue."""
        return any(self.store.check([f"verdict/{rank}"]) for rank in range(self.world))

    def close(self) -> None:
        """Close every connection; peers that wait on one wake up."""
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

    def _collect(self) -> dict[int, dict[str, Any]]:
        """Collect the verdicts that ranks publish within the grace."""
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self.grace
        while True:
            for rank in set(range(self.world)) - found.keys():
                if self.store.check([f"verdict/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"verdict/{rank}"))
            if len(found) == self.world or time.monotonic() > until:
                return found
            time.sleep(_POLL_S)

    def _root(self, said: Mapping[int, dict[str, Any]], epoch: int) -> Cause:
        """
        Choose the one cause, by precedence: a refusal or an error, then a skipped message, then a
        disagreement, then a rank that is gone or late.
        """
        alive = len(said) == self.world and len({v["epoch"] for v in said.values()}) == 1
        alive = alive and all(v["recoverable"] for v in said.values())
        for rank, v in sorted(said.items()):
            if v["kind"] in ("refused", "raised"):
                return _cause(v["kind"], rank, v, v["text"], alive)
        for rank, v in sorted(said.items()):
            if (skipped := self._skipped(v)) is not None:
                text = "the rank passed this action without sending the message"
                return _cause("dropped", rank, {**v, **skipped}, text, alive)
        unlike = [r for r, v in sorted(said.items()) if v["kind"] == "disagreed"]
        if (found := self._different(said, whole=bool(unlike))) is not None:
            return found
        if unlike:
            v = said[unlike[0]]
            return _cause("disagreed", unlike[0], v, v["text"], alive)
        for rank in sorted(set(range(self.world)) - said.keys()):
            seen = sorted(
                (v for v in said.values() if v["peer"] == rank), key=self._place_of_awaited
            )
            late = all(v["kind"] == "late" for v in (seen or said.values()))
            awaited = self._awaited_of(seen[0]) if seen else {"stage": None, "action": None}
            text = ("the process did not reach it in time" if late else "the process has ended") + (
                f" (rank {_first(said, seen[0])} waits at {seen[0]['awaits']})" if seen else ""
            )
            known = {"epoch": epoch, "clause": None, **awaited}
            return _cause("late" if late else "gone", rank, known, text, False)
        order = ("late", "ended", "lost")
        rank, v = min(said.items(), key=lambda item: (order.index(item[1]["kind"]), item[0]))
        return _cause(v["kind"], rank, v, v["text"], alive)

    def _skipped(self, v: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first send that a rank has passed but not posted."""
        if v["row"] is None:
            return None
        posted = {number for numbers in v["posted"].values() for number in numbers}
        for atom in self.table.atoms[v["row"]][: v["passed"]]:
            if atom.kind in SENDS:
                message = Message(atom.stage, atom.microbatch, "B" in atom.kind.value)
                if message.number not in posted:
                    return {"stage": atom.stage, "action": message.sent, "clause": None}
        return None

    def _different(self, said: Mapping[int, dict[str, Any]], *, whole: bool) -> Cause | None:
        """
        Return the first difference between the ends of a channel as a cause, or None.

        Args:
            said: The verdicts of the ranks.
            whole: Whether both ends reached the end of their row; if not, one end may have more
                messages than the other.
        """
        for ends in self.every:
            if ends.source not in said or ends.to not in said:
                continue
            name = f"{ends.source}>{ends.to}"
            a, b = (said[r]["posted"].get(name, ()) for r in ends)
            if (found := first_difference(a, b)) is None:
                continue
            place, sent, received = found
            if not whole and (sent is None or received is None):
                continue  # one end stopped earlier
            v = said[ends.source]
            where = {
                "epoch": v["epoch"], "clause": None,
                "stage": (sent or received or Message(0, 0, False)).stage,
                "action": sent.sent if sent else received.sent if received else None,
            }  # fmt: skip
            text = (
                f"message {place} of the channel from rank {ends.source} to rank {ends.to}: the "
                f"sender posted {sent.sent if sent else 'nothing'}, the receiver posted "
                f"{received.received if received else 'nothing'}"
            )
            recoverable = len(said) == self.world and all(x["recoverable"] for x in said.values())
            return _cause("disagreed", ends.source, where, text, recoverable)
        return None

    def _place_of_awaited(self, v: Mapping[str, Any]) -> int:
        """Place, in the peer's row, of the action that a rank waited for."""
        owed = self._awaited_of(v)["action"]
        for atoms in self.table.atoms:
            for place, atom in enumerate(atoms):
                if name_of(atom) == owed:
                    return place
        return sys.maxsize

    def _awaited_of(self, v: Mapping[str, Any]) -> dict[str, Any]:
        """The peer's action at the other end of the transfer that a rank waited for."""
        for atoms in self.table.atoms:
            for atom in atoms:
                if atom.kind in SENDS:
                    message = Message(atom.stage, atom.microbatch, "B" in atom.kind.value)
                    if message.received == v["awaits"]:
                        return {"stage": atom.stage, "action": message.sent}
                    if message.sent == v["awaits"]:
                        to = message.stage + (-1 if message.gradient else 1)
                        return {"stage": to, "action": message.received}
        return {"stage": None, "action": v["awaits"]}


def _bits_of(part: float) -> int:
    """Return the bits of a sum of squares as a non-negative integer, for any NaN too."""
    held = math.nan if math.isnan(part) else abs(part)
    return int.from_bytes(struct.pack(">d", held), "big")


def _of_bits(word: int) -> float:
    found: float = struct.unpack(">d", word.to_bytes(8, "big", signed=True))[0]
    return found


def _one_of_replicas(told: Sequence[Sequence[float]]) -> list[float]:
    """
    Return the common part of each stage; a part that is not finite in any replica wins.

    Raises:
        DisagreementError: Two replicas have different finite parts: their reduced gradients differ.
    """
    if not told:
        return []
    agreed = list(told[0])
    for replica, parts in enumerate(told):
        for stage, part in enumerate(parts):
            if not math.isfinite(part):
                agreed[stage] = part
            elif math.isfinite(agreed[stage]) and part != agreed[stage]:
                raise DisagreementError(
                    f"the reduced gradients of stage {stage} differ between replicas: the sum of "
                    f"squares is {agreed[stage]!r} in replica 0 and {part!r} in replica {replica}"
                )
    return agreed


def _first(said: Mapping[int, dict[str, Any]], v: Mapping[str, Any]) -> int:
    return next(rank for rank, other in sorted(said.items()) if other is v)


def _odd_epochs(epochs: Sequence[int]) -> str:
    """Name the ranks whose epoch differs from the most common epoch."""
    most = max(Counter(epochs).items(), key=lambda item: (item[1], item[0]))[0]
    odd = ", ".join(f"rank {r} is at epoch {e}" for r, e in enumerate(epochs) if e != most)
    return f"{odd}; the others are at epoch {most}"


def _verdict(
    error: BaseException,
    epoch: int,
    atom: Atom | None,
    passed: int,
    posted: Mapping[Ends, Sequence[int]],
    at: str,
) -> dict[str, Any]:
    """Describe why a rank stopped, as plain data for the store."""
    kind = "refused" if isinstance(error, Refused) else "raised"
    if isinstance(error, LostError):
        kind = "late" if error.late else "lost"
    elif isinstance(error, DisagreementError):
        kind = "disagreed"
    elif isinstance(error, TerminatedError):
        kind = "ended"
    text = " ".join(str(error).split())
    return {
        "kind": kind,
        "epoch": epoch,
        "stage": None if atom is None else atom.stage,
        "action": at if atom is None else name_of(atom),
        "clause": getattr(error, "clause", None),
        "text": f"{type(error).__name__}: {text}" if kind == "raised" else text,
        "peer": getattr(error, "peer", None),
        "awaits": getattr(error, "action", None),
        "passed": passed,
        "posted": {f"{e.source}>{e.to}": list(numbers) for e, numbers in posted.items()},
        "recoverable": not getattr(error, "unrecoverable", False),
    }


def name_of(atom: Atom) -> str:
    """Return an indivisible step in a table's notation, such as ``1W2``."""
    return f"{atom.stage}{atom.kind.value}{atom.microbatch if atom.microbatch >= 0 else ''}"


def _cause(kind: str, rank: int, where: Mapping[str, Any], what: str, recoverable: bool) -> Cause:
    at = where["action"] or "an unknown action"
    text = f"rank {rank}, step {where['epoch']}, {at}: {what}"
    stage, action, clause = where["stage"], where["action"], where["clause"]
    return Cause(kind, rank, stage, action, clause, text, recoverable)

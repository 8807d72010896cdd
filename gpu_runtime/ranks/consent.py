"""
All ranks go on or none does, and where none does all say why in the same words.

Consent is one small all-reduce over a group of all ranks on the CPU, which waits for no device.
Each rank says its epoch and the digest of each end of its channels; the update runs on no rank
unless all agree. A rank that cannot go on publishes why in the store first, and only then closes
its connections: its peers wake up at once, publish what they saw, and all read one cause, which the
first of them to have heard everybody writes.
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
"""Looks at the device between two looks at the store."""


class DisagreementError(RuntimeError):
    """Every rank said yes, to different things."""


class TerminatedError(RuntimeError):
    """The launcher ends this rank, as it does when another one has died."""

    unrecoverable = True


@attrs.frozen
class Cause:
    """
    Why a step ended on every rank.

    Args:
        kind: `refused` by the contract, `raised`, `dropped` (a message was skipped), `disagreed`
            (epochs or messages), `gone` (a process ended), `late` (one did not come in time),
            `ended` (by the launcher) or `lost` (a connection broke).
        rank: The rank where it began.
        stage: The stage whose action it was, or None.
        action: The action, as it stands in the table, or `commit`.
        clause: The clause that refused it, or None.
        text: All of it in one line.
        recoverable: Whether every rank is there to rebuild the epoch from the last commit.
    """

    kind: str
    rank: int
    stage: int | None
    action: str | None
    clause: str | None
    text: str
    recoverable: bool


class StoppedError(RuntimeError):
    """The step ended on every rank, for one cause; no rank has updated its weights."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


def wait_for(done: Any, consent: Consent | None, *, deadline: float, grace: float) -> None:
    """
    Wait for work of this rank's device, but not for what another rank has given up.

    Args:
        done: An event behind the work.
        consent: Hears whether another rank has stopped; None where there is none.
        deadline: Seconds within which the work has to end.
        grace: Of these a quarter is left to the work once a rank has stopped: it may have all that
            it needs to end by itself.

    Raises:
        LostError: It did not end.
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
            raise LostError("commit", -1, True, "what the device was given did not end")
        time.sleep(_DEVICE_POLL_S)


@attrs.define(eq=False)
class Consent:
    """
    The verdict of all ranks.

    Args:
        store: A store that outlives every rank, under a name of this attempt alone; torchrun's
            agent keeps one.
        group: A gloo group of all ranks, for consent alone; None where there is one rank.
        rank: The global rank.
        world: Number of ranks.
        every: Every channel of the world, in one order for all ranks.
        channels: Those that end here.
        table: The table that is walked.
        ranks: Global rank of each of the table's ranks, in this replica.
        deadline: Seconds within which all ranks must have come to the commit.
        grace: Seconds within which the others must have said why they stopped.
        replicas: What else holds connections.
        release: Drops what connections wait for when they end: a graph that holds their kernels.
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
        Say yes to the update, and wait until all have, to the same.

        Args:
            epoch: The epoch that ends.
            parts: What each stage of this rank adds to the sum of all gradients' squares, where
                every rank says that; it travels in the same all-reduce.

        Returns:
            The parts of all stages in the model's order, the same bits on every rank; nothing where
            none were given.

        Raises:
            LostError: Somebody is gone or late.
            DisagreementError: Epochs differ, or the two ends of a channel, or what two replicas
                have for the gradients of one stage, where both are finite.
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
                raise DisagreementError(f"the two ends of the channel from rank {ends} differ")
        told = [_of_bits(word) for word in heard[words:]]
        agreed = _one_of_replicas([told[r : r + stages] for r in range(0, len(told), stages)])
        self.channels.commit()
        return agreed

    def gathered(self, own: Tensor) -> Tensor:
        """
        What every rank brings, on the connection of consent: a rank that stops ends the wait.

        Args:
            own: On the CPU, of one form on all ranks.

        Returns:
            Those of all ranks, by rank.

        Raises:
            LostError: Somebody is gone or late.
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
        """Begin what all ranks do together, and wait for it."""
        work = None
        try:
            work = begin()
            work.wait(datetime.timedelta(seconds=self.deadline))
        except RuntimeError as error:
            library = str(error)
            error.__traceback__ = None  # its frames hold the group, and that its connections
            work = None
            raise LostError("commit", -1, "imed out" in library, library) from None

    # Where there is none

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
        Publish why this rank cannot go on, wake its peers, and agree on one cause.

        Args:
            error: Why.
            epoch: The epoch that it happened in.
            atom: The action that it happened at; None at the commit.
            passed: How many steps of its row this rank has behind it.
            at: What it was at, where that is no action.
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
                      f"{text}; the store that the ranks meet in is gone ({lost})", False)
            )  # fmt: skip

    def stopped(self) -> bool:
        """Whether a rank has said why it cannot go on."""
        return any(self.store.check([f"verdict/{rank}"]) for rank in range(self.world))

    def close(self) -> None:
        """Close every connection; peers that wait on one wake up."""
        # All at once: to drop a graph may wait for its end, and it ends when every group whose
        # kernels it holds has been let go.
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
        """What every rank says, as far as it says it within the grace."""
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
        The one cause: a refusal or an error before a message that was skipped, that before ranks
        that disagree, that before a rank that is gone or late.
        """
        alive = len(said) == self.world and len({v["epoch"] for v in said.values()}) == 1
        alive = alive and all(v["recoverable"] for v in said.values())
        for rank, v in sorted(said.items()):
            if v["kind"] in ("refused", "raised"):
                return _cause(v["kind"], rank, v, v["text"], alive)
        for rank, v in sorted(said.items()):
            if (skipped := self._skipped(v)) is not None:
                text = "was passed and never sent"
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
            text = (
                "the process did not come to it in time" if late else "the process has ended"
            ) + (f" (rank {_first(said, seen[0])} waits at {seen[0]['awaits']})" if seen else "")
            known = {"epoch": epoch, "clause": None, **awaited}
            return _cause("late" if late else "gone", rank, known, text, False)
        order = ("late", "ended", "lost")
        rank, v = min(said.items(), key=lambda item: (order.index(item[1]["kind"]), item[0]))
        return _cause(v["kind"], rank, v, v["text"], alive)

    def _skipped(self, v: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first send that a rank has behind it and has not posted."""
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
        What the ends of a channel differ in, where they do.

        Args:
            said: What the ranks say.
            whole: Whether both ends came to the end of their row, so that one may not hold more.
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
                f"message {place} of the channel from rank {ends.source} to rank {ends.to} is "
                f"{sent.sent if sent else 'nothing'} where it leaves and "
                f"{received.received if received else 'nothing'} where it arrives"
            )
            recoverable = len(said) == self.world and all(x["recoverable"] for x in said.values())
            return _cause("disagreed", ends.source, where, text, recoverable)
        return None

    def _place_of_awaited(self, v: Mapping[str, Any]) -> int:
        """Where what a rank waited for stands in the row of the peer that owed it."""
        owed = self._awaited_of(v)["action"]
        for atoms in self.table.atoms:
            for place, atom in enumerate(atoms):
                if name_of(atom) == owed:
                    return place
        return sys.maxsize

    def _awaited_of(self, v: Mapping[str, Any]) -> dict[str, Any]:
        """The other end of the transfer that a rank waited for, which the peer owed."""
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
    """A sum of squares as a word that is not negative, whatever NaN it is."""
    held = math.nan if math.isnan(part) else abs(part)
    return int.from_bytes(struct.pack(">d", held), "big")


def _of_bits(word: int) -> float:
    found: float = struct.unpack(">d", word.to_bytes(8, "big", signed=True))[0]
    return found


def _one_of_replicas(told: Sequence[Sequence[float]]) -> list[float]:
    """
    What all replicas say of each stage; what one alone has that is not finite is said by all.

    Raises:
        DisagreementError: Two have different finite sums: what was reduced is not the same.
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
                    f"the reduced gradients of stage {stage} have squares that add up to {part!r} "
                    f"in replica {replica}, and to {agreed[stage]!r} in the others"
                )
    return agreed


def _first(said: Mapping[int, dict[str, Any]], v: Mapping[str, Any]) -> int:
    return next(rank for rank, other in sorted(said.items()) if other is v)


def _odd_epochs(epochs: Sequence[int]) -> str:
    """Which ranks are at another epoch than most."""
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
    """What a rank says of its own end, as plain data."""
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
    """An indivisible step as it stands in a table."""
    return f"{atom.stage}{atom.kind.value}{atom.microbatch if atom.microbatch >= 0 else ''}"


def _cause(kind: str, rank: int, where: Mapping[str, Any], what: str, recoverable: bool) -> Cause:
    at = where["action"] or "an action that nobody saw"
    text = f"rank {rank}, step {where['epoch']}, {at}: {what}"
    stage, action, clause = where["stage"], where["action"], where["clause"]
    return Cause(kind, rank, stage, action, clause, text, recoverable)

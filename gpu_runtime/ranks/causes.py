"""The common cause of a stop on all ranks, chosen from the reasons that the ranks published."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from qeffect.refusals import Refused
from qeffect.schedule.actions import SENDS, Atom, Schedule
from qeffect.text import counted

from .channels import ChannelEnds, LostError, Message, first_different_message

__all__ = [
    "WEIGHT",
    "Cause",
    "Difference",
    "DisagreementError",
    "MismatchError",
    "StoppedError",
    "TerminatedError",
    "Verdicts",
    "action_name",
    "verdict_of",
]


WEIGHT = "weight "
"""Prefix of the name of a weight that changed while a step ran twice."""
_LOSSES = ("late", "ended", "lost")
"""
Kinds of verdicts (published reasons) of ranks that stopped only because of other processes. If the
ranks have several of these kinds, the cause has the kind that is listed first.
"""


class DisagreementError(RuntimeError):
    """All ranks reached the commit, but their step numbers, messages or gradients differ."""


@attrs.frozen
class Difference:
    """
    A gradient, a stage's numerical state, or a weight that differs between two runs of one step.

    Args:
        rank: The rank that computed the gradient, state or weight.
        stage: The stage of the gradient, state or weight.
        name: The gradient's name within the stage. For a weight: the prefix `WEIGHT`, then the
            weight's name. For numerical state (such as FP8 scales): the text `double_run.STATE`.
        count: 1 if every difference of the rank has its own `Difference` object. If only the rank's
            first difference is known, `count` is the number of all differences of the rank.
    """

    rank: int
    stage: int
    name: str
    count: int = 1


class MismatchError(RuntimeError):
    """
    Two runs of one step from the same state have different results.

    Args:
        found: The gradients, weights and states that differ.

    Attributes:
        unrecoverable: Whether a weight has changed. A step with changed weights cannot be
            restarted.
    """

    unrecoverable = False

    def __init__(self, found: Sequence[Difference]) -> None:
        super().__init__(_mismatch_text(found))
        self.found = tuple(found)


def _difference(found: Difference | Mapping[str, Any]) -> Difference:
    """Return a difference, if needed after converting it from the plain data in the store."""
    return found if isinstance(found, Difference) else Difference(**found)


def _differences(
    found: Iterable[Difference | Mapping[str, Any]],
) -> tuple[Difference, ...]:
    return tuple(map(_difference, found))


def _mismatch_text(found: Sequence[Difference]) -> str:
    """
    Name the ranks whose gradients differ, each with its number of differences and its first
    difference.
    """
    said = []
    for rank in sorted({one.rank for one in found}):
        own = [one for one in found if one.rank == rank]
        many = sum(one.count for one in own)
        said.append(
            f"rank {rank} has {counted(many, 'difference')}, the first in stage {own[0].stage}: "
            f"{own[0].name}"
        )
    return f"two runs of the step differ: {'; '.join(said)}"


class TerminatedError(RuntimeError):
    """The launcher ends this rank, usually because another rank has died."""

    unrecoverable = True


@attrs.frozen
class Cause:
    """
    The cause of a stop, the same on all ranks.

    Args:
        kind: `refused` (the contract refused), `raised` (an error was raised), `dropped` (a message
            was skipped), `disagreed` (epochs, messages or gradients differ between ranks), `gone`
            (a process ended), `late` (a rank missed the deadline), `ended` (the launcher ended the
            rank), `lost` (a connection broke), `differs` (two runs of one step have different
            gradients) or `diverged` (a number of the training is not finite).
        rank: The rank that the cause names, usually the rank where the cause began
            (`Verdicts.cause`).
        stage: Stage of the action that caused the stop; None if no action caused it.
        action: The action that caused the stop, in the notation of schedule tables, such as
            ``1W2``; or `commit`.
        clause: The contract's clause that refused the action; None if the contract did not refuse
            it.
        text: The whole cause in one line.
        recoverable: Whether every rank still runs and can restart the step from the last commit.
        step: The number of the optimizer step in which the cause began; None if unknown.
        differ: For the kind `differs`, the gradients, weights and states that differ.
    """

    kind: str
    rank: int
    stage: int | None
    action: str | None
    clause: str | None
    text: str
    recoverable: bool
    step: int | None = None
    differ: tuple[Difference, ...] = attrs.field(default=(), converter=_differences)


class StoppedError(RuntimeError):
    """
    This rank stopped a step. All ranks that stop report the same `cause`.

    If a rank stopped before it received the last consent or vote, its weights may be one step
    behind the weights of other ranks. Then the ranks cannot continue without a checkpoint. In mode
    ``one launch``, `OneLaunch.rebuild` detects such a difference and raises an error.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


@attrs.frozen
class Verdicts:
    """
    The reasons that ranks published for stopping a step, from which one cause is chosen.

    Args:
        said: The verdicts (reasons) that ranks published, by rank, as `verdict_of` makes them. Each
            verdict also has the entry `row`: the index of the rank's row in the schedule table, or
            None.
        world: Number of ranks.
        every: Every channel (a pair of sending and receiving rank), in the same order on all ranks.
        table: The schedule table, with one row of actions and messages per rank.
    """

    said: Mapping[int, dict[str, Any]]
    world: int
    every: Sequence[ChannelEnds]
    table: Schedule

    def cause(self, epoch: int) -> Cause:
        """
        Choose the common cause. If ranks published several causes, the first one in this list is
        chosen: a refusal or an error, two runs of a step that differ, a skipped message, a
        disagreement, a rank that is gone or late.

        The cause names only ranks that `_nameable` returns. If messages or two runs differ on
        another rank, the cause names a rank that published the difference.

        Args:
            epoch: The epoch (optimizer step) of the rank that makes the choice.
        """
        said = self.said
        alive = self._recoverable() and len({v["epoch"] for v in said.values()}) == 1
        nameable = self._nameable()
        spoken = {rank: v for rank, v in sorted(said.items()) if rank in nameable}
        for rank, v in spoken.items():
            if v["kind"] in ("refused", "raised"):
                return _cause(v["kind"], rank, v, v["text"], alive)
        if differ := self._differ():
            rank, v = next((rank, v) for rank, v in spoken.items() if v.get("differ"))
            if own := [one for one in differ if one.rank in nameable]:
                # A weight that changed is the reason for the other differences.
                first = next((one for one in own if one.name.startswith(WEIGHT)), own[0])
                rank, v = first.rank, {**v, "stage": first.stage}
            chosen = _cause("differs", rank, v, _mismatch_text(differ), alive)
            return attrs.evolve(chosen, differ=differ)
        for rank, v in spoken.items():
            if (skipped := self._skipped(v)) is not None:
                text = "the rank passed this action without sending the message"
                return _cause("dropped", rank, {**v, **skipped}, text, alive)
        unlike = [r for r, v in spoken.items() if v["kind"] == "disagreed"]
        if spoken and (found := self._different(spoken, whole=bool(unlike))) is not None:
            return found
        if unlike:
            v = said[unlike[0]]
            return _cause("disagreed", unlike[0], v, v["text"], alive)
        for rank in sorted(nameable - said.keys()):
            seen = sorted(
                (v for v in said.values() if v["peer"] == rank), key=self._place_of_awaited
            )
            late = all(v["kind"] == "late" for v in (seen or said.values()))
            together = {v["awaits"] for v in said.values() if v["peer"] == -1}
            place = together.pop() if len(together) == 1 else None  # of all ranks, as evaluations
            awaited = self._awaited_of(seen[0]) if seen else {"stage": None, "action": place}
            text = (
                "the process did not reach this action in time" if late else "the process has ended"
            )
            if seen:
                text += f" (rank {_first(said, seen[0])} waits at {seen[0]['awaits']})"
            known = {"epoch": epoch, "clause": None, **awaited}
            return _cause("late" if late else "gone", rank, known, text, False)
        rank, v = min(said.items(), key=lambda item: (_LOSSES.index(item[1]["kind"]), item[0]))
        return _cause(v["kind"], rank, v, v["text"], alive)

    def _nameable(self) -> set[int]:
        """
        Return the ranks that the cause may name: the ranks that stopped for a reason of their own.
        If no rank did, the cause may name the ranks that published nothing. If every rank published
        that it stopped because of other ranks, the cause may name all ranks. The formal model of
        ranks has the same rule.
        """
        own = {rank for rank, v in self.said.items() if v["kind"] not in _LOSSES}
        every = set(range(self.world))
        return own or every - self.said.keys() or every

    def _recoverable(self) -> bool:
        """Whether every rank has published a verdict from which it can rebuild the epoch."""
        return len(self.said) == self.world and all(v["recoverable"] for v in self.said.values())

    def _differ(self) -> list[Difference]:
        """
        Return every gradient that differs between two runs. If a rank reported its own differences,
        other ranks' reports about that rank are ignored.
        """
        found: list[Difference] = []
        for rank in range(self.world):
            own = self.said.get(rank, {}).get("differ", ())
            every = [own, *(v.get("differ", ()) for v in self.said.values())]
            told = ([_difference(one) for one in each if one["rank"] == rank] for each in every)
            found += next(filter(None, told), [])
        return found

    def _skipped(self, v: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the first send in a rank's line of the schedule table that the rank has passed but
        not posted."""
        if v["row"] is None:
            return None
        posted = {number for numbers in v["posted"].values() for number in numbers}
        for atom in self.table.atoms[v["row"]][: v["passed"]]:
            if atom.kind in SENDS:
                message = Message(atom.stage, atom.microbatch, "B" in atom.kind.value)
                if message.number not in posted:
                    return {"stage": atom.stage, "action": message.sent, "clause": None}
        return None

    def _different(self, spoken: Mapping[int, dict[str, Any]], *, whole: bool) -> Cause | None:
        """
        Return the first difference between the sender and the receiver of a channel as a cause;
        None without a difference.

        Args:
            spoken: The verdicts of the ranks that the cause may name, in ascending order. The cause
                names the sender if the sender is among these ranks, else the first of these ranks.
            whole: Whether sender and receiver both completed all their actions and messages. If
                not, a message that only one of them posted is not a difference.
        """
        said = self.said
        for ends in self.every:
            if ends.source not in said or ends.to not in said:
                continue
            name = f"{ends.source}>{ends.to}"
            a, b = (said[r]["posted"].get(name, ()) for r in ends)
            if (found := first_different_message(a, b)) is None:
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
            rank = ends.source
            if rank not in spoken:
                rank, where = next(iter(spoken.items()))
            return _cause("disagreed", rank, where, text, self._recoverable())
        return None

    def _place_of_awaited(self, v: Mapping[str, Any]) -> int:
        """Return the index, in the peer's line of the schedule table, of the action that a rank
        waited for."""
        owed = self._awaited_of(v)["action"]
        for atoms in self.table.atoms:
            for place, atom in enumerate(atoms):
                if action_name(atom) == owed:
                    return place
        return sys.maxsize

    def _awaited_of(self, v: Mapping[str, Any]) -> dict[str, Any]:
        """Return the peer's action at the other end of the transfer that a rank waited for."""
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


def _first(said: Mapping[int, dict[str, Any]], v: Mapping[str, Any]) -> int:
    return next(rank for rank, other in sorted(said.items()) if other is v)


def verdict_of(
    error: BaseException,
    epoch: int,
    atom: Atom | None,
    passed: int,
    posted: Mapping[ChannelEnds, Sequence[int]],
    at: str,
) -> dict[str, Any]:
    """
    Describe why a rank stopped, as plain data for the key-value store.

    Args:
        error: The error that stopped the rank.
        epoch: The epoch (optimizer step) in which the error occurred.
        atom: The rank's action or message that raised the error; None if no action or message did.
        passed: How many actions and messages of its row in the schedule table the rank has
            completed.
        posted: By channel, the `Message.number` of each message that the rank posted in this step.
        at: Description of what the rank was doing, if `atom` is None.
    """
    kind = "refused" if isinstance(error, Refused) else "raised"
    if isinstance(error, LostError):
        kind = "late" if error.late else "lost"
    elif isinstance(error, DisagreementError):
        kind = "disagreed"
    elif isinstance(error, MismatchError):
        kind = "differs"
    elif isinstance(error, TerminatedError):
        kind = "ended"
    text = " ".join(str(error).split())
    return {
        "kind": kind,
        "epoch": epoch,
        "stage": None if atom is None else atom.stage,
        "action": at if atom is None else action_name(atom),
        "clause": getattr(error, "clause", None),
        "text": f"{type(error).__name__}: {text}" if kind == "raised" else text,
        "peer": getattr(error, "peer", None),
        "awaits": getattr(error, "action", None),
        "passed": passed,
        "differ": [*map(attrs.asdict, error.found)] if isinstance(error, MismatchError) else [],
        "posted": {f"{e.source}>{e.to}": list(numbers) for e, numbers in posted.items()},
        "recoverable": not getattr(error, "unrecoverable", False),
    }


def action_name(atom: Atom) -> str:
    """Return an action or message of a rank in the notation of schedule tables, such as ``1W2``."""
    return f"{atom.stage}{atom.kind.value}{atom.microbatch if atom.microbatch >= 0 else ''}"


def _cause(kind: str, rank: int, where: Mapping[str, Any], what: str, recoverable: bool) -> Cause:
    at = where["action"] or "an unknown action"
    text = f"rank {rank}, step {where['epoch']}, {at}: {what}"
    stage, action, clause = where["stage"], where["action"], where["clause"]
    return Cause(kind, rank, stage, action, clause, text, recoverable, where["epoch"])

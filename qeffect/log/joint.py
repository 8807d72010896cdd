"""
Check the event logs of all ranks of a pipeline together.

Each log records the actions of one process, and is first replayed alone. A single log cannot show
whether the actions of the ranks match. So the F, dI, dW and messages of each committed step are
joined into a schedule table of what really ran, with one row per rank. This table is checked as
`qeffect check` checks a table:

* every message that arrived was sent, and every message that was sent arrived
  (`schedule.receive-without-send`, `schedule.send-without-receive`);
* each receive ends after its send began (`schedule.deadlock` if the logs contradict each other);
* between two ranks, receives are posted in the order of their sends (`schedule.message-order`);
* all ranks committed the same epochs in the same order (`epoch.wrong-epoch`).

Logs have no common clock, so an order is refused only if no possible timing of the ranks explains
it. The actions of an epoch that never committed are left out: no committed result depends on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from qeffect.spec.clauses import CLAUSES

from ..relations.constants import BACK_BIT, GRAD_BIT, IN_BIT, OUT_BIT
from ..schedule.actions import Schedule
from ..schedule.findings import Finding
from ..schedule.index import index_of
from ..schedule.infer import from_actions
from ..schedule.messages import check_message_order, check_messages
from ..schedule.simulate import check_deadlock, simulate
from ..schedule.transport import Transport
from ..text import counted
from .checker import LogError
from .replayer import ReplayReport, replay
from .rotation import CONTINUES

__all__ = ["JointReport", "moves_of", "replay_together"]

#: How a table writes an event: computations by their transition, messages by their bit.
_COMPUTED = {"check_forward": "F", "check_dgrad": "I", "check_wgrad": "W", "group_wgrad": "W"}
_SENT = {OUT_BIT: "SEND_F", GRAD_BIT: "SEND_B"}
_RECEIVED = {IN_BIT: "RECV_F", BACK_BIT: "RECV_B"}


@attrs.frozen
class JointReport:
    """
    The result of a joint replay of all ranks' logs.

    Args:
        verdict: ``accepted`` or ``refused``.
        ranks: For each log, the report of a replay of this log alone; in the order of the logs.
        epochs: Number of epochs that were compared; every rank committed them.
        messages: Number of messages between ranks in these epochs.
        rank: Rank of the refused event. This and all fields below are None if nothing was refused.
        epoch: Epoch of the refused event.
        clause: Clause of the refusal.
        step: Sequence number of the event in its log.
        action: The event's action in torch's notation, or the name of the contract call.
        message: The finding in one sentence.
        expected: What was expected.
        found: What was found.
        remedy: What a person should do about the refusal.
    """

    verdict: str
    ranks: tuple[ReplayReport, ...]
    epochs: int = 0
    messages: int = 0
    rank: int | None = None
    epoch: int | None = None
    clause: str | None = None
    step: int | None = None
    action: str | None = None
    message: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None

    def asdict(self) -> dict[str, Any]:
        """Return the report as a plain dictionary."""
        return attrs.asdict(self)

    def summary(self) -> str:
        """Return the result as one line."""
        if self.clause is None:
            return (
                f"accepted: {counted(len(self.ranks), 'rank')} together, "
                f"{counted(self.epochs, 'epoch')} committed by all, "
                f"{counted(self.messages, 'message')}"
            )
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        event = "" if self.step is None else f", event {self.step} ({self.action})"
        return (
            f"refused: rank {self.rank}{epoch}{event}: {self.clause}: {self.message} "
            f"What to do: {self.remedy}"
        )


#: A log's file, or its files, oldest first.
_Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def replay_together(paths: Sequence[_Files]) -> JointReport:
    """
    Replay each log alone, then all logs together.

    Args:
        paths: The logs of all ranks of one pipeline, in any order. A log with several files is
            given as a sequence of its files, oldest first. If log rotation removed the beginning of
            a log, only the epochs that all logs have are compared.

    Returns:
        The report. If the replay of one log alone is refused, the report has the clause of that
        refusal.

    Raises:
        LogError: A file is not an event log, or the logs do not cover exactly one whole pipeline.
    """
    if isinstance(paths, str | os.PathLike) or not paths:
        raise LogError(
            "expected the paths of the logs of all ranks, found one path or none; name every log"
        )
    every = [_files(given) for given in paths]
    reports = tuple(replay(*files) for files in every)
    for number, report in enumerate(reports):
        if report.clause is not None:
            rank = number if report.rank is None else report.rank
            return JointReport(
                "refused",
                reports,
                rank=rank,
                clause=report.clause,
                step=report.step,
                action=report.action,
                message=f"in its own log: found {report.found}; expected {report.expected}.",
                expected=report.expected,
                found=report.found,
                remedy=report.remedy,
            )
    logs = sorted((_Log.of(files) for files in every), key=lambda log: min(log.stages))
    homes = _homes(logs)
    logs = [log if log.rank >= 0 else attrs.evolve(log, rank=n) for n, log in enumerate(logs)]
    if any(report.trusted_epoch is not None for report in reports):
        logs = _shared(logs)
    uneven = _uneven(logs)
    if uneven is not None:
        return attrs.evolve(uneven, ranks=reports)
    messages = 0
    for number, epoch in enumerate(logs[0].epochs):
        steps = [log.steps[number] for log in logs]
        found = _compare(logs, steps, homes)
        if found is not None:
            finding, line = found
            return JointReport(
                "refused",
                reports,
                number,
                messages,
                None if finding.rank is None else logs[finding.rank].rank,
                epoch,
                finding.clause,
                line,
                finding.action,
                f"{finding.message}.",
                finding.expected,
                finding.found,
                finding.remedy,
            )
        messages += sum("SEND" in entry for step in steps for _, entry in step.rows(homes)[0])
    return JointReport("accepted", reports, len(logs[0].epochs), messages)


@attrs.frozen
class _Step:
    """The actions of one rank in an epoch that it committed."""

    events: tuple[tuple[int, str, int, int, int], ...]

    def rows(self, homes: Mapping[int, int]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """
        Return the step as two table rows; each entry comes with its sequence number in the log.

        A receive is placed where it ended in the first row, and where it was posted in the second.
        """
        ended: list[tuple[int, str]] = []
        posted: list[tuple[int, str]] = []
        seen: set[tuple[str, str]] = set()
        for place, transition, stage, microbatch, bit in self.events:
            receives = bit in _RECEIVED and transition in ("post_receive", "finish_receive")
            if transition in _COMPUTED:
                name = f"{stage}{_COMPUTED[transition]}{microbatch}"
            elif receives:
                name = f"{stage}{_RECEIVED[bit]}{microbatch}"
            else:
                # A reader on the same rank (the next local stage, or a loss) is not a message.
                target = homes.get(stage + (1 if bit == OUT_BIT else -1), homes[stage])
                if target == homes[stage]:
                    continue
                name = f"{stage}{_SENT[bit]}{microbatch}"
            # All blocks and invocations of an execution are one entry.
            entry = _COMPUTED.get(transition, transition), name
            if entry in seen:
                continue
            seen.add(entry)
            if transition != "post_receive":
                ended.append((place, name))
            if transition != "finish_receive":
                posted.append((place, name))
        return ended, posted


@attrs.frozen
class _Log:
    """
    The messages and commits of an accepted log. The rank is -1 if the log names no rank. `moves`
    are the log's commits and restores, each with the sequence number of its line and its epoch.
    """

    name: str
    rank: int
    stages: Mapping[int, Mapping[str, Any]]
    epochs: tuple[int, ...]
    steps: tuple[_Step, ...]
    moves: tuple[tuple[int, str, int], ...] = ()
    whole: bool = True

    @classmethod
    def of(cls, files: Sequence[str | os.PathLike[str]]) -> _Log:
        """Read a log that a replay accepted."""
        path = files[0]
        try:
            with ExitStack() as stack:
                opened = [
                    stack.enter_context(Path(one).open(encoding="utf-8", errors="replace"))
                    for one in files
                ]
                header, *_ = [json.loads(next(file)) for file in opened]
                continues = header.get(CONTINUES)
                epoch = continues["state"]["weight_epoch"][0] if continues else header["epoch"]
                kept = {
                    step["began"]: [a for event in step["events"] for a in _actions(event)]
                    for step in (continues or {"steps": ()})["steps"]
                }
                moves: list[tuple[int, str, int]] = []
                lines = (line for line in chain(*opened) if line.endswith("\n"))  # whole ones
                committed = _committed(map(json.loads, lines), epoch, kept, moves)
        except (OSError, ValueError, StopIteration) as error:  # it was another file a moment ago
            raise LogError(f"{path}: changed while it was replayed: {error}") from error
        stages = {config["stage"]: config for config in header["stages"]}
        epochs, steps = tuple(e for e, _ in committed), tuple(step for _, step in committed)
        rank = -1 if header["rank"] is None else header["rank"]
        return cls(str(path), rank, stages, epochs, steps, tuple(moves), whole=not continues)


#: An action of a log: its line's sequence number, transition, stage, microbatch and bit.
_Action = tuple[int, str, int, int, int]


def _actions(event: Mapping[str, Any]) -> list[_Action | str]:
    """Return the actions that a line records; a string ends a walk (a pass over the schedule)."""
    transition = event.get("transition")
    if transition in ("next_walk", "commit_update", "commit_epoch"):
        return [transition]
    if transition in _COMPUTED or transition in ("read", "post_receive", "finish_receive"):
        assert transition is not None
        _, stage, microbatch, *_ = event["key"]
        bit = event.get("bit", event.get("message", 0))
        return [(event["seq"], transition, stage, microbatch, bit)]
    return []


def _committed(
    events: Iterator[dict[str, Any]],
    epoch: int,
    kept: Mapping[int, list[_Action | str]],
    moves: list[tuple[int, str, int]],
) -> list[tuple[int, _Step]]:
    """
    Return every walk (pass over the schedule) of the epochs that were committed and not undone by a
    restore.

    Args:
        events: The lines after the header. A line that repeats a recorded step stands for all lines
            of that step.
        epoch: The weight epoch at the beginning of the log.
        kept: The recorded steps of earlier files, by the sequence number of their first line.
        moves: List to which each commit and each restore is appended, in order.

    Returns:
        A pair of epoch and actions for each walk; an epoch may have several walks.
    """
    own: list[_Action] = []
    walks: list[_Step] = []  # of the epoch under way
    found: list[tuple[int, _Step]] = []
    recorded: list[_Action | str] = []  # since the last step began; text ends a walk
    steps: dict[int, list[_Action | str]] = dict(kept)
    for event in events:
        transition = event.get("transition")
        if transition == "begin_step":
            recorded = steps[event["seq"]] = []
            continue
        if transition == "restore":
            epoch = event["epoch"]
            moves.append((event["seq"], "restore", epoch))
            own, walks, found = [], [], [pair for pair in found if pair[0] < epoch]
            continue
        many: list[_Action | str] = []
        if transition == "repeat_step":
            again = steps[event["step"]]
            many = [a if isinstance(a, str) else (event["seq"], *a[1:]) for a in again]
        elif transition in ("keep_step", "drop_step"):
            recorded = []  # later lines do not belong to the step
        else:
            many = _actions(event)
        recorded += many
        for action in many:
            if not isinstance(action, str):
                own.append(action)
                continue
            walks.append(_Step(tuple(own)))
            own = []
            if action != "next_walk":
                found += [(epoch, walk) for walk in walks]
                moves.append((event["seq"], "commit", epoch))
                walks, epoch = [], epoch + 1
    return found


def _files(given: _Files) -> tuple[str | os.PathLike[str], ...]:
    return (given,) if isinstance(given, str | os.PathLike) else tuple(given)


def _shared(logs: Sequence[_Log]) -> list[_Log]:
    """Cut the logs so that all begin at the first epoch that every log has."""
    first = max(log.epochs[0] if log.epochs else 0 for log in logs)
    found = []
    for log in logs:
        pairs = [pair for pair in zip(log.epochs, log.steps, strict=True) if pair[0] >= first]
        epochs, steps = tuple(e for e, _ in pairs), tuple(step for _, step in pairs)
        found.append(attrs.evolve(log, epochs=epochs, steps=steps))
    return found


def _homes(logs: Sequence[_Log]) -> dict[int, int]:
    """Return, for each stage, the position of its log in the list of logs."""
    homes: dict[int, int] = {}
    for place, log in enumerate(logs):
        for stage in log.stages:
            if stage in homes:
                other = logs[homes[stage]]
                raise LogError(
                    f"stage {stage} is in {other.name} and in {log.name}; expected the logs of one "
                    "replica, with each stage in one log"
                )
            homes[stage] = place
    if any(log.rank < 0 for log in logs) != all(log.rank < 0 for log in logs):
        nameless = next(log.name for log in logs if log.rank < 0)
        raise LogError(
            f"{nameless} names no rank, but another log does; expected logs of one run, which "
            "either all name their ranks or all do not"
        )
    missing = next((n for n in range(len(homes)) if n not in homes), None)
    if missing is not None:
        raise LogError(
            f"stage {missing} is missing, although stage {max(homes)} is there; expected the logs "
            "of all ranks of one pipeline: name the missing log too"
        )
    for log in logs:
        for stage, config in log.stages.items():
            for flag, other_stage in (
                ("receives_input", stage - 1),
                ("receives_gradient", stage + 1),
            ):
                if config.get(flag) and other_stage not in homes:
                    raise LogError(
                        f"{log.name}: stage {stage} receives from stage {other_stage}, which is in "
                        "none of the given logs; expected the logs of all ranks: name its log too"
                    )
    return homes


def _uneven(logs: Sequence[_Log]) -> JointReport | None:
    """Return a refusal if a rank's committed epochs or walks differ from the first rank's."""
    for log in logs[1:]:
        if log.epochs != logs[0].epochs:
            clause = CLAUSES["epoch.wrong-epoch"]
            ours, theirs = list(logs[0].epochs), list(log.epochs)
            same = sum(1 for a, b in zip(ours, theirs, strict=False) if a == b)
            return JointReport(
                "refused",
                (),
                same,
                rank=log.rank,
                clause=clause.id,
                action="commit_update",
                message=f"rank {log.rank} committed {_span(theirs)}, rank {logs[0].rank} "
                f"{_span(ours)}: all ranks must commit an epoch, or none.",
                expected=_span(ours),
                found=_span(theirs),
                remedy="Commit only if all ranks consent; if a rank cannot commit, stop all ranks.",
            )
    return None


def moves_of(
    files: Sequence[str | os.PathLike[str]],
) -> tuple[int, tuple[tuple[int, str, int], ...], bool]:
    """
    Return a log's rank, its commits and restores, and whether its first file was given.

    Args:
        files: The log's files, oldest first; a replay must have accepted the log.

    Returns:
        Three values. First the rank, or -1 if the log names no rank. Second a tuple with one entry
        per commit or restore: the sequence number of its line, its name, and the epoch that it
        committed or restored. Third whether the log's first file was given.
    """
    log = _Log.of(files)
    return log.rank, log.moves, log.whole


def _span(epochs: Sequence[int]) -> str:
    """Return a list of epochs in words, with at most four numbers."""
    if not epochs:
        return "no epoch"
    shown = ", ".join(map(str, epochs[:4])) + (", ..." if len(epochs) > 4 else "")
    return f"{len(epochs)} epochs ({shown})" if len(epochs) > 1 else f"epoch {shown}"


def _compare(
    logs: Sequence[_Log], steps: Sequence[_Step], homes: Mapping[int, int]
) -> tuple[Finding, int | None] | None:
    """Check one epoch of all ranks; return the first finding and the number of its log event."""
    both = [step.rows(homes) for step in steps]
    for place, checks in ((0, (check_messages, _contradicted)), (1, (check_message_order,))):
        rows = [rows[place] for rows in both]
        table = _table(rows, homes, logs)
        index = index_of(table, Transport("edge"))
        for check in checks:
            for finding in check(index):
                line = None
                if finding.rank is not None and finding.step is not None:
                    line = rows[finding.rank][finding.step][0]
                return finding, line
    return None


def _contradicted(index: Any) -> Iterator[Finding]:
    yield from check_deadlock(simulate(index))


def _table(
    rows: Sequence[Sequence[tuple[int, str]]], homes: Mapping[int, int], logs: Sequence[_Log]
) -> Schedule:
    return from_actions(
        {rank: [entry for _, entry in row] for rank, row in enumerate(rows)},
        source="event logs",
        num_stages=max(homes) + 1,
        num_microbatches=max(c["microbatches"] for log in logs for c in log.stages.values()),
        stage_to_rank=dict(homes),
        complete=True,
    )

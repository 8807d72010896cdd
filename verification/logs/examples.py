"""
The example logs: the log of each scenario, and for every reachable clause an edited log that breaks
the clause.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from attrs import frozen

from qeffect import StageConfig
from qeffect.log.replayer import LogError, ReplayReport, replay_lines
from qeffect.spec.clauses import CLAUSES

from .edits import Edit, LineEdit, edits
from .recorded import MATRICES, RecordedCaller, placed
from .scenarios import SCENARIOS

__all__ = ["UNREACHED", "Rejected", "files", "outcomes", "rejected", "single_edit_logs", "valid"]

#: Clauses that no change of one place in a valid log breaks; the end of the contract gives the
#: reasons.
UNREACHED: Final = frozenset(
    {
        "persistence.reduction-in-flight",
        "persistence.configuration",
        "version.left-out",
        "epoch.uncounted",
        "epoch.device-count",
        "epoch.device-order",
        "order.scales-moved",
        "arena.other-destination",
    }
)


@frozen
class Rejected:
    """
    A rejected example: a valid log with one changed field, one missing line or one repeated line.

    Args:
        clause: The clause that refuses the example.
        log: Name of the valid log.
        edit: The change of the valid log.
        refused: Number of the line that is refused.
        lines: The lines of the example, after the change.
    """

    clause: str
    log: str
    edit: Edit | LineEdit
    refused: int
    lines: list[str]

    def entry(self) -> dict[str, Any]:
        """Return the example's entry in the index of rejected logs."""
        return {
            "clause": self.clause,
            "log": f"valid/{self.log}.jsonl",
            **self.edit.entry(),
            "refused_at_line": self.refused,
        }


@cache
def valid() -> Mapping[str, list[str]]:
    """Return the valid logs by name."""
    return {name: scenario() for name, scenario in SCENARIOS.items()}


@cache
def outcomes(log: str) -> tuple[tuple[Edit, ReplayReport | LogError], ...]:
    """Return every one-field edit of a valid log with the replayer's verdict on the edited log."""
    result: list[tuple[Edit, ReplayReport | LogError]] = []
    for edit in edits(valid()[log]):
        try:
            result.append((edit, replay_lines(edit.apply(valid()[log]))))
        except LogError as error:
            result.append((edit, error))
    return tuple(result)


def given_up() -> list[str]:
    """A tape (the data of one F) of one stage is dropped, and another stage continues."""
    stages = [StageConfig(s, 1, 1, matrices=MATRICES) for s in (0, 1)]
    d = RecordedCaller(stages, incarnation=0x5EED_0800)
    d.forward(1, 0, refresh=True)
    d.contract.drop(d.key(1, 0), d.ref(1, 0))
    d.forward(0, 0, refresh=True)
    d.dgrad(0, 0)
    return d.log.close()


def two_writes_at_once() -> list[str]:
    """The dW of two microbatches are in flight at once, each with its own destinations."""
    d = RecordedCaller(
        [
            StageConfig(0, 2, 2, matrices=MATRICES, destinations=placed(2, 4096)),
            StageConfig(1, 1, 1, matrices=MATRICES),
        ],
        incarnation=0x5EED_0900,
    )
    d.refresh(0)
    for microbatch in (0, 1):
        d.forward(0, microbatch)
        d.dgrad(0, microbatch)
    outstanding = [d.contract.check_wgrad(d.key(0, m), d.ref(0, m)) for m in (0, 1)]
    for ticket in outstanding:
        d.contract.commit(ticket, MATRICES)
    d.finalize(0)
    return d.log.close()


def one_write_for_two() -> list[str]:
    """One dW takes two tapes (computes the gradients of two microbatches), and the gradients
    accumulate at an undescribed address."""
    d = RecordedCaller(
        [StageConfig(0, 2, 2, matrices=MATRICES, scales="epoch")], incarnation=0x5EED_1700
    )
    d.refresh(0)
    for microbatch in (0, 1):
        d.forward(0, microbatch)
        d.dgrad(0, microbatch)
    d.wgrad(0, 0, group=[(d.key(0, 1), d.ref(0, 1))])
    d.finalize(0)
    return d.log.close()


#: The parts of a key and of a reference, in the order of a log's line.
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "key": ("epoch", "stage", "microbatch", "block", "invocation"),
    "ref": ("slot", "generation", "incarnation"),
}


def _without(part: str) -> Callable[[Any], Any]:
    """Return a function that removes a name from a list, or a field from an object."""

    def left(was: Any) -> Any:
        if isinstance(was, list):
            return [name for name in was if name != part]
        return {name: value for name, value in was.items() if name != part}

    return left


#: Valid logs that exist only for one edit each.
_SINGLE_EDIT_LOGS: Final[Mapping[str, Callable[[], list[str]]]] = {
    "given-up": given_up,
    "two-writes-at-once": two_writes_at_once,
    "one-write-for-two": one_write_for_two,
}

#: Clauses that only edits of these logs break: the log, a text (its first line with the text is
#: edited), the place, and the value after the edit, or a function of the value before it.
_MADE: Final[Mapping[str, tuple[str, str, tuple[str | int, ...], Any]]] = {
    "arena.spoiled": ("given-up", "bind", ("key", 1), 1),
    # The stage then accumulates into one symbolic buffer. The buffer number in the second dW then
    # belongs to the other stage, whose description is the same.
    "arena.in-flight": ("two-writes-at-once", "event-log", ("stages", 0, "destinations"), []),
    "arena.left-out": ("one-write-for-two", "event-log", ("relations",), _without("arena")),
    "order.unequal-scales": ("one-write-for-two", "event-log", ("stages", 0), _without("scales")),
}


#: An event of a log: its transition, and its number among those of this transition.
_Event = tuple[str, int]

#: Clauses that no change of a field breaks, only a missing or repeated line: the log, the event,
#: and the event before which the copy stands, or None if the event is missing.
_LINES: Final[Mapping[str, tuple[str, _Event, _Event | None]]] = {
    "ownership.duplicate-dgrad": ("two-writes-at-once", ("check_dgrad", 0), ("check_forward", 1)),
    "ownership.wgrad-before-dgrad": ("two-writes-at-once", ("check_wgrad", 0), ("check_dgrad", 0)),
    "ownership.duplicate-wgrad": ("copied-inputs", ("check_wgrad", 0), ("finish_read", 0)),
    "ownership.not-grouped": ("grouped-wgrads", ("ungroup_wgrad", 0), ("check_wgrad", 0)),
    "ownership.walk-begun": ("short-walk", ("skip", 0), ("commit_forward", 0)),
    "order.moves-outside-update": ("scales-of-an-epoch", ("move_scales", 0), ("check_update", 0)),
    "persistence.action-in-flight": ("updates", ("checkpoint", 0), ("commit_refresh", 0)),
    "persistence.live-tape": ("updates", ("checkpoint", 0), ("bind", 0)),
    "persistence.mid-epoch": ("updates", ("checkpoint", 0), ("check_forward", 0)),
    "reduction.begun": ("accumulated-walks", ("next_walk", 0), ("check_update", 0)),
    "completion.gradients-in-use": ("gradients-readers", ("finish_gradients_read", 0), None),
}


@cache
def single_edit_logs() -> Mapping[str, list[str]]:
    """Return, by name, the valid logs that each are the basis of only one rejected log."""
    return {name: scenario() for name, scenario in _SINGLE_EDIT_LOGS.items()}


def _made(clause: str) -> Rejected:
    """Return the example for a clause that no one-field edit of the scenarios' logs breaks."""
    edit: Edit | LineEdit
    logs = {**valid(), **single_edit_logs()}
    if clause in _LINES:
        log, event, before = _LINES[clause]
        lines = logs[log]
        edit = LineEdit(_line(lines, event), None if before is None else _line(lines, before))
    else:
        log, text, path, now = _MADE[clause]
        lines = logs[log]
        line = next(number for number, found in enumerate(lines, 1) if f'"{text}"' in found)
        was = json.loads(lines[line - 1])
        for part in path:
            was = was[part]
        edit = Edit(line, path, was, now(was) if callable(now) else now)
    outcome = replay_lines(edit.apply(lines))
    if outcome.clause != clause or outcome.line is None:
        raise ValueError(
            f"expected {clause} to refuse {log} after {edit}, found: {outcome.summary()}"
        )
    return Rejected(clause, log, edit, outcome.line, edit.apply(lines))


def _line(lines: Sequence[str], event: _Event) -> int:
    """Return the line number of an event, from 1."""
    text, place = f'"transition":"{event[0]}"', event[1]
    return [number for number, line in enumerate(lines, 1) if text in line][place]


def rejected() -> dict[str, Rejected]:
    """
    Return one rejected log per clause that a single field or line can break.

    Every one-field edit of the scenarios' logs is tried. Several edits may break a clause. The
    function prefers an edit that is refused at the edited line, then an edit of the field that the
    clause names (such as ``ref.generation``), then a shorter log, then an earlier edit. If no such
    edit breaks a clause, the example edits a separate log, or deletes or repeats a line.
    """
    best: dict[str, tuple[tuple[bool, bool, int], Rejected]] = {}
    for log, lines in valid().items():
        for edit, outcome in outcomes(log):
            if isinstance(outcome, LogError) or outcome.clause is None or outcome.line is None:
                continue
            named = _part(CLAUSES[outcome.clause].argument)
            elsewhere = named is not None and edit.path != named
            rank = (outcome.line != edit.line, elsewhere, len(lines))
            if outcome.clause not in best or rank < best[outcome.clause][0]:
                example = Rejected(outcome.clause, log, edit, outcome.line, [])
                best[outcome.clause] = rank, example
    chosen = {
        clause: Rejected(e.clause, e.log, e.edit, e.refused, e.edit.apply(valid()[e.log]))
        for clause, (_, e) in best.items()
    }
    chosen |= {clause: _made(clause) for clause in (*_MADE, *_LINES)}
    damaged = chosen["order.token"]
    assert isinstance(damaged.edit, Edit)
    lines = damaged.edit.apply(valid()[damaged.log], sealed=False)
    chosen["log.chain"] = Rejected("log.chain", damaged.log, damaged.edit, damaged.edit.line, lines)
    return {clause: chosen[clause] for clause in CLAUSES if clause in chosen}


def _part(argument: str) -> tuple[str | int, ...] | None:
    """
    Return the path, in a line of a log, to the entry of a key or reference that a clause names.

    >>> _part("ref.generation"), _part("key")
    (('ref', 1), None)
    """
    field, _, part = argument.partition(".")
    return (field, _PARTS[field].index(part)) if part and field in _PARTS else None


@cache
def files() -> Mapping[str, str]:
    """Return the text of every example file by its path under ``spec/logs``."""
    examples = rejected()
    return {
        **{
            f"valid/{name}.jsonl": "".join(lines)
            for name, lines in {**valid(), **single_edit_logs()}.items()
        },
        **{f"rejected/{clause}.jsonl": "".join(e.lines) for clause, e in examples.items()},
        "rejected/index.json": _index(examples),
    }


def _index(examples: Mapping[str, Rejected]) -> str:
    rows = ",\n".join(f"  {json.dumps(e.entry())}" for e in examples.values())
    return f"[\n{rows}\n]\n"

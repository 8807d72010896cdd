"""
The example logs: what each scenario records, and for every reachable clause an edit that breaks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from attrs import frozen

from qeffect.replay import LogError, ReplayReport, replay_lines
from spec.clauses import CLAUSES

from .edits import Edit, edits
from .scenarios import SCENARIOS

__all__ = ["UNREACHED", "Rejected", "files", "outcomes", "rejected", "valid"]

#: Clauses that no single field breaks, because key and reference, or more than one event, would
#: have to change together; and one that is about a checkpoint, which no log holds.
UNREACHED: Final = frozenset(
    {
        "ownership.not-forwarded",
        "ownership.duplicate-dgrad",
        "ownership.wgrad-before-dgrad",
        "ownership.duplicate-wgrad",
        "arena.pending",
        "persistence.live-tape",
        "persistence.mid-epoch",
        "persistence.pending-action",
        "persistence.reduction-in-flight",
        "persistence.configuration",
    }
)


@frozen
class Rejected:
    """
    A rejected example: a valid log with one field changed.

    Args:
        clause: The clause that refuses it.
        log: Name of the valid log.
        edit: The change.
        refused: Line at which it is refused.
        lines: The log after the change.
    """

    clause: str
    log: str
    edit: Edit
    refused: int
    lines: list[str]

    def entry(self) -> dict[str, Any]:
        """Return its entry in the index."""
        return {
            "clause": self.clause,
            "log": f"valid/{self.log}.jsonl",
            "line": self.edit.line,
            "field": self.edit.field,
            "was": self.edit.was,
            "now": self.edit.now,
            "refused_at_line": self.refused,
        }


@cache
def valid() -> Mapping[str, list[str]]:
    """Return the valid logs by name."""
    return {name: scenario() for name, scenario in SCENARIOS.items()}


@cache
def outcomes(log: str) -> tuple[tuple[Edit, ReplayReport | LogError], ...]:
    """Return every one-field edit of a valid log, resealed, with what the replayer says of it."""
    result: list[tuple[Edit, ReplayReport | LogError]] = []
    for edit in edits(valid()[log]):
        try:
            result.append((edit, replay_lines(edit.apply(valid()[log]))))
        except LogError as error:
            result.append((edit, error))
    return tuple(result)


def rejected() -> dict[str, Rejected]:
    """
    Return one rejected log per clause that a single field can break.

    An edit that is refused at its own line is preferred, then a shorter log, then the earlier.
    """
    best: dict[str, tuple[tuple[bool, int], Rejected]] = {}
    for log, lines in valid().items():
        for edit, outcome in outcomes(log):
            if isinstance(outcome, LogError) or outcome.clause is None or outcome.line is None:
                continue
            rank = (outcome.line != edit.line, len(lines))
            if outcome.clause not in best or rank < best[outcome.clause][0]:
                example = Rejected(outcome.clause, log, edit, outcome.line, [])
                best[outcome.clause] = rank, example
    chosen = {
        clause: Rejected(e.clause, e.log, e.edit, e.refused, e.edit.apply(valid()[e.log]))
        for clause, (_, e) in best.items()
    }
    damaged = chosen["order.token"]
    lines = damaged.edit.apply(valid()[damaged.log], sealed=False)
    chosen["log.chain"] = Rejected("log.chain", damaged.log, damaged.edit, damaged.edit.line, lines)
    return {clause: chosen[clause] for clause in CLAUSES if clause in chosen}


@cache
def files() -> Mapping[str, str]:
    """Return the text of every example file by its path under ``spec/logs``."""
    examples = rejected()
    return {
        **{f"valid/{name}.jsonl": "".join(lines) for name, lines in valid().items()},
        **{f"rejected/{clause}.jsonl": "".join(e.lines) for clause, e in examples.items()},
        "rejected/index.json": _index(examples),
    }


def _index(examples: Mapping[str, Rejected]) -> str:
    rows = ",\n".join(f"  {json.dumps(e.entry())}" for e in examples.values())
    return f"[\n{rows}\n]\n"

"""
Edits of a log in one place: a changed field of one line, a missing line, or a repeated line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib import resources
from typing import Any, Final

from attrs import frozen

from qeffect.log.format import DIGEST_BYTES, FIELDS, MARKS, compact
from qeffect.log.recorder import seal

__all__ = ["Edit", "LineEdit", "edits", "line_schema", "reseal", "schema", "semantic_fields"]

Path = tuple[str | int, ...]
_MOST: Final = 4  # maximum number of values tried per place


@frozen
class Edit:
    """
    A change of one field in one line of a log.

    Args:
        line: Number of the line in the log, from 1.
        path: The changed field, as a path of names and indices within the line.
        was: The value before the change.
        now: The value after the change.
    """

    line: int
    path: Path
    was: Any
    now: Any

    @property
    def field(self) -> str:
        """The changed field as text, for example ``ref[1]``."""
        head, *rest = self.path
        return str(head) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest)

    def apply(self, lines: Sequence[str], sealed: bool = True) -> list[str]:
        """
        Return the log with this change.

        Args:
            lines: The log, line by line.
            sealed: Whether to recompute the digests of the changed line and all later lines.
        """
        bodies = [_body(line) for line in lines]
        bodies[self.line - 1] = compact(
            _replaced(_fields(lines[self.line - 1]), self.path, self.now)
        )[:-1]
        if sealed:
            return reseal(bodies)
        changed = list(lines)
        changed[self.line - 1] = bodies[self.line - 1] + lines[self.line - 1][-_END:]
        return changed

    def entry(self) -> dict[str, Any]:
        """Return the change's entry in the index of rejected logs."""
        return {"line": self.line, "field": self.field, "was": self.was, "now": self.now}


@frozen
class LineEdit:
    """
    A deleted line, or a line that is repeated at another place.

    The edit renumbers the later events and corrects their number in the closing line.

    Args:
        line: Number of the line in the log, from 1; the line must be an event.
        at: Line number of the copy in the edited log; None deletes the line.
    """

    line: int
    at: int | None = None

    def apply(self, lines: Sequence[str]) -> list[str]:
        """Return the log with this change and recomputed digests."""
        changed = [_fields(line) for line in lines]
        moved = changed[self.line - 1]
        if self.at is None:
            del changed[self.line - 1]
        else:
            changed.insert(self.at - 1, dict(moved))
        for number, fields in enumerate(changed[1:-1], 1):
            fields["seq"] = number
        changed[-1]["events"] = len(changed) - 2
        return reseal(compact(fields)[:-1] for fields in changed)

    def entry(self) -> dict[str, Any]:
        """Return the change's entry in the index of rejected logs."""
        if self.at is None:
            return {"line": self.line, "removed": True}
        return {"line": self.line, "repeated_at": self.at}


_END: Final = len(',"digest":""}\n') + 2 * DIGEST_BYTES


def reseal(bodies: Iterable[str]) -> list[str]:
    """Return a log's lines from their bodies, with recomputed digests."""
    chain = blake2b(digest_size=DIGEST_BYTES)
    return [seal(body, chain) for body in bodies]


@cache
def schema() -> Mapping[str, Any]:
    """Return the schema of a log's lines."""
    text = (resources.files("qeffect.spec") / "event-log.schema.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


def line_schema(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of the schema that applies to a line with these fields."""
    if "qeffect" in fields:
        name = "header"
    elif "events" in fields:
        name = "closing"
    else:
        name = f"event.{fields['transition']}"
    part: Mapping[str, Any] = schema()["$defs"][name]
    return part


def semantic_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a line's fields that the schema marks as semantic."""
    for name, part in line_schema(fields)["properties"].items():
        if part.get("x-semantic") and name in fields:
            yield name


def edits(lines: Sequence[str]) -> Iterator[Edit]:
    """
    Yield edits of every value in every semantic field (a field with meaning for the contract).

    The new values are typical mistakes of a runtime: neighbouring numbers, a changed digit or
    letter, and values that the same field has elsewhere in the log.
    """
    parsed = [_fields(line) for line in lines]
    seen: dict[Path, list[Any]] = {}
    for fields in parsed:
        for name in semantic_fields(fields):
            for path, value in _places((name,), fields[name]):
                values = seen.setdefault(path, [])
                if value not in values:
                    values.append(value)
    for number, fields in enumerate(parsed, 1):
        for name in semantic_fields(fields):
            for path, value in _places((name,), fields[name]):
                others = seen[path] if number > 1 else []
                for now in _alternatives(path, value, others, fields):
                    yield Edit(number, path, value, now)


def _places(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every simple value inside a value, and every list as a whole, with its path."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _places((*path, name), part)
    elif isinstance(value, list):
        yield path, value
        for place, part in enumerate(value):
            yield from _places((*path, place), part)
    else:
        yield path, value


def _alternatives(
    path: Path, value: Any, others: Sequence[Any], fields: Mapping[str, Any]
) -> Iterator[Any]:
    if path == ("transition",):
        own = FIELDS[value]
        alike = (name for name, names in FIELDS.items() if names == own and name != value)
        yield from (name for name in alike if (name in MARKS) is (value in MARKS))
        return
    near: list[Any]
    if isinstance(value, bool):
        near = [not value]
    elif isinstance(value, int):
        near = [value + 1, value - 1]
    elif isinstance(value, str):
        near = [value[:-1] + ("0" if value[-1:] != "0" else "1")]
    elif isinstance(value, list):
        # Keys and references have a fixed length; only lists of names vary.
        near = [value[:-1], [*value, value[0]]] if value and path[0] not in ("key", "ref") else []
        others = []
    else:
        near = [0, "x"]
    tried = [value]
    for now in (*near, *others):
        if now not in tried and len(tried) <= _MOST:
            tried.append(now)
            yield now


def _fields(line: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(line)
    del fields["digest"]
    return fields


def _body(line: str) -> str:
    return line[:-_END]


def _replaced(value: Any, path: Path, now: Any) -> Any:
    if not path:
        return now
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], now)
    return copy

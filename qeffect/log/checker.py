"""
Checks of the shape of an event log's lines; an error names the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from ..relations.constants import NEVER
from ..text import decoded, json_mistake, shown, within
from .fields import CLOSING, EVENT, HEADER, Field, present
from .format import FIELDS, compact

__all__ = ["LogError", "check_closing", "check_event", "check_header", "parse"]


class LogError(Exception):
    """
    The input is not an event log, or was written by another version of QEffect. The message is one
    line for the user.

    Args:
        message: The error text, in which excerpts of the log are escaped and shortened.
    """

    def __init__(self, message: str) -> None:
        super().__init__(within(decoded(message), 480))


def parse(body: bytes, where: str) -> dict[str, Any]:
    """
    Parse a line strictly. The line must be a JSON object in UTF-8 with the exact spelling that a
    recorder writes, without repeated names and without fractions.

    Args:
        body: The line without its digest and closing brace.
        where: The line's name in error messages.

    Raises:
        LogError: The line is malformed.
    """
    try:
        text = (body + b"}").decode()
        value = json.loads(
            text,
            object_pairs_hook=_once,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except RecursionError:
        raise LogError(f"{where} is nested too deeply to be an event") from None
    except UnicodeDecodeError as error:
        raise LogError(f"{where} is not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise LogError(f"{where} is not JSON as a log writes it: {json_mistake(error)}") from None
    if type(value) is not dict:
        raise LogError(f"{where} is not a JSON object")
    if (spelled := compact(value)) != text:
        pairs = enumerate(zip(text, spelled, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(spelled)))
        raise LogError(
            f"{where} is not spelled as a recorder spells it: at character {at + 1} found "
            f"{shown(text[at : at + 20])}; expected {shown(spelled[at : at + 20])}"
        )
    return value


def check_event(event: Mapping[str, Any], where: str) -> None:
    """
    Check the shape of an event.

    Raises:
        LogError: A field is missing, unknown, out of order or of the wrong type.
    """
    transition = event.get("transition")
    if type(transition) is not str or transition not in FIELDS:
        raise LogError(
            f"{where}, field transition: found {shown(transition)}; expected a transition"
        )
    fields = FIELDS[transition]
    _check(event, present(fields, event), EVENT, f"{where}, {transition}")
    if "weight" not in event and event.get("draws") == NEVER:
        raise LogError(
            f"{where}, {transition}, field draws: found -1; expected an integer of at least 0, or "
            "no field"
        )


def check_header(header: Mapping[str, Any], where: str) -> None:
    """
    Check the shape of a header.

    Raises:
        LogError: Another version wrote the log, or a field is malformed.
    """
    _check(header, tuple(HEADER), HEADER, where)


def check_closing(closing: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> None:
    """
    Check the shape of a closing line.

    Args:
        closing: The parsed closing line.
        columns: The columns (arrays) of the replayed state, by name.
        where: The line's name in error messages.

    Raises:
        LogError: A field is malformed, or the line's state has other columns than `columns`.
    """
    _check(closing, tuple(CLOSING), CLOSING, where)
    if differing := sorted(columns.keys() ^ closing["state"].keys()):
        raise LogError(
            f"{where}, field state: the log and this version of qeffect differ in "
            f"{len(differing)} columns, including {', '.join(differing[:3])}; replay the log with "
            "the version that recorded it"
        )


def _check(
    line: Mapping[str, Any],
    fields: tuple[str, ...],
    table: Mapping[str, Field],
    where: str,
) -> None:
    if tuple(line) != fields:
        raise LogError(f"{where}: found the fields {', '.join(line)}; expected {', '.join(fields)}")
    for name in fields:
        field = table[name]
        if not field.accepts(line[name]):
            raise LogError(
                f"{where}, field {name}: found {shown(line[name])}; expected {field.expected}"
            )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a field occurs twice")
    return result


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")

"""
What a line of an event log may hold: the checks behind every complaint about its shape.

The schema in ``spec/event-log.schema.json`` says the same; a test holds the two together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import attrs

from ..config import Bucket, StageConfig
from ..destinations import Destination
from ..relations.constants import (
    ADDS,
    BACK_BIT,
    GRAD_BIT,
    IN_BIT,
    JOINS,
    NEVER,
    OPENS,
    OUT_BIT,
    OVERWRITES,
)
from ..text import is_name, shown, within
from .format import FIELDS, HEADER, MAGIC, VERSION, compact

__all__ = ["LogError", "check_closing", "check_event", "check_header", "parse"]


class LogError(Exception):
    """
    Input that is not an event log, or that another version wrote; one line for the user.

    Args:
        message: What is wrong; what it repeats of the log is escaped and cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__(within(message, 480))


Check = Callable[[Any], bool]

_HEX: Final = re.compile(r"[0-9a-f]{16}")


def _integer(value: Any) -> bool:
    return type(value) is int


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _told(value: Any) -> bool:
    return type(value) is int and value >= NEVER


def _flag(value: Any) -> bool:
    return type(value) is int and value in (0, 1)


def _hex(value: Any) -> bool:
    return type(value) is str and _HEX.fullmatch(value) is not None


def _key(value: Any) -> bool:
    return type(value) is list and len(value) == 5 and all(map(_natural, value))


def _ref(value: Any) -> bool:
    if type(value) is not list or len(value) != 3:
        return False
    slot, generation, incarnation = value
    return _natural(slot) and _natural(generation) and _hex(incarnation)


def _names(value: Any) -> bool:
    return type(value) is list and all(map(is_name, value))


def _destination(value: Any) -> bool:
    return _natural(value) or (type(value) is list and all(map(_described, value)))


def _described(value: Any) -> bool:
    if type(value) is not dict or tuple(value) != _DESTINATION:
        return False
    microbatch, shape = value["microbatch"], value["shape"]
    return (
        (microbatch is None or _natural(microbatch))
        and type(shape) is list
        and all(map(_natural, shape))
        and all(is_name(value[name]) for name in ("matrix", "dtype", "device"))
        and _natural(value["address"])
        and _natural(value["nbytes"])
    )


def _stage(value: Any) -> bool:
    return (
        type(value) is dict
        and tuple(value) == _STAGE
        and all(type(value[n]) is bool for n in _STAGE_FLAGS)
        and all(map(_natural, (value[n] for n in _STAGE_COUNTS)))
        and type(value["destinations"]) is list
        and all(map(_described, value["destinations"]))
        and _names(value["matrices"])
        and type(value["buckets"]) is list
        and all(map(_bucket, value["buckets"]))
        and type(value["buffers"]) is list
        and all(_names(pair) and len(pair) == 2 for pair in value["buffers"])
        and _names(value["tied"])
    )


def _bucket(value: Any) -> bool:
    return (
        type(value) is dict
        and tuple(value) == _BUCKET
        and (_integer(value["name"]) or is_name(value["name"]))
        and _names(value["matrices"])
    )


def _graph(value: Any) -> bool:
    return type(value) is list and len(value) == 3 and all(map(_natural, value[:2]))


def _action(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _key([0, *value[1]])


def _declared(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_action, value[1]))


def _each(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


_DESTINATION: Final = tuple(a.name for a in attrs.fields(Destination))
_STAGE: Final = tuple(a.name for a in attrs.fields(StageConfig))
_BUCKET: Final = tuple(a.name for a in attrs.fields(Bucket))
_STAGE_FLAGS: Final = (
    "sends_output",
    "sends_gradient",
    "reduces",
    "receives_input",
    "receives_gradient",
    "reports_fills",
    "reports_updates",
)
_STAGE_COUNTS: Final = ("stage", "microbatches", "slots", "blocks", "invocations")

#: What each field of an event must be, and how to say so.
_EVENT: Final[Mapping[str, tuple[Check, str]]] = {
    "seq": (_natural, "a number"),
    "transition": (lambda value: value in FIELDS, "a transition"),
    "key": (_key, "[epoch, stage, microbatch, block, invocation]"),
    "ref": (_ref, "[slot, generation, incarnation as 16 hexadecimal digits]"),
    "slot": (_integer, "a slot index"),
    "refresh": (_flag, "0 or 1"),
    "first": (
        lambda value: _integer(value) and value in (ADDS, OVERWRITES, JOINS, OPENS),
        f"{ADDS}, {OVERWRITES}, {JOINS} or {OPENS}",
    ),
    "bit": (
        lambda value: _integer(value) and value in (OUT_BIT, GRAD_BIT),
        f"{OUT_BIT} or {GRAD_BIT}",
    ),
    "message": (
        lambda value: _integer(value) and value in (IN_BIT, BACK_BIT),
        f"{IN_BIT} or {BACK_BIT}",
    ),
    "destination": (_destination, "a buffer index or a list of destinations"),
    "queued": (_names, "a list of printable matrix names"),
    "filled": (_names, "a list of printable matrix names"),
    "fill_epoch": (_told, "a number, or -1 where none is reported"),
    "updates": (_told, "a number, or -1 where none is reported"),
    "scales": (_told, "a number, or -1 where none is reported"),
    "covered": (_names, "a list of printable matrix names"),
    "incarnation": (_hex, "16 hexadecimal digits"),
    "token": (_natural, "a number"),
    "link": (_natural, "a number"),
    "caller": (_natural, "a number"),
    "ticket": (_natural, "a number"),
    "stage": (_natural, "a number"),
    "domain": (_natural, "a number"),
    "bucket": (_natural, "a number"),
    "epoch": (_natural, "a number"),
    "result": (_natural, "a number"),
}

_HEADER: Final[Mapping[str, tuple[Check, str]]] = {
    "qeffect": (lambda value: value == MAGIC, repr(MAGIC)),
    "version": (lambda value: _integer(value) and value == VERSION, f"{VERSION}"),
    "rank": (lambda value: value is None or _natural(value), "a rank or null"),
    "relations": (_names, "a list of relations"),
    "stages": (_each(_stage), "a list of stage configurations"),
    "callers": (lambda value: type(value) is list, "a list of names"),
    "capture_order": (_each(_graph), "a list of [stage, slot, action]"),
    "declared": (_each(_declared), "a list of [domain, [[action, cell], ...]]"),
    "generation_max": (_natural, "a number"),
    "reductions": (lambda value: type(value) is list, "a list of names"),
    "epoch": (_natural, "a number"),
    "incarnation": (_hex, "16 hexadecimal digits"),
}

_CLOSING: Final[Mapping[str, tuple[Check, str]]] = {
    "events": (_natural, "a number"),
    "state": (
        lambda value: type(value) is dict and all(map(_hex, value.values())),
        "digests of 16 hexadecimal digits",
    ),
}


def parse(body: bytes, where: str) -> dict[str, Any]:
    """
    Parse a line strictly: UTF-8 and JSON, an object, no name twice, no fractions, and spelled in
    the only way that a log spells it.

    Args:
        body: The line without its digest and closing brace.
        where: What to call the line.

    Raises:
        LogError: It is not.
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
        raise LogError(f"{where} is not JSON as a log writes it: {error}") from None
    if type(value) is not dict:
        raise LogError(f"{where} is not a JSON object")
    if (spelled := compact(value)) != text:
        pairs = enumerate(zip(text, spelled, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(spelled)))
        raise LogError(
            f"{where} is not spelled as a log spells it: it has {shown(text[at : at + 20])} "
            f"at character {at + 1}, not {shown(spelled[at : at + 20])}"
        )
    return value


def check_event(event: Mapping[str, Any], where: str) -> None:
    """
    Check the shape of an event.

    Raises:
        LogError: A field is missing, unknown, out of place or of another type.
    """
    transition = event.get("transition")
    if type(transition) is not str or transition not in FIELDS:
        raise LogError(f"{where}, field transition: {shown(transition)} is not a transition")
    _check(event, FIELDS[transition], _EVENT, f"{where}, {transition}")


def check_header(header: Mapping[str, Any], where: str) -> None:
    """
    Check the shape of a header.

    Raises:
        LogError: Another version wrote it, or a field is not what it must be.
    """
    _check(header, HEADER, _HEADER, where)


def check_closing(closing: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> None:
    """
    Check the shape of a closing line.

    Args:
        closing: The line.
        columns: The columns of the replayed state, by name.
        where: What to call the line.

    Raises:
        LogError: A field is not what it must be, or the state has other columns.
    """
    _check(closing, tuple(_CLOSING), _CLOSING, where)
    if differing := sorted(columns.keys() ^ closing["state"].keys()):
        raise LogError(
            f"{where}, field state: the log and this version disagree about {len(differing)} "
            f"columns, {', '.join(differing[:3])} among them; replay it with the version that "
            "recorded it"
        )


def _check(
    line: Mapping[str, Any],
    fields: tuple[str, ...],
    checks: Mapping[str, tuple[Check, str]],
    where: str,
) -> None:
    if tuple(line) != fields:
        raise LogError(f"{where}: has the fields {', '.join(line)}; expected {', '.join(fields)}")
    for name in fields:
        check, expected = checks[name]
        if not check(line[name]):
            raise LogError(f"{where}, field {name}: {shown(line[name])} is not {expected}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a field occurs twice")
    return result


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")

"""
The fields of an event log's lines: one table for the reader, the checker and the schema.

The schema in ``spec/event-log.schema.json`` describes the same fields; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
from attrs import frozen

from ..destinations import Destination
from ..engine.stage import TRANSITIONS
from ..process_layout import REFRESH
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
from ..stage_config import ADDED, Bucket, StageConfig
from ..text import is_name

__all__ = [
    "CLOSING",
    "EVENT",
    "HEADER",
    "MAGIC",
    "MARKS",
    "OPTIONAL",
    "VERSION",
    "Check",
    "Field",
    "present",
]

MAGIC: Final = "event-log"
VERSION: Final = 3

#: Fields of the lines about recorded steps, by kind of line: a step begins, is kept, is dropped, or
#: was committed in one call. Such a line records no transition.
MARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "begin_step": (),
    "keep_step": (),
    "drop_step": (),
    "repeat_step": ("step",),
}

#: Optional fields at the end of some lines. A line leaves out the optional fields after the last
#: one that was reported; older logs lack all of them. ``weight`` and ``parts`` are reported
#: together.
OPTIONAL: Final = ("draws", "weight", "parts")

#: Whether a parsed value has a field's shape.
Check = Callable[[Any], bool]

_HEX: Final = re.compile(r"[0-9a-f]{16}")


def _integer(value: Any) -> bool:
    return type(value) is int


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _reported(value: Any) -> bool:
    return type(value) is int and value >= NEVER


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
        and tuple(value) == tuple(n for n in _STAGE if n not in ADDED or n in value)
        and all(type(value[n]) is bool for n in _STAGE_FLAGS)
        and all(value.get(n, True) is True for n in _ADDED_FLAGS)
        and _natural(value.get("feeds", 0))
        and _positive_pair(value.get("weights_sum", [1, 1]))
        and value.get("scales", "epoch") == "epoch"
        and value.get("refresh_pool", 0) is not None
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


def _positive_pair(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(_natural(n) and n > 0 for n in value)


def _bucket(value: Any) -> bool:
    return (
        type(value) is dict
        and tuple(value) == _BUCKET
        and (_integer(value["name"]) or is_name(value["name"]))
        and _names(value["matrices"])
    )


def _graph(value: Any) -> bool:
    if type(value) is not list or len(value) not in (2, 3):
        return False
    return all(map(_natural, value[:-1])) and (len(value) == 3 or value[-1] == REFRESH)


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
_ADDED_FLAGS: Final = ("copies_input", "reports_draws", "recomputes_draws")
_STAGE_COUNTS: Final = ("stage", "microbatches", "slots", "blocks", "invocations")


_NUMBER: Final = "[0-9]++"
_NAME: Final = r'"[ !#-\[\]-~]*+"'
_NAMES: Final = rf"\[(?:{_NAME}(?:,{_NAME})*)?\]"


@frozen
class Field:
    """
    One field of a line.

    Args:
        accepts: Function that returns whether a parsed value has the field's shape.
        expected: The expected shape as text, for error messages.
        spelled: Regular expression for the recorder's usual spelling. The pattern need not exclude
            leading zeros, because the line is already known to be JSON. The checker also accepts
            escapes, names beyond ASCII, and destinations in full; lines with these are read by
            slower code.
        choices: The allowed values, if there are only a few; otherwise empty.
    """

    accepts: Check
    expected: str
    spelled: str = _NUMBER
    choices: frozenset[int] = frozenset()


def _choice(*choices: int) -> Field:
    *most, last = choices
    return Field(
        lambda value: _integer(value) and value in choices,
        f"{', '.join(map(str, most))} or {last}",
        choices=frozenset(choices),
    )


_NATURAL: Final = Field(_natural, "an integer of at least 0")
_REPORT: Final = Field(
    _reported, "an integer of at least 0, or -1 if nothing was reported", f"(?:-1|{_NUMBER})"
)
_MATRICES: Final = Field(_names, "a list of printable matrix names", _NAMES)
_INCARNATION: Final = Field(_hex, "16 hexadecimal digits", '"[0-9a-f]{16}"')

#: The fields of an event, by name. `qeffect.log.format.FIELDS` lists the fields of each transition.
EVENT: Final[Mapping[str, Field]] = {
    "seq": _NATURAL,
    "transition": Field(
        lambda value: type(value) is str and (value in TRANSITIONS or value in MARKS),
        "the name of a transition or of a step line",
    ),
    "key": Field(
        _key, "[epoch, stage, microbatch, block, invocation]", rf"\[{','.join([_NUMBER] * 5)}\]"
    ),
    "ref": Field(
        _ref,
        "[slot, generation, incarnation as 16 hexadecimal digits]",
        rf'\[{_NUMBER},{_NUMBER},"[0-9a-f]{{16}}"\]',
    ),
    "slot": Field(_integer, "a slot index", f"(?:-1|{_NUMBER})"),
    "leader": _NATURAL,
    "refresh": _choice(0, 1),
    "cached": _choice(0, 1),
    "first": _choice(ADDS, OVERWRITES, JOINS, OPENS),
    "bit": _choice(OUT_BIT, GRAD_BIT),
    "message": _choice(IN_BIT, BACK_BIT),
    "destination": Field(_destination, "a buffer index or a list of destinations"),
    "queued": _MATRICES,
    "filled": _MATRICES,
    "fill_epoch": _REPORT,
    "updates": _REPORT,
    "scales": _REPORT,
    "draws": _REPORT,
    "weight": _NATURAL,
    "parts": _NATURAL,
    "covered": _MATRICES,
    "incarnation": _INCARNATION,
    "token": _NATURAL,
    "link": _NATURAL,
    "caller": _NATURAL,
    "ticket": _NATURAL,
    "stage": _NATURAL,
    "domain": _NATURAL,
    "bucket": _NATURAL,
    "epoch": _NATURAL,
    "step": _NATURAL,
    "result": _NATURAL,
}


def present(fields: tuple[str, ...], event: Mapping[str, Any]) -> tuple[str, ...]:
    """
    Return the fields that a line must have: all fields, without the optional fields that follow the
    last optional field in the line.

    >>> present(("queued", "draws", "weight", "parts"), {"queued": [], "draws": 3})
    ('queued', 'draws')
    """
    last = next((name for name in reversed(OPTIONAL) if name in event), None)
    left_out = OPTIONAL if last is None else () if last != "draws" else OPTIONAL[1:]
    return tuple(name for name in fields if name not in left_out)


#: The fields of the header, in order, without the digest.
HEADER: Final[Mapping[str, Field]] = {
    "qeffect": Field(lambda value: value == MAGIC, repr(MAGIC)),
    "version": Field(lambda value: _integer(value) and value == VERSION, f"{VERSION}"),
    "rank": Field(lambda value: value is None or _natural(value), "a rank or null"),
    "relations": Field(_names, "a list of relations"),
    "stages": Field(_each(_stage), "a list of stage configurations"),
    "callers": Field(lambda value: type(value) is list, "a list of names"),
    "capture_order": Field(_each(_graph), 'a list of [stage, slot, action] and [stage, "refresh"]'),
    "declared": Field(_each(_declared), "a list of [domain, [[action, cell], ...]]"),
    "generation_max": _NATURAL,
    "reductions": Field(lambda value: type(value) is list, "a list of names"),
    "epoch": _NATURAL,
    "incarnation": _INCARNATION,
}

#: The fields of the closing line, in order, without the digest.
CLOSING: Final[Mapping[str, Field]] = {
    "events": _NATURAL,
    "state": Field(
        lambda value: type(value) is dict and all(map(_hex, value.values())),
        "digests of 16 hexadecimal digits",
    ),
}

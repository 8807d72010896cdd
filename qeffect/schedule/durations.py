"""
Durations of actions and messages: the input of the step-time simulator, and its file format.

The file is one JSON object; its schema is ``durations.schema.json`` beside this module. Every
number is a time in the file's `unit`. F, I and W are required. `stages`, `ranks` and `links` (pairs
of ranks) replace these times for single stages, ranks and links:

>>> given = {"unit": "ms", "F": 0.3, "I": 0.3, "W": 0.2, "stages": {"0": {"F": 1}}}
>>> durations = parse_durations(given)
>>> durations.of(Kind.FORWARD, 0), durations.of(Kind.FORWARD, 1)
(1, 0.3)
>>> parse_durations({**given, "stages": {"0": {"F": -1}}})
Traceback (most recent call last):
  ...
qeffect.schedule.actions.ScheduleError: durations: stages.0.F: expected a number from 0 to ...

`grouped_W` gives the time of one matrix product that computes the dW of several microbatches:

>>> grouped = parse_durations({**given, "grouped_W": {"4": 0.5}})
>>> grouped.product(0, 4), grouped.product(0, 8)
(0.5, None)
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import attrs

from ..text import json_mistake, unreadable
from .actions import Kind, Schedule, ScheduleError, shorten

#: Microseconds of each unit that a file may use.
UNITS: Mapping[str, float] = MappingProxyType({"s": 1e6, "ms": 1e3, "us": 1.0})
MAX_BYTES = 1 << 20
MOST = 10**9

Time = int | float | Fraction

_COMPUTATIONS = ("F", "I", "W")
_OPTIONAL = ("refresh", "message", "reduce", "update", "consent", "host", "launch")
_OF_STAGE = (*_COMPUTATIONS, "refresh", "reduce")
_GROUPED = "grouped_W"
_OF_RANK = ("update", "host", "launch")
_INDEX = r"(?:0|[1-9][0-9]{0,5})"
_GROUP = r"(?:[2-9]|[1-9][0-9]{1,5})"


@attrs.frozen
class Durations:
    """
    The durations of one step.

    The simulator only adds and compares times, so integers and fractions stay exact.

    Args:
        times: Times by name: `F`, `I`, `W`, and any of `refresh`, `message`, `reduce`, `update`,
            `consent` (all ranks agree before an update), `host` and `launch`; zero if left out.
        unit: The unit of every time: s, ms or us.
        stages: For single stages, times that replace the general `F`, `I`, `W`, `refresh` and
            `reduce`.
        ranks: For single ranks, times that replace the general `update`, `host` and `launch`.
        links: For directed pairs of ranks, times that replace the general `message`.
        grouped: For each number of microbatches, the time of one matrix product that computes the
            dW of this number of microbatches, including the packing of the operands.
        grouped_stages: For single stages, times that replace the times in `grouped`.
    """

    times: Mapping[str, Time]
    unit: str = "ms"
    stages: Mapping[int, Mapping[str, Time]] = attrs.field(factory=dict)
    ranks: Mapping[int, Mapping[str, Time]] = attrs.field(factory=dict)
    links: Mapping[tuple[int, int], Time] = attrs.field(factory=dict)
    grouped: Mapping[int, Time] = attrs.field(factory=dict)
    grouped_stages: Mapping[int, Mapping[int, Time]] = attrs.field(factory=dict)

    def of(self, kind: Kind, stage: int) -> Time:
        """Return the time of a stage's F, I or W."""
        return self.stages.get(stage, {}).get(kind.value, self.times[kind.value])

    def product(self, stage: int, group: int) -> Time | None:
        """
        Return the time of one matrix product that computes a stage's dW of `group` microbatches.

        The result is `None` if the durations contain this time neither for the stage nor for all
        stages. A stage with its own `W` also needs its own product time: the product time for all
        stages belongs to the `W` of all stages.
        """
        own = self.grouped_stages.get(stage, {}).get(group)
        if own is not None or Kind.WGRAD.value in self.stages.get(stage, {}):
            return own
        return self.grouped.get(group)

    def refresh(self, stage: int) -> Time:
        """Return how long a stage quantizes its weights, before its first F of a step."""
        return self.stages.get(stage, {}).get("refresh", self.times.get("refresh", 0))

    def message(self, source: int, target: int) -> Time:
        """Return the time of a message from one rank to another."""
        return self.links.get((source, target), self.times.get("message", 0))

    def reduction(self, stage: int) -> Time:
        """Return the time of the reduction of a stage's gradients."""
        return self.stages.get(stage, {}).get("reduce", self.times.get("reduce", 0))

    def on(self, rank: int, name: str) -> Time:
        """Return the time of a rank's `update`, `host` or `launch`."""
        return self.ranks.get(rank, {}).get(name, self.times.get(name, 0))

    @property
    def consent(self) -> Time:
        """
        The time that all ranks take to agree before any update. If it is zero, no rank waits for
        the other ranks before its update.
        """
        return self.times.get("consent", 0)

    def require(self, schedule: Schedule) -> None:
        """
        Refuse a schedule that lacks a stage, rank or link that the durations name.

        Raises:
            ScheduleError: The schedule lacks a stage, rank or link; the message names it.
        """
        stages, ranks = range(schedule.num_stages), range(schedule.num_ranks)
        for name, given, known in (
            ("stages", {*self.stages, *self.grouped_stages}, stages),
            ("ranks", self.ranks, ranks),
            ("links", [rank for link in self.links for rank in link], ranks),
        ):
            strange = sorted(set(given) - set(known))
            if strange:
                what = "rank" if name == "links" else name.removesuffix("s")
                raise ScheduleError(
                    f"durations: {name}: expected {what}s of the schedule, 0 to {len(known) - 1}, "
                    f"found {strange[0]}; leave it out, or use the schedule that it belongs to"
                )
        for source, target in self.links:
            if source == target:
                raise ScheduleError(
                    f"durations: links: expected two ranks, found {source}->{target}; leave it "
                    "out, since stages of one rank pass tensors to each other without a message"
                )


def read_durations(path: str | Path) -> Durations:
    """
    Read a file of durations.

    Raises:
        ScheduleError: The file cannot be read, is not JSON, or violates the schema; the message
            names the field, what was expected, what was found and what to do.
    """
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: {unreadable(error)}") from None
    if len(data) > MAX_BYTES:
        raise ScheduleError(f"{path}: larger than the limit of {MAX_BYTES >> 20} MiB")
    try:
        given = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ScheduleError(
            f"{path}: not JSON: found {json_mistake(error)}; expected one object such as "
            '{"unit": "ms", "F": 0.3, "I": 0.3, "W": 0.3, "message": 0.04}'
        ) from None
    return parse_durations(given, source=str(path))


def parse_durations(given: object, *, source: str = "durations") -> Durations:
    """
    Make durations from plain data that follows `durations.schema.json`.

    Args:
        given: The parsed JSON object of a file.
        source: Name of the data in error messages.

    Raises:
        ScheduleError: The data violates the schema.
    """
    parser = _Parser(source)
    top = parser.an_object("", given)
    known = ("unit", *_COMPUTATIONS, _GROUPED, *_OPTIONAL, "stages", "ranks", "links")
    parser.names("", top, known)
    for name in ("unit", *_COMPUTATIONS):
        if name not in top:
            wanted = f"one of {', '.join(UNITS)}" if name == "unit" else "a time"
            parser.refuse(name, wanted, "nothing", "add it")
    if not isinstance(top["unit"], str) or top["unit"] not in UNITS:
        parser.refuse("unit", f"one of {', '.join(UNITS)}", _shown(top["unit"]), "name the unit")
    times = {n: parser.time(n, top[n]) for n in (*_COMPUTATIONS, *_OPTIONAL) if n in top}
    links = parser.keyed("links", top, f"{_INDEX}->{_INDEX}", 'two ranks, as in "0->1"')
    stages = parser.table("stages", top, (*_OF_STAGE, _GROUPED))
    grouped_stages = {
        stage: parser.products(f"stages.{stage}", inner)
        for stage, inner in stages.items()
        if _GROUPED in inner
    }
    return Durations(
        times,
        top["unit"],
        parser.timed("stages", stages),
        parser.timed("ranks", parser.table("ranks", top, _OF_RANK)),
        {_link(key): parser.time(f"links.{key}", time) for key, time in links.items()},
        parser.products("", top),
        grouped_stages,
    )


@attrs.frozen
class _Parser:
    source: str

    def refuse(self, field: str, expected: str, found: str, remedy: str) -> NoReturn:
        place = f"{field}: " if field else ""
        raise ScheduleError(f"{self.source}: {place}expected {expected}, found {found}; {remedy}")

    def an_object(self, field: str, given: object) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            self.refuse(field, "an object", _shown(given), "write { and } around names and times")
        return given

    def names(self, field: str, given: Mapping[str, Any], known: Collection[str]) -> None:
        for name in given:
            if name not in known:
                place = f"{field}.{name}" if field else str(name)
                remedy = (
                    "give I and W instead, the two halves of B" if name == "B" else "leave it out"
                )
                self.refuse(shorten(place), f"one of {', '.join(known)}", _shown(name), remedy)

    def time(self, field: str, given: object) -> Time:
        if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= MOST:
            return given
        self.refuse(
            field,
            f"a number from 0 to {MOST:,}",
            _shown(given),
            "give a time in `unit`",
        )

    def keyed(
        self, name: str, outer: Mapping[str, Any], pattern: str, wanted: str, place: str = ""
    ) -> Mapping[str, Any]:
        field = place or name
        given = self.an_object(field, outer.get(name, {}))
        for key in given:
            if not isinstance(key, str) or not re.fullmatch(pattern, key, re.ASCII):
                self.refuse(
                    field, f"names that are {wanted}", _shown(key), "write each name in this form"
                )
        return given

    def table(
        self, field: str, top: Mapping[str, Any], known: Collection[str]
    ) -> dict[int, Mapping[str, Any]]:
        found = {}
        for key, inner in self.keyed(field, top, _INDEX, 'numbers, as in "0"').items():
            place = f"{field}.{key}"
            self.names(place, self.an_object(place, inner), known)
            found[int(key)] = inner
        return found

    def timed(
        self, field: str, table: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, dict[str, Time]]:
        return {
            key: {n: self.time(f"{field}.{key}.{n}", t) for n, t in inner.items() if n != _GROUPED}
            for key, inner in table.items()
        }

    def products(self, field: str, given: Mapping[str, Any]) -> dict[int, Time]:
        place = f"{field}.{_GROUPED}" if field else _GROUPED
        wanted = 'numbers of microbatches from 2 to 999999, as in "4"'
        found = self.keyed(_GROUPED, given, _GROUP, wanted, place)
        return {int(key): self.time(f"{place}.{key}", time) for key, time in found.items()}


def _link(key: str) -> tuple[int, int]:
    source, target = key.split("->")
    return int(source), int(target)


def _shown(found: object) -> str:
    try:
        return shorten(json.dumps(found))
    except (TypeError, ValueError, RecursionError):
        return shorten(type(found).__name__)


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {shorten(name)!r} occurs twice in one object")
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a duration")

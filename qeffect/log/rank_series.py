"""
Join the files of each rank log into one log, and cut the logs so that all begin at the same commit.

If the first files of a log were removed, the log begins in the middle of the run. The state at its
beginning comes from the header of the first remaining file, and is taken on trust. If a rank was
killed, the logs of one attempt may begin at different commits. The logs that begin earlier are then
cut at the first commit that all logs have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from .checker import LogError
from .rank_log import RankLines
from .rank_place import RankPlace
from .rotation import CONTINUES

__all__ = ["TAKEN_ON_TRUST", "begun_together", "joined"]

TAKEN_ON_TRUST: Final = "continues"
"""The event that is inserted at the beginning of a log whose first file is missing."""


def joined(paths: Iterable[str | os.PathLike[str]]) -> list[RankLines]:
    """
    Read rank logs, and join the files of each log.

    Args:
        paths: The files, in any order.

    Raises:
        LogError: A file is not a rank log or does not continue the file before it, or a file
            between two given files is missing.
    """
    found: dict[str, dict[int, RankLines]] = {}
    for path in paths:
        log = RankLines.read(path)
        part = log.header[CONTINUES]["part"] if CONTINUES in log.header else 0
        files = found.setdefault(_own(log), {})
        other = files.setdefault(part, log)
        if other is not log:
            raise LogError(
                f"{log.name} and {other.name} are both of rank {log.header['rank']} in one attempt"
                + (f", file {part}" if part else "")
            )
    return [_join([files[part] for part in sorted(files)]) for files in found.values()]


def _own(log: RankLines) -> str:
    """Return the header fields that all files of one log have in common, as text."""
    return repr([(k, v) for k, v in log.header.items() if k not in (CONTINUES, "digest")])


def _join(files: Sequence[RankLines]) -> RankLines:
    log, *rest = files
    for further in rest:
        continues = further.header[CONTINUES]
        part = log.header[CONTINUES]["part"] if CONTINUES in log.header else 0
        told = log.files[-1][0] - 1 + len(log.events)
        if continues["part"] != part + 1:
            raise LogError(
                f"file {part + 1} is missing between {log.files[-1][1]} and {further.name}"
            )
        if (continues["after"], continues["events"]) != (log.last, told):
            raise LogError(
                f"{further.name} does not continue {log.files[-1][1]}: expected event {told} "
                f"with digest {log.last}, found {continues['events']} with {continues['after']}"
            )
        log = attrs.evolve(further, files=(*log.files, *further.files))
    first = files[0]
    events = tuple(event for file in files for event in file.events)
    return attrs.evolve(log, name=first.name, header=first.header, events=events)


def begun_together(logs: Sequence[RankLines]) -> list[RankLines]:
    """
    If a log lacks its first file, cut the logs of one attempt so that all begin at the same commit.

    Args:
        logs: The log of each rank.

    Returns:
        The logs. If any log lacks its first file, every log begins with the event `TAKEN_ON_TRUST`.

    Raises:
        LogError: The logs have no commit in common at which all of them can begin.
    """
    late = [log for log in logs if CONTINUES in log.header]
    if not late:
        return [*logs]
    places = [_places(log) for log in logs]
    latest = max(late, key=lambda log: _key(RankPlace.beginning(log.header)))
    start = _key(RankPlace.beginning(latest.header))
    common = [key for key in set.intersection(*map(set, places)) if key >= start]
    if not common:
        ends = min(zip(logs, places, strict=True), key=lambda pair: max(pair[1], default=(0, 0)))
        raise LogError(
            f"{latest.name} begins in epoch {start[1]}; expected a commit of this or a "
            "later epoch in the logs of all ranks, found none in "
            f"{ends[0].name}; give the earlier files too"
        )
    return [_cut(log, *own[min(common)]) for log, own in zip(logs, places, strict=True)]


def _key(place: RankPlace) -> tuple[int, int]:
    return place.again, place.epoch


def _places(log: RankLines) -> dict[tuple[int, int], tuple[RankPlace, int]]:
    """Return the points at which a log can begin, with the number of events before each."""
    place = RankPlace.beginning(log.header)
    found = {_key(place): (attrs.evolve(place), 0)} if CONTINUES in log.header else {}
    for before, event in enumerate(log.events, 1):
        if place.take(event):
            found.setdefault(_key(place), (attrs.evolve(place), before))
    return found


def _cut(log: RankLines, place: RankPlace, before: int) -> RankLines:
    seq = log.files[0][0] - 1 + before
    begin: dict[str, Any] = {"seq": seq, "event": TAKEN_ON_TRUST, **attrs.asdict(place)}
    return attrs.evolve(log, events=(begin, *log.events[before:]))

"""
Rank logs: the interaction of a job's ranks, in one file for each rank and attempt (start of the
job).

An event log (`qeffect.log.recorder`) records a contract's transitions (accepted calls). A rank log
records the events between ranks, which a contract does not see: the start, posted and received
messages, consents (votes before a commit), the ranks' parts of checkpoints, and the stop. Every
line is written without a buffer, so that the log of a killed process ends with the last action of
the process. `qeffect replay` checks the logs of all ranks against a model of how ranks interact.

A log may have several files; each later file begins after a commit. All ranks begin their later
files at the same epochs. A rank removes an old file only two commits after it began the next file.
By then every other rank has also begun its next file, so the remaining files of all ranks have a
commit in common. The header of a later file contains a state (`RankPlace`);
`qeffect.log.rank_series` joins the files.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import attrs

from qeffect.spec.rank_log import FIELD_KINDS, RANK_CONTINUES, RANK_EVENTS, RANK_HEADER

from .checker import LogError
from .format import DIGEST_BYTES, compact
from .rank_place import RankPlace
from .recorder import seal
from .rotation import CONTINUES, Rotation

__all__ = ["RANK_MAGIC", "RankLines", "RankLog", "is_rank_log", "order_digest"]

RANK_MAGIC: Final = "rank-log"
_VERSION: Final = 1
#: If a rank has committed this many times after a commit, every rank has written that commit.
_KNOWN_TO_ALL: Final = 2
_PRIME: Final = (1 << 61) - 1
_BASE: Final = 1_000_003


class RankLog:
    """
    Writes one rank's log.

    Args:
        file: A path; a `Rotation` for a log with several files; or None to keep the lines in
            memory.
        header: The fields of `RANK_HEADER` except `began`.

    Attributes:
        lines: The lines, if they are kept in memory.
        place: The buffer of the next posted message: its slot (set of buffers) and the slot's
            generation.
        ended: Whether the log was closed or could not be written. Later events are not written.
        problem: Why the log could not be written; empty if no write failed.
        ends: Function that is called once, with the write error that ended the log; or None.

    >>> log = RankLog(None, rank=0, world=1, attempt=None, worker=0, epoch=0, channels=[])
    >>> log("begin_step", epoch=0)
    >>> log.close()
    >>> [json.loads(line).get("event") for line in log.lines]
    [None, 'begin_step', 'closed']
    """

    def __init__(self, file: str | os.PathLike[str] | None, **header: Any) -> None:
        self.lines: list[str] = []
        self.place = (0, 0)
        self.ended = False
        self.problem = ""
        self.ends: Callable[[OSError], object] | None = None
        self._count = 0
        self._lock = threading.Lock()  # an asynchronous save publishes from a thread
        self._rotation = file if isinstance(file, Rotation) else None
        if self._rotation is not None:
            self._rotation.clear()
        self._part = 0
        self._new: dict[int, int] = {}  # by file that others may not have: commits since
        self._file = None if file is None else Path(file).open("wb", buffering=0)  # noqa: SIM115
        began = {"began": time.time_ns()}
        self._header = {name: {**header, **began}[name] for name in RANK_HEADER}
        self._place = RankPlace(header["epoch"])
        self._begin()

    def _begin(self, **continues: Any) -> None:
        """Write a file's header."""
        self._chain = blake2b(digest_size=DIGEST_BYTES)
        more = {CONTINUES: continues} if continues else {}
        self._write({"qeffect": RANK_MAGIC, "version": _VERSION, **self._header, **more})

    def __call__(self, event: str, **fields: Any) -> None:
        """
        Write an event to the log.

        Args:
            event: The event's name, one of `RANK_EVENTS`.
            fields: The event's fields, in the order of `RANK_EVENTS`.
        """
        assert fields.keys() == RANK_EVENTS[event][0].keys(), event
        with self._lock:
            if self.ended:
                return
            self._count += 1
            line = {"seq": self._count, "event": event, **fields}
            self._write(line)
            if self._rotation is not None and not self.ended:
                self._rotate(self._rotation, line)

    def _rotate(self, files: Rotation, event: Mapping[str, Any]) -> None:
        """After a commit, remove files that are too old, and begin the next file when it is due."""
        again = self._place.again
        committed = self._place.take(event)
        if again != self._place.again:  # commits of an earlier beginning may be undone
            self._new = dict.fromkeys(self._new, 0)
        if not committed:
            return
        for part in [*self._new]:
            self._new[part] += 1
            if self._new[part] >= _KNOWN_TO_ALL:
                del self._new[part]
                files.forget(part)
        if self._place.epoch % files.steps:
            return
        self._part += 1
        self._new[self._part] = 0
        after = self._last
        assert self._file is not None
        try:
            self._file.close()
            self._file = files.part(self._part).open("wb", buffering=0)
        except OSError as error:
            self._end(error)
            return
        place = attrs.asdict(self._place, filter=lambda field, _: field.name in RANK_CONTINUES)
        values = {"part": self._part, "events": self._count, "after": after, **place}
        self._begin(**{name: values[name] for name in RANK_CONTINUES})

    def posted(self, event: str, peer: int, message: Sequence[Any]) -> None:
        """Write that a message was posted, and the message's buffer (see `place`)."""
        slot, generation = self.place
        self(event, peer=peer, message=[*message], slot=slot, generation=generation)

    def close(self) -> None:
        """Write that the process ended normally, and close the log; a second call does nothing."""
        self("closed")
        with self._lock:
            self.ended = True
            if self._file is not None:
                self._file.close()

    def _write(self, fields: Mapping[str, Any]) -> None:
        line = seal(compact(fields)[:-1], self._chain)
        self._last: str = line.rpartition(':"')[2][: 2 * DIGEST_BYTES]
        if self._file is None:
            self.lines.append(line)
        else:
            try:
                self._file.write(line.encode())
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        """Note a write error instead of raising it: a failed log must not prevent a clean stop."""
        self.ended, self.problem = True, error.strerror or str(error)
        if self.ends is not None:
            self.ends(error)


@attrs.frozen
class RankLines:
    """
    The content of a rank log.

    Args:
        name: The path of the log, or of its first file.
        header: The fields of the log's header.
        events: The log's events; the name of an event determines its fields.
        last: The digest of the log's last line.
        files: For each file, the sequence number of its first event and its path.
    """

    name: str
    header: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    last: str = ""
    files: tuple[tuple[int, str], ...] = ()

    def where(self, seq: int) -> tuple[str, int]:
        """Return the file and line of an event; ``seq`` may also be one after the last event."""
        begun = (one for one in reversed(self.files) if one[0] <= seq)
        first, name = next(begun, self.files[0])
        return name, seq - first + 2

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RankLines:
        """
        Read a log. A last line without a newline is ignored: the process was killed while it wrote
        the line.

        Raises:
            LogError: The file is not a rank log, or a line is damaged.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise LogError(f"{path}: {error.strerror or error}") from error
        chain = blake2b(digest_size=DIGEST_BYTES)
        *lines, _ = data.split(b"\n")
        parsed = [_line(path, number, line, chain) for number, line in enumerate(lines, 1)]
        if not parsed or parsed[0].get("qeffect") != RANK_MAGIC:
            raise LogError(f"{path}: expected a rank log's header in line 1")
        header, *events = parsed
        if header.get("version") != _VERSION:
            raise LogError(
                f"{path}: line 1: expected version {_VERSION}, found {header.get('version')!r}"
            )
        fields = {name: kind for name, (kind, _) in RANK_HEADER.items()}
        further = {CONTINUES} & header.keys()
        _check(path, 1, header, {"qeffect", "version", "digest", *further}, fields)
        begin = 1
        if further:
            fields = {name: kind for name, (kind, _) in RANK_CONTINUES.items()}
            if type(header[CONTINUES]) is not dict:
                raise LogError(f"{path}: line 1: {CONTINUES}: expected an object")
            _check(path, 1, header[CONTINUES], set(), fields)
            begin += header[CONTINUES]["events"]
        if header["rank"] >= header["world"]:
            raise LogError(
                f"{path}: line 1: expected a rank below {header['world']}, found {header['rank']}"
            )
        for line, event in enumerate(events, 2):
            name = event.get("event")
            if type(name) is not str or name not in RANK_EVENTS:
                raise LogError(
                    f"{path}: line {line}: expected an event of a rank log, found {name!r}"
                )
            _check(path, line, event, {"seq", "event", "digest"}, RANK_EVENTS[name][0])
            if event["seq"] != (seq := begin + line - 2):
                raise LogError(f"{path}: line {line}: expected seq {seq}, found {event['seq']}")
        return cls(str(path), header, tuple(events), parsed[-1]["digest"], ((begin, str(path)),))


def _line(path: Any, number: int, line: bytes, chain: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
        if type(parsed) is not dict:
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path}: line {number}: expected a JSON object: {error}") from error
    body = {name: value for name, value in parsed.items() if name != "digest"}
    sealed = seal(compact(body)[:-1], chain).encode()
    if sealed != line + b"\n":
        raise LogError(
            f"{path}: line {number}: the digest does not match the lines so far; the log was "
            "changed or damaged: take the log that the run wrote"
        )
    return parsed


def _check(
    path: Any, line: int, found: Mapping[str, Any], common: set[str], fields: Mapping[str, str]
) -> None:
    if found.keys() != common | fields.keys():
        expected = ", ".join(fields) or "no field"
        raise LogError(f"{path}: line {line}: expected {expected}, found {', '.join(found)}")
    for name, kind in fields.items():
        if not FIELD_KINDS[kind](found[name]):
            raise LogError(
                f"{path}: line {line}: {name} is malformed: expected {kind}, found {found[name]!r}"
            )


def order_digest(numbers: Iterable[int], before: int = 0) -> int:
    """
    Return a digest of a channel's messages, which depends on their order.

    Args:
        numbers: The number of each message: its stage, microbatch and direction.
        before: Digest of earlier messages of the channel.

    >>> order_digest([3, 5]) == order_digest([5, 3])
    False
    >>> order_digest([5], order_digest([3])) == order_digest([3, 5])
    True
    """
    for number in numbers:
        before = (before * _BASE + number) % _PRIME
    return before


def is_rank_log(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like a rank log; False for a file that cannot be read."""
    mark = b'{"qeffect":"%s"' % RANK_MAGIC.encode()
    try:
        with Path(path).open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False

"""
The event log's recorder: it writes one line per accepted transition (contract call). Each line ends
in a digest of the log up to this line.

If a contract has no recorder, the hook for recorders costs one comparison per transition.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from ..configuration import write_destinations
from ..contract import Contract
from ..keys import TapeKey, TapeRef
from ..relations.constants import NEVER
from ..steps import RecordedStep, Recording
from ..text import shown
from .fields import MARKS, OPTIONAL
from .format import DIGEST_BYTES, FIELDS, KEPT_STEPS, compact, describe, fingerprints
from .rotation import CONTINUES, Rotation, columns_of

__all__ = ["Recorder", "seal"]

#: Transitions whose last fields are left out where nothing was reported.
_REPORTS: Final = frozenset(name for name, fields in FIELDS.items() if fields[-1] in OPTIONAL)


def seal(body: str, chain: blake2b) -> str:
    """
    Return a complete log line: the body, the digest and a newline.

    Args:
        body: The JSON object without its closing brace.
        chain: Running digest of all earlier lines; this call adds the new line to it.
    """
    chain.update(body.encode())
    end = f',"digest":"{chain.hexdigest()}"}}\n'
    chain.update(end.encode())
    return body + end


class Recorder:
    """
    Writes a contract's event log while it is attached.

    A line is written after its transition was accepted. If writing fails, for example on a full
    disk, the caller of the transition gets the error, although the transition has taken effect. The
    log is then incomplete, and ``Contract.outstanding()`` includes the ticket if the transition was
    a check. If `ends` is set, the caller gets no error, and the log ends at this line.

    Args:
        contract: The contract to observe, before its first transition.
        file: Where to write: a path, a binary file, a `Rotation` for a log with several files, or
            None to keep the lines in memory.
        rank: Rank of the process, written to the header for readers of the log.

    Attributes:
        ends: Function that is called once, with the error that ended the log. If None, the error is
            raised.
        ended: Whether the log ended with an error. Later transitions are not written.

    Raises:
        TypeError: The file is neither a path nor a file object, or was opened in text mode.
        ValueError: The contract already has an observer, has made a transition, or has a name
            that JSON cannot hold.

    >>> from qeffect import StageConfig
    >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
    >>> with Recorder(contract) as log:
    ...     contract.submit()
    >>> len(log.lines)  # header, event, closing line
    3
    """

    def __init__(
        self,
        contract: Contract,
        file: str | os.PathLike[str] | BinaryIO | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        if contract.observer is not None:
            raise ValueError("the contract already has an observer; detach it first")
        if isinstance(file, io.TextIOBase) or not (
            file is None or isinstance(file, str | os.PathLike) or hasattr(file, "write")
        ):
            raise TypeError(f"file must be a path, a binary file or None, got {shown(file)}")
        header = describe(contract, rank)
        self.contract = contract
        self.lines: list[str] = []
        self.events = 0
        self.ends: Callable[[OSError], object] | None = None
        self.ended = False
        self._steps: dict[RecordedStep, int] = {}
        self._owned = isinstance(file, str | os.PathLike)
        self._rotation = file if isinstance(file, Rotation) else None
        self._header = header
        self._part = self._taken = 0  # the file, and the steps in it
        self._recorded: list[str] | None = None  # bodies of the step that is being recorded
        self._start: dict[str, Any] = {}  # the state before it
        self._kept: dict[int, tuple[dict[str, Any], list[str]]] = {}
        if self._rotation is not None:
            self._rotation.clear()
        self._file: BinaryIO | None = (
            Path(file).open("wb")  # noqa: SIM115 - close() closes it
            if isinstance(file, str | os.PathLike)
            else file
        )
        self._chain = blake2b(digest_size=DIGEST_BYTES)
        self._write(compact(header)[:-1])
        contract.observer = self

    @classmethod
    def attach(
        cls,
        contract: Contract,
        file: str | os.PathLike[str] | BinaryIO | None = None,
        *,
        rank: int | None = None,
    ) -> Recorder:
        """Begin to record a contract; this call is the same as constructing a recorder."""
        return cls(contract, file, rank=rank)

    def __call__(self, transition: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Record one accepted transition; the contract calls this method."""
        self.events += 1
        body = f'{{"seq":{self.events},"transition":"{transition}"'
        last = len(arguments)
        if transition in _REPORTS:
            while (
                last and arguments[last - 1] == NEVER and FIELDS[transition][last + 1] in OPTIONAL
            ):
                last -= 1
        for name, value in zip(FIELDS[transition][2:], arguments[:last], strict=False):
            if name == "destination":
                body += f',"destination":{self._destination(arguments[0], value)}'
            else:
                body += f',"{name}":{_TEXT.get(name, _integer)(value)}'
        if result is not None:
            body += f',"result":{result}'
        if self._recorded is not None and transition not in MARKS:
            self._recorded.append(body)
        self._write(body)
        if transition == "commit_update":
            self._taken += 1
            if self._recorded is None:
                self._rotate()

    def begin_step(self) -> int:
        """Write that the recording of a step begins; return the line's sequence number."""
        self("begin_step", (), None)
        if self._rotation is not None:
            self._recorded, self._start = [], columns_of(self.contract.memory)
        return self.events

    def keep_step(self, began: int, step: RecordedStep) -> None:
        """
        Write that a step was recorded. Only the most recently recorded steps can be repeated.

        Args:
            began: The sequence number that `begin_step` returned.
            step: The recorded step.
        """
        self("keep_step", (), None)
        self._steps[step] = began
        for old in [*self._steps][:-KEPT_STEPS]:
            del self._steps[old]
        if self._recorded is not None:
            self._kept[began] = self._start, self._recorded
            self._kept = {n: kept for n, kept in self._kept.items() if n in self._steps.values()}
            self._recorded = None
        self._rotate()

    def drop_step(self, began: int) -> None:
        """Write that the step whose recording began is discarded."""
        self("drop_step", (), None)
        self._recorded = None
        self._rotate()

    def repeats(self, step: RecordedStep) -> bool:
        """Return whether the log can write this step as one line, because it was recorded."""
        return step in self._steps

    def repeat_step(self, step: RecordedStep) -> None:
        """Write one line for a recorded step that the contract committed in one call."""
        self("repeat_step", (self._steps[step],), None)
        self._taken += 1
        self._rotate()

    def _rotate(self) -> None:
        """Begin the next file, if the current file has its number of steps."""
        rotation = self._rotation
        if rotation is None or self._taken < rotation.steps or self.ended:
            return
        try:
            self._next_file(rotation)
        except OSError as error:
            self._end(error)

    def _next_file(self, rotation: Rotation) -> None:
        after = self._close_file()
        if self.ended:
            return
        self._part, self._taken = self._part + 1, 0
        state = columns_of(self.contract.memory)
        steps = ",".join(
            f'{{"began":{began},"state":{compact(_since(start, state))},'
            f'"events":[{",".join(f"{body}}}" for body in bodies)}]}}'
            for began, (start, bodies) in self._kept.items()
        )
        continues = (
            f'{{"part":{self._part},"events":{self.events},"after":"{after}",'
            f'"state":{compact(state)},"steps":[{steps}]}}'
        )
        self._file = rotation.part(self._part).open("wb")
        self._chain = blake2b(digest_size=DIGEST_BYTES)
        self._write(f'{compact(self._header)[:-1]},"{CONTINUES}":{continues}')
        rotation.forget(self._part)

    def _close_file(self) -> str:
        """Write the closing line, and return its digest."""
        state = compact(fingerprints(self.contract.snapshot()))
        digest = self._write(f'{{"events":{self.events},"state":{state}')
        if self._file is not None and not self.ended:
            self._file.flush()
            if self._owned:
                self._file.close()
        return digest

    def close(self) -> list[str]:
        """
        Detach from the contract and write the closing line; a second call does nothing.

        Returns:
            The log's lines if they were kept in memory; otherwise an empty list.
        """
        recording = self.contract.observer
        if isinstance(recording, Recording) and recording.observer is self:
            recording.drop()
        if self.contract.observer is self:
            self.contract.observer = None
            try:
                self._close_file()
            except OSError as error:
                self._end(error)
        return self.lines

    def _end(self, error: OSError) -> None:
        """
        End the log because of an error, and pass the error to `ends`.

        Raises:
            OSError: The given error, if `ends` is None or the log has already ended.
        """
        if self.ends is None or self.ended:
            raise error
        self.ended = True
        if self._owned and self._file is not None:
            with suppress(OSError):  # closing writes the rest of the buffer
                self._file.close()
        self.ends(error)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _destination(self, key: TapeKey, found: Any) -> str:
        """Return configured destinations as the index of their buffer, and others in full."""
        st = self.contract.memory
        if found == st.destination_of[key.cell]:
            return str(st.buffer_of[key.cell])
        return compact(write_destinations(found))

    def _write(self, body: str) -> str:
        """Write a line, and return its digest."""
        if self.ended:
            return ""
        line = seal(body, self._chain)
        if self._file is None:
            self.lines.append(line)
        else:
            data = line.encode()
            try:
                written = self._file.write(data)
                if written is not None and written != len(data):  # an unbuffered file may do that
                    raise OSError(
                        errno.EIO, f"{written} of {len(data)} bytes of the event log were written"
                    )
            except OSError as error:
                self._end(error)
        return line[-2 - 2 * DIGEST_BYTES - 1 : -3]


def _since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns (arrays) of an earlier state that differ in the later state."""
    return {name: column for name, column in before.items() if now[name] != column}


def _integer(value: int) -> str:
    return f"{value:d}"


def _key(key: TapeKey) -> str:
    _, microbatch, block, invocation = key.cell
    return f"[{key.epoch},{key.stage},{microbatch},{block},{invocation}]"


def _ref(ref: TapeRef) -> str:
    return f'[{ref.slot},{ref.generation},"{ref.incarnation:016x}"]'


_TEXT: Final[Mapping[str, Callable[[Any], str]]] = {
    "key": _key,
    "ref": _ref,
    "queued": compact,
    "filled": compact,
    "covered": compact,
    "incarnation": lambda number: f'"{number:016x}"',
}

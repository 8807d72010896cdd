"""
The log of a run. It is written as JSON lines, to TensorBoard if configured, and to the terminal.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from qeffect.report import UnusableError, finite
from qeffect.text import within

__all__ = ["Log", "memory_bytes"]

#: Bytes that are read at a time from the end of a log.
_TAIL = 1 << 16


def memory_bytes(device: torch.device) -> int:
    """
    Return the peak memory so far, in bytes. On a GPU this is reserved memory, on a CPU resident
    memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _warnings(line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """
    Return the warnings about a step, by kind; the terminal shows each kind only once in a run.
    """
    if not math.isfinite(line["loss"]):
        yield "NOT FINITE", f"the loss is {line['loss']}"
    if line.get("skipped"):
        yield "SKIPPED", f"the norm of the gradients is {line['norm']}"
    if "saturated" in line:
        yield (
            "SATURATED",
            f"a gradient was {line['saturation']:.3g} times the largest value that its scale can "
            f"hold, and was clipped: {line['saturated']}",
        )
    if "slowest" in line:
        rank, factor = line["slowest"]["rank"], line["slowest"]["times_median"]
        yield (
            f"SLOW RANK {rank}",
            f"its computation takes {factor:.3g} times as long as the median of all ranks",
        )
    if stages := line.get("zero_stages"):
        named = within(", ".join(map(str, stages)), 60)
        yield (
            "ALL ZERO",
            f"every gradient is zero in {'stage' if len(stages) == 1 else 'stages'} {named}",
        )


def _shown(line: Mapping[str, Any]) -> str:
    """Return the terminal's line for a step."""
    parts = [
        f"step {line['step']}",
        f"loss {line['loss']:.4f}",
        f"rate {line['rate']:.3g}",
        f"{line['tokens_per_s']:,.0f} tokens/s",
        f"{line['step_ms']:.1f} ms",
    ]
    if "norm" in line:
        parts.insert(3, f"norm {line['norm']:.3g}")
        parts.append(f"{line['skipped_updates']:,} skipped")
    if "seconds_left" in line:
        parts.append(f"{_clock(line['seconds_left'])} left")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    """
    Return a duration in hours, minutes and seconds.

    >>> _clock(7.4), _clock(3723.0), _clock(200_000.0)
    ('0:07', '1:02:03', '55:33:20')
    """
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def _end_last_line(path: Path) -> None:
    """
    Prepare a log file so that the next entry begins on a new line.

    An unfinished last line, left by a killed run or a full disk, is removed. A complete last line
    without a newline gets a newline.

    Raises:
        OSError: The file cannot be read or written.
    """
    if not path.is_file():
        return  # a device has no lines
    with path.open("r+b") as file:
        size = at = file.seek(0, os.SEEK_END)
        tail = b""
        while at and b"\n" not in tail:
            at = max(0, at - _TAIL)
            file.seek(at)
            tail = file.read(size - at)
        last = tail.rpartition(b"\n")[2]
        if not last:
            return
        try:
            json.loads(last)
            file.write(b"\n")
        except (ValueError, RecursionError):
            if last.startswith(b'{"'):
                file.truncate(size - len(last))
            else:
                file.write(b"\n")


def _require_log(path: Path) -> None:
    """
    Raise an error unless lines may be appended to a file: a new or empty file, a device, or a log.

    Raises:
        UnusableError: The file has other content than a log, such as tokens.
        OSError: The file cannot be read.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        first = file.read(20)
    if first and not first.startswith(b"{"):
        raise UnusableError(
            f"[run] log: {path}: expected a new file, or a log of JSON lines, found a file that "
            f"begins with {first!r}; name another file"
        )


class Log:
    """
    The log of a run. Only rank 0 has a log.

    Steps are numbered from 0. An event after a step, such as an evaluation, has the number of this
    step. A number that is not finite is written as null. If the file can no longer be written, the
    error is reported once, and training continues without the file.

    Args:
        path: File to which JSON lines are appended; None for no file. If a killed run left its last
            line unfinished, that line is removed.
        board: Folder for TensorBoard; None for no TensorBoard files.
        show: Function that shows a progress line on the terminal, but may skip lines that follow
            one another quickly.
        note: Function that shows every line; by default `show`.

    Attributes:
        ended: Why the file could no longer be written; None while it can be written.

    Raises:
        UnusableError: The file cannot be written or is not a log, or TensorBoard is not installed.
    """

    def __init__(
        self,
        path: Path | None,
        board: Path | None,
        show: Callable[[str], None],
        note: Callable[[str], None] | None = None,
    ) -> None:
        self._show, self.note, self._path = show, note or show, path
        self.ended: str | None = None
        self._noted: set[str] = set()
        self._writer: Any = None
        if board is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UnusableError(
                    "[run] tensorboard: the package tensorboard is not installed; pip install "
                    "tensorboard, or leave the field out: the log's JSON lines have the same "
                    "numbers"
                ) from None
            self._writer = SummaryWriter(str(board))
        self._file = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _require_log(path)
                self._file = path.open("a", encoding="utf-8")
                _end_last_line(path)
            except OSError as error:
                raise UnusableError(f"[run] log: {path}: {error.strerror or error}") from None

    def __call__(self, line: Mapping[str, Any]) -> None:
        """
        Write one line to the log as JSON, write its numbers to TensorBoard, and show the loss on
        the terminal.
        """
        if self._file is not None:
            clean = {k: finite(v) if type(v) is float else v for k, v in line.items()}
            try:
                self._file.write(json.dumps(clean, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                self._end(error)
        step = line.get("step")
        if self._writer is not None and step is not None:
            for name, value in line.items():
                if name != "step" and type(value) in (int, float):
                    self._writer.add_scalar(name, value, step)
        if "not_saved" in line:
            self.note(f"step {step}  NOT SAVED: {line['not_saved']}")
        if "loss" in line:
            for kind, text in _warnings(line):
                if kind not in self._noted:
                    self._noted.add(kind)
                    self.note(f"step {step}  {kind}: {text}")
            self._show(_shown(line))

    def _end(self, error: OSError) -> None:
        """Continue without the log file, and record the reason."""
        self.ended = f"[run] log: {self._path}: {error.strerror or error}"
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing writes the rest of the buffer
                file.close()
        self.note(f"NOT LOGGED from here on: {self.ended}")

    def close(self) -> None:
        """Close the file and TensorBoard."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._end(error)
        if self._writer is not None:
            self._writer.close()

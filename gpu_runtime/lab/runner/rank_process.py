"""
One rank of one start, in its own process. The process runs a function (the body), and hands over
the function's results.

Once a process has used the profiler, it launches every later graph more slowly. So a process either
times or profiles; in a process that times, every use of the profiler is an error.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from qeffect.report import UnusableError
from qeffect.schedule.actions import ScheduleError

from ...backends.protocol import BackendError
from ...ranks.consent import StoppedError

__all__ = ["Findings", "Request", "forbid_profiler", "main"]

_PROFILER = f"{__package__}.profiler"


@attrs.frozen
class Request:
    """
    The request to a rank's process.

    Args:
        body: A function of a module, called with the arguments and the rank's `Findings`.
        arguments: Arguments that can be pickled.
        profiles: Whether the process may use the profiler; such a process times nothing.
    """

    body: Callable[..., None]
    arguments: Sequence[Any]
    profiles: bool


class Findings:
    """
    Lines of JSON that a rank's process writes for the process that started it.

    Args:
        file: The file to which the lines are written.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def note(self, text: str) -> None:
        """Send a progress line to the process that started this rank."""
        self._write({"note": text})

    def add(self, row: Any) -> None:
        """Hand over a result, as plain data."""
        self._write({"row": row})

    def end(self, error: BaseException) -> None:
        """
        Hand over an error that the command itself reports; any other error leaves a traceback.
        """
        if isinstance(error, StoppedError):
            self._write({"stopped": attrs.asdict(error.cause)})
        elif isinstance(error, (BackendError, ScheduleError, UnusableError)):
            self._write({"unusable": str(error)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def forbid_profiler() -> None:
    """
    Make every use of torch's profiler, and every import of our profiler module, an error in this
    process.
    """
    from torch.autograd import profiler

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            "expected no profiler in a process that times steps, because the profiler would slow "
            "later steps"
        )

    # torch.profiler.profile makes one of these too.
    profiler.profile.__init__ = refuse  # type: ignore[method-assign]
    sys.modules[_PROFILER] = None  # type: ignore[assignment]


def main(argv: Sequence[str]) -> None:
    """
    Run the request in a file, then end the process at once, because process groups make an orderly
    exit hang.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    path = Path(argv[0])
    code = 1
    with path.with_suffix(f".{os.environ['RANK']}.jsonl").open("w", encoding="utf-8") as file:
        findings = Findings(file)
        try:
            request: Request = pickle.loads(path.read_bytes())
            if not request.profiles:
                forbid_profiler()
            request.body(*request.arguments, findings)
            code = 0
        except BaseException as error:
            findings.end(error)
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """
    End this process when its parent ends. The standard input is a pipe that only the parent holds
    open, so the end of the standard input shows that the parent has ended.
    """
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

"""
The log of a recorded run: one line for each part of the run, and one for each test that ended.

A long run that a time limit cuts off can be resumed: a later part skips the tests that have ended.
The log is written line by line, so that it also survives a run that was killed. ``python -m
tests.record LOG`` then writes the record that the run could not write.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RunLog", "bare_id"]

_GROUP = re.compile(r"@[^\]/]*$")


def bare_id(node: str) -> str:
    """The id of a test, without the group that ``--dist loadgroup`` appends."""
    return _GROUP.sub("", node)


class RunLog:
    """
    Read and write the log of one run.

    Attributes:
        parts: The entry of each part (a process that runs the tests that are left), the earliest
            first, with the part's ``seconds``.
        ended: The outcomes of each test that has ended in any part, and of each module that the
            last part could not collect.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.parts: list[dict[str, Any]] = []
        self.ended: dict[str, list[str]] = {}

    @classmethod
    def read(cls, file: Path) -> RunLog:
        """
        Read the log of a run that was cut off.

        Raises:
            OSError: The file cannot be read.
            ValueError: A line before the last one is malformed.
        """
        log = cls(file)
        lines = file.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], 1):  # a killed run can leave half a line
            try:
                log._take(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{file}, line {number}: malformed ({error})") from None
        if not log.parts:
            raise ValueError(f"{file}: no part of a run")
        return log

    def _take(self, line: dict[str, Any]) -> None:
        if "test" in line:
            self.ended[line["test"]] = line["outcomes"]
            self.parts[-1]["seconds"] = line["at"]
        elif "commit" in line:
            # Each part collects every module again, so that only its own collection counts.
            self.ended = {name: found for name, found in self.ended.items() if "::" in name}
            self.parts.append({"seconds": 0.0, **line})
        else:
            self.parts[-1].update(line)

    def begin(self, part: Mapping[str, Any]) -> None:
        """
        Begin a part. The first part empties the file; a later part drops an incomplete last line.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        before = self.file.read_text(encoding="utf-8") if self.parts else ""
        self.file.write_text(before[: before.rfind("\n") + 1], encoding="utf-8")
        self._write(dict(part))

    def test_ended(self, name: str, outcomes: list[str], at: float) -> None:
        """Add a test that has ended, ``at`` seconds after the part began."""
        self._write({"test": name, "outcomes": outcomes, "at": round(at, 1)})

    def end(self, seconds: float, exit_status: int) -> None:
        """End the part."""
        self._write({"seconds": round(seconds, 1), "exit_status": exit_status})

    def _write(self, line: dict[str, Any]) -> None:
        self._take(line)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def counts(self) -> Counter[str]:
        """The number of tests with each outcome."""
        return Counter(outcome for outcomes in self.ended.values() for outcome in outcomes)

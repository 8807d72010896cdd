"""
Schedule tables as CSV: one row per rank, one entry per action; an empty entry is idle.

The reader accepts both formats of torch's tables, and distinguishes them by their entries:
`compute_only` (F, I, W, B, OVERLAP_F_B, idle entries, sometimes REDUCE_GRAD) and `compute_comms`
(with sends, receives and sharding). A file is untrusted data: the reader returns a `Schedule` or
raises an error with a one-line message.
"""

from __future__ import annotations

import csv
import io
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ..text import unreadable
from .actions import Action, Schedule, ScheduleError
from .infer import MAX_ENTRIES, MAX_RANKS, parse_entry, schedule_of

MAX_BYTES = 16 * 1024 * 1024
_REFUSED = "refused"


def read_table(
    path: str | Path | Traversable,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """
    Read a schedule table from a file.

    Args:
        path: The CSV file.
        num_stages: Stages of the pipeline; inferred from the table when left out.
        num_microbatches: Microbatches; inferred from the table when left out.

    Raises:
        ScheduleError: The file cannot be read, is empty, binary, larger than 16 MiB or malformed.
    """
    name = path.name if isinstance(path, Path | Traversable) else str(path)
    target = Path(path) if isinstance(path, str) else path
    try:
        with target.open("rb") as stream:
            # One byte more than the limit; this also bounds devices and pipes, which have no size.
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{name}: {unreadable(error)}") from None
    return decode_table(data, source=name, num_stages=num_stages, num_microbatches=num_microbatches)


def decode_table(
    data: bytes,
    *,
    source: str = "table",
    num_stages: int | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """
    Read a schedule table from the bytes of a file.

    Args:
        data: The bytes of the file. Of a file over 16 MiB, 16 MiB and one byte are enough, because
            such a file is refused.
        source: Origin of the bytes, for messages.
        num_stages: Stages of the pipeline; inferred from the table when left out.
        num_microbatches: Microbatches; inferred from the table when left out.

    Raises:
        ScheduleError: The table is empty, binary, larger than 16 MiB or malformed.
    """
    name = source
    if len(data) > MAX_BYTES:
        raise ScheduleError(f"{name}: larger than the limit of {MAX_BYTES >> 20} MiB")
    if b"\0" in data:
        raise ScheduleError(f"{name}: binary data; expected a CSV table of actions such as 0F0")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{name}: byte {error.start} is not UTF-8; expected a CSV table of actions such as 0F0"
        ) from None
    return parse_table(text, source=name, num_stages=num_stages, num_microbatches=num_microbatches)


def parse_table(
    text: str,
    *,
    source: str = "table",
    num_stages: int | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    r"""
    Read a schedule table from text.

    >>> parse_table("0F0,0I0,0W0\n").num_ranks
    1
    >>> parse_table("0F0xyz\n")
    Traceback (most recent call last):
      ...
    qeffect.schedule.actions.ScheduleError: rank 0, step 0: entry '0F0xyz' is not an action: ...

    Args:
        text: The table.
        source: Origin of the text, for messages.
        num_stages: Stages of the pipeline; inferred from the table when left out.
        num_microbatches: Microbatches; inferred from the table when left out.

    Raises:
        ScheduleError: The table is empty, too large or malformed.
    """
    if not text.strip():
        raise ScheduleError(f"{source}: empty; expected one row of entries per rank")
    rows: list[list[Action | None]] = []
    entries = 0
    blank_row: int | None = None
    try:
        for record in csv.reader(io.StringIO(text, newline=""), strict=True):
            if not record:
                blank_row = len(rows) if blank_row is None else blank_row
                continue
            rank = len(rows)
            if blank_row is not None:
                raise ScheduleError(
                    f"{source}: a blank line between ranks; write an idle rank as one comma",
                    rank=blank_row,
                )
            entries += len(record)
            if entries > MAX_ENTRIES or rank >= MAX_RANKS:
                raise ScheduleError(
                    f"{source}: more than the limits of {MAX_RANKS} ranks or {MAX_ENTRIES} entries"
                )
            rows.append([parse_entry(entry, rank, step) for step, entry in enumerate(record)])
    except csv.Error as error:
        raise ScheduleError(f"{source}: not a CSV table: {error}", rank=len(rows)) from None
    return schedule_of(
        rows, source=source, num_stages=num_stages, num_microbatches=num_microbatches
    )


def write_table(schedule: Schedule) -> str:
    """
    Return the schedule as the CSV table that torch would write.

    `parse_table` reads the same rows back. Lines end in CR LF, as in the `csv` module, so open the
    output file with `newline=""`.

    Args:
        schedule: The schedule, from any reader.
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    for row in schedule.rows:
        writer.writerow(["" if action is None else str(action) for action in row] or ["", ""])
    return out.getvalue()


def fixture_names(*, refused: bool = False) -> tuple[str, ...]:
    """
    Return the names of the tables shipped with the package, all written by torch 2.13.

    Args:
        refused: If True, return only the wrong tables, which torch draws but does not execute; if
            False, return only the tables that torch executes.
    """
    folder = _folder() / _REFUSED if refused else _folder()
    return tuple(sorted(p.name for p in folder.iterdir() if p.name.endswith(".csv")))


def read_fixture(name: str) -> Schedule:
    """
    Read one of the shipped tables.

    Args:
        name: A name that `fixture_names` returns, with either value of ``refused``.

    Raises:
        ScheduleError: No shipped table has that name.
    """
    if name in fixture_names():
        return read_table(_folder() / name)
    if name in fixture_names(refused=True):
        return read_table(_folder() / _REFUSED / name)
    raise ScheduleError(f"no shipped table {name!r}; expected one of {', '.join(fixture_names())}")


def _folder() -> Traversable:
    return resources.files(__package__) / "fixtures"

"""
``qeffect check-all``: check every schedule table of a repository, before a commit or in CI.
"""

from __future__ import annotations

import argparse
import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import require_folder, write_text
from ..schedule.actions import ScheduleError
from ..schedule.check import check
from ..schedule.page import page
from ..schedule.pairing import DISCIPLINES
from ..schedule.tables import read_table
from ..schedule.transport import QUEUES, Transport
from ..text import decoded
from .command import PLACE, Outcome, Progress, UnusableError, brief
from .source import PAIRING

__all__ = ["CheckAll"]


class CheckAll:
    """Check many tables, each independently of the others."""

    name = "check-all"
    help = "check all schedule tables of a repository, for example before a commit"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "tables",
            nargs="+",
            metavar="FILE",
            help="torch schedule table, a folder (all *.csv files below it), or a pattern such as "
            "'schedules/**/*.csv'",
        )
        parser.add_argument(
            "--pairing",
            choices=tuple(DISCIPLINES),
            default="contract",
            help=PAIRING,
        )
        parser.add_argument(
            "--queues",
            choices=tuple(QUEUES),
            default="pair",
            help="which messages share a queue; qeffect check --help explains the values "
            "(default pair)",
        )
        parser.add_argument(
            "--html",
            type=Path,
            metavar="DIR",
            help="folder for HTML pages, one per refused table, as from qeffect check --html",
        )
        parser.add_argument(
            "--github",
            action="store_true",
            help="also print a GitHub Actions annotation for each refused or unusable table; it "
            "points to the line of the refused rank",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Check every table and report; an unreadable table does not stop the check of the rest."""
        if args.html is not None:
            require_folder(args.html, "--html")
            args.html.mkdir(parents=True, exist_ok=True)
        files = _files(args.tables)
        names = Counter(file.stem for file in files)
        rows: list[dict[str, Any]] = []
        text: list[str] = []
        for number, file in enumerate(files):
            progress(f"Checking {number + 1} of {len(files)}: {file}")
            row = _check(file, args, unique=names[file.stem] == 1)
            rows.append(row)
            text.append(_line(row))
            if args.github and row["verdict"] != "accepted":
                text.append(_annotation(row))
        counts = Counter(row["verdict"] for row in rows)
        verdict = next((v for v in ("refused", "unusable") if counts[v]), "accepted")
        text.append(
            f"{len(rows)} checked: {counts['accepted']} accepted, {counts['refused']} refused, "
            f"{counts['unusable']} unusable."
        )
        first = next((row for row in rows if row["verdict"] == "refused"), None)
        data = {} if first is None else {name: first[name] for name in PLACE}
        return Outcome(verdict, {**data, "tables": rows}, text)


def _files(given: Sequence[str]) -> list[Path]:
    """
    Return each named table once, in the order in which they were named.

    Raises:
        UnusableError: A folder or a pattern contains no table.
    """
    found: dict[Path, None] = {}
    for name in given:
        path = Path(name)
        if path.is_dir():
            below = sorted(path.rglob("*.csv"))
        elif not path.exists() and glob.has_magic(name):
            below = sorted(map(Path, glob.glob(name, recursive=True)))  # noqa: PTH207 - absolute too
        else:
            below = [path]
        if not below:
            raise UnusableError(
                f"{name}: expected files that end in .csv, found none; name a table, or a folder "
                "or pattern with tables"
            )
        found.update(dict.fromkeys(file for file in below if not file.is_dir()))
    return list(found)


def _check(file: Path, args: argparse.Namespace, *, unique: bool) -> dict[str, Any]:
    try:
        schedule = read_table(str(file))
        verdict = check(schedule, pairing=args.pairing, transport=Transport(args.queues))
    except ScheduleError as error:
        said = str(error)
        named = said if str(file) in said else f"{file}: {said}"
        return {"table": str(file), "verdict": "unusable", "rank": error.rank, "error": named}
    row = {"table": str(file), **Outcome(verdict.verdict, verdict.record()).record()}
    if args.html is not None and verdict.finding is not None:
        name = file.stem if unique else "_".join(file.with_suffix("").parts[-3:])
        place = args.html / f"{name}.html"
        try:
            write_text(place, decoded(page(schedule, row, verdict.finding)))
        except ScheduleError as error:
            return {**row, "page_error": str(error)}
        row["page"] = str(place)
    return row


def _line(row: dict[str, Any]) -> str:
    if row["verdict"] == "unusable":
        return f"unusable  {brief(row['error'])}"
    if row["verdict"] == "accepted":
        return f"accepted  {row['table']}"
    page = f" (page: {row['page']})" if "page" in row else ""
    return f"refused   {row['table']}: {_said(row)}{page}"


def _said(row: dict[str, Any]) -> str:
    if row["verdict"] == "unusable":
        return brief(row["error"])
    found = row["findings"][0]
    where = "" if row["rank"] is None else f"rank {row['rank']}"
    if row["step"] is not None:
        where += f", step {row['step']} ({row['action']})"
    said = f"{where}: {row['clause']}: {found['message']}"
    return said.removeprefix(": ")


def _annotation(row: dict[str, Any]) -> str:
    # A table has one line for each rank.
    line = "" if row["rank"] is None else f",line={row['rank'] + 1}"
    title = row.get("clause") or "unusable table"
    place = f"file={_escaped(row['table'], ':,')}{line},title={_escaped(title, ':,')}"
    said = _said(row)
    if row["verdict"] == "refused":
        said += f"\n{row['findings'][0]['remedy']}"
    return f"::error {place}::{_escaped(said)}"


def _escaped(text: str, more: str = "") -> str:
    """Escape the characters that would end a workflow command of GitHub Actions."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text

"""
Read and check a training file. An error message is one line with the field, the expected value and
the found value. Paths are relative to the folder of the file.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

import attrs

from qeffect.report import UnusableError
from qeffect.text import json_mistake, near, unreadable

from .config import TABLES, Config

__all__ = ["current", "differences", "read", "translated"]

_T = TypeVar("_T")
_FLAGS = ("captured", "one_launch")
"""Fields of `[parallel]` that `mode` replaces."""
_MOVED = ("start_s", "commit_s")
"""Fields of `[limits]` that earlier releases had in `[run]`."""


def read(path: Path, **changes: Mapping[str, Any]) -> Config:
    """
    Read and check a training file.

    Args:
        path: The file.
        changes: Fields that the command line overrides, by table; None keeps the file's value.

    Raises:
        UnusableError: The file is missing or is not TOML; a table or a field is unknown; a value is
            not allowed; or a field has no effect because of other fields.
    """
    try:
        # Some editors begin a file with a byte order mark.
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UnusableError(f"{path}: {unreadable(error)}") from None
    except ValueError as error:  # also a number of too many digits, and a NUL in the path
        raise UnusableError(f"{path}: expected a TOML file, found {_mistake(error)}") from None
    for name, value in given.items():
        if name in TABLES:
            continue
        if isinstance(value, dict):
            raise UnusableError(
                f"{path}: unknown table [{name}]; expected one of {', '.join(TABLES)}"
                f"{near(name, TABLES)}"
            )
        homes = [table for table, kind in TABLES.items() if name in attrs.fields_dict(kind)]
        raise UnusableError(
            f"{path}: {name}: expected fields below the name of a table, found {name} before the "
            f"first table; move it below {' or '.join(f'[{home}]' for home in homes or TABLES)}"
        )
    tables: dict[str, Any] = {}
    for name, kind in TABLES.items():
        found = given.get(name, {})
        if not isinstance(found, dict):
            raise UnusableError(
                f"{path}: {name}: expected a table, found {_shown(found)}; write [{name}] once, "
                "and its fields below it"
            )
        if name == "parallel":
            found = _with_mode(path, found)
        if name == "run":
            _require_moved(path, found)
        over = {key: value for key, value in changes.get(name, {}).items() if value is not None}
        if over:  # a bad value in the file is refused even if the command line replaces it
            _table(path, name, kind, {**over, **found})
        tables[name] = _table(path, name, kind, {**found, **over})
    cut = tables["parallel"].cut
    for name in ("embedding_cost", "head_cost"):
        if cut != "balanced" and name in given.get("parallel", {}):
            raise UnusableError(
                f"{path}: [parallel] {name}: expected cut = 'balanced' beside it, found cut = "
                f"{cut!r}; leave {name} out, or set cut"
            )
    if tables["model"].start_names and not tables["model"].start:
        raise UnusableError(
            f"{path}: [model] start_names: expected start beside it, found none; leave start_names "
            "out, or set start"
        )
    run = tables["run"]
    for name, wants in (("event_log_steps", "event_logs"), ("event_log_keep", "event_log_steps")):
        if getattr(run, name) and not getattr(run, wants):
            raise UnusableError(
                f"{path}: [run] {name}: expected {wants} beside it, found none; leave {name} out, "
                f"or set {wants}"
            )
    if tables["guard"].digests and not run.log:
        raise UnusableError(
            f"{path}: [guard] digests: expected [run] log, to which digests are written, found "
            "none; set log, or leave digests out"
        )
    if tables["guard"].replay_every and not run.deterministic:
        raise UnusableError(
            f"{path}: [guard] replay_every: expected [run] deterministic = true, found false: "
            "nondeterministic kernels may give the two runs of a step different bits; set "
            "deterministic = true, or leave replay_every out"
        )
    if tables["model"].scales == "epoch" and not run.deterministic:
        raise UnusableError(
            f"{path}: [model] scales: expected [run] deterministic = true, found false: "
            "nondeterministic kernels may give each mapping onto ranks different bits; set "
            "deterministic = true, or leave scales out"
        )
    if "on_mismatch" in given.get("guard", {}) and not tables["guard"].replay_every:
        raise UnusableError(
            f"{path}: [guard] on_mismatch: expected replay_every beside it, found none; leave "
            "on_mismatch out, or set replay_every"
        )
    rates = tables["optimizer"]
    if rates.least_rate > rates.rate:
        own = "" if "least_rate" in given.get("optimizer", {}) else ", its default"
        raise UnusableError(
            f"{path}: [optimizer] least_rate: expected at most rate, which is {rates.rate}, found "
            f"{rates.least_rate}{own}"
        )
    return Config(source=path, **tables)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """
    List the fields in which two runs differ, one line each.

    Args:
        saved: The tables of the saved run, from `Config.record`.
        own: The tables of the resuming run.

    >>> differences({"run": {"steps": 4, "log": ""}}, {"run": {"steps": 6, "log": ""}})
    ['[run] steps was 4, is 6']
    """
    before = current(saved)
    return [
        f"[{table}] {name} was {earlier!r}, is {value!r}"
        for table, fields in own.items()
        for name, value in fields.items()
        if (earlier := before.get(table, {}).get(name, _default(table, name))) != value
    ]


def _default(table: str, name: str) -> Any:
    """Return the default of a field that an earlier release did not write."""
    return getattr(TABLES[table](), name, None) if table in TABLES else None


def current(tables: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the tables that an earlier release saved, with the field names of this release.

    >>> current({"parallel": {"captured": False}, "run": {"steps": 4, "start_s": 60.0}})
    {'parallel': {'mode': 'eager'}, 'run': {'steps': 4}, 'limits': {'start_s': 60.0}}
    """
    new = {**tables, "parallel": translated(tables.get("parallel", {}))}
    run = new.get("run", {})
    if moved := {name: run[name] for name in _MOVED if name in run}:
        new["run"] = {name: value for name, value in run.items() if name not in moved}
        new["limits"] = {**moved, **new.get("limits", {})}
    return new


def translated(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a table `[parallel]` in which `mode` replaces the flags of earlier releases.

    >>> translated({"pp": 2, "captured": True, "one_launch": False})
    {'pp': 2, 'mode': 'replays'}
    """
    new = {name: value for name, value in parallel.items() if name not in _FLAGS}
    if len(new) < len(parallel):
        replays = "replays" if parallel.get("captured", True) else "eager"
        new["mode"] = "one launch" if parallel.get("one_launch", False) else replays
    return new


def _with_mode(path: Path, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept the older flags of a file's `[parallel]`, with a warning."""
    old = [name for name in _FLAGS if name in given]
    if not old:
        return given
    for name in old:
        if type(given[name]) is not bool:
            raise UnusableError(
                f"{path}: [parallel] {name}: expected true or false, found {_shown(given[name])}"
            )
    if "mode" in given:
        raise UnusableError(
            f"{path}: [parallel] {old[0]}: expected mode alone, found {old[0]} beside it; leave "
            f"{old[0]} out"
        )
    if given.get("one_launch") and not given.get("captured", True):
        raise UnusableError(
            f"{path}: [parallel] one_launch: expected captured = true beside it, found captured = "
            "false: one launch is a captured graph; write mode instead"
        )
    new = translated(given)
    warnings.warn(
        f"{path}: [parallel] {', '.join(old)} will be removed in the next release; write "
        f'mode = "{new["mode"]}"',
        DeprecationWarning,
        stacklevel=3,
    )
    return new


def _require_moved(path: Path, given: Mapping[str, Any]) -> None:
    """Raise an error for fields of `[run]` that are now in `[limits]`."""
    for name in _MOVED:
        if name in given:
            raise UnusableError(
                f"{path}: [run] {name}: this field has moved; write it below [limits]"
            )


def _table(path: Path, name: str, kind: type[_T], given: Mapping[str, Any]) -> _T:
    fields = {field.name: field for field in attrs.fields(kind)}  # type: ignore[arg-type]
    for key, value in given.items():
        if key not in fields:
            raise UnusableError(
                f"{path}: [{name}] {key}: unknown field; expected one of {', '.join(fields)}"
                f"{near(key, fields)}"
            )
        known = fields[key].metadata
        if not known["fits"](value):
            raise UnusableError(
                f"{path}: [{name}] {key}: expected {_expected(known, value)}, found {_shown(value)}"
            )
    return kind(**given)


def _expected(known: Mapping[str, Any], value: Any) -> str:
    said: str = known["expected"]
    if type(value) is str and "\0" in value and said == "a text":
        return "a text without NUL, which a path cannot contain"
    if known["most"] is not None and type(value) in (int, float) and value > known["most"]:
        return f"{said} and at most {known['most']:,}"
    return said


def _mistake(error: ValueError) -> str:
    if isinstance(error, tomllib.TOMLDecodeError):
        said = str(error)
        return f"a mistake: {said[:1].lower()}{said[1:]}"
    return json_mistake(error)


def _shown(value: Any) -> str:
    """Return a value as TOML text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date | time):
        return str(value)
    try:
        return repr(value)
    except ValueError:  # Python writes no number of so many digits
        return "a number of too many digits"

"""
Reports: the record of the environment, and reading and writing of JSON files.

A command of any layer that cannot do what was asked raises `UnusableError`. The error's message is
one line for the user; nothing was measured or written.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import sha1, sha256
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

__all__ = [
    "UnusableError",
    "commit",
    "environment",
    "package",
    "program",
    "read_json",
    "require_folder",
    "require_place",
    "sources",
    "write_json",
    "write_text",
]

#: Packages that influence measurements and proofs, as their registries spell them.
PACKAGES = (
    "qeffect", "attrs", "z3-solver", "cvc5", "numpy", "hypothesis", "torch", "transformer-engine",
    "torchao",
)  # fmt: skip
#: Version of a package that is not installed.
ABSENT = "not installed"
#: Commit of code outside a git checkout.
UNKNOWN = "unknown"
#: Folders of the repository whose reports pages and tests quote.
_KEPT = ("verification/reports", "gpu_runtime/lab/reports")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class UnusableError(ValueError):
    """A command cannot do what was asked; the message says why, and what to do."""


def environment(
    argv: Sequence[str] | None = None,
    commit_given: str | None = None,
    *,
    device: Mapping[str, Any] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """
    Record the hardware, the software versions and the commit for a report.

    Args:
        argv: The command's arguments, by default those of this process; folders are left out.
        commit_given: The commit, for code outside a git checkout.
        device: Entries about the device, given by the runtime and added to the record.
        out: The report's file. If the commit is unknown, a line on standard error reports this.

    Raises:
        UnusableError: The given commit is malformed, or the commit is unknown and the file is in
            one of the repository's folders of reports.
    """
    given = sys.argv[1:] if argv is None else argv
    made_at = commit(commit_given)
    if made_at == UNKNOWN and out is not None:
        _require_own_place(out)
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": made_at,
        "sources": sources(),
        "program": program(),
        "argv": [_without_folder(argument) for argument in given],
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **(device or {}),
    }


@cache
def sources() -> str:
    """
    Return a digest of the modules of this package, as they are now.

    A report contains this digest and the commit. `tests/docs/test_sources.py` compares the digest
    with the commit's files in git.

    Returns:
        The SHA-256 of a text with one line per module: the path in the package, and git's hash of
        the file.
    """
    root = Path(__file__).resolve().parent
    lines = []
    for folder, inner, names in os.walk(root, followlinks=True):
        # A checkout has the guards twice; a wheel has them by their short name only.
        left_out = {"guards"} if Path(folder).name == "gpu_runtime" else set()
        inner[:] = [name for name in inner if name not in left_out | {"__pycache__"}]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder) / name
                body = path.read_bytes()
                blob = sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False)
                lines.append(f"{path.relative_to(root).as_posix()} {blob.hexdigest()}\n")
    return sha256("".join(sorted(lines)).encode()).hexdigest()


def program(
    words: Sequence[str] = tuple(sys.orig_argv), environ: Mapping[str, str] = os.environ
) -> list[str]:
    """
    Return how a command was started: the command line before its own arguments, without folders.

    Args:
        words: The interpreter's own command line, beginning with the program.
        environ: The process's environment variables, from which torchrun's rank counts are read.

    >>> program(["/usr/bin/python", "-u", "-m", "qeffect", "runtime"], {})
    ['python', '-m', 'qeffect']
    >>> program(["python", "/opt/bin/qeffect", "check"], {})
    ['qeffect']
    >>> ranks = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    >>> program(["python", "-u", "-m", "qeffect", "runtime"], ranks)
    ['torchrun', '--nproc-per-node', '2', '-m', 'qeffect']
    """
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in ("-W", "-X") else 1]
    direct = rest[:1] not in (["-m"], ["-c"])
    named = [_without_folder(word) for word in rest[: 2 if rest[:1] == ["-m"] else 1]]
    if "TORCHELASTIC_RUN_ID" in environ:
        nodes = environ.get("GROUP_WORLD_SIZE", "1")
        ranks = ["--nproc-per-node", environ.get("LOCAL_WORLD_SIZE", "1")]
        return ["torchrun", *["--nnodes", nodes] * (nodes != "1"), *ranks, *named]
    return named if direct else ["python", *named]


def package(record: Mapping[str, Any], name: str) -> str | None:
    """
    Return the version of a package from a record of the environment, current or older.

    Older reports of the runtime have torch and Transformer Engine as entries of the record itself.

    >>> package({"packages": {"torch": "2.13.0"}}, "torch")
    '2.13.0'
    >>> package({"transformer_engine": "2.18.0"}, "transformer-engine")
    '2.18.0'
    >>> package({"packages": {"torch": "not installed"}}, "torch")
    """
    packages: Mapping[str, str] = record.get("packages", {})
    found = packages.get(name, record.get(name.replace("-", "_")))
    return None if found == ABSENT else found


def commit(given: str | None = None) -> str:
    """
    Return the commit of the checkout that this code runs from, or was built from.

    Args:
        given: The commit, for code outside a git checkout.

    Returns:
        Forty hexadecimal digits, with ``+changes`` if tracked files differ from that commit;
        ``unknown`` for code without git, such as a copied folder.

    Raises:
        UnusableError: The given commit is not 40 hexadecimal digits.
    """
    if given is not None:
        if not _COMMIT.fullmatch(given):
            raise UnusableError(f"--commit takes 40 hexadecimal digits, not {given!r}")
        return given
    root = Path(__file__).resolve().parents[1]
    top = _git(root, "rev-parse", "--show-toplevel")
    # A package installed inside another checkout is not at that checkout's commit.
    if top is None or Path(top).resolve() != root:
        return _commit_built()
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return UNKNOWN
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return head + ("+changes" if changed else "")


def _require_own_place(out: Path) -> None:
    """Warn once that the report has no commit; refuse it in the repository's report folders."""
    root = Path(__file__).resolve().parents[1]
    if any(out.resolve().is_relative_to(root / folder) for folder in _KEPT):
        raise UnusableError(
            f"--out {out}: a report in this folder needs a commit, and {root} is not a git "
            "checkout; name the commit with --commit where the command has that option, or write "
            "the report elsewhere"
        )
    _say_unknown()


@cache
def _say_unknown() -> None:
    if sys.stderr is not None and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(
                "qeffect: this is not a git checkout: the report's commit is 'unknown'",
                file=sys.stderr,
                flush=True,
            )


def finite(value: float) -> float | None:
    """Return a finite number; None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def read_json(path: Path) -> Any:
    """
    Read a JSON file as RFC 8259 defines it: no NaN, and no name twice in one object.

    Raises:
        UnusableError: The file cannot be read or is not JSON; the message names file and reason.
    """
    from .text import json_mistake, unreadable  # here: `commit` also works where this file is alone

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"{path}: expected JSON, found {json_mistake(error)}") from None
    except (OSError, ValueError) as error:
        raise UnusableError(f"{path}: {unreadable(error)}") from None
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path}: expected JSON, found {json_mistake(error)}") from None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} twice in one object")
    return found


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant}, which is not a JSON number")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """
    Write plain data as JSON; a reader sees either the old file or the complete new file.

    Raises:
        UnusableError: The file cannot be written.
    """
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """
    Write a text file; a reader sees either the old file or the complete new file.

    Raises:
        UnusableError: The file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device has no old content to keep
            path.write_text(text, encoding="utf-8")
            return
        place, partial = _places(path)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def require_place(path: Path | None, option: str = "--out") -> None:
    """
    Require that a file can be written, before anything is measured; an existing file is kept.

    Args:
        path: The file; None to require nothing.
        option: The option that named the file, for the message.

    Raises:
        UnusableError: The path is a folder, its folder is missing, or the file cannot be written.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise UnusableError(
                f"{option} {path}: expected a file, found a folder; name a file in it"
            )
        if path.exists() and not path.is_file():
            return
        if not path.absolute().parent.is_dir():
            raise UnusableError(
                f"{option} {path}: there is no folder {path.parent}; make it, or name another "
                "folder"
            )
        _, partial = _places(path)
        partial.touch()
        partial.unlink()
    except UnusableError:
        raise
    except (OSError, ValueError) as error:
        raise _unwritable(path, error, f"{option}: ") from error


def require_folder(path: Path, option: str = "--out") -> None:
    """
    Require, before work begins, that files can be written to a folder that need not exist yet.

    Args:
        path: The folder; the call makes no folder.
        option: The option that named the folder, for the message.

    Raises:
        UnusableError: The path or a part of the path is a file, or the folder cannot be written.
    """
    try:
        place = path.absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise UnusableError(
                f"{option} {path}: expected a folder, found the file {place}; name a folder"
            )
        _, partial = _places(place / "qeffect")
        partial.touch()
        partial.unlink()
    except UnusableError:
        raise
    except (OSError, ValueError) as error:
        raise _unwritable(path, error, f"{option}: ") from error


def _places(path: Path) -> tuple[Path, Path]:
    """Return the file behind all links, and the temporary file beside it that will replace it."""
    place = path.resolve()
    own = f"{os.getpid()}.{threading.get_native_id()}"
    return place, place.with_name(f".{place.name}.{own}.partial")


def _unwritable(path: Path, error: OSError | ValueError, option: str = "") -> UnusableError:
    why = getattr(error, "strerror", None) or error
    return UnusableError(f"{option}cannot write {path}: {why}; choose another place")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit_built() -> str:
    """The commit in the version of the installed package, if this code is that package."""
    try:
        installed = distribution("qeffect")
    except PackageNotFoundError:
        return UNKNOWN
    if (
        installed.read_text("RECORD") is None
    ):  # metadata of a source tree, perhaps of an older commit
        return UNKNOWN
    if Path(str(installed.locate_file("qeffect/report.py"))).resolve() != Path(__file__).resolve():
        return UNKNOWN
    found = re.search(r"\+g([0-9a-f]{40})(\.changes)?$", installed.version)
    if found is None:
        return UNKNOWN
    return found[1] + ("+changes" if found[2] else "")


def _version(name: str) -> str:
    # Asking the package itself would import it, and with it a device context.
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _without_folder(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if equals and "/" in value:
        return f"{name}={Path(value).name}"
    return Path(argument).name if "/" in argument else argument

"""
The SHA-256 of a whole token file. It is cached, and the cache is valid while size, modification
time and inode stay the same.

The cache is one line of JSON in a file `.NAME.sha256` beside the token file. If that folder is
read-only, the file is in `$XDG_CACHE_HOME/qeffect` (by default `~/.cache/qeffect`). If neither file
can be written, every run computes the hash again. A damaged or outdated cache is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

__all__ = ["ChangedFileError", "file_sha256"]

_SETTLED_S = 2.0
"""
Seconds since its last change before a file's hash is cached: another change in this time might
leave the same modification time.
"""


class ChangedFileError(OSError):
    """The file changed while it was read."""


def file_sha256(path: Path) -> str:
    """
    Return the SHA-256 of a file. If the file is unchanged, the hash comes from the cache.

    Args:
        path: The file to hash.

    Raises:
        ChangedFileError: The file changed while it was read.
        OSError: The file cannot be read.
    """
    mark = _mark(path)
    for place in _places(path):
        if (found := _cached(place, mark)) is not None:
            return found
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _mark(path) != mark:
        raise ChangedFileError(None, "the file changed while it was read", str(path))
    if time.time() - mark["mtime_ns"] / 1e9 > _SETTLED_S:
        _store(path, {**mark, "sha256": digest})
    return digest


def _mark(path: Path) -> dict[str, int]:
    """Return facts that change with the file's content, without reading the content."""
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def _places(path: Path) -> list[Path]:
    """Return the possible paths of the cache, in the order in which to try them."""
    whole = path.resolve()
    places = [whole.with_name(f".{whole.name}.sha256")]
    with contextlib.suppress(RuntimeError):  # this user has no home
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(os.fsencode(whole)).hexdigest()[:32]
        places.append(base / "qeffect" / f"{name}.sha256")
    return places


def _cached(place: Path, mark: dict[str, int]) -> str | None:
    try:
        held = json.loads(place.read_bytes())
        digest = held.pop("sha256")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    known = isinstance(digest, str) and len(digest) == 64
    return digest if known and held == mark else None


def _store(path: Path, held: dict[str, int | str]) -> None:
    """
    Write the cache to the first possible path that can be written; several ranks may do this at
    once.
    """
    for place in _places(path):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=place.parent, prefix=place.name)
        except OSError:
            continue
        part = Path(name)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(held) + "\n")
            part.chmod(0o644)
            part.replace(place)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            continue
        return

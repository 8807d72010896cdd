"""
Make token files from text that every machine with Python has: the sources and text files of
CPython's standard library.

The files are read from the folder of the running interpreter; this repository contains no copy. For
each supported version of Python, a list contains the name, the length, and the first digits of the
SHA-256 of every file. A hash of a file's name decides whether the whole file is held out for
evaluation. Files are encoded with a byte-pair encoding, which is trained on the files that are not
held out. They can also be encoded byte by byte, which needs no package.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from qeffect.report import UnusableError

from .corpus_files import replaced, write_record
from .data import save
from .encodings import MOST, Bytes, Encoding, Pairs

__all__ = ["ListedFile", "differences", "encoding_maker", "listing", "make", "stdlib"]

LISTS = Path(__file__).parent / "corpora"
_SKIPPED = ("site-packages", "dist-packages", "__pycache__", "lib-dynload", "ensurepip")
_HELD_OUT = 1 / 50
_SUFFIXES = (".py", ".txt")


@attrs.frozen
class ListedFile:
    """
    An entry of the list of a standard library's files.

    Args:
        name: The file's path below the standard library's folder.
        size: The file's length in bytes.
        sha256: The first 16 digits of the file's SHA-256.
    """

    name: str
    size: int
    sha256: str

    @property
    def held_out(self) -> bool:
        """Whether the file is used for evaluation only."""
        share = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") / 2**32
        return share < _HELD_OUT

    def __str__(self) -> str:
        return f"{self.sha256} {self.size} {self.name}"


def stdlib() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def listing(folder: Path) -> Iterator[ListedFile]:
    """
    List the text files of a standard library, sorted by name. Files that a build of Python
    generates are left out.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        parts = name.split("/")
        if path.suffix not in _SUFFIXES or any(part in _SKIPPED for part in parts):
            continue
        if parts[-1].startswith("_sysconfigdata") or parts[0].startswith("config-"):
            continue
        content = path.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue  # the library's own tests of other encodings
        yield ListedFile(name, len(content), hashlib.sha256(content).hexdigest()[:16])


def known(version: str) -> list[ListedFile] | None:
    """Return the list for a version of Python; None if the version has no list."""
    path = LISTS / f"cpython-{version}.txt"
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split(" ", 2) for line in lines if line and not line.startswith("#")]
    return [ListedFile(name, int(size), digest) for digest, size, name in rows]


def versions() -> list[str]:
    """Return the versions of Python that have a list."""
    return sorted(path.stem.removeprefix("cpython-") for path in LISTS.glob("cpython-*.txt"))


def differences(found: Iterable[ListedFile], expected: Iterable[ListedFile]) -> list[str]:
    """Describe each difference between two lists, sorted by file name."""
    here, there = ({one.name: one for one in side} for side in (found, expected))
    said = []
    for name in sorted(here.keys() | there.keys()):
        if name not in here:
            said.append(f"{name} is missing")
        elif name not in there:
            said.append(f"{name} is not on the list")
        elif here[name] != there[name]:
            said.append(
                f"{name}: expected {there[name].size} bytes with hash {there[name].sha256}, found "
                f"{here[name].size} with {here[name].sha256}"
            )
    return said


def encoding_maker(tokenizer: str, vocabulary: int) -> Callable[[Iterable[str]], Encoding]:
    """
    Return a function that makes an encoding from the texts to train on.

    Args:
        tokenizer: `bpe` or `bytes`.
        vocabulary: Number of tokens of the byte-pair encoding.

    Raises:
        UnusableError: The vocabulary is invalid.
    """
    if not 272 <= vocabulary <= MOST or vocabulary % 16:
        raise UnusableError(
            f"--vocabulary: expected a multiple of 16 from 272 to {MOST:,}, found {vocabulary}"
        )
    return lambda texts: Bytes() if tokenizer == Bytes.name else Pairs(texts, vocabulary)


def make(
    out: Path,
    *,
    tokenizer: str = "bpe",
    vocabulary: int = 32768,
    any_version: bool = False,
    given: Encoding | None = None,
) -> dict[str, Any]:
    """
    Write `train.npy`, `held_out.npy` and `corpus.json` from the standard library of the running
    interpreter.

    Args:
        out: The folder to write to; created if missing.
        tokenizer: `bpe` or `bytes`.
        vocabulary: Number of tokens of the byte-pair encoding.
        any_version: Whether to accept a version of Python without a list of files, or files that
            differ from this list.
        given: An encoding to use. `tokenizer` and `vocabulary` then have no effect. None makes an
            encoding.

    Returns:
        The content of `corpus.json`.

    Raises:
        UnusableError: This version of Python has no list, the files differ from the list, the
            package `tokenizers` is missing, the vocabulary is invalid, or the folder cannot be
            written.
    """
    maker = encoding_maker(tokenizer, vocabulary)
    version, folder = platform.python_version(), stdlib()
    files, expected = list(listing(folder)), known(version)
    odd = ["QEffect has no list of its files"] if expected is None else differences(files, expected)
    if odd and not any_version:
        raise UnusableError(_odd(version, folder, expected, odd))
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for one in files:
        text = (folder / one.name).read_text(encoding="utf-8")
        parts["held_out" if one.held_out else "train"].append(text)
    made = maker(parts["train"]) if given is None else given
    record: dict[str, Any] = {
        "python": version,
        "listed": not odd,
        "files": {name: len(texts) for name, texts in parts.items()},
        "bytes": sum(one.size for one in files),
        **made.describe(),
    }
    with replaced(out) as part:
        for name, texts in parts.items():
            tokens = list(made.encode(texts))
            record[f"{name}_tokens"] = sum(map(len, tokens))
            save(part / f"{name}.npy", np.concatenate(tokens))
        made.save(part)
        write_record(part, record)
    return record


def _odd(version: str, folder: Path, expected: list[ListedFile] | None, odd: list[str]) -> str:
    if expected is None:
        return (
            "expected a Python version whose library QEffect has listed "
            f"({', '.join(versions())}), found {version}; run a listed version, or pass "
            "--any-version to accept other text"
        )
    return (
        f"{len(odd)} files of {folder} differ from the release of Python {version}, such as: "
        f"{'; '.join(odd[:3])}; run an unmodified release, or pass --any-version to accept other "
        "text"
    )

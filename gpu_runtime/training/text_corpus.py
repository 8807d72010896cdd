"""
Make token files from your own text. The text consists of one or many files of plain text or JSON
lines, which are mixed according to weights.

A file whose name ends in `.jsonl` or `.ndjson` has one JSON object per line, and each object has a
text in the same field. Any other file is a single text. JSON lines are read line by line, so a file
may be larger than memory.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import attrs
import numpy as np

from qeffect.report import UnusableError
from qeffect.text import json_mistake, unreadable, within

from .corpus_files import begin_tokens, replaced, token_type, write_record
from .encodings import Encoding

__all__ = ["LINES", "TextFile", "blend", "make_text"]

LINES = (".jsonl", ".ndjson")
"""Name endings of files of JSON lines."""
_BATCH = 1 << 20
"""Number of characters that are encoded in one call."""
_TIMES = 1000
"""
Largest number of times that a blend may repeat a file; a larger number is refused as a mistake.
"""


@attrs.frozen
class TextFile:
    """
    A file of text.

    Args:
        path: The file to read.
        field: The field of each JSON line that contains the text.
        held_out: Share of the text to hold out from training.
    """

    path: Path
    field: str = "text"
    held_out: float = 0.0

    @property
    def in_lines(self) -> bool:
        """Whether each line is a JSON object."""
        return self.path.suffix.lower() in LINES

    def texts(self) -> Iterator[tuple[str, bool]]:
        """
        Yield each text that is not empty, and whether it is held out.

        In JSON lines, a text's hash decides whether the text is held out. Therefore equal texts are
        either all held out or all used for training. In a plain text file, the end of the text is
        held out, from the nearest start of a line.

        Raises:
            UnusableError: The file cannot be read, is not UTF-8, or a line is not a JSON object
                with a text in the field.
        """
        try:
            if not self.in_lines:
                text = self._decoded(self.path.read_bytes(), "")
                at = _cut(text, self.held_out)
                yield from ((part, out) for part, out in ((text[:at], False), (text[at:], True)))
                return
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        text = self._field(line, number)
                        yield text, _share(text) < self.held_out
        except OSError as error:
            raise UnusableError(f"--text {self.path}: {unreadable(error)}") from None

    def _field(self, line: bytes, number: int) -> str:
        where = f", line {number}"
        text = self._decoded(line, where)
        try:
            held = json.loads(text)
        except (ValueError, RecursionError) as error:
            said = error.msg if isinstance(error, json.JSONDecodeError) else json_mistake(error)
            self._refuse(where, f"expected a JSON object, found invalid JSON ({said})")
        if not isinstance(held, dict):
            self._refuse(
                where, f"expected a JSON object, found {within(line.decode().strip(), 40)}"
            )
        if self.field not in held:
            named = within(", ".join(map(repr, held)) or "no field", 60)
            self._refuse(
                where,
                f"expected a text in the field {self.field!r}, found {named}; name the field with "
                "--field",
            )
        found = held[self.field]
        if not isinstance(found, str):
            shown = within(json.dumps(found), 40)
            self._refuse(where, f"expected a text in the field {self.field!r}, found {shown}")
        try:
            found.encode("utf-8")
        except UnicodeEncodeError:
            self._refuse(where, f"expected UTF-8 in the field {self.field!r}, found a surrogate")
        return found

    def _decoded(self, content: bytes, where: str) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            self._refuse(
                where, f"expected UTF-8, found a byte that is not UTF-8, at byte {error.start}"
            )

    def _refuse(self, where: str, said: str) -> NoReturn:
        raise UnusableError(f"--text {self.path}{where}: {said}")


def _share(text: str) -> float:
    """Return a number from 0 to 1 that depends only on the text."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:4], "big") / 2**32


def _cut(text: str, held_out: float) -> int:
    """
    Return the position at which the held-out end of a text begins: at the nearest start of a line,
    if a line starts nearby.
    """
    share = int(len(text) * held_out)
    at = len(text) - share
    starts = [text.rfind("\n", 0, at) + 1, text.find("\n", at) + 1]
    near = [start for start in starts if start and abs(start - at) <= share // 2]
    return min(near, key=lambda start: abs(start - at), default=at)


@attrs.define
class _Counts:
    """The counts of texts and tokens of one file."""

    bytes: int = 0
    texts: int = 0
    empty: int = 0
    held_out: int = 0


def _survey(file: TextFile) -> _Counts:
    """
    Read and check a file once, before any text is encoded.

    Raises:
        UnusableError: The file cannot be read, is not UTF-8, has a malformed line, or has no text
            to train on.
    """
    found = _Counts()
    for text, out in file.texts():
        found.bytes += len(text.encode("utf-8"))
        if not text:
            found.empty += file.in_lines
        elif out:
            found.held_out += 1
        else:
            found.texts += 1
    if not found.texts:
        what = "but all of it is held out; lower --held-out" if found.held_out else "found none"
        raise UnusableError(f"--text {file.path}: expected text to train on, {what}")
    return found


@attrs.frozen
class _Spooled:
    """
    The tokens of one file's texts, stored on the disk.

    Args:
        path: The file with the raw tokens.
        kind: The type of the tokens.
        ends: For each text, the index after its last token.
    """

    path: Path
    kind: np.dtype[Any]
    ends: Sequence[int]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.ends[-1] if self.ends else 0

    def tokens(self) -> np.ndarray[Any, Any]:
        """The tokens, mapped into memory."""
        return np.memmap(self.path, self.kind, mode="r", shape=(self.count,))


def _spool(
    file: TextFile, encoding: Encoding, place: Path, kind: np.dtype[Any]
) -> tuple[_Spooled, _Spooled]:
    """Encode a file's texts into two files of raw tokens: one for training, one held out."""
    places = [place.with_name(f"{place.name}-{side}") for side in ("train", "held_out")]
    ends = array("q"), array("q")
    batches: tuple[list[str], list[str]] = [], []
    with ExitStack() as opened:
        streams = [opened.enter_context(path.open("wb")) for path in places]

        def encode(side: int) -> None:
            for ids in encoding.encode(batches[side]):
                streams[side].write(ids.astype(kind).tobytes())
                ends[side].append(len(ids) + (ends[side][-1] if ends[side] else 0))
            batches[side].clear()

        sizes = [0, 0]
        for text, out in file.texts():
            if text:
                batches[out].append(text)
                sizes[out] += len(text)
            if sizes[out] >= _BATCH:
                encode(out)
                sizes[out] = 0
        for side in range(2):
            encode(side)
    first, second = (_Spooled(path, kind, own) for path, own in zip(places, ends, strict=True))
    return first, second


def blend(counts: Sequence[int], weights: Sequence[Fraction]) -> list[int]:
    """
    Return how many tokens to take from each file, so that the numbers of tokens have the ratio of
    the weights.

    Each file is taken completely at least once. The file with the most tokens relative to its
    weight is taken exactly once.

    >>> blend([100, 100], [Fraction(3), Fraction(1)]), blend([900, 100], [Fraction(1), Fraction(1)])
    ([300, 100], [900, 900])
    """
    total = max(count / weight for count, weight in zip(counts, weights, strict=True))
    return [round(total * weight) for weight in weights]


def _mixed(
    files: Sequence[_Spooled], wanted: Sequence[int], end: int
) -> Iterator[np.ndarray[Any, Any]]:
    """
    Yield texts of all files alternately, up to the wanted number of tokens of each file; the last
    text of a file may be cut.

    The next text comes from the file that is furthest behind its share, so the files have about the
    ratio of the weights in any long part of the result.
    """
    held = [file.tokens() for file in files]
    given = [0] * len(files)
    at = [0] * len(files)
    queue = [(0.0, n) for n in range(len(files))]
    while queue:
        _, n = heapq.heappop(queue)
        ends = files[n].ends
        start = ends[at[n] - 1] if at[n] else 0
        part = held[n][start : ends[at[n]]]
        if (left := wanted[n] - given[n]) < len(part):
            part = part[:left].copy()
            part[-1] = end
        yield part
        given[n] += len(part)
        at[n] = (at[n] + 1) % len(ends)
        if given[n] < wanted[n]:
            heapq.heappush(queue, (given[n] / wanted[n], n))


def make_text(
    out: Path,
    files: Sequence[TextFile],
    weights: Sequence[Fraction] | None,
    encode: Callable[[Iterator[str]], Encoding],
    show: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Write `train.npy`, `held_out.npy`, `corpus.json`, and `tokenizer.json` if the encoding has one.

    Args:
        out: The folder to write to; created if missing.
        files: The files of text to encode.
        weights: The weight of each file. With None every file is taken once, one after the other.
        encode: Function that makes the encoding from the texts to train on.
        show: Function that shows a line of progress.

    Returns:
        The content of `corpus.json`.

    Raises:
        UnusableError: A file or the folder cannot be used. After this error the folder is
            unchanged.
    """
    counts = []
    for file in files:
        show(f"Reading {file.path}")
        counts.append(_survey(file))
    if weights is not None:
        sizes = [found.bytes for found in counts]
        _require_few(files, sizes, blend(sizes, weights))

    def training() -> Iterator[str]:
        for file in files:
            yield from (text for text, out in file.texts() if text and not out)

    encoding = encode(training())
    kind = token_type(encoding.vocabulary)
    with replaced(out) as part:
        train, held_out = [], []
        for n, file in enumerate(files):
            show(f"Encoding {file.path}")
            own_train, own_held_out = _spool(file, encoding, part / str(n), kind)
            train.append(own_train)
            held_out.append(own_held_out)
        own = [one.count for one in train]
        wanted = own if weights is None else blend(own, weights)
        record: dict[str, Any] = {
            "texts": [
                {
                    "file": str(file.path),
                    **attrs.asdict(found),
                    "weight": None if weights is None else float(weights[n]),
                    "tokens": own[n],
                    "held_out_tokens": held_out[n].count,
                    "train_tokens": wanted[n],
                }
                for n, (file, found) in enumerate(zip(files, counts, strict=True))
            ],
            **encoding.describe(),
            "train_tokens": sum(wanted),
            "held_out_tokens": sum(one.count for one in held_out),
        }
        with (part / "train.npy").open("wb") as stream:
            begin_tokens(stream, kind, sum(wanted))
            if weights is None:
                _append(stream, train)
            else:
                for tokens in _mixed(train, wanted, encoding.end):
                    stream.write(tokens.tobytes())
        if record["held_out_tokens"]:
            with (part / "held_out.npy").open("wb") as stream:
                begin_tokens(stream, kind, record["held_out_tokens"])
                _append(stream, held_out)
        encoding.save(part)
        write_record(part, record)
    return record


def _require_few(files: Sequence[TextFile], own: Sequence[int], wanted: Sequence[int]) -> None:
    for file, has, takes in zip(files, own, wanted, strict=True):
        if takes > _TIMES * has:
            raise UnusableError(
                f"--weights: expected weights that repeat a file at most {_TIMES:,} times, found "
                f"{takes / has:,.0f} times for {file.path}; give this file a smaller weight"
            )


def _append(stream: BinaryIO, files: Sequence[_Spooled]) -> None:
    for file in files:
        with file.path.open("rb") as raw:
            while chunk := raw.read(_BATCH):
                stream.write(chunk)

"""
Encodings of text as tokens: single bytes, a byte-pair encoding that QEffect trains, or a given
`tokenizer.json`.

Single bytes need no package; the other two encodings need the package `tokenizers`. The vocabulary
size of a model is the largest token id plus one, rounded up to a multiple of 16 for FP8 products.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qeffect.renamed import old_names
from qeffect.report import UnusableError
from qeffect.text import near, unreadable, within

__all__ = [
    "END",
    "MOST",
    "NAMES",
    "TOKENIZER",
    "Bytes",
    "Encoding",
    "FileEncoding",
    "Packaged",
    "Pairs",
    "open_encoding",
    "padded",
]

__getattr__ = old_names(__name__, {"Given": "FileEncoding"})

END = "<|end|>"
"""The end token after each text, in an encoding that QEffect trains."""
MOST = 2**31
"""Largest vocabulary that a training file may name."""
NAMES = ("bpe", "bytes")
"""The values of `--tokenizer` that are not a file's path."""
TOKENIZER = "tokenizer.json"
"""Name of the file with a corpus's encoding; the encoding `bytes` needs no file."""
_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that end a text in known tokenizers, in search order."""

Ids = np.ndarray[Any, Any]


def padded(tokens: int) -> int:
    """
    Return the vocabulary size that a model needs for a number of tokens: the next multiple of 16.

    >>> padded(257), padded(272), padded(50257)
    (272, 272, 50272)
    """
    return -(-tokens // 16) * 16


class Encoding(Protocol):
    """
    An encoding of text as tokens.

    Attributes:
        name: `bytes`, `bpe` or `given`.
        tokens: The largest token id plus one.
        vocabulary: The vocabulary size of a model for this encoding.
        end: The token after each text.
    """

    name: str
    tokens: int
    vocabulary: int
    end: int

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        """Return the tokens of each text, followed by the end token."""

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text, without the end token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for tokens."""

    def describe(self) -> dict[str, Any]:
        """Return the facts that identify the encoding, for `corpus.json`."""

    def save(self, folder: Path) -> None:
        """
        Write the encoding's file into the folder of `corpus.json`. `open_encoding` reads this file.
        """


class Bytes:
    """
    One token for each byte value, and one token for the end of a text. The other ids below 272 are
    unused.
    """

    name = "bytes"
    tokens = 257
    vocabulary = 272
    end = 256

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        """Return the bytes of each text, followed by the end token."""
        for text in texts:
            held = np.empty(len(raw := text.encode("utf-8")) + 1, np.uint32)
            held[:-1] = np.frombuffer(raw, np.uint8)
            held[-1] = self.end
            yield held

    def prompt(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """
        Return the text for bytes, without the end token. Bytes that are not valid UTF-8 become
        U+FFFD.
        """
        return bytes(one for one in ids if one < 256).decode("utf-8", "replace")

    def describe(self) -> dict[str, Any]:
        """Return the name and the vocabulary, which identify this encoding."""
        return {"tokenizer": self.name, "vocabulary": self.vocabulary, "tokens": self.tokens}

    def save(self, folder: Path) -> None:
        """Write nothing: the name in `corpus.json` identifies this encoding."""


class Packaged:
    """
    An encoding of the package `tokenizers`.

    Args:
        made: The package's tokenizer object.
        end: The token after each text, as a string.
        where: The name of the encoding, for messages.
        text: The content of the encoding's file, which is saved unchanged because the package would
            write a different file; None if there is no file.

    Raises:
        UnusableError: The encoding lacks the end token, or its vocabulary is too large.
    """

    name = "given"

    def __init__(self, made: Any, end: str, where: str, text: str | None = None) -> None:
        self._text: str = made.to_str() if text is None else text
        made.no_truncation()
        made.no_padding()
        self._made, self._end, self._where = made, end, where
        found = made.token_to_id(end)
        if found is None:
            raise UnusableError(f"{where}: expected the token {within(repr(end))}, found none")
        self.end: int = found
        self.tokens: int = max(made.get_vocab(with_added_tokens=True).values()) + 1
        self.vocabulary = padded(self.tokens)
        if self.vocabulary > MOST:
            raise UnusableError(
                f"{where}: expected token ids below {MOST:,}, the largest vocabulary that a "
                f"training file may set, found the id {self.tokens - 1:,}"
            )

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        """
        Return the tokens of each text, followed by the end token.

        Raises:
            UnusableError: The tokenizer has no token for a part of a text.
        """
        try:
            encoded = self._made.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the package raises nothing more specific
            raise UnusableError(f"{self._where}: the text cannot be encoded: {error}") from None
        for one in encoded:
            yield np.asarray([*one.ids, self.end], np.uint32)

    def prompt(self, text: str) -> list[int]:
        """
        Return the tokens of a text, without the end token.

        Raises:
            UnusableError: The tokenizer has no token for a part of the text.
        """
        (found,) = self.encode([text])
        return [int(one) for one in found[:-1]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for tokens, without special tokens."""
        text: str = self._made.decode(list(ids), skip_special_tokens=True)
        return text

    def describe(self) -> dict[str, Any]:
        """
        Return the facts that identify this encoding: name, vocabulary, end token, and a hash of the
        whole encoding.
        """
        return {
            "tokenizer": self.name,
            "vocabulary": self.vocabulary,
            "tokens": self.tokens,
            "end": self._end,
            "sha256": hashlib.sha256(self._text.encode("utf-8")).hexdigest(),
        }

    def save(self, folder: Path) -> None:
        """Write the encoding in the package's own format."""
        (folder / TOKENIZER).write_bytes(self._text.encode("utf-8"))


class Pairs(Packaged):
    """
    A byte-pair encoding that QEffect trains.

    Args:
        texts: The texts to train on.
        vocabulary: Largest number of tokens. A text with few different words gives fewer tokens.

    Raises:
        UnusableError: The package is not installed.
    """

    name = "bpe"

    def __init__(self, texts: Iterable[str], vocabulary: int) -> None:
        tokenizers = _package("--tokenizer bpe", "or use --tokenizer bytes")
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(texts, trainer)
        super().__init__(made, END, "--tokenizer bpe")


class FileEncoding(Packaged):
    """
    An encoding from a file `tokenizer.json`.

    Args:
        path: The file.
        end: The token after each text, as a string. None takes the first token of `_ENDS` that the
            encoding has.
        option: The option that named the file, for messages.

    Raises:
        UnusableError: The package is not installed, the file cannot be used, or the encoding lacks
            the end token.
    """

    def __init__(self, path: Path, end: str | None = None, option: str = "--tokenizer") -> None:
        where = f"{option} {path}"
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            raise UnusableError(
                f"{where}: expected a tokenizer.json in UTF-8, found a byte that is not UTF-8"
            ) from None
        except OSError as error:
            raise UnusableError(f"{where}: {unreadable(error)}") from None
        tokenizers = _package(where, "or use --tokenizer bytes")
        try:
            made = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises nothing more specific
            raise UnusableError(
                f"{where}: expected a tokenizer.json of the package tokenizers; that package "
                f"reports: {within(str(error))}"
            ) from None
        if end is None:
            end = next((one for one in _ENDS if made.token_to_id(one) is not None), None)
        if end is None:
            raise UnusableError(
                f"{where}: expected an end token of a text ({', '.join(_ENDS)}), found none of "
                "these; name the token with --end"
            )
        super().__init__(made, end, where, text)


def encoding_of(name: str, end: str | None) -> FileEncoding | None:
    """
    Return the encoding in the file that `--tokenizer` names; None if `name` is one of `NAMES`.

    Raises:
        UnusableError: `name` is neither one of `NAMES` nor a file, or `FileEncoding` refuses the
            file.
    """
    if name in NAMES:
        return None
    path = Path(name)
    if not path.exists():
        raise UnusableError(
            f"--tokenizer: expected {', '.join(NAMES)} or the path of a tokenizer.json, found no "
            f"file {within(name)}{near(name, NAMES)}"
        )
    return FileEncoding(path, end)


def open_encoding(folder: Path, option: str) -> tuple[Encoding, dict[str, Any]]:
    """
    Return the encoding and the record (`corpus.json`) of a corpus.

    Args:
        folder: The folder that `qeffect runtime corpus` wrote.
        option: The option with which a user can name another folder, for messages.

    Raises:
        UnusableError: The folder has no corpus, or its encoding cannot be read.
    """
    path = folder / "corpus.json"
    try:
        record = json.loads(path.read_bytes())
        name, end = record["tokenizer"], record.get("end", END)
    except OSError as error:
        raise UnusableError(
            f"{path}: {error.strerror or error}; name a folder that qeffect runtime corpus wrote, "
            f"with {option}"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UnusableError(
            f"{path}: expected the record of a corpus, as qeffect runtime corpus writes it, found "
            f"something else; name the corpus with {option}"
        ) from None
    made: Encoding
    made = Bytes() if name == Bytes.name else FileEncoding(folder / TOKENIZER, end, "corpus")
    return made, record


def _package(where: str, instead: str) -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise UnusableError(
            f"{where}: the package tokenizers is not installed; pip install 'qeffect[train]', "
            f"{instead}"
        ) from None

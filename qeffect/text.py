"""
Text for messages: untrusted text escaped and shortened to one line, and words for file errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Final

__all__ = [
    "aligned",
    "counted",
    "decoded",
    "escaped",
    "is_name",
    "json_mistake",
    "near",
    "shown",
    "spelled",
    "unreadable",
    "within",
]

#: Longest excerpt of a log in a message, in characters.
_LONGEST: Final = 300


def is_name(value: Any) -> bool:
    """
    Whether a value is a name that a log may hold: a printable string.

    >>> is_name("fc1"), is_name("fc1\\x1b[2K"), is_name("fc\\ud800"), is_name(1)
    (True, False, False, False)
    """
    return isinstance(value, str) and value.isprintable()


def escaped(text: str) -> str:
    r"""
    Return text with every unprintable character escaped.

    These include control characters, line ends, bidirectional marks and lone surrogates.

    >>> escaped("fc1\nqeffect: accepted")
    'fc1\\nqeffect: accepted'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def decoded(text: str) -> str:
    r"""
    Decode, as UTF-8, the bytes in a text (such as a file name) that the locale could not decode.

    >>> decoded("\udcc3\udca9.csv"), decoded("\udce9.csv")
    ('é.csv', '\\xe9.csv')
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return text


def counted(number: int, noun: str) -> str:
    """
    Return a number with its noun.

    >>> counted(1, "step"), counted(2000, "step"), counted(2, "microbatch"), counted(2, "epoch")
    ('1 step', '2,000 steps', '2 microbatches', '2 epochs')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("tch", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """
    Yield the lines of a table whose columns are aligned to the right.

    >>> list(aligned([["group", "ms"], ["1", "72.5"]]))
    ['group    ms', '    1  72.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def near(word: object, names: Iterable[str]) -> str:
    """
    Return the words "; did you mean NAME?" with the most similar name; empty if no name is similar.

    >>> near("layres", ["layers", "hidden"]), near("x", ["layers"])
    ('; did you mean layers?', '')
    """
    found = get_close_matches(str(word).partition("=")[0], list(names), 1)
    return f"; did you mean {found[0]}?" if found else ""


def within(text: str, most: int = _LONGEST) -> str:
    """
    Return text on one line; the middle of a text that is too long is left out.

    Args:
        text: The text.
        most: Maximum length of the result, in characters.
    """
    # Cut first, so that a line of megabytes costs no more to show than a short one.
    cut = text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 3) :]}"
    line = escaped(cut)
    return line if len(line) <= most else f"{line[: most // 2]}...{line[-(most // 3) :]}"


def spelled(value: Any) -> str:
    """Return a name as text, even if it contains an integer too long for Python to print."""
    try:
        return str(value)
    except ValueError:
        return shown(value)


def shown(value: Any) -> str:
    """Return a value as a message shows it: short, and on one line."""
    try:
        text = repr(value)
    except RecursionError:
        return "a deeply nested value"
    except Exception as error:  # a class of the caller, or an integer of thousands of digits
        if isinstance(value, int):
            return f"an integer of {value.bit_length():,} bits"
        name = type(value).__name__
        return f"a value of class {name} that cannot be printed ({type(error).__name__})"
    return within(text if len(text) <= 60 else f"{text[:57]}...")


def unreadable(error: OSError | ValueError) -> str:
    """Return, as text, why a file cannot be read and what to do."""
    remedies: dict[type[Exception], str] = {
        FileNotFoundError: "check its name",
        IsADirectoryError: "name a file in it",
    }
    remedy = remedies.get(type(error), "check its name and its permissions")
    return f"cannot be read: {getattr(error, 'strerror', None) or error}; {remedy}"


def json_mistake(error: ValueError | RecursionError) -> str:
    """
    Return, in plain words, the mistake that a JSON parser found.

    Args:
        error: The exception of ``bytes.decode``, of ``json.loads``, or of one of its hooks.

    >>> json_mistake(json.JSONDecodeError("Expecting value", "", 0))
    'an empty file'
    """
    if isinstance(error, RecursionError):
        return "a deeply nested value"
    if isinstance(error, UnicodeDecodeError):
        return f"a byte that is not UTF-8, at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        if not error.doc.strip():
            return "an empty file"
        said = error.msg[:1].lower() + error.msg[1:]
        return f"a mistake at line {error.lineno}, column {error.colno} ({said})"
    if "integer string conversion" in str(error):
        return "an integer of thousands of digits"
    return str(error)

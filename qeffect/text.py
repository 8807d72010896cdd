"""
Text from a log, made fit for a terminal: nothing in it moves a cursor or begins a line.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["counted", "decoded", "escaped", "is_name", "shown", "spelled", "within"]

#: Longest passage of a log that a message repeats.
_LONGEST: Final = 300


def is_name(value: Any) -> bool:
    """
    Whether a value is a name that a log may hold: printable text.

    >>> is_name("fc1"), is_name("fc1\\x1b[2K"), is_name("fc\\ud800"), is_name(1)
    (True, False, False, False)
    """
    return isinstance(value, str) and value.isprintable()


def escaped(text: str) -> str:
    r"""
    Return text with every character escaped that is not printable.

    Control characters, line ends, marks that reorder what follows and lone surrogates are such.

    >>> escaped("fc1\nqeffect: accepted")
    'fc1\\nqeffect: accepted'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def decoded(text: str) -> str:
    r"""
    Return text with the bytes decoded that the locale could not decode, as in a file's name.

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

    >>> counted(1, "step"), counted(2000, "step"), counted(2, "microbatch")
    ('1 step', '2,000 steps', '2 microbatches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def within(text: str, most: int = _LONGEST) -> str:
    """
    Return text on one line of a limited length, its middle left out where it is longer.

    Args:
        text: The text.
        most: The most characters.
    """
    # Cut first, so that a line of megabytes costs no more to show than a short one.
    cut = text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 3) :]}"
    line = escaped(cut)
    return line if len(line) <= most else f"{line[: most // 2]}...{line[-(most // 3) :]}"


def spelled(value: Any) -> str:
    """Return a name as text, also one with a number that is too long to be spelled."""
    try:
        return str(value)
    except ValueError:
        return shown(value)


def shown(value: Any) -> str:
    """Return a value as a message repeats it: short, and on one line."""
    try:
        text = repr(value)
    except RecursionError:
        return "a deeply nested value"
    except Exception as error:  # of a class of the caller's, or an integer of thousands of digits
        if isinstance(value, int):
            return f"an integer of {value.bit_length():,} bits"
        return f"a value of class {type(value).__name__} with no text ({type(error).__name__})"
    return within(text if len(text) <= 60 else f"{text[:57]}...")

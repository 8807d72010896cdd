"""
Links of a page to files, headings and anchors, and the Python names that links refer to.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["anchors", "broken", "headings", "inlined", "names_in", "unlinked"]

#: The target of the links with this text, at the end of a page.
_END = re.compile(r"^\[(`[^`\]]+`)\]: (\S+)\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
#: Names before a link to the file that has them, such as "`f`, `g` in [`file.py`](../file.py)".
_NAMES = re.compile(r"((?:`[^`]+`(?:, )?)+) in \[`[^`]+`\]\(([^)\s#]+\.py)\)")
#: A command or a path names no symbol.
_SYMBOL = re.compile(r"`([\w.-]+)`")


def inlined(text: str) -> str:
    """
    Return a text with the targets that stand at its end moved into the links.

    >>> inlined("see [`a`] and [`b`](b.md)\\n\\n[`a`]: a.md\\n")
    'see [`a`](a.md) and [`b`](b.md)\\n\\n'
    """
    ends = dict(_END.findall(text))
    text = _END.sub("", text)
    return re.sub(
        r"\[(`[^`\]]+`)\](?!\()",
        lambda found: f"{found[0]}({ends[found[1]]})" if found[1] in ends else found[0],
        text,
    )


def unlinked(text: str) -> str:
    """
    Return a text without the links around code and without anchors.

    >>> unlinked('<a id="b"></a>`b`: see [`a`](#a) and [the rest](c.md)')
    '`b`: see `a` and [the rest](c.md)'
    """
    return re.sub(r'<a id="[^"]*"></a>', "", re.sub(r"\[(`[^`]*`)\]\([^)\s]+\)", r"\1", text))


def headings(text: str) -> set[str]:
    """Return the anchors of a text's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def anchors(text: str) -> list[str]:
    """Return the anchors that a text sets itself, in order."""
    return re.findall(r'<a id="([^"]+)"></a>', text)


def broken(text: str, folder: Path) -> list[str]:
    """
    Return the links of a text, and the names in the links, that do not exist.

    Args:
        text: The text of a page.
        folder: The folder of the page.

    Returns:
        Links to files or anchors that do not exist, and names that a linked Python file lacks. The
        name is the text of the link, or stands in code before ``in`` and the link.
    """
    own = headings(text) | set(anchors(text))
    return [*_lost(text, folder, own), *_unknown(text, folder)]


def _lost(text: str, folder: Path, own: set[str]) -> Iterator[str]:
    for _, target in _LINK.findall(text):
        path, _, anchor = target.partition("#")
        there = (folder / path).is_file() if path else anchor in own
        if "://" not in target and not there:
            yield target


def _unknown(text: str, folder: Path) -> Iterator[str]:
    named = [(names, path) for names, path in _NAMES.findall(text)]
    named += [(said, path) for said, path in _LINK.findall(text) if path.endswith(".py")]
    for names, path in named:
        file = folder / path
        symbols = [name for name in _SYMBOL.findall(names) if not name.endswith(".py")]
        known = names_in(file.resolve()) if symbols and file.is_file() else frozenset(symbols)
        yield from (f"{name} in {path}" for name in symbols if name not in known)


@cache
def names_in(file: Path) -> frozenset[str]:
    """
    Return the names that a Python file defines.

    These are functions, classes, methods as ``Class.method``, and the names under which decorators
    enter a predicate in a register.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            inner = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {node.name, *(f"{node.name}.{name}" for name in inner)}
        elif isinstance(node, ast.FunctionDef):
            calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
            entered = [call.args[0] for call in calls if call.args]
            found |= {node.name, *(str(a.value) for a in entered if isinstance(a, ast.Constant))}
    return frozenset(found)

"""
The changelog's table of import names that moved below ``qeffect.gpu_runtime``.

Names that keep their last word share one row per pair of old and new folder. A renamed module has a
row of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qeffect.gpu_runtime.renamed import MODULES, NAMES
from tests.docs.blocks import markdown


def moved() -> str:
    """Old and new names, from the table that keeps the old names importable."""
    kept: dict[tuple[str, str], list[str]] = {}
    renamed = []
    for old, new in [*MODULES.items(), *NAMES.items()]:
        (before, _, last), (after, _, word) = old.rpartition("."), new.rpartition(".")
        if not new or word == "__main__":
            continue
        if last == word:
            kept.setdefault((before, after), []).append(last)
        else:
            renamed.append((f"`{old}`", f"`{new}`"))
    rows = [
        (_spelled(before, words), _spelled(after, words)) for (before, after), words in kept.items()
    ]
    return markdown(("old name", "new name"), [*rows, *renamed])


def _spelled(folder: str, words: list[str]) -> str:
    dotted = f"{folder}." if folder else ""
    return f"`{dotted}{words[0]}`" if len(words) == 1 else f"`{dotted}{{{', '.join(words)}}}`"


#: The blocks of the changelog.
BLOCKS: Mapping[str, Callable[[], str]] = {"moved": moved}

"""
Generate the page of all fields of a training file, from `config.py`.

``python -m qeffect.gpu_runtime.training.config_page`` writes the page into `docs/configuration.md`
of this tree, or into the path that an argument names.
"""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

import attrs

from .config import TABLES

__all__ = ["COLUMNS", "descriptions", "page", "rows"]

COLUMNS = ("field", "type", "default", "unit", "allowed", "on resume", "what it does")

_HEAD = """# The training file

`qeffect runtime train FILE.toml` reads one TOML file. Every field has a default, and an unknown
field is refused. Paths are relative to the file's folder. An
[example](../gpu_runtime/training/examples/cpu.toml) runs on a CPU in two processes.

The column *on resume* says whether a field may change when `--resume` continues from the newest
checkpoint. If a field must stay the same, the run compares its value with the checkpoint before any
rank writes anything, and refuses another value. The log lists the fields that changed.

F, dI and dW are a stage's forward, input gradient and weight gradient for one microbatch. A *tape*
is the data that one F leaves for its dI and dW; a *slot* is the memory of one tape. An *amax* is
the largest absolute value of a tensor, from which its FP8 scale is computed.

This page is generated from `gpu_runtime/training/config.py`:
`python -m qeffect.gpu_runtime.training.config_page`.
"""


def descriptions(table: type) -> dict[str, str]:
    """
    Return the description of each field of a table. The descriptions come from the docstring of the
    table's class.
    """
    text = inspect.getdoc(table) or ""
    _, _, arguments = text.partition("Args:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def rows(table: type) -> list[tuple[str, ...]]:
    """Return one row per field of a table, with one cell for each of `COLUMNS`."""
    does = descriptions(table)
    fields: Any = attrs.fields(table)
    defaults = table()
    return [
        (
            f"`{field.name}`",
            field.metadata["kind"],
            f"`{_toml(getattr(defaults, field.name))}`",
            field.metadata["unit"] or "-",
            field.metadata["allowed"],
            field.metadata["resume"],
            does.get(field.name, ""),
        )
        for field in fields
    ]


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for name, table in TABLES.items():
        title, _, about = (inspect.getdoc(table) or "").partition("\n")[0].partition(": ")
        assert title == f"Table `[{name}]`", title
        parts.append(f"## `[{name}]`\n\n{about[:1].upper()}{about[1:]}\n")
        cells = [COLUMNS, tuple("---" for _ in COLUMNS), *rows(table)]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n")
    return "\n".join(parts)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def main() -> None:
    """Write the page."""
    default = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    parser = argparse.ArgumentParser(description="Write the page of a training file's fields.")
    parser.add_argument("path", nargs="?", type=Path, default=default, help="path of the page")
    parser.parse_args().path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""
The pages' generated blocks: every number in them comes from a run or from a checked-in report.

``python -m tests.docs.blocks`` writes the blocks; ``--check`` exits with 1 if a block is out of
date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
KERNEL_REPORTS = ROOT / "verification" / "reports"
RUNTIME_REPORTS = ROOT / "gpu_runtime" / "lab" / "reports"
KERNEL_PAGE = KERNEL_REPORTS / "README.md"
RUNTIME_PAGE = RUNTIME_REPORTS / "README.md"
RECORDS_PAGE = ROOT / "tests" / "records" / "README.md"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def load(path: Path) -> Mapping[str, Any]:
    """Read a report."""
    data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def pages() -> Mapping[Path, Mapping[str, Callable[[], str]]]:
    """The function of each block, by page and block name."""
    from tests.docs import (
        backends_block,
        guard_block,
        kernel_block,
        modes_block,
        moved_block,
        readme_block,
        record_block,
        runtime_block,
        trust_block,
    )

    return {
        README: readme_block.BLOCKS,
        CHANGELOG: moved_block.BLOCKS,
        KERNEL_PAGE: kernel_block.BLOCKS,
        RUNTIME_PAGE: runtime_block.BLOCKS,
        RECORDS_PAGE: record_block.BLOCKS,
        **trust_block.BLOCKS,
        guard_block.PAGE: {**trust_block.BLOCKS[guard_block.PAGE], **guard_block.BLOCKS},
        **modes_block.BLOCKS,
        **backends_block.BLOCKS,
    }


def rendered(page: Path) -> str:
    """Return the text of a page with every block generated again."""
    text = page.read_text(encoding="utf-8")
    for name, make in pages()[page].items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page.relative_to(ROOT)} has no block {name!r}")
        made = make()
        text = pattern.sub(lambda _, b=begin, m=made, e=end: f"{b}\n{m}\n{e}", text)
    return text


def main(argv: Sequence[str]) -> int:
    """Write the blocks, or with ``--check`` only compare them."""
    made = {page: rendered(page) for page in pages()}
    stale = [page for page, text in made.items() if page.read_text(encoding="utf-8") != text]
    if "--check" in argv:
        return int(bool(stale))
    for page in stale:
        page.write_text(made[page], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""
``python -m qeffect.spec``: write the contract and the fault table from their data, or check that
both are current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .document import DOCUMENTS

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """
    Write every generated document of this folder.

    Args:
        argv: Arguments without the program's name.

    Returns:
        0 if the documents are current or were written, 1 if ``--check`` finds a stale one.
    """
    parser = argparse.ArgumentParser(prog="python -m qeffect.spec", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a document is out of date"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(__file__).parent,
        help="folder of the documents (default: this package)",
    )
    args = parser.parse_args(argv)
    stale = []
    for name, render in DOCUMENTS.items():
        path = args.folder / name
        text = render()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not args.check:
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(
            f"{name} is out of date; run python -m qeffect.spec" if args.check else f"wrote {name}"
        )
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

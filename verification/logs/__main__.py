"""
``python -m qeffect.verification.logs``: write the example logs of ``spec/logs``, or check that they
are up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qeffect import spec

from .examples import files

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """
    Write every example log.

    Args:
        argv: Arguments without the program's name.

    Returns:
        0 if the examples are up to date or were written; 1 if ``--check`` finds an outdated
        example.
    """
    parser = argparse.ArgumentParser(
        prog="python -m qeffect.verification.logs", description=__doc__
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if an example is out of date",
    )
    folder = Path(spec.__file__).parent / "logs"
    parser.add_argument("--folder", type=Path, default=folder, help="folder of the example logs")
    args = parser.parse_args(argv)
    wanted = {args.folder / name: text.encode() for name, text in files().items()}
    found = {path for path in args.folder.rglob("*") if path.is_file()}
    stale = [p for p, text in wanted.items() if p not in found or p.read_bytes() != text]
    stale += sorted(found - wanted.keys())
    for path in stale:
        name = path.relative_to(args.folder)
        if args.check:
            print(f"{name} is out of date; run python -m qeffect.verification.logs")
        elif path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wanted[path])
            print(f"wrote {name}")
        else:
            path.unlink()
            print(f"removed {name}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

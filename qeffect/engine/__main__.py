"""
``python -m qeffect.engine``: write the composed transitions (functions that check and change the
contract's state), or check that they are current.
"""

from __future__ import annotations

import argparse
import sys

from .compose import CompositionError
from .generate import FOLDER, stale, write

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """
    Run the command.

    Returns:
        0 if the transitions are current or were written, 1 if ``--check`` finds them stale, 2 if
        they cannot be composed or written.
    """
    parser = argparse.ArgumentParser(prog="python -m qeffect.engine", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a generated file is stale"
    )
    options = parser.parse_args(arguments)
    try:
        if options.check:
            differing = stale()
            if differing:
                print(f"stale: {', '.join(differing)}; run python -m qeffect.engine")
                return 1
            print("the composed transitions are current")
            return 0
        print(f"written: {', '.join(write()) or 'nothing; all files were current'}")
    except (CompositionError, OSError) as error:
        print(f"cannot write {FOLDER.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

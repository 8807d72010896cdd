"""
``python -m qeffect.gpu_runtime`` is ``qeffect runtime``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qeffect import cli

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command of the runtime.

    Args:
        argv: Arguments without the program's name; by default the process's own.

    Returns:
        0 when all is well, 1 when a violation or a mismatch was found, 2 for unusable input or
        something that is missing.
    """
    return cli.main(["runtime", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())

"""
``python -m qeffect.gpu_runtime`` does the same as ``qeffect runtime``.
"""

from __future__ import annotations

from collections.abc import Sequence

from qeffect import cli

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command of the runtime.

    Args:
        argv: Command-line arguments without the program's name; by default those of this process.

    Returns:
        0 for success, 1 for a violation or a mismatch, 2 for unusable input or a missing
        dependency, 130 after an interrupt.
    """
    return cli.main(argv, before=("runtime",))


if __name__ == "__main__":
    raise SystemExit(main())

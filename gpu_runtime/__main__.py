"""
``python -m qeffect.gpu_runtime`` is ``qeffect runtime``.
"""

from __future__ import annotations

from collections.abc import Sequence

from qeffect import cli

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command of the runtime.

    Args:
        argv: Arguments without the program's name; by default the process's own.

    Returns:
        0 when all is well, 1 for a violation or a mismatch, 2 for unusable input or a missing
        dependency, 130 after an interrupt.
    """
    return cli.main(argv, before=("runtime",))


if __name__ == "__main__":
    raise SystemExit(main())

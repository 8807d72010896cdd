"""
Ctrl-C during the command's imports: SIGINT is blocked until the command line can handle it.

Importing the package takes a fifth of a second. In this time Python would answer Ctrl-C with a
traceback. The ``qeffect`` command therefore blocks SIGINT before anything else is imported, and
``Interrupts.run`` later handles the blocked signal. A process that imports QEffect as a library
keeps its signal handling.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["block_interrupts", "is_command", "unblock_interrupts"]

#: The name of the console script and, after ``-m``, of the package.
_COMMAND = "qeffect"


def is_command(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """
    Whether a process runs the ``qeffect`` command, as a script or with ``python -m qeffect``.

    Args:
        argv: ``sys.argv`` while the package is imported; its first entry is ``-m`` for modules.
        orig_argv: ``sys.orig_argv``, the interpreter's own command line.

    >>> is_command(["/opt/bin/qeffect", "check"], ["python", "/opt/bin/qeffect", "check"])
    True
    >>> is_command(["-m", "check"], ["python", "-X", "dev", "-m", "qeffect", "check"])
    True
    >>> is_command(["train.py"], ["python", "train.py"])
    False
    """
    program = argv[0] if argv else ""
    if program == "-m":
        place = orig_argv.index("-m") if "-m" in orig_argv else len(orig_argv)
        return list(orig_argv[place + 1 : place + 2]) == [_COMMAND]
    return program.replace("\\", "/").rpartition("/")[2] in (_COMMAND, f"{_COMMAND}.exe")


def block_interrupts() -> None:
    """Block SIGINT in this thread, and thereby in all threads and processes that it starts."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def unblock_interrupts() -> None:
    """Let SIGINT reach this thread; a signal that was blocked arrives at once."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


if is_command(sys.argv, sys.orig_argv):
    block_interrupts()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from .launched import START, trains

        if trains(sys.orig_argv):
            START.arm()

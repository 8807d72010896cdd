"""
The lock of a folder of checkpoints. Only one run at a time may write to such a folder.

The process of rank 0 holds an advisory lock (`flock`) on a file in the folder while it trains. The
operating system releases the lock when that process ends for any reason, so a lock never outlives
its owner. The file's text names the owner, for the error message of a second run. The text has no
effect on the lock.

The lock belongs to the file, not to its name. If the folder is moved or the file is removed while
the run trains, another run could lock a new file of the same name. Therefore the owner checks that
the name still refers to the locked file. It does so before each save (`FolderLock.require`) and
before it replaces the status file (`FolderLock.lost`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...backends.protocol import BackendError

__all__ = ["LOCK", "FolderLock"]

LOCK = ".lock"
"""Name of the lock's file."""
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderLock:
    """
    The lock of one folder of checkpoints, held by this process.

    Args:
        folder: The folder of checkpoints; created if missing.

    Attributes:
        began: Whether the training has begun. If a run ends before its training begins, the command
            writes the status file. Otherwise the trainer writes it.
        problem: Why the folder could not be locked, although no other run holds the lock. A second
            run in the folder is then not detected. Empty if this process holds the lock.

    Raises:
        BackendError: Another process holds the lock. The message names this process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.problem = folder, ""
        self.began = False
        self._handle: int | None = None
        self._said: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._take()

    def _take(self) -> None:
        """
        Lock the file that has the lock's name at this moment.

        Raises:
            BackendError: Another process holds the lock.
        """
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = self._handle is not None and error.errno in _HELD
            owner = self._owner() if held else ""
            self.release()
            if held:
                raise BackendError(
                    f"{folder} is in use by {owner}; end that run, or name another folder"
                ) from None
            self.problem = (
                f"{folder} cannot be locked: {error.strerror or error}; a second run in this "
                "folder would not be noticed"
            )
        self.say()

    def require(self) -> None:
        """
        Raise an error if another process holds the folder's lock. If the locked file was moved or
        removed, lock the folder again.

        Raises:
            BackendError: Another file now has the lock's name, and another process has locked this
                file.
        """
        if self._handle is None or self._same() is True:
            return
        former, self._handle = self._handle, None
        try:
            self._take()
        except BackendError:
            self._handle = former  # still locks the folder that was moved away
            raise
        os.close(former)

    def lost(self) -> bool:
        """
        Whether another file now has the lock's name. Then another process may have locked the
        folder.
        """
        return self._handle is not None and self._same() is False

    def _same(self) -> bool | None:
        """
        Whether the file with the lock's name is the locked file; None if no file has this name.
        """
        assert self._handle is not None
        try:
            found = (self.folder / LOCK).stat()
        except OSError:
            return None
        return os.path.samestat(found, os.fstat(self._handle))

    def say(self, **facts: Any) -> None:
        """
        Write the owner of the lock into the lock file, with further facts such as the run's
        identity.
        """
        self._said.update(facts)
        if self._handle is not None:
            with suppress(OSError):  # a full disk: the lock holds without its text
                os.ftruncate(self._handle, 0)
                os.pwrite(self._handle, json.dumps(self._said).encode(), 0)

    def _owner(self) -> str:
        """Describe the process that holds the lock."""
        assert self._handle is not None
        try:
            said = json.loads(os.pread(self._handle, 4096, 0))
            assert isinstance(said, Mapping)
            run = f" of run {said['run']}" if "run" in said else ""
            return f"process {said['pid']} on {said['host']}{run}, since {said['since']}"
        except (OSError, ValueError, KeyError, AssertionError):
            return "another process"

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

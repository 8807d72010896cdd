"""
Check that a device is present, and read its name, clocks and memory as nvidia-smi reports them.

This module changes no setting of the device.
"""

from __future__ import annotations

import importlib.util
import subprocess
import threading

from qeffect.report import UnusableError

from ...backends.devices import visible_id
from ...backends.nvidia_smi import IDENTITY, STATE, parse, query

__all__ = [
    "FIRST_READING_S",
    "IDENTITY",
    "STATE",
    "MemoryPoll",
    "parse",
    "query",
    "require_device",
]

FIRST_READING_S = 4.0


def require_device(instead: str, *, library: bool = True) -> None:
    """
    Require a CUDA device and the library, without creating a device context in this process.

    Args:
        instead: What the user can do without a device; this text becomes part of the error message.
        library: Whether Transformer Engine is needed too.

    Raises:
        UnusableError: A CUDA device or Transformer Engine is missing.
    """
    import torch

    if not torch.cuda.device_count():
        raise UnusableError(
            f"expected a GPU, found no CUDA device; {instead}; `qeffect runtime doctor` lists "
            "what is missing"
        )
    if library and importlib.util.find_spec("transformer_engine") is None:
        raise UnusableError("Transformer Engine is not installed: pip install 'qeffect[gpu]'")


class MemoryPoll:
    """
    The peak of device memory that the driver reports, polled every 20 ms.

    nvidia-smi does the polling in a process of its own, so neither the interpreter nor the context
    under test is disturbed. On a machine without nvidia-smi, every rise is None.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._latest = 0
        self._first = 0
        self._peak = 0
        self._given_up = False
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._sampled = threading.Condition()

    def __enter__(self) -> MemoryPoll:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen(
                [*command, f"--id={visible_id()}", "--loop-ms=20"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return self
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.sample(int(line) * 1024 * 1024)

    def sample(self, used: int) -> None:
        """Record one reading."""
        with self._sampled:
            self._samples += 1
            self._latest = used
            self._peak = max(self._peak, used)
            self._sampled.notify_all()

    def mark(self) -> None:
        """
        Start a new measurement at the next reading; stop polling if no reading arrives in time.
        """
        with self._sampled:
            if self._process is not None and not self._given_up:
                seen = self._samples
                if not self._sampled.wait_for(lambda: self._samples > seen, FIRST_READING_S):
                    self._given_up = True
                    self._process.terminate()
            self._first = self._peak = self._latest

    def rise(self) -> int | None:
        """The peak since `mark`, minus the reading at `mark`; None without a reading."""
        with self._sampled:
            return None if self._given_up or not self._samples else self._peak - self._first

    def __exit__(self, *_: object) -> None:
        if self._process is None or self._thread is None:
            return
        self._process.terminate()
        self._process.wait(timeout=30)
        self._thread.join(timeout=30)
        if self._process.stdout is not None:
            self._process.stdout.close()

"""What a run tells of itself: JSON lines, TensorBoard where it is installed, a terminal."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from qeffect.report import UnusableError

__all__ = ["Log", "memory_bytes"]


def memory_bytes(device: torch.device) -> int:
    """The most memory that was held so far: reserved on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Log:
    """
    Where the lines of a run go; rank 0 has one.

    Args:
        path: JSON lines, appended to; None for none.
        board: A folder for TensorBoard; None for none.
        show: Shows a line on a terminal.

    Raises:
        UnusableError: The file cannot be written, or TensorBoard is not installed.
    """

    def __init__(self, path: Path | None, board: Path | None, show: Callable[[str], None]) -> None:
        self._show = show
        self._writer: Any = None
        if board is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UnusableError(
                    "[run] tensorboard: the package tensorboard is not installed; pip install "
                    "tensorboard, or leave the field out: the JSON lines have the same figures"
                ) from None
            self._writer = SummaryWriter(str(board))
        self._file = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise UnusableError(f"[run] log: {path}: {error.strerror or error}") from None

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write one line; its numbers go to TensorBoard under their names."""
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        step = line.get("step")
        if self._writer is not None and step is not None:
            for name, value in line.items():
                if name != "step" and type(value) in (int, float):
                    self._writer.add_scalar(name, value, step)
        if "not_saved" in line:
            self._show(f"step {step}  NOT SAVED: {line['not_saved']}")
        if "loss" in line:
            self._show(
                f"step {step}  loss {line['loss']:.4f}  rate {line['rate']:.3g}  "
                f"{line['tokens_per_s']:,.0f} tokens/s  {line['step_ms']:.1f} ms"
            )

    def close(self) -> None:
        """End both."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()

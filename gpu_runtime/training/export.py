"""
Write the weights of a checkpoint to one file that other programs can read.

The file contains only weights, without AdamW's state, scaling state and random states.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from qeffect.cli.command import needs

from ..backends.protocol import BackendError
from .checkpoint.files import manifest, problem_of, read_facts
from .state import MODEL

__all__ = ["FORMATS", "read_part", "read_weights", "write_weights"]


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """
    Compare each file of a checkpoint with its hash, then read the weights.

    Args:
        path: The checkpoint's folder, as `Checkpoints` wrote it, from any number of ranks.

    Returns:
        The weights by the model's names, such as ``layers.5.qkv.weight``, and the checkpoint's
        facts (its plain data). The weights are on the CPU, with the shapes and dtypes of the
        training. A tied weight appears once.

    Raises:
        BackendError: A file is missing or damaged, or the folder is not a checkpoint.
    """
    return read_part(path, MODEL)


def read_part(
    path: Path, part: str, *, compared: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """
    Read the tensors of a checkpoint whose names begin with a prefix. The prefix is removed from the
    names.

    Args:
        path: The checkpoint's folder.
        part: The prefix, such as ``model`` or ``fp8.dp0``.
        compared: Whether an earlier call for another prefix has already compared the files with
            their hashes. If False, this call compares them.

    Returns:
        The tensors by name without the prefix, on the CPU, and the checkpoint's facts (its plain
        data).

    Raises:
        BackendError: A file is missing or damaged, or the folder is not a checkpoint.
    """
    marks = manifest(path)
    if problem := problem_of(path, marks, () if compared else sorted(marks)):
        raise BackendError(problem)
    facts = read_facts(path, marks)
    prefix = f"{part}."
    held = {
        name: torch.empty(size, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, size) in facts["tensors"].items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads all
        read_tensors(held, storage_reader=FileSystemReader(path), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in sorted(held.items())}, facts


def write_weights(
    path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any], kind: str
) -> None:
    """
    Write weights into a new file. The file gets its name only when it is complete.

    Args:
        path: The path of the file. Its folder must exist.
        weights: The weights by name, on the CPU.
        about: Plain data that a safetensors file stores as JSON under ``qeffect``.
        kind: One of `FORMATS`.

    Raises:
        BackendError: The file exists already, or cannot be written.
        UnusableError: The package that writes this format is not installed.
    """
    if path.exists():
        raise BackendError(f"{path} exists; name another file, or move the existing file away")
    write = FORMATS[kind]()
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial, weights, about)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            partial.unlink()
        raise BackendError(f"{path} cannot be written: {error}") from error


def _torch() -> Callable[[Path, Mapping[str, Tensor], Mapping[str, Any]], None]:
    def write(path: Path, weights: Mapping[str, Tensor], _: Mapping[str, Any]) -> None:
        torch.save(dict(weights), path)

    return write


def _safetensors() -> Callable[[Path, Mapping[str, Tensor], Mapping[str, Any]], None]:
    library = needs("export", lambda: __import__("safetensors.torch").torch)

    def write(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        library.save_file(dict(weights), path, {"format": "pt", "qeffect": json.dumps(about)})

    return write


#: By name of a format, a function that returns its writer.
FORMATS: Final = {"safetensors": _safetensors, "torch": _torch}

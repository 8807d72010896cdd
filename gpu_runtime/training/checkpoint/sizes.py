"""
The size of a checkpoint in bytes, by kind of content.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..state import EXTRA, MODEL, NUMERICAL, OPTIMIZER, RANDOM
from .files import FACTS, MANIFEST, manifest, read_facts

__all__ = ["sizes"]


def sizes(path: str | Path) -> dict[str, int]:
    """
    Count the bytes of a checkpoint.

    Returns:
        The bytes of tensors by kind: ``weights``, ``optimizer``, ``numerical`` (amax histories and
        scales), ``random`` and ``extra``. Also the bytes of the file ``facts``, and the ``total``
        of all files.

    Raises:
        BackendError: The folder is not a complete checkpoint.
    """
    path = Path(path)
    marks = manifest(path)
    facts = read_facts(path, marks)
    kinds = {
        MODEL: "weights", OPTIMIZER: "optimizer", NUMERICAL: "numerical", RANDOM: "random",
        EXTRA: "extra",
    }  # fmt: skip
    found = dict.fromkeys(kinds.values(), 0)
    for name, (dtype, size) in facts["tensors"].items():
        width = getattr(torch, dtype.removeprefix("torch.")).itemsize
        count = 1
        for length in size:
            count *= length
        found[kinds[name.partition(".")[0]]] += count * width
    total = sum(mark.size for mark in marks.values()) + (path / MANIFEST).stat().st_size
    return {**found, "facts": marks[FACTS].size, "total": total}

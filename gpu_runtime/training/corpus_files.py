"""
The files of a corpus: token files, the encoding, and the record `corpus.json`. All files are
replaced together, or none of them is replaced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qeffect.report import UnusableError

from .encodings import TOKENIZER

__all__ = ["RECORD", "begin_tokens", "replaced", "token_type", "write_record"]

RECORD = "corpus.json"
_FILES = ("train.npy", "held_out.npy", TOKENIZER)


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype of a token file: uint16 if it can hold every token, else uint32."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def begin_tokens(file: BinaryIO, kind: np.dtype[Any], count: int) -> None:
    """
    Write a token file's header. Afterwards the caller writes `count` tokens of the dtype `kind` as
    bytes.
    """
    head = {
        "descr": np.lib.format.dtype_to_descr(kind),
        "fortran_order": False,
        "shape": (count,),
    }
    np.lib.format.write_array_header_1_0(file, head)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a corpus (`corpus.json`)."""
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """
    Yield a hidden folder. At the end of the `with` block, the files in it replace the files of the
    corpus.

    If the block raises an error, the previous corpus is unchanged, and the new files are removed.
    The old record is removed first and the new record is written last, so a folder with a record
    has a complete corpus.

    Args:
        out: The folder of the corpus; created if missing.

    Raises:
        UnusableError: The folder cannot be written.
    """
    made = [path for path in (out, *out.parents) if not path.exists()]
    part = out / ".partial-corpus"
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)  # a killed command's
            part.mkdir()
            yield part
            before = (out / RECORD).exists()
            (out / RECORD).unlink(missing_ok=True)
            for name in _FILES:
                if (part / name).exists():
                    (part / name).replace(out / name)
                elif before:  # the file of another corpus
                    (out / name).unlink(missing_ok=True)
            (part / RECORD).replace(out / RECORD)
            made.clear()
        finally:
            shutil.rmtree(part, ignore_errors=True)
            for path in made:
                with suppress(OSError):
                    path.rmdir()
    except OSError as error:
        raise UnusableError(f"--out {out}: {error.strerror or error}") from None

"""
Train runs on a file system that is really full: `python -m tests.training.full_disk FOLDER`.

In a mount namespace of this process alone, FOLDER gets a small file system in memory for its
checkpoints. The program prints a line of JSON per run: the exit code, the output, and the contents
of the folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from .helpers import CONFIG, text

_CLONE_NEWNS = 0x00020000
#: Bytes of one checkpoint of this model are about 490,000.
SMALL, LARGE = "800k", "16m"
RUN = CONFIG.replace("steps = 3", 'steps = 3\nlog = "log.jsonl"\nevent_logs = "logs"') + (
    '[checkpoint]\nfolder = "kept"\nevery = 1\nkeep = 1\nasynchronous = {}\n'
)


def _mount(*words: str) -> None:
    ended = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise OSError(f"mount {' '.join(words)}: {ended.stderr.strip()}")


def _own_mounts(kept: Path) -> None:
    """
    Mount a small file system that no other process sees.

    Raises:
        OSError: The machine does not permit the mount.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNS) != 0:
        raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
    _mount("--make-rprivate", "/")
    kept.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(kept))


def _train(folder: Path, name: str, *words: str) -> None:
    from qeffect.cli import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["runtime", "train", str(folder / name), *words])
    held = sorted(path.name for path in (folder / "kept").iterdir())
    said = out.getvalue() + err.getvalue()
    print(json.dumps({"code": code, "said": said, "held": held}), flush=True)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        _own_mounts(place / "kept")
    except OSError as error:
        print(json.dumps({"not_permitted": str(error)}))
        raise SystemExit(0) from None
    text(place)
    for kind, value in (("synchronous", "false"), ("asynchronous", "true")):
        (place / kind).write_text(RUN.format(value))
    for kind in ("synchronous", "asynchronous"):
        _train(place, kind, "--resume")
    _mount("-o", f"remount,size={LARGE}", str(place / "kept"))
    _train(place, "asynchronous", "--resume")

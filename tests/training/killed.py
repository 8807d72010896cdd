"""
One rank of a run that torchrun starts again and again: `python -m tests.training.killed`.

The number of the attempt, which torchrun counts, determines which rank is killed, and where.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from qeffect.gpu_runtime.ranks.job import Job
from tests.training import bodies

if __name__ == "__main__":
    folder, words, until, kills, seed = sys.argv[1:]
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job = Job(schedule="zbv", pp=2, microbatches=4)
    drawn = int(seed) + attempt if attempt < int(kills) else None
    said = bodies.killed(job, folder, int(until), drawn)
    said["attempt"] = attempt
    rank = os.environ["RANK"]
    Path(words, f"{rank}.{attempt}.json").write_text(json.dumps(said), encoding="utf-8")
    os._exit(1 if said["cause"] else 0)

"""What the ranks run in the tests of initial weights."""

from __future__ import annotations

from pathlib import Path

from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.training.config_file import read
from qeffect.gpu_runtime.training.loop import Trainer
from tests.ranks.bodies import LIMITS


def saved_at_once(config: str) -> list[str]:
    """Make a trainer and save before its first step; the lines of the log are notes."""
    notes: list[str] = []
    trainer = Trainer(join("cpu", LIMITS), read(Path(config)), note=notes.append)
    trainer.save()
    trainer.close()
    return notes

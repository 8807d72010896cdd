"""What the ranks run in the tests of the end of a run."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from typing import Any

from qeffect.gpu_runtime.training import ending
from qeffect.gpu_runtime.training.checkpoint.checkpoints import Checkpoints
from qeffect.gpu_runtime.training.checkpoint.files import Writer
from qeffect.gpu_runtime.training.loop import Trainer

from . import language_bodies, launched_bodies


def signalled(
    cases: list[list[str]], signals: dict[int, list[tuple[int, str]]], launches: bool = False
) -> Any:
    """
    Train several runs in turn, in which ranks receive signals.

    Args:
        cases: The arguments of `train`.
        signals: For each rank, the signals that it receives and the steps before which it receives
            them.
        launches: Whether steps can be one launch.
    """
    ending._SAME_S = 0.0
    real = Trainer._step

    def step(self: Trainer, number: int) -> None:
        for place, name in signals.get(self.member.rank, []):
            if place == number:
                os.kill(os.getpid(), getattr(signal, name))
                time.sleep(0.01)
        real(self, number)

    Trainer._step = step  # type: ignore[method-assign]
    if launches:
        return launched_bodies.commands([["train", *case] for case in cases])
    return language_bodies.in_turn(cases)


def failing(cases: list[list[str]]) -> Any:
    """
    Train runs whose second asynchronous save fails; each step begins once no save is in progress.
    """
    real, finish = Trainer._step, Writer.finish

    def step(self: Trainer, number: int) -> None:
        kept = self.checkpoints
        assert isinstance(kept, Checkpoints)
        if kept._under_way is not None:
            future: Future[Any] = kept._under_way[1]
            future.exception()
        real(self, number)

    def full(self: Writer, *args: Any, **named: Any) -> None:
        if self.final.name == "step-00000002":
            raise OSError(28, "No space left on device")
        finish(self, *args, **named)

    Trainer._step = step  # type: ignore[method-assign]
    Writer.finish = full  # type: ignore[method-assign]
    return language_bodies.in_turn(cases)

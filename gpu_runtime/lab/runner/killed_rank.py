"""
A rank of ``qeffect runtime train`` that kills itself, or its launcher, at a chosen moment (place).

``python -m qeffect.gpu_runtime.lab.runner.killed_rank runtime train FILE ...`` runs the command as
``python -m qeffect`` does. The variable QEFFECT_KILL holds a `Kill` as JSON. Before the kill, the
rank writes the place into a file; without this file, no kill happened.

Each start gives torch's generators another seed. The generators therefore end in the state of the
undisturbed run only if every checkpoint saved the generators' state and every resume restored that
state.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from qeffect.launched import START, trains

__all__ = ["ANY_RANK", "PLACES", "VARIABLE", "Kill", "arm"]

#: The environment variable with the start's folder and seed, and with its kill.
VARIABLE: Final = "QEFFECT_KILL"

#: Places where a rank can be killed, with the rank that gets there; None for any rank.
PLACES: Final[dict[str, int | None]] = {
    "start, before the ranks meet": None,
    "start, with the model built": None,
    "resume, before a file is read": None,
    "resume, before a tensor is written": None,
    "resume, with all tensors written": None,
    "step": None,
    "evaluation": None,
    "save, before its file": None,
    "save, after its file": None,
    "save, before the index": 0,
    "save, before the name": 0,
    "save, after the name": 0,
}
ANY_RANK: Final = tuple(place for place, rank in PLACES.items() if rank is None)


@attrs.frozen
class Kill:
    """
    Which process is killed, and at which moment.

    Args:
        place: When the process is killed, one of `PLACES`.
        rank: The rank that must reach the place.
        folder: Folder in which the dying rank writes ``killed``.
        launcher: If True, the rank's launcher is killed; if False, the rank.
        steps: Number of steps after which the kill is due; a kill in the start or a resume comes
            before the first step.
        part: For the place ``step``: the share of a step's time after which the process is killed.
    """

    place: str
    rank: int
    folder: str
    launcher: bool = False
    steps: int = 1
    part: float = 0.5


class _Killer:
    """Count the steps of this process, and kill the process or its launcher once."""

    def __init__(self, kill: Kill) -> None:
        self.kill, self.taken, self._killed = kill, 0, False
        self._in_step, self._last_s = False, 0.0

    def die(self, *_: Any, **__: Any) -> None:
        """Kill this process or its launcher; later calls do nothing."""
        if self._killed:
            return
        self._killed = True
        victim = os.getppid() if self.kill.launcher else os.getpid()
        told = {"place": self.kill.place, "taken": self.taken, "process": victim}
        Path(self.kill.folder, "killed").write_text(json.dumps(told))
        os.kill(victim, signal.SIGKILL)

    def die_if_due(self, *_: Any, **__: Any) -> None:
        """Kill if this process has taken the number of steps after which the kill is due."""
        if self.taken >= self.kill.steps:
            self.die()

    def _fire(self) -> None:
        if self._in_step:
            self.die()

    def around_step(self, step: Callable[..., None]) -> Callable[..., None]:
        """Count a step; if the kill is due in this step, kill in the middle of the step."""

        @functools.wraps(step)
        def counted(*args: Any, **named: Any) -> None:
            timer = None
            began = time.perf_counter()
            self._in_step = True
            if self.kill.place == "step" and self.taken >= self.kill.steps:
                timer = threading.Timer(self.kill.part * self._last_s, self._fire)
                timer.daemon = True
                timer.start()
            step(*args, **named)
            self._in_step = False
            self._last_s = time.perf_counter() - began
            if timer is not None:
                timer.cancel()  # the step was shorter: the next one is tried
            self.taken += 1

        return counted


def _around(
    owner: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*args: Any, **named: Any) -> Any:
        if before is not None:
            before(*args, **named)
        found = real(*args, **named)
        if after is not None:
            after(*args, **named)
        return found

    setattr(owner, name, wrapped)


def arm(kill: Kill) -> None:
    """
    Arrange the kill of this process. The rank calls this function before the training begins.

    Raises:
        ValueError: The place is unknown.
    """
    if kill.place not in PLACES:
        raise ValueError(f"unknown place {kill.place!r}; expected one of {', '.join(PLACES)}")
    from ...training import command, evaluate, loop
    from ...training.checkpoint import checkpoints
    from ...training.checkpoint.files import MANIFEST, Writer

    killer = _Killer(kill)
    trainer: Any = loop.Trainer
    trainer._step = killer.around_step(trainer._step)

    def sealed(_: Writer, name: str, *__: Any) -> None:
        if name == MANIFEST:
            killer.die_if_due()

    whole = checkpoints.Checkpoints
    places: dict[str, Callable[[], None]] = {
        "start, before the ranks meet": lambda: _around(command, "join_ranks", killer.die),
        "start, with the model built": lambda: _around(loop, "build_worker", after=killer.die),
        "resume, before a file is read": lambda: _around(whole, "load", killer.die),
        "resume, before a tensor is written": lambda: _around(
            checkpoints, "write_loaded", killer.die
        ),
        "resume, with all tensors written": lambda: _around(whole, "load", after=killer.die),
        "step": lambda: None,
        "evaluation": lambda: _around(evaluate, "_through", killer.die_if_due),
        "save, before its file": lambda: _around(Writer, "write_data", killer.die_if_due),
        "save, after its file": lambda: _around(Writer, "write_data", after=killer.die_if_due),
        "save, before the index": lambda: _around(Writer, "finish", killer.die_if_due),
        "save, before the name": lambda: _around(Writer, "_write", after=sealed),
        "save, after the name": lambda: _around(Writer, "finish", after=killer.die_if_due),
    }
    places[kill.place]()


def _main() -> int:
    if trains(sys.argv):
        START.arm()  # as `python -m qeffect` does, before anything else is imported
    from qeffect.cli import main

    given, rank = json.loads(os.environ[VARIABLE]), int(os.environ["RANK"])
    Path(given["folder"], f"rank{rank}.pid").write_text(str(os.getpid()))
    _seed(given["seed"])
    kill = given["kill"]
    if kill is not None and kill["rank"] == rank:
        arm(Kill(**kill))
    return main(sys.argv[1:])


def _seed(seed: int) -> None:
    """Seed torch's generators when the rank begins to connect to the other ranks."""
    import torch

    from ...training import command

    def seeded(*_: Any, **__: Any) -> None:
        torch.manual_seed(seed)

    _around(command, "join_ranks", seeded)


if __name__ == "__main__":
    raise SystemExit(_main())

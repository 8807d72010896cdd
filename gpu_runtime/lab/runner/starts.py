"""
Start the ranks of a report: each start runs a function (the body) in a fresh process per rank.

A report starts its ranks twice. The first processes measure. After the measuring processes have
ended, other processes build the same sides again and run some steps under the profiler; the figures
of the profiler are added to the rows.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from qeffect.report import UnusableError

from ...ranks.consent import Cause, StoppedError
from ...ranks.membership import launcher_ranks
from .rank_process import Request
from .ranks import RankExits, run_ranks

__all__ = ["RankStart", "RankStarts"]


@attrs.frozen
class RankStart:
    """
    The results of one start of the ranks.

    Args:
        exits: Exit codes and last output lines of the processes.
        rows: For each rank that this process started: the rows (dictionaries of results) that the
            rank handed over.
        error: The error that the first of these ranks reported, under `unusable` or `stopped`.
    """

    exits: RankExits
    rows: list[list[Any]]
    error: Mapping[str, Any] = attrs.field(factory=dict)

    def require(self) -> list[Any]:
        """
        Return the rows (dictionaries of results) of the first rank.

        Raises:
            StoppedError: Every rank stopped, for one cause.
            UnusableError: A rank failed; the message is the rank's own message, or the last lines
                of the rank's output.
        """
        if "stopped" in self.error:
            raise StoppedError(Cause(**self.error["stopped"]))
        if self.exits.error is not None:
            raise UnusableError(self.error.get("unusable", f"a rank failed: {self.exits.error}"))
        return self.rows[0]


class RankStarts:
    """
    Starts ranks repeatedly, each time in fresh processes.

    Args:
        world: Number of ranks.
        folder: Folder of requests, findings and output.
        own: The rank as which torchrun started this process; None if this process starts all ranks.
    """

    def __init__(self, world: int, folder: Path, own: int | None = None) -> None:
        self.world, self.folder, self.own = world, folder, own
        self._numbers = itertools.count(1)
        self._store: Any = None

    @classmethod
    def here(cls, world: int, device: str, folder: Path) -> RankStarts:
        """
        The ranks that torchrun started, including this process; without torchrun, all ranks on this
        machine.

        Raises:
            UnusableError: torchrun started another number of ranks, or this machine has too few
                GPUs.
            BackendError: torchrun's environment variables are malformed.
        """
        rank, launched = launcher_ranks()
        if launched is None:
            if device == "cuda" and torch.cuda.device_count() < world:
                raise UnusableError(
                    f"expected {world} GPUs, one per rank, found {torch.cuda.device_count()}"
                )
            return cls(world, folder)
        if launched != world:
            raise UnusableError(
                f"expected {world} processes for --pp {world}, found {launched}; start torchrun "
                f"with --nproc-per-node {world}"
            )
        return cls(world, folder, rank)

    @property
    def speaks(self) -> bool:
        """Whether this process writes the report and shows progress."""
        return not self.own

    def start(
        self,
        body: Callable[..., None],
        *arguments: Any,
        profiles: bool = False,
        limit: float = math.inf,
        environ: Mapping[str, str] | None = None,
        take: Callable[[Any], None] = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> RankStart:
        """
        Run a body in a fresh process per rank, and wait until all processes have ended.

        Args:
            body: A function of a module, called with the arguments and the rank's `Findings`.
            arguments: Arguments that can be pickled.
            profiles: Whether the processes may use the profiler.
            limit: Time limit in seconds.
            environ: Environment variables that every rank gets in addition to this process's own.
            take: Function that is called with each row (a dictionary of results) of the first rank,
                soon after the row was handed over.
            note: Function that is called with each of the first rank's progress lines.
        """
        number = next(self._numbers)
        path = self.folder / f"start{number}.request"
        path.write_bytes(pickle.dumps(Request(body, arguments, profiles)))
        first = self.own or 0
        files = [
            path.with_suffix(f".{rank}.jsonl")
            for rank in (range(self.world) if self.own is None else (first,))
        ]
        heard, *others = (_Tail(file) for file in files)
        exits = run_ranks(
            [sys.executable, "-m", "qeffect.gpu_runtime.lab.runner.rank_process", str(path)],
            self.world,
            limit,
            self.folder,
            f"start{number}",
            own=self.own,
            environ={**self._meeting(number), **(environ or {})},
            watch=lambda: heard.read(take, note),
        )
        heard.read(take, note)
        for other in others:
            other.read()
        rows = [tail.rows for tail in (heard, *others)]
        return RankStart(exits, rows, heard.error)

    def _meeting(self, number: int) -> dict[str, str]:
        """
        Environment variables with which the ranks of a start connect. Under torchrun, the ranks
        connect through torchrun's store, with keys that only this start uses.
        """
        if self.own is None:
            return {}
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and self.own == 0:
            if self._store is None:
                self._store = dist.TCPStore(  # type: ignore[attr-defined]
                    os.environ["MASTER_ADDR"],
                    int(os.environ["MASTER_PORT"]),
                    is_master=True,
                    wait_for_workers=False,
                )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": f"{attempt}.{number}",
        }


class _Tail:
    """A reader of the growing file of a rank's findings."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0
        self.rows: list[Any] = []
        self.error: dict[str, Any] = {}

    def read(
        self,
        take: Callable[[Any], None] = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Read the lines that were completed since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            fresh = file.read()
        end = fresh.rfind(b"\n") + 1
        self._at += end
        for text in fresh[:end].splitlines():
            ((kind, value),) = json.loads(text).items()
            if kind == "row":
                self.rows.append(value)
                take(value)
            elif kind == "note":
                note(value)
            else:
                self.error[kind] = value

"""
``qeffect runtime``: the runtime's commands, registered with the kernel's command line.

Neither torch nor a module that imports it is loaded before a command that needs it is named, so
that help, and the doctor, work on a machine without torch.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from qeffect.cli.command import Outcome, Progress, UnusableError

__all__ = ["RuntimeCommand", "RuntimeCommands"]


@frozen
class RuntimeCommand:
    """
    One command of the runtime.

    Args:
        name: What is typed after ``qeffect runtime``.
        help: What it does, in a line.
        module: Holds ``add_NAME_arguments(parser)`` and ``run_NAME(args, progress)``.
    """

    name: str
    help: str
    module: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """
        Declare the command's options.

        Raises:
            UnusableError: torch is missing; the message says which extra brings it.
        """
        self._part("add", "_arguments")(parser)

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Do the work."""
        outcome: Outcome = self._part("run")(args, progress)
        return outcome

    def _part(self, prefix: str, suffix: str = "") -> Any:
        try:
            module = importlib.import_module(f"qeffect.gpu_runtime.{self.module}")
        except (ImportError, OSError) as error:  # OSError: a library of torch's cannot be loaded
            if _torch_works():
                raise
            raise UnusableError(
                f"runtime {self.name} needs torch, which cannot be imported ({error}): "
                "pip install 'qeffect[torch]'"
            ) from error
        return getattr(module, f"{prefix}_{self.name}{suffix}")


def _torch_works() -> bool:
    try:
        importlib.import_module("torch")
    except (ImportError, OSError):
        return False
    return True


class RuntimeCommands:
    """The runtime's commands as one group of the command line."""

    name = "runtime"
    help = "run, compare and measure the guarded training runtime"

    def commands(self) -> Iterator[RuntimeCommand]:
        """Yield them in the order in which a newcomer needs them."""
        for name, text, module in (
            ("doctor", "say what this machine has, what works on it and what is missing", "doctor"),
            (
                "demo",
                "run a few guarded steps, the same natively, and compare every bit",
                "lab.commands.demo",
            ),
            (
                "compare",
                "compare native, eager and captured steps bit for bit",
                "lab.commands.compare",
            ),
            (
                "pipeline",
                "train a guarded pipeline over the ranks that torchrun started",
                "lab.commands.pipeline",
            ),
            (
                "corpus",
                "make token files of the standard library's own text",
                "training.corpus_command",
            ),
            (
                "train",
                "train a language model over the ranks that torchrun started, or alone",
                "training.command",
            ),
            (
                "curves",
                "train run after run, guarded and natively, into one report of loss curves",
                "lab.commands.curves",
            ),
            ("bench", "measure step time, memory, set-up, copies and guards", "lab.commands.bench"),
            (
                "scale",
                "compare and time a pipeline over the ranks that torchrun started",
                "lab.commands.scale",
            ),
            (
                "tables",
                "measure the paper's complete-step tables over the ranks that torchrun started",
                "lab.commands.tables",
            ),
            (
                "streams",
                "count stale reads of one-way and two-way handoffs",
                "lab.commands.streams",
            ),
            (
                "pools",
                "show what graphs that share one memory pool corrupt",
                "lab.commands.pools",
            ),
            (
                "probes",
                "look at what the documentation says of the library",
                "lab.commands.probes",
            ),
            ("plots", "draw the reports", "lab.commands.plots"),
        ):
            yield RuntimeCommand(name, text, module)

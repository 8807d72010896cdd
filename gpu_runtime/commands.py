"""
``qeffect runtime``: the runtime's commands, registered with the kernel's command line.

torch is imported only if the named command needs torch. So ``--help`` and the command `doctor` also
work on a machine without torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
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
        name: The word after ``qeffect runtime``.
        help: What the command does, in one line.
        module: Name of the module with the functions ``add_NAME_arguments(parser)`` and
            ``run_NAME(args, progress)``.
        comparison: Module of `lab/` that declares ``--compare`` and runs the command if that option
            is given; empty if the command has no such option.
        moved: The command's new name, if the command was renamed; otherwise None. The old name
            works for one release, with a warning.
    """

    name: str
    help: str
    module: str
    comparison: str = ""
    moved: str | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """
        Declare the command's options.

        Raises:
            UnusableError: torch is missing; the message says which extra to install.
        """
        for module in filter(None, (self.module, self.comparison)):
            self._part(module, "add", "_arguments")(parser)

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Run the command, and return its outcome."""
        if self.moved is not None and os.environ.get("RANK", "0") == "0":
            progress.note(f"qeffect: runtime {self.name} is now {self.moved}; use the new name")
        compares = self.comparison and args.compare is not None
        module = self.comparison if compares else self.module
        outcome: Outcome = self._part(module, "run")(args, progress)
        return outcome

    def _part(self, name: str, prefix: str, suffix: str = "") -> Any:
        try:
            module = importlib.import_module(f"qeffect.gpu_runtime.{name}")
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


#: The parts of `qeffect runtime report`, each in its own module of `lab/commands`.
PARTS = (
    ("bench", "measure step time, memory, set-up, copies and guards"),
    (
        "scale",
        "time a guarded pipeline and torch's own pipeline over the ranks that torchrun started, "
        "and compare their results bit for bit",
    ),
    ("tables", "measure steps for the tables of the paper, over the ranks that torchrun started"),
    ("models", "measure TFLOP/s of whole decoders over the ranks that torchrun started"),
    (
        "groups",
        "measure steps that compute the weight gradients (dW) of several microbatches as one "
        "matrix product",
    ),
    ("peers", "measure torch's own pipeline and Megatron-core beside the guarded pipeline"),
    ("curves", "train guarded and native runs one after another, and report their loss curves"),
    (
        "restarts",
        "stop training, resume it from a checkpoint, and compare every bit with a run without a "
        "stop",
    ),
    (
        "kills",
        "kill a training run repeatedly, resume it each time, and compare every bit with an "
        "undisturbed run",
    ),
    (
        "modes",
        "run a framework under many combinations of options; compare bits and list the guard's "
        "reports",
    ),
    ("guards", "measure the host time that QEffect's guard adds to torch's pipeline"),
    (
        "scales",
        "compare the losses of two ways to update FP8 scales: at every action, or once per step",
    ),
    (
        "second_runs",
        "run steps twice and flip bits in one of the two runs; check that no flipped bit "
        "reaches an update, and measure the cost",
    ),
    ("streams", "count stale reads after one-way and two-way waits between CUDA streams"),
    ("pools", "show which data CUDA graphs corrupt if they share one memory pool"),
    ("probes", "check the documentation's statements about Transformer Engine on this machine"),
    ("plots", "draw the figures of the reports"),
)
#: Parts that used to be separate commands: their old names work for one release.
MOVED = ("curves", "bench", "scale", "tables", "streams", "pools", "probes", "plots")


class ReportCommands:
    """The subcommands of ``qeffect runtime report``."""

    name = "report"
    help = "measure parts of the runtime; write, merge and plot the JSON reports"

    def commands(self) -> Iterator[RuntimeCommand]:
        """Yield the subcommands."""
        for name, text in PARTS:
            yield RuntimeCommand(name, text, f"lab.commands.{name}")


class RuntimeCommands:
    """The runtime's commands as one group of the command line."""

    name = "runtime"
    help = "run, compare and measure the guarded training runtime"

    def commands(self) -> Iterator[RuntimeCommand | ReportCommands]:
        """Yield the commands in the order in which a newcomer needs them."""
        for name, text, module in (
            (
                "doctor",
                "list what this machine has, what works on it and what is missing",
                "doctor",
            ),
            (
                "demo",
                "run a few guarded steps and the same steps without guards, and compare every bit",
                "lab.commands.demo",
            ),
            (
                "compare",
                "compare steps bit for bit: native (without guards and CUDA graphs), guarded "
                "without graphs, and guarded with graphs",
                "lab.commands.compare",
            ),
            (
                "pipeline",
                "train a guarded pipeline over the ranks that torchrun started",
                "lab.commands.pipeline",
            ),
            (
                "corpus",
                "make token files from text files, or from Python's standard library",
                "training.corpus_command",
            ),
            (
                "train",
                "train a language model over the ranks that torchrun started, or in one process",
                "training.command",
            ),
            (
                "times",
                "measure the times of a model's parts on this device, and compare group sizes "
                "for weight gradients (dW)",
                "training.times_command",
            ),
            (
                "export",
                "write the weights of a checkpoint to one safetensors or torch file",
                "training.export_command",
            ),
            (
                "bisect",
                "name the step and the gradients in which two runs first differ",
                "training.bisect_command",
            ),
            (
                "generate",
                "continue a prompt with the model of a checkpoint, on the CPU",
                "training.generate_command",
            ),
        ):
            comparison = "lab.commands.train" if name == "train" else ""
            yield RuntimeCommand(name, text, module, comparison)
        yield ReportCommands()
        for name in MOVED:
            new = f"runtime report {name}"
            yield RuntimeCommand(name, f"old name of {new}", f"lab.commands.{name}", moved=new)

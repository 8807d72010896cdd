"""``qeffect runtime export``: the weights of a checkpoint as one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError, require_place
from qeffect.text import counted

from ..backends.protocol import BackendError
from .export import FORMATS, read_weights, write_weights

__all__ = ["add_export_arguments", "run_export"]


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `export`."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="folder of one step, .../step-00000003"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="F", help="file of the weights, a new one"
    )
    parser.add_argument(
        "--to",
        choices=tuple(FORMATS),
        default="safetensors",
        help="format of the file: safetensors (default), or torch for a dictionary that torch.load "
        "reads",
    )


def run_export(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Compare the checkpoint's hashes, read its weights and write them.

    Raises:
        UnusableError: The checkpoint is damaged, or the file exists or cannot be written.
    """
    require_place(args.out)
    progress.note(f"Reading {args.checkpoint}")
    try:
        weights, facts = read_weights(args.checkpoint)
        about = {"epoch": facts["epoch"], "model": facts["must"].get("given", {}).get("model")}
        write_weights(args.out, weights, about, args.to)
    except BackendError as error:
        raise UnusableError(str(error)) from error
    parameters = sum(tensor.numel() for tensor in weights.values())
    data = {
        "checkpoint": str(args.checkpoint),
        "out": str(args.out),
        "format": args.to,
        "step": facts["epoch"],
        "tensors": len(weights),
        "parameters": parameters,
    }
    return Outcome(
        "accepted",
        data,
        [
            f"{args.out}: {counted(len(weights), 'tensor')}, {parameters:,} parameters, after "
            f"{counted(facts['epoch'], 'step')}"
        ],
    )

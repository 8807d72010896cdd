"""``qeffect runtime export``: write the weights of a checkpoint to one file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError, require_place
from qeffect.text import counted

from ..backends.protocol import BackendError
from .export import FORMATS, read_weights, write_weights
from .weight_names import GPT2, WeightNames, gpt2_config

__all__ = ["add_export_arguments", "run_export"]

_OF_GPT2 = {
    "kv_heads": 0,
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
}
"""The fields of `[model]` that GPT-2 determines, with GPT-2's values."""


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `export`."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint folder of one step, such as .../step-00000003",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="F",
        help="file to write the weights to; must not exist yet",
    )
    parser.add_argument(
        "--to",
        choices=tuple(FORMATS),
        default="safetensors",
        help="file format: safetensors (default), or torch for a dictionary that torch.load reads",
    )
    parser.add_argument(
        "--names",
        metavar="gpt2|FILE",
        help="names for the weights in the file: gpt2 for the names in transformers' "
        "GPT2LMHeadModel, or a text file of lines OURS = THEIRS (default: QEffect's names)",
    )


def run_export(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Compare each file of the checkpoint with its hash, read the weights and write them to a file.

    Raises:
        UnusableError: The checkpoint is damaged, or the file exists or cannot be written.
    """
    require_place(args.out)
    progress.note(f"Reading {args.checkpoint}")
    config: dict[str, Any] = {}
    try:
        weights, facts = read_weights(args.checkpoint)
        about = {"epoch": facts["epoch"], "model": facts["must"].get("given", {}).get("model")}
        if args.names:
            weights = WeightNames.of(args.names).renamed(weights)
            about["names"] = args.names
        if args.names == GPT2:
            about["gpt2"] = config = _gpt2(facts)
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
        **({"names": args.names} if args.names else {}),
        **({"gpt2": config} if config else {}),
    }
    lines = [
        f"{args.out}: {counted(len(weights), 'tensor')}, {parameters:,} parameters, after "
        f"{counted(facts['epoch'], 'step')}"
    ]
    if config:
        lines.append(f"  config.json of transformers: {json.dumps(config)}")
    return Outcome("accepted", data, lines)


def _gpt2(facts: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the configuration of transformers' GPT-2 for a checkpoint.

    Raises:
        BackendError: The model's layers compute something else than GPT-2's layers.
    """
    backend, model = facts["must"].get("backend"), facts["must"].get("given", {}).get("model")
    if backend != "reference" or model is None:
        raise BackendError(
            "--names gpt2: expected a checkpoint that `runtime train` saved with the backend "
            f"reference, found the backend {backend}, which orders queries, keys and values "
            "differently; give --names a file of names"
        )
    for field, expected in _OF_GPT2.items():
        if (found := model.get(field, expected)) != expected:
            raise BackendError(
                f"--names gpt2: expected [model] {field} = {expected!r}, as in GPT-2, found "
                f"{found!r}; give --names a file of names"
            )
    return gpt2_config(model)

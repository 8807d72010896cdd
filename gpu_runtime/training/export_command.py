"""``qeffect runtime export``: the weights of a checkpoint as one file."""

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
"""What GPT-2 has of the fields of `[model]`."""


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `export`."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="folder of one step, .../step-00000003"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="F",
        help="file to write the weights to; must not exist",
    )
    parser.add_argument(
        "--to",
        choices=tuple(FORMATS),
        default="safetensors",
        help="format of the file: safetensors (default), or torch for a dictionary that torch.load "
        "reads",
    )
    parser.add_argument(
        "--names",
        metavar="gpt2|FILE",
        help="other names of the weights: gpt2 for those of transformers' GPT2LMHeadModel, or a "
        "file of lines OURS = THEIRS (default: the model's own)",
    )


def run_export(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Compare the checkpoint's hashes, read its weights and write them.

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
    The configuration of GPT-2 for a checkpoint.

    Raises:
        BackendError: The layers compute something else than GPT-2's.
    """
    backend, model = facts["must"].get("backend"), facts["must"].get("given", {}).get("model")
    if backend != "reference" or model is None:
        raise BackendError(
            f"--names gpt2: expected a checkpoint of `runtime train` over the backend reference, "
            f"found the backend {backend}, which orders queries, keys and values differently; "
            "write a file of names"
        )
    for field, expected in _OF_GPT2.items():
        if (found := model.get(field, expected)) != expected:
            raise BackendError(
                f"--names gpt2: expected [model] {field} = {expected!r}, as GPT-2 computes, found "
                f"{found!r}; write a file of names"
            )
    return gpt2_config(model)

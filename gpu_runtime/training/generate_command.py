"""``qeffect runtime generate``: continue a prompt with the model of a checkpoint."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.report import UnusableError
from qeffect.text import counted

from ..backends.protocol import BackendError
from .encodings import Encoding, open_encoding
from .prompt import WholeModel

__all__ = ["add_generate_arguments", "run_generate"]

_TOKENS = 100
_MOST_SEED = 2**63 - 1


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `generate`."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint folder of one step, such as .../step-00000003",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--tokens",
        type=int,
        default=_TOKENS,
        metavar="N",
        help=f"maximum number of tokens to add (default {_TOKENS}); the model may end the text "
        "earlier",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature, by which logits are divided; 0 always takes the most probable "
        "token (default 0)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the sampling (default 0)")
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="folder that qeffect runtime corpus wrote (default: the corpus that the training file "
        "names)",
    )


def run_generate(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Load the model and its encoding, and continue the prompt.

    Raises:
        UnusableError: The checkpoint or the corpus cannot be used, or an option is out of range.
    """
    if args.tokens < 1:
        raise UnusableError(f"--tokens: expected at least 1, found {args.tokens}")
    if not 0 <= args.temperature < math.inf:
        raise UnusableError(
            f"--temperature: expected a finite number of at least 0, found {args.temperature}"
        )
    if args.temperature == 0:
        refuse_unused(args, ["--seed"], "temperature 0 draws nothing", wants="--temperature")
    seed = args.seed or 0
    if not 0 <= seed <= _MOST_SEED:
        raise UnusableError(f"--seed: expected 0 to {_MOST_SEED:,}, found {seed}")
    progress.note(f"Reading {args.checkpoint}")
    try:
        whole = WholeModel.of(args.checkpoint)
    except BackendError as error:
        raise UnusableError(str(error)) from error
    encoding = _encoding(args.corpus, args.checkpoint, whole)
    ids = encoding.prompt(args.prompt)
    if not ids:
        raise UnusableError("--prompt: expected a text of at least one token, found none")
    progress.note(f"After {counted(whole.facts['epoch'], 'step')}, on the CPU {whole.computed}")
    added: list[int] = []
    ended = False
    for token in whole.continued(
        ids, tokens=args.tokens, below=encoding.tokens, temperature=args.temperature, seed=seed
    ):
        if ended := token == encoding.end:
            break
        added.append(token)
        progress(f"{len(added)} of {counted(args.tokens, 'token')}")
    text = encoding.decode([*ids, *added])
    data = {
        "checkpoint": str(args.checkpoint),
        "step": whole.facts["epoch"],
        "computed": whole.computed,
        "prompt": args.prompt,
        "text": text,
        "tokens": added,
        "ended": ended,
    }
    return Outcome("accepted", data, [text])


def _encoding(given: Path | None, checkpoint: Path, whole: WholeModel) -> Encoding:
    """
    Return the encoding of the corpus that a checkpoint was trained on.

    Raises:
        UnusableError: The corpus is unknown or cannot be read, or differs from the corpus of the
            run.
    """
    free = whole.facts["free"]
    folder = given or _corpus_of(checkpoint, free.get("configuration", {}))
    if folder is None:
        raise UnusableError(
            f"{checkpoint}: the corpus of the run cannot be found, because the checkpoint was "
            "moved; name the corpus folder with --corpus"
        )
    encoding, record = open_encoding(folder, "--corpus")
    trained = free.get("data", {}).get("tokens")
    if record.get("train_tokens") != trained:
        raise UnusableError(
            f"{folder}: expected the corpus of the run, with {trained} training tokens, found a "
            f"corpus with {record.get('train_tokens')}; name the corpus of the run with --corpus"
        )
    if encoding.tokens > whole.model.vocabulary:
        raise UnusableError(
            f"{folder}: expected an encoding of at most {whole.model.vocabulary} tokens, the "
            f"model's vocabulary, found {encoding.tokens}; name the corpus of the run with "
            "--corpus"
        )
    return encoding


def _corpus_of(checkpoint: Path, tables: Mapping[str, Any]) -> Path | None:
    """
    Return the folder of a run's training text; None if the checkpoint was moved.

    Paths in a training file are relative to the file's folder, which is found from the checkpoint's
    folder.
    """
    train = PurePath(tables.get("data", {}).get("train", "train.npy"))
    kept = PurePath(tables.get("checkpoint", {}).get("folder", ""))
    if train.is_absolute():
        return Path(train).parent
    parts, place = kept.parts, checkpoint.absolute().parent
    home = len(place.parts) - len(parts)
    if kept.is_absolute() or ".." in parts or place.parts[home:] != parts:
        return None
    return Path(*place.parts[:home]) / train.parent

"""``qeffect runtime corpus``: token files from the running interpreter's standard library."""

from __future__ import annotations

import argparse
from pathlib import Path

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.report import require_folder

from .corpus import make

__all__ = ["add_corpus_arguments", "run_corpus"]


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `corpus`."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the token files"
    )
    parser.add_argument(
        "--tokenizer",
        choices=("bpe", "bytes"),
        default="bpe",
        help="bpe: byte pairs, trained in this run (default); bytes: single bytes, no package "
        "needed",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help="vocabulary size of bpe, in tokens (default 32768)",
    )
    parser.add_argument(
        "--any-version",
        action="store_true",
        help="accept a standard library that differs from the listed one",
    )


def run_corpus(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Read the standard library, encode it, and write the token files.

    Raises:
        UnusableError: The library, the tokenizer or the folder cannot be used, or an option has no
            effect in this combination.
    """
    if args.tokenizer == "bytes":
        refuse_unused(args, ["--vocabulary"], "the vocabulary of bytes is fixed")
    require_folder(args.out)
    progress.note(f"Reading the standard library and encoding it with {args.tokenizer}")
    made = make(
        args.out,
        tokenizer=args.tokenizer,
        vocabulary=32768 if args.vocabulary is None else args.vocabulary,
        any_version=args.any_version,
    )
    lines = [
        f"Python {made['python']}{'' if made['listed'] else ' (differs from its list)'}: "
        f"{made['files']['train']} files for training, {made['files']['held_out']} held out",
        f"{args.out}: {made['train_tokens']:,} tokens for training, "
        f"{made['held_out_tokens']:,} held out, vocabulary {made['vocabulary']}",
    ]
    return Outcome("accepted", made, lines)

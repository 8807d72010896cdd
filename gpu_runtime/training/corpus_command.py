"""``qeffect runtime corpus``: token files from the running interpreter's standard library."""

from __future__ import annotations

import argparse
from pathlib import Path

from qeffect.cli.command import Outcome, Progress, refuse_unused

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
        help="bpe: byte pairs, trained here (default); bytes: single bytes, which need no package",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help="size of the vocabulary of byte pairs (default 32768)",
    )
    parser.add_argument(
        "--any-version",
        action="store_true",
        help="accept a standard library that differs from the listed one",
    )


def run_corpus(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Read, encode, write.

    Raises:
        UnusableError: The library, the tokenizer or the folder cannot be used, or an option means
            nothing here.
    """
    if args.tokenizer == "bytes":
        refuse_unused(args, ["--vocabulary"], "bytes have a vocabulary of their own")
    progress.note(f"Reading the standard library, encoding by {args.tokenizer}")
    made = make(
        args.out,
        tokenizer=args.tokenizer,
        vocabulary=32768 if args.vocabulary is None else args.vocabulary,
        any_version=args.any_version,
    )
    lines = [
        f"Python {made['python']}{'' if made['listed'] else ', not as listed'}: "
        f"{made['files']['train']} files to learn from, {made['files']['held_out']} held out",
        f"{made['train_tokens']:,} and {made['held_out_tokens']:,} tokens of {made['vocabulary']} "
        f"in {args.out}",
    ]
    return Outcome("accepted", made, lines)

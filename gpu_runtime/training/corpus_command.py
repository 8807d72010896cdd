"""
``qeffect runtime corpus``: make token files from your own text, or from Python's standard library.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.report import UnusableError, require_folder
from qeffect.text import counted, within

from .corpus import encoding_maker, make
from .encodings import NAMES, Encoding, encoding_of
from .text_corpus import LINES, TextFile, make_text

__all__ = ["add_corpus_arguments", "run_corpus"]

_HELD_OUT = 0.02
_VOCABULARY = 32768
_TEXT = ("--weights", "--field", "--held-out")
"""Options that only apply to your own text."""


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `corpus`."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the token files"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text files in UTF-8: .jsonl and .ndjson have one JSON object per line, any other "
        "file is plain text (default: the standard library)",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        metavar="W",
        help="weights of the files: the ratio of their token counts in train.npy, one number per "
        "file; files are repeated to reach this ratio (default: each file once)",
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="field of each JSON line that contains the text (default text)",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help=f"share of the text for held_out.npy, from 0 to below 1 (default {_HELD_OUT})",
    )
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        metavar="NAME",
        help="bpe: byte pairs, trained on this text (default); bytes: single bytes, needs no "
        "package; or the path of a tokenizer.json",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help=f"vocabulary size of bpe, in tokens (default {_VOCABULARY})",
    )
    parser.add_argument(
        "--end",
        metavar="TOKEN",
        help="token to put after each text, with a tokenizer.json (default: <|endoftext|>, </s> "
        "or another known end token)",
    )
    parser.add_argument(
        "--any-version",
        action="store_true",
        help="accept a standard library even if QEffect has no list of its files' hashes, or if "
        "files differ from the list",
    )


def run_corpus(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Read the text, encode it, and write the token files.

    Raises:
        UnusableError: The text, the tokenizer or the folder cannot be used, or an option would have
            no effect. After this error the folder is unchanged.
    """
    if args.tokenizer == "bytes":
        refuse_unused(args, ["--vocabulary"], "the tokenizer bytes has a fixed vocabulary")
    if args.tokenizer in NAMES:
        refuse_unused(args, ["--end"], "only a tokenizer.json has a choice of end tokens")
    else:
        refuse_unused(args, ["--vocabulary"], "the tokenizer's file determines the vocabulary")
    if args.text is None:
        refuse_unused(args, _TEXT, "the text is the standard library", wants="--text")
    else:
        refuse_unused(args, ["--any-version"], "--text replaces the standard library")
    require_folder(args.out)
    given = encoding_of(args.tokenizer, args.end)
    vocabulary = _VOCABULARY if args.vocabulary is None else args.vocabulary
    if args.text is not None:
        return _from_text(args, given, vocabulary, progress)
    progress.note(f"Reading the standard library and encoding it with {args.tokenizer}")
    made = make(
        args.out,
        tokenizer=args.tokenizer,
        vocabulary=vocabulary,
        any_version=args.any_version,
        given=given,
    )
    lines = [
        f"Python {made['python']}{'' if made['listed'] else ' (not as listed)'}: "
        f"{made['files']['train']} files for training, {made['files']['held_out']} held out",
        *_written(args.out, made),
    ]
    return Outcome("accepted", made, lines)


def _from_text(
    args: argparse.Namespace, given: Encoding | None, vocabulary: int, progress: Progress
) -> Outcome:
    share = _HELD_OUT if args.held_out is None else args.held_out
    if not 0 <= share < 1:
        raise UnusableError(f"--held-out: expected a share from 0 to below 1, found {share}")
    if not any(path.suffix.lower() in LINES for path in args.text):
        refuse_unused(args, ["--field"], f"no file of --text ends in {' or '.join(LINES)}")
    files = [TextFile(path, args.field or "text", share) for path in args.text]
    weights = None if args.weights is None else _weights(args.weights, files)
    maker = encoding_maker(args.tokenizer, vocabulary)

    def encode(texts: Iterable[str]) -> Encoding:
        return maker(texts) if given is None else given

    made = make_text(args.out, files, weights, encode, progress.note)
    lines = [_described(one, made["train_tokens"]) for one in made["texts"]]
    return Outcome("accepted", made, [*lines, *_written(args.out, made)])


def _weights(given: Sequence[str], files: Sequence[TextFile]) -> list[Fraction]:
    """
    Parse the weights with which files are blended.

    Raises:
        UnusableError: The weights are not one positive number per file.
    """
    if len(given) != len(files):
        raise UnusableError(
            f"--weights: expected {counted(len(files), 'number')}, one per file of --text, found "
            f"{len(given)}"
        )
    weights = []
    for one in given:
        try:
            weight = Fraction(one)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if weight <= 0:
            raise UnusableError(f"--weights: expected numbers above 0, found {within(one, 40)}")
        weights.append(weight)
    return weights


def _described(one: Mapping[str, Any], total: int) -> str:
    said = f"{one['file']}: {counted(one['texts'], 'text')}, {one['tokens']:,} tokens to train on"
    if one["held_out_tokens"]:
        said += f", {one['held_out_tokens']:,} held out"
    if one["empty"]:
        said += f"; {counted(one['empty'], 'empty text')} left out"
    if one["weight"] is not None:
        times, share = one["train_tokens"] / one["tokens"], one["train_tokens"] / total
        said += f"; weight {one['weight']:g}: taken {times:.2f} times, {share:.1%} of train.npy"
    return said


def _written(out: Path, made: Mapping[str, Any]) -> list[str]:
    held_out = f"{made['held_out_tokens']:,} held out"
    if not made["held_out_tokens"]:
        held_out = "none held out, so held_out.npy is not written"
    spare = made["vocabulary"] - made["tokens"]
    padding = f", padded from {made['tokens']:,} tokens to a multiple of 16" if spare else ""
    return [
        f"{out}: {made['train_tokens']:,} tokens for training, {held_out}",
        f"vocabulary {made['vocabulary']}{padding}: in the training file, write [model] "
        f"vocabulary = {made['vocabulary']}",
    ]

"""
Where a command's schedule comes from: a CSV table, a torch class by name, or a TE order list.
"""

from __future__ import annotations

import argparse

from ..schedule.actions import Schedule, ScheduleError
from .command import Unusable, refuse_unused

__all__ = ["SOURCE", "add_source", "read_source"]

_OF_TORCH = ("--pp", "--vpp", "--comms")
#: Everything that names or shapes a schedule.
SOURCE = ("FILE.csv", "--torch", "--te-order", *_OF_TORCH, "--microbatches")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name a schedule."""
    parser.add_argument("file", nargs="?", metavar="FILE.csv", help="a torch schedule table")
    parser.add_argument("--torch", metavar="CLASS", help="a schedule class of torch, by name")
    parser.add_argument("--pp", type=int, help="pipeline ranks (with --torch; default 2)")
    parser.add_argument("--vpp", type=int, help="stages a rank (with --torch)")
    parser.add_argument(
        "--microbatches",
        type=int,
        help="microbatches of one step (with --torch, default 4; with FILE.csv, what it must hold)",
    )
    parser.add_argument(
        "--comms", action="store_true", help="with sends and receives (with --torch)"
    )
    parser.add_argument("--te-order", metavar="LIST", help="a Transformer Engine _order list")


def read_source(args: argparse.Namespace) -> Schedule:
    """
    Read the schedule that the arguments name.

    Raises:
        Unusable: None or several are named, the one named cannot be read, or an option shapes
            another kind than the one named.
    """
    named = [
        option
        for option, value in (
            ("FILE.csv", args.file),
            ("--torch", args.torch),
            ("--te-order", args.te_order),
        )
        if value is not None
    ]
    if len(named) != 1:
        got = " and ".join(named) or "none"
        raise Unusable(f"name one schedule: FILE.csv, --torch CLASS or --te-order LIST; got {got}")
    if args.torch is None:
        refuse_unused(
            args, _OF_TORCH, f"only --torch CLASS uses that, not {named[0]}; leave it out"
        )
    if args.te_order is not None:
        refuse_unused(
            args, ("--microbatches",), "--te-order counts them from its list; leave it out"
        )
    try:
        if args.torch is not None:
            from ..schedule.torch_tables import torch_schedule

            return torch_schedule(
                args.torch,
                pp=2 if args.pp is None else args.pp,
                vpp=args.vpp,
                microbatches=4 if args.microbatches is None else args.microbatches,
                comms=args.comms,
            )
        if args.te_order is not None:
            from ..schedule.te_order import te_order

            return te_order(args.te_order)
        from ..schedule.tables import read_table

        return read_table(args.file, num_microbatches=args.microbatches)
    except ScheduleError as error:
        raise Unusable(str(error)) from error

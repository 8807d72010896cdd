"""
Where a command's schedule comes from: a CSV table, a torch class by name, or a TE order list.
"""

from __future__ import annotations

import argparse

from ..schedule.actions import Schedule, ScheduleError
from .command import UnusableError, refuse_unused

__all__ = ["SHAPE", "add_source", "read_source"]

_OF_TORCH = ("--pp", "--vpp", "--comms")
#: Options that shape the schedule that another one names.
SHAPE = (*_OF_TORCH, "--microbatches")


def add_source(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """
    Declare the options that name a schedule.

    Returns:
        The group of options of which exactly one must be given; a command may add its own.
    """
    schedule = parser.add_argument_group("schedule")
    named = schedule.add_mutually_exclusive_group(required=True)
    named.add_argument("file", nargs="?", metavar="FILE.csv", help="a torch schedule table")
    named.add_argument("--torch", metavar="CLASS", help="a schedule class of torch, by name")
    named.add_argument("--te-order", metavar="LIST", help="a Transformer Engine _order list")
    schedule.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default 2)")
    schedule.add_argument("--vpp", type=int, metavar="N", help="stages of each rank")
    schedule.add_argument("--comms", action="store_true", help="with sends and receives")
    schedule.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="microbatches of one step: with --torch as many are made (default 4), with FILE.csv "
        "the table must hold as many",
    )
    schedule.description = "--pp, --vpp and --comms apply to --torch."
    return named


def read_source(args: argparse.Namespace) -> Schedule:
    """
    Read the schedule that the arguments name.

    Raises:
        UnusableError: The schedule cannot be read, or an option shapes another kind of schedule.
    """
    if args.torch is None:
        refuse_unused(args, _OF_TORCH, "only --torch CLASS uses that")
    if args.te_order is not None:
        refuse_unused(
            args,
            ("--microbatches",),
            "--te-order takes the number of microbatches from its list",
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
        raise UnusableError(str(error)) from error

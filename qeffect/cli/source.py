"""
Where a command's schedule comes from: a CSV table, a torch class by name, or a TE order list; and
how the runtime carries its messages.
"""

from __future__ import annotations

import argparse

from ..schedule.actions import Schedule, ScheduleError
from ..schedule.transport import QUEUES, Transport
from .command import Unusable, refuse_unused

__all__ = ["SOURCE", "add_source", "read_source", "read_transport"]

_OF_TORCH = ("--pp", "--vpp", "--comms", "--defer-receives")
_TRANSPORT = ("--max-outstanding-sends", "--queues")
#: Everything that names or shapes a schedule, or says how its messages are carried.
SOURCE = ("FILE.csv", "--torch", "--te-order", *_OF_TORCH, "--microbatches", *_TRANSPORT)


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
    parser.add_argument(
        "--defer-receives",
        action="store_true",
        help="receives just before their use (with --torch and --comms; torch's defer_pp_recv)",
    )
    parser.add_argument("--te-order", metavar="LIST", help="a Transformer Engine _order list")
    parser.add_argument(
        "--max-outstanding-sends",
        type=int,
        metavar="N",
        help="the most sends of a rank that are posted and not awaited, torch 2.15's option "
        "(with --torch and --comms, the table is made with it)",
    )
    parser.add_argument(
        "--queues",
        choices=QUEUES,
        help="pair: all messages from one rank to another are received in the order in which they "
        "are sent (default); direction: activations and gradients each (torch 2.14's "
        "pipeline_per_direction_p2p)",
    )


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
        refuse_unused(args, _TRANSPORT, "a --te-order list has no messages; leave it out")
    if args.torch is not None and not args.comms:
        refuse_unused(
            args,
            ("--defer-receives", *_TRANSPORT),
            "it is about messages, and --torch CLASS gives them with --comms; add that or leave it "
            "out",
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
                defer_receives=args.defer_receives,
                max_outstanding_sends=args.max_outstanding_sends,
            )
        if args.te_order is not None:
            from ..schedule.te_order import te_order

            return te_order(args.te_order)
        from ..schedule.tables import read_table

        return read_table(args.file, num_microbatches=args.microbatches)
    except ScheduleError as error:
        raise Unusable(str(error)) from error


def read_transport(args: argparse.Namespace, schedule: Schedule) -> Transport:
    """
    How the runtime carries the schedule's messages.

    Raises:
        Unusable: The limit is negative, or the schedule does not say when its sends end.
    """
    try:
        transport = Transport(
            "pair" if args.queues is None else args.queues, args.max_outstanding_sends
        )
        transport.require_waits(schedule)
    except ScheduleError as error:
        raise Unusable(str(error)) from error
    return transport

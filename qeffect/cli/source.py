"""
The options that name a command's schedule: a CSV table, the name of a torch or DeepSpeed class,
Megatron-core's loops, or a Transformer Engine order list. Further options say how the runtime
carries the schedule's messages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from ..report import require_place
from ..schedule.actions import Schedule, ScheduleError
from ..schedule.megatron import MESSAGES
from ..schedule.transport import QUEUES, RENDEZVOUS, Transport
from .command import UnusableError, refuse_unused

__all__ = [
    "PAIRING",
    "SHAPE",
    "add_source",
    "one_rank",
    "read_source",
    "read_transport",
    "refuse_one_file",
]

#: The file name that stands for standard input.
STDIN = "-"
#: Help of ``--pairing``.
PAIRING = (
    "how the runtime chooses the retained work for a weight gradient dW; retained work is the "
    "operands that an input gradient dI keeps for a dW. contract: the work of the dW's own "
    "microbatch (default). fifo: the oldest work of its stage. latest: the newest work of its "
    "stage. global: the oldest work of its rank"
)
_DRAWN = ("--svg", "--trace", "--html")
_TRANSPORT = ("--max-outstanding-sends", "--queues", "--rendezvous")
#: Options that apply only to some kinds of schedule: for each group of options, the options that
#: name such a schedule.
_USERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--pp", "--vpp"): ("--torch CLASS", "--megatron"),
    ("--comms", "--defer-receives"): ("--torch CLASS",),
    ("--messages", "--group"): ("--megatron",),
    ("--stages",): ("--deepspeed CLASS",),
}
#: Options that change a schedule that another option names, or say how the schedule's messages are
#: carried.
SHAPE = (*(option for options in _USERS for option in options), "--microbatches", *_TRANSPORT)


def add_source(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """
    Declare the options that name a schedule.

    Returns:
        A group of options; exactly one of them must be given. A command may add its own options.
    """
    schedule = parser.add_argument_group("schedule")
    named = schedule.add_mutually_exclusive_group(required=True)
    named.add_argument(
        "file", nargs="?", metavar="FILE.csv", help="torch schedule table; - reads standard input"
    )
    named.add_argument(
        "--torch",
        metavar="CLASS",
        help="name of a torch schedule class, or module:Class for your own subclass; the module "
        "may be in the working folder",
    )
    named.add_argument(
        "--megatron",
        action="store_true",
        help="Megatron-core's 1F1B schedule and its messages; with --vpp 2 or more, the "
        "interleaved schedule",
    )
    named.add_argument(
        "--deepspeed",
        metavar="CLASS",
        help="DeepSpeed schedule class: TrainSchedule, DualPipeVSchedule, or module:Class for your "
        "own subclass; the module may be in the working folder",
    )
    named.add_argument(
        "--te-order", metavar="LIST", help="Transformer Engine _order list, such as 1,1,-1,-1"
    )
    schedule.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default 2)")
    schedule.add_argument(
        "--vpp",
        type=int,
        metavar="N",
        help="stages per rank (default 2, or 1 for a class with one stage per rank); with "
        "--megatron, virtual stages per rank (default 1)",
    )
    schedule.add_argument(
        "--stages", type=int, metavar="N", help="ranks of the --deepspeed pipeline (default 2)"
    )
    schedule.add_argument(
        "--messages",
        choices=MESSAGES,
        help="Megatron-core's options for messages. batched: batch_p2p_comm, which posts the "
        "messages of an F and of a B together (default, as in Megatron-core). overlapped: "
        "overlap_p2p_comm. prefetched: overlap_p2p_comm and overlap_p2p_comm_warmup_flush. plain: "
        "none of these options; messages are posted one by one",
    )
    schedule.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="Megatron-core's microbatch_group_size_per_vp_stage: number of microbatches that a "
        "virtual stage runs before the next virtual stage (default: the number of ranks)",
    )
    schedule.add_argument(
        "--comms", action="store_true", help="include sends and receives in the table"
    )
    schedule.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="microbatches per step (default 4 with --torch, --megatron and --deepspeed); with "
        "FILE.csv, a table with another number is refused",
    )
    schedule.add_argument(
        "--defer-receives",
        action="store_true",
        help="place each receive just before the action that uses its message, as torch's "
        "defer_pp_recv does (needs --comms)",
    )
    schedule.add_argument(
        "--max-outstanding-sends",
        type=int,
        metavar="N",
        help="maximum number of sends that a rank has posted and not yet awaited (default no "
        "limit); with --torch and --comms, torch 2.15 makes a table that keeps this limit",
    )
    schedule.add_argument(
        "--queues",
        choices=tuple(QUEUES),
        help="which messages share a queue and therefore arrive in the order of their sends. "
        "pair: one queue for all messages between two ranks (default). direction: two queues "
        "between two ranks, one for activations and one for gradients (torch 2.14's "
        "pipeline_per_direction_p2p). edge: one queue from each sending rank to each receiving "
        "rank (torch 2.15's pipeline_per_edge_p2p). edge-direction: two queues from each sending "
        "rank to each receiving rank, one for activations and one for gradients",
    )
    schedule.add_argument(
        "--rendezvous",
        choices=RENDEZVOUS,
        help="assume that a send waits until its receive is posted, and refuse a table that can "
        "deadlock under this assumption. queue: a waiting send blocks its queue. rank: a waiting "
        "send blocks its whole rank. Default: sends are buffered and never wait",
    )
    schedule.description = (
        "--pp and --vpp apply to --torch and --megatron; --comms and --defer-receives apply to "
        "--torch; --messages and --group apply to --megatron; --stages applies to --deepspeed."
    )
    return named


def read_source(args: argparse.Namespace) -> Schedule:
    """
    Read the schedule that the arguments name.

    Raises:
        UnusableError: The schedule cannot be read, or an option was given that does not apply to
            this kind of schedule.
    """
    _refuse_other_shapes(args)
    if args.te_order is not None:
        refuse_unused(
            args,
            ("--microbatches",),
            "--te-order takes the number of microbatches from its list",
        )
        refuse_unused(args, _TRANSPORT, "a --te-order list has no messages")
    if args.torch is not None and not args.comms:
        refuse_unused(
            args,
            ("--defer-receives", *_TRANSPORT),
            "the table of --torch CLASS has messages only with --comms",
        )
    try:
        if args.torch is not None:
            from ..schedule.torch_tables import torch_schedule

            return _named(
                f"--torch {args.torch}",
                lambda: torch_schedule(
                    args.torch,
                    pp=2 if args.pp is None else args.pp,
                    vpp=args.vpp,
                    microbatches=4 if args.microbatches is None else args.microbatches,
                    comms=args.comms,
                    defer_receives=args.defer_receives,
                    max_outstanding_sends=args.max_outstanding_sends,
                ),
            )
        if args.megatron:
            from ..schedule.megatron import megatron_schedule

            return megatron_schedule(
                pp=2 if args.pp is None else args.pp,
                vpp=args.vpp,
                microbatches=4 if args.microbatches is None else args.microbatches,
                messages="batched" if args.messages is None else args.messages,
                group=args.group,
            )
        if args.deepspeed is not None:
            from ..schedule.deepspeed import deepspeed_schedule

            return _named(
                f"--deepspeed {args.deepspeed}",
                lambda: deepspeed_schedule(
                    args.deepspeed,
                    stages=2 if args.stages is None else args.stages,
                    microbatches=4 if args.microbatches is None else args.microbatches,
                ),
            )
        if args.te_order is not None:
            from ..schedule.te_order import te_order

            return _named("--te-order", lambda: te_order(args.te_order))
        return _read_file(args.file, args.microbatches)
    except ScheduleError as error:
        raise UnusableError(str(error)) from error


def _refuse_other_shapes(args: argparse.Namespace) -> None:
    """Refuse options that do not apply to the named kind of schedule."""
    unused = {
        option: users
        for options, users in _USERS.items()
        for option in options
        if _given(args, option) and not any(_given(args, user) for user in users)
    }
    if unused:
        every = next(iter(unused.values()))
        shared = [user for user in every if all(user in users for users in unused.values())]
        named = [option for option, users in unused.items() if set(shared) <= set(users)]
        users = " or ".join(shared or every)
        refuse_unused(args, named if shared else list(unused)[:1], f"only {users} uses that")


def _given(args: argparse.Namespace, option: str) -> bool:
    value = getattr(args, option.split()[0].lstrip("-").replace("-", "_"))
    return value is not None and value is not False


def _read_file(file: str, microbatches: int | None) -> Schedule:
    from ..schedule.tables import MAX_BYTES, decode_table, read_table

    name = "standard input" if file == STDIN else file
    try:
        if file != STDIN:
            return read_table(file, num_microbatches=microbatches)
        if sys.stdin is None:
            raise ScheduleError("standard input: closed; name a file")
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
        return decode_table(data, source=name, num_microbatches=microbatches)
    except ScheduleError as error:
        said = str(error)
        raise ScheduleError(said if name in said else f"{name}: {said}") from error


def _named(source: str, read: Callable[[], Schedule]) -> Schedule:
    """Read a schedule; add the schedule's source to an error about one of its entries."""
    try:
        return read()
    except ScheduleError as error:
        if error.rank is None:
            raise
        raise ScheduleError(f"{source}: {error}") from error


def read_transport(args: argparse.Namespace, schedule: Schedule) -> Transport:
    """
    Return how the runtime carries the schedule's messages.

    Raises:
        UnusableError: The limit of outstanding sends is negative, or the schedule lacks what an
            option needs: waits for its sends, or the names of its messages.
    """
    limit = args.max_outstanding_sends
    if limit is not None and limit < 0:
        raise UnusableError(f"--max-outstanding-sends must be at least 0, not {limit}")
    try:
        transport = Transport(
            "pair" if args.queues is None else args.queues,
            args.max_outstanding_sends,
            args.rendezvous,
        )
        transport.require(schedule)
    except ScheduleError as error:
        raise UnusableError(str(error)) from error
    return transport


def one_rank(schedule: Schedule) -> list[str]:
    """Return a line on what is not checked if the schedule table has only one rank."""
    if schedule.complete:
        return []
    return [
        "  only one rank's row was given: the stages of other ranks, and the messages to and from "
        "other ranks, are not checked"
    ]


def refuse_one_file(args: argparse.Namespace) -> None:
    """
    Refuse two pictures in one file, a picture that overwrites its input, or an unwritable file.

    Two different paths to the same file are refused too. This test runs before any schedule check.

    Raises:
        UnusableError: --svg, --trace or --html names a file that is also the input or another
            option's file, or that cannot be written.
    """
    given = {
        name: None if path is None else Path(path)
        for name, path in (
            ("FILE.csv", None if args.file == STDIN else args.file),
            ("--durations", getattr(args, "durations", None)),
            ("--svg", args.svg),
            ("--trace", args.trace),
            ("--html", getattr(args, "html", None)),
        )
    }
    for option in _DRAWN:
        require_place(given[option], option)
    for (first, one), (option, other) in combinations(given.items(), 2):
        if option in _DRAWN and one is not None and other is not None:
            if _same(one, other):
                raise UnusableError(
                    f"{first} and {option} both name {other}; give each a file of its own"
                )


def _same(one: Path, other: Path) -> bool:
    try:
        if one.resolve() == other.resolve():
            return True
        return one.exists() and other.exists() and one.samefile(other)
    except (OSError, ValueError):  # the reader of the file reports the error
        return False

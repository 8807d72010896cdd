"""
Make the tables of torch's schedule classes on a CPU, without process groups and without GPUs.

Classes with several stages per rank (`ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`,
`ScheduleZBVZeroBubble`, `ScheduleDualPipeV`, `ScheduleLoopedBFS`) execute a table, which this
module returns unchanged. Classes with one stage per rank (`Schedule1F1B`, `ScheduleGPipe`) execute
a loop instead; this module runs the loop against stages that only record their calls. These classes
also have a `pipeline_order`, a table that torch draws but does not execute. In torch 2.13 this
table is wrong for `Schedule1F1B`: on the last rank it starts at microbatch 1. `drawn=True` returns
it, and `check` refuses it.

torch 2.11 to 2.14 make the same tables; since torch 2.13, receives can be deferred. torch 2.15
places a wait for every send and every reduction, can limit outstanding sends, and moves a few
receives. 1F1B and GPipe wait within their loop in every version, so their tables have no waits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from ..text import near
from .actions import Schedule, ScheduleError, shorten
from .infer import MAX_ENTRIES, from_actions
from .own_class import base_name, own_class

SINGLE = ("Schedule1F1B", "ScheduleGPipe")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
CLASSES = SINGLE + LOOPED + V_SHAPED
_SINCE = {"defer_pp_recv": "2.13", "max_outstanding_sends": "2.15"}


def torch_schedule(
    name: str | type,
    *,
    pp: int,
    microbatches: int,
    vpp: int | None = None,
    comms: bool = False,
    drawn: bool = False,
    defer_receives: bool = False,
    max_outstanding_sends: int | None = None,
    release: tuple[str, ModuleType] | None = None,
) -> Schedule:
    """
    Return the table of one of torch's schedule classes.

    Args:
        name: Name of torch's class, with or without its leading "Schedule", in upper or lower case;
            or a user's own subclass, as `module:Class` or as the class itself.
        pp: Number of ranks of the pipeline.
        microbatches: Number of microbatches per step.
        vpp: Stages (model chunks) per rank; by default 1 for 1F1B and GPipe, 2 for other classes.
        comms: If True, return the table with sends, receives and sharding; if False, without them.
        drawn: For 1F1B and GPipe: if True, return the class's `pipeline_order` instead of the
            actions of the executed loop.
        defer_receives: If True, place each receive just before the computation that uses its
            message, as torch's `defer_pp_recv` does; needs torch 2.13 or later.
        max_outstanding_sends: Maximum number of sends that a rank has posted and not yet awaited,
            as in torch's option with this name; needs torch 2.15 or later.
        release: Version and `torch.distributed.pipelining.schedules` module of another torch
            release, to use instead of the installed torch.

    Raises:
        ScheduleError: torch is missing, the class is unknown or refuses this combination, or this
            torch release lacks an option.
    """
    own = None
    if isinstance(name, type) or ":" in name:
        _import_torch()
        own = own_class(name) if isinstance(name, str) else name
        cls_name, base = own.__name__, base_name(own, CLASSES)
    else:
        cls_name = base = class_name(str(name))
    vpp = (1 if base in SINGLE else 2) if vpp is None else vpp
    what = f"{cls_name} pp={pp} vpp={vpp} microbatches={microbatches}"
    _check_arguments(base, what, pp, vpp, microbatches, comms, drawn)
    torch, schedules = _import_torch()
    version = str(torch.__version__).split("+")[0]
    if release is not None:
        version, schedules = release
    options: dict[str, Any] = {}
    if defer_receives:
        options["defer_pp_recv"] = True
    if max_outstanding_sends is not None:
        options["max_outstanding_sends"] = max_outstanding_sends
    if options and not comms:
        raise ScheduleError(
            f"{what}: {' and '.join(options)}: a table without comms has no messages; pass "
            "comms=True"
        )
    cls = getattr(schedules, base) if own is None else own
    _check_options(cls, version, cls_name, options)
    try:
        if base in SINGLE and not drawn:
            rows = [
                _run_single(schedules, cls, rank, pp, microbatches, comms) for rank in range(pp)
            ]
        else:
            rows = _table(torch, schedules, cls, base, pp, vpp, microbatches, comms, options)
    except (ScheduleError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: a user's class may raise anything
        # Any exception of a constructor (several raise IndexError, or AssertionError with the whole
        # table as text) means that torch has no such schedule.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = " ".join(lines[0].split())
        if own is None:
            raise ScheduleError(f"torch refuses {what}: {said}") from error
        raise ScheduleError(
            f"{own.__module__}:{what} cannot be constructed: {type(error).__name__}: {said}; "
            "expected a constructor that takes the stages and the number of microbatches, as "
            "torch's does"
        ) from error
    asked = "".join(f" {option}={value}" for option, value in options.items())
    return from_actions(
        dict(enumerate(rows)),
        source=f"torch {version} {what} {'comms' if comms else 'compute'}{asked}",
        num_stages=pp * vpp,
        num_microbatches=microbatches,
        complete=True,
        notes=("torch draws this table and does not execute it",) if drawn else (),
    )


def class_name(name: str) -> str:
    """
    Return torch's full name of a schedule class.

    >>> class_name("zbvzerobubble")
    'ScheduleZBVZeroBubble'

    Raises:
        ScheduleError: The class is unknown.
    """
    wanted = name.lower().removeprefix("schedule")
    for cls_name in CLASSES:
        if cls_name.lower().removeprefix("schedule") == wanted:
            return cls_name
    like = [cls_name for cls_name in CLASSES if wanted and wanted in cls_name.lower()]
    raise ScheduleError(
        f"unknown schedule class {name!r}; expected one of {', '.join(CLASSES)}, or module:Class "
        "for your own subclass" + (f"; did you mean {like[0]}?" if like else near(name, CLASSES))
    )


def _check_arguments(
    cls_name: str, what: str, pp: int, vpp: int, microbatches: int, comms: bool, drawn: bool
) -> None:
    if min(pp, vpp, microbatches) < 1:
        raise ScheduleError(f"{what}: pp, vpp and microbatches must be at least 1")
    if cls_name in SINGLE and vpp != 1:
        raise ScheduleError(f"{what}: {cls_name} has exactly 1 stage per rank; expected vpp=1")
    if cls_name in V_SHAPED and vpp != 2:
        raise ScheduleError(f"{what}: {cls_name} has exactly 2 stages per rank; expected vpp=2")
    if drawn and (comms or cls_name not in SINGLE):
        raise ScheduleError(
            f"{what}: drawn needs 1F1B or GPipe without comms: only these two have "
            "a drawn table, and a drawn table has no messages"
        )
    # Three computations per stage and microbatch, and about as many messages.
    if pp * vpp * microbatches * 8 > MAX_ENTRIES:
        raise ScheduleError(f"{what}: more than the limit of {MAX_ENTRIES} entries")


def _check_options(cls: type[Any], version: str, cls_name: str, options: dict[str, Any]) -> None:
    known = inspect.signature(cls.__init__).parameters
    # A user's own subclass may pass all its arguments to torch's constructor.
    anything = any(p.kind is p.VAR_KEYWORD for p in known.values()) and cls_name not in CLASSES
    for option in options:
        if option not in known and not anything:
            since = (
                "no release so far" if cls_name in SINGLE else f"torch {_SINCE[option]} and later"
            )
            raise ScheduleError(
                f"torch {version}'s {cls_name} has no {option}; {since} has it: leave the option "
                "out, or read a table that was saved with the option"
            )


def _import_torch() -> tuple[ModuleType, ModuleType]:
    try:
        import torch
        from torch.distributed.pipelining import schedules
    except ImportError:
        raise ScheduleError(
            "torch's schedule tables need torch: pip install 'qeffect[torch]' "
            "(tables saved as CSV are read without it)"
        ) from None
    return torch, schedules


class _Stage:
    """A stage with only its position in the pipeline; torch's constructors read nothing else."""

    def __init__(self, index: int, rank: int, pp: int, vpp: int, submod: object) -> None:
        self.stage_index = index
        self.num_stages = pp * vpp
        self.group_size = pp
        self.group_rank = rank
        self.submod = submod
        self.is_first = index == 0
        self.is_last = index == pp * vpp - 1
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] | None = None


class _RecordingStage(_Stage):
    """A stage that records the calls that the loop of a single-stage class makes."""

    def __init__(self, rank: int, pp: int, comms: bool) -> None:
        super().__init__(rank, rank, pp, 1, None)
        self.entries: list[str] = []
        self._comms = comms

    def _note(self, kind: str, microbatch: int) -> None:
        self.entries.append(f"{self.stage_index}{kind}{microbatch}")

    def _message(self, kind: str, microbatch: int, at_end: bool) -> list[Any]:
        if self._comms and not at_end:
            self._note(kind, microbatch)
        return []

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self._message("RECV_F", microbatch, self.is_first)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        return self._message("SEND_F", microbatch, self.is_last)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self._message("RECV_B", microbatch, self.is_last)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        return self._message("SEND_B", microbatch, self.is_first)

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self._note("F", microbatch)

    def backward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self._note("B", microbatch)

    def release_fwd_send_outputs(self, _: int) -> None:
        """Do nothing: torch 2.15 calls this to free sent tensors, and this stage has none."""

    def perform_reduce_grad(self, *_: object) -> None:
        if self._comms:
            self.entries.append(f"{self.stage_index}REDUCE_GRAD")


def _quietly(schedules: ModuleType, make: Callable[[], Any]) -> Any:
    # The constructors log the class in use, which does not belong in a checker's output.
    logger = logging.getLogger(schedules.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return make()
    finally:
        logger.setLevel(level)


def _run_single(
    schedules: ModuleType, cls: type[Any], rank: int, pp: int, microbatches: int, comms: bool
) -> list[str]:
    stage = _RecordingStage(rank, pp, comms)

    def run() -> None:
        schedule = cls(stage, microbatches)
        # Initialization negotiates tensor shapes with other processes, which do not exist here.
        schedule._initialize_stage = lambda *_, **__: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches, return_outputs=False)

    _quietly(schedules, run)
    return stage.entries


def _table(
    torch: ModuleType,
    schedules: ModuleType,
    cls: type[Any],
    base: str,
    pp: int,
    vpp: int,
    microbatches: int,
    comms: bool,
    options: dict[str, Any],
) -> list[list[Any]]:
    submod = torch.nn.Identity()
    local = [0, 2 * pp - 1] if base in V_SHAPED else [pp * chunk for chunk in range(vpp)]
    stages = [_Stage(index, 0, pp, vpp, submod) for index in local]
    given: Any = stages[0] if base in SINGLE else stages
    made = _quietly(schedules, lambda: cls(given, microbatches, **options))
    return _rows(cls, made, "pipeline_order_with_comms" if comms else "pipeline_order", pp)


def _rows(cls: type[Any], made: Any, attribute: str, pp: int) -> list[list[Any]]:
    """Return the rows of a schedule object's table."""
    order = getattr(made, attribute, None)
    leave = ", or leave out --comms" if attribute.endswith("comms") else ""
    remedy = f"set self.{attribute} in the class's constructor{leave}"
    expected = f"{cls.__name__}.{attribute}: expected a row of actions for each of {pp} ranks"
    if not order:
        raise ScheduleError(f"{expected}, found nothing; {remedy}")
    if not isinstance(order, Mapping):
        found = shorten(repr(order))
        raise ScheduleError(f"{expected}, as {{rank: [actions]}}, found {found}; {remedy}")
    for rank in range(pp):
        if not isinstance(order.get(rank), Iterable):
            ranks = ", ".join(map(str, order))
            raise ScheduleError(f"{expected}, found no row for rank {rank} among {ranks}; {remedy}")
    return [list(order[rank]) for rank in range(pp)]

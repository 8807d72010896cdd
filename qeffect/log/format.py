"""
The event log's format: how arguments are written, and how the header describes a contract.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import Any, Final

import attrs

from ..configuration import Configuration
from ..contract import Contract
from ..engine.concrete_memory import Snapshot
from ..engine.stage import RELATIONS, TRANSITIONS
from ..relations.constants import NEVER
from .budget import require_affordable
from .fields import MAGIC, MARKS, VERSION

__all__ = [
    "COLUMNS_ADDED",
    "COLUMNS_OF_FIRST",
    "COLUMNS_SINCE_FIRST",
    "COLUMNS_SINCE_SECOND",
    "DIGEST_BYTES",
    "FIELDS",
    "FIRST",
    "KEPT_STEPS",
    "MAGIC",
    "MARKS",
    "OF_STAGE_IN_FIRST",
    "SECOND",
    "SINCE_SECOND",
    "VERSION",
    "compact",
    "describe",
    "fingerprints",
    "header_of",
    "rebuild",
    "upgraded",
    "upgraded_header",
    "upgraded_header_of_second",
]

#: The first version. It has no evidence of fills, scaling updates or scales, and no stage that
#: reports any of these; `SINCE_FIRST` gives the values of the missing fields.
FIRST: Final = 1
SINCE_FIRST: Final[Mapping[str, Mapping[str, Any]]] = {
    "commit_refresh": {"filled": [], "fill_epoch": NEVER},
    "commit_forward": {"filled": [], "fill_epoch": NEVER, "updates": NEVER},
    "commit_dgrad": {"updates": NEVER, "scales": NEVER},
    "reserve": {"link": 0},
    "finish_read": {"link": 0},
    "stage": {
        "reports_fills": False,
        "reports_updates": False,
        "tape_scales": None,
        "receives_input": False,
        "receives_gradient": False,
    },
}
#: Columns that the first version's closing line lacks, or gives another meaning; they are not
#: compared for a log of that version.
COLUMNS_SINCE_FIRST: Final = frozenset(
    {
        "arrived",
        "ended_at",
        "ended_on",
        "moving",
        "receives",
        "vacated",
        "reports_fills",
        "reports_updates",
        "live_scales",
        "carried_scales",
        "scaled_at",
        "rolled_at",
        "stage_at",
        "tied_at",
        "shared_of",
        "sharer_of",
        "reduce_at",
        "ordered",
        "reducing",
        "reduced",
        "started",
        "named",
        "consumer",
        "caller_at",
        "updater",
        "unawaited",
        "undrained",
        "spoiled",
    }
)
#: Columns of the first version that are not compared: they no longer exist, or had another meaning.
#: Some described stages instead of buckets; others did not count the optimizer's update as device
#: work, or the loss of a cache as a failure.
COLUMNS_OF_FIRST: Final = frozenset({"reduces", "reducing", "unreduced", "undrained", "spoiled"})
#: Columns that a log may lack because the log was recorded before these columns existed. Either the
#: header gives their values, or the header configures nothing that writes them.
COLUMNS_ADDED: Final = frozenset(
    {
        "target_of",
        "input_of",
        "gradient_of",
        "reports_draws",
        "recomputes_draws",
        "reports_weights",
        "parts",
        "unweighed",
        "drawn",
        "drawn_at",
        "keeper_of",
        "skipped",
        "skips",
        "epoch_scales",
        "gathered",
        "refresh_pool",
        "refresh_rank",
    }
)
#: A column that a commit did not reset in logs without the column ``skipped``.
KEPT_BEFORE_SKIPS: Final = "forwarded"
#: A column that a restore did not reset in logs without the column ``gathered``.
KEPT_BEFORE_MOVES: Final = "rolled_at"
#: Transitions that name a stage and no link in the first version.
OF_STAGE_IN_FIRST: Final = frozenset({"start_reduction", "finish_reduction", "fail_reduction"})
#: The second version. Its `commit_epoch` is the check and the commit of an update in one line, and
#: takes no ticket.
SECOND: Final = 2
#: Lines that the first two versions lack.
SINCE_SECOND: Final = frozenset(
    {
        "start_weights_read",
        "finish_weights_read",
        "start_gradients_read",
        "finish_gradients_read",
        "next_walk",
        "skip",
        "check_evaluation",
        "commit_evaluation",
        "abort_evaluation",
        "group_wgrad",
        "ungroup_wgrad",
        "check_update",
        "move_scales",
        "commit_update",
        "abort_update",
        "fail",
        *MARKS,
    }
)
#: Columns that the closing line of the first two versions lacks; their logs use none of them.
COLUMNS_SINCE_SECOND: Final = frozenset(
    {
        "evaluating",
        "optimizing",
        "half_updated",
        "weights_read",
        "gradients_read",
        "unseen",
        "unwaited",
        "walk",
    }
)
#: Bytes of a line's digest: enough to find damage; it is not a signature.
DIGEST_BYTES: Final = 8

#: How many recorded steps a log keeps; only these can be repeated in one line.
KEPT_STEPS: Final = 4

#: Fields of each line between the header and the closing line, in order, without the digest.
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    name: (
        "seq",
        "transition",
        *parameters,
        *(["result"] if name.startswith("check_") else []),
    )
    for name, parameters in (*TRANSITIONS.items(), *MARKS.items())
}


def compact(value: Any) -> str:
    """Return a value as JSON without spaces; a log uses no other spelling."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def fingerprints(snapshot: Snapshot) -> dict[str, str]:
    """Return a digest of each column (array) of a state, by the column's name."""
    plain = cache(attrs.asdict)  # many cells share a destination
    return {
        name: blake2b(
            json.dumps(column, separators=(",", ":"), default=plain).encode(),
            digest_size=DIGEST_BYTES,
        ).hexdigest()
        for name, column in snapshot.items()
    }


def describe(contract: Contract, rank: int | None = None) -> dict[str, Any]:
    """
    Return the header of a contract's log. A replayer can rebuild the contract from the header.

    Args:
        contract: The contract, before its first transition.
        rank: Rank of the process; readers of the log use it, the contract does not.

    Raises:
        ValueError: A name is not printable; the name of a domain, pool or caller is neither text
            nor an integer; the contract is larger than a log may configure; or the contract has
            already made a transition.
    """
    header = header_of(contract, rank)
    if rebuild(json.loads(compact(header))).snapshot() != contract.snapshot():
        raise ValueError(
            "a log needs every transition of its contract: attach the recorder before the first "
            "transition (a restore is a transition too)"
        )
    return header


def upgraded(event: Mapping[str, Any]) -> dict[str, Any]:
    """
    Convert an event of log format 1 into the current format.

    Raises:
        ValueError: The event has a field that log format 1 lacks.
    """
    added = SINCE_FIRST.get(event.get("transition", ""), {})
    if added.keys() & event.keys():
        raise ValueError(f"log format 1 has no field {', '.join(added)}")
    digest = {"digest": event["digest"]} if "digest" in event else {}
    rest = {name: value for name, value in event.items() if name != "digest"}
    return {**rest, **added, **digest}


def upgraded_header(header: Mapping[str, Any]) -> dict[str, Any]:
    """
    Convert a header of log format 1 into the current format.

    Raises:
        TypeError, ValueError: The header does not follow log format 1.
    """
    added = SINCE_FIRST["stage"]
    stages = []
    for stage in header["stages"]:
        if added.keys() & stage.keys():
            raise ValueError(f"log format 1 has no field {', '.join(added)}")
        last = {name: added[name] for name in added if name.startswith("receives")}
        pool = {"pool": stage["pool"]}
        rest = {name: value for name, value in stage.items() if name not in pool}
        middle = {name: value for name, value in added.items() if name not in last}
        stages.append({**rest, **middle, **pool, **last, "buckets": [], "buffers": [], "tied": []})
    if "reductions" in header:
        raise ValueError("log format 1 has no field reductions")
    late = {"epoch": header["epoch"], "incarnation": header["incarnation"]}
    early = {name: value for name, value in header.items() if name not in late}
    return {**early, "version": VERSION, "stages": stages, "reductions": [], **late}


def upgraded_header_of_second(header: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a header of log format 2 into the current format."""
    return {**header, "version": VERSION}


def header_of(contract: Contract, rank: int | None) -> dict[str, Any]:
    """Return the log header of a contract, which must be in its initial state."""
    return {
        "qeffect": MAGIC,
        "version": VERSION,
        "rank": rank,
        **contract.configuration.plain(),
        "epoch": contract.epoch,
        "incarnation": f"{contract.incarnation:016x}",
    }


def rebuild(header: Mapping[str, Any]) -> Contract:
    """
    Build the contract that a header describes, in its initial state.

    Raises:
        KeyError, TypeError, ValueError: The header does not describe a contract.
        Refused: The contract refuses the header's gradient destinations.
    """
    unknown = [name for name in header["relations"] if name not in RELATIONS]
    if unknown:
        raise ValueError(f"unknown relations {unknown}; the relations are {list(RELATIONS)}")
    described = Configuration.read(header)
    require_affordable(header)
    contract = Contract(
        described.stages,
        omit=[name for name in RELATIONS if name not in header["relations"]],
        callers=described.callers,
        capture_order=described.capture_order,
        declared=dict(described.declared),
        generation_max=described.generation_max,
        reductions=described.reductions,
        epoch=header["epoch"],
    )
    if list(contract.transitions.relations) != header["relations"]:
        raise ValueError(f"expected the relations in the order {contract.transitions.relations}")
    contract.memory.incarnation[0] = int(header["incarnation"], 16)
    return contract

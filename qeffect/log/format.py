"""
The event log's format: how an argument is written, and how the header describes a contract.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from functools import cache
from hashlib import blake2b
from typing import Any, Final

import attrs

from ..config import StageConfig
from ..contract import Contract
from ..engine.memory import Snapshot
from ..engine.stage import RELATIONS, TRANSITIONS
from ..keys import Cell
from ..layout import Destination
from .budget import require_affordable
from .text import is_name

__all__ = [
    "DIGEST_BYTES",
    "FIELDS",
    "HEADER",
    "MAGIC",
    "VERSION",
    "compact",
    "describe",
    "fingerprints",
    "header_of",
    "rebuild",
    "write_destinations",
]

MAGIC: Final = "event-log"
VERSION: Final = 1
#: Bytes of a line's digest: enough to find damage; it is no signature.
DIGEST_BYTES: Final = 8

#: Fields of each transition's line, in order, without the digest.
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    name: (
        "seq",
        "transition",
        *parameters,
        *(["result"] if name.startswith("check_") else []),
    )
    for name, parameters in TRANSITIONS.items()
}


#: Fields of the header, in order, without the digest.
HEADER: Final = (
    "qeffect",
    "version",
    "rank",
    "relations",
    "stages",
    "callers",
    "capture_order",
    "declared",
    "generation_max",
    "epoch",
    "incarnation",
)


def compact(value: Any) -> str:
    """Return a value as JSON without spaces, the only spelling that a log uses."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def write_destinations(destinations: tuple[Destination, ...]) -> list[dict[str, Any]]:
    """
    Return destinations as plain data.

    Raises:
        TypeError: One is not a ``Destination``.
        ValueError: One has a name that is not printable.
    """
    if not all(isinstance(d, Destination) for d in destinations):
        raise TypeError(f"an event log holds Destination records, got {destinations!r}")
    for destination in destinations:
        for name in (destination.matrix, destination.dtype, destination.device):
            _printable(name, "destination")
    return [attrs.asdict(d) for d in destinations]


def fingerprints(snapshot: Snapshot) -> dict[str, str]:
    """Return a digest of every column of a state."""
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
    Return the header of a contract's log: all that a replayer needs to rebuild the contract.

    Args:
        contract: The contract, before its first transition.
        rank: Rank of the process, for whoever reads the log.

    Raises:
        ValueError: A name is not printable, or a domain's, pool's or caller's is neither text nor
            an integer; the contract is larger than a log may configure, or has already made a
            transition.
    """
    header = header_of(contract, rank)
    if rebuild(json.loads(compact(header))).snapshot() != contract.snapshot():
        raise ValueError(
            "a log begins with its contract: attach the recorder before the first transition, "
            "a restore included"
        )
    return header


def header_of(contract: Contract, rank: int | None) -> dict[str, Any]:
    """Return the header of a contract in its initial state, the only one that describes it."""
    st = contract.memory
    local = [(config.stage, i) for config in contract.stages for i in range(config.slots)]
    domains = dict.fromkeys(config.domain for config in contract.stages)
    graphs = [
        (rank_of[slot], [*local[slot], kind])
        for kind, rank_of in (("F", st.forward_rank), ("dI", st.dgrad_rank), ("dW", st.wgrad_rank))
        for slot in range(len(st.pending))
    ]
    return {
        "qeffect": MAGIC,
        "version": VERSION,
        "rank": rank,
        "relations": list(contract.transitions.relations),
        "stages": [_write_stage(config) for config in contract.stages],
        "callers": [_name(caller, "caller") for caller in contract._callers],
        "capture_order": [graph for _, graph in sorted(graphs)],
        "declared": [
            [_name(name, "domain"), _declared(st, d)]
            for d, name in enumerate(domains)
            if st.declared[d]
        ],
        "generation_max": st.generation_max[0],
        "epoch": contract.epoch,
        "incarnation": f"{contract.incarnation:016x}",
    }


def rebuild(header: Mapping[str, Any]) -> Contract:
    """
    Build the contract that a header describes, in its initial state.

    Raises:
        KeyError, TypeError, ValueError: The header does not describe one.
        Refused: Its gradient destinations are refused.
    """
    unknown = [name for name in header["relations"] if name not in RELATIONS]
    if unknown:
        raise ValueError(f"relations {unknown} are not known; there are {list(RELATIONS)}")
    stages = [_read_stage(stage) for stage in header["stages"]]
    require_affordable(header)
    contract = Contract(
        stages,
        omit=[name for name in RELATIONS if name not in header["relations"]],
        callers=[_name(caller, "caller") for caller in header["callers"]],
        capture_order=[(s, slot, kind) for s, slot, kind in header["capture_order"]],
        declared={
            domain: [(kind, _cell(cell)) for kind, cell in sequence]
            for domain, sequence in header["declared"]
        },
        generation_max=header["generation_max"],
        epoch=header["epoch"],
    )
    if list(contract.transitions.relations) != header["relations"]:
        raise ValueError(f"the relations come in the order {contract.transitions.relations}")
    if len(header["declared"]) != len({domain for domain, _ in header["declared"]}):
        raise ValueError("a domain declares its order twice")
    contract.memory.incarnation[0] = int(header["incarnation"], 16)
    return contract


def _declared(st: Any, domain: int) -> list[list[Any]]:
    """Return the declared F and dI of a domain, in order."""
    placed = [
        (at[cell], kind, cell)
        for kind, at in (("F", st.forward_at), ("dI", st.dgrad_at))
        for cell in at
        if at[cell] >= 0 and st.domain_of[cell[0]] == domain
    ]
    return [[kind, list(cell)] for _, kind, cell in sorted(placed)]


def _write_stage(config: StageConfig) -> dict[str, Any]:
    plain = {a.name: getattr(config, a.name) for a in attrs.fields(StageConfig)}
    plain["domain"] = _name(config.domain, "domain")
    plain["matrices"] = [_printable(name, "matrix") for name in config.matrices]
    plain["pool"] = None if config.pool is None else _name(config.pool, "pool")
    plain["destinations"] = write_destinations(config.destinations)
    return plain


def _read_stage(plain: Mapping[str, Any]) -> StageConfig:
    return StageConfig(
        **{
            **plain,
            "domain": _name(plain["domain"], "domain"),
            "matrices": tuple(plain["matrices"]),
            "destinations": tuple(Destination(**d) for d in plain["destinations"]),
        }
    )


def _cell(parts: list[int]) -> Cell:
    stage, microbatch, block, invocation = parts
    return stage, microbatch, block, invocation


def _name(name: Hashable, what: str) -> int | str:
    if type(name) is int:
        return name
    if isinstance(name, str):
        return _printable(name, what)
    raise ValueError(f"an event log names a {what} by an integer or a string, got {name!r}")


def _printable(name: str, what: str) -> str:
    if not is_name(name):
        raise ValueError(f"an event log names a {what} by printable characters, got {name!r}")
    return name

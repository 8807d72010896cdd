"""
The description of a contract: processes with equal descriptions have the same contract.

An event log begins with this description and a checkpoint contains it, in the same plain form.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import evolve, fields, frozen

from .destinations import Destination
from .keys import Cell, cell_of
from .process_layout import GRAPHS, REFRESH, Graph, default_capture_order, share_buckets
from .relations.constants import GENERATION_MAX, NO_RANK
from .stage_config import ADDED, Bucket, StageConfig
from .text import counted, is_name, shown

__all__ = ["Configuration", "Graph", "Positions", "write_destinations"]

#: The domain's name, and its (``F`` | ``dI``, cell) pairs in their declared order.
Positions = tuple[Hashable, tuple[tuple[str, Cell], ...]]


@frozen
class Configuration:
    """
    The arguments that a contract was built from, each with the same meaning as for `Contract`.

    Args:
        stages: The stages of the process.
        relations: Names of the relations (groups of guards) in force, in the order in which the
            contract runs their guards.
        callers: Names of the callers' CUDA streams, which enqueue work for the graph streams.
        capture_order: Order in which the graphs of a shared memory pool were captured; empty for
            the default order (`process_layout.default_capture_order`).
        declared: For each state domain (stages whose FP8 scales are updated together) that declares
            an order, the order of its F and dI.
        generation_max: The last generation (count of releases) that a slot (set of buffers) may
            reach.
        reductions: Names of all buckets (gradients that are reduced together) in the declared order
            of their reductions; empty if no order is declared.

    >>> from qeffect import Contract, StageConfig
    >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], callers=("a", "b"))
    >>> contract.configuration.callers
    ('a', 'b')
    """

    stages: tuple[StageConfig, ...]
    relations: tuple[str, ...]
    callers: tuple[Hashable, ...] = ("main",)
    capture_order: tuple[Graph, ...] = ()
    declared: tuple[Positions, ...] = ()
    generation_max: int = GENERATION_MAX
    reductions: tuple[int | str, ...] = ()

    @classmethod
    def of(
        cls,
        stages: Sequence[StageConfig],
        relations: Iterable[str],
        callers: Iterable[Hashable],
        st: Any,
    ) -> Configuration:
        """
        Return the configuration from which a contract's state was built.

        Args:
            stages: The stages of the process.
            relations: Names of the relations (groups of guards) in force.
            callers: Names of the callers' CUDA streams, which enqueue work for the graph streams.
            st: The contract's state, which gives the rest of the configuration.
        """
        local = [(config.stage, i) for config in stages for i in range(config.slots)]
        ranks = zip(GRAPHS, (st.forward_rank, st.dgrad_rank, st.wgrad_rank), strict=True)
        placed: list[tuple[int, Graph]] = [
            (rank[i], (*local[i], kind)) for kind, rank in ranks for i in range(len(local))
        ]
        for config in stages:
            if (place := st.refresh_rank[config.stage]) != NO_RANK:
                placed.append((place, (config.stage, REFRESH)))
        order = tuple(graph for _, graph in sorted(placed))
        domains = dict.fromkeys(config.domain for config in stages)
        return cls(
            tuple(stages),
            tuple(relations),
            tuple(callers),
            () if order == default_capture_order(stages) else order,
            tuple((name, _positions(st, d)) for d, name in enumerate(domains) if st.declared[d]),
            st.generation_max[0],
            _reductions(stages, st),
        )

    def without_places(self) -> Configuration:
        """Return a copy without addresses and devices of destinations, which each process sets."""
        return evolve(
            self,
            stages=tuple(
                evolve(
                    config,
                    destinations=tuple(
                        evolve(d, address=0, device="") for d in config.destinations
                    ),
                )
                for config in self.stages
            ),
        )

    def difference(self, other: Configuration) -> tuple[str, str, str] | None:
        """
        Return the first part in which another configuration differs from this one.

        Returns:
            Name of the part, its value in this configuration, its value in the other; None if the
            two configurations are equal.

        >>> one = Configuration((), ("order",), generation_max=3)
        >>> one.difference(Configuration((), ("order",), generation_max=4))
        ('generation_max', '3', '4')
        """
        for part in fields(Configuration):
            ours, theirs = getattr(self, part.name), getattr(other, part.name)
            if ours != theirs:
                return part.name, *_first_difference(part.name, ours, theirs)
        return None

    def summary(self) -> str:
        """Return one line that names the stages and the relations (groups of guards)."""
        stages = ", ".join(
            f"{c.stage} (M={c.microbatches}, {counted(c.slots, 'slot')})" for c in self.stages
        )
        return f"stages {stages} under {', '.join(self.relations)}"

    # As plain data

    def plain(self) -> dict[str, Any]:
        """
        Return the configuration as plain data, with the default capture order written out.

        Raises:
            ValueError: A state domain, capture-memory pool or caller has a name that JSON cannot
                hold.
        """
        order = self.capture_order or default_capture_order(self.stages)
        return {
            "relations": list(self.relations),
            "stages": [_write_stage(config) for config in self.stages],
            "callers": [_name(caller, "caller") for caller in self.callers],
            "capture_order": [list(graph) for graph in order],
            "declared": [
                [_name(domain, "domain"), [[kind, list(cell)] for kind, cell in sequence]]
                for domain, sequence in self.declared
            ],
            "generation_max": self.generation_max,
            "reductions": [_name(bucket, "bucket") for bucket in self.reductions],
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Configuration:
        """
        Return the configuration that plain data describe.

        Raises:
            KeyError, TypeError, ValueError: The data do not describe a configuration.
        """
        if len(plain["declared"]) != len({domain for domain, _ in plain["declared"]}):
            raise ValueError(
                f"each domain may declare one order, got {[d for d, _ in plain['declared']]}"
            )
        return cls(
            tuple(_read_stage(stage) for stage in plain["stages"]),
            tuple(plain["relations"]),
            tuple(_name(caller, "caller") for caller in plain["callers"]),
            tuple(_read_graph(*graph) for graph in plain["capture_order"]),
            tuple(
                (domain, tuple((kind, cell_of(*cell)) for kind, cell in sequence))
                for domain, sequence in plain["declared"]
            ),
            plain["generation_max"],
            tuple(_name(bucket, "bucket") for bucket in plain["reductions"]),
        )


def write_destinations(destinations: tuple[Destination, ...]) -> list[dict[str, Any]]:
    """
    Return destinations as plain data.

    Raises:
        TypeError: An entry is not a ``Destination``.
        ValueError: A name is not printable.
    """
    if not all(isinstance(d, Destination) for d in destinations):
        raise TypeError(f"destinations must be Destination objects, got {shown(destinations)}")
    for destination in destinations:
        for name in (destination.matrix, destination.dtype, destination.device):
            _printable(name, "destination")
    return [attrs.asdict(d) for d in destinations]


def _read_graph(stage: int, *rest: Any) -> Graph:
    match rest:
        case (kind,):
            return stage, kind
        case (slot, kind):
            return stage, slot, kind
    raise ValueError(f"a captured graph has a stage and a kind, got {[stage, *rest]}")


def _positions(st: Any, domain: int) -> tuple[tuple[str, Cell], ...]:
    """Return the declared F and dI of a domain, in order."""
    placed = [
        (at[cell], kind, cell)
        for kind, at in (("F", st.forward_at), ("dI", st.dgrad_at))
        for cell in at
        if at[cell] >= 0 and st.domain_of[cell[0]] == domain
    ]
    return tuple((kind, cell) for _, kind, cell in sorted(placed))


def _reductions(stages: Sequence[StageConfig], st: Any) -> tuple[int | str, ...]:
    """Return the names of all buckets in their declared order; empty if none is declared."""
    if not st.ordered[0]:
        return ()
    placed = zip(st.reduce_at, share_buckets(stages), strict=True)
    return tuple(name for _, name in sorted(placed, key=lambda one: int(one[0])))


def _first_difference(part: str, ours: Any, theirs: Any) -> tuple[str, str]:
    """Return both values as text; for sequences of equal length, the first entry that differs."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        if len(ours) != len(theirs):
            return f"{len(ours)} {part}", f"{len(theirs)} {part}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        place, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        if isinstance(one, StageConfig):
            return _stage_difference(one, other)
        if isinstance(one, tuple) and isinstance(other, tuple) and part == "declared":
            if one[0] == other[0]:
                inner = _first_difference(f"actions of domain {one[0]!r}", one[1], other[1])
                return inner
        return f"{one!r} at position {place}", f"{other!r} at position {place}"
    return repr(ours), repr(theirs)


def _stage_difference(one: StageConfig, other: StageConfig) -> tuple[str, str]:
    for part in fields(StageConfig):
        ours, theirs = getattr(one, part.name), getattr(other, part.name)
        if ours != theirs:
            return (
                f"{part.name}={ours!r} of stage {one.stage}",
                f"{part.name}={theirs!r} of stage {other.stage}",
            )
    raise AssertionError("the stages are equal")


def _write_stage(config: StageConfig) -> dict[str, Any]:
    plain = {a.name: getattr(config, a.name) for a in fields(StageConfig)}
    plain["domain"] = _name(config.domain, "domain")
    plain["matrices"] = [_printable(name, "matrix") for name in config.matrices]
    plain["pool"] = None if config.pool is None else _name(config.pool, "pool")
    if config.refresh_pool is not None:
        plain["refresh_pool"] = _name(config.refresh_pool, "pool")
    plain["destinations"] = write_destinations(config.destinations)
    plain["buckets"] = [
        {"name": _name(b.name, "bucket"), "matrices": list(b.matrices)} for b in config.buckets
    ]
    plain["buffers"] = [[matrix, _printable(name, "buffer")] for matrix, name in config.buffers]
    plain["tied"] = list(config.tied)
    if config.weights_sum is not None:
        plain["weights_sum"] = list(config.weights_sum)
    return {name: given for name, given in plain.items() if given != ADDED.get(name, ...)}


def _read_stage(plain: Mapping[str, Any]) -> StageConfig:
    return StageConfig(
        **{
            **plain,
            "domain": _name(plain["domain"], "domain"),
            "matrices": tuple(plain["matrices"]),
            "destinations": tuple(Destination(**d) for d in plain["destinations"]),
            "buckets": tuple(Bucket(**bucket) for bucket in plain["buckets"]),
            "buffers": tuple((matrix, name) for matrix, name in plain["buffers"]),
            "tied": tuple(plain["tied"]),
        }
    )


def _name(name: Hashable, what: str) -> int | str:
    if type(name) is int:
        return name
    if isinstance(name, str):
        return _printable(name, what)
    raise ValueError(f"an event log names a {what} by an integer or a string, got {shown(name)}")


def _printable(name: str, what: str) -> str:
    if not is_name(name):
        raise ValueError(f"an event log names a {what} by printable characters, got {shown(name)}")
    return name

"""
What a process is configured with: its stages, their slots, destinations, pools and callers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from attrs import Factory, field, frozen
from attrs.validators import ge, instance_of

from .constants import DI, DW, GENERATION_MAX, GRAD, OUT
from .keys import Cell
from .layout import Destination, placements
from .memory import Memory
from .stage import Transitions

__all__ = ["Layout", "StageConfig", "lay_out"]

_count = [instance_of(int), ge(1)]


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"matrices must be a sequence of names, got the string {names!r}")
    return tuple(sorted(names))


def _destinations(destinations: Iterable[Destination]) -> tuple[Destination, ...]:
    return tuple(destinations)


@frozen
class StageConfig:
    """
    One pipeline stage (or virtual chunk) of this process.

    Args:
        stage: Global stage index.
        microbatches: Microbatches of one optimizer step, M.
        slots: Slots of the stage's pool; the schedule's peak of live tapes is enough.
        domain: Name of the state domain. Stages whose scaling state is rolled together, as
            Transformer Engine rolls every module of the process, share one.
        blocks: Sub-layer blocks taped apart in each execution.
        invocations: Invocations of each block in one execution.
        matrices: Names of the weight matrices whose gradients dW must cover, each once.
        destinations: Where each matrix gradient of each microbatch lands; see
            ``qeffect.layout``. Empty means a symbolic accumulating buffer for every matrix.
        sends_output: The forward's output has a reader (a send, or the next local stage) that
            must finish before the slot is free.
        sends_gradient: Likewise the input gradient.
        reduces: The stage's gradients are reduced over data-parallel ranks before the commit.
        pool: Name of the capture-memory pool that the stage's slots share; None gives every
            slot a pool of its own.

    Raises:
        TypeError, ValueError: A count is not a positive integer.
    """

    stage: int = field(validator=[instance_of(int), ge(0)])
    microbatches: int = field(validator=_count)
    slots: int = field(validator=_count)
    domain: Hashable = 0
    blocks: int = field(default=1, validator=_count)
    invocations: int = field(default=1, validator=_count)
    matrices: tuple[str, ...] = field(default=(), converter=_names)
    destinations: tuple[Destination, ...] = field(default=(), converter=_destinations)
    sends_output: bool = False
    sends_gradient: bool = False
    reduces: bool = False
    pool: Hashable | None = None

    def cells(self) -> tuple[Cell, ...]:
        """Every key of the stage without its epoch, in microbatch order."""
        return tuple(
            (self.stage, m, b, i)
            for m in range(self.microbatches)
            for b in range(self.blocks)
            for i in range(self.invocations)
        )

    def consumers(self) -> int:
        """Mask of the consumers that a fresh tape of this stage waits for."""
        return DI | DW | (OUT if self.sends_output else 0) | (GRAD if self.sends_gradient else 0)


@frozen
class Layout:
    """
    Dense indices of a process: what each configured name became.

    Args:
        memory: The memory, in its initial state.
        slots: Slot indices of each stage.
        domains: Domain index by name.
        links: Link index by (caller, domain name).
        cells: Every configured cell.
    """

    memory: Memory
    slots: Mapping[int, tuple[int, ...]]
    domains: Mapping[Hashable, int]
    links: Mapping[tuple[Hashable, Hashable], int]
    cells: frozenset[Cell] = Factory(frozenset)


def lay_out(
    stages: Sequence[StageConfig],
    functions: Transitions,
    *,
    callers: Sequence[Hashable] = ("main",),
    capture_order: Iterable[tuple[int, int, str]] = (),
    declared: Mapping[Hashable, Sequence[tuple[str, Cell]]] | None = None,
    generation_max: int = GENERATION_MAX,
) -> Layout:
    """
    Build the memory of a process.

    Args:
        stages: Its stages; each index once.
        functions: The composed transitions that will run over the memory.
        callers: Names of the streams that call into the domains' graph streams.
        capture_order: (stage, local slot, "F" | "dI" | "dW") of every captured graph, in the
            order of capture; only shared pools need it. By default all F, then all dI, then all
            dW, stage by stage and slot by slot.
        declared: For a domain, the order of its F and dI within an epoch as
            ("F" | "dI", cell) pairs. Where given, another order is refused.
        generation_max: The last generation that a slot may reach.

    Raises:
        ValueError: A stage is configured twice, or a declared order is not a permutation.
        Refused: Destinations overlap, or a matrix of a microbatch has none or two.
    """
    indices = [config.stage for config in stages]
    if len(set(indices)) != len(indices) or not indices:
        raise ValueError(f"every stage must be configured exactly once, got stages {indices}")
    domains = {name: d for d, name in enumerate(dict.fromkeys(c.domain for c in stages))}
    links = {
        (caller, name): c * len(domains) + d
        for c, caller in enumerate(callers)
        for name, d in domains.items()
    }
    slots: dict[int, tuple[int, ...]] = {}
    first = 0
    for config in stages:
        slots[config.stage] = tuple(range(first, first + config.slots))
        first += config.slots
    slot_stage = [c.stage for c in stages for _ in range(c.slots)]
    pools, ranks = _pools(stages, slots, domains, capture_order)
    cells = [cell for config in stages for cell in config.cells()]
    destination_of, buffer_of, buffers = placements(stages)
    forward_at, dgrad_at, has_order = _positions(cells, domains, declared or {})
    dense = sorted(indices) == list(range(len(indices)))

    def by_stage(values: Mapping[int, Any]) -> Any:
        return [values[s] for s in sorted(values)] if dense else dict(values)

    memory = Memory(
        functions.columns,
        {
            "one": 1,
            "slot": len(slot_stage),
            "cell": cells,
            "stage": len(indices) if dense else indices,
            "domain": len(domains),
            "link": len(links),
            "pool": max(pools) + 1,
            "buffer": buffers,
        },
        {
            "generation_max": [generation_max],
            "slot_stage": slot_stage,
            "domain_of": by_stage({c.stage: domains[c.domain] for c in stages}),
            "domain_at": [domains[name] for _, name in links],
            "owes": by_stage({c.stage: c.consumers() for c in stages}),
            "matrices": by_stage({c.stage: c.matrices for c in stages}),
            "cells": by_stage({c.stage: len(c.cells()) for c in stages}),
            "declared": has_order,
            "forward_at": forward_at,
            "dgrad_at": dgrad_at,
            "destination_of": destination_of,
            "buffer_of": buffer_of,
            "pool_of": pools,
            "forward_rank": [ranks[slot, "F"] for slot in range(len(slot_stage))],
            "dgrad_rank": [ranks[slot, "dI"] for slot in range(len(slot_stage))],
            "wgrad_rank": [ranks[slot, "dW"] for slot in range(len(slot_stage))],
            "reduces": by_stage({c.stage: int(c.reduces) for c in stages}),
        },
    )
    return Layout(memory, slots, domains, links, frozenset(cells))


def _pools(
    stages: Sequence[StageConfig],
    slots: Mapping[int, tuple[int, ...]],
    domains: Mapping[Hashable, int],
    capture_order: Iterable[tuple[int, int, str]],
) -> tuple[list[int], dict[tuple[int, str], int]]:
    """Return the pool of each slot, and the capture rank of each graph within its pool."""
    names: dict[Hashable, int] = {}
    owner: dict[Hashable, Hashable] = {}
    pools: list[int] = []
    for config in stages:
        for slot in slots[config.stage]:
            name: Hashable = ("slot", slot) if config.pool is None else ("pool", config.pool)
            if owner.setdefault(name, config.domain) != config.domain:
                raise ValueError(f"pool {config.pool!r} is shared by two state domains")
            pools.append(names.setdefault(name, len(names)))
    order = [(slots[stage][local], kind) for stage, local, kind in capture_order]
    if not order:
        order = [(slot, kind) for kind in ("F", "dI", "dW") for slot in range(len(pools))]
    if len(set(order)) != 3 * len(pools):
        raise ValueError(
            f"the capture order must name F, dI and dW of all {len(pools)} slots once, "
            f"got {len(order)} graphs"
        )
    return pools, {graph: rank for rank, graph in enumerate(order)}


def _positions(
    cells: Sequence[Cell],
    domains: Mapping[Hashable, int],
    declared: Mapping[Hashable, Sequence[tuple[str, Cell]]],
) -> tuple[dict[Cell, int], dict[Cell, int], list[int]]:
    """Return the declared position of each cell's F and dI, and which domains declare any."""
    positions = {"F": dict.fromkeys(cells, -1), "dI": dict.fromkeys(cells, -1)}
    has_order = [0] * len(domains)
    for name, sequence in declared.items():
        if len(set(sequence)) != len(sequence):
            raise ValueError(f"the declared order of domain {name!r} names an action twice")
        has_order[domains[name]] = 1
        for position, (kind, cell) in enumerate(sequence):
            positions[kind][cell] = position
    return positions["F"], positions["dI"], has_order

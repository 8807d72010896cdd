"""
What a process is configured with: its stages, their slots, destinations, pools and callers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from attrs import Attribute, Factory, field, frozen

from .engine.memory import Memory
from .engine.stage import Transitions
from .keys import Cell
from .layout import Destination, placements
from .relations.constants import DI, DW, GENERATION_MAX, GRAD, OUT

__all__ = ["Layout", "StageConfig", "lay_out"]


def _at_least(least: int) -> Callable[[Any, Attribute[int], Any], None]:
    def validate(config: Any, attribute: Attribute[int], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{attribute.name} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{attribute.name} must be at least {least}, got {value}")

    return validate


def _hashable(config: Any, attribute: Attribute[Any], value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{attribute.name} must be a hashable name, got {value!r}") from None


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"matrices must be a sequence of names, got {names!r}")
    given = tuple(names)
    if not all(isinstance(name, str) for name in given):
        raise TypeError(f"matrices must be names, got {given!r}")
    if len(set(given)) != len(given):
        raise ValueError(f"matrices must be named once each, got {given!r}")
    return tuple(sorted(given))


def _destinations(destinations: Iterable[Destination]) -> tuple[Destination, ...]:
    given = tuple(destinations) if isinstance(destinations, Iterable) else (destinations,)
    if not all(isinstance(destination, Destination) for destination in given):
        raise TypeError(f"destinations must be Destination objects, got {given!r}")
    return given


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
        TypeError, ValueError: A count is not a positive integer, a matrix is named twice, or a
            name cannot be one.

    >>> StageConfig(0, microbatches=2, slots=1, matrices=("qkv", "fc1")).matrices
    ('fc1', 'qkv')
    >>> StageConfig(0, microbatches=0, slots=1)
    Traceback (most recent call last):
    ...
    ValueError: microbatches must be at least 1, got 0
    """

    stage: int = field(validator=_at_least(0))
    microbatches: int = field(validator=_at_least(1))
    slots: int = field(validator=_at_least(1))
    domain: Hashable = field(default=0, validator=_hashable)
    blocks: int = field(default=1, validator=_at_least(1))
    invocations: int = field(default=1, validator=_at_least(1))
    matrices: tuple[str, ...] = field(default=(), converter=_names)
    destinations: tuple[Destination, ...] = field(default=(), converter=_destinations)
    sends_output: bool = False
    sends_gradient: bool = False
    reduces: bool = False
    pool: Hashable | None = field(default=None, validator=_hashable)

    def cells(self) -> tuple[Cell, ...]:
        """
        Every key of the stage without its epoch, in microbatch order.

        >>> StageConfig(3, microbatches=2, slots=1).cells()
        ((3, 0, 0, 0), (3, 1, 0, 0))
        """
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
        TypeError, ValueError: A stage is configured twice, a declared order is not a permutation,
            or what is configured needs a relation that was left out.
        Refused: Destinations overlap, or a matrix of a microbatch has none or two.
    """
    for config in stages:
        if not isinstance(config, StageConfig):
            raise TypeError(f"stages must be StageConfig objects, got {config!r}")
    _require_relations(stages, functions, declared or {})
    if isinstance(callers, str) or len(set(callers)) != len(callers) or not callers:
        raise ValueError(f"callers must be different names, at least one, got {callers!r}")
    if not isinstance(generation_max, int) or not 0 <= generation_max <= GENERATION_MAX:
        raise ValueError(
            f"generation_max must be a non-negative integer of at most {GENERATION_MAX}, "
            f"got {generation_max!r}"
        )
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
    members = {
        name: [cell for c in stages if c.domain == name for cell in c.cells()] for name in domains
    }
    forward_at, dgrad_at, has_order = _positions(cells, domains, members, declared or {})
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


def _require_relations(
    stages: Sequence[StageConfig],
    functions: Transitions,
    declared: Mapping[Hashable, Sequence[tuple[str, Cell]]],
) -> None:
    """Refuse a configuration that a left-out relation would silently ignore."""
    asked = {
        "order": ("a declared order", bool(declared)),
        "arena": ("destinations", any(config.destinations for config in stages)),
        "capture": ("a shared pool", any(config.pool is not None for config in stages)),
        "reduction": ("reduces=True", any(config.reduces for config in stages)),
    }
    for relation, (what, given) in asked.items():
        if given and relation not in functions.relations:
            raise ValueError(f"{what} is configured but the relation {relation!r} is left out")


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
    order = []
    for graph in capture_order:
        match graph:
            case (stage, int(local), "F" | "dI" | "dW" as kind) if (
                0 <= local < len(slots.get(stage, ()))
            ):
                order.append((slots[stage][local], kind))
            case _:
                raise ValueError(
                    f"the capture order names {graph!r}; expected (stage, local slot, F | dI | dW)"
                )
    if not order:
        order = [(slot, kind) for kind in ("F", "dI", "dW") for slot in range(len(pools))]
    if len(order) != 3 * len(pools) or len(set(order)) != len(order):
        raise ValueError(
            f"the capture order must name F, dI and dW of all {len(pools)} slots once, "
            f"got {len(order)} graphs"
        )
    return pools, {graph: rank for rank, graph in enumerate(order)}


def _positions(
    cells: Sequence[Cell],
    domains: Mapping[Hashable, int],
    members: Mapping[Hashable, Sequence[Cell]],
    declared: Mapping[Hashable, Sequence[tuple[str, Cell]]],
) -> tuple[dict[Cell, int], dict[Cell, int], list[int]]:
    """Return the declared position of each cell's F and dI, and which domains declare any."""
    positions = {"F": dict.fromkeys(cells, -1), "dI": dict.fromkeys(cells, -1)}
    has_order = [0] * len(domains)
    for name, sequence in declared.items():
        if name not in domains:
            raise ValueError(f"an order is declared for domain {name!r}; there are {[*domains]}")
        wanted = {(kind, cell) for cell in members[name] for kind in ("F", "dI")}
        given = Counter(tuple(action) for action in sequence)
        for action in (*given, *wanted):
            if given[action] != 1 or action not in wanted:
                raise ValueError(
                    f"the declared order of domain {name!r} names {action!r} {given[action]} "
                    f"times; expected each of its {len(wanted)} (F | dI, cell) pairs once"
                )
        has_order[domains[name]] = 1
        for position, (kind, cell) in enumerate(sequence):
            positions[kind][cell] = position
    return positions["F"], positions["dI"], has_order

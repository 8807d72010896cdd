"""
The layout of a process: the memory that holds the contract's state, and each configured name's
index in this memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from attrs import frozen

from .destinations import Destination, require_disjoint
from .engine.concrete_memory import Memory
from .engine.stage import Transitions
from .keys import Cell
from .local_edges import local_edges, require_edges_kept
from .order_search import SlotPlaces, require_feasible
from .refusals import refused
from .relations.constants import GENERATION_MAX, NO_RANK
from .sharing import share_destinations, written_once
from .stage_config import StageConfig
from .text import shown

__all__ = [
    "GRAPHS",
    "REFRESH",
    "Graph",
    "ProcessLayout",
    "default_capture_order",
    "lay_out",
    "share_buckets",
]


@frozen
class ProcessLayout:
    """
    The state of a process's contract, and the index (0, 1, ...) of each configured name.

    Args:
        memory: The contract's state, with its initial values.
        slots: For each stage, the indices of its slots (sets of buffers).
        domains: For each state domain's name, its index.
        links: For each (caller, domain name), the index of the link between their two streams.
        cells: Every configured cell (a key without its epoch), in the order of the stages.
        buckets: For each bucket's name (gradients reduced together), its index; in the order of the
            stages.
    """

    memory: Memory
    slots: Mapping[int, tuple[int, ...]]
    domains: Mapping[Hashable, int]
    links: Mapping[tuple[Hashable, Hashable], int]
    cells: Collection[Cell]
    buckets: Mapping[int | str, int]


#: Kinds of captured graph of a slot, in the order in which a slot's graphs are replayed.
GRAPHS: Final = ("F", "dI", "dW")
#: Kind of the captured graph of a stage's refresh.
REFRESH: Final = "refresh"
#: A captured graph: (stage, local slot, "F" | "dI" | "dW"), or (stage, "refresh").
Graph: TypeAlias = tuple[int, int, str] | tuple[int, str]


def lay_out(
    stages: Sequence[StageConfig],
    functions: Transitions,
    *,
    callers: Sequence[Hashable] = ("main",),
    capture_order: Iterable[Graph] = (),
    declared: Mapping[Hashable, Sequence[tuple[str, Cell]]] | None = None,
    reductions: Sequence[int | str] = (),
    generation_max: int = GENERATION_MAX,
) -> ProcessLayout:
    """
    Build the contract's state for a process, and the index of each configured name.

    Args:
        stages: The stages of the process; each index once.
        functions: The composed transitions (functions that check and change the memory).
        callers: Names of the callers' CUDA streams, which enqueue work for the graph streams.
        capture_order: (stage, local slot, "F" | "dI" | "dW") of every captured graph of a slot, and
            (stage, "refresh") of every stage with a ``refresh_pool``, in the order of capture;
            needed only if slots share a capture-memory pool. The default order is: these refreshes,
            all F, all dI, all dW; each stage by stage and slot by slot.
        declared: For a state domain, the order of its F and dI within an epoch, as ("F" | "dI",
            cell) pairs; a cell is a key without its epoch. Any other order is then refused.
        reductions: Names of all buckets in the order in which every replica starts their
            reductions. Any other order is then refused.
        generation_max: The last generation (count of releases) that a slot may reach.

    Raises:
        TypeError, ValueError: A stage is configured twice; a declared order does not name each F
            and dI once, or cannot run with the slots and pools; the configuration needs a relation
            (group of guards) that was left out; or stages feed each other in a way that cannot run.
        Refused: A declared order contradicts an edge (one stage feeds another); destinations
            overlap; two matrices share a destination without being declared tied; or a matrix of a
            microbatch has no destination or two destinations.
    """
    for config in stages:
        if not isinstance(config, StageConfig):
            raise TypeError(f"stages must be StageConfig objects, got {shown(config)}")
    _require_relations(stages, functions, declared or {})
    try:
        different = not isinstance(callers, str) and len(set(callers)) == len(callers) > 0
    except TypeError:
        different = False  # a name that is not hashable
    if not different:
        raise ValueError(f"callers must be one or more different names, got {shown(callers)}")
    if generation_max.__class__ is not int or not 0 <= generation_max <= GENERATION_MAX:
        raise ValueError(
            f"generation_max must be a non-negative integer of at most {GENERATION_MAX}, "
            f"got {shown(generation_max)}"
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
    slot_stage = [c.stage for c in stages for _ in range(c.slots)]
    # One object for each number: a large pool has many columns with the same numbers.
    numbers = list(range(3 * len(slot_stage) + len(stages)))
    slots: dict[int, tuple[int, ...]] = {}
    first = 0
    for config in stages:
        slots[config.stage] = tuple(numbers[first : first + config.slots])
        first += config.slots
    pools, ranks, refreshes = _pools(stages, slots, capture_order, numbers)
    cells = [cell for config in stages for cell in config.cells()]
    sharers = share_destinations(stages)
    edges = local_edges(stages)
    inputs = edges.inputs(cells)
    destination_of, buffer_of, buffers = placements(stages)
    shared_of = shared_buffers(stages, sharers, buffer_of, buffers)
    members = {
        name: [cell for c in stages if c.domain == name for cell in c.cells()] for name in domains
    }
    forward_at, dgrad_at, has_order = _positions(cells, domains, members, declared or {})
    bucket_stages = share_buckets(stages)
    buckets_of = {name: b for b, name in enumerate(bucket_stages)}
    for name, order in (declared or {}).items():
        require_edges_kept(name, [(kind, cell) for kind, cell in order], edges)
        alone = "capture" not in functions.relations
        places = SlotPlaces(slots, range(len(pools)) if alone else pools, _ranks(ranks, alone))
        require_feasible(name, [(kind, cell) for kind, cell in order], places)
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
            "buffer": len(shared_of),
            "bucket": len(bucket_stages),
        },
        {
            "generation_max": [generation_max],
            "slot_stage": slot_stage,
            "domain_of": by_stage({c.stage: domains[c.domain] for c in stages}),
            "domain_at": [domains[name] for _, name in links],
            "caller_at": [callers.index(caller) for caller, _ in links],
            "owes": by_stage({c.stage: c.consumers() for c in stages}),
            "receives": by_stage({c.stage: c.messages() | edges.needs(c.stage) for c in stages}),
            "matrices": by_stage({c.stage: c.matrices for c in stages}),
            "cells": by_stage({c.stage: len(c.cells()) for c in stages}),
            "target_of": by_stage(edges.targets),
            "input_of": inputs,
            # Never written, so without an edge one object can serve as both columns.
            "gradient_of": edges.gradients(cells) if edges.sources != edges.targets else inputs,
            "declared": has_order,
            "epoch_scales": _epoch_scales(stages, domains),
            "forward_at": forward_at,
            "dgrad_at": dgrad_at,
            "destination_of": destination_of,
            "buffer_of": buffer_of,
            "keeper_of": _keepers(buffer_of, len(shared_of), cells),
            "shared_of": shared_of,
            "sharer_of": by_stage(sharers),
            "pool_of": pools,
            "forward_rank": ranks["F"],
            "dgrad_rank": ranks["dI"],
            "wgrad_rank": ranks["dW"],
            "refresh_pool": by_stage({s: pool for s, (pool, _) in refreshes.items()}),
            "refresh_rank": by_stage({s: rank for s, (_, rank) in refreshes.items()}),
            "reports_fills": by_stage({c.stage: int(c.reports_fills) for c in stages}),
            "reports_updates": by_stage({c.stage: int(c.reports_updates) for c in stages}),
            "live_scales": by_stage({c.stage: int(c.tape_scales == "live") for c in stages}),
            "carried_scales": by_stage({c.stage: int(c.tape_scales == "carried") for c in stages}),
            "reports_draws": by_stage({c.stage: int(c.reports_draws) for c in stages}),
            "recomputes_draws": by_stage({c.stage: int(c.recomputes_draws) for c in stages}),
            "reports_weights": by_stage({c.stage: int(c.weights_sum is not None) for c in stages}),
            "stage_at": [first for first, _ in bucket_stages.values()],
            "tied_at": [last for _, last in bucket_stages.values()],
            "reduce_at": _reduce_at(bucket_stages, reductions),
            "ordered": [int(bool(reductions))],
        },
    )
    return ProcessLayout(memory, slots, domains, links, memory.buffer_of.keys(), buckets_of)


def _keepers(buffer_of: Mapping[Cell, int], buffers: int, cells: Sequence[Cell]) -> list[Cell]:
    """Return the first cell that writes each buffer; any cell for a buffer that no cell owns."""
    first: dict[int, Cell] = {}
    for cell in cells:
        first.setdefault(buffer_of[cell], cell)
    return [first.get(buffer, cells[0]) for buffer in range(buffers)]


def _epoch_scales(stages: Sequence[StageConfig], domains: Mapping[Hashable, int]) -> list[int]:
    """
    Return, for each domain, 1 if its scales move once an epoch.

    Raises:
        ValueError: Two stages of a domain have different values of ``scales``.
    """
    forms: dict[Hashable, StageConfig] = {}
    for config in stages:
        first = forms.setdefault(config.domain, config)
        if first.scales != config.scales:
            raise ValueError(
                f"stage {config.stage} has scales={config.scales!r}, but stage {first.stage} of "
                f"the same domain {config.domain!r} has scales={first.scales!r}; all scales "
                "of a domain are updated together, so give its stages the same value"
            )
    return [int(forms[name].scales == "epoch") for name in domains]


def share_buckets(stages: Sequence[StageConfig]) -> dict[int | str, tuple[int, int]]:
    """
    Return, for each bucket (gradients that are reduced together), the two stages that write the
    bucket; a single stage appears twice.

    Raises:
        ValueError: More than two stages share a bucket, or the two stages are of different domains,
            or only one of the two names the bucket in `buckets` (the other uses the name by
            default).

    >>> share_buckets([StageConfig(4, microbatches=1, slots=1, reduces=True)])
    {4: (4, 4)}
    """
    found: dict[int | str, list[StageConfig]] = {}
    for config in stages:
        for bucket in config.reductions():
            found.setdefault(bucket.name, []).append(config)
    for name, sharing in found.items():
        indices = [config.stage for config in sharing]
        if len(sharing) > 2:
            raise ValueError(
                f"bucket {name!r} is shared by the stages {indices}; at most two stages may share "
                "a bucket"
            )
        if len({config.domain for config in sharing}) > 1:
            raise ValueError(
                f"bucket {name!r} is shared by the stages {indices}, whose state domains differ; "
                "name one bucket per stage, or give both stages the same domain"
            )
        if len(sharing) > 1 and not all(config.buckets for config in sharing):
            raise ValueError(
                f"stages {indices} share bucket {name!r}, but only one names it explicitly; name "
                "the buckets of both stages"
            )
    return {name: (group[0].stage, group[-1].stage) for name, group in found.items()}


def _reduce_at(
    buckets: Mapping[int | str, tuple[int, int]], reductions: Sequence[int | str]
) -> list[int]:
    """Return the declared position of each bucket's reduction; -1 if no order is declared."""
    at = {name: place for place, name in enumerate(reductions)}
    if reductions and (len(at) != len(reductions) or at.keys() != buckets.keys()):
        raise ValueError(
            f"reductions must name every bucket once: expected {[*buckets]} in some order, got "
            f"{[*reductions]}"
        )
    return [at.get(name, -1) for name in buckets]


def _require_relations(
    stages: Sequence[StageConfig],
    functions: Transitions,
    declared: Mapping[Hashable, Sequence[tuple[str, Cell]]],
) -> None:
    """Reject a configuration that needs a relation that was left out."""
    asked = [
        ("version", "reports_fills=True", any(config.reports_fills for config in stages)),
        ("order", "a declared order", bool(declared)),
        ("order", "reports_updates=True", any(config.reports_updates for config in stages)),
        ("order", "scales='epoch'", any(config.scales == "epoch" for config in stages)),
        ("order", "tape_scales", any(config.tape_scales for config in stages)),
        ("order", "reports_draws=True", any(config.reports_draws for config in stages)),
        ("arena", "destinations", any(config.destinations for config in stages)),
        ("arena", "tied", any(config.tied for config in stages)),
        ("capture", "a shared pool", any(config.pool is not None for config in stages)),
        ("version", "refresh_pool", any(config.refresh_pool is not None for config in stages)),
        ("completion", "copies_input=True", any(config.copies_input for config in stages)),
        ("reduction", "reduces=True", any(config.reduces for config in stages)),
    ]
    for relation, what, given in asked:
        if given and relation not in functions.relations:
            raise ValueError(
                f"{what} needs the relation {relation!r}, which is left out; remove {relation!r} "
                f"from omit, or remove {what}"
            )


def default_capture_order(stages: Sequence[StageConfig]) -> tuple[Graph, ...]:
    """
    Return the default order in which the graphs of a shared memory pool are captured.

    >>> default_capture_order([StageConfig(3, microbatches=1, slots=1, pool="p", refresh_pool="p")])
    ((3, 'refresh'), (3, 0, 'F'), (3, 0, 'dI'), (3, 0, 'dW'))
    """
    local = [(config.stage, i) for config in stages for i in range(config.slots)]
    refreshes = [(c.stage, REFRESH) for c in stages if c.refresh_pool is not None]
    return (*refreshes, *((*slot, kind) for kind in GRAPHS for slot in local))


def _pools(
    stages: Sequence[StageConfig],
    slots: Mapping[int, tuple[int, ...]],
    capture_order: Iterable[Graph],
    numbers: Sequence[int],
) -> tuple[list[int], dict[str, list[int]], dict[int, tuple[int, int]]]:
    """
    Return the pool of each slot, and by kind of graph the capture rank of each slot; then, for each
    stage, the pool and the capture rank of its refresh.
    """
    names: dict[Hashable, int] = {}
    owner: dict[Hashable, StageConfig] = {}
    pools: list[int] = []
    for config in stages:
        for slot in slots[config.stage]:
            name: Hashable = ("slot", slot) if config.pool is None else ("pool", config.pool)
            _require_one_domain(owner.setdefault(name, config), config, config.pool)
            pools.append(names.setdefault(name, numbers[len(names)]))
    refreshing = [config.stage for config in stages if config.refresh_pool is not None]
    order: list[tuple[int, str]] = []
    for graph in tuple(capture_order) or default_capture_order(stages):
        match graph:
            case (stage, int(local), "F" | "dI" | "dW" as kind) if (
                0 <= local < len(slots.get(stage, ()))
            ):
                order.append((slots[stage][local], kind))
            case (int(stage), "refresh") if stage in refreshing:
                order.append((stage, REFRESH))
            case _:
                raise ValueError(
                    f"capture_order has {graph!r}; expected (stage, local slot, F | dI | dW)"
                    + " or (stage, 'refresh') of a stage with a refresh_pool" * bool(refreshing)
                )
    if len(order) != 3 * len(pools) + len(refreshing) or len(set(order)) != len(order):
        also = f", and the refresh of stages {refreshing}" if refreshing else ""
        raise ValueError(
            f"capture_order must name F, dI and dW of all {len(pools)} slots once{also}, "
            f"got {len(order)} graphs"
        )
    place = dict(zip(order, numbers, strict=False))
    ranks = {kind: [place[slot, kind] for slot in range(len(pools))] for kind in GRAPHS}
    refreshes = {}
    for config in stages:
        pool, rank = pools[slots[config.stage][0]], NO_RANK
        if config.refresh_pool is not None:
            name = ("pool", config.refresh_pool)
            if name not in names:
                raise ValueError(
                    f"stage {config.stage} names refresh_pool {config.refresh_pool!r}, but no "
                    "stage has that pool; name a stage's pool, or leave out refresh_pool if no "
                    "slot shares it"
                )
            _require_one_domain(owner[name], config, config.refresh_pool)
            pool, rank = names[name], place[config.stage, REFRESH]
        refreshes[config.stage] = pool, rank
    return pools, ranks, refreshes


def _require_one_domain(one: StageConfig, other: StageConfig, pool: Hashable) -> None:
    """Require that two stages that share a capture pool share a state domain."""
    if one.domain != other.domain:
        raise ValueError(
            f"pool {pool!r} is shared by the state domains {one.domain!r} and {other.domain!r}; "
            "give each domain its own pool"
        )


def _ranks(ranks: Mapping[str, Sequence[int]], alone: bool) -> Mapping[str, Sequence[int]]:
    """Return the capture ranks; if the relation capture is omitted, ranks that block no replay."""
    if not alone:
        return ranks
    return {kind: [rank] * len(ranks[kind]) for rank, kind in enumerate(GRAPHS)}


def _positions(
    cells: Sequence[Cell],
    domains: Mapping[Hashable, int],
    members: Mapping[Hashable, Sequence[Cell]],
    declared: Mapping[Hashable, Sequence[tuple[str, Cell]]],
) -> tuple[dict[Cell, int], dict[Cell, int], list[int]]:
    """Return the declared position of each cell's F and dI, and which domains declare an order."""
    has_order = [0] * len(domains)
    nowhere = dict.fromkeys(cells, -1)
    if not declared:  # both are configured and never written, so that one object serves as both
        return nowhere, nowhere, has_order
    positions = {"F": nowhere, "dI": nowhere.copy()}
    for name, sequence in declared.items():
        if name not in domains:
            raise ValueError(
                f"declared names domain {name!r}, which no stage has; expected one of {[*domains]}"
            )
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


def require_layout(config: StageConfig) -> None:
    """
    Refuse gradient destinations that do not give every matrix of every microbatch exactly one
    buffer.

    Raises:
        Refused: ``arena.duplicate-destination``, ``arena.missing-destination`` or
            ``arena.unknown-matrix``.
        ValueError: Accumulating and per-microbatch destinations are mixed.
    """
    modes = {d.microbatch is None for d in config.destinations}
    if len(modes) > 1:
        raise ValueError(
            f"stage {config.stage} mixes accumulating and per-microbatch destinations; use one kind"
        )
    counts = Counter((d.matrix, d.microbatch) for d in config.destinations)
    for (matrix, microbatch), count in counts.items():
        if matrix not in config.matrices:
            raise refused(
                "arena.unknown-matrix",
                "configure",
                f"{matrix!r}",
                f"one of {', '.join(config.matrices)}",
            )
        if count > 1 or (microbatch is not None and (matrix, None) in counts):
            raise refused(
                "arena.duplicate-destination",
                "configure",
                f"{count} destinations for {matrix!r} microbatch {microbatch}",
                "exactly one",
            )
    for matrix in config.matrices:
        for microbatch in range(config.microbatches):
            if not {(matrix, microbatch), (matrix, None)} & counts.keys():
                raise refused(
                    "arena.missing-destination",
                    "configure",
                    f"no destination for {matrix!r} microbatch {microbatch}",
                    "exactly one",
                )


def placements(
    stages: Sequence[StageConfig],
) -> tuple[dict[Cell, tuple[Destination, ...]], dict[Cell, int], int]:
    """
    Return the destinations of each cell (a key without its epoch), the index of their buffer, and
    the number of buffers.

    A buffer is a set of destinations that are written together: one per stage if they accumulate,
    otherwise one per microbatch. All blocks and invocations of a microbatch share a buffer; the
    first dW that writes the buffer overwrites its content.
    """
    destination_of: dict[Cell, tuple[Destination, ...]] = {}
    buffer_of: dict[Cell, int] = {}
    buffers = 0
    for config in stages:
        if config.destinations:
            require_layout(config)
        given = config.destinations or tuple(Destination(matrix) for matrix in config.matrices)
        by_microbatch: dict[int | None, list[Destination]] = {}
        for destination in sorted(given, key=lambda d: d.matrix):
            by_microbatch.setdefault(destination.microbatch, []).append(destination)
        shared = None in by_microbatch or not by_microbatch
        names: Iterable[int | None] = (None,) if shared else range(config.microbatches)
        own = {m: (tuple(by_microbatch.get(m, ())), buffers + i) for i, m in enumerate(names)}
        buffers += len(own)
        for cell in config.cells():
            destination_of[cell], buffer_of[cell] = own[None if shared else cell[1]]
    require_disjoint(written_once(stages))
    return destination_of, buffer_of, buffers


def shared_buffers(
    stages: Sequence[StageConfig],
    sharers: Mapping[int, int],
    buffer_of: Mapping[Cell, int],
    buffers: int,
) -> list[int]:
    """
    Return, for each buffer of a stage, the buffer that the stage shares with another stage.

    Two sharing stages have one shared buffer, or one per microbatch. Shared buffers are numbered
    after all others. A shared buffer maps to itself, as does the buffer of a stage that shares
    nothing.
    """
    shared_of = list(range(buffers))
    known: dict[tuple[int, int | None], int] = {}
    for config in stages:
        per_microbatch = bool(config.destinations) and config.destinations[0].microbatch is not None
        for cell in config.cells():
            if sharers[config.stage] != config.stage:
                pair = min(config.stage, sharers[config.stage]), cell[1] if per_microbatch else None
                shared_of[buffer_of[cell]] = known.setdefault(pair, buffers + len(known))
    return [*shared_of, *known.values()]

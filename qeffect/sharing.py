"""
Tied weights: two matrices that write the same gradient destination, and are both declared tied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from attrs import evolve

from .destinations import Destination
from .refusals import refused
from .stage_config import StageConfig

__all__ = ["require_tied_ranks", "share_destinations", "written_once"]

#: A matrix that writes a named destination: its stage and its name.
Writer = tuple[StageConfig, str]


def share_destinations(stages: Sequence[StageConfig]) -> dict[int, int]:
    """
    Return, for each stage, the stage that shares its tied destinations, or the stage itself if no
    stage does.

    Raises:
        Refused: ``arena.overlapping-destinations``: two matrices name one destination without
            both being declared tied.
        ValueError: More than two stages share a destination; the two stages have different state
            domains, numbers of microbatches, buckets or descriptions of the destination; or a tied
            matrix has neither a partner in this process nor a bucket.

    >>> tied = {"microbatches": 1, "slots": 1, "tied": ("w",), "buffers": {"w": "table"}}
    >>> stages = [StageConfig(s, matrices=("w",), **tied) for s in (0, 3)]
    >>> share_destinations([*stages, StageConfig(1, microbatches=1, slots=1)])
    {0: 3, 3: 0, 1: 1}
    """
    sharers = {config.stage: config.stage for config in stages}
    for name, writers in _by_name(stages).items():
        _require_declared(name, writers)
        _require_alike(name, writers)
        _require_one_bucket(name, writers)
        own = {config.stage: config for config, _ in writers}
        if len(own) == 1:
            if len(writers) == 1 and writers[0][1] in writers[0][0].tied:
                _require_way_out(name, *writers[0])
            continue
        for stage, config in own.items():
            others = {other for other in (*own, sharers[stage]) if other != stage}
            if len(others) > 1:
                raise ValueError(
                    f"stage {stage} shares destinations with the stages {sorted(others)}; expected "
                    "at most one stage"
                )
            (sharers[stage],) = others
            partner = own[sharers[stage]]
            for what in ("domain", "microbatches"):
                if getattr(config, what) != getattr(partner, what):
                    raise ValueError(
                        f"the stages {sorted(own)} share the destination {name!r} and differ in "
                        f"{what}: {getattr(config, what)!r} and {getattr(partner, what)!r}"
                    )
    return sharers


def written_once(stages: Sequence[StageConfig]) -> Iterable[Destination]:
    """Yield every gradient destination of a process once, even if two tied matrices write it."""
    seen: set[tuple[str, int | None]] = set()
    for config in stages:
        named = dict(config.buffers)
        for destination in config.destinations:
            name = named.get(destination.matrix)
            if name is not None:
                if (name, destination.microbatch) in seen:
                    continue
                seen.add((name, destination.microbatch))
            yield destination


def require_tied_ranks(ranks: Sequence[Sequence[StageConfig]]) -> dict[str, tuple[int, ...]]:
    """
    Require that weights tied across ranks are reduced together, and return their ranks.

    Each rank has a copy of such a weight and of its gradient. A rank's contract only sees that the
    rank's own copy is reduced in a bucket (gradients that are reduced together), and does not see
    the other ranks' copies. So this function compares the configurations of all ranks once, before
    the first step. Every copy must be declared tied under the same name, and must be reduced in a
    bucket of the same name.

    Args:
        ranks: The stages of each rank of a pipeline.

    Returns:
        For each tied destination's name, the ranks that have a copy.

    Raises:
        Refused: ``arena.overlapping-destinations``: a copy is not declared tied.
        ValueError: A tied weight has only one copy on all ranks together, or its copies are reduced
            in different buckets.

    >>> from qeffect.stage_config import Bucket
    >>> tied = {"microbatches": 1, "slots": 1, "tied": ("w",), "buffers": {"w": "table"}}
    >>> tied |= {"reduces": True, "buckets": (Bucket("tied", ("w",)),)}
    >>> require_tied_ranks([[StageConfig(s, matrices=("w",), **tied)] for s in (0, 3)])
    {'table': (0, 1)}
    """
    found: dict[str, tuple[int, ...]] = {}
    places = {config.stage: rank for rank, stages in enumerate(ranks) for config in stages}
    for name, writers in _by_name([config for stages in ranks for config in stages]).items():
        _require_declared(name, writers)
        holders = tuple(sorted({places[config.stage] for config, _ in writers}))
        if len(writers) == 1 and writers[0][1] in writers[0][0].tied:
            raise ValueError(
                f"{_who(*writers[0])} is declared tied as {name!r}, but no other matrix of any "
                "rank is"
            )
        if len(holders) > 1:
            for writer in writers:
                _require_way_out(name, *writer)
            _require_one_bucket(name, writers)
        if len(writers) > 1:
            found[name] = holders
    return found


def _by_name(stages: Iterable[StageConfig]) -> dict[str, list[Writer]]:
    """Return, for each named destination, the matrices that write it."""
    found: dict[str, list[Writer]] = {}
    for config in stages:
        for matrix, name in config.buffers:
            found.setdefault(name, []).append((config, matrix))
    return found


def _require_declared(name: str, writers: Sequence[Writer]) -> None:
    undeclared = [writer for writer in writers if writer[1] not in writer[0].tied]
    if len(writers) > 1 and undeclared:
        other = next(writer for writer in writers if writer is not undeclared[0])
        raise refused(
            "arena.overlapping-destinations",
            "configure",
            f"{_who(*undeclared[0])}, not declared tied, in {name!r}, which {_who(*other)} also "
            "writes",
            "a destination of its own, or both matrices declared tied",
        )


def _require_alike(name: str, writers: Sequence[Writer]) -> None:
    """Require that all matrices that write a destination describe it in the same way."""
    first = _described(*writers[0])
    for writer in writers[1:]:
        if _described(*writer) != first:
            raise ValueError(
                f"{_who(*writers[0])} and {_who(*writer)} are tied as {name!r}, but their "
                "destinations differ; they must have the same microbatch, shape, dtype, device, "
                "address and length"
            )


def _described(config: StageConfig, matrix: str) -> dict[int | None, Destination]:
    given = config.destinations or (Destination(matrix),)
    return {d.microbatch: evolve(d, matrix="") for d in given if d.matrix == matrix}


def _require_one_bucket(name: str, writers: Sequence[Writer]) -> None:
    """Require that all matrices that write a destination are reduced in the same bucket."""
    buckets = {_bucket(*writer) for writer in writers}
    if len(buckets) > 1:
        listed = ", ".join(f"{_who(*writer)} in {_named(_bucket(*writer))}" for writer in writers)
        raise ValueError(
            f"matrices that are tied as {name!r} must be reduced in one bucket, got {listed}"
        )


def _require_way_out(name: str, config: StageConfig, matrix: str) -> None:
    """Require a named bucket for a tied weight whose partner is on another rank."""
    if not config.buckets:
        raise ValueError(
            f"{_who(config, matrix)} is tied as {name!r}, but to no other matrix of this process; "
            "its gradient must be reduced in a bucket that both ranks name: set reduces and buckets"
        )


def _bucket(config: StageConfig, matrix: str) -> Hashable:
    """Return the bucket of a matrix's gradient; None if the gradient is not reduced."""
    return next((b.name for b in config.reductions() if matrix in b.matrices), None)


def _named(bucket: Hashable) -> str:
    return "no bucket" if bucket is None else f"bucket {bucket!r}"


def _who(config: StageConfig, matrix: str) -> str:
    return f"{matrix!r} of stage {config.stage}"

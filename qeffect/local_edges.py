"""
Edges within a process: stages whose output is the input of another stage of the same process.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from .keys import Cell
from .refusals import refused
from .relations.constants import SOURCE_BIT, TARGET_BIT
from .stage_config import StageConfig

__all__ = ["LocalEdges", "local_edges", "require_edges_kept"]


class LocalEdges(NamedTuple):
    """
    For each stage, the stage of the process that feeds it, and the stage that it feeds.

    Args:
        sources: For each stage, the stage that feeds it (its output is the stage's input); the
            stage itself if no stage feeds it.
        targets: For each stage, the stage that it feeds; the stage itself if it feeds no stage.
    """

    sources: Mapping[int, int]
    targets: Mapping[int, int]

    def needs(self, stage: int) -> int:
        """
        Return, as a bit mask, whether the input of a stage's F, and the gradient for its dI, come
        from stages of this process.
        """
        fed, feeds = self.sources[stage] != stage, self.targets[stage] != stage
        return (SOURCE_BIT if fed else 0) | (TARGET_BIT if feeds else 0)

    def inputs(self, cells: Sequence[Cell]) -> dict[Cell, Cell]:
        """
        Return, for each cell (a key without its epoch), the cell whose F makes its input; or the
        cell itself if no such F exists.
        """
        return _joined(cells, self.sources)

    def gradients(self, cells: Sequence[Cell]) -> dict[Cell, Cell]:
        """
        Return, for each cell (a key without its epoch), the cell whose dI makes the gradient of its
        output; or the cell itself if no such dI exists.
        """
        return _joined(cells, self.targets)


def _joined(cells: Sequence[Cell], stages: Mapping[int, int]) -> dict[Cell, Cell]:
    """Return, for each cell, the same cell of the stage at the other end of the edge, or itself."""
    return {
        cell: cell if stages[cell[0]] == cell[0] else (stages[cell[0]], *cell[1:]) for cell in cells
    }


def local_edges(stages: Sequence[StageConfig]) -> LocalEdges:
    """
    Return the edges that the stages of a process declare.

    Raises:
        ValueError: A stage feeds itself or a stage of another process; two stages feed the same
            stage; the edges form a cycle; the two stages of an edge have different numbers of
            microbatches, or several blocks or invocations; the fed stage has ``copies_input``; one
            stage receives a message that the other stage does not send; or two stages of different
            state domains (with separate FP8 scaling state) exchange no messages.

    >>> stages = [StageConfig(0, 1, 1, feeds=3), StageConfig(3, 1, 1)]
    >>> local_edges(stages)
    LocalEdges(sources={0: 0, 3: 0}, targets={0: 3, 3: 3})
    """
    own = {config.stage: config for config in stages}
    sources = {stage: stage for stage in own}
    targets = {stage: stage for stage in own}
    for config in stages:
        if config.feeds is None:
            continue
        target = own.get(config.feeds)
        if target is None or target is config:
            raise ValueError(
                f"stage {config.stage} feeds stage {config.feeds}; expected another stage of this "
                f"process, one of {sorted(set(own) - {config.stage})}"
            )
        if sources[target.stage] != target.stage:
            raise ValueError(
                f"the stages {sources[target.stage]} and {config.stage} both feed stage "
                f"{target.stage}; at most one stage may feed it"
            )
        _require_alike(config, target)
        _require_carried(config, target)
        sources[target.stage], targets[config.stage] = config.stage, target.stage
    _require_ends(targets)
    return LocalEdges(sources, targets)


def _require_alike(source: StageConfig, target: StageConfig) -> None:
    """Require that each microbatch has exactly one tape in each stage of an edge."""
    counts = [
        (config.microbatches, config.blocks, config.invocations) for config in (source, target)
    ]
    if counts[0] != counts[1] or counts[0][1:] != (1, 1):
        raise ValueError(
            f"stage {source.stage} feeds stage {target.stage}: both must have the same number "
            "of microbatches, one block and one invocation; found (microbatches, blocks, "
            f"invocations) {counts[0]} and {counts[1]}"
        )


def _require_carried(source: StageConfig, target: StageConfig) -> None:
    """Require that the output and the gradient reach the other stage in a way that is guarded."""
    edge = f"stage {source.stage} feeds stage {target.stage}"
    if target.copies_input:
        raise ValueError(
            f"{edge}, which has copies_input=True; a stage gets its input in one way only"
        )
    for receives, sends, what in (
        (target.receives_input, source.sends_output, "receives_input and sends_output"),
        (source.receives_gradient, target.sends_gradient, "receives_gradient and sends_gradient"),
    ):
        if receives and not sends:
            raise ValueError(f"{edge}: a message is received but not sent; set {what}")
        if not receives and source.domain != target.domain:
            raise ValueError(
                f"{edge} in another state domain, so on another graph stream; the two stages "
                f"must exchange messages: set {what}"
            )


def _require_ends(targets: Mapping[int, int]) -> None:
    """Require that no stage feeds itself through others."""
    for first in targets:
        stage, met = first, {first}
        while targets[stage] != stage:
            stage = targets[stage]
            if stage in met:
                raise ValueError(f"the stages {sorted(met)} feed each other in a circle")
            met.add(stage)


def require_edges_kept(
    domain: Hashable, order: Sequence[tuple[str, Cell]], edges: LocalEdges
) -> None:
    """
    Require that a declared order follows the edges: F runs first in the feeding stage, dI first in
    the fed stage.

    Args:
        domain: Name of the state domain, for the error message.
        order: The domain's F and dI in declared order, each once per cell (a key without its
            epoch).
        edges: The edges between stages of the process.

    Raises:
        Refused: ``ownership.input-not-made`` or ``ownership.gradient-not-made``, naming the first
            action that comes too early.
    """
    done: set[tuple[str, Cell]] = set()
    here = {cell for _, cell in order}
    for kind, cell in order:
        linked = edges.sources if kind == "F" else edges.targets
        first = (linked[cell[0]], *cell[1:])
        if first != cell and first in here and (kind, first) not in done:
            clause = "input-not-made" if kind == "F" else "gradient-not-made"
            raise refused(
                f"ownership.{clause}",
                "configure",
                f"{kind} of {cell} before {kind} of {first} in the declared order of domain "
                f"{domain!r}",
                f"{kind} of {first} first: "
                + (
                    f"stage {first[0]} feeds stage {cell[0]}"
                    if kind == "F"
                    else f"stage {cell[0]} feeds stage {first[0]}"
                ),
            )
        done.add((kind, cell))

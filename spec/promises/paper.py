"""
The paper's invariants by name, each with its promises.

Section III-F of the paper numbers four invariants; the fourth is persistence. The paper's abstract
names completion as the fourth instead. Section III-D adds an invariant without a number: every
configured microbatch is written exactly once. This module has all six invariants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

__all__ = ["PAPER", "PaperInvariant"]


@frozen
class PaperInvariant:
    """
    One invariant of the paper.

    Args:
        name: Name of the invariant in this project.
        place: Place in the paper.
        title: Name of the invariant in the paper.
        says: The invariant in words.
        promises: Names of the promises that together make the invariant.
        theorems: Names of further proved theorems that belong to the invariant.
        needs: Optional parts of the contract; if one of these is left out, the contract keeps only
            part of the invariant.
    """

    name: str
    place: str
    title: str
    says: str
    promises: tuple[str, ...]
    theorems: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


_ALL = (
    PaperInvariant(
        name="token-once",
        place="III-F, Invariant 1; III-B",
        title="Temporal serialization",
        says="Each F and each dI advances its domain's effect token exactly once, and nothing "
        "else advances the token. In particular, no dW changes scaling state.",
        promises=(
            "order.token",
            "order.token-advances",
            "order.token-kept",
            "order.token-from-zero",
            "order.threaded",
            "order.sound-state",
            "ownership.forward-once",
            "ownership.dgrad-after-forward",
            "ownership.once",
        ),
        needs=("order",),
    ),
    PaperInvariant(
        name="one-live-tape",
        place="III-F, Invariant 2; III-A",
        title="Generational ownership",
        says="A key has at most one live tape. A slot holds at most one tape, and no other tape "
        "displaces a live tape. A reference finds its own key's work, or is refused.",
        promises=(
            "ownership.injective",
            "ownership.cell-names-its-slot",
            "ownership.slot-names-its-cell",
            "ownership.own-stage",
            "ownership.tenant",
            "ownership.tenant-stays",
            "ownership.never-preempted",
            "ownership.generation-rises-at-release",
            "ownership.generation-bounded",
            "ownership.right-reference",
            "ownership.right-work",
            "ownership.owing",
        ),
    ),
    PaperInvariant(
        name="cache-current-when-read",
        place="III-F, Invariant 3; III-C",
        title="Cache freshness",
        says="Whenever a quantized weight cache is read, it holds the weights of the key's epoch. "
        "The first F of an epoch comes after a refresh, or refreshes the cache itself. Later F of "
        "the epoch read the same fill of the cache.",
        promises=(
            "epoch.weights",
            "version.cache-content",
            "version.weights-of-the-key",
            "version.cache-of-the-key",
            "version.cache-for-dgrad",
            "version.one-fill",
            "version.only-stale-filled",
            "version.only-stale-filled-by-forward",
            "version.filled-just-before",
            "version.refresh-fills",
            "version.stale-after-restore",
        ),
        needs=("version", "order"),
    ),
    PaperInvariant(
        name="quiescent-persistence",
        place="III-F, Invariant 4; III-E",
        title="Quiescent persistence",
        says="A checkpoint is taken only when no tape is live and no write, reduction or device "
        "work is under way. After a restore every slot is free, every cache is stale, and every "
        "earlier reference is invalid.",
        promises=(
            "persistence.quiescent",
            "order.quiescent",
            "completion.drained",
            "reduction.quiescent",
            "persistence.restore-between-actions",
            "order.restore-between-actions",
            "persistence.slots-from-zero",
            "persistence.epoch-of-checkpoint",
            "version.stale-after-restore",
            "order.token-from-zero",
            "ownership.right-reference",
        ),
        theorems=(
            "a restore ends every reference",
            "an ended reference stays ended",
            "an ended reference is refused",
        ),
        needs=("version", "order", "completion", "reduction"),
    ),
    PaperInvariant(
        name="written-exactly-once",
        place="III-D, finalization",
        title="Every configured microbatch writes exactly once",
        says="When a stage is finalized, and when the weights change, every cell that the walk "
        "over the microbatches includes has run F, dI and dW exactly once. Each dW covered every "
        "matrix, and no other dW was writing its bound destination at the same time.",
        promises=(
            "epoch.whole",
            "epoch.not-spoiled",
            "epoch.commit",
            "ownership.once",
            "ownership.covered-whole",
            "ownership.wgrad-after-dgrad",
            "arena.bound-once",
            "arena.bound-destination",
            "arena.right-destination",
            "arena.alone",
            "arena.not-spoiled",
        ),
        needs=("arena",),
    ),
    PaperInvariant(
        name="completion",
        place="abstract, invariant 4; II-C, IV-D",
        title="Bidirectional completion",
        says="A replay comes after the work of its caller. A consumer comes after the replay that "
        "wrote the consumer's input.",
        promises=(
            "completion.replay-after-caller",
            "completion.refresh-after-caller",
            "completion.consumer-after-replay",
            "completion.gradients-after-replay",
            "completion.update-after-gradients",
            "completion.forward-after-update",
            "completion.refresh-after-update",
            "completion.drained",
        ),
        needs=("completion",),
    ),
)

#: The paper's invariants by name, in its order.
PAPER: Final[Mapping[str, PaperInvariant]] = {invariant.name: invariant for invariant in _ALL}

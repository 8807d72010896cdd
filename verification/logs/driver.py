"""
A runtime in miniature: drives a contract by stage and microbatch while its log is recorded.
"""

from __future__ import annotations

from typing import Any, Final

from qeffect import Checkpoint, Contract, Destination, StageConfig, TapeKey, TapeRef
from qeffect.guarded import Dgrad, Forward
from qeffect.log.recorder import Recorder

__all__ = ["MATRICES", "Driver", "placed"]

MATRICES: Final = ("fc1", "fc2")


class Driver:
    """
    Drives a contract and remembers the references it hands out.

    Args:
        stages: The stages.
        incarnation: The random number, pinned so that a scenario's log is always the same.
        options: Further arguments of the contract.
    """

    def __init__(self, stages: list[StageConfig], incarnation: int, **options: Any) -> None:
        self.contract = Contract(stages, **options)
        self.contract.memory.incarnation[0] = incarnation
        self.refs: dict[tuple[int, int, int], TapeRef] = {}
        self.scaled_at: dict[tuple[int, int, int], int] = {}
        self.log = Recorder(self.contract, rank=0)
        self._domains = {config.stage: config.domain for config in stages}

    def link(self, stage: int, caller: str = "main") -> int:
        """The link of a caller and the stage's graph stream."""
        return self.contract.link(caller, self._domains[stage])

    def key(self, stage: int, microbatch: int, block: int = 0) -> TapeKey:
        """The key of an execution in the current epoch."""
        return TapeKey(self.contract.epoch, stage, microbatch, block)

    def ref(self, stage: int, microbatch: int, block: int = 0) -> TapeRef:
        """The reference that the execution's forward returned."""
        return self.refs[stage, microbatch, block]

    def refresh(self, stage: int) -> None:
        """Refresh a stage's weight cache."""
        with self.contract.refresh(stage, self.link(stage)) as action:
            action.filled = self.fills(stage)

    def forward(self, stage: int, microbatch: int, block: int = 0, **options: Any) -> None:
        """Run F."""
        options.setdefault("link", self.link(stage))
        with self.contract.forward(self.key(stage, microbatch, block), **options) as action:
            self.report(stage, action)
            if options.get("refresh"):
                action.filled = self.fills(stage)
            self.scaled_at[stage, microbatch, block] = self.contract.token(stage)
        self.refs[stage, microbatch, block] = action.ref

    def dgrad(self, stage: int, microbatch: int, block: int = 0, **options: Any) -> None:
        """Run dI, after binding its destinations and waiting for what it consumes."""
        options.setdefault("link", self.link(stage))
        key = self.key(stage, microbatch, block)
        if "arena" in self.contract.transitions.relations:
            self.contract.bind(key)
        self.contract.wait(self.link(stage))
        with self.contract.dgrad(key, self.ref(stage, microbatch, block), **options) as action:
            action.queued = MATRICES
            self.report(stage, action)
            if self.config(stage).tape_scales == "carried":
                action.scales = self.scaled_at[stage, microbatch, block]

    def wgrad(self, stage: int, microbatch: int, block: int = 0, **options: Any) -> None:
        """Run dW."""
        options.setdefault("link", self.link(stage))
        key = self.key(stage, microbatch, block)
        with self.contract.wgrad(key, self.ref(stage, microbatch, block), **options) as action:
            action.covered = MATRICES

    def config(self, stage: int) -> StageConfig:
        """A stage's configuration."""
        return next(config for config in self.contract.stages if config.stage == stage)

    def report(self, stage: int, action: Forward | Dgrad) -> None:
        """Report the scaling updates of an F or dI, where the stage's backend does."""
        if self.config(stage).reports_updates:
            action.updates = 1

    def fills(self, stage: int) -> dict[str, int] | None:
        """What a refresh reports, where the stage's backend does."""
        epoch = self.contract.epoch
        return dict.fromkeys(MATRICES, epoch) if self.config(stage).reports_fills else None

    def whole(self, stage: int, microbatch: int) -> None:
        """Run F, dI and dW."""
        self.forward(stage, microbatch)
        self.dgrad(stage, microbatch)
        self.wgrad(stage, microbatch)

    def fail(self, action: Any) -> None:
        """Let a guarded action's physical work raise."""
        try:
            with action:
                raise RuntimeError("replay failed")
        except RuntimeError:
            return

    def finalize(self, stage: int) -> None:
        """Wait for a stage's gradients and finalize it."""
        self.contract.wait(self.link(stage))
        self.contract.finalize(stage, self.link(stage))

    def begin_again(self, checkpoint: Checkpoint, incarnation: int) -> None:
        """Purge, drain and restore, as after a failure."""
        self.contract.purge(self.contract.epoch)
        self.contract.drain()
        self.contract.restore(checkpoint, incarnation=incarnation)


def placed(microbatches: int | None, base: int) -> tuple[Destination, ...]:
    """Return destinations laid end to end: one per microbatch, or (None) one in all."""
    each: list[int | None] = [None] if microbatches is None else list(range(microbatches))
    return tuple(
        Destination(matrix, microbatch, (4, 8), "float32", "cuda:0", base + 128 * place, 128)
        for place, (matrix, microbatch) in enumerate((m, i) for m in MATRICES for i in each)
    )

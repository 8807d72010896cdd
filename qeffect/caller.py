"""
Drive the contract of one process: each method makes every contract call that one action needs.

The fault table and the example logs name only the action, stage and microbatch. This module then
calls the contract as a training runtime does. No device is used.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .contract import Contract
from .keys import Cell, TapeKey, TapeRef

__all__ = ["Caller"]


class Caller:
    """
    A contract, and the references of its live tapes (data that F keeps for dI and dW).

    Args:
        contract: The contract that the calls go to.

    Attributes:
        contract: The contract that the calls go to.
        refs: For each cell (a key without its epoch), the reference of its latest forward.
        scales: For each cell, the effect token (count of F and dI) that identifies the scales of
            its latest forward.
        draws: For each cell, the position of the random generator when its latest forward began.
        walks: Number of walks (passes over all microbatches) per epoch. The weights of a stage's
            gradients from all walks add up to `StageConfig.weights_sum`.

    >>> from qeffect import StageConfig
    >>> caller = Caller(Contract([StageConfig(0, microbatches=1, slots=1, matrices=("w",))]))
    >>> caller.refresh(0)
    >>> caller.whole(0, 0)
    >>> caller.finalize(0)
    >>> caller.commit()
    1
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.refs: dict[Cell, TapeRef] = {}
        self.scales: dict[Cell, int] = {}
        self.draws: dict[Cell, int] = {}
        self._drawn = 0
        self._moved: dict[Hashable, int] = {}
        self.walks = 1
        self._configs = {config.stage: config for config in self.contract.stages}

    def link(self, stage: int, caller: Hashable = "main") -> int:
        """Index of the link between a caller's stream and the stage's graph stream."""
        return self.contract.link(caller, self._configs[stage].domain)

    def key(self, stage: int, microbatch: int, block: int = 0) -> TapeKey:
        """The key of a stage, microbatch and block in the current epoch."""
        return TapeKey(self.contract.epoch, stage, microbatch, block)

    def ref(self, stage: int, microbatch: int, block: int = 0) -> TapeRef:
        """The reference that the latest forward of this stage, microbatch and block returned."""
        return self.refs[self.key(stage, microbatch, block).cell]

    def refresh(self, stage: int) -> None:
        """Refresh a stage's weight cache."""
        ticket = self.contract.check_refresh(stage, self.link(stage))
        self.contract.commit(ticket, filled=self._filled(stage))

    def forward(self, stage: int, microbatch: int, block: int = 0, **options: Any) -> None:
        """Run F; the options are those of `Contract.check_forward`."""
        options.setdefault("link", self.link(stage))
        key = self.key(stage, microbatch, block)
        ticket = self.contract.check_forward(key, **options)
        filled = self._filled(stage) if options.get("refresh") else None
        self.scales[key.cell] = self._scales(stage)
        updates, draws = self._updates(stage), self.draw(key)
        ref = self.contract.commit(ticket, filled=filled, updates=updates, draws=draws)
        assert ref is not None
        self.refs[key.cell] = ref

    def draw(self, key: TapeKey) -> int | None:
        """
        Return the random generator's position for a key's next F; None if the stage does not report
        positions.
        """
        if not self._configs[key.stage].reports_draws:
            return None
        self.draws[key.cell] = self._drawn
        self._drawn += 1
        return self.draws[key.cell]

    def dgrad(self, stage: int, microbatch: int, block: int = 0, **options: Any) -> None:
        """
        Bind the destinations, wait for the inputs of dI, run dI and report every matrix as queued.
        """
        options.setdefault("link", self.link(stage))
        key = self.key(stage, microbatch, block)
        if "arena" in self.contract.transitions.relations:
            self.contract.bind(key)
        self.contract.wait(self.link(stage))
        ticket = self.contract.check_dgrad(key, self.refs[key.cell], **options)
        config = self._configs[stage]
        scales = self.scales[key.cell] if config.tape_scales == "carried" else None
        draws = self.draws[key.cell] if config.recomputes_draws else None
        updates, weight = self._updates(stage), self.weight(stage)
        self.contract.commit(
            ticket, config.matrices, updates=updates, scales=scales, draws=draws, weight=weight
        )

    def weight(self, stage: int) -> tuple[int, int] | None:
        """
        Return the weight of one microbatch's gradient; None if the stage reports no weights.

        Every microbatch has the same weight, in each of the epoch's `walks` (passes).
        """
        config = self._configs[stage]
        if config.weights_sum is None:
            return None
        above, below = config.weights_sum
        return above, below * config.microbatches * self.walks

    def wgrad(self, stage: int, microbatch: int, block: int = 0, **options: Any) -> None:
        """Run dW and report every matrix as covered."""
        options.setdefault("link", self.link(stage))
        key = self.key(stage, microbatch, block)
        ticket = self.contract.check_wgrad(key, self.refs[key.cell], **options)
        self.contract.commit(ticket, self._configs[stage].matrices)

    def whole(self, stage: int, microbatch: int) -> None:
        """Run F, dI and dW."""
        self.forward(stage, microbatch)
        self.dgrad(stage, microbatch)
        self.wgrad(stage, microbatch)

    def finalize(self, stage: int) -> None:
        """Wait for a stage's gradients and finalize it."""
        self.contract.wait(self.link(stage))
        self.contract.finalize(stage, self.link(stage))

    def commit(self) -> int:
        """Commit the epoch; every graph stream waits for the optimizer's update."""
        moving = {c.domain: c for c in self.contract.stages[::-1] if c.scales == "epoch"}
        if moving:
            with self.contract.update() as update:
                for config in moving.values():
                    update.move_scales(config.stage, 1 if config.reports_updates else None)
                    self._moved[config.domain] = self.contract.token(config.stage)
            epoch = self.contract.epoch
        else:
            epoch = self.contract.commit_epoch()
        for link in dict.fromkeys(self.link(stage) for stage in self._configs):
            self.contract.join(link)
        return epoch

    def _scales(self, stage: int) -> int:
        """Return the effect token that identifies the scales of the next F."""
        config = self._configs[stage]
        if config.scales == "action":
            return self.contract.token(stage)
        return self._moved.get(config.domain, 0)

    def _filled(self, stage: int) -> dict[str, int] | None:
        """Return a refresh's report: each cache, filled from this epoch; None without reports."""
        config = self._configs[stage]
        return dict.fromkeys(config.matrices, self.contract.epoch) if config.reports_fills else None

    def _updates(self, stage: int) -> int | None:
        """Return the scaling updates that F and dI report: 1, or 0 if scales move once an epoch."""
        config = self._configs[stage]
        return int(config.scales == "action") if config.reports_updates else None

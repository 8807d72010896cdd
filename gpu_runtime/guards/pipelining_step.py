"""One guarded step of a `torch.distributed.pipelining` schedule, as calls of a contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from qeffect.action_blocks import Dgrad, Forward
from qeffect.contract import Contract
from qeffect.keys import TapeKey, TapeRef
from qeffect.relations.constants import GENERATION_MAX

from .pipelining_table import Event

__all__ = ["GuardedStep", "TableReductions"]

_RECEIVES = frozenset({"RECV_F", "RECV_B"})


@attrs.frozen
class TableReductions:
    """
    The reductions and awaited transfers of a table.

    Args:
        reduces: Whether the table reduces the gradients of each stage of this rank.
        awaits_sends: Whether the table awaits its sends; otherwise they end with the step.
        awaits_reductions: Whether the table awaits its reductions; otherwise they end with the
            step.
    """

    reduces: Mapping[int, bool]
    awaits_sends: bool = False
    awaits_reductions: bool = False


class GuardedStep:
    """
    The live work, messages and reductions of one step under a contract.

    Every method that calls the contract raises `Refused` if an action breaks it.

    Args:
        contract: The contract of the rank.
        reductions: The table's reductions.
    """

    def __init__(self, contract: Contract, reductions: TableReductions) -> None:
        self.contract = contract
        self.reductions = reductions
        self._refs: dict[tuple[int, int], TapeRef] = {}
        self._posted: set[Event] = set()
        self._reading: set[Event] = set()
        self._final: set[int] = set()
        self._reducing: list[int] = []

    def check(self, event: Event) -> Any:
        """Check F (`F`), dI (`I`), dW (`W`) or a full backward (`B`); return its open block."""
        kind, stage, microbatch = event
        key, work = TapeKey(self.contract.epoch, stage, microbatch), (stage, microbatch)
        block: Any
        if kind == "F":
            self._finish_receive("RECV_F", key)
            block = self.contract.forward(key)
        elif kind == "W":
            block = self.contract.wgrad(key, self._ref(work))
        else:
            self._finish_receive("RECV_B", key)
            block = self.contract.dgrad(key, self._ref(work))
        return block.__enter__()

    def commit(self, event: Event, block: Any) -> None:
        """Commit an action that ran, by the block that `check` returned."""
        kind, stage, microbatch = event
        block.__exit__(None, None, None)
        if isinstance(block, Forward):
            self._refs[stage, microbatch] = block.ref
        elif isinstance(block, Dgrad) and kind == "B":  # the full backward has run dW too
            key = TapeKey(self.contract.epoch, stage, microbatch)
            with self.contract.wgrad(key, self._ref((stage, microbatch))):
                pass

    def post_message(self, event: Event) -> None:
        """Post a send or a receive."""
        kind, stage, microbatch = event
        key, gradient = TapeKey(self.contract.epoch, stage, microbatch), kind.endswith("B")
        if kind == "RECV_F":
            self._refs[stage, microbatch] = self.contract.reserve(key)
        ref = self._ref((stage, microbatch))
        if kind in _RECEIVES:
            self.contract.post_receive(key, ref, gradient=gradient)
            self._posted.add(event)
        else:
            self.contract.read(key, ref, gradient=gradient)
            self._reading.add(event)

    def finish_send(self, event: Event) -> None:
        """End a send, which torch has waited for."""
        kind, stage, microbatch = event
        key = TapeKey(self.contract.epoch, stage, microbatch)
        ref = self._ref((stage, microbatch))
        self.contract.finish_read(key, ref, gradient=kind == "SEND_B")
        self._reading.discard(event)

    def reduce(self, stage: int) -> None:
        """Finalize a stage, and start its reduction if the table has one."""
        self.contract.finalize(stage)
        self._final.add(stage)
        if self.reductions.reduces[stage]:
            self.contract.start_reduction(stage)
            self._reducing.append(stage)

    def finish(self, stages: Iterable[int]) -> None:
        """
        End the step: its transfers, stages and reductions, then the epoch.

        Args:
            stages: Indices of this rank's stages.
        """
        if not self.reductions.awaits_sends:  # torch has already waited for every send
            for event in sorted(self._reading):
                self.finish_send(event)
        for stage in stages:
            if stage not in self._final:
                self.contract.finalize(stage)
        if not self.reductions.awaits_reductions:
            for reduced in self._reducing:
                self.contract.finish_reduction(reduced)
        self.contract.commit_epoch()

    def _finish_receive(self, kind: str, key: TapeKey) -> None:
        event = (kind, key.stage, key.microbatch)
        if event in self._posted:
            self._posted.discard(event)
            ref = self._ref((key.stage, key.microbatch))
            self.contract.finish_receive(key, ref, gradient=kind == "RECV_B")

    def _ref(self, work: tuple[int, int]) -> TapeRef:
        ref = self._refs.get(work)
        if ref is None:  # nothing was retained: use a reference that was never issued
            return TapeRef(0, GENERATION_MAX, self.contract.incarnation)
        return ref

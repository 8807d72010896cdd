"""
The transcript of a re-enactment: one process, and a line for each call of its contract.

A step is named as in a schedule table: ``0F1`` is stage 0's forward of microbatch 1, ``0I1`` its
input gradient and ``0W1`` its weight gradient. After the first optimizer step, the epoch follows
the name, such as ``e1``. The steps of two runs can be compared line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from copy import deepcopy
from typing import Any

from qeffect.caller import Caller
from qeffect.contract import Contract
from qeffect.destinations import Destination
from qeffect.keys import TapeKey, TapeRef
from qeffect.refusals import Refused
from qeffect.stage_config import StageConfig
from qeffect.tickets import ABORTS

from ..process import Process

__all__ = ["MATRICES", "Transcript", "addresses", "stage"]

#: The weight matrices of a stage, if a re-enactment names none.
MATRICES = ("fc1", "fc2")


def addresses(*matrices: str, first: int = 4096) -> tuple[Destination, ...]:
    """Return one gradient buffer per matrix, at consecutive addresses from `first` on."""
    return tuple(
        Destination(name, None, (8, 8), "float32", "cuda:0", first + 256 * place, 256)
        for place, name in enumerate(matrices)
    )


class Transcript:
    """
    One process, and a record of the calls to its contract.

    Args:
        faulty: If True, run the re-enactment as reported; if False, with the faulty step corrected.

    Attributes:
        caller: The contract, and the references that its forwards returned.
        steps: A line for each call.
        unchanged: Whether the latest refused call left the contract's state unchanged; None if no
            call was refused.
        place: The step that is running.
    """

    caller: Caller

    def __init__(self, *, faulty: bool) -> None:
        self.faulty = faulty
        self.steps: list[str] = []
        self.unchanged: bool | None = None
        self.place = ""

    @property
    def legal(self) -> bool:
        """Whether the faulty step is corrected in this run."""
        return not self.faulty

    def at(self, refusal: Refused) -> str:
        """Return where the run was refused: the transition and the action."""
        return f"{refusal.transition} {self.place}".strip()

    def step(self, name: str, call: Callable[[], Any], detail: str = "") -> Any:
        """
        Make one call of the contract and record it.

        Args:
            name: The action, in the notation of schedule tables.
            call: Function that makes the call.
            detail: The call's arguments for the transcript; empty if they do not matter.

        Raises:
            Refused: The contract refused the call.
        """
        self.place = name
        self.steps.append(f"{name} {detail}".strip())
        before = self.contract.snapshot()
        try:
            return call()
        except Refused:
            self.unchanged = before == self.contract.snapshot()
            raise

    @property
    def contract(self) -> Contract:
        """The contract of the process."""
        return self.caller.contract

    def process(
        self, *stages: StageConfig, callers: Iterable[Hashable] = ("main",), **options: Any
    ) -> None:
        """
        Begin a process.

        Args:
            stages: The configurations of the stages; by default only stage 0, with two microbatches
                and two slots (sets of buffers).
            callers: Names of the callers' streams.
            options: Options of ``Contract``; any other option configures stage 0.
        """
        of_contract = {
            k: options.pop(k) for k in ("capture_order", "declared", "reductions") if k in options
        }
        if not stages:
            stages = (stage(0, **options),)
        self.steps.append(
            f"configure {'; '.join(_configured(s) for s in stages)} {of_contract or ''}".strip()
        )
        self.place = ""
        process = Process("re-enactment", stages, callers=tuple(callers), **of_contract)
        self.caller = Caller(process.contract())

    # Helpers

    def key(self, microbatch: int, stage: int = 0, invocation: int = 0) -> TapeKey:
        """Return the key (epoch, stage and microbatch) of a microbatch in the current epoch."""
        return TapeKey(self.contract.epoch, stage, microbatch, invocation=invocation)

    def ref(self, key: TapeKey) -> TapeRef:
        """Return the reference that the latest forward of a key's microbatch returned."""
        return self.caller.refs[key.cell]

    def _redeem(
        self,
        name: str,
        ticket: Any,
        evidence: Iterable[str] = (),
        detail: str = "",
        **reports: Any,
    ) -> Any:
        self.place = name
        if detail:
            self.steps.append(f"{name} {detail}")
        twin = deepcopy(self.contract.memory)
        try:
            return self.contract.commit(ticket, evidence, **reports)
        except Refused:
            # The action has run, so the contract aborts it, and changes nothing else.
            aborted = self.contract.transitions.functions[ABORTS[ticket.action]]
            aborted(twin, ticket.slot, ticket.serial)
            self.unchanged = twin.snapshot() == self.contract.snapshot()
            raise

    def _hand_over(self, stage: int, caller: Hashable, joined: bool | None) -> int:
        """Submit the caller's work, let the graph stream wait for it, and return the link."""
        link = self.caller.link(stage, caller)
        if joined is not None:
            self.contract.submit(caller)
        if joined:
            self.contract.join(link)
        return link

    def _fills(
        self,
        stage: int,
        filled: Iterable[str] | None,
        *,
        asked: bool,
        of: int | None = None,
    ) -> dict[str, int]:
        """Return, and record, which caches the device reports as filled, and from which weights."""
        default = self._matrices(stage) if asked else ()
        given = default if filled is None else tuple(filled)
        if filled is not None:
            self.steps.append(f"s{stage} fills {', '.join(given) or 'nothing'}")
        if of is not None:
            self.steps.append(f"s{stage} fills from the weights of e{of}")
        return dict.fromkeys(given, self.contract.epoch if of is None else of)

    def _matrices(self, stage: int) -> tuple[str, ...]:
        return next(s.matrices for s in self.contract.stages if s.stage == stage)

    def _action(self, letter: str, key: TapeKey) -> str:
        again = f".{key.invocation}" if key.invocation else ""
        return self._name(f"{key.stage}{letter}{key.microbatch}{again}", key.epoch)

    @staticmethod
    def _name(name: str, epoch: int) -> str:
        return f"{name} e{epoch}" if epoch else name


def stage(index: int, **options: Any) -> StageConfig:
    """Return a stage; by default it has two microbatches, two slots and two matrices."""
    return StageConfig(index, **{"microbatches": 2, "slots": 2, "matrices": MATRICES, **options})


def _configured(config: StageConfig) -> str:
    given = f"s{config.stage} of {config.microbatches} microbatches, {config.slots} slots"
    given += f", matrices {' '.join(config.matrices)}, domain {config.domain}"
    if config.tape_scales is not None:
        given += f", scales of tapes {config.tape_scales}"
    if config.scales != "action":
        given += f", scales of the {config.scales}"
    if config.pool is not None:
        given += f", pool {config.pool}"
    return given

"""
A process to run by hand, and the check that a refusal names its clause and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qeffect import Contract, Refused, StageConfig, TapeKey, TapeRef, Ticket
from qeffect.spec.constants import NEVER

__all__ = ["MATRICES", "Rig", "refused", "refused_evidence", "stage"]

MATRICES = ("w0", "w1")


def stage(index: int = 0, **options: Any) -> StageConfig:
    """The configuration of a stage, by default with two microbatches, two slots (sets of buffers)
    and two matrices."""
    return StageConfig(index, **{"microbatches": 2, "slots": 2, "matrices": MATRICES, **options})


class Rig:
    """
    A contract, and methods that call it correctly, with all required waits and binds.

    Args:
        stages: The stages; by default one.
        options: Arguments of `Contract`.
    """

    def __init__(self, *stages: StageConfig, **options: Any) -> None:
        self.contract = Contract(stages or [stage()], **options)

    def key(self, microbatch: int = 0, stage: int = 0, **parts: int) -> TapeKey:
        """A key (epoch, stage and microbatch) of the current epoch."""
        return TapeKey(
            **{"epoch": self.contract.epoch, "stage": stage, "microbatch": microbatch, **parts}
        )

    def link(self, stage: int = 0, caller: Any = "main") -> int:
        """The link of a caller to the stage's domain."""
        (config,) = (c for c in self.contract.stages if c.stage == stage)
        return self.contract.link(caller, config.domain)

    def matrices(self, stage: int = 0) -> tuple[str, ...]:
        """The matrices of a stage."""
        return next(c.matrices for c in self.contract.stages if c.stage == stage)

    def check_forward(self, microbatch: int = 0, stage: int = 0, **options: Any) -> Ticket:
        """Check F; the same F also refreshes the cache if the cache is stale."""
        contract = self.contract
        stale = contract.memory.cache_epoch[stage] != contract.epoch
        uses = "version" in contract.transitions.relations
        given = {"link": self.link(stage), "refresh": stale and uses, **options}
        return contract.check_forward(self.key(microbatch, stage), **given)

    def forward(self, microbatch: int = 0, stage: int = 0, **options: Any) -> TapeRef:
        """Run F."""
        ref = self.contract.commit(self.check_forward(microbatch, stage, **options))
        assert ref is not None
        return ref

    def check_dgrad(
        self, ref: TapeRef, microbatch: int = 0, stage: int = 0, **options: Any
    ) -> Ticket:
        """Bind, wait for F, and check dI."""
        key = self.key(microbatch, stage)
        if self.contract.memory.bound[key.cell] != key.epoch:
            self.contract.bind(key)
        self.contract.wait(self.link(stage))
        return self.contract.check_dgrad(key, ref, **{"link": self.link(stage), **options})

    def dgrad(self, ref: TapeRef, microbatch: int = 0, stage: int = 0) -> None:
        """Run dI."""
        ticket = self.check_dgrad(ref, microbatch, stage)
        self.contract.commit(ticket, self.matrices(stage))

    def check_wgrad(
        self, ref: TapeRef, microbatch: int = 0, stage: int = 0, **options: Any
    ) -> Ticket:
        """Check dW."""
        key = self.key(microbatch, stage)
        return self.contract.check_wgrad(key, ref, **{"link": self.link(stage), **options})

    def wgrad(self, ref: TapeRef, microbatch: int = 0, stage: int = 0) -> None:
        """Run dW."""
        ticket = self.check_wgrad(ref, microbatch, stage)
        self.contract.commit(ticket, self.matrices(stage))

    def microbatch(self, microbatch: int = 0, stage: int = 0) -> TapeRef:
        """Run F, dI and dW of one microbatch, after its receives and before its readers."""
        (config,) = (c for c in self.contract.stages if c.stage == stage)
        if config.receives_input:
            link = self.link(stage)
            self.contract.wait(link)
            claimed = self.contract.reserve(self.key(microbatch, stage), link=link)
            self.receive(claimed, microbatch, stage)
        ref = self.forward(microbatch, stage)
        if config.receives_gradient:
            self.receive(ref, microbatch, stage, gradient=True)
        self.dgrad(ref, microbatch, stage)
        self.wgrad(ref, microbatch, stage)
        for gradient, sends in ((False, config.sends_output), (True, config.sends_gradient)):
            if sends:
                self.send(ref, microbatch, stage, gradient=gradient)
        return ref

    def send(
        self, ref: TapeRef, microbatch: int = 0, stage: int = 0, *, gradient: bool = False
    ) -> None:
        """Run a whole send, from the wait for the sent tensor to the join of the send's end."""
        key, link = self.key(microbatch, stage), self.link(stage)
        self.contract.wait(link)
        self.contract.read(key, ref, gradient=gradient, link=link)
        self.contract.finish_read(key, ref, gradient=gradient, link=link)
        self.contract.join(link)

    def receive(
        self, ref: TapeRef, microbatch: int = 0, stage: int = 0, *, gradient: bool = False
    ) -> None:
        """Run a whole receive, from the wait for the slot to the join of the receive's end."""
        key, link = self.key(microbatch, stage), self.link(stage)
        self.contract.wait(link)
        self.contract.post_receive(key, ref, gradient=gradient, link=link)
        self.contract.finish_receive(key, ref, gradient=gradient, link=link)
        self.contract.join(link)

    def finish(self, stage: int = 0) -> None:
        """Finalize a stage, and reduce its gradients if a reduction is due."""
        self.contract.wait(self.link(stage))
        self.contract.finalize(stage, self.link(stage))
        (config,) = (c for c in self.contract.stages if c.stage == stage)
        if config.reduces:
            self.contract.start_reduction(stage)
            self.contract.finish_reduction(stage)

    def epoch(self) -> int:
        """Run a whole epoch of every stage and commit it."""
        for config in self.contract.stages:
            for microbatch in range(config.microbatches):
                self.microbatch(microbatch, config.stage)
        for config in self.contract.stages:
            self.finish(config.stage)
        return self.commit()

    def commit(self, caller: Any = "main") -> int:
        """
        Commit, with the update on a caller's stream, for which every graph stream waits.

        Scales that move once per epoch move in the update.
        """
        moving = {c.domain: c.stage for c in self.contract.stages if c.scales == "epoch"}
        if moving:
            with self.contract.update(caller=caller) as update:
                for stage in moving.values():
                    update.move_scales(stage, 1)
            epoch = self.contract.epoch
        else:
            epoch = self.contract.commit_epoch(caller=caller)
        for config in self.contract.stages:
            self.contract.join(self.link(config.stage, caller))
        return epoch


@contextmanager
def refused(
    rig: Rig | Contract, clause: str, found: str = "", expected: str = ""
) -> Iterator[None]:
    """
    Expect a refusal by a clause; the refusal must change nothing, and its message must be one line
    with the expected words.

    Args:
        rig: The contract that is called.
        clause: The clause that refuses.
        found: What the refusal's ``found`` must contain.
        expected: What its ``expected`` must contain.
    """
    contract = rig.contract if isinstance(rig, Rig) else rig
    before, free = contract.snapshot(), {s: sorted(own) for s, own in contract._free.items()}
    with pytest.raises(Refused) as caught:
        yield
    refusal = caught.value
    assert refusal.clause == clause, str(refusal)
    assert contract.snapshot() == before
    assert {s: sorted(own) for s, own in contract._free.items()} == free
    record = refusal.record()
    assert record.found
    assert found in record.found, record.found
    assert record.expected
    assert expected in record.expected, record.expected
    assert record.transition
    assert record.cause
    assert record.remedy
    assert record.section
    assert "\n" not in str(refusal)


def refused_evidence(rig: Rig, clause: str, ticket: Ticket, evidence: tuple[str, ...]) -> None:
    """
    Expect the transition to refuse evidence and change nothing, and the commit to abort by it.

    Args:
        rig: The contract that is called.
        clause: The clause that refuses.
        ticket: The ticket of a dI or dW in flight.
        evidence: What the action queued or covered.
    """
    contract = rig.contract
    name = {"dI": "commit_dgrad", "dW": "commit_wgrad"}[ticket.action]
    before = contract.snapshot()
    unreported = {"dI": (NEVER,) * 5, "dW": ()}[ticket.action]
    with pytest.raises(Refused) as bare:
        contract.transitions.functions[name](
            contract.memory, ticket.slot, ticket.serial, tuple(sorted(evidence)), *unreported
        )
    assert bare.value.clause == clause
    assert contract.snapshot() == before
    with pytest.raises(Refused) as public:
        contract.commit(ticket, evidence)
    assert public.value.clause == clause
    assert str(tuple(sorted(evidence)) or "no matrix") in public.value.found
    assert str(MATRICES) in public.value.expected
    assert ticket.key not in contract.live()
    with pytest.raises(Refused, match=r"ownership\.unknown-ticket"):
        contract.abort(ticket)

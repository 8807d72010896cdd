"""
Run the paper's fault table: seven injections in six families, each through the public API.

Every injection does some valid work, and then makes one invalid call. Afterwards the injection
completes the tape (a forward's dI and dW), epoch or reduction normally. This shows that the invalid
call preserved the state that the table names. No device is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import asdict, frozen

from qeffect.spec.document import fault_rows

from .caller import Caller
from .contract import Contract
from .destinations import Destination
from .refusals import Refused
from .stage_config import StageConfig

__all__ = ["FaultReport", "FaultRow", "run"]

MATRICES: Final = ("fc1", "fc2")


@frozen
class FaultRow:
    """
    One injected violation and its result.

    Args:
        injection: The injected violation, in the paper's words.
        family: The kind of fault, as the paper's table names it.
        detected_at: The place of detection, in the paper's words.
        transition: The contract call that refused the violation; empty without a refusal.
        clause: The clause of the refusal; empty without a refusal.
        refused: Whether the table's clause refused the first invalid operation, and the state did
            not change.
        result: The result in the paper's table, or a note that the violation was not refused as
            the table says.
        preserved: The state that the injection's later calls found preserved; or a note that this
            state was lost.
        holds: Whether the violation was refused and the state preserved.
        accepted: Number of contract calls accepted before the violation.
    """

    injection: str
    family: str
    detected_at: str
    transition: str
    clause: str
    refused: bool
    result: str
    preserved: str
    holds: bool
    accepted: int


@frozen
class FaultReport:
    """
    The results of the fault table.

    Args:
        verdict: ``accepted`` if every row holds, else ``refused``.
        rows: One row per injection, in the paper's order.
    """

    verdict: str
    rows: tuple[FaultRow, ...]

    def asdict(self) -> dict[str, Any]:
        """Return the report as a plain dictionary."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def run() -> FaultReport:
    """
    Inject every fault of the table.

    >>> report = run()
    >>> [row.clause for row in report.rows if row.family == "checkpoint in flight"]
    ['persistence.live-tape', 'persistence.reduction-in-flight']
    """
    rows = tuple(_inject(row) for row in fault_rows())
    return FaultReport("accepted" if all(row.holds for row in rows) else "refused", rows)


def _inject(row: Mapping[str, str]) -> FaultRow:
    injection = _INJECTIONS[row["id"]]()
    refusal, unchanged, preserved = None, False, ""
    try:
        injection.prepare()
        accepted = injection.accepted
        before = injection.contract.snapshot()
        try:
            injection.violate()
        except Refused as refused:
            refusal = refused
        unchanged = before == injection.contract.snapshot() and injection.accepted == accepted
        injection.go_on()
    except Refused as refused:
        preserved = f"not preserved: {refused}"
        accepted = injection.accepted
    refused_so = (
        refusal is not None
        and (refusal.clause, refusal.transition) == (row["clause"], row["transition"])
        and unchanged
    )
    return FaultRow(
        injection=row["violation"],
        family=row["family"],
        detected_at=row["detected_at"],
        transition=refusal.transition if refusal else "",
        clause=refusal.clause if refusal else "",
        refused=refused_so,
        result=row["result"] if refused_so else "not refused as the table says",
        preserved=preserved or row["preserved"],
        holds=refused_so and not preserved,
        accepted=accepted,
    )


class _Injection(Caller):
    """A process with two microbatches, and the fault that is injected into it."""

    slots = 2
    reduces = False

    def __init__(self) -> None:
        self.accepted = 0
        destinations = [
            Destination(name, None, (8, 8), "float32", "cuda:0", 4096 + 256 * i, 256)
            for i, name in enumerate(MATRICES)
        ]
        stage = StageConfig(
            0,
            microbatches=2,
            slots=self.slots,
            matrices=MATRICES,
            destinations=destinations,
            reduces=self.reduces,
        )
        super().__init__(Contract([stage], observer=self._count))
        self.start = self.contract.checkpoint()

    def prepare(self) -> None:
        """Make the valid calls before the fault."""
        raise NotImplementedError  # each injection has its own

    def violate(self) -> None:
        """Make the one invalid call."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Use the preserved state; a refusal here means that the state was not preserved."""
        raise NotImplementedError

    def _count(self, transition: str, arguments: tuple[Any, ...], result: Any) -> None:
        self.accepted += 1

    def step(self) -> None:
        """Run one whole optimizer step."""
        self.refresh(0)
        self.whole(0, 0)
        self.whole(0, 1)
        self.finalize(0)
        self.commit()

    def save(self) -> None:
        """Take a checkpoint after the device has finished its work."""
        self.contract.drain()
        self.contract.checkpoint()


class _OldReference(_Injection):
    """dW presents the right key, but the reference of the slot's previous tape."""

    slots = 1

    def prepare(self) -> None:
        self.refresh(0)
        self.whole(0, 0)
        self.forward(0, 1)
        self.dgrad(0, 1)

    def violate(self) -> None:
        self.contract.check_wgrad(self.key(0, 1), self.ref(0, 0))

    def go_on(self) -> None:
        self.wgrad(0, 1)
        self.finalize(0)
        self.commit()


class _RepeatedDgrad(_Injection):
    """The runtime requests dI of one microbatch twice."""

    def prepare(self) -> None:
        self.refresh(0)
        self.forward(0, 0)
        self.dgrad(0, 0)
        self.contract.wait()

    def violate(self) -> None:
        self.contract.check_dgrad(self.key(0, 0), self.ref(0, 0))

    def go_on(self) -> None:
        self.wgrad(0, 0)
        self.whole(0, 1)
        self.finalize(0)
        self.commit()


class _MissingWgrad(_Injection):
    """A stage is finalized while one delayed dW is still to run."""

    def prepare(self) -> None:
        self.refresh(0)
        self.whole(0, 0)
        self.forward(0, 1)
        self.dgrad(0, 1)
        self.contract.wait()

    def violate(self) -> None:
        self.contract.finalize(0)

    def go_on(self) -> None:
        self.wgrad(0, 1)
        self.finalize(0)
        self.commit()


class _WriteAfterAbort(_Injection):
    """After one dW raised while writing, another dW of the same epoch starts."""

    def prepare(self) -> None:
        self.refresh(0)
        for microbatch in (0, 1):
            self.forward(0, microbatch)
            self.dgrad(0, microbatch)
        self.contract.abort(self.contract.check_wgrad(self.key(0, 0), self.ref(0, 0)))

    def violate(self) -> None:
        self.contract.check_wgrad(self.key(0, 1), self.ref(0, 1))

    def go_on(self) -> None:
        self.contract.purge(self.contract.epoch)
        self.contract.drain()
        self.contract.restore(self.start)
        self.step()


class _StaleCache(_Injection):
    """The first forward after an optimizer step neither finds nor makes a fresh weight cache."""

    def prepare(self) -> None:
        self.step()

    def violate(self) -> None:
        self.contract.check_forward(self.key(0, 0))

    def go_on(self) -> None:
        self.step()


class _CheckpointLiveTape(_Injection):
    """A checkpoint is requested in mid-step, while a tape waits for its backward."""

    def prepare(self) -> None:
        self.refresh(0)
        self.forward(0, 0)
        self.contract.drain()

    def violate(self) -> None:
        self.contract.checkpoint()

    def go_on(self) -> None:
        self.dgrad(0, 0)
        self.wgrad(0, 0)
        self.whole(0, 1)
        self.finalize(0)
        self.commit()
        self.save()


class _CheckpointReduction(_Injection):
    """A checkpoint is requested while gradients are being reduced."""

    reduces = True

    def prepare(self) -> None:
        self.refresh(0)
        self.whole(0, 0)
        self.whole(0, 1)
        self.finalize(0)
        self.contract.start_reduction(0)
        self.contract.drain()

    def violate(self) -> None:
        self.contract.checkpoint()

    def go_on(self) -> None:
        self.contract.finish_reduction(0)
        self.commit()
        self.save()


_INJECTIONS: Final[Mapping[str, Callable[[], _Injection]]] = {
    "old-reference": _OldReference,
    "repeated-dgrad": _RepeatedDgrad,
    "missing-wgrad": _MissingWgrad,
    "write-after-abort": _WriteAfterAbort,
    "stale-cache": _StaleCache,
    "checkpoint-live-tape": _CheckpointLiveTape,
    "checkpoint-reduction": _CheckpointReduction,
}

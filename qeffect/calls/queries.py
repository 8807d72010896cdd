"""
Calls that only read: the epoch, references, open reservations (tickets), and the whole state.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..configuration import Configuration
from ..engine.concrete_memory import Snapshot
from ..keys import TapeKey, TapeRef
from ..ledgers.runner import Observer
from ..text import shown
from ..tickets import Ticket
from .parts import ContractParts

__all__ = ["Queries"]


class Queries(ContractParts):
    """Calls that read a contract's state, and the settable attribute `observer`."""

    @property
    def observer(self) -> Observer | None:
        """The function that is called after every accepted transition, or None."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        if observer is not None and not callable(observer):
            raise TypeError(f"observer must be a function or None, got {shown(observer)}")
        self._observer = self._runner.observer = observer
        self._heard = observer is not None or self._counted is not None

    @property
    def configuration(self) -> Configuration:
        """The contract's construction arguments, which event logs and checkpoints contain."""
        return Configuration.of(
            self.stages, self.transitions.relations, self._streams.callers, self.memory
        )

    @property
    def epoch(self) -> int:
        """The weight epoch of the process; the same for all stages, since a commit is atomic."""
        return self._epochs.current

    @property
    def incarnation(self) -> int:
        """The random number that identifies this contract in the references that it issues."""
        return int(self.memory.incarnation[0])

    @property
    def half_updated(self) -> bool:
        """
        Whether the weights may be wrong: since the last `restore`, an update failed, or a fault in
        the gradients was found after an update had used them.
        """
        return bool(self.memory.half_updated[0])

    def token(self, stage: int) -> int:
        """
        The effect token of the stage's state domain (stages whose FP8 scales are updated together):
        the number of F and dI committed since construction or the last restore.

        Raises:
            TypeError: The stage is not an int.
            ValueError: The stage is not configured in this process.
        """
        self._arguments.stage("token", stage)
        return int(self.memory.token[self.memory.domain_of[stage]])

    def link(self, caller: Hashable = "main", domain: Hashable | None = None) -> int:
        """Index of the link between a caller stream and a state domain's graph stream."""
        return self._streams.link(caller, self.stages[0].domain if domain is None else domain)

    def live(self) -> dict[TapeKey, TapeRef]:
        """
        The reference of every live tape (what one F leaves in memory for its dI and dW), by the
        tape's key.
        """
        return self._tapes.live()

    def reference(self, key: TapeKey) -> TapeRef | None:
        """
        The reference of a key's live tape (what its F left in memory); None if the key has no slot.

        Raises:
            TypeError: The argument is not a `TapeKey`.

        >>> from qeffect import Contract, StageConfig, TapeKey
        >>> contract = Contract([StageConfig(0, microbatches=2, slots=1)])
        >>> contract.reserve(TapeKey(epoch=0, stage=0, microbatch=0)).slot
        0
        >>> contract.reference(TapeKey(epoch=0, stage=0, microbatch=1)) is None
        True
        """
        self._arguments.tape_key("reference", key)
        return self._tapes.reference(key)

    def outstanding(self) -> tuple[Ticket, ...]:
        """
        Every ticket that a check issued and no commit or abort redeemed, oldest first.

        If an observer raises during a check, the check stays in effect, and its ticket is included.
        After any failure, abort these tickets, `drain`, and `restore` a checkpoint.

        >>> from qeffect import Contract, StageConfig, TapeKey
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
        >>> ticket = contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
        >>> contract.outstanding() == (ticket,)
        True
        >>> contract.abort(ticket)
        >>> contract.outstanding()
        ()
        """
        return self._tapes.outstanding()

    def first_writer(self, key: TapeKey) -> bool:
        """
        Whether the key's dW would be the first write to its stage's own buffer in this epoch.

        Raises:
            TypeError: The argument is not a `TapeKey`.
            ValueError: The key is not configured in this process.
        """
        self._arguments.of_process("first_writer", key)
        st = self.memory
        return bool(st.opened[st.buffer_of[key.cell]] != key.epoch)

    def first_of_tied(self, key: TapeKey) -> bool:
        """
        Whether the key's dW would be the first write to its stage's shared destinations this epoch.

        If the stage shares no destination, the result is the same as for `first_writer`.

        Raises:
            TypeError: The argument is not a `TapeKey`.
            ValueError: The key is not configured in this process.

        >>> from qeffect import Contract, StageConfig, TapeKey
        >>> tied = {"microbatches": 1, "slots": 1, "tied": ("w",), "buffers": {"w": "table"}}
        >>> contract = Contract([StageConfig(s, matrices=("w",), **tied) for s in (0, 1)])
        >>> contract.first_of_tied(TapeKey(epoch=0, stage=1, microbatch=0))
        True
        """
        self._arguments.of_process("first_of_tied", key)
        st = self.memory
        return bool(st.opened[st.shared_of[st.buffer_of[key.cell]]] != key.epoch)

    def snapshot(self) -> Snapshot:
        """
        The whole state as plain values; a refused call leaves the snapshot equal.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> before = contract.snapshot()
        >>> contract.finalize(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: ...
        >>> contract.snapshot() == before
        True
        """
        return self.memory.snapshot()

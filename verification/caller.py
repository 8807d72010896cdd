"""
A caller of one process's contract: it makes single calls, or all calls that an action needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qeffect import Checkpoint, Contract, Refused
from qeffect.caller import Caller
from qeffect.engine.stage import TRANSITIONS
from qeffect.explain import explain

from .calls import Call
from .process import Process

__all__ = ["ProcessCaller"]

#: Transitions that no call of the public API runs alone.
_PARTS = ("group_wgrad", "ungroup_wgrad")


class ProcessCaller(Caller):
    """
    The kernel's `Caller` for a process: it makes calls in the right order. This class can also make
    single calls, and restart the process.

    Args:
        process: The configuration of the process.
        make: Function that makes the contract at the start and at every restart in a new process;
            by default `process.contract`.
    """

    def __init__(self, process: Process, make: Callable[[], Contract] | None = None) -> None:
        self.process = process
        self._make = process.contract if make is None else make
        super().__init__(self._make())

    def call(self, call: Call) -> Any:
        """
        Make one call and return its result. A restore into a fresh process makes a new contract.

        Raises:
            Refused: The contract refused the call.
        """
        name, given = call.transition, dict(call.arguments)
        if name in _PARTS:
            return self._part(name, given)
        if "ticket" in given:
            name = name.partition("_")[0]
        contract = self._make() if given.pop("fresh", False) else self.contract
        result = getattr(contract, name)(**given)
        self.contract = contract
        return result

    def _part(self, name: str, given: dict[str, Any]) -> Any:
        """Run one transition on the contract's memory, without the public API."""
        contract = self.contract
        if "destination" in given and given["destination"] is None:
            given["destination"] = contract.memory.destination_of[given["key"].cell]
        arguments = tuple(given[parameter] for parameter in TRANSITIONS[name])
        try:
            return contract.transitions.functions[name](contract.memory, *arguments)
        except Refused as refused:
            raise explain(refused, name, contract.memory, arguments) from None

    def fail(self, action: Any) -> None:
        """Raise an error inside a guarded action, so that the contract aborts the action."""
        try:
            with action:
                raise RuntimeError("replay failed")
        except RuntimeError:
            return

    def restart(self, checkpoint: Checkpoint, incarnation: int) -> None:
        """Purge the epoch, drain the device and restore a checkpoint, as after a failure."""
        self.contract.purge(self.contract.epoch)
        self.contract.drain()
        self.contract.restore(checkpoint, incarnation=incarnation)

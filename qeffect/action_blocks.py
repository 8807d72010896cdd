"""
Guarded actions: context managers that check on entry, commit on exit and abort on an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from inspect import (
    isasyncgen,
    isasyncgenfunction,
    iscoroutine,
    iscoroutinefunction,
    isgenerator,
    isgeneratorfunction,
)
from types import TracebackType
from typing import Any, Literal, Protocol

from .keys import TapeKey, TapeRef
from .refusals import Refused
from .text import shown
from .threads import ConcurrentCallError
from .tickets import Fills, Ticket

__all__ = [
    "Actions",
    "Dgrad",
    "Evaluation",
    "Forward",
    "Guards",
    "Refresh",
    "Update",
    "Wgrad",
    "guarded",
]


class Guards(Protocol):
    """
    The contract's calls that a guarded action makes; `qeffect.contract.Contract` implements them.
    """

    @property
    def check_refresh(self) -> Callable[..., Ticket]:
        """Reserve a stage's state domain (shared FP8 scaling state) for a weight-cache refresh."""

    @property
    def check_evaluation(self) -> Callable[..., Ticket]:
        """Reserve a stage and its state domain (shared FP8 scaling state) for an evaluation."""

    @property
    def check_forward(self) -> Callable[..., Ticket]:
        """Reserve a slot (set of buffers) and the state domain (shared FP8 scaling state) for F."""

    @property
    def check_dgrad(self) -> Callable[..., Ticket]:
        """Reserve a tape (what F left) and the state domain (shared FP8 scaling state) for dI."""

    @property
    def check_wgrad(self) -> Callable[..., Ticket]:
        """Reserve a tape (what F left) and the gradient buffers that dW writes."""

    @property
    def check_update(self) -> Callable[..., Ticket]:
        """Reserve the weights of every stage for the optimizer's update."""

    def commit(
        self,
        ticket: Ticket,
        evidence: Iterable[str] = (),
        *,
        filled: Fills | None = None,
        updates: int | None = None,
        scales: int | None = None,
        draws: int | None = None,
        weight: tuple[int, int] | None = None,
    ) -> TapeRef | None:
        """Redeem a ticket (an action's reservation) after the action succeeded."""

    def abort(self, ticket: Ticket) -> None:
        """Redeem a ticket (an action's reservation) after the action failed."""

    def move_scales(self, stage: int, updates: int | None = None) -> None:
        """Record that the update also updated the scales of a stage's state domain."""


class Actions(Protocol):
    """The contract's context managers for F, dI and dW, which the decorator `guarded` enters."""

    def forward(self, key: TapeKey, **options: Any) -> Forward:
        """Guard a forward F."""

    def dgrad(self, key: TapeKey, ref: TapeRef, **options: Any) -> Dgrad:
        """Guard an input gradient dI."""

    def wgrad(self, key: TapeKey, ref: TapeRef, **options: Any) -> Wgrad:
        """Guard a weight gradient dW."""


class _Guarded:
    """
    One guarded action, which holds a ticket between entry and exit of its block.

    A block that ends while another thread's call is under way cannot redeem its ticket;
    ``outstanding()`` then lists that ticket. If the block succeeded, its exit raises
    `ConcurrentCallError`; otherwise the block's own exception propagates.
    """

    __slots__ = ("contract", "ticket")

    contract: Guards
    ticket: Ticket

    def commit(self) -> None:
        """Redeem the ticket with the action's evidence, that is, its reports of what it did."""
        raise NotImplementedError  # each action has its own

    def __enter__(self) -> Any:
        """
        Check the action and keep its ticket.

        Each action has its own method, since a common one would cost another call. F, dI and dW
        pass their options only if there are any: even ``**{}`` takes the interpreter's slow path.
        """
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if kind is None:
            self.commit()
        else:
            # If the block redeemed the ticket itself, nothing is left to abort. The exception of
            # the block matters more than this, and more than a concurrent call.
            with suppress(Refused, ConcurrentCallError):
                self.contract.abort(self.ticket)
        return False


class Refresh(_Guarded):
    """
    A guarded refresh of a stage's quantized weight cache.

    If the backend reports which caches it filled, set ``filled`` to a mapping: for each matrix, the
    weight epoch (number of optimizer steps) of the quantized weights.
    """

    __slots__ = ("filled", "link", "stage")

    def __init__(self, contract: Guards, stage: int, link: int) -> None:
        self.contract, self.stage, self.link = contract, stage, link
        self.filled: Fills | None = None

    def __enter__(self) -> Refresh:
        self.ticket = self.contract.check_refresh(self.stage, self.link)
        return self

    def commit(self) -> None:
        self.contract.commit(self.ticket, filled=self.filled)


class Evaluation(_Guarded):
    """
    A guarded evaluation, which does not change the state of training.

    Set ``updates`` to the number of scaling updates that the backend reports, and ``filled`` to the
    cache fills that it reports. An evaluation commits only with 0 updates and without fills.
    """

    __slots__ = ("filled", "options", "stage", "updates")

    def __init__(self, contract: Guards, stage: int, options: dict[str, Any]) -> None:
        self.contract, self.stage, self.options = contract, stage, options
        self.filled: Fills | None = None
        self.updates: int | None = None

    def __enter__(self) -> Evaluation:
        self.ticket = self.contract.check_evaluation(self.stage, **self.options)
        return self

    def commit(self) -> None:
        self.contract.commit(self.ticket, filled=self.filled, updates=self.updates)


class Forward(_Guarded):
    """
    A guarded F (forward); read ``slot`` (the set of buffers to use) inside the block, and ``ref``
    after the block.

    Set the values that the backend reports: ``filled`` as in `Refresh`, ``updates`` to the number
    of scaling updates, ``draws`` to the position of the random generator when F began.
    """

    __slots__ = ("draws", "filled", "key", "options", "updates")

    def __init__(self, contract: Guards, key: TapeKey, options: dict[str, Any]) -> None:
        self.contract, self.key, self.options = contract, key, options
        self.filled: Fills | None = None
        self.updates: int | None = None
        self.draws: int | None = None

    def __enter__(self) -> Forward:
        if self.options:
            self.ticket = self.contract.check_forward(self.key, **self.options)
        else:
            self.ticket = self.contract.check_forward(self.key)
        return self

    def commit(self) -> None:
        self.contract.commit(
            self.ticket, filled=self.filled, updates=self.updates, draws=self.draws
        )

    @property
    def slot(self) -> int:
        """The slot (set of buffers) that the check reserved."""
        return self.ticket.slot

    @property
    def ref(self) -> TapeRef:
        """
        Reference of the tape (what F left), after the block has ended.

        Raises:
            RuntimeError: The block has not ended, or its action failed.
        """
        if self.ticket.ref is None:
            raise RuntimeError(
                "a forward's reference exists only after its block has ended without an exception"
            )
        return self.ticket.ref


class Dgrad(_Guarded):
    """
    A guarded dI (input gradient); set ``queued`` to the matrices whose gradient work dI deferred.

    Set the values that the backend reports. ``updates`` is the number of scaling updates.
    ``scales`` identifies the scales that dI used: the effect token (the state domain's count of F
    and dI) of the F that used the same scales. If scales are updated once an epoch, ``scales`` is
    the domain's token at their last update. If dI recomputes F, ``draws`` is the position of the
    random generator when the recomputation began. ``weight`` is the factor by which the
    microbatch's gradient is weighted, as (numerator, denominator).
    """

    __slots__ = ("draws", "key", "options", "queued", "ref", "scales", "updates", "weight")

    def __init__(
        self, contract: Guards, key: TapeKey, ref: TapeRef, options: dict[str, Any]
    ) -> None:
        self.contract, self.key, self.ref, self.options = contract, key, ref, options
        self.queued: Iterable[str] = ()
        self.updates: int | None = None
        self.scales: int | None = None
        self.draws: int | None = None
        self.weight: tuple[int, int] | None = None

    def __enter__(self) -> Dgrad:
        if self.options:
            self.ticket = self.contract.check_dgrad(self.key, self.ref, **self.options)
        else:
            self.ticket = self.contract.check_dgrad(self.key, self.ref)
        return self

    def commit(self) -> None:
        self.contract.commit(
            self.ticket,
            self.queued,
            updates=self.updates,
            scales=self.scales,
            draws=self.draws,
            weight=self.weight,
        )


class Wgrad(_Guarded):
    """
    A guarded dW (weight gradient); set ``covered`` to the matrices whose gradient was written.

    For a grouped dW (``group=[(key, ref), ...]``), ``covered`` applies to each tape (what one F
    left) of the group.
    """

    __slots__ = ("covered", "key", "options", "ref")

    def __init__(
        self, contract: Guards, key: TapeKey, ref: TapeRef, options: dict[str, Any]
    ) -> None:
        self.contract, self.key, self.ref, self.options = contract, key, ref, options
        self.covered: Iterable[str] = ()

    def __enter__(self) -> Wgrad:
        if self.options:
            self.ticket = self.contract.check_wgrad(self.key, self.ref, **self.options)
        else:
            self.ticket = self.contract.check_wgrad(self.key, self.ref)
        return self

    def commit(self) -> None:
        self.contract.commit(self.ticket, self.covered)


class Update(_Guarded):
    """
    A guarded update of the weights; if the block raises, the weights count as half updated.

    If scales are updated once an epoch (`StageConfig.scales`), update them in the block, once for
    each state domain, and call `move_scales` after each domain's update.
    """

    __slots__ = ("options",)

    def __init__(self, contract: Guards, options: dict[str, Any]) -> None:
        self.contract, self.options = contract, options

    def __enter__(self) -> Update:
        self.ticket = self.contract.check_update(**self.options)
        return self

    def move_scales(self, stage: int, updates: int | None = None) -> None:
        """Record an update of the scales of a stage's domain; see `Contract.move_scales`."""
        self.contract.move_scales(stage, updates)

    def commit(self) -> None:
        self.contract.commit(self.ticket)


def guarded(
    contract: Actions, action: Literal["F", "dI", "dW"]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Decorate a physical action (a function that does the device work) so that every call is checked,
    then committed or aborted.

    The decorated F is called as ``f(key, ...)`` and returns ``(ref, result)``; the undecorated
    function returns only ``result``. The decorated dI and dW are called as ``f(key, ref, ...)`` and
    return ``result``. The undecorated function must return ``(matrices, result)``. For dI,
    ``matrices`` are those whose gradient work was queued; for dW, those whose gradient was written.

    The action must have happened when the function returns. A coroutine or a generator only starts
    later, and is therefore rejected.

    Raises:
        ValueError: The action is not F, dI or dW.
        TypeError: The function is an ``async def`` or a generator. A call raises the same error,
            and aborts the action, if the function returned a coroutine or generator, or if a dI or
            dW did not return a pair.
        Refused: ``Contract.check_*`` or ``Contract.commit`` refused the action.

    >>> from qeffect import Contract, StageConfig
    >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
    >>> @guarded(contract, "F")
    ... def forward(key):
    ...     return "activations"
    >>> ref, result = forward(TapeKey(epoch=0, stage=0, microbatch=0))
    >>> ref.slot, result
    (0, 'activations')
    """
    if action not in ("F", "dI", "dW"):
        raise ValueError(f"action must be 'F', 'dI' or 'dW', got {shown(action)}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(function, "__name__", action)
        if any(is_kind(function) for is_kind in _STARTED_LATER):
            raise TypeError(
                f"{name} must run its action when it is called; a coroutine or a generator runs "
                "later. Put the guard around the call inside that function"
            )
        if action == "F":

            @wraps(function)
            def run_forward(key: TapeKey, *args: Any, **kwargs: Any) -> Any:
                with contract.forward(key) as block:
                    result = _done(name, function(key, *args, **kwargs))
                return block.ref, result

            return run_forward

        @wraps(function)
        def run_backward(key: TapeKey, ref: TapeRef, *args: Any, **kwargs: Any) -> Any:
            block = (contract.dgrad if action == "dI" else contract.wgrad)(key, ref)
            with block:
                given = _done(name, function(key, ref, *args, **kwargs))
                if not isinstance(given, tuple) or len(given) != 2:
                    raise TypeError(f"{name} must return (matrices, result), got {shown(given)}")
                matrices, result = given
                if isinstance(block, Dgrad):
                    block.queued = matrices
                else:
                    block.covered = matrices
            return result

        return run_backward

    return decorate


#: Functions whose body runs after they have returned.
_STARTED_LATER = (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)


def _done(name: str, result: Any) -> Any:
    """Reject a coroutine or generator, whose body has yet to run."""
    if iscoroutine(result) or isgenerator(result) or isasyncgen(result):
        kind = type(result).__name__
        if iscoroutine(result):
            result.close()  # it is never awaited
        raise TypeError(f"{name} returned a {kind}, so its action has not happened yet")
    return result

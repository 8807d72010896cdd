"""Tell a contract about the computations and messages of one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from qeffect.contract import Contract, Ticket
from qeffect.keys import TapeKey, TapeRef
from qeffect.relations.constants import GENERATION_MAX
from qeffect.schedule.pairing import Work

from .recurring import Call, RecurringSteps, Script

__all__ = ["Event", "Works"]

Event = tuple[str, int, int]
"""An action: torch's name of its kind, its stage, and its microbatch (-1 if it has none)."""

_RECEIVES = frozenset({"RECV_F", "RECV_B"})
#: The script of a step that is not compared: no call equals its only entry.
_NOTHING: Script = (None,)


class _Keys(dict[Work, TapeKey]):
    """The contract's keys of works, in the epoch that is current when a step begins."""

    def __init__(self, contract: Contract) -> None:
        super().__init__()
        self._epoch = contract.epoch

    def __missing__(self, work: Work) -> TapeKey:
        key = self[work] = TapeKey(self._epoch, *work)
        return key


class _References(dict[Work, TapeRef]):
    """The references to works' tapes; a work without a tape has a reference never issued."""

    def __init__(self, contract: Contract) -> None:
        super().__init__()
        self._contract = contract

    def __missing__(self, work: Work) -> TapeRef:
        return TapeRef(0, GENERATION_MAX, self._contract.incarnation)


_P = ParamSpec("_P")

#: By the name of a method of `Works`, the function that makes its call of the contract.
_MAKES: dict[str, Callable[..., None]] = {}


def _compared(
    make: Callable[Concatenate[Works, _P], None],
) -> Callable[Concatenate[Works, _P], None]:
    """
    Wrap a method: compare its call with the recorded step's next call, and make it if they differ.

    A guarded step calls these methods often, and each Python frame costs a microsecond.
    """
    name = make.__name__
    _MAKES[name] = make

    @wraps(make)
    def call(self: Works, /, *given: _P.args, **named: _P.kwargs) -> None:
        called = name, given, named or None
        if self.script[self.place] == called:
            self.place += 1
        else:
            self.make(called)

    return call


class Works:
    """
    Tells a contract about the computations and messages of one step.

    A *work* is a stage together with a microbatch.

    If a step repeats a recorded step, its calls are only compared with the recorded calls; see
    `recurring`. Every method raises `Refused` if its action breaks the contract.

    To save time, a guard may compare a call directly. If ``script[place]`` equals the call, the
    guard adds 1 to `place`. Otherwise the guard passes the call to `make`.

    Args:
        steps: The steps of the rank's contract. This is also an attribute.
        whole: Whether the step begins an epoch. Only such a step is recorded or compared.

    Attributes:
        script: The recorded calls with which the step is compared.
        place: The index of the next call in `script`.
    """

    def __init__(self, steps: RecurringSteps, *, whole: bool = True) -> None:
        contract = steps.raw_contract
        self.steps, self._contract = steps, contract
        self._keys, self._refs = _Keys(contract), _References(contract)
        self._tickets: dict[Event, Ticket] = {}
        self._update: Ticket | None = None
        self._posted: set[Event] = set()
        self._reading: set[Event] = set()
        self.script, self.place = _NOTHING, 0
        self._whole, self._begun = whole, False
        self._calls: list[Call] | None = None  # the calls of a step that is recorded

    # Calls that repeat a recorded step

    def make(self, call: Call) -> None:
        """
        Make a call that differs from the recorded call.

        Args:
            call: A tuple: the name of a method, its positional arguments, and its named arguments
                if there are any.
        """
        if not self._begun:
            self._begun = True
            script = None
            if self._whole:
                script = self.steps.begin(self)
            else:
                self.steps.settle()
            if script:
                self.script = script
                if script[0] == call:
                    self.place = 1
                    return
            elif script is not None:
                self._calls = []
        if self.script is not _NOTHING:
            self.catch_up()
        name, given, named = call
        try:
            _MAKES[name](self, *given, **named or {})
        except BaseException:
            self.catch_up()  # a step with a refused call is not recorded
            raise
        if self._calls is not None:
            self._calls.append(call)

    def catch_up(self) -> None:
        """
        Make all calls that were only compared so far. The rest of the step is neither compared nor
        recorded.
        """
        if self._calls is not None:
            self._calls = None
            self.steps.drop()
        script, place = self.script, self.place
        if script is _NOTHING:
            return
        self.script, self.place = _NOTHING, 0
        self.steps.differ()
        for call in script[:place]:
            assert call is not None
            name, given, named = call
            _MAKES[name](self, *given, **named or {})

    def end(self) -> None:
        """End the step. Its last call must have committed the epoch."""
        if self.script is not _NOTHING:
            if self.steps.commit():
                self.script, self.place = _NOTHING, 0
            else:
                self.catch_up()
        elif self._calls is not None:
            calls, self._calls = self._calls, None
            self.steps.keep(calls)

    # Computations

    @_compared
    def check(self, event: Event, used: Work | None = None, *, refresh: bool = False) -> None:
        """
        Check F (`F`), dI (`I`), dW (`W`) or a full backward (`B`).

        Args:
            event: The action.
            used: The work whose output a backward uses; by default the work of the backward itself.
            refresh: Whether F quantizes the stage's weights again.
        """
        kind, stage, microbatch = event
        contract, work = self._contract, (stage, microbatch)
        if kind == "F":
            self._end_receive(("RECV_F", stage, microbatch))
            ticket = contract.check_forward(self._keys[work], refresh=refresh)
        elif kind == "W":
            ticket = contract.check_wgrad(self._keys[work], self._refs[work])
        else:
            self._end_receive(("RECV_B", stage, microbatch))
            ticket = contract.check_dgrad(self._keys[work], self._refs[used or work])
        self._tickets[event] = ticket

    @_compared
    def commit(self, event: Event) -> None:
        """Commit an action that was checked and has run."""
        kind, stage, microbatch = event
        contract, work = self._contract, (stage, microbatch)
        ref = contract.commit(self._tickets.pop(event))
        if ref is not None:  # of F
            self._refs[work] = ref
        elif kind == "B":  # the full backward has run dW too
            contract.commit(contract.check_wgrad(self._keys[work], self._refs[work]))

    # Messages

    @_compared
    def reserve(self, work: Work, slot: int | None = None) -> None:
        """Reserve a slot (the place of one microbatch) for the input of a work."""
        self._reserve(work, slot)

    def _reserve(self, work: Work, slot: int | None) -> None:
        self._refs[work] = self._contract.reserve(self._keys[work], slot)

    @_compared
    def post_message(self, event: Event, slot: int | None = None, used: Work | None = None) -> None:
        """
        Post a send or a receive.

        Args:
            event: The message.
            slot: The slot for a received input; by default a free slot.
            used: The work whose output or gradient is sent; by default the work of the message
                itself.
        """
        kind, stage, microbatch = event
        work = (stage, microbatch)
        if kind == "RECV_F":
            self._reserve(work, slot)
        key, ref = self._keys[work], self._refs[used or work]
        if kind in _RECEIVES:
            self._contract.post_receive(key, ref, gradient=kind == "RECV_B")
            self._posted.add(event)
        else:
            self._contract.read(key, ref, gradient=kind == "SEND_B")
            self._reading.add(event)

    @_compared
    def finish_receive(self, event: Event) -> None:
        """Record the end of a receive, if the receive was posted and has not ended."""
        self._end_receive(event)

    def _end_receive(self, event: Event) -> None:
        if event in self._posted:
            self._posted.discard(event)
            kind, stage, microbatch = event
            work = (stage, microbatch)
            self._contract.finish_receive(
                self._keys[work], self._refs[work], gradient=kind == "RECV_B"
            )

    @_compared
    def finish_sends(self, events: tuple[Event, ...] | None = None) -> None:
        """
        Record the end of sends for which the framework has waited; by default of all unfinished
        sends.
        """
        for kind, stage, microbatch in sorted(self._reading) if events is None else events:
            work = (stage, microbatch)
            key, ref = self._keys[work], self._refs[work]
            self._contract.finish_read(key, ref, gradient=kind == "SEND_B")
            self._reading.discard((kind, stage, microbatch))

    # Gradients and the update

    @_compared
    def finalize(self, stage: int) -> None:
        """Finalize a stage, that is, declare its gradients complete."""
        self._contract.finalize(stage)

    @_compared
    def start_reduction(self, name: int | str) -> None:
        """Check a reduction that is about to start. `name` is its stage or bucket."""
        self._contract.start_reduction(name)

    @_compared
    def finish_reduction(self, name: int | str) -> None:
        """Record that a reduction has ended. `name` is its stage or bucket."""
        self._contract.finish_reduction(name)

    @_compared
    def check_update(self) -> None:
        """Check an optimizer update that is about to run."""
        self._update = self._contract.check_update()

    @_compared
    def commit_update(self) -> None:
        """Commit the update after it has run. Call `end` afterwards."""
        update, self._update = self._update, None
        assert update is not None
        self._contract.commit(update)

    @_compared
    def commit_epoch(self) -> None:
        """Check and commit an update in one call. Call `end` afterwards."""
        self._contract.commit_epoch()

"""
The driver of random tests: it makes one call after another on a contract, and compares each answer
with the oracle's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from qeffect import Contract, Refused, Ticket
from qeffect.keys import TapeRef
from qeffect.relations.constants import NEVER

from ..caller import ProcessCaller
from ..calls import Call
from ..claims import failing, members_of, seen, speaks_of
from ..coverage import TARGETS, Target
from ..induction import INVARIANTS
from ..process import Process
from .attempts import aimed, attempt
from .oracle import refusal, violations
from .proposals import Pick, chooser, support
from .shadow import Shadow
from .timeline import CallRecord, schedule_text, timeline_text
from .walk import RandomWalk

__all__ = ["CallCounts", "Driver", "Mismatch"]

#: The counts that commits report, in the order of the transitions' parameters.
_NUMBERS = ("updates", "scales", "draws")
#: Calls between two comparisons of the contract's state with the shadow.
_EVERY = 8
#: Supporting calls before the attempt of a rare refusal.
_SUPPORT = 3
#: The targets that need an update in flight.
_DURING_UPDATE = (
    ("commit_update", "epoch.unknown-ticket"),
    ("abort_update", "epoch.unknown-ticket"),
    ("move_scales", "order.nothing-gathered"),
    ("move_scales", "order.scaling-updates"),
)
#: The targets that need a dW in flight.
_DURING_WGRAD = tuple(one for one in TARGETS if one[0] in ("group_wgrad", "ungroup_wgrad"))
#: The transitions that a call runs for the other tapes of a dW.
_GROUPED: Mapping[str, set[str]] = {
    "check_wgrad": {"group_wgrad"},
    "commit_wgrad": {"drop", "ungroup_wgrad"},
    "abort_wgrad": {"drop", "ungroup_wgrad"},
}
#: Exceptions of Python if a broken contract reads an unknown name instead of refusing.
_BREAKDOWN = (LookupError, TypeError, ValueError, AttributeError)
#: The targets that refuse only while something is in flight, half done or broken.
_FLEETING = tuple(
    (name, clause)
    for name, clause in TARGETS
    if (name, clause) in _DURING_WGRAD
    or clause.partition(".")[2]
    in {
        "device-work",
        "half-updated",
        "in-flight",
        "live-tape",
        "not-forwarded",
        "not-final",
        "action-in-flight",
        "poisoned",
        "reduction-in-flight",
        "refresh-interrupted",
        "spoiled",
        "unknown-ticket",
        "work-not-queued",
        "matrix-coverage",
        "mid-epoch",
        "duplicate",
        "missing",
        "nothing-gathered",
        "scales-not-moved",
    }
)


class Mismatch(AssertionError):  # noqa: N818 - what was found, not what went wrong
    """
    A contract and the oracle disagree; the message shows the schedule and its timeline.

    Attributes:
        guard: The guard that should have refused, as (transition, clause); None if the contract
            refused a legal call.
        steps: The calls that led to the disagreement, without the calls that were rightly refused.
    """

    guard: Target | None = None
    steps: Sequence[CallRecord] = ()


@define
class CallCounts:
    """
    How often a run of schedules exercised each transition and clause.

    Args:
        accepted: For each transition, how often the contract's observer saw it accepted.
        refused: Number of refusals for each clause.
        targets: Number of refusals for each (transition, clause).
        calls: Number of calls.
    """

    accepted: Counter[str] = field(factory=Counter)
    refused: Counter[str] = field(factory=Counter)
    targets: Counter[Target] = field(factory=Counter)
    calls: int = 0


class Driver(RandomWalk):
    """
    Makes random calls on the contract of one process.

    Args:
        process: The configuration of the process.
        tally: Counts to add to; by default new counts.
        make: Function that makes the contracts; a test passes one that makes faulty contracts.
        focus: Guards for which calls are attempted after every step; other guards are then not
            attempted. By default all guards are attempted from time to time.
        rare: Guards to attempt first, until each guard has refused a call.

    Attributes:
        steps: The calls so far.
    """

    def __init__(
        self,
        process: Process,
        tally: CallCounts | None = None,
        make: Callable[..., Contract] | None = None,
        focus: Sequence[Target] | None = None,
        rare: Sequence[Target] = (),
    ) -> None:
        self.rare = rare
        self.process = process
        self.focus = focus
        self.tally = CallCounts() if tally is None else tally
        self.make = process.contract if make is None else make
        self.steps: list[CallRecord] = []
        self.met: set[Target] = set()
        self.events: list[str] = []
        self.caller = ProcessCaller(process, lambda: self.make(observer=self._observe))
        super().__init__(Shadow(process, self.contract.incarnation))
        self.start()

    @property
    def contract(self) -> Contract:
        """The contract that calls go to now."""
        return self.caller.contract

    def _observe(self, transition: str, arguments: tuple[Any, ...], result: Any) -> None:
        self.events.append(transition)
        self.tally.accepted[transition] += 1

    def aim(self, pick: Pick) -> None:
        """Attempt calls that the guards refuse which have not refused in this schedule yet."""
        if self.focus is not None:
            return
        rare = self._still_rare()
        for _ in range(_SUPPORT if rare else 0):
            self.run(support(self.shadow, pick))  # the rest of the call must be right
        everything = TARGETS if self.shadow.quiet else _FLEETING
        targets = rare or [target for target in everything if target not in self.met]
        self._aim_at(targets, pick)

    def _still_rare(self) -> list[Target]:
        return [target for target in self.rare if target not in self.met]

    def _aim_at(self, targets: Sequence[Target], pick: Pick) -> None:
        if not targets:
            return
        for call in aimed(self.shadow, pick, self.checkpoints, self.fresh(), targets):
            self.call(call)
            if "evidence" in call.arguments:
                return  # wrong evidence has aborted its action

    def step(self, number: int) -> None:
        """
        Take the step that a number chooses; then attempt calls for the guards in `focus` or `rare`.
        """
        super().step(number)
        if number:
            self._aim_at(self._still_rare(), chooser(number))
            if self.shadow.update is not None:
                self._aim_at(_DURING_UPDATE, chooser(number))
            if self.shadow.may_take_more():
                unmet = [target for target in _DURING_WGRAD if target not in self.met]
                self._aim_at(unmet, chooser(number))
        if self.focus:
            for call in aimed(self.shadow, chooser(0), self.checkpoints, self.fresh(), self.focus):
                self.call(call)

    def attempt(self, pick: Pick, transition: str) -> None:
        """Attempt a legal or illegal call of a transition."""
        call = attempt(self.shadow, pick, self.checkpoints, self.fresh(), transition)
        if call is not None:
            self.call(call)

    # Calls

    def call(self, call: Call) -> Any:
        """
        Make a call and return its result; None if the call was rightly refused.

        Raises:
            Mismatch: A legal call was refused, an illegal call was accepted or refused by another
                clause, or a refusal changed the state.
        """
        wrong = violations(self.shadow, call)
        self.tally.calls += 1
        if wrong:
            self._expect_refusal(call, wrong)
            return None
        self.events.clear()
        try:
            result = self.caller.call(call)
        except Refused as refused:
            self._note(call, refused.clause)
            raise self._mismatch(f"a legal call was refused: {refused}") from None
        except _BREAKDOWN as error:
            raise self._broke_down(call, error, None) from error
        self._note(call, "", result)
        self._expect_events(call)
        self.happened(call, result)
        closing = call.transition in ("commit_update", "restore")
        if not self.focus and (closing or len(self.steps) % _EVERY == 0):
            self.agree()
        return result

    def _expect_refusal(self, call: Call, wrong: list[str]) -> None:
        before = self.contract.snapshot()
        guard = refusal(self.shadow, call) or (call.transition, wrong[0])
        redeems = call.transition.startswith("commit_")
        if redeems and "unknown" not in wrong[0] and "left-out" not in wrong[0]:
            self._expect_wrong_evidence(call, wrong[0], before)
            return
        try:
            result = self.caller.call(call)
        except Refused as refused:
            self._note(call, refused.clause)
            if refused.clause != wrong[0]:
                raise self._mismatch(f"expected a refusal by {wrong[0]}", guard) from None
            if not (refused.found and refused.expected):
                raise self._mismatch(
                    "the refusal does not say what was expected and found", guard
                ) from None
        except _BREAKDOWN as error:
            raise self._broke_down(call, error, guard) from error
        else:
            self._note(call, "", result)
            broken = ", ".join(wrong)
            raise self._mismatch(f"an illegal call was accepted; it breaks {broken}", guard)
        if self.contract.snapshot() != before:
            raise self._mismatch("the refused call changed the state", guard)
        self._count(guard)

    def _expect_wrong_evidence(self, call: Call, clause: str, before: Any) -> None:
        """Check a refusal of evidence: the commit changes nothing, then the action is aborted."""
        ticket: Ticket = call.arguments["ticket"]
        ends_update = call.transition == "commit_update"
        given = () if ends_update else self._told(call)
        transition = self.contract.transitions.functions[call.transition]
        attempts: tuple[Callable[[], Any], ...] = (
            lambda: transition(self.contract.memory, ticket.slot, ticket.serial, *given),
            lambda: self.caller.call(call),
        )
        for attempted in attempts:
            try:
                attempted()
            except Refused as refused:
                found = refused.clause
            except _BREAKDOWN as error:
                raise self._broke_down(call, error, (call.transition, clause)) from error
            else:
                found = ""
            self._note(call, found)
            if found != clause:
                raise self._mismatch(f"expected a refusal by {clause}", (call.transition, clause))
            if before is not None and self.contract.snapshot() != before:
                raise self._mismatch("the refused call changed the state")
            before = None
        del self.steps[-1]
        self._count((call.transition, clause))
        abort = "abort_update" if ends_update else "abort_wgrad"
        self.shadow.happened(Call(abort, {"ticket": ticket}), None)

    def _told(self, call: Call) -> tuple[Any, ...]:
        """Return a commit's reports in the form of the transition's arguments."""
        told = call.arguments
        filled = told.get("filled")
        pairs = list(filled.items() if isinstance(filled, dict) else filled or ())
        flight = self.shadow.flights[told["ticket"].serial]
        if not self.shadow.configs[flight.stage].reports_fills:
            pairs = []
        numbers = {n: NEVER if told.get(n) is None else told[n] for n in _NUMBERS}
        fill = tuple(sorted(name for name, _ in pairs)), pairs[0][1] if pairs else NEVER
        whole = tuple(sorted(told["evidence"]))
        weighed = self.shadow.configs[flight.stage].counted(told.get("weight"))
        return {
            "commit_refresh": fill,
            "commit_evaluation": (fill[1], numbers["updates"]),
            "commit_forward": (*fill, numbers["updates"], numbers["draws"]),
            "commit_dgrad": (whole, *numbers.values(), *weighed),
            "commit_wgrad": (whole,),
        }[call.transition]

    def _count(self, guard: Target) -> None:
        self.met.add(guard)
        self.tally.refused[guard[1]] += 1
        self.tally.targets[guard] += 1

    def _note(self, call: Call, refused: str, result: Any = None) -> None:
        slot = None
        for name in ("ticket", "ref", "slot"):
            value = call.arguments.get(name)
            if value is not None:
                slot = getattr(value, "slot", value)
        if isinstance(result, Ticket | TapeRef):
            slot = result.slot
        if isinstance(result, Ticket):
            told = f"ticket {result.serial}"
            if result.action not in ("refresh", "evaluation", "update"):
                told += f" in slot {result.slot}"
        else:
            told = str(result) if isinstance(result, TapeRef) else ""
        if call.transition.endswith(("refresh", "evaluation", "update")) or (
            slot is not None and slot >= len(self.shadow.slots)
        ):
            slot = None
        self.steps.append(CallRecord(call, refused, slot, told))

    # Agreement

    def _expect_events(self, call: Call) -> None:
        named = {"purge": "drop"}.get(call.transition, call.transition)
        grouped = _GROUPED.get(named, set())
        if self.events and set(self.events) - grouped != {named}:
            raise self._mismatch(
                f"the contract ran other transitions than the call's: {self.events}"
            )
        if not self.events and call.transition != "purge":
            raise self._mismatch("the contract accepted a call without a transition")

    def agree(self) -> None:
        """
        Compare the contract's state with the shadow, and check every invariant.

        Raises:
            Mismatch: The contract and the shadow differ, or an invariant does not hold.
        """
        shadow, contract = self.shadow, self.contract
        live = {s.tape.key: shadow.ref(s) for s in shadow.slots if s.tape is not None}
        if contract.live() != live:
            raise self._mismatch(f"expected live tapes {live}, the contract has {contract.live()}")
        if contract.epoch != shadow.epoch:
            raise self._mismatch(
                f"expected epoch {shadow.epoch}, the contract is in epoch {contract.epoch}"
            )
        if shadow.uses("order"):
            for stage in shadow.stages:
                if contract.token(stage) != shadow.domain(stage).updates:
                    raise self._mismatch(
                        f"expected token {shadow.domain(stage).updates} of stage "
                        f"{stage}, the contract has {contract.token(stage)}"
                    )
        for name in self._broken_invariants():
            raise self._mismatch(f"the invariant {name} does not hold")

    def _broken_invariants(self) -> Iterator[str]:
        contract = self.contract
        relations = frozenset(contract.transitions.relations)
        claimed = (predicate for predicate in INVARIANTS if speaks_of(predicate, relations))
        members = members_of(contract.memory, contract.stages)
        for name, values in failing(claimed, members, seen(contract.memory)):
            yield f"{name} of {values}"

    def _broke_down(self, call: Call, error: Exception, guard: Target | None) -> Mismatch:
        self._note(call, type(error).__name__)
        expected = f"; expected a refusal by {guard[1]}" if guard else ""
        return self._mismatch(
            f"a call raised {error!r} instead of a refusal or a result{expected}", guard
        )

    def _mismatch(self, message: str, guard: Target | None = None) -> Mismatch:
        """Return the mismatch and the calls that led to it, without the rightly refused calls."""
        *before, last = self.steps
        shown = [step for step in before if not step.refused or "evidence" in step.call.arguments]
        left_out = len(before) - len(shown)
        note = f" ({left_out} rightly refused calls left out)" if left_out else ""
        stages = [slot.stage for slot in self.shadow.slots]
        mismatch = Mismatch(
            f"{message}\n\nSchedule over {self.process}{note}:\n"
            f"{schedule_text([*shown, last])}\n\n{timeline_text([*shown, last], stages)}"
        )
        mismatch.guard = guard
        mismatch.steps = [*shown, last]
        return mismatch

"""
A recurring step is checked in one comparison and committed at once, with the effect of its single
actions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qeffect import Contract, Refused, StageConfig, TapeKey, Ticket
from qeffect.engine.stage import OPTIONAL, STATE, Transitions
from qeffect.ledgers import recorded_steps
from qeffect.steps import BASES, COUNTERS, RecordedStep

from .helpers import Rig, refused, stage

TIED = {"tied": ("w0",), "buffers": {"w0": "table"}}


class ShortRig(Rig):
    """A rig whose steps leave one microbatch out."""


CONTRACTS: dict[str, Callable[[], Rig]] = {
    "one stage": lambda: Rig(),
    "one slot": lambda: Rig(stage(slots=1, microbatches=3)),
    "messages": lambda: Rig(
        stage(sends_output=True, sends_gradient=True, receives_input=True, receives_gradient=True)
    ),
    "reductions": lambda: Rig(stage(reduces=True)),
    "tied": lambda: Rig(stage(0, **TIED), stage(1, **TIED)),
    "stages with a gap": lambda: Rig(stage(2), stage(5, domain="other")),
    "counted": lambda: Rig(counted=True, late=True),
    "short": lambda: ShortRig(stage(microbatches=3)),
    **{
        f"without {name}": (lambda name=name: Rig(omit=(name,)))  # type: ignore[misc]
        for name in sorted(OPTIONAL)
    },
}


def run(rig: Rig) -> None:
    """A step, action by action."""
    contract = rig.contract
    if contract.counts_awaited:
        contract.present_counts(contract.committed_counts())
    short = isinstance(rig, ShortRig)
    if short:
        contract.shorten_walk(2)
    for config in contract.stages:
        contract.submit()
        contract.join(rig.link(config.stage))
        for microbatch in range(config.microbatches - short):
            rig.microbatch(microbatch, config.stage)
            contract.join(rig.link(config.stage))
    for config in contract.stages:
        rig.finish(config.stage)
    contract.commit_epoch()
    for config in contract.stages:
        contract.join(rig.link(config.stage))


def recorded(rig: Rig, walk: Callable[[Rig], None] = run) -> RecordedStep:
    """The third step, of which the second was the same."""
    walk(rig)
    steps = []
    for _ in range(2):
        recording = rig.contract.record_step()
        walk(rig)
        steps.append(recording.end())
    assert steps[0].recurs(steps[1])
    return steps[1]


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_step_as_one_leaves_what_its_actions_leave(name: str) -> None:
    """Over every relation that may be left out, reductions, messages, tied weights, counts."""
    one, each = CONTRACTS[name](), CONTRACTS[name]()
    each.contract.memory.incarnation[0] = one.contract.incarnation
    step = recorded(one)
    recorded(each)
    for _ in range(4):
        assert one.contract.check_step(step, guards_alone=True) is None
        if one.contract.counts_awaited:
            one.contract.present_counts(one.contract.committed_counts())
        assert one.contract.check_step(step) is None
        assert one.contract.commit_step(step) == one.contract.epoch
        run(each)
        assert one.contract.step_state() == each.contract.step_state() or (
            one.contract.snapshot() == each.contract.snapshot()
            and one.contract._steps._free() == each.contract._steps._free()
            and one.contract._reserved == each.contract._reserved
        )
        if name == "counted":
            assert one.contract.committed_counts() == each.contract.committed_counts()
            assert one.contract.counts_awaited
    run(one)
    run(each)
    assert one.contract.snapshot() == each.contract.snapshot()


@cache
def step_of(name: str) -> RecordedStep:
    """The recorded step of a contract, which nothing changes."""
    return recorded(CONTRACTS[name]())


@given(st.sampled_from(sorted(CONTRACTS)), st.data())
def test_counters_that_move_alike_decide_nothing(name: str, data: st.DataObject) -> None:
    """The transitions in force, from starts that are moved by any amounts, end moved alike."""
    step = step_of(name)
    amounts = {
        group: data.draw(st.integers(0, 1 << 40), label=str(group)) for group in step.counters
    }
    step.try_moved(amounts)


def test_a_step_that_depends_on_how_far_a_counter_is_is_not_made() -> None:
    """The look for it is not blind: a guard, and a write, over a number that moves."""
    step = step_of("one stage")
    functions = step.transitions.functions

    def refuses(memory: Any, *given: Any) -> None:
        if memory.token[0] > 1000:
            raise Refused("order.token")
        functions["commit_forward"](memory, *given)

    def writes(memory: Any, *given: Any) -> None:
        functions["commit_forward"](memory, *given)
        memory.rolled_at[0] = memory.rolled_at[0] + (memory.serial[0] > 1000)

    for odd, said in ((refuses, "refused by order.token"), (writes, "in column rolled_at")):
        changed = Transitions(step.transitions.relations, {**functions, "commit_forward": odd})
        with pytest.raises(ValueError, match=said):
            RecordedStep.of(changed, step.start, step.events, step.end)


def test_every_counter_is_of_a_family_with_a_base() -> None:
    """The base of each is its own counter, and stands for nothing else."""
    assert {*COUNTERS} < {*STATE}
    assert {counter.family for counter in COUNTERS.values()} == {*BASES}
    assert all(COUNTERS[name].through in (None, ()) for name in BASES.values())


# No step here begins in mid-walk, with cells forwarded before; the proofs need that column.
@pytest.mark.parametrize("column", sorted({*COUNTERS} - {"forwarded", "spoiled"}))
def test_no_counter_is_an_entry_that_stays(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for one, some contract's step is not made, or does not recur."""
    left = {name: counter for name, counter in COUNTERS.items() if name != column}
    monkeypatch.setattr("qeffect.steps.counters.COUNTERS", left)
    failed = 0
    for make in CONTRACTS.values():
        try:
            recorded(make())
        except (AssertionError, KeyError, ValueError):
            failed += 1
    assert failed


def test_an_epoch_that_is_spoiled_in_advance_does_not_recur(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were it no counter, the step would be committed as one in the epoch that it names, too."""
    rig = Rig()
    rig.contract.memory.spoiled[0] = 4
    with pytest.raises(AssertionError):
        recorded(rig)

    monkeypatch.setattr("qeffect.steps.counters.COUNTERS", {**COUNTERS, "spoiled": None})
    blind, other = Rig(), Rig()
    blind.contract.memory.spoiled[0] = other.contract.memory.spoiled[0] = 4
    step = recorded(blind)
    for _ in range(2):
        blind.contract.commit_step(step)
    assert blind.contract.epoch == 5
    for _ in range(4):
        run(other)
    with pytest.raises(Refused, match=r"arena\.spoiled"):
        run(other)


def in_slots(contract: Contract, step: RecordedStep) -> None:
    """Let a contract's F take up the slots of a recorded step, which a launch of it would fill."""
    slots = {given[0].cell: given[1] for name, given in step.events if name == "check_forward"}
    check = contract.check_forward

    def check_forward(key: TapeKey, **options: Any) -> Ticket:
        return check(key, slot=slots[key.cell], **options)

    contract.check_forward = check_forward  # type: ignore[method-assign]


def whole(rig: Rig) -> dict[str, Any]:
    """All that a step may change."""
    now = rig.contract.step_state()
    return {**now.memory.snapshot(), "free": now.free, "reserved": now.reserved}


def reorder(contract: Contract) -> None:
    """Let another slot be the next that a stage takes up by default."""
    first = next(iter(contract._free[0]))
    contract._free[0].pop(first)
    contract._free[0].put(first)


def reserve(contract: Contract) -> None:
    """Let a list name a slot as reserved that no transition has reserved."""
    contract._reserved[0, 0, 0, 0] = next(iter(contract._free[0]))


@pytest.mark.parametrize(
    "happens",
    [
        lambda contract: contract.wait(),
        lambda contract: (contract.submit(), contract.join()),
        lambda contract: contract.drain(),
        lambda contract: contract.invalidate(0),
        reorder,
    ],
)
def test_a_harmless_difference_is_tried_action_by_action(
    happens: Callable[[Contract], Any],
) -> None:
    """The step is committed as one, and leaves what its actions leave in the recorded slots."""
    one, each = Rig(), Rig()
    each.contract.memory.incarnation[0] = one.contract.incarnation
    step = recorded(one)
    recorded(each)
    for rig in (one, each):
        happens(rig.contract)
    in_slots(each.contract, step)
    for _ in range(2):
        assert one.contract.check_step(step) is None
        one.contract.commit_step(step)
        run(each)
        assert whole(one) == whole(each)


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_any_order_of_the_free_slots_is_taken(
    order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order only decides which slot a contract chooses, and a step has its slots already."""
    one, each = (Rig(stage(slots=3)) for _ in range(2))
    each.contract.memory.incarnation[0] = one.contract.incarnation
    step, _ = recorded(one), recorded(each)
    for rig in (one, each):
        free = rig.contract._free[0]
        free.clear()
        free.update(dict.fromkeys(order))
    monkeypatch.setattr(recorded_steps, "attempt", lambda *_: "a trial of each transition")
    assert one.contract.check_step(step) is None
    one.contract.commit_step(step)
    in_slots(each.contract, step)
    run(each)

    assert whole(one) == whole(each)


def test_what_a_contract_holds_beside_its_memory_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the look, the recorded lists would replace the present ones."""
    one, each, blind = (Rig(stage(slots=3)) for _ in range(3))
    for rig in (each, blind):
        rig.contract.memory.incarnation[0] = one.contract.incarnation
    step, blindly = recorded(one), recorded(blind)
    recorded(each)
    for rig in (one, each, blind):
        reserve(rig.contract)
    one.contract.commit_step(step)
    in_slots(each.contract, step)
    run(each)
    assert whole(one) == whole(each)

    monkeypatch.setattr(RecordedStep, "_outside_memory", lambda *_: None)
    blind.contract.commit_step(blindly)
    assert whole(blind) != whole(one)


def test_counts_of_the_last_commit_are_asked_for_at_the_check() -> None:
    """As they are at the commit, which refuses by the same clause."""
    rig = Rig(counted=True, late=True)
    step = recorded(rig)
    found = rig.contract.check_step(step)
    assert found is not None
    assert found.clause == "epoch.uncounted"
    assert rig.contract.check_step(step, guards_alone=True) is None
    with pytest.raises(Refused, match=r"epoch\.uncounted"):
        rig.contract.commit_step(step)
    rig.contract.present_counts(rig.contract.committed_counts())
    assert rig.contract.check_step(step) is None


class TestCheckpoint:
    """From the check of a whole step to its commit its launch may be writing the weights."""

    def test_between_the_check_and_the_commit(self) -> None:
        """A checkpoint would name the former epoch, over weights of the next or of both."""
        rig = Rig()
        step = recorded(rig)
        rig.contract.drain()
        rig.contract.checkpoint()
        assert rig.contract.check_step(step) is None
        rig.contract.drain()
        for call in (rig.contract.check_checkpoint, rig.contract.checkpoint):
            with refused(rig, "persistence.action-in-flight", "check_step", "withdraw_step"):
                call()
        rig.contract.commit_step(step)
        rig.contract.drain()
        rig.contract.checkpoint()

    def test_a_step_that_was_not_run(self) -> None:
        """The caller says so, or runs the actions one by one."""
        rig = Rig()
        step = recorded(rig)
        rig.contract.drain()
        assert rig.contract.check_step(step) is None
        rig.contract.withdraw_step()
        rig.contract.checkpoint()

        assert rig.contract.check_step(step) is None
        run(rig)
        rig.contract.drain()
        rig.contract.checkpoint()

    def test_a_step_that_was_refused_or_restored(self) -> None:
        """A refused step does not run; after a restore nothing runs."""
        rig = Rig()
        start = rig.contract.checkpoint()
        step = recorded(rig)
        rig.contract.drain()
        assert rig.contract.check_step(step) is None
        rig.contract.restore(start)
        rig.contract.checkpoint()
        assert rig.contract.check_step(step) is not None
        rig.contract.checkpoint()


def test_a_commit_looks_again() -> None:
    """Whatever was told since the check; nothing is written."""
    rig = Rig()
    step = recorded(rig)
    assert rig.contract.check_step(step) is None
    ticket = rig.contract.check_forward(rig.key(), refresh=True)
    before = rig.contract.snapshot()
    with pytest.raises(ValueError, match=r"commit_step: consumers\[\d\] is 16"):
        rig.contract.commit_step(step)
    assert rig.contract.snapshot() == before
    rig.contract.abort(ticket)
    found = rig.contract.check_step(step)
    assert found is not None
    assert found.clause == "ownership.repeated-forward"
    assert "(ownership.repeated-forward)" in str(found)


def test_a_commit_compares_the_state_unless_nothing_has_come_since_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any call that may change the state brings the comparison back; so does another step."""
    rig = Rig()
    first, second = recorded(rig), recorded(rig)
    contract, compared, differs = rig.contract, list[RecordedStep](), RecordedStep.differs

    def counted(step: RecordedStep, found: Any) -> Any:
        compared.append(step)
        return differs(step, found)

    monkeypatch.setattr(RecordedStep, "differs", counted)

    assert contract.check_step(first) is None
    contract.commit_step(first)
    assert [first] == compared
    contract.commit_step(first)  # a check is good for one commit
    assert [first] * 2 == compared

    compared.clear()
    assert contract.check_step(first) is None
    contract.withdraw_step()
    contract.commit_step(first)
    assert [first] * 2 == compared

    compared.clear()
    assert contract.check_step(first) is None
    contract.commit_step(second)
    assert [first, second] == compared


def test_a_failure_between_the_check_and_the_commit_is_refused() -> None:
    """It issues no ticket; nothing is written."""
    rig = Rig()
    step = recorded(rig)
    assert rig.contract.check_step(step) is None
    rig.contract.fail(0, rig.contract.epoch)
    before = rig.contract.snapshot()
    with pytest.raises(ValueError, match=r"commit_step: spoiled\[0\] is"):
        rig.contract.commit_step(step)
    assert before == rig.contract.snapshot()


def test_an_observer_between_the_check_and_the_commit_is_refused() -> None:
    """An observer that keeps no step would miss the step's calls."""
    rig = Rig()
    step = recorded(rig)
    assert rig.contract.check_step(step) is None
    rig.contract.observer = lambda *_: None
    with pytest.raises(ValueError, match=r"commit_step: the observer is"):
        rig.contract.commit_step(step)


def test_a_step_is_of_one_contract_and_incarnation() -> None:
    """Another contract of the same configuration is another incarnation; so is a restored one."""
    rig, other = Rig(), Rig()
    step = recorded(rig)
    recorded(other)
    found = other.contract.check_step(step)
    assert found is not None
    assert (found.where, found.clause) == ("incarnation[0]", None)
    wider = recorded(Rig(stage(0), stage(1)))
    found = rig.contract.check_step(wider)
    assert found is not None
    assert found.where == "incarnation[0]"
    with pytest.raises(ValueError, match=r"commit_step: incarnation\[0\] is"):
        rig.contract.commit_step(wider)
    with pytest.raises(ValueError, match="other relations"):
        Rig(omit=("capture",)).contract.check_step(step)
    rig.contract.drain()
    rig.contract.restore(rig.contract.checkpoint())
    assert rig.contract.check_step(step) is not None


def test_counts_that_are_compared_at_the_commit_leave_no_step_as_one() -> None:
    """They have to be there before it; a step as one brings none."""
    rig = Rig(counted=True)
    recording = rig.contract.record_step()
    rig.microbatch(0)
    rig.microbatch(1)
    rig.finish()
    rig.contract.commit_epoch(counted=rig.contract.committed_counts())
    step = recording.end()
    found = rig.contract.check_step(step)
    assert found is not None
    assert "counts" in found.where


def test_what_does_not_recur_is_not_recorded() -> None:
    """A failure, a step without its commit, and one that an observer hears."""
    rig = Rig()
    with pytest.raises(ValueError, match="commit its epoch exactly once"):
        rig.contract.record_step().end()
    recording = rig.contract.record_step()
    with pytest.raises(ValueError, match="the contract has an observer"):
        rig.contract.record_step()
    rig.contract.abort(rig.check_forward())
    with pytest.raises(ValueError, match="cannot record a step with abort_forward"):
        recording.end()
    rig.contract.record_step().drop()
    assert rig.contract.observer is None

    rig = Rig()
    told: list[str] = []
    recording = rig.contract.record_step()
    rig.contract.observer = lambda transition, *_: told.append(transition)
    run(rig)
    with pytest.raises(ValueError, match="observer was replaced"):
        recording.end()
    recording.drop()
    assert rig.contract.observer is not None
    assert told


def calls(call: Callable[[], object]) -> Counter[str]:
    """How often each Python function is called."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_look_calls_no_function_for_an_action() -> None:
    """Four times as many microbatches: the same calls, to check as to commit."""
    found = []
    for microbatches in (2, 8):
        rig = Rig(StageConfig(0, microbatches=microbatches, slots=2, matrices=("w0", "w1")))
        step = recorded(rig)
        assert len(step.events) > 8 * microbatches
        asked = calls(lambda rig=rig, step=step: rig.contract.check_step(step))  # type: ignore[misc]
        told = calls(lambda rig=rig, step=step: rig.contract.commit_step(step))  # type: ignore[misc]
        found.append((asked, told))
    assert found[0] == found[1]
    assert 5 < sum(found[0][0].values()) < 150

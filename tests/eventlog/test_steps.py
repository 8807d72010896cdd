"""
A step that is committed in one call is one line of the log, which the replayer expands and checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qeffect import Contract, StageConfig, TapeKey
from qeffect.caller import Caller
from qeffect.log.format import KEPT_STEPS, compact
from qeffect.log.joint import replay_together
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import LogError, replay_lines
from qeffect.steps import RecordedStep
from qeffect.verification.logs.edits import reseal


def step(contract: Contract) -> None:
    """One step of one stage and two microbatches."""
    with contract.refresh(0):
        pass
    tapes = []
    for microbatch in (0, 1):
        key = TapeKey(contract.epoch, 0, microbatch)
        with contract.forward(key) as f:
            contract.bind(key)
        tapes.append((key, f.ref))
    contract.wait()
    for key, ref in tapes:
        with contract.dgrad(key, ref) as i:
            i.queued = ("w",)
    for key, ref in reversed(tapes):
        with contract.wgrad(key, ref) as w:
            w.covered = ("w",)
    contract.wait()
    contract.finalize(0)
    contract.commit_epoch()
    contract.join()


def made() -> tuple[Contract, Recorder]:
    """A contract and its log."""
    contract = Contract([StageConfig(0, microbatches=2, slots=2, matrices=("w",))])
    return contract, Recorder(contract)


def recorded(contract: Contract) -> RecordedStep:
    """A step that is recorded."""
    recording = contract.record_step()
    step(contract)
    return recording.end()


def log_of(repeats: int = 3) -> list[str]:
    """A log with a recorded step and its repeats."""
    contract, log = made()
    step(contract)
    again = recorded(contract)
    for _ in range(repeats):
        assert contract.check_step(again) is None
        contract.commit_step(again)
    return log.close()


def test_each_step_as_one_is_one_line_and_the_log_is_accepted() -> None:
    """The closing line's state is that of the actions one by one."""
    few, many = log_of(1), log_of(5)

    assert len(many) - len(few) == 4
    assert max(len(line) for line in many[len(few) - 1 : -1]) < 100
    report = replay_lines(many)
    assert (report.verdict, report.epoch) == ("accepted", 7)


def test_the_contract_is_where_its_actions_would_have_led_it() -> None:
    """With a log, too."""
    (one, log), (each, _) = made(), made()
    each.memory.incarnation[0] = one.incarnation
    again = recorded(one)
    step(each)
    for _ in range(3):
        one.commit_step(again)
        step(each)
    assert one.snapshot() == each.snapshot()
    assert replay_lines(log.close()).verdict == "accepted"


def grouped_step(contract: Contract, *order: int) -> None:
    """One step of three microbatches, with one dW for all of them, which takes them in order."""
    caller = Caller(contract)
    caller.refresh(0)
    for microbatch in range(3):
        caller.forward(0, microbatch)
        caller.dgrad(0, microbatch)
    first, *others = order or (2, 1, 0)
    caller.wgrad(0, first, group=[(caller.key(0, m), caller.ref(0, m)) for m in others])
    caller.finalize(0)
    caller.commit()


def grouping() -> Contract:
    """A contract whose scales move once an epoch."""
    return Contract([StageConfig(0, microbatches=3, slots=3, matrices=("w",), scales="epoch")])


def test_a_step_with_a_grouped_dw_recurs() -> None:
    """As one it leads where its actions lead."""
    one, each = grouping(), grouping()
    each.memory.incarnation[0] = one.incarnation
    log = Recorder(one)
    recording = one.record_step()
    grouped_step(one)
    again = recording.end()
    grouped_step(each)
    for _ in range(3):
        one.commit_step(again)
        grouped_step(each)
    assert one.snapshot() == each.snapshot()
    assert replay_lines(log.close()).verdict == "accepted"


def test_a_step_with_a_grouped_dw_is_tried_from_another_start() -> None:
    """An earlier step left the free slots in another order; the slots of the group are free."""
    contract = grouping()
    log = Recorder(contract)
    recording = contract.record_step()
    grouped_step(contract)
    again = recording.end()
    grouped_step(contract, 0, 1, 2)
    assert again.differs(contract._steps.step_state()) is not None
    assert contract.check_step(again) is None
    contract.commit_step(again)
    grouped_step(contract)
    assert replay_lines(log.close()).verdict == "accepted"


def test_only_the_last_few_steps_can_be_repeated() -> None:
    """The log forgets older ones, so that a replay needs no more memory for a longer log."""
    contract, log = made()
    steps = [recorded(contract) for _ in range(KEPT_STEPS + 1)]

    found = contract.check_step(steps[0])
    assert found is not None
    assert found.where == "the observer"
    with pytest.raises(ValueError, match="the observer"):
        contract.commit_step(steps[0])
    contract.commit_step(steps[1])
    assert replay_lines(log.close()).verdict == "accepted"


def test_a_log_that_is_closed_in_a_step_is_whole() -> None:
    """The step is dropped, and the recorder leaves the contract."""
    contract, log = made()
    contract.record_step()
    contract.submit()
    lines = log.close()

    assert contract.observer is None
    assert '"drop_step"' in lines[-2]
    assert replay_lines(lines).verdict == "accepted"


def test_a_step_that_does_not_recur_is_dropped() -> None:
    """An action of it was aborted."""
    contract, log = made()
    recording = contract.record_step()
    contract.abort(contract.check_refresh(0))
    with pytest.raises(ValueError, match="cannot record a step"):
        recording.end()
    assert contract.observer is log
    lines = log.close()
    assert '"drop_step"' in lines[-2]
    assert replay_lines(lines).verdict == "accepted"


def test_an_observer_that_takes_no_steps_has_none_recorded() -> None:
    """A step as one would bypass it."""
    contract = Contract([StageConfig(0, 2, 2)], observer=lambda *_: None)
    with pytest.raises(ValueError, match="which a recorded step would bypass"):
        contract.record_step()


# Forged logs, whose digests and numbers are right


Fields = dict[str, object]


def forged(change: Callable[[list[Fields]], object]) -> list[str]:
    """A log whose lines, but the first and the last, were changed."""
    lines = [json.loads(line) for line in log_of()]
    for line in lines:
        del line["digest"]
    header, *events, closing = lines
    change(events)
    for number, event in enumerate(events, 1):
        event["seq"] = number
    closing["events"] = len(events)
    return reseal([compact(line)[:-1] for line in (header, *events, closing)])


def at(events: list[Fields], mark: str) -> int:
    """The place of the first line of a kind."""
    return next(n for n, event in enumerate(events) if event["transition"] == mark)


def without(mark: str) -> Callable[[list[Fields]], object]:
    """Leave out the first line of a kind."""
    return lambda events: events.pop(at(events, mark))


def double(mark: str) -> Callable[[list[Fields]], object]:
    """Repeat the first line of a kind."""
    return lambda events: events.insert(at(events, mark), {**events[at(events, mark)]})


def another_step(events: list[Fields]) -> None:
    """Name a step that does not begin there."""
    events[at(events, "repeat_step")]["step"] = 1


def two_commits(events: list[Fields]) -> None:
    """Let a kept step end with the next step's commit."""
    first = at(events, "begin_step")
    events.insert(0, events.pop(first))
    events[at(events, "repeat_step")]["step"] = 1


def a_live_tape(events: list[Fields]) -> None:
    """Begin an F before the step that is repeated."""
    place = at(events, "repeat_step")
    refresh = next(n for n, e in enumerate(events) if e["transition"] == "check_refresh")
    events.insert(place, {**events[refresh], "result": 99})


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        (without("begin_step"), "log.step"),
        (without("keep_step"), "log.step"),
        (double("begin_step"), "log.step"),
        (double("keep_step"), "log.step"),
        (another_step, "log.step"),
        (two_commits, "log.step"),
        (lambda events: events[at(events, "keep_step")].update(transition="drop_step"), "log.step"),
        (lambda events: events.insert(0, {"seq": 0, "transition": "drop_step"}), "log.step"),
        (lambda events: events.pop(), "log.state"),
        (lambda events: events.append({**events[-1]}), "log.state"),
        (a_live_tape, "log.result"),
        (lambda events: events.append({"seq": 0, "transition": "begin_step"}), "log.step"),
    ],
)
def test_a_forged_step_is_refused(change: Callable[[list[Fields]], object], clause: str) -> None:
    """By the line that it stands in, or at the end."""
    assert replay_lines(forged(change)).clause == clause


def test_a_repeated_step_whose_action_is_refused_is_refused_by_its_clause() -> None:
    """Every guard runs again: here the weight cache was lost while the step's F had begun."""
    contract, log = made()
    again = recorded(contract)
    contract.commit_step(again)
    ticket = contract.check_refresh(0)
    contract.abort(ticket)
    lines = log.close()
    bodies = [line[: line.rindex(',"digest"')] for line in lines]
    seq = len(bodies) - 1
    bodies.insert(-1, f'{{"seq":{seq},"transition":"repeat_step","step":1')
    bodies[-1] = bodies[-1].replace(f'"events":{seq - 1}', f'"events":{seq}')
    report = replay_lines(reseal(bodies))

    assert (report.clause, report.action, report.line) == (
        "order.poisoned",
        "check_refresh",
        seq + 1,
    )


def test_a_mark_has_one_spelling() -> None:
    """As every other line."""
    lines = log_of()
    bodies = [line[: line.rindex(',"digest"')] for line in lines]
    place = next(n for n, body in enumerate(bodies) if "begin_step" in body)
    bodies[place] += ',"step":1'
    with pytest.raises(LogError, match="begin_step: found the fields"):
        replay_lines(reseal(bodies))


def test_a_recording_whose_observer_is_put_back_is_dropped() -> None:
    """The log has the end of the step, so that a later step can be recorded."""
    contract, log = made()
    recording = contract.record_step()
    contract.observer = log
    with pytest.raises(ValueError, match="observer was replaced"):
        recording.end()
    recording.drop()
    again = recorded(contract)
    contract.commit_step(again)
    lines = log.close()
    assert sum('"drop_step"' in line for line in lines) == 1
    assert replay_lines(lines).verdict == "accepted"


def test_an_interrupt_at_a_recordings_end_drops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is whole, whatever ended the recording."""
    contract, log = made()
    recording = contract.record_step()
    contract.submit()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RecordedStep, "of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recording.end()
    recording.drop()
    lines = log.close()
    assert sum('"drop_step"' in line for line in lines) == 1
    assert replay_lines(lines).verdict == "accepted"


def rank(number: int, path: Path, plan: str) -> str:
    """
    The log of one rank of two, whose stages exchange messages.

    Args:
        number: The rank, which is its stage too.
        path: Where to write the log.
        plan: For each step: a (action by action), r (recorded), 1 (the recorded one, as one).
    """
    first = number == 0
    config = StageConfig(
        number,
        1,
        1,
        sends_output=first,
        receives_gradient=first,
        sends_gradient=not first,
        receives_input=not first,
    )
    contract = Contract([config])

    def run() -> None:
        key = TapeKey(contract.epoch, number, 0)
        contract.join()
        contract.wait()
        with contract.refresh(number):
            pass
        if not first:
            ref = contract.reserve(key)
            contract.post_receive(key, ref)
            contract.finish_receive(key, ref)
            contract.join()
        with contract.forward(key) as f:
            contract.bind(key)
        contract.wait()
        if first:
            contract.read(key, f.ref)
            contract.finish_read(key, f.ref)
            contract.post_receive(key, f.ref, gradient=True)
            contract.finish_receive(key, f.ref, gradient=True)
            contract.join()
        with contract.dgrad(key, f.ref):
            pass
        contract.wait()
        if not first:
            contract.read(key, f.ref, gradient=True)
            contract.finish_read(key, f.ref, gradient=True)
            contract.join()
        with contract.wgrad(key, f.ref):
            pass
        contract.wait()
        contract.finalize(number)
        contract.commit_epoch()
        contract.join()

    again = None
    with Recorder(contract, path, rank=number):
        for letter in plan:
            if letter == "r":
                recording = contract.record_step()
                run()
                again = recording.end()
            elif letter == "1":
                assert again is not None
                contract.commit_step(again)
            else:
                run()
    return str(path)


@pytest.mark.parametrize(
    ("first", "second", "epochs", "messages"),
    [("ar11", "araa", 4, 8), ("ar11", "ar11", 4, 8), ("ar11aa", "arar11", 6, 12)],
)
def test_a_repeated_step_counts_as_its_actions_for_the_other_ranks(
    first: str, second: str, epochs: int, messages: int, tmp_path: Path
) -> None:
    """A rank may commit as one what another commits action by action."""
    logs = [rank(n, tmp_path / f"{n}.jsonl", plan) for n, plan in enumerate((first, second))]
    report = replay_together(logs)
    assert (report.verdict, report.epochs, report.messages) == ("accepted", epochs, messages)


def test_a_rank_that_repeats_fewer_steps_is_refused(tmp_path: Path) -> None:
    """All ranks commit an epoch, or none."""
    logs = [rank(n, tmp_path / f"{n}.jsonl", plan) for n, plan in enumerate(("ar111", "ar"))]
    report = replay_together(logs)
    assert (report.clause, report.rank) == ("epoch.wrong-epoch", 1)

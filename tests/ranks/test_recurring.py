"""
A step that is checked and committed in one call leaves the same state as its actions one by one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import attrs
import pytest
import torch

from qeffect.contract import Contract
from qeffect.engine.stage import STATE
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.rehearsal import Rehearsal
from qeffect.gpu_runtime.step.actions import HALF_UPDATED
from qeffect.gpu_runtime.step.plan.rows import walked
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.keys import TapeKey
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import replay_lines
from qeffect.refusals import Refused
from qeffect.relations.columns import CONFIG
from qeffect.schedule.actions import Kind
from qeffect.steps import RecordedStep
from qeffect.steps.counters import BASES
from tests.profiles import few
from tests.ranks.recurring import SMALL, Rank

SCHEDULES = ["il", "izb", "zbv", "1f1b", "gpipe", "dualpipev"]
FIRST = 3  # steps until two that were rehearsed are the same
STEPS = FIRST + 5


def held(whole: Any, at: str = "contract") -> Iterator[tuple[str, Any]]:
    """Every value that a contract and its ledgers hold, wherever they hold it."""
    if isinstance(whole, dict):
        yield f"{at} order", tuple(map(str, whole))
        for key, value in whole.items():
            yield from held(value, f"{at}[{key}]")
    elif isinstance(whole, list | tuple) and not hasattr(whole, "__attrs_attrs__"):
        for n, value in enumerate(whole):
            yield from held(value, f"{at}[{n}]")
    elif type(whole).__module__.startswith("qeffect.") and type(whole).__name__ in OWN:
        names = [n for cls in type(whole).__mro__ for n in getattr(cls, "__slots__", ())]
        for name in dict.fromkeys([*names, *getattr(whole, "__dict__", ())]):
            if name not in ("__weakref__", "observer"):
                yield from held(getattr(whole, name, None), f"{at}.{name}")
    elif not callable(whole):
        yield at, whole


#: The parts of a contract; whatever else it holds is a value.
OWN = {
    "Contract", "Memory", "Runner", "Arguments", "Pool", "Tapes", "Groups", "Streams", "Epochs",
    "Restarts", "ExpectedCounts", "RecordedSteps", "FreeSlots",
}  # fmt: skip


def pair(job: Job, rank: int, **options: Any) -> tuple[Rank, Rank]:
    """Two of one rank, which cannot be told apart."""
    table = walked(job.table(), job.provisioning, job.wgrad_group)
    one, each = (Rank(job, rank, table=table, **options) for _ in range(2))
    each.contract.memory.incarnation[0] = one.contract.incarnation
    each.every_action = True
    return one, each


@pytest.mark.parametrize(
    ("pp", "rule"),
    few(itertools.product((2, 4), ("accumulate", "per_microbatch")), [0], [3]),
)
@pytest.mark.parametrize("schedule", few(SCHEDULES, dev=range(3), ci=[5]))
def test_the_whole_state_is_that_of_action_by_action(schedule: str, pp: int, rule: Any) -> None:
    """Every column, ledger, free list and count of each rank after each of many steps."""
    job = Job(schedule=schedule, pp=pp, microbatches=2 * pp, rule=rule, config=SMALL)
    for rank in range(pp):
        one, each = pair(job, rank, late=rank % 2 == 0, reduced=rank % 4 > 1 or schedule == "zbv")
        began = dict(held(each.contract))
        messages = one.pipeline.channels.digests()
        for step in range(STEPS):
            assert one.step() == (step >= FIRST), one.rehearsal.difference
            assert not each.step()
            assert state(one.contract) == state(each.contract)
        moved = {at for at, value in held(each.contract) if began.get(at, value) != value}
        assert {f"contract.memory.{n}[0]" for n in ("serial", "token", "generation")} <= moved
        assert one.contract.epoch == STEPS
        assert one.pipeline.channels.digests() == messages == each.pipeline.channels.digests()
        assert one.rehearsal.steps == [FIRST, STEPS - FIRST]
        assert one.rehearsal.recurs is not None
        told = {transition for transition, _ in one.rehearsal.recurs.events}
        assert ("finish_reduction" in told) == (one.runtime.reducer is not None)
        # And action by action again from there.
        one.every_action = True
        assert not one.step()
        assert not each.step()
        assert state(one.contract) == state(each.contract)


@pytest.mark.parametrize("group", [2, 4])
def test_so_is_that_of_a_step_with_grouped_wgrads(group: int) -> None:
    """Each recurring step takes and ends the same groups."""
    job = Job(schedule="zbv", microbatches=4, config=SMALL, scales="epoch", wgrad_group=group)
    for rank in range(2):
        one, each = pair(job, rank, late=True)
        for step in range(STEPS):
            assert one.step() == (step >= FIRST), one.rehearsal.difference
            assert not each.step()
            assert state(one.contract) == state(each.contract)
        assert one.rehearsal.recurs is not None
        told = [transition for transition, _ in one.rehearsal.recurs.events]
        assert told.count("group_wgrad") == 2 * 4 // group * (group - 1)


@pytest.mark.parametrize("schedule", ["il", "zbv"])
def test_so_is_that_of_a_model_with_a_tied_weight(schedule: str) -> None:
    """Its copies' sum is one of the step's reductions, on one rank of two or on both."""
    job = LanguageJob(schedule=schedule, pp=2, microbatches=4, config=SMALL, tied=True)
    for rank in range(2):
        one, each = pair(job, rank, late=True, reduced=True)
        for step in range(STEPS):
            assert one.step() == (step >= FIRST), one.rehearsal.difference
            assert not each.step()
            assert state(one.contract) == state(each.contract)
        assert one.rehearsal.recurs is not None
        told = Counter(transition for transition, _ in one.rehearsal.recurs.events)
        copies = int(schedule == "il" or rank == 0)
        assert told["start_reduction"] == told["finish_reduction"] == 2 + copies


@pytest.mark.parametrize(("schedule", "rank"), [("il", 0), ("il", 1), ("zbv", 0)])
def test_a_step_without_the_sum_over_a_tie_is_refused(schedule: str, rank: int) -> None:
    """Before its launch, on each rank that has a copy."""
    job = LanguageJob(schedule=schedule, pp=2, microbatches=4, config=SMALL, tied=True)
    one = Rank(job, rank, reduced=True)
    one.step()
    one.runtime._reductions.copies.clear()
    with pytest.raises(Refused, match=r"reduction\.missing"):
        one.ask()


def state(contract: Contract) -> dict[str, Any]:
    """All that a contract holds, but for configured addresses, in which two runtimes differ."""
    named = "destination_of", "contract.stages"
    return {at: value for at, value in held(contract) if not any(n in at for n in named)}


# Any other state


class Kept:
    """A rank whose next step recurs, and the way back to where it is now."""

    def __init__(self, job: Job, number: int) -> None:
        self.rank = Rank(job, number)
        for _ in range(FIRST + 1):
            self.rank.step()
        assert self.rank.rehearsal.recurs is not None
        self.step = self.rank.rehearsal.recurs
        self.contract = self.rank.contract
        self.start = self.contract.step_state()
        self.columns = [*self.contract.transitions.columns]
        self.cells = [*self.start.memory.skipped]

    def back(self) -> None:
        """Put the contract back."""
        contract = self.contract
        contract.observer = None
        for name in self.columns:
            self.put(name, getattr(self.start.memory, name))
        for stage, slots in self.start.free.items():
            contract._free[stage].clear()
            contract._free[stage].update(dict.fromkeys(slots))
        contract._reserved.clear()
        self.rank.fill()

    def put(self, name: str, entries: Any) -> None:
        """Give a column entries."""
        column = getattr(self.contract.memory, name)
        if isinstance(column, dict):
            column.update(entries)
        else:
            column[:] = entries

    def one_by_one(self) -> dict[str, Any] | str:
        """What the actions leave, from the state that is set; or what refuses them."""
        self.rank.every_action = True
        try:
            self.rank.step()
        except (Refused, BackendError, IndexError, KeyError, TypeError, ValueError) as error:
            if str(error) == HALF_UPDATED:  # the runtime looks at the contract's flag first
                return "epoch.half-updated"
            return getattr(error, "clause", type(error).__name__)
        return self.whole()

    def as_one(self) -> dict[str, Any] | str:
        """What the step leaves as one; or why it may not be committed so."""
        try:
            self.contract.commit_step(self.step)
        except ValueError as error:
            return str(error)
        return self.whole()

    def whole(self) -> dict[str, Any]:
        """All that the step may have moved."""
        now = self.contract.step_state()
        return {"free": now.free, "reserved": now.reserved, **now.memory.snapshot()}

    def try_entries(self, *entries: tuple[str, Any, Any]) -> str:
        """Set entries, and say how the verdict on the step compares with its actions."""

        def put() -> None:
            for name, index, value in entries:
                getattr(self.contract.memory, name)[index] = value

        return self.judge(put)

    def judge(self, happens: Callable[[], None]) -> str:
        """Let something happen, and say how the verdict on the step compares with its actions."""

        def put() -> None:
            self.back()
            happens()

        put()
        found = self.contract.check_step(self.step)
        ended = self.one_by_one()
        if isinstance(ended, str):
            if found is None:
                return "dangerous"
            if ended in UNUSABLE:  # a value that no transition writes; no clause refuses it
                return "unusable" if found.clause is None else "dangerous"
            return "named" if found.clause == ended else "misnamed"
        put()
        alike = self.as_one() == ended
        if found is None:
            return "same" if alike else "dangerous"
        return "over-strict"


def others(value: Any) -> list[Any]:
    """What to put in place of an entry."""
    if isinstance(value, tuple) and isinstance(value[0], int):  # a cell
        return [*({(stage, m, 0, 0) for stage in range(4) for m in (0, 1)} - {value})]
    if isinstance(value, tuple):
        return [(), value[1:], (*value, *value)]
    if value is None:
        return [(0, 0, 0, 0)]
    near = (value - 2, value - 1, value + 1, value + 2, -1, 0, 1, 2, 3, 31, value + 100)
    return [other for other in dict.fromkeys(near) if other != value]


#: The errors of an index that no column has.
UNUSABLE = {"IndexError", "KeyError", "TypeError", "ValueError"}


def edits(kept: Kept) -> list[tuple[str, Any, Any]]:
    """Every other value at every index of every column, configured ones too."""
    found = []
    # No guard of a step asks for the walk. It says what a dW does with its destination, which is
    # evidence that the caller of `check_step` must know to be the recorded one.
    for name in (own for own in kept.columns if own != "walk"):
        column = getattr(kept.start.memory, name)
        items = column.items() if isinstance(column, dict) else enumerate(column)
        links = {**CONFIG, **STATE}[name].values == "link"
        for index, value in items:
            # To a list, -1 is its last entry: a link that no transition writes.
            found += [(name, index, o) for o in others(value) if not (links and o == -1)]
    return found


@pytest.mark.parametrize(
    ("schedule", "number"),
    [
        ("1f1b", 1),
        pytest.param("zbv", 0, marks=pytest.mark.nightly),
        pytest.param("zbv", 1, marks=pytest.mark.ci),
    ],
)
def test_no_other_state_is_taken_for_the_recorded_one(schedule: str, number: int) -> None:
    """Each entry is changed: what its actions refuse or end elsewhere, the step as one refuses."""
    kept = Kept(Job(schedule=schedule, pp=2, microbatches=2, config=SMALL), number)
    every = edits(kept)
    without = {
        "walk",
        "reducing",
        "reduced",
        "stage_at",
        "tied_at",
        "reduce_at",
    }  # nothing is reduced
    assert {name for name, _, _ in every} == {*CONFIG, *STATE} - without

    counts = Counter(kept.try_entries(edit) for edit in every)

    assert counts["dangerous"] == counts["misnamed"] == 0
    assert min(counts["same"], counts["named"], counts["unusable"]) > 10
    # Only another incarnation is refused although its actions would be accepted.
    assert counts["over-strict"] == len([name for name, _, _ in every if name == "incarnation"])
    kept.back()
    assert kept.contract.check_step(kept.step) is None


def test_no_state_with_several_other_entries_is_taken_for_the_recorded_one() -> None:
    """Two to four entries at once, of which one could make up for another."""
    kept = Kept(Job(schedule="zbv", pp=2, microbatches=2, config=SMALL), 0)
    dice = random.Random(0)
    alone = ("incarnation", "half_updated")  # which the runtime asks about first
    every = [edit for edit in edits(kept) if edit[0] not in alone]
    counts: Counter[str] = Counter()
    for _ in range(300):
        counts[kept.try_entries(*dice.sample(every, dice.randint(2, 4)))] += 1
    assert counts["dangerous"] == counts["misnamed"] == 0
    assert min(counts["same"], counts["unusable"]) > 0
    assert counts["named"] > 50


@pytest.mark.parametrize(
    ("check", "edit"),
    [
        ("_fallen", ("serial", 0, -5)),
        ("_changed", ("poisoned", 0, 1)),
        ("_unlike_counter", ("spoiled", 1, FIRST + 1)),
        ("_exhausted", ("generation", 0, (1 << 64) - 2)),
    ],
)
def test_each_look_is_needed(
    check: str, edit: tuple[str, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one of them a step is taken for accepted that its actions refuse."""
    kept = Kept(Job(schedule="1f1b", pp=2, microbatches=2, config=SMALL), 1)
    assert kept.try_entries(edit) in ("named", "same")
    monkeypatch.setattr(RecordedStep, check, lambda *_: None)
    assert kept.try_entries(edit) == "dangerous"


_CONFIGURED = "a contract's configuration does not change"
#: Columns that a comparison could leave out, and why. The counters themselves are measured.
SPARE = {
    **dict.fromkeys(("generation_max", "declared", "reports_fills"), _CONFIGURED),
    **dict.fromkeys(("reports_updates", "carried_scales", "recomputes_draws"), _CONFIGURED),
    **dict.fromkeys(("refresh_pool", "refresh_rank"), _CONFIGURED),
    "named": "the consumer is compared, and its own calls name no other",
    "consumer": "`named` is compared, so that a call of the step names the consumer anew",
    "updater": "`unawaited` is compared, so that the graph stream has waited for the update",
    "incarnation": "only the references' number; a state of another incarnation is refused apart",
}


def without(step: RecordedStep, column: str) -> RecordedStep:
    """The step as it is when it does not compare a column."""
    reads = {name: indices for name, indices in step.reads.items() if name != column}
    return attrs.evolve(step, reads=reads)


@pytest.mark.parametrize(
    ("schedule", "number", "also"),
    [("1f1b", 1, {"live_scales"}), pytest.param("zbv", 0, set(), marks=pytest.mark.ci)],
)
def test_each_compared_column_is_needed(schedule: str, number: int, also: set[str]) -> None:
    """
    Without the comparison of any one column, some other state is taken for the recorded one.

    Its actions then refuse it, or leave something else.
    """
    kept = Kept(Job(schedule=schedule, pp=2, microbatches=2, config=SMALL), number)
    whole, now = kept.step, kept.contract.epoch
    every = edits(kept)
    tried: dict[str, list[tuple[tuple[str, Any, Any], ...]]] = {name: [] for name in whole.reads}
    for name, index, value in every:
        if name in tried:
            tried[name] += [((name, index, value),), ((name, index, now),)]
    # The cells of a walk that left some out are read only if `skips` tells of any.
    tried["skips"] = [(("skips", 0, 1), ("skipped", cell, now)) for cell in kept.cells]
    spare = set()
    for column, states in tried.items():
        kept.step = without(whole, column)
        if not any(kept.try_entries(*entries) == "dangerous" for entries in states):
            spare.add(column)

    assert spare - {*BASES.values()} == {*SPARE} | also


# Histories


def calls(contract: Contract) -> dict[str, Callable[[], Any]]:
    """What a caller may do between two steps, by name."""
    stage = contract.stages[0].stage
    key = TapeKey(contract.epoch, stage, 0)

    def refresh(fails: bool) -> None:
        ticket = contract.check_refresh(stage)
        if fails:
            contract.abort(ticket)
        else:
            whole = [(name, contract.epoch) for name in contract.stages[0].matrices]
            contract.commit(ticket, filled=whole)

    return {
        "submit": lambda: contract.submit("main"),
        "join": contract.join,
        "wait": contract.wait,
        "drain": contract.drain,
        "enter": contract.enter,
        "invalidate": lambda: contract.invalidate(stage),
        "refresh": lambda: refresh(False),
        "a failed refresh": lambda: refresh(True),
        "an evaluation": lambda: contract.commit(contract.check_evaluation(stage), updates=0),
        "reserve": lambda: contract.reserve(key),
        "drop": lambda: [contract.drop(own, ref) for own, ref in contract.live().items()],
        "purge": lambda: contract.purge(contract.epoch),
        "bind": lambda: contract.bind(key),
        "a reader of weights": lambda: contract.start_weights_read(stage),
        "its end": lambda: contract.finish_weights_read(stage),
        "checkpoint": contract.checkpoint,
        "restore": lambda: contract.restore(contract.checkpoint()),
        "a fault": lambda: contract.fail(stage),
    }


@pytest.mark.parametrize(
    ("schedule", "number"), [("1f1b", 1), pytest.param("zbv", 0, marks=pytest.mark.ci)]
)
def test_histories_that_are_not_taken_as_one_are_refused_by_their_actions(
    schedule: str, number: int
) -> None:
    """
    Up to six calls between two steps: none unsound, and none legal that is not taken as one.

    But for a restore, after which a step is recorded anew: less than a tenth of the legal ones.
    """
    kept = Kept(Job(schedule=schedule, pp=2, microbatches=2, config=SMALL), number)
    dice = random.Random(0)
    counts: Counter[str] = Counter()
    for _ in range(400):
        names = dice.choices([*calls(kept.contract)], k=dice.randint(1, 6))
        restored = False

        def happens(names: list[str] = names) -> None:
            nonlocal restored
            before = kept.contract.incarnation
            for name in names:
                with suppress(Refused, ValueError):
                    calls(kept.contract)[name]()
            restored = kept.contract.incarnation != before

        verdict = kept.judge(happens)
        counts[f"{verdict}, restored" if restored else verdict] += 1

    assert counts["dangerous"] == counts["misnamed"] == counts["over-strict"] == 0
    assert not counts["dangerous, restored"]
    assert min(counts["same"], counts["named"]) > 100
    assert 0 < counts["over-strict, restored"] < counts["same"] / 10


# What happens between two launches


def begun(**options: Any) -> Rank:
    """A rank whose steps are committed as one."""
    rank = Rank(Job(schedule="zbv", pp=2, microbatches=2, config=SMALL), 0, **options)
    for _ in range(FIRST):
        rank.step()
    assert rank.step()
    return rank


def aborted(rank: Rank) -> None:
    """A refresh that failed."""
    rank.contract.abort(rank.contract.check_refresh(0))


def filled(rank: Rank, stage: int) -> list[tuple[str, int]]:
    """A report of a whole refresh."""
    epoch = rank.contract.epoch
    return [(name, epoch) for name in rank.runtime.memories[stage].all_matrices]


def left_live(rank: Rank) -> None:
    """A tape that is live."""
    contract = rank.contract
    contract.enter()
    contract.commit(contract.check_refresh(0), filled=filled(rank, 0))
    contract.commit(contract.check_forward(rank.runtime.key(0, 0)), updates=1)


def dropped(rank: Rank) -> None:
    """The same, and the epoch was given up."""
    left_live(rank)
    assert rank.contract.purge(rank.contract.epoch) == 1


@pytest.mark.parametrize(
    ("happens", "clause"),
    [
        (aborted, "order.poisoned"),
        (left_live, "version.already-fresh"),
        (dropped, "version.already-fresh"),
        (lambda rank: rank.contract.check_refresh(0), "version.in-flight"),
    ],
)
def test_after_a_failure_the_actions_are_asked_and_refuse(
    happens: Callable[[Rank], Any], clause: str
) -> None:
    """The step as one names the clause; the actions refuse by it, and nothing was written."""
    rank = begun()
    happens(rank)
    with pytest.raises(Refused) as refused:
        rank.step()
    assert refused.value.clause == clause
    assert f"({clause})" in rank.rehearsal.difference
    assert not rank.rehearsal.as_one
    rank.rehearsal.drop()

    for ticket in rank.contract.outstanding():
        rank.contract.abort(ticket)
    rank.runtime.rebuild()
    rank.fill()
    assert [rank.step() for _ in range(FIRST + 1)] == [False] * FIRST + [True]


def test_a_restore_is_another_incarnation() -> None:
    """A checkpoint that is loaded leaves the actions to be asked again."""
    rank = begun()
    checkpoint, numbers = rank.runtime.checkpoint()
    assert rank.step()
    rank.runtime.restore(checkpoint, numbers)
    rank.fill()
    assert [rank.step() for _ in range(FIRST + 1)] == [False] * FIRST + [True]


def test_a_checkpoint_that_is_taken_changes_nothing_that_a_step_reads() -> None:
    """Device work was seen to finish: no guard of a step asks for that."""
    rank = begun()
    rank.runtime.checkpoint()
    assert rank.step()


def test_a_cache_that_was_lost_does_no_harm() -> None:
    """Every step begins with a refresh; the step is tried, and committed as one."""
    rank, other = begun(), begun()
    other.every_action = True
    other.contract.memory.incarnation[0] = rank.contract.incarnation
    for one in (rank, other):
        one.contract.invalidate(0)
    assert rank.step()
    assert not other.step()
    assert state(rank.contract) == state(other.contract)


def program(rank: Rank) -> None:
    """An action stands in the program twice."""
    place = next(
        n for n, e in enumerate(rank.pipeline.program) if str(e.atom.kind) == str(Kind.WGRAD)
    )
    rank.pipeline.program.insert(place, rank.pipeline.program[place])


def destination(rank: Rank) -> None:
    """A gradient buffer is another one."""
    arena = rank.runtime.memories[0].arena
    name = next(iter(arena._buffers[0]))
    arena._buffers[0][name] = torch.zeros_like(arena._buffers[0][name])
    arena._identities[0]._tensors[0] = arena._buffers[0][name]


def moved(rank: Rank) -> None:
    """What a graph bakes in is elsewhere."""
    rank.told.moved = True


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (program, "duplicate-wgrad"),
        (destination, "arena.mismatch"),
        (moved, "a cache has moved"),
    ],
)
def test_what_the_actions_are_given_is_looked_at(
    happens: Callable[[Rank], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands beside the contract: without the look the step would be committed as one."""
    rank = begun()
    happens(rank)
    with pytest.raises((Refused, BackendError), match=said):
        rank.step()
    assert rank.rehearsal.difference
    assert not rank.rehearsal.as_one

    blind = begun()
    happens(blind)
    monkeypatch.setattr(Rehearsal, "_beside", lambda self: "")
    assert blind.step()


def test_half_updated_weights_are_refused_by_the_contract_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an update failed half way no step is committed as one, whoever looks first."""
    rank = begun()
    rank.contract.memory.half_updated[0] = 1
    with pytest.raises(BackendError, match="failed half way"):
        rank.step()
    assert "failed half way" in rank.rehearsal.difference

    blind = begun()
    blind.contract.memory.half_updated[0] = 1
    monkeypatch.setattr(Rehearsal, "_beside", lambda self: "")
    with pytest.raises(BackendError, match="failed half way"):
        blind.step()
    assert "half_updated[0] is 1" in blind.rehearsal.difference


def test_every_action_is_told_to_an_observer() -> None:
    """An event log has each of them: such steps are never committed as one."""
    rank = begun()
    told: list[str] = []
    rank.contract.observer = lambda transition, *_: told.append(transition)
    assert not rank.step()
    first = [*told]
    assert not rank.step()
    assert first * 2 == told
    assert {"check_forward", "commit_wgrad", "commit_update"} <= {*first}
    rank.contract.observer = None
    assert [rank.step() for _ in range(2)] == [False, True]


def test_an_event_log_has_a_step_as_one_in_one_line() -> None:
    """Steps are recorded and committed as one beside it, and the replayer accepts the whole."""
    rank = Rank(Job(schedule="zbv", pp=2, microbatches=2, config=SMALL), 0)
    log = Recorder(rank.contract)
    lines = []
    for step in range(FIRST + 3):
        before = len(log.lines)
        assert rank.step() == (step >= FIRST)
        lines.append(log.lines[before:])
    assert [1] * 3 == [len(own) for own in lines[FIRST:]]
    assert max(len(own[0]) for own in lines[FIRST:]) < 100 < min(map(len, lines[:FIRST]))
    report = replay_lines(log.close())
    assert (report.verdict, report.epoch) == ("accepted", FIRST + 3)


def test_a_stop_behind_the_launch_leaves_an_epoch_that_goes_no_further() -> None:
    """As where the actions were told before it: no step, and no checkpoint without a restore."""
    rank, other = begun(), begun()
    rank.ask()
    assert rank.rehearsal.as_one
    rank.rehearsal.stopped()
    other.every_action = True
    other.ask()
    other.rehearsal.drop()
    for stopped in (rank, other):
        assert not stopped.rehearsal.as_one
        with pytest.raises(Refused, match=r"persistence\.mid-epoch"):
            stopped.runtime.checkpoint()
        with pytest.raises(Refused, match=r"version\.already-fresh"):
            stopped.ask()
        stopped.rehearsal.drop()
    without = begun()
    without.ask()
    with pytest.raises(Refused, match=r"persistence\.action-in-flight"):
        without.runtime.checkpoint()
    without.runtime.contract.withdraw_step()
    without.runtime.checkpoint()


def test_a_stop_keeps_its_cause_whatever_fails_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the walk would hide it, and the other ranks would wait for this one's words."""
    rank = begun()
    rank.ask()
    assert rank.rehearsal.as_one
    monkeypatch.setattr(rank.pipeline.feed, "outputs", lambda *_: 1 // 0)
    rank.rehearsal.stopped()
    assert not rank.rehearsal.as_one
    with pytest.raises(Refused, match=r"persistence\.live-tape"):
        rank.runtime.checkpoint()


def test_counts_that_have_not_come_hold_the_commit() -> None:
    """As they hold that of single actions."""
    rank = begun(late=True)
    rank.ask()
    assert rank.rehearsal.as_one
    before = rank.contract.snapshot()
    with pytest.raises(Refused, match=r"epoch\.uncounted"):
        rank.rehearsal.commit()
    assert rank.contract.snapshot() == before
    rank.tell()
    assert rank.contract.counts_awaited

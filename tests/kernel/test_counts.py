"""
Device counts: the device ran exactly the committed actions, each the right number of times and in
the same order.

The device here is a list of counters beside the calls, so that a test can run anything.
"""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import Contract, Destination, DeviceCounts, Refused, StageConfig, TapeKey
from qeffect.counts import COUNTED, WAYS, fold, mark, ways_of
from qeffect.relations.constants import ADDS, OVERWRITES

from .helpers import MATRICES, refused, stage


class Device:
    """
    What a device of one domain would count.

    Args:
        stages: Its stages.
    """

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.digest = 0
        self.numbers = {stage: [0] * len(COUNTED) for stage in stages}

    def run(self, action: str, stage: int, place: int, writes: int = OVERWRITES) -> None:
        """Replay a graph."""
        self.digest = fold(self.digest, mark(action, place, writes))
        self.numbers[stage][COUNTED.index(action)] += 1

    def counts(self) -> DeviceCounts:
        """The counts that the host reads."""
        return DeviceCounts(self.digest, {s: tuple(n) for s, n in self.numbers.items()})


class Step:
    """
    One optimizer step of two stages of two microbatches each in one domain.

    Args:
        skip: Committed actions, counted from 0, that the device does not run.
        twice: Those that it runs twice.
        instead: For some, the one whose graph it runs instead.
        counted: Whether the contract wants counts.
        late: Whether they are presented after the commit.
    """

    def __init__(
        self,
        *,
        skip: tuple[int, ...] = (),
        twice: tuple[int, ...] = (),
        instead: dict[int, int] | None = None,
        counted: bool = True,
        late: bool = False,
    ) -> None:
        self.contract = Contract([stage(0), stage(1)], counted=counted, late=late)
        self.device = Device((0, 1))
        self.ran: list[tuple[Any, ...]] = []
        self.skip, self.twice, self.instead = skip, twice, instead or {}
        self.otherwise: dict[int, int] = {}  # how the device's dW writes instead

    def act(self, *action: Any) -> None:
        """Record a committed action; the device runs it later."""
        self.ran.append(action)

    def run(self) -> None:
        """Commit every action of an epoch, let the device run them, finalize."""
        contract, epoch = self.contract, self.contract.epoch
        contract.join()  # the latest update is awaited
        began = len(self.ran)
        for s in (0, 1):
            contract.commit(contract.check_refresh(s))
            self.act("refresh", s, s)
            refs = {}
            for m in (0, 1):
                key = TapeKey(epoch, s, m)
                ref = refs[key] = contract.commit(contract.check_forward(key))
                assert ref is not None
                self.act("F", s, ref.slot)
            contract.wait()
            for key, ref in refs.items():
                assert ref is not None
                contract.bind(key)
                contract.commit(contract.check_dgrad(key, ref), MATRICES)
                self.act("dI", s, ref.slot)
                contract.commit(contract.check_wgrad(key, ref), MATRICES)
                # The microbatches have one destination: the first one overwrites it.
                self.act("dW", s, ref.slot, ADDS if key.microbatch else OVERWRITES)
            contract.wait()
            contract.finalize(s)
        for n in range(began, len(self.ran)):
            if n not in self.skip:
                for _ in range(1 + (n in self.twice)):
                    ran = self.ran[self.instead.get(n, n)]
                    self.device.run(*ran[:3], self.otherwise.get(n, (*ran[3:], OVERWRITES)[0]))

    def commit(self) -> int:
        """Commit with the device's counts."""
        return self.contract.commit_epoch(counted={0: self.device.counts()})


#: In the order of `Step`: refresh, two F, dI, dW, dI, dW of stage 0, then the same of stage 1.
REFRESH, F0, F1, DGRAD, WGRAD = range(5)
OTHER_STAGE = 7


class TestCommit:
    def test_what_was_committed_is_what_ran(self) -> None:
        """An honest device's counts are accepted, epoch after epoch."""
        step = Step()
        for epoch in (1, 2, 3):
            step.run()
            step.contract.check_commit(counted={0: step.device.counts()})

            assert epoch == step.commit()

    @pytest.mark.parametrize("action", range(14))
    def test_a_skipped_replay(self, action: int) -> None:
        """A committed action that did not run is named by stage and kind."""
        step = Step(skip=(action,))
        step.run()
        own = step.ran[action][1]

        with refused(
            step.contract, "epoch.device-count", f"stage {own}", "as many as were committed"
        ):
            step.commit()
        assert 0 == step.contract.epoch

    @pytest.mark.parametrize("action", range(14))
    def test_a_replay_that_ran_twice(self, action: int) -> None:
        """An action that ran twice is named too."""
        step = Step(twice=(action,))
        step.run()

        with refused(step.contract, "epoch.device-count", f"{step.ran[action][0]}"):
            step.commit()

    @pytest.mark.parametrize(("at", "writes"), [(4, ADDS), (6, OVERWRITES)])
    def test_a_graph_that_writes_in_another_way(self, at: int, writes: int) -> None:
        """The same slot's graph that adds instead of overwriting, or the reverse."""
        step = Step()
        step.otherwise = {at: writes}
        step.run()
        assert step.ran[at][0] == "dW"
        assert step.ran[at][-1] != writes

        with refused(step.contract, "epoch.device-order", "digest"):
            step.commit()

    def test_a_replay_behind_the_guards(self) -> None:
        """A replay without a check is counted, wherever in the step it ran."""
        step = Step()
        step.device.run("dW", 1, 2)
        step.run()

        with refused(step.contract, "epoch.device-count", "stage 1: the device ran 3 dW", "2"):
            step.commit()

    @pytest.mark.parametrize(
        "exchanged",
        [
            pytest.param((F0, F1), id="microbatches"),
            pytest.param((F0, F0 + OTHER_STAGE), id="stages"),
            pytest.param((DGRAD, DGRAD + 2), id="dI"),
            pytest.param((WGRAD, WGRAD + 2), id="dW"),
            pytest.param((REFRESH, REFRESH + OTHER_STAGE), id="refreshes"),
        ],
    )
    def test_two_exchanged(self, exchanged: tuple[int, int]) -> None:
        """Two swapped graphs run the right number of times; only the order shows the fault."""
        a, b = exchanged
        step = Step(instead={a: b, b: a})
        step.run()

        with refused(step.contract, "epoch.device-order", "of the order that ran"):
            step.commit()

    def test_no_counts(self) -> None:
        """If the device counts, a commit or check_commit without counts is refused."""
        step = Step()
        step.run()
        for call in (step.contract.commit_epoch, step.contract.check_commit):
            with refused(step.contract, "epoch.uncounted", "no counts", "every state domain"):
                call()

        assert 1 == step.commit()

    def test_a_guard_is_named_first(self) -> None:
        """If a guard of the commit also refuses, it is named instead of the device's counts."""
        step = Step(skip=(F0,))

        with refused(step.contract, "epoch.not-final"):
            step.commit()

    def test_only_the_comparison_refuses(self) -> None:
        """Without counts the same skipped replay commits: no other guard notices it."""
        step = Step(skip=(F0,), counted=False)
        step.run()

        assert 1 == step.contract.commit_epoch()

    def test_a_restore_begins_at_zero(self) -> None:
        """After a mismatch only a restore helps; the device's counters are then zero too."""
        checkpoint = Step().contract.checkpoint()
        step = Step(skip=(F0,))
        step.run()
        with refused(step.contract, "epoch.device-count"):
            step.commit()
        step.contract.drain()
        step.contract.restore(checkpoint)
        step.device, step.skip = Device((0, 1)), ()
        step.run()

        assert 1 == step.commit()

    def test_an_aborted_action_is_not_counted(self) -> None:
        """It is unknown what a failed action ran; its epoch cannot commit anyway."""
        contract = Contract([stage(0)], omit=("version",), counted=True)
        contract.abort(contract.check_forward(TapeKey(0, 0, 0)))
        assert contract._counted is not None

        assert {0: DeviceCounts(0, {0: (0, 0, 0, 0)})} == contract._counted.own()

    def test_domains_are_counted_apart(self) -> None:
        """Each state domain has its own digest, since no order relates two domains."""
        contract = Contract(
            [stage(0, domain="a"), stage(1, domain="b")], omit=("version",), counted=True
        )
        ref = contract.commit(contract.check_forward(TapeKey(0, 1, 0), link=1))
        assert contract._counted is not None
        assert ref is not None

        own = contract._counted.own()

        assert DeviceCounts(0, {0: (0, 0, 0, 0)}) == own["a"]
        assert DeviceCounts(mark("F", ref.slot), {1: (0, 1, 0, 0)}) == own["b"]


class TestLate:
    """Counts that arrive after the commit: the device has skipped the update if they differ."""

    def test_what_was_committed_is_what_ran(self) -> None:
        """An honest device's counts are accepted a step later, epoch after epoch."""
        step = Step(late=True)
        for epoch in (1, 2, 3):
            step.run()
            expected = step.contract.committed_counts()

            assert {0: step.device.counts()} == expected
            assert epoch == step.contract.commit_epoch()
            assert step.contract.counts_awaited
            step.contract.present_counts(expected)
            assert not step.contract.counts_awaited

    @pytest.mark.parametrize("compared_in", ["the next epoch", "at once"])
    def test_those_of_the_commit_are_compared(self, compared_in: str) -> None:
        """Late counts are compared with the actions up to that commit, not with later actions."""
        step = Step(late=True)
        step.run()
        counted = {0: step.device.counts()}
        step.contract.commit_epoch()
        if compared_in == "the next epoch":
            step.run()
            with refused(step.contract, "epoch.device-count", "the device ran 2 refresh", "1"):
                step.contract.present_counts({0: step.device.counts()})

        step.contract.present_counts(counted)

    @pytest.mark.parametrize(
        ("wrong", "clause"),
        [
            ({"skip": (F1,)}, "epoch.device-count"),
            ({"twice": (WGRAD,)}, "epoch.device-count"),
            ({"instead": {F0: F1, F1: F0}}, "epoch.device-order"),
        ],
    )
    def test_a_difference_ends_in_a_restore(self, wrong: dict[str, Any], clause: str) -> None:
        """The commit has happened with the old weights; only a restore can follow."""
        saved = Step().contract.checkpoint()
        step = Step(late=True, **wrong)
        step.run()
        counted = {0: step.device.counts()}
        assert 1 == step.contract.commit_epoch()
        step.run()
        for _ in range(2):
            with refused(step.contract, clause):
                step.contract.present_counts(counted)
        with refused(step.contract, "epoch.uncounted", "not presented", "present_counts"):
            step.contract.commit_epoch()
        step.contract.drain()
        step.contract.restore(saved)
        step.device, step.skip, step.twice, step.instead = Device((0, 1)), (), (), {}
        step.run()

        assert 1 == step.contract.commit_epoch()
        step.contract.present_counts({0: step.device.counts()})

    def test_neither_commit_nor_checkpoint_before(self) -> None:
        """Work that may not have run is neither committed nor saved."""
        step = Step(late=True)
        step.run()
        step.contract.commit_epoch()
        counted = {0: step.device.counts()}
        step.contract.drain()
        contract = step.contract
        for call in (contract.checkpoint, contract.check_checkpoint):
            with refused(contract, "epoch.uncounted", "not presented"):
                call()
        step.run()
        for call in (contract.commit_epoch, contract.check_commit):
            with refused(contract, "epoch.uncounted", "not presented"):
                call()
        contract.present_counts(counted)

        assert 2 == contract.commit_epoch()

    def test_a_commit_may_be_asked_about_with_counts_or_without_any(self) -> None:
        """Before a consent the counts are compared at once; the guards alone need no counts."""
        step = Step(late=True)
        step.run()
        contract = step.contract
        contract.check_commit(counted={0: step.device.counts()})
        step.device.run("F", 0, 0)
        with refused(contract, "epoch.device-count", "3 F", "2"):
            contract.check_commit(counted={0: step.device.counts()})
        contract.commit_epoch()
        step.run()
        with refused(contract, "epoch.uncounted"):
            contract.check_commit()
        contract.check_commit(guards_alone=True)
        with refused(Contract([stage(0)]), "epoch.not-final"):
            Contract([stage(0)]).check_commit(guards_alone=True)

    def test_a_restore_awaits_nothing(self) -> None:
        """A new incarnation has committed nothing."""
        step = Step(late=True)
        saved = step.contract.checkpoint()
        step.run()
        step.contract.commit_epoch()
        step.contract.drain()
        step.contract.restore(saved)

        assert not step.contract.counts_awaited
        assert saved.epoch == step.contract.checkpoint().epoch

    def test_an_observer_that_raises_at_the_commit(self) -> None:
        """The commit has happened, so its counts are awaited although the observer raised."""
        step = Step(late=True)
        step.run()

        def full(*_: Any) -> None:
            raise OSError("full")

        step.contract.observer = full
        with pytest.raises(OSError, match=r"^full$"):
            step.contract.commit_epoch()

        assert 1 == step.contract.epoch
        assert step.contract.counts_awaited

    def test_wrong_calls(self) -> None:
        """A call that the contract's configuration or state does not allow raises an error that
        names the missing option or call."""
        with pytest.raises(ValueError, match="late=True requires counted=True"):
            Contract([stage(0)], late=True)
        step = Step(late=True)
        step.run()
        with pytest.raises(ValueError, match="call present_counts after the commit"):
            step.commit()
        with pytest.raises(ValueError, match="no commit awaits its counts"):
            step.contract.present_counts({0: step.device.counts()})
        plain = Contract([stage(0)])
        assert not plain.counts_awaited
        for call in (plain.committed_counts, lambda: plain.present_counts({})):
            with pytest.raises(ValueError, match="made without counted=True"):
                call()


class TestBadCounts:
    def test_a_contract_that_does_not_count(self) -> None:
        """Counts are refused if the contract would not compare them."""
        step = Step(counted=False)
        step.run()

        with pytest.raises(ValueError, match="without counted=True"):
            step.commit()

    @pytest.mark.parametrize(
        ("counted", "error", "message"),
        [
            ({}, ValueError, "domains"),
            ({1: DeviceCounts(0, {})}, ValueError, "domains"),
            ({0: DeviceCounts(0, {0: (0, 0, 0, 0)})}, ValueError, "stages"),
            ({0: (0, 0)}, TypeError, "DeviceCounts"),
        ],
    )
    def test_counts_of_something_else(
        self, counted: Any, error: type[Exception], message: str
    ) -> None:
        """Counts for domains or stages that the contract lacks are refused."""
        step = Step()
        step.run()
        before = step.contract.snapshot()

        with pytest.raises(error, match=message):
            step.contract.commit_epoch(counted=counted)
        assert before == step.contract.snapshot()

    @pytest.mark.parametrize("digest", [True, 1.0, "1", None])
    def test_no_number(self, digest: Any) -> None:
        """A value that only equals an int is refused as a count."""
        with pytest.raises(TypeError, match="plain integers"):
            DeviceCounts(digest, {})
        with pytest.raises(TypeError, match="plain integers"):
            DeviceCounts(0, {0: (0, digest, 0, 0)})

    def test_too_few_counters(self) -> None:
        """Every kind of action has a counter."""
        with pytest.raises(ValueError, match="refresh, F, dI, dW"):
            DeviceCounts(0, {0: (1, 2)})

    @pytest.mark.parametrize("stages", [None, 3, [0], {0: None}, {0: 4}])
    def test_no_counters(self, stages: Any) -> None:
        """A value that is not a mapping of sequences is named as such."""
        with pytest.raises(TypeError, match=r"counters( by stage)?, got"):
            DeviceCounts(0, stages)

    @pytest.mark.parametrize("counted", [3, "0", [0]])
    def test_no_mapping(self, counted: Any) -> None:
        """A value that is not a mapping of counts is named, at a commit and at its query."""
        step = Step()
        step.run()
        for ask in (step.contract.check_commit, step.contract.commit_epoch):
            with pytest.raises(TypeError, match=r"^counted: expected DeviceCounts by state domain"):
                ask(counted=counted)

        assert 0 == step.contract.epoch

    @pytest.mark.parametrize("counts", [True, False], ids=["counting", "not-counting"])
    @pytest.mark.parametrize("counted", [3, {}, {1: None}, None])
    def test_guards_are_asked_first(self, counted: Any, counts: bool) -> None:
        """With any counts, a commit and its query refuse with the same message."""
        contract = Contract([stage(0)], counted=counts)
        said = []
        for name in ("check_commit", "commit_epoch"):
            ask = getattr(contract, name)
            with pytest.raises(Refused, match=r"^epoch\.not-final in check_update") as caught:
                ask(counted=counted)
            said.append(str(caught.value))
            with pytest.raises(TypeError, match=rf"^{name}: epoch must be an int"):
                ask(True, counted=counted)

        assert said[0] == said[1]


class TestDestinations:
    """One slot is used by two microbatches, whose dW have destinations of their own."""

    #: Two destinations that lie at two places.
    APART = tuple(
        Destination(matrix, m, (2,), "float32", "cuda:0", 64 * (2 * m + n + 1), 8)
        for m in (0, 1)
        for n, matrix in enumerate(MATRICES)
    )

    def run(self, into: tuple[int, int], destinations: tuple[Destination, ...]) -> tuple[Any, Any]:
        """Two microbatches in one slot; the device's dW write where `into` says."""
        contract = Contract(
            [stage(slots=1, destinations=destinations)], omit=("version",), counted=True
        )
        device = Device((0,))
        for m in (0, 1):
            key = TapeKey(0, 0, m)
            ref = contract.commit(contract.check_forward(key))
            assert ref is not None
            contract.wait()
            contract.bind(key)
            contract.commit(contract.check_dgrad(key, ref), MATRICES)
            contract.commit(contract.check_wgrad(key, ref), MATRICES)
            contract.wait()
            device.run("F", 0, ref.slot)
            device.run("dI", 0, ref.slot)
            device.digest = fold(device.digest, mark("dW", ref.slot, OVERWRITES, into[m]))
            device.numbers[0][COUNTED.index("dW")] += 1
        contract.finalize(0)
        return contract, {0: device.counts()}

    def test_own_destinations_are_accepted(self) -> None:
        contract, counted = self.run((0, 1), self.APART)

        assert 1 == contract.commit_epoch(counted=counted)

    @pytest.mark.parametrize("into", [(1, 0), (0, 0), (1, 1)])
    def test_other_destinations_are_refused(self, into: tuple[int, int]) -> None:
        """Both graphs overwrite in one slot; only their destinations distinguish them."""
        contract, counted = self.run(into, self.APART)

        with refused(contract, "epoch.device-order", "digest"):
            contract.commit_epoch(counted=counted)

    def test_without_addresses_all_have_one_number(self) -> None:
        """Without addresses the contract cannot distinguish destinations."""
        symbolic = tuple(Destination(matrix, m) for m in (0, 1) for matrix in MATRICES)
        contract, counted = self.run((0, 0), symbolic)

        assert 1 == contract.commit_epoch(counted=counted)


class TestDigest:
    def test_marks_differ(self) -> None:
        """Any two actions or places have different marks, and no mark is zero."""
        marks = [
            mark(action, place, writes)
            for place in range(9)
            for action in COUNTED
            for writes in ways_of(action)
        ]

        assert sorted(marks) == [*range(1, len(marks) + 1)]
        assert len(marks) == 9 * (len(COUNTED) - 1 + len(WAYS))
        elsewhere = {mark("dW", p, w, d) for p in range(9) for w in WAYS for d in range(1, 9)}
        assert len(elsewhere - {*marks}) == 9 * len(WAYS) * 8

    def test_it_wraps_as_the_device_s_integers_do(self) -> None:
        """A digest stays a signed 64-bit integer, and folds as exact arithmetic modulo 2**64."""
        digest, exact = 0, 0
        for number in range(1, 200):
            digest = fold(digest, number)
            exact = exact * 6364136223846793005 + number

            assert -(2**63) <= digest < 2**63
            assert 0 == (digest - exact) % 2**64


def test_a_restore_begins_at_zero_whoever_was_told() -> None:
    """Even if an observer raises at the restore, counts of the old incarnation are dropped."""
    step = Step()
    saved = step.contract.checkpoint()
    step.run()
    step.contract.drain()

    def full(*_: Any) -> None:
        raise OSError("full")

    step.contract.observer = full
    with pytest.raises(OSError, match=r"^full$"):
        step.contract.restore(saved)
    step.contract.observer = None
    step.device = Device((0, 1))
    step.run()

    assert 1 == step.commit()


def test_a_stage_config_is_unchanged() -> None:
    """A contract that does not count can restore a checkpoint of a contract that counts."""
    configs = [StageConfig(0, microbatches=1, slots=1)]
    checkpoint = Contract(configs, counted=True).checkpoint()

    Contract(configs).restore(checkpoint)

"""
Weights of gradients: the weights of one epoch add up to the declared sum, over all passes (walks).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from qeffect import Contract, Refused, StageConfig, TapeKey
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import LogError, replay_lines
from qeffect.verification.logs.edits import reseal

#: The weight that a dI reports, by walk and microbatch.
Weights = list[list[Any]]


def contract(microbatches: int = 2, *, reports: Any = (1, 1), **options: Any) -> Contract:
    """One stage that reports weights which add up to a fraction."""
    config = StageConfig(
        0, microbatches, microbatches, matrices=("w",), weights_sum=reports, **options
    )
    return Contract([config])


def backward(
    of: Contract,
    key: TapeKey,
    weight: Any,
    matrices: tuple[str, ...] = ("w",),
    updates: int | None = None,
) -> None:
    """F, dI with a weight, and dW of one key."""
    with of.forward(key) as f:
        f.updates = updates
    of.bind(key)
    of.wait()
    with of.dgrad(key, f.ref) as i:
        i.queued, i.weight, i.updates = matrices, weight, updates
    with of.wgrad(key, f.ref) as w:
        w.covered = matrices
    of.wait()


def step(of: Contract, weights: Weights) -> None:
    """An epoch of one walk for each list of weights; a shorter list shortens the walk."""
    with of.refresh(0):
        pass
    for walk, given in enumerate(weights):
        if walk:
            of.next_walk()
        if len(given) < of.stages[0].microbatches:
            of.shorten_walk(len(given))
        for microbatch, weight in enumerate(given):
            backward(of, TapeKey(of.epoch, 0, microbatch), weight)
        of.finalize(0)
    of.commit_epoch()
    of.join()


class TestUpdate:
    @pytest.mark.parametrize(
        "weights",
        [
            [[(1, 2), (1, 2)]],
            [[(3, 8), (5, 8)]],  # by the tokens of each
            [[(0, 1), (1, 1)]],  # a microbatch whose tokens are all masked
            [[(1, 4), (1, 4)], [(1, 4), (1, 4)]],
            [[(1, 3), (1, 3)], [(1, 3)]],
            [[(1, 1)]],
        ],
    )
    def test_weights_that_add_up(self, weights: Weights) -> None:
        """One walk or several, whole or shortened; afterwards the next epoch counts anew."""
        of = contract()
        step(of, weights)
        step(of, [[(1, 2), (1, 2)]])

        assert 2 == of.epoch
        assert ([0], [0]) == (of.memory.parts, of.memory.unweighed)

    @pytest.mark.parametrize(
        ("weights", "found"),
        [
            ([[(1, 1), (1, 1)]], "2 of 1 parts"),  # the loss was not divided
            ([[(1, 4), (1, 4)]], "2 of 4 parts"),  # it was divided twice
            ([[(3, 1), (5, 1)]], "8 of 1 parts"),  # a sum over tokens
            ([[(1, 2), (1, 2)], [(1, 2), (1, 2)]], "4 of 2 parts"),  # by one walk of two
            ([[(1, 2)]], "1 of 2 parts"),  # by the configured number in a shortened walk
        ],
    )
    def test_a_wrong_scale_is_refused(self, weights: Weights, found: str) -> None:
        """The update is refused, and nothing has changed; the same step is accepted unreported."""
        of = contract()
        with pytest.raises(Refused) as caught:
            step(of, weights)

        assert ("epoch.wrong-weights", "check_update") == (
            caught.value.clause,
            caught.value.transition,
        )
        assert f"microbatch weights that add up to {found} (stage 0)" == caught.value.found
        assert 0 == of.epoch
        step(contract(reports=None), weights)

    def test_check_commit_asks_before_other_ranks_do(self) -> None:
        """`check_commit` finds the wrong sum, so that no rank updates."""
        of = contract(1)
        with of.refresh(0):
            pass
        backward(of, TapeKey(0, 0, 0), (1, 2))
        of.finalize(0)
        with pytest.raises(Refused, match=r"^epoch\.wrong-weights"):
            of.check_commit()

    def test_a_sum_over_replicas(self) -> None:
        """With a sum of 1/R each replica weights its share; a mean counted twice is refused."""
        step(contract(reports=(1, 2)), [[(1, 4), (1, 4)]])
        with pytest.raises(Refused, match=r"^epoch\.wrong-weights"):
            step(contract(), [[(1, 4), (1, 4)]])

    def test_a_restore_counts_anew(self) -> None:
        """A restore in the middle of an epoch forgets the weights so far."""
        of = contract()
        of.drain()
        saved = of.checkpoint()
        with of.refresh(0):
            pass
        backward(of, TapeKey(0, 0, 0), (1, 3))
        of.drain()
        of.restore(saved)
        step(of, [[(1, 2), (1, 2)]])

        assert 1 == of.epoch

    def test_blocks_share_the_weight_of_their_microbatch(self) -> None:
        """Each block and invocation of a microbatch reports the microbatch's weight."""
        of = Contract(
            [StageConfig(0, 1, 4, blocks=2, invocations=2, matrices=("w",), weights_sum=(1, 1))]
        )
        with of.refresh(0):
            pass
        for block in (0, 1):
            for invocation in (0, 1):
                backward(of, TapeKey(0, 0, 0, block, invocation), (1, 1))
        of.finalize(0)
        of.commit_epoch()

        assert 1 == of.epoch

    def test_each_stage_has_a_sum_of_its_own(self) -> None:
        """A stage that divides again is named, though the stage after it weights rightly."""
        of = Contract([StageConfig(s, 1, 1, matrices=("w",), weights_sum=(1, 1)) for s in (4, 6)])
        for stage, weight in ((4, (1, 2)), (6, (1, 1))):
            with of.refresh(stage):
                pass
            backward(of, TapeKey(0, stage, 0), weight)
            of.finalize(stage)
        with pytest.raises(Refused) as caught:
            of.commit_epoch()

        assert "microbatch weights that add up to 1 of 2 parts (stage 4)" == caught.value.found


class TestWithOtherRelations:
    @pytest.mark.parametrize(
        ("weights", "stage"),
        [
            ({0: [(1, 2), (1, 2)], 1: [(1, 2), (1, 2)]}, None),
            ({0: [(1, 2), (1, 2)], 1: [(1, 4), (1, 4)]}, 1),
            ({0: [(1, 1), (1, 1)], 1: [(1, 2), (1, 2)]}, 0),
        ],
    )
    def test_stages_that_share_a_tied_weight(
        self, weights: dict[int, list[Any]], stage: int | None
    ) -> None:
        """Both write one destination, whose gradient is right only if the sum of each is."""
        of = Contract(
            [
                StageConfig(
                    s, 2, 2, matrices=("v", "w"), tied=("w",), buffers={"w": "table"},
                    weights_sum=(1, 1),
                )
                for s in (0, 1)
            ]
        )  # fmt: skip
        for s in (1, 0):
            with of.refresh(s):
                pass
            for m in (0, 1):
                backward(of, TapeKey(0, s, m), weights[s][m], ("v", "w"))
        for s in (0, 1):
            of.finalize(s)
        if stage is None:
            assert 1 == of.commit_epoch()
            return
        with pytest.raises(Refused, match=r"^epoch\.wrong-weights") as caught:
            of.commit_epoch()
        assert f"(stage {stage})" in caught.value.found

    @pytest.mark.parametrize(("weight", "refuses"), [((1, 2), False), ((1, 3), True)])
    def test_an_evaluation_has_no_weight(self, weight: tuple[int, int], refuses: bool) -> None:
        """Between two microbatches and before the update, it leaves the sum as it was."""
        of = contract(reports_updates=True)
        with of.refresh(0):
            pass
        backward(of, TapeKey(0, 0, 0), (1, 2) if not refuses else weight, updates=1)
        for _ in range(2):
            of.commit(of.check_evaluation(0, cached=True), updates=0)
        backward(of, TapeKey(0, 0, 1), weight, updates=1)
        of.commit(of.check_evaluation(0, cached=True), updates=0)
        of.wait()
        of.finalize(0)
        if not refuses:
            assert 1 == of.commit_epoch()
            return
        with pytest.raises(Refused, match=r"^epoch\.wrong-weights") as caught:
            of.commit_epoch()
        assert "microbatch weights that add up to 2 of 3 parts (stage 0)" == caught.value.found


class TestReport:
    @pytest.mark.parametrize(
        "weight", [None, 1, 0.5, (1,), (1, 2, 3), (1, 0), (-1, 2), (True, 2), (1, 2.0), "ab"]
    )
    def test_a_weight_is_a_fraction(self, weight: Any) -> None:
        """No weight is refused, and so is one that is not two integers."""
        of = contract()
        with of.refresh(0):
            pass
        with pytest.raises(Refused) as caught:
            backward(of, TapeKey(0, 0, 0), weight)

        assert ("epoch.other-parts", "commit_dgrad") == (
            caught.value.clause,
            caught.value.transition,
        )
        assert "no readable microbatch weight in the report of dI" == caught.value.found
        assert [1] == of.memory.poisoned

    def test_another_denominator(self) -> None:
        """A divisor that changes within the epoch is refused at once."""
        of = contract()
        with of.refresh(0):
            pass
        backward(of, TapeKey(0, 0, 0), (1, 2))
        with pytest.raises(Refused, match=r"^epoch\.other-parts") as caught:
            backward(of, TapeKey(0, 0, 1), (2, 4))

        assert "a microbatch weight of 2 of 4 parts" == caught.value.found
        assert "a microbatch weight of 2 parts, like the epoch's earlier weights" == (
            caught.value.expected
        )

    def test_a_stage_that_does_not_report_is_trusted(self) -> None:
        """What it passes is not looked at."""
        of = contract(reports=None)
        step(of, [[(1, 3), "nonsense"]])

        assert ([0], [0]) == (of.memory.parts, of.memory.unweighed)

    @pytest.mark.parametrize("wrong", [1, (1,), (0, 1), (1, 0), (1.0, 1), (True, 1), "11"])
    def test_the_declared_sum_is_a_fraction(self, wrong: Any) -> None:
        """Anything but two positive integers is refused when the stage is configured."""
        with pytest.raises(TypeError, match=r"weights_sum must be \(numerator, denominator\)"):
            contract(reports=wrong)

    def test_a_recorded_step_has_its_weights(self) -> None:
        """A step of weights is recorded, and committed as one."""
        of = contract()
        step(of, [[(1, 2), (1, 2)]])
        for _ in range(2):
            recording = of.record_step()
            step(of, [[(1, 2), (1, 2)]])
            made = recording.end()

        assert of.check_step(made) is None
        of.commit_step(made)
        assert 4 == of.epoch


class TestLog:
    def recorded(self) -> list[str]:
        """The log of one step whose two dI report."""
        of = contract()
        with Recorder(of) as log:
            step(of, [[(1, 2), (1, 2)]])
        return log.lines

    def test_weights_are_recorded_and_replayed(self) -> None:
        """A log holds each weight and its parts; draws before them are spelled as unreported."""
        lines = self.recorded()

        told = [line for line in lines if '"draws":-1,"weight":1,"parts":2,"digest"' in line]
        assert 2 == len(told)
        assert '"weights_sum":[1,1]' in lines[0]
        assert "accepted" == replay_lines(lines).verdict

    @pytest.mark.parametrize(
        ("was", "now", "clause"),
        [
            (',"draws":-1,"weight":1,"parts":2', "", "epoch.other-parts"),
            ('"weight":1', '"weight":2', "epoch.wrong-weights"),
            ('"parts":2', '"parts":0', "epoch.other-parts"),
        ],
    )
    def test_a_forged_weight_is_refused(self, was: str, now: str, clause: str) -> None:
        """Each line must have a weight, and their sum the declared one."""
        bodies = [line.partition(',"digest"')[0] for line in self.recorded()]
        at = next(n for n, body in enumerate(bodies) if was in body)
        bodies[at] = bodies[at].replace(was, now)

        assert clause == replay_lines(reseal(bodies)).clause

    @pytest.mark.parametrize(
        "now", ['"weight":1', '"draws":-1', '"parts":2', '"draws":-1,"weight":1']
    )
    def test_a_weight_comes_with_its_parts(self, now: str) -> None:
        """A line has all three fields, or none of them."""
        bodies = [line.partition(',"digest"')[0] for line in self.recorded()]
        was = '"draws":-1,"weight":1,"parts":2'
        at = next(n for n, body in enumerate(bodies) if was in body)
        bodies[at] = bodies[at].replace(was, now)
        with pytest.raises(LogError):
            replay_lines(reseal(bodies))

    def test_a_stage_that_does_not_report_leaves_no_trace(self) -> None:
        """Header and lines are those of a log from before the report existed."""
        of = contract(reports=None)
        with Recorder(of) as log:
            step(of, [[None, None]])

        assert "weight" not in "".join(log.lines[:-1]).replace("weight_", "")
        closing = json.loads(log.lines[-1])
        del closing["digest"]
        for column in ("parts", "unweighed", "reports_weights"):
            del closing["state"][column]
        bodies = [line.partition(',"digest"')[0] for line in log.lines[:-1]]
        bodies.append(json.dumps(closing, separators=(",", ":"))[:-1])
        assert "accepted" == replay_lines(reseal(bodies)).verdict

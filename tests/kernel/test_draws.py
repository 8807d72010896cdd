"""
Random numbers: a replay that draws those of an earlier one, and a recomputation that draws others.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from qeffect import Contract, Refused, StageConfig, TapeKey, TapeRef
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import LogError, replay_lines
from qeffect.verification.logs.edits import reseal

REPORTS = {"reports_draws": True, "recomputes_draws": True}


def contract(**options: Any) -> Contract:
    """Two stages of one domain with two microbatches each; by default both report all draws."""
    told = {**REPORTS, **options}
    return Contract([StageConfig(s, 2, 2, matrices=("w",), **told) for s in (0, 1)])


def forward(
    of: Contract, stage: int, microbatch: int, draws: Any, refresh: bool = False
) -> TapeRef:
    """Run F, which began to draw at a position."""
    ticket = of.check_forward(TapeKey(of.epoch, stage, microbatch), refresh=refresh)
    ref = of.commit(ticket, draws=draws)
    assert ref is not None
    return ref


def dgrad(of: Contract, stage: int, microbatch: int, ref: TapeRef, draws: Any) -> None:
    """Bind and run dI, whose recomputation began to draw at a position."""
    key = TapeKey(of.epoch, stage, microbatch)
    of.bind(key)
    of.wait()
    of.commit(of.check_dgrad(key, ref), ("w",), draws=draws)


class TestForward:
    @pytest.mark.parametrize("draws", [7, 6, 0])
    def test_a_replay_that_draws_the_same_numbers_again(self, draws: int) -> None:
        """A graph that replays its capture's seed and offset begins where an earlier F began."""
        of = contract()
        forward(of, 0, 0, 7, refresh=True)
        with pytest.raises(Refused) as caught:
            forward(of, 0, 1, draws)

        assert "order.draws-again" == caught.value.clause
        assert f"random numbers drawn from position {draws}" == caught.value.found
        assert "a position after 7, where the latest F of domain 0 began" == caught.value.expected
        assert [1] == of.memory.poisoned
        assert [7] == of.memory.drawn

    def test_without_the_report_the_same_program_is_accepted(self) -> None:
        """A stage that does not report is trusted: what it passes is not looked at."""
        of = contract(reports_draws=False, recomputes_draws=False)
        ref = forward(of, 0, 0, 7, refresh=True)
        forward(of, 0, 1, 7)
        dgrad(of, 0, 0, ref, 3)

        assert [-1] == of.memory.drawn
        assert 3 == of.token(0)

    def test_another_stage_of_the_domain_draws_from_the_same_generator(self) -> None:
        """The chunks of a rank share one generator."""
        of = contract()
        forward(of, 0, 0, 7, refresh=True)
        with pytest.raises(Refused, match=r"^order\.draws-again"):
            forward(of, 1, 0, 7, refresh=True)

    def test_a_stage_that_does_not_report_forgets_nothing(self) -> None:
        """A stage without dropout runs in between; the position before it still counts."""
        stages = [StageConfig(s, 2, 2, matrices=("w",), reports_draws=s == 0) for s in (0, 1)]
        of = Contract(stages)
        forward(of, 0, 0, 7, refresh=True)
        forward(of, 1, 0, None, refresh=True)
        forward(of, 1, 1, 90)

        assert [7] == of.memory.drawn
        with pytest.raises(Refused, match=r"^order\.draws-again"):
            forward(of, 0, 1, 7)

    def test_stages_of_other_domains_have_generators_of_their_own(self) -> None:
        """Two domains never compare their positions."""
        stages = [
            StageConfig(s, 1, 1, domain=s, matrices=("w",), reports_draws=True) for s in (0, 1)
        ]
        of = Contract(stages)
        for s in (0, 1):
            ticket = of.check_forward(TapeKey(0, s, 0), refresh=True, link=s)
            of.commit(ticket, draws=4)

        assert [4, 4] == of.memory.drawn

    @pytest.mark.parametrize(
        ("draws", "found"),
        [
            (None, "no report of where F began to draw"),
            (-1, "no readable count in the report of where F began to draw: -1"),
            (True, "no readable count in the report of where F began to draw: True"),
            (1.0, "no readable count in the report of where F began to draw: 1.0"),
        ],
    )
    def test_a_report_is_a_position(self, draws: Any, found: str) -> None:
        """No report is refused, also of the first F; so is a report that cannot be read."""
        of = contract()
        with pytest.raises(Refused) as caught:
            forward(of, 0, 0, draws, refresh=True)

        assert "order.draws-again" == caught.value.clause
        assert found == caught.value.found
        assert "a position of at least 0" == caught.value.expected

    def test_positions_count_over_epochs(self) -> None:
        """A commit forgets nothing: the next epoch draws other numbers."""
        of = Contract([StageConfig(0, 1, 1, matrices=("w",), **REPORTS)])
        ref = forward(of, 0, 0, 5, refresh=True)
        dgrad(of, 0, 0, ref, 5)
        of.commit(of.check_wgrad(TapeKey(0, 0, 0), ref), ("w",))
        of.wait()
        of.finalize(0)
        of.commit_epoch()
        of.join()
        with pytest.raises(Refused, match=r"^order\.draws-again"):
            forward(of, 0, 0, 5, refresh=True)

    def test_a_restore_forgets_the_position(self) -> None:
        """A repeated epoch restores the generator with the weights and draws the same again."""
        of = contract()
        start = of.checkpoint()
        forward(of, 0, 0, 7, refresh=True)
        with pytest.raises(Refused):
            forward(of, 0, 1, 7)
        of.drain()
        of.drop(TapeKey(0, 0, 0), of.live()[TapeKey(0, 0, 0)])
        of.restore(start)

        assert [-1] == of.memory.drawn
        forward(of, 0, 0, 7, refresh=True)
        assert [7] == of.memory.drawn


class TestRecomputation:
    @pytest.mark.parametrize(
        ("draws", "found"),
        [
            (9, "random numbers drawn again from position 9"),
            (None, "no report of where the recomputation began to draw"),
        ],
    )
    def test_a_recomputation_that_draws_others(self, draws: Any, found: str) -> None:
        """The generator as dI found it, or another microbatch's state, gives other numbers."""
        of = contract()
        ref = forward(of, 0, 0, 7, refresh=True)
        forward(of, 0, 1, 9)
        with pytest.raises(Refused) as caught:
            dgrad(of, 0, 0, ref, draws)

        assert "order.wrong-draws" == caught.value.clause
        assert found == caught.value.found
        assert "the random numbers of the same key's F, from position 7" == caught.value.expected
        assert [1] == of.memory.poisoned

    def test_each_recomputes_its_own(self) -> None:
        """Every order of dI is right; a recomputation does not move where F began."""
        of = contract()
        refs = [forward(of, 0, 0, 7, refresh=True), forward(of, 0, 1, 9)]
        for microbatch, draws in ((1, 9), (0, 7)):
            dgrad(of, 0, microbatch, refs[microbatch], draws)

        assert [9] == of.memory.drawn

    def test_a_backward_that_keeps_its_masks_reports_nothing(self) -> None:
        """Without recomputation dI is not asked."""
        of = contract(recomputes_draws=False)
        ref = forward(of, 0, 0, 7, refresh=True)
        dgrad(of, 0, 0, ref, None)

        assert 2 == of.token(0)

    def test_it_is_compared_with_what_the_forward_reported(self) -> None:
        """Without the report of F there is nothing to compare with."""
        with pytest.raises(ValueError, match=r"recomputes_draws=True, which needs reports_draws"):
            StageConfig(0, 1, 1, recomputes_draws=True)


class TestBlocks:
    def test_guarded_actions_report(self) -> None:
        """F and dI as context managers."""
        of = contract()
        key = TapeKey(0, 0, 0)
        with of.forward(key, refresh=True) as f:
            f.draws = 7
        of.bind(key)
        of.wait()
        with pytest.raises(Refused, match=r"^order\.wrong-draws"), of.dgrad(key, f.ref) as i:
            i.queued, i.draws = ("w",), 8

    def test_a_step_that_draws_is_not_recorded(self) -> None:
        """Each step draws other numbers, so that one step does not stand for the next."""
        of = Contract([StageConfig(0, 1, 1, matrices=("w",), reports_draws=True)])
        recording = of.record_step()
        ref = forward(of, 0, 0, 5, refresh=True)
        dgrad(of, 0, 0, ref, None)
        of.commit(of.check_wgrad(TapeKey(0, 0, 0), ref), ("w",))
        of.wait()
        of.finalize(0)
        of.commit_epoch()
        with pytest.raises(ValueError, match="cannot record a step whose F report where they draw"):
            recording.end()


def recorded() -> list[str]:
    """The log of one F and one dI that report."""
    of = contract()
    with Recorder(of) as log:
        ref = forward(of, 0, 0, 7, refresh=True)
        dgrad(of, 0, 0, ref, 7)
    return log.lines


class TestLog:
    def test_draws_are_recorded_and_replayed(self) -> None:
        """A log holds the positions, and replaying it asks for them again."""
        lines = recorded()

        assert '"updates":-1,"draws":7,"digest"' in lines[2]
        assert '"updates":-1,"scales":-1,"draws":7,"digest"' in lines[6]
        assert "accepted" == replay_lines(lines).verdict

    @pytest.mark.parametrize(
        ("was", "now", "clause"),
        [
            (',"draws":7', "", "order.draws-again"),
            ('"scales":-1,"draws":7', '"scales":-1,"draws":6', "order.wrong-draws"),
            ('"scales":-1,"draws":7', '"scales":-1', "order.wrong-draws"),
        ],
    )
    def test_a_log_without_the_report_is_refused(self, was: str, now: str, clause: str) -> None:
        """A stage that reports must report in each line."""
        bodies = [line.partition(',"digest"')[0] for line in recorded()]
        at = next(n for n, body in enumerate(bodies) if was in body)
        bodies[at] = bodies[at].replace(was, now)

        assert clause == replay_lines(reseal(bodies)).clause

    def test_no_report_has_one_spelling(self) -> None:
        """A line without a report lacks the field."""
        bodies = [line.partition(',"digest"')[0] for line in recorded()]
        bodies[2] = bodies[2].replace('"draws":7', '"draws":-1')
        with pytest.raises(LogError, match="field draws: found -1; expected an integer of"):
            replay_lines(reseal(bodies))

    def test_a_stage_that_does_not_report_leaves_no_trace(self) -> None:
        """Header and lines are those of a log from before the report existed."""
        of = contract(reports_draws=False, recomputes_draws=False)
        with Recorder(of) as log:
            forward(of, 0, 0, None, refresh=True)

        assert "draws" not in "".join(log.lines[:-1])
        closing = json.loads(log.lines[-1])
        del closing["digest"]
        for column in ("drawn", "drawn_at", "reports_draws", "recomputes_draws"):
            del closing["state"][column]
        bodies = [line.partition(',"digest"')[0] for line in log.lines[:-1]]
        bodies.append(json.dumps(closing, separators=(",", ":"))[:-1])
        assert "accepted" == replay_lines(reseal(bodies)).verdict

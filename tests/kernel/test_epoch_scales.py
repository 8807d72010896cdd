"""Scales per epoch: F and dI only gather amaxes, and the update moves the scales once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qeffect import Contract, Refused, StageConfig, TapeKey, TapeRef
from qeffect.configuration import Configuration
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import replay_lines
from qeffect.steps import RecordedStep

from .helpers import refused

#: A stage of such a domain whose backend reports movements, and whose dI reads live scales.
TOLD: dict[str, Any] = {"reports_updates": True, "tape_scales": "live", "scales": "epoch"}


def config(stage: int = 0, microbatches: int = 2, **options: Any) -> StageConfig:
    """A stage whose scales move once an epoch, and which reports that."""
    return StageConfig(stage, microbatches, microbatches, matrices=("w",), **{**TOLD, **options})


def contract(*stages: StageConfig, **options: Any) -> Contract:
    """A contract of such a stage, or of other stages."""
    return Contract(stages or [config()], **options)


def forward(of: Contract, microbatch: int, stage: int = 0, updates: Any = 0) -> TapeRef:
    """F, which refreshes where it must, and reports a number of movements."""
    key = TapeKey(of.epoch, stage, microbatch)
    stale = of.memory.cache_epoch[stage] != of.epoch
    ticket = of.check_forward(key, refresh=stale, link=_link(of, stage))
    ref = of.commit(ticket, updates=updates)
    assert ref is not None
    return ref


def backward(of: Contract, ref: TapeRef, microbatch: int, stage: int = 0, **told: Any) -> None:
    """Run dI and dW of a tape."""
    key, link = TapeKey(of.epoch, stage, microbatch), _link(of, stage)
    of.bind(key)
    of.wait(link)
    of.commit(of.check_dgrad(key, ref, link=link), ("w",), **{"updates": 0, **told})
    of.commit(of.check_wgrad(key, ref, link=link), ("w",))


def walk(of: Contract, updates: int = 0) -> None:
    """Every microbatch of every stage: all F first, then dI and dW; then finalize."""
    for one in of.stages:
        tapes = [forward(of, m, one.stage, updates) for m in range(one.microbatches)]
        for m, ref in enumerate(tapes):
            backward(of, ref, m, one.stage, updates=updates)
        of.wait(_link(of, one.stage))
        of.finalize(one.stage, _link(of, one.stage))


def update(of: Contract, *moving: int) -> None:
    """The update, in which the scales of these stages' domains move."""
    with of.update() as block:
        for stage in moving:
            block.move_scales(stage, updates=1)
    for link in range(len(of.memory.submitted)):
        of.join(link)


def _link(of: Contract, stage: int) -> int:
    (own,) = (one for one in of.stages if one.stage == stage)
    return of.link(domain=own.domain)


class TestGather:
    def test_live_scales_outlast_other_forwards(self) -> None:
        """A dI finds the scales of its own F after other F of the domain, in any order."""
        of = contract(config(microbatches=3))
        tapes = [forward(of, m) for m in range(3)]
        for m in (1, 2, 0):
            backward(of, tapes[m], m)

        assert [6] == list(of.memory.token)

    def test_an_evaluation_moves_nothing(self) -> None:
        """An evaluation reports 0 movements, and marks nothing as gathered."""
        of = contract()
        with of.evaluation(0, cached=False) as block:
            block.updates = 0
        assert [0] == of.memory.gathered

        with (
            pytest.raises(Refused, match=r"order\.scaling-updates"),
            of.evaluation(0, cached=False) as block,
        ):
            block.updates = 1

    @pytest.mark.parametrize("updates", [1, 2, None])
    def test_a_forward_that_moves_them(self, updates: int | None) -> None:
        """An F that moved scales has failed: the domain is poisoned."""
        of = contract()
        with pytest.raises(Refused) as caught:
            forward(of, 0, updates=updates)

        assert "order.scaling-updates" == caught.value.clause
        assert "0 scaling updates of domain 0" == caught.value.expected
        assert [1] == of.memory.poisoned

    @pytest.mark.parametrize("updates", [1, None])
    def test_a_dgrad_that_moves_them(self, updates: int | None) -> None:
        """The same of dI, as when Transformer Engine's backward ends its region."""
        of = contract()
        ref = forward(of, 0)
        with pytest.raises(Refused) as caught:
            backward(of, ref, 0, updates=updates)

        assert "order.scaling-updates" == caught.value.clause
        assert [1] == of.memory.poisoned

    def test_carried_scales_are_named_by_their_movement(self) -> None:
        """All tapes of an epoch carry the same scales; those of an earlier epoch are others."""
        of = contract(config(tape_scales="carried"))
        for name in (0, 4, 8):
            tapes = [forward(of, m) for m in (0, 1)]
            for m in (1, 0):
                backward(of, tapes[m], m, scales=name)
            of.wait()
            of.finalize(0)
            update(of, 0)
        ref = forward(of, 0)
        with pytest.raises(Refused, match=r"order\.wrong-scales"):
            backward(of, ref, 0, scales=8)

    def test_a_restore_names_them_anew(self) -> None:
        """Positions count from zero, as tokens do."""
        of = contract(config(tape_scales="carried"))
        start = of.checkpoint()
        tapes = [forward(of, m) for m in (0, 1)]
        for m in (0, 1):
            backward(of, tapes[m], m, scales=0)
        of.wait()
        of.finalize(0)
        update(of, 0)
        assert [4] == of.memory.rolled_at
        of.drain()
        of.restore(start)

        backward(of, forward(of, 0), 0, scales=0)

    def test_without_reports_a_forward_is_trusted(self) -> None:
        """Where nothing is reported F and dI gather all the same, so that the update must move."""
        of = contract(StageConfig(0, 1, 1, matrices=("w",), scales="epoch"))
        walk(of, updates=7)

        assert [1] == of.memory.gathered


class TestMove:
    def test_once_in_each_update(self) -> None:
        """Two epochs, the second of two walks: each update moves once and commits."""
        of = contract()
        walk(of)
        update(of, 0)
        walk(of)
        of.next_walk()
        walk(of)
        update(of, 0)

        assert 2 == of.epoch
        assert [0] == of.memory.gathered
        assert [12] == list(of.memory.token)

    def test_a_second_movement(self) -> None:
        """Stages of one domain share its scales: the second stage's movement is one too many."""
        of = contract(config(0), config(1))
        walk(of)
        ticket = of.check_update()
        of.move_scales(0, updates=1)
        with refused(of, "order.nothing-gathered", "already moved in this", "one move_scales"):
            of.move_scales(1, updates=1)
        of.commit(ticket)

        assert 1 == of.epoch

    @pytest.mark.parametrize("when", ["first", "mid", "final", "after"])
    def test_outside_an_update(self, when: str) -> None:
        """No movement before the first F, in the middle, before the check or after the commit."""
        of = contract()
        if when == "mid":
            backward(of, forward(of, 0), 0)
        elif when != "first":
            walk(of)
        if when == "after":
            update(of, 0)
        with refused(of, "order.moves-outside-update", "with no optimizer update in flight"):
            of.move_scales(0, updates=1)

    def test_of_a_domain_that_moves_with_each_action(self) -> None:
        """The update of a process with both forms moves the scales of one domain only."""
        of = contract(config(0), StageConfig(1, 1, 1, domain="each", matrices=("w",)))
        walk(of)
        ticket = of.check_update()
        with refused(of, "order.nothing-gathered", "move with each F and dI"):
            of.move_scales(1)
        of.move_scales(0, updates=1)
        of.commit(ticket)

        assert 1 == of.epoch

    @pytest.mark.parametrize("updates", [0, 2, None, -1, True, "1"])
    def test_another_number_of_movements(self, updates: Any) -> None:
        """A movement that was skipped or doubled leaves the update half done."""
        of = contract()
        walk(of)
        with pytest.raises(Refused) as caught, of.update() as block:
            block.move_scales(0, updates=updates)

        assert "order.scaling-updates" == caught.value.clause
        assert "1 scaling update of domain 0" == caught.value.expected
        assert of.half_updated

    def test_unknown_stages(self) -> None:
        """A stage that is not configured is named."""
        of = contract()
        with pytest.raises(ValueError, match="stage 1 is not configured"):
            of.move_scales(1)
        with pytest.raises(TypeError, match="stage must be an int"):
            of.move_scales("0")  # type: ignore[arg-type]


class TestCommit:
    def test_an_update_that_moves_nothing(self) -> None:
        """Weights are updated, scales are not: the update is aborted."""
        of = contract()
        walk(of)
        with pytest.raises(Refused) as caught:
            update(of)

        assert "order.scales-not-moved" == caught.value.clause
        assert "commit_update" == caught.value.transition
        assert "domain 0" in caught.value.found
        assert of.half_updated
        assert 0 == of.epoch

    def test_every_domain_moves(self) -> None:
        """One domain that was forgotten is enough."""
        of = contract(config(0), config(1, domain="b"))
        walk(of)
        with pytest.raises(Refused, match=r"order\.scales-not-moved"):
            update(of, 0)

        of = contract(config(0), config(1, domain="b"))
        walk(of)
        update(of, 1, 0)
        assert 1 == of.epoch

    def test_commit_epoch_has_no_place_for_a_movement(self) -> None:
        """The check and the commit in one call are refused before anything changes."""
        of = contract()
        walk(of)
        with refused(of, "order.scales-not-moved", "domain 0"):
            of.commit_epoch()
        update(of, 0)

        assert 1 == of.epoch

    def test_commit_epoch_names_an_earlier_refusal(self) -> None:
        """A stage that is not final comes before scales that have not moved."""
        of = contract()
        forward(of, 0)
        with refused(of, "ownership.live-tape"):
            of.commit_epoch()

    def test_the_check_asks_nothing_of_scales(self) -> None:
        """Ranks consent before the scales move."""
        of = contract()
        walk(of)
        of.check_commit()

    def test_the_next_epoch_gathers_anew(self) -> None:
        """A movement counts for its own update only."""
        of = contract()
        walk(of)
        update(of, 0)
        walk(of)
        with pytest.raises(Refused, match=r"order\.scales-not-moved"):
            update(of)


class TestFailures:
    @pytest.mark.parametrize("moves", [False, True])
    def test_an_aborted_update(self, moves: bool) -> None:
        """Scales and weights are half updated together; a restore begins without anything."""
        of = contract()
        start = of.checkpoint()
        walk(of)
        ticket = of.check_update()
        if moves:
            of.move_scales(0, updates=1)
        of.abort(ticket)
        assert of.half_updated
        with refused(of, "order.moves-outside-update"):
            of.move_scales(0, updates=1)
        of.drain()
        of.restore(start)
        assert [0] == of.memory.gathered
        walk(of)
        update(of, 0)

        assert 1 == of.epoch

    def test_a_purged_epoch(self) -> None:
        """What gathered before a purge never moves; the restore clears it."""
        of = contract()
        start = of.checkpoint()
        forward(of, 0)
        of.purge(0)
        of.drain()
        with refused(of, "persistence.mid-epoch"):
            of.checkpoint()
        of.restore(start)
        walk(of)
        update(of, 0)

        assert 1 == of.epoch

    def test_a_late_fault_in_the_update(self) -> None:
        """Scales moved over wrong gradients: half updated, whether or not the update commits."""
        of = contract()
        walk(of)
        ticket = of.check_update()
        of.move_scales(0, updates=1)
        of.fail(0)
        of.commit(ticket)
        of.join()

        assert of.half_updated
        with refused(of, "epoch.half-updated"):
            of.check_forward(TapeKey(1, 0, 0), refresh=True)

    def test_a_checkpoint_between_epochs(self) -> None:
        """After the update nothing is gathered, and a checkpoint is taken and restored."""
        of = contract()
        walk(of)
        update(of, 0)
        of.drain()
        taken = of.checkpoint()
        walk(of)
        of.drain()
        of.restore(taken)

        assert (1, [0]) == (of.epoch, of.memory.gathered)


class TestConfiguration:
    def test_one_form_for_a_domain(self) -> None:
        """Stages of a domain share its scales, and so their form."""
        with pytest.raises(ValueError, match="stage 1 has scales='action', but stage 0 of the"):
            contract(config(0), StageConfig(1, 1, 1))
        contract(config(0), StageConfig(1, 1, 1, domain="b"))

    def test_an_unknown_form(self) -> None:
        """Two forms exist."""
        with pytest.raises(ValueError, match="'scales' must be in"):
            StageConfig(0, 1, 1, scales="step")

    def test_without_order(self) -> None:
        """A contract without order has no scales to ask about."""
        with pytest.raises(ValueError, match="scales='epoch' needs the relation 'order'"):
            contract(StageConfig(0, 1, 1, scales="epoch"), omit={"order"})
        of = contract(StageConfig(0, 1, 1), omit={"order"})
        of.move_scales(0)

    def test_plain_data(self) -> None:
        """Plain data name the form only where it is not the default, and read it back."""
        plain = contract(config(0), StageConfig(1, 1, 1, domain=1)).configuration.plain()
        assert ["epoch", "action"] == [s.get("scales", "action") for s in plain["stages"]]
        assert "scales" not in plain["stages"][1]
        assert Configuration.read(json.loads(json.dumps(plain))).plain() == plain


class TestSteps:
    def recorded(self, of: Contract) -> RecordedStep:
        """A step of the contract, recorded after one that was not."""
        walk(of)
        update(of, 0)
        recording = of.record_step()
        walk(of)
        update(of, 0)
        return recording.end()

    def test_a_step_in_one_call(self) -> None:
        """A recorded step moves the scales too, and leaves the state that its actions leave."""
        one, other = contract(), contract()
        other.memory.incarnation[0] = one.memory.incarnation[0]
        step = self.recorded(one)
        assert one.check_step(step) is None
        one.commit_step(step)
        for _ in range(3):
            walk(other)
            update(other, 0)

        assert 3 == one.epoch
        for name in ("token", "position", "gathered", "weight_epoch", "serial", "optimizing"):
            assert getattr(one.memory, name) == getattr(other.memory, name)

    def test_a_step_after_an_open_movement(self) -> None:
        """A step does not recur where an epoch has begun to gather."""
        of = contract()
        step = self.recorded(of)
        forward(of, 0)

        assert of.check_step(step) is not None

    def test_an_event_log(self) -> None:
        """A log has each movement in a line, and a repeated step in one; both are replayed."""
        of = contract()
        log = Recorder(of)
        of.commit_step(self.recorded(of))
        lines = log.close()

        assert 2 == sum('"transition":"move_scales"' in line for line in lines)
        assert '"updates":1' in next(line for line in lines if "move_scales" in line)
        assert "accepted" == replay_lines(lines).verdict

"""Evaluations: forwards between the actions of an epoch that do not train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qeffect import Refused, TapeKey

from .helpers import Rig, refused, stage

REPORTS = {"reports_fills": True, "reports_updates": True}


def evaluate(rig: Rig, cached: bool = True, index: int = 0) -> None:
    """Run an evaluation that updates and fills nothing."""
    link = rig.link(index)
    ticket = rig.contract.check_evaluation(index, cached=cached, link=link)
    rig.contract.commit(ticket, updates=0)


def whole(**options: Any) -> Rig:
    """A stage of one microbatch, final, whose update comes next."""
    rig = Rig(stage(microbatches=1), **options)
    rig.microbatch(0)
    rig.finish()
    return rig


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The columns in which two snapshots differ."""
    return {name for name in before if before[name] != after[name]}


class TestInTraining:
    """An evaluation in the middle of training leaves the epoch as it was."""

    def test_it_changes_nothing_that_training_reads(self) -> None:
        """It counts as a ticket and as device work; nothing else differs."""
        rig = Rig(stage())
        rig.microbatch(0)
        before = dict(rig.contract.snapshot())

        evaluate(rig)

        assert changed(before, dict(rig.contract.snapshot())) <= {
            "serial",
            "replays",
            "undrained",
            "unwaited",
        }
        assert rig.contract.outstanding() == ()

    @pytest.mark.parametrize("cached", [False, True])
    def test_between_any_two_microbatches_and_before_the_update(self, cached: bool) -> None:
        """With every slot live, since an evaluation takes none."""
        rig = Rig(stage())
        refs = [rig.forward(m) for m in (0, 1)]
        evaluate(rig, cached)
        for m, ref in enumerate(refs):
            rig.dgrad(ref, m)
            evaluate(rig, cached)
            rig.wgrad(ref, m)
        evaluate(rig, cached)
        rig.finish()
        evaluate(rig, cached)
        rig.contract.wait()
        assert rig.commit() == 1
        evaluate(rig, cached=False)
        rig.contract.drain()
        rig.contract.checkpoint()

    def test_an_ordinary_forward_of_evaluation_keeps_the_epoch_open(self) -> None:
        """The program that was necessary before: a key of its own owes dI and dW."""
        rig = Rig(stage(invocations=2))
        for m in (0, 1):
            rig.microbatch(m)
        key = TapeKey(0, 0, 0, 0, 1)
        ref = rig.contract.commit(rig.contract.check_forward(key))
        rig.contract.drop(key, ref)

        with refused(rig, "order.incomplete"):
            rig.contract.finalize(0)

    def test_a_device_counts_none(self) -> None:
        """Counts and digests of a device are those of F, dI, dW and refreshes."""
        rig = Rig(stage(), counted=True)
        before = rig.contract.committed_counts()

        evaluate(rig, cached=False)

        assert rig.contract.committed_counts() == before


class TestRefused:
    """When no evaluation may run."""

    def test_over_a_stale_cache(self) -> None:
        """Unless the evaluation quantizes the weights itself."""
        rig = Rig(stage())
        with refused(rig, "version.stale-cache"):
            rig.contract.check_evaluation(0)
        evaluate(rig, cached=False)

    def test_between_a_refresh_and_its_forward(self) -> None:
        """The forward comes first."""
        rig = Rig(stage())
        rig.contract.commit(rig.contract.check_refresh(0))
        with refused(rig, "version.refresh-interrupted"):
            rig.contract.check_evaluation(0)

    def test_beside_an_action_of_its_domain(self) -> None:
        """An F in flight moves the scales that the evaluation would read."""
        rig = Rig(stage())
        ticket = rig.check_forward(0)
        with refused(rig, "order.in-flight"):
            rig.contract.check_evaluation(0, cached=False)
        rig.contract.commit(ticket)

    @pytest.mark.parametrize(
        ("clause", "call"),
        [
            ("order.in-flight", lambda rig: rig.check_forward(0)),
            ("order.in-flight", lambda rig: rig.contract.check_refresh(0)),
            ("order.in-flight", lambda rig: rig.contract.check_evaluation(0, cached=False)),
            ("persistence.action-in-flight", lambda rig: rig.contract.checkpoint()),
        ],
    )
    def test_what_waits_for_its_end(self, clause: str, call: Callable[[Rig], Any]) -> None:
        """Until it is committed, no action of the domain and no checkpoint."""
        rig = Rig(stage())
        ticket = rig.contract.check_evaluation(0, cached=False)
        with refused(rig, clause):
            call(rig)
        rig.contract.commit(ticket)
        rig.forward(0)

    def test_the_update_and_a_restore_wait_for_it(self) -> None:
        """The update would write the weights that the evaluation reads."""
        rig = Rig(stage(microbatches=1))
        start = rig.contract.checkpoint()
        rig.microbatch(0)
        rig.finish()
        ticket = rig.contract.check_evaluation(0)
        with refused(rig, "epoch.in-flight"):
            rig.contract.check_update()
        with refused(rig, "epoch.in-flight"):
            rig.contract.next_walk()
        rig.contract.drain()
        with refused(rig, "epoch.in-flight"):
            rig.contract.restore(start)
        rig.contract.commit(ticket)
        rig.contract.wait()
        assert rig.commit() == 1

    def test_during_an_update_and_after_half_of_one(self) -> None:
        """The weights are neither the old nor the new."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()
        ticket = rig.contract.check_update()
        rig.contract.join()
        with refused(rig, "epoch.in-flight"):
            rig.contract.check_evaluation(0)
        rig.contract.abort(ticket)
        rig.contract.join()
        with refused(rig, "epoch.half-updated"):
            rig.contract.check_evaluation(0)

    def test_before_the_update_is_awaited(self) -> None:
        """On the graph stream, the evaluation could read half-written weights."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()
        rig.contract.commit_epoch()
        with refused(rig, "completion.update-to-graph"):
            rig.contract.check_evaluation(0, cached=False)

    def test_twice_at_once_without_scaling_state(self) -> None:
        """Where order is left out, another stage's evaluation may run beside it."""
        rig = Rig(stage(0), stage(1), omit=("order",))
        first = rig.contract.check_evaluation(0, cached=False)
        second = rig.contract.check_evaluation(1, cached=False)
        with refused(rig, "epoch.in-flight"):
            rig.contract.check_evaluation(0, cached=False)
        for ticket in (first, second):
            rig.contract.commit(ticket)

    def test_a_ticket_is_redeemed_once(self) -> None:
        """By a commit or an abort."""
        rig = Rig(stage())
        ticket = rig.contract.check_evaluation(0, cached=False)
        assert rig.contract.outstanding() == (ticket,)
        rig.contract.commit(ticket)
        for redeem in (rig.contract.commit, rig.contract.abort):
            with refused(rig, "epoch.unknown-ticket"):
                redeem(ticket)


class TestUpdate:
    """The stream of the update waits for the work of every evaluation, which reads the weights."""

    def test_an_evaluation_after_the_wait_for_the_gradients(self) -> None:
        """On a machine the optimizer would overwrite weights that the evaluation still reads."""
        rig = whole()
        evaluate(rig)

        for call in (rig.contract.check_update, rig.contract.check_commit):
            with refused(rig, "completion.evaluation-not-awaited", "domains 0", "links 0"):
                call()
        rig.contract.wait()
        assert rig.contract.commit_epoch() == 1

    def test_a_drain_is_no_wait(self) -> None:
        """As for gradients: the host saw the work finish, but no stream was told to wait."""
        rig = whole()
        evaluate(rig)
        rig.contract.drain()

        with refused(rig, "completion.evaluation-not-awaited"):
            rig.contract.check_update()

    def test_a_wait_before_the_commit_does_not_count(self) -> None:
        """The evaluation may be enqueued at any moment until its commit."""
        rig = whole()
        ticket = rig.contract.check_evaluation(0)
        rig.contract.wait()
        rig.contract.commit(ticket)

        with refused(rig, "completion.evaluation-not-awaited"):
            rig.contract.check_update()

    def test_another_stream_waited(self) -> None:
        """The optimizer's stream runs on."""
        rig = whole(callers=("main", "eval"))
        evaluate(rig)
        rig.contract.wait(rig.link(0, "eval"))

        with refused(rig, "completion.evaluation-not-awaited"):
            rig.contract.check_update()
        rig.contract.wait()
        assert rig.contract.commit_epoch() == 1

    def test_another_stream_waited_before_the_gradients_were_final(self) -> None:
        """The stream that finalizes is judged by its own waits."""
        rig = Rig(stage(microbatches=1), callers=("main", "eval"))
        rig.microbatch(0)
        rig.contract.wait(rig.link(0, "eval"))
        evaluate(rig)
        rig.contract.wait()
        rig.contract.finalize(0, rig.link(0, "eval"))

        with refused(rig, "completion.evaluation-not-awaited", "caller 1", "links 1"):
            rig.contract.check_update(caller="eval")
        rig.contract.wait(rig.link(0, "eval"))
        assert rig.contract.commit_epoch(caller="eval") == 1

    def test_in_another_domain(self) -> None:
        """Each domain has a graph stream of its own."""
        rig = Rig(stage(0, microbatches=1), stage(1, domain="b", microbatches=1))
        for index in (0, 1):
            rig.microbatch(0, index)
            rig.finish(index)
        evaluate(rig, index=1)
        rig.contract.wait(rig.link(0))

        with refused(rig, "completion.evaluation-not-awaited", "domains 1", "links 1"):
            rig.contract.check_update()
        rig.contract.wait(rig.link(1))
        assert rig.contract.commit_epoch() == 1

    def test_a_wait_before_finalize_is_enough(self) -> None:
        """The wait for the gradients, if it comes after the evaluation."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        evaluate(rig)
        rig.finish()
        assert rig.contract.commit_epoch() == 1

    def test_a_restore_forgets_it(self) -> None:
        """The host has seen it finish."""
        rig = Rig(stage(microbatches=1))
        start = rig.contract.checkpoint()
        evaluate(rig, cached=False)
        rig.contract.drain()
        rig.contract.restore(start)
        rig.contract.join()
        rig.microbatch(0)
        rig.finish()
        assert rig.contract.commit_epoch() == 1


class TestFailure:
    """An evaluation that changed something, or that failed."""

    @pytest.mark.parametrize(
        ("clause", "told"),
        [
            ("order.scaling-updates", {"updates": 1}),
            ("order.scaling-updates", {}),
            ("version.fill-unasked", {"updates": 0, "filled": {"w0": 0, "w1": 0}}),
        ],
    )
    def test_wrong_evidence_spoils_the_epoch(self, clause: str, told: dict[str, Any]) -> None:
        """The scales or the cache are no longer those of training."""
        rig = Rig(stage(microbatches=1, **REPORTS))
        ticket = rig.contract.check_evaluation(0, cached=False)
        with pytest.raises(Refused) as caught:
            rig.contract.commit(ticket, **told)
        assert caught.value.clause == clause
        with refused(rig, "order.poisoned"):
            rig.check_forward(0)

    @pytest.mark.parametrize("omit", [(), ("order",)])
    def test_a_failure_withdraws_the_end_of_the_epoch(self, omit: tuple[str, ...]) -> None:
        """Also where the stage was final already, and without scaling state."""
        rig = Rig(stage(microbatches=1), omit=omit)
        rig.microbatch(0)
        rig.finish()
        with pytest.raises(MemoryError), rig.contract.evaluation(0):
            raise MemoryError
        with refused(rig, "epoch.not-final"):
            rig.contract.check_update()

    def test_a_block_reports(self) -> None:
        """The context manager takes the reports of the backend."""
        rig = Rig(stage(**REPORTS))
        with rig.contract.evaluation(0, cached=False) as block:
            block.updates = 0
        block = rig.contract.evaluation(0, cached=False)
        block.updates = 2
        with pytest.raises(Refused) as caught, block:
            pass
        assert caught.value.clause == "order.scaling-updates"

"""
Completion: a replay waits for its caller, and a consumer waits for the replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qeffect import Contract

from .helpers import Rig, refused, stage


class TestCallerToGraph:
    def test_every_replay_waits(self) -> None:
        """After new work of the caller the graph stream must wait before any replay."""
        rig = Rig()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.contract.submit()
        calls: tuple[Callable[[], object], ...] = (
            lambda: rig.check_forward(1),
            lambda: rig.check_wgrad(ref, 0),
        )
        for call in calls:
            with refused(
                rig,
                "completion.caller-to-graph",
                "waited for 0 of the caller's 1 piece ",
                "all these pieces",
            ):
                call()
        rig.contract.join()
        rig.wgrad(ref, 0)

        assert rig.forward(1).slot == ref.slot

    def test_a_refresh_and_a_dgrad(self) -> None:
        """A refresh and dI are replays too."""
        rig = Rig()
        rig.contract.submit()
        with refused(rig, "completion.caller-to-graph", "1 piece ", "all"):
            rig.contract.check_refresh(0)
        rig.contract.join()
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        rig.contract.submit()
        with refused(
            rig,
            "completion.caller-to-graph",
            "waited for 1 of the caller's 2 pieces",
            "all these pieces",
        ):
            rig.contract.check_dgrad(rig.key(0), ref)

    def test_the_latest_work_counts(self) -> None:
        """A wait for earlier work does not cover work that was enqueued since."""
        rig = Rig()
        rig.contract.submit()
        rig.contract.join()
        rig.contract.submit()

        with refused(
            rig,
            "completion.caller-to-graph",
            "waited for 1 of the caller's 2 pieces",
            "all these pieces",
        ):
            rig.check_forward(0)

    def test_enter_is_submit_and_join(self) -> None:
        """One call tells both, of the caller's every link, and an observer hears both."""
        stages = [stage(0, domain="a"), stage(1, domain="b")]
        heard: list[list[tuple[str, tuple[object, ...]]]] = [[], [], []]
        found = []
        for n, observed in enumerate((False, True, True)):
            contract = Contract(stages, callers=("main", "side"))
            if observed:
                contract.observer = lambda name, given, _, to=heard[n]: to.append((name, given))
            link = contract.link("side", "b")
            if n < 2:
                contract.enter(link)
            else:
                contract.submit("side")
                contract.join(link)
            found.append((contract.memory.submitted[:], contract.memory.joined[:]))

        assert [([0, 0, 1, 1], [0, 0, 0, 1])] * 3 == found
        assert heard[1] == heard[2] == [("submit", (2,)), ("submit", (3,)), ("join", (3,))]
        assert [] == heard[0]

    def test_enter_on_no_link(self) -> None:
        """A link that was never configured is refused by name, and nothing changes."""
        rig = Rig()
        before = rig.contract.snapshot()

        for link in (-1, 9, True):
            with pytest.raises((TypeError, ValueError), match="link"):
                rig.contract.enter(link)

        assert before == rig.contract.snapshot()

    def test_each_caller_for_itself(self) -> None:
        """A replay does not wait for another caller's work."""
        rig = Rig(callers=("main", "side"))
        rig.contract.submit("side")

        assert rig.forward(0).slot == 0
        with refused(rig, "completion.caller-to-graph"):
            rig.check_forward(1, link=rig.contract.link("side"))

    def test_submit_reaches_every_domain(self) -> None:
        """What a caller enqueues, every graph stream it calls into must wait for."""
        rig = Rig(stage(0, domain="a"), stage(1, domain="b"))
        rig.contract.submit()
        rig.contract.join(rig.link(0))

        assert rig.forward(0, 0).slot == 0
        with refused(rig, "completion.caller-to-graph"):
            rig.check_forward(0, 1)


class TestGraphToCaller:
    def test_dgrad_consumes_the_forward(self) -> None:
        """dI's caller must have waited for the replay that wrote the tape."""
        rig = Rig()
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))

        with refused(rig, "completion.graph-to-caller", "up to replay 0", "after replay 1"):
            rig.contract.check_dgrad(rig.key(0), ref)
        rig.contract.wait()
        assert rig.contract.check_dgrad(rig.key(0), ref).slot == ref.slot

    def test_an_earlier_wait_is_not_enough(self) -> None:
        """A wait before the replay covers nothing of it."""
        rig = Rig()
        rig.forward(0)
        rig.contract.wait()
        ref = rig.forward(1)
        rig.contract.bind(rig.key(1))

        with refused(rig, "completion.graph-to-caller", "up to replay 1", "after replay 2"):
            rig.contract.check_dgrad(rig.key(1), ref)

    def test_a_reader_waits_for_the_replay_that_wrote(self) -> None:
        """A reader waits for the replay that wrote what it reads."""
        rig = Rig(stage(sends_output=True, sends_gradient=True))
        ref = rig.forward(0)
        with refused(rig, "completion.graph-to-caller", "up to replay 0", "after replay 1"):
            rig.contract.read(rig.key(0), ref)
        rig.dgrad(ref, 0)
        with refused(rig, "completion.graph-to-caller", "up to replay 1", "after replay 2"):
            rig.contract.read(rig.key(0), ref, gradient=True)
        rig.contract.wait()
        rig.contract.read(rig.key(0), ref, gradient=True)

    def test_finalize_consumes_the_gradients(self) -> None:
        """Gradients are final for a stream that waited for the last dW."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)

        with refused(rig, "completion.graph-to-caller", "up to replay 1", "after replay 3"):
            rig.contract.finalize(0)
        rig.contract.wait()
        rig.contract.finalize(0)

    def test_the_consumer_s_own_stream(self) -> None:
        """One stream's wait does not order another's."""
        rig = Rig(callers=("main", "side"))
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait(rig.contract.link("side"))

        with refused(rig, "completion.graph-to-caller", "up to replay 0"):
            rig.contract.check_dgrad(rig.key(0), ref)
        assert rig.contract.check_dgrad(rig.key(0), ref, link=1).slot == ref.slot

    def test_a_wgrad_consumes_nothing_of_the_caller(self) -> None:
        """dW follows its dI on the graph stream, whether the caller waited or not."""
        rig = Rig()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)

        assert rig.contract.live() == {}


class TestWrongStream:
    def test_every_use_of_a_link(self) -> None:
        """A link of another domain orders nothing here."""
        rig = Rig(stage(0, domain="a", sends_output=True), stage(1, domain="b"))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        wrong = rig.link(1)
        calls: tuple[Callable[[], object], ...] = (
            lambda: rig.contract.check_refresh(1, rig.link(0)),
            lambda: rig.check_forward(1, link=wrong),
            lambda: rig.check_wgrad(ref, 0, link=wrong),
            lambda: rig.contract.read(rig.key(0), ref, link=wrong),
        )
        for call in calls:
            with refused(rig, "completion.wrong-stream", "link ", "a link of domain "):
                call()

    def test_dgrad_and_finalize(self) -> None:
        """dI and finalize likewise."""
        rig = Rig(stage(0, domain="a", microbatches=1), stage(1, domain="b", microbatches=1))
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        with refused(rig, "completion.wrong-stream", "link 1 of domain 1", "domain 0"):
            rig.contract.check_dgrad(rig.key(0), ref, link=1)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        with refused(rig, "completion.wrong-stream", "link 1 of domain 1", "domain 0"):
            rig.contract.finalize(0, 1)

    def test_a_link_is_found_by_caller_and_domain(self) -> None:
        """A link is found by caller and domain; any other is named with those that exist."""
        rig = Rig(stage(0, domain="a"), stage(1, domain="b"), callers=("main", "side"))

        assert [0, 1, 2, 3] == [
            rig.contract.link(caller, domain) for caller in ("main", "side") for domain in "ab"
        ]
        with pytest.raises(ValueError, match="no link of caller 'x' and domain 'a'; expected"):
            rig.contract.link("x")


class TestDeviceWork:
    @pytest.mark.parametrize("action", ["refresh", "F", "dI", "dW"])
    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_live_until_drained(self, action: str, end: str) -> None:
        """Device work counts as live until the host saw it finish, also that of a failed action."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        if action == "refresh":
            ticket = rig.contract.check_refresh(0)
        elif action == "F":
            ticket = rig.check_forward(0)
        else:
            ref = rig.forward(0)
            if action == "dI":
                ticket = rig.check_dgrad(ref, 0)
            else:
                rig.dgrad(ref, 0)
                ticket = rig.check_wgrad(ref, 0)
        rig.contract.drain()
        if end == "commit":
            rig.contract.commit(ticket, rig.matrices())
        else:
            rig.contract.abort(ticket)

        with refused(rig, "persistence.device-work", "finished: 0", "every domain drained"):
            rig.contract.restore(checkpoint)
        rig.contract.drain()
        rig.contract.restore(checkpoint)


def _whole(**options: Any) -> Rig:
    """Two stages in two domains, whole, and awaited by every caller."""
    rig = Rig(stage(0, domain="a", microbatches=1), stage(1, domain="b", microbatches=1), **options)
    for index in (0, 1):
        rig.microbatch(0, index)
    for link in range(len(rig.contract.memory.domain_at)):
        rig.contract.wait(link)
    return rig


class TestUpdate:
    def test_the_graph_stream_waits_for_it(self) -> None:
        """After a commit neither a refresh nor an F is accepted before the update was awaited."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()
        rig.contract.commit_epoch()
        calls: tuple[Callable[[], object], ...] = (
            lambda: rig.contract.check_refresh(0),
            lambda: rig.check_forward(0),
        )
        for call in calls:
            with refused(rig, "completion.update-to-graph", "of caller 0", "a join of link 0"):
                call()
        rig.contract.join()

        rig.contract.commit(rig.contract.check_refresh(0))
        assert 0 == rig.forward(0).slot

    def test_without_version_too(self) -> None:
        """F reads the weights, also without a cache to refresh."""
        rig = Rig(stage(microbatches=1), omit=("version",))
        rig.microbatch(0)
        rig.finish()
        rig.contract.commit_epoch()

        with refused(rig, "completion.update-to-graph", "F of "):
            rig.check_forward(0)

    def test_each_graph_stream_waits(self) -> None:
        """A wait of one domain's graph stream does not count for another domain."""
        rig = _whole()
        for index in (0, 1):
            rig.contract.finalize(index, rig.link(index))
        rig.contract.commit_epoch()
        rig.contract.join(rig.link(0))

        rig.forward(0, 0)
        with refused(rig, "completion.update-to-graph", "of domain 1", "a join of link 1"):
            rig.check_forward(0, 1)

    def test_for_the_stream_that_it_ran_on(self) -> None:
        """A wait for another caller's stream does not count as a wait for the update."""
        rig = Rig(stage(microbatches=1), callers=("main", "optimizer"))
        rig.microbatch(0)
        optimizer = rig.link(0, "optimizer")
        rig.contract.wait(optimizer)
        rig.contract.finalize(0, optimizer)
        rig.contract.commit_epoch(caller="optimizer")
        rig.contract.enter(rig.link(0))

        with refused(rig, "completion.update-to-graph", "of caller 1", "a join of link 1"):
            rig.check_forward(0)
        rig.contract.join(optimizer)
        rig.forward(0)

    def test_or_the_host_saw_it_finish(self) -> None:
        """What the host has seen finish comes before everything that is enqueued later."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()
        rig.contract.commit_epoch()
        rig.contract.drain()

        assert 0 == rig.forward(0).slot

    def test_a_wait_before_it_does_not_cover_it(self) -> None:
        """A join, and a drain, are of what was enqueued before."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()
        rig.contract.join()
        rig.contract.drain()
        rig.contract.commit_epoch()

        with refused(rig, "completion.update-to-graph"):
            rig.check_forward(0)
        with refused(rig, "persistence.device-work", "finished: 0", "every domain drained"):
            rig.contract.checkpoint()

    def test_a_checkpoint_is_taken_after_it(self) -> None:
        """A graph stream that waits shows the host nothing: a checkpoint wants a drain."""
        rig = _whole()
        for index in (0, 1):
            rig.contract.finalize(index, rig.link(index))
        rig.contract.drain()
        rig.commit()

        with refused(rig, "persistence.device-work", "finished: 0, 1", "every domain drained"):
            rig.contract.checkpoint()
        rig.contract.drain()
        assert 1 == rig.contract.checkpoint().epoch

    def test_on_the_stream_that_awaited_the_gradients(self) -> None:
        """An update on another stream than the stream of the finalize is refused."""
        rig = Rig(stage(microbatches=1), callers=("main", "optimizer"))
        rig.microbatch(0)
        rig.finish()

        for call in (rig.contract.commit_epoch, rig.contract.check_commit):
            with refused(rig, "completion.update-stream", "caller 1", "caller 0"):
                call(caller="optimizer")
        assert 1 == rig.contract.commit_epoch(caller="main")

    def test_one_stream_awaits_every_gradient(self) -> None:
        """All stages are updated on one stream; a second one is refused at its finalize."""
        rig = _whole(callers=("main", "optimizer"))
        rig.contract.finalize(0, rig.link(0))

        with refused(rig, "completion.wrong-consumer", "link 3, of caller 1", "caller 0"):
            rig.contract.finalize(1, rig.link(1, "optimizer"))
        rig.contract.finalize(1, rig.link(1))
        assert 1 == rig.commit()

    @pytest.mark.parametrize("caller", ["x", 0, True, ["main"]])
    def test_a_caller_that_is_not_configured(self, caller: Any) -> None:
        """A wrong name is named with those that there are, and nothing changes."""
        rig = Rig()
        before = rig.contract.snapshot()

        for name in ("commit_epoch", "check_commit"):
            with pytest.raises(
                ValueError, match=rf"^{name}: no caller .*; expected one of \['main'\]$"
            ):
                getattr(rig.contract, name)(caller=caller)
        assert before == rig.contract.snapshot()

    def test_a_restore_forgets_it(self) -> None:
        """Loaded weights are nobody's update."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()
        checkpoint = Rig(stage(microbatches=1)).contract.checkpoint()
        rig.contract.commit_epoch()
        with refused(rig, "persistence.device-work"):
            rig.contract.restore(checkpoint)
        rig.contract.drain()
        rig.contract.restore(checkpoint)

        assert 0 == rig.forward(0).slot

"""
Strategies: every legal schedule is accepted; every illegal one is refused by the named clause.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from qeffect import Refused
from qeffect.verification.calls import Call
from qeffect.verification.walks.schedules import Schedule

from .strategies import Illegal, illegal_schedules, legal_schedules

_FIND = settings(
    max_examples=3_000,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def _names(schedule: Schedule) -> list[str]:
    return [call.transition for call in schedule.calls]


class TestLegal:
    @given(schedule=legal_schedules())
    def test_a_legal_schedule_is_accepted_call_by_call(self, schedule: Schedule) -> None:
        """A fresh contract accepts each call of a legal schedule."""
        contract = schedule.replay().contract

        assert contract.snapshot() == schedule.replay().contract.snapshot()

    @given(schedule=legal_schedules(longest=20))
    def test_a_schedule_prints_every_call_and_a_timeline(self, schedule: Schedule) -> None:
        """A schedule prints every call and a timeline."""
        text = str(schedule)

        assert text.startswith(f"Schedule over {schedule.process}:")
        assert text.count(" -> ") == len(schedule.calls)


def _before(schedule: Schedule, first: tuple[str, int], second: tuple[str, int]) -> bool:
    """Whether one commit of (transition, microbatch) precedes another in the first epoch."""
    places = {
        (call.transition, call.arguments["ticket"].key.microbatch): at
        for at, call in reversed(list(enumerate(schedule.calls)))
        if call.transition.startswith("commit_") and _key(call)
    }
    return first in places and second in places and places[first] < places[second]


def _key(call: Call) -> bool:
    ticket = call.arguments.get("ticket")
    return ticket is not None and ticket.key is not None and ticket.key.stage == 0


def _shortest(what: Callable[[Schedule], bool]) -> Schedule:
    """A schedule with a property, found among short schedules and then shrunk."""
    for steps in (6, 20, 120):
        with suppress(NoSuchExample):
            return find(legal_schedules(longest=steps), what, settings=_FIND, random=Random(0))
    raise NoSuchExample("no schedule has the property")


class TestReach:
    """
    What random schedules must reach, with the maximum number of calls after shrinking.

    Most shrink further: shrinking ends when no single step can be removed, which depends on the
    initial schedule. Before shrinking a schedule has some three hundred calls.
    """

    @pytest.mark.parametrize(
        ("what", "longest"),
        [
            pytest.param(lambda s: "commit_update" in _names(s), 30, marks=pytest.mark.ci),
            pytest.param(
                lambda s: _names(s).count("commit_update") > 1,
                60,
                marks=pytest.mark.nightly,  # as long as all others together
            ),
            (lambda s: "abort_dgrad" in _names(s), 40),
            (lambda s: "checkpoint" in _names(s)[2:], 10),
            (lambda s: any(c.arguments.get("fresh") for c in s.calls), 50),
            (lambda s: "purge" in _names(s), 20),
            (
                # delayed dW, not LIFO: dI 0 before dI 1, and dW 0 after dW 1 or before it
                lambda s: (
                    _before(s, ("commit_dgrad", 0), ("commit_dgrad", 1))
                    and _before(s, ("commit_dgrad", 1), ("commit_wgrad", 1))
                    and _before(s, ("commit_wgrad", 1), ("commit_wgrad", 0))
                ),
                60,
            ),
            pytest.param(
                lambda s: (
                    _before(s, ("commit_dgrad", 1), ("commit_dgrad", 0))
                    and _before(s, ("commit_dgrad", 0), ("commit_wgrad", 0))
                    and _before(s, ("commit_wgrad", 0), ("commit_wgrad", 1))
                ),
                60,
                marks=pytest.mark.nightly,
            ),
            pytest.param(
                # one checkpoint restored twice
                lambda s: any(
                    sum(c.arguments.get("checkpoint") is one for c in s.calls) > 2
                    for one in {
                        id(c.arguments.get("checkpoint")): c.arguments.get("checkpoint")
                        for c in s.calls
                        if c.transition == "restore"
                    }.values()
                ),
                60,
                marks=pytest.mark.nightly,
            ),
        ],
        ids=[
            "epoch",
            "two epochs",
            "abort",
            "checkpoint",
            "fresh process",
            "purge",
            "late dW",
            "crossed dW",
            "restored twice",
        ],
    )
    def test_random_schedules_reach_it_and_shrink_to_a_short_one(
        self, what: Callable[[Schedule], bool], longest: int
    ) -> None:
        """Random schedules reach the target, and the shortest one found is short."""
        found = _shortest(what)

        assert len(found.calls) <= longest, str(found)


class TestIllegal:
    @settings(suppress_health_check=list(HealthCheck))
    @given(illegal=illegal_schedules())
    def test_the_last_call_is_refused_and_nothing_changed(self, illegal: Illegal) -> None:
        """The last call is refused by the clause that it breaks, and the state is unchanged."""
        caller = illegal.schedule.replay()
        before = caller.contract.snapshot()
        with pytest.raises(Refused) as caught:
            caller.call(illegal.call)

        assert illegal.clause == caught.value.clause
        assert "evidence" in illegal.call.arguments or before == caller.contract.snapshot()

    def test_an_illegal_schedule_prints_the_call_and_the_clause(self) -> None:
        """An illegal schedule prints the calls before, the illegal call and the clause."""
        found = find(
            illegal_schedules(longest=6),
            lambda illegal: illegal.clause == "ownership.unknown-key",
            settings=_FIND,
            random=Random(0),
        )

        assert str(found).splitlines()[-1].startswith("then ")
        assert str(found).endswith("to be refused by ownership.unknown-key")

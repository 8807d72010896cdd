"""
Tickets: a check reserves resources, a commit or abort redeems the ticket once, and no call between
them can be refused for its sake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from qeffect import Refused, Ticket
from qeffect.engine.stage import OPTIONAL

from .helpers import MATRICES, Rig, refused, stage


def _in_flight(action: str, rig: Rig) -> Ticket:
    """Check an action of microbatch 0 and leave it in flight."""
    if action == "refresh":
        return rig.contract.check_refresh(0)
    if action == "F":
        return rig.check_forward(0)
    ref = rig.forward(0)
    if action == "dI":
        return rig.check_dgrad(ref, 0)
    rig.dgrad(ref, 0)
    return rig.check_wgrad(ref, 0)


ACTIONS = ("refresh", "F", "dI", "dW")


class TestRedeemed:
    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("first", ["commit", "abort"])
    @pytest.mark.parametrize("second", ["commit", "abort"])
    def test_a_ticket_is_redeemed_once(self, action: str, first: str, second: str) -> None:
        """A ticket is redeemed once, by a commit or an abort."""
        rig = Rig()
        ticket = _in_flight(action, rig)
        redeem: dict[str, Callable[[Ticket], Any]] = {
            "commit": lambda t: rig.contract.commit(t, MATRICES),
            "abort": rig.contract.abort,
        }
        redeem[first](ticket)
        family = "version" if action == "refresh" else "ownership"

        with refused(
            rig,
            f"{family}.unknown-ticket",
            f"ticket {ticket.serial}",
            "no refresh in flight" if action == "refresh" else "in flight there: none",
        ):
            redeem[second](ticket)

    @pytest.mark.parametrize("action", ACTIONS)
    def test_a_forward_returns_its_reference(self, action: str) -> None:
        """Only a forward's commit returns a reference, and leaves it on the ticket."""
        rig = Rig()
        ticket = _in_flight(action, rig)
        result = rig.contract.commit(ticket, MATRICES)

        if action == "F":
            assert result == ticket.ref
            assert rig.contract.live() == {rig.key(0): result}
        else:
            assert result is None

    def test_every_check_issues_the_next_serial(self) -> None:
        """Every check issues the next serial, also after aborts and restores."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        serials = [_in_flight("F", rig)]
        rig.contract.abort(serials[0])
        rig.contract.drain()
        rig.contract.restore(checkpoint)
        serials.append(_in_flight("refresh", rig))

        assert [1, 2] == [ticket.serial for ticket in serials]

    def test_a_refused_check_issues_none(self) -> None:
        """A refused check leaves the serial where it was."""
        rig = Rig()
        with refused(rig, "version.stale-cache"):
            rig.check_forward(0, refresh=False)

        assert _in_flight("F", rig).serial == 1


class TestForged:
    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_another_serial_slot_or_action(self, action: str, end: str) -> None:
        """Every part of a ticket must be as it was issued."""
        rig = Rig(stage(0), stage(1))
        ticket = _in_flight(action, rig)
        wrong = [evolve(ticket, serial=serial) for serial in (0, -1, ticket.serial + 1)]
        wrong += [evolve(ticket, slot=1)]
        wrong += [evolve(ticket, action=other) for other in ACTIONS if other != action]
        for forged in wrong:
            with pytest.raises(Refused) as caught, _unchanged(rig):
                getattr(rig.contract, end)(forged)
            assert caught.value.clause.endswith(".unknown-ticket"), forged
            assert caught.value.found
        rig.contract.commit(ticket, MATRICES)

    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("end", ["commit", "abort"])
    @pytest.mark.parametrize(
        "change", [{"slot": 99}, {"slot": -1}, {"slot": -2}, {"action": "B"}, {"serial": "1"}]
    )
    def test_out_of_range(self, action: str, end: str, change: dict[str, Any]) -> None:
        """A slot or action that does not exist is refused without a traceback."""
        rig = Rig()
        forged = evolve(_in_flight(action, rig), **change)

        with pytest.raises(Refused, match="unknown-ticket"), _unchanged(rig):
            getattr(rig.contract, end)(forged)

    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_of_another_contract(self, action: str, end: str) -> None:
        """Another contract's ticket is refused though its slot and serial are the same."""
        rig, other = Rig(), Rig()
        mine, foreign = _in_flight(action, rig), _in_flight(action, other)
        assert (mine.serial, mine.slot) == (foreign.serial, foreign.slot)

        with refused(
            rig,
            "ownership.unknown-ticket",
            f"issued by incarnation {foreign.incarnation:016x}",
            f"issued by incarnation {rig.contract.incarnation:016x}",
        ):
            getattr(rig.contract, end)(foreign)

    @pytest.mark.parametrize("wrong", ["zz", None, 1.5])
    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_of_no_incarnation_at_all(self, end: str, wrong: Any) -> None:
        """A message quotes an incarnation that is not a number."""
        rig = Rig()
        forged = evolve(_in_flight("F", rig), incarnation=wrong)

        with refused(rig, "ownership.unknown-ticket", f"issued by incarnation {wrong!r}"):
            getattr(rig.contract, end)(forged)

    @pytest.mark.parametrize("wrong", [None, 1, "ticket", ("F", 0, 1)])
    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_anything_but_a_ticket_is_named(self, end: str, wrong: Any) -> None:
        """A value that is not a ticket is named."""
        with pytest.raises(TypeError, match=f"^{end}: expected a Ticket, got "):
            getattr(Rig().contract, end)(wrong)


class TestEvidence:
    @pytest.mark.parametrize("evidence", [None, 7, [1, "w0"]])
    def test_no_collection_of_names(self, evidence: Any) -> None:
        """Evidence that is not a collection of names counts as empty: the action failed."""
        rig = Rig()
        ticket = _in_flight("dI", rig)

        with pytest.raises(Refused, match=r"ownership\.work-not-queued"):
            rig.contract.commit(ticket, evidence)
        assert rig.contract.live() == {}
        assert rig.contract.memory.held == [0, 0]

    def test_evidence_that_raises(self) -> None:
        """An iterable that raises counts as missing evidence; the action is no longer in flight."""
        rig = Rig()
        ticket = _in_flight("dW", rig)

        with pytest.raises(Refused, match=r"ownership\.matrix-coverage.*ZeroDivisionError"):
            rig.contract.commit(ticket, (str(1 // count) for count in (1, 0)))
        assert rig.contract.live() == {}

    def test_wrong_evidence_aborts(self) -> None:
        """After wrong evidence the ticket is spent, the tape gone and the domain poisoned."""
        rig = Rig()
        ticket = _in_flight("dI", rig)
        generation = rig.contract.memory.generation[ticket.slot]
        with pytest.raises(Refused, match=r"ownership\.work-not-queued"):
            rig.contract.commit(ticket, ())

        assert generation + 1 == rig.contract.memory.generation[ticket.slot]
        with refused(rig, "order.poisoned"):
            rig.check_forward(1)
        with refused(rig, "ownership.unknown-ticket"):
            rig.contract.commit(ticket, MATRICES)


class TestCommitNeverRefuses:
    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("omitted", [None, *sorted(OPTIONAL - {"version"})])
    def test_whatever_happened_between(self, action: str, omitted: str | None) -> None:
        """For a ticket in flight with whole evidence the commit succeeds, whatever came between."""
        rig = Rig(
            stage(0, slots=3, microbatches=3),
            stage(1, domain="b"),
            callers=("main", "side"),
            omit=() if omitted is None else {omitted},
        )
        contract = rig.contract
        checkpoint = contract.checkpoint()
        ticket = _in_flight(action, rig)
        between: list[Callable[[], Any]] = [
            lambda: contract.submit("main"),
            lambda: contract.submit("side"),
            contract.drain,
            lambda: contract.wait(),
            lambda: contract.invalidate(0),
            lambda: contract.invalidate(1),
            lambda: contract.reserve(rig.key(2)),
            lambda: contract.bind(rig.key(1)),
            lambda: rig.microbatch(0, 1),
            lambda: contract.check_refresh(0),
            lambda: rig.check_forward(1),
            lambda: contract.purge(0),
            lambda: [contract.drop(key, ref) for key, ref in contract.live().items()],
            lambda: contract.finalize(0),
            lambda: contract.commit_epoch(),
            lambda: contract.checkpoint(),
            lambda: contract.restore(checkpoint),
        ]
        refusals = 0
        for call in between:
            try:
                call()
            except Refused:
                refusals += 1
        contract.commit(ticket, MATRICES)

        assert refusals >= 3


class _unchanged:  # noqa: N801 - a context manager, used like a function
    """The contract's state is the same after the block, whatever it raised."""

    def __init__(self, rig: Rig) -> None:
        self.contract = rig.contract

    def __enter__(self) -> None:
        self.before = self.contract.snapshot()

    def __exit__(self, *_: object) -> None:
        assert self.before == self.contract.snapshot()

"""Relations that a backend leaves out: the remaining relations still form a contract."""

from __future__ import annotations

from itertools import combinations

import pytest

from qeffect import Ticket
from qeffect.engine.compose import source
from qeffect.engine.stage import OPTIONAL, RELATIONS, transitions

from .helpers import MATRICES, Rig, refused, stage

EACH = pytest.mark.parametrize("relation", sorted(OPTIONAL))
SUBSETS = [
    frozenset(chosen)
    for size in range(len(OPTIONAL) + 1)
    for chosen in combinations(sorted(OPTIONAL), size)
]

WITHOUT_VERSION = pytest.mark.parametrize(
    "omit", [s for s in SUBSETS if "version" in s], ids=lambda s: "+".join(sorted(s))
)


class TestAnySubset:
    @pytest.mark.parametrize("omit", SUBSETS, ids=lambda s: "+".join(sorted(s)) or "nothing")
    def test_an_orderly_process_runs_whatever_is_left_out(self, omit: frozenset[str]) -> None:
        """Whatever is left out, an orderly process runs epoch after epoch."""
        rig = Rig(stage(0, sends_output=True), stage(1, domain="b"), omit=omit)

        assert [1, 2] == [rig.epoch(), rig.epoch()]

    @pytest.mark.parametrize("omit", SUBSETS, ids=lambda s: "+".join(sorted(s)) or "nothing")
    def test_a_stale_reference_is_refused_in_every_composition(self, omit: frozenset[str]) -> None:
        """Ownership is never left out: a stale reference is refused in every composition."""
        rig = Rig(omit=omit)
        ref = rig.microbatch(0)

        with refused(rig, "ownership.stale-reference"):
            rig.contract.check_wgrad(rig.key(0), ref)
        with refused(rig, "ownership.repeated-forward"):
            rig.check_forward(0)

    def test_remaining_relations_are_listed_in_the_normative_order(self) -> None:
        """The composition lists the relations that remain, in the normative order."""
        for omit in SUBSETS:
            assert tuple(n for n in RELATIONS if n not in omit) == transitions(omit).relations


class TestEach:
    @EACH
    def test_no_clause_of_its_own(self, relation: str) -> None:
        """No function of the composition mentions a clause of a relation that was left out."""
        refusal = f'raise Refused("{relation}.left-out")'
        composed = [
            source(f).replace(refusal, "") for f in transitions({relation}).functions.values()
        ]

        assert not any(f'"{relation}.' in text for text in composed)
        whole = transitions().functions.values()
        assert any(f'"{relation}.' in source(function) for function in whole)

    @EACH
    def test_tickets_are_redeemed_once_in_every_composition(self, relation: str) -> None:
        """Tickets are redeemed once in every composition."""
        rig = Rig(omit={relation})
        ticket = rig.check_forward(0)
        rig.contract.commit(ticket)

        with refused(rig, "ownership.unknown-ticket"):
            rig.contract.commit(ticket)

    def test_without_version_there_is_no_cache(self) -> None:
        """Without version nothing is stale, and there is nothing to refresh or to invalidate."""
        rig = Rig(omit={"version"})
        for attempt in (rig.contract.check_refresh, rig.contract.invalidate):
            with refused(rig, "version.left-out", "of stage 0", "leave out the relation version"):
                attempt(0)

        assert rig.contract.check_forward(rig.key(0)).serial == 1

    @WITHOUT_VERSION
    @pytest.mark.parametrize("redeem", ["commit", "abort"])
    def test_a_forged_refresh_ticket_frees_no_domain(
        self, omit: frozenset[str], redeem: str
    ) -> None:
        """Without version no refresh is in flight: a ticket of one, whatever its number, is forged
        and must not free a domain in which an F runs."""
        rig = Rig(omit=omit)
        ticket = rig.check_forward(0)
        for serial in (0, ticket.serial):
            forged = Ticket("refresh", None, 0, serial, rig.contract.incarnation)
            with refused(rig, "version.left-out", "of stage 0"):
                getattr(rig.contract, redeem)(forged)
        if "order" not in omit:
            with refused(rig, "order.in-flight"):
                rig.check_forward(1)
        assert rig.contract.commit(ticket) is not None

    @WITHOUT_VERSION
    def test_an_epoch_commits_once(self, omit: frozenset[str]) -> None:
        """Also without version a commit names the epoch that it ends: one epoch does not commit
        again, and the next one not before its microbatches ran."""
        rig = Rig(omit=omit)
        assert rig.epoch() == 1
        for stale in (0, 0):
            with refused(rig, "epoch.wrong-epoch", f"epoch {stale}", "the weight epochs [1]"):
                rig.contract.commit_epoch(stale)
        rig.microbatch(0)
        with refused(rig, "epoch.wrong-epoch", "epoch 0"):
            rig.contract.commit_epoch(0)
        with refused(rig, "epoch.not-final"):
            rig.contract.commit_epoch()
        rig.microbatch(1)
        rig.finish()
        with refused(rig, "epoch.wrong-epoch", "epoch 2"):
            rig.contract.commit_epoch(2)

        assert rig.contract.commit_epoch() == 2

    def test_without_order_updates_overlap(self) -> None:
        """Without order several F and dI of a domain may be in flight, and none poisons it."""
        rig = Rig(omit={"order"})
        rig.contract.commit(rig.contract.check_refresh(0))
        rig.contract.bind(rig.key(0))
        tickets = [rig.check_forward(0), rig.check_forward(1)]
        rig.contract.abort(tickets[1])
        ref = rig.contract.commit(tickets[0])
        assert ref is not None

        rig.dgrad(ref, 0)
        assert rig.contract.token(0) == 0

    def test_without_order_a_refresh_is_alone(self) -> None:
        """Two refreshes of one cache never overlap, also where order does not say so."""
        rig = Rig(omit={"order"})
        ticket = rig.contract.check_refresh(0)
        with refused(rig, "version.in-flight"):
            rig.contract.check_refresh(0)
        rig.contract.commit(ticket)

        assert rig.contract.memory.cache_epoch == [0]

    def test_without_arena_writes_overlap(self) -> None:
        """Without an arena (gradients are copied) two dW of a stage may be in flight."""
        rig = Rig(omit={"arena"})
        refs = [rig.forward(0), rig.forward(1)]
        for microbatch in (0, 1):
            rig.contract.wait()
            key = rig.key(microbatch)
            rig.contract.commit(rig.contract.check_dgrad(key, refs[microbatch]), MATRICES)
        tickets = [rig.check_wgrad(refs[m], m) for m in (0, 1)]
        for ticket in tickets:
            rig.contract.commit(ticket, MATRICES)
        rig.finish()

        assert rig.contract.commit_epoch() == 1

    def test_without_completion_no_link_is_asked(self) -> None:
        """Without completion an action waits for nobody."""
        rig = Rig(omit={"completion"})
        rig.contract.submit()
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))

        assert rig.contract.check_dgrad(rig.key(0), ref).slot == ref.slot

    def test_without_reduction_a_commit_waits_for_none(self) -> None:
        """Without reduction an epoch commits when its stages are final."""
        assert Rig(omit={"reduction"}).epoch() == 1

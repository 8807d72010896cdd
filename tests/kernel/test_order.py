"""Order: each F and dI advances the effect token of its domain exactly once; dW never does."""

from __future__ import annotations

import pytest

from .helpers import Rig, refused, stage

_ORDER = (("F", (0, 0, 0, 0)), ("F", (0, 1, 0, 0)), ("dI", (0, 1, 0, 0)), ("dI", (0, 0, 0, 0)))


class TestToken:
    def test_who_advances_it(self) -> None:
        """F and dI advance the token by one, dW and a refresh leave it."""
        rig = Rig()
        tokens = [rig.contract.token(0)]
        rig.contract.commit(rig.contract.check_refresh(0))
        tokens.append(rig.contract.token(0))
        ref = rig.forward(0)
        tokens.append(rig.contract.token(0))
        rig.dgrad(ref, 0)
        tokens.append(rig.contract.token(0))
        rig.wgrad(ref, 0)
        tokens.append(rig.contract.token(0))

        assert [0, 0, 1, 2, 2] == tokens

    def test_a_check_does_not(self) -> None:
        """The token advances when the action succeeded, not when it was checked."""
        rig = Rig()
        ticket = rig.check_forward(0)
        assert rig.contract.token(0) == 0

        rig.contract.commit(ticket)
        assert rig.contract.token(0) == 1

    def test_neither_an_abort_nor_a_commit_rewinds_the_token(self) -> None:
        """An abort leaves the token where it was; a commit of the epoch too."""
        rig = Rig()
        rig.forward(0)
        rig.contract.abort(rig.check_forward(1))
        assert rig.contract.token(0) == 1

        rig = Rig()
        rig.epoch()
        assert rig.contract.token(0) == 4

    @pytest.mark.parametrize("token", [0, 2, -1])
    def test_wrong_token_of_dgrad(self, token: int) -> None:
        """dI threads the token that the last update left: none skipped, none doubled."""
        rig = Rig()
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()

        with refused(rig, "order.token", f"effect token {token}", "token 1"):
            rig.contract.check_dgrad(rig.key(0), ref, token=token)

    def test_wrong_token_of_forward(self) -> None:
        """F threads it likewise."""
        rig = Rig()

        with refused(rig, "order.token", "effect token 1", "token 0"):
            rig.check_forward(0, token=1)
        assert rig.forward(0, token=0).slot == 0

    def test_one_domain_is_one_sequence(self) -> None:
        """Stages of one domain share an effect token (a count of F and dI); stages of another
        domain have another token."""
        rig = Rig(stage(0), stage(1), stage(2, domain="other"))
        rig.forward(0, 0)
        rig.forward(0, 1)

        assert [2, 2, 0] == [rig.contract.token(s) for s in range(3)]


class TestInFlight:
    def test_one_update_at_a_time(self) -> None:
        """While an F, dI or refresh of a domain is in flight no other is checked."""
        rig = Rig(stage(0), stage(1))
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        rig.check_forward(1)

        with refused(rig, "order.in-flight", "F of microbatch 0 of stage 1 in epoch 0", "0: 2"):
            rig.check_forward(0, 1)
        with refused(rig, "order.in-flight", "dI of microbatch 0 of stage 0 in epoch 0"):
            rig.contract.check_dgrad(rig.key(0), ref)
        with refused(rig, "order.in-flight", "refresh of stage 1"):
            rig.contract.check_refresh(1)

    def test_wgrad_is_no_update(self) -> None:
        """dW runs while an F of its domain is in flight, and the other way round."""
        rig = Rig()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        forward = rig.check_forward(1)
        wgrad = rig.check_wgrad(ref, 0)
        rig.contract.commit(forward)
        rig.contract.commit(wgrad, rig.matrices())

        assert set(rig.contract.live()) == {rig.key(1)}

    def test_domains_are_apart(self) -> None:
        """An update in flight in one domain does not hold up another."""
        rig = Rig(stage(0, domain="a"), stage(1, domain="b"))
        first, second = rig.check_forward(0, 0), rig.check_forward(0, 1)
        rig.contract.commit(second)
        rig.contract.commit(first)

        assert len(rig.contract.live()) == 2


class TestPoison:
    @pytest.mark.parametrize("action", ["F", "dI", "refresh"])
    def test_a_failed_update_poisons_its_domain(self, action: str) -> None:
        """After a failed F, dI or refresh nothing runs over the domain's scaling state."""
        rig = Rig(stage(0), stage(1, domain="b"))
        if action == "F":
            ticket = rig.check_forward(0)
        elif action == "dI":
            ticket = rig.check_dgrad(rig.forward(0), 0)
        else:
            ticket = rig.contract.check_refresh(0)
        rig.contract.abort(ticket)

        with refused(rig, "order.poisoned", "a failed F, dI, refresh or evaluation", "snapshot"):
            rig.check_forward(1)
        with refused(rig, "order.poisoned"):
            rig.contract.finalize(0)
        assert rig.forward(0, 1).slot == 2

    def test_a_failed_wgrad_does_not(self) -> None:
        """dW touches no scaling state, so that its failure leaves the domain usable."""
        rig = Rig()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.contract.abort(rig.check_wgrad(ref, 0))

        assert rig.forward(1).slot == ref.slot

    def test_a_poisoned_domain_is_not_checkpointed(self) -> None:
        """A poisoned domain is not checkpointed, even when everything is drained."""
        rig = Rig()
        rig.contract.abort(rig.contract.check_refresh(0))
        rig.contract.drain()

        with refused(rig, "order.poisoned", "checkpoint"):
            rig.contract.checkpoint()

    def test_a_restore_heals(self) -> None:
        """The last commit's snapshot makes the domain usable again."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        rig.contract.abort(rig.check_forward(0))
        rig.contract.drain()
        rig.contract.restore(checkpoint)

        assert rig.epoch() == 1


class TestDeclaredOrder:
    def test_the_declared_order_passes(self) -> None:
        """Updates in the declared order are accepted, epoch after epoch."""
        rig = Rig(declared={0: _ORDER})
        for epoch in (1, 2):
            first, second = rig.forward(0), rig.forward(1)
            rig.dgrad(second, 1)
            rig.dgrad(first, 0)
            rig.wgrad(first, 0)
            rig.wgrad(second, 1)
            rig.finish()
            assert epoch == rig.commit()

    def test_another_forward_than_the_declared_one_is_refused(self) -> None:
        """Another forward than the declared one is refused, and the message says which is due."""
        rig = Rig(declared={0: _ORDER})

        with refused(
            rig,
            "order.reordered",
            "F of microbatch 1 of stage 0 in epoch 0 at position 0",
            "position 1",
        ):
            rig.check_forward(1)

    def test_another_dgrad_than_the_declared_one_is_refused(self) -> None:
        """So is another dI."""
        rig = Rig(declared={0: _ORDER})
        ref = rig.forward(0)
        rig.forward(1)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()

        with refused(
            rig,
            "order.reordered",
            "dI of microbatch 0 of stage 0 in epoch 0 at position 2",
            "position 3",
        ):
            rig.contract.check_dgrad(rig.key(0), ref)

    def test_only_where_declared(self) -> None:
        """A domain without a declared order takes any."""
        rig = Rig(stage(0), stage(1, domain=1), declared={0: _ORDER})

        assert rig.forward(1, 1).slot == 2


class TestIncomplete:
    def test_missing_forward_and_dgrad(self) -> None:
        """Finalize wants M forwards and M input gradients of the stage."""
        rig = Rig()
        with refused(rig, "order.incomplete", "0 forwards and 0 input", "2 of each"):
            rig.contract.finalize(0)
        rig.microbatch(0)
        rig.forward(1)
        with refused(rig, "order.incomplete", "2 forwards and 1 input", "2 of each"):
            rig.contract.finalize(0)

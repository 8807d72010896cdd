"""Guarded actions: check on entry, commit on a normal exit, abort on any other exit."""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import Refused, TapeKey, TapeRef, guarded

from .helpers import MATRICES, Rig, refused, stage


class TestContextManagers:
    def test_a_whole_epoch_of_context_managers_commits(self) -> None:
        """A whole epoch through the context managers commits."""
        rig = Rig(stage(microbatches=1))
        contract, key = rig.contract, rig.key(0)
        with contract.refresh(0):
            pass
        with contract.forward(key) as f:
            assert f.slot == 0
        contract.bind(key)
        contract.wait()
        with contract.dgrad(key, f.ref) as i:
            i.queued = MATRICES
        with contract.wgrad(key, f.ref) as w:
            w.covered = MATRICES
        contract.wait()
        contract.finalize(0)

        assert contract.commit_epoch() == 1

    def test_options_reach_the_check(self) -> None:
        """Options of a block are those of its check."""
        rig = Rig(stage(slots=3), callers=("main", "side"))
        side = rig.contract.link("side")
        with rig.contract.forward(rig.key(0), refresh=True, slot=2, token=0, link=side) as f:
            pass

        assert f.ref.slot == 2

    def test_checks_on_entry(self) -> None:
        """A refused check never enters the block, and creating one checks nothing."""
        rig = Rig()
        block = rig.contract.forward(rig.key(0))
        entered = False
        with refused(rig, "version.stale-cache"), block:
            entered = True

        assert not entered

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    def test_aborts_when_the_action_raises(self, error: type[BaseException]) -> None:
        """Whatever the action raises goes to the caller, after the tape was dropped."""
        rig = Rig()
        with pytest.raises(error), rig.contract.forward(rig.key(0), refresh=True):
            raise error("the action")

        assert rig.contract.live() == {}
        with refused(rig, "order.poisoned"):
            rig.check_forward(1)

    def test_left_while_another_call_is_under_way(self) -> None:
        """The block's exception propagates, and its ticket is still available."""
        rig = Rig()
        contract = rig.contract

        block = contract.forward(rig.key(0), refresh=True)
        block.__enter__()
        error, left = MemoryError("mine"), []

        def elsewhere(*_: Any) -> None:
            left.append(block.__exit__(MemoryError, error, None))

        contract.observer = elsewhere
        contract.submit()
        contract.observer = None

        assert left == [False]
        (ticket,) = contract.outstanding()
        contract.abort(ticket)
        assert contract.live() == {}

    @pytest.mark.parametrize("kind", ["refresh", "dgrad", "wgrad"])
    def test_the_others_abort_too(self, kind: str) -> None:
        """A failed refresh and dI poison the domain, a failed dW spoils the epoch only."""
        rig = Rig()
        if kind == "refresh":
            block: Any = rig.contract.refresh(0)
        else:
            ref = rig.forward(0)
            rig.contract.bind(rig.key(0))
            rig.contract.wait()
            if kind == "wgrad":
                rig.contract.commit(rig.contract.check_dgrad(rig.key(0), ref), MATRICES)
            block = getattr(rig.contract, kind)(rig.key(0), ref)
        with pytest.raises(ZeroDivisionError), block:
            _ = 1 // 0

        assert rig.contract.live() == {}
        assert rig.contract.memory.held == [0, 0]
        assert rig.contract.memory.poisoned == [int(kind != "wgrad")]

    def test_a_dgrad_that_says_nothing_of_its_work_has_failed(self) -> None:
        """A dI block that does not report its queued work has failed."""
        rig = Rig()
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()

        block = rig.contract.dgrad(rig.key(0), ref)
        with pytest.raises(Refused, match=r"work-not-queued .*no matrix"), block:
            pass
        assert rig.contract.live() == {}

    def test_no_reference_before_the_end(self) -> None:
        """A forward's reference exists only after its block has ended."""
        rig = Rig()
        block = rig.contract.forward(rig.key(0), refresh=True)
        with block, pytest.raises(RuntimeError, match="only after its block has ended"):
            _ = block.ref

        assert block.ref.slot == block.slot

    def test_a_ticket_redeemed_inside(self) -> None:
        """What a block raises after redeeming its own ticket reaches the caller as it is."""
        rig = Rig()
        block = rig.contract.forward(rig.key(0), refresh=True)

        def act() -> None:
            rig.contract.commit(block.ticket)
            raise ValueError("afterwards")

        with pytest.raises(ValueError, match="afterwards"), block:
            act()

        assert set(rig.contract.live()) == {rig.key(0)}

    def test_a_failure_in_an_inner_domain_leaves_the_outer_alone(self) -> None:
        """Blocks of different domains nest; the inner one's failure leaves the outer alone."""
        rig = Rig(stage(0, domain="a"), stage(1, domain="b"))
        inner = rig.contract.forward(rig.key(0, 1), refresh=True, link=rig.link(1))
        outer = rig.contract.forward(rig.key(0), refresh=True)
        with outer, pytest.raises(ValueError, match="inner"), inner:
            raise ValueError("inner")

        assert {rig.key(0): outer.ref} == rig.contract.live()


class TestDecorator:
    def test_decorated_actions_are_checked_and_committed_every_time(self) -> None:
        """Decorated actions are checked and committed on every call."""
        rig = Rig()
        contract = rig.contract

        @guarded(contract, "F")
        def forward(key: TapeKey, scale: int) -> int:
            """Scale a microbatch."""
            return key.microbatch * scale

        @guarded(contract, "dI")
        def dgrad(key: TapeKey, ref: TapeRef) -> tuple[tuple[str, ...], str]:
            return MATRICES, f"dx{ref.slot}"

        @guarded(contract, "dW")
        def wgrad(key: TapeKey, ref: TapeRef, *, times: int = 1) -> tuple[tuple[str, ...], int]:
            return MATRICES, times

        with contract.refresh(0):
            pass
        refs = {}
        for microbatch in (0, 1):
            key = rig.key(microbatch)
            refs[key], result = forward(key, 10)
            assert 10 * microbatch == result
            contract.bind(key)
        contract.wait()
        for key, ref in refs.items():
            assert f"dx{ref.slot}" == dgrad(key, ref)
        for key, ref in reversed(refs.items()):
            assert wgrad(key, ref, times=3) == 3
        rig.finish()

        assert contract.commit_epoch() == 1
        assert forward.__doc__ == "Scale a microbatch."

    @pytest.mark.parametrize("action", ["F", "dI", "dW"])
    def test_a_failure_aborts(self, action: str) -> None:
        """A decorated action that raises is aborted, and its error is the caller's."""
        rig = Rig()

        @guarded(rig.contract, action)  # type: ignore[arg-type]
        def fail(*_: Any) -> Any:
            raise OSError("device lost")

        if action == "F":
            with rig.contract.refresh(0):
                pass
            arguments: tuple[Any, ...] = (rig.key(0),)
        else:
            ref = rig.forward(0)
            rig.contract.bind(rig.key(0))
            rig.contract.wait()
            if action == "dW":
                rig.contract.commit(rig.contract.check_dgrad(rig.key(0), ref), MATRICES)
            arguments = (rig.key(0), ref)
        with pytest.raises(OSError, match="device lost"):
            fail(*arguments)

        assert rig.contract.live() == {}

    def test_a_refusal_never_runs_the_action(self) -> None:
        """The physical action does not run when the check refuses it."""
        rig = Rig()
        ran = []

        @guarded(rig.contract, "F")
        def forward(key: TapeKey) -> None:
            ran.append(key)

        with refused(rig, "version.stale-cache"):
            forward(rig.key(0))
        assert ran == []

    @pytest.mark.parametrize("action", ["B", "refresh", "", None])
    def test_there_are_three_actions_to_decorate(self, action: Any) -> None:
        """There are three actions to decorate."""
        with pytest.raises(ValueError, match=r"^action must be 'F', 'dI' or 'dW', got "):
            guarded(Rig().contract, action)

    @pytest.mark.parametrize("result", [None, 7, (MATRICES,), (MATRICES, 1, 2)])
    def test_a_result_without_evidence(self, result: Any) -> None:
        """A dI or dW that does not return its matrices and a result counts as failed, and the error
        names the missing value."""
        rig = Rig()

        @guarded(rig.contract, "dI")
        def dgrad(key: TapeKey, ref: TapeRef) -> Any:
            return result

        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        with pytest.raises(TypeError, match=r"^dgrad must return \(matrices, result\), got "):
            dgrad(rig.key(0), ref)
        assert rig.contract.live() == {}

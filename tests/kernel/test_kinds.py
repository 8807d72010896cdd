"""
Types of values: an object that only equals an int, or only resembles a key, is refused.

``True`` equals 1, 0.0 equals 0, a NumPy integer equals both, and a string is a collection of
letters. Without a check, each such value would pass every guard and be stored in a cache, in the
contract's memory or in an event log.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from qeffect import Checkpoint, Contract, Destination, Refused, StageConfig, TapeKey, TapeRef
from qeffect.action_blocks import guarded
from qeffect.keys import cell_of
from qeffect.log.recorder import Recorder

from .helpers import MATRICES, Rig, refused, stage


class _Number(IntEnum):
    ZERO = 0
    ONE = 1


#: What equals 1 and is not that integer, and the same of 0.
_ONES: tuple[Any, ...] = (True, 1.0, np.int64(1), _Number.ONE)
_ZEROS: tuple[Any, ...] = (False, 0.0, np.int64(0), _Number.ZERO)


class _LooksLikeAKey:
    """Everything that a guard reads of a key."""

    epoch, stage, microbatch, block, invocation = 0, 0, 0, 0, 0
    cell = (0, 0, 0, 0)


class _OtherKey(TapeKey):
    """A key whose class could say something else each time that it is asked."""


class _LooksLikeAReference:
    def __init__(self, ref: TapeRef) -> None:
        self.slot, self.generation, self.incarnation = ref.slot, ref.generation, ref.incarnation


def _ready_for(action: str) -> tuple[Rig, TapeKey, TapeRef]:
    """A rig whose next action is this one, with its key and reference."""
    rig = Rig(stage(sends_output=True))
    ref = rig.forward(0)
    rig.contract.bind(rig.key(0))
    rig.contract.wait()
    if action != "check_dgrad":
        rig.dgrad(ref, 0)
    return rig, rig.key(0), ref


class TestNames:
    @pytest.mark.parametrize("part", ["epoch", "stage", "microbatch", "block", "invocation"])
    @pytest.mark.parametrize("value", [*_ZEROS, *_ONES])
    def test_parts_of_a_key_are_plain_integers(self, part: str, value: Any) -> None:
        """A key is made of plain integers."""
        good: dict[str, Any] = {"epoch": 0, "stage": 0, "microbatch": 0}
        with pytest.raises(TypeError, match=f"'{part}' must be an int, got "):
            TapeKey(**{**good, part: value})

    def test_no_refused_key_stands_for_a_later_one(self) -> None:
        """A refused key leaves nothing behind: a later key's log names plain integers."""
        for attempt in (lambda: TapeKey(0, False, True), lambda: cell_of(0, 1, True, 0)):
            with pytest.raises(TypeError):
                attempt()
        rig = Rig(stage(microbatches=2, blocks=2))
        with Recorder(rig.contract) as log:
            rig.contract.reserve(TapeKey(0, 0, 1, 1))

        assert '"key":[0,0,1,1,0]' in log.lines[1]
        assert all(part.__class__ is int for part in TapeKey(0, 0, 1).cell)

    @pytest.mark.parametrize("part", ["slot", "generation", "incarnation"])
    @pytest.mark.parametrize("value", [*_ZEROS, None, "0"])
    def test_parts_of_a_reference_are_plain_integers(self, part: str, value: Any) -> None:
        """So is a reference."""
        with pytest.raises(TypeError, match=f"'{part}' must be an int, got "):
            TapeRef(**{"slot": 0, "generation": 0, "incarnation": 0, part: value})

    @pytest.mark.parametrize("key", [_LooksLikeAKey(), _OtherKey(0, 0, 0)])
    def test_what_looks_like_a_key_is_none(self, key: Any) -> None:
        """Guards read a key more than once, so that it has to be a key."""
        rig = Rig()
        calls: list[Callable[[], Any]] = [
            lambda: rig.contract.check_forward(key, refresh=True),
            lambda: rig.contract.check_forward(key, refresh=True, slot=0),
            lambda: rig.contract.reserve(key),
            lambda: rig.contract.bind(key),
        ]
        before = rig.contract.snapshot()
        for call in calls:
            with pytest.raises(TypeError, match="key must be a TapeKey, got "):
                call()
        assert before == rig.contract.snapshot()

    @pytest.mark.parametrize("call", ["check_dgrad", "check_wgrad", "read", "finish_read", "drop"])
    def test_what_looks_like_a_reference_is_none(self, call: str) -> None:
        """Likewise a reference, and the key beside a good one."""
        rig, key, ref = _ready_for(call)
        before = rig.contract.snapshot()
        with pytest.raises(TypeError, match=f"^{call}: ref must be a TapeRef, got "):
            getattr(rig.contract, call)(key, _LooksLikeAReference(ref))
        with pytest.raises(TypeError, match=f"^{call}: key must be a TapeKey, got "):
            getattr(rig.contract, call)(_LooksLikeAKey(), ref)
        assert before == rig.contract.snapshot()


class TestNumbers:
    @pytest.mark.parametrize("value", _ZEROS)
    @pytest.mark.parametrize("name", ["slot", "token", "link"])
    def test_of_a_forward(self, name: str, value: Any) -> None:
        """Slot, token and link of F; the free list is as it was."""
        rig = Rig()
        before, free = rig.contract.snapshot(), sorted(rig.contract._free[0])
        given = {"slot": None, "token": None, "link": 0, name: value}
        with pytest.raises(TypeError, match=f"^check_forward: {name} must be an int, got "):
            rig.contract.check_forward(rig.key(0), refresh=True, **given)
        assert (before, free) == (rig.contract.snapshot(), sorted(rig.contract._free[0]))

    @pytest.mark.parametrize("value", _ZEROS)
    @pytest.mark.parametrize(
        ("call", "name"),
        [("check_dgrad", "token"), ("check_dgrad", "link"), ("check_wgrad", "link")],
    )
    def test_of_a_backward(self, call: str, name: str, value: Any) -> None:
        """Token and link of dI, link of dW."""
        rig, key, ref = _ready_for(call)
        before = rig.contract.snapshot()
        with pytest.raises(TypeError, match=f"^{call}: {name} must be an int, got "):
            getattr(rig.contract, call)(key, ref, **{name: value})
        assert before == rig.contract.snapshot()

    @pytest.mark.parametrize("value", _ZEROS)
    @pytest.mark.parametrize(
        ("call", "name"),
        [
            ("join", "link"),
            ("wait", "link"),
            ("check_refresh", "stage"),
            ("invalidate", "stage"),
            ("finalize", "stage"),
            ("purge", "epoch"),
            ("commit_epoch", "epoch"),
        ],
    )
    def test_of_every_other_call(self, call: str, name: str, value: Any) -> None:
        """Stages, links and epochs of every other call."""
        rig = Rig()
        before = rig.contract.snapshot()
        with pytest.raises(TypeError, match=f"^{call}: {name} must be an int, got "):
            getattr(rig.contract, call)(value)
        assert before == rig.contract.snapshot()

    @pytest.mark.parametrize("value", _ZEROS)
    def test_the_epoch_stays_a_plain_integer(self, value: Any) -> None:
        """A commit of an epoch that only equals the current one would store its successor."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch()
        rig.finish()
        with pytest.raises(TypeError, match=r"^commit_epoch: epoch must be an int, got "):
            rig.contract.commit_epoch(value)

        assert rig.contract.commit_epoch(0) == 1
        assert rig.contract.memory.weight_epoch[0].__class__ is int

    @pytest.mark.parametrize("value", _ZEROS)
    @pytest.mark.parametrize("redeem", ["commit", "abort"])
    def test_a_forged_ticket_of_an_update(self, value: Any, redeem: str) -> None:
        """Its epoch only equals the current one; a commit would store its successor."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch()
        rig.finish()
        ticket = rig.contract.check_update()
        before = rig.contract.snapshot()
        with pytest.raises(Refused, match=r"^ownership\.unknown-ticket"):
            getattr(rig.contract, redeem)(evolve(ticket, slot=value))

        assert before == rig.contract.snapshot()
        rig.contract.commit(ticket)
        assert rig.contract.memory.weight_epoch[0].__class__ is int

    @pytest.mark.parametrize(
        "flags", [{"counted": "x"}, {"counted": True, "late": -1}, {"late": 0}]
    )
    def test_of_a_flag(self, flags: Any) -> None:
        """What only counts as true is not taken for True."""
        with pytest.raises(TypeError, match=r"^(counted|late) must be True or False, got "):
            Contract([stage()], **flags)

    @pytest.mark.parametrize("value", _ONES)
    def test_of_a_configuration(self, value: Any) -> None:
        """And of what a contract is made from."""
        for make in (
            lambda: StageConfig(value, microbatches=1, slots=1),
            lambda: StageConfig(0, microbatches=value, slots=1),
            lambda: Contract([stage()], epoch=value),
            lambda: Contract([stage()], generation_max=value),
            lambda: Destination("w0", microbatch=value),
            lambda: Destination("w0", shape=(2, value)),
            lambda: Destination("w0", address=value),
            lambda: Destination("w0", nbytes=value),
            lambda: Checkpoint(value, Rig().contract.configuration),
            lambda: Rig().contract.restore(Rig().contract.checkpoint(), incarnation=value),
        ):
            with pytest.raises((TypeError, ValueError), match=r"int|64 bits"):
                make()

    @pytest.mark.parametrize("flag", ["no", 7, [0]])
    def test_a_flag_is_its_truth(self, flag: Any) -> None:
        """What is passed for ``refresh`` or ``first`` is a flag when it is written down, too."""
        rig = Rig(stage(microbatches=1))
        with Recorder(rig.contract) as log:
            ref = rig.contract.commit(rig.contract.check_forward(rig.key(0), refresh=flag))
            assert ref is not None
            rig.dgrad(ref, 0)
            rig.contract.commit(rig.contract.check_wgrad(rig.key(0), ref, first=flag), MATRICES)

        assert '"refresh":1' in log.lines[1]
        assert '"first":1' in log.lines[-3]

    def test_a_flag_that_has_no_truth_takes_no_slot(self) -> None:
        """An array of two has no truth value; the slot that F would have had is still free."""
        rig = Rig()
        before, free = rig.contract.snapshot(), sorted(rig.contract._free[0])
        with pytest.raises(ValueError, match="truth value"):
            rig.contract.check_forward(rig.key(0), refresh=np.zeros(2))  # type: ignore[arg-type]
        assert (before, free) == (rig.contract.snapshot(), sorted(rig.contract._free[0]))


class TestEvidence:
    @pytest.mark.parametrize("evidence", ["w", b"w", [b"w"], [1], {1: "w"}])
    def test_a_name_is_no_collection_of_names(self, evidence: Any) -> None:
        """``"w"`` is not ``("w",)``: the action has failed, and is aborted."""
        rig = Rig(stage(matrices=("w",)))
        ref = rig.forward(0)
        ticket = rig.check_dgrad(ref, 0)
        with pytest.raises(Refused, match=r"^ownership\.work-not-queued in commit_dgrad: found "):
            rig.contract.commit(ticket, evidence)
        assert rig.contract.live() == {}

    @pytest.mark.parametrize("evidence", [["w"], {"w"}, {"w": 1}, iter(["w"]), [np.str_("w")]])
    def test_any_collection_of_names_is_one(self, evidence: Any) -> None:
        """A list, a set, the keys of a dictionary or an iterator is evidence."""
        rig = Rig(stage(matrices=("w",)))
        ref = rig.forward(0)
        rig.contract.commit(rig.check_dgrad(ref, 0), evidence)

        assert rig.contract.memory.dgrads[0] == 1


class TestGuarded:
    async def _coroutine(self, *_: Any) -> None:
        raise AssertionError("the body of a coroutine ran")

    def _generator(self, *_: Any) -> Any:
        yield self
        raise AssertionError("the body of a generator ran")

    async def _both(self, *_: Any) -> Any:
        yield self
        raise AssertionError("the body of an asynchronous generator ran")

    @pytest.mark.parametrize("action", ["F", "dI", "dW"])
    @pytest.mark.parametrize("name", ["_coroutine", "_generator", "_both"])
    def test_a_body_that_runs_later_cannot_be_guarded(self, name: str, action: Any) -> None:
        """Such a function returns before its body began: it would commit what has not happened."""
        for function in (getattr(self, name), partial(getattr(self, name), 1)):
            with pytest.raises(TypeError, match="must run its action when it is called"):
                guarded(Rig().contract, action)(function)

    @pytest.mark.parametrize("action", ["F", "dI"])
    @pytest.mark.parametrize("name", ["_coroutine", "_generator", "_both"])
    def test_nor_one_that_is_handed_back(self, name: str, action: Any) -> None:
        """Where only the call shows it, the action is aborted."""
        rig = Rig()
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        act = guarded(rig.contract, action)(lambda *given: getattr(self, name)(*given))
        arguments = (rig.key(1),) if action == "F" else (rig.key(0), ref)
        with pytest.raises(TypeError, match="its action has not happened yet"):
            act(*arguments)

        assert arguments[0] not in rig.contract.live()
        assert rig.contract.memory.poisoned == [1]


class TestDestinations:
    def test_one_address_twice_is_an_overlap_without_lengths_too(self) -> None:
        """Two destinations at one address overlap, whether or not their lengths are known."""
        with pytest.raises(Refused, match=r"^arena\.overlapping-destinations in configure"):
            Contract([stage(destinations=[Destination(w, address=64) for w in MATRICES])])

    def test_an_address_within_another_is_an_overlap(self) -> None:
        """An address without a length overlaps inside another's bytes, but not at their end."""
        first = Destination("w0", address=64, nbytes=64)
        with pytest.raises(Refused, match=r"^arena\.overlapping-destinations in configure"):
            Contract([stage(destinations=[first, Destination("w1", address=127)])])
        Contract([stage(destinations=[first, Destination("w1", address=128)])])

    def test_addresses_are_of_a_device(self) -> None:
        """One address on two devices is two places; an absent address does not count as a place."""
        Contract(
            [stage(destinations=[Destination(w, address=64, device=w) for w in MATRICES])],
        )
        Contract([stage(destinations=[Destination(w) for w in MATRICES])])


class TestIncarnations:
    def test_an_incarnation_never_comes_back(self) -> None:
        """A number that a contract has had would revive the references of that time."""
        rig = Rig()
        saved = rig.contract.checkpoint()
        first = rig.contract.incarnation
        rig.contract.restore(saved, incarnation=first ^ 1)
        rig.contract.restore(saved)
        for old in (first, first ^ 1):
            with refused(rig, "persistence.same-incarnation", f"{old:016x}", "new random"):
                rig.contract.restore(saved, incarnation=old)

    def test_a_reference_of_an_old_incarnation_stays_dead(self) -> None:
        """And those references stay refused."""
        rig = Rig()
        saved = rig.contract.checkpoint()
        ref = rig.forward(0)
        rig.contract.drop(rig.key(0), ref)
        rig.contract.drain()
        rig.contract.restore(saved)
        with pytest.raises(Refused, match="same-incarnation"):
            rig.contract.restore(saved, incarnation=ref.incarnation)
        assert rig.forward(0) == evolve(ref, incarnation=rig.contract.incarnation)
        with refused(rig, "ownership.foreign-incarnation"):
            rig.contract.drop(rig.key(0), ref)

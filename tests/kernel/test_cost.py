"""
Cost: an action touches only a few entries, whatever the size of the pool.

The tests count accesses instead of measuring time: every column is replaced by a column that counts
its accesses and fails if an action iterates over all entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from qeffect import Contract, Refused
from qeffect.cli.bench import memory_of_a_tape
from qeffect.engine.freelist import FreeSlots

from .helpers import MATRICES, Rig, stage


class _WalkedError(AssertionError):
    """Something walked a column."""


class _Counting(list):  # type: ignore[type-arg]
    """A column that counts single accesses and refuses to be walked."""

    touched = 0

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, int)
        _Counting.touched += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        assert isinstance(index, int)
        _Counting.touched += 1
        super().__setitem__(index, value)

    def __iter__(self) -> Iterator[Any]:
        raise _WalkedError

    def count(self, value: Any) -> int:
        raise _WalkedError

    def items(self) -> Any:
        raise _WalkedError

    def keys(self) -> Any:
        raise _WalkedError

    def __contains__(self, value: Any) -> bool:
        raise _WalkedError


class _CountingCells(dict):  # type: ignore[type-arg]
    """The same over cells."""

    def __getitem__(self, index: Any) -> Any:
        _Counting.touched += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        raise _WalkedError

    def items(self) -> Any:
        raise _WalkedError

    def values(self) -> Any:
        raise _WalkedError


class _CountingFree(FreeSlots):
    """Free slots that may be indexed at their end and taken, not searched."""

    __slots__ = ()

    def __iter__(self) -> Iterator[int]:
        raise _WalkedError

    def __contains__(self, value: Any) -> bool:
        raise _WalkedError

    def items(self) -> Any:
        raise _WalkedError

    def keys(self) -> Any:
        raise _WalkedError


def _instrumented(slots: int) -> Rig:
    rig = Rig(stage(slots=slots, microbatches=8, sends_output=True))
    contract = rig.contract
    for name in contract.memory._names:
        column = getattr(contract.memory, name)
        kind = _CountingCells if isinstance(column, dict) else _Counting
        setattr(contract.memory, name, kind(column))
    for own in contract._free.values():
        own.__class__ = _CountingFree
    return rig


def _touches(slots: int) -> Counter[str]:
    """Entries touched by each call of one microbatch's life, in a pool of some size."""
    rig = _instrumented(slots)
    contract, keys = rig.contract, [rig.key(m) for m in range(8)]
    touched: Counter[str] = Counter()

    def measure(name: str, call: Any) -> Any:
        _Counting.touched = 0
        result = call()
        touched[name] = _Counting.touched
        return result

    ticket = measure("check_refresh", lambda: contract.check_refresh(0))
    measure("commit_refresh", lambda: contract.commit(ticket))
    measure("reserve", lambda: contract.reserve(keys[0]))
    forward = measure("check_forward reserved", lambda: contract.check_forward(keys[0]))
    ref = measure("commit_forward", lambda: contract.commit(forward))
    other = measure("check_forward", lambda: contract.check_forward(keys[1]))
    contract.commit(other)
    chosen = measure(
        "check_forward chosen", lambda: contract.check_forward(keys[2], slot=slots - 1)
    )
    measure("abort_forward", lambda: contract.abort(chosen))
    rig = None  # type: ignore[assignment]

    second = _instrumented(slots)
    contract, key = second.contract, second.key(0)
    contract.commit(contract.check_refresh(0))
    ref = contract.commit(contract.check_forward(key))
    measure("bind", lambda: contract.bind(key))
    measure("wait", lambda: contract.wait())
    measure("read", lambda: contract.read(key, ref))
    dgrad = measure("check_dgrad", lambda: contract.check_dgrad(key, ref))
    measure("commit_dgrad", lambda: contract.commit(dgrad, MATRICES))
    wgrad = measure("check_wgrad", lambda: contract.check_wgrad(key, ref))
    measure("commit_wgrad", lambda: contract.commit(wgrad, MATRICES))
    contract.join()
    measure("finish_read", lambda: contract.finish_read(key, ref))
    measure("refusal", lambda: _refusal(contract, key, ref))
    contract.join()
    third = contract.commit(contract.check_forward(second.key(1)))
    measure("drop", lambda: contract.drop(second.key(1), third))
    return touched


def _refusal(contract: Contract, key: Any, ref: Any) -> None:
    with pytest.raises(Refused, match=r"stale-reference"):
        contract.check_wgrad(key, ref)


def test_independent_of_the_pool() -> None:
    """From 4 to 4,096 slots every action and every refusal touches exactly as many entries."""
    small = _touches(4)

    assert small == _touches(64) == _touches(4096)
    assert max(small.values()) < 80
    assert min(small.values()) > 0


def test_a_walk_would_be_seen() -> None:
    """The instrument is not blind: a boundary call walks, and is caught."""
    with pytest.raises(_WalkedError):
        _instrumented(4).contract.commit_epoch()


def test_few_attributes() -> None:
    """With more than 29, CPython keeps an object's attributes in a dictionary, which is slower."""
    assert len(vars(Rig(stage()).contract)) <= 29


@pytest.mark.nightly
def test_a_live_tape_in_a_full_pool_fits_about_a_kibibyte() -> None:
    """Slot, microbatch, key and reference together, in the largest pool that is measured."""
    configured, live = memory_of_a_tape(4096)

    assert 0 < live < configured < configured + live <= 1100


class TestFreeSlots:
    def test_the_first_slot_first(self) -> None:
        """Slots are handed out from the first, and the latest freed is used next."""
        rig = Rig(stage(slots=3, microbatches=6))
        slots = [rig.forward(m).slot for m in (0, 1)]
        rig.contract.drop(rig.key(0), rig.contract.live()[rig.key(0)])

        assert [0, 1, 0] == [*slots, rig.forward(2).slot]

    def test_any_order_of_takes_and_puts(self) -> None:
        """Whatever is taken and put, the free list is the set of slots without a tape."""
        free, taken = FreeSlots(range(6)), []
        for slot in (3, 0, 5, 1):
            assert free.take(slot)
            assert not free.take(slot)
            taken.append(slot)
            assert sorted({*range(6)} - {*taken}) == sorted(free)
        for slot in (5, 3, 0):
            free.put(slot)
            taken.remove(slot)
            assert sorted({*range(6)} - {*taken}) == sorted(free)
        assert free.take(2)
        assert sorted(free) == [0, 3, 4, 5]

    def test_an_exhausted_slot_comes_last(self) -> None:
        """A retired slot is used only when nothing else is free."""
        free = FreeSlots(range(3))
        assert free.take(0)
        free.retire(0)
        used = []
        while free:
            used.append(free.next)
            assert free.take(free.next)

        assert used[-1] == 0

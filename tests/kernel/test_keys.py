"""Keys and references: plain immutable names that identify a tape and its slot."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from attrs.exceptions import FrozenInstanceError

from qeffect import TapeKey, TapeRef


class TestTapeKey:
    def test_a_key_names_epoch_stage_microbatch_block_and_invocation(self) -> None:
        """A key names epoch, stage, microbatch, block and invocation; its cell leaves the epoch."""
        key = TapeKey(3, 1, 2, 4, 5)

        assert ((1, 2, 4, 5), "microbatch 2 of stage 1 in epoch 3, block 4, invocation 5") == (
            key.cell,
            str(key),
        )

    def test_equal_by_value(self) -> None:
        """Keys are equal when all their parts are, also as keys of a dictionary."""
        assert {TapeKey(0, 1, 2): "tape"}[TapeKey(0, 1, 2, 0, 0)] == "tape"
        assert TapeKey(0, 1, 2) != TapeKey(1, 1, 2)
        assert TapeKey(0, 1, 2) < TapeKey(0, 2, 0)

    def test_a_key_never_changes(self) -> None:
        """A key never changes."""
        with pytest.raises(FrozenInstanceError):
            TapeKey(0, 0, 0).epoch = 1  # type: ignore[misc]

    @pytest.mark.parametrize("part", ["epoch", "stage", "microbatch", "block", "invocation"])
    def test_parts_are_counts(self, part: str) -> None:
        """Every part is a number from zero."""
        good: dict[str, Any] = {"epoch": 0, "stage": 0, "microbatch": 0}
        with pytest.raises(ValueError, match=f"'{part}' must be >= 0: -1"):
            TapeKey(**{**good, part: -1})
        with pytest.raises(TypeError, match=f"'{part}' must be an int"):
            TapeKey(**{**good, part: "0"})

    def test_keys_and_references_travel_between_processes(self) -> None:
        """Keys and references travel between processes."""
        key, ref = TapeKey(1, 2, 3), TapeRef(4, 5, 6)

        assert (key, ref) == pickle.loads(pickle.dumps((key, ref)))
        assert key.cell == pickle.loads(pickle.dumps(key)).cell


class TestTapeRef:
    def test_a_reference_names_slot_generation_and_incarnation(self) -> None:
        """A reference names slot, generation and incarnation."""
        ref = TapeRef(2, 5, 0x1F)

        assert str(ref) == "slot 2 generation 5 incarnation 000000000000001f"
        assert ref == TapeRef(2, 5, 31)
        assert TapeRef(2, 5, 1) != TapeRef(2, 5, 2)

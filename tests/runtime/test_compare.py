"""Comparing recorded runs: what is counted, and what must be reported as a difference."""

from __future__ import annotations

import json

import pytest
import torch

from qeffect.gpu_runtime.lab.comparisons.recording import CATEGORIES, REQUIRED, Recording, compare


def recording(**values: torch.Tensor | int) -> Recording:
    """A recording of some outputs."""
    made = Recording("test")
    for label, value in values.items():
        made.add("outputs", label, value)
    return made


class TestCompare:
    def test_equal_bits_are_no_mismatch_and_each_value_counts(self) -> None:
        """Equal bits are no mismatch, and each value counts."""
        a, b = recording(x=torch.ones(3), y=4), recording(x=torch.ones(3), y=4)

        result = compare(a, b, categories=["outputs"])

        assert (2, 0) == (result.compared, result.mismatched)

    @pytest.mark.parametrize(
        "other",
        [
            torch.tensor([0.0, -0.0]),
            torch.tensor([0.0, 0.0]).bfloat16(),
            torch.tensor([[0.0, 0.0]]),
            torch.nextafter(torch.zeros(2), torch.ones(2)),
        ],
        ids=["sign of zero", "dtype", "shape", "one ulp"],
    )
    def test_any_bit_counts(self, other: torch.Tensor) -> None:
        """Without tolerance: another sign, type, shape or bit is a mismatch."""
        result = compare(recording(x=torch.zeros(2)), recording(x=other), categories=["outputs"])

        assert 1 == result.mismatched
        assert ("x",) == result["outputs"].first

    def test_nan_equals_itself(self) -> None:
        """Raw bits: the same NaN is the same."""
        nan = torch.tensor([float("nan")])

        assert 0 == compare(recording(x=nan), recording(x=nan), categories=["outputs"]).mismatched

    @pytest.mark.parametrize("swap", [False, True])
    def test_missing_label_is_a_mismatch(self, swap: bool) -> None:
        """A value that only one side recorded is a mismatch, whichever side it is."""
        a, b = recording(x=1, y=2), recording(x=1)
        if swap:
            a, b = b, a

        result = compare(a, b, categories=["outputs"])

        assert (2, 1) == (result.compared, result.mismatched)

    def test_empty_category_refused(self) -> None:
        """Comparing a category in which nothing was recorded is an error, not a pass."""
        with pytest.raises(ValueError, match="expected values of category 'scales', found none"):
            compare(recording(x=1), recording(x=1), categories=["outputs", "scales"])

    def test_all_categories_by_default(self) -> None:
        """Every category is compared unless some are named."""
        a = Recording("all")
        for category in CATEGORIES:
            a.add(category, "x", 1)  # type: ignore[arg-type]

        assert CATEGORIES == tuple(c.category for c in compare(a, a).categories)

    @pytest.mark.parametrize("category", REQUIRED)
    def test_what_must_not_be_is_compared_with_zero(self, category: str) -> None:
        """A reference has no slots or graphs; a candidate's counts must all be zero."""
        reference, good, bad = Recording("native"), Recording("good"), Recording("bad")
        good.add(category, "x", 0)  # type: ignore[arg-type]
        bad.add(category, "x", 0)  # type: ignore[arg-type]
        bad.add(category, "y", 2)  # type: ignore[arg-type]

        assert (1, 0) == counted(reference, good, category)
        assert (2, 1) == counted(reference, bad, category)
        assert (1, 1) == counted(reference, Recording("lazy"), category)


def counted(reference: Recording, candidate: Recording, category: str) -> tuple[int, int]:
    """Values compared and mismatched in one category."""
    result = compare(reference, candidate, categories=[category])
    return result.compared, result.mismatched


class TestRecording:
    def test_a_label_is_used_once(self) -> None:
        """A label that is used twice would hide a value, so it is an error."""
        made = recording(x=1)

        with pytest.raises(ValueError, match="expected a new label, found 'x'"):
            made.add("outputs", "x", 1)

    def test_json_round_trip(self) -> None:
        """Recordings cross processes as JSON."""
        made = recording(x=torch.ones(2), y=torch.ones(2).to(torch.float8_e4m3fn))

        again = Recording.from_json(json.loads(json.dumps(made.to_json())))

        assert made == again

    def test_records_a_copy(self) -> None:
        """What is recorded is what the tensor held then."""
        x = torch.zeros(2)
        before, after = Recording("a"), Recording("b")
        before.add("outputs", "x", x)
        x.add_(1)
        after.add("outputs", "x", x)

        assert 1 == compare(before, after, categories=["outputs"]).mismatched

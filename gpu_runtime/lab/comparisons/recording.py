"""
Compare recorded runs as raw bits, category by category, never with a tolerance.

A run writes its results into a `Recording`: each tensor under a category and a label, which names
the step and action that produced the tensor. Two recordings must have the same labels with the same
bits. A label on only one side is a mismatch too, so that an empty comparison cannot pass.

A library's own full backward has neither slots nor graphs, so three categories have no counterpart
in native runs: addresses, retained work and growth. A guarded run records these categories as
counts that must be zero, and each count is compared with zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import attrs
from torch import Tensor

from ...step.memory.digests import digests

Value = Literal[
    "outputs",
    "loss",
    "input gradients",
    "microbatch gradients",
    "parameter gradients",
    "parameters",
    "AdamW state",
    "amax histories",
    "scales",
    "caches",
    "versions",
]
Requirement = Literal["addresses", "retained work", "growth"]
Category = Value | Requirement

CATEGORIES: tuple[Value, ...] = get_args(Value)
"""
Categories that both sides of a comparison have. The loss is half the mean square of an output;
microbatch gradients are the gradients of one dI or dW, before any sum.
"""

REQUIRED: tuple[Requirement, ...] = get_args(Requirement)
"""
Counts of a guarded run that must be zero: recorded addresses that moved, work that is still
retained or outstanding after a step, and resources that grew in a step.
"""


def digest(value: Tensor | int) -> str:
    """
    Shape, type and SHA-256 of the raw bits of a tensor, or the number itself.

    >>> digest(3)
    'int:3'
    """
    if isinstance(value, int):
        return f"int:{value}"
    return digests([value])[0]


@attrs.define
class Recording:
    """
    The results of one run, as digests of raw bits.

    Args:
        what: How the run was made, in words, for reports.
        values: For each category, the digests by label.
        injected: Faults that were injected into the run, each with the clause that refused it.
    """

    what: str
    values: dict[str, dict[str, str]] = attrs.field(factory=dict)
    injected: list[dict[str, str]] = attrs.field(factory=list)

    def add(self, category: Category, label: str, value: Tensor | int) -> None:
        """
        Record one value.

        Raises:
            ValueError: The category is unknown, or the label was used before: the second value
                would hide the first.
        """
        self._add_digest(category, label, digest(value))

    def _add_digest(self, category: Category, label: str, value: str) -> None:
        if category not in (known := (*CATEGORIES, *REQUIRED)):
            raise ValueError(f"unknown category {category!r}; choose from {', '.join(known)}")
        held = self.values.setdefault(category, {})
        if label in held:
            raise ValueError(
                f"{category}: expected a new label, found {label!r}, which was recorded before"
            )
        held[label] = value

    def add_all(self, category: Category, where: str, named: Mapping[str, Tensor]) -> None:
        """Record several tensors of one category by name."""
        for name, value in zip(named, digests(list(named.values())), strict=True):
            self._add_digest(category, f"{where} {name}", value)

    def add_state(self, where: str, state: Mapping[str, Tensor]) -> None:
        """
        Record numerical state; the end of a tensor's name tells whether it is a scale or a history.
        """
        for name, value in zip(state, digests(list(state.values())), strict=True):
            kind: Category = "scales" if name.endswith("scale") else "amax histories"
            self._add_digest(kind, f"{where} {name}", value)

    @property
    def size(self) -> int:
        """Number of recorded values."""
        return sum(len(held) for held in self.values.values())

    def to_json(self) -> dict[str, Any]:
        """The recording as plain data, to compare runs of separate processes."""
        return {"what": self.what, "values": self.values, "injected": self.injected}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recording:
        """Read the recording that `to_json` wrote."""
        values = {k: dict(v) for k, v in data["values"].items()}
        return cls(data["what"], values, [dict(fault) for fault in data["injected"]])


@attrs.frozen
class CategoryResult:
    """
    One category of a comparison.

    Args:
        compared: Number of labels (names of recorded values) that at least one of the two runs has.
        mismatched: Number of labels whose bits differ, or that only one run has.
        first: The first mismatched labels, in recorded order.
    """

    category: str
    compared: int
    mismatched: int
    first: tuple[str, ...] = ()


@attrs.frozen
class Comparison:
    """The result of comparing two recordings, by category."""

    reference: str
    candidate: str
    categories: tuple[CategoryResult, ...]

    @property
    def compared(self) -> int:
        """The number of compared values, over all categories."""
        return sum(c.compared for c in self.categories)

    @property
    def mismatched(self) -> int:
        """The number of values that differ, over all categories."""
        return sum(c.mismatched for c in self.categories)

    def __getitem__(self, category: str) -> CategoryResult:
        return next(c for c in self.categories if c.category == category)

    def to_json(self) -> dict[str, Any]:
        """The result as plain data, for a report."""
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "compared": self.compared,
            "mismatched": self.mismatched,
            "categories": [attrs.asdict(c) for c in self.categories],
        }

    def __str__(self) -> str:
        lines = [f"{self.candidate} against {self.reference}"]
        for c in self.categories:
            first = f"   first: {', '.join(c.first)}" if c.first else ""
            lines.append(f"  {c.category:<20} {c.mismatched:>6} of {c.compared:>7} differ{first}")
        return "\n".join(lines)


def compare(
    reference: Recording,
    candidate: Recording,
    *,
    categories: Iterable[str] = CATEGORIES,
    show: int = 3,
) -> Comparison:
    """
    Compare two recordings as raw bits.

    Args:
        reference: The reference run, whose bits are taken as right.
        candidate: The run under test.
        categories: Categories to compare. The reference must have values in each category;
            categories of `REQUIRED` exist only in the candidate and are compared with zero.
        show: Maximum number of labels of differing values to list.

    Raises:
        ValueError: The reference recorded nothing in a category.
    """
    results = []
    for category in categories:
        if category in REQUIRED:
            results.append(_required(category, candidate.values.get(category, {}), show))
            continue
        a, b = reference.values.get(category, {}), candidate.values.get(category, {})
        if not a:
            raise ValueError(
                f"expected values of category {category!r}, found none in the reference "
                f"({reference.what}); record the category, or leave it out"
            )
        labels = dict.fromkeys((*a, *b))
        bad = [label for label in labels if a.get(label) != b.get(label)]
        results.append(CategoryResult(category, len(labels), len(bad), tuple(bad[:show])))
    return Comparison(reference.what, candidate.what, tuple(results))


def _required(category: str, held: Mapping[str, str], show: int) -> CategoryResult:
    """
    Compare the counts of a category with the required value zero; a run that recorded no count has
    failed.
    """
    if not held:
        return CategoryResult(category, 1, 1, ("no count was recorded",))
    bad = [label for label, value in held.items() if value != digest(0)]
    return CategoryResult(category, len(held), len(bad), tuple(bad[:show]))

"""A step that is one launch, as far as it can be tested on a machine without a device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qeffect.counts import advance, fold
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.staged_feed import StagedFeed

_INT = st.integers(-(2**63), 2**63 - 1)
_MARKS = st.lists(st.integers(1, 99), min_size=1, max_size=30)


@given(_INT, _INT, _MARKS)
def test_a_step_is_one_map_of_the_digest_whatever_it_was(a: int, b: int, marks: list[int]) -> None:
    """What is learned from one step foretells every step with the same actions in that order."""

    def ran(digest: int, order: list[int]) -> int:
        for mark in order:
            digest = fold(digest, mark)
        return digest

    factors, terms = advance([a, 5, 0], [ran(a, marks), 5 + len(marks), 0])
    found = torch.tensor([b, 9, 9]) * torch.tensor(factors) + torch.tensor(terms)

    assert found.tolist() == [ran(b, marks), 9 + len(marks), 9]
    if marks != marks[::-1]:
        assert found.tolist()[0] != ran(b, marks[::-1])


class _Feed:
    def inputs(self, stage: Any, step: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((2,), float(10 * step + microbatch)),)

    def output_gradients(self, stage: Any, step: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        return (torch.ones(()),)

    def outputs(self, *_: Any) -> None:
        raise AssertionError("expected no losses in the feed: the graph keeps them")


def test_staged_data_stay_where_they_are() -> None:
    """Every step's data come to the places that the graph reads, and none of them moves."""
    staged = StagedFeed(_Feed())  # type: ignore[arg-type]
    stage = SimpleNamespace(index=0, inputs=(1,))
    staged.prepare([SimpleNamespace(stage=stage, microbatch=m, last=True) for m in (0, 1)], 3)  # type: ignore[misc]
    (held,) = staged.inputs(stage, 3, 1)  # type: ignore[arg-type]
    assert [31.0, 31.0] == held.tolist()
    staged.load(4)

    assert [41.0, 41.0] == held.tolist()
    assert staged.inputs(stage, 4, 1)[0] is held  # type: ignore[arg-type]


def test_a_rehearsal_keeps_the_losses_of_the_launch() -> None:
    """A loss is copied where a graph copies it, and not when nothing runs."""
    staged = StagedFeed(_Feed())  # type: ignore[arg-type]
    staged.outputs(None, 0, 0, (torch.tensor(2.0),))  # type: ignore[arg-type]
    staged.rehearsing = True
    staged.outputs(None, 1, 0, (torch.tensor(3.0),))  # type: ignore[arg-type]

    assert {0: 2.0} == {m: float(loss) for m, loss in staged.losses.items()}


class _Given(_Feed):
    """Two inputs of each microbatch, and what a test makes of them."""

    def __init__(self) -> None:
        self.other: Callable[[int, list[torch.Tensor]], list[torch.Tensor]] = lambda _, own: own

    def inputs(self, stage: Any, step: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        whole = torch.full((2,), float(10 * step + microbatch))
        return tuple(self.other(microbatch, [whole, whole.long()]))


def _staged(first: Any = None) -> tuple[_Given, StagedFeed, Any]:
    feed, stage = _Given(), SimpleNamespace(index=0, inputs=(1, 2))
    feed.other = first or feed.other
    staged = StagedFeed(feed)  # type: ignore[arg-type]
    staged.prepare([SimpleNamespace(stage=stage, microbatch=m, last=False) for m in (0, 1)], 0)  # type: ignore[misc]
    return feed, staged, stage


@pytest.mark.parametrize(
    ("other", "named", "found"),
    [
        (lambda m, own: own[: 2 - m], 1, "float32 of (2,) on cpu"),
        (lambda m, own: own if m else [*own, own[0]], 0, "on cpu, torch.float32 of (2,) on cpu"),
        # As many in all, of the same forms one behind the other.
        (lambda m, own: [] if m else [*own, *own], 0, "on cpu, torch.float32 of (2,) on cpu"),
        (lambda m, own: own[::-1] if m else own, 1, "int64 of (2,) on cpu, torch.float32"),
        (lambda m, own: [own[0], own[1][:1]] if m else own, 1, "int64 of (1,) on cpu"),
        (lambda m, own: [own[0].to("meta"), own[1]] if m else own, 1, "of (2,) on meta"),
    ],
    ids=["one less", "one more", "at another place", "in another order", "smaller", "elsewhere"],
)
def test_data_of_another_form_are_named_and_nothing_is_copied(
    other: Callable[[int, list[torch.Tensor]], list[torch.Tensor]], named: int, found: str
) -> None:
    """Their number, types, shapes and devices, each at its own place."""
    feed, staged, stage = _staged()
    feed.other = other
    with pytest.raises(BackendError) as refused:
        staged.load(7)
    said = str(refused.value)
    assert (
        f"stage 0, inputs of microbatch {named} in step 7: expected torch.float32 of (2,)" in said
    )
    assert found in said.split("found")[1]
    assert [t.tolist() for m in (0, 1) for t in staged.inputs(stage, 7, m)] == [
        [0.0, 0.0],
        [0, 0],
        [1.0, 1.0],
        [1, 1],
    ]


@pytest.mark.parametrize("first", [False, True], ids=["later", "in the captured step"])
def test_data_with_a_graph_leave_their_places_without_one(first: bool) -> None:
    """A copy would make the places part of it, and hold the first step's for ever."""
    weight = torch.ones(2, requires_grad=True)

    def other(_: int, own: list[torch.Tensor]) -> list[torch.Tensor]:
        return [own[0] * weight, own[1]]

    feed, staged, stage = _staged(other if first else None)
    if not first:
        feed.other = other
    staged.load(3)
    places = [t for m in (0, 1) for t in staged.inputs(stage, 3, m)]
    assert [t.tolist() for t in places] == [[30.0, 30.0], [30, 30], [31.0, 31.0], [31, 31]]
    assert not any(t.requires_grad for t in places)

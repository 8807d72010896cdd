"""
Three kernels for a step that is one launch. They compare the counters, publish the votes, and
record the time. Each kernel has one thread block.

A rank votes yes with the step's number, counted from 1. A rank votes no with 0, or with a number
below 0 that gives the reason. After an abort of a communicator, the buffer may still contain a vote
of an earlier step. Such a vote has another number, and does not count for the current step.
"""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,unused-ignore]
    globaltimer,
)

from ..step.memory.counters_kernel import block_of


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _compare(  # type: ignore[no-untyped-def]
    values,
    wanted,
    factors,
    terms,
    number,
    word,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    offsets = tl.arange(0, BLOCK)
    inside = offsets < SIZE
    before = tl.load(wanted + offsets, mask=inside, other=0)
    factor = tl.load(factors + offsets, mask=inside, other=0)
    term = tl.load(terms + offsets, mask=inside, other=0)
    value = tl.load(values + offsets, mask=inside, other=0)
    now = before * factor + term
    found = tl.max((value != now).to(tl.int32), axis=0)
    tl.store(wanted + offsets, now, mask=inside)
    yes = tl.load(number) + 1
    tl.store(word, tl.where(found > 0, 0, yes).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _publish(  # type: ignore[no-untyped-def]
    values,
    heard,
    skip,
    ring,
    number,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    WORLD: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    offsets = tl.arange(0, BLOCK)
    ranks = tl.arange(0, RANKS)
    value = tl.load(values + offsets, mask=offsets < SIZE, other=0)
    said = tl.load(heard + ranks, mask=ranks < WORLD, other=0.0)
    step = tl.load(number)
    no = (said != (step + 1).to(tl.float64)) & (ranks < WORLD)
    row = ring + (step % ROWS) * (1 + SIZE + WORLD)
    tl.store(skip, tl.max(no.to(tl.int32), axis=0).to(tl.float32))
    tl.store(row + 1 + offsets, value, mask=offsets < SIZE)
    words = tl.where(said < 0, (1 - said).to(tl.int64), no.to(tl.int64))
    tl.store(row + 1 + SIZE + ranks, words, mask=ranks < WORLD)
    tl.store(row, step)
    tl.store(number, step + 1)


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _stamp(ring, number, place, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = ring + (tl.load(number) % ROWS) * WIDTH
    tl.store(row + place, globaltimer())


def compare(
    values: Tensor, wanted: Tensor, factors: Tensor, terms: Tensor, number: Tensor, word: Tensor
) -> None:
    """
    Update the expected counters for one more step, and compare them with the device's counters.

    Args:
        values: The device's counters, int64. All arguments are on the device.
        wanted: The expected counters after the previous step; updated in place.
        factors: Factors by which a step multiplies the counters.
        terms: Terms that a step adds to the counters.
        number: Scalar of int64: the step's number, from 0.
        word: Scalar of float64: the vote; 0 if a counter differs, else `number` plus 1.
    """
    size = values.numel()
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _compare[(1,)](
            values,
            wanted,
            factors,
            terms,
            number,
            word,
            SIZE=size,
            BLOCK=block_of(size),
            num_warps=1,
        )


def publish(values: Tensor, heard: Tensor, skip: Tensor, ring: Tensor, number: Tensor) -> None:
    """
    Decide whether all ranks voted yes on this step, and publish the votes for the host.

    Args:
        values: Counters, int64, on the device.
        heard: Each rank's vote, float64, on the device. A vote is -1 if the reduced gradients of
            its replica differ from the first replica's, and below -1 if the rank's two runs of the
            step differ.
        skip: Scalar of float32 on the device; set to 1 if any rank did not vote yes on this step,
            else 0.
        ring: Ring buffer of int64 numbers in pinned memory, with one line per step: the step's
            number, its counters, and a number for each rank. A rank's number is 0 for a yes on this
            step, 1 minus the vote if the vote is below 0, otherwise 1.
        number: Scalar of int64 on the device: the step's number, increased by 1 in place.
    """
    size, world = values.numel(), heard.numel()
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _publish[(1,)](
            values,
            heard,
            skip,
            ring,
            number,
            SIZE=size,
            BLOCK=block_of(size),
            WORLD=world,
            RANKS=block_of(world),
            ROWS=ring.shape[0],
            num_warps=1,
        )


def stamp(ring: Tensor, number: Tensor, place: int) -> None:
    """
    Write the time of the device's clock, in nanoseconds, into a step's line of a ring buffer.

    Args:
        ring: Ring buffer of time stamps in pinned memory, int64, with one line per step.
        number: Scalar of int64 on the device: the step's number.
        place: Index within the step's line.
    """
    rows, width = ring.shape
    with torch.cuda.device_of(number):  # type: ignore[no-untyped-call]
        _stamp[(1,)](ring, number, place, WIDTH=width, ROWS=rows, num_warps=1)

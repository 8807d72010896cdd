"""
The memory's columns: for each, the sort (type) of its index, the sort of its values, and its
initial value.

The kernel, the explorer, the proofs and the batches build their memory from these tables.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["CONFIG", "Column"]


@frozen
class Column:
    """
    One column of the contract's memory.

    Args:
        index: Sort of the index: one of ``one, slot, cell, stage, domain, link, pool, buffer,
            bucket``.
        values: Sort of the values: an index sort, ``caller`` (a stream that calls), or ``int`` (a
            count or an epoch mark), ``flag`` (0 or 1), ``mask`` (consumer bits), ``generation``,
            ``ticket`` (a serial, or 0 for none), ``opaque`` (compared for equality only).
        initial: Initial value of every entry; None if a configuration must give the value, or if
            any value will do before the first write.
    """

    index: str
    values: str = "int"
    initial: int | None = 0

    @property
    def number(self) -> int:
        """The initial value; if that is None, 0 for a link or caller, else -1 (no member)."""
        if self.initial is not None:
            return self.initial
        return 0 if self.values in ("link", "caller") else -1


#: Configured columns: no transition writes them.
CONFIG = {
    "generation_max": Column("one", "generation", None),
    "slot_stage": Column("slot", "stage", None),
    "domain_of": Column("stage", "domain", None),
    "domain_at": Column("link", "domain", None),
    "caller_at": Column("link", "caller", None),
    "owes": Column("stage", "mask", None),  # what a new tape waits for: its `consumers`
    "receives": Column("stage", "mask", None),  # messages that F and dI of a tape need
    "matrices": Column("stage", "opaque", None),  # the matrices a dW must cover
    "cells": Column("stage", "int", None),  # tapes of one epoch
    "target_of": Column("stage", "stage", None),  # the stage that it feeds, or itself
    "input_of": Column("cell", "cell", None),  # the cell whose F makes its input, or itself
    "gradient_of": Column("cell", "cell", None),  # the cell whose dI makes its gradient, or itself
    "declared": Column("domain", "flag", None),  # 1: the order of F and dI is declared
    "epoch_scales": Column("domain", "flag", None),  # 1: scales move once an epoch
    "forward_at": Column("cell", "int", None),  # declared position of the cell's F
    "dgrad_at": Column("cell", "int", None),  # declared position of the cell's dI
    "destination_of": Column("cell", "opaque", None),
    "buffer_of": Column("cell", "buffer", None),
    "keeper_of": Column("buffer", "cell", None),  # its first writer, which no walk leaves out
    "shared_of": Column("buffer", "buffer", None),  # the buffer shared with a stage, or itself
    "sharer_of": Column("stage", "stage", None),  # the stage that shares a buffer, or itself
    "pool_of": Column("slot", "pool", None),
    "forward_rank": Column("slot", "int", None),
    "dgrad_rank": Column("slot", "int", None),
    "wgrad_rank": Column("slot", "int", None),
    "refresh_pool": Column("stage", "pool", None),  # one of its slots' if it has a pool of its own
    "refresh_rank": Column("stage", "int", None),  # NO_RANK: a pool of its own
    "reports_fills": Column("stage", "flag", None),  # 1: the backend reports fills
    "reports_updates": Column("stage", "flag", None),  # 1: it reports updates of scales
    "live_scales": Column("stage", "flag", None),  # 1: dI reads the domain's live scales
    "carried_scales": Column("stage", "flag", None),  # 1: dI reports whose F's scales it used
    "reports_draws": Column("stage", "flag", None),  # 1: F reports where it began to draw
    "recomputes_draws": Column(
        "stage", "flag", None
    ),  # 1: dI reports where its recomputation draws
    "reports_weights": Column("stage", "flag", None),  # 1: dI reports its gradient's weight
    "stage_at": Column("bucket", "stage", None),  # the stage whose gradients the bucket holds
    "tied_at": Column("bucket", "stage", None),  # the other stage that writes it, or itself
    "reduce_at": Column("bucket", "int", None),  # declared place of the reduction
    "ordered": Column("one", "flag", None),  # 1: the order of reductions is declared
}

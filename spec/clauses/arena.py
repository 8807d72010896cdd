"""
Arena: each matrix gradient of each microbatch lands in its configured destination exactly once.
"""

from __future__ import annotations

from .model import Clause, Part

_BUFFER = "The destination and the tape keep their content."
_NOTHING = "No contract is built."

PART = Part(
    name="arena",
    title="Gradient arena",
    hidden="the destinations of matrix gradients",
    without="a gradient is lost, added twice, or written over another one",
    holder="a record of each destination: bound before dI, written once by dW, whole at finalize",
    intro="""\
With direct placement, dW accumulates into preallocated buffers (Transformer Engine's `main_grad`),
whose addresses a captured graph has fixed. A stage is configured with one destination per matrix
and microbatch, or with one accumulating destination per matrix. The kernel compares descriptors
(matrix, microbatch, shape, dtype, device, address, length) for equality and byte ranges for
overlap; it never touches memory.

Tied weights, such as an embedding and the output head that reads it, have one gradient. Two
matrices, in one stage or in two, may share a destination if both are declared tied. If the two
matrices are in two stages, each dW of either stage writes two destinations: the shared destination,
and a destination that only its own stage writes. Undeclared sharing is refused, whether two
matrices name one buffer or two buffers overlap in memory. The epoch's first dW of either stage
overwrites the shared destination; all later dW add to it, one at a time. So a dW states for both
destinations whether it overwrites, and a stage is final only when the sharing stage's dW have run
too. If gradients are reduced, the shared gradient is reduced in one bucket, after the last dW of
both stages. A weight that is tied across ranks has a copy on each rank, and every copy's gradient
is reduced in a bucket of the same name. A contract sees its own process only, so `qeffect.sharing`
compares the configurations of all ranks before the first step.

Destinations are bound before dI, because dI reads `main_grad`. The first dW that writes a buffer in
an epoch overwrites the buffer; later dW accumulate. One matrix product may write the gradients of
several tapes that share one destination and one set of scales. Such a *grouped* dW writes the
buffer once, and counts as the dW of each of its tapes. A dW that fails may have written half a
gradient: the stage's epoch is then spoiled until it is rebuilt. Finalize requires the dW of every
configured microbatch exactly once. A stage may instead copy its gradients out of dW, without an
arena (the *copied* path). Such a stage leaves this part out and keeps all others.""",
    clauses=(
        Clause(
            id="arena.spoiled",
            number="4.1",
            title="A half-written arena is not used",
            invariant="In an epoch that was spoiled for a stage (`epoch.spoiled` lists the "
            "causes), no destination of the stage is bound or written. Neither the stage nor a "
            "stage that shares a destination with it is finalized.",
            transitions=(
                "bind",
                "check_wgrad",
                "group_wgrad",
                "ungroup_wgrad",
                "finalize",
            ),
            argument="key.stage",
            unchanged="The destinations, and the mark that the epoch is spoiled.",
            section="IV-E",
            cause="An earlier F, dI or dW of this stage raised, or a tape was dropped. The sum "
            "in the buffers then lacks a microbatch, or contains half of one.",
            remedy="Purge the epoch (abort its tapes), restore the last commit and run the epoch "
            "again.",
        ),
        Clause(
            id="arena.duplicate-bind",
            number="4.2",
            title="A key's destinations are bound once",
            invariant="The destinations of a cell (a key without its epoch) are bound once per "
            "walk over the microbatches.",
            transitions=("bind",),
            argument="key",
            unchanged="The existing binding.",
            section="III-D",
            cause="Two places in the code bind `main_grad` for the same microbatch.",
            remedy="Bind in one place in the code, between the forward and its dI.",
        ),
        Clause(
            id="arena.mismatch",
            number="4.3",
            title="Gradients go to their configured destinations",
            invariant="The destinations of the call equal the cell's configured destinations in "
            "matrix, microbatch, shape, dtype, device, address and length.",
            transitions=("bind", "check_wgrad", "group_wgrad"),
            argument="destination",
            unchanged=_BUFFER,
            section="III-D",
            cause="A gradient buffer was reallocated, re-viewed, moved or cast after capture, or "
            "the views of another microbatch were bound.",
            remedy="Allocate the arena once before capture; compare `data_ptr` before binding.",
        ),
        Clause(
            id="arena.unbound",
            number="4.4",
            title="Destinations are bound before dI",
            invariant="dI runs after the destinations of its cell (its key without the epoch) were "
            "bound in this walk over the microbatches.",
            transitions=("check_dgrad",),
            argument="key",
            unchanged="The tape and the effect token.",
            section="III-D",
            cause="`main_grad` was bound after dI. By then dI had already read the old "
            "`main_grad`.",
            remedy="Bind before dI.",
        ),
        Clause(
            id="arena.in-flight",
            number="4.5",
            title="One writer at a time",
            invariant="At most one dW is in flight per buffer, whether one stage owns the buffer "
            "or two stages share it.",
            transitions=("check_wgrad", "ungroup_wgrad"),
            argument="destination",
            unchanged=_BUFFER,
            section="III-D",
            cause="Two dW of one accumulating buffer overlap: a ticket was not redeemed, or two "
            "threads write, or both stages of a tied weight write.",
            remedy="Commit or abort the first dW, or give every microbatch its own destination.",
        ),
        Clause(
            id="arena.overwrite",
            number="4.6",
            title="Only the first writer overwrites",
            invariant="Only the first dW of an epoch that writes a buffer overwrites the buffer. "
            "The rule holds for a stage's own buffer and for a buffer that it shares.",
            transitions=("check_wgrad",),
            argument="first",
            unchanged=_BUFFER,
            section="III-D",
            cause="A graph captured for microbatch 0 (is_first_microbatch, overwrite_main_grad) "
            "was replayed for a later microbatch, or the second use of a tied weight assigns "
            "its gradient. Either would erase the accumulated gradient.",
            remedy="Call `first_writer(key)` and `first_of_tied(key)` to choose the graph to "
            "replay.",
        ),
        Clause(
            id="arena.stale-accumulation",
            number="4.7",
            title="Nothing accumulates into the previous epoch's gradient",
            invariant="A dW adds to a buffer only after another dW overwrote that buffer in this "
            "epoch. The rule holds for a stage's own buffer and for a buffer that it shares.",
            transitions=("check_wgrad",),
            argument="first",
            unchanged=_BUFFER,
            section="III-D",
            cause="The schedule reorders dW, so that microbatch 0 is not the first writer, or the "
            "buffer was zeroed by hand instead of being overwritten.",
            remedy="Let the epoch's first writer overwrite, whichever microbatch it is.",
        ),
        Clause(
            id="arena.incomplete",
            number="4.8",
            title="An arena is finalized when it is complete",
            invariant="Finalize requires one committed dW for every cell (a key without its epoch: "
            "microbatch, block and invocation) that belongs to the walk over the microbatches. The "
            "cells are those of the stage, and of the stage that shares a destination with it.",
            transitions=("finalize",),
            argument="stage",
            unchanged="The stage, which is not final; the missing dW may still run.",
            section="III-D",
            cause="A delayed dW has not run yet, or the schedule lost it.",
            remedy="Run the deferred dW; `contract.live()` names the tapes that wait for it.",
        ),
        Clause(
            id="arena.unknown-matrix",
            number="4.9",
            title="Destinations name the stage's matrices",
            invariant="Every configured destination receives the gradient of a matrix of its "
            "stage.",
            transitions=("configure",),
            argument="destination.matrix",
            unchanged=_NOTHING,
            section="III-D",
            cause="Names of parameters and names of matrices differ, or a chunk was configured "
            "with another chunk's destinations.",
            remedy="Use the names listed in `matrices`.",
        ),
        Clause(
            id="arena.duplicate-destination",
            number="4.10",
            title="A gradient has one destination",
            invariant="For each microbatch, no matrix is configured with two destinations.",
            transitions=("configure",),
            argument="destination",
            unchanged=_NOTHING,
            section="III-D",
            cause="A shared (tied) weight was listed twice, or per-microbatch views were listed "
            "next to an accumulating buffer.",
            remedy="List each matrix once per microbatch, or once for all microbatches together.",
        ),
        Clause(
            id="arena.missing-destination",
            number="4.11",
            title="Every gradient has a destination",
            invariant="For each microbatch, every matrix is configured with a destination.",
            transitions=("configure",),
            argument="destination",
            unchanged=_NOTHING,
            section="III-D",
            cause="The arena was built for fewer microbatches than the stage runs, or a matrix "
            "was forgotten.",
            remedy="Build one view per matrix and microbatch, or one accumulating buffer.",
        ),
        Clause(
            id="arena.overlapping-destinations",
            number="4.12",
            title="Only declared tied destinations overlap",
            invariant="Destinations have different names and do not overlap in memory. Only "
            "matrices that are declared tied may name the same destination.",
            transitions=("configure",),
            argument="destination.address",
            unchanged=_NOTHING,
            section="III-D",
            cause="Views were cut from one arena at wrong offsets, or two matrices, such as "
            "tied weights, share a buffer that `tied` does not declare.",
            remedy="Give each destination its own aligned range, or name the shared destination "
            "for both matrices in `buffers` and declare both in `tied`.",
        ),
        Clause(
            id="arena.other-destination",
            number="4.13",
            title="A grouped dW has one destination",
            invariant="A grouped dW takes a tape only if that tape's gradient goes to the buffer "
            "that the dW writes.",
            transitions=("group_wgrad",),
            argument="destination",
            unchanged=_BUFFER,
            section="design",
            cause="The stage keeps the gradient of each microbatch in a buffer of its own "
            "(`per_microbatch`).",
            remedy="Group dW only where the stage's gradients accumulate in one buffer.",
        ),
        Clause(
            id="arena.left-out",
            number="4.14",
            title="A stage without the arena part cannot group dW",
            invariant="If a stage leaves the arena part out, no dW takes a second tape into a "
            "group.",
            transitions=("group_wgrad", "ungroup_wgrad"),
            argument="key",
            unchanged="Everything, including the dW in flight.",
            section="design",
            cause="The stage copies each gradient out of dW, so no buffer holds the sum over the "
            "group's tapes.",
            remedy="Keep the arena, with one accumulating destination for each matrix.",
        ),
    ),
)

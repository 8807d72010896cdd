"""
Arena: each matrix gradient of each microbatch lands in its configured destination exactly once.
"""

from __future__ import annotations

from .model import Clause, Part

_BUFFER = "The content of the destination and of the tape."
_NOTHING = "No contract is built."

PART = Part(
    name="arena",
    title="Gradient arena",
    hidden="the destinations of matrix gradients",
    without="a gradient is lost, added twice, or overwrites another gradient",
    holder="a record of each destination: bound before dI, written once by dW, complete at "
    "finalize",
    intro="""\
dW can accumulate directly into preallocated buffers (Transformer Engine's `main_grad`), at
addresses that are fixed in the captured graph. These buffers form the *arena*. A stage is
configured with one destination per matrix and microbatch, or with one accumulating destination per
matrix. The contract compares descriptors of destinations (matrix, microbatch, shape, dtype, device,
address, length) for equality, and their byte ranges for overlap. It never touches the memory
itself.

Tied weights, such as an embedding and the output head that reads it, have one gradient. Two
matrices, in one stage or in two stages, may share a destination if both matrices are declared tied.
Undeclared sharing is refused, whether two matrices name one buffer or two buffers overlap in
memory. If the tied matrices are in two stages, each dW of these stages writes two destinations: the
shared destination, and a destination of its own stage. The first dW of the epoch, in either stage,
overwrites the shared destination. All later dW of both stages add to it, one at a time. So a dW
states for each of its two destinations whether it overwrites. A stage is final only when the dW of
the other stage have run too. If gradients are reduced, the shared gradient is reduced in one
bucket, after the last dW of both stages. A weight that is tied across ranks has a copy on each
rank, and every copy's gradient is reduced in a bucket of the same name. A contract sees only its
own process, so `qeffect.sharing` compares the configurations of all ranks before the first step.

Destinations are bound (named for a key) before dI, because dI reads `main_grad`. The first dW that
writes a buffer in an epoch overwrites the buffer; later dW accumulate. One matrix product may write
the gradients of several tapes that share one destination and one set of scales. Such a *grouped* dW
writes the buffer once, and counts as the dW of each of its tapes. A dW that fails may have written
half a gradient. It therefore spoils the stage's epoch, which must then be run again after a
restore. `finalize` requires the dW of every configured microbatch exactly once. Alternatively, a
stage may copy its gradients out of dW, without an arena (the *copied* path). Such a stage leaves
this part out and keeps all others.""",
    clauses=(
        Clause(
            id="arena.spoiled",
            number="4.1",
            title="A half-written arena is not used",
            invariant="After a failure has spoiled an epoch for a stage (`epoch.spoiled` lists "
            "the causes), no destination of the stage is bound or written in this epoch. Neither "
            "this stage nor a stage that shares a destination with this stage is finalized.",
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
            cause="An earlier F, dI or dW of this stage raised an exception, or a tape was "
            "dropped. The sum in the buffers then lacks a microbatch's gradient, or contains only "
            "half of it.",
            remedy="Purge the epoch (abort its tapes), restore the last commit and run the epoch "
            "again.",
        ),
        Clause(
            id="arena.duplicate-bind",
            number="4.2",
            title="A key's destinations are bound once",
            invariant="The destinations of a cell (a key without its epoch) are bound only once "
            "in each walk over the microbatches.",
            transitions=("bind",),
            argument="key",
            unchanged="The existing binding.",
            section="III-D",
            cause="Two places in the code bind `main_grad` for the same microbatch.",
            remedy="Call `bind` in one place only, between the forward and its dI.",
        ),
        Clause(
            id="arena.mismatch",
            number="4.3",
            title="Gradients go to their configured destinations",
            invariant="The destinations that a call names equal the destinations that are "
            "configured for the key, in matrix, microbatch, shape, dtype, device, address and "
            "length.",
            transitions=("bind", "check_wgrad", "group_wgrad"),
            argument="destination",
            unchanged=_BUFFER,
            section="III-D",
            cause="A gradient buffer was reallocated, viewed anew, moved or cast after capture. "
            "Or the caller bound the views of another microbatch.",
            remedy="Allocate the arena once, before capture. Compare `data_ptr` before binding.",
        ),
        Clause(
            id="arena.unbound",
            number="4.4",
            title="Destinations are bound before dI",
            invariant="dI runs only after the destinations of its key were bound in the current "
            "walk over the microbatches.",
            transitions=("check_dgrad",),
            argument="key",
            unchanged="The tape and the effect token.",
            section="III-D",
            cause="`main_grad` was bound too late: dI had already read the old `main_grad`.",
            remedy="Call `bind` before the check of dI.",
        ),
        Clause(
            id="arena.in-flight",
            number="4.5",
            title="One writer at a time",
            invariant="At most one dW is in flight for each gradient buffer. This also holds if "
            "two stages share the buffer.",
            transitions=("check_wgrad", "ungroup_wgrad"),
            argument="destination",
            unchanged=_BUFFER,
            section="III-D",
            cause="Two dW that accumulate into one buffer overlap. Either a ticket was not "
            "redeemed, or two threads run dW, or the two stages of a tied weight run dW at the "
            "same time.",
            remedy="Commit or abort the first dW, or give every microbatch its own destination.",
        ),
        Clause(
            id="arena.overwrite",
            number="4.6",
            title="Only the first writer overwrites",
            invariant="In an epoch, only the first dW that writes a buffer overwrites the buffer. "
            "This holds for a stage's own buffer, and for a buffer that two stages share.",
            transitions=("check_wgrad",),
            argument="first",
            unchanged=_BUFFER,
            section="III-D",
            cause="A graph that was captured for microbatch 0 (is_first_microbatch, "
            "overwrite_main_grad) was replayed for a later microbatch. Or the second use of a "
            "tied weight assigns its gradient instead of adding it. Either mistake would erase "
            "the accumulated gradient.",
            remedy="Choose the graph to replay by `first_writer(key)` and `first_of_tied(key)`.",
        ),
        Clause(
            id="arena.stale-accumulation",
            number="4.7",
            title="Nothing accumulates into the previous epoch's gradient",
            invariant="A dW adds to a buffer only after another dW overwrote that buffer in this "
            "epoch. This holds for a stage's own buffer, and for a buffer that two stages share.",
            transitions=("check_wgrad",),
            argument="first",
            unchanged=_BUFFER,
            section="III-D",
            cause="The schedule reorders dW, so another microbatch than microbatch 0 writes "
            "first. Or the code zeroes the buffer itself, and lets the first dW add.",
            remedy="Let the epoch's first dW overwrite the buffer, whichever microbatch it "
            "belongs to.",
        ),
        Clause(
            id="arena.incomplete",
            number="4.8",
            title="An arena is finalized when it is complete",
            invariant="`finalize` requires one committed dW for every cell (microbatch, block and "
            "invocation) of the stage. It requires the same for a stage that shares a destination "
            "with this stage. Cells that were left out of the walk over the microbatches do not "
            "count.",
            transitions=("finalize",),
            argument="stage",
            unchanged="The stage. It is not final, and the missing dW may still run.",
            section="III-D",
            cause="A delayed dW has not run yet, or is missing in the schedule.",
            remedy="Run the missing dW. `contract.live()` names the tapes that still wait for a "
            "dW.",
        ),
        Clause(
            id="arena.unknown-matrix",
            number="4.9",
            title="Destinations name the stage's matrices",
            invariant="Every configured destination names a matrix of its stage.",
            transitions=("configure",),
            argument="destination.matrix",
            unchanged=_NOTHING,
            section="III-D",
            cause="The destinations use other names than the stage's `matrices`. Or a chunk was "
            "configured with another chunk's destinations.",
            remedy="Use the names that the stage lists in `matrices`.",
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
            cause="A shared (tied) weight was listed twice. Or a matrix was listed both with one "
            "view per microbatch and with an accumulating buffer.",
            remedy="List each matrix either once per microbatch, or once for all microbatches "
            "together.",
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
            cause="The arena was built for fewer microbatches than the stage runs. Or a matrix "
            "was forgotten.",
            remedy="Configure one view per matrix and microbatch, or one accumulating buffer per "
            "matrix.",
        ),
        Clause(
            id="arena.overlapping-destinations",
            number="4.12",
            title="Only declared tied destinations overlap",
            invariant="No two destinations have the same name or overlap in memory. Only matrices "
            "that are declared tied may name the same destination.",
            transitions=("configure",),
            argument="destination.address",
            unchanged=_NOTHING,
            section="III-D",
            cause="Views were cut from one arena at wrong offsets. Or two matrices share a "
            "buffer, for example because their weights are tied, but `tied` does not declare it.",
            remedy="Give each destination its own aligned range of memory. For tied weights, name "
            "the shared destination for both matrices in `buffers`, and declare both matrices in "
            "`tied`.",
        ),
        Clause(
            id="arena.other-destination",
            number="4.13",
            title="A grouped dW has one destination",
            invariant="A grouped dW is one matrix product for several tapes. It takes a tape only "
            "if that tape's gradient goes to the buffer that the dW writes.",
            transitions=("group_wgrad",),
            argument="destination",
            unchanged=_BUFFER,
            section="design",
            cause="The stage keeps the gradient of each microbatch in a buffer of its own "
            "(`per_microbatch`).",
            remedy="Group dW only in stages whose gradients accumulate in one buffer.",
        ),
        Clause(
            id="arena.left-out",
            number="4.14",
            title="A stage without the arena part cannot group dW",
            invariant="In a stage that leaves the arena part out, no dW takes a second tape into "
            "a group.",
            transitions=("group_wgrad", "ungroup_wgrad"),
            argument="key",
            unchanged="Everything, including the dW in flight.",
            section="design",
            cause="The stage copies each gradient out of dW, so it has no buffer for the sum over "
            "the group's tapes.",
            remedy="Keep the arena part, with one accumulating destination per matrix.",
        ),
    ),
)

"""
Reduction: each bucket of gradients is reduced once, after its last dW and before the commit.
"""

from __future__ import annotations

from .model import Clause, Part

_REDUCTIONS = "The reductions in flight, and the buckets that are already reduced."

PART = Part(
    name="reduction",
    title="Reductions",
    hidden="asynchronous data-parallel reductions of gradients",
    without="the optimizer reads gradients that are partly reduced, or reduced twice",
    holder="a record per bucket: whole, in flight, or reduced in this epoch",
    intro="""\
A stage whose gradients are reduced divides the gradients into *buckets*; by default they form one
bucket with the stage's name. Every dW covers every matrix of its stage, so a bucket is whole after
the stage's last dW of the epoch. This may happen long before finalize, and long before the buckets
of other stages are whole. Two stages of one state domain that name the same bucket share it: a
destination that both write is reduced once, after the last dW of both.

The runtime reports a reduction by calls. `start_reduction` says that the reduction was enqueued,
and on which stream. `finish_reduction` says that the stream which will read the gradients waits for
the reduction, and `fail_reduction` says that the reduction failed. If an order of all buckets is
declared, every replica starts the reductions in that order, as collectives of one group require.
After a failed reduction the content of the gradients is unknown: the epoch cannot commit until it
is rebuilt.

No guard checks whether a dW writes a bucket while the bucket is reduced, or whether a bucket still
holds an earlier epoch's gradients. The other guards exclude both cases: no dW follows the stage's
last dW, no reduction starts before that dW, and no walk follows a reduction. The promises of this
part state this exclusion, and are proved. A tape that is dropped during a reduction has already run
its dW and waits only for readers: the drop leaves the buffers unchanged, but spoils the epoch.""",
    clauses=(
        Clause(
            id="reduction.incomplete",
            number="7.1",
            title="Only whole gradients are reduced",
            invariant="A reduction starts only after the last dW of every stage that writes the "
            "bucket, in this epoch.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The bucket's reduction was launched when its last hook fired, but a delayed dW "
            "had not run yet. The hook fired in dI, or in the first of two stages that share the "
            "bucket.",
            remedy="Start the reduction after the last dW of the bucket's stages has committed.",
        ),
        Clause(
            id="reduction.spoiled",
            number="7.2",
            title="Spoiled gradients are not reduced",
            invariant="A reduction starts only if the epoch was not spoiled for any stage that "
            "writes the bucket (`epoch.spoiled` lists the causes).",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The reducer ran although an action raised, or ran again after its own failure.",
            remedy="On all replicas, restore the last checkpoint or the last commit, and run the "
            "epoch again.",
        ),
        Clause(
            id="reduction.in-flight",
            number="7.3",
            title="Gradients in reduction are left alone",
            invariant="While a bucket's reduction is in flight, no second reduction of the bucket "
            "starts, and no update or restore begins.",
            transitions=("start_reduction", "check_update", "restore"),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The handle of an asynchronous all-reduce was not waited for.",
            remedy="Wait for the reduction, then call `finish_reduction`.",
        ),
        Clause(
            id="reduction.duplicate",
            number="7.4",
            title="Gradients are reduced once",
            invariant="A bucket's reduction starts only if the bucket was not yet reduced in this "
            "epoch.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The reducer ran twice in one step; a second sum over the ranks would scale the "
            "gradient.",
            remedy="Reduce each bucket once per epoch.",
        ),
        Clause(
            id="reduction.out-of-order",
            number="7.5",
            title="All replicas reduce in one order",
            invariant="If an order of reductions is declared, a reduction starts only if its "
            "bucket is next in that order.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="Buckets were launched as they became whole, in an order that differs between "
            "replicas. Collectives of one group then mismatch, and hang or mix gradients.",
            remedy="Start reductions in the declared order, or declare the order in which the "
            "schedule makes buckets whole.",
        ),
        Clause(
            id="reduction.not-started",
            number="7.6",
            title="Only a started reduction finishes",
            invariant="The end or the failure of a reduction is accepted only while the reduction "
            "is in flight.",
            transitions=("finish_reduction", "fail_reduction"),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="A completion callback fired twice, or for another bucket.",
            remedy="Call `start_reduction`, then `finish_reduction` or `fail_reduction`, once "
            "each.",
        ),
        Clause(
            id="reduction.missing",
            number="7.7",
            title="An update finds every reduction done",
            invariant="The update, or a read of gradients on another stream, begins only if the "
            "reduction of every bucket finished in this epoch.",
            transitions=("start_gradients_read", "check_update"),
            argument="",
            unchanged="The weight epoch, and the reductions that are still missing.",
            section="IV-E",
            cause="The optimizer stepped on local gradients: a bucket's hook was never fired.",
            remedy="Reduce every bucket before the commit.",
        ),
        Clause(
            id="reduction.begun",
            number="7.8",
            title="No walk follows a reduction",
            invariant="Another walk (pass over the microbatches) of the epoch begins only if no "
            "reduction of the epoch has started.",
            transitions=("next_walk",),
            argument="",
            unchanged=_REDUCTIONS,
            section="design",
            cause="Gradients were reduced after each walk of an accumulated step. The dW of the "
            "next walk would add local gradients to reduced ones.",
            remedy="Start the reductions after the last walk. If every walk is a step of its own, "
            "commit instead of calling `next_walk`.",
        ),
    ),
)

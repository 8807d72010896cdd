"""
Reduction: each bucket of gradients is reduced once, after its last dW and before the commit.
"""

from __future__ import annotations

from .model import Clause, Part

_REDUCTIONS = "The reductions in flight, and the buckets that were already reduced."

PART = Part(
    name="reduction",
    title="Reductions",
    hidden="asynchronous data-parallel reductions of gradients",
    without="the optimizer reads gradients that are partly reduced, or reduced twice",
    holder="a record per bucket: whole, in flight, or reduced in this epoch",
    intro="""\
If a stage's gradients are reduced over data-parallel replicas, the stage divides them into
*buckets*. By default, a stage has one bucket, which has the stage's name. Every dW writes the
gradient of every matrix of its stage, so a bucket is whole after the stage's last dW of the epoch.
This may happen long before the stage is finalized, and long before the buckets of other stages are
whole. Two stages of one state domain share a bucket if both name it. Such a bucket is reduced once,
after the last dW of both stages.

The runtime reports each reduction by two calls. `start_reduction` says that the reduction was
enqueued, and on which stream. Then `finish_reduction` says that the stream that will read the
gradients waits for the reduction, or `fail_reduction` says that the reduction failed. If an order
of all buckets is declared, every replica starts the reductions in that order, as collectives of one
group require. After a failed reduction, the content of the gradients is unknown. The epoch can then
not commit, and must run again after a restore.

Two faults have no guard of their own: a dW writes a bucket during its reduction, or a bucket with
an earlier epoch's gradients is reduced. The other guards already exclude both: no reduction starts
before the last dW of the bucket's stages, and no walk follows a reduction. The promises of this
part state that both faults are excluded, and are proved. A tape that is dropped during a reduction
has already run its dW, and waits only for readers of its output or input gradient. The drop leaves
the gradients unchanged, but spoils the epoch.""",
    clauses=(
        Clause(
            id="reduction.incomplete",
            number="7.1",
            title="Only whole gradients are reduced",
            invariant="A bucket's reduction starts only after the epoch's last dW of every stage "
            "that writes the bucket.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The bucket's reduction was launched when the bucket's last gradient hook "
            "fired, but a delayed dW had not run yet. The hook fired in dI, or in the first of "
            "two stages that share the bucket.",
            remedy="Start the reduction after the last dW of all the bucket's stages was "
            "committed.",
        ),
        Clause(
            id="reduction.spoiled",
            number="7.2",
            title="Spoiled gradients are not reduced",
            invariant="A reduction is refused if a failure has spoiled the epoch for a stage that "
            "writes the bucket (`epoch.spoiled` lists the causes).",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The reduction was started although an action had raised an exception. Or the "
            "reduction was started again after a failure.",
            remedy="On all replicas, restore the last checkpoint or the last commit, and run the "
            "epoch again.",
        ),
        Clause(
            id="reduction.in-flight",
            number="7.3",
            title="No second reduction and no update begins during a reduction",
            invariant="While a bucket's reduction is in flight, no second reduction of the bucket "
            "starts, and no update or restore begins.",
            transitions=("start_reduction", "check_update", "restore"),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The caller did not wait for the handle of an asynchronous all-reduce.",
            remedy="Wait for the reduction, then call `finish_reduction`.",
        ),
        Clause(
            id="reduction.duplicate",
            number="7.4",
            title="Gradients are reduced once",
            invariant="A bucket is reduced only once per epoch.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The reduction ran twice in one step. A second sum over the ranks would "
            "multiply the gradient.",
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
            cause="Each replica reduced its buckets in the order in which they became whole, and "
            "this order differs between replicas. The collectives of one group then mismatch, and "
            "hang or mix gradients.",
            remedy="Start reductions in the declared order. Or declare the order in which the "
            "schedule completes the buckets.",
        ),
        Clause(
            id="reduction.not-started",
            number="7.6",
            title="Only a started reduction finishes",
            invariant="The end or the failure of a reduction is accepted only while the reduction "
            "is in flight (started, and not ended).",
            transitions=("finish_reduction", "fail_reduction"),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="A completion callback fired twice, or fired for another bucket.",
            remedy="For each reduction, call `start_reduction` once, then either "
            "`finish_reduction` or `fail_reduction` once.",
        ),
        Clause(
            id="reduction.missing",
            number="7.7",
            title="An update finds every reduction done",
            invariant="An update, or a read of gradients on another stream, begins only if every "
            "bucket was reduced in this epoch.",
            transitions=("start_gradients_read", "check_update"),
            argument="",
            unchanged="The weight epoch, and the state of every bucket.",
            section="IV-E",
            cause="The optimizer would step on gradients of this replica only, because a bucket's "
            "hook never fired.",
            remedy="Reduce every bucket before the update.",
        ),
        Clause(
            id="reduction.begun",
            number="7.8",
            title="No walk follows a reduction",
            invariant="The epoch's next walk (pass over the microbatches) begins only if no "
            "reduction has started in this epoch.",
            transitions=("next_walk",),
            argument="",
            unchanged=_REDUCTIONS,
            section="design",
            cause="The step accumulates gradients over several walks, and the caller reduced them "
            "after each walk. The dW of the next walk would add local gradients to reduced "
            "gradients.",
            remedy="Start the reductions after the last walk. If every walk is an optimizer step "
            "of its own, commit the epoch instead of calling `next_walk`.",
        ),
    ),
)

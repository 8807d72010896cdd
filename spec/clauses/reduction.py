"""
Reduction: each bucket of gradients is reduced once, after its last dW and before the commit.
"""

from __future__ import annotations

from .model import Clause, Part

_REDUCTIONS = "The reductions in flight, and what is already reduced."

PART = Part(
    name="reduction",
    title="Reductions",
    hidden="asynchronous data-parallel reductions of gradients",
    without="the optimizer reads gradients that are partly reduced, or reduced twice",
    holder="a ledger per bucket: whole, in flight, done in this epoch",
    intro="""\
A stage that reduces divides its gradients into *buckets*; by default all are one bucket, named as
the stage. Every dW covers every matrix of its stage, so a bucket is whole after the stage's last dW
of the epoch, which may be long before the other stages' and before finalize. Two stages of one
domain that name the same bucket share it: a destination that both write is reduced once, after the
last dW of both.

The runtime says when a reduction is enqueued, behind which stream's work; when the stream that will
read the gradients waits for it; or that it failed. Where an order of all buckets is declared,
every replica starts their reductions in that order, as collectives of one group must. A failed one
leaves gradients of which nobody knows what they hold: the epoch cannot commit until it is rebuilt.

No guard asks whether a dW writes a bucket that is being reduced, or whether a bucket still holds
the placeholders of an epoch without a dW: after the last dW of a stage there is none to come, and
before it nothing starts. Both are promised, and proved. A tape that is dropped meanwhile has had
its dW, and waits for readers alone: the buffers stay as they are, and the epoch is spoiled.""",
    clauses=(
        Clause(
            id="reduction.incomplete",
            number="7.1",
            title="Whole gradients are reduced",
            invariant="A reduction starts only after the last dW of every stage that writes the "
            "bucket, in this epoch.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="A bucket was launched as soon as its last hook fired, in dI or in the first of "
            "two stages that share it, while a delayed dW was still to come.",
            remedy="Start the bucket when the last dW of its stages has committed.",
        ),
        Clause(
            id="reduction.spoiled",
            number="7.2",
            title="Spoiled gradients are not reduced",
            invariant="A reduction starts only where no action of the bucket's stages failed in "
            "this epoch.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The reducer ran although an action raised, or ran again after its own failure.",
            remedy="Restore the last checkpoint, or rebuild the epoch, on all replicas.",
        ),
        Clause(
            id="reduction.in-flight",
            number="7.3",
            title="Gradients in reduction are left alone",
            invariant="While a bucket's reduction is in flight no second one of it starts, and "
            "nothing commits or restores.",
            transitions=("start_reduction", "commit_epoch", "restore"),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The handle of an asynchronous all-reduce was not waited for.",
            remedy="Wait for the reduction and tell it with `finish_reduction`.",
        ),
        Clause(
            id="reduction.duplicate",
            number="7.4",
            title="Gradients are reduced once",
            invariant="A bucket's reduction starts only where none of it finished in this epoch.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The reducer ran twice in one step; a second sum over the ranks would scale the "
            "gradient.",
            remedy="Reduce each bucket once in an epoch.",
        ),
        Clause(
            id="reduction.out-of-order",
            number="7.5",
            title="All replicas reduce in one order",
            invariant="Where an order of reductions is declared, the bucket is the next of it.",
            transitions=("start_reduction",),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="Buckets were launched as they became whole, in an order that differs between "
            "replicas; collectives of one group then meet others, and hang or mix gradients.",
            remedy="Start reductions in the declared order, or declare the order in which the "
            "schedule makes buckets whole.",
        ),
        Clause(
            id="reduction.not-started",
            number="7.6",
            title="What finishes has started",
            invariant="Finish and failure are told of a reduction that is in flight.",
            transitions=("finish_reduction", "fail_reduction"),
            argument="bucket",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="A completion callback fired twice, or for another bucket.",
            remedy="Tell start, then finish or failure, once each.",
        ),
        Clause(
            id="reduction.missing",
            number="7.7",
            title="A commit finds every reduction done",
            invariant="The commit happens when the reduction of every bucket finished in this "
            "epoch.",
            transitions=("commit_epoch",),
            argument="",
            unchanged="The weight epoch, and what is owed.",
            section="IV-E",
            cause="The optimizer stepped on local gradients: a bucket's hook was never fired.",
            remedy="Reduce every bucket before the commit.",
        ),
    ),
)

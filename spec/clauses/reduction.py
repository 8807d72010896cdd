"""
Reduction: a stage's gradients are reduced once, after they are whole and before the commit.
"""

from __future__ import annotations

from .model import Clause, Part

_REDUCTIONS = "The reductions in flight, and what is already reduced."

PART = Part(
    name="reduction",
    title="Reductions",
    hidden="asynchronous data-parallel reductions of gradients",
    without="the optimizer reads gradients that are partly reduced, or reduced twice",
    holder="a ledger per stage: owed after finalize, in flight, done",
    intro="""\
Where a stage is configured to reduce, finalize makes it owe one reduction. The runtime says when
it starts, finishes or fails. A failed one leaves gradients of which nobody knows what they hold:
the epoch cannot commit until it is rebuilt.""",
    clauses=(
        Clause(
            id="reduction.before-final",
            number="7.1",
            title="Whole gradients are reduced",
            invariant="A reduction starts only after its stage was finalized in this epoch.",
            transitions=("start_reduction",),
            argument="stage",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="A bucket was launched as soon as its last hook fired, while a delayed dW of "
            "another microbatch was still to come, or after a failure.",
            remedy="Finalize the stage first.",
        ),
        Clause(
            id="reduction.in-flight",
            number="7.2",
            title="Gradients in reduction are left alone",
            invariant="While a stage's reduction is in flight no second one starts, no tape of the "
            "stage is dropped, and nothing commits or restores.",
            transitions=("drop", "start_reduction", "commit_epoch", "restore"),
            argument="stage",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The handle of an asynchronous all-reduce was not waited for.",
            remedy="Wait for the reduction and tell it with `finish_reduction`.",
        ),
        Clause(
            id="reduction.duplicate",
            number="7.3",
            title="Gradients are reduced once",
            invariant="A stage's reduction starts only while it owes one.",
            transitions=("start_reduction",),
            argument="stage",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="The reducer ran twice in one step, or the stage was configured without one; a "
            "second sum over the ranks would scale the gradient.",
            remedy="Reduce once after finalize, and configure `reduces=True` where it happens.",
        ),
        Clause(
            id="reduction.not-started",
            number="7.4",
            title="What finishes has started",
            invariant="Finish and failure are told of a reduction that is in flight.",
            transitions=("finish_reduction", "fail_reduction"),
            argument="stage",
            unchanged=_REDUCTIONS,
            section="IV-E",
            cause="A completion callback fired twice, or for another stage.",
            remedy="Tell start, then finish or failure, once each.",
        ),
        Clause(
            id="reduction.missing",
            number="7.5",
            title="A commit finds every reduction done",
            invariant="The commit happens when no stage owes a reduction.",
            transitions=("commit_epoch",),
            argument="",
            unchanged="The weight epoch, and what is owed.",
            section="IV-E",
            cause="The optimizer stepped on local gradients: a stage's reducer was not run.",
            remedy="Reduce every configured stage before the commit.",
        ),
    ),
)

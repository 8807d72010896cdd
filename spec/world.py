"""
The terms that the promises use for the world outside the contract, with their meanings.

A promise is a claim about what really happened: which work ran, what a buffer or a cache holds,
which stream waited for which. The values of these terms depend only on the actions and their
arguments, never on the contract's own state or on a guard. So a promise does not merely repeat a
guard. ``qeffect.verification.induction.history`` defines how each accepted transition changes these
values.

Some terms describe one reference, ticket, slot, link or stage that is fixed but arbitrary. A proof
about an arbitrary reference holds for all references.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

__all__ = [
    "DGRAD",
    "DONE",
    "EVALUATION",
    "FORWARD",
    "NONE",
    "REFRESH",
    "RUNNING",
    "UPDATE",
    "WGRAD",
    "WORDS",
    "Word",
]

#: Kinds of an outstanding ticket.
NONE: Final = 0
FORWARD: Final = 1
DGRAD: Final = 2
WGRAD: Final = 3
REFRESH: Final = 4
UPDATE: Final = 5
EVALUATION: Final = 6
#: Progress of a reduction, after ``NONE``.
RUNNING: Final = 1
DONE: Final = 2


@frozen
class Word:
    """
    One term for the world outside the contract: a named quantity that follows what really happens.

    Args:
        name: Name of the term; a predicate reads its value as ``h.NAME[index]``.
        index: Sort (type) of the index; ``one`` if the term has a single value.
        meaning: Meaning of the value, in words.
    """

    name: str
    index: str
    meaning: str


def _words(index: str, **meanings: str) -> dict[str, Word]:
    return {name: Word(name, index, meaning) for name, meaning in meanings.items()}


#: Every word that some promise uses.
WORDS: Final[Mapping[str, Word]] = {
    **_words(
        "slot",
        tenant="the cell of the key whose work was last put into the slot",
        tenant_epoch="the epoch of the key whose work was last put into the slot",
        owing="the consumers that have not finished with the slot's latest work, as a bit mask",
        acting="how many actions are in flight on the slot",
        queued="the deferred work that dI of the slot's latest tape left for dW",
        fill_read="which fill of the weight cache was read by F of the slot's latest tape; the "
        "value of `fills` at that F",
        scaled_by="which scales were used by F of the slot's latest tape, as a value of the "
        "domain's `updates`: the value just before that F or, if scales change once an epoch, the "
        "value at their last change (0 before the first change)",
        rolls_seen="the value of the domain's `rolls` just after F of the slot's latest tape",
        drew_at="the position of the random generator at which F of the slot's latest tape began "
        "to draw, if reported",
        in_pool="1 while the slot keeps memory in its capture pool",
        moving="the transfers under way in the slot, as a bit mask",
        last_end_on="the link on which the slot's latest transfer ended, or its copy was enqueued",
        last_end="the number of that end or copy among all that were reported on the link "
        "`last_end_on`; 0 before the first",
        arrived="the messages that the slot's work has received, and whether its input was "
        "copied, as a bit mask",
    ),
    **_words(
        "cell",
        ran_forward="how often the cell's F succeeded in this walk over the microbatches",
        ran_dgrad="how often the cell's dI succeeded in this walk over the microbatches",
        ran_wgrad="how often the cell's dW succeeded in this walk over the microbatches",
        covered="the matrices that the cell's latest dW wrote",
        skipped="how often the current walk over the microbatches left the cell out",
        binds="how often the cell's destination was bound in this walk over the microbatches",
        bound_to="the destination to which the cell was bound last",
        output_read="1 once a read of the cell's output began in this walk over the microbatches",
        gradient_read="1 once a read of the cell's input gradient began in this walk over the "
        "microbatches",
    ),
    **_words(
        "stage",
        num_forwards="how many F of the stage succeeded in this walk over the microbatches",
        num_dgrads="how many dI of the stage succeeded in this walk over the microbatches",
        num_wgrads="how many dW of the stage succeeded in this walk over the microbatches",
        num_skipped="how many cells of the stage the current walk over the microbatches leaves out",
        forwards_of_epoch="how many F of the stage succeeded since the weights last changed",
        weighed="the sum of the gradient weights that the stage's dI reported since the weights "
        "last changed, in parts of `counted_in`",
        counted_in="the total number of parts that the stage's latest dI reported with its "
        "gradient weight; 0 if no dI has reported since the weights last changed",
        cached="the version of the weights in the stage's quantized cache; -1 if the cache holds "
        "none",
        fills="how often the stage's quantized cache was filled",
        fill_of_epoch="which fill of the cache was read by the epoch's first F; the value of "
        "`fills` at that F, or -1 before that F",
        lost="1 if the cache was lost since its latest fill began",
        lost_in_use="the last epoch in which the cache was lost between the stage's first F and "
        "last dI; -1 if never",
        filled_after="the value of the domain's `updates` just before the stage's latest refresh",
        spoiled="the last epoch whose gradients a failure spoiled; -1 if no failure did",
        half_written="the last epoch whose gradients a failed dW left half written; -1 if no dW "
        "did",
        evaluating="how many evaluations of the stage are in flight",
        finals="how often the stage was finalized in this walk over the microbatches",
        weights_reader="the read of the stage's weights on a separate stream since the weights "
        "last changed: 0 none, 1 running, 2 done",
        reader_awaited_by="the link whose caller waited for the end of the stage's latest read of "
        "weights (`weights_reader`)",
        gradients_reader="the read of the stage's gradients on a separate stream since the weights "
        "last changed: 0 none, 1 running, 2 done",
        gradients_awaited_by="the link whose caller waited for the end of the stage's latest read "
        "of gradients (`gradients_reader`)",
        finalized_by="the link that the stage's latest `finalize` named",
    ),
    **_words(
        "domain",
        updates="number of F and dI of the domain that succeeded since the last restore; each "
        "counts as often as it updated scales, or once if scales change once an epoch",
        updates_of_walk="number of scaling updates in this walk over the microbatches",
        rolls="how often the domain's scales were rolled (changed to new values): by each F, or "
        "by each `move_scales` if scales change once an epoch",
        gathers="if the domain's scales change once an epoch: how many F and dI gathered maxima "
        "(amax) since the scales last changed",
        moves="how often `move_scales` changed the domain's scales since the last restore",
        drew_last="position of the random generator that the domain's latest F reported since the "
        "last restore; -1 if none did",
        repeats="how many F since the last restore began to draw at one arbitrary (fixed but "
        "unknown) position of the random generator",
        running="how many F, dI, refreshes and evaluations are in flight",
        broken="1 if an F, dI, refresh or evaluation has failed since the last restore",
        touched="1 if an F, dI or refresh has begun since the weights last changed",
        device="1 while device work may be unfinished",
        updating="1 while the optimizer's update may overlap new work of the graph stream",
    ),
    **_words(
        "buffer",
        content="the epoch whose gradients the buffer holds; -1 if the buffer holds none",
        writers="how many dW are writing the buffer",
    ),
    **_words(
        "bucket",
        reduction="the bucket's reduction of this epoch: 0 none, 1 running, 2 done",
        awaited_by="the link whose caller waited for the bucket's latest reduction",
    ),
    **_words(
        "pool",
        tapes="how many slots keep memory in the pool",
        last_rank="the position, in the pool's order of capture, of the graph that the pool "
        "replayed last; 0 before the first replay",
    ),
    **_words(
        "link",
        behind="1 while the graph stream has not yet waited for all work of the link's caller",
        behind_update="1 while new work of the link's caller may run beside the optimizer's "
        "latest update",
        heard="how many transfers and copies the graph stream has waited for, of those that were "
        "reported on the link",
    ),
    **_words(
        "one",
        weights="the number of optimizer updates of the weights",
        updated_on="the stream on which the latest optimizer update runs",
        commits="number of optimizer updates that were committed since the last restore",
        walks="number of finished walks (passes over the microbatches) since the weights last "
        "changed",
        optimizing="how many optimizer updates are in flight",
        left_out="how many cells the current walk over the microbatches leaves out",
        half_updated="1 if an update has failed half way since the last restore, or if a late "
        "fault belongs to an epoch whose update had begun",
        begun="how many reductions were started since the weights last changed",
        ref_slot="the slot of an arbitrary reference",
        ref_generation="the generation of the arbitrary reference",
        ref_incarnation="the incarnation of the arbitrary reference",
        issued="1 once the arbitrary reference has been issued",
        ref_cell="the cell of the key that the reference was issued for",
        ref_epoch="the epoch of the key that the reference was issued for",
        dead="1 once the work that the arbitrary reference named is gone",
        ticket="an arbitrary ticket",
        outstanding="the action that the ticket reserves: 0 none, 1 F, 2 dI, 3 dW, 4 refresh, "
        "5 update, 6 evaluation",
        ticket_slot="the slot that the ticket reserves",
        ticket_stage="the stage that the ticket reserves",
        slot="an arbitrary slot",
        link="an arbitrary link",
        stage="an arbitrary stage",
        clobbered="1 once a replay has overwritten memory that the arbitrary slot keeps in its "
        "pool",
        seen="1 once the arbitrary link's caller has waited for the replay that wrote the "
        "arbitrary slot's output",
        clear="1 once the arbitrary link's caller has waited for every replay of the arbitrary "
        "slot's previous tape",
        grouped="the grouped dW (one product for several tapes) that took the arbitrary slot's "
        "tape: 0 none, 1 running, 2 done",
        trailing="1 while the graph stream has not yet waited for the arbitrary slot's transfer "
        "or copy that was reported on the arbitrary link",
        seen_gradients="1 once the arbitrary link's caller has waited for the replay of the "
        "arbitrary stage's latest dW",
        seen_evaluation="1 once the arbitrary link's caller has waited for the arbitrary stage's "
        "latest evaluation",
    ),
}

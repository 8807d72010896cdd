"""
The terms that the promises use for the world outside the contract, with their meanings.

A promise is a claim about what really happened: which work ran, what a buffer or a cache holds,
which stream waited for which. The world follows the actions and their arguments, never the
contract's own state or a guard, so a promise does not merely repeat a guard.
``qeffect.verification.induction.history`` defines how an accepted transition changes the world.

Some terms describe one arbitrary, fixed reference, ticket, slot, link or stage. A proof about an
arbitrary reference holds for all references.
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
        name: Name of the term, as in ``h.NAME[index]``.
        index: Sort (type) of the index; ``one`` for a single value.
        meaning: Meaning of the value.
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
        owing="the consumers that have not finished with the slot's latest work, as a mask",
        acting="how many actions are in flight on the slot",
        queued="the deferred work that dI of the slot's latest tape left",
        fill_read="the number of the fill (as in `fills`) of the weight cache that F of the slot's "
        "latest tape read",
        scaled_by="which scales F of the slot's latest tape used: the domain's `updates` just "
        "before that F; if scales move once an epoch, the `updates` at their last movement (0 for "
        "none)",
        rolls_seen="the value of the domain's `rolls` just after F of the slot's latest tape",
        drew_at="the position, if reported, at which F of the slot's latest tape began to draw "
        "random numbers",
        in_pool="1 while the slot keeps memory in its capture pool",
        moving="the transfers under way through the slot, as a mask",
        last_end_on="the link on which the slot's latest transfer ended, or its copy was enqueued",
        last_end="the number of the slot's latest end or copy among those reported on its link "
        "(`last_end_on`); 0 for none",
        arrived="the messages and the copy that the slot's work has received, as a mask",
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
        weighed="the sum, in parts, of the gradient weights that the stage's dI reported since the "
        "weights last changed",
        counted_in="the number of parts that the stage's latest dI reported with its weight since "
        "the weights last changed; 0 for none",
        cached="the version of the weights in the stage's quantized cache; -1 for none",
        fills="how often the stage's quantized cache was filled",
        fill_of_epoch="the number of the fill (as in `fills`) of the cache that the epoch's first "
        "F read; -1 before that F",
        lost="1 when the cache was lost since its latest fill began",
        lost_in_use="the last epoch whose cache was lost between first F and last dI; -1 for none",
        filled_after="the domain's `updates` just before the latest refresh",
        spoiled="the last epoch whose gradients a failure spoiled; -1 for none",
        half_written="the last epoch that a failed dW left half written; -1 for none",
        evaluating="how many evaluations of the stage are in flight",
        finals="how often the stage was finalized in this walk over the microbatches",
        weights_reader="the read of the stage's weights on a separate stream since the weights "
        "last changed: 0 none, 1 running, 2 done",
        reader_awaited_by="the link of the stream that waited for the end of the stage's weights "
        "read (`weights_reader`)",
        gradients_reader="the read of the stage's gradients on a separate stream since the weights "
        "last changed: 0 none, 1 running, 2 done",
        gradients_awaited_by="the link of the stream that waited for the end of the stage's "
        "gradients read (`gradients_reader`)",
        finalized_by="the link that the stage's latest `finalize` named",
    ),
    **_words(
        "domain",
        updates="number of F and dI of the domain that succeeded since the last restore; each "
        "counts as often as it updated scales, or once if scales move once an epoch",
        updates_of_walk="number of scaling updates in this walk over the microbatches",
        rolls="how often the domain's scales were ever rolled: by each F, or by each movement if "
        "scales move once an epoch",
        gathers="if the domain's scales move once an epoch: how many F and dI gathered maxima "
        "since the scales last moved",
        moves="how often the domain's scales moved since the last restore",
        drew_last="position at which the latest F that reports draws began to draw since the last "
        "restore; -1 for none",
        repeats="how many F since the last restore began to draw at one arbitrary position",
        running="how many F, dI, refreshes and evaluations are in flight",
        broken="1 when an F, dI, refresh or evaluation raised since the last restore",
        touched="1 when scaling state was changed since the weights last changed",
        device="1 while device work may be unfinished",
        updating="1 while the optimizer's update may overlap new work of the graph stream",
    ),
    **_words(
        "buffer",
        content="the epoch whose gradients the buffer holds; -1 for none",
        writers="how many dW are writing the buffer",
    ),
    **_words(
        "bucket",
        reduction="the bucket's reduction of this epoch: 0 none, 1 running, 2 done",
        awaited_by="the link of the stream that waited for the bucket's latest reduction",
    ),
    **_words(
        "pool",
        tapes="how many slots keep memory in the pool",
        last_rank="the position, in the pool's order of capture, of the graph that the pool "
        "replayed last; 0 before the first replay",
    ),
    **_words(
        "link",
        behind="1 while the graph stream has yet to wait for work of the caller",
        behind_update="1 while the caller's stream may run beside the optimizer's latest update",
        heard="how many of the transfers and copies reported on the link the graph stream has "
        "waited for",
    ),
    **_words(
        "one",
        weights="the number of optimizer updates of the weights",
        updated_on="the caller's stream that the latest optimizer update runs on",
        commits="number of optimizer updates that were committed since the last restore",
        walks="number of finished walks (passes over the microbatches) since the weights last "
        "changed",
        optimizing="how many optimizer updates are in flight",
        left_out="how many cells the current walk over the microbatches leaves out",
        half_updated="1 when an update failed half way since the last restore",
        begun="how many reductions were started since the weights last changed",
        ref_slot="the slot of an arbitrary reference",
        ref_generation="the generation of the arbitrary reference",
        ref_incarnation="the incarnation of the arbitrary reference",
        issued="1 when the arbitrary reference was issued",
        ref_cell="the cell of the key that the reference was issued for",
        ref_epoch="the epoch of the key that the reference was issued for",
        dead="1 when the work that the reference named is gone",
        ticket="an arbitrary ticket",
        outstanding="the action that the ticket reserves: 0 none, 1 F, 2 dI, 3 dW, 4 refresh, "
        "5 update, 6 evaluation",
        ticket_slot="the slot that the ticket reserves",
        ticket_stage="the stage that the ticket reserves",
        slot="an arbitrary slot",
        link="an arbitrary link",
        stage="an arbitrary stage",
        clobbered="1 when a replay overwrote memory that the arbitrary slot keeps in its pool",
        seen="1 when the arbitrary link's caller waited for the replay that wrote the arbitrary "
        "slot's output",
        clear="1 when the arbitrary link's caller waited for every replay of the arbitrary slot's "
        "previous tape",
        grouped="the dW that took the arbitrary slot's tape into its group: 0 none, 1 running, 2 "
        "done",
        trailing="1 while the graph stream has yet to wait for the arbitrary slot's transfer or "
        "copy on the arbitrary link",
        seen_gradients="1 when the arbitrary link's caller waited for the replay of the arbitrary "
        "stage's latest dW",
        seen_evaluation="1 when the arbitrary link's caller waited for the arbitrary stage's "
        "latest evaluation",
    ),
}

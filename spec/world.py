"""
The words that the promises use for the world outside the contract, with their meanings.

A promise is a claim about what really happened: which work ran, what a buffer or a cache holds,
which stream waited for which. The world follows the actions and their arguments, never the
contract's own state or a guard, so that a promise does not merely repeat a guard. How an accepted
transition changes the world is defined in ``qeffect.verification.induction.history``.

Some words follow one arbitrary, fixed thing: a reference, a ticket, a slot, a link and a stage.
What is proved of an arbitrary one holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

__all__ = [
    "DGRAD",
    "DONE",
    "FORWARD",
    "NONE",
    "REFRESH",
    "RUNNING",
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
#: Stations of a reduction, after ``NONE``.
RUNNING: Final = 1
DONE: Final = 2


@frozen
class Word:
    """
    One word for the world, as promises use it.

    Args:
        name: Name of the word, as in ``h.NAME[index]``.
        index: What it is indexed by; ``one`` for a single value.
        meaning: Meaning of its value.
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
        tenant_epoch="the epoch of that key",
        owing="the consumers that have yet to visit that work, as a mask",
        acting="how many actions are in flight on the slot",
        queued="the deferred work that the tenant's dI left",
        fill_read="the fill of the weight cache that the tenant's F read",
        scaled_by="the scaling updates that the tenant's F had seen",
        rolls_seen="the forwards that had rolled the domain's scales when the tenant's F had",
        last_rank="the capture rank of the slot's graph that was replayed last",
        in_pool="1 while the slot keeps memory in its capture pool",
        moving="the transfers under way through the slot, as a mask",
        last_end_on="the link on which the slot's latest transfer ended,",
        last_end="and as which of the ends that were told on it; 0 for none",
        arrived="the messages that the slot's work has received, as a mask",
    ),
    **_words(
        "cell",
        ran_forward="how often the cell's F succeeded since the weights last changed",
        ran_dgrad="the same of its dI",
        ran_wgrad="the same of its dW",
        covered="the matrices that its latest dW wrote",
        binds="how often its destination was bound since the weights last changed",
        bound_to="the destination that was bound last",
    ),
    **_words(
        "stage",
        num_forwards="how many F of the stage succeeded since the weights last changed",
        num_dgrads="the same of dI",
        num_wgrads="the same of dW",
        cached="the version of the weights in the stage's quantized cache; -1 for none",
        fills="how often that cache was filled",
        fill_of_epoch="the fill that the epoch's first F read; -1 before it",
        lost="1 when the cache was lost since its latest fill began",
        lost_in_use="the last epoch in which it was lost while an F or dI needed it; -1 for none",
        filled_after="the scaling updates that the latest refresh had seen",
        spoiled="the last epoch whose gradients a failure spoiled; -1 for none",
        half_written="the last epoch that a failed dW left half written; -1 for none",
        finals="how often it was finalized since the weights last changed",
        finalized_by="the link of the stream that finalized it last",
    ),
    **_words(
        "domain",
        updates="scaling updates (F and dI that succeeded) since the last restore",
        updates_of_epoch="scaling updates since the weights last changed",
        rolls="the forwards that ever rolled the domain's scales",
        running="F, dI and refreshes in flight",
        broken="1 when an F, dI or refresh raised since the last restore",
        touched="1 when scaling state was touched since the weights last changed",
        device="1 while device work may be unfinished",
        updating="1 while the optimizer's update may run beside what the graph stream is given",
    ),
    **_words(
        "buffer",
        content="the epoch whose gradients the buffer holds; -1 for none",
        writers="how many dW are writing it",
    ),
    **_words(
        "bucket",
        reduction="its reduction of this epoch: 0 none, 1 running, 2 done",
        awaited_by="the link of the stream that waited for its latest reduction",
    ),
    **_words(
        "pool",
        tapes="how many slots keep memory in the pool",
        last_replayed="the slot whose graph the pool replayed last",
    ),
    **_words(
        "link",
        behind="1 while the graph stream has yet to wait for work of the caller",
        heard="how many of the ends of transfers told there the graph stream has waited for",
    ),
    **_words(
        "one",
        weights="the optimizer updates of the weights",
        begun="how many reductions were started since the weights last changed",
        ref_slot="an arbitrary reference: its slot,",
        ref_generation="its generation,",
        ref_incarnation="and its incarnation",
        issued="1 when that reference was handed out",
        ref_cell="the cell of the key that it was handed out for,",
        ref_epoch="and that key's epoch",
        dead="1 when the work that it named is gone",
        ticket="an arbitrary ticket",
        outstanding="what it is good for now: 0 nothing, 1 an F, 2 a dI, 3 a dW, 4 a refresh",
        ticket_slot="the slot that it is good for,",
        ticket_stage="or the stage",
        slot="an arbitrary slot",
        link="an arbitrary link",
        stage="an arbitrary stage",
        clobbered="1 when an earlier graph overwrote what the arbitrary slot keeps in its pool",
        seen="1 when the arbitrary link waited for the replay that wrote that slot's output",
        clear="1 when the arbitrary link waited for every replay of that slot's former work",
        trailing="1 when a transfer of that slot ended on that link, unseen by the graph stream",
        seen_gradients="1 when it waited for the replay that wrote the arbitrary stage's gradients",
    ),
}

"""
The columns of the physical history (ghosts), by name.

Some ghosts follow a single reference, ticket, slot, link or stage that is chosen arbitrarily at the
beginning. A property that is proved for an arbitrary choice holds for all choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from qeffect.spec.constants import NEVER

__all__ = ["GHOSTS", "Ghost", "History", "State"]

#: The memory, and the history beside it: each maps names to columns.
State = Any
History = Any


class Ghost(NamedTuple):
    """A column of the history: the sorts of its indices and values, and its initial value."""

    indices: tuple[str, ...]
    values: str = "int"
    initial: int | None = 0


def _each(index: str, *names: str, **options: Any) -> dict[str, Ghost]:
    return {name: Ghost(tuple(index.split()), **options) for name in names}


#: The history's columns. An initial value of None is arbitrary.
GHOSTS: Final[Mapping[str, Ghost]] = {
    # The work that was last put into a slot, its key, the consumers that still have to visit it,
    # transfers under way through it, the messages that the work has received, actions in flight on
    # it, the products that its dI deferred, whether its F fills the cache, and the cache fill that
    # its F read.
    **_each("slot", "tenant", values="cell", initial=None),
    **_each("slot", "tenant_epoch", initial=NEVER),
    **_each("slot", "owing", "moving", "arrived", values="mask"),
    **_each("slot", "acting"),
    **_each("slot", "queued", values="opaque", initial=None),
    **_each("slot", "filling", values="flag"),
    **_each("slot", "fill_read"),
    # The scaling updates that its F had seen, and the forwards that had rolled scales with it.
    **_each("slot", "scaled_by", "rolls_seen"),
    # Where its F began to draw random numbers.
    **_each("slot", "drew_at", initial=NEVER),
    # How often each action of a cell succeeded in this walk, where it was bound, and what its dW
    # covered.
    **_each("cell", "ran_forward", "ran_dgrad", "ran_wgrad", "binds", "skipped"),
    **_each("cell", "bound_to", "covered", values="opaque", initial=None),
    # Whether a read of the cell's output, and of its input gradient, began since then.
    **_each("cell", "output_read", "gradient_read", values="flag"),
    # The same counts per stage. Below, `placed` lists a stage's cells: first those whose dW ran,
    # then those whose dI ran, then those whose F ran, then the rest.
    **_each("stage", "num_forwards", "num_dgrads", "num_wgrads", "num_skipped"),
    **_each("one", "left_out"),
    # The sum of the weights that dI reported since the last update, and the number of parts that
    # the latest dI reported with its weight.
    **_each("stage", "weighed", "counted_in"),
    # The F of the epoch, over all its walks; and the walks of the epoch that are over.
    **_each("stage", "forwards_of_epoch"),
    **_each("one", "walks"),
    **_each("cell", "place", initial=None),
    **_each("stage place", "placed", values="cell", initial=None),
    # The optimizer updates of the weights, the version of the weights in each cache, how often
    # the cache was filled, the fill that the epoch's first F read, whether the fill in progress
    # was lost, and the scaling updates that the fill had seen.
    **_each("one", "weights"),
    # Number of updates since the last restore that were completed.
    **_each("one", "commits"),
    # Evaluations in flight of each stage.
    **_each("stage", "evaluating"),
    # Number of updates in flight; whether an update failed half way since the last restore.
    **_each("one", "optimizing"),
    **_each("one", "half_updated", values="flag"),
    **_each("stage", "cached", "fill_of_epoch", initial=NEVER),
    **_each("stage", "fills", "filled_after"),
    **_each("stage", "lost", values="flag"),
    # The last epoch in which the cache was lost between the first F and the last dI.
    **_each("stage", "lost_in_use", initial=NEVER),
    # The last epoch whose gradients a failure spoiled, or left half written.
    **_each("stage", "spoiled", "half_written", initial=NEVER),
    # How often a stage was finalized in this walk, and on which link;
    # a bucket's reduction of the epoch, the link on which it was awaited, and how many started.
    **_each("stage", "finals"),
    **_each("stage", "finalized_by", values="link", initial=None),
    **_each("bucket", "reduction"),
    **_each("bucket", "awaited_by", values="link", initial=None),
    **_each("one", "begun"),
    # Scaling updates since the last restore, and of this walk; F, dI, refreshes and evaluations in
    # flight; whether scaling state is broken, whether it was touched since the last commit, and the
    # stage whose F or refresh touched it; the stage whose evaluation began last; whether device
    # work may be unfinished, and the slot or stage on which such work began last.
    **_each("domain", "updates", "updates_of_walk", "running"),
    # How often the domain's scales were ever rolled, and the scaling updates before the last roll;
    # how often they moved since the last restore, and the F and dI that gathered amaxes since then.
    **_each("domain", "rolls", "rolled_after", "moves", "gathers"),
    # The position at which the latest reporting F began to draw random numbers; how many F began at
    # the arbitrary position `number`.
    **_each("domain", "drew_last", initial=NEVER),
    **_each("domain", "repeats"),
    **_each("one", "number", initial=None),
    # Number of work items enqueued on a domain's graph stream since the last restore.
    **_each("domain", "enqueued"),
    **_each("domain", "broken", "touched", "device", values="flag"),
    **_each("domain", "toucher", "refresher", "evaluator", values="stage", initial=None),
    **_each("domain", "updater", "beginner", values="slot", initial=None),
    # The epoch whose gradients a buffer holds, the number of writers, and the writing slot.
    **_each("buffer", "content", initial=NEVER),
    **_each("buffer", "writers"),
    **_each("buffer", "writer", values="slot", initial=None),
    # How many slots keep memory in a pool; the pool's slots in an order that begins with these; the
    # capture rank of a slot's latest replay, and of a pool's; the slot whose graph a pool replayed
    # last, and the stage whose refresh.
    **_each("pool", "tapes"),
    **_each("pool", "slots", initial=None),
    **_each("slot", "in_pool", values="flag"),
    **_each("slot", "seat", initial=None),
    **_each("pool place", "seated", values="slot", initial=None),
    **_each("slot", "own_rank"),
    **_each("pool", "last_rank"),
    **_each("pool", "last_replayed", values="slot", initial=None),
    **_each("pool", "last_refreshed", values="stage", initial=None),
    # The caller's stream on which the latest optimizer update was enqueued; whether the update may
    # run concurrently with new work on a domain's graph stream.
    **_each("one", "updated_on", values="caller", initial=None),
    **_each("domain", "updating", values="flag"),
    # Whether a caller's stream may run concurrently with that update.
    **_each("link", "behind_update", values="flag"),
    # The read of a stage's weights on a separate stream since the weights last changed, and the
    # link on which its end was awaited.
    **_each("stage", "weights_reader"),
    **_each("stage", "reader_awaited_by", values="link", initial=None),
    # The same of its gradients.
    **_each("stage", "gradients_reader"),
    **_each("stage", "gradients_awaited_by", values="link", initial=None),
    # Whether the graph stream has yet to wait for work of a caller.
    **_each("link", "behind", values="flag"),
    # Number of transfer ends reported on a link, and how many of these the graph stream has waited
    # for; the link and the number of a slot's latest transfer end.
    **_each("link", "told", "heard"),
    **_each("slot", "last_end_on", values="link", initial=None),
    **_each("slot", "last_end"),
    # The arbitrary slot, link and stage.
    **_each("one", "slot", values="slot", initial=None),
    **_each("one", "link", values="link", initial=None),
    **_each("one", "stage", values="stage", initial=None),
    # An earlier graph overwrote the slot's retained memory; the link waited for the replay that
    # wrote the slot's output, and for the replay that wrote the stage's gradients.
    **_each("one", "clobbered", "seen", values="flag"),
    # The link waited for every replay on the slot; for every replay of the slot's former work; a
    # transfer of the slot ended on the link, and the graph stream has not waited for it.
    **_each("one", "saw", "clear", values="flag", initial=1),
    # The ticket of the dW that took a slot's tape into its group; the slot of the dW that took the
    # arbitrary slot's tape, and how far that dW is.
    **_each("slot", "group"),
    **_each("one", "leader", values="slot", initial=None),
    **_each("one", "grouped"),
    **_each("one", "trailing", values="flag"),
    **_each("one", "seen_gradients", values="flag", initial=1),
    # The link's caller waited for the stage's latest evaluation, on any of its links.
    **_each("one", "seen_evaluation", values="flag", initial=1),
    # An arbitrary reference: whether it was issued, for which key, and whether its work is gone.
    **_each("one", "ref_slot", values="slot", initial=None),
    **_each("one", "ref_generation", values="generation", initial=None),
    **_each("one", "ref_incarnation", initial=None),
    **_each("one", "issued", "dead", values="flag"),
    **_each("one", "ref_cell", values="cell", initial=None),
    **_each("one", "ref_epoch", initial=NEVER),
    # An arbitrary ticket: what it currently permits, and for which slot and stage.
    **_each("one", "ticket", values="ticket", initial=None),
    **_each("one", "outstanding"),
    **_each("one", "ticket_slot", values="slot", initial=None),
    **_each("one", "ticket_stage", values="stage", initial=None),
}

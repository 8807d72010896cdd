"""
Invariants of the gradients: the counts of an epoch and the gradient buffers.

The counts tell for which cells dW has run. A final stage has the dW of every cell. A stage that a
failure spoiled is marked and never final. A buffer holds the gradients of the epoch in which it was
opened, and at most one dW writes it at a time. A cell is bound to its buffer before its dI runs.
"""

from __future__ import annotations

from qeffect.spec.constants import DGRAD_BIT, GROUP_BIT, NO_SLOT, RESERVED
from qeffect.spec.predicates import Register, implies
from qeffect.spec.world import DONE, RUNNING

from .words import (
    History,
    Index,
    State,
    Truth,
    in_flight,
    now,
    retained,
    updating,
    wgrad_in_flight,
)

__all__ = ["HISTORY"]

#: Proved: lemmas about an epoch's gradients and their buffers.
HISTORY = Register()


# Epoch: whole, and never when spoiled


@HISTORY("epoch.counts", g="stage")
def wgrads(st: State, h: History, g: Index) -> Truth:
    """
    The count of dW includes the dW that ran and the cells that the walk leaves out. No more dW ran
    than dI, no more dI than F, and no more F than there are cells that are not left out.
    """
    forwards, dgrads, wgrads = h.num_forwards[g], h.num_dgrads[g], h.num_wgrads[g]
    skipped = h.num_skipped[g]
    first = (st.wgrads[g] == wgrads + skipped) & (0 <= wgrads) & (0 <= skipped)
    return first & (wgrads <= dgrads) & (dgrads <= forwards) & (forwards + skipped <= st.cells[g])


@HISTORY("epoch.every-cell-placed", c="cell")
def every_cell_placed(st: State, h: History, c: Index) -> Truth:
    """
    Every cell has its own position in its stage's order. The cells that are left out come first.
    Then a cell's position is below the count of an action exactly if that action ran for the cell.
    """
    g, place = st.stage_of[c], h.place[c]
    out, first = h.skipped[c] == 1, h.num_skipped[g]
    ran = (
        ((place < first) == out)
        & ((place < first + h.num_forwards[g]) == (out | (h.ran_forward[c] == 1)))
        & ((place < first + h.num_dgrads[g]) == (out | (h.ran_dgrad[c] == 1)))
        & ((place < first + h.num_wgrads[g]) == (out | (h.ran_wgrad[c] == 1)))
    )
    return (0 <= place) & (place < st.cells[g]) & (h.placed[g, place] == c) & ran


@HISTORY("epoch.every-place-taken", g="stage", i="place")
def every_place_taken(st: State, h: History, g: Index, i: Index) -> Truth:
    """Each position in a stage's order belongs to one of the stage's cells."""
    cell = h.placed[g, i]
    return implies((0 <= i) & (i < st.cells[g]), (st.stage_of[cell] == g) & (h.place[cell] == i))


@HISTORY("epoch.keeper-runs", c="cell")
def keeper_runs(st: State, h: History, c: Index) -> Truth:
    """The first cell that writes a buffer is never left out."""
    return h.skipped[st.keeper_of[st.buffer_of[c]]] == 0


@HISTORY("epoch.one-cell-runs", g="stage")
def one_cell_runs(st: State, h: History, g: Index) -> Truth:
    """No walk leaves out every cell of a stage."""
    return h.num_skipped[g] < st.cells[g]


@HISTORY("order.declared-is-whole", g="stage")
def declared_is_whole(st: State, h: History, g: Index) -> Truth:
    """No cell is left out of a declared order."""
    return implies(st.declared[st.domain_of[g]] != 0, h.num_skipped[g] == 0)


@HISTORY("epoch.spoiled-is-marked", g="stage")
def spoiled_is_marked(st: State, h: History, g: Index) -> Truth:
    """An epoch that a failure spoiled is marked as spoiled."""
    marked = implies(h.spoiled[g] == now(st, g), st.spoiled[g] == now(st, g))
    return marked & (h.spoiled[g] <= now(st, g)) & (h.half_written[g] <= h.spoiled[g])


@HISTORY("epoch.half-written", g="stage")
def half_written(st: State, h: History, g: Index) -> Truth:
    """An epoch with half-written gradients is marked as spoiled."""
    return implies(h.half_written[g] == now(st, g), st.spoiled[g] == now(st, g))


@HISTORY("epoch.final-is-whole", g="stage")
def final_is_whole(st: State, h: History, g: Index) -> Truth:
    """A final stage has every gradient, every counted dI ran, and nothing spoiled the gradients."""
    whole = (st.wgrads[g] == st.cells[g]) & (st.spoiled[g] != now(st, g))
    counted = (st.forwards[g] == 0) | (st.dgrads[g] == st.cells[g])
    return implies(st.final[g] == now(st, g), whole & counted)


@HISTORY("epoch.final-or-spoiled", g="stage")
def final_or_spoiled(st: State, h: History, g: Index) -> Truth:
    """A stage that was finalized is final, or a failure spoiled it afterwards."""
    return (h.finals[g] == 0) | (st.final[g] == now(st, g)) | (st.spoiled[g] == now(st, g))


@HISTORY("epoch.parts-counted", g="stage")
def parts_counted(st: State, h: History, g: Index) -> Truth:
    """The contract adds up the weights of an epoch's gradients, and counts the remaining parts."""
    left = st.unweighed[g] == h.counted_in[g] - h.weighed[g]
    silent = (st.reports_weights[g] != 0) | (h.counted_in[g] == 0)
    return left & silent & (st.parts[g] == h.counted_in[g]) & (0 <= st.parts[g])


@HISTORY("epoch.update-of-all-parts", g="stage")
def update_of_all_parts(st: State, h: History, g: Index) -> Truth:
    """While an update is in flight, no part of the gradients' weights is missing."""
    return implies(updating(st), st.unweighed[g] == 0)


# The update: every action of the epoch ran before its check, so none is left to run


@HISTORY("epoch.one-update")
def one_update(st: State, h: History) -> Truth:
    """At most one update is in flight, and the contract records whether one failed halfway."""
    idle = (st.optimizing[0] == 0) & (h.optimizing[0] == 0)
    flying = (st.optimizing[0] != 0) & (h.optimizing[0] == 1)
    return (idle | flying) & (st.half_updated[0] == h.half_updated[0])


@HISTORY("epoch.one-evaluation", g="stage")
def one_evaluation(st: State, h: History, g: Index) -> Truth:
    """At most one evaluation of a stage is in flight, and the contract records it."""
    idle = (st.evaluating[g] == 0) & (h.evaluating[g] == 0)
    flying = (st.evaluating[g] != 0) & (h.evaluating[g] == 1)
    return idle | flying


@HISTORY("epoch.update-without-evaluation", g="stage")
def update_without_evaluation(st: State, h: History, g: Index) -> Truth:
    """No evaluation is in flight while an update is."""
    return implies(updating(st), st.evaluating[g] == 0)


@HISTORY("epoch.update-of-whole-stages", g="stage")
def update_of_whole_stages(st: State, h: History, g: Index) -> Truth:
    """While an update is in flight, every dW has run."""
    return implies(updating(st), st.wgrads[g] == st.cells[g])


@HISTORY("epoch.update-without-tapes", s="slot")
def update_without_tapes(st: State, h: History, s: Index) -> Truth:
    """No tape is live while an update is in flight."""
    return implies(updating(st), st.consumers[s] == 0)


@HISTORY("version.update-without-refresh", needs="order", g="stage")
def update_without_refresh(st: State, h: History, g: Index) -> Truth:
    """No refresh is in flight while an update is."""
    return implies(updating(st), st.refreshing[g] == 0)


@HISTORY("completion.update-without-readers", g="stage")
def update_without_readers(st: State, h: History, g: Index) -> Truth:
    """No separate stream reads weights while an update is in flight."""
    return implies(updating(st), st.weights_read[g] == 0)


@HISTORY("arena.final-shared-whole", g="stage")
def final_shared_whole(st: State, h: History, g: Index) -> Truth:
    """If a stage is final, the stage that shares a destination with it has every gradient too."""
    t = st.sharer_of[g]
    return implies(st.final[g] == now(st, g), st.wgrads[t] == st.cells[t])


@HISTORY("completion.update-without-gradients-readers", g="stage")
def update_without_gradients_readers(st: State, h: History, g: Index) -> Truth:
    """No separate stream reads gradients while an update is in flight."""
    return implies(updating(st), st.gradients_read[g] == 0)


@HISTORY("reduction.update-of-reduced", b="bucket")
def update_of_reduced(st: State, h: History, b: Index) -> Truth:
    """While an update is in flight, every bucket is reduced."""
    return implies(updating(st), st.reduced[b] == now(st, st.stage_at[b]))


# Arena


@HISTORY("arena.written-is-held", c="cell")
def written_is_held(st: State, h: History, c: Index) -> Truth:
    """If a cell's dW ran, its buffers hold gradients of the current epoch."""
    own, shared = h.content[st.buffer_of[c]], h.content[st.shared_of[st.buffer_of[c]]]
    return implies(h.ran_wgrad[c] != 0, (own == h.weights[0]) & (shared == h.weights[0]))


@HISTORY("arena.shared-is-held", c="cell")
def shared_is_held(st: State, h: History, c: Index) -> Truth:
    """If a stage's own buffer holds gradients of the current epoch, so does the shared buffer."""
    own, shared = h.content[st.buffer_of[c]], h.content[st.shared_of[st.buffer_of[c]]]
    return implies(own == h.weights[0], shared == h.weights[0])


@HISTORY("arena.content", b="buffer")
def content(st: State, h: History, b: Index) -> Truth:
    """A buffer holds the gradients of the epoch in which it was opened."""
    return st.opened[b] == h.content[b]


@HISTORY("arena.one-writer", b="buffer")
def one_writer(st: State, h: History, b: Index) -> Truth:
    """At most one dW writes a buffer at a time, and the buffer records the ticket of that dW."""
    s = h.writer[b]
    idle = (st.writing[b] == 0) & (h.writers[b] == 0)
    dw = (s != NO_SLOT) & wgrad_in_flight(st, s) & (st.writing[b] == st.held[s])
    busy = (st.writing[b] != 0) & (h.writers[b] == 1)
    cell = st.cell_at[s]
    return idle | (
        busy & dw & ((st.buffer_of[cell] == b) | (st.shared_of[st.buffer_of[cell]] == b))
    )


@HISTORY("arena.group-writes", s="slot")
def group_writes(st: State, h: History, s: Index) -> Truth:
    """
    While a dW that took a tape into its group runs, the dW writes the tape's buffer, and its own
    slot belongs to the tape's stage.
    """
    grouped = (st.moving[s] & GROUP_BIT) != 0
    b, ticket = st.buffer_of[st.cell_at[s]], h.group[s]
    w = h.writer[b]
    ours = (w != NO_SLOT) & (st.held[w] == ticket) & (st.slot_stage[w] == st.slot_stage[s])
    issued = (ticket != 0) & (ticket <= st.serial[0])
    return implies(grouped, issued & implies(st.writing[b] == ticket, ours))


@HISTORY("arena.group-written", s="slot")
def group_written(st: State, h: History, s: Index) -> Truth:
    """
    After the dW that took a tape into its group, the tape's buffers hold gradients of this epoch,
    or the epoch of the tape's stage is spoiled.
    """
    b, g = st.buffer_of[st.cell_at[s]], st.slot_stage[s]
    grouped = (st.moving[s] & GROUP_BIT) != 0
    ended = grouped & retained(st, s) & (st.writing[b] != h.group[s])
    own, shared = h.content[b], h.content[st.shared_of[b]]
    whole = (own == h.weights[0]) & (shared == h.weights[0])
    return implies(ended & (st.spoiled[g] != now(st, g)), whole)


@HISTORY("ownership.group-led")
def group_led(st: State, h: History) -> Truth:
    """
    While a dW that took a tape into its group runs, the dW holds another slot of the tape's stage,
    in which dI has run, and the tape's slot is kept for the dW.
    """
    leader, s = h.leader[0], h.slot[0]
    here = (leader != NO_SLOT) & (st.slot_stage[leader] == st.slot_stage[s])
    held = (st.held[leader] == h.group[s]) & (st.held[leader] != 0)
    held &= (st.consumers[leader] & (RESERVED | DGRAD_BIT)) == 0
    kept = (leader != s) & ((st.moving[s] & GROUP_BIT) != 0)
    return implies(h.grouped[0] == RUNNING, here & held & kept)


@HISTORY("arena.group-progress")
def group_progress(st: State, h: History) -> Truth:
    """
    A tape stays in its group until the group's dW ends; if that dW failed, the stage's epoch is
    spoiled.
    """
    s = h.slot[0]
    b, g = st.buffer_of[st.cell_at[s]], st.slot_stage[s]
    runs = st.writing[b] == h.group[s]
    done = (h.grouped[0] == DONE) | (st.spoiled[g] == now(st, g))
    grouped = (st.moving[s] & GROUP_BIT) != 0
    running = h.grouped[0] == RUNNING
    return (running == (grouped & runs)) & implies(grouped & ~runs & retained(st, s), done)


@HISTORY("arena.bound-once", c="cell")
def bound_once(st: State, h: History, c: Index) -> Truth:
    """A cell is bound at most once per walk, to its configured destination."""
    bound = st.bound[c] == now(st, st.stage_of[c])
    there = (h.binds[c] == 1) & (h.bound_to[c] == st.destination_of[c])
    return (bound & there) | ((st.bound[c] != now(st, st.stage_of[c])) & (h.binds[c] == 0))


@HISTORY("arena.bound-before-dgrad", c="cell")
def bound_before_dgrad(st: State, h: History, c: Index) -> Truth:
    """A cell whose dI ran was bound."""
    return implies(h.ran_dgrad[c] != 0, h.binds[c] == 1)


@HISTORY("arena.bound-during-dgrad", s="slot")
def bound_during_dgrad(st: State, h: History, s: Index) -> Truth:
    """A cell whose dI is in flight was bound."""
    running = in_flight(st, s) & retained(st, s)
    return implies(running, h.binds[st.cell_at[s]] == 1)

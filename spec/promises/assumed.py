"""
Assumptions about a configuration and about the caller's arguments. Assumptions are not proved.

A configuration is checked when a contract is built from it. The caller is trusted to count epochs
from zero and to draw a fresh incarnation for each restore. If the version part is left out, the
caller is also trusted to present only keys of the current weights.
"""

from __future__ import annotations

from ..constants import (
    BACK_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    INPUT_BITS,
    NO_STAGE,
    OUT_BIT,
    RESERVED,
    SOURCE_BIT,
    TARGET_BIT,
    WGRAD_BIT,
)
from ..predicates import Register, implies
from .words import Args, History, Index, State, Truth, domain_of_slot

__all__ = ["ASSUMED", "CONFIGURATION"]

#: Assumed about a configuration, which is checked when a contract is built from it.
CONFIGURATION = Register()
#: Assumed about the caller's arguments; some are assumed only if the part that would check them is
#: left out.
ASSUMED = Register()


# The configuration


@CONFIGURATION("ownership.slots-have-stages", s="slot")
def slots_have_stages(st: State, s: Index) -> Truth:
    """Every slot belongs to a stage."""
    return st.slot_stage[s] != NO_STAGE


@CONFIGURATION("ownership.cells-have-stages", c="cell")
def cells_have_stages(st: State, c: Index) -> Truth:
    """Every cell (a key without its epoch) belongs to a stage."""
    return st.stage_of[c] != NO_STAGE


@CONFIGURATION("ownership.tapes-owe-both", g="stage")
def tapes_owe_both(st: State, g: Index) -> Truth:
    """A fresh tape waits for its dI, its dW and any configured readers."""
    return ((st.owes[g] & (DGRAD_BIT | WGRAD_BIT)) == (DGRAD_BIT | WGRAD_BIT)) & (
        (st.owes[g] & RESERVED) == 0
    )


@CONFIGURATION("ownership.input-one-way", g="stage")
def input_one_way(st: State, g: Index) -> Truth:
    """No stage is configured both to receive its input and to copy it."""
    return (st.receives[g] & INPUT_BITS) != INPUT_BITS


@CONFIGURATION("ownership.cells-counted", g="stage")
def cells_counted(st: State, g: Index) -> Truth:
    """Every stage has at least one cell (a key without its epoch)."""
    return 1 <= st.cells[g]


@CONFIGURATION("ownership.generations-counted")
def generations_counted(st: State) -> Truth:
    """The configured maximum of a slot's generation is at least zero."""
    return 0 <= st.generation_max[0]


@CONFIGURATION("arena.buffers-apart", a="cell", b="cell")
def buffers_apart(st: State, a: Index, b: Index) -> Truth:
    """A stage's own gradient buffer is written by no other stage. A buffer that two stages share
    counts as neither stage's own."""
    here, own = st.stage_of[a] == st.stage_of[b], st.buffer_of[b]
    alone = here & (st.shared_of[own] == own)
    return implies(st.buffer_of[a] == own, here) & implies(
        st.shared_of[st.buffer_of[a]] == own, alone
    )


@CONFIGURATION("arena.two-sharers", a="cell", b="cell")
def two_sharers(st: State, a: Index, b: Index) -> Truth:
    """At most two stages write a shared gradient buffer. If two stages write it, each names the
    other as its sharer."""
    one, other = st.stage_of[a], st.stage_of[b]
    sharers = (one == other) | ((st.sharer_of[one] == other) & (st.sharer_of[other] == one))
    return implies(st.shared_of[st.buffer_of[a]] == st.shared_of[st.buffer_of[b]], sharers)


@CONFIGURATION("arena.one-domain", g="stage")
def sharers_at_home(st: State, g: Index) -> Truth:
    """Stages that share a gradient buffer share a state domain."""
    there = st.domain_of[st.sharer_of[g]] == st.domain_of[g]
    return (st.sharer_of[g] != NO_STAGE) & there


@CONFIGURATION("epoch.keepers-write", c="cell")
def keepers_write(st: State, c: Index) -> Truth:
    """Each gradient buffer has a keeper: one cell (a key without its epoch) that writes the buffer
    and that no walk over the microbatches leaves out. All cells that have this buffer as their own
    belong to the keeper's stage."""
    keeper = st.keeper_of[st.buffer_of[c]]
    return (st.buffer_of[keeper] == st.buffer_of[c]) & (st.stage_of[keeper] == st.stage_of[c])


@CONFIGURATION("order.one-form", d="domain")
def one_form(st: State, d: Index) -> Truth:
    """A domain's scales change either with every F and dI or once an epoch."""
    return (st.epoch_scales[d] == 0) | (st.epoch_scales[d] == 1)


@CONFIGURATION("capture.pools-apart", a="slot", b="slot")
def pools_apart(st: State, a: Index, b: Index) -> Truth:
    """Slots of different state domains never share a capture pool."""
    return implies(st.pool_of[a] == st.pool_of[b], domain_of_slot(st, a) == domain_of_slot(st, b))


@CONFIGURATION("capture.refresh-at-home", g="stage", s="slot")
def refresh_at_home(st: State, g: Index, s: Index) -> Truth:
    """If a slot and the refresh of a stage share a capture pool, the slot and the stage belong to
    the same state domain."""
    here = st.pool_of[s] == st.refresh_pool[g]
    return implies(here, domain_of_slot(st, s) == st.domain_of[g])


@CONFIGURATION("reduction.one-domain", b="bucket")
def one_domain(st: State, b: Index) -> Truth:
    """Stages that share a bucket share a state domain."""
    there = st.domain_of[st.stage_at[b]] == st.domain_of[st.tied_at[b]]
    return (st.stage_at[b] != NO_STAGE) & (st.tied_at[b] != NO_STAGE) & there


# The configuration of the cell that a key names


@ASSUMED("ownership.edges-join-cells", "check_dgrad", "finish_receive")
def edges_join_cells(st: State, h: History, a: Args) -> Truth:
    """Suppose that stage A of the process makes the input of stage B. The configuration then maps
    each key of A to a cell (a key without its epoch) of B."""
    target = st.target_of[a.key.stage]
    return (st.stage_of[st.gradient_of[a.key.cell]] == target) & (target != NO_STAGE)


@ASSUMED("ownership.messages-have-readers", "finish_receive")
def messages_have_readers(st: State, h: History, a: Args) -> Truth:
    """If a stage receives a message from another stage of the process, the sending stage is
    configured with a reader: the send that reads the message from the sender's slot."""
    needs, source = st.receives[a.key.stage], st.stage_of[st.input_of[a.key.cell]]
    received = ((needs & SOURCE_BIT) != 0) & ((needs & IN_BIT) != 0)
    returned = ((needs & TARGET_BIT) != 0) & ((needs & BACK_BIT) != 0)
    sent = implies(received, (st.owes[source] & OUT_BIT) != 0)
    returns = (st.owes[st.target_of[a.key.stage]] & GRAD_BIT) != 0
    return sent & implies(returned, returns)


# The caller's arguments


@ASSUMED("ownership.epochs-from-zero", "reserve", "skip", "bind", "check_forward")
def epochs_from_zero(st: State, h: History, a: Args) -> Truth:
    """The epoch that a key names is at least zero."""
    return 0 <= a.key.epoch


@ASSUMED("ownership.keys-of-now", "reserve", "skip", "bind", "check_forward", without="version")
def keys_of_now(st: State, h: History, a: Args) -> Truth:
    """If the version part is left out, every key that the caller presents names the epoch of the
    current weights."""
    return a.key.epoch == h.weights[0]


@ASSUMED("persistence.epochs-from-zero", "restore")
def checkpoints_from_zero(st: State, h: History, a: Args) -> Truth:
    """The epoch of a checkpoint is at least zero."""
    return 0 <= a.epoch


@ASSUMED("persistence.fresh-incarnation", "restore")
def fresh_incarnation(st: State, h: History, a: Args) -> Truth:
    """A restore draws a 64-bit random number as its incarnation, and no earlier incarnation had
    that number."""
    earlier = (h.issued[0] == 1) & (h.ref_incarnation[0] != st.incarnation[0])
    return implies(earlier, a.incarnation != h.ref_incarnation[0])

"""
What an accepted transition changes, and what no transition changes.

Each promise compares the memory before a transition (``st``) with the memory after it (``after``);
``a`` holds the transition's arguments. The promise names the transitions for which it holds. A
restore resets the memory, so separate promises cover it.
"""

from __future__ import annotations

from typing import Final

from ..constants import NEVER
from ..predicates import Register, choose, implies
from ..transitions import TRANSITIONS
from .words import Args, Index, State, Truth, domain_of_slot, free, live

__all__ = ["CHANGES"]

#: Proved: relations between the memory before and after an accepted transition.
CHANGES = Register()

_EVERY: Final = tuple(transition.name for transition in TRANSITIONS)
_UPDATES: Final = ("commit_forward", "commit_dgrad")


def _but(*names: str) -> tuple[str, ...]:
    """Every transition except these."""
    return tuple(name for name in _EVERY if name not in names)


# The effect token


@CHANGES("order.token-advances", *_UPDATES, d="domain")
def token_advances(st: State, after: State, a: Args, d: Index) -> Truth:
    """The commit of an F or a dI advances its domain's token by one. The tokens of all other
    domains stay unchanged."""
    own = d == domain_of_slot(st, a.slot)
    return after.token[d] == st.token[d] + choose(own, 1, 0)


@CHANGES("order.token-kept", *_but(*_UPDATES, "restore"), d="domain")
def token_kept(st: State, after: State, a: Args, d: Index) -> Truth:
    """A token changes only at the commit of an F or a dI, and at a restore."""
    return after.token[d] == st.token[d]


@CHANGES("order.token-from-zero", "restore", d="domain")
def token_from_zero(st: State, after: State, a: Args, d: Index) -> Truth:
    """A restore sets every token to zero."""
    return after.token[d] == 0


# Slots and their tenants


@CHANGES("ownership.tenant-stays", *_EVERY, s="slot")
def tenant_stays(st: State, after: State, a: Args, s: Index) -> Truth:
    """
    A slot that stays live keeps its tape: no other key takes the slot before the slot is free.
    """
    same = (after.cell_at[s] == st.cell_at[s]) & (after.epoch_at[s] == st.epoch_at[s])
    return implies(live(st, s) & live(after, s), same)


@CHANGES("ownership.generation-rises-at-release", *_but("restore"), s="slot")
def generation_rises_at_release(st: State, after: State, a: Args, s: Index) -> Truth:
    """A slot's generation (count of releases) rises by one when the slot becomes free. Apart from a
    restore, nothing else changes the generation."""
    released = live(st, s) & free(after, s)
    return after.generation[s] == st.generation[s] + choose(released, 1, 0)


# Weights and caches


@CHANGES("epoch.weights-advance", "commit_update", g="stage")
def weights_advance(st: State, after: State, a: Args, g: Index) -> Truth:
    """The commit of an update advances the weight epoch of every stage by one."""
    return after.weight_epoch[g] == st.weight_epoch[g] + 1


@CHANGES("epoch.weights-kept", *_but("commit_update", "restore"), g="stage")
def weights_kept(st: State, after: State, a: Args, g: Index) -> Truth:
    """A weight epoch changes only at the commit of an update, and at a restore."""
    return after.weight_epoch[g] == st.weight_epoch[g]


@CHANGES("version.refresh-fills", "commit_refresh")
def refresh_fills(st: State, after: State, a: Args) -> Truth:
    """A refresh that succeeds makes its stage's weight cache current."""
    return after.cache_epoch[a.stage] == st.weight_epoch[a.stage]


# A restore


@CHANGES("persistence.slots-from-zero", "restore", s="slot")
def slots_from_zero(st: State, after: State, a: Args, s: Index) -> Truth:
    """A restore frees every slot and sets every generation (count of releases) to zero."""
    return free(after, s) & (after.generation[s] == 0)


@CHANGES("version.stale-after-restore", "restore", g="stage")
def stale_after_restore(st: State, after: State, a: Args, g: Index) -> Truth:
    """A restore marks every weight cache as stale."""
    return after.cache_epoch[g] == NEVER


@CHANGES("persistence.epoch-of-checkpoint", "restore", g="stage")
def epoch_of_checkpoint(st: State, after: State, a: Args, g: Index) -> Truth:
    """A restore sets every weight epoch to the epoch of the checkpoint. The new incarnation is the
    random number that was drawn for this restore."""
    return (after.weight_epoch[g] == a.epoch) & (after.incarnation[0] == a.incarnation)

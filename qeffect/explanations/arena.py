"""
Texts of found and expected values, for refusals by the clauses of the gradient arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..relations.constants import ADDS, NEVER, OPENS
from ..text import shown
from .words import Arguments, Explanation, stage_of, with_skipped

__all__ = ["EXPLANATIONS"]


def _own_first(first: int) -> bool:
    """Whether a dW overwrites its stage's own buffer."""
    return first not in (ADDS, OPENS)


def _opened(st: Any, a: Arguments) -> str:
    """Name the buffer, already written in this epoch, that a dW would overwrite."""
    cell = a["key"].cell
    own, shared = st.buffer_of[cell], st.shared_of[st.buffer_of[cell]]
    ours = _own_first(a["first"]) and st.opened[own] == a["key"].epoch
    return "buffer's" if ours or own == shared else "tied buffer's"


def _missed(st: Any, a: Arguments) -> str:
    """Return text: when the buffer that a dW would add to was last overwritten."""
    cell = a["key"].cell
    own, shared = st.buffer_of[cell], st.shared_of[st.buffer_of[cell]]
    if not _own_first(a["first"]) and st.opened[own] != a["key"].epoch:
        return _overwritten(st.opened[own])
    tied = "" if own == shared else "; it is the tied buffer"
    return f"{_overwritten(st.opened[shared])}{tied}"


def _overwritten(epoch: int) -> str:
    return "never overwritten" if epoch == NEVER else f"last overwritten in epoch {epoch}"


def _written(st: Any, a: Arguments) -> int:
    """Return the ticket of the dW in flight on a buffer of the key."""
    cell = a["key"].cell
    return int(st.writing[st.buffer_of[cell]] or st.writing[st.shared_of[st.buffer_of[cell]]])


def _spoiled(st: Any, a: Arguments) -> int:
    """Return the spoiled stage: the call's own, or the stage that shares a destination with it."""
    stage = int(stage_of(st, a))
    sharer = int(st.sharer_of[stage])
    return stage if st.spoiled[stage] == st.weight_epoch[stage] else sharer


def _unwritten(st: Any, a: Arguments) -> int:
    """Return the stage that lacks a dW: the stage to finalize, or a stage that shares with it."""
    stage = int(a["stage"])
    return stage if st.wgrads[stage] != st.cells[stage] else int(st.sharer_of[stage])


def _tied(st: Any, a: Arguments) -> str:
    """Name the sharing stage, if the sharing stage lacks a dW; otherwise return empty text."""
    sharer = _unwritten(st, a)
    return "" if sharer == a["stage"] else f" of stage {sharer}, which shares a destination"


def _difference(found: Any, configured: Any, side: int) -> str:
    """Name the first destination and field in which two bindings differ."""
    if not isinstance(found, tuple) or len(found) != len(configured):
        both = (found, configured)[side]
        return f"{len(both)} destinations" if isinstance(both, tuple) else shown(both)
    for ours, theirs in zip(found, configured, strict=True):
        for name in ("matrix", "microbatch", "shape", "dtype", "device", "address", "nbytes"):
            pair = getattr(ours, name, "unknown"), getattr(theirs, name)
            if pair[0] != pair[1]:
                value = f"{pair[side]:#x}" if name == "address" else pair[side]
                return f"{theirs.matrix} microbatch {theirs.microbatch} {name} {value}"
    return shown((found, configured)[side])


def _writer(st: Any, a: Arguments) -> str:
    """Return text: which dW is writing the buffer of a key."""
    ticket = st.writing[st.buffer_of[a["key"].cell]]
    return f"ticket {ticket} in flight" if ticket else "no dW in flight"


#: For each clause, the function that returns what was found and what was expected.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "arena.spoiled": lambda st, a: (
        f"stage {_spoiled(st, a)}, spoiled in epoch {st.spoiled[_spoiled(st, a)]}",
        "an epoch in which no action failed",
    ),
    "arena.duplicate-bind": lambda st, a: (
        f"another bind of {a['key']}",
        "one bind of each key's destinations per walk over the microbatches",
    ),
    "arena.mismatch": lambda st, a: (
        _difference(a["destination"], st.destination_of[a["key"].cell], 0),
        _difference(a["destination"], st.destination_of[a["key"].cell], 1),
    ),
    "arena.unbound": lambda st, a: (
        f"{a['key']} with no destinations bound",
        "destinations bound before dI",
    ),
    "arena.in-flight": lambda st, a: (
        f"{a['key']} into a buffer with a write in flight",
        f"no write in flight; ticket {_written(st, a)} is in flight",
    ),
    "arena.other-destination": lambda st, a: (
        f"{a['key']} in the group of ticket {a['ticket']}",
        "a tape whose gradient goes to the destination that this dW writes; the destination of "
        f"{a['key']} has {_writer(st, a)}",
    ),
    "arena.left-out": lambda st, a: (
        f"a grouped dW of {a['key']}",
        "one dW for each tape, since these stages leave out the relation arena",
    ),
    "arena.overwrite": lambda st, a: (
        f"{a['key']} as the {_opened(st, a)} first write",
        "an accumulating write: the buffer was already written in this epoch",
    ),
    "arena.stale-accumulation": lambda st, a: (
        f"{a['key']} accumulated into a buffer that was {_missed(st, a)}",
        "an overwriting first write in this epoch",
    ),
    "arena.incomplete": lambda st, a: (
        f"{st.wgrads[_unwritten(st, a)]} weight-gradient writes{_tied(st, a)}"
        + with_skipped(st, [_unwritten(st, a)]),
        f"{st.cells[_unwritten(st, a)]}, one for every configured key",
    ),
}

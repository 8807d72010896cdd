"""
Texts of found and expected values, for refusals by the clauses of ownership: tapes (what F leaves
for dI and dW) and slots (sets of buffers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..keys import spell
from ..relations.constants import (
    BACK_BIT,
    COPY_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    NEVER,
    OUT_BIT,
    RESERVED,
    WGRAD_BIT,
)
from ..text import counted
from .words import (
    Arguments,
    Explanation,
    asked,
    entries_of,
    nonzero_entries,
    skipped_keys,
    slot_of,
    stage_of,
)

__all__ = ["EXPLANATIONS"]


def mask_text(mask: int) -> str:
    """
    Return, as text, the consumers in a bit mask: the actions and transfers that a tape waits for.

    >>> mask_text(3)
    'dI and dW'
    """
    names = {
        DGRAD_BIT: "dI",
        WGRAD_BIT: "dW",
        OUT_BIT: "output reader",
        GRAD_BIT: "gradient reader",
    }
    if mask == RESERVED:
        return "its forward"
    return " and ".join(name for bit, name in names.items() if mask & bit) or "nobody"


def _transfers(mask: int) -> str:
    """Return text for a mask of transfers."""
    names = {
        IN_BIT: "receive of the input",
        BACK_BIT: "receive of the output's gradient",
        OUT_BIT: "read of the output",
        GRAD_BIT: "read of the input gradient",
    }
    return " and ".join(name for bit, name in names.items() if mask & bit) or "nothing"


def _message(a: Arguments) -> int:
    """Return the message that a receive brings, or that an action waits for."""
    if "message" in a:
        return int(a["message"])
    return BACK_BIT if a["transition"] == "check_dgrad" else IN_BIT


def _tape(st: Any, slot: int) -> str:
    if st.consumers[slot] == 0:
        return f"slot {slot} generation {st.generation[slot]}, free"
    return (
        f"slot {slot} generation {st.generation[slot]} holding "
        f"{spell(st.epoch_at[slot], st.cell_at[slot])}, "
        f"which waits for {mask_text(st.consumers[slot])}"
    )


def _fed_by(st: Any, a: Arguments) -> str:
    """Return text: the key whose F computes the input of the call's key."""
    return spell(a["key"].epoch, st.input_of[a["key"].cell])


def _fed(st: Any, a: Arguments) -> str:
    """Return text: the key whose dI computes the output gradient of the call's key."""
    return spell(a["key"].epoch, st.gradient_of[a["key"].cell])


def _other_cell(st: Any, a: Arguments) -> Any:
    """Return the cell (a key without its epoch) whose tape a receive within the process reads."""
    return (st.input_of if a["message"] == IN_BIT else st.gradient_of)[a["key"].cell]


def _other_end(st: Any, a: Arguments) -> str:
    """Return text: which output or gradient a receive within the process reads."""
    what = "the output" if a["message"] == IN_BIT else "the input gradient"
    return f"{what} of {spell(a['key'].epoch, _other_cell(st, a))}"


def _whereabouts(st: Any, cell: Any) -> str:
    """Return text: where the tape of a cell (a key without its epoch) is."""
    slot = st.slot_of[cell]
    spoiled = st.spoiled[cell[0]] == st.weight_epoch[cell[0]]
    told = _tape(st, slot) if slot >= 0 else "this key has no tape"
    return f"{told}; the epoch of stage {cell[0]} is spoiled" if spoiled else told


def _redeems(a: Arguments) -> str:
    """Name the action whose ticket a commit or an abort redeems."""
    word = str(a["transition"]).partition("_")[2]
    return {"forward": "F", "dgrad": "dI", "wgrad": "dW"}.get(word, word)


def _held(a: Arguments) -> int:
    """Return the slot of the ticket that a call presents."""
    return int(a["leader"] if "leader" in a else a["slot"])


def _ref(st: Any, a: Arguments) -> tuple[str, str]:
    return f"{a['key']} in {a['ref']}", f"what the slot holds: {_tape(st, a['ref'].slot)}"


def _begun(st: Any) -> int:
    """Return how many F of the walk (pass over the microbatches) were checked."""
    return sum(epoch != NEVER for _, epoch in entries_of(st.forwarded))


#: How many slots a message names before it counts the rest.
_FEW: Final = 4


def _tenants(st: Any, a: Arguments) -> str:
    """Return text: what the first few slots of the key's stage hold."""
    slots = [slot for slot, own in enumerate(st.slot_stage) if own == a["key"].stage]
    few = [_tape(st, slot) for slot in slots[:_FEW]]
    return "; ".join([*few, f"and {len(slots) - _FEW} more"] if slots[_FEW:] else few)


#: For each clause, the function that returns what was found and what was expected.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "ownership.pool-exhausted": lambda st, a: (
        f"{a['key']} with no free slot",
        f"a free slot of stage {a['key'].stage}; all are taken: {_tenants(st, a)}",
    ),
    "ownership.foreign-slot": lambda st, a: (
        f"{a['key']} in slot {a['slot']}",
        f"a slot of stage {a['key'].stage}; slot {a['slot']} belongs to stage "
        f"{st.slot_stage[a['slot']]}",
    ),
    "ownership.slot-busy": lambda st, a: (
        f"{a['key']} in slot {a['slot']}",
        f"a free slot; {_tape(st, a['slot'])}",
    ),
    "ownership.key-live": lambda st, a: (
        f"{a['key']} in slot {a['slot']}" if "slot" in a else asked(a),
        f"a key without a live tape; this key has one in slot {st.slot_of[a['key'].cell]}",
    ),
    "ownership.generation-exhausted": lambda st, a: (
        f"generation {st.generation[a['slot']]} of slot {a['slot']}",
        f"a generation below {st.generation_max[0]}",
    ),
    "ownership.foreign-incarnation": lambda st, a: (
        str(a["ref"]),
        f"a reference of incarnation {st.incarnation[0]:016x}",
    ),
    "ownership.stale-reference": _ref,
    "ownership.wrong-key": _ref,
    "ownership.not-forwarded": _ref,
    "ownership.duplicate-dgrad": _ref,
    "ownership.wgrad-before-dgrad": _ref,
    "ownership.duplicate-wgrad": _ref,
    "ownership.read-before-dgrad": _ref,
    "ownership.read-duplicate": lambda st, a: (
        f"another {_transfers(a['bit'])} of {a['key']}",
        f"one read at a time; under way in slot {slot_of(a)}: {_transfers(st.moving[slot_of(a)])}",
    ),
    "ownership.no-such-reader": lambda st, a: (
        f"{mask_text(a['bit'])} of {a['key']}",
        f"a reader that the tape waits for: {_tape(st, a['ref'].slot)}",
    ),
    "ownership.read-not-begun": lambda st, a: (
        f"the end of a {_transfers(a['bit'])} of {a['key']}",
        f"a read that has begun; under way in slot {slot_of(a)}: "
        f"{_transfers(st.moving[slot_of(a)])}",
    ),
    "ownership.no-such-receive": lambda st, a: (
        f"a {_transfers(a['message'])} by stage {stage_of(st, a)}",
        f"a message that the stage is configured to receive: "
        f"{_transfers(st.receives[stage_of(st, a)])}",
    ),
    "ownership.receive-duplicate": lambda st, a: (
        f"another {_transfers(a['message'])} of {a['key']}",
        f"one receive of this message; under way: {_transfers(st.moving[slot_of(a)])}; arrived: "
        f"{_transfers(st.arrived[slot_of(a)])}",
    ),
    "ownership.receive-not-posted": lambda st, a: (
        f"the end of a {_transfers(a['message'])} of {a['key']}",
        f"a receive that was posted; under way in slot {slot_of(a)}: "
        f"{_transfers(st.moving[slot_of(a)])}",
    ),
    "ownership.receive-missing": lambda st, a: (
        (
            f"{asked(a)} in a slot that the key has not reserved",
            "a reservation, since the stage's input is copied into its slot",
        )
        if _message(a) == IN_BIT and st.receives[stage_of(st, a)] & COPY_BIT
        else (
            f"{asked(a)} with no {_transfers(_message(a))} posted",
            "a message that was posted and has arrived",
        )
    ),
    "ownership.input-not-made": lambda st, a: (
        f"{asked(a)} before F of {_fed_by(st, a)}, or after that tape was lost",
        f"F of {_fed_by(st, a)} first, and its tape live; "
        f"{_whereabouts(st, st.input_of[a['key'].cell])}",
    ),
    "ownership.gradient-not-made": lambda st, a: (
        f"{asked(a)} before dI of {_fed(st, a)}",
        f"dI of {_fed(st, a)} first, in an epoch that no failure has spoiled; "
        f"{_whereabouts(st, st.gradient_of[a['key'].cell])}",
    ),
    "ownership.receive-before-read": lambda st, a: (
        f"the end of a {_transfers(a['message'])} of {a['key']}",
        f"a read of {_other_end(st, a)} that has begun; {_whereabouts(st, _other_cell(st, a))}",
    ),
    "ownership.transfer-in-flight": lambda st, a: (
        f"{asked(a)} in slot {slot_of(a)} during a {_transfers(st.moving[slot_of(a)])}",
        "every transfer out of the slot and into it finished",
    ),
    "ownership.in-flight": lambda st, a: (
        f"{a['key']} in slot {slot_of(a)}" if "key" in a else "a restore",
        f"no action in flight there; ticket {st.held[slot_of(a)]} is in flight"
        if "key" in a
        else f"no action in flight; in flight on slots {nonzero_entries(st.held)} (slot: ticket)",
    ),
    "ownership.unknown-ticket": lambda st, a: (
        f"ticket {a['ticket']} of {_redeems(a)} on slot {_held(a)}",
        f"the ticket in flight there: {st.held[_held(a)] or 'none'}"
        + (", of another action" if st.held[_held(a)] == a["ticket"] else "")
        + f"; {_tape(st, _held(a))}",
    ),
    "ownership.not-grouped": lambda st, a: (
        f"the end of a grouped dW for {a['key']} in {a['ref']}",
        f"a tape in the group of a dW in flight; {_tape(st, a['ref'].slot)}",
    ),
    "ownership.work-not-queued": lambda st, a: (
        f"deferred work for {a['queued'] or 'no matrix'}",
        f"deferred work for {st.matrices[stage_of(st, a)]}",
    ),
    "ownership.matrix-coverage": lambda st, a: (
        f"gradients of {a['covered'] or 'no matrix'}",
        f"each of {st.matrices[stage_of(st, a)]} exactly once",
    ),
    "ownership.live-tape": lambda st, a: (
        f"live tapes in slots {[slot for slot, mask in enumerate(st.consumers) if mask]}",
        "no tape that waits for a consumer",
    ),
    "ownership.skipped": lambda st, a: (
        asked(a),
        "a key that this walk (pass over the microbatches) runs; the walk leaves out "
        f"{counted(skipped_keys(st, a['key'].stage), 'key')} of stage {a['key'].stage}",
    ),
    "ownership.walk-begun": lambda st, a: (
        f"{asked(a)} after {counted(_begun(st), 'forward')} of the walk (pass over the "
        "microbatches)",
        "no forward of the walk yet",
    ),
    "ownership.repeated-forward": lambda st, a: (
        f"{a['key']} again",
        "each key forwarded once per walk over the microbatches, even if its tape was released or "
        f"aborted; the weight epoch is {st.weight_epoch[a['key'].stage]}",
    ),
}

"""
What a refusal says: the value found and the value the contract wanted, for every clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .engine.stage import TRANSITIONS
from .keys import spell
from .refusals import Refused
from .relations.constants import (
    ADDS,
    BACK_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    NEVER,
    NO_STAGE,
    OPENS,
    OUT_BIT,
    RESERVED,
    WGRAD_BIT,
)
from .text import shown

__all__ = ["EXPLANATIONS", "explain", "mask_text"]

Arguments = Mapping[str, Any]
Explanation = Callable[[Any, Arguments], tuple[str, str]]


def mask_text(mask: int) -> str:
    """Spell a consumer mask.

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
    """Spell a mask of transfers."""
    names = {
        IN_BIT: "receive of the input",
        BACK_BIT: "receive of the output's gradient",
        OUT_BIT: "read of the output",
        GRAD_BIT: "read of the input gradient",
    }
    return " and ".join(name for bit, name in names.items() if mask & bit) or "nothing"


def _message(a: Arguments) -> int:
    """The message that a receive brings, or that an action waits for."""
    if "message" in a:
        return int(a["message"])
    return BACK_BIT if a["transition"] == "check_dgrad" else IN_BIT


def _end(st: Any, a: Arguments) -> tuple[int, int, int]:
    """Link of a slot's latest end of a transfer, which piece of work it was, what was joined."""
    slot = _slot(a)
    on = st.ended_on[slot]
    return on, st.ended_at[slot], st.joined[on]


def _stage(st: Any, a: Arguments) -> int:
    if "stage" in a:
        return int(a["stage"])
    if "bucket" in a:
        return int(st.stage_at[a["bucket"]])
    if "key" in a:
        return int(a["key"].stage)
    return int(st.slot_stage[a["slot"]])


def _domain(st: Any, a: Arguments) -> int:
    return int(st.domain_of[_stage(st, a)])


def _tape(st: Any, slot: int) -> str:
    if st.consumers[slot] == 0:
        return f"slot {slot} generation {st.generation[slot]}, free"
    return (
        f"slot {slot} generation {st.generation[slot]} holding "
        f"{spell(st.epoch_at[slot], st.cell_at[slot])}, "
        f"which waits for {mask_text(st.consumers[slot])}"
    )


def _what(a: Arguments) -> str:
    """Say what was asked for: the transition in the field's words, and its subject."""
    word = a["transition"].removeprefix("check_")
    word = {"forward": "F", "dgrad": "dI", "wgrad": "dW"}.get(word, word)
    if "key" in a:
        return f"{word} of {a['key']}"
    return f"{word} of stage {a['stage']}" if "stage" in a else word


def _redeems(a: Arguments) -> str:
    """Name the action whose ticket a commit or an abort redeems."""
    word = str(a["transition"]).partition("_")[2]
    return {"forward": "F", "dgrad": "dI", "wgrad": "dW"}.get(word, word)


def _slot(a: Arguments) -> int:
    return int(a["ref"].slot if "ref" in a else a["slot"])


def _ref(st: Any, a: Arguments) -> tuple[str, str]:
    return f"{a['key']} in {a['ref']}", f"what the slot holds: {_tape(st, a['ref'].slot)}"


def _entries(column: Any) -> Iterable[tuple[Any, Any]]:
    """Index and value of each entry; a column by stage may be a dictionary."""
    return column.items() if isinstance(column, dict) else enumerate(column)


def _live(column: Any) -> str:
    return ", ".join(
        f"{index}: {value}" for index, value in _entries(column) if value not in (0, -1)
    )


#: How many slots a message names before it counts the rest.
_FEW = 4


def _tenants(st: Any, a: Arguments) -> str:
    """What the slots of the key's stage hold, the first few."""
    slots = [slot for slot, own in enumerate(st.slot_stage) if own == a["key"].stage]
    few = [_tape(st, slot) for slot in slots[:_FEW]]
    return "; ".join([*few, f"and {len(slots) - _FEW} more"] if slots[_FEW:] else few)


def _captured(st: Any, a: Arguments) -> int:
    """Where in the order of capture the graph stands that would be replayed."""
    ranks = {"check_forward": "forward_rank", "check_dgrad": "dgrad_rank"}
    place: int = getattr(st, ranks.get(a["transition"], "wgrad_rank"))[_slot(a)]
    return place


def _epoch(epoch: int) -> str:
    return "no epoch" if epoch == NEVER else f"epoch {epoch}"


def _indices(column: Any, usual: int = 0) -> str:
    """Where a column does not hold its usual value: by default, where flags are set."""
    return ", ".join(str(index) for index, value in _entries(column) if value != usual) or "none"


def _weights(epoch: int) -> str:
    return f"the weights of epoch {epoch}" if epoch >= 0 else "weights of no known epoch"


def _waiting(st: Any) -> str:
    return ", ".join(f"stage {stage}" for stage in st.refreshed if stage != NO_STAGE)


def _reported(count: Any, what: str, said: str) -> str:
    """Say what an action reported: a count, nothing, or what is no count."""
    if isinstance(count, str):
        return f"no readable count in the report of {what}: {count}"
    return said.format(count) if count >= 0 else f"no report of {what}"


def _position(st: Any, a: Arguments, column: str, action: str) -> tuple[str, str]:
    d = _domain(st, a)
    return (
        f"{action} of {a['key']} as update {st.position[d]} of the epoch",
        f"it as update {getattr(st, column)[a['key'].cell]}, as declared",
    )


EXPLANATIONS: Mapping[str, Explanation] = {
    "ownership.pool-exhausted": lambda st, a: (
        f"{a['key']} with no free slot",
        f"a free slot of stage {a['key'].stage}; none is: {_tenants(st, a)}",
    ),
    "ownership.foreign-slot": lambda st, a: (
        f"{a['key']} in slot {a['slot']}",
        f"a slot of stage {a['key'].stage}; slot {a['slot']} is of stage "
        f"{st.slot_stage[a['slot']]}",
    ),
    "ownership.slot-busy": lambda st, a: (f"{a['key']}", f"a free slot; {_tape(st, a['slot'])}"),
    "ownership.key-live": lambda st, a: (
        f"{a['key']} in slot {a['slot']}",
        f"a key that is not live; it is live in slot {st.slot_of[a['key'].cell]}",
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
        f"one at a time; under way in slot {_slot(a)}: {_transfers(st.moving[_slot(a)])}",
    ),
    "ownership.no-such-reader": lambda st, a: (
        f"{mask_text(a['bit'])} of {a['key']}",
        _tape(st, a["ref"].slot),
    ),
    "ownership.read-not-begun": lambda st, a: (
        f"the end of a {_transfers(a['bit'])} of {a['key']}",
        f"a read that has begun; under way in slot {_slot(a)}: {_transfers(st.moving[_slot(a)])}",
    ),
    "ownership.no-such-receive": lambda st, a: (
        f"a {_transfers(a['message'])} by stage {_stage(st, a)}",
        f"a message that the stage is configured to receive: "
        f"{_transfers(st.receives[_stage(st, a)])}",
    ),
    "ownership.receive-duplicate": lambda st, a: (
        f"another {_transfers(a['message'])} of {a['key']}",
        f"one in all; under way {_transfers(st.moving[_slot(a)])}, arrived "
        f"{_transfers(st.arrived[_slot(a)])}",
    ),
    "ownership.receive-not-posted": lambda st, a: (
        f"the end of a {_transfers(a['message'])} of {a['key']}",
        f"a receive that was posted; under way in slot {_slot(a)}: "
        f"{_transfers(st.moving[_slot(a)])}",
    ),
    "ownership.receive-missing": lambda st, a: (
        f"{_what(a)} with no {_transfers(_message(a))} posted",
        "a message that was posted and has arrived",
    ),
    "ownership.transfer-in-flight": lambda st, a: (
        f"{_what(a)} in slot {_slot(a)} during a {_transfers(st.moving[_slot(a)])}",
        "every transfer out of the slot and into it finished",
    ),
    "ownership.in-flight": lambda st, a: (
        f"{a['key']} in slot {_slot(a)}" if "key" in a else "a restore",
        f"no action in flight there; ticket {st.held[_slot(a)]} is"
        if "key" in a
        else f"no action in flight; slots in flight {_live(st.held)} (slot: ticket)",
    ),
    "ownership.unknown-ticket": lambda st, a: (
        f"ticket {a['ticket']} on slot {a['slot']} as that of {_redeems(a)}",
        f"ticket {st.held[a['slot']] or 'none'} in flight there"
        + (", of another action" if st.held[a["slot"]] == a["ticket"] else "")
        + f"; {_tape(st, a['slot'])}",
    ),
    "ownership.work-not-queued": lambda st, a: (
        f"deferred work for {a['queued'] or 'no matrix'}",
        f"work queued for {st.matrices[_stage(st, a)]}",
    ),
    "ownership.matrix-coverage": lambda st, a: (
        f"gradients of {a['covered'] or 'no matrix'}",
        f"each of {st.matrices[_stage(st, a)]} exactly once",
    ),
    "ownership.live-tape": lambda st, a: (
        f"live tapes in slots {[slot for slot, mask in enumerate(st.consumers) if mask]}",
        "no tape that waits for a consumer",
    ),
    "version.wrong-epoch": lambda st, a: (
        f"{a['key']}",
        f"weight epoch {st.weight_epoch[_stage(st, a)]}",
    ),
    "version.stale-cache": lambda st, a: (
        f"{a['key']} over a weight cache of {_epoch(st.cache_epoch[_stage(st, a)])}",
        f"a cache of epoch {a['key'].epoch}",
    ),
    "version.already-fresh": lambda st, a: (
        f"a refresh of stage {_stage(st, a)}",
        f"a stale cache; it already holds epoch {st.cache_epoch[_stage(st, a)]}",
    ),
    "version.late-refresh": lambda st, a: (
        f"a refresh of stage {_stage(st, a)} after {st.forwards[_stage(st, a)]} forwards",
        "a refresh directly before the stage's first forward of the epoch",
    ),
    "version.refresh-interrupted": lambda st, a: (
        f"an action of stage {_stage(st, a)}",
        f"the first forward of stage {st.refreshed[_domain(st, a)]}, whose cache was refreshed",
    ),
    "version.in-flight": lambda st, a: (
        _what(a),
        "no refresh in flight, by itself or by an F; stages in flight (stage: ticket) "
        + (", ".join(filter(None, (_live(st.refreshing), _live(st.filling)))) or "none"),
    ),
    "version.unknown-ticket": lambda st, a: (
        f"refresh ticket {a['ticket']} of stage {a['stage']}",
        f"ticket {ticket}" if (ticket := st.refreshing[a["stage"]]) else "no refresh in flight",
    ),
    "version.fill-missing": lambda st, a: (
        f"caches filled of {a['filled'] or 'no matrix'}",
        f"each of {st.matrices[_stage(st, a)]} exactly once",
    ),
    "version.wrong-fill": lambda st, a: (
        f"a cache filled from {_weights(a['fill_epoch'])}",
        f"one filled from the weights of epoch {st.weight_epoch[_stage(st, a)]}",
    ),
    "version.fill-unasked": lambda st, a: (
        f"a cache filled from {_weights(a['fill_epoch'])} by an F in slot {a['slot']}",
        "no fill: the F was checked without a refresh",
    ),
    "version.left-out": lambda st, a: (
        f"{a['transition']} of stage {a['stage']}",
        "no call about a weight cache: these stages leave version out",
    ),
    "order.in-flight": lambda st, a: (
        _what(a),
        f"no F, dI or refresh in flight; domains in flight {_live(st.busy)} (domain: ticket)",
    ),
    "order.poisoned": lambda st, a: (
        f"{_what(a)} over scaling state that a failed F, dI or refresh left half updated",
        "a domain restored from the last commit's snapshot",
    ),
    "order.token": lambda st, a: (
        f"effect token {a['token']}",
        f"token {st.token[_domain(st, a)]}",
    ),
    "ownership.repeated-forward": lambda st, a: (
        f"{a['key']} again",
        f"each key forwarded once in an epoch, also after its release or abort; the weight epoch "
        f"is {st.weight_epoch[a['key'].stage]}",
    ),
    "order.reordered": lambda st, a: _position(
        st, a, "dgrad_at" if "ref" in a else "forward_at", "dI" if "ref" in a else "F"
    ),
    "order.scaling-updates": lambda st, a: (
        _reported(a["updates"], "scaling updates", "{} scaling updates"),
        f"1 scaling update of domain {_domain(st, a)}",
    ),
    "order.scales-moved": lambda st, a: (
        f"{a['key']} over live scales of the F at token {st.rolled_at[_domain(st, a)]}",
        f"the scales of its own F, at token {st.scaled_at[_slot(a)]}",
    ),
    "order.wrong-scales": lambda st, a: (
        _reported(a["scales"], "the scales that dI used", "the scales of the F at token {}"),
        f"the scales of its own F, at token {st.scaled_at[a['slot']]}",
    ),
    "order.incomplete": lambda st, a: (
        f"{st.forwards[a['stage']]} forwards and {st.dgrads[a['stage']]} input gradients",
        f"{st.cells[a['stage']]} of each",
    ),
    "arena.spoiled": lambda st, a: (
        f"stage {_spoiled(st, a)}, spoiled in epoch {st.spoiled[_spoiled(st, a)]}",
        "gradients that no failed action half wrote",
    ),
    "arena.duplicate-bind": lambda st, a: (
        f"{a['key']} bound again",
        "one bind of a key's destinations in an epoch",
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
        f"no write in flight; ticket {_written(st, a)} is",
    ),
    "arena.overwrite": lambda st, a: (
        f"{a['key']} as the {_opened(st, a)} first write",
        "an accumulating write: the buffer was already written in this epoch",
    ),
    "arena.stale-accumulation": lambda st, a: (
        f"{a['key']} accumulated into a buffer last opened in epoch {_missed(st, a)}",
        "an overwriting first write in this epoch",
    ),
    "arena.incomplete": lambda st, a: (
        f"{st.wgrads[_unwritten(st, a)]} weight-gradient writes{_tied(st, a)}",
        f"{st.cells[_unwritten(st, a)]}, one for every configured key",
    ),
    "capture.out-of-order": lambda st, a: (
        f"{a['key']} in slot {_slot(a)}, the graph captured at place {_captured(st, a)}, after the "
        f"one captured at place {st.cursor[st.pool_of[_slot(a)]]}",
        "graphs of one memory pool replayed in the order of capture while a tape is live in it",
    ),
    "completion.wrong-stream": lambda st, a: (
        f"link {a['link']} of domain {st.domain_at[a['link']]}",
        f"a link of domain {_domain(st, a)}",
    ),
    "completion.caller-to-graph": lambda st, a: (
        f"a replay after the graph stream waited for {st.joined[a['link']]} of the caller's work",
        f"a wait for all {st.submitted[a['link']]}",
    ),
    "completion.graph-to-caller": lambda st, a: (
        f"a consumer whose stream waited up to replay {st.waited[a['link']]}",
        f"a wait at or after replay {_replay(st, a)}",
    ),
    "completion.transfer-to-graph": lambda st, a: (
        f"a replay on slot {_slot(a)}, whose last transfer ended on link {_end(st, a)[0]} as piece "
        f"{_end(st, a)[1]} of its caller's work",
        f"a join of that link since; the graph stream has waited for {_end(st, a)[2]}",
    ),
    "completion.two-ends": lambda st, a: (
        f"an end told on link {a['link']} after one on link {_end(st, a)[0]}",
        f"a join of link {_end(st, a)[0]} before: the graph stream has waited for "
        f"{_end(st, a)[2]} of its caller's {_end(st, a)[1]} pieces of work",
    ),
    "completion.slot-not-awaited": lambda st, a: (
        f"a caller that waited up to replay {st.waited[a['link']]}",
        f"a wait at or after replay {st.vacated[_slot(a)]}, the last of slot {_slot(a)}'s tenant",
    ),
    "completion.wrong-consumer": lambda st, a: (
        f"link {a['link']}, of caller {st.caller_at[a['link']]}",
        f"a link of caller {st.consumer[0]}, which reads the gradients of this epoch",
    ),
    "completion.update-stream": lambda st, a: (
        f"an update on the stream of caller {a['caller']}",
        f"one on that of caller {st.consumer[0]}, which waited for the gradients",
    ),
    "completion.update-to-graph": lambda st, a: (
        f"{_what(a)} before the graph stream of domain {_domain(st, a)} waited for the "
        f"optimizer's update, which ran on the stream of caller {st.updater[0]}",
        f"a join of link {_updaters_link(st, _domain(st, a))} after the commit",
    ),
    "reduction.incomplete": lambda st, a: (
        ", ".join(f"{st.wgrads[s]} weight gradients of stage {s}" for s in _stages(st, a)),
        ", ".join(f"{st.cells[s]}" for s in _stages(st, a)),
    ),
    "reduction.spoiled": lambda st, a: (
        ", ".join(f"stage {s}, spoiled in epoch {st.spoiled[s]}" for s in _stages(st, a)),
        "an epoch in which no action failed",
    ),
    "reduction.in-flight": lambda st, a: (
        f"buckets with a reduction in flight: {_indices(st.reducing)}",
        "none in flight",
    ),
    "reduction.duplicate": lambda st, a: (
        f"another reduction of {_bucket(st, a)}",
        "one reduction of a bucket in an epoch",
    ),
    "reduction.out-of-order": lambda st, a: (
        f"{_bucket(st, a)}, the one at place {st.reduce_at[a['bucket']]} of the declared order",
        f"the bucket at place {st.started[0]}",
    ),
    "reduction.not-started": lambda st, a: (
        f"the end of a reduction of {_bucket(st, a)}, which has none in flight",
        f"one that was started; in flight: buckets {_indices(st.reducing)}",
    ),
    "reduction.missing": lambda st, a: (
        f"buckets not yet reduced: {_indices(st.reduced, a['epoch'])}",
        "every configured reduction finished",
    ),
    "epoch.spoiled": lambda st, a: (
        f"stage {a['stage']}, spoiled in epoch {st.spoiled[a['stage']]}",
        "an epoch in which no action failed",
    ),
    "epoch.incomplete": lambda st, a: (
        f"{st.wgrads[a['stage']]} weight gradients",
        f"{st.cells[a['stage']]}",
    ),
    "epoch.already-final": lambda st, a: (f"stage {a['stage']} again", "one finalize in an epoch"),
    "epoch.not-final": lambda st, a: (
        f"stages that are not final: {_indices(st.final, a['epoch'])}",
        f"every stage finalized in epoch {a['epoch']}",
    ),
    "epoch.wrong-epoch": lambda st, a: (
        f"epoch {a['epoch']}",
        f"the weight epochs {st.weight_epoch}",
    ),
    "persistence.live-tape": lambda st, a: (
        f"live tapes in slots {[slot for slot, mask in enumerate(st.consumers) if mask]}",
        "none live",
    ),
    "persistence.action-in-flight": lambda st, a: (
        f"in flight (domain: ticket) {_live(st.busy) or 'none'}; refreshes in flight "
        f"(stage: ticket) {_live(st.refreshing) or 'none'}",
        "none in flight",
    ),
    "persistence.mid-epoch": lambda st, a: (
        f"an epoch with {sum(_values(st.forwards))} forwards and {sum(_values(st.wgrads))} weight "
        f"gradients done, refreshed and not yet forwarded {_waiting(st) or 'none'}",
        "a checkpoint directly after a commit",
    ),
    "persistence.device-work": lambda st, a: (
        f"domains with device work not known to be finished: {_indices(st.undrained)}",
        "all drained",
    ),
    "persistence.reduction-in-flight": lambda st, a: (
        f"buckets with a reduction in flight: {_indices(st.reducing)}",
        "none in flight",
    ),
    "persistence.same-incarnation": lambda st, a: (
        f"incarnation {a['incarnation']:016x}",
        "a fresh random one",
    ),
}


def _own_first(first: int) -> bool:
    """Whether a dW overwrites its stage's own buffer."""
    return first not in (ADDS, OPENS)


def _opened(st: Any, a: Arguments) -> str:
    """Say which buffer a dW would overwrite that was opened before it."""
    cell = a["key"].cell
    own, shared = st.buffer_of[cell], st.shared_of[st.buffer_of[cell]]
    ours = _own_first(a["first"]) and st.opened[own] == a["key"].epoch
    return "buffer's" if ours or own == shared else "tied buffer's"


def _missed(st: Any, a: Arguments) -> str:
    """Say when the buffer was last opened that a dW would add to, and that it is a shared one."""
    cell = a["key"].cell
    own, shared = st.buffer_of[cell], st.shared_of[st.buffer_of[cell]]
    if not _own_first(a["first"]) and st.opened[own] != a["key"].epoch:
        return f"{st.opened[own]}"
    return f"{st.opened[shared]}" + ("" if own == shared else ", the tied one")


def _written(st: Any, a: Arguments) -> int:
    """Return the ticket of the dW in flight on a buffer of the key."""
    cell = a["key"].cell
    return int(st.writing[st.buffer_of[cell]] or st.writing[st.shared_of[st.buffer_of[cell]]])


def _spoiled(st: Any, a: Arguments) -> int:
    """Return the stage whose failure stands in the way: an action's own, or its sharer."""
    stage = int(_stage(st, a))
    sharer = int(st.sharer_of[stage])
    return stage if st.spoiled[stage] == st.weight_epoch[stage] else sharer


def _unwritten(st: Any, a: Arguments) -> int:
    """Return the stage that lacks a dW: the one to be final, or its sharer."""
    stage = int(a["stage"])
    return stage if st.wgrads[stage] != st.cells[stage] else int(st.sharer_of[stage])


def _tied(st: Any, a: Arguments) -> str:
    """Say that what lacks a dW is a sharer of the stage."""
    sharer = _unwritten(st, a)
    return "" if sharer == a["stage"] else f" of stage {sharer}, which shares a destination"


def _stages(st: Any, a: Arguments) -> list[int]:
    """Return the stages that an action at the end of an epoch is about."""
    if "bucket" not in a:
        return list(dict.fromkeys((a["stage"], st.sharer_of[a["stage"]])))
    return list(dict.fromkeys((st.stage_at[a["bucket"]], st.tied_at[a["bucket"]])))


def _bucket(st: Any, a: Arguments) -> str:
    """Say which bucket a reduction is of."""
    return f"bucket {a['bucket']} of stage {' and '.join(map(str, _stages(st, a)))}"


def _replay(st: Any, a: Arguments) -> int:
    """Return the replay that a consumer has to wait for."""
    if "ref" in a:
        return int(st.produced[a["ref"].slot])
    return int(max(st.landed[s] for s in _stages(st, a)))


def _updaters_link(st: Any, domain: int) -> int:
    """Return the link of the optimizer's stream and a domain's graph stream."""
    pairs = zip(st.caller_at, st.domain_at, strict=True)
    return next(link for link, pair in enumerate(pairs) if pair == (st.updater[0], domain))


def _values(column: Any) -> Any:
    return column.values() if isinstance(column, dict) else column


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


def explain(refused: Refused, transition: str, st: Any, arguments: tuple[Any, ...]) -> Refused:
    """Fill in what a refusal found and expected, from the unchanged state."""
    refused.transition = transition
    given = dict(zip(TRANSITIONS[transition], arguments, strict=True))
    given["transition"] = transition
    try:
        refused.found, refused.expected = EXPLANATIONS[refused.clause](st, given)
    except ValueError:  # Python spells no integer of thousands of digits
        told = ((name, value) for name, value in given.items() if name != "transition")
        refused.found = ", ".join(f"{name} {shown(value)}" for name, value in told)
        refused.expected = "numbers that this contract has given"
    return refused

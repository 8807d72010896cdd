"""
The fields of each line of a rank log.

The log's writer, its reader and the generated ``spec/contract.md`` take these fields from here.

A rank log has a header, then one line per event. Every line ends with a digest of the file up to
this digest. Every event has a number, ``seq``, which counts from 1.

A rank may write its log in several files, each with digests of its own. A file that continues
another file also has the field ``continues`` in its header: the rank's state after the commit that
ended the previous file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["FIELD_KINDS", "RANK_CONTINUES", "RANK_EVENTS", "RANK_HEADER"]

_Fields = Mapping[str, str]


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _peer(value: Any) -> bool:
    return type(value) is int and value >= -1


def _word(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 200


def _maybe_word(value: Any) -> bool:
    return value is None or _word(value)


def _flag(value: Any) -> bool:
    return type(value) is bool


def _message(value: Any) -> bool:
    if type(value) is not list or len(value) != 3:
        return False
    stage, microbatch, gradient = value
    return _natural(stage) and _natural(microbatch) and type(gradient) is bool


def _naturals(value: Any) -> bool:
    return type(value) is list and all(map(_natural, value))


def _digest(value: Any) -> bool:
    return type(value) is str and len(value) == 16 and not set(value) - set("0123456789abcdef")


def _channels(value: Any) -> bool:
    return type(value) is list and all(_naturals(one) and len(one) == 3 for one in value)


#: The kind of the field with the votes.
_VOTES: Final = (
    "one number per rank: 0 (yes), 1 (no), 2 (its gradients differ from the first replica's), more "
    "than 2 (its two runs differ)"
)

#: The kind of the field with the messages of a graph.
_ORDERS: Final = (
    "a list of [peer, digest of the sends to the peer, digest of the receives from the peer]"
)

#: The kinds of fields, each with a function that tells whether a parsed value is of the kind.
FIELD_KINDS: Final[Mapping[str, Any]] = {
    "a number": _natural,
    "a rank, or -1": _peer,
    "an epoch, or -1": _peer,
    "a digest": _digest,
    "a name": _word,
    "a name, or null": _maybe_word,
    "true or false": _flag,
    "[sending stage, microbatch, true for a gradient]": _message,
    _VOTES: _naturals,
    "a list of [sender, receiver, messages per step]": _channels,
    _ORDERS: _channels,
}

_NUMBER: Final = "a number"
_NAME: Final = "a name"
_EPOCH: Final[_Fields] = {"epoch": _NUMBER}
_NAMED: Final[_Fields] = {"name": _NAME}
_POSTED: Final[_Fields] = {
    "peer": _NUMBER,
    "message": "[sending stage, microbatch, true for a gradient]",
    "slot": _NUMBER,
    "generation": _NUMBER,
}
_ENDED: Final[_Fields] = {"peer": _NUMBER, "action": _NAME}

#: The header's fields: kind and meaning.
RANK_HEADER: Final[Mapping[str, tuple[str, str]]] = {
    "rank": (_NUMBER, "the rank"),
    "world": (_NUMBER, "number of ranks of the job"),
    "attempt": (
        "a name, or null",
        "the name of the attempt that the ranks agreed on; null if another library connected the "
        "ranks",
    ),
    "worker": (_NUMBER, "the worker's number within its process"),
    "began": (_NUMBER, "when the worker began, in nanoseconds of the host's clock"),
    "epoch": (_NUMBER, "the weight epoch in which the worker began"),
    "channels": (
        "a list of [sender, receiver, messages per step]",
        "the job's connections between ranks",
    ),
}

#: The fields of ``continues`` in the header of a further file: kind and meaning.
RANK_CONTINUES: Final[Mapping[str, tuple[str, str]]] = {
    "part": (
        _NUMBER,
        "the number of the file; the first file of a log has number 0 and no field `continues`",
    ),
    "events": (_NUMBER, "number of events in all earlier files"),
    "after": ("a digest", "the digest at the end of the previous file's last line"),
    "epoch": (_NUMBER, "the weight epoch after the commit that ended the previous file"),
    "again": (_NUMBER, "how often the worker had restarted, in place or from a checkpoint"),
    "launches": (
        "true or false",
        "whether the step that the previous file ends with was one launch",
    ),
    "wrote": ("an epoch, or -1", "the epoch of the rank's newest part of a checkpoint"),
}

#: Each event: its fields and their kinds, and what happened.
RANK_EVENTS: Final[Mapping[str, tuple[_Fields, str]]] = {
    "offer": (_NAMED, "rank 0 drew a name for the attempt and offered it"),
    "take_seat": (_NAMED, "the rank took its seat under the name"),
    "confirm": (_NAMED, "rank 0 saw that every rank had taken its seat, and confirmed the name"),
    "connect": (_NAMED, "the rank connected under the name"),
    "begin_step": (_EPOCH, "a guarded step began"),
    "post_send": (_POSTED, "the rank posted a send"),
    "post_receive": (_POSTED, "the rank posted a receive"),
    "sent": (_ENDED, "a send ended"),
    "received": (_ENDED, "a receive ended"),
    "behind_send": (
        _ENDED,
        "device work that the rank queues after this event runs only after a send has ended",
    ),
    "behind_receive": (
        _ENDED,
        "device work that the rank queues after this event runs only after a receive has ended",
    ),
    "finish": (_EPOCH, "the gradients are final, and the rank's contract would accept the commit"),
    "consent": (_EPOCH, "the rank consents to the commit"),
    "commit": (
        _EPOCH,
        "the rank updated its weights (or launched the update) and committed the step",
    ),
    "capture": (_EPOCH, "the rank begins to capture a step as one launch"),
    "second_run": (
        _EPOCH,
        "the step runs twice as a check; in a guarded step, both runs have ended with equal "
        "digests; in a launched step, both launches are enqueued and not yet compared",
    ),
    "captured": (_EPOCH, "all ranks captured the step"),
    "order": (
        {**_EPOCH, "messages": _ORDERS},
        "digests of the messages that the next launch posts, in the order of their capture",
    ),
    "launch": (_EPOCH, "the host launches the step"),
    "votes": (
        {
            **_EPOCH,
            "votes": _VOTES,
        },
        "the host read the devices' votes of an earlier launch",
    ),
    "leave": (_EPOCH, "the last launch ended; guarded steps or a checkpoint may follow"),
    "resume": (_EPOCH, "launches continue"),
    "report": (_EPOCH, "after a stop: the rank reports the epoch of its device's weights"),
    "load": (_EPOCH, "the rank loaded a checkpoint of the epoch"),
    "write_shard": (_EPOCH, "the rank writes its part of a checkpoint"),
    "publish": (_EPOCH, "rank 0 gave the whole checkpoint its name"),
    "stop": (
        {"kind": _NAME, "peer": "a rank, or -1", "in_row": "true or false"},
        "the rank stops: `kind` is the reason, `peer` the rank that caused it, and `in_row` tells "
        "whether the rank was inside its row of the schedule",
    ),
    "say": ({}, "the rank published its reason for stopping"),
    "close": ({}, "the rank closed its connections"),
    "end": (
        {"cause": _NUMBER, "kind": _NAME},
        "the rank read the attempt's cause: `cause` is the rank that caused the stop, and `kind` "
        "says how",
    ),
    "rebuilt": (_EPOCH, "the rank restarted in place"),
    "closed": ({}, "the worker ended its work; the log is complete"),
}

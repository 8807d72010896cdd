"""
Checks of messages: inputs arrive before use, every send is received, and messages within a queue
stay in order.

Stage s gets its input from stage s-1, and the gradient of its output from stage s+1. If both stages
are on one rank, the tensor needs no message. Otherwise a compute+comms table shows a send and a
receive. A compute-only table shows no messages; the dry run then checks that inputs from other
ranks arrive in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .actions import RECEIVES, SENDS, Kind
from .findings import Finding, finding, place
from .index import Index, Occurrence

# For each message: the kind that computes it, its counterpart, and the counterpart's stage offset.
_PRODUCER = {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.DGRAD}
COUNTERPART = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
# For each computation with an input: the receive of the input, and its source's stage offset.
INPUTS = {Kind.FORWARD: (Kind.RECV_F, -1), Kind.DGRAD: (Kind.RECV_B, 1)}


def check_inputs(index: Index) -> Iterator[Finding]:
    """Yield a finding for each computation that runs before its input has arrived on its rank."""
    comms = index.schedule.has_comms and index.schedule.complete
    for (kind, stage, microbatch), spot in index.first.items():
        if kind not in INPUTS:
            continue
        receive, offset = INPUTS[kind]
        source = index.home(stage + offset)
        if source is None:
            continue
        if source == spot.rank:
            wanted = index.get(kind, stage + offset, microbatch)
            name = f"{stage + offset}{kind.value}{microbatch}"
            how = "is computed on this rank"
            if wanted is None or wanted.rank != spot.rank:
                continue
        elif comms:
            wanted = index.get(receive, stage, microbatch)
            name = f"{stage}{receive.value}{microbatch}"
            how = "is received"
        else:
            continue
        if index.before(wanted, spot):
            continue
        where = "is missing" if wanted is None else f"is at step {wanted.atom.step}"
        yield finding(
            "use-before-receive",
            f"{stage}{kind.value}{microbatch} runs before its input {how}: {name} {where}",
            rank=spot.rank,
            atom=spot.atom,
            expected=f"{name} earlier on rank {spot.rank}",
            found=f"{name} {where}",
            related=() if wanted is None else (place(wanted.rank, wanted.atom, "needs"),),
        )


def check_messages(index: Index) -> Iterator[Finding]:
    """
    Yield a finding for each send without a receive, receive without a send, send before its
    computation, and message within one rank.
    """
    if not index.schedule.complete:
        return
    for (kind, stage, microbatch), spot in index.first.items():
        if kind not in COUNTERPART:
            continue
        counterpart, offset = COUNTERPART[kind]
        peer = index.home(stage + offset)
        name = f"{stage + offset}{counterpart.value}{microbatch}"
        if peer is None or peer == spot.rank:
            reason = (
                f"stage {stage} has no neighbour there"
                if peer is None
                else f"stage {stage + offset} is on the same rank"
            )
            yield finding(
                "message-misplaced",
                f"{spot.atom.action} has no use: {reason}",
                rank=spot.rank,
                atom=spot.atom,
                expected="a message between neighbour stages on different ranks",
                found=reason,
            )
            continue
        if index.get(counterpart, stage + offset, microbatch) is None:
            sends = kind in SENDS
            yield finding(
                "send-without-receive" if sends else "receive-without-send",
                f"{spot.atom.action} has no counterpart: {name} is not in rank {peer}'s row",
                rank=spot.rank,
                atom=spot.atom,
                expected=f"{name} on rank {peer}",
                found="none",
            )
        if kind in _PRODUCER:
            producer = index.get(_PRODUCER[kind], stage, microbatch)
            if (
                producer is not None
                and producer.rank == spot.rank
                and not index.before(producer, spot)
            ):
                yield finding(
                    "send-before-compute",
                    f"{spot.atom.action} sends what {producer.atom.action} computes only at step "
                    f"{producer.atom.step}",
                    rank=spot.rank,
                    atom=spot.atom,
                    expected=f"{producer.atom.action} before step {spot.atom.step}",
                    found=f"{producer.atom.action} at step {producer.atom.step}",
                    related=(place(producer.rank, producer.atom, "needs"),),
                )


def check_message_order(index: Index) -> Iterator[Finding]:
    """
    Yield, for each queue, a finding for the first receive that would not get the message that it
    names.
    """
    if not index.schedule.complete:
        return
    queue = index.transport.queue
    sent: dict[tuple[int, int, str], list[Occurrence]] = defaultdict(list)
    received: dict[tuple[int, int, str], list[Occurrence]] = defaultdict(list)
    for (kind, stage, microbatch), spot in index.first.items():
        if kind not in COUNTERPART:
            continue
        counterpart, offset = COUNTERPART[kind]
        other = index.get(counterpart, stage + offset, microbatch)
        if other is None or other.rank == spot.rank:
            continue
        if kind in SENDS:
            sent[spot.rank, other.rank, queue(kind)].append(spot)
        elif kind in RECEIVES:
            received[other.rank, spot.rank, queue(counterpart)].append(spot)
    for (source, target, shared), sends in sent.items():
        for send, receive in zip(sends, received[source, target, shared], strict=False):
            counterpart, offset = COUNTERPART[send.atom.kind]
            wanted = (counterpart, send.atom.stage + offset, send.atom.microbatch)
            atom = receive.atom
            if wanted == (atom.kind, atom.stage, atom.microbatch):
                continue
            name = f"{wanted[1]}{wanted[0].value}{wanted[2]}"
            yield finding(
                "message-order",
                f"rank {target} receives {atom.action} where rank {source} sends "
                f"{send.atom.action} (step {send.atom.step}): the tensors would be swapped",
                rank=target,
                atom=atom,
                expected=name,
                found=str(atom.action),
                related=(place(send.rank, send.atom, "peer"),),
            )
            break

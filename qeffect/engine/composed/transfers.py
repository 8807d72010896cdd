"""
The composed transitions post_receive, finish_receive, read and finish_read.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import (
    BACK_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    NO_SLOT,
    OUT_BIT,
    READ_BITS,
    RESERVED,
)

__all__ = ["finish_read", "finish_receive", "post_receive", "read"]


def post_receive(st, key, ref, message, link):
    """
    Before a stream receives the tape's input, or its output's gradient, into the slot.

    Guards: ownership, completion.
    Writes: ownership, completion.
    """
    # ownership.post_receive_guards
    slot = ref.slot
    s = key.stage
    mask = st.consumers[slot]
    moving = st.moving[slot]
    e = key.epoch
    c = key.cell
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    if mask == 0 or st.generation[slot] != ref.generation:
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")
    if message != IN_BIT and message != BACK_BIT or st.receives[s] & message == 0:
        raise Refused("ownership.no-such-receive")
    if message == BACK_BIT and mask == RESERVED:
        raise Refused("ownership.not-forwarded")
    if (moving | st.arrived[slot]) & message != 0:
        raise Refused("ownership.receive-duplicate")
    # completion.post_receive_guards
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.vacated[slot]:
        raise Refused("completion.slot-not-awaited")
    # ownership.post_receive_writes
    st.moving[slot] = moving | message
    # completion.post_receive_writes
    st.undrained[d] = 1


def finish_receive(st, key, ref, message, link):
    """
    After the message has arrived and the link's caller has waited for the receive.

    Guards: ownership, completion.
    Writes: ownership, completion.
    """
    # ownership.finish_receive_guards
    slot = ref.slot
    bit = message
    moving = st.moving[slot]
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    now = st.generation[slot]
    then = ref.generation
    if (mask == 0 or now != then) and (mask != 0 or moving & bit == 0 or now != then + 1):
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")
    if bit != IN_BIT and bit != BACK_BIT or moving & bit == 0:
        raise Refused("ownership.receive-not-posted")
    # completion.finish_receive_guards
    s = key.stage
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.ended_on[slot] != link and st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        raise Refused("completion.two-ends")
    end = st.submitted[link] + 1
    # ownership.finish_receive_writes
    st.moving[slot] = moving & ~bit
    if mask != 0:
        st.arrived[slot] = st.arrived[slot] | bit
    # completion.finish_receive_writes
    st.submitted[link] = end
    st.ended_on[slot] = link
    st.ended_at[slot] = end


def read(st, key, ref, bit, link):
    """
    Before a stream reads the output or the input gradient.

    Guards: ownership, completion.
    Writes: ownership, completion.
    """
    # ownership.read_guards
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    e = key.epoch
    c = key.cell
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    if mask == 0 or st.generation[slot] != ref.generation:
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")
    if bit != OUT_BIT and bit != GRAD_BIT or mask & bit == 0:
        raise Refused("ownership.no-such-reader")
    if bit == GRAD_BIT and mask & DGRAD_BIT != 0:
        raise Refused("ownership.read-before-dgrad")
    if moving & bit != 0:
        raise Refused("ownership.read-duplicate")
    # completion.read_guards
    s = key.stage
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.produced[slot]:
        raise Refused("completion.graph-to-caller")
    # ownership.read_writes
    st.moving[slot] = moving | bit
    # completion.read_writes
    st.undrained[d] = 1


def finish_read(st, key, ref, bit, link):
    """
    After the read has ended and the link's caller has waited for it. The tape's last consumer
    releases the slot.

    Guards: ownership, completion.
    Writes: ownership, capture, completion.
    """
    # ownership.finish_read_guards
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    e = key.epoch
    c = key.cell
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    now = st.generation[slot]
    then = ref.generation
    if (mask == 0 or now != then) and (mask != 0 or moving & bit == 0 or now != then + 1):
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")
    if bit != OUT_BIT and bit != GRAD_BIT or (mask | moving) & bit == 0:
        raise Refused("ownership.no-such-reader")
    if moving & bit == 0:
        raise Refused("ownership.read-not-begun")
    # completion.finish_read_guards
    s = key.stage
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.ended_on[slot] != link and st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        raise Refused("completion.two-ends")
    left = mask & ~bit
    p = st.pool_of[slot]
    end = st.submitted[link] + 1
    # ownership.finish_read_writes
    st.moving[slot] = moving & ~bit
    if mask != 0 and left == 0:
        st.slot_of[st.cell_at[slot]] = NO_SLOT
        st.consumers[slot] = 0
        st.arrived[slot] = 0
        st.generation[slot] = st.generation[slot] + 1
    else:
        st.consumers[slot] = left
    # capture.finish_read_writes
    if left == 0 and moving & ~bit & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1
    # completion.finish_read_writes
    st.submitted[link] = end
    st.ended_on[slot] = link
    st.ended_at[slot] = end

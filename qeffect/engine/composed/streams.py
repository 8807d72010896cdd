"""
The composed transitions submit, join, wait and drain.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

__all__ = ["drain", "join", "submit", "wait"]


def submit(st, link):
    """
    After the caller enqueued work that a later replay must come after.

    Guards: none.
    Writes: completion.
    """
    # completion.submit_writes
    st.submitted[link] = st.submitted[link] + 1


def join(st, link):
    """
    The graph stream waits for all work that the caller submitted.

    Guards: none.
    Writes: completion.
    """
    # completion.join_writes
    st.joined[link] = st.submitted[link]
    if st.caller_at[link] == st.updater[0]:
        st.unawaited[st.domain_at[link]] = 0


def wait(st, link):
    """
    The caller waits for all replays of the graph stream.

    Guards: none.
    Writes: completion.
    """
    d = st.domain_at[link]
    # completion.wait_writes
    st.waited[link] = st.replays[d]


def drain(st, domain):
    """
    The host has seen the domain's device work finish.

    Guards: none.
    Writes: completion.
    """
    # completion.drain_writes
    st.undrained[domain] = 0
    st.unawaited[domain] = 0

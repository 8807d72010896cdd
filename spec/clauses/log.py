"""
Event logs: what a runtime did, replayed through the same transitions.
"""

from __future__ import annotations

from .model import Clause, Part

_BEFORE = "Every event before this line was replayed and kept the contract."

PART = Part(
    name="log",
    title="Event logs",
    hidden="what a runtime did without asking",
    without="a run is believed because nobody can look at it again",
    holder="a JSON Lines log of every accepted transition, replayed through the same functions",
    intro="""\
No guard sees a runtime that acts without asking. A runtime therefore leaves a log: a header with
its configuration, one line per accepted transition with its arguments and result, and a closing
line with the number of events and a digest of the state that they led to. `event-log.schema.json`
is the format; fields marked `x-semantic` are those whose change changes what the log claims. Every
line ends in a digest of all bytes of the log before it. The digest finds damage, not forgery:
whoever rewrites a log can compute it anew, and then meets the clauses of parts 1 to 9.

A replayer rebuilds the memory from the header and runs the transition functions over the events. A
log is accepted when every event is, with the recorded result, and the final state is the recorded
one. Input that is not a log at all (binary, empty, malformed) is unusable, which is not a
refusal. A line has one spelling: no spaces, the schema's order of fields, printable names, the
configuration as a recorder describes it. Another spelling is no log, and neither is a header that
asks for more stages, slots, cells, links or destinations than a log may have.

Some changes leave a history that also keeps the contract, and only the digests tell: another name
for a caller, domain or pool, an argument of a part that is left out, a wait that nothing depends
on, or what a later restore undoes.""",
    clauses=(
        Clause(
            id="log.chain",
            number="10.1",
            title="No byte of a log has changed",
            invariant="Every line's digest is the digest of all bytes before it.",
            transitions=("replay",),
            argument="digest",
            unchanged=_BEFORE,
            section="design",
            cause="The line, or one before it, was edited, reordered, removed or damaged.",
            remedy="Take the log from its source again.",
        ),
        Clause(
            id="log.sequence",
            number="10.2",
            title="Events are numbered without gaps",
            invariant="The n-th event of a log has the sequence number n.",
            transitions=("replay",),
            argument="seq",
            unchanged=_BEFORE,
            section="design",
            cause="Lines were lost, repeated or merged from two processes.",
            remedy="Keep one log per process, and write it in order.",
        ),
        Clause(
            id="log.result",
            number="10.3",
            title="Checks return what was recorded",
            invariant="A replayed check issues the ticket that the log says it issued.",
            transitions=("replay",),
            argument="result",
            unchanged=_BEFORE,
            section="design",
            cause="An event before this one is missing, or was not recorded.",
            remedy="Attach the recorder before the first transition and leave it attached.",
        ),
        Clause(
            id="log.closing",
            number="10.4",
            title="A log is closed",
            invariant="The last line of a log is its closing line, with the number of its events, "
            "and nothing follows it.",
            transitions=("replay",),
            argument="events",
            unchanged=_BEFORE,
            section="design",
            cause="The process ended before it closed its log, or the end was cut off.",
            remedy="Close the recorder, also on an exception. What was replayed up to the break "
            "did keep the contract.",
        ),
        Clause(
            id="log.state",
            number="10.5",
            title="The events lead to the recorded state",
            invariant="The digest of the replayed state equals the one in the closing line.",
            transitions=("replay",),
            argument="state",
            unchanged="Every event of the log was replayed and kept the contract.",
            section="design",
            cause="The header's configuration or an event's argument is not what the runtime had.",
            remedy="Compare the header with the runtime's configuration.",
        ),
        Clause(
            id="log.incarnation",
            number="10.6",
            title="An incarnation begins once",
            invariant="The incarnation of a restore is none that the log has had before, in its "
            "header or by a restore.",
            transitions=("replay",),
            argument="incarnation",
            unchanged=_BEFORE,
            section="design",
            cause="An incarnation was kept and given to a later restore, which makes references "
            "of its first time valid again.",
            remedy="Leave it out: the contract draws a fresh random one.",
        ),
    ),
)

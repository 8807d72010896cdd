"""
Event logs: what a runtime did, replayed through the same transitions.
"""

from __future__ import annotations

from .model import Clause, Part

_BEFORE = "Every event before this line was replayed and accepted."

PART = Part(
    name="log",
    title="Event logs",
    hidden="actions that a runtime ran without a check",
    without="nobody can check afterwards what a run did",
    holder="a JSON Lines log of every accepted transition, replayed through the same functions",
    intro="""\
No guard sees an action that was never checked. A runtime therefore writes a log: a header with its
configuration, one line per accepted transition with its arguments and result, and a closing line.
The closing line has the number of events and a digest of the final state. `event-log.schema.json`
describes the format and marks fields as `x-semantic`: a changed semantic field changes what the log
claims. Every line ends in a digest of all bytes of the log before it. The digest finds damage, not
forgery: a forger can compute the digests anew, but the clauses of parts 1 to 9 still apply.

A contract can record the transitions of one step, and later commit an equal step in one call
(chapter *A step in one call*). The log of such a commit is one line, `repeat_step`, which names the
recorded step. The lines of the recorded step stand between `begin_step` and `keep_step` (or
`drop_step`, if the recording is not kept). For `repeat_step` the replayer runs each transition of
the recorded step again, with all guards; epochs, tokens and other counters in the arguments advance
with the step.

A replayer rebuilds the memory from the header and runs the transition functions over the events. A
log is accepted if every event is accepted with the recorded result, and the final state is the
recorded state. Input that is not a log (binary, empty, malformed) is reported as an error, not as a
refusal. Each line can be written in one way only: no spaces, the schema's order of fields,
printable names, the configuration as a recorder describes it. Any other line is rejected as
malformed. A header that configures more stages, slots, cells, links or destinations than a log may
have is malformed too.

After some changes to a log, its events still keep the contract, and only the digests reveal the
change. Examples: another name for a caller, domain or pool; an argument of a part that is left out;
a wait that nothing depends on; an event that a later restore undoes.""",
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
            cause="This line, or an earlier line, was edited, reordered, removed or damaged.",
            remedy="Copy the log from its source again.",
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
            invariant="A replayed check issues the ticket that the log records for it.",
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
            cause="The process ended before it closed its log, the end was cut off, or something "
            "was appended to the log.",
            remedy="Close the recorder, also on an exception, and keep each log in a file of its "
            "own. The events before the break were accepted.",
        ),
        Clause(
            id="log.state",
            number="10.5",
            title="The events lead to the recorded state",
            invariant="The digest of the replayed state equals the digest in the closing line.",
            transitions=("replay",),
            argument="state",
            unchanged="Every event of the log was replayed and accepted.",
            section="design",
            cause="The header's configuration or an event's argument differs from the runtime's.",
            remedy="Compare the header with the runtime's configuration.",
        ),
        Clause(
            id="log.incarnation",
            number="10.6",
            title="An incarnation begins once",
            invariant="The incarnation of a restore is new to the log: it occurs neither in the "
            "header nor in an earlier restore.",
            transitions=("replay",),
            argument="incarnation",
            unchanged=_BEFORE,
            section="design",
            cause="An incarnation was kept and passed to a later restore, which would make old "
            "references valid again.",
            remedy="Leave `incarnation` out: the contract draws a new random number.",
        ),
        Clause(
            id="log.step",
            number="10.7",
            title="A step committed in one call was recorded before",
            invariant="A `repeat_step` line names one of the last four steps that were kept in the "
            "same incarnation. Steps are recorded one after another, and each is kept or dropped "
            "before the log ends. A kept step has one commit, and consists only of transitions "
            "that may recur.",
            transitions=("replay",),
            argument="step",
            unchanged=_BEFORE,
            section="design",
            cause="The line names another step, or the lines that begin and keep the step are "
            "missing.",
            remedy="Write the log with the recorder of the contract that recorded the step.",
        ),
    ),
)

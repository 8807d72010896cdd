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
describes the format. The schema marks some fields as `x-semantic`: if such a field changes, the log
claims that something else happened. Every line ends in a digest of all bytes of the log before this
digest. The digests reveal damage but not forgery, because a forger can compute them anew. The
clauses of parts 1 to 9 still apply to a forged log.

A contract can record the transitions of one step, and later commit an equal step in one call
(chapter *A step in one call*). The log of such a commit is one line, `repeat_step`, which names the
recorded step. The lines of the recorded step stand between `begin_step` and `keep_step` (or
`drop_step`, if the recording is not kept). For each `repeat_step`, the replayer runs every
transition of the recorded step again, with all guards. It first advances the epochs, tokens and
other counters in the arguments to the values of the repeated step.

A replayer builds the contract's memory from the header, and then runs the transition functions over
the events. The replayer accepts a log if each event is accepted with the recorded result and the
final state is the recorded state. Input that is not a log (binary, empty, malformed) is reported as
an error, not as a refusal. Each line can be written in one way only: without spaces, with fields in
the schema's order, with printable names, and with the configuration as a recorder writes it. Any
other line is rejected as malformed. The number of stages, slots, cells, links and destinations in a
log is limited; a header that exceeds a limit is malformed too.

After some changes to a log, its events still keep all clauses, and only the digests reveal the
change. Such a change concerns, for example, the name of a caller, domain or pool, or an argument of
a part that is left out. It can also concern a wait that nothing depends on, or an event that a
later restore undoes.""",
    clauses=(
        Clause(
            id="log.chain",
            number="10.1",
            title="No byte of a log has changed",
            invariant="The digest at the end of each line is the digest of all bytes of the log "
            "before it.",
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
            invariant="The last line of a log is its closing line, which states the number of "
            "events. Nothing follows the closing line.",
            transitions=("replay",),
            argument="events",
            unchanged=_BEFORE,
            section="design",
            cause="The process ended before it closed its log, the end was cut off, or something "
            "was appended to the log.",
            remedy="Close the recorder, also after an exception, and keep each log in a file of "
            "its own. The events before the break were accepted.",
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
            cause="The configuration in the header, or an argument of an event, differs from what "
            "the runtime used.",
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
            cause="The caller kept an incarnation and passed it to a later restore. Old "
            "references would then be valid again.",
            remedy="Leave `incarnation` out: the contract draws a new random number.",
        ),
        Clause(
            id="log.step",
            number="10.7",
            title="A step committed in one call was recorded before",
            invariant="A `repeat_step` line names one of the last four steps that were kept in "
            "the same incarnation. Recordings do not overlap, and each is kept or dropped before "
            "the log ends. A kept step has one commit, and consists only of transitions that may "
            "recur.",
            transitions=("replay",),
            argument="step",
            unchanged=_BEFORE,
            section="design",
            cause="The named step was not kept or is not among the last four. Or the lines that "
            "begin and keep the step are missing.",
            remedy="Use one recorder for the whole log: the recorder of the contract that "
            "recorded the step.",
        ),
    ),
)

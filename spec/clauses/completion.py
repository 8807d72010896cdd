"""
Completion: a replay waits for its caller, and a consumer waits for the replay.
"""

from __future__ import annotations

from .model import Clause, Part

_STREAMS = "The contract's counters of all streams; nothing was enqueued."

PART = Part(
    name="completion",
    title="Completion",
    hidden="caller and graph streams",
    without="a replay reads inputs that are not there yet, or a consumer reads half-updated state",
    holder="a caller-to-graph wait before each replay, a graph-to-caller event before consumption",
    intro="""\
A replay returns to the host at once, before its output tensors are computed. Two waits on the
device make the outputs right: the graph stream waits for the caller's work before the replay, and
the caller waits for the graph's end before it uses an output. A *link* joins one caller stream and
one domain's graph stream. Per link, the contract counts the work that the caller submitted, and how
much of it the graph stream has waited for. The contract also counts each graph stream's replays
and, per link, how many of them the caller has waited for. Each missing wait has its own clause. A
stream that fills a slot must have waited for the replays of the slot's previous tape. The call that
ends a transfer names a link, and the end counts as work of that link's caller. So a replay neither
reads a message before it has arrived, nor overwrites a buffer that is still being read. The copy of
an input counts as work of the caller whose link the reservation names.

The optimizer's update is device work too. The update runs on the stream of the caller that its
check names, and that stream must have waited for every gradient. No graph stream reads the new
weights before it has waited for that stream, and no checkpoint is taken before the host has seen
the update finish.

An asynchronous save or a broadcast of parameters reads weights on a separate stream. The read
starts after the latest update, and the stream of the next update waits for the read's end. An
evaluation reads weights on the graph stream; the stream of the next update waits for it too.

The computation of a gradient norm, or a save, may read gradients on a separate stream. The read
starts once the gradients are final and every bucket is reduced. One caller's stream has waited for
the gradients and the reductions, and the read starts after the work of that stream. Before the next
update or walk, that stream and the graph stream wait for the read's end. So no update, no dW and no
reduction writes gradients that are being read.

The contract assumes that the host's order of calls is the order of enqueueing. The runtime must
really put the waits on the streams.""",
    clauses=(
        Clause(
            id="completion.wrong-stream",
            number="6.1",
            title="A link connects the action's own graph stream",
            invariant="The link that a call names belongs to the state domain of the call's stage.",
            transitions=(
                "check_refresh",
                "check_forward",
                "check_evaluation",
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
                "reserve",
                "post_receive",
                "finish_receive",
                "read",
                "finish_read",
                "finalize",
                "start_reduction",
                "finish_reduction",
                "start_weights_read",
                "finish_weights_read",
                "start_gradients_read",
                "finish_gradients_read",
            ),
            argument="link",
            unchanged=_STREAMS,
            section="IV-D",
            cause="With several domains, the default link 0 was used for a stage of another "
            "domain.",
            remedy="Ask `contract.link(caller, domain)` for the link.",
        ),
        Clause(
            id="completion.caller-to-graph",
            number="6.2",
            title="A replay waits for its caller",
            invariant="Before a replay, the graph stream has waited for all the work that the "
            "link's caller submitted.",
            transitions=(
                "check_refresh",
                "check_forward",
                "check_evaluation",
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
            ),
            argument="link",
            unchanged=_STREAMS,
            section="IV-D",
            cause="The caller enqueued input copies or an optimizer update after the graph "
            "stream's last wait_stream, so the replay could read its inputs too early.",
            remedy="Make the graph stream wait for the caller's stream before the replay, and "
            "call `join`.",
        ),
        Clause(
            id="completion.graph-to-caller",
            number="6.3",
            title="A consumer waits for the replay",
            invariant="The caller's stream has waited for the replay that produced the data, "
            "before that stream consumes the data.",
            transitions=("check_dgrad", "read", "finalize", "start_reduction"),
            argument="link",
            unchanged=_STREAMS,
            section="II-C",
            cause="The caller's stream did not wait for the event at the graph's tail before it "
            "sent an output, computed a gradient from the output, enqueued a reduction or ran the "
            "optimizer. A communication stream that waits for the default stream has not waited "
            "for the graph stream.",
            remedy="Make the caller's stream wait for the event recorded at the graph's tail, and "
            "call `wait`.",
        ),
        Clause(
            id="completion.slot-not-awaited",
            number="6.4",
            title="A slot is filled after its last tape's work",
            invariant="A stream that fills or receives into a slot has waited for every replay of "
            "the slot's last tape.",
            transitions=("reserve", "post_receive"),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="The commit of a dW freed the slot, but that dW may still read its input on the "
            "device. The receive was posted on a stream that had not waited for that dW.",
            remedy="Let the receiving stream wait for the graph stream after that dW, and call "
            "`wait` on the receive's link.",
        ),
        Clause(
            id="completion.transfer-to-graph",
            number="6.5",
            title="A replay waits for the slot's transfers",
            invariant="Before F, the graph stream has waited for the slot's latest event: the end "
            "of a transfer, or the copy of an input. The wait is required whichever link reported "
            "that end or copy. Before dI, the same wait is required if the stage receives its "
            "output's gradient.",
            transitions=("check_forward", "check_dgrad"),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="A transfer of the slot ended on another caller's stream, or a loader's "
            "stream copied the input, but only this caller's stream was joined.",
            remedy="Call `join` on the link that the transfer's end or the reservation named, or "
            "report the transfer's end on the link of F.",
        ),
        Clause(
            id="completion.two-ends",
            number="6.6",
            title="Ends of transfers are joined, or name the same stream",
            invariant="Each end of a transfer through a slot, and each copy of an input into the "
            "slot, names the same link as the slot's previous end or copy. Another link is "
            "accepted only after the graph stream has waited for that previous end or copy.",
            transitions=("reserve", "finish_receive", "finish_read"),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="Two sends from one slot ended on two streams, and no replay waited for the "
            "first. The contract remembers only the latest end per slot.",
            remedy="Name one link for both ends, or call `join` on the first link in between.",
        ),
        Clause(
            id="completion.wrong-consumer",
            number="6.7",
            title="One stream reads the gradients",
            invariant="In each epoch one stream, the optimizer's, waits for the last dW of every "
            "stage, for each reduction, and for each read of weights or gradients on another "
            "stream. `finalize` and the calls that finish a reduction or a read name that stream. "
            "A read of gradients starts after the work of that stream.",
            transitions=(
                "finalize",
                "finish_reduction",
                "finish_weights_read",
                "start_gradients_read",
                "finish_gradients_read",
            ),
            argument="link",
            unchanged=_STREAMS,
            section="II-C",
            cause="The optimizer runs on a stream that did not wait for the reduction: another "
            "stream waited, for example the default or the communication stream.",
            remedy="Let the optimizer's stream wait for every graph stream and for each "
            "reduction's handle, and name its links in `finalize` and in `finish_reduction`.",
        ),
        Clause(
            id="completion.update-stream",
            number="6.8",
            title="The update runs on the stream that waited for the gradients",
            invariant="The update runs on the stream that waited for every gradient. So the check "
            "of the update names the same caller as `finalize`.",
            transitions=("check_update",),
            argument="caller",
            unchanged="The weight epoch.",
            section="II-C",
            cause="The stream that `finalize` named waited for the gradients, but the optimizer "
            "runs on another stream that did not. The optimizer may read gradients that are still "
            "being written, and overwrite weights that are still being read.",
            remedy="Name the stream that waited for the gradients (the caller of the links in "
            "`finalize`) as `caller` of `update`, `check_update` or `commit_epoch`, and run the "
            "optimizer on that stream.",
        ),
        Clause(
            id="completion.update-to-graph",
            number="6.9",
            title="Weights are read after the optimizer's update",
            invariant="Before a refresh, an F or an evaluation, the graph stream has waited for "
            "the optimizer's latest update, whichever stream ran the update. No wait is "
            "needed if the host has seen the update finish.",
            transitions=("check_refresh", "check_forward", "check_evaluation"),
            argument="link",
            unchanged=_STREAMS,
            section="IV-D",
            cause="The epoch was committed, but the graph stream did not wait for the update: "
            "the weights could be quantized or used while the optimizer still writes them.",
            remedy="After the commit, make each graph stream wait for the optimizer's stream, and "
            "call `join` on that caller's link of the domain.",
        ),
        Clause(
            id="completion.weights-in-use",
            number="6.10",
            title="Weights are not updated while they are read",
            invariant="No update begins while a separate stream reads a stage's weights.",
            transitions=("check_update",),
            argument="",
            unchanged="The weights, and the reads under way.",
            section="design",
            cause="An asynchronous save or a broadcast of parameters still reads the weights that "
            "the optimizer is about to write: the copy mixes two epochs.",
            remedy="Make the update's stream wait for the reader, and call `finish_weights_read`.",
        ),
        Clause(
            id="completion.second-reader",
            number="6.11",
            title="A stage's weights have one reader at a time, and so do its gradients",
            invariant="A read of a stage's weights starts only after the previous read of these "
            "weights has ended. Reads of the stage's gradients follow the same rule.",
            transitions=("start_weights_read", "start_gradients_read"),
            argument="stage",
            unchanged=_STREAMS,
            section="design",
            cause="A second save began before the first ended, or a save and another kind of "
            "reader overlap.",
            remedy="End the first read, or let one stream wait for both readers and report them as "
            "one.",
        ),
        Clause(
            id="completion.not-reading",
            number="6.12",
            title="A read ends only after it was started",
            invariant="The end of a read of a stage's weights or gradients is accepted only after "
            "that read was started, and only once.",
            transitions=("finish_weights_read", "finish_gradients_read"),
            argument="stage",
            unchanged=_STREAMS,
            section="design",
            cause="The end was reported twice, or a restore came between start and end.",
            remedy="Call `start_weights_read`, then `finish_weights_read`, once each; likewise "
            "`start_gradients_read`, then `finish_gradients_read`.",
        ),
        Clause(
            id="completion.update-to-reader",
            number="6.13",
            title="Weights are read on other streams after the update",
            invariant="A read of weights names a link, and starts after the work of the link's "
            "caller. This caller's stream either ran the optimizer's latest update, or has waited "
            "for the link's graph stream since that update. The wait counts only if the graph "
            "stream had already waited for the update, or the host had seen the update finish.",
            transitions=("start_weights_read",),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="The reader's stream was not made to wait for the optimizer's stream: the copy "
            "holds weights of two epochs.",
            remedy="Make the reader's stream wait for the optimizer's stream, or call `join` on "
            "the optimizer's link and then `wait` on the reader's link.",
        ),
        Clause(
            id="completion.evaluation-not-awaited",
            number="6.14",
            title="Weights are not updated while an evaluation reads them",
            invariant="Before an update, the update's stream has waited for the replays of all "
            "evaluations, in every state domain. The commit of an evaluation says that its work "
            "was enqueued, not that the work is done.",
            transitions=("check_update",),
            argument="",
            unchanged="The weights, which the evaluation may still read.",
            section="IV-D",
            cause="An evaluation was enqueued on the graph stream after the optimizer's stream had "
            "waited for the gradients: the optimizer may overwrite weights that the evaluation "
            "still reads.",
            remedy="After the evaluation make the optimizer's stream wait for the graph stream, "
            "and call `wait` on its link of the evaluation's domain.",
        ),
        Clause(
            id="completion.gradients-in-use",
            number="6.15",
            title="Gradients are not overwritten while they are read",
            invariant="No update and no further walk (pass over the microbatches) begins while a "
            "separate stream reads a stage's gradients. The reason: an update may scale gradients "
            "in place, and each dW of the next walk or epoch writes them.",
            transitions=("next_walk", "check_update"),
            argument="",
            unchanged="The gradients, and the reads under way.",
            section="design",
            cause="A norm or a save still reads the gradients that the optimizer or the next dW is "
            "about to write.",
            remedy="Make the update's stream and the stage's graph stream wait for the reader, and "
            "call `finish_gradients_read`.",
        ),
    ),
)

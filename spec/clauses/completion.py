"""
Completion: a replay waits for its caller, and a consumer waits for the replay.
"""

from __future__ import annotations

from .model import Clause, Part

_STREAMS = "The contract's counters of all streams. Nothing was enqueued."

PART = Part(
    name="completion",
    title="Completion",
    hidden="caller and graph streams",
    without="a replay reads inputs that have not arrived, or a consumer reads half-written results",
    holder="counters that show two waits: the graph stream waits for the caller before each "
    "replay, and the caller waits for the graph stream before it uses a result",
    intro="""\
A replay returns to the host at once, before its output tensors are computed. Two waits on the
device make the outputs right. The graph stream waits for the caller's work before the replay, and
the caller waits for the end of the graph before it uses an output. Here, *the caller* is a stream
of the training loop. A *link* is a pair of one caller stream and one domain's graph stream. Per
link, the contract counts the work that the caller submitted, and how much of this work the graph
stream has waited for. The contract also counts each graph stream's replays and, per link, the
replays that the caller has waited for. Each kind of missing wait has a clause of its own. A stream
that fills a slot must have waited for the replays of the slot's previous tape. The call that ends a
transfer names a link, and the end counts as work of that link's caller. So a replay does not read a
message before the message has arrived, and does not overwrite a buffer that is still being read. If
an input is copied into a slot, the reservation names a link, and the copy counts as work of that
link's caller.

The optimizer's update is device work too. The check of the update names the caller stream on which
the update runs. That stream must have waited for every gradient. A graph stream reads the new
weights only after it has waited for that stream. A checkpoint is taken only after the host has seen
the update finish.

An asynchronous save or a broadcast of parameters reads weights on a separate stream. The read
starts after the latest update, and the stream of the next update waits for the end of the read. An
evaluation reads weights on the graph stream. The stream of the next update waits for the
evaluation, too.

The computation of a gradient norm, or a save, may read gradients on a separate stream. The read
starts once the gradients are final and every bucket is reduced. It starts after the work of the
caller stream that waited for the gradients and the reductions. Before the next update or walk, this
caller stream and the graph stream wait for the end of the read. So no update, dW or reduction
writes gradients that are being read.

The contract assumes that the host enqueues work in the order of its calls. The contract only counts
waits; the runtime must enqueue them on the streams.""",
    clauses=(
        Clause(
            id="completion.wrong-stream",
            number="6.1",
            title="A link connects the action's own graph stream",
            invariant="A link is a pair of a caller stream and a domain's graph stream. The link "
            "that a call names belongs to the state domain of the call's stage.",
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
            cause="The process has several domains, and the caller used the default link 0 for a "
            "stage of another domain.",
            remedy="Get the link from `contract.link(caller, domain)`.",
        ),
        Clause(
            id="completion.caller-to-graph",
            number="6.2",
            title="A replay waits for its caller",
            invariant="A replay is accepted only if the graph stream has waited for all work that "
            "the link's caller stream submitted.",
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
            "stream's last `wait_stream`. So the replay could read its inputs too early.",
            remedy="Make the graph stream wait for the caller's stream before the replay, and "
            "report the wait by `join`.",
        ),
        Clause(
            id="completion.graph-to-caller",
            number="6.3",
            title="A consumer waits for the replay",
            invariant="A caller's stream uses the result of a replay only after that stream has "
            "waited for the replay.",
            transitions=("check_dgrad", "read", "finalize", "start_reduction"),
            argument="link",
            unchanged=_STREAMS,
            section="II-C",
            cause="The caller's stream sent an output, computed a gradient from an output, "
            "enqueued a reduction or ran the optimizer. But it had not waited for the event at "
            "the end of the graph. A communication stream that waits only for the default stream "
            "has not waited for the graph stream.",
            remedy="Make the caller's stream wait for the event that is recorded at the end of "
            "the graph, and report the wait by `wait`.",
        ),
        Clause(
            id="completion.slot-not-awaited",
            number="6.4",
            title="A slot is filled after the work of its previous tape",
            invariant="A stream writes or receives an input into a slot only after it has waited "
            "for every replay of the slot's previous tape.",
            transitions=("reserve", "post_receive"),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="The receive was posted on a stream that had not waited for the previous tape's "
            "dW. The commit of that dW freed the slot, but the dW may still read the slot on the "
            "device.",
            remedy="Make the receiving stream wait for the graph stream after that dW, and call "
            "`wait` on the receive's link.",
        ),
        Clause(
            id="completion.transfer-to-graph",
            number="6.5",
            title="A replay waits for the slot's transfers",
            invariant="F runs only after the graph stream has waited for the end of the slot's "
            "latest transfer, or for the copy of the input. This holds for whichever link "
            "reported that end or copy. In a stage that receives its output's gradient, dI "
            "requires the same wait.",
            transitions=("check_forward", "check_dgrad"),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="A transfer of the slot ended on another caller's stream, or a data loader's "
            "stream copied the input. But the graph stream waited only for this caller's stream.",
            remedy="Call `join` on the link that the end of the transfer, or the reservation, "
            "named. Or report the end of the transfer on the link of F.",
        ),
        Clause(
            id="completion.two-ends",
            number="6.6",
            title="A slot's transfers end on one link, or with a wait in between",
            invariant="Each end of a transfer through a slot, and each copy of an input into the "
            "slot, is reported on a link. It names the same link as the slot's previous end or "
            "copy. Another link is accepted only after the graph stream has waited for that "
            "previous end or copy.",
            transitions=("reserve", "finish_receive", "finish_read"),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="Two sends from one slot ended on two streams, and no replay waited for the "
            "first send. The contract remembers only the latest end per slot.",
            remedy="Name one link for both ends, or call `join` on the first link between the two "
            "ends.",
        ),
        Clause(
            id="completion.wrong-consumer",
            number="6.7",
            title="One stream reads the gradients",
            invariant="In each epoch, one stream (the optimizer's) waits for the last dW of every "
            "stage, for each reduction, and for each read of weights or gradients on another "
            "stream. `finalize`, and the calls that end a reduction or a read, name this stream. "
            "A read of gradients starts after the work of this stream.",
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
            cause="The optimizer runs on a stream that did not wait for the reduction. Another "
            "stream waited, for example the default stream or the communication stream.",
            remedy="Make the optimizer's stream wait for every graph stream and for each "
            "reduction's handle. Name the links of this stream in `finalize` and in "
            "`finish_reduction`.",
        ),
        Clause(
            id="completion.update-stream",
            number="6.8",
            title="The update runs on the stream that waited for the gradients",
            invariant="The optimizer's update runs on the stream that waited for every gradient. "
            "So the check of the update names the same caller as `finalize`.",
            transitions=("check_update",),
            argument="caller",
            unchanged="The weight epoch.",
            section="II-C",
            cause="The optimizer runs on another stream than `finalize` named, and this other "
            "stream did not wait for the gradients. The optimizer may read gradients that are "
            "still being written, and overwrite weights that are still being read.",
            remedy="Run the optimizer on the stream that waited for the gradients (the caller of "
            "the links in `finalize`). Pass this stream as the argument `caller` of `update`, "
            "`check_update` or `commit_epoch`.",
        ),
        Clause(
            id="completion.update-to-graph",
            number="6.9",
            title="Weights are read after the optimizer's update",
            invariant="A refresh, an F or an evaluation is accepted only after the graph stream "
            "has waited for the optimizer's latest update, on whichever stream the update ran. No "
            "wait is needed if the host has seen the update finish.",
            transitions=("check_refresh", "check_forward", "check_evaluation"),
            argument="link",
            unchanged=_STREAMS,
            section="IV-D",
            cause="The epoch was committed, but the graph stream did not wait for the update. So "
            "the weights could be quantized or used while the optimizer still writes them.",
            remedy="After the commit, make each graph stream wait for the optimizer's stream. "
            "Call `join` on the link of these two streams.",
        ),
        Clause(
            id="completion.weights-in-use",
            number="6.10",
            title="Weights are not updated while they are read",
            invariant="No update of the weights begins while a separate stream reads a stage's "
            "weights.",
            transitions=("check_update",),
            argument="",
            unchanged="The weights, and the reads under way.",
            section="design",
            cause="An asynchronous save or a broadcast of parameters still reads the weights that "
            "the optimizer is about to write. The copy would mix the weights of two epochs.",
            remedy="Make the update's stream wait for the reading stream, and call "
            "`finish_weights_read`.",
        ),
        Clause(
            id="completion.second-reader",
            number="6.11",
            title="A stage's weights or gradients have one reader at a time",
            invariant="A read of a stage's weights starts only after the previous read of these "
            "weights has ended. The same rule holds for reads of the stage's gradients.",
            transitions=("start_weights_read", "start_gradients_read"),
            argument="stage",
            unchanged=_STREAMS,
            section="design",
            cause="A second save began before the first save ended. Or a save overlaps with "
            "another kind of reader.",
            remedy="End the first read before the second starts. Or make one stream wait for both "
            "readers, and report the two reads as one.",
        ),
        Clause(
            id="completion.not-reading",
            number="6.12",
            title="A read ends only after it was started",
            invariant="The end of a read of a stage's weights or gradients is accepted only once, "
            "after the start of that read.",
            transitions=("finish_weights_read", "finish_gradients_read"),
            argument="stage",
            unchanged=_STREAMS,
            section="design",
            cause="The end was reported twice. Or a restore happened between the start and the "
            "end.",
            remedy="For each read of weights, call `start_weights_read` and then "
            "`finish_weights_read`, once each. For gradients, call `start_gradients_read` and "
            "then `finish_gradients_read`.",
        ),
        Clause(
            id="completion.update-to-reader",
            number="6.13",
            title="Weights are read on other streams after the update",
            invariant="A read of weights names a link, and starts after the work of the link's "
            "caller stream. Either this caller stream ran the optimizer's latest update, or it "
            "has waited for the link's graph stream since that update. Such a wait counts only if "
            "the graph stream itself had waited for the update before, or if the host had seen "
            "the update finish.",
            transitions=("start_weights_read",),
            argument="link",
            unchanged=_STREAMS,
            section="design",
            cause="The reader's stream did not wait for the optimizer's stream. The copy then "
            "mixes the weights of two epochs.",
            remedy="Make the reader's stream wait for the optimizer's stream. Or make it wait "
            "through the graph stream: call `join` on the optimizer's link, then `wait` on the "
            "reader's link.",
        ),
        Clause(
            id="completion.evaluation-not-awaited",
            number="6.14",
            title="Weights are not updated while an evaluation reads them",
            invariant="An update begins only after its stream has waited for the replays of all "
            "evaluations, in every state domain. The commit of an evaluation says only that the "
            "work was enqueued, not that the work is done.",
            transitions=("check_update",),
            argument="",
            unchanged="The weights, which the evaluation may still read.",
            section="IV-D",
            cause="An evaluation was enqueued on the graph stream after the optimizer's stream "
            "had waited for the gradients. So the optimizer may overwrite weights that the "
            "evaluation still reads.",
            remedy="After the evaluation, make the optimizer's stream wait for the graph stream. "
            "Call `wait` on the link of these two streams.",
        ),
        Clause(
            id="completion.gradients-in-use",
            number="6.15",
            title="Gradients are not overwritten while they are read",
            invariant="While a separate stream reads a stage's gradients, no update begins, and "
            "no further walk (pass over the microbatches) begins. The reason: an update may scale "
            "gradients in place, and each dW of the next walk or epoch writes them.",
            transitions=("next_walk", "check_update"),
            argument="",
            unchanged="The gradients, and the reads under way.",
            section="design",
            cause="The computation of a norm, or a save, still reads the gradients that the "
            "optimizer or the next dW is about to write.",
            remedy="Make both the update's stream and the stage's graph stream wait for the "
            "reading stream. Then call `finish_gradients_read`.",
        ),
    ),
)

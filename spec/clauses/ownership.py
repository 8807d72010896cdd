"""
Ownership: each retained tape has one key, one slot and one generation.
"""

from __future__ import annotations

from .model import Clause, Part

_TENANT = "The slot, its tape and generation, and the actions that the tape still waits for."
_POOL = "Every slot. No slot is claimed, and every live tape keeps its slot."
_FLIGHT = "The action in flight, with its reservation and its tape."

PART = Part(
    name="ownership",
    title="Ownership",
    hidden="the work that a dI leaves for its dW",
    without="a dW consumes another microbatch's work, or reads a slot that already holds the next "
    "tape",
    holder="a map from `TapeKey` to `TapeRef`; per slot, a mask of the unfinished consumers, and "
    "a generation that rises at every release",
    intro="""\
A forward leaves a *tape*. The tape holds saved activations and, after dI, the deferred
weight-gradient work. A key, `TapeKey(epoch, stage, microbatch, block, invocation)`, names the tape;
a key without its epoch is a *cell*. A reference, `TapeRef(slot, generation, incarnation)`, tells
where the tape is. The slot is a place in a bounded pool. Each slot has a *generation*, a counter
that rises by one at each release, never at allocation. The reference has the generation at which
the slot took the tape. The incarnation is a random number that the contract draws when it is built,
and again at every restore. Captured graphs replay over fixed addresses, so one slot serves many
keys in turn. The address therefore does not show which microbatch's work it holds.

A tape is *live* while it occupies a slot. Its *consumers* are the actions that use the tape: dI,
dW, and the configured readers of the output and of the input gradient. Each slot has a mask (a set
of bits) of the consumers that have not finished. The slot is free when the mask is empty, so the
last consumer's commit releases the slot. An abort of the tape, or a purge (an abort of every tape
of an epoch), releases the slot early. An occupied slot is never given to another tape. Every
consumer presents the key *and* the reference, and both must name the same live tape.

A *transfer* is a receive into a slot (from `post_receive` to `finish_receive`) or a read from a
slot (from `read` to `finish_read`). In a stage that receives messages, F and dI run only on
messages that arrived for their own key. When a tape is aborted, its transfers continue. Until they
have ended, the slot takes no new tape. The call that ends a transfer presents the same key and
reference as the call that began it. `finish_receive` on a live tape states that the whole message
has arrived. If a message can no longer arrive, the caller first drops (aborts) the tape, so that no
action uses the tape. The caller then still calls `finish_receive`: on a dropped tape, this
call states only that the receive has ended. At most one read of a tape's output is under way at any
time, and at most one read of its input gradient.

In some stages, a stream of the training loop copies the input into the slot. Such a stage declares
`copies_input`. The caller then reserves the slot for the key, names a link in the reservation, and
enqueues the copy on the link's caller stream. F runs only in a slot that its key has reserved.

A stage may declare that its output is the input of another stage of the same process (`feeds`). The
feeding stage is the *source*, and the fed stage the *target*. For each microbatch, the target runs
F only while the source's tape is live, and the source runs dI only after the target's dI. If the
two stages exchange messages, a receive ends only after the sending stage's read began.

A check reserves the slot and returns a *ticket*, the next serial number. A commit or an abort
redeems the ticket, once. Until then the ticket is *outstanding*, and every other action on the slot
is refused.""",
    clauses=(
        Clause(
            id="ownership.pool-exhausted",
            number="1.1",
            title="Live tapes are bounded by the pool",
            invariant="A reservation takes a free slot of the stage. An F takes the slot that its "
            "key reserved, or else a free slot of the stage. If a free slot is needed and the "
            "stage has none, the call is refused.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_POOL,
            section="III-A",
            cause="The schedule keeps more tapes live than the stage has slots. Either forwards "
            "run too far ahead of their dI and dW, or an earlier tape was never consumed.",
            remedy="Give the stage as many slots as its schedule keeps tapes live at once "
            "(`qeffect plan` prints this number). Or look for a dW that was never committed, or "
            "for a read of a tape that never ended.",
        ),
        Clause(
            id="ownership.foreign-slot",
            number="1.2",
            title="Slots belong to stages",
            invariant="A reservation or an F names only a slot of the key's own stage.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_POOL,
            section="III-A",
            cause="The caller counted slots from the first slot of the stage, but the contract "
            "numbers the slots of all stages of the process in one sequence. Or the caller "
            "computed the index for another chunk of this rank.",
            remedy="Let the contract choose the slot, or add the index of the stage's first slot.",
        ),
        Clause(
            id="ownership.slot-busy",
            number="1.3",
            title="An occupied slot is never preempted",
            invariant="A slot takes a new tape only after every consumer of the old tape has "
            "finished, or after the old tape was aborted. A reserved slot takes only a tape of "
            "the key that reserved it.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_TENANT,
            section="III-A",
            cause="The runtime picks slots itself, for example as the microbatch modulo the "
            "pool's size. A delayed dW still needs the picked slot.",
            remedy="Let the contract choose a free slot. If the runtime must pick slots, provide "
            "one slot for every tape that the schedule keeps live at once.",
        ),
        Clause(
            id="ownership.key-live",
            number="1.4",
            title="A key has at most one tape",
            invariant="A cell (a key without its epoch) has at most one live tape. While a cell "
            "has a live tape, it gets no second tape, and cannot be left out of a walk over the "
            "microbatches.",
            transitions=("reserve", "skip", "check_forward"),
            argument="key",
            unchanged=_TENANT,
            section="III-A",
            cause="The caller ran F, or reserved a slot, a second time for the same microbatch, "
            "block and invocation while the first tape was live. Often, two uses of a block share "
            "one invocation number.",
            remedy="Give each invocation of a block within a microbatch its own number, or finish "
            "or abort the first tape before the second forward.",
        ),
        Clause(
            id="ownership.repeated-forward",
            number="1.5",
            title="A key's forward runs once per walk",
            invariant="A key's forward is accepted once per walk (a pass over the microbatches of "
            "an epoch), even after its tape was released or aborted.",
            transitions=("reserve", "check_forward"),
            argument="key",
            unchanged=_POOL,
            section="design",
            cause="The caller ran a microbatch again after it had finished or failed. Or "
            "activation recomputation ran F again under the same key. A second F would roll "
            "(shift) the amax history twice.",
            remedy="Recompute activations while the key's dI runs, after the check of dI and "
            "before its commit. Use the scales that F of the same key used, and record no amax in "
            "the recomputation. dI then reports one scaling update, and that it used the scales "
            "of that F. For a forward that only evaluates, call `check_evaluation`. To repeat a "
            "failed microbatch, restore the last commit, then run the whole epoch again.",
        ),
        Clause(
            id="ownership.generation-exhausted",
            number="1.6",
            title="Generations never wrap",
            invariant="A slot takes no new tape once its generation has reached the counter's "
            "maximum. So no release can wrap the counter.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_POOL,
            section="design",
            cause="The configured maximum of the generation is lower than the number of tapes "
            "that a slot serves. A 64-bit counter suffices for any run.",
            remedy="Configure a higher `generation_max`. Or restore a checkpoint: every "
            "generation then starts again at zero, in a new incarnation.",
        ),
        Clause(
            id="ownership.in-flight",
            number="1.7",
            title="One action at a time on a slot",
            invariant="While an action on a slot is in flight (its ticket is outstanding), no "
            "other action touches the slot, and no restore happens.",
            transitions=(
                "check_forward",
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
                "post_receive",
                "finish_receive",
                "read",
                "finish_read",
                "drop",
                "restore",
            ),
            argument="ref.slot",
            unchanged=_FLIGHT,
            section="design",
            cause="An action was checked, but neither committed nor aborted. For example, an "
            "exception was raised between check and commit, or two host threads drive one stage.",
            remedy="Use the contract's context managers, which abort on an exception. Without "
            "them, commit or abort the ticket on every code path.",
        ),
        Clause(
            id="ownership.foreign-incarnation",
            number="1.8",
            title="References do not outlive their process",
            invariant="A reference is accepted only in the incarnation that issued it: in the same "
            "process, until the next restore.",
            transitions=(
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
                "ungroup_wgrad",
                "post_receive",
                "finish_receive",
                "read",
                "finish_read",
                "drop",
            ),
            argument="ref.incarnation",
            unchanged=_TENANT,
            section="design",
            cause="A queue, a pickle or other saved values kept a reference from before a "
            "restore, or from another process. Slot and generation alone could match by accident, "
            "because generations start again at zero after a restore.",
            remedy="Drop every reference at a restore and run the forwards of the epoch again.",
        ),
        Clause(
            id="ownership.stale-reference",
            number="1.9",
            title="A reference is valid as long as its tape exists",
            invariant="A reference is accepted only while its slot is occupied and still has the "
            "reference's generation. Two calls are accepted even after the tape was aborted or "
            "dropped. The first ends a transfer of the tape. The second takes the tape out of a "
            "grouped dW (one matrix product for several tapes).",
            transitions=(
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
                "ungroup_wgrad",
                "post_receive",
                "finish_receive",
                "read",
                "finish_read",
                "drop",
            ),
            argument="ref.generation",
            unchanged=_TENANT,
            section="III-A",
            cause="The tape was released, aborted or purged, and its slot may have been given to "
            "another microbatch. The caller kept the old reference, or consumed the tape twice.",
            remedy="Keep the key together with the reference that the forward's commit returned, "
            "and drop the reference after the last consumer.",
        ),
        Clause(
            id="ownership.wrong-key",
            number="1.10",
            title="Key and reference name one tape",
            invariant="The key that a call presents is the key of the tape in the reference's "
            "slot.",
            transitions=(
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
                "ungroup_wgrad",
                "post_receive",
                "finish_receive",
                "read",
                "finish_read",
                "drop",
            ),
            argument="key",
            unchanged=_TENANT,
            section="IV-B",
            cause="The runtime paired dW with another microbatch's work. It took the oldest entry "
            "of a queue, or the work of the stage's latest dI, instead of the key's own work. "
            "Both choices fail if dW runs in another order than dI, as in the schedule ZB-V.",
            remedy="Let dW find its deferred work by key. To test a pairing rule, such as first "
            "in, first out, run `qeffect check --pairing fifo` on your schedule. The command "
            "names a dW that would get the wrong work.",
        ),
        Clause(
            id="ownership.not-forwarded",
            number="1.11",
            title="Backward runs after its forward was committed",
            invariant="dI, dW and the receive of a gradient are accepted only after the forward "
            "of their tape was committed.",
            transitions=("check_dgrad", "check_wgrad", "post_receive"),
            argument="key",
            unchanged="The reservation and its slot.",
            section="III-A",
            cause="The slot was only reserved, to receive an input. The forward has not run yet.",
            remedy="Run and commit the forward of this key first.",
        ),
        Clause(
            id="ownership.duplicate-dgrad",
            number="1.12",
            title="A tape's dI runs once",
            invariant="A tape's dI is accepted only while the tape still waits for its dI.",
            transitions=("check_dgrad",),
            argument="key",
            unchanged="The tape, which still waits for its dW, and the effect token (the domain's "
            "count of F and dI).",
            section="III-A",
            cause="The schedule or a retry ran dI of this microbatch twice. A second dI would "
            "roll (shift) the gradients' amax history again, and queue the deferred work twice.",
            remedy="Remove the repeated dI. After a failed dI, abort the epoch instead of running "
            "dI again.",
        ),
        Clause(
            id="ownership.wgrad-before-dgrad",
            number="1.13",
            title="A tape's dW runs after its own dI",
            invariant="A tape's dW is accepted only after that tape's dI was committed.",
            transitions=("check_wgrad", "group_wgrad"),
            argument="key",
            unchanged="The tape, which still waits for dI and dW, and its destinations.",
            section="III-A",
            cause="dW was scheduled before the dI of its microbatch, or that dI was checked but "
            "not yet committed. The dI of another microbatch does not help, because it queued "
            "other work.",
            remedy="Run and commit dI of this key before its dW.",
        ),
        Clause(
            id="ownership.duplicate-wgrad",
            number="1.14",
            title="A tape's dW runs once",
            invariant="A tape's dW is accepted only while the tape still waits for its dW. It is "
            "refused if a grouped dW (one matrix product for several tapes) has already taken the "
            "tape.",
            transitions=("check_wgrad", "group_wgrad"),
            argument="key",
            unchanged="The tape, and every gradient already written.",
            section="III-A",
            cause="The tape's dW has already run, and only an unfinished read of the output or "
            "input gradient keeps the tape live. Or a grouped dW has already taken the tape, or "
            "names the tape twice.",
            remedy="Remove the repeated dW. It would add the gradient a second time.",
        ),
        Clause(
            id="ownership.work-not-queued",
            number="1.15",
            title="dI queues the deferred work",
            invariant="dI commits only if it queued deferred work exactly once for every matrix "
            "of its stage.",
            transitions=("commit_dgrad",),
            argument="queued",
            unchanged="The whole state. The public API then aborts the tape, because its dI has "
            "already run on the device.",
            section="IV-A",
            cause="A module does not defer its weight gradient. Or another slot's WeightGradStore "
            "(Transformer Engine's queue of deferred work) was installed when the forward ran, so "
            "the work went to that store.",
            remedy="Install the slot's own stores before F. After dI, report each matrix for "
            "which a store has an entry.",
        ),
        Clause(
            id="ownership.matrix-coverage",
            number="1.16",
            title="dW covers every matrix once",
            invariant="dW commits only if it produced the gradient of every matrix of its stage "
            "exactly once. This also holds without an arena (preallocated gradient buffers), "
            "where the caller copies the gradients out of dW.",
            transitions=("commit_wgrad", "ungroup_wgrad"),
            argument="covered",
            unchanged="The whole state. The public API then aborts the tape, because its dW has "
            "already run on the device.",
            section="IV-A",
            cause="A WeightGradStore (Transformer Engine's queue of deferred work) was drained "
            "only in part, or twice. For example, LayerNormMLP puts two entries into one store.",
            remedy="Drain every entry of the slot's stores, and report each matrix as often as its "
            "gradient was written.",
        ),
        Clause(
            id="ownership.no-such-reader",
            number="1.17",
            title="Readers are configured, and finish once",
            invariant="A tape is read only by a reader that is configured for its stage. Each "
            "reader (of the output, or of the input gradient) finishes once, and reads no more "
            "afterwards.",
            transitions=("read", "finish_read"),
            argument="bit",
            unchanged=_TENANT,
            section="design",
            cause="The stage was configured without `sends_output` or `sends_gradient`, or this "
            "reader has already finished.",
            remedy="Configure the reader. Call `finish_read` only once, when the send has "
            "completed.",
        ),
        Clause(
            id="ownership.read-before-dgrad",
            number="1.18",
            title="An input gradient is read after dI",
            invariant="A tape's input gradient is read only after its dI was committed.",
            transitions=("read",),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The send of an input gradient was posted before dI of that microbatch. The "
            "buffer still held the gradient of the slot's previous tape.",
            remedy="Post the send after dI's commit.",
        ),
        Clause(
            id="ownership.read-duplicate",
            number="1.19",
            title="A buffer has one read at a time",
            invariant="A read of a tape's output, or of its input gradient, begins only if no "
            "read of the same buffer is under way. The contract counts one read per buffer. With "
            "two reads, the end of the first would free the slot while the second still runs.",
            transitions=("read",),
            argument="bit",
            unchanged=_TENANT + " The read under way continues as well.",
            section="design",
            cause="The send was posted twice. Or two streams read one buffer, and the caller "
            "reported a read for each.",
            remedy="Post one send. If several streams read, call `read` once before the first "
            "stream begins. Call `finish_read` once after the last stream has ended, on a stream "
            "that waited for all of them.",
        ),
        Clause(
            id="ownership.transfer-in-flight",
            number="1.20",
            title="A transfer keeps its slot",
            invariant="A slot takes a new tape only if no transfer into or out of the slot is "
            "under way, even if the old tape was aborted. F runs only if no receive of its input "
            "is under way. dI runs only if no receive of its output's gradient is under way.",
            transitions=("reserve", "check_forward", "check_dgrad"),
            argument="slot",
            unchanged="The transfer under way, and the slot that the transfer keeps occupied.",
            section="design",
            cause="The caller posted a receive and did not wait for it. Or the slot's last tape "
            "was aborted while a send still read the slot.",
            remedy="Wait for the transfer, then call `finish_receive` or `finish_read`.",
        ),
        Clause(
            id="ownership.receive-missing",
            number="1.21",
            title="F and dI use a message that was received",
            invariant="In a stage that receives its input, F runs only after the receive of the "
            "key's input has ended. In a stage that receives its output's gradient, dI runs only "
            "after the receive of that gradient has ended. In a stage whose input is copied into "
            "the slot, F runs only in a slot that its key has reserved.",
            transitions=("check_forward", "check_dgrad"),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The receive or the copy was left out of the schedule, or was made for another "
            "microbatch. The buffer still holds the input of the slot's previous tape.",
            remedy="Before F, reserve the key's slot, post the receive into this slot, and wait "
            "for the receive. Before dI, post the receive of the gradient, and wait for it. If "
            "the input is copied, reserve the key's slot, and name the link of the stream that "
            "makes the copy.",
        ),
        Clause(
            id="ownership.no-such-receive",
            number="1.22",
            title="Receives are configured",
            invariant="A message is received only if the stage is configured to receive it.",
            transitions=("post_receive",),
            argument="message",
            unchanged=_TENANT,
            section="design",
            cause="The stage was configured without `receives_input` or `receives_gradient`. Such "
            "a stage is the first or last of the pipeline, or its neighbour is on the same rank.",
            remedy="Configure the receive, or remove it.",
        ),
        Clause(
            id="ownership.receive-duplicate",
            number="1.23",
            title="A message is received once",
            invariant="A tape receives its input at most once, and its output's gradient at most "
            "once.",
            transitions=("post_receive",),
            argument="message",
            unchanged=_TENANT,
            section="design",
            cause="A receive was posted twice for one microbatch. The second receive would "
            "overwrite the data that F or dI reads, or take another microbatch's message.",
            remedy="Remove the second receive.",
        ),
        Clause(
            id="ownership.receive-not-posted",
            number="1.24",
            title="Only a receive that was posted can end",
            invariant="The end of a receive (`finish_receive`) is accepted only once, after the "
            "receive was posted.",
            transitions=("finish_receive",),
            argument="message",
            unchanged=_TENANT,
            section="design",
            cause="The caller waited before it posted the receive, or waited for another "
            "microbatch's receive, or called `finish_receive` twice.",
            remedy="Post the receive first, and call `finish_receive` once.",
        ),
        Clause(
            id="ownership.read-not-begun",
            number="1.25",
            title="Only a read that began can end",
            invariant="The end of a read (`finish_read`) is accepted only after the read began "
            "(`read`).",
            transitions=("finish_read",),
            argument="bit",
            unchanged=_TENANT,
            section="design",
            cause="`finish_read` was called for a send, but `read` was not called before the "
            "send. Either the call of `read` is missing, or the send was never posted. Without "
            "the send, the neighbour waits for the message, or takes another message in its "
            "place.",
            remedy="Call `read` where the send is posted. If the send was not posted, post it.",
        ),
        Clause(
            id="ownership.unknown-ticket",
            number="1.26",
            title="A ticket is redeemed once, by the action it was issued for",
            invariant="A commit or an abort is accepted only with the slot's outstanding ticket, "
            "and only for the action that the ticket was issued for. Another tape joins a grouped "
            "dW (one matrix product for several tapes) only with the outstanding ticket of that "
            "dW.",
            transitions=(
                "commit_forward",
                "abort_forward",
                "commit_dgrad",
                "abort_dgrad",
                "commit_wgrad",
                "abort_wgrad",
                "group_wgrad",
            ),
            argument="ticket",
            unchanged=_FLIGHT,
            section="design",
            cause="The ticket was already committed or aborted. Or the ticket belongs to another "
            "slot, or was issued before a restore.",
            remedy="Redeem each ticket exactly once: commit it after success, abort it after "
            "failure.",
        ),
        Clause(
            id="ownership.live-tape",
            number="1.27",
            title="No tape is live when an update or the next walk begins",
            invariant="The optimizer's update, or the next walk (pass over the microbatches) of an "
            "epoch, begins only if every slot of every stage of the process is free.",
            transitions=("next_walk", "check_update"),
            argument="",
            unchanged="Every live tape, and the weight epoch.",
            section="IV-E",
            cause="A dW or a reader has not finished, or a slot is still reserved for a receive.",
            remedy="Run the actions and reads that the live tapes still wait for. Or purge the "
            "epoch (abort its tapes), restore the last commit and run the epoch again.",
        ),
        Clause(
            id="ownership.unknown-key",
            number="1.28",
            title="Keys are configured",
            invariant="A key names a stage, microbatch, block and invocation that this process is "
            "configured with.",
            transitions=(
                "reserve",
                "skip",
                "bind",
                "check_forward",
                "check_wgrad",
                "group_wgrad",
            ),
            argument="key",
            unchanged="Everything.",
            section="III-A",
            cause="The microbatch is out of range, or the stage lives on another rank.",
            remedy="Configure the stage with all microbatches, blocks and invocations that the "
            "schedule uses.",
        ),
        Clause(
            id="ownership.unknown-slot",
            number="1.29",
            title="Slots are configured",
            invariant="A slot index lies within the process's pool.",
            transitions=(
                "reserve",
                "check_forward",
                "check_dgrad",
                "check_wgrad",
                "group_wgrad",
                "post_receive",
                "finish_receive",
                "read",
                "finish_read",
                "drop",
            ),
            argument="ref.slot",
            unchanged="Everything.",
            section="III-A",
            cause="The reference was issued by another contract, or the slot index is out of "
            "range.",
            remedy="Pass the reference that the forward's commit returned.",
        ),
        Clause(
            id="ownership.input-not-made",
            number="1.30",
            title="F of a stage runs after F of the stage that feeds it",
            invariant="One stage of a process may feed another (its output is the other's input). "
            "The fed stage runs F only after the feeding stage's F of the same microbatch was "
            "committed, and while the tape of that F is live.",
            transitions=("check_forward",),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The chunks of one rank run in the wrong order, so F would read another "
            "microbatch's input. Or the feeding stage's tape was aborted.",
            remedy="Run the feeding stage's F first. If an order is declared, it must place that "
            "F first.",
        ),
        Clause(
            id="ownership.gradient-not-made",
            number="1.31",
            title="dI of a stage runs after dI of the stage that it feeds",
            invariant="One stage of a process may feed another (its output is the other's input). "
            "The feeding stage runs dI only after the fed stage's dI of the same microbatch was "
            "committed, and only if no failure has spoiled the fed stage's epoch.",
            transitions=("check_dgrad",),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The chunks of one rank run backward in the same order as forward, so dI would "
            "read another microbatch's gradient.",
            remedy="Run the fed stage's dI first. If an order is declared, it must place that dI "
            "first.",
        ),
        Clause(
            id="ownership.receive-before-read",
            number="1.32",
            title="A message within the process arrives after the sender's read began",
            invariant="One stage of a process may send messages to another. The receive of such a "
            "message into a live tape ends only after the sending stage's read of the same "
            "microbatch began.",
            transitions=("finish_receive",),
            argument="key",
            unchanged="The transfer under way, and the slot that the transfer keeps occupied.",
            section="design",
            cause="The receive took another message. Or `finish_receive` was called before the "
            "send was posted.",
            remedy="Call `read` for the sending stage's tape before the receive ends. If the "
            "message can no longer arrive, drop (abort) the receiving tape first.",
        ),
        Clause(
            id="ownership.skipped",
            number="1.33",
            title="A key that a walk leaves out does not run",
            invariant="A key that was left out of the current walk (pass over the microbatches) "
            "gets no slot and no F in this walk, and cannot be left out again.",
            transitions=("reserve", "skip", "check_forward"),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The loop ran a microbatch that `shorten_walk` had left out, or called "
            "`shorten_walk` twice in one walk.",
            remedy="Call `shorten_walk` once per walk, with the number n of microbatches in this "
            "walk. Then run only the first n microbatches.",
        ),
        Clause(
            id="ownership.walk-begun",
            number="1.34",
            title="A walk is shortened before its first F",
            invariant="A key can be left out of a walk (a pass over the microbatches) only before "
            "the walk's first F on any stage of the process.",
            transitions=("skip",),
            argument="",
            unchanged=_TENANT,
            section="design",
            cause="The loop noticed after the first F that its batch is short. Or the loop called "
            "`shorten_walk` for the next walk too early: before `next_walk`, or before the commit "
            "of the epoch.",
            remedy="Read the batch's size first, then call `shorten_walk`, then run the first F. "
            "If the walk has already begun, run all microbatches. Or purge the epoch (abort its "
            "tapes), restore the last commit and run the epoch again.",
        ),
        Clause(
            id="ownership.not-grouped",
            number="1.35",
            title="Only a tape in a group of dW can leave the group",
            invariant="A grouped dW is one matrix product that writes the gradients of several "
            "tapes. A tape leaves a grouped dW (`ungroup_wgrad`) once, and only after the dW took "
            "the tape.",
            transitions=("ungroup_wgrad",),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The commit of a grouped dW was repeated. Or the commit names a tape that the "
            "check of the group did not name.",
            remedy="Name every tape of the group once, when the dW is checked.",
        ),
    ),
)

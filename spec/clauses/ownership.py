"""
Ownership: each retained tape has one key, one slot and one generation.
"""

from __future__ import annotations

from .model import Clause, Part

_TENANT = "The slot keeps its tape, its generation and its mask of consumers."
_POOL = "No slot is claimed, and every live tape stays where it is."
_FLIGHT = "The action in flight keeps its reservation and its tape."

PART = Part(
    name="ownership",
    title="Ownership",
    hidden="work that a dI leaves for its dW",
    without="a dW consumes another microbatch's work, or a slot that was reused",
    holder="a map from `TapeKey` to `TapeRef`, a consumer mask, a generation that rises at every "
    "release",
    intro="""\
A forward leaves a *tape*. The tape holds saved activations and, after dI, the deferred
weight-gradient work. A key, `TapeKey(epoch, stage, microbatch, block, invocation)`, names the tape;
a key without its epoch is a *cell*. A reference, `TapeRef(slot, generation, incarnation)`, tells
where the tape is. It names a slot of a bounded pool, and the generation that the slot had when it
took the tape. The incarnation is a random number that the contract draws when it is built and at
every restore. Captured graphs replay over fixed addresses, so the same slot serves many keys, and
an address does not tell whose work it holds.

A tape's *consumers* are the actions that use the tape: dI, dW, and the configured readers of the
output and of the input gradient. A slot has a mask of the consumers that have not finished. The
slot is free when the mask is empty. The last consumer's commit releases the slot. An abort of the
tape, or a purge (an abort of every tape of an epoch), releases the slot early. A slot's generation
rises by one at each release, never at allocation. An occupied slot is never preempted. Every
consumer presents the key *and* the reference, and both must name the same live tape.

A *transfer* is a receive into a slot (from `post_receive` to `finish_receive`) or a read from a
slot (from `read` to `finish_read`). In a stage that receives messages, F and dI run only on
messages that arrived for their own key. When a tape is aborted, its transfers continue, and the
slot takes no new tape until they have ended. The call that ends a transfer presents the same key
and reference as the call that began it. `finish_receive` on a live tape states that the message has
arrived whole. If a message can no longer arrive, the caller first drops the tape, so that no action
uses the tape; `finish_receive` then frees the slot. At any time, at most one read of a tape's
output, and at most one read of its input gradient, is under way.

A stage may declare that a caller's stream copies its input into the slot (`copies_input`). The
caller then enqueues the copy when it reserves the slot, on the stream of the link that the
reservation names. F runs only in a slot that its key has reserved.

A stage may declare that it feeds another stage of its process (`feeds`). The feeding stage is the
*source*, and the fed stage the *target*. For each microbatch, the target runs F only while the
source's tape is live, and the source runs dI after the target's dI. If the two stages exchange
messages, a receive ends only after the sending stage's read began.

A check reserves the slot and returns a *ticket*, the next serial number. While a slot has an
outstanding ticket, every other action on the slot is refused. A commit or an abort redeems the
ticket, once.""",
    clauses=(
        Clause(
            id="ownership.pool-exhausted",
            number="1.1",
            title="Live tapes are bounded by the pool",
            invariant="A reservation, or an F whose key has reserved no slot, takes a free slot of "
            "the stage. Without a free slot in the stage, both are refused.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_POOL,
            section="III-A",
            cause="The schedule keeps more tapes live than the stage has slots: forwards run ahead "
            "of their dI and dW, or an earlier tape was never consumed.",
            remedy="Give the stage as many slots as its schedule keeps tapes live at once "
            "(`qeffect plan` prints this number). Or look for a dW that was never committed, or a "
            "read of a tape that never finished.",
        ),
        Clause(
            id="ownership.foreign-slot",
            number="1.2",
            title="Slots belong to stages",
            invariant="A reservation or an F puts a key only into a slot of the key's own stage.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_POOL,
            section="III-A",
            cause="The caller counted slots from the first slot of the stage, or computed the "
            "index for another chunk of this rank. The contract numbers slots over all stages of "
            "the process.",
            remedy="Let the contract choose the slot, or add the index of the stage's first slot.",
        ),
        Clause(
            id="ownership.slot-busy",
            number="1.3",
            title="An occupied slot is never preempted",
            invariant="A slot takes a new tape only after every consumer of the old tape has "
            "finished. A reserved slot takes only a tape of the key that reserved it.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_TENANT,
            section="III-A",
            cause="The runtime picks slots itself, by microbatch modulo the pool's size, and a "
            "delayed dW still needs this slot.",
            remedy="Let the contract choose a free slot. If slots are fixed, provide one slot for "
            "every tape that the schedule keeps live at once.",
        ),
        Clause(
            id="ownership.key-live",
            number="1.4",
            title="A key has at most one tape",
            invariant="A cell (a key without its epoch) has at most one live tape. While that tape "
            "is live, the cell gets no second tape, and no walk over the microbatches leaves the "
            "cell out.",
            transitions=("reserve", "skip", "check_forward"),
            argument="key",
            unchanged=_TENANT,
            section="III-A",
            cause="The caller ran F, or reserved a slot, a second time for the same microbatch, "
            "block and invocation while the first tape was live. Often two calls share one "
            "invocation number.",
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
            "activation recomputation ran F again under the same key. A second F would roll the "
            "amax history twice.",
            remedy="Recompute activations while the key's dI runs, after the check of dI and "
            "before its commit. Use the scales that F of the same key used, and record no amax in "
            "the recomputation. dI then reports one scaling update, and the scales of that F. For "
            "an evaluation, call `check_evaluation`. To repeat a failed microbatch, restore, then "
            "run the whole epoch again.",
        ),
        Clause(
            id="ownership.generation-exhausted",
            number="1.6",
            title="Generations never wrap",
            invariant="A slot whose generation has reached the counter's maximum takes no new "
            "tape. So no release can wrap the counter.",
            transitions=("reserve", "check_forward"),
            argument="slot",
            unchanged=_POOL,
            section="design",
            cause="The generation counter was configured too narrow for the number of tapes that a "
            "slot serves; 64 bits suffice for any run.",
            remedy="Restore from a checkpoint, which begins a new incarnation at generation zero, "
            "or configure a wider counter.",
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
            cause="An action was checked and neither committed nor aborted: an exception was "
            "raised between check and commit, or two host threads drive one stage.",
            remedy="Use the context managers, which abort on an exception; otherwise commit or "
            "abort the ticket on every code path.",
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
            cause="The reference was issued before a restore, or by another process, and was kept "
            "in saved values, a queue or a pickle. After a restore, generations start again at "
            "zero, so slot and generation alone would match.",
            remedy="Drop every reference at a restore and run the forwards of the epoch again.",
        ),
        Clause(
            id="ownership.stale-reference",
            number="1.9",
            title="A reference is valid as long as its tape exists",
            invariant="The slot that a reference names is occupied and has the reference's "
            "generation. There is one exception. After a tape was aborted or dropped, two calls "
            "are still accepted: the call that ends its transfer, and the call that takes the tape "
            "out of a grouped dW.",
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
            invariant="The given key is the key of the tape in the reference's slot.",
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
            cause="dW was paired with another microbatch's work: the runtime took the oldest entry "
            "of a queue, or the work of the stage's most recent dI, instead of the key's own "
            "work. ZB-V runs dW in another order than dI.",
            remedy="Let dW find its deferred work by key. To test another pairing rule, such as "
            "`fifo`, run `qeffect check --pairing fifo` on your schedule: the check names a dW "
            "that would get the wrong work.",
        ),
        Clause(
            id="ownership.not-forwarded",
            number="1.11",
            title="Backward follows the forward's commit",
            invariant="dI, dW and the receive of a gradient need a tape whose forward has been "
            "committed.",
            transitions=("check_dgrad", "check_wgrad", "post_receive"),
            argument="key",
            unchanged="The reservation and its slot.",
            section="III-A",
            cause="The slot was only reserved, to receive an input, and its forward has not run.",
            remedy="Run and commit the forward of this key first.",
        ),
        Clause(
            id="ownership.duplicate-dgrad",
            number="1.12",
            title="dI consumes its tape once",
            invariant="A tape's dI is accepted only while the tape waits for it.",
            transitions=("check_dgrad",),
            argument="key",
            unchanged="The tape, which still waits for its dW, and the effect token.",
            section="III-A",
            cause="The schedule or a retry ran dI of this microbatch twice; a second dI would roll "
            "the gradients' amax history again and queue deferred work twice.",
            remedy="Remove the repeated dI. After a failed dI, abort the epoch instead of running "
            "dI again.",
        ),
        Clause(
            id="ownership.wgrad-before-dgrad",
            number="1.13",
            title="dW follows its own dI",
            invariant="A tape's dW is accepted only after that tape's dI was committed.",
            transitions=("check_wgrad", "group_wgrad"),
            argument="key",
            unchanged="The tape, which still waits for dI and dW, and its destinations.",
            section="III-A",
            cause="dW was scheduled before dI of the same microbatch, or dI was checked but not "
            "yet committed. The dI of another microbatch does not count, because it queued other "
            "work.",
            remedy="Move dI of this key before its dW.",
        ),
        Clause(
            id="ownership.duplicate-wgrad",
            number="1.14",
            title="dW consumes its tape once",
            invariant="A tape's dW is accepted only while the tape waits for it and no other dW "
            "has taken the tape into its group.",
            transitions=("check_wgrad", "group_wgrad"),
            argument="key",
            unchanged="The tape, and every gradient already written.",
            section="III-A",
            cause="The tape's dW has already run, and only a reader that has not finished keeps "
            "the tape live. Or a grouped dW has already taken the tape, or names the tape twice.",
            remedy="Remove the repeated dW: it would add the gradient a second time.",
        ),
        Clause(
            id="ownership.work-not-queued",
            number="1.15",
            title="dI queues the deferred work",
            invariant="dI commits only if deferred work was queued exactly once for every matrix "
            "of its stage.",
            transitions=("commit_dgrad",),
            argument="queued",
            unchanged="The whole state; the public API then aborts the tape, since its dI has run.",
            section="IV-A",
            cause="A module's deferred weight gradient is disabled. Or another slot's "
            "WeightGradStore was installed when the forward ran, so that the entries went to that "
            "store.",
            remedy="Install the slot's own stores before F, and report each matrix whose entry the "
            "store holds after dI.",
        ),
        Clause(
            id="ownership.matrix-coverage",
            number="1.16",
            title="dW covers every matrix once",
            invariant="dW commits only if it produced the gradient of every matrix of its stage "
            "exactly once. This also holds without an arena, where the caller copies the gradients "
            "out of dW.",
            transitions=("commit_wgrad", "ungroup_wgrad"),
            argument="covered",
            unchanged="The whole state; the public API then aborts the tape, since its dW has run.",
            section="IV-A",
            cause="A store was drained partly or twice. LayerNormMLP, for example, puts two "
            "entries into its one store.",
            remedy="Drain every entry of the slot's stores, and report each matrix as often as its "
            "gradient was written.",
        ),
        Clause(
            id="ownership.no-such-reader",
            number="1.17",
            title="Readers are configured, and finish once",
            invariant="A tape is read only by a reader that is configured for its stage, and only "
            "before that reader has finished.",
            transitions=("read", "finish_read"),
            argument="bit",
            unchanged=_TENANT,
            section="design",
            cause="The stage was configured without `sends_output` or `sends_gradient`, or this "
            "reader has already finished.",
            remedy="Configure the reader, and call `finish_read` once, when the send has "
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
            cause="The send of an input gradient was posted before dI of that microbatch; the "
            "buffer still holds the gradient of the slot's previous tape.",
            remedy="Post the send after dI's commit.",
        ),
        Clause(
            id="ownership.read-duplicate",
            number="1.19",
            title="A reader reads once at a time",
            invariant="A read of a tape's output, or of its input gradient, begins only if no read "
            "of the same buffer is under way. The contract counts one read per buffer: with two "
            "reads, the end of the first would free the slot during the second.",
            transitions=("read",),
            argument="bit",
            unchanged=_TENANT + " The read under way continues.",
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
            invariant="A slot is claimed only if no transfer through it is under way. F and dI run "
            "only if no receive of their message is under way. A transfer continues after its tape "
            "was aborted.",
            transitions=("reserve", "check_forward", "check_dgrad"),
            argument="slot",
            unchanged="The transfer under way, and the slot that it keeps.",
            section="design",
            cause="A receive was posted and not awaited, or the slot's last tape was aborted while "
            "a send still read it.",
            remedy="Wait for the transfer, then call `finish_receive` or `finish_read`.",
        ),
        Clause(
            id="ownership.receive-missing",
            number="1.21",
            title="F and dI use a message that was received",
            invariant="In a stage that receives its input, F runs only after the receive of the "
            "key's input was posted and has ended. In a stage that receives its output's gradient, "
            "dI runs only after the receive of that gradient has ended. In a stage whose input is "
            "copied, F runs in the slot that its key reserved.",
            transitions=("check_forward", "check_dgrad"),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The receive or the copy was left out of the schedule, or was made for another "
            "microbatch. The buffer still holds the input of the slot's previous tape.",
            remedy="Reserve the key's slot, post the receive into it, and wait for it before F; "
            "post the gradient's receive before dI. If the input is copied, reserve the key's slot "
            "with the link whose caller's stream makes the copy.",
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
            cause="The stage was configured without `receives_input` or `receives_gradient`: the "
            "stage is the pipeline's first or last, or its neighbour is on this rank.",
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
            cause="A receive was posted twice for one microbatch; the second receive would "
            "overwrite what F or dI reads, or take another microbatch's message.",
            remedy="Remove the second receive.",
        ),
        Clause(
            id="ownership.receive-not-posted",
            number="1.24",
            title="Only a receive that was posted finishes",
            invariant="The end of a receive is accepted only after the receive was posted, and "
            "only once per receive.",
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
            title="Only a read that began finishes",
            invariant="The end of a read is accepted only after the read began.",
            transitions=("finish_read",),
            argument="bit",
            unchanged=_TENANT,
            section="design",
            cause="`finish_read` was called for a send, but `read` was not called before it: the "
            "call is missing where the send is posted, or the send was never posted. In the second "
            "case the neighbour waits for the message, or takes another message in its place.",
            remedy="Call `read` where the send is posted. If the send was not posted, post it.",
        ),
        Clause(
            id="ownership.unknown-ticket",
            number="1.26",
            title="A ticket is redeemed once, by the action it was issued for",
            invariant="A commit or an abort is accepted only with the slot's outstanding ticket, "
            "and only for the action that the ticket was issued for. A further tape joins a "
            "grouped dW only with the outstanding ticket of that dW.",
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
            cause="The ticket was already committed or aborted, or belongs to another slot or to "
            "an action before a restore.",
            remedy="Redeem each ticket exactly once; commit after success, abort after failure.",
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
            remedy="Run the actions that the tapes wait for. Or purge the epoch (abort its tapes), "
            "restore the last commit and run the epoch again.",
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
            remedy="Configure the stage with as many microbatches, blocks and invocations as the "
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
            invariant="If another stage of the process feeds the stage, F runs only after the "
            "feeding stage's F of the same microbatch was committed, and while the tape of that F "
            "is live.",
            transitions=("check_forward",),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="Chunks of one rank run in the wrong order, so that the input that F would read "
            "still belongs to another microbatch. Or the feeding stage's tape was lost.",
            remedy="Run the feeding stage's F first; a declared order must place that F first.",
        ),
        Clause(
            id="ownership.gradient-not-made",
            number="1.31",
            title="dI of a stage runs after dI of the stage that it feeds",
            invariant="If the stage feeds another stage of the process, dI runs only after the fed "
            "stage's dI of the same microbatch succeeded, and only if no failure has spoiled the "
            "fed stage's epoch.",
            transitions=("check_dgrad",),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The chunks of one rank run their backward in the order of their forward, so the "
            "gradient that dI would read still belongs to another microbatch.",
            remedy="Run the fed stage's dI first; a declared order must place that dI first.",
        ),
        Clause(
            id="ownership.receive-before-read",
            number="1.32",
            title="A message within the process arrives after the sender's read began",
            invariant="If one stage of the process feeds another by messages, a receive into a "
            "live tape ends only after the sending stage's read of the same microbatch began.",
            transitions=("finish_receive",),
            argument="key",
            unchanged="The transfer under way, and the slot that it keeps.",
            section="design",
            cause="The receive was matched with another message, or `finish_receive` was called "
            "before the send was posted.",
            remedy="Begin the read (`read`) of the sending stage's tape before the receive ends. "
            "If the message can no longer arrive, drop the tape first.",
        ),
        Clause(
            id="ownership.skipped",
            number="1.33",
            title="A key that a walk leaves out does not run",
            invariant="Once a key is left out of the current walk (pass over the microbatches), it "
            "gets no slot and no F in this walk, and is not left out a second time.",
            transitions=("reserve", "skip", "check_forward"),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="`shorten_walk` left out a microbatch that the loop then ran, or was called "
            "twice in one walk.",
            remedy="Call `shorten_walk` once per walk, with the number of microbatches that the "
            "walk takes, and run only that many: the first ones.",
        ),
        Clause(
            id="ownership.walk-begun",
            number="1.34",
            title="A walk is shortened before its first F",
            invariant="A key is left out of a walk only before the first F of that walk, on any "
            "stage of the process.",
            transitions=("skip",),
            argument="",
            unchanged=_TENANT,
            section="design",
            cause="The loop noticed only after the first F that its batch is short. Or the loop "
            "called `shorten_walk` too early for the next walk: before `next_walk` or before the "
            "commit.",
            remedy="Read the batch's size first, then call `shorten_walk`, then run the first F. "
            "If the walk has already begun, run all microbatches. Or purge the epoch (abort its "
            "tapes), restore the last commit and run the epoch again.",
        ),
        Clause(
            id="ownership.not-grouped",
            number="1.35",
            title="Only a tape in a group of dW can leave the group",
            invariant="A grouped dW is one matrix product that writes the gradients of several "
            "tapes. A tape leaves a grouped dW once, and only after the dW took the tape.",
            transitions=("ungroup_wgrad",),
            argument="key",
            unchanged=_TENANT,
            section="design",
            cause="The commit of a grouped dW was repeated, or names a tape that the group's check "
            "did not name.",
            remedy="Name every tape of the group once, in the check of its dW.",
        ),
    ),
)

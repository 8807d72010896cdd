"""
Order: F and dI advance a state domain's effect token exactly once, dW never.
"""

from __future__ import annotations

from .model import Clause, Part

_TOKEN = "The effect token, which counts the F and dI of the domain."

PART = Part(
    name="order",
    title="Order",
    hidden="FP8 scaling state",
    without="a scale update is skipped, doubled or reordered, while the loss stays finite",
    holder="one effect token per state domain; F and dI advance the token, dW cannot",
    intro="""\
With delayed scaling, F and dI update amax histories and scales. dW consumes the work that dI left,
and must not update scales again. A *state domain* is the set of stages whose amax histories one
update may roll (shift by one entry). Transformer Engine's update goes over every module of the
process and rolls each history that has a new entry; before its pull request 825 it rolled every
history. So all chunks of a rank share one domain. A domain has an effect token, a count of the F
and dI committed in it. A caller presents the token that it saw, and an F or dI is accepted only if
that token is current. dW neither takes nor advances a token.

A token proves that each scaling update happened once, and that updates happened one after another.
The order of microbatches is checked only if the caller declares an order. An F, dI, refresh or
evaluation that fails on the device leaves scales half updated: its domain is *poisoned* until the
numerical state of the last commit is restored. An abort never rewinds the token.

Alternatively, a domain may have *scales of an epoch*, which move once an epoch
(`StageConfig(scales="epoch")` on all its stages). F and dI then only gather maxima into the amax
histories, in any order. The optimizer's update moves the scales once, by `move_scales` between its
check and its commit, even if it leaves the weights unchanged. All F and dI of an epoch then use the
same scales, and the scales no longer depend on the order of microbatches. The token still rises by
one with each F and each dI, although these no longer move the scales; `move_scales` does not change
the token. The update commits only after the scales of every such domain have moved. After an update
failed, scales and weights both count as half updated. The same holds after `fail` reported a fault
of an epoch whose update had begun.""",
    clauses=(
        Clause(
            id="order.in-flight",
            number="3.1",
            title="One scaling update at a time",
            invariant="At most one F, dI, refresh or evaluation of a state domain is in flight. "
            "Other clauses ensure that none of these is in flight at an update of the weights or "
            "at a restore.",
            transitions=("check_refresh", "check_forward", "check_evaluation", "check_dgrad"),
            argument="",
            unchanged=_TOKEN,
            section="III-B",
            cause="An action of the domain was checked and neither committed nor "
            "aborted, or two host threads drive chunks that share scaling state.",
            remedy="Commit or abort that action first. Put two chunks into separate "
            "domains only if no scaling update changes the scales of both.",
        ),
        Clause(
            id="order.poisoned",
            number="3.2",
            title="Half-updated scales are not used",
            invariant="No F, dI, refresh, evaluation, finalize or checkpoint happens in a state "
            "domain in which an F, dI, refresh or evaluation has failed since the last restore.",
            transitions=(
                "check_refresh",
                "check_forward",
                "check_evaluation",
                "check_dgrad",
                "finalize",
                "checkpoint",
            ),
            argument="",
            unchanged=_TOKEN,
            section="IV-E",
            cause="A replay raised. Transformer Engine's autocast rolls scales even when the "
            "forward inside raised, so the state cannot be trusted.",
            remedy="Restore the numerical state of the last commit, then `restore` the contract "
            "and run the epoch again.",
        ),
        Clause(
            id="order.token",
            number="3.3",
            title="F and dI present the current token",
            invariant="The caller of an F or dI presents the current effect token of the state "
            "domain, that is, the domain's count of F and dI.",
            transitions=("check_forward", "check_dgrad"),
            argument="token",
            unchanged=_TOKEN,
            section="III-B",
            cause="The caller kept a token while another F or dI of the domain ran: an update was "
            "skipped, repeated or run in another order than the host believed.",
            remedy="Read `contract.token(stage)` after the F or dI that must come first, and pass "
            "that value. Leave the token out only if the host's order of checks is the intended "
            "order.",
        ),
        Clause(
            id="order.reordered",
            number="3.4",
            title="A declared order is kept",
            invariant="If a domain declares the order of its F and dI, each F and each dI runs at "
            "its declared position.",
            transitions=("check_forward", "check_dgrad"),
            argument="key",
            unchanged=_TOKEN,
            section="III-B",
            cause="The runtime deviated from the declared schedule, for example by starting the "
            "microbatch that arrived first.",
            remedy="Follow the table, or declare the order that the runtime follows.",
        ),
        Clause(
            id="order.incomplete",
            number="3.5",
            title="A stage is finalized after all its F and dI",
            invariant="Finalize requires one committed F and one committed dI for every cell of "
            "the stage that the walk (pass over the microbatches) does not leave out.",
            transitions=("finalize",),
            argument="stage",
            unchanged="The stage, which is not final; the missing actions may still run.",
            section="IV-E",
            cause="A microbatch was left out, or the stage is configured with more microbatches, "
            "blocks or invocations than the schedule runs.",
            remedy="Run the missing F and dI, or correct the configuration.",
        ),
        Clause(
            id="order.scaling-updates",
            number="3.6",
            title="F and dI update scales once, or the optimizer's update does; evaluations never",
            invariant="This clause applies if the backend reports scaling updates "
            "(`StageConfig.reports_updates`; Transformer Engine's stages do not). An F or dI "
            "commits only if it updated its domain's scaling state exactly once; an evaluation "
            "commits only if it left that state unchanged. If scales move once an epoch, an F or "
            "dI commits only if it left the scales unchanged. `move_scales` is then accepted only "
            "if the update moved the scales exactly once.",
            transitions=("commit_forward", "commit_evaluation", "commit_dgrad", "move_scales"),
            argument="updates",
            unchanged="The token. A refused F, dI or evaluation has failed and is aborted, which "
            "poisons the domain; a refused update stays in flight, and must be aborted.",
            section="III-B",
            cause="An autocast region was entered twice for one F. Or the update was skipped "
            "because no module was registered, or a captured graph lacks the update. Or an "
            "evaluation replayed a graph of F.",
            remedy="Update scales once, at the end of the outermost region of F and of dI; or, "
            'with `scales="epoch"`, once in the update and nowhere else. Then restore the '
            "numerical state of the last commit, `restore` the contract, and run the epoch again.",
        ),
        Clause(
            id="order.scales-moved",
            number="3.7",
            title="dI finds the live scales of its own forward",
            invariant="If dI reads live scales (the domain's current scales, not a copy on the "
            "tape), no other F of the domain runs between the F and the dI of one tape. If scales "
            "move once an epoch, they do not move in between, and this clause refuses nothing.",
            transitions=("check_dgrad",),
            argument="ref",
            unchanged=_TOKEN,
            section="III-B",
            cause="The tape kept quantized data without its dequantization factor, and another "
            "microbatch's F has changed that factor since.",
            remedy="Let tapes carry the scales of their forward, give interleaved stages "
            "separate domains, or let scales move once an epoch.",
        ),
        Clause(
            id="order.wrong-scales",
            number="3.8",
            title="dI uses the scales of its own forward",
            invariant="If tapes carry scales, dI commits only if it used the scales of its own F. "
            "dI names these scales by the effect token that was current when that F ran. If scales "
            "move once an epoch, dI reports the token at which the scales last moved since the "
            "last restore (0 if they have not moved).",
            transitions=("commit_dgrad",),
            argument="scales",
            unchanged="The token. The action has failed and is aborted, so its state domain "
            "accepts no F, dI or refresh until a restore.",
            section="III-B",
            cause="The scales were read by reference instead of copied, or a tape was given the "
            "scales of another microbatch.",
            remedy="Copy the scales onto the tape in F; then restore the last commit.",
        ),
        Clause(
            id="order.draws-again",
            number="3.9",
            title="No F draws the random numbers of an earlier F",
            invariant="This clause applies if the backend reports where F begins to draw random "
            "numbers (`StageConfig.reports_draws`). An F commits only if the reported position is "
            "at least 0, and later than the last position that an F of the domain reported. A "
            "restore forgets the last position, since a repeated epoch draws the same numbers "
            "again.",
            transitions=("commit_forward",),
            argument="draws",
            unchanged="The token. The action has failed and is aborted, so its state domain "
            "accepts no F, dI or refresh until a restore.",
            section="III-B",
            cause="A captured graph replays the generator's seed and offset of its capture, so "
            "that every replay drops the same elements, or the generator was seeded again.",
            remedy="Register the generator with the graph (`CUDAGraph.register_generator_state`), "
            "so that each replay advances it. Then restore the last commit.",
        ),
        Clause(
            id="order.wrong-draws",
            number="3.10",
            title="Recomputation draws the numbers of its own F",
            invariant="If dI recomputes F and reports where the recomputation began to draw "
            "(`StageConfig.recomputes_draws`), dI commits only if the recomputation began to draw "
            "where the F of the same tape began.",
            transitions=("commit_dgrad",),
            argument="draws",
            unchanged="The token. The action has failed and is aborted, so its state domain "
            "accepts no F, dI or refresh until a restore.",
            section="III-B",
            cause="The recomputation ran with the generator's current state, or with the state "
            "that another microbatch's F had saved.",
            remedy="Keep the generator's state with the tape in F, and set it for the "
            "recomputation; then restore the last commit.",
        ),
        Clause(
            id="order.declared",
            number="3.11",
            title="A declared order leaves no key out",
            invariant="No key is left out of a walk in a domain that declares the order of its F "
            "and dI.",
            transitions=("skip",),
            argument="key",
            unchanged=_TOKEN,
            section="design",
            cause="The order was declared for all microbatches, but the batch has fewer.",
            remedy="Make the contract without a declared order, or declare an order of the "
            "batch's number of microbatches.",
        ),
        Clause(
            id="order.moves-outside-update",
            number="3.12",
            title="Scales of an epoch move in the update",
            invariant="If scales move once an epoch, they move only after the check of an update "
            "and before its commit.",
            transitions=("move_scales",),
            argument="stage",
            unchanged="The contract's record of the scales; the scales themselves have moved.",
            section="design",
            cause="The backend's update of scales ran in the middle of an epoch, for example at "
            "the end of an autocast region, or the update had already been committed or aborted.",
            remedy="Move the scales inside `with contract.update() as update:`. If they moved "
            "outside an update, restore the numerical state of the last commit, and `restore` the "
            "contract.",
        ),
        Clause(
            id="order.nothing-gathered",
            number="3.13",
            title="Scales of an epoch move once",
            invariant="`move_scales` is accepted at most once per update and domain. The call is "
            "accepted only if the domain's scales move once an epoch and an F or dI of the epoch "
            "has gathered maxima.",
            transitions=("move_scales",),
            argument="stage",
            unchanged="The update, which stays in flight. Abort it if the scales moved a second "
            "time.",
            section="design",
            cause="Each stage of the domain moved the scales that all of them share, or the "
            "stages were configured with scales that move with F and dI.",
            remedy="Move the scales of each domain once, however many stages it has; configure "
            'its stages with `scales="epoch"`.',
        ),
        Clause(
            id="order.scales-not-moved",
            number="3.14",
            title="No update commits before scales of an epoch moved",
            invariant="If scales move once an epoch, an update commits only after they moved in "
            "every domain in which an F or dI of the epoch gathered maxima.",
            transitions=("commit_update",),
            argument="",
            unchanged="The weight epoch; the update has failed and is aborted, since the weights "
            "are updated and the scales are not.",
            section="design",
            cause="`move_scales` was not called, for example in an update that is skipped because "
            "of the gradient norm, or was called for some domains only. Or `commit_epoch` was "
            "called: it checks and commits in one call, so `move_scales` cannot come in between.",
            remedy="In the update, move the scales of every domain and call `move_scales` for "
            "each. After this refusal, restore the numerical state of the last commit.",
        ),
        Clause(
            id="order.unequal-scales",
            number="3.15",
            title="A grouped dW has one set of scales",
            invariant="A grouped dW takes a tape only if the tape's F and the F of the group's "
            "first tape ran with the same scales. If scales move with every F, no two tapes have "
            "the same scales.",
            transitions=("group_wgrad",),
            argument="ref",
            unchanged="Both tapes, and the dW in flight.",
            section="design",
            cause="A grouped dW is one matrix product, with one pair of dequantization factors for "
            "all its operands, and another microbatch's F has moved the scales since.",
            remedy='Let scales move once an epoch (`scales="epoch"`), or run one dW for each tape.',
        ),
    ),
)

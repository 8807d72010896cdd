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
    without="a scale update is skipped, doubled or reordered, and nobody notices because the loss "
    "stays finite",
    holder="one effect token per state domain; F and dI advance the token, dW cannot",
    intro="""\
With delayed scaling, F and dI update amax histories and scales. dW consumes the work that dI left,
and must not update scales again. A *state domain* is a set of stages whose amax histories a single
update may roll (shift by one entry). Transformer Engine's update visits every module of the
process, and rolls each history that has a new entry. (Before pull request 825 of Transformer
Engine, the update rolled every history.) So all chunks of a rank share one domain. Each domain has
an *effect token*: the number of F and dI committed in the domain. The caller of an F or dI presents
the token that it last read. The call is accepted only if that token is current. dW neither takes
nor advances a token.

The token proves that each scaling update happened once, and that updates happened one after
another. The order of microbatches is checked only if the caller declares an order. An F, dI,
refresh or evaluation that fails on the device leaves scales half updated. Its domain is then
*poisoned* until the numerical state of the last commit is restored. An abort never rewinds the
token.

Alternatively, a domain may have *scales of an epoch*, which change (*move*) only once per epoch.
All stages of the domain are then configured with `StageConfig(scales="epoch")`. F and dI only
gather maxima into the amax histories, in any order. The optimizer's update moves the scales once,
even if it leaves the weights unchanged. The caller reports this by `move_scales`, between the check
and the commit of the update. So all F and dI of an epoch use the same scales, and the scales no
longer depend on the order of microbatches. The token still rises by one with each F and each dI,
although these no longer move the scales. `move_scales` does not change the token. The update
commits only after the scales of every such domain have moved. After a failed update, scales and
weights both count as half updated. The same holds after `fail` reported a fault of an epoch whose
update had begun.""",
    clauses=(
        Clause(
            id="order.in-flight",
            number="3.1",
            title="One scaling update at a time",
            invariant="At most one F, dI, refresh or evaluation of a state domain is in flight. "
            "Other clauses ensure that none of these actions is in flight when an update of the "
            "weights or a restore begins.",
            transitions=("check_refresh", "check_forward", "check_evaluation", "check_dgrad"),
            argument="",
            unchanged=_TOKEN,
            section="III-B",
            cause="An action of the domain was checked, but neither committed nor aborted. Or two "
            "host threads drive chunks that share scaling state.",
            remedy="Commit or abort the earlier action first. Put two chunks into separate "
            "domains only if no scaling update changes the scales of both.",
        ),
        Clause(
            id="order.poisoned",
            number="3.2",
            title="Half-updated scales are not used",
            invariant="A state domain is poisoned after an F, dI, refresh or evaluation failed in "
            "it, until the next restore. In a poisoned domain, no F, dI, refresh, evaluation, "
            "finalize or checkpoint is accepted.",
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
            cause="A replay raised an exception. Transformer Engine's autocast updates scales "
            "even if the forward inside it raised, so the scales cannot be trusted.",
            remedy="Restore the numerical state of the last commit, call the contract's "
            "`restore`, and run the epoch again.",
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
            cause="Another F or dI of the domain ran after the caller had read the token. So a "
            "scaling update was skipped, repeated or run in another order than the host expected.",
            remedy="Read `contract.token(stage)` after the F or dI that must come before this "
            "one, and pass that value. Leave the argument out only if the host calls the checks "
            "in the intended order.",
        ),
        Clause(
            id="order.reordered",
            number="3.4",
            title="A declared order is kept",
            invariant="If an order of the F and dI of a domain is declared, each F and each dI "
            "runs at its declared position.",
            transitions=("check_forward", "check_dgrad"),
            argument="key",
            unchanged=_TOKEN,
            section="III-B",
            cause="The runtime deviated from the declared schedule, for example by starting the "
            "microbatch that arrived first.",
            remedy="Follow the declared schedule, or declare the order in which the runtime runs "
            "F and dI.",
        ),
        Clause(
            id="order.incomplete",
            number="3.5",
            title="A stage is finalized after all its F and dI",
            invariant="`finalize` requires one committed F and one committed dI for every cell "
            "(microbatch, block and invocation) of the stage. It does not require those of cells "
            "that were left out of the walk (the pass over the microbatches).",
            transitions=("finalize",),
            argument="stage",
            unchanged="The stage. It is not final, and the missing actions may still run.",
            section="IV-E",
            cause="The schedule lost a microbatch. Or the stage is configured with more "
            "microbatches, blocks or invocations than the schedule runs.",
            remedy="Run the missing F and dI, or correct the configuration.",
        ),
        Clause(
            id="order.scaling-updates",
            number="3.6",
            title="Scales are updated once, by F and dI or by the optimizer's update",
            invariant="This clause applies if the backend reports scaling updates "
            "(`StageConfig.reports_updates`; Transformer Engine's stages do not). An F or dI "
            "commits only if it updated its domain's scales exactly once. An evaluation commits "
            "only if it left the scales unchanged. If scales move once per epoch, an F or dI "
            "commits only if it left them unchanged, and `move_scales` is accepted only if the "
            "optimizer's update moved them exactly once.",
            transitions=("commit_forward", "commit_evaluation", "commit_dgrad", "move_scales"),
            argument="updates",
            unchanged="The effect token. A refused F, dI or evaluation counts as failed and is "
            "aborted, which poisons the domain. If `move_scales` is refused, the update stays in "
            "flight, and must be aborted.",
            section="III-B",
            cause="One F entered two autocast regions. Or no module was registered, so nothing "
            "was updated. Or the captured graph lacks the update. Or an evaluation replayed a "
            "graph of F.",
            remedy="Update scales once, at the end of the outermost autocast region of F and of "
            'dI. With `scales="epoch"`, update scales only in the optimizer\'s update, once. '
            "Then restore the numerical state of the last commit, call the contract's `restore`, "
            "and run the epoch again.",
        ),
        Clause(
            id="order.scales-moved",
            number="3.7",
            title="dI finds the live scales of its own forward",
            invariant="In some stages, dI reads live scales: the domain's current scales, not a "
            "copy on the tape. Such a dI is refused if another F of the domain ran between the "
            "tape's F and this dI. If scales move once per epoch, this clause refuses nothing, "
            "because the scales do not move in between.",
            transitions=("check_dgrad",),
            argument="ref",
            unchanged=_TOKEN,
            section="III-B",
            cause="The tape kept quantized data, but not the dequantization factor. Another "
            "microbatch's F has changed that factor since.",
            remedy="Store the scales of the forward on the tape. Or give interleaved stages "
            'separate domains, or configure `scales="epoch"`.',
        ),
        Clause(
            id="order.wrong-scales",
            number="3.8",
            title="dI uses the scales of its own forward",
            invariant="If tapes carry scales, dI commits only if it used the scales of its own F. "
            "The backend names the scales by a token: the domain's effect token when that F ran. "
            "If scales move once per epoch, the backend names the effect token at the last move "
            "of the scales, or 0 if they have not moved since the last restore.",
            transitions=("commit_dgrad",),
            argument="scales",
            unchanged="The effect token. The action counts as failed and is aborted. Its state "
            "domain then accepts no F, dI, refresh or evaluation until a restore.",
            section="III-B",
            cause="F stored a reference to the scales instead of a copy. Or the tape was given "
            "the scales of another microbatch.",
            remedy="Copy the scales onto the tape in F. Then restore the last commit.",
        ),
        Clause(
            id="order.draws-again",
            number="3.9",
            title="No F draws the random numbers of an earlier F",
            invariant="This clause applies if the backend reports where F begins to draw random "
            "numbers (`StageConfig.reports_draws`). An F commits only if the reported position of "
            "the generator is at least 0, and later than the last position that an F of the "
            "domain reported. At a restore, the contract forgets that last position, because a "
            "repeated epoch draws the same numbers again.",
            transitions=("commit_forward",),
            argument="draws",
            unchanged="The effect token. The action counts as failed and is aborted. Its state "
            "domain then accepts no F, dI, refresh or evaluation until a restore.",
            section="III-B",
            cause="Every replay of a captured graph uses the seed and offset of the capture, so "
            "every dropout drops the same elements. Or the generator was seeded again.",
            remedy="Register the generator with the graph (`CUDAGraph.register_generator_state`), "
            "so that each replay advances it. Then restore the last commit.",
        ),
        Clause(
            id="order.wrong-draws",
            number="3.10",
            title="Recomputation draws the numbers of its own F",
            invariant="This clause applies if dI recomputes F, and reports where the "
            "recomputation began to draw random numbers (`StageConfig.recomputes_draws`). dI "
            "commits only if this position of the generator equals the position at which the "
            "tape's F began to draw.",
            transitions=("commit_dgrad",),
            argument="draws",
            unchanged="The effect token. The action counts as failed and is aborted. Its state "
            "domain then accepts no F, dI, refresh or evaluation until a restore.",
            section="III-B",
            cause="The recomputation used the generator's current state, or the state that "
            "another microbatch's F had saved.",
            remedy="In F, save the generator's state with the tape, and set this state before the "
            "recomputation. Then restore the last commit.",
        ),
        Clause(
            id="order.declared",
            number="3.11",
            title="A declared order leaves no key out",
            invariant="If an order of the F and dI of a domain is declared, no key of the domain "
            "can be left out of a walk (a pass over the microbatches).",
            transitions=("skip",),
            argument="key",
            unchanged=_TOKEN,
            section="design",
            cause="The order was declared for all microbatches, but the batch has fewer.",
            remedy="Build the contract without a declared order. Or declare an order for the "
            "number of microbatches that the batch has.",
        ),
        Clause(
            id="order.moves-outside-update",
            number="3.12",
            title="Scales that move once per epoch move inside the update",
            invariant="If scales move once per epoch, they move only inside an update: after its "
            "check and before its commit.",
            transitions=("move_scales",),
            argument="stage",
            unchanged="The contract's record of the scales. The scales themselves have already "
            "moved.",
            section="design",
            cause="The backend updated the scales in the middle of an epoch, for example at the "
            "end of an autocast region. Or the optimizer's update had already been committed or "
            "aborted.",
            remedy="Move the scales inside `with contract.update() as update:`. If they moved "
            "outside an update, restore the numerical state of the last commit, and call the "
            "contract's `restore`.",
        ),
        Clause(
            id="order.nothing-gathered",
            number="3.13",
            title="Scales move at most once per update",
            invariant="`move_scales` is accepted at most once per update and domain. The call is "
            "accepted only if the domain's scales move once per epoch, and if an F of the epoch "
            "has gathered maxima in the domain.",
            transitions=("move_scales",),
            argument="stage",
            unchanged="The update, which stays in flight. Abort the update if the scales moved a "
            "second time.",
            section="design",
            cause="Each stage of the domain moved the scales that all its stages share. Or the "
            "stages were configured with scales that move with every F and dI.",
            remedy="Move the scales once per domain, not once per stage. Configure every stage of "
            'the domain with `scales="epoch"`.',
        ),
        Clause(
            id="order.scales-not-moved",
            number="3.14",
            title="An update commits only after its scales have moved",
            invariant="If scales move once per epoch, an update commits only after the scales "
            "moved in every domain in which an F of the epoch was committed.",
            transitions=("commit_update",),
            argument="",
            unchanged="The weight epoch. The update counts as failed and is aborted, because the "
            "weights are updated but the scales are not.",
            section="design",
            cause="`move_scales` was not called, or only for some domains. The call is often "
            "missing where the optimizer skips a step because of the gradient norm. Or the caller "
            "used `commit_epoch`, which checks and commits in one call and leaves no place for "
            "`move_scales`.",
            remedy="In the update, move the scales of every domain, and call `move_scales` for "
            "each domain. After this refusal, restore the numerical state of the last commit.",
        ),
        Clause(
            id="order.unequal-scales",
            number="3.15",
            title="A grouped dW has one set of scales",
            invariant="A grouped dW is one matrix product for several tapes. It takes a tape only "
            "if the tape's F and the F of the group's first tape used the same scales. If scales "
            "move with every F, no two tapes have the same scales.",
            transitions=("group_wgrad",),
            argument="ref",
            unchanged="The tape, the group's first tape, and the dW in flight.",
            section="design",
            cause="Another microbatch's F moved the scales between the two tapes. One matrix "
            "product has only one pair of dequantization factors for all its operands.",
            remedy='Configure scales that move once per epoch (`scales="epoch"`), or run one dW '
            "per tape.",
        ),
    ),
)

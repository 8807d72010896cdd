"""
Version: every action sees the weights, and the quantized weight cache, of its key's epoch.
"""

from __future__ import annotations

from .model import Clause, Part

_CACHE = "The weight cache and its epoch, and the stage's slots."

PART = Part(
    name="version",
    title="Version",
    hidden="quantized weight cache",
    without="a forward reads quantized weights of an earlier optimizer step at the fixed address",
    holder="a weight epoch and a cache epoch per stage; the first F refreshes the cache, and later "
    "F check it",
    intro="""\
A captured forward reads quantized weights at a fixed address. The bytes at that address do not show
which optimizer step's weights they hold. Each stage therefore has two counters. The weight epoch
rises at each commit of an update. A *refresh* quantizes the weights into the cache, and sets the
cache epoch to the weight epoch. A cache is *stale* if it does not hold the current weights: at
first, after a commit, after a restore, and after the caller reported that the cache was lost
(`invalidate`).

A refresh is a separate action or a flag of F. It comes directly before its stage's first forward of
the epoch: no F, dI, evaluation or other stage's refresh of the same state domain runs in between.
The reason: each F and each dI ends with an update of the scales of all modules of the domain. One
such update must see both the amaxes of the refreshed weights and the amaxes of the forward. If the
cache is stale, the contract accepts only a forward that refreshes the cache itself.""",
    clauses=(
        Clause(
            id="version.wrong-epoch",
            number="2.1",
            title="A key's epoch is the weight epoch",
            invariant="Every key that is passed to F, dI, dW, `bind`, `reserve` or `skip` names "
            "the stage's weight epoch (the number of its weight updates). For dI and dW, "
            "`ownership.wrong-key` already ensures this: their key belongs to a live tape, and no "
            "tape outlives its epoch.",
            transitions=("reserve", "skip", "bind", "check_forward"),
            argument="key.epoch",
            unchanged="The weight epochs, the slots and the bindings.",
            section="III-C",
            cause="The optimizer stepped, but `commit_epoch` was not called. Or a key was built "
            "from a step counter that differs from the contract's epoch. Or a backward ran after "
            "the optimizer's update of its own step.",
            remedy="Build keys from `contract.epoch`. Call the commit exactly where the optimizer "
            "updates the parameters.",
        ),
        Clause(
            id="version.stale-cache",
            number="2.2",
            title="The weight cache is current",
            invariant="F and dI run only if the stage's weight cache holds the weights of their "
            "key's epoch. The exception is an F that refreshes the cache itself. An evaluation "
            "that reads the cache runs only if the cache holds the current weights.",
            transitions=("check_forward", "check_evaluation", "check_dgrad"),
            argument="key.epoch",
            unchanged=_CACHE,
            section="III-C",
            cause="Nothing refreshed the cache after an optimizer step or a restart. For example, "
            "the first forward replayed a graph that was captured with is_first_microbatch=False.",
            remedy="Refresh the stage's cache directly before its first forward of the epoch, or "
            "let that forward refresh the cache (`refresh=True`). Run an evaluation after that "
            "forward, or let the evaluation quantize the weights itself (`cached=False`).",
        ),
        Clause(
            id="version.already-fresh",
            number="2.3",
            title="A cache is refreshed once per epoch",
            invariant="A refresh happens only while the weight cache is stale, that is, does not "
            "hold the current weights.",
            transitions=("check_refresh", "check_forward"),
            argument="refresh",
            unchanged=_CACHE,
            section="III-C",
            cause="Two microbatches were both treated as the first. Or an explicit refresh was "
            "followed by a forward that refreshes again. A second refresh would roll (shift) the "
            "weights' amax history once more.",
            remedy="Refresh in one place: either by the refresh action, or by the flag of the "
            "first forward.",
        ),
        Clause(
            id="version.late-refresh",
            number="2.4",
            title="A refresh precedes the stage's forwards",
            invariant="A refresh happens before the stage's first committed forward of the epoch. "
            "A stage without the order part does not check this, because only that part counts "
            "forwards.",
            transitions=("check_refresh", "check_forward"),
            argument="refresh",
            unchanged=_CACHE,
            section="design",
            cause="The caller invalidated the cache in the middle of an epoch, for example "
            "because a module allocated its workspace again at another address.",
            remedy="Abort the epoch, restore the last commit and run the epoch again, because all "
            "microbatches of a step must use the same quantized weights. Create workspaces before "
            "capture and keep them.",
        ),
        Clause(
            id="version.refresh-interrupted",
            number="2.5",
            title="Nothing comes between a refresh and its forward",
            invariant="After a stage's refresh, the next F, dI, refresh or evaluation of its state "
            "domain is the F of that stage, or another refresh of that stage.",
            transitions=("check_refresh", "check_forward", "check_evaluation", "check_dgrad"),
            argument="key.stage",
            unchanged=_CACHE,
            section="design",
            cause="All chunks were refreshed together at the start of the epoch, or another "
            "chunk's action ran between the refresh and the forward. If a scaling update rolls "
            "(shifts) the amax histories of all chunks, the forward then uses other scales than "
            "the refresh.",
            remedy="Replay each stage's refresh directly before the first forward of that stage.",
        ),
        Clause(
            id="version.in-flight",
            number="2.6",
            title="One refresh at a time",
            invariant="While a refresh of a stage's cache is in flight (checked, and neither "
            "committed nor aborted), the cache is neither refreshed again nor invalidated. No "
            "update of the weights and no restore begins during this time.",
            transitions=(
                "check_refresh",
                "check_forward",
                "invalidate",
                "check_update",
                "restore",
            ),
            argument="stage",
            unchanged="The refresh in flight, and the cache's epoch.",
            section="design",
            cause="A refresh was checked, but neither committed nor aborted.",
            remedy="Commit or abort the refresh on every code path, or use the context manager.",
        ),
        Clause(
            id="version.unknown-ticket",
            number="2.7",
            title="A refresh's ticket is redeemed once",
            invariant="A commit or an abort of a refresh is accepted only with the stage's "
            "outstanding refresh ticket.",
            transitions=("commit_refresh", "abort_refresh"),
            argument="ticket",
            unchanged="The refresh in flight, and the cache's epoch.",
            section="design",
            cause="The ticket was already redeemed, or belongs to another stage.",
            remedy="Redeem each ticket exactly once, or use the context manager.",
        ),
        Clause(
            id="version.left-out",
            number="2.8",
            title="A stage without the version part has no cache",
            invariant="In a stage that leaves the version part out, every call about the weight "
            "cache is refused: the check, commit and abort of a refresh, and `invalidate`.",
            transitions=("check_refresh", "commit_refresh", "abort_refresh", "invalidate"),
            argument="stage",
            unchanged="Everything, including an action in flight in the domain.",
            section="design",
            cause="The stage was configured without a weight cache, but its backend refreshes a "
            "cache. Or the ticket of a refresh was forged.",
            remedy="Keep the version part if weights are quantized once per epoch.",
        ),
        Clause(
            id="version.fill-missing",
            number="2.9",
            title="A refresh fills every matrix's cache",
            invariant="If the backend reports which caches were filled, a refresh commits only if "
            "the cache of every matrix of the stage was filled exactly once.",
            transitions=("commit_refresh", "commit_forward"),
            argument="filled",
            unchanged="The cache's epoch. The action counts as failed and is aborted. Its state "
            "domain then accepts no F, dI, refresh or evaluation until a restore.",
            section="III-C",
            cause="The kernel that casts a weight was skipped. Or a cache was allocated but never "
            "filled. Or one matrix was quantized twice.",
            remedy="Quantize every weight of the stage exactly once in a refresh. Then restore "
            "the last commit.",
        ),
        Clause(
            id="version.wrong-fill",
            number="2.10",
            title="A refresh quantizes the current weights",
            invariant="If the backend reports which caches were filled, a refresh commits only if "
            "it filled every cache from the weights of the current epoch.",
            transitions=("commit_refresh", "commit_forward"),
            argument="fill_epoch",
            unchanged="The cache's epoch. The action counts as failed and is aborted. Its state "
            "domain then accepts no F, dI, refresh or evaluation until a restore.",
            section="III-C",
            cause="The cache was filled before the optimizer's update. Or the cache was filled "
            "from a copy of the weights that the optimizer no longer updates.",
            remedy="Quantize the parameters that the optimizer has updated. Then restore the last "
            "commit.",
        ),
        Clause(
            id="version.fill-unasked",
            number="2.11",
            title="A forward without a refresh fills no cache",
            invariant="If the backend reports which caches were filled, an F that was checked "
            "with `refresh=False` commits only if it filled no cache. An evaluation never commits "
            "after it filled a cache.",
            transitions=("commit_forward", "commit_evaluation"),
            argument="fill_epoch",
            unchanged="The cache's epoch. The action counts as failed and is aborted. Its state "
            "domain then accepts no F, dI, refresh or evaluation until a restore.",
            section="III-C",
            cause="A later microbatch replayed a graph that was captured with "
            "is_first_microbatch=True. Or the flag that skips the cast was ignored. Or an "
            "evaluation ran with is_first_microbatch=True.",
            remedy="Call `check_forward` with `refresh=True` for that F, or replay the graph that "
            "does not write the cache. Run evaluations with is_first_microbatch=False or None.",
        ),
    ),
)

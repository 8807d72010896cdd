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
    without="a fixed address holds the quantized weights of an earlier optimizer step",
    holder="a weight epoch and a cache epoch per stage; the first F refreshes the cache, and later "
    "F check it",
    intro="""\
A captured forward reads quantized weights at a fixed address. The bytes at that address do not show
after which optimizer step the weights were quantized. Each stage therefore has a weight epoch,
which the commit advances, and a cache epoch. A *refresh* quantizes the weights into the cache, and
sets the cache epoch to the weight epoch. The cache is stale at first, after a commit, after a
restore, and after the caller reported its loss (`invalidate`).

A refresh is a separate action or a flag of F. A refresh comes directly before its stage's first
forward of the epoch, with no other F, dI, refresh or evaluation of its state domain in between. The
reason: each F and dI ends with an update of the scales of all modules of the domain. One such
update must see both the amaxes of the refreshed weights and the amaxes of the forward. Over a stale
cache, the contract accepts only a forward that refreshes the cache itself.""",
    clauses=(
        Clause(
            id="version.wrong-epoch",
            number="2.1",
            title="A key's epoch is the weight epoch",
            invariant="The key of an F, dI, dW, bind, reservation or skip names the stage's weight "
            "epoch. For dI and dW `ownership.wrong-key` ensures this: their key belongs to a live "
            "tape, and no tape outlives its epoch.",
            transitions=("reserve", "skip", "bind", "check_forward"),
            argument="key.epoch",
            unchanged="The weight epochs, the slots and the bindings.",
            section="III-C",
            cause="The optimizer stepped without `commit_epoch`. Or a key was built from a step "
            "counter that differs from the contract's epoch. Or a backward ran after the update of "
            "its own step.",
            remedy="Build keys from `contract.epoch`, and commit exactly where the optimizer "
            "updates the parameters.",
        ),
        Clause(
            id="version.stale-cache",
            number="2.2",
            title="The weight cache is current",
            invariant="F and dI run only if the stage's weight cache holds the weights of their "
            "key's epoch. An F that refreshes the cache itself is also accepted. An evaluation "
            "that reads the cache runs only if the cache holds the current weights.",
            transitions=("check_forward", "check_evaluation", "check_dgrad"),
            argument="key.epoch",
            unchanged=_CACHE,
            section="III-C",
            cause="The first forward after an optimizer step or a restart replayed a graph that "
            "was captured with is_first_microbatch=False, so nothing refreshed the cache.",
            remedy="Refresh the stage's cache directly before its first forward of the epoch, or "
            "let that forward refresh it (`refresh=True`). Evaluate after that forward, or "
            "quantize the weights in the evaluation itself (`cached=False`).",
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
            cause="Two microbatches were both treated as the first, or an explicit refresh was "
            "followed by a forward that refreshes again. A second refresh rolls the weight's amax "
            "once more.",
            remedy="Refresh in one place: by the refresh action, or by the first forward's flag.",
        ),
        Clause(
            id="version.late-refresh",
            number="2.4",
            title="A refresh precedes the stage's forwards",
            invariant="A refresh happens before the stage's first committed forward of the epoch. "
            "Without the order part, which counts the forwards, the contract does not check this.",
            transitions=("check_refresh", "check_forward"),
            argument="refresh",
            unchanged=_CACHE,
            section="design",
            cause="The cache was invalidated in the middle of an epoch, for example because a "
            "module re-created its workspace at another address.",
            remedy="Abort the epoch, restore the last commit and run the epoch again: microbatches "
            "of one step must not see two quantizations of the weights. Create workspaces before "
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
            cause="All chunks were refreshed at the start of the epoch, or another chunk's action "
            "was scheduled in between. If each update rolls the amax histories of all chunks, the "
            "forward then runs under other scales than the refresh.",
            remedy="Replay each stage's refresh directly before its own first forward.",
        ),
        Clause(
            id="version.in-flight",
            number="2.6",
            title="One refresh at a time",
            invariant="While a refresh of a stage's cache is in flight, the cache is neither "
            "refreshed again nor invalidated, and no update or restore begins.",
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
            cause="A refresh was checked and neither committed nor aborted.",
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
            invariant="If a stage leaves the version part out, its cache is neither refreshed nor "
            "invalidated, and no refresh ticket is redeemed.",
            transitions=("check_refresh", "commit_refresh", "abort_refresh", "invalidate"),
            argument="stage",
            unchanged="Everything, including an action in flight in the domain.",
            section="design",
            cause="The stage was declared to quantize no weights, but its backend refreshes a "
            "cache; or a refresh ticket was forged.",
            remedy="Keep the version part if weights are quantized once per epoch.",
        ),
        Clause(
            id="version.fill-missing",
            number="2.9",
            title="A refresh fills every matrix's cache",
            invariant="If the backend reports fills, a refresh commits only if the cache of every "
            "matrix of the stage was filled exactly once.",
            transitions=("commit_refresh", "commit_forward"),
            argument="filled",
            unchanged="The cache's epoch. The action has failed and is aborted, so its state "
            "domain accepts no F, dI or refresh until a restore.",
            section="III-C",
            cause="The kernel that casts a weight was skipped, a cache was allocated but never "
            "filled, or one matrix was quantized twice.",
            remedy="Quantize every weight of the stage once; then restore the last commit.",
        ),
        Clause(
            id="version.wrong-fill",
            number="2.10",
            title="A refresh quantizes the current weights",
            invariant="If the backend reports fills, a refresh commits only if it filled every "
            "cache from the weights of the stage's current weight epoch.",
            transitions=("commit_refresh", "commit_forward"),
            argument="fill_epoch",
            unchanged="The cache's epoch. The action has failed and is aborted, so its state "
            "domain accepts no F, dI or refresh until a restore.",
            section="III-C",
            cause="The cache was filled before the optimizer's update, or from a copy of the "
            "weights that the optimizer no longer updates.",
            remedy="Quantize the parameters that the optimizer updated; then restore the last "
            "commit.",
        ),
        Clause(
            id="version.fill-unasked",
            number="2.11",
            title="A forward without a refresh fills no cache",
            invariant="If the backend reports fills, an F that was checked without `refresh` "
            "commits only if it filled no cache. An evaluation must never fill a cache.",
            transitions=("commit_forward", "commit_evaluation"),
            argument="fill_epoch",
            unchanged="The cache's epoch. The action has failed and is aborted, so its state "
            "domain accepts no F, dI or refresh until a restore.",
            section="III-C",
            cause="A later microbatch replayed a graph that was captured with "
            "is_first_microbatch=True, the flag that skips the cast was ignored, or an evaluation "
            "ran with is_first_microbatch=True.",
            remedy="Call `check_forward` with `refresh=True` for that F, or replay the graph that "
            "does not write the cache. Evaluate with is_first_microbatch=False or None.",
        ),
    ),
)

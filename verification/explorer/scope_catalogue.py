"""
The scopes that the explorer can explore, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from qeffect.engine.stage import OPTIONAL, TRANSITIONS
from qeffect.relations.constants import BACK_BIT, COPY_BIT, GRAD_BIT, IN_BIT, OUT_BIT

from .scopes import Scope

__all__ = ["large_scopes", "pool_scope", "standard_scopes"]

#: The transitions of the slot pool alone.
_POOL: Final = (
    "reserve",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "drop",
)

#: The transitions from a refresh to the read of an output, on any stream.
_READ: Final = (
    "check_refresh",
    "commit_refresh",
    "abort_refresh",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "read",
    "finish_read",
    "submit",
    "join",
    "wait",
)

#: The transitions of receives and sends through a slot.
_MESSAGES: Final = (
    "reserve",
    "check_forward",
    "commit_forward",
    "check_dgrad",
    "commit_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "abort_dgrad",
    "abort_forward",
    "post_receive",
    "finish_receive",
    "read",
    "finish_read",
    "drop",
    "submit",
    "join",
    "wait",
)

#: The transitions from an F to the commit of reduced gradients.
_REDUCE: Final = (
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "join",
    "wait",
    "finalize",
    "start_reduction",
    "finish_reduction",
    "fail_reduction",
    "check_update",
    "commit_update",
    "abort_update",
)

#: The transitions from an F to the commit of gradients, one of which two stages write.
_SHARE: Final = (
    "bind",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "finalize",
    "check_update",
    "commit_update",
    "abort_update",
)

#: The transitions from a refresh to the optimizer's update and the next refresh.
_UPDATE: Final = (
    "check_refresh",
    "commit_refresh",
    "abort_refresh",
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "join",
    "wait",
    "drain",
    "finalize",
    "check_update",
    "commit_update",
    "abort_update",
    "checkpoint",
)

#: The transitions from an F to an update that moves the epoch's scales, and the transitions after
#: it.
_SCALES: Final = (
    "check_forward",
    "commit_forward",
    "abort_forward",
    "check_dgrad",
    "commit_dgrad",
    "abort_dgrad",
    "check_wgrad",
    "commit_wgrad",
    "abort_wgrad",
    "drop",
    "finalize",
    "next_walk",
    "check_update",
    "move_scales",
    "commit_update",
    "abort_update",
    "fail",
    "checkpoint",
    "restore",
)

#: The transitions from an F to a dW that takes several tapes, and the loss of such tapes.
_GROUP: Final = (
    "bind",
    "check_forward",
    "commit_forward",
    "check_dgrad",
    "commit_dgrad",
    "check_wgrad",
    "group_wgrad",
    "commit_wgrad",
    "ungroup_wgrad",
    "abort_wgrad",
    "drop",
)

#: The transitions of an evaluation.
_EVALUATE: Final = ("check_evaluation", "commit_evaluation", "abort_evaluation")

#: The transitions of a reader of the weights on a separate stream.
_WEIGHTS: Final = ("start_weights_read", "finish_weights_read")

#: The transitions of a reader of the gradients on a separate stream.
_GRADIENTS: Final = ("start_gradients_read", "finish_gradients_read")

#: All transitions except the late fault, readers on separate streams, and evaluations. Each of the
#: excluded transitions may occur at any moment, and so doubles the number of states.
_NO_FAULT: Final = tuple(
    name for name in TRANSITIONS if name not in ("fail", *_WEIGHTS, *_GRADIENTS, *_EVALUATE)
)

#: The transitions of ``_NO_FAULT``, except those of a successful reduction.
_NO_REDUCTION: Final = tuple(
    name for name in _NO_FAULT if name not in ("start_reduction", "finish_reduction", *_EVALUATE)
)

#: The transitions that end an epoch, and the transitions between epochs.
_CLOSING: Final = (
    "drain",
    "finalize",
    "start_reduction",
    "finish_reduction",
    "fail_reduction",
    *_WEIGHTS,
    *_GRADIENTS,
    "next_walk",
    "check_update",
    "commit_update",
    "abort_update",
    "fail",
    "checkpoint",
    "restore",
)


def pool_scope(slots: int, keys: int, generations: int, **options: Any) -> Scope:
    """
    Return a scope with only the slot pool: the relation ownership without epochs; each check runs
    in one step with its commit.

    Args:
        slots: Number of slots in the pool.
        keys: Number of keys (microbatches of the stage) that compete for the slots; a key is used
            again after its release.
        generations: Number of tapes (each the data of one F) that each slot may hold, one after
            another.
        options: Further arguments of ``Scope``.

    Raises:
        TypeError, ValueError: A count is not a positive integer.

    >>> pool_scope(4, 4, 3).name
    'pool-4-4-3'
    """
    right = "" if options.get("wrong_arguments", True) else "-right"
    return Scope(
        name=f"pool-{slots}-{keys}-{generations}{right}",
        slots=(slots,),
        cells=(keys,),
        generation_max=generations,
        omit=tuple(sorted(OPTIONAL)),
        only=_POOL,
        fresh_keys=True,
        **options,
    )


def standard_scopes() -> Mapping[str, Scope]:
    """
    Return the standard scopes by name; tests compare their numbers of states with fixed values.

    Together the scopes accept every transition and reach every refusal that the specification names
    for each transition. They do not take every accepting path: each combination of configured flags
    has separate paths, and not every combination has a scope.
    """
    scopes = (
        pool_scope(2, 2, 2),
        pool_scope(3, 3, 2),
        Scope("stage-epochs", slots=(1,), cells=(1,), generation_max=1, epochs=2, only=_NO_FAULT),
        Scope(
            "stage-faults",
            slots=(1,),
            cells=(1,),
            generation_max=1,
            epochs=2,
            only=(*_NO_FAULT, "fail"),
        ),
        Scope(
            "stage-walks",
            slots=(1,),
            cells=(1,),
            generation_max=2,
            walks=2,
            reduces=True,
            only=_NO_FAULT,
        ),
        Scope("stage-reuse", slots=(1,), cells=(2,), generation_max=2, only=_NO_FAULT),
        Scope("stage-small", slots=(2,), cells=(2,), generation_max=1, only=_NO_FAULT),
        Scope(
            "stage-tickets", slots=(2,), cells=(2,), generation_max=1, tickets=True, only=_NO_FAULT
        ),
        Scope(
            "stage-readers",
            slots=(1,),
            cells=(1,),
            generation_max=1,
            epochs=2,
            readers=OUT_BIT | GRAD_BIT,
            reduces=True,
            only=_NO_FAULT,
        ),
        Scope(
            "domains-readers",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            readers=OUT_BIT,
            only=_READ,
            omit=("arena", "capture", "order", "reduction"),
        ),
        Scope(
            "stage-messages",
            slots=(1,),
            cells=(2,),
            generation_max=2,
            readers=OUT_BIT | GRAD_BIT,
            receives=IN_BIT | BACK_BIT,
            only=_MESSAGES,
            omit=("arena", "capture", "completion", "order", "reduction", "version"),
        ),
        Scope(
            "domains-messages",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            receives=IN_BIT | BACK_BIT,
            only=tuple(n for n in _MESSAGES if "read" not in n and "abort" not in n),
            omit=("arena", "capture", "order", "reduction", "version"),
        ),
        Scope(
            "callers-messages",
            slots=(1,),
            cells=(2,),
            callers=2,
            generation_max=2,
            readers=OUT_BIT | GRAD_BIT,
            receives=BACK_BIT,
            only=_MESSAGES,
            omit=("arena", "capture", "order", "reduction", "version"),
            wrong_arguments=False,
        ),
        Scope(
            "callers-copies",
            slots=(1,),
            cells=(2,),
            callers=2,
            generation_max=2,
            readers=OUT_BIT,
            receives=COPY_BIT,
            only=tuple(n for n in _MESSAGES if "receive" not in n),
            omit=("arena", "capture", "order", "reduction", "version"),
            wrong_arguments=False,
        ),
        Scope(
            "stages-fed",
            slots=(1, 1),
            cells=(2, 2),
            generation_max=2,
            feeds=True,
            only=_POOL,
            omit=("arena", "capture", "completion", "order", "reduction", "version"),
        ),
        Scope(
            "stages-exchange",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            feeds=True,
            readers=OUT_BIT | GRAD_BIT,
            receives=IN_BIT | BACK_BIT,
            only=_MESSAGES,
            omit=("arena", "capture", "completion", "order", "reduction", "version"),
        ),
        Scope(
            "stage-buckets",
            slots=(1,),
            cells=(1,),
            callers=2,
            generation_max=1,
            epochs=2,
            buckets=((0, 0), (0, 0)),
            ordered=True,
            only=_REDUCE,
            omit=("arena", "capture", "order", "version"),
        ),
        Scope(
            "callers-update",
            slots=(1,),
            cells=(1,),
            callers=2,
            generation_max=2,
            epochs=2,
            only=(*_UPDATE, "bind", "invalidate", "fail"),
            omit=("arena", "capture", "order", "reduction"),
        ),
        Scope(
            "callers-weights",
            slots=(1,),
            cells=(1,),
            callers=2,
            generation_max=2,
            epochs=2,
            only=(*_UPDATE, *_WEIGHTS, "fail"),
            omit=("arena", "capture", "order", "reduction", "version"),
        ),
        Scope(
            "callers-gradients",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            callers=2,
            generation_max=1,
            reduces=True,
            only=(*_REDUCE, *_GRADIENTS),
            omit=("arena", "capture", "order", "version"),
            wrong_arguments=False,
        ),
        Scope(
            "stage-gradients",
            slots=(1,),
            cells=(1,),
            generation_max=2,
            walks=2,
            reduces=True,
            tickets=True,
            only=(*_REDUCE, *_GRADIENTS, "next_walk", "drain", "restore"),
            omit=("arena", "capture", "order", "version"),
        ),
        Scope(
            "stage-skips",
            slots=(1,),
            cells=(3,),
            generation_max=4,
            epochs=2,
            walks=2,
            skips=True,
            only=(*_SHARE, "reserve", "skip", "next_walk"),
            omit=("capture", "completion", "reduction", "version"),
        ),
        Scope(
            "stage-skips-epochs",
            slots=(1,),
            cells=(2,),
            generation_max=3,
            epochs=2,
            tickets=True,
            skips=True,
            only=(*_UPDATE, "bind", "skip", "restore"),
            omit=("capture", "completion", "order", "reduction"),
        ),
        Scope(
            "stage-skips-declared",
            slots=(2,),
            cells=(2,),
            generation_max=2,
            skips=True,
            declared=True,
            only=(*_SHARE, "skip"),
            omit=("capture", "completion", "reduction", "version"),
        ),
        Scope(
            "stage-evaluated",
            slots=(1,),
            cells=(1,),
            generation_max=1,
            epochs=2,
            walks=2,
            tickets=True,
            only=(*_UPDATE, *_EVALUATE, *_WEIGHTS, "next_walk", "restore"),
            omit=("arena", "capture", "reduction"),
        ),
        Scope(
            "stage-evaluated-reports",
            slots=(1,),
            cells=(1,),
            generation_max=1,
            reports=True,
            only=(*_UPDATE, *_EVALUATE),
            omit=("arena", "capture", "completion", "reduction"),
        ),
        Scope(
            "domains-evaluated",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            tickets=True,
            only=(*_EVALUATE, *_WEIGHTS, "submit", "join"),
            omit=("arena", "capture", "reduction"),
        ),
        Scope(
            "stages-tied",
            slots=(1, 1),
            cells=(1, 1),
            callers=2,
            generation_max=1,
            buckets=((0, 1), (1, 1)),
            only=_REDUCE,
            omit=("arena", "capture", "order", "version"),
        ),
        Scope(
            "stages-shared",
            slots=(1, 1),
            cells=(2, 2),
            generation_max=2,
            tied=True,
            tickets=True,
            only=_SHARE,
            omit=("capture", "completion", "order", "reduction", "version"),
        ),
        Scope(
            "stages-shared-streams",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            tied=True,
            only=(*_SHARE, "join", "wait"),
            omit=("capture", "order", "reduction", "version"),
            wrong_arguments=False,
        ),
        Scope(
            "domains-buckets",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            reduces=True,
            only=_REDUCE,
            omit=("arena", "capture", "order", "version"),
        ),
        Scope(
            "stage-shared-pool",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            shared_pool=True,
            only=_NO_FAULT,
        ),
        Scope(
            "stage-declared",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            shared_pool=True,
            declared=True,
            only=_NO_FAULT,
        ),
        Scope(
            "stages-two",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            tickets=True,
            shared_pool=True,
            only=_NO_FAULT,
        ),
        Scope(
            "stages-refreshed-in-pool",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=2,
            shared_pool=True,
            refreshes_in_pool=True,
            epochs=2,
            only=_NO_FAULT,
            omit=("arena", "completion", "reduction"),
        ),
        Scope(
            "stages-declared",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            shared_pool=True,
            declared=True,
            only=_NO_FAULT,
        ),
        Scope(
            "stage-reports",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            reports=True,
            tape_scales="carried",
            omit=("arena", "capture", "completion", "reduction"),
            only=_NO_FAULT,
        ),
        Scope(
            "callers-reports",
            slots=(1,),
            cells=(1,),
            callers=2,
            generation_max=1,
            readers=OUT_BIT | GRAD_BIT,
            receives=IN_BIT | BACK_BIT,
            reports=True,
            tape_scales="carried",
            only=tuple(name for name in TRANSITIONS if name not in (*_CLOSING, *_EVALUATE)),
            wrong_arguments=False,
        ),
        Scope(
            "stages-draws",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            draws=True,
            omit=("arena", "capture", "completion", "reduction"),
            only=_NO_FAULT,
        ),
        Scope(
            "stage-weights",
            slots=(1,),
            cells=(2,),
            generation_max=2,
            weights=True,
            omit=("arena", "capture", "completion", "reduction"),
            only=_NO_FAULT,
        ),
        Scope(
            "stages-live",
            slots=(1, 1),
            cells=(1, 1),
            generation_max=1,
            tape_scales="live",
            omit=("arena", "capture", "completion", "reduction"),
            only=_NO_FAULT,
        ),
        Scope(
            "stage-epoch-scales",
            slots=(1,),
            cells=(2,),
            generation_max=2,
            epochs=2,
            tickets=True,
            reports=True,
            tape_scales="live",
            epoch_scales=True,
            only=_SCALES,
            omit=("arena", "capture", "completion", "reduction", "version"),
        ),
        Scope(
            "domains-epoch-scales",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=2,
            epochs=2,
            tickets=True,
            epoch_scales=True,
            only=_SCALES,
            omit=("arena", "capture", "completion", "reduction", "version"),
        ),
        Scope(
            "stage-groups",
            slots=(3,),
            cells=(3,),
            generation_max=1,
            tickets=True,
            epoch_scales=True,
            groups=True,
            only=_GROUP,
            omit=("capture", "completion", "reduction", "version"),
            wrong_arguments=False,
        ),
        Scope(
            "stage-groups-scales",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            tickets=True,
            groups=True,
            only=_GROUP,
            omit=("capture", "completion", "reduction", "version"),
        ),
        Scope(
            "stage-groups-apart",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            tickets=True,
            epoch_scales=True,
            accumulate=False,
            groups=True,
            only=_GROUP,
            omit=("capture", "completion", "reduction", "version"),
        ),
        Scope(
            "stage-groups-faults",
            slots=(2,),
            cells=(2,),
            generation_max=2,
            epochs=2,
            tickets=True,
            readers=OUT_BIT,
            epoch_scales=True,
            groups=True,
            shared_pool=True,
            only=(
                *_GROUP,
                "reserve",
                "read",
                "finish_read",
                "finalize",
                "check_update",
                "move_scales",
                "commit_update",
                "fail",
            ),
            omit=("completion", "reduction", "version"),
        ),
        Scope(
            "domains-groups",
            slots=(2, 1),
            cells=(2, 1),
            domains=(0, 1),
            generation_max=1,
            tickets=True,
            groups=True,
            only=(*_GROUP, "submit", "join", "wait"),
            omit=("capture", "order", "reduction", "version"),
        ),
        Scope(
            "domains-two",
            slots=(1, 1),
            cells=(1, 1),
            domains=(0, 1),
            generation_max=1,
            only=_NO_REDUCTION,
            omit=("arena", "capture", "order", "reduction", "version"),
        ),
    )
    return {scope.name: scope for scope in scopes}


def large_scopes() -> Mapping[str, Scope]:
    """
    Return, by name, scopes with many states; they also serve to measure the explorer's speed.

    The pool of 4 slots, 4 keys and 3 generations has 540,184 states, as many as the same model in
    TLC and SPIN. A scope with ``-right`` in its name tries only right arguments, as these models
    do. The last pool and the last stage have more than five million states.
    """
    scopes = (
        pool_scope(4, 4, 2, wrong_arguments=False),
        pool_scope(4, 4, 3, wrong_arguments=False),
        pool_scope(4, 4, 3),
        pool_scope(4, 5, 4),
        Scope(
            "stage-small-right",
            slots=(2,),
            cells=(2,),
            generation_max=1,
            wrong_arguments=False,
            only=_NO_FAULT,
        ),
        Scope("stage-medium", slots=(2,), cells=(3,), generation_max=2, only=_NO_FAULT),
        Scope("stage-large", slots=(3,), cells=(3,), generation_max=2, epochs=2, only=_NO_FAULT),
    )
    return {scope.name: scope for scope in scopes}

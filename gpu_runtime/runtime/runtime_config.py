"""
`RuntimeConfig`: how a process runs its steps, what its device counts, and how its memory is used.

The flags that `mode` and `counts` replace (`captured`, `nested`, `device_counts`, `late_counts`)
are still accepted, but emit a DeprecationWarning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, get_args

import attrs
import torch

from qeffect.stage_config import Bucket
from qeffect.text import near, shown

from ..backends.protocol import BackendError
from ..step.memory.arena import Rule
from ..step.memory.tied_weights import Place
from ..step.memory.weight_copies import Copies
from ..step.plan.slots import Provisioning
from .step_mode import MODES, Mode, walks_obstacle

__all__ = ["COUNTS", "Counts", "RuntimeConfig"]

_T = TypeVar("_T")

Counts = Literal["commit", "next step"]
"""When the device's counts are compared with the committed actions."""
COUNTS: tuple[Counts, ...] = get_args(Counts)

_OLD = ("captured", "device_counts", "late_counts", "nested")


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """
    Replace old flags in the arguments of a `RuntimeConfig` with `mode` and `counts`.

    An old flag overrides the given mode and counts.

    Raises:
        ValueError: ``late_counts`` is set without ``device_counts``.
        TypeError: A flag is not a bool.
    """
    old = {name: given[name] for name in _OLD if name in given}
    for name, value in old.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"RuntimeConfig: {name} must be a bool, got {shown(value)}; write "
                f"{'mode=' if name in ('captured', 'nested') else 'counts='} instead"
            )
    new = {name: value for name, value in given.items() if name not in old}
    if not old:
        return new
    mode, counts = new.get("mode", "eager"), new.get("counts")
    if old.get("captured", mode != "eager"):
        new["mode"] = "one launch" if old.get("nested", mode == "one launch") else "replays"
    else:
        new["mode"] = "eager"
    counted = old.get("device_counts", counts is not None)
    late = old.get("late_counts", counts == "next step")
    if late and not counted:
        raise ValueError("late_counts=True needs device_counts=True; write counts='next step'")
    new["counts"] = "next step" if late else "commit" if counted else None
    if new["mode"] == "one launch":
        new["counts"] = "next step"
    choice = ", ".join(f"{name}={new[name]!r}" for name in ("mode", "counts"))
    warnings.warn(
        f"RuntimeConfig: {', '.join(old)} will be removed in the next release; write {choice}",
        DeprecationWarning,
        stacklevel=3,
    )
    return new


def _accepting_old_flags(cls: type[_T]) -> type[_T]:
    made: Callable[..., None] = cls.__init__

    @wraps(made)
    def init(self: _T, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise TypeError(
                f"{cls.__name__} takes its fields by name, as in {cls.__name__}(mode='replays'); "
                f"got {shown(unnamed[0])} without a name"
            )
        known = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known and name not in _OLD:
                raise TypeError(
                    f"{cls.__name__} has no field {name!r}; the fields are {', '.join(known)}"
                    f"{near(name, known)}"
                )
        made(self, **translated(given))

    cls.__init__ = init  # type: ignore[assignment]
    return cls


@_accepting_old_flags
@attrs.frozen(kw_only=True)
class RuntimeConfig:
    """
    How a process runs its steps.

    Args:
        mode: How a step runs. ``eager`` calls the backend. ``replays`` captures one CUDA graph per
            action and slot, and replays it. ``one launch`` calls the backend until a whole step
            is captured as one graph (`ranks/one_launch.py`), and then replays that graph.
        counts: Whether the device counts the actions that it runs, and when the counts are compared
            with the committed actions (`qeffect.counts`). With None nothing is counted. With
            ``commit`` the host waits for the step's last action and compares before the update.
            With ``next step`` the device compares, and skips the update if the counts differ. The
            host does not wait; after a skipped update, the next `finalize` or `checkpoint` is
            refused. The default is None. In mode ``one launch`` the default is ``next step``, and
            no other value is accepted.
        rule: Where dW writes (`step/memory/arena.py`). With ``accumulate`` all microbatches add to
            one buffer per matrix. With ``per_microbatch`` each microbatch has its own buffers. With
            ``copied`` each gradient is copied out of the memory of the FP8 library.
        walks: Largest number of walks (passes over the order) in an epoch, at least 1.
            `Runtime.next_walk` begins the next walk, and gradients accumulate over the walks. More
            than 1 needs the rule ``accumulate``, and a mode other than ``one launch``.
        group: Number of consecutive microbatches whose weight gradients one matrix product
            computes. It must divide the number of microbatches of a walk. 1 computes one product
            per microbatch. More than 1 needs three things. Scales must be updated once an epoch,
            because one product has one set of scales. The rule must be ``accumulate``. The dW of a
            group must follow one another in the order (`qeffect.schedule.grouping`). In bf16 the
            group size changes the bits of gradients, because one product is rounded once.
        dtype: dtype of the gradient destinations. If this dtype differs from the parameters' dtype,
            the optimizer needs master weights.
        provisioning: ``live`` gives each stage as many slots as it has microbatches in progress at
            once; ``static`` gives each stage one slot per microbatch.
        readers: Whether outputs and input gradients have a reader: a send, the next stage on this
            rank, or a recorder. A slot is free only after its readers have finished.
        feeds: Maps a local stage to the local stage that reads its output. The slot of the output
            is kept until the reading stage has finished.
        declared: Whether F and dI must run in the runtime's `order`. If False, the order of F and
            dI is not checked.
        callers: Names of the callers' streams.
        feeder: Name of a caller, one of `callers`. Its stream copies data into the slots of stages
            that take data, and F waits for this stream. The default, None, copies on the graph
            stream. `Pipeline` uses a feeder, except in mode ``one launch``: there the step's graph
            copies the data.
        pool: A CUDA graph memory pool that all slots share. None gives every slot its own pool,
            which is the only correct choice. Only a test sets a pool, to show that sharing is
            wrong.
        buckets: By stage, the gradients that are reduced together. Each matrix belongs to exactly
            one bucket. One bucket without matrices contains the gradients of all parameters that
            are not matrices. A stage that is not listed has one bucket with all its gradients. The
            name of this bucket is the stage's index.
        reductions: Names of all buckets, in the order in which every replica must start the
            reductions. If empty, this order is not checked.
        tied: Groups of matrices that are one parameter. Each matrix is given as stage and name. The
            matrices of a group share one gradient destination, and the gradient is listed under the
            first matrix. An undeclared parameter of two matrices raises an error.
        copies: Maps the name of a weight that exists several times to its copies. Copies are
            separate parameters with separate gradients. The reducer gets the gradients of all
            copies of this process under the weight's name, after all other gradients. The reducer
            must write the same sum into the gradients of all copies, including copies on other
            ranks.
        amax: With ``replica`` each replica computes scales from its own amaxes (largest absolute
            values). With ``replicas`` all replicas share their amaxes at the end of each epoch
            (`step/memory/scaling.py`). With ``replicas`` the reducer needs a method `largest`, as
            in `qeffect.gpu_runtime.ranks.replicas`. The contract then also requires the reduction
            of a bucket ``amax`` before the epoch commits.
        weights_sum: Expected sum of the microbatches' weighting factors in an epoch, as (numerator,
            denominator). Each microbatch's gradients are multiplied by such a factor. The sum is
            (1, R) if the gradients of R replicas are summed, and (1, 1) otherwise. The contract
            checks the sum for stages whose backend reports the factors. None disables the check. A
            `Worker` sets this sum.

    Raises:
        BackendError: A field has an unknown value, or the values of two fields contradict each
            other.
    """

    mode: Mode = "eager"
    counts: Counts | None = attrs.field(
        default=attrs.Factory(
            lambda self: "next step" if self.mode == "one launch" else None, takes_self=True
        )
    )
    rule: Rule = "accumulate"
    walks: int = 1
    group: int = 1
    dtype: torch.dtype = torch.bfloat16
    provisioning: Provisioning = "live"
    readers: bool = False
    feeds: Mapping[int, int] = attrs.field(factory=dict)
    declared: bool = True
    callers: tuple[Hashable, ...] = ("main",)
    feeder: Hashable | None = None
    pool: Hashable | None = None
    buckets: Mapping[int, Sequence[Bucket]] = attrs.field(factory=dict)
    reductions: Sequence[int | str] = ()
    tied: Sequence[Sequence[Place]] = ()
    copies: Copies = attrs.field(factory=dict)
    amax: str = "replica"
    weights_sum: tuple[int, int] | None = None

    def __attrs_post_init__(self) -> None:
        if self.mode not in MODES:
            raise BackendError(
                f"mode is {self.mode!r}; expected one of {', '.join(map(repr, MODES))}"
            )
        if self.counts is not None and self.counts not in COUNTS:
            raise BackendError(
                f"counts is {self.counts!r}; expected None or one of {', '.join(map(repr, COUNTS))}"
            )
        if self.mode == "one launch" and self.counts != "next step":
            raise BackendError(
                f"counts is {self.counts!r}; mode 'one launch' needs 'next step', which is its "
                "default: leave counts out"
            )
        self._require_positive("walks", "the largest number of walks over the order in an epoch")
        if self.walks > 1 and self.rule != "accumulate":
            raise BackendError(
                f"walks is {self.walks} and rule is {self.rule!r}: only the rule 'accumulate' adds "
                "the gradients of several walks in the order of their dW; set rule='accumulate'"
            )
        self._require_positive(
            "group", "the number of microbatches whose weight gradients are one product"
        )
        if self.group > 1 and self.rule != "accumulate":
            raise BackendError(
                f"group is {self.group} and rule is {self.rule!r}: one product of several "
                "microbatches writes one destination; set rule='accumulate', or group=1"
            )
        if self.mode == "one launch" and (why := walks_obstacle(self.walks)) is not None:
            raise BackendError(f"mode is 'one launch', but {why}, or set mode='replays'")
        if self.feeder is not None and self.feeder not in self.callers:
            raise BackendError(
                f"feeder is {shown(self.feeder)}; expected one of callers {self.callers}: add the "
                "feeder to callers"
            )
        if self.feeder is not None and self.mode == "one launch":
            raise BackendError(
                f"feeder is {shown(self.feeder)}: a step as one launch copies its data in its "
                "graph; set mode='replays', or leave feeder out"
            )

    def _require_positive(self, name: str, meaning: str) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < 1:
            raise BackendError(f"{name} is {shown(value)}; expected a positive integer, {meaning}")

    @property
    def replays_graphs(self) -> bool:
        """Whether CUDA graphs are replayed, either of single actions or of a whole step."""
        return self.mode != "eager"

    @property
    def counts_late(self) -> bool:
        """Whether the host learns the device's counts one step later."""
        return self.counts == "next step"

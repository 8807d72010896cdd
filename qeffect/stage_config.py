"""
Configuration of one pipeline stage of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final

from attrs import Attribute, field, frozen
from attrs.validators import in_, optional

from .destinations import Destination
from .keys import Cell, cell_of
from .relations.constants import (
    BACK_BIT,
    COPY_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    NEVER,
    OUT_BIT,
    WGRAD_BIT,
)
from .text import shown

__all__ = ["ADDED", "UNWEIGHTED", "Bucket", "StageConfig"]

#: Upper bound of stage indices, slots and cells of a stage: each has entries in lists.
_MOST: Final = 1 << 20


#: Stands for the weight (factor) of a gradient if the weight was not reported: in place of the
#: weight's number of parts, and of the epoch's number of parts.
UNWEIGHTED: Final = (NEVER, NEVER)

#: By option, the default value. A stage's plain data omit these options at their defaults, so that
#: older logs and checkpoints stay valid.
ADDED: Final[Mapping[str, Any]] = {
    "copies_input": False,
    "feeds": None,
    "reports_draws": False,
    "recomputes_draws": False,
    "weights_sum": None,
    "scales": "action",
    "refresh_pool": None,
}


def _at_least(least: int) -> Callable[[Any, Attribute[int], Any], None]:
    def validate(config: Any, attribute: Attribute[int], value: Any) -> None:
        if value.__class__ is not int:
            raise TypeError(f"{attribute.name} must be an integer, got {shown(value)}")
        if value < least:
            raise ValueError(f"{attribute.name} must be at least {least}, got {shown(value)}")
        if value > _MOST:
            raise ValueError(f"{attribute.name} must be at most {_MOST:,}, got {shown(value)}")

    return validate


def _flag(config: Any, attribute: Attribute[bool], value: Any) -> None:
    if value.__class__ is not bool:
        raise TypeError(f"{attribute.name} must be a bool, got {shown(value)}")


def _fraction(config: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is None:
        return
    pair = value if isinstance(value, tuple) else ()
    if len(pair) != 2 or not all(type(n) is int and 1 <= n <= _MOST for n in pair):
        raise TypeError(
            f"{attribute.name} must be (numerator, denominator), two integers from 1 to {_MOST:,}, "
            f"or None; got {shown(value)}"
        )


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # as plain data spells it


def _hashable(config: Any, attribute: Attribute[Any], value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{attribute.name} must be a hashable name, got {shown(value)}") from None


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"matrices must be a sequence of names, got {shown(names)}")
    given = tuple(names)
    if not all(isinstance(name, str) for name in given):
        raise TypeError(f"matrices must be names, got {shown(given)}")
    if len(set(given)) != len(given):
        raise ValueError(f"matrices must be named once each, got {shown(given)}")
    return tuple(sorted(given))


def _destinations(destinations: Iterable[Destination]) -> tuple[Destination, ...]:
    given = tuple(destinations) if isinstance(destinations, Iterable) else (destinations,)
    if not all(isinstance(destination, Destination) for destination in given):
        raise TypeError(f"destinations must be Destination objects, got {shown(given)}")
    return given


def _bucket_name(bucket: Any, attribute: Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"a bucket's name must be a string or an integer, got {shown(value)}")


@frozen
class Bucket:
    """
    Gradients that are reduced together.

    Two stages of one process that name the same bucket share it. A destination that both write,
    such as the gradient of tied embeddings, is reduced once, after the last dW of both.

    Args:
        name: Name of the bucket, unique in the process except for stages that share the bucket.
        matrices: The stage's matrices whose gradients the bucket holds. Empty for a bucket of other
            gradients (biases, norms), which are complete as soon as the matrices' gradients are
            complete.

    Raises:
        TypeError: A name is not a string (or, for the bucket, an integer).
        ValueError: A matrix is named twice.

    >>> Bucket("attention", ("qkv", "proj")).matrices
    ('proj', 'qkv')
    """

    name: int | str = field(validator=_bucket_name)
    matrices: tuple[str, ...] = field(default=(), converter=_names)


def _buckets(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    given = tuple(buckets) if isinstance(buckets, Iterable) else (buckets,)
    if not all(isinstance(bucket, Bucket) for bucket in given):
        raise TypeError(f"buckets must be Bucket objects, got {shown(given)}")
    names = [bucket.name for bucket in given]
    if len(set(names)) != len(names):
        raise ValueError(f"buckets must be named once each, got {shown(names)}")
    return given


def _placed(buffers: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    pairs: Any = buffers.items() if isinstance(buffers, Mapping) else buffers
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise TypeError(f"buffers must map matrices to names, got {shown(buffers)}")
    given = tuple(tuple(pair) for pair in pairs)
    if not all(len(pair) == 2 and all(isinstance(n, str) for n in pair) for pair in given):
        raise TypeError(f"buffers must map matrices to names, got {shown(buffers)}")
    if len({matrix for matrix, _ in given}) != len(given):
        raise ValueError(f"buffers must name each matrix once, got {shown(given)}")
    return tuple((matrix, name) for matrix, name in sorted(given))


@frozen
class StageConfig:
    """
    One pipeline stage (or virtual chunk) of this process.

    Args:
        stage: Global stage index.
        microbatches: Microbatches of one optimizer step, M.
        slots: Number of slots (sets of buffers) of the stage. A slot holds one tape (what one F
            leaves for its dI and dW) at a time, so the schedule's peak number of live tapes is
            enough.
        domain: Name of the state domain. Stages share a domain if one scaling update may change the
            FP8 scaling state of both, as an update of Transformer Engine does for all modules of a
            process.
        blocks: Number of sub-layer blocks per stage execution; each block has tapes of its own.
        invocations: How often one stage execution runs each block.
        matrices: Names of the weight matrices; dW must write the gradient of each matrix once.
        destinations: The buffer of each matrix gradient of each microbatch; see
            ``qeffect.destinations``. If empty, each matrix gets a symbolic buffer (one without an
            address) into which all microbatches accumulate.
        sends_output: Whether the forward's output has a reader (a send, or the next local stage)
            that must finish before the slot is free.
        sends_gradient: Whether the input gradient has a reader that must finish before the slot is
            free.
        receives_input: Whether a message brings the forward's input into the slot. F then runs only
            after the receive was posted and the message has arrived.
        receives_gradient: Whether a message brings the output's gradient into the slot. dI then
            runs only after the receive was posted and the message has arrived.
        reduces: Whether the stage's gradients are reduced over data-parallel ranks before the
            commit.
        reports_fills: Whether the backend reports which weight caches were filled, from the
            weights of which epoch (optimizer step). It reports this when a refresh (which
            quantizes the weights into the caches) or an F is committed. Otherwise the contract
            trusts that a refresh filled the caches.
        reports_updates: Whether the backend reports, at the commit of F and dI, how often the
            domain's scaling state was updated. Otherwise the contract trusts that one update ran
            (with ``scales="epoch"``, no update).
        tape_scales: The scales with which dI dequantizes its tape. With ``carried``, the tape keeps
            the scales of its F, and dI reports which scales it used. With ``live``, dI reads the
            domain's current scales. With None, the backend cannot tell which scales dI used, and
            the contract trusts that dI used the scales of its own F.
        pool: Name of the capture-memory pool that the stage's slots share; None gives every
            slot a pool of its own.
        buckets: The gradients that are reduced together, each matrix in one bucket; requires
            ``reduces``. By default one bucket with all matrices, named by the stage's index.
        buffers: For each matrix, the name of its gradient's destination. Two matrices, even of
            different stages, may name the same destination. A matrix that is left out has its own
            memory.
        tied: Matrices that share their named destination with another matrix, as tied weights do.
            Both matrices must be declared tied, otherwise sharing is refused. See
            ``qeffect.sharing``.
        copies_input: Whether a caller's stream copies the forward's input into the slot, for
            example from the host. If so, call `Contract.reserve` before the copy, with this
            stream's link (its pair with the graph stream). The contract then records the copy as
            work of the stream. F runs only in a slot that its key has reserved, and only after the
            graph stream has waited for the copy.
        feeds: The stage of this process whose input is this stage's output, as in interleaved and
            V-shaped schedules. F of the target stage then runs after F of this stage with the same
            microbatch, and dI of this stage runs after dI of the target. Without messages
            (`receives_input` of the target, `receives_gradient` of this stage) both stages need the
            same state domain. One case has no guard: without messages, dI of this stage reads the
            gradient that dI of the target left in the target's slot. Copy this gradient before
            the target's slot is used again, or set the target's `sends_gradient`: the slot then
            stays occupied until the reader has called `finish_read`.
        reports_draws: Whether the stage draws random numbers, as dropout does, and reports their
            position: at the commit of F, the backend reports the random generator's position at
            which F began to draw. Otherwise the contract trusts that no replay repeats the numbers
            of another.
        recomputes_draws: Whether dI recomputes the forward, and reports the position of its random
            numbers: at the commit of dI, the backend reports the position at which the
            recomputation began to draw. Requires ``reports_draws``.
        weights_sum: The sum of the weights (factors) of one epoch's gradients, as (numerator,
            denominator). The backend then reports each weight at the commit of dI. Give (1, 1) if
            each microbatch's loss is divided, for example by M, so that the epoch's gradient is a
            mean. Give (1, R) if the gradients of R replicas are then summed. With None, nothing is
            reported, and the contract trusts the scale of the loss. If a microbatch has several
            blocks or invocations, each of them has a weight, and the sum is multiplied by their
            number.
        scales: When the scaling state of the stage's domain moves (is updated). With ``action``,
            each F and dI moves the scales, as delayed scaling does by default. With ``epoch``, F
            and dI only gather amaxes (maxima of absolute values), and the optimizer's update moves
            the scales once (`Contract.move_scales`). F and dI then report 0 scaling updates, and
            the optimizer's update reports 1. All stages of a domain have the same value.
        refresh_pool: Name of the capture-memory pool in which the graph of the stage's refresh was
            captured, if slots share that pool (`pool` of this or another stage). The refresh must
            then keep the pool's order of capture; ``capture_order`` names the graph of the refresh
            as (stage, "refresh"). The cache itself must lie outside the pool. With None, the graph
            of the refresh has a pool of its own.

    Raises:
        TypeError: A count is not an integer, a flag not a ``bool``, a fraction not two positive
            integers, or a name not a string.
        ValueError: A count is out of range, a matrix is named twice, buckets do not hold every
            matrix once, or a tied matrix has no name in ``buffers``.

    >>> StageConfig(0, microbatches=2, slots=1, matrices=("qkv", "fc1")).matrices
    ('fc1', 'qkv')
    >>> StageConfig(0, microbatches=0, slots=1)
    Traceback (most recent call last):
    ...
    ValueError: microbatches must be at least 1, got 0
    """

    stage: int = field(validator=_at_least(0))
    microbatches: int = field(validator=_at_least(1))
    slots: int = field(validator=_at_least(1))
    domain: Hashable = field(default=0, validator=_hashable)
    blocks: int = field(default=1, validator=_at_least(1))
    invocations: int = field(default=1, validator=_at_least(1))
    matrices: tuple[str, ...] = field(default=(), converter=_names)
    destinations: tuple[Destination, ...] = field(default=(), converter=_destinations)
    sends_output: bool = field(default=False, validator=_flag)
    sends_gradient: bool = field(default=False, validator=_flag)
    reduces: bool = field(default=False, validator=_flag)
    reports_fills: bool = field(default=False, validator=_flag)
    reports_updates: bool = field(default=False, validator=_flag)
    tape_scales: str | None = field(default=None, validator=optional(in_(("carried", "live"))))
    pool: Hashable | None = field(default=None, validator=_hashable)
    receives_input: bool = field(default=False, validator=_flag)
    receives_gradient: bool = field(default=False, validator=_flag)
    buckets: tuple[Bucket, ...] = field(default=(), converter=_buckets)
    buffers: tuple[tuple[str, str], ...] = field(default=(), converter=_placed)
    tied: tuple[str, ...] = field(default=(), converter=_names)
    copies_input: bool = field(default=False, validator=_flag)
    feeds: int | None = field(default=None, validator=optional(_at_least(0)))
    reports_draws: bool = field(default=False, validator=_flag)
    recomputes_draws: bool = field(default=False, validator=_flag)
    weights_sum: tuple[int, int] | None = field(default=None, converter=_pair, validator=_fraction)
    scales: str = field(default="action", validator=in_(("action", "epoch")))
    refresh_pool: Hashable | None = field(default=None, validator=_hashable)

    def __attrs_post_init__(self) -> None:
        if (count := self.microbatches * self.blocks * self.invocations) > _MOST:
            raise ValueError(
                f"microbatches * blocks * invocations of stage {self.stage} is {count:,}; "
                f"expected at most {_MOST:,}"
            )
        if self.copies_input and self.receives_input:
            raise ValueError(
                f"stage {self.stage} has copies_input=True and receives_input=True; a stage "
                "gets its input in one way only"
            )
        if self.recomputes_draws and not self.reports_draws:
            raise ValueError(
                f"stage {self.stage} has recomputes_draws=True, which needs reports_draws=True: "
                "dI is compared with what F reported"
            )
        if self.reports_fills and not self.matrices:
            raise ValueError(
                f"stage {self.stage} has reports_fills=True but no matrices, so it fills no cache"
            )
        named = [matrix for matrix, _ in self.buffers]
        for what, names, known in (
            ("buffers", named, list(self.matrices)),
            ("tied", self.tied, named),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(
                    f"{what} of stage {self.stage}: {unknown} are not among {known}; buffers "
                    "must name matrices of the stage, and tied must name matrices that are in "
                    "buffers"
                )
        if not self.buckets:
            return
        if not self.reduces:
            raise ValueError(f"stage {self.stage} has buckets, which need reduces=True")
        held = sorted(name for bucket in self.buckets for name in bucket.matrices)
        if held != list(self.matrices):
            raise ValueError(
                f"the buckets of stage {self.stage} must hold each of its matrices once: expected "
                f"{list(self.matrices)}, got {held}"
            )

    def reductions(self) -> tuple[Bucket, ...]:
        """
        Return the stage's buckets (gradients that are reduced together); empty without ``reduces``.

        >>> StageConfig(3, microbatches=1, slots=1, matrices=("w",), reduces=True).reductions()
        (Bucket(name=3, matrices=('w',)),)
        """
        if self.buckets or not self.reduces:
            return self.buckets
        return (Bucket(self.stage, self.matrices),)

    def cells(self) -> tuple[Cell, ...]:
        """
        Return every key of the stage without its epoch, in microbatch order.

        >>> StageConfig(3, microbatches=2, slots=1).cells()
        ((3, 0, 0, 0), (3, 1, 0, 0))
        """
        return tuple(
            cell_of(self.stage, m, b, i)
            for m in range(self.microbatches)
            for b in range(self.blocks)
            for i in range(self.invocations)
        )

    def counted(self, weight: Any) -> tuple[int, int]:
        """
        Return a microbatch's weight as a number of equal parts, so that weights can be added
        exactly.

        Args:
            weight: The factor by which one microbatch's gradient is weighted, as (numerator,
                denominator); the numerator is at least 0, the denominator at least 1.

        Returns:
            The weight's number of parts, and the number of parts that the epoch's weights must add
            up to; (-1, -1) if the weight cannot be read or `weights_sum` is None.

        >>> StageConfig(0, microbatches=4, slots=1, weights_sum=(1, 2)).counted((1, 8))
        (2, 8)
        """
        if self.weights_sum is None or not isinstance(weight, (tuple, list)) or len(weight) != 2:
            return UNWEIGHTED
        numerator, denominator = weight
        if type(numerator) is not int or type(denominator) is not int:
            return UNWEIGHTED
        if numerator < 0 or denominator < 1:
            return UNWEIGHTED
        above, below = self.weights_sum
        return numerator * below, denominator * above * self.blocks * self.invocations

    def on_trust(self) -> tuple[str, ...]:
        """
        Return the facts that the stage's backend does not report, and that the contract must trust.

        >>> told = {"reports_fills": True, "tape_scales": "live"}
        >>> StageConfig(0, microbatches=1, slots=1, matrices=("w",), **told).on_trust()
        ('F and dI update scales once each',)
        """
        claims = (
            (self.reports_fills, "a refresh fills every cache from the current weights"),
            (self.reports_updates, "F and dI update scales once each"),
            (self.tape_scales is not None, "dI uses the scales of its own F"),
        )
        return tuple(claim for reported, claim in claims if not reported)

    def consumers(self) -> int:
        """
        Return the bit mask of a tape's consumers (dI, dW and sends), which must finish before its
        slot is free.
        """
        return (
            DGRAD_BIT
            | WGRAD_BIT
            | (OUT_BIT if self.sends_output else 0)
            | (GRAD_BIT if self.sends_gradient else 0)
        )

    def messages(self) -> int:
        """Return the bit mask of the messages and the input copy that F and dI wait for."""
        return (
            (IN_BIT if self.receives_input else 0)
            | (BACK_BIT if self.receives_gradient else 0)
            | (COPY_BIT if self.copies_input else 0)
        )

"""
What one pipeline stage of a process is configured with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final

from attrs import Attribute, field, frozen
from attrs.validators import in_, optional

from .destinations import Destination
from .keys import Cell, cell_of
from .relations.constants import BACK_BIT, DGRAD_BIT, GRAD_BIT, IN_BIT, OUT_BIT, WGRAD_BIT
from .text import shown

__all__ = ["Bucket", "StageConfig"]

#: The largest stage; and most slots, and most cells of a stage, all of which have entries in lists.
_MOST: Final = 1 << 20


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

    Two stages of one process that name the same bucket share it: a destination that both write,
    as tied embeddings do, is reduced once, after the last dW of both.

    Args:
        name: Its name, different from every other bucket of the process.
        matrices: The stage's matrices whose gradients it holds; none for a bucket of gradients
            that are no matrix, which are whole when the stage's are.

    Raises:
        TypeError, ValueError: A name cannot be one, or a matrix is named twice.

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
        raise TypeError(f"buffers must be names by matrix, got {shown(buffers)}")
    given = tuple(tuple(pair) for pair in pairs)
    if not all(len(pair) == 2 and all(isinstance(n, str) for n in pair) for pair in given):
        raise TypeError(f"buffers must be names by matrix, got {shown(buffers)}")
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
        slots: Slots of the stage's pool; the schedule's peak of live tapes is enough.
        domain: Name of the state domain. Stages whose scaling state one update may roll, as that
            of Transformer Engine goes over every module of the process, share one.
        blocks: Sub-layer blocks taped apart in each execution.
        invocations: Invocations of each block in one execution.
        matrices: Names of the weight matrices whose gradients dW must cover, each once.
        destinations: Where each matrix gradient of each microbatch lands; see
            ``qeffect.destinations``. Empty means a symbolic accumulating buffer for every matrix.
        sends_output: The forward's output has a reader (a send, or the next local stage) that
            must finish before the slot is free.
        sends_gradient: Likewise the input gradient.
        receives_input: A message brings the forward's input into the slot; F runs only after it
            was posted and has arrived.
        receives_gradient: Likewise the output's gradient, before dI.
        reduces: The stage's gradients are reduced over data-parallel ranks before the commit.
        reports_fills: The backend reports, at the commit of a refresh and of F, which matrices'
            caches were filled and from which weight epoch. Where it does not, that a refresh
            filled the cache is taken on trust.
        reports_updates: The backend reports, at the commit of F and dI, how often the domain's
            scaling state was updated. Where it does not, that it was once is taken on trust.
        tape_scales: What dI dequantizes its tape with: ``carried`` where a tape keeps the scales
            of its F, and dI reports which it used; ``live`` where it reads what the domain has
            by then; None where the backend cannot say, and it is taken on trust.
        pool: Name of the capture-memory pool that the stage's slots share; None gives every
            slot a pool of its own.
        buckets: The gradients that are reduced together, each matrix in one bucket; only where
            the stage reduces. By default all of the stage, in a bucket named as its index.
        buffers: By matrix, the name of the memory that its gradient's destination is; another
            matrix, of this stage or another one, may name the same. Without a name it is memory
            of the matrix's own.
        tied: Matrices that share the destination they name with another matrix, as tied weights
            do. Both must be declared: what names one destination undeclared is refused. See
            ``qeffect.sharing``.

    Raises:
        TypeError, ValueError: A count is not a positive integer, a flag is no ``bool``, a matrix
            is named twice, a name cannot be one, buckets do not hold every matrix once, or a
            matrix is tied whose destination has no name.

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

    def __attrs_post_init__(self) -> None:
        if (count := self.microbatches * self.blocks * self.invocations) > _MOST:
            raise ValueError(
                f"microbatches, blocks and invocations of stage {self.stage} make {count:,} cells; "
                f"expected at most {_MOST:,} in all"
            )
        if self.reports_fills and not self.matrices:
            raise ValueError(f"stage {self.stage} has no matrices, so it has no fills to report")
        named = [matrix for matrix, _ in self.buffers]
        for what, names, known in (
            ("buffers", named, list(self.matrices)),
            ("tied", self.tied, named),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(
                    f"{what} of stage {self.stage}: {unknown} are none of {known}; tied matrices "
                    "need a name in buffers, and buffers are of the stage's matrices"
                )
        if not self.buckets:
            return
        if not self.reduces:
            raise ValueError(f"stage {self.stage} has buckets; they need reduces=True")
        held = sorted(name for bucket in self.buckets for name in bucket.matrices)
        if held != list(self.matrices):
            raise ValueError(
                f"the buckets of stage {self.stage} must hold each of its matrices once: expected "
                f"{list(self.matrices)}, got {held}"
            )

    def reductions(self) -> tuple[Bucket, ...]:
        """
        Buckets of the stage that are reduced.

        >>> StageConfig(3, microbatches=1, slots=1, matrices=("w",), reduces=True).reductions()
        (Bucket(name=3, matrices=('w',)),)
        """
        if self.buckets or not self.reduces:
            return self.buckets
        return (Bucket(self.stage, self.matrices),)

    def cells(self) -> tuple[Cell, ...]:
        """
        Every key of the stage without its epoch, in microbatch order.

        >>> StageConfig(3, microbatches=2, slots=1).cells()
        ((3, 0, 0, 0), (3, 1, 0, 0))
        """
        return tuple(
            cell_of(self.stage, m, b, i)
            for m in range(self.microbatches)
            for b in range(self.blocks)
            for i in range(self.invocations)
        )

    def on_trust(self) -> tuple[str, ...]:
        """
        What the stage's backend does not report, so that it is taken on trust; empty for nothing.

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
        """Mask of the consumers that a fresh tape of this stage waits for."""
        return (
            DGRAD_BIT
            | WGRAD_BIT
            | (OUT_BIT if self.sends_output else 0)
            | (GRAD_BIT if self.sends_gradient else 0)
        )

    def messages(self) -> int:
        """Mask of the messages that F and dI of a tape of this stage wait for."""
        return (IN_BIT if self.receives_input else 0) | (BACK_BIT if self.receives_gradient else 0)

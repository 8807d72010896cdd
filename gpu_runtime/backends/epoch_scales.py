"""
FP8 scales that move (are updated) once an epoch (optimizer step), and the methods that a domain
with such scales adds to `StateDomain`. A domain is the stages whose scales are updated together.

By default the library moves scales at the end of every F and dI, so the bits of a step depend on
the order of its microbatches. In a domain of epoch scales, F and dI only gather amaxes: the newest
entry of a history stays open, and keeps the largest amax of all casts. `move_scales` then moves all
scales of the domain once, in the same way as F and dI do by default. The contract counts this
movement as one effect of the update.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

from .protocol import BackendError, StateDomain

__all__ = [
    "SCALES",
    "EpochScales",
    "Scales",
    "begin_forward",
    "move_scales",
    "moves_once",
    "require_scales",
]

Scales = Literal["action", "epoch"]
"""When scales move: at the end of every F and dI, or once at the end of an epoch."""
SCALES: Final[tuple[Scales, ...]] = ("action", "epoch")


class EpochScales(Protocol):
    """
    The interface of a domain whose `scales` are ``epoch``; other domains may lack these methods.
    """

    @property
    def scales(self) -> str:
        """When scales move: ``action`` or ``epoch``."""

    def move_scales(self) -> None:
        """Close the open entry of every history, forward and backward, and move each scale once."""

    def begin_forward(self, epoch: int, microbatch: int) -> None:
        """
        Announce the microbatch of the next F; dropout's random numbers depend on the microbatch.
        """


def require_scales(scales: str) -> None:
    """
    Raise an error if the value of `scales` is unknown.

    Raises:
        ValueError: The value is unknown.
    """
    if scales not in SCALES:
        raise ValueError(f"scales must be 'action' or 'epoch', got {scales!r}")


def moves_once(domain: StateDomain) -> bool:
    """Whether a domain's scales move once an epoch, by `move_scales`."""
    return getattr(domain, "scales", "action") == "epoch"


def move_scales(domain: StateDomain) -> None:
    """
    Move the scales of a domain of epoch scales; do nothing for other domains, whose scales have
    already moved.
    """
    if moves_once(domain):
        held: Any = domain
        held.move_scales()


def begin_forward(domain: StateDomain, epoch: int, microbatch: int) -> None:
    """Announce the microbatch of the next F, if the domain needs it."""
    told = getattr(domain, "begin_forward", None)
    if told is not None:
        told(epoch, microbatch)


def unnamed() -> BackendError:
    """Return the error for dropout in an F whose microbatch was not announced."""
    return BackendError(
        "dropout under scales='epoch' draws by layer, microbatch and epoch, but the microbatch of "
        "this F is unknown; call begin_forward(epoch, microbatch) of the domain first"
    )

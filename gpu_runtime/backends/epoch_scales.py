"""
FP8 scales that are updated once an epoch (optimizer step), and the methods that a domain with such
scales adds to `StateDomain`. A domain consists of the stages whose scales are updated together. The
code calls an update of the scales a move.

By default the library updates scales at the end of every F and dI, so the bits of a step depend on
the order of its microbatches. In a domain of epoch scales, F and dI only gather amaxes (largest
absolute values). The newest entry of an amax history stays open, and keeps the largest amax of all
casts. `move_scales` then updates all scales of the domain once, in the same way as F and dI do by
default. The contract counts this as one effect of the optimizer's update.
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
    The interface of a domain whose `scales` are ``epoch``. Other domains may lack these methods.
    """

    @property
    def scales(self) -> str:
        """When scales are updated: ``action`` (at every F and dI) or ``epoch`` (once an epoch)."""

    def move_scales(self) -> None:
        """
        Close the open entry of every forward and backward amax history, and update each scale once.
        """

    def begin_forward(self, epoch: int, microbatch: int) -> None:
        """
        Set the microbatch of the next F, because dropout's random numbers depend on the microbatch.
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
    """Whether a domain's scales are updated once an epoch, by `move_scales`."""
    return getattr(domain, "scales", "action") == "epoch"


def move_scales(domain: StateDomain) -> None:
    """
    Update the scales of a domain with epoch scales. Do nothing for other domains, because F and dI
    have already updated their scales.
    """
    if moves_once(domain):
        held: Any = domain
        held.move_scales()


def begin_forward(domain: StateDomain, epoch: int, microbatch: int) -> None:
    """Set the microbatch of the next F, if the domain has epoch scales."""
    told = getattr(domain, "begin_forward", None)
    if told is not None:
        told(epoch, microbatch)


def unnamed() -> BackendError:
    """Return the error for an F with dropout whose microbatch was not set by `begin_forward`."""
    return BackendError(
        "dropout under scales='epoch' draws by layer, microbatch and epoch, but the microbatch of "
        "this F is unknown; call begin_forward(epoch, microbatch) of the domain first"
    )

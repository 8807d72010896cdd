"""
Scales that move once an epoch, and what a domain of such scales offers beside `StateDomain`.

By default the library moves scales at the end of every F and dI, so the bits of a step depend on
the order of its microbatches. In a domain of epoch scales, F and dI only gather: a cast takes the
maximum of its tensor's amax into the open entry of the history. `move_scales` moves all scales of
the domain once, as the end of F and of dI does by default. It is one effect of the update.
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
    """What a domain whose `scales` are ``epoch`` offers; a domain without `scales` has none."""

    @property
    def scales(self) -> str:
        """When scales move: ``action`` or ``epoch``."""

    def move_scales(self) -> None:
        """Close the open entry of every history of both directions, and move every scale, once."""

    def begin_forward(self, epoch: int, microbatch: int) -> None:
        """Name the microbatch of the next F, from which dropout's numbers follow."""


def require_scales(scales: str) -> None:
    """
    Require a known value of `scales`.

    Raises:
        ValueError: The value is unknown.
    """
    if scales not in SCALES:
        raise ValueError(f"scales must be 'action' or 'epoch', got {scales!r}")


def moves_once(domain: StateDomain) -> bool:
    """Whether a domain's scales move once an epoch, by `move_scales`."""
    return getattr(domain, "scales", "action") == "epoch"


def move_scales(domain: StateDomain) -> None:
    """Move the scales of a domain of epoch scales; scales of other domains have moved already."""
    if moves_once(domain):
        held: Any = domain
        held.move_scales()


def begin_forward(domain: StateDomain, epoch: int, microbatch: int) -> None:
    """Name the microbatch of the next F, if the domain asks for it."""
    told = getattr(domain, "begin_forward", None)
    if told is not None:
        told(epoch, microbatch)


def unnamed() -> BackendError:
    """The error of dropout whose F runs for no named microbatch."""
    return BackendError(
        "dropout under scales='epoch' draws by layer, microbatch and epoch, but the microbatch of "
        "this F is unknown; call begin_forward(epoch, microbatch) of the domain first"
    )

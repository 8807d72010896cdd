"""Releases of a framework that a guard was tested with."""

from __future__ import annotations

import re

from .reports import LOGGER, Manner

__all__ = ["UntestedReleaseError", "check_release"]


class UntestedReleaseError(RuntimeError):
    """The guard was not tested with this release of its framework."""


def check_release(
    name: str, found: str, oldest: str, newest: str, *, manner: Manner, untested: bool
) -> None:
    """
    Warn of a release that the guard was not tested with, or refuse it.

    Args:
        name: Name of the framework.
        found: Its installed release.
        oldest: The oldest release that was tested, as major and minor number.
        newest: The newest release that was tested.
        manner: ``report`` warns; ``refuse`` raises, unless `untested` is set.
        untested: Whether the caller asks for a guard of an untested release.

    Raises:
        UntestedReleaseError: In manner ``refuse``.
    """
    if _minor(oldest) <= _minor(found) <= _minor(newest):
        return
    said = f"this guard was tested with {name} {oldest} to {newest}; {found} is installed"
    if manner == "refuse" and not untested:
        raise UntestedReleaseError(
            f"{said}; pass untested=True to guard it all the same, or manner='report'"
        )
    LOGGER.warning("%s", said)


def _minor(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])

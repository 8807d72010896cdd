"""Check whether a guard was tested with the installed release of its framework."""

from __future__ import annotations

import re

from .reports import LOGGER, Manner

__all__ = ["UntestedReleaseError", "check_release"]


class UntestedReleaseError(RuntimeError):
    """The guard was not tested with this release of its framework."""


def check_release(name: str, found: str, *tested: str, manner: Manner, untested: bool) -> None:
    """
    Warn about a release that the guard was not tested with, or refuse this release.

    If the release is between two tested releases, both manners only warn.

    Args:
        name: Name of the framework.
        found: The installed release of the framework.
        tested: The tested releases, oldest first, each with major and minor number, such as
            ``2.13``.
        manner: ``report`` warns. ``refuse`` raises an error, unless `untested` is True.
        untested: Whether the caller accepts an untested release.

    Raises:
        UntestedReleaseError: The release is untested, the manner is ``refuse``, and `untested` is
            False.
    """
    known = [_minor(release) for release in tested]
    if _minor(found) in known:
        return
    if known[0] < _minor(found) < known[-1]:
        each = ", ".join(tested)
        LOGGER.warning("this guard was tested with %s %s, not with %s", name, each, found)
        return
    oldest, newest = tested[0], tested[-1]
    said = f"this guard was tested with {name} {oldest} to {newest}; {found} is installed"
    if manner == "refuse" and not untested:
        raise UntestedReleaseError(
            f"{said}; pass untested=True to use the guard anyway, or manner='report'"
        )
    LOGGER.warning("%s", said)


def _minor(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])

"""
What the installed torch lacks: tests of what only later releases have are skipped, with the reason.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

import pytest

__all__ = ["DEFERS_RECEIVES", "LACKS_DEFERRED", "NEEDS_DEFERRED"]


def _release() -> tuple[int, ...]:
    """The installed torch's major and minor number; () without torch."""
    try:
        return tuple(int(part) for part in version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ()


DEFERS_RECEIVES: Final = _release() >= (2, 13)
"""Whether this release must have the option `defer_pp_recv`."""

LACKS_DEFERRED: Final = "torch has the option defer_pp_recv only from 2.13 on"
"""Why a test that needs the option is skipped."""

NEEDS_DEFERRED: Final = pytest.mark.skipif(not DEFERS_RECEIVES, reason=LACKS_DEFERRED)
"""The mark of a test that needs the option."""

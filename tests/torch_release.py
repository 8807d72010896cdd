"""
Skip marks, with reasons, for tests of features that the installed torch does not have yet.
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
"""Whether torch is installed in a release that has the option `defer_pp_recv`."""

LACKS_DEFERRED: Final = "needs torch 2.13 or later, which has the option defer_pp_recv"
"""Why a test that needs the option is skipped."""

NEEDS_DEFERRED: Final = pytest.mark.skipif(not DEFERS_RECEIVES, reason=LACKS_DEFERRED)
"""The mark of a test that needs the option."""

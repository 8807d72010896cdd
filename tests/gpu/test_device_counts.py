"""Device counts over real graphs: counters inside the graphs record which graphs ran."""

from __future__ import annotations

import pytest

from ..runtime.device_counts import DeviceCountsCases, LateCountsCases
from ..runtime.injection import Injection
from .helpers import CapturedInjection


class TestCaptured(DeviceCountsCases):
    """Every fault that no guard sees, while graphs are live."""

    @pytest.fixture
    def injected(self) -> Injection:
        """A captured run before its second epoch."""
        return CapturedInjection(counts="commit")


class TestLate(LateCountsCases):
    """The same faults, found by the device itself, which skips the update."""

    @pytest.fixture
    def injected(self) -> Injection:
        """A captured run before its second epoch."""
        return CapturedInjection(counts="next step")

"""
Every row of the paper's fault table, injected on a CPU into the eager runtime and into a runtime
whose stand-in graphs are live.
"""

from __future__ import annotations

import pytest

from qeffect.gpu_runtime.lab.comparisons.faults import ROWS, LocalReduction

from .fault_table import FaultTable
from .injection import Injection
from .stand_ins import install


@pytest.fixture(params=["eager", "stand-in graphs"])
def injected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Injection:
    """A run of the reference backend, before its second epoch, with a reduction over one rank."""
    captured = request.param != "eager"
    if captured:
        install(monkeypatch)
    made = Injection(reducer=LocalReduction(), captured=captured)
    assert captured is (getattr(made.run.runtime.executor, "num_replays", 0) > 0)
    return made


class TestFaultTable(FaultTable):
    """The reference backend."""

    def test_there_is_a_test_for_every_row(self) -> None:
        """Seven rows, seven tests beside this one."""
        tests = [name for name in dir(FaultTable) if name.startswith("test_")]

        assert 7 == len(ROWS) == len(tests)

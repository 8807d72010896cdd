"""
The suite's configuration: its profile, the record of a run, and the speed of a worker.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import profiles
from tests.ports import free_port
from tests.record import Recorder

# A worker of xdist has one core: a second thread of torch would wait for another worker's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each worker's torchrun has a port of its own. Two that take torchrun's default can meet.
os.environ["PET_MASTER_PORT"] = str(free_port())
# Test collection makes millions of lasting objects; a third of its time would go to garbage
# collection among them.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for a record of the run."""
    parser.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="JSON file for a dated record of the run: commit, hardware, versions, counts",
    )
    parser.addoption(
        "--resume",
        action="store_true",
        help="resume the run of --record that was cut off: skip the tests that have ended",
    )
    parser.addoption("--commit", help="commit that the record names (default: the checkout's)")


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile; write a record if ``--record`` asks for it."""
    named = config.getoption("hypothesis_profile", None)
    if named not in (None, profiles.PROFILE):
        raise pytest.UsageError(
            f"--hypothesis-profile={named}: expected the profile in the environment; "
            f"set HYPOTHESIS_PROFILE={named}"
        )
    try:
        profiles.load()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if not selects_devices(config.getoption("markexpr")):
        # Tests that need no GPU must behave alike on machines that have GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes background programs ignore interrupts, and every program that a test
        # starts and interrupts would inherit this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    file = config.getoption("record")
    if file is None and config.getoption("resume"):
        raise pytest.UsageError("--resume needs --record FILE: the record of the run to resume")
    if file is not None and not hasattr(config, "workerinput"):
        recorder = Recorder(file.absolute(), config, resumed=config.getoption("resume"))
        config.pluginmanager.register(recorder, "qeffect record")
        # A signal from `timeout` ends the run as Ctrl-C does: with the failures so far, and a
        # record.
        signal.signal(signal.SIGTERM, recorder.break_off)


@pytest.fixture(autouse=True, scope="module")
def _kept_aside() -> Iterator[None]:
    """
    Collect garbage once after each module, then exclude the remaining objects from collection.

    The tables that test modules keep have millions of objects. If these objects were included, each
    garbage collection would take many seconds, and the programs under test request collections.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_rank() -> Iterator[None]:
    """
    Require that a test leaves no rank's variables in the environment of this process.

    Processes that later tests start would inherit these variables, and would connect to the same
    port.
    """
    yield
    found = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    assert not found, (
        f"expected no rank's variables after the test, found {found}; start ranks in new processes"
    )


def selects_devices(expression: str) -> bool:
    """Whether a marker expression selects a test whose only marker is ``gpu``."""
    names: defaultdict[str, bool] = defaultdict(bool, gpu=True)
    return not expression or bool(eval(expression, {"__builtins__": {}}, names))


def pytest_report_header() -> str:
    """The profile of this run, and the reason for its choice."""
    return profiles.described()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Deselect tests marked ``ci`` under the profile ``dev``, and tests that ended in an earlier part
    of the run.

    Tests of one long sweep stay together.
    """
    for item in items:
        # `--dist loadgroup` then runs each part of a sweep once. Other values of `--dist` ignore
        # groups.
        if "report" in getattr(item, "fixturenames", ()) and item.get_closest_marker("slow"):
            callspec = getattr(item, "callspec", None)
            part = callspec.indices.get("share", 0) if callspec is not None else 0
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{part}"))
    # Longest tests first, so that no worker begins one when the others end.
    items.sort(key=_minutes, reverse=True)
    ended = _ended(config)
    left = {item for item in items if _is_left_out(item, ended)}
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def _ended(config: pytest.Config) -> frozenset[str]:
    """The tests that have ended in earlier parts of this run."""
    if hasattr(config, "workerinput"):
        return frozenset(config.workerinput.get("ended", ()))
    recorder = config.pluginmanager.get_plugin("qeffect record")
    return frozenset() if recorder is None else recorder.before


def _is_left_out(item: pytest.Item, ended: frozenset[str]) -> bool:
    """Whether a test has ended already, or does not run under this profile."""
    if profiles.THINNED and item.get_closest_marker("ci") is not None:
        return True
    return item.nodeid in ended


def _minutes(item: pytest.Item) -> float:
    """The minutes in a slow test's mark; 0 if it has none."""
    mark = item.get_closest_marker("slow")
    minutes: float = 0 if mark is None else mark.kwargs.get("minutes", 0)
    return minutes


def pytest_collection_finish() -> None:
    """Turn garbage collection on again, except for the lasting objects of test collection."""
    gc.enable()
    gc.collect()
    gc.freeze()

"""How a process runs its steps: `mode`, `counts`, and the flags that they replace."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.runtime import MODES, Mode, RuntimeConfig, mode_on


@pytest.mark.parametrize("mode", MODES)
def test_counts_follow_from_the_mode(mode: Mode) -> None:
    """One launch compares on the device, a step later; the other modes count nothing."""
    wanted = "next step" if mode == "one launch" else None
    assert RuntimeConfig(mode=mode).counts == wanted


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mode": "captured"}, "mode is 'captured'; expected one of 'eager', 'replays', 'one"),
        ({"counts": "late"}, "counts is 'late'; expected None or one of 'commit', 'next step'"),
        ({"mode": "one launch", "counts": "commit"}, "counts is 'commit'; mode 'one launch' needs"),
        ({"mode": "one launch", "counts": None}, "counts is None; mode 'one launch' needs"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(given: Any, named: str) -> None:
    """The message names what was found and what is possible."""
    with pytest.raises(BackendError, match=named):
        RuntimeConfig(**given)


@pytest.mark.parametrize(
    ("old", "mode", "counts"),
    [
        ({"captured": False}, "eager", None),
        ({"captured": True}, "replays", None),
        ({"device_counts": True}, "eager", "commit"),
        ({"captured": True, "device_counts": True}, "replays", "commit"),
        ({"device_counts": True, "late_counts": True}, "eager", "next step"),
        ({"captured": True, "device_counts": True, "late_counts": True}, "replays", "next step"),
        (
            {"captured": True, "device_counts": True, "late_counts": True, "nested": True},
            "one launch",
            "next step",
        ),
        ({"captured": True, "nested": False}, "replays", None),
    ],
)
def test_old_flags_say_the_same(old: Any, mode: Mode, counts: str | None) -> None:
    """Each combination becomes a mode; the warning names the new form."""
    with pytest.warns(DeprecationWarning, match=f"write mode='{mode}', counts={counts!r}"):
        config = RuntimeConfig(rule="copied", **old)
    assert (config.mode, config.counts, config.rule) == (mode, counts, "copied")


def test_late_counts_alone_are_refused() -> None:
    """As before: the host can learn late only of counts that are kept."""
    with pytest.raises(ValueError, match="late_counts=True needs device_counts=True"):
        RuntimeConfig(late_counts=True)  # type: ignore[call-arg]


def test_an_old_flag_changes_a_configuration() -> None:
    """`attrs.evolve` passes the mode that was there; the flag says what changes."""
    config = RuntimeConfig(mode="replays", counts="commit")
    with pytest.warns(DeprecationWarning, match="late_counts will be removed"):
        changed = attrs.evolve(config, late_counts=True)
    assert (changed.mode, changed.counts) == ("replays", "next step")


def test_a_cpu_is_eager() -> None:
    """It has no graphs, whatever is asked for."""
    assert [mode_on("cpu", mode) for mode in MODES] == ["eager"] * 3
    assert [mode_on(torch.device("cuda", 1), mode) for mode in MODES] == [*MODES]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"captured": "yes"}, "captured must be a bool, got 'yes'; write mode= instead"),
        ({"nested": 1}, "nested must be a bool, got 1; write mode= instead"),
        ({"device_counts": None}, "device_counts must be a bool, got None; write counts= instead"),
        ({"late_counts": "commit"}, "late_counts must be a bool, got 'commit'; write counts="),
        ({"provisionning": "live"}, "RuntimeConfig has no field 'provisionning'; the fields are"),
        ({"provisionning": "live"}, "did you mean provisioning?"),
        ({"one_launch": True}, "RuntimeConfig has no field 'one_launch'"),
    ],
)
def test_a_wrong_name_or_flag_is_one_line(given: dict[str, object], said: str) -> None:
    """The field is named, with what was expected."""
    with pytest.raises(TypeError) as caught:
        RuntimeConfig(**given)  # type: ignore[arg-type]

    assert said in str(caught.value)


def test_fields_are_given_by_name() -> None:
    """A value without a name is refused by this class's own words."""
    with pytest.raises(TypeError, match=r"takes its fields by name, as in .*; got 'replays' with"):
        RuntimeConfig("replays")  # type: ignore[misc]

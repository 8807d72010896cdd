"""
The runtime's event log: the kernel's replayer accepts the log, and refuses it after a change of one
field.
"""

from __future__ import annotations

import json

import pytest

from qeffect.log.replayer import LogError, replay_lines

from .helpers import guarded_run
from .orders import random_order, table_order


@pytest.mark.parametrize("provisioning", ["live", "static"])
def test_a_log_of_three_epochs_replays_to_its_end(provisioning: str) -> None:
    """A log of three epochs replays to its end, in the epoch that the runtime is in."""
    order = table_order("ScheduleZBVZeroBubble", 1)
    run = guarded_run(order, event_log=True, provisioning=provisioning)  # type: ignore[arg-type]
    run.run(3)
    run.runtime.close()
    assert run.runtime.recorder is not None

    report = replay_lines(line.encode() for line in run.runtime.recorder.lines)

    assert "accepted" == report.verdict
    assert 3 == report.epoch == run.runtime.epoch
    assert run.runtime.recorder.events == report.events


def test_rebuilt_epoch_replays() -> None:
    """An aborted and rebuilt epoch is in the log too."""
    run = guarded_run(random_order(1), event_log=True)
    run.step()
    run.runtime.actions.refresh(run.runtime.order.steps[0].stage)
    run.act(run.runtime.order.steps[0])
    run.runtime.rebuild()
    run.run(1)
    run.runtime.close()
    assert run.runtime.recorder is not None

    report = replay_lines(line.encode() for line in run.runtime.recorder.lines)

    assert "accepted" == report.verdict
    assert 2 == report.epoch


def test_corrupted_log_is_refused() -> None:
    """Another slot in one event is not accepted."""
    run = guarded_run(random_order(1), event_log=True)
    run.step()
    run.runtime.close()
    assert run.runtime.recorder is not None
    lines = list(run.runtime.recorder.lines)
    place = next(n for n, line in enumerate(lines) if '"transition":"check_forward"' in line)
    event = json.loads(lines[place])
    event["slot"] += 1
    lines[place] = json.dumps(event, separators=(",", ":")) + "\n"

    try:
        verdict = replay_lines(line.encode() for line in lines).verdict
    except LogError:
        verdict = "unusable"

    assert verdict in ("refused", "unusable")


def test_off_by_default() -> None:
    """Without a log the contract has no observer."""
    assert guarded_run(random_order(1)).runtime.contract.observer is None

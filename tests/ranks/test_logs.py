"""The event logs of ranks that really exchanged messages are consistent with each other."""

from __future__ import annotations

from pathlib import Path

from qeffect.log.joint import replay_together
from qeffect.schedule.torch_tables import torch_schedule
from tests.ranks import log_bodies
from tests.ranks.ranks import launch

SCHEDULES = {
    "il": "ScheduleInterleaved1F1B",
    "izb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "1f1b": "Schedule1F1B",
}


def test_logs_of_real_ranks_fit_together(tmp_path: Path) -> None:
    """What two ranks logged of two steps is what torch's table has them say to each other."""
    steps, said = 2, tmp_path / "said"
    said.mkdir()
    words = launch(2, said, log_bodies.logged, list(SCHEDULES), str(tmp_path), steps).words
    assert {0: [steps] * len(SCHEDULES), 1: [steps] * len(SCHEDULES)} == words
    for name, cls in SCHEDULES.items():
        report = replay_together([tmp_path / f"{name}{rank}.jsonl" for rank in range(2)])
        table = torch_schedule(cls, pp=2, microbatches=4, comms=True)
        sends = sum("SEND" in str(action) for row in table.rows for action in row)

        assert "accepted" == report.verdict, (name, report.summary())
        assert (steps, steps * sends) == (report.epochs, report.messages), name

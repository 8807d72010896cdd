"""
Project step times to more ranks than were measured, with a simulator that uses the measured times
of two ranks.

The results are not measurements. Times of F, dI, dW, refreshes and updates come from a report of
``qeffect runtime report scale``, with one layer per stage; times of messages are assumptions,
stated in `Links`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from typing import Any

import attrs

from qeffect.schedule.actions import Schedule
from qeffect.schedule.durations import Durations
from qeffect.schedule.steptime import step_time
from qeffect.schedule.torch_tables import torch_schedule

from ...step.plan.rows import Row, walked
from .summary import exact_median

__all__ = ["CLASSES", "Links", "Measured", "Projected", "project"]

CLASSES = {"il": "ScheduleInterleaved1F1B", "zbv": "ScheduleZBVZeroBubble"}
STAGES_A_RANK = 2
MOST_SLOTS = 16


@attrs.frozen
class Links:
    """
    Assumed costs of messages.

    Args:
        ranks_a_host: Consecutive ranks that share a host.
        inside_ms: Latency of a message inside a host, in milliseconds.
        inside_gb_s: Bandwidth of a link inside a host, in GB/s.
        between_ms: Latency of a message between hosts, in milliseconds.
        between_gb_s: Bandwidth of a link between hosts, in GB/s; 25 is 200 Gb/s.
        slower: Factor by which the time of messages between hosts is multiplied.
    """

    ranks_a_host: int = 8
    inside_ms: float = 0.01
    inside_gb_s: float = 100.0
    between_ms: float = 0.02
    between_gb_s: float = 25.0
    slower: float = 1.0

    def of(self, pp: int, size: int) -> dict[tuple[int, int], float]:
        """Milliseconds of a message of `size` bytes between each pair of neighbouring ranks."""
        found = {}
        for a in range(pp):
            for b in {(a + 1) % pp, (a - 1) % pp} - {a}:
                if a // self.ranks_a_host == b // self.ranks_a_host:
                    found[a, b] = self.inside_ms + size / self.inside_gb_s / 1e6
                else:
                    took = self.between_ms + size / self.between_gb_s / 1e6
                    found[a, b] = self.slower * took
        return found


@attrs.frozen
class Measured:
    """
    One cell (workload) of a report over two ranks.

    Args:
        first: Times of F, dI (`I`), dW (`W`) and the weight-cache refresh of the first stage, in
            milliseconds.
        inner: The same times for inner stages: medians over the stages between the first and the
            last stage.
        last: The same times for the last stage, which has the loss.
        update: Time of a rank's update.
        replays_host: Host time of a guarded replay, per F, dI or dW.
        launch_host: Host time of one launch, divided by the number of F, dI and dW. This time is
            measured for a single step; steps back to back take less host time.
        message_bytes: Bytes of an activation between stages.
    """

    first: Mapping[str, float]
    inner: Mapping[str, float]
    last: Mapping[str, float]
    update: float
    replays_host: float
    launch_host: float
    message_bytes: int

    @classmethod
    def of(cls, report: Mapping[str, Any], cell: str, schedule: str) -> Measured:
        """Read a report of `scale`, with the host times of single steps."""
        rows = {
            row["side"]: row
            for row in report["raw"]["timed"]
            if row["cell"] == cell and row["schedule"] == schedule
        }
        alone = {int(n): times for n, times in rows["guarded"]["alone_ms"].items()}
        order = sorted(alone)
        kinds = ("F", "I", "W", "refresh")
        inner = [alone[n] for n in order[1:-1]]
        hidden, sequence, microbatches = (int(part[1:]) for part in cell.split("-"))
        actions = 3 * STAGES_A_RANK * microbatches
        hosts = {side: exact_median(row["host_ms"]) / actions for side, row in rows.items()}
        return cls(
            {kind: alone[order[0]][kind] for kind in kinds},
            {kind: exact_median(times[kind] for times in inner) for kind in kinds},
            {kind: alone[order[-1]][kind] for kind in kinds},
            max(rows["guarded"]["update_ms"]),
            hosts["guarded"],
            hosts["one launch"],
            2 * hidden * sequence,
        )


@attrs.frozen
class Projected:
    """
    One row of the projection: a simulated step and its parts, in milliseconds.

    Args:
        pp: Number of pipeline ranks.
        microbatches: Number of microbatches per step.
        free: The step time if messages take no time.
        step: The step time with the assumed messages.
        slow: The step time if messages between hosts are ten times slower.
        bubble: Idle share of the step with messages, over all ranks.
        replays: The step time with the measured host time of guarded replays before each action.
        launch_host: Host time of one launch with the actions of the projected step.
        slots: The largest number of slots (sets of buffers for one microbatch) on a rank; None
            above `MOST_SLOTS` ranks, where planning takes minutes.
    """

    pp: int
    microbatches: int
    free: float
    step: float
    slow: float
    bubble: float
    replays: float
    launch_host: float
    slots: int | None


@functools.cache
def _table(cls: str, pp: int, microbatches: int) -> Schedule:
    return torch_schedule(cls, pp=pp, vpp=STAGES_A_RANK, microbatches=microbatches, comms=True)


def project(measured: Measured, schedule: str, pp: int, links: Links | None = None) -> Projected:
    """
    Simulate a step on more ranks, with one layer per stage and `2 * pp` microbatches.

    Args:
        measured: The times of two ranks.
        schedule: `il` or `zbv`.
        pp: Number of pipeline ranks.
        links: Assumed costs of messages.
    """
    links = links or Links()
    count = 2 * pp
    table = _table(CLASSES[schedule], pp, count)
    ends = {0: measured.first, table.num_stages - 1: measured.last}
    times = {**measured.inner, "update": measured.update}

    def simulate_step(between: Links | None, host: float = 0.0) -> Any:
        taken = {} if between is None else between.of(pp, measured.message_bytes)
        return step_time(table, Durations({**times, "host": host}, "ms", stages=ends, links=taken))

    step = simulate_step(links)
    slots = None
    if pp <= MOST_SLOTS:
        walk = walked(table, "live")
        slots = max(sum(Row.of(walk, n, "live").slots.num_slots.values()) for n in range(pp))
    return Projected(
        pp,
        count,
        float(simulate_step(None).time),
        float(step.time),
        float(simulate_step(attrs.evolve(links, slower=10.0)).time),
        statistics.mean(rank.bubble for rank in step.ranks),
        float(simulate_step(links, measured.replays_host).time),
        measured.launch_host * 3 * STAGES_A_RANK * count,
        slots,
    )

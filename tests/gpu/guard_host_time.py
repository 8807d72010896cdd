"""
The host's time inside the guard of Megatron-core: one command, one report.

    python -m tests.gpu.guard_host_time OUT.json

The run is that of the price in `guard_megatron.py`: two ranks, two virtual stages each, eager
layers of Transformer Engine at hidden 4096 and sequence 4096, four microbatches. There the price is
a difference of two steps, which differ from each other by more than the guard costs. Here a clock
is read whenever the host enters or leaves code of the guard, and only the time inside is added up.
Reading the clock takes time too. So every other step runs with the same clocks but without the
guard, and the time inside of these steps is subtracted. The figure does not contain what the guard
costs the code around it, for example by data that it displaces from a cache.

The host's time does not depend on how many GPUs the ranks have. If there is one GPU, both ranks
share it (`NCCL_HOSTID`), and the time of a step says nothing.

It needs Megatron-core 0.19.2 (``pip install --no-deps megatron-core==0.19.2``) and takes a minute.
Outside a git checkout give ``--commit SHA``. The exit code is 0 if both ranks measured all steps,
else 1.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import attrs

from .guard_megatron import ACTIONS, PRICED, make, take_loop
from .two_ranks import begin, run_ranks

#: The kept report.
KEPT = Path(__file__).parents[1] / "megatron" / "host_time.json"
GOAL_US = 30.0
TURNS = ("bare", "on")
WARM, STEPS, LIMIT_S = 5, 100, 150.0


class Inside:
    """
    Adds up the time that passes inside the guard.

    Args:
        clock: Returns the time in nanoseconds.

    Attributes:
        ns: Nanoseconds inside the guard so far.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.ns = 0
        self._inside = [False]
        self._since = 0

    def _turn(self) -> None:
        now = self.clock()
        if self._inside[-1]:
            self.ns += now - self._since
        self._since = now

    def of(self, run: Callable[..., Any], *, guard: bool) -> Callable[..., Any]:
        """Return a function that calls `run`, inside the guard or outside of it."""

        @wraps(run)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._inside.append(guard)
            try:
                return run(*args, **kwargs)
            finally:
                self._turn()
                self._inside.pop()

        return timed


def places() -> list[tuple[Any, str]]:
    """Where the guard replaces functions that a step calls: the owner, and the name."""
    from qeffect.guards.megatron_library import library

    lib = library()
    groups, scaling = lib.buffers._ParamAndGradBucketGroup, lib.scaling
    found: list[tuple[Any, str]] = [
        (lib.schedules, "forward_backward_no_pipelining"),
        (lib.schedules, "forward_backward_pipelining_without_interleaving"),
        (lib.schedules, "forward_backward_pipelining_with_interleaving"),
        (lib.schedules, "forward_step"),
        (lib.schedules, "backward_step"),
        (lib.p2p.P2PCommunicator, "_communicate"),
        (groups, "start_grad_sync"),
        (groups, "finish_grad_sync"),
        (scaling, "reduce_and_update_fp8_tensors"),
    ]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def _put(owner: Any, name: str, run: Callable[..., Any]) -> None:
    bound = hasattr(getattr(owner, name), "__self__")  # a method of the class
    setattr(owner, name, staticmethod(run) if bound else run)


@attrs.define
class Watched:
    """
    The guard of Megatron-core, with a clock at each of its borders.

    Args:
        guarded: The guard.
        with_guard: The functions that run with the guard and the clocks, by owner and name.
        without: The functions that run with the same clocks, but without the guard.
    """

    guarded: Any
    with_guard: dict[tuple[Any, str], Any]
    without: dict[tuple[Any, str], Any]

    def turn(self, on: bool) -> None:
        """Let the next step run with the guard, or without it."""
        self.guarded._off = not on
        for (owner, name), run in (self.with_guard if on else self.without).items():
            _put(owner, name, run)


def watch(inside: Inside) -> Watched:
    """Put the guard of Megatron-core on, with a clock at each of its borders."""
    from qeffect.guards import megatron as guards
    from qeffect.guards.evidence import BackwardPasses
    from qeffect.guards.megatron_updates import Updates

    without = {}
    for owner, name in places():
        plain = inside.of(getattr(owner, name), guard=False)
        if name == "forward_step":
            plain = _entered(inside, plain)
        _put(owner, name, plain)
        without[owner, name] = inside.of(plain, guard=True)
    hooks: tuple[tuple[Any, str], ...] = (
        (BackwardPasses, "_passed"),
        (Updates, "_before"),
        (Updates, "_after"),
    )
    for owner, name in hooks:
        setattr(owner, name, inside.of(getattr(owner, name), guard=True))
    guarded = guards.guard(manner="refuse")
    found = {(o, name): inside.of(getattr(o, name), guard=True) for o, name in places()}
    watched = Watched(guarded, found, without)
    watched.turn(True)
    return watched


def _entered(inside: Inside, run: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward step call the function that the guard passes it as a part of the guard."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if args:
            return run(inside.of(args[0], guard=True), *args[1:], **kwargs)
        function = inside.of(kwargs.pop("forward_step_func"), guard=True)
        return run(forward_step_func=function, **kwargs)

    return forward_step


def measure() -> dict[str, Any]:
    """
    Train some steps on this rank; return the microseconds inside the guard's borders of each step,
    with the guard (``on``) and without it (``bare``).
    """
    from qeffect.gpu_runtime.lab.sides.megatron import meet

    member = meet("none")
    side = make(member, "none", PRICED)
    inside = Inside()
    watched = watch(inside)
    side._forward = inside.of(side._forward, guard=False)
    said: dict[str, Any] = {f"{turn}{what}": [] for turn in TURNS for what in ("", " ms")}
    for number in range(WARM + STEPS):
        for turn in TURNS if number % 2 else reversed(TURNS):
            watched.turn(turn == "on")
            take_loop(side)
            member.synchronize()
            before, began = inside.ns, time.perf_counter()
            side.step()
            member.synchronize()
            if number >= WARM:
                said[turn].append((inside.ns - before) / 1e3)
                said[f"{turn} ms"].append((time.perf_counter() - began) * 1e3)
    watched.turn(True)
    assert watched.guarded._recurring is not None
    said["repeated"] = watched.guarded._recurring.repeated
    return said


def per_action(said: dict[str, Any]) -> dict[str, float]:
    """
    Microseconds inside the guard for each F and each B of a rank: the median over all pairs of a
    step with the guard and one without it, and the tenth and ninetieth percentile.
    """
    found = [(on - bare) / ACTIONS for on, bare in zip(said["on"], said["bare"], strict=True)]
    tenths = statistics.quantiles(found, n=10, method="inclusive")
    return {
        "median_us": statistics.median(found),
        "tenth_us": tenths[0],
        "ninetieth_us": tenths[-1],
    }


def main() -> int:
    """Start two ranks, and write the report."""
    import torch

    out, where = begin(__doc__, measure)
    ranks = run_ranks("tests.gpu.guard_host_time", out, limit_s=LIMIT_S)
    costs = [per_action(said) for said in ranks if said.get("on")]
    report = {
        "environment": where,
        "gpus": torch.cuda.device_count(),
        "goal_us": GOAL_US,
        "costs": costs,
        "ranks": ranks,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(costs, indent=1))
    return 0 if len(costs) == len(ranks) else 1


if __name__ == "__main__":
    sys.exit(main())

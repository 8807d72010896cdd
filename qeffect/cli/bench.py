"""
``qeffect bench``: measure what the guards cost, and report medians and ratios of one run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..contract import Contract
from ..keys import TapeKey, TapeRef
from ..refusals import Refused
from ..report import environment, require_place, write_json
from ..stage_config import StageConfig
from . import prices
from .command import Outcome, Progress, UnusableError, needs

__all__ = ["Bench", "contract_of", "memory_of_a_tape", "run_epochs"]

MATRICES = ("fc1", "fc2", "proj", "qkv")

#: Rounds per measurement of an action. Each round gives a median; the reported figure is the median
#: of these medians.
ROUNDS = 9

#: Numbers of slots; an action should cost the same with each.
POOLS = (4, 64, 4096)

#: Numbers of slots for which memory is measured. Each contract has as many microbatches as slots,
#: so that no slot stays free.
FULL_POOLS = (64, 4096)


class Bench:
    """Measure the kernel, and each package above the kernel that is installed."""

    name = "bench"
    help = "measure the times of the guards, the state explorer, the proofs and the log replayer"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "--kernel",
            action="store_true",
            help="measure without the state explorer, the proofs and the random schedules",
        )
        parser.add_argument("--out", type=Path, metavar="F", help="file of the JSON report")

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Run the measurements and report the times."""
        require_place(args.out)
        data: dict[str, Any] = {"environment": environment(out=args.out)}
        progress.note("Measuring: the guarded actions")
        data |= actions()
        progress("Measuring: the price of each relation")
        data["relation_prices"] = prices.relations(priced_contract, run_epochs)
        progress("Measuring: the schedule check and the replayer")
        data |= schedules()
        if not args.kernel:
            for entry in sorted(entry_points(group="qeffect.bench"), key=lambda e: e.name):
                progress(f"Measuring: {entry.name}")
                try:
                    data |= needs("verify", lambda: entry.load()(progress))  # noqa: B023
                except UnusableError as error:
                    data[f"{entry.name}_not_measured"] = str(error)
        if args.out is not None:
            write_json(args.out, data)
        return Outcome("accepted", data, _lines(data))


def actions(epochs: int = 200, microbatches: int = 8) -> dict[str, Any]:
    """
    Measure the time of F, dI, dW and a refusal through the public API, and the memory use.

    Each timing is taken once per round, so that a slow period of the machine affects all timings
    and not only one. Memory is measured once, after the rounds.

    Returns:
        Medians: ``*_us`` in microseconds per action, ``bytes_*`` in bytes.
    """
    plain: dict[str, list[float]] = {"F": [], "dI": [], "dW": []}
    wide: dict[int, list[float]] = {slots: [] for slots in POOLS}
    pooled, managed, refused = [], [], []
    for _ in range(ROUNDS):
        gc.collect()
        times = _epochs(8, microbatches, epochs, managed=False)
        for action, own in times.items():
            plain[action].append(statistics.median(own))
        pooled.append(_pooled(times))
        managed.append(_pooled(_epochs(8, microbatches, epochs, managed=True)))
        for slots, medians in wide.items():
            medians.append(_pooled(_epochs(slots, 4, epochs, managed=False)))
        refused.append(_refusal())
    by_slots = {str(slots): statistics.median(medians) for slots, medians in wide.items()}
    return {
        "guarded_action_us": statistics.median(pooled),
        "guarded_action_us_by_action": {k: statistics.median(v) for k, v in plain.items()},
        "context_manager_us": statistics.median(managed),
        "refusal_us": statistics.median(refused),
        "guarded_action_us_by_slots": by_slots,
        "slots_4096_over_4": by_slots["4096"] / by_slots["4"],
        **_memory(),
    }


def _pooled(times: dict[str, list[float]]) -> float:
    return statistics.median(t for own in times.values() for t in own)


def contract_of(slots: int, microbatches: int, omit: Iterable[str] = ()) -> Contract:
    """Return the contract that every measurement uses: one stage with four weight matrices."""
    return Contract(
        [StageConfig(0, microbatches=microbatches, slots=slots, matrices=MATRICES)], omit=omit
    )


def priced_contract(omit: Iterable[str] = ()) -> Contract:
    """Return a new contract with eight slots (sets of buffers) and eight microbatches, for price
    measurements."""
    return contract_of(8, 8, omit)


def _epochs(slots: int, microbatches: int, epochs: int, *, managed: bool) -> dict[str, list[float]]:
    """Run whole epochs of a new contract; return the times as ``run_epochs`` does."""
    return run_epochs(contract_of(slots, microbatches), epochs, managed=managed)


def run_epochs(contract: Contract, epochs: int, *, managed: bool = False) -> dict[str, list[float]]:
    """
    Run whole epochs of a contract with one stage, and time each action.

    Args:
        contract: The contract; no epoch may be in progress.
        epochs: Number of epochs.
        managed: Whether to use the API's ``with`` blocks instead of check and commit calls.

    Returns:
        For each action a list with one entry per epoch: microseconds of its check plus its commit.
    """
    stage = contract.stages[0]
    mats, microbatches = stage.matrices, stage.microbatches
    cached = "version" in contract.transitions.relations
    times: dict[str, list[float]] = {"F": [], "dI": [], "dW": []}
    clock = time.perf_counter
    for epoch in range(contract.epoch, contract.epoch + epochs):
        keys = [TapeKey(epoch, 0, m) for m in range(microbatches)]
        refs: list[TapeRef] = []
        if cached:
            with contract.refresh(0):
                pass
        began = clock()
        if managed:
            for key in keys:
                with contract.forward(key) as f:
                    pass
                refs.append(f.ref)
        else:
            for key in keys:
                refs.append(contract.commit(contract.check_forward(key)))  # type: ignore[arg-type]
        times["F"].append((clock() - began) / microbatches * 1e6)
        for key in keys:
            contract.bind(key)
        contract.wait()
        pairs = list(zip(keys, refs, strict=True))
        began = clock()
        if managed:
            for key, ref in pairs:
                with contract.dgrad(key, ref) as i:
                    i.queued = mats
        else:
            for key, ref in pairs:
                contract.commit(contract.check_dgrad(key, ref), mats)
        times["dI"].append((clock() - began) / microbatches * 1e6)
        began = clock()
        if managed:
            for key, ref in pairs:
                with contract.wgrad(key, ref) as w:
                    w.covered = mats
        else:
            for key, ref in pairs:
                contract.commit(contract.check_wgrad(key, ref), mats)
        times["dW"].append((clock() - began) / microbatches * 1e6)
        contract.wait()
        contract.finalize(0)
        contract.commit_epoch()
        contract.join()
    return times


def _refusal(rounds: int = 50, each: int = 50) -> float:
    """Return the median microseconds from a check until the caller has caught the refusal."""
    contract = contract_of(4, 4)
    key = TapeKey(0, 0, 0)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(each):
            try:
                contract.check_forward(key)  # the cache is stale
            except Refused:
                continue
            raise AssertionError("a forward over a stale cache was accepted")
        times.append((time.perf_counter() - began) / each * 1e6)
    return statistics.median(times)


def _memory() -> dict[str, Any]:
    """Measure the bytes of a configured slot (set of buffers), and the bytes that each live tape
    (data of one F) adds."""
    found = {str(slots): memory_of_a_tape(slots) for slots in FULL_POOLS}
    live = {slots: added for slots, (_, added) in found.items()}
    return {
        "bytes_per_live_tape_in_a_full_pool": max(sum(both) for both in found.values()),
        "bytes_per_live_tape": max(live.values()),
        "bytes_per_live_tape_by_slots": live,
        "bytes_configured_per_slot": {slots: kept for slots, (kept, _) in found.items()},
    }


def memory_of_a_tape(slots: int) -> tuple[float, float]:
    """
    Measure the memory per slot (set of buffers) of a contract that has as many microbatches as
    slots.

    Args:
        slots: Number of slots, and of microbatches.

    Returns:
        Two numbers: the bytes of the new contract divided by the number of slots; and the bytes
        that each live tape adds after F, bind and dI, including its key and its reference.
    """
    contract_of(1, 1)  # composes the transitions, which every contract shares
    kept: list[tuple[TapeKey, TapeRef]] = []
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        contract = contract_of(slots, slots)
        gc.collect()
        configured = tracemalloc.get_traced_memory()[0]
        with contract.refresh(0):
            pass
        for m in range(slots):
            key = TapeKey(0, 0, m)
            kept.append((key, contract.commit(contract.check_forward(key))))  # type: ignore[arg-type]
            contract.bind(key)
        contract.wait()
        mats = contract.stages[0].matrices
        for key, ref in kept:
            contract.commit(contract.check_dgrad(key, ref), mats)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return (configured - before) / slots, (after - configured) / slots


def _median(function: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def schedules() -> dict[str, Any]:
    """Measure the check of ZB-V at PP=8, M=64, and the replay of an event log."""
    from ..log.recorder import Recorder
    from ..log.replayer import replay_lines
    from ..schedule.check import check
    from ..schedule.tables import read_fixture

    table = read_fixture("ScheduleZBVZeroBubble_pp8_vpp2_m64.compute.csv")
    lines = _log(Recorder)
    seconds = _median(lambda: replay_lines(lines), 3)
    return {
        "check_zbv_pp8_m64_s": _median(lambda: check(table)),
        "replay_events_per_s": len(lines) / seconds,
        "replay_events": len(lines),
    }


def _log(recorder_type: Any, epochs: int = 300, microbatches: int = 8) -> list[str]:
    """Record whole epochs of one stage; return the log's lines."""
    contract = contract_of(8, microbatches)
    recorder = recorder_type.attach(contract)
    mats = contract.stages[0].matrices
    for epoch in range(epochs):
        keys = [TapeKey(epoch, 0, m) for m in range(microbatches)]
        with contract.refresh(0):
            pass
        refs = [contract.commit(contract.check_forward(key)) for key in keys]
        contract.wait()
        for key, ref in zip(keys, refs, strict=True):
            contract.bind(key)
            contract.commit(contract.check_dgrad(key, ref), mats)  # type: ignore[arg-type]
        for key, ref in zip(keys, refs, strict=True):
            contract.commit(contract.check_wgrad(key, ref), mats)  # type: ignore[arg-type]
        contract.wait()
        contract.finalize(0)
        contract.commit_epoch()
        contract.join()
    lines: list[str] = recorder.close()
    return lines


def _lines(data: dict[str, Any]) -> list[str]:
    where = data["environment"]
    lines = [f"{where['cpu']}, {where['cores']} cores, Python {sys.version.split()[0]}"]
    for name, value in data.items():
        if name == "environment" or name.endswith("_prices"):
            continue
        lines.append(f"  {name:34} {_spelled(value)}")
    return [*lines, *prices.lines(data)] if "relation_prices" in data else lines


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_spelled(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
    return str(value)

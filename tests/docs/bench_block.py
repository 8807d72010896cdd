"""
The figures of the kernel beside their goals, from the bench report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from qeffect.cli.prices import dearest, spelled

from .blocks import markdown


@frozen
class Figure:
    """
    One row of the table.

    Args:
        name: What was measured.
        value: What it came to.
        unit: How it is spelled, as a format of the value.
        goal: The most that it may be, or the least; None where it has no goal.
        least: Whether the goal is the least.
        note: What follows the value.
    """

    name: str
    value: float
    unit: str
    goal: float | None = None
    least: bool = False
    note: str = ""

    @property
    def misses(self) -> bool:
        """Whether the figure is on the wrong side of its goal."""
        if self.goal is None:
            return False
        return self.value < self.goal if self.least else self.value > self.goal

    @property
    def shown(self) -> str:
        """The value, spelled."""
        return self.unit.format(self.value)

    @property
    def wanted(self) -> str:
        """The goal, spelled."""
        if self.goal is None:
            return "-"
        bound = "at least" if self.least else "at most"
        return f"{bound} {self.goal:,}{self.unit.partition('}')[2]}"

    def cells(self) -> tuple[str, str, str]:
        """The row."""
        shown = f"**{self.shown}**" if self.misses else self.shown
        return self.name, shown + self.note, self.wanted


MICROSECONDS, SECONDS = "{:.3f} µs", "{:.2f} s"
BYTES, RATE = "{:,.0f} B", "{:,.0f}/s"
ACTIONS = ("F", "dI", "dW")
KIB = 1024
DEAREST = 5


def figures(data: Mapping[str, Any], proofs: Mapping[str, Any]) -> list[Figure]:
    """
    Every figure of the kernel that the README shows, with its goal.

    Args:
        data: The bench report.
        proofs: The proofs' report, whose own run is held against the same goal.
    """
    by_action = data["guarded_action_us_by_action"]
    return [
        *(
            Figure(f"guarded {action}, check plus commit", by_action[action], MICROSECONDS, 1.5)
            for action in ACTIONS
        ),
        Figure("F, dI and dW pooled", data["guarded_action_us"], MICROSECONDS, 1.5),
        Figure("the same by context managers", data["context_manager_us"], MICROSECONDS, 2.5),
        Figure("a refusal, explained", data["refusal_us"], MICROSECONDS, 4),
        Figure("an action with 4,096 slots over one with 4", data["slots_4096_over_4"], "{:.2f}x"),
        *_memory(data),
        Figure("check of ZB-V, PP=8, M=64, two steps", data["check_zbv_pp8_m64_s"], SECONDS, 1),
        Figure("event log replay, events", data["replay_events_per_s"], RATE, 200_000, True),
        Figure("random schedules, actions", data["random_actions_per_s"], RATE, 2_000, True),
        _rate(data, "slot pool alone, plain", "pool_plain", 400_000),
        _rate(data, "slot pool alone, NumPy", "pool_batch", 2_500_000),
        _rate(data, "composed stage, plain", "stage_plain", 100_000),
        _rate(data, "composed stage, NumPy", "stage_batch", 1_000_000),
        _five_million(data["explore_five_million_states"]),
        Figure(
            f"all {data['proofs_obligations']:,} unbounded proofs", data["proofs_s"], SECONDS, 10
        ),
        Figure(
            f"all {proofs['obligations']:,} unbounded proofs, in the run of the proofs' report",
            proofs["seconds"],
            SECONDS,
            10,
        ),
        Figure(f"a mutant, of {data['mutants']}, whole sweep", data["mutant_s"], SECONDS, 2),
        Figure("the slowest mutant", data["mutant_slowest_s"], SECONDS, 2),
    ]


def _memory(data: Mapping[str, Any]) -> list[Figure]:
    live = data["bytes_per_live_tape_by_slots"]
    kept = data["bytes_configured_per_slot"]
    largest = max(kept, key=lambda slots: kept[slots] + live[slots])
    return [
        Figure(
            "memory that a live tape adds: F, bind and dI done",
            data["bytes_per_live_tape"],
            BYTES,
            KIB,
        ),
        *(
            Figure(
                f"memory of a slot and its microbatch beforehand, {int(slots):,} of each",
                kept[slots],
                BYTES,
                KIB,
            )
            for slots in kept
        ),
        Figure(
            f"both together, in a full pool of {int(largest):,}",
            kept[largest] + live[largest],
            BYTES,
            KIB,
        ),
    ]


def _rate(data: Mapping[str, Any], what: str, name: str, goal: int) -> Figure:
    report = data[f"explore_{name}"]
    return Figure(
        f"exploration of the {what}, `{report['scope']}`, {report['states']:,} states: accepted "
        "transitions of a core",
        report["accepted_per_cpu_s"],
        RATE,
        goal,
        True,
    )


def _five_million(report: Mapping[str, Any]) -> Figure:
    return Figure(
        f"peak memory of {report['states']:,} unreduced states, `{report['scope']}`, NumPy",
        report["peak_rss_mb"],
        "{:,.0f} MiB",
        4096,
        note=f" in {report['seconds']:.1f} s",
    )


def missed(rows: Sequence[Figure], data: Mapping[str, Any]) -> str:
    """Say how many figures miss their goals, and what is known of why; the table says which."""
    goals, found = [row for row in rows if row.goal is not None], [r for r in rows if r.misses]
    if not found:
        return "Every figure meets its goal."
    text = f"{len(found)} of {len(goals)} goals are missed, in bold."
    names = " ".join(row.name for row in found)
    if "guarded" in names or "pooled" in names:
        text += " " + _why_actions(data)
    if "full pool" in names or "beforehand" in names:
        text += (
            " Before any tape lives, a contract keeps its columns by slot and by microbatch; those "
            "by microbatch are dictionaries, so that an action finds its entry by the key that it "
            f"was given; a tape's life adds {data['bytes_per_live_tape']:.0f} B."
        )
    if any(row.name.endswith("unbounded proofs") for row in found):
        text += (
            f" Of the proofs' time {data['proofs_solver_s']:.1f} s are the solver's, on one core, "
            f"the slowest proof {data['proofs_worst_s']:.1f} s; the processor was theirs for "
            f"{data['proofs_cpu_s']:.1f} s."
        )
    return text


def _why_actions(data: Mapping[str, Any]) -> str:
    parts = data["guards_and_updates_by_action"]
    counts = ", ".join(
        f"{action} {parts[action]['guards']} and {parts[action]['updates']}" for action in parts
    )
    commit = data["environment"]["commit"][:12]
    return (
        "A check is one flat function and so is a commit, every guard of every relation written "
        f"out; at commit `{commit}`, which was measured, both together had guards and state "
        f"updates: {counts}."
    )


SET_ON = "AMD EPYC"
"""The processor of the report that the goals were set by."""


def conditions(data: Mapping[str, Any], proofs: Mapping[str, Any]) -> str:
    """
    Say where the report is not of the machine of the goals, or not of the proofs' kernel.

    Args:
        data: The bench report.
        proofs: The proofs' report.
    """
    (cpu, commit), theirs = (
        (data["environment"][key] for key in ("cpu", "commit")),
        proofs["environment"]["commit"],
    )
    said = []
    if not cpu.startswith(SET_ON):
        said.append(
            f"The goals were set on another machine, an {SET_ON} (the history of the report has "
            "its figures), so that every rate and time here tells of the machine as well."
        )
    if commit != theirs:
        said.append(
            f"The proofs' report is of another commit, `{theirs[:12]}`: the kernels of the two "
            "reports need not be the same."
        )
    return " ".join(said)


def cost(data: Mapping[str, Any]) -> str:
    """
    What each relation costs a guarded action, and what the dearest clauses do.

    Args:
        data: The bench report; one of before prices were taken has none, and nothing is said.
    """
    if "relation_prices" not in data:
        return ""
    own, clauses = data["relation_prices"], data["clause_prices"]
    rows = sorted(own, key=lambda name: -sum(part["us"] for part in own[name].values()))
    table = [(name, *(spelled(own[name][action]) for action in ACTIONS)) for name in rows]
    guards = clauses["guards"]
    unseen = sum(row["low_us"] <= 0 <= row["high_us"] for row in guards)
    every = ", ".join(f"{a} {spelled(clauses['every_guard'][a])}" for a in ACTIONS)
    named = "; ".join(
        f"`{row['clause']}` of {row['action']} {spelled(row)}" for row in dearest(guards)[:DEAREST]
    )
    return (
        "What a relation costs an action: with it less without it, the configuration otherwise the "
        "same, in turns of one run, as the median of the rounds' differences, where it lies in 95 "
        "of 100 such runs, and with over without. *nothing* is the same contract twice: what the "
        "comparison is worth.\n\n"
        + markdown(("relation", *ACTIONS), table)
        + f"\n\nThe {len(guards)} guards of F, dI and dW, taken out of the composed functions: all "
        f"of an action {every}. The dearest alone: {named}. The bounds of {unseen} of the "
        f"{len(guards)} include zero. The report has each."
    )

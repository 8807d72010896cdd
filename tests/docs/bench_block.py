"""
The figures of the kernel and their goals, from the bench report.
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
    One measured figure: a row of the table of the kernel's speed.

    Args:
        name: What was measured.
        value: The measured value.
        unit: The format that spells the value with its unit.
        goal: The upper bound, or the lower bound if `least`; None for a figure without a goal.
        least: Whether the goal is a lower bound.
        note: Text behind the value.
    """

    name: str
    value: float
    unit: str
    goal: float | None = None
    least: bool = False
    note: str = ""

    @property
    def misses(self) -> bool:
        """Whether the figure misses its goal."""
        if self.goal is None:
            return False
        return self.value < self.goal if self.least else self.value > self.goal

    @property
    def shown(self) -> str:
        """The value as text."""
        return self.unit.format(self.value)

    @property
    def wanted(self) -> str:
        """The goal as text."""
        if self.goal is None:
            return "-"
        bound = "at least" if self.least else "at most"
        return f"{bound} {self.goal:,}{self.unit.partition('}')[2]}"

    def cells(self) -> tuple[str, str, str]:
        """The entries of the figure's row in the table: name, value, goal."""
        shown = f"**{self.shown}**" if self.misses else self.shown
        return self.name, shown + self.note, self.wanted


MICROSECONDS, SECONDS = "{:.3f} µs", "{:.2f} s"
BYTES, RATE = "{:,.0f} B", "{:,.0f}/s"
ACTIONS = ("F", "dI", "dW")
KIB = 1024
DEAREST = 5


def figures(data: Mapping[str, Any], proofs: Mapping[str, Any]) -> list[Figure]:
    """
    Every figure of the kernel with its goal.

    Args:
        data: The bench report.
        proofs: The proofs' report; its own run has the same goal.
    """
    by_action = data["guarded_action_us_by_action"]
    return [
        *(
            Figure(f"guarded {action}, check plus commit", by_action[action], MICROSECONDS, 1.5)
            for action in ACTIONS
        ),
        Figure("F, dI and dW pooled", data["guarded_action_us"], MICROSECONDS, 1.5),
        Figure(
            "F, dI and dW pooled, with context managers",
            data["context_manager_us"],
            MICROSECONDS,
            2.5,
        ),
        Figure("a refusal, explained", data["refusal_us"], MICROSECONDS, 4),
        Figure(
            "time of an action with 4,096 slots, divided by its time with 4",
            data["slots_4096_over_4"],
            "{:.2f}x",
        ),
        *_memory(data),
        Figure("check of ZB-V, PP=8, M=64, two steps", data["check_zbv_pp8_m64_s"], SECONDS, 1),
        Figure("event log replay, events", data["replay_events_per_s"], RATE, 200_000, True),
        Figure("random schedules, actions", data["random_actions_per_s"], RATE, 2_000, True),
        *_rates(data),
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
        Figure(
            f"a verdict on a mutant, mean over all {data['mutants']} mutants, with the search for "
            "reachable states",
            data["mutant_s"],
            SECONDS,
            2,
        ),
        Figure(
            "the slowest verdict on a mutant, without the search for reachable states",
            data["mutant_slowest_s"],
            SECONDS,
            2,
        ),
    ]


def _memory(data: Mapping[str, Any]) -> list[Figure]:
    live = data["bytes_per_live_tape_by_slots"]
    kept = data["bytes_configured_per_slot"]
    largest = max(kept, key=lambda slots: kept[slots] + live[slots])
    return [
        Figure(
            "memory of a live tape after F, bind and dI",
            data["bytes_per_live_tape"],
            BYTES,
            KIB,
        ),
        *(
            Figure(
                f"memory of a slot and its microbatch before any tape, with {int(slots):,} slots",
                kept[slots],
                BYTES,
                KIB,
            )
            for slots in kept
        ),
        Figure(
            f"memory of a slot, its microbatch and a live tape, in a full pool of {int(largest):,}",
            kept[largest] + live[largest],
            BYTES,
            KIB,
        ),
    ]


#: Rates of exploration and their goals. Reports from before the plain explorer was only a check
#: have its rates too.
RATES = (
    ("slot pool alone, plain", "pool_plain", 400_000),
    ("slot pool alone, NumPy", "pool_batch", 2_500_000),
    ("composed stage, plain", "stage_plain", 100_000),
    ("composed stage, NumPy", "stage_batch", 1_000_000),
)


def _rates(data: Mapping[str, Any]) -> list[Figure]:
    return [_rate(data, *row) for row in RATES if f"explore_{row[1]}" in data]


def _rate(data: Mapping[str, Any], what: str, name: str, goal: int) -> Figure:
    report = data[f"explore_{name}"]
    return Figure(
        f"exploration of the {what}, `{report['scope']}`, {report['states']:,} states: accepted "
        "transitions per core",
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
    """How many figures miss their goals, with the known reasons."""
    goals, found = [row for row in rows if row.goal is not None], [r for r in rows if r.misses]
    if not found:
        return "Every figure meets its goal."
    text = f"{len(found)} of {len(goals)} goals are missed (bold)."
    names = " ".join(row.name for row in found)
    if "guarded" in names or "pooled" in names:
        text += " " + _why_actions(data)
    if "full pool" in names or "before any tape" in names:
        text += (
            " Even without a live tape (a microbatch's work between F and dW), a contract "
            "stores state for each slot and each microbatch. The state of microbatches is in "
            "dictionaries, so that an action finds its entry by key. A live tape adds "
            f"{data['bytes_per_live_tape']:.0f} B."
        )
    if any(row.name.endswith("unbounded proofs") for row in found):
        text += (
            f" The proofs used {data['proofs_cpu_s']:.1f} s of CPU time, of which the solver took "
            f"{data['proofs_solver_s']:.1f} s on one core. One proof took the solver at most "
            f"{data['proofs_worst_s']:.1f} s."
        )
    return text


def _why_actions(data: Mapping[str, Any]) -> str:
    parts = data["guards_and_updates_by_action"]
    counts = ", ".join(
        f"{action} has {parts[action]['guards']} guards and {parts[action]['updates']} writes"
        for action in parts
    )
    commit = data["environment"]["commit"][:12]
    return (
        "The check of an action is one generated function with the guards of all relations; the "
        f"commit is a second generated function. At the measured git commit `{commit}`, the two "
        "functions of an action together have these numbers of guards and of writes to the "
        f"contract's state: {counts}."
    )


SET_ON = "AMD EPYC"
"""The processor of the report by which the goals were set."""


def conditions(data: Mapping[str, Any], proofs: Mapping[str, Any]) -> str:
    """
    Caveats: another machine than the goals were set on, another commit than the proofs' report.

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
            f"The goals were set on another machine, an {SET_ON} (its figures are in the history "
            "of the report), so every rate and time here also depends on the machine."
        )
    if commit != theirs:
        said.append(
            f"The proofs' report was made at another commit, `{theirs[:12]}`, so the measured "
            "kernel and the proved kernel may differ."
        )
    return " ".join(said)


def cost(data: Mapping[str, Any]) -> str:
    """
    The cost of each relation in a guarded action, and of the most expensive clauses.

    Args:
        data: The bench report; an older report without prices gives an empty text.
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
        "The next table has the cost of each relation per action: the time with the relation "
        "minus the time without it. Both times were measured alternately in one run, in the "
        "same configuration. An entry has the median difference over the rounds, its 95 % "
        "confidence interval, and the ratio of the two times. The row *nothing* compares a "
        "contract with itself and shows the noise.\n\n"
        + markdown(("relation", *ACTIONS), table)
        + (
            f"\n\nIn another measurement, the {len(guards)} guards of F, dI and dW were removed "
            "from the generated functions, one at a time and all at once. All guards of an "
            f"action together cost: {every}. The most expensive single guards are: {named}. For "
            f"{unseen} of the {len(guards)} guards the interval of the cost includes zero. The "
            "report lists each guard."
        )
    )

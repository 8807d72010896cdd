"""
Random tests: real contracts get random legal and illegal calls, and the oracle checks each answer.

`run` tests contracts with whole schedules. `ContractMachine` does the same as a Hypothesis state
machine with a rule for every transition. A run proves nothing. The test fails if a legal call is
refused, or if an illegal call is accepted or refused by another clause than the first that it
breaks. The test also fails if a refusal changes the state, if an invariant of the specification
breaks, or if a transition or clause was never exercised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from attrs import asdict, define, field
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from qeffect import Contract
from qeffect.countdown import Countdown

from ..coverage import CLAUSE_IDS, TARGETS, TRANSITION_NAMES, Target
from ..process import Process
from .driver import CallCounts, Driver, Mismatch
from .processes import PROCESSES
from .proposals import chooser

__all__ = ["ContractMachine", "RandomReport", "numbers", "processes", "run", "uncovered"]

_CHOICES = st.integers(0, (1 << 64) - 1)
#: Hypothesis also draws constants of the loaded modules if they are within bounds. None is above
#: this bound, so that a seed draws the same schedules in a command, in a test and from a wheel.
_BEYOND = 1 << 96
_APART = st.integers(_BEYOND, _BEYOND + (1 << 64) - 1).map(lambda number: number - _BEYOND)
#: Steps of the longest schedule; a step is a call, or a few calls that belong together.
_LONGEST = 160
#: Limits of the search for a shorter failure: lengths of schedules, schedules per length, seconds.
_LENGTHS = (8, 24, 72, _LONGEST)
_SHRINKING = 300
#: Every n-th schedule looks for refusals that the other schedules did not reach.
_LAST = 2
_SHRINKING_SECONDS = 30.0


@define
class RandomReport:
    """
    The result of a run of random schedules.

    Args:
        schedules: Number of schedules that ran.
        actions: Number of calls, both accepted and refused.
        accepted: How often each transition was accepted.
        refused: How often each clause refused.
        uncovered: Transitions that were never accepted, and clauses that never refused a transition
            that the specification names for the clause.
        seconds: Wall-clock time in seconds.
        failure: The mismatch of contract and oracle, with a shortened schedule and its timeline;
            empty without a mismatch.
    """

    schedules: int = 0
    actions: int = 0
    accepted: dict[str, int] = field(factory=dict)
    refused: dict[str, int] = field(factory=dict)
    uncovered: list[str] = field(factory=list)
    seconds: float = 0.0
    failure: str = ""

    @property
    def actions_per_second(self) -> float:
        """Number of calls per second, including the time to draw and check them."""
        return self.actions / self.seconds if self.seconds else 0.0

    def asdict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {**asdict(self), "actions_per_second": self.actions_per_second}


def processes() -> st.SearchStrategy[Process]:
    """Return a Hypothesis strategy for `PROCESSES`; the first process is the simplest."""
    return st.sampled_from(PROCESSES)


def numbers(
    longest: int = 120, one: st.SearchStrategy[int] = _CHOICES
) -> st.SearchStrategy[list[int]]:
    """
    Return a Hypothesis strategy for the numbers that choose the steps of a random walk. Long lists
    are as likely as short lists, and shrink to short lists.
    """
    # A list of exactly one size would shrink by its numbers alone, so none is that long at least.
    shortest = tuple(longest * quarter // 4 for quarter in range(4))
    return st.sampled_from(shortest).flatmap(
        lambda least: st.lists(one, min_size=least, max_size=longest)
    )


def uncovered(tally: CallCounts) -> list[str]:
    """Return the transitions that were never accepted and the refusals that were never given."""
    return [
        *(f"transition {name}" for name in TRANSITION_NAMES if not tally.accepted[name]),
        *(
            f"clause {clause} in {name}"
            for name, clause in TARGETS
            if not tally.targets[name, clause]
        ),
    ]


def run(
    schedules: int,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    make: Callable[[Process], Callable[..., Contract]] | None = None,
    *,
    shrink: bool = True,
    note: Callable[[str], None] | None = None,
) -> RandomReport:
    """
    Run random schedules over all processes.

    A few hundred schedules exercise every transition and clause. Fewer schedules may leave some of
    them uncovered; the report lists these.

    Args:
        schedules: Number of schedules.
        seed: Seed of the random choices; equal seeds give equal schedules.
        progress: Function that is called with progress lines.
        make: Function that returns a factory of contracts for a process, to test faulty contracts.
        shrink: Whether a failing schedule is shortened before it is reported.
        note: Function that is called with a failure at once, before it is shortened.

    Returns:
        The report. The run failed if ``failure`` or ``uncovered`` is not empty.
    """
    tally = CallCounts()
    report = RandomReport()
    count = Countdown("random schedules", schedules)

    rare: list[Target] = []

    def walk(process: Process, steps: list[int]) -> None:
        if not any(steps) or report.schedules == wanted:
            return  # the simplest example, which Hypothesis draws first and may draw again
        made = None if make is None else make(process)
        driver = Driver(process, tally, made, rare=rare)
        for number in steps:
            driver.step(number)
        driver.agree()
        report.schedules += 1
        if progress is not None:
            progress(f"Checking: {count(report.schedules)}: {tally.calls:,} actions")

    begun = time.perf_counter()
    found = None
    wanted = 0
    last = schedules // _LAST
    for share_of, start in ((schedules - last, seed), (last, seed + len(PROCESSES))):
        for number, process in enumerate(PROCESSES):
            # One process after another. If the process were drawn with the steps, some would hardly
            # ever occur.
            share = (share_of + number) // len(PROCESSES)
            if share and found is None:
                one, spare = st.just(process), 2 + share // 10
                wanted = report.schedules + share
                found = _found(walk, one, share + spare, start + number, (Phase.generate,))
        rare = [target for target in TARGETS if not tally.targets[target]]
    report.seconds = time.perf_counter() - begun
    if found is not None:
        if note is not None:
            note(f"First finding: {str(found).splitlines()[0]}; looking for a shorter schedule")
        report.failure = str(_shrunk(found, seed, progress, make) if shrink else found)
    report.actions = tally.calls
    report.accepted = {name: tally.accepted[name] for name in TRANSITION_NAMES}
    report.refused = {clause: tally.refused[clause] for clause in CLAUSE_IDS}
    report.uncovered = [] if report.failure else uncovered(tally)
    return report


def _shrunk(
    found: Mismatch,
    seed: int,
    progress: Callable[[str], None] | None,
    make: Callable[[Process], Callable[..., Contract]] | None,
) -> Mismatch:
    """
    Return the same kind of mismatch with the fewest and simplest calls that the search finds.

    The search attempts one fixed guard after every step. If it attempted random guards, as the run
    does, removing a step would change all later attempts.
    """

    best = found
    deadline = time.monotonic() + _SHRINKING_SECONDS

    def walk(process: Process, steps: list[int]) -> None:
        nonlocal best
        if time.monotonic() > deadline:
            raise _Enough
        if progress is not None:
            progress("Shrinking.")
        focus = [] if found.guard is None else [found.guard]
        driver = Driver(process, None, None if make is None else make(process), focus)
        try:
            for number in steps:
                driver.step(number)
            driver.agree()
        except Mismatch as mismatch:
            best = min(best, mismatch, key=lambda one: len(one.steps))
            raise

    with suppress(_Enough):
        for longest in _LENGTHS:
            phases = (Phase.generate, Phase.shrink)
            if _found(walk, processes(), _SHRINKING, seed, phases, longest):
                break
    return best


class _Enough(BaseException):
    """Raised when the time for shrinking is over."""


def _found(
    walk: Callable[[Process, list[int]], None],
    process: st.SearchStrategy[Process],
    examples: int,
    seed: int,
    phases: tuple[Phase, ...],
    longest: int = _LONGEST,
) -> Mismatch | None:
    """Run Hypothesis examples until one fails; return the mismatch, or None if none fails."""
    one = _CHOICES if Phase.shrink in phases else _APART  # offset values shrink worse
    configured = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    test = seeded(seed)(configured(given(process, numbers(longest, one))(walk)))
    try:
        test()
    except Mismatch as mismatch:
        return mismatch
    return None


class ContractMachine(RuleBasedStateMachine):
    """
    A Hypothesis state machine for one process; a class attribute counts what was exercised.

    Each transition has a rule that attempts a legal or illegal call of it. Single attempts would
    rarely complete an epoch, so each rule first takes some steps of a random walk.
    """

    tally = CallCounts()

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(PROCESSES[0], self.tally)

    @initialize(process=processes())
    def configure(self, process: Process) -> None:
        """Choose the process to test."""
        self.driver = Driver(process, self.tally)

    def attempt(self, transition: str, steps: list[int], choices: int) -> None:
        """Take some steps of a random walk, then attempt a call of a transition."""
        for number in steps:
            self.driver.step(number)
        self.driver.attempt(chooser(choices), transition)

    @rule()
    def agree(self) -> None:
        """Compare the contract's state with the shadow, and check every invariant."""
        self.driver.agree()


def _rule(transition: str) -> Callable[[ContractMachine, list[int], int], None]:
    def attempt(self: ContractMachine, steps: list[int], choices: int) -> None:
        self.attempt(transition, steps, choices)

    attempt.__name__ = transition
    attempt.__doc__ = f"Attempt {transition}, right or wrong."
    return attempt


_WALKS = st.lists(_CHOICES, min_size=1, max_size=10)
for _name in TRANSITION_NAMES:
    _made = rule(steps=_WALKS, choices=_CHOICES)(_rule(_name))
    setattr(ContractMachine, _name, _made)

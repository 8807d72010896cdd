"""
Measure what a part of the contract costs: time guarded actions with the part and without it, in
alternation within one run.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import comb
from random import Random
from typing import Any, Final

from attrs import frozen

from ..contract import Contract
from ..engine.stage import OPTIONAL, Transitions

__all__ = [
    "ACTIONS",
    "ALL",
    "NOTHING",
    "Pair",
    "Run",
    "Times",
    "bounds",
    "dearest",
    "in_turns",
    "lines",
    "price",
    "relations",
    "spelled",
    "with_functions",
]

#: The transitions that check and commit each action.
ACTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "F": ("check_forward", "commit_forward"),
    "dI": ("check_dgrad", "commit_dgrad"),
    "dW": ("check_wgrad", "commit_wgrad"),
}

#: Rounds of a comparison; each round gives one difference of medians. The addresses of objects in
#: memory change a time by about one percent; many rounds average this out.
ROUNDS: Final = 20

#: Number of turns of each contract per round, of timed epochs per turn, and of untimed epochs
#: before the timed epochs. In the untimed epochs the interpreter specializes its calls for the
#: functions of the contract whose turn it is.
TURNS: Final = 4
EPOCHS: Final = 20
BEFORE: Final = 8

#: Names of two rows of the report: the price of all optional relations together, and the price of
#: nothing, which should be zero.
ALL: Final = "all of them"
NOTHING: Final = "nothing"

#: Number of guards that are printed; the report has all.
_NAMED: Final = 3

#: By action, microseconds of the guarded action, one entry per epoch.
Times = Mapping[str, Sequence[float]]

#: Runs a number of epochs of a contract and returns their times.
Run = Callable[[Contract, int], Times]


@frozen
class Pair:
    """
    Two contracts to compare: one with a part (a relation or a guard), the other without the part.

    Args:
        name: Name of the relation or guard.
        whole: Function that makes a contract with the relation or guard.
        without: Function that makes a contract without the relation or guard.
    """

    name: str
    whole: Callable[[], Contract]
    without: Callable[[], Contract]


def with_functions(contract: Contract, functions: Transitions) -> Contract:
    """
    Replace a contract's functions for F, dI and dW, and return the contract.

    Args:
        contract: A new contract.
        functions: The transition functions to use; their relations must equal the contract's.

    Raises:
        RuntimeError: The contract's attributes for its transitions do not have the expected names.
    """
    for name in (name for pair in ACTIONS.values() for name in pair):
        # getattr, not vars(): vars() would slow down every later attribute access of the contract.
        if getattr(contract, f"_{name}", None) is not contract.transitions.functions[name]:
            raise RuntimeError(
                f"the contract has no transition {name} of its own; the attribute was renamed"
            )
        setattr(contract, f"_{name}", functions.functions[name])
    return contract


def relations(make: Callable[[Iterable[str]], Contract], run: Run, **turns: int) -> dict[str, Any]:
    """
    Measure the price of each optional relation (group of guards), and of all optional relations
    together.

    Args:
        make: Function that makes a contract without the named relations.
        run: Function that runs epochs of a contract and returns the times.
        turns: Keyword arguments of ``in_turns``, such as ``rounds``.

    Returns:
        For each relation, the ``price`` of each action. The entry ``all of them`` is the price of
        all relations together. The entry ``nothing`` compares equal contracts and so shows the
        measurement error.
    """
    left_out: dict[str, tuple[str, ...]] = {name: (name,) for name in sorted(OPTIONAL)}
    left_out |= {ALL: tuple(sorted(OPTIONAL)), NOTHING: ()}
    pairs = [Pair(name, partial(make, ()), partial(make, omit)) for name, omit in left_out.items()]
    return in_turns(pairs, run, **turns)


def in_turns(
    pairs: Sequence[Pair],
    run: Run,
    *,
    rounds: int = ROUNDS,
    turns: int = TURNS,
    epochs: int = EPOCHS,
    before: int = BEFORE,
) -> dict[str, Any]:
    """
    Compare pairs of contracts: every round runs every pair and alternates between its contracts.

    Every round makes new contracts. A random draw decides which contract of a pair is made first
    and which runs first, because either order changes a time by about one percent. Each contract
    comes first in half of the rounds.

    Args:
        pairs: The pairs of contracts to compare.
        run: Function that runs epochs of a contract and returns the times.
        rounds: Number of rounds; each gives one difference of medians per action.
        turns: Number of times that each contract is timed in a round.
        epochs: Number of epochs that are timed in one turn.
        before: Number of untimed epochs at the start of each turn.

    Returns:
        For the name of each pair, the ``price`` of each action.
    """
    medians: dict[str, list[dict[str, tuple[float, float]]]] = {pair.name: [] for pair in pairs}
    chance = Random(0)
    made_first, runs_first = ([_halves(rounds, chance) for _ in pairs] for _ in range(2))
    for number in range(rounds):
        gc.collect()
        for pair, made, runs in zip(pairs, made_first, runs_first, strict=True):
            contracts = _made(pair, made[number])
            medians[pair.name].append(_round(contracts, runs[number], run, turns, epochs, before))
    return {
        name: {action: price([found[action] for found in of_rounds]) for action in ACTIONS}
        for name, of_rounds in medians.items()
    }


def _halves(rounds: int, chance: Random) -> list[int]:
    """Return 0 or 1 for every round: each number for half of the rounds, in random order."""
    sides = [number % 2 for number in range(rounds)]
    chance.shuffle(sides)
    return sides


def _made(pair: Pair, first: int) -> tuple[Contract, Contract]:
    """Make and return the contracts with and without the part; ``first`` (0 or 1) is made first."""
    if first == 0:
        whole = pair.whole()
        return whole, pair.without()
    without = pair.without()
    return pair.whole(), without


def _round(
    contracts: tuple[Contract, Contract],
    first: int,
    run: Run,
    turns: int,
    epochs: int,
    before: int,
) -> dict[str, tuple[float, float]]:
    """Return both contracts' median times by action; the contract that begins a turn alternates."""
    times: list[dict[str, list[float]]] = [{action: [] for action in ACTIONS} for _ in contracts]
    for turn in range(turns):
        for side in (first, 1 - first) if turn % 2 == 0 else (1 - first, first):
            run(contracts[side], before)
            for action, own in run(contracts[side], epochs).items():
                times[side][action] += own
    whole, without = times
    return {
        action: (statistics.median(whole[action]), statistics.median(without[action]))
        for action in ACTIONS
    }


def price(rounds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """
    Compute the price of a relation or guard of the contract from the times of all rounds.

    Args:
        rounds: For each round, the microseconds of an action with the relation or guard, and
            without it.

    Returns:
        ``with_us`` and ``without_us``: the median times over the rounds. ``us``: the median
        difference of the two times. ``low_us`` and ``high_us``: a confidence interval of ``us``.
        ``ratio``: the median of the time with the part divided by the time without the part.

    >>> price([(2.5, 2.0), (2.25, 2.0), (2.0, 2.0)])["us"]
    0.25
    """
    differences = [whole - without for whole, without in rounds]
    low, high = bounds(differences)
    return {
        "with_us": statistics.median(whole for whole, _ in rounds),
        "without_us": statistics.median(without for _, without in rounds),
        "us": statistics.median(differences),
        "low_us": low,
        "high_us": high,
        "ratio": statistics.median(whole / without for whole, without in rounds),
    }


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """
    Return a 95 percent confidence interval of the median of some values.

    The interval is based on the order of the values and is valid for every distribution. With
    twenty values the interval runs from the sixth smallest to the sixth largest value. With fewer
    than nine values it runs from the smallest to the largest value; with fewer than six values its
    confidence is below 95 percent.

    >>> bounds(range(1, 21))
    (6, 15)
    >>> bounds([3, 1, 2])
    (1, 3)
    """
    ordered = sorted(values)
    count, dropped = len(ordered), 0
    outside = comb(count, 0)
    while 2 * (outside + comb(count, dropped + 1)) <= 0.05 * 2**count:
        dropped += 1
        outside += comb(count, dropped)
    return ordered[dropped], ordered[-1 - dropped]


def lines(data: Mapping[str, Any]) -> list[str]:
    """
    Return lines with the prices of every relation and of the three most expensive guards.

    A line gives the microseconds that a part adds to an action, with a confidence interval, and the
    ratio of the time with the part to the time without the part.

    Args:
        data: The report, with ``relation_prices`` and, if guards were measured, ``clause_prices``.
    """
    found = [f"  added by {name}: {_actions(own)}" for name, own in data["relation_prices"].items()]
    if "clause_prices" in data:
        clauses = data["clause_prices"]
        found.append(f"  added by all guards: {_actions(clauses['every_guard'])}")
        for row in dearest(clauses["guards"])[:_NAMED]:
            found.append(f"  added by {row['clause']} to {row['action']}: {spelled(row)}")
    return found


def dearest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort the measured guards by price, the most expensive first."""
    return sorted(rows, key=lambda row: -row["us"])


def spelled(cost: Mapping[str, float]) -> str:
    """
    Return a price as text.

    >>> spelled(price([(2.5, 2.0), (2.25, 2.0), (2.0, 2.0)]))
    '0.250 µs (0.000 to 0.500), 1.12x'
    """
    low, high = cost["low_us"], cost["high_us"]
    return f"{cost['us']:.3f} µs ({low:.3f} to {high:.3f}), {cost['ratio']:.2f}x"


def _actions(own: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(f"{action} {spelled(cost)}" for action, cost in own.items())

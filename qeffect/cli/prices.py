"""
What a part of the contract costs: guarded actions with it and without it, in turns of one run.
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

#: Rounds of a comparison; each gives one difference of medians. Many, since places in memory and
#: with them a hundredth of a time are chance.
ROUNDS: Final = 20

#: Turns of each side in a round, epochs of a turn, and how many of those come before the clock:
#: the interpreter adapts its calls to the functions that it met last.
TURNS: Final = 4
EPOCHS: Final = 20
BEFORE: Final = 8

#: All relations that may be left out, together; and none, which should cost nothing.
ALL: Final = "all of them"
NOTHING: Final = "nothing"

#: Guards that are printed, of all that are reported.
_NAMED: Final = 3

#: Microseconds of guarded actions, one entry an epoch, by action.
Times = Mapping[str, Sequence[float]]

#: Runs so many epochs of a contract and gives their times.
Run = Callable[[Contract, int], Times]


@frozen
class Pair:
    """
    What is compared, by the name of what is priced.

    Args:
        name: What is priced.
        whole: Makes a contract with it.
        without: Makes one without it.
    """

    name: str
    whole: Callable[[], Contract]
    without: Callable[[], Contract]


def with_functions(contract: Contract, functions: Transitions) -> Contract:
    """
    Return the contract, with other functions for F, dI and dW in place of its own.

    Args:
        contract: A new contract.
        functions: Transitions over the same relations.

    Raises:
        RuntimeError: The contract does not call its transitions by the names known here.
    """
    for name in (name for pair in ACTIONS.values() for name in pair):
        # Asked of the contract itself: its vars() would make every later look-up slower.
        if getattr(contract, f"_{name}", None) is not contract.transitions.functions[name]:
            raise RuntimeError(f"a contract does not keep {name} where it was looked for")
        setattr(contract, f"_{name}", functions.functions[name])
    return contract


def relations(make: Callable[[Iterable[str]], Contract], run: Run, **turns: int) -> dict[str, Any]:
    """
    Price each relation that a configuration may leave out, and all of them.

    Args:
        make: Makes a contract that leaves out the relations named.
        run: Runs epochs of it.
        turns: As for ``in_turns``.

    Returns:
        By relation, under ``all of them`` and, for what the comparison itself is worth, under
        ``nothing``: a ``price`` of each action.
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
    Compare pairs of contracts, each pair in turns and every pair in every round.

    Every round makes its contracts anew; which of a pair is made first, and which runs first, is
    drawn, each in half of the rounds: either is worth a hundredth of an action by itself.

    Args:
        pairs: The pairs.
        run: Runs epochs of a contract.
        rounds, turns, epochs, before: As ``ROUNDS``, ``TURNS``, ``EPOCHS`` and ``BEFORE``.

    Returns:
        By name a ``price`` of each action.
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
    """Return a side for every round, each in half of them, in any order."""
    sides = [number % 2 for number in range(rounds)]
    chance.shuffle(sides)
    return sides


def _made(pair: Pair, first: int) -> tuple[Contract, Contract]:
    """Make the contracts of a pair: with what is priced and without it, this or that one first."""
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
    """Return the medians of both sides by action; who begins changes from turn to turn."""
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
    Return what something costs, from its rounds.

    Args:
        rounds: Microseconds of an action with it and without it, a pair a round.

    Returns:
        ``with_us`` and ``without_us``, medians over the rounds; ``us``, the median of the rounds'
        differences, and ``low_us`` and ``high_us``, its ``bounds``; and ``ratio``, the median of
        the rounds' quotients, with over without.

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
    Return between which of some values their median lies, in at least 95 of 100 such samples.

    By their order alone, whatever their distribution: of twenty the sixth least and the sixth
    most; of fewer than nine the least and the most, which promise less where there are under six.

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
    Return the prices of a report as text: those of relations, and the three dearest guards.

    Args:
        data: ``relation_prices``, and ``clause_prices`` where clauses were priced.
    """
    found = [
        f"  with {name} over without: {_actions(own)}"
        for name, own in data["relation_prices"].items()
    ]
    if "clause_prices" in data:
        clauses = data["clause_prices"]
        found.append(f"  with every guard over without any: {_actions(clauses['every_guard'])}")
        for row in dearest(clauses["guards"])[:_NAMED]:
            found.append(f"  {row['clause']} of {row['action']}: {spelled(row)}")
    return found


def dearest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of guards, the dearest first."""
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

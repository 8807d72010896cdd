"""
What a part of the contract costs: guarded actions with it and without it, in turns of one run.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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

#: Rounds of a comparison; each gives one difference of medians.
ROUNDS: Final = 9

#: Turns of each side in a round, epochs of a turn, and how many of those come before the clock:
#: the interpreter adapts its calls to the functions that it met last.
TURNS: Final = 4
EPOCHS: Final = 40
BEFORE: Final = 10

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

    Every round makes its contracts anew, so that no place in memory favours a side throughout.

    Args:
        pairs: The pairs.
        run: Runs epochs of a contract.
        rounds, turns, epochs, before: As ``ROUNDS``, ``TURNS``, ``EPOCHS`` and ``BEFORE``.

    Returns:
        By name a ``price`` of each action.
    """
    medians: dict[str, list[dict[str, tuple[float, float]]]] = {pair.name: [] for pair in pairs}
    for _ in range(rounds):
        gc.collect()
        for pair in pairs:
            contracts = pair.whole(), pair.without()
            medians[pair.name].append(_round(contracts, run, turns, epochs, before))
    return {
        name: {action: price([found[action] for found in of_rounds]) for action in ACTIONS}
        for name, of_rounds in medians.items()
    }


def _round(
    contracts: tuple[Contract, Contract], run: Run, turns: int, epochs: int, before: int
) -> dict[str, tuple[float, float]]:
    """Return the medians of both sides by action; who begins changes from turn to turn."""
    times: list[dict[str, list[float]]] = [{action: [] for action in ACTIONS} for _ in contracts]
    for turn in range(turns):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
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
        differences, with the least and the most of them, ``least_us`` and ``most_us``; and
        ``ratio``, the median of the rounds' quotients, with over without.

    >>> price([(2.5, 2.0), (2.25, 2.0), (2.0, 2.0)])["us"]
    0.25
    """
    differences = [whole - without for whole, without in rounds]
    return {
        "with_us": statistics.median(whole for whole, _ in rounds),
        "without_us": statistics.median(without for _, without in rounds),
        "us": statistics.median(differences),
        "least_us": min(differences),
        "most_us": max(differences),
        "ratio": statistics.median(whole / without for whole, without in rounds),
    }


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
    low, high = cost["least_us"], cost["most_us"]
    return f"{cost['us']:.3f} µs ({low:.3f} to {high:.3f}), {cost['ratio']:.2f}x"


def _actions(own: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(f"{action} {spelled(cost)}" for action, cost in own.items())

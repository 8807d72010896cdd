"""
Prices: how the comparison computes them, which guards it deletes, and how a report shows them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from math import comb
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qeffect import Contract, Refused
from qeffect.cli import bench, prices
from qeffect.cli.bench import priced_contract, run_epochs
from qeffect.engine.compose import source
from qeffect.engine.stage import OPTIONAL, transitions
from qeffect.keys import TapeKey
from qeffect.verification import prices as of_clauses
from qeffect.verification.bench import _sites
from tests.docs.bench_block import cost

REPORTS = Path(__file__).parents[2] / "verification" / "reports"
ONCE = {"rounds": 1, "turns": 1, "epochs": 1, "before": 0}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Every price measured once, by the shortest run."""
    return {
        "relation_prices": prices.relations(priced_contract, run_epochs, **ONCE),
        "clause_prices": of_clauses.clauses(**ONCE),
    }


# The arithmetic


def test_a_price_is_the_median_of_the_rounds_differences() -> None:
    """A price is not the difference of the medians; its range is the range of the rounds."""
    rounds = [(4.0, 1.0), (2.0, 1.5), (8.0, 4.0)]

    assert {
        "with_us": 4.0,
        "without_us": 1.5,
        "us": 3.0,
        "low_us": 0.5,
        "high_us": 4.0,
        "ratio": 2.0,
    } == prices.price(rounds)


@pytest.mark.parametrize(
    ("count", "low"), [(1, 0), (2, 0), (5, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5)]
)
def test_bounds_of_a_median_are_of_the_binomial_distribution(count: int, low: int) -> None:
    """At most 5 in 100 sign patterns of that many rounds put the median outside the bounds."""
    assert (low, count - 1 - low) == prices.bounds(list(range(count))[::-1])
    outside = sum(comb(count, k) for k in range(low + 1)) * 2 / 2**count
    narrower = sum(comb(count, k) for k in range(low + 2)) * 2 / 2**count
    assert outside <= 0.05 or count < 6
    assert narrower > 0.05


class Clock:
    """Replaces a run: returns scripted times by contract, and records the turns."""

    def __init__(self, times: dict[str, Iterable[float]]) -> None:
        self.times = {name: iter(values) for name, values in times.items()}
        self.turns: list[tuple[str, int]] = []

    def __call__(self, contract: Any, epochs: int) -> dict[str, list[float]]:
        self.turns.append((contract, epochs))
        if epochs == BEFORE:
            return {action: [1e9] * epochs for action in prices.ACTIONS}
        took = next(self.times[contract])
        return {action: [took + i for i in range(epochs)] for action in prices.ACTIONS}


BEFORE, EPOCHS = 2, 3


def test_both_sides_take_turns_and_each_begins_half_of_the_rounds() -> None:
    """The sides alternate who begins; epochs before timing starts are dropped."""
    clock = Clock({"a": [10, 20, 30, 40], "b": [1, 2, 3, 4]})
    made: list[str] = []

    def maker(name: str) -> Any:
        def make() -> str:
            made.append(name)
            return name

        return make

    pair = prices.Pair("it", maker("a"), maker("b"))
    found = prices.in_turns([pair], clock, rounds=2, turns=2, epochs=EPOCHS, before=BEFORE)

    one = [(side, n) for side in ("a", "b", "b", "a") for n in (BEFORE, EPOCHS)]
    other = [(side, n) for side in ("b", "a", "a", "b") for n in (BEFORE, EPOCHS)]
    assert clock.turns in (one + other, other + one)
    assert made in ([*"abba"], [*"baab"])
    # Medians of 10..12 with 20..22, of 1..3 with 2..4, then of the second round.
    rounds = [(16.0, 2.5), (36.0, 4.5)]
    assert {"it": dict.fromkeys(prices.ACTIONS, prices.price(rounds))} == found


# What is taken out


@pytest.mark.nightly
def test_every_relation_that_may_be_left_out_is_priced(measured: dict[str, Any]) -> None:
    """Each relation alone, all together, and none: whole epochs run without any of them."""
    own = measured["relation_prices"]

    assert {*OPTIONAL, prices.ALL, prices.NOTHING} == own.keys()
    assert all(own[name].keys() == prices.ACTIONS.keys() for name in own)


def test_every_guard_of_the_three_actions_is_priced(measured: dict[str, Any]) -> None:
    """One row under its action for each guard of F, dI and dW that has a mutant."""
    rows = measured["clause_prices"]["guards"]

    assert {action: count["guards"] for action, count in _sites().items()} == Counter(
        row["action"] for row in rows
    )
    assert all(row["transition"] in prices.ACTIONS[row["action"]] for row in rows)
    assert all(row["clause"].startswith(row["relation"]) for row in rows)
    assert len(rows) == len({(row["transition"], row["clause"], row["test"]) for row in rows})


def test_without_a_guard_the_functions_are_the_contracts_less_its_test() -> None:
    """One function has two lines fewer; every other function is unchanged."""
    guard = next(g for g in of_clauses.guards_of("F") if g.clause == "version.stale-cache")

    changed = of_clauses.without([guard])

    for name, function in of_clauses.without([]).functions.items():
        ours, theirs = (
            Counter(source(f).splitlines()) for f in (function, changed.functions[name])
        )
        gone = [f"    if {guard.text}:", f'        raise Refused("{guard.clause}")']
        assert (Counter(gone) if name == guard.transition else Counter()) == ours - theirs
        assert Counter() == theirs - ours


def test_functions_without_any_guard_taken_out_are_those_of_the_contract() -> None:
    """A clause is compared with the unchanged composition, generated again."""
    own, anew = transitions(), of_clauses.without([])

    for name in (name for pair in prices.ACTIONS.values() for name in pair):
        assert source(own.functions[name]).split() == source(anew.functions[name]).split()
        assert own.functions[name] is not anew.functions[name]


@pytest.mark.parametrize("action", prices.ACTIONS)
def test_no_guard_is_left_where_every_guard_is_taken_out(action: str) -> None:
    """No refusal is left in the check and the commit of an action."""
    bare = of_clauses.without(of_clauses.guards_of(action))

    for name in prices.ACTIONS[action]:
        assert "raise" in source(transitions().functions[name])
        assert "raise" not in source(bare.functions[name])


def test_a_contract_runs_the_functions_that_it_is_given() -> None:
    """A forward over a stale cache is refused, and accepted if that guard is deleted."""
    guard = next(g for g in of_clauses.guards_of("F") if g.clause == "version.stale-cache")
    key = TapeKey(0, 0, 0)

    with pytest.raises(Refused, match=r"version\.stale-cache"):
        priced_contract().check_forward(key)
    broken = prices.with_functions(priced_contract(), of_clauses.without([guard]))

    assert key == broken.check_forward(key).key


def test_a_contract_that_calls_its_functions_otherwise_is_not_priced() -> None:
    """Otherwise no guard would be deleted, and every price would be meaningless."""
    contract = priced_contract()
    contract._check_wgrad = lambda *arguments: 1

    with pytest.raises(RuntimeError, match="check_wgrad"):
        prices.with_functions(contract, transitions())


def test_epochs_go_on_where_the_contract_stands() -> None:
    """A second run of a contract begins at the epoch after the first run."""
    contract: Contract = priced_contract()

    first, second = run_epochs(contract, 2), run_epochs(contract, 3)

    assert 5 == contract.epoch
    assert {"F": 2, "dI": 2, "dW": 2} == {action: len(own) for action, own in first.items()}
    assert {"F": 3, "dI": 3, "dW": 3} == {action: len(own) for action, own in second.items()}


# What is said


def schema() -> dict[str, Any]:
    """The schema of the bench's report."""
    found: dict[str, Any] = json.loads((REPORTS / "bench.schema.json").read_text("utf-8"))
    return found


def report() -> dict[str, Any]:
    """The checked-in report."""
    found: dict[str, Any] = json.loads((REPORTS / "bench.json").read_text("utf-8"))
    return found


def test_reports_keep_the_schema(measured: dict[str, Any]) -> None:
    """The checked-in report, and a report measured now."""
    jsonschema.validate(report(), schema())
    jsonschema.validate({**report(), **measured}, schema())


@pytest.mark.parametrize("lost", ["relation_prices", "clause_prices"])
def test_a_report_without_prices_breaks_the_schema(lost: str) -> None:
    """Prices of relations are always needed, prices of clauses if the verification was measured."""
    short = {name: value for name, value in report().items() if name != lost}

    with pytest.raises(jsonschema.ValidationError, match=lost):
        jsonschema.validate(short, schema())
    del short["mutants"]
    if lost == "clause_prices":
        jsonschema.validate(short, schema())


@pytest.mark.parametrize("lost", ["us", "ratio", "clause"])
def test_a_guard_without_a_field_breaks_the_schema(measured: dict[str, Any], lost: str) -> None:
    """Every row has its price and names its guard."""
    clauses = measured["clause_prices"]
    rows = [{k: v for k, v in row.items() if k != lost} for row in clauses["guards"]]
    broken = {**report(), **measured, "clause_prices": {**clauses, "guards": rows}}

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema())


def sample() -> dict[str, Any]:
    """Round prices: arena is expensive, capture is cheap, and one of two guards is noise."""

    def all_actions(us: float) -> dict[str, Any]:
        return dict.fromkeys(prices.ACTIONS, prices.price([(2 + us, 2.0)]))

    def row(clause: str, rounds: list[tuple[float, float]]) -> dict[str, Any]:
        return {"action": "dI", "clause": clause, **prices.price(rounds)}

    return {
        "relation_prices": {"capture": all_actions(0.125), "arena": all_actions(0.5)},
        "clause_prices": {
            "guards": [
                row("order.token", [(2.0, 2.0625), (2.0625, 2.0), (2.0625, 2.0)]),
                row("arena.unbound", [(2.25, 2.0), (2.25, 2.0)]),
            ],
            "every_guard": all_actions(1.0),
        },
    }


def test_the_readme_shows_relations_by_price_and_the_dearest_clauses() -> None:
    """The most expensive come first; guards whose rounds differ in sign are counted."""
    said = cost(sample())

    assert said.index("| arena | 0.500 µs (0.500 to 0.500), 1.25x") < said.index("| capture |")
    assert "the 2 guards of F, dI and dW were removed" in said
    assert "`arena.unbound` of dI 0.250 µs (0.250 to 0.250), 1.12x; `order.token`" in said
    assert "For 1 of the 2 guards the interval of the cost includes zero" in said
    assert "F 1.000 µs (1.000 to 1.000), 1.50x" in said
    assert "" == cost({})


def test_the_command_prints_prices_in_lines() -> None:
    """One line per relation and one per guard, not a raw data structure."""
    data = {"environment": {"cpu": "a cpu", "cores": 2}, "refusal_us": 1.0, **sample()}

    lines = bench._lines(data)

    assert "  added by arena: F 0.500 µs (0.500 to 0.500), 1.25x; dI" in "\n".join(lines)
    assert "  added by arena.unbound to dI: 0.250 µs (0.250 to 0.250), 1.12x" in lines
    assert not [line for line in lines if "{" in line or "_prices" in line]
    assert bench._lines({"environment": data["environment"]})

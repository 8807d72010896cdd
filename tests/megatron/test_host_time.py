"""The clock at the borders of the guard, by which `tests/gpu/guard_host_time.py` measures."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from qeffect.guards import megatron
from qeffect.guards.evidence import BackwardPasses
from qeffect.guards.megatron_updates import Updates
from tests.gpu import guard_host_time
from tests.gpu.guard_host_time import Inside, places, watch
from tests.megatron.faults import STEPS
from tests.megatron.stand_in import StandIn, installed
from tests.megatron.test_guard import LEGAL, steps


class _Clock:
    """A clock that only stands still or is set."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the stand-in; every name that `watch` replaces is restored afterwards."""
    found = installed(monkeypatch)
    hooks = [(BackwardPasses, "_passed"), (Updates, "_before"), (Updates, "_after")]
    for owner, name in [*places(), *hooks]:
        monkeypatch.setattr(owner, name, vars(owner).get(name))
    yield found
    for guarded in list(megatron._active):
        guarded.remove()


def test_only_time_inside_is_added() -> None:
    """A function of the guard calls the library, which calls a hook of the guard."""
    clock = _Clock()
    inside = Inside(clock)

    def passes(ns: int) -> None:
        clock.now += ns

    hook = inside.of(lambda: passes(7), guard=True)

    def library() -> None:
        passes(100)
        hook()
        passes(1000)

    called = inside.of(library, guard=False)

    def guard() -> None:
        passes(5)
        called()
        passes(3)

    passes(10_000)
    inside.of(guard, guard=True)()
    passes(10_000)

    assert inside.ns == 5 + 7 + 3


def test_after_an_error_time_is_added_as_before() -> None:
    """The error leaves through a function of the library and one of the guard."""
    clock = _Clock()
    inside = Inside(clock)

    def fails() -> None:
        clock.now += 100
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        inside.of(inside.of(fails, guard=False), guard=True)()
    clock.now += 50
    inside.of(lambda: None, guard=True)()

    assert inside.ns == 0


@pytest.mark.parametrize("where", ["library", "guard"])
def test_a_run_keeps_its_steps(
    where: str, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    If only the library takes time, none is inside the guard; if only the guard does, all of it is.
    """
    clock, calls = _Clock(), [0]

    def slow(run: object) -> object:
        def slowly(*args: object, **kwargs: object) -> object:
            clock.now += 1
            calls[0] += 1
            return run(*args, **kwargs)  # type: ignore[operator]

        return slowly

    if where == "library":
        for owner, name in places():
            monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    else:
        monkeypatch.setattr(Updates, "begin", slow(Updates.begin))
    inside = Inside(clock)
    run = StandIn(made, LEGAL["interleaved, quantized"], 0)
    watched = watch(inside)
    guarded = watched.guarded
    run.forward_step = inside.of(run.forward_step, guard=False)  # type: ignore[method-assign]
    steps(run)

    assert guarded.epochs == STEPS
    assert guarded._recurring is not None
    assert guarded._recurring.repeated == STEPS - 2
    assert calls[0] >= STEPS
    assert inside.ns == (0 if where == "library" else STEPS)


def test_steps_without_the_guard_are_passed_by(made: dict[str, ModuleType]) -> None:
    """The guard judges only the steps of its turns, which repeat one another."""
    inside = Inside()
    run = StandIn(made, LEGAL["interleaved, quantized"], 0)
    watched = watch(inside)
    for turn in [True] * 3 + [False, True] * 3:
        watched.turn(turn)
        steps(run, 1)

    assert watched.guarded.epochs == 6
    assert watched.guarded._recurring.repeated == 4
    assert watched.guarded.violations == ()


def test_a_rank_has_a_price_for_each_action() -> None:
    """Of eleven pairs of steps of sixteen F and B, less what the clocks take."""
    said = {"on": [160.0 * n + 32.0 for n in range(1, 12)], "bare": [32.0] * 11}

    assert guard_host_time.per_action(said) == {
        "median_us": 60.0,
        "tenth_us": 20.0,
        "ninetieth_us": 100.0,
    }

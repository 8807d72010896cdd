"""
The explorer leaves out of its states only columns that no guard could notice.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from qeffect.engine.concrete_memory import Memory
from qeffect.engine.stage import OPTIONAL, STATE, transitions
from qeffect.process_layout import lay_out
from qeffect.refusals import Refused
from qeffect.relations.columns import CONFIG
from qeffect.stage_config import StageConfig
from qeffect.verification.explorer import Scope, pool_scope, standard_scopes
from qeffect.verification.explorer.cone import dependence, visible_columns
from qeffect.verification.explorer.engine import Engine
from qeffect.verification.explorer.exploration import explore
from qeffect.verification.explorer.plain import PlainExplorer, State
from qeffect.verification.explorer.scopes import configuration
from qeffect.verification.explorer.space import Space
from qeffect.verification.explorer.steps import Step
from qeffect.verification.explorer.tally import Tally
from qeffect.verification.explorer.witnesses import Schedules, occurrences
from tests.profiles import few

from .explorations import NAMES, explored, packed, real_memory, restored, space


def _normal_form(walker: PlainExplorer, memory: object) -> State:
    for name in STATE:
        column = getattr(walker.memory, name)
        column[:] = [-1 if value is None else value for value in getattr(memory, name)]
    return walker.state()


def _refusal(walker: PlainExplorer, step: Step, memory: Memory) -> str | None:
    try:
        walker.run(step, memory)
    except Refused as refused:
        return refused.clause
    return None


@pytest.mark.parametrize("name", few(NAMES, range(1, len(NAMES), 3), range(0, len(NAMES), 3)))
def test_a_state_and_its_normal_form_have_the_same_futures(name: str) -> None:
    """
    Along random schedules every move has the same result and normal form from both states;
    the explorer counts the same refusals and reaches the same states.
    """
    engine, walker = Engine(space(name)), PlainExplorer(space(name))
    memory = real_memory(space(name))
    start = memory.snapshot()
    choose = random.Random(name)
    for _ in range(2):
        restored(memory, start)
        state = walker.initial
        for _ in range(20):
            assert state == _normal_form(walker, memory)
            before = memory.snapshot()
            accepted: dict[int, State] = {}
            refused = []
            for index, clause, after in list(walker.edges(state)):
                step = walker.step(index, memory)
                assert clause == _refusal(walker, step, memory), step
                if clause is None:
                    assert after == _normal_form(walker, memory), step
                    accepted[index] = after
                else:
                    refused.append((index, clause))
                restored(memory, before)
            words = np.array([packed(engine.packing, space(name), state)], np.int64).T
            tally = Tally()
            arrived = {arrival.move: arrival.words for arrival in engine.expand(words, tally)}
            assert refused == sorted(tally.refused)
            assert {index: words[:, 0].tolist() for index, words in arrived.items()} == {
                index: list(packed(engine.packing, space(name), after))
                for index, after in accepted.items()
            }
            if not accepted:
                break  # every generation of the pool is used up
            index = choose.choice(list(accepted))
            state = accepted[index]
            walker.run(walker.step(index, memory), memory)


def test_a_drop_vacates_as_of_the_last_replay_whatever_that_did() -> None:
    """A slot dropped after a refresh is refilled only after a wait for the refresh."""
    walker = PlainExplorer(space("stage-reuse"))
    moves = walker.space.moves

    def after(state: State, label: str) -> State:
        return next(
            to
            for index, clause, to in walker.edges(state)
            if clause is None and moves[index].label == label
        )

    def refusals(state: State) -> set[str | None]:
        return {
            clause
            for index, clause, _ in walker.edges(state)
            if moves[index].label == "reserve" and moves[index].right
        }

    reserved = after(after(walker.initial, "refresh"), "reserve")
    dropped = after(reserved, "drop")

    assert {"completion.slot-not-awaited"} == refusals(dropped)
    assert {None} == refusals(after(dropped, "wait"))
    assert {None} == refusals(after(after(reserved, "wait"), "drop"))


@pytest.mark.parametrize("name", few(NAMES, range(0, len(NAMES), 3), range(1, len(NAMES), 3)))
def test_witnesses_replay_on_real_memory(name: str) -> None:
    """A schedule found among normal forms runs on the kernel's own memory, with the same end."""
    found = explored(name)
    walker = PlainExplorer(space(name))
    named = occurrences(found)
    schedules = Schedules(found, tuple(named.values()))
    memory = real_memory(space(name))
    start = memory.snapshot()
    for what, seen in named.items():
        restored(memory, start)
        *moves, index = schedules.moves(seen)[0]
        for move in moves:
            walker.run(walker.step(move, memory), memory)
        last = walker.step(index, memory)
        if seen.clause is None:
            walker.run(last, memory)
            assert what in last.move.steps
        else:
            transition, _, clause = what.partition(": ")
            assert transition in last.move.steps
            assert clause == seen.clause
            with pytest.raises(Refused, match=f"^{clause}$"):
                walker.run(last, memory)


def test_columns_left_out_decide_nothing() -> None:
    """The pool has the same graph with and without the columns that its exploration leaves out."""
    scope = pool_scope(2, 2, 2)
    left_out = STATE.keys() - Space(scope).kept
    wide, narrow = Space(scope, also=("wgrads", "spoiled", "final")), Space(scope)
    all_states = explore(wide).seen.words
    columns = Engine(wide).packing.unpack(all_states)
    projected = Engine(narrow).packing.repack(columns, all_states.shape[1])

    assert {"wgrads", "spoiled", "final"} <= left_out
    assert all_states.shape[1] > len(set(projected[0].tolist()))
    assert set(projected[0].tolist()) == set(explore(narrow).seen.words[0].tolist())


def test_a_stage_leaves_out_nothing() -> None:
    """With every relation and transition, guards can see every column."""
    functions = transitions().functions.values()

    assert STATE.keys() <= visible_columns(dependence(f) for f in functions)


def test_reads_and_writes_are_read_off_the_composed_function() -> None:
    """A transition's reads and writes are derived from its composed function."""
    found = dependence(transitions(omit=OPTIONAL).check_wgrad)

    assert {"held": frozenset({"serial"}), "serial": frozenset({"serial"})} == found.writes
    assert {
        "consumers",
        "generation",
        "cell_at",
        "epoch_at",
        "held",
        "moving",
        "incarnation",
        "half_updated",
    } == found.guards
    assert {
        "key.cell",
        "key.epoch",
        "ref.slot",
        "ref.generation",
        "ref.incarnation",
    } == found.arguments
    assert "ownership.duplicate-wgrad" in found.clauses


@pytest.mark.parametrize(
    ("scope", "stages", "options"),
    [
        (Scope("one", slots=(2,), cells=(3,)), [StageConfig(0, 3, 2)], {}),
        (
            Scope("two", slots=(1, 2), cells=(2, 1), domains=(0, 1), callers=2, reduces=True),
            [StageConfig(0, 2, 1, reduces=True), StageConfig(1, 1, 2, domain=1, reduces=True)],
            {"callers": ("a", "b")},
        ),
        (
            Scope("shared", slots=(2, 1), cells=(2, 1), shared_pool=True),
            [StageConfig(0, 2, 2, pool="p"), StageConfig(1, 1, 1, pool="p")],
            {},
        ),
        (
            Scope(
                "refreshed", slots=(2, 1), cells=(2, 1), shared_pool=True, refreshes_in_pool=True
            ),
            [
                StageConfig(0, 2, 2, pool="p", refresh_pool="p"),
                StageConfig(1, 1, 1, pool="p", refresh_pool="p"),
            ],
            {},
        ),
        (
            Scope("feeds", slots=(1, 1), cells=(2, 2), feeds=True),
            [StageConfig(0, 2, 1, feeds=1), StageConfig(1, 2, 1)],
            {},
        ),
    ],
)
def test_configuration_is_the_kernels(
    scope: Scope, stages: list[StageConfig], options: dict[str, tuple[str, ...]]
) -> None:
    """A scope's columns equal those of the stages that a user would configure for it."""
    memory = lay_out(stages, transitions(), generation_max=2, **options).memory
    expected = configuration(scope)
    opaque = {"matrices", "destination_of"}  # compared for equality only
    ranks = dict.fromkeys(("forward_rank", "dgrad_rank", "wgrad_rank"), "pool_of")
    ranks["refresh_rank"] = "refresh_pool"
    dense = {cell: number for number, cell in enumerate(memory.input_of)}
    for name in CONFIG.keys() - opaque - ranks.keys():
        column = getattr(memory, name)
        values = list(column.values() if isinstance(column, dict) else column)
        if CONFIG[name].values == "cell":
            values = [dense[cell] for cell in values]
        assert expected[name] == values, name
    order, ours = (
        sorted(
            (columns[pools][index], rank, name, index)
            for name, pools in ranks.items()
            for index, rank in enumerate(columns[name])
        )
        for columns in ({n: getattr(memory, n) for n in CONFIG}, expected)
    )
    assert [graph[2:] for graph in order] == [graph[2:] for graph in ours]


def test_standard_scopes_differ() -> None:
    """No two standard scopes have the same configuration."""
    scopes = list(standard_scopes().values())

    assert len({(str(configuration(s)), s.omit, s.only, s.tickets, s.epochs) for s in scopes}) == (
        len(scopes)
    )

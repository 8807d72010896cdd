"""
Legal schedules written by hand: the oracle and the contract accept each, and mutants refuse some.
"""

from __future__ import annotations

import pytest

from qeffect.engine.stage import transitions
from qeffect.refusals import Refused
from qeffect.stage_config import StageConfig
from qeffect.verification.concrete_run import ConcreteRun
from qeffect.verification.mutants import Site, sites_with
from qeffect.verification.mutants.byhand import by_hand, telling
from qeffect.verification.mutants.corpus import legal_schedules
from qeffect.verification.mutants.sites import mutant
from qeffect.verification.process import Process

TWO_CALLERS = Process(
    "two callers", [StageConfig(0, 1, 1, sends_output=True)], callers=("main", "side")
)

#: Operands without which one of them is refused: transition, the operand, the clause.
OPERANDS = (
    ("check_refresh", "st.refreshed[d] != stage", "version.refresh-interrupted"),
    ("commit_forward", "reports != 0", "version.fill-unasked"),
    ("check_dgrad", "needs & BACK_BIT != 0", "completion.transfer-to-graph"),
    (
        "finish_weights_read",
        "st.named[0] == st.weight_epoch[stage]",
        "completion.wrong-consumer",
    ),
)


def _site(transition: str, operand: str, clause: str) -> Site:
    found = [
        site
        for site in sites_with(clause)
        if (site.transition, site.kind, site.clause) == (transition, "operand", clause)
        and site.text.startswith(f"{operand}`")
    ]
    assert 1 == len(found)
    return found[0]


def _refusals(functions: object) -> set[tuple[str, str]]:
    """Return the refusals of the schedules as pairs of transition and clause."""
    found = set()
    for process, actions in legal_schedules():
        memory = process.lay_out().memory
        for name, arguments in actions:
            try:
                functions[name](memory, *arguments)  # type: ignore[index]
            except Refused as refused:
                found.add((name, refused.clause))
                break
    return found


@pytest.mark.parametrize(("transition", "operand", "clause"), OPERANDS)
def test_without_the_operand_a_legal_schedule_is_refused(
    transition: str, operand: str, clause: str
) -> None:
    """The contract accepts every legal schedule; without the operand its guard refuses one."""
    own = transitions().functions
    broken = mutant(_site(transition, operand, clause)).function

    assert set() == _refusals(own)
    assert {(transition, clause)} == _refusals({**own, transition: broken})


def test_what_is_told_where_nothing_is_reported_changes_nothing() -> None:
    """If a stage is not configured to report, its reports do not change the state."""
    process, actions = legal_schedules()[0]
    told = telling(Process(process.name, process.stages), actions)
    memories = []
    for schedule in (actions, told):
        run = ConcreteRun(process, relations=frozenset(transitions().relations))
        for name, arguments in schedule:
            run.take(name, transitions().functions[name], arguments)
        memories.append(run.laid.memory.snapshot())

    assert actions != told
    assert memories[0] == memories[1]


def test_what_does_not_fit_a_process_is_not_written_for_it() -> None:
    """Schedules skip calls that a process lacks: refreshes without version, others' reads."""
    names = [[call.transition for call in one.calls] for one in by_hand(TWO_CALLERS)]
    alone = Process("alone", TWO_CALLERS.stages)
    without = Process("without", TWO_CALLERS.stages, {"version"}, callers=TWO_CALLERS.callers)

    assert [2, 1, 0] == [calls.count("check_refresh") for calls in names]
    assert [0, 0, 1] == [calls.count("finish_read") for calls in names]
    assert 2 == len(list(by_hand(alone)))
    assert [0] == [sum("refresh" in c.transition for c in one.calls) for one in by_hand(without)]

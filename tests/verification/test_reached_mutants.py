"""
Two mutants that random schedules seldom reach are killed by schedules written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attrs import evolve

from qeffect.engine.stage import transitions
from qeffect.refusals import Refused
from qeffect.verification.concrete_run import ConcreteRun
from qeffect.verification.mutants.byhand import by_hand
from qeffect.verification.mutants.candidates import candidates
from qeffect.verification.mutants.probes import Probe, about, harm
from qeffect.verification.mutants.processes import MUTANT_PROCESSES
from qeffect.verification.mutants.sites import BREAKDOWN, Mutant, Site, sites
from qeffect.verification.process import Process


def probes(process: Process, site: Site) -> Iterator[Probe]:
    """The calls along each schedule that a site's mutant answers differently from the contract."""
    functions = transitions(()).functions
    mutant = Mutant((site,))
    for schedule in by_hand(evolve(process, epoch=0)):
        for life in schedule.lives():
            run = ConcreteRun(process, relations=frozenset(transitions(()).relations))
            trace = tuple(life)
            for place, (name, arguments) in enumerate(trace):
                for call, given in (trace[place], *candidates(run)):
                    if call != site.transition:
                        continue
                    memories = run.laid.memory.copy(), run.laid.memory.copy()
                    clause = None
                    try:
                        functions[call](memories[0], *given)
                    except Refused as refused:
                        clause = refused.clause
                    try:
                        mutant.function(memories[1], *given)
                    except (Refused, *BREAKDOWN):
                        continue
                    if clause is not None or memories[0].snapshot() != memories[1].snapshot():
                        followed = about(run, call, given)
                        yield Probe(process, trace[:place], call, given, clause, followed)
                run.take(name, functions[name], arguments)


@pytest.mark.parametrize(
    ("process", "transition", "kind", "deleted", "failing"),
    [
        (
            "buckets",
            "wait",
            "condition",
            "st.caller_at[link] == st.consumer[0]",
            ("history", "completion.evaluation-awaited-by-consumer"),
        ),
        (
            "chunks by messages, a spare slot",
            "finish_receive",
            "operand",
            "st.slot_of[st.input_of[c]] == NO_SLOT` in ",
            ("step", "ownership.read-before-arrival"),
        ),
    ],
)
def test_it_is_refuted_from_the_initial_state(
    process: str, transition: str, kind: str, deleted: str, failing: tuple[str, str]
) -> None:
    """A wait of another stream does not count for the consumer; without a tape (the data of one F)
    there is no message to wait for."""
    (own,) = [one for one in MUTANT_PROCESSES if one.name == process]
    (site,) = [
        one
        for one in sites()
        if (one.transition, one.kind) == (transition, kind) and one.text.startswith(deleted)
    ]
    found = next(filter(None, (harm(Mutant((site,)), probe) for probe in probes(own, site))), [])

    assert failing in found

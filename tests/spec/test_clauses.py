"""
The clauses and the code agree: every clause is raised, by the transitions that the clause names.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import qeffect
from qeffect import Contract, Destination, Refused, StageConfig, TapeKey, TapeRef
from qeffect.engine.stage import TRANSITIONS, transitions
from qeffect.explain import EXPLANATIONS
from qeffect.spec.clauses import CLAUSES, INTERFACE, PARTS, SCHEDULE, SCHEDULE_CLAUSES
from qeffect.spec.transitions import TRANSITIONS as WRITTEN

#: Clauses that the embedding API, the layout or the replayer raises around the transitions.
AROUND = {
    # Elsewhere the reference's own key is compared first, and the refusal is a stale reference or
    # a wrong key.
    "ownership.unknown-key": {
        "reserve",
        "skip",
        "bind",
        "check_forward",
        "check_wgrad",
        "group_wgrad",
    },
    "ownership.unknown-slot": {
        t
        for t, p in TRANSITIONS.items()
        # No public call takes the arguments of `ungroup_wgrad`.
        if "key" in p and ("ref" in p or "slot" in p) and t != "ungroup_wgrad"
    },
    "persistence.configuration": {"restore"},
    "epoch.uncounted": {"check_update", "checkpoint"},
    **{f"epoch.{c}": {"check_update"} for c in ("device-count", "device-order")},
    # Compositions that leave the relation out consist of it.
    "version.left-out": {"check_refresh", "commit_refresh", "abort_refresh", "invalidate"},
    "arena.left-out": {"group_wgrad", "ungroup_wgrad"},
    **{f"arena.{name}": {"configure"} for name in ("unknown-matrix", "duplicate-destination")},
    **{f"arena.{name}": {"configure"} for name in ("missing-destination",)},
    "arena.overlapping-destinations": {"configure"},
    **{f"log.{name}": {"replay"} for name in ("chain", "sequence", "result", "closing", "state")},
    **{f"log.{name}": {"replay"} for name in ("incarnation", "step")},
}


#: Clauses that a call, a log or a schedule is refused by.
ALL = (*CLAUSES.values(), *SCHEDULE_CLAUSES.values())


@cache
def raised_by_composition() -> dict[str, list[str]]:
    """Which transitions' composed functions raise which clause, from their syntax trees."""
    found: dict[str, list[str]] = {}
    for name, function in transitions().functions.items():
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Raise):
                assert isinstance(node.exc, ast.Call)
                argument = node.exc.args[0]
                assert isinstance(argument, ast.Constant)
                users = found.setdefault(str(argument.value), [])
                if name not in users:
                    users.append(name)
    return found


def clauses_in_source() -> set[str]:
    """Every clause id that stands as a string in the kernel, its explanations left aside."""
    relations = "|".join(part.name for part in PARTS)
    pattern = re.compile(rf"({relations})\.[a-z]+(-[a-z]+)*")
    found = set()
    for path in Path(qeffect.__file__).parent.rglob("*.py"):
        if path.name in ("explain.py", "refusals.py") or path.parent.name == "explanations":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if pattern.fullmatch(node.value):
                    found.add(node.value)
    return found


class TestAgreement:
    def test_every_clause_is_raised_and_every_raised_one_is_a_clause(self) -> None:
        """The kernel's source names exactly the clauses of the specification."""
        assert set(CLAUSES) == clauses_in_source()

    def test_transitions_are_those_that_can_raise_it(self) -> None:
        """A clause lists exactly the transitions whose composed function raises it, in order."""
        composed = raised_by_composition()
        written = {c.id: list(c.transitions) for c in CLAUSES.values() if c.id not in AROUND}

        assert {clause: set(users) for clause, users in composed.items()} == {
            clause: set(users) for clause, users in written.items()
        }

    def test_clauses_around_the_transitions_name_where_they_are_raised(self) -> None:
        """Clauses that no composed function raises list the calls that the API guards."""
        composed = raised_by_composition()

        assert {c for c in CLAUSES if c not in composed} == set(AROUND)
        assert {c: set(CLAUSES[c].transitions) for c in AROUND} == AROUND

    def test_the_interface_s_clauses_are_raised_around_transitions(self) -> None:
        """The interface raises clauses of transitions; no composed function raises those."""
        around = {clause for clause, where in AROUND.items() if where <= set(TRANSITIONS)}

        assert around == INTERFACE
        assert not INTERFACE & set(raised_by_composition())

    def test_the_written_transitions_are_the_stages_own(self) -> None:
        """The table of transitions has the names and arguments that the stage composes."""
        assert {t.name: t.arguments for t in WRITTEN} == dict(TRANSITIONS)

    def test_every_kernel_clause_has_an_explanation(self) -> None:
        """What a transition may refuse can be explained, and nothing else is."""
        explained = {c for c in CLAUSES if c in raised_by_composition()}

        assert explained | {"version.left-out", "arena.left-out"} == set(EXPLANATIONS)


class TestText:
    def test_numbers_count_through_their_part(self) -> None:
        """Clause numbers are the part's place and the clause's place in it."""
        expected = [
            f"{number}.{place}"
            for number, part in enumerate((*PARTS, SCHEDULE), 1)
            for place, _ in enumerate(part.clauses, 1)
        ]

        assert expected == [c.number for c in (*CLAUSES.values(), *SCHEDULE_CLAUSES.values())]

    def test_ids_begin_with_their_part(self) -> None:
        """A clause's id names the part it stands in, and no id occurs twice."""
        for part in (*PARTS, SCHEDULE):
            assert {part.name} == {clause.relation for clause in part.clauses}
        assert len(CLAUSES) == sum(len(part.clauses) for part in PARTS)
        assert len(SCHEDULE_CLAUSES) == len(SCHEDULE.clauses)

    @pytest.mark.parametrize("clause", ALL, ids=lambda c: c.id)
    def test_each_text_is_whole_sentences(self, clause: object) -> None:
        """Invariant, unchanged, cause and remedy are sentences; the title is a phrase."""
        for name in ("invariant", "unchanged", "cause", "remedy"):
            text = getattr(clause, name)
            assert text.endswith("."), (name, text)
            assert text[0].isupper() or text.startswith(("dI", "dW", "`")), (name, text)
        assert not getattr(clause, "title").endswith(".")  # noqa: B009 - typed as object

    @pytest.mark.parametrize("clause", CLAUSES.values(), ids=lambda c: c.id)
    def test_its_argument_is_one_that_a_caller_passes(self, clause: object) -> None:
        """The argument to look at belongs to one of the clause's transitions."""
        argument = getattr(clause, "argument").partition(".")[0]  # noqa: B009
        own = getattr(clause, "transitions")  # noqa: B009
        known = {name for t in own for name in TRANSITIONS.get(t, ())}
        around = {"destination", "checkpoint", "digest", "seq", "result", "events", "state"}
        around |= {"incarnation", "step"} if own == ("replay",) else set()

        assert argument in known | {""} or (argument in around and not known & {argument})

    def test_sections_are_the_papers(self) -> None:
        """A clause comes from a section of the paper, or from the design."""
        sections = {
            "II-C",
            *(f"III-{s}" for s in "ABCDEF"),
            *(f"IV-{s}" for s in "ABCDE"),
            "design",
        }

        assert {clause.section for clause in ALL} <= sections

    def test_no_text_is_anothers(self) -> None:
        """Every clause has a title and an invariant of its own."""
        assert len(ALL) == len({clause.title for clause in ALL})
        assert len(ALL) == len({clause.invariant for clause in ALL})


class TestAroundTheTransitions:
    def contract(self) -> Contract:
        return Contract([StageConfig(0, microbatches=1, slots=1, matrices=("w",))])

    @pytest.mark.parametrize("transition", sorted(AROUND["ownership.unknown-key"]))
    def test_an_unknown_key_is_refused_by_every_transition_that_takes_one(
        self, transition: str
    ) -> None:
        """A key that was never configured has its own clause, and changes nothing."""
        contract = self.contract()
        key = TapeKey(0, stage=0, microbatch=7)
        ref = TapeRef(0, 0, contract.incarnation)
        before = contract.snapshot()
        with pytest.raises(Refused) as caught:
            self.call(contract, transition, key, ref, slot=0)

        assert ("ownership.unknown-key", transition) == (
            caught.value.clause,
            caught.value.transition,
        )
        assert before == contract.snapshot()

    @pytest.mark.parametrize("transition", sorted(AROUND["ownership.unknown-slot"]))
    @pytest.mark.parametrize("slot", [-2, 1])
    def test_an_unknown_slot_is_refused_by_every_transition_that_takes_one(
        self, transition: str, slot: int
    ) -> None:
        """A slot outside the pool, also one below zero, has its own clause."""
        contract = self.contract()
        key = TapeKey(0, stage=0, microbatch=0)
        before = contract.snapshot()
        with pytest.raises(Refused) as caught:
            self.call(contract, transition, key, TapeRef(slot, 0, contract.incarnation), slot=slot)

        assert ("ownership.unknown-slot", transition) == (
            caught.value.clause,
            caught.value.transition,
        )
        assert before == contract.snapshot()

    def call(
        self, contract: Contract, transition: str, key: TapeKey, ref: TapeRef, slot: int
    ) -> None:
        """Call a transition's method of the embedding API, or the check that runs it."""
        if transition == "group_wgrad":
            first = TapeKey(0, stage=0, microbatch=0), TapeRef(0, 0, contract.incarnation)
            contract.check_wgrad(*first, group=[(key, ref)])
        method = getattr(contract, transition)
        if transition in ("reserve", "check_forward"):
            method(key, slot=slot)
        elif transition in ("bind", "skip"):
            method(key)
        else:
            method(key, ref)

    def test_another_configuration_is_refused_by_restore(self) -> None:
        """A checkpoint of other stages is not restored, and nothing changes."""
        contract = self.contract()
        other = Contract([StageConfig(0, microbatches=2, slots=1, matrices=("w",))])
        before = contract.snapshot()
        with pytest.raises(Refused) as caught:
            contract.restore(other.checkpoint())

        assert caught.value.clause == "persistence.configuration"
        assert before == contract.snapshot()

    @pytest.mark.parametrize(
        ("clause", "destinations"),
        [
            ("arena.unknown-matrix", [Destination("v")]),
            ("arena.duplicate-destination", [Destination("w"), Destination("w")]),
            ("arena.missing-destination", [Destination("w", microbatch=0)]),
            (
                "arena.overlapping-destinations",
                [
                    Destination("w", 0, device="cuda:0", address=64, nbytes=32),
                    Destination("w", 1, device="cuda:0", address=95, nbytes=32),
                ],
            ),
        ],
    )
    def test_unusable_destinations_build_no_contract(
        self, clause: str, destinations: list[Destination]
    ) -> None:
        """Destinations that lack, double or overlap are refused where a contract is configured."""
        config = StageConfig(0, 2, 1, matrices=("w",), destinations=tuple(destinations))
        with pytest.raises(Refused) as caught:
            Contract([config])

        assert (clause, "configure") == (caught.value.clause, caught.value.transition)

"""
Refusals: one exception family, explained in words, and a plain record that travels.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict

import pytest

import qeffect
from qeffect import Refusal, Refused
from qeffect.engine.stage import transitions
from qeffect.explain import EXPLANATIONS
from qeffect.spec.clauses import CLAUSES
from qeffect.verification.walks.sites import sites

from .helpers import Rig


def _some_refusal() -> Refused:
    rig = Rig()
    with pytest.raises(Refused) as caught:
        rig.check_forward(0, token=7)
    return caught.value


class TestRefused:
    def test_names_one_clause(self) -> None:
        """A refusal carries the clause, its relation and the transition that checked it."""
        refusal = _some_refusal()

        assert ("order.token", "order", "check_forward") == (
            refusal.clause,
            refusal.relation,
            refusal.transition,
        )

    def test_the_message_is_one_line_with_cause_and_remedy(self) -> None:
        """Its message is one line: clause, presented, expected, likely cause, what to do."""
        clause = CLAUSES["order.token"]

        assert str(_some_refusal()) == (
            "order.token in check_forward: presented effect token 7; expected token 0. "
            f"Likely cause: {clause.cause} What to do: {clause.remedy}"
        )

    def test_a_refusal_turns_into_a_record_of_strings(self) -> None:
        """It turns into a plain record of strings."""
        record = _some_refusal().record()

        assert isinstance(record, Refusal)
        assert record.asdict() == json.loads(json.dumps(record.asdict()))
        assert set(record.asdict()) == {
            "clause",
            "transition",
            "presented",
            "expected",
            "cause",
            "remedy",
            "section",
        }
        assert all(record.asdict().values())

    def test_a_refusal_crosses_processes_whole(self) -> None:
        """It crosses processes with everything that it says."""
        refusal = _some_refusal()

        assert refusal.record() == pickle.loads(pickle.dumps(refusal)).record()

    def test_every_refusal_is_a_refused(self) -> None:
        """Every refusal is a `Refused`; there is nothing else to catch."""
        assert Refused.__mro__[1] is Exception
        assert Refused.__subclasses__() == []
        assert qeffect.Refused is Refused

    def test_a_refusal_of_a_clause_alone_is_readable(self) -> None:
        """A guard raises it with the clause alone; it is still readable."""
        assert str(Refused("order.token")) == "order.token"

    def test_a_refusal_is_not_chained_to_inner_workings(self) -> None:
        """What the caller sees is not chained to inner workings."""
        assert _some_refusal().__suppress_context__


class TestClauses:
    def test_every_raised_clause_is_explained(self) -> None:
        """Every clause that a guard raises has an explanation, and no explanation is dead."""
        raised = {
            clause
            for clause, where in sites().items()
            if clause not in {"ownership.unknown-key", "ownership.unknown-slot"}
            and clause != "persistence.configuration"
        }

        assert raised == set(EXPLANATIONS)

    def test_every_raised_clause_is_specified(self) -> None:
        """The specification names the transitions that check each clause, and no others."""
        specified = {
            clause: set(CLAUSES[clause].transitions) for clause in sites() if clause in EXPLANATIONS
        }

        assert {
            clause: set(names) for clause, names in sites().items() if clause in EXPLANATIONS
        } == specified

    def test_guard_order_is_normative(self) -> None:
        """For dI and dW: ownership, version, order, arena, capture memory, completion."""
        normative = ("ownership", "version", "order", "arena", "capture", "completion")
        found = defaultdict(list)
        for clause, names in sites().items():
            for name in names:
                found[name].append(clause)
        for name in ("check_dgrad", "check_wgrad"):
            text = transitions().functions[name].__doc__ or ""
            places = sorted(
                (text.index(f"'{c}'"), c.partition(".")[0]) for c in found[name] if f"'{c}'" in text
            )
            relations = [relation for _, relation in places]

            assert sorted(relations, key=normative.index) == relations
            assert set(relations) <= set(normative)

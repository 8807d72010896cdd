"""
Refusals: one family of exceptions, explained in words, with a plain record that can be sent and
stored.
"""

from __future__ import annotations

import json
import pickle

import pytest

import qeffect
from qeffect import Refusal, Refused
from qeffect.engine.compose import source
from qeffect.engine.stage import transitions
from qeffect.spec.clauses import CLAUSES

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
        """Its message is one line: clause, found, expected, likely cause, what to do."""
        clause = CLAUSES["order.token"]

        assert str(_some_refusal()) == (
            "order.token in check_forward: found effect token 7; expected token 0. "
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
            "found",
            "expected",
            "cause",
            "remedy",
            "section",
        }
        assert all(record.asdict().values())

    def test_a_refusal_crosses_processes_whole(self) -> None:
        """It crosses processes with everything that it says, and with its notes."""
        refusal = _some_refusal()
        refusal.add_note("at pipeline rank 1")
        again = pickle.loads(pickle.dumps(refusal))

        assert refusal.record() == again.record()
        assert ["at pipeline rank 1"] == again.__notes__

    def test_advice_replaces_cause_and_remedy(self) -> None:
        """A refusal may have advice of its own, which its message, record and pickle keep."""
        refusal = _some_refusal()
        assert refusal.advice is None
        before = refusal.record()
        assert refusal.advise("A hook ran F.", "Remove the hook.") is refusal
        again = pickle.loads(pickle.dumps(refusal))

        assert (
            str(refusal)
            == str(again)
            == (
                "order.token in check_forward: found effect token 7; expected token 0. "
                "Likely cause: A hook ran F. What to do: Remove the hook."
            )
        )
        assert ("A hook ran F.", "Remove the hook.") == again.advice
        changed = {k for k, v in before.asdict().items() if again.record().asdict()[k] != v}
        assert {"cause", "remedy"} == changed

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
    def test_guard_order_is_normative(self) -> None:
        """For dI and dW: ownership, version, order, arena, capture memory, completion, epoch."""
        normative = ("ownership", "version", "order", "arena", "capture", "completion", "epoch")
        for name in ("check_dgrad", "check_wgrad"):
            text = source(transitions().functions[name])
            places = sorted((text.index(f'"{c}"'), c) for c in CLAUSES if f'"{c}"' in text)
            relations = [CLAUSES[clause].relation for _, clause in places]

            assert len(relations) > 10
            assert sorted(relations, key=normative.index) == relations
            # The epoch of a dW's weights is its key's, and dW moves no token.
            without = {"order", "version"} if name == "check_wgrad" else set()
            assert set(relations) == set(normative) - without

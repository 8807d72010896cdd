"""Declared orders that no assignment of slots can run are refused when a contract is made."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from qeffect import Contract, Refused, StageConfig, TapeKey
from qeffect.destinations import Destination
from qeffect.engine.concrete_memory import Memory
from qeffect.keys import Cell, reference
from qeffect.relations.constants import NEVER

Order = list[tuple[str, Cell]]

_GRAPHS = ("F", "dI", "dW")


def _contract(slots: int, order: Order, **options: Any) -> Contract:
    cells = {cell for _, cell in order}
    pool = options.pop("pool", None)
    return Contract(
        [StageConfig(0, microbatches=len(cells), slots=slots, matrices=("w",), pool=pool)],
        omit=options.pop("omit", ("version", "arena", "completion")),
        declared={0: order},
        **options,
    )


def _order(*names: str) -> Order:
    """An order from names like ``F0`` and ``dI0``."""
    return [(name[:-1], (0, int(name[-1]), 0, 0)) for name in names]


class TestMessages:
    def test_more_live_tapes_than_slots(self) -> None:
        """Two forwards before a dI want two slots; the first action that fits none is named."""
        order = _order("F0", "F1", "dI0", "dI1")
        with pytest.raises(
            ValueError, match="after 1 of its 4 actions no slot of stage 0 can take F"
        ):
            _contract(1, order)
        assert _contract(2, order).epoch == 0

    def test_a_dgrad_before_its_forward(self) -> None:
        """A dI before its own F never comes."""
        with pytest.raises(
            ValueError, match="after 0 of its 2 actions no slot of stage 0 can take dI"
        ):
            _contract(1, _order("dI0", "F0"))

    def test_a_shared_pool(self) -> None:
        """Interleaved tapes of a shared pool want an order of capture that interleaves likewise."""
        order = _order("F0", "F1", "dI0", "dI1")
        apart = [(0, slot, kind) for slot in (0, 1) for kind in _GRAPHS]
        with pytest.raises(ValueError, match="cannot run to its end"):
            _contract(2, order, pool="shared", capture_order=apart)
        assert _contract(2, order, pool="shared").epoch == 0
        assert _contract(2, order, capture_order=apart).epoch == 0

    def test_a_shared_pool_that_nobody_looks_at(self) -> None:
        """Where capture is left out, pools hold nothing up; slots still do."""
        order = _order("F0", "F1", "dI0", "dI1")
        left = ("version", "arena", "completion", "capture")
        assert _contract(2, order, omit=left).epoch == 0
        with pytest.raises(ValueError, match="cannot run to its end"):
            _contract(1, order, omit=left)

    def test_no_order_of_dw(self) -> None:
        """Where every F and dI fits and no dW can follow, that is what is said."""
        backwards = [(0, 0, kind) for kind in ("F", "dW", "dI")]
        with pytest.raises(ValueError, match="lets every dW follow in the order of capture"):
            _contract(1, _order("F0", "dI0"), capture_order=backwards)


def _can_be_run(contract: Contract, order: Order) -> bool:
    """Whether the guards let some choice of slots, and of moments for dW, end the order."""
    t, slots = contract.transitions, range(len(contract.memory.consumers))
    whole: tuple[Destination, ...] = contract.memory.destination_of[0, 0, 0, 0]

    def after(st: Memory, kind: str, cell: Cell, slot: int) -> Memory | None:
        st, key = st.copy(), TapeKey(0, *cell)
        ref = reference(slot, st.generation[slot], st.incarnation[0])
        try:
            if kind == "F":
                ticket = t.check_forward(st, key, slot, st.token[0], 0, 0)
                t.commit_forward(st, slot, ticket, (), NEVER, NEVER, NEVER)
            elif kind == "dI":
                ticket = t.check_dgrad(st, key, ref, st.token[0], 0)
                t.commit_dgrad(st, slot, ticket, ("w",), *(NEVER,) * 5)
            else:
                first = int(st.opened[0] != 0) if "arena" in t.relations else 0
                ticket = t.check_wgrad(st, key, ref, 0, whole, first)
                t.commit_wgrad(st, slot, ticket, ("w",))
        except Refused:
            return None
        return st

    def ends(st: Memory, at: int) -> bool:
        if at == len(order) and st.wgrads[0] == st.cells[0]:
            return True
        found = [after(st, "dW", cell, s) for _, cell in order[::2] + order[1::2] for s in slots]
        if any(end is not None and ends(end, at) for end in found):
            return True
        if at == len(order):
            return False
        nexts = [after(st, *order[at], s) for s in slots]
        return any(end is not None and ends(end, at + 1) for end in nexts)

    return ends(contract.memory, 0)


def _is_refused(slots: int, order: Order, options: dict[str, Any]) -> bool:
    try:
        _contract(slots, order, **options)
    except ValueError as error:
        if "cannot run to its end" not in str(error):
            raise
        return True
    return False


def test_what_is_refused_is_what_the_guards_would_never_let_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random orders, slots and orders of capture: refused exactly where no run reaches the end."""
    random, verdicts = Random(7), set()
    for _ in range(500):
        cells, slots = random.choice([2, 3]), random.choice([1, 2])
        order = [(kind, (0, m, 0, 0)) for m in range(cells) for kind in ("F", "dI")]
        random.shuffle(order)
        if random.random() < 0.8:  # most orders have each dI after its F
            order.sort(key=lambda action: action[0] == "dI" and random.random() < 0.7)
        graphs = [(0, slot, kind) for kind in _GRAPHS for slot in range(slots)]
        random.shuffle(graphs)
        if random.random() < 0.6:
            graphs.sort(key=lambda graph: _GRAPHS.index(graph[2]))
        options = {"pool": random.choice([None, "shared"]), "capture_order": graphs}
        refused = _is_refused(slots, order, options)
        with monkeypatch.context() as patched:
            patched.setattr("qeffect.process_layout.require_feasible", lambda *_: None)
            contract = _contract(slots, order, **options)
        assert refused is not _can_be_run(contract, order), (slots, order, options)
        verdicts.add(refused)
    assert verdicts == {True, False}


def test_a_long_order_is_looked_at_in_a_step_an_action() -> None:
    """Slots with a pool each need no search: a long order that ends badly is still refused."""
    names = [(kind, (0, m, 0, 0)) for m in range(2_000) for kind in ("F", "dI")]
    assert _contract(1, names).epoch == 0
    names[-3:] = [names[-2], names[-3], names[-1]]
    with pytest.raises(ValueError, match="after 3997 of its 4000 actions"):
        _contract(1, names)

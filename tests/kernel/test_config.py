"""
Configuration: an unusable configuration is refused in one clear line before a contract exists.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from qeffect import Contract, Destination, Refused, StageConfig

from .helpers import MATRICES, stage

Places = list[Destination]


def _destination(matrix: str, microbatch: int | None, address: int, **options: Any) -> Destination:
    given = {"shape": (4, 4), "dtype": "float32", "device": "cuda:0", "nbytes": 64, **options}
    return Destination(matrix, microbatch, address=address, **given)


def _accumulating() -> Places:
    return [_destination(name, None, 4096 + 64 * at) for at, name in enumerate(MATRICES)]


class TestDestinations:
    """What the arena's clauses refuse at configuration."""

    @pytest.mark.parametrize(
        ("clause", "places", "found", "expected"),
        [
            (
                "arena.missing-destination",
                [_destination("w0", None, 0)],
                "no destination for 'w1' microbatch 0",
                "exactly one",
            ),
            (
                "arena.missing-destination",
                [_destination(n, 0, 64 * at) for at, n in enumerate(MATRICES)],
                "no destination for 'w0' microbatch 1",
                "exactly one",
            ),
            (
                "arena.duplicate-destination",
                [*_accumulating(), _destination("w0", None, 8192)],
                "2 destinations for 'w0' microbatch None",
                "exactly one",
            ),
            (
                "arena.unknown-matrix",
                [*_accumulating(), _destination("bias", None, 8192)],
                "'bias'",
                "one of w0, w1",
            ),
            (
                "arena.overlapping-destinations",
                [_destination("w0", None, 4096), _destination("w1", None, 4159)],
                "'w1' microbatch None at 0x103f",
                "at or after 0x1040, the end of 'w0'",
            ),
            (
                "arena.overlapping-destinations",
                [_destination("w0", None, 4096, nbytes=4096), _destination("w1", None, 4608)],
                "'w1' microbatch None at 0x1200",
                "at or after 0x2000",
            ),
            (
                "arena.overlapping-destinations",
                [_destination("w0", None, 4096), _destination("w1", None, 4096)],
                "at 0x1000",
                "at or after 0x1040",
            ),
        ],
    )
    def test_unusable_destinations_are_refused_by_name(
        self, clause: str, places: Places, found: str, expected: str
    ) -> None:
        """Missing, duplicate, unknown and overlapping destinations are refused by name."""
        with pytest.raises(Refused) as caught:
            Contract([stage(destinations=places)])
        record = caught.value.record()

        assert (clause, "configure") == (record.clause, record.transition)
        assert found in record.found
        assert expected in record.expected
        assert record.cause
        assert record.remedy

    def test_a_stage_accumulates_or_has_buffers_of_microbatches(self) -> None:
        """A stage accumulates, or has destinations for every microbatch; not both."""
        places = [*_accumulating(), _destination("w0", 0, 8192)]

        with pytest.raises(ValueError, match=r"^stage 0 mixes accumulating and per-microbatch "):
            Contract([stage(destinations=places)])

    def test_overlap_of_two_stages(self) -> None:
        """Stages do not share bytes either."""
        with pytest.raises(Refused, match=r"arena\.overlapping-destinations"):
            Contract([stage(s, destinations=_accumulating()) for s in (0, 1)])

    def test_adjacent_and_apart(self) -> None:
        """Adjacent ranges, equal addresses of two devices and symbolic ones are fine."""
        elsewhere = [
            _destination(name, None, 4096 + 64 * at, device="cuda:1")
            for at, name in enumerate(MATRICES)
        ]
        symbolic = [Destination(name) for name in MATRICES]
        contract = Contract(
            [
                stage(0, destinations=_accumulating()),
                stage(1, destinations=elsewhere),
                stage(2, destinations=symbolic),
                stage(3),
            ]
        )

        assert len(set(contract.memory.buffer_of.values())) == 4

    @pytest.mark.parametrize("field", ["address", "nbytes"])
    @pytest.mark.parametrize("wrong", [-1, 1.5, "0"])
    def test_no_count_of_bytes(self, field: str, wrong: Any) -> None:
        """An address and a length are numbers of bytes."""
        with pytest.raises(ValueError, match=f"^{field} of the destination of 'w' must be a non-n"):
            Destination("w", **{field: wrong})


class TestStageConfig:
    @pytest.mark.parametrize("name", ["microbatches", "slots", "blocks", "invocations"])
    @pytest.mark.parametrize("wrong", [0, -1])
    def test_counts_begin_at_one(self, name: str, wrong: int) -> None:
        """Counts begin at one."""
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got {wrong}$"):
            stage(**{name: wrong})

    @pytest.mark.parametrize("name", ["stage", "microbatches", "slots", "blocks", "invocations"])
    @pytest.mark.parametrize("wrong", ["2", None, 1.0, True])
    def test_counts_and_indices_are_integers(self, name: str, wrong: Any) -> None:
        """Counts and indices are integers."""
        given = {"stage": 0, "microbatches": 1, "slots": 1, name: wrong}
        with pytest.raises(TypeError, match=f"^{name} must be an integer, got "):
            StageConfig(**given)

    def test_stages_are_counted_from_zero(self) -> None:
        """Stages are counted from zero."""
        with pytest.raises(ValueError, match=r"^stage must be at least 0, got -1$"):
            StageConfig(-1, microbatches=1, slots=1)

    @pytest.mark.parametrize(
        ("matrices", "error", "message"),
        [
            ("qkv", TypeError, "must be a sequence of names, got 'qkv'"),
            (7, TypeError, "must be a sequence of names, got 7"),
            ([1, 2], TypeError, r"must be names, got \(1, 2\)"),
            (("w", "w"), ValueError, r"must be named once each, got \('w', 'w'\)"),
        ],
    )
    def test_matrices_are_different_names(
        self, matrices: Any, error: type[Exception], message: str
    ) -> None:
        """Matrices are different names; a string is one name, not many."""
        with pytest.raises(error, match=f"^matrices {message}$"):
            stage(matrices=matrices)

    @pytest.mark.parametrize("name", ["domain", "pool"])
    def test_domains_and_pools_are_named_by_anything_hashable(self, name: str) -> None:
        """Domains and pools are named by anything that can be a key of a dictionary."""
        with pytest.raises(TypeError, match=rf"^{name} must be a hashable name, got \[\]$"):
            stage(**{name: []})

    @pytest.mark.parametrize(
        "name",
        [
            "sends_output",
            "sends_gradient",
            "receives_input",
            "receives_gradient",
            "reduces",
            "reports_fills",
            "reports_updates",
            "reports_draws",
            "recomputes_draws",
        ],
    )
    @pytest.mark.parametrize("wrong", ["false", "", 0, 1, None])
    def test_flags_are_bools(self, name: str, wrong: Any) -> None:
        """A flag is True or False; any non-empty string would be true."""
        with pytest.raises(TypeError, match=f"^{name} must be a bool, got {wrong!r}$"):
            stage(**{name: wrong})

    @pytest.mark.parametrize("wrong", [3, ["w0"], "w0"])
    def test_destinations_are_destination_objects(self, wrong: Any) -> None:
        """Destinations are Destination objects."""
        with pytest.raises(TypeError, match=r"^destinations must be Destination objects, got "):
            stage(destinations=wrong)


class TestProcess:
    @pytest.mark.parametrize("stages", [[], [stage(0), stage(0)]])
    def test_each_stage_once(self, stages: list[StageConfig]) -> None:
        """A process has stages, each configured once."""
        with pytest.raises(ValueError, match=r"^every stage must be configured exactly once, got "):
            Contract(stages)

    def test_no_stage_config(self) -> None:
        """Stages are StageConfig objects."""
        with pytest.raises(TypeError, match=r"^stages must be StageConfig objects, got 0$"):
            Contract([0])  # type: ignore[list-item]

    @pytest.mark.parametrize("callers", [(), "main", ("a", "a")])
    def test_callers_are_different_names_and_at_least_one(self, callers: Any) -> None:
        """Callers are different names, at least one."""
        with pytest.raises(ValueError, match=r"^callers must be one or more different names"):
            Contract([stage()], callers=callers)

    @pytest.mark.parametrize("wrong", [-1, 1 << 64, "8", None])
    def test_a_generation_counter_has_at_most_64_bits(self, wrong: Any) -> None:
        """A generation counter has at most 64 bits."""
        with pytest.raises(
            ValueError,
            match=r"^generation_max must be a non-negative integer of at most 18446744073709",
        ):
            Contract([stage()], generation_max=wrong)

    def test_only_optional_relations_are_left_out(self) -> None:
        """Only relations that a backend may do without are left out."""
        for wrong in (["ownership"], ["orders"], ["epoch", "tickets"]):
            with pytest.raises(ValueError, match=r"^cannot leave out .*: a stage may omit arena, "):
                Contract([stage()], omit=wrong)

    @pytest.mark.parametrize(
        ("relation", "options", "what"),
        [
            ("arena", {"stages": [stage(destinations=_accumulating())]}, "destinations"),
            ("capture", {"stages": [stage(pool="p")]}, "a shared pool"),
            ("reduction", {"stages": [stage(reduces=True)]}, "reduces=True"),
            ("order", {"declared": {0: []}}, "a declared order"),
            ("order", {"stages": [stage(reports_updates=True)]}, "reports_updates=True"),
            ("order", {"stages": [stage(tape_scales="live")]}, "tape_scales"),
            ("order", {"stages": [stage(reports_draws=True)]}, "reports_draws=True"),
            ("version", {"stages": [stage(reports_fills=True)]}, "reports_fills=True"),
        ],
    )
    def test_nothing_is_ignored(self, relation: str, options: dict[str, Any], what: str) -> None:
        """What is configured for a relation that was left out is refused, not ignored."""
        given = {"stages": [stage()], **options}
        with pytest.raises(ValueError, match=f"^{what} needs the relation '{relation}"):
            Contract(**given, omit={relation})

    @pytest.mark.parametrize(
        "order",
        [
            [(0, 0, "F")],
            [(0, 0, "F")] * 6,
            [(0, slot, kind) for kind in ("F", "dI", "dW") for slot in (0, 1)] + [(0, 0, "F")],
        ],
    )
    def test_capture_order_is_whole(self, order: Any) -> None:
        """A capture order names every graph once."""
        with pytest.raises(ValueError, match=r"^capture_order must name F, dI and dW of all 2"):
            Contract([stage(pool="p")], capture_order=order)

    @pytest.mark.parametrize(
        "graph", [(9, 0, "F"), (0, 2, "F"), (0, -1, "F"), (0, 0, "B"), (0, "0", "F"), (0, 0), 7]
    )
    def test_capture_order_names_graphs(self, graph: Any) -> None:
        """A graph is a configured stage, one of its slots and an action."""
        with pytest.raises(ValueError, match=r"^capture_order has .*; expected \(stage, loc"):
            Contract([stage(pool="p")], capture_order=[graph])

    def test_pool_of_two_domains(self) -> None:
        """A pool belongs to one graph stream, thus to one state domain."""
        with pytest.raises(
            ValueError, match=r"^pool 'p' is shared by the state domains 0 and 'b'; give"
        ):
            Contract([stage(0, pool="p"), stage(1, domain="b", pool="p")])

    @pytest.mark.parametrize(
        ("declared", "message"),
        [
            ({7: []}, r"declared names domain 7, which no stage has; expected one of \[0\]"),
            ({0: []}, r"the declared order of domain 0 names .* 0 times; expected each of its 2 "),
            (
                {0: [("F", (0, 0, 0, 0))] * 2 + [("dI", (0, 0, 0, 0))]},
                r".* names \('F', \(0, 0, 0, 0\)\) 2 times",
            ),
            (
                {0: [("F", (0, 0, 0, 0)), ("dW", (0, 0, 0, 0))]},
                r".* names \('dW', \(0, 0, 0, 0\)\) 1 times; expected each",
            ),
            (
                {0: [("F", (0, 0, 0, 0)), ("dI", (0, 0, 0, 0)), ("F", (0, 1, 0, 0))]},
                r".* names \('F', \(0, 1, 0, 0\)\) 1 times; expected each",
            ),
        ],
    )
    def test_declared_order_is_a_permutation(self, declared: Any, message: str) -> None:
        """A declared order names every F and dI of its domain once."""
        with pytest.raises(ValueError, match=f"^{message}"):
            Contract([stage(microbatches=1)], declared=declared)

    def test_any_stage_numbers(self) -> None:
        """A rank's stages need not be dense nor in order, as in ZB-V."""
        from .helpers import Rig

        rig = Rig(stage(7), stage(3, domain="b"), stage(4))

        assert [1, 2] == [rig.epoch(), rig.epoch()]


class TestWhatIsNoConfiguration:
    """One line of ours, before anything is laid out."""

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"stages": None}, r"^stages must be a collection, got None$"),
            ({"stages": StageConfig(0, 1, 1)}, r"^stages must be a collection, got StageConfig"),
            ({"omit": "version"}, r"^omit must be a collection, got 'version'$"),
            ({"omit": 5}, r"^omit must be a collection, got 5$"),
            ({"callers": None}, r"^callers must be one or more different names, got None$"),
            ({"callers": ([],)}, r"^callers must be one or more different names, got \(\[\],\)$"),
            ({"reductions": "ab"}, r"^reductions must be a collection, got 'ab'$"),
            ({"observer": 5}, r"^observer must be a function or None, got 5$"),
        ],
    )
    def test_is_said_so(self, options: dict[str, Any], told: str) -> None:
        """Of whatever class it is."""
        with pytest.raises((TypeError, ValueError), match=told):
            Contract(**{"stages": [StageConfig(0, 1, 1)], **options})

    @pytest.mark.parametrize("name", ["stage", "microbatches", "slots", "blocks", "invocations"])
    @pytest.mark.parametrize("value", [(1 << 20) + 1, 10**30, pytest.param(10**5000, id="long")])
    def test_a_number_that_no_memory_holds(self, name: str, value: int) -> None:
        """A mistyped zero ends here, not in gigabytes of lists."""
        sizes = {"stage": 0, "microbatches": 1, "slots": 1, name: value}
        with pytest.raises(ValueError, match=f"^{name} must be at most 1,048,576, got "):
            StageConfig(**sizes)

    def test_cells_that_no_memory_holds(self) -> None:
        """Three numbers, each of which is one, are multiplied."""
        with pytest.raises(ValueError, match=r"stage 0 is 2,097,152; expected at most"):
            StageConfig(0, microbatches=1 << 10, slots=1, blocks=1 << 10, invocations=2)

    @pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_contract_is_not_copied(self, take: Callable[[Contract], object]) -> None:
        """A shallow copy would share the memory, and not the look whether a call is under way."""
        with pytest.raises(TypeError, match=r"neither copied nor pickled; keep contract\.checkp"):
            take(Contract([StageConfig(0, 1, 1)]))

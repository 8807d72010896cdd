"""
Several contracts in one process: with a common registry, no contract writes another contract's
gradient destinations.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from qeffect import Contract, Destination, DestinationRegistry, Refused, StageConfig

from .helpers import Rig


def buffer(matrix: str = "w", address: int = 4096, **options: Any) -> Destination:
    """A buffer of 64 bytes."""
    return Destination(matrix, **{"device": "cuda:0", "address": address, "nbytes": 64, **options})


def writing(*destinations: Destination, **options: Any) -> list[StageConfig]:
    """One stage that writes these destinations."""
    names = tuple(d.matrix for d in destinations)
    given = {"microbatches": 1, "slots": 1, "matrices": names, "destinations": destinations}
    return [StageConfig(0, **{**given, **options})]


def overlap(stages: list[StageConfig], registry: DestinationRegistry) -> Refused:
    """The refusal of a contract whose destinations overlap."""
    with pytest.raises(Refused) as caught:
        Contract(stages, registry=registry)
    assert caught.value.clause == "arena.overlapping-destinations"
    assert caught.value.transition == "configure"
    return caught.value


class TestTheWrongProgram:
    def test_is_accepted_by_contracts_that_do_not_know_each_other(self) -> None:
        """Each sums its dW into the same bytes, and each overwrites them first: both commit."""
        rigs = [Rig(*writing(buffer())), Rig(*writing(buffer()))]
        for rig in rigs:
            assert rig.epoch() == 1

    def test_is_refused_with_one_registry(self) -> None:
        """The second contract is refused, and the first continues."""
        registry = DestinationRegistry()
        first = Rig(*writing(buffer()), registry=registry)
        found = overlap(writing(buffer("v", 4096 + 63)), registry)

        assert "'v' microbatch None at 0x103f" in str(found.found)
        assert "0x1040, the end of 'w'" in str(found.expected)
        assert "of a contract that shares the registry" in str(found.expected)
        assert (first.epoch(), len(registry)) == (1, 1)


class TestAClaim:
    def test_of_adjacent_and_foreign_bytes(self) -> None:
        """The next byte and another device's same byte are other destinations."""
        registry = DestinationRegistry()
        stages = [
            writing(buffer(**given)) for given in ({}, {"address": 4160}, {"device": "cuda:1"})
        ]
        made = [Contract(own, registry=registry) for own in stages]

        assert len(registry) == len(made) == 3

    def test_of_symbolic_destinations(self) -> None:
        """Without a place and a name a destination is the stage's own."""
        registry = DestinationRegistry()
        made = [Contract([StageConfig(0, 1, 1)], registry=registry) for _ in range(2)]

        assert len(registry) == len(made)

    def test_of_names(self) -> None:
        """A named destination without a place is compared by its name; one with a place is not."""
        registry = DestinationRegistry()
        named = [StageConfig(0, 1, 1, matrices=("w",), buffers={"w": "table"})]
        first = Contract(named, registry=registry)
        found = overlap(named, registry)
        placed = [writing(buffer(address=at), buffers={"w": "table"}) for at in (64, 128)]
        others = [Contract(own, registry=registry) for own in placed]

        assert "the destination 'table'" in str(found.found)
        assert len(registry) == len([first, *others])

    def test_of_tied_matrices_counts_once(self) -> None:
        """Two stages of one contract may share what they declare; another contract may not."""
        registry = DestinationRegistry()
        tied = {"microbatches": 1, "slots": 1, "matrices": ("w",), "tied": ("w",)}
        pair = [
            StageConfig(s, destinations=(buffer(),), buffers={"w": "table"}, **tied) for s in (0, 1)
        ]
        own = Contract(pair, registry=registry)
        overlap(writing(buffer()), registry)

        assert len(own.stages) == 2

    def test_of_a_refused_contract_is_none(self) -> None:
        """Destinations of a refused contract stay free."""
        registry = DestinationRegistry()
        first = Contract(writing(buffer()), registry=registry)
        overlap(writing(buffer(), buffer("v", 8192)), registry)
        second = Contract(writing(buffer("v", 8192)), registry=registry)

        assert len(registry) == len([first, second])


class TestTheEndOfAClaim:
    def test_is_a_release(self) -> None:
        """A contract that runs no more releases its destinations; a second release is harmless."""
        registry = DestinationRegistry()
        first = Contract(writing(buffer()), registry=registry)
        registry.release(first)
        registry.release(first)
        second = Contract(writing(buffer()), registry=registry)

        assert len(registry) == 1
        registry.release(first)
        assert len(registry) == 1
        assert second.epoch == 0

    def test_is_the_end_of_the_contract(self) -> None:
        """A contract without references holds no destinations."""
        registry = DestinationRegistry()
        first = Contract(writing(buffer()), registry=registry)
        assert first.epoch == 0
        del first
        gc.collect()

        assert len(registry) == 0
        assert Contract(writing(buffer()), registry=registry).epoch == 0

    def test_is_not_a_restore(self) -> None:
        """A restored contract writes the same destinations again."""
        registry = DestinationRegistry()
        rig = Rig(*writing(buffer()), registry=registry)
        rig.contract.restore(rig.contract.checkpoint())
        overlap(writing(buffer()), registry)

        assert len(registry) == 1


@pytest.mark.parametrize("registry", [True, DestinationRegistry, "registry"])
def test_a_registry_of_another_type_is_refused(registry: object) -> None:
    """With a line that says what was expected and found."""
    with pytest.raises(TypeError, match="registry must be a DestinationRegistry or None, got"):
        Contract([StageConfig(0, 1, 1)], registry=registry)  # type: ignore[arg-type]

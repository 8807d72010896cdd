"""
Inputs that a separate stream copies into a slot: F must wait until the graph stream has waited for
the copy.
"""

from __future__ import annotations

import pytest

from qeffect import Contract, StageConfig

from .helpers import Rig, refused, stage

CALLERS = ("main", "loader")


def loading(**options: object) -> Rig:
    """A process whose inputs a loader's stream copies into the slots."""
    return Rig(stage(**{"slots": 1, "copies_input": True, **options}), callers=CALLERS)


def race(rig: Rig) -> None:
    """Copy an input on the loader's stream, and run F after a wait for the main stream alone."""
    rig.contract.reserve(rig.key(0), link=rig.link(caller="loader"))
    rig.contract.submit("main")
    rig.contract.join(rig.link(caller="main"))
    rig.forward(0)


class TestTheWrongProgram:
    def test_is_accepted_without_the_declaration(self) -> None:
        """The contract cannot know that the reservation's stream fills the slot."""
        rig = Rig(stage(slots=1), callers=CALLERS)
        race(rig)

        assert len(rig.contract.live()) == 1

    def test_is_refused_with_it(self) -> None:
        """F would read an input that the loader's stream is still copying."""
        rig = loading()
        race_until_forward = rig.contract.reserve(rig.key(0), link=rig.link(caller="loader"))
        rig.contract.join(rig.link(caller="main"))
        with refused(
            rig,
            "completion.transfer-to-graph",
            "whose last transfer or copy was on link 1, as piece 1",
            "a join of link 1 after this piece",
        ):
            rig.check_forward(0)
        rig.contract.join(rig.link(caller="loader"))

        assert rig.forward(0) == race_until_forward


class TestTheReservation:
    def test_stands_for_the_copy(self) -> None:
        """F in a slot that its key has not reserved would read the last tenant's input."""
        rig = loading()
        with refused(
            rig, "ownership.receive-missing", "in a slot that the key has not reserved", "is copied"
        ):
            rig.check_forward(0)

    def test_of_an_earlier_tenant_does_not_serve(self) -> None:
        """The copy for a dropped tape is not the next key's input."""
        rig = loading()
        link = rig.link()
        ref = rig.contract.reserve(rig.key(0), link=link)
        rig.contract.join(link)
        rig.contract.drop(rig.key(0), ref)
        with refused(rig, "ownership.receive-missing"):
            rig.check_forward(1)

    def test_is_work_of_its_caller(self) -> None:
        """On one stream too, the graph stream waits for the copy before F."""
        rig = loading()
        rig.contract.join()
        rig.contract.reserve(rig.key(0))
        with refused(rig, "completion.caller-to-graph"):
            rig.check_forward(0)

    def test_is_device_work(self) -> None:
        """No restore forgets a copy that may still be writing the slot."""
        rig = loading()
        start = rig.contract.checkpoint()
        ref = rig.contract.reserve(rig.key(0))
        rig.contract.drop(rig.key(0), ref)
        with refused(rig, "persistence.device-work"):
            rig.contract.restore(start)
        rig.contract.drain()
        rig.contract.restore(start)

        assert rig.contract.live() == {}

    def test_does_not_hide_a_read_of_the_last_tenant(self) -> None:
        """The contract remembers one end per slot: the first is joined before the second."""
        rig = loading(sends_output=True)
        main, loader = rig.link(), rig.link(caller="loader")
        rig.contract.reserve(rig.key(0), link=loader)
        rig.contract.join(loader)
        ref = rig.forward(0)
        rig.contract.wait(main)
        rig.contract.read(rig.key(0), ref, link=main)
        rig.dgrad(ref)
        rig.wgrad(ref)
        rig.contract.finish_read(rig.key(0), ref, link=main)
        rig.contract.wait(loader)
        with refused(
            rig,
            "completion.two-ends",
            "a copy, on link 1, after an earlier end or copy on link 0",
            "a join of link 0",
        ):
            rig.contract.reserve(rig.key(1), link=loader)
        rig.contract.join(main)
        rig.contract.reserve(rig.key(1), link=loader)
        rig.contract.join(loader)
        rig.forward(1)

    def test_of_other_stages_is_no_work(self) -> None:
        """A reservation of a stage without the declaration asks for no wait, as before."""
        rig = Rig(stage(slots=1), callers=CALLERS)
        rig.contract.reserve(rig.key(0), link=rig.link(caller="loader"))

        assert rig.contract.memory.submitted == [0, 0]
        assert rig.contract.memory.undrained == [0]
        rig.forward(0)


class TestAWholeEpoch:
    def test_of_copies_commits(self) -> None:
        """Two epochs of two microbatches through one slot, each copied by the loader's stream."""
        rig = loading()
        loader = rig.link(caller="loader")
        for epoch in (1, 2):
            for microbatch in (0, 1):
                rig.contract.wait(loader)
                rig.contract.reserve(rig.key(microbatch), link=loader)
                rig.contract.join(loader)
                rig.microbatch(microbatch)
            rig.finish()

            assert rig.commit() == epoch


class TestTheDeclaration:
    def test_excludes_a_received_input(self) -> None:
        """An input comes one way."""
        with pytest.raises(ValueError, match="a stage gets its input in one way only"):
            stage(copies_input=True, receives_input=True)

    def test_needs_completion(self) -> None:
        """Without the streams' counters no wait can be asked for."""
        with pytest.raises(ValueError, match="copies_input=True needs the relation 'completion'"):
            Contract([stage(copies_input=True)], omit=("completion",))

    def test_is_written_only_where_it_is_made(self) -> None:
        """Plain data of other stages stay as older versions wrote them, and are read back."""
        for config in (stage(copies_input=True), stage()):
            own = Contract([config]).configuration
            (plain,) = own.plain()["stages"]

            assert ("copies_input" in plain) == config.copies_input
            assert type(own).read(own.plain()).stages == (config,)

    def test_is_a_bool(self) -> None:
        """A truthy value that is not a bool is refused."""
        with pytest.raises(TypeError, match="copies_input must be a bool"):
            StageConfig(0, 1, 1, copies_input=1)  # type: ignore[arg-type]

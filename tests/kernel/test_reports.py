"""
Effects that report themselves: fills, scaling updates, and scales that differ from the requested
scales.
"""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import Contract, Refused, StageConfig, TapeKey, TapeRef
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import replay_lines

MATRICES = ("w0", "w1")
NOW = dict.fromkeys(MATRICES, 0)

#: What a refresh must not report of a cache of two matrices in epoch 0, and what refuses it.
WRONG_FILLS = [
    (None, "version.fill-missing", "no matrix"),
    ({}, "version.fill-missing", "no matrix"),
    ({"w0": 0}, "version.fill-missing", "('w0',)"),
    ({**NOW, "w2": 0}, "version.fill-missing", "'w2'"),
    ([("w0", 0), ("w1", 0), ("w1", 0)], "version.fill-missing", "'w1', 'w1'"),
    (7, "version.fill-missing", "no matrix"),
    ([("w0",)], "version.fill-missing", "no matrix"),
    ({"w0": 0, "w1": 1}, "version.wrong-fill", "epoch 1"),
    (dict.fromkeys(MATRICES, 1), "version.wrong-fill", "epoch 1"),
    ({"w0": 0, "w1": -1}, "version.wrong-fill", "no known epoch"),
    ({"w0": 0, "w1": True}, "version.wrong-fill", "no known epoch"),
    ({"w0": 0, "w1": "0"}, "version.wrong-fill", "no known epoch"),
]


def reporting(**options: Any) -> Contract:
    """A stage of two microbatches whose backend reports everything."""
    told = {"reports_fills": True, "reports_updates": True, "tape_scales": "carried", **options}
    return Contract([StageConfig(0, 2, 2, matrices=MATRICES, **told)])


def key(microbatch: int) -> TapeKey:
    """A key of epoch 0."""
    return TapeKey(0, 0, microbatch)


def forward(of: Contract, microbatch: int, filled: Any = None, updates: Any = 1) -> TapeRef:
    """Run F, refreshing the cache where something is to be filled."""
    ticket = of.check_forward(key(microbatch), refresh=filled is not None)
    ref = of.commit(ticket, filled=filled, updates=updates)
    assert ref is not None
    return ref


def failed(of: Contract, commit: Any, clause: str, found: str, expected: str) -> None:
    """Expect a commit to be refused, its action to be aborted and its domain poisoned."""
    before = {name: column for name, column in of.snapshot().items() if name == "token"}
    with pytest.raises(Refused) as caught:
        commit()
    assert clause == caught.value.clause
    assert found in caught.value.found, caught.value.found
    assert expected in caught.value.expected, caught.value.expected
    assert [1] == of.memory.poisoned
    assert [0] == of.memory.busy
    assert before == {"token": of.snapshot()["token"]}
    with pytest.raises(Refused, match=r"unknown-ticket"):
        commit()


#: Reports of a fill that name no epoch of a matrix.
UNREADABLE = [
    {"w0": None},
    {"w0": -1},
    {"w0": -2},
    {"w0": 0.0, "w1": 0.0},
    {"w0": True},
    {"w0": "0"},
    ["w0"],
    [("w0",)],
    "w0",
    3,
    0,
]


class Unspelled:
    """A report of a class that has no text."""

    def __repr__(self) -> str:
        raise OSError("no text")


UNSPELLED = Unspelled()


def found_count(reported: Any, what: str, said: str) -> str:
    """What a refusal finds in a report of a count."""
    if reported is None:
        return f"no report of {what}"
    if type(reported) is int and reported in (0, 2):
        return said.format(reported)
    if reported is UNSPELLED:
        shown = "a value of class Unspelled that cannot be printed (OSError)"
    elif reported == 10**5000:
        shown = "an integer of 16,610 bits"
    else:
        shown = repr(reported)
    return f"no readable count in the report of {what}: {shown}"


class TestFills:
    @pytest.mark.parametrize(("filled", "clause", "found"), WRONG_FILLS)
    def test_a_refresh_that_did_not_fill_every_cache(
        self, filled: Any, clause: str, found: str
    ) -> None:
        """A skipped cast, a placeholder, a second cast, or other weights: the refresh failed."""
        of = reporting()
        ticket = of.check_refresh(0)

        expected = "each of" if clause.endswith("missing") else "weights of epoch 0"
        failed(of, lambda: of.commit(ticket, filled=filled), clause, found, expected)
        assert [-1] == of.memory.cache_epoch
        assert {} == of.live()

    @pytest.mark.parametrize(("filled", "clause", "found"), WRONG_FILLS)
    def test_a_forward_that_did_not_fill_every_cache(
        self, filled: Any, clause: str, found: str
    ) -> None:
        """The same of an F that refreshes; its tape is gone and its epoch spoiled."""
        of = reporting()
        ticket = of.check_forward(key(0), refresh=True)

        expected = "each of" if clause.endswith("missing") else "weights of epoch 0"
        failed(of, lambda: of.commit(ticket, filled=filled, updates=1), clause, found, expected)
        assert [-1] == of.memory.cache_epoch
        assert {} == of.live()
        assert [0] == of.memory.spoiled

    def test_a_forward_that_filled_unasked(self) -> None:
        """A later microbatch that quantizes the weights again, under live tapes, failed."""
        of = reporting()
        forward(of, 0, NOW)
        ticket = of.check_forward(key(1))

        failed(
            of,
            lambda: of.commit(ticket, filled=NOW, updates=1),
            "version.fill-unasked",
            "weights of epoch 0",
            "no fill",
        )

    @pytest.mark.parametrize("filled", UNREADABLE)
    def test_a_report_that_cannot_be_read_is_no_report_of_nothing(self, filled: Any) -> None:
        """Whatever was filled, and from whatever: an F that nobody asked for it failed."""
        of = reporting()
        forward(of, 0, NOW)
        ticket = of.check_forward(key(1))

        failed(
            of,
            lambda: of.commit(ticket, filled=filled, updates=1),
            "version.fill-unasked",
            "weights of no known epoch",
            "no fill",
        )

    @pytest.mark.parametrize("filled", UNREADABLE)
    def test_nor_is_it_one_of_a_whole_fill(self, filled: Any) -> None:
        """Where a fill was asked for, a report that cannot be read is refused as well."""
        of = reporting()
        ticket = of.check_refresh(0)

        with pytest.raises(Refused, match=r"^version\.(fill-missing|wrong-fill)"):
            of.commit(ticket, filled=filled)
        assert [-1] == of.memory.cache_epoch

    @pytest.mark.parametrize("filled", [None, {}, [], ()])
    def test_a_report_of_nothing(self, filled: Any) -> None:
        """An F that was not asked and that reports no fill is accepted."""
        of = reporting()
        forward(of, 0, NOW)

        ref = of.commit(of.check_forward(key(1)), filled=filled, updates=1)
        assert of.live()[key(1)] == ref

    @pytest.mark.parametrize("filled", [NOW, list(NOW.items()), [("w1", 0), ("w0", 0)]])
    def test_a_whole_fill_in_any_order(self, filled: Any) -> None:
        """Every cache from the current weights, in any order, as a mapping or as pairs."""
        of = reporting()
        of.commit(of.check_refresh(0), filled=filled)

        assert [0] == of.memory.cache_epoch
        assert forward(of, 0).slot == 0

    def test_where_nothing_is_reported_it_is_taken_on_trust(self) -> None:
        """A backend declares what it cannot report; such values are ignored."""
        of = Contract([StageConfig(0, 2, 2, matrices=MATRICES)])
        of.commit(of.check_refresh(0), filled={"w7": 5})

        assert [0] == of.memory.cache_epoch
        assert of.commit(of.check_forward(key(0)), filled={"w7": 5}, updates=9) is not None

    def test_a_stage_without_matrices_has_nothing_to_report(self) -> None:
        """Such a configuration is unusable."""
        with pytest.raises(ValueError, match=r"^stage 0 has reports_fills=True but no matrices"):
            StageConfig(0, 1, 1, reports_fills=True)


class TestUpdates:
    @pytest.mark.parametrize(
        "updates",
        [None, 0, 2, -1, True, 1.0, "1", UNSPELLED, pytest.param(10**5000, id="long"), 2**63],
    )
    def test_an_update_that_ran_twice_or_not_at_all(self, updates: Any) -> None:
        """F and dI update scales once each; anything else failed, and a message quotes it."""
        found = found_count(updates, "scaling updates", "{} scaling updates")
        of = reporting()
        ticket = of.check_forward(key(0), refresh=True)
        commit = lambda: of.commit(ticket, filled=NOW, updates=updates)  # noqa: E731
        failed(of, commit, "order.scaling-updates", found, "1 scaling update of domain 0")

        of = reporting()
        ref = forward(of, 0, NOW)
        of.bind(key(0))
        of.wait()
        ticket = of.check_dgrad(key(0), ref)
        commit = lambda: of.commit(ticket, MATRICES, updates=updates, scales=0)  # noqa: E731
        failed(of, commit, "order.scaling-updates", found, "1 scaling update of domain 0")


class TestScales:
    @pytest.mark.parametrize(
        "scales", [None, 0, 2, -1, True, 1.0, UNSPELLED, pytest.param(10**5000, id="long")]
    )
    def test_carried_scales_of_another_forward(self, scales: Any) -> None:
        """dI names the token at which the F ran whose scales it used; another's are refused."""
        of = reporting()
        forward(of, 0, NOW)
        ref = forward(of, 1)
        of.bind(key(1))
        of.wait()
        ticket = of.check_dgrad(key(1), ref)

        failed(
            of,
            lambda: of.commit(ticket, MATRICES, updates=1, scales=scales),
            "order.wrong-scales",
            found_count(scales, "the scales that dI used", "the scales of the F at token {}"),
            "at token 1",
        )

    def test_carried_scales_outlive_other_forwards(self) -> None:
        """With carried scales every order of dI is right."""
        of = reporting()
        refs = [forward(of, 0, NOW), forward(of, 1)]
        for microbatch in (0, 1):
            of.bind(key(microbatch))
            of.wait()
            with of.dgrad(key(microbatch), refs[microbatch]) as i:
                i.queued, i.updates, i.scales = MATRICES, 1, microbatch

        assert 4 == of.token(0)

    def test_live_scales_moved(self) -> None:
        """With live scales a dI after another F of its domain is refused, and nothing changes."""
        of = reporting(tape_scales="live")
        refs = [forward(of, 0, NOW), forward(of, 1)]
        of.bind(key(0))
        of.bind(key(1))
        of.wait()
        before = of.snapshot()
        with pytest.raises(Refused) as caught:
            of.check_dgrad(key(0), refs[0])

        assert "order.scales-moved" == caught.value.clause
        assert "the F at token 1" in caught.value.found
        assert "at token 0" in caught.value.expected
        assert before == of.snapshot()
        of.commit(of.check_dgrad(key(1), refs[1]), MATRICES, updates=1)

    def test_another_stage_of_the_domain_moves_them_too(self) -> None:
        """What rolls the scales is any F of the domain; one of another domain does not."""
        told = {"matrices": MATRICES, "tape_scales": "live"}
        for domain, refused in ((0, True), (1, False)):
            of = Contract([StageConfig(0, 1, 1, **told), StageConfig(1, 1, 1, domain=domain)])
            ref = forward(of, 0, NOW)
            of.commit(of.check_forward(TapeKey(0, 1, 0), refresh=True, link=domain))
            of.bind(key(0))
            of.wait()
            if refused:
                with pytest.raises(Refused, match=r"order\.scales-moved"):
                    of.check_dgrad(key(0), ref)
            else:
                assert 0 == of.check_dgrad(key(0), ref).slot

    def test_a_dgrad_rolls_no_forward_scales(self) -> None:
        """F, dI, F, dI is right with live scales: a dI moves the token, not what dI reads."""
        of = reporting(tape_scales="live")
        for microbatch in (0, 1):
            ref = forward(of, microbatch, None if microbatch else NOW)
            of.bind(key(microbatch))
            of.wait()
            of.commit(of.check_dgrad(key(microbatch), ref), MATRICES, updates=1)

        assert 4 == of.token(0)

    def test_scales_are_carried_or_live(self) -> None:
        """Any other word is unusable."""
        with pytest.raises(ValueError, match="tape_scales"):
            StageConfig(0, 1, 1, tape_scales="cached")


def test_evidence_is_recorded_and_replayed() -> None:
    """A log holds the reports, and replaying it asks for them again."""
    of = reporting()
    with Recorder(of) as log:
        with of.refresh(0) as r:
            r.filled = NOW
        with of.forward(key(0)) as f:
            f.updates = 1
        of.bind(key(0))
        of.wait()
        with of.dgrad(key(0), f.ref) as i:
            i.queued, i.updates, i.scales = MATRICES, 1, 0

    assert '"filled":["w0","w1"],"fill_epoch":0' in log.lines[2]
    assert '"filled":[],"fill_epoch":-1,"updates":1' in log.lines[4]
    assert '"queued":["w0","w1"],"updates":1,"scales":0' in log.lines[8]
    assert "accepted" == replay_lines(log.lines).verdict

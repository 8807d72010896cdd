"""Arguments: every call refuses, by name, anything that was not configured, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from qeffect import Contract, Refused, TapeKey, TapeRef

from .helpers import Rig, refused, stage

Call = Callable[[Contract, Any], Any]

_KEY = TapeKey(0, 0, 0)
_REF = TapeRef(0, 0, 0)

OF_STAGE: dict[str, Call] = {
    "check_refresh": lambda c, s: c.check_refresh(s),
    "invalidate": lambda c, s: c.invalidate(s),
    "finalize": lambda c, s: c.finalize(s),
}
OF_LINK: dict[str, Call] = {
    "join": lambda c, link: c.join(link),
    "wait": lambda c, link: c.wait(link),
    "check_refresh": lambda c, link: c.check_refresh(0, link),
    "finalize": lambda c, link: c.finalize(0, link),
    "read": lambda c, link: c.read(_KEY, _REF, link=link),
}
OF_KEY: dict[str, Call] = {
    "reserve": lambda c, key: c.reserve(key),
    "bind": lambda c, key: c.bind(key),
    "check_forward": lambda c, key: c.check_forward(key, refresh=True),
    "check_dgrad": lambda c, key: c.check_dgrad(key, _REF),
    "check_wgrad": lambda c, key: c.check_wgrad(key, _REF),
    "read": lambda c, key: c.read(key, _REF),
    "finish_read": lambda c, key: c.finish_read(key, _REF),
    "drop": lambda c, key: c.drop(key, _REF),
}
OF_REF: dict[str, Call] = {
    "check_dgrad": lambda c, ref: c.check_dgrad(_KEY, ref),
    "check_wgrad": lambda c, ref: c.check_wgrad(_KEY, ref),
    "read": lambda c, ref: c.read(_KEY, ref),
    "finish_read": lambda c, ref: c.finish_read(_KEY, ref),
    "drop": lambda c, ref: c.drop(_KEY, ref),
}


class TestStages:
    @pytest.mark.parametrize("call", OF_STAGE)
    @pytest.mark.parametrize("wrong", [1, -1, 99])
    def test_an_unknown_stage_is_named_with_those_that_exist(self, call: str, wrong: int) -> None:
        """A stage that this process does not have is named, with those that it has."""
        with pytest.raises(
            ValueError, match=rf"^{call}: stage {wrong} is not configured; expected one of \[0\]$"
        ):
            OF_STAGE[call](Rig().contract, wrong)

    @pytest.mark.parametrize("call", OF_STAGE)
    @pytest.mark.parametrize("wrong", ["0", None, 0.0, [0]])
    def test_anything_but_an_integer_is_said_not_to_be_one(self, call: str, wrong: Any) -> None:
        """A value that is not an int is named as such."""
        with pytest.raises(TypeError, match=f"^{call}: stage must be an int, got "):
            OF_STAGE[call](Rig().contract, wrong)


class TestLinks:
    @pytest.mark.parametrize("call", OF_LINK)
    @pytest.mark.parametrize("wrong", [1, -1, 99])
    def test_an_unknown_link_is_named(self, call: str, wrong: int) -> None:
        """A link that does not exist is named; a negative one does not count from the end."""
        with pytest.raises(
            ValueError, match=f"^{call}: link {wrong} is not configured; links are 0 to 0$"
        ):
            OF_LINK[call](Rig().contract, wrong)

    @pytest.mark.parametrize("call", OF_LINK)
    @pytest.mark.parametrize("wrong", ["0", None, [0]])
    def test_anything_but_an_integer_is_said_not_to_be_one(self, call: str, wrong: Any) -> None:
        """A value that is not an int is named as such."""
        with pytest.raises(TypeError, match=f"^{call}: link must be an int, got "):
            OF_LINK[call](Rig().contract, wrong)

    @pytest.mark.parametrize("action", ["check_forward", "check_dgrad", "check_wgrad"])
    @pytest.mark.parametrize("wrong", [1, -1, 99])
    def test_of_an_action(self, action: str, wrong: int) -> None:
        """The three actions name a wrong link too, and reserve nothing."""
        rig = Rig()
        check = _ready(rig, action)
        before = rig.contract.snapshot()

        with pytest.raises(
            ValueError, match=f"^{action}: link {wrong} is not configured; links are 0 to 0$"
        ):
            check(link=wrong)
        assert before == rig.contract.snapshot()

    @pytest.mark.parametrize("action", ["check_forward", "check_dgrad", "check_wgrad"])
    @pytest.mark.parametrize("wrong", ["0", None])
    def test_of_an_action_no_index(self, action: str, wrong: Any) -> None:
        """A value that is not a link is refused too."""
        check = _ready(Rig(), action)

        with pytest.raises(TypeError, match=f"^{action}: link must be an int, got "):
            check(link=wrong)

    def test_work_of_an_unknown_caller_is_not_forgotten_in_silence(self) -> None:
        """Work of a caller that was never named is not silently forgotten."""
        with pytest.raises(
            ValueError, match=r"^submit: no caller 'side'; expected one of \['main'\]$"
        ):
            Rig().contract.submit("side")


def _ready(rig: Rig, action: str) -> Callable[..., Any]:
    """Make everything ready for an action of microbatch 0, and return its check."""
    key = rig.key(0)
    if action == "check_forward":
        return lambda **options: rig.contract.check_forward(key, refresh=True, **options)
    ref = rig.forward(0)
    rig.contract.bind(key)
    rig.contract.wait()
    if action == "check_dgrad":
        return lambda **options: rig.contract.check_dgrad(key, ref, **options)
    rig.dgrad(ref, 0)
    return lambda **options: rig.contract.check_wgrad(key, ref, **options)


class TestKeys:
    @pytest.mark.parametrize("call", ["reserve", "bind", "check_forward", "check_wgrad"])
    @pytest.mark.parametrize(
        ("part", "expected"),
        [
            ({"microbatch": 2}, "a key of stage 0: 2 microbatches, 1 block, 1 invocation"),
            ({"block": 1}, "a key of stage 0: 2 microbatches, 1 block"),
            ({"invocation": 1}, "1 invocation"),
            ({"stage": 5}, "a key of one of the stages [0]"),
        ],
    )
    def test_a_key_outside_the_configuration_is_refused(
        self, call: str, part: dict[str, int], expected: str
    ) -> None:
        """A key outside the configuration is refused; the message says what is inside."""
        rig = Rig()
        key = evolve(_KEY, **part)

        with refused(rig, "ownership.unknown-key", str(key), expected):
            OF_KEY[call](rig.contract, key)

    def test_unknown_with_a_slot(self) -> None:
        """Naming a slot does not change what is wrong, even when that slot is busy."""
        rig = Rig()
        ref = rig.forward(0)
        for call in (rig.contract.check_forward, rig.contract.reserve):
            with refused(rig, "ownership.unknown-key", "microbatch 9 of stage 0 in epoch 0"):
                call(TapeKey(0, 0, 9), slot=ref.slot)

    def test_unknown_with_no_slot_free(self) -> None:
        """Nor does a full pool."""
        rig = Rig()
        rig.forward(0)
        rig.forward(1)
        for call in (rig.contract.check_forward, rig.contract.reserve):
            with refused(rig, "ownership.unknown-key", "microbatch 9 of stage 0 in epoch 0"):
                call(TapeKey(0, 0, 9))

    def test_unknown_stage_of_a_dgrad(self) -> None:
        """dI of a stage that is not here is refused by its key."""
        rig = Rig()
        ref = rig.forward(0)

        with refused(rig, "ownership.unknown-key", "microbatch 0 of stage 5 in epoch 0"):
            rig.contract.check_dgrad(TapeKey(0, 5, 0), ref)

    @pytest.mark.parametrize("call", ["check_dgrad", "read", "finish_read", "drop"])
    def test_unknown_with_a_live_reference(self, call: str) -> None:
        """Where a live tape is presented too, the key is not that tape's."""
        rig = Rig(stage(sends_output=True))
        ref = rig.forward(0)

        with refused(
            rig,
            "ownership.wrong-key",
            "microbatch 9 of stage 0 in epoch 0",
            "holding microbatch 0 of stage 0 in epoch 0",
        ):
            getattr(rig.contract, call)(TapeKey(0, 0, 9), ref)

    @pytest.mark.parametrize("call", OF_KEY)
    @pytest.mark.parametrize("wrong", [None, "microbatch 0 of stage 0 in epoch 0", (0, 0, 0), 3])
    def test_anything_but_a_key_is_said_not_to_be_one(self, call: str, wrong: Any) -> None:
        """A value that is not a key is named as such."""
        with pytest.raises(TypeError, match=f"^{call}: key must be a TapeKey, got "):
            OF_KEY[call](Rig().contract, wrong)


class TestReads:
    def test_the_token_of_an_unknown_stage(self) -> None:
        """A stage that is not here is named with those that are."""
        contract = Rig(stage(3)).contract
        assert contract.token(3) == 0

        with pytest.raises(
            ValueError, match=r"^token: stage 9 is not configured; expected one of \[3\]$"
        ):
            contract.token(9)
        with pytest.raises(TypeError, match=r"^token: stage must be an int, got True \(bool\)$"):
            contract.token(True)

    def test_the_first_writer_of_an_unknown_key(self) -> None:
        """A key that is not here is named with those that are."""
        contract = Rig().contract

        with pytest.raises(
            ValueError, match=r"^first_writer: microbatch 9 of stage 0 .* stage 0: 2 microbatch"
        ):
            contract.first_writer(TapeKey(0, 0, 9))

    @pytest.mark.parametrize("call", ["first_writer", "reference"])
    @pytest.mark.parametrize("wrong", [None, 1, (0, 0, 0, 0)])
    def test_of_no_key(self, call: str, wrong: Any) -> None:
        """A value that is not a key is named as such."""
        with pytest.raises(TypeError, match=f"^{call}: key must be a TapeKey, got "):
            getattr(Rig().contract, call)(wrong)


class TestSlots:
    @pytest.mark.parametrize("wrong", [2, 99, -1, -2])
    def test_unknown_of_a_forward(self, wrong: int) -> None:
        """A slot that does not exist is named; a negative one does not count from the end."""
        rig = Rig()
        for call in (rig.contract.reserve, rig.contract.check_forward):
            with refused(
                rig, "ownership.unknown-slot", f"slot {wrong} for microbatch 0", "from 0 to 1"
            ):
                call(rig.key(0), slot=wrong)

    @pytest.mark.parametrize("wrong", ["0", 0.0, [0]])
    def test_anything_but_an_integer_is_said_not_to_be_one(self, wrong: Any) -> None:
        """A value that is not an int is named as such."""
        rig = Rig()
        for name in ("reserve", "check_forward"):
            with pytest.raises(TypeError, match=f"^{name}: slot must be an int, got "):
                getattr(rig.contract, name)(rig.key(0), slot=wrong)

    @pytest.mark.parametrize("call", OF_REF)
    @pytest.mark.parametrize("wrong", [2, 99, -1, -2])
    def test_unknown_of_a_reference(self, call: str, wrong: int) -> None:
        """So is a reference into no slot."""
        rig = Rig(stage(sends_output=True))
        ref = rig.forward(0)

        with refused(
            rig,
            "ownership.unknown-slot",
            f"slot {wrong} for microbatch 0 of stage 0 in epoch 0",
            "from 0 to 1",
        ):
            OF_REF[call](rig.contract, evolve(ref, slot=wrong))

    @pytest.mark.parametrize("call", OF_REF)
    @pytest.mark.parametrize("wrong", [None, 0, (0, 0, 0), "slot 0"])
    def test_anything_but_a_reference_is_said_not_to_be_one(self, call: str, wrong: Any) -> None:
        """A value that is not a reference is named as such."""
        with pytest.raises(TypeError, match=f"^{call}: ref must be a TapeRef, got "):
            OF_REF[call](Rig().contract, wrong)


#: Every place where a caller's value goes, given the contract, a live tape and the value.
_PLACES: dict[str, Callable[[Contract, TapeKey, TapeRef, Any], Any]] = {
    "token of F": lambda c, k, r, x: c.check_forward(evolve(k, microbatch=1), token=x),
    "slot of F": lambda c, k, r, x: c.check_forward(evolve(k, microbatch=1), slot=x),
    "token of dI": lambda c, k, r, x: c.check_dgrad(k, r, token=x),
    "destination of dW": lambda c, k, r, x: c.check_wgrad(k, r, destination=x),
    "destination of a bind": lambda c, k, r, x: c.bind(k, x),
    "slot of a reservation": lambda c, k, r, x: c.reserve(evolve(k, microbatch=1), x),
    "caller": lambda c, k, r, x: c.submit(x),
    "caller of a link": lambda c, k, r, x: c.link(x),
    "domain of a link": lambda c, k, r, x: c.link("main", x),
    "epoch of a commit": lambda c, k, r, x: c.commit_epoch(x),
    "checkpoint": lambda c, k, r, x: c.restore(x),
    "ticket of a commit": lambda c, k, r, x: c.commit(x),
    "ticket of an abort": lambda c, k, r, x: c.abort(x),
}


def _everywhere() -> dict[str, Callable[[Contract, TapeKey, TapeRef, Any], Any]]:
    places = dict(_PLACES)
    for what, calls in (("stage", OF_STAGE), ("link", OF_LINK), ("key", OF_KEY), ("ref", OF_REF)):
        for name, call in calls.items():
            places[f"{what} of {name}"] = lambda c, k, r, x, call=call: call(c, x)
    return places


class _Unspelled:
    """What has no text, as an array on a lost device."""

    def __repr__(self) -> str:
        raise OSError("no text")


class _Lines:
    """What has a long text of many lines, as an array."""

    def __repr__(self) -> str:
        return "[1, 2]\n" * 99


class TestNoTraceback:
    #: Values that no argument takes, of every kind; the last ones cannot be spelled, or in no line.
    JUNK = (
        *("x", 3.5, -7, 10**30, [], {}, (), object(), float("nan"), b""),
        *(_Unspelled(), _Lines(), 10**5000, -(10**5000)),
    )

    @pytest.mark.parametrize("part", ["epoch", "stage", "microbatch"])
    @pytest.mark.parametrize("call", OF_KEY)
    def test_a_key_of_numbers_that_cannot_be_spelled_is_refused(self, call: str, part: str) -> None:
        """Python spells no integer of thousands of digits; the refusal stands, by its clause."""
        rig = Rig(stage(sends_output=True))
        ref = rig.forward(0)
        key = evolve(rig.key(0), **{part: 10**5000})
        own = (lambda c, k: getattr(c, call)(k, ref)) if call in OF_REF else OF_KEY[call]
        with pytest.raises(Refused) as caught:
            own(rig.contract, key)
        assert "Exceeds the limit" not in str(caught.value)
        assert "cannot be printed" in caught.value.found

    @pytest.mark.parametrize("place", _everywhere())
    def test_any_argument_ends_in_a_refusal_or_an_error_of_ours(self, place: str) -> None:
        """For any argument, the error is a refusal, a TypeError or a ValueError of the contract."""
        for junk in self.JUNK:
            rig = Rig(stage(sends_output=True, sends_gradient=True, reduces=True))
            ref = rig.forward(0)
            before = rig.contract.snapshot()
            with pytest.raises((Refused, TypeError, ValueError)) as caught:
                _everywhere()[place](rig.contract, rig.key(0), ref, junk)

            assert before == rig.contract.snapshot()
            text = str(caught.value)
            assert "\n" not in text
            assert isinstance(caught.value, Refused) or _is_ours(text), text

    @pytest.mark.parametrize("place", _everywhere())
    def test_none_is_a_default_or_an_error_of_ours(self, place: str) -> None:
        """None is the default where there is one, and an error of ours elsewhere."""
        rig = Rig(stage(sends_output=True, sends_gradient=True, reduces=True))
        ref = rig.forward(0)
        try:
            _everywhere()[place](rig.contract, rig.key(0), ref, None)
        except Refused as refused:
            ours = bool(refused.found)
        except (TypeError, ValueError) as error:
            ours = _is_ours(str(error))
        else:
            ours = True
        assert ours


def _is_ours(text: str) -> bool:
    """Whether a message names the call and what was given, as ours do and Python's do not."""
    ours = ("must be", "is not configured", "no link", "no caller", "expected a")
    return any(words in text for words in ours)

"""
What the reference backend reports reaches the kernel's commits through the runtime.

Users reported each of these faults in public: a cast that was skipped, a cache placeholder that
nobody filled, a scaling update that ran twice or not at all. With reports, the commit of the faulty
action is refused; without reports, the same fault silently trains to other bits.

The two stages take turns, so every second row of an amax history is empty. With an odd number of
rows, one update too many does not change the largest amax; with an even number, one update too few
does not change it. Each fault therefore gets a history length at which it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import Reports, StageBackend
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.backends.reference.linear import ScaledLinear
from qeffect.gpu_runtime.backends.reference.scaling import QuantizedTensor
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.effects import StageReports
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.refusals import Refused

from .helpers import TINY, guarded_run, optimizer_for
from .injection import NUM_STEPS, ORDER, Injection, native_final
from .stand_ins import install

TRUSTED = (
    "a refresh fills every cache from the current weights",
    "F and dI update scales once each",
    "dI uses the scales of its own F",
)


def reference(stage: StageBackend) -> ReferenceStage:
    """The stage as what it is here."""
    assert isinstance(stage, ReferenceStage)
    return stage


def reference_domain(injected: Injection) -> ReferenceDomain:
    """The domain of a run."""
    domain = injected.run.runtime.domain
    assert isinstance(domain, ReferenceDomain)
    return domain


oracle = cache(native_final)
"""The undisturbed native run by length of its histories."""


# Faults: each is in force for one action only.

Fault = Callable[[Injection, pytest.MonkeyPatch], None]


def skip_a_cast(injected: Injection, broken: pytest.MonkeyPatch) -> None:
    """A refresh leaves one product's cache as it was."""
    stage = reference(injected.run.runtime.stages[1])
    broken.setattr(stage.linears[2], "refresh", lambda: None)


def forget_a_placeholder(injected: Injection, broken: pytest.MonkeyPatch) -> None:
    """A refresh fills a cache, and F is left with an empty one in its place."""
    stage = reference(injected.run.runtime.stages[1])
    refresh = stage.refresh_cache

    def and_replace() -> None:
        refresh()
        linear = stage.linears[1]
        old = linear.cache
        linear.cache = QuantizedTensor(torch.zeros_like(old.data), torch.ones_like(old.scale_inv))

    broken.setattr(stage, "refresh_cache", and_replace)


def cast_twice(injected: Injection, broken: pytest.MonkeyPatch) -> None:
    """A refresh casts, and F casts again in an interval that is not the cache's."""
    stage = reference(injected.run.runtime.stages[2])
    forward = stage.forward

    def and_cast(*given: Any) -> Any:
        stage.linears[0].refresh()
        return forward(*given)

    broken.setattr(stage, "forward", and_cast)


def update(times: int, injected: Injection, broken: pytest.MonkeyPatch) -> None:
    """Scaling updates run a number of times instead of once."""
    roll = ReferenceDomain.roll

    def several(domain: ReferenceDomain, *, forward: bool) -> None:
        for _ in range(times):
            roll(domain, forward=forward)

    broken.setattr(ReferenceDomain, "roll", several)


@contextmanager
def live_scales(injected: Injection) -> Iterator[None]:
    """Tapes refer to the latest F's scales, while the domain says that they carry their own."""
    states = reference_domain(injected)._forward
    for state in states:
        state.live = torch.ones_like(state.scale)
    try:
        yield
    finally:
        for state in states:
            state.live = None


@attrs.frozen
class Row:
    """A fault, the action that it spoils, and what refuses it."""

    cell: str
    fault: Fault
    clause: str
    transition: str
    found: str
    history: int = 4


def filled_but(left_out: str) -> str:
    """What a refusal found where one matrix of four was not filled."""
    names = (f"layers.0.{n}.weight" for n in ("fc1", "fc2", "proj", "qkv") if n != left_out)
    return f"filled caches of {tuple(names)}"


ROWS = {
    "a skipped cast": Row(
        "1F0", skip_a_cast, "version.fill-missing", "commit_refresh", filled_but("fc1")
    ),
    "a placeholder that nobody filled": Row(
        "1F0", forget_a_placeholder, "version.fill-missing", "commit_refresh", filled_but("proj")
    ),
    "a cast that nobody asked for": Row(
        "2F1",
        cast_twice,
        "version.fill-unasked",
        "commit_forward",
        "a cache filled from the weights of epoch 1 by an F in slot 4",
    ),
    "no update in F": Row(
        "2F1", partial(update, 0), "order.scaling-updates", "commit_forward", "0 scaling updates", 5
    ),
    "two updates in F": Row(
        "2F1", partial(update, 2), "order.scaling-updates", "commit_forward", "2 scaling updates"
    ),
    "no update in dI": Row(
        "1I1", partial(update, 0), "order.scaling-updates", "commit_dgrad", "0 scaling updates", 5
    ),
    "two updates in dI": Row(
        "1I1", partial(update, 2), "order.scaling-updates", "commit_dgrad", "2 scaling updates"
    ),
}


def spoil(injected: Injection, row: Row) -> None:
    """Run the epoch up to a row's action, and that with the fault in force."""
    injected.until(row.cell)
    with pytest.MonkeyPatch.context() as broken:
        row.fault(injected, broken)
        injected.act(Order.parse(row.cell).steps[0])


class TestFaults:
    @pytest.mark.parametrize("name", ROWS)
    def test_refused_at_its_own_commit(self, name: str) -> None:
        """By its clause; the epoch cannot commit, and rebuilt it ends with native's bits."""
        row = ROWS[name]
        injected = Injection(history=row.history)
        runtime = injected.run.runtime
        with pytest.raises(Refused) as caught:
            spoil(injected, row)

        assert (row.clause, row.transition) == (caught.value.clause, caught.value.transition)
        assert row.found == caught.value.found
        assert not injected.contract.live()
        with pytest.raises(Refused):
            runtime.finish(injected.run.optimizer)
        assert 1 == runtime.epoch
        injected.start_over(oracle(row.history))

    @pytest.mark.parametrize("name", ROWS)
    def test_trains_to_other_bits_where_nothing_is_reported(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is refused, every epoch commits, and the result is not native's."""
        monkeypatch.setattr(ReferenceStage, "reports", Reports())
        injected = Injection(history=ROWS[name].history)
        spoil(injected, ROWS[name])
        with pytest.raises(AssertionError, match="differ"):
            injected.go_on(oracle(ROWS[name].history))

        assert NUM_STEPS == injected.run.runtime.epoch

    @pytest.mark.parametrize("history", sorted({row.history for row in ROWS.values()}))
    def test_without_reports_and_without_a_fault_bits_are_native(
        self, history: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So the difference above is the fault's."""
        monkeypatch.setattr(ReferenceStage, "reports", Reports())
        injected = Injection(history=history)
        injected.go_on(oracle(history))

        assert NUM_STEPS == injected.run.runtime.epoch


class TestScales:
    def test_another_tapes_scales_are_refused(self, undisturbed: Recording) -> None:
        """A dI that used the scales of the latest F, instead of its own F, is refused."""
        injected = Injection()
        with live_scales(injected), pytest.raises(Refused, match=r"^order\.wrong-scales") as caught:
            injected.run.actions()

        assert "commit_dgrad" == caught.value.transition
        injected.start_over(undisturbed)

    def test_and_would_have_been_wrong(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unreported, the same run commits other bits."""
        monkeypatch.setattr(ReferenceStage, "reports", Reports())
        injected = Injection()
        with live_scales(injected):
            injected.run.step()
        injected.run.step()
        with pytest.raises(AssertionError, match="differ"):
            injected.assert_final(undisturbed)

        assert NUM_STEPS == injected.run.runtime.epoch

    @pytest.mark.parametrize(
        ("row", "refused"), [("F0 F1 I0 W0 I1 W1", True), ("F0 I0 W0 F1 I1 W1", False)]
    )
    def test_declared_live_scales(self, row: str, refused: bool) -> None:
        """Where tapes refer to live scales, a dI after another F is refused before it runs."""
        order = Order.parse(" ".join(f"0{cell}" for cell in row.split()))
        stages = [ReferenceStage(0, ReferenceDomain(tape_scales="live"), TINY)]
        runtime = Runtime(stages, order, RuntimeConfig(readers=True))
        run = GuardedRun(runtime, Workload(), optimizer_for(stages, torch.bfloat16))
        if not refused:
            run.step()
            assert 1 == runtime.epoch
            return
        with pytest.raises(Refused, match=r"^order\.scales-moved in check_dgrad"):
            run.step()


class TestCounts:
    def test_start_again_with_an_incarnation(self) -> None:
        """Counts of the backend before a restore belong to no action."""
        injected = Injection()
        runtime = injected.run.runtime
        saved = runtime.checkpoint()
        stage = reference(runtime.stages[1])
        stage.native_forward([spec.buffer() for spec in stage.inputs], first=True)
        runtime.restore(*saved)
        injected.run.step()

        assert 2 == runtime.epoch

    def test_start_again_in_a_fresh_runtime(self) -> None:
        """A second runtime over stages that have run counts from where it began."""
        first = guarded_run(ORDER)
        first.step()
        stages = [reference(stage) for stage in first.runtime.stages.values()]
        again = Runtime(stages, ORDER, RuntimeConfig(readers=True))
        GuardedRun(again, Workload(), optimizer_for(stages, torch.bfloat16)).step()

        assert 1 == again.epoch

    @pytest.mark.parametrize("method", ["forget", "keep"])
    def test_are_forgotten_by_a_rebuild(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """An update that was counted and not committed would shift every later position."""
        injected = Injection()
        injected.until("2F1")
        runtime = injected.run.runtime
        with pytest.MonkeyPatch.context() as broken:
            update(2, injected, broken)
            with pytest.raises(Refused, match=r"order\.scaling-updates"):
                injected.act(Order.parse("2F1").steps[0])
        if method == "keep":
            monkeypatch.setattr(StageReports, "restart", lambda self: None)
        runtime.rebuild()
        if method == "keep":
            with pytest.raises(Refused, match=r"order\.wrong-scales"):
                injected.run.step()
            return
        injected.run.step()
        assert 2 == runtime.epoch

    def test_an_f_behind_the_guards_is_seen_at_the_next_dgrad(self, undisturbed: Recording) -> None:
        """It moves the scales that every later F uses, so its epoch cannot commit."""
        injected = Injection()
        runtime = injected.run.runtime
        stage = reference(runtime.stages[1])
        stage.native_forward([spec.buffer() for spec in stage.inputs], first=False)
        with pytest.raises(Refused, match=r"^order\.wrong-scales in commit_dgrad"):
            injected.run.actions()

        # What it did to the state before the epoch's first action is in no snapshot of that epoch.
        injected.start_over(undisturbed)


class TestCaptured:
    def test_what_captures_recorded_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Casts and updates are in the graphs; the position of a tape's scales is not."""
        install(monkeypatch)
        run = guarded_run(ORDER, captured=True)
        run.step()

        assert {(TRUSTED[2],)} == set(run.runtime.on_trust().values())
        assert 1 == run.runtime.epoch

    def test_a_refresh_captured_without_a_cast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A library that decided at capture not to cast replays nothing, every step."""
        install(monkeypatch)
        refresh, seen = ScaledLinear.refresh, set[str]()

        def once(linear: ScaledLinear) -> None:
            name = f"{id(linear)}"
            if name not in seen:
                seen.add(name)
                refresh(linear)

        monkeypatch.setattr(ScaledLinear, "refresh", once)
        run = guarded_run(ORDER, captured=True)
        with pytest.raises(Refused, match=r"^version\.fill-missing in commit_refresh"):
            run.actions()

    def test_an_f_captured_with_two_updates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a capture recorded twice, each replay does twice."""
        install(monkeypatch)
        roll = ReferenceDomain.roll

        def twice(domain: ReferenceDomain, *, forward: bool) -> None:
            roll(domain, forward=forward)
            roll(domain, forward=forward)

        monkeypatch.setattr(ReferenceDomain, "roll", twice)
        run = guarded_run(ORDER, captured=True)
        with pytest.raises(Refused, match=r"^order\.scaling-updates in commit_forward"):
            run.actions()

    def test_nothing_is_reported_where_the_device_decides(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backend whose captured kernels look at a flag cannot speak for their replays."""
        install(monkeypatch)
        told = ReferenceStage.reports.fget  # type: ignore[attr-defined]
        undecided = property(lambda stage: attrs.evolve(told(stage), recorded=False))
        monkeypatch.setattr(ReferenceStage, "reports", undecided)

        assert {TRUSTED} == set(guarded_run(ORDER, captured=True).runtime.on_trust().values())
        assert {()} == set(guarded_run(ORDER).runtime.on_trust().values())


class TestReports:
    def test_positions_are_counted_in_updates(self) -> None:
        """Carried scales without a count of updates have no position to report."""
        with pytest.raises(ValueError, match="needs updates"):
            Reports(tape_scales="carried")

    def test_unknown_scales(self) -> None:
        """Another word is refused where it is made."""
        with pytest.raises(ValueError, match="tape_scales"):
            Reports(updates=int, tape_scales="cached")

    @pytest.mark.parametrize("recorded", [True, False])
    def test_live_scales_are_live_in_a_graph(self, recorded: bool) -> None:
        """What dI reads is a fact of the library, captured or not."""
        told = Reports(updates=int, tape_scales="live", recorded=recorded).captured()

        assert "live" == told.tape_scales
        assert recorded == (told.updates is not None)

"""
Guarded steps that repeat a recorded step: committed in one call, and judged as call by call.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections import Counter
from pathlib import Path
from threading import Thread
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qeffect.contract import Contract
from qeffect.engine.stage import STATE
from qeffect.guards import megatron, recurring
from qeffect.guards.recurring import RecurringSteps
from qeffect.guards.works import Works
from qeffect.refusals import Refused
from qeffect.stage_config import Bucket, StageConfig
from tests.megatron.faults import FAULTS, STEPS
from tests.megatron.model import Layer
from tests.megatron.stand_in import StandIn
from tests.megatron.test_guard import LEGAL, put, steps

#: The most frames of Python for each F and each B, with their messages and their part of the
#: step's beginning and end.
FRAMES = 18


class Local:
    """An object to which a weak reference can be made."""


@pytest.mark.parametrize("fault", ["another_input", "updated_twice", "weight_written"])
def test_a_refusal_that_was_handled_keeps_nothing_alive(
    fault: str, made: dict[str, ModuleType]
) -> None:
    """No cycle of references: the tensors of the frames are freed without the cycle collector."""
    case, left = FAULTS[fault], []
    run = StandIn(made, LEGAL[case.case], case.ranks[0])

    def train() -> None:
        activations = Local()
        left.append(weakref.ref(activations))
        for _ in range(STEPS):
            run.step()

    with put(fault, run, manner="refuse"):
        gc.collect()
        gc.disable()
        try:
            said = ""
            try:
                train()
            except Refused as refusal:
                said = refusal.clause
            assert said == case.clause
            assert left[0]() is None
        finally:
            gc.enable()


def test_layers_may_be_exchanged_between_steps(made: dict[str, ModuleType]) -> None:
    """
    A layer with graphs of Transformer Engine is another mode, with its own number of updates of
    scales; the guard keeps no module that the model has dropped.
    """
    guarded = megatron.guard(manner="refuse")
    run, updates = StandIn(made, {}, 0), [1]
    forward = run.forward_step

    def counted(batches: Any, model: Any) -> Any:
        guarded._scaling_updates += updates[0]
        return forward(batches, model)

    run.forward_step = counted  # type: ignore[method-assign]
    layers = run.model[0].module.decoder.layers
    layers[0].cuda_graphs, layers[0].kept = [], Local()
    kept = weakref.ref(layers[0].kept)
    for _ in range(STEPS):
        run.step()

    layer = Layer(False)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    layer.cuda_graphs = ["graph"]  # type: ignore[assignment]
    layers[0], updates[0] = layer, 0
    run.optimizer = type(run.optimizer)([])
    for _ in range(STEPS):
        run.step()
    gc.collect()

    assert guarded.violations == ()
    assert kept() is None


def call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let later guards record no step, so that none repeats one."""
    monkeypatch.setattr(recurring, "_RECORDINGS", 0)


def state(contract: Contract | None) -> list[Any]:
    """
    Return a contract's columns and free slots, whichever slots the microbatches have used.

    A step that was repeated has used the recorded slots; the contract itself may choose others. So
    columns of slots are compared in any order, generations by their sum, and of a free slot nothing
    that its last tape has left.
    """
    assert contract is not None
    found = contract.step_state()
    names = [name for name in contract.transitions.columns if name in STATE]
    columns = {name: getattr(found.memory, name) for name in names}
    del columns["incarnation"], columns["slot_of"]
    slots, generations = len(found.memory.slot_stage), sum(columns.pop("generation"))
    idle = {slot for own in found.free.values() for slot in own}
    for name, column in columns.items():
        if isinstance(column, list) and len(column) == slots:
            column = sorted(str(each) for slot, each in enumerate(column) if slot not in idle)
        columns[name] = column.copy()
    free = {stage: len(own) for stage, own in found.free.items()}
    return [columns, generations, free, len(found.reserved)]


def but_slots(text: object) -> str:
    """Return a text without the numbers of slots, generations and incarnations."""
    one = re.sub(r"\b(slot|generation|incarnation) [0-9a-f]+", r"\1", str(text))
    return re.sub(r"\bslots \[[^]]*\]", lambda found: f"{found[0].count(',') + 1} slots", one)


def looking(run: StandIn, guarded: Any) -> list[list[int]]:
    """Let a step look at the contract in its later forwards; return the list of what it sees."""
    forward, looked = run.forward_step, list[list[int]]()

    def step(batches: Any, model: Any) -> Any:
        if run.number == STEPS - 2 and model.module.decoder.layers[0].current_microbatch:
            contract = guarded.contract
            looked.append([len(contract.outstanding()), len(contract.live())])
        return forward(batches, model)

    run.forward_step = step  # type: ignore[method-assign]
    return looked


class TestMegatron:
    """Runs of the stand-in for Megatron-core."""

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("name", LEGAL)
    def test_later_steps_repeat_the_second(
        self, name: str, rank: int, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bits and the contract's state are those of a guard that makes each call."""
        found = []
        for repeats in (True, False):
            if not repeats:
                call_by_call(monkeypatch)
            run = StandIn(made, LEGAL[name], rank)
            guarded = megatron.guard(manner="refuse")
            bits = steps(run)
            assert guarded._recurring is not None
            assert (STEPS - 2) * repeats == guarded._recurring.repeated
            found.append([bits, state(guarded.contract)])
            guarded.remove()

        assert found[0] == found[1]

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_fault_has_the_refusal_that_it_has_call_by_call(
        self, name: str, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The faulty step repeats a recorded one until the fault."""
        fault, found = FAULTS[name], []
        for repeats in (True, False):
            if not repeats:
                call_by_call(monkeypatch)
            run = StandIn(made, LEGAL[fault.case], fault.ranks[0])
            with put(name, run, manner="report") as guarded:
                steps(run)
            found.append([but_slots(each) for each in guarded.violations])

        assert found[0]
        assert found[0] == found[1]

    def test_a_repeated_step_enters_few_frames(self, made: dict[str, ModuleType]) -> None:
        """A frame of Python costs about a microsecond on a host that launches kernels."""
        run = StandIn(made, LEGAL["interleaved, quantized"], 0)
        guarded = megatron.guard(manner="refuse")
        steps(run)
        run.zero()
        begun: Counter[str] = Counter()

        def entered(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            # Later releases of Python enter no frame for a comprehension.
            if event == "call" and not code.co_name.endswith("comp>"):
                begun[Path(code.co_filename).parent.name] += 1

        sys.setprofile(entered)
        try:
            run.loop()
            run.update()
        finally:
            sys.setprofile(None)

        assert guarded._recurring is not None
        assert STEPS - 1 == guarded._recurring.repeated
        own = sum(begun[name] for name in ("guards", "qeffect", "calls", "ledgers", "steps"))
        assert 16 * FRAMES >= own, begun

    def test_a_log_has_every_call(self, made: dict[str, ModuleType], tmp_path: Path) -> None:
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(log=tmp_path)
        steps(run)

        assert guarded._recurring is not None
        assert 0 == guarded._recurring.repeated

    def test_the_contract_that_a_user_sees_is_at_the_present(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the midst of a repeated step too."""
        seen: list[list[Any]] = []
        for repeats in (True, False):
            if not repeats:
                call_by_call(monkeypatch)
            run = StandIn(made, {}, 0)
            guarded = megatron.guard(manner="refuse")
            looked = looking(run, guarded)
            steps(run)
            seen.append([*looked, guarded.epochs])
            guarded.remove()

        assert seen[0] == seen[1]
        assert [1, 2] == seen[0][0]
        assert 4 == len(seen[0])

    def test_another_thread_reads_the_contract_as_it_is(self, made: dict[str, ModuleType]) -> None:
        """It makes no call of the step, which the training thread is about to compare."""
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        forward, epochs = run.forward_step, list[int]()

        def step(batches: Any, model: Any) -> Any:
            reader = Thread(target=lambda: epochs.append(guarded.contract.epoch))  # type: ignore[union-attr]
            reader.start()
            reader.join()
            return forward(batches, model)

        run.forward_step = step  # type: ignore[method-assign]
        steps(run)

        assert guarded._recurring is not None
        assert STEPS - 2 == guarded._recurring.repeated
        assert [number for number in range(STEPS) for _ in range(4)] == epochs

    def test_an_observer_that_is_put_on_in_mid_step_hears_every_call(
        self, made: dict[str, ModuleType]
    ) -> None:
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        steps(run)
        contract, heard = guarded.contract, list[str]()
        assert contract is not None
        update = run.update

        def observed() -> None:
            contract.observer = lambda transition, *_: heard.append(transition)
            update()

        run.update = observed  # type: ignore[method-assign]
        run.step()

        assert STEPS + 1 == guarded.epochs
        assert "commit_forward" in heard
        assert "commit_update" == heard[-1]

    @pytest.mark.parametrize("repeats", [True, False])
    def test_a_contract_that_a_user_has_spoiled_refuses_the_update(
        self, repeats: bool, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At the latest where a repeated step commits."""
        if not repeats:
            call_by_call(monkeypatch)
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        steps(run)
        contract, update = guarded.contract, run.update
        assert contract is not None

        def spoiled() -> None:
            contract.fail(0, contract.epoch)
            update()

        run.update = spoiled  # type: ignore[method-assign]
        with pytest.raises(Refused, match=r"epoch\.") as refused:
            run.step()

        assert refused.value.clause in ("epoch.not-final", "epoch.spoiled")

    def test_a_checkpoint_is_refused_in_a_repeated_step(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        steps(run)
        run.save("between")
        forward = run.forward_step

        def step(batches: Any, model: Any) -> Any:
            run.save("within")
            return forward(batches, model)

        run.forward_step = step  # type: ignore[method-assign]
        with pytest.raises(Refused, match=r"persistence\.") as refused:
            run.step()
        guarded.remove()

        assert "dist_checkpointing.save" in refused.value.__notes__[0]


def contracts() -> list[RecurringSteps]:
    """Two contracts of one rank: two stages of two microbatches, the first reduced over ranks."""
    configs = [
        StageConfig(
            stage,
            microbatches=2,
            slots=2,
            sends_output=stage == 0,
            receives_gradient=stage == 0,
            reduces=stage == 0,
            buckets=[Bucket("grads")] * (stage == 0),
        )
        for stage in (0, 1)
    ]
    omit = ("version", "arena", "capture", "completion")
    return [RecurringSteps(Contract(configs, omit=omit)) for _ in range(2)]


def calls() -> list[tuple[str, tuple[Any, ...]]]:
    """The calls of a legal step."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for stage in (0, 1):
        for microbatch in (0, 1):
            for kind in ("F", "I", "W"):
                event = (kind, stage, microbatch)
                if (kind, stage) == ("I", 0):
                    send, receive = ("SEND_F", 0, microbatch), ("RECV_B", 0, microbatch)
                    found += [("post_message", (send,)), ("post_message", (receive,))]
                    found += [("finish_sends", ((send,),)), ("finish_receive", (receive,))]
                found += [("check", (event,)), ("commit", (event,))]
        found.append(("finalize", (stage,)))
    return [
        *found,
        ("start_reduction", ("grads",)),
        ("finish_reduction", ("grads",)),
        ("check_update", ()),
        ("commit_update", ()),
    ]


def run(steps: RecurringSteps, made: list[tuple[str, tuple[Any, ...]]]) -> list[str]:
    """Make the calls of a step; return what each refusal says, and go on after it."""
    works, found = Works(steps), []
    for place, (name, arguments) in enumerate(made):
        try:
            getattr(works, name)(*arguments)
            if name == "commit_update":
                works.end()
        except (Refused, KeyError) as error:  # a commit without its check
            found.append(but_slots(f"{place} {name}: {error}"))
        except AssertionError:  # the commit of an update without its check
            found.append(f"{place} {name}")
    return found


class TestAnyCalls:
    """Steps of arbitrary calls, some of which differ from the recorded ones."""

    @given(st.data())
    def test_a_step_is_judged_as_call_by_call(self, data: st.DataObject) -> None:
        """Whatever a step makes of the recorded calls, refusals and the state are the same."""
        repeating, plain = contracts()
        plain._recordings = recurring._RECORDINGS
        for _ in range(3):
            assert [] == run(repeating, calls()) == run(plain, calls())
        assert (1, 0) == (repeating.repeated, plain.repeated)
        for _ in range(data.draw(st.integers(1, 3), "steps")):
            row = calls()
            for _ in range(data.draw(st.integers(0, 2), "edits")):
                place = data.draw(st.integers(0, len(row) - 1), "place")
                other = data.draw(st.integers(0, len(row) - 1), "other")
                edit = data.draw(st.sampled_from(["leave out", "double", "exchange"]), "edit")
                if edit == "leave out":
                    del row[place]
                elif edit == "double":
                    row.insert(other, row[place])
                else:
                    row[place], row[other] = row[other], row[place]
            assert run(plain, row) == run(repeating, row)
            assert state(plain.contract) == state(repeating.contract)

    def test_a_step_that_is_left_is_there(self) -> None:
        """What a step did before it was left is made before the next step begins."""
        repeating, plain = contracts()
        plain._recordings = recurring._RECORDINGS
        for _ in range(3):
            run(repeating, calls()), run(plain, calls())
        half = calls()[:7]
        assert [] == run(repeating, half) == run(plain, half)
        found = run(repeating, calls())

        assert found == run(plain, calls())
        assert found[0].startswith("0 check: ownership.key-live")

    def test_a_step_that_differs_at_once_leaves_the_checkpoint_free(self) -> None:
        """A step that repeats nothing is not one that may be writing the weights."""
        repeating, _ = contracts()
        for _ in range(3):
            run(repeating, calls())
        assert [] == run(repeating, [("finish_receive", (("RECV_B", 0, 0),))])  # not posted

        repeating.contract.check_checkpoint()

    def test_a_step_with_a_refused_call_is_not_recorded(self) -> None:
        """A call may be refused after the first of its transitions, which then has happened."""
        repeating, _ = contracts()
        twice = calls()
        twice.insert(1, twice[0])
        run(repeating, calls())
        assert 1 == len(run(repeating, twice))
        for repeated in (0, 1, 2):
            assert [] == run(repeating, calls())
            assert repeated == repeating.repeated

    def test_a_call_behind_the_end_names_the_epoch_that_has_ended(self) -> None:
        repeating, plain = contracts()
        plain._recordings = recurring._RECORDINGS
        late = [*calls(), ("check", (("I", 1, 0),))]
        for _ in range(2):
            run(repeating, calls()), run(plain, calls())
        found = run(repeating, late)

        assert found == run(plain, late)
        assert "in epoch 2" in found[0]

    def test_another_step_is_recorded_after_three_that_differ(self) -> None:
        """A run whose steps change, for good, repeats the new ones."""
        repeating, _ = contracts()
        for _ in range(4):
            run(repeating, calls())
        assert 2 == repeating.repeated
        other = calls()
        other[1:1] = [("finish_receive", (("RECV_B", 0, 0),))]  # not posted: it changes nothing
        for _ in range(recurring._DIFFERENT + 1):
            assert [] == run(repeating, other)
        assert 2 == repeating.repeated
        assert [] == run(repeating, other)

        assert 3 == repeating.repeated

    def test_steps_that_never_repeat_are_recorded_three_times(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repeating, _ = contracts()
        recorded: list[int] = []
        record = Contract.record_step
        monkeypatch.setattr(
            Contract, "record_step", lambda self: (recorded.append(1), record(self))[1]
        )
        for extra in range(60):
            row = calls()
            row[1:1] = [("finish_receive", (("RECV_B", 0, 0),))] * (extra % 7)
            assert [] == run(repeating, row)

        assert recurring._RECORDINGS == len(recorded)

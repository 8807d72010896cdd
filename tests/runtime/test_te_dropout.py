"""
Dropout in the library's layers, with a stand-in for the library: where F draws random numbers, and
what F reports.

`tests/gpu/test_dropout.py` tests the random numbers of the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.epoch_scales import SCALES, Scales
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.backends.random_streams import POSITION
from qeffect.gpu_runtime.backends.te import device_numbers
from qeffect.gpu_runtime.backends.te import domain as te
from qeffect.gpu_runtime.backends.te.device_numbers import DeviceNumbers
from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.runtime import Mode, Runtime, RuntimeConfig
from qeffect.gpu_runtime.runtime.assembly import Assembly
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, preserving
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.refusals import Refused

from . import fake_te
from .helpers import assert_same, run_and_repeat
from .stand_ins import install as install_graphs
from .test_te import CPU, FUSED, ORDER, install

DROPOUT = 0.25
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the stand-in where the library would be, with a generator like the device's."""
    install(monkeypatch)
    monkeypatch.setattr(fake_te, "generator", fake_te.DeviceGenerator())
    monkeypatch.setattr(device_numbers, "generator_of", lambda _: fake_te.generator)
    monkeypatch.setattr(TransformerEngineDomain, "_device_obstacles", lambda _: ())
    yield
    te.library.cache_clear()


def stages_of(scales: Scales = "action", dropout: float = DROPOUT) -> list[TransformerEngineStage]:
    """Fresh stages that drop elements, in a fresh domain."""
    te.reset_process()
    domain = TransformerEngineDomain("delayed", 4, CPU, scales)
    return [
        TransformerEngineStage(
            n, domain, FUSED, seed=n, fuse_wgrad_accumulation=True, dropout=dropout
        )
        for n in ORDER.stages
    ]


def native(scales: Scales, steps: int, dropout: float = DROPOUT) -> Recording:
    """The library's full backward."""
    stages = stages_of(scales, dropout)
    with preserving(stages[0].domain):
        for stage in stages:
            stage.warm()
    rule = rule_for(ORDER, "accumulate", BF16)
    recording = Recording("native")
    NativeRun(stages, ORDER, Workload(), rule, BF16, Optimizer(stages), recording).run(steps)
    return recording


def guarded(scales: Scales = "action", mode: Mode = "eager") -> GuardedRun:
    """A recorded guarded run."""
    stages = stages_of(scales)
    config = RuntimeConfig(rule="accumulate", dtype=BF16, readers=True, mode=mode)
    runtime = Runtime(stages, ORDER, config)
    return GuardedRun(runtime, Workload(), Optimizer(stages), Recording("guarded"))


def recorded(run: GuardedRun) -> Recording:
    """What a run recorded."""
    assert run.recording is not None
    return run.recording


def random_of(run: GuardedRun) -> DeviceNumbers:
    """The random numbers of a run."""
    domain = run.runtime.domain
    assert isinstance(domain, TransformerEngineDomain)
    return domain.random


@pytest.mark.parametrize("scales", SCALES)
def test_dropout_has_the_bits_of_native(scales: Scales) -> None:
    """And other bits than training without dropout."""
    run = guarded(scales)
    run.run(3)

    assert_same(native(scales, 3), recorded(run))
    assert compare(native(scales, 3, dropout=0.0), recorded(run)).mismatched > 0


def test_replays_draw_at_the_domains_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay of F draws new numbers and says where; same bits as native."""
    install_graphs(monkeypatch)
    run = guarded(mode="replays")
    run.run(3)

    assert_same(native("action", 3), recorded(run))
    assert all(config.reports_draws for config in run.runtime.contract.stages)
    assert run.runtime.contract.memory.drawn[0] > 0


def test_the_process_keeps_its_own_generator() -> None:
    """Other code of the process draws where it would have drawn."""
    run = guarded()
    before = fake_te.generator.initial_seed(), fake_te.generator.get_offset()
    run.run(1)

    assert before == (fake_te.generator.initial_seed(), fake_te.generator.get_offset())
    assert int(random_of(run).position) > 0


def test_a_capture_moves_neither_generator_nor_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replays of the captured graph draw, not the capture."""
    numbers = DeviceNumbers(CPU, stream=5)
    before = fake_te.generator.initial_seed(), fake_te.generator.get_offset()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with numbers.drawing() as begun:
        within = fake_te.generator.initial_seed(), fake_te.generator.get_offset()
        fake_te.generator.drop(torch.ones(4), DROPOUT)

    assert (begun, int(numbers.position)) == (0, 0)
    assert within == before


@pytest.mark.parametrize("mode", ["eager", "replays"])
def test_numbers_that_stay_are_refused(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs that bake in where their capture drew: the second F drops the same elements."""
    install_graphs(monkeypatch)
    run = guarded(mode=mode)
    drop = fake_te.DeviceGenerator.drop

    def baked(self: fake_te.DeviceGenerator, x: Tensor, probability: float) -> Tensor:
        at = self.get_offset()
        dropped = drop(self, x, probability)
        self.set_offset(at)
        return dropped

    monkeypatch.setattr(fake_te.DeviceGenerator, "drop", baked)
    with pytest.raises(Refused, match=r"^order\.draws-again in commit_forward") as caught:
        run.run(1)

    assert caught.value.found == "random numbers drawn from position 0"


def test_an_evaluation_drops_nothing() -> None:
    """Two evaluations of one input are equal, and leave the position where it was."""
    run = guarded()
    run.run(1)
    stage = next(iter(run.runtime.stages.values()))
    spec = stage.inputs[0].buffer()  # a norm maps a constant to zero, which has nothing to drop
    x = torch.linspace(-1, 1, spec.numel()).view(spec.shape).to(spec.dtype)
    before = int(random_of(run).position)
    first, again = (run.runtime.actions.evaluate(stage.index, [x])[0] for _ in range(2))

    assert torch.equal(first, again)
    assert before == int(random_of(run).position)
    assert isinstance(stage, TransformerEngineStage)
    assert all(layer.hidden_dropout == DROPOUT for layer in stage.layers)


def test_a_repeated_epoch_drops_the_same_elements() -> None:
    """The position is numerical state, so a rebuild puts it back."""
    run = guarded()
    assert run.runtime.domain.extra_state()["generator.position"] is random_of(run).position
    run_and_repeat(run)

    assert_same(native("action", 2), recorded(run))


def test_without_dropout_there_is_no_position() -> None:
    """Checkpoints of earlier versions have none."""
    (stage, *_) = stages_of(dropout=0.0)

    assert "generator.position" not in stage.domain.extra_state()
    assert stage.reports.draws is False


class TestByName:
    """Epoch scales: the numbers follow from the layer, the microbatch and the epoch."""

    def test_the_microbatch_must_be_known(self) -> None:
        (stage, *_) = stages_of("epoch")
        with preserving(stage.domain):
            stage.warm()
        inputs = [spec.buffer() for spec in stage.inputs]
        with pytest.raises(BackendError, match="the microbatch of this F is unknown"):
            stage.forward(stage.new_tape(0), inputs)

    def test_each_layer_of_each_microbatch_draws_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Native runs the same code, so its bits say nothing of the names."""
        drawn: list[tuple[int, ...]] = []
        named = device_numbers.named_seed

        def noted(stream: int, name: Sequence[int]) -> int:
            drawn.append((stream, *name))
            return named(stream, name)

        monkeypatch.setattr(device_numbers, "named_seed", noted)
        run = guarded("epoch")
        random_of(run).stream = 7
        run.run(2)

        microbatches = {step.microbatch for step in ORDER.steps}
        layers = ORDER.stages  # a layer a stage
        assert sorted(drawn) == sorted(itertools.product([7], range(2), microbatches, layers))

    def test_they_are_taken_on_trust(self) -> None:
        (stage, *_) = stages_of("epoch")

        assert stage.reports.draws is None
        assert "generator.position" not in stage.domain.extra_state()

    def test_no_graph_can_draw_them(self) -> None:
        (stage, *_) = stages_of("epoch")
        (why,) = stage.domain.capture_obstacles()

        assert why.startswith("dropout under scales='epoch' draws by layer")


class TestStreams:
    @pytest.mark.parametrize("scales", SCALES)
    def test_another_stream_drops_other_elements(self, scales: Scales) -> None:
        """At the same position, or under the same name."""
        outputs = []
        for stream in (0, 0, 1):
            (stage, *_) = stages_of(scales)
            stage.domain.random.stream = stream
            with preserving(stage.domain):
                stage.warm()
            stage.domain.begin_forward(0, 0)
            spec = stage.inputs[0].buffer().detach()
            spec.copy_(torch.linspace(-1, 1, spec.numel()).view(spec.shape))
            outputs.append(stage.forward(stage.new_tape(0), [spec])[0])
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[0], outputs[2])

    def test_with_epoch_scales_ranks_share_a_stream(self) -> None:
        """The layer's number tells draws apart, so another mapping draws the same."""
        job = Job(schedule="zbv", pp=2, dropout=DROPOUT, scales="epoch")
        made: list[Any] = [job.stages(i, CPU, "transformer-engine")[0] for i in ((0, 3), (1, 2))]
        assert made[0].domain.random.stream == made[1].domain.random.stream

    def test_shared_amaxes_leave_positions_alone(self) -> None:
        """Each replica draws numbers of its own."""
        stages = stages_of()
        with preserving(stages[0].domain):
            for stage in stages:
                stage.warm()
        live = live_state(stages[0].domain)
        assert f"domain.{POSITION}" in live
        own = Assembly._shared_scaling(SimpleNamespace(domain=stages[0].domain))  # type: ignore
        assert len(own.live) == len(live) - 1

    def test_replicas_and_ranks_drop_other_elements(self) -> None:
        """Each process of a job draws from a stream of its own."""
        job = Job(schedule="zbv", pp=2, dropout=DROPOUT)
        found = set()
        for indices, replica in (((0, 3), 0), ((1, 2), 0), ((0, 3), 1)):
            stage: Any = job.stages(indices, CPU, "transformer-engine", replica=replica)[0]
            assert stage.dropout == DROPOUT
            found.add(stage.domain.random.stream)
        assert len(found) == 3

    @pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan"), True, "0.1"])
    def test_a_probability_is_below_one(self, dropout: Any) -> None:
        said = rf"^dropout: expected a number of at least 0 and below 1, found {dropout!r}$"
        with pytest.raises(ValueError, match=said):
            stages_of(dropout=dropout)

"""
`megatron.guard()` over a stand-in for Megatron-core, without the package.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qeffect.guards import megatron
from qeffect.guards.releases import UntestedReleaseError
from qeffect.log.joint import replay_together
from qeffect.log.replayer import replay
from qeffect.refusals import Refused
from tests.megatron import stand_in_parts
from tests.megatron.faults import CASES, FAULTS, FAULTY_STEP, STEPS, Undo, around
from tests.megatron.model import QuantizedLinear
from tests.megatron.stand_in import StandIn

#: Legal runs, by name: the set-ups of the faults, and others.
LEGAL = {
    **CASES,
    "fused, overlapped": {"stages": 1, "overlap": True, "fused": True},
    "three microbatches": {"microbatches": 3},
    "interleaved, quantized": {"chunks": 2, "quantized": True},
    "four ranks, interleaved": {"stages": 4, "chunks": 2, "microbatches": 8},
}


@contextmanager
def put(name: str, run: StandIn, **options: Any) -> Iterator[Any]:
    """Put a fault and, with a manner, a guard."""
    fault, undo, guarded = FAULTS[name], Undo(), None
    try:
        if not fault.above:
            fault.put(run, undo)
        if options:
            guarded = megatron.guard(**options)
        if fault.above:
            fault.put(run, undo)
        yield guarded
    finally:
        if fault.above:
            undo()
        if guarded is not None:
            guarded.remove()
        undo()


def steps(run: StandIn, number: int = STEPS) -> list[list[str]]:
    """Run steps; return the bits of losses and weights after each."""
    torch.manual_seed(9)
    return [run.step() for _ in range(number)]


class TestLegal:
    """Runs without a fault."""

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("name", LEGAL)
    def test_a_guard_changes_no_bit(
        self, name: str, rank: int, made: dict[str, ModuleType], tmp_path: Path
    ) -> None:
        plain = steps(StandIn(made, LEGAL[name], rank))
        run = StandIn(made, LEGAL[name], rank)
        guarded = megatron.guard(manner="refuse", log=tmp_path)
        found = steps(run)
        guarded.remove()

        assert plain == found
        assert STEPS == guarded.epochs == len(set(map(str, found)))
        assert guarded.contract is not None
        assert not guarded.contract.live()
        assert "accepted" == replay(next(tmp_path.iterdir())).verdict

    def test_logs_of_both_ranks_replay_together(
        self, made: dict[str, ModuleType], tmp_path: Path
    ) -> None:
        for rank in (0, 1):
            run = StandIn(made, CASES["interleaved"], rank)
            guarded = megatron.guard(manner="refuse", log=tmp_path)
            steps(run)
            guarded.remove()
        report = replay_together(sorted(tmp_path.iterdir()))

        assert ("accepted", STEPS) == (report.verdict, report.epochs)
        assert STEPS * 4 * 3 * 2 == report.messages

    def test_every_name_is_put_back(self, made: dict[str, ModuleType]) -> None:
        owners = [*made.values(), *vars(stand_in_parts).values()]
        before = [dict(vars(each)) for each in owners if hasattr(each, "__dict__")]
        guarded = megatron.guard()
        during = [dict(vars(each)) for each in owners if hasattr(each, "__dict__")]
        guarded.remove()
        after = [dict(vars(each)) for each in owners if hasattr(each, "__dict__")]

        assert before != during
        assert before == after

    def test_a_name_that_was_replaced_since_stays(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        below = run.schedules.forward_step

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return below(*args, **kwargs)

        run.schedules.forward_step = wrapped
        try:
            guarded.remove()

            assert wrapped is run.schedules.forward_step
            assert steps(run) == steps(StandIn(made, {}, 0))
        finally:
            run.schedules.forward_step = below.__wrapped__

    def test_evaluation_is_not_guarded(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 1)
        guarded = megatron.guard(manner="refuse")
        for _ in range(2):
            run.step()
            with torch.no_grad():
                run.loop(forward_only=True)

        assert 2 == guarded.epochs

    def test_another_number_of_microbatches(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        run.step()
        run.microbatches = 6
        run.step()

        assert 2 == guarded.epochs

    def test_a_rerun_of_a_step(self, made: dict[str, ModuleType]) -> None:
        """Megatron-LM's rerun state machine runs a loop again, without an update."""
        run = StandIn(made, CASES["replicas"], 0)
        guarded = megatron.guard(manner="refuse")
        for _ in range(2):
            run.zero()
            run.loop()
            run.step()

        assert "updates by optimizers that the guard does not see" in guarded.on_trust()

    def test_a_step_that_is_replayed_as_one_graph(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        run.replay_loops()
        steps(run, 4)

        assert 1 == guarded.epochs
        assert any("replayed as one graph" in each for each in guarded.on_trust())

    def test_an_optimizer_of_torch(self, made: dict[str, ModuleType]) -> None:
        """Its update is seen by torch's hooks; that of another model's optimizer is not."""
        run = StandIn(made, {}, 0)
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        parameters = [p for chunk in run.model for p in chunk.parameters()]
        run.optimizer = torch.optim.SGD(parameters, lr=0.1)
        guarded = megatron.guard(manner="refuse")
        run.step()
        other.step()

        assert 1 == guarded.epochs

    def test_two_optimizers(self, made: dict[str, ModuleType]) -> None:
        """One for each chunk: the first one's update commits the step."""
        run = StandIn(made, CASES["interleaved"], 0)
        run.update = lambda: [  # type: ignore[method-assign, assignment]
            each.step() for each in run.optimizer.chained_optimizers
        ]
        guarded = megatron.guard(manner="refuse")
        steps(run)

        assert STEPS == guarded.epochs

    def test_a_checkpoint_between_steps(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 0)
        megatron.guard(manner="refuse")
        run.save("first")
        run.step()
        run.save("second")

        assert run.saves.save.__wrapped__ is not None

    @pytest.mark.parametrize("how", ["scheduled", "copied", "at once"])
    def test_asynchronous_checkpoints_are_told_apart(
        self, how: str, made: dict[str, ModuleType]
    ) -> None:
        """Each request closes itself: scheduled, as a copy of the tuple, or executed at once."""
        run = StandIn(made, {}, 1)
        guarded = megatron.guard(manner="refuse")
        steps(run, 1)
        first, second = run.ask("first"), run.ask("second")
        run.schedule(second)
        with pytest.raises(Refused, match="an update while 1 asynchronous saves"):
            run.update()
        if how == "at once":
            first.execute_sync()
        else:
            run.schedule(first if how == "scheduled" else first._replace(folder="other"))
        steps(run, 1)

        assert 2 == guarded.epochs

    def test_an_asynchronous_checkpoint_between_steps(self, made: dict[str, ModuleType]) -> None:
        """It may end later: the weights are copied where it is scheduled."""
        run = StandIn(made, {}, 0)
        guarded = megatron.guard(manner="refuse")
        for _ in range(2):
            run.step()
            run.schedule(run.ask("folder"))

        assert 2 == guarded.epochs

    def test_ring_exchanges_are_not_exchanged(self, made: dict[str, ModuleType]) -> None:
        """Each direction has a tensor of its own there, whatever `batch_p2p_comm` says."""
        run = StandIn(made, CASES["interleaved"], 0)
        run.config.overlap_p2p_comm, run.config.batch_p2p_comm = False, True
        run.config.use_ring_exchange_p2p = True
        guarded = megatron.guard(manner="refuse")
        steps(run)

        assert STEPS == guarded.epochs

    def test_a_step_of_sixty_is_as_legal_as_the_first(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, CASES["interleaved"], 1)
        guarded = megatron.guard(manner="refuse")
        for _ in range(60):
            run.step()

        assert 60 == guarded.epochs


class TestFaults:
    """Every fault passes without the guard, and has its name with it."""

    @pytest.mark.parametrize("name", FAULTS)
    def test_is_reported_where_it_happens(self, name: str, made: dict[str, ModuleType]) -> None:
        fault = FAULTS[name]
        rank = fault.ranks[0]
        right = steps(StandIn(made, CASES[fault.case], rank))
        run = StandIn(made, CASES[fault.case], rank)
        with put(name, run):
            plain = steps(run)
        run = StandIn(made, CASES[fault.case], rank)
        with put(name, run, manner="report") as guarded:
            found = steps(run)

        assert plain == found
        if fault.stand_in:
            assert fault.harmless is (right == plain)
        first = guarded.violations[0]
        assert (fault.clause, fault.step) == (first.clause, first.step)
        assert first.action.startswith(fault.at)

    @pytest.mark.parametrize("name", FAULTS)
    def test_is_refused_where_it_happens(self, name: str, made: dict[str, ModuleType]) -> None:
        fault = FAULTS[name]
        run = StandIn(made, CASES[fault.case], fault.ranks[0])
        with put(name, run, manner="refuse") as guarded, pytest.raises(Refused) as refused:
            steps(run)

        assert fault.clause == refused.value.clause
        assert refused.value.__notes__[0].startswith(
            f"at pipeline rank {guarded._rank}: {fault.at}"
        )
        assert fault.step == run.number

    def test_after_a_violation_the_next_step_is_judged(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 1)
        with put("weight_written", run, manner="report") as guarded:
            steps(run, FAULTY_STEP + 1)
            assert FAULTY_STEP == guarded.epochs
            steps(run, 2)

            assert FAULTY_STEP + 2 == guarded.epochs
            assert 1 == len(guarded.violations)

    def test_a_callable_gets_the_violation(
        self, made: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
    ) -> None:
        got: list[Any] = []
        run = StandIn(made, {}, 1)
        with put("left_out", run, on_violation=got.append):
            steps(run)

        assert ["ownership.read-before-dgrad"] == [each.clause for each in got]
        assert (
            f"ownership.read-before-dgrad on pipeline rank 1, step {FAULTY_STEP}, at exchange"
            in caplog.text
        )

    def test_what_the_callable_does_is_not_judged(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, {}, 1)
        with put("left_out", run, on_violation=lambda _: run.save("now")) as guarded:
            steps(run)

            assert ["ownership.read-before-dgrad"] == [v.clause for v in guarded.violations]


class TestOverlappedReduction:
    """Reductions that start within a backward."""

    def test_a_refusal_names_the_backward_around_it(self, made: dict[str, ModuleType]) -> None:
        """All backwards but the last one, which starts the reductions, add no gradient."""

        def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
            for parameter in run.model[0].parameters():
                parameter.grad_added_to_main_grad = call < 3
            return function(*args, **kwargs)

        run, undo = StandIn(made, CASES["overlapped"], 0), Undo()
        around(run, undo, run.schedules, "backward_step", inner)
        guarded = megatron.guard(manner="report")
        steps(run, FAULTY_STEP + 1)
        guarded.remove()
        undo()

        assert [("epoch.device-count", "B of stage 0, microbatch 3")] == [
            (violation.clause, violation.action) for violation in guarded.violations
        ]
        assert "B of stage 0, microbatch 0 wrote no main_grad" == guarded.violations[0].found

    def test_a_backward_that_raised_is_over(self, made: dict[str, ModuleType]) -> None:
        """A reduction that starts later is not within it."""
        run = StandIn(made, CASES["overlapped"], 0)
        guarded = megatron.guard(manner="refuse")
        run.step()
        hook = next(run.model[0].parameters()).register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step()
        hook.remove()
        with pytest.raises(Refused) as refused:
            run.model[0].start_grad_sync()
        guarded.remove()

        assert "during the backward" not in str(refused.value)


class TestCaches:
    """Quantized weights under `cuda_graph_impl="local"`, with graphs that only read the flag."""

    def replayed(self, run: StandIn, made: dict[str, ModuleType], *, clears: bool) -> None:
        """Run each layer as a graph of its own for each microbatch, as with several ranks."""
        graphs: Any = made["cuda_graphs"]
        graphs._set_skip_fp8_weight_update_tensor = lambda skip: None
        memos: dict[int, Any] = {}
        forward = run.forward_step

        def step(batches: Any, model: Any) -> Any:
            microbatch = model.module.decoder.layers[0].current_microbatch
            if run.number == 0:  # not captured yet
                return forward(batches, model)
            first = microbatch == 0

            def replay(_: bool) -> None:
                if clears or memos.get(microbatch) != first:
                    graphs._set_skip_fp8_weight_update_tensor(not first)
                    memos[microbatch] = first

            runner = SimpleNamespace(fp8_enabled=True, replay=replay)
            graphs._CudagraphReplayNode.forward(None, runner, first)
            return forward(batches, model)

        run.forward_step = step  # type: ignore[method-assign]

    def test_a_flag_that_nobody_clears(self, made: dict[str, ModuleType]) -> None:
        """The memo is kept for each graph, so that the third step quantizes no weight."""
        run = StandIn(made, CASES["quantized"], 0)
        self.replayed(run, made, clears=False)
        megatron.guard(manner="refuse")
        with pytest.raises(Refused, match=r"version\.stale-cache") as refused:
            steps(run, 4)

        assert 2 == run.number
        assert "1 of 1 replayed graphs with the flag that skips" in str(refused.value.found)

    def test_weights_that_are_quantized_parameters(self, made: dict[str, ModuleType]) -> None:
        """They are quantized by the update and need no cache, so that the flag says nothing."""
        run = StandIn(made, CASES["quantized"], 0)
        for module in run.model[0].modules():
            if isinstance(module, QuantizedLinear):
                module.weight.__class__ = type("Float8Tensor", (nn.Parameter,), {})
        self.replayed(run, made, clears=False)
        guarded = megatron.guard(manner="refuse")
        steps(run, 4)

        assert 4 == guarded.epochs

    def test_a_flag_that_is_cleared(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, CASES["quantized"], 0)
        self.replayed(run, made, clears=True)
        guarded = megatron.guard(manner="refuse")
        steps(run, 4)

        assert 4 == guarded.epochs


class TestScaling:
    """The updates of Transformer Engine's scaling state; a step has four forwards."""

    @staticmethod
    def found(made: dict[str, ModuleType], extra: set[int], microbatches: int = 4) -> list[Any]:
        """The violations of a few steps, in which some forwards update once too often."""

        class FP8GlobalStateManager:
            calls = 0

            @classmethod
            def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
                cls.calls += 1

        vars(made["cuda_graphs"])["FP8GlobalStateManager"] = FP8GlobalStateManager
        run = StandIn(made, {}, 1)
        run.microbatches = microbatches
        forward, calls = run.forward_step, [0]

        def step(batches: Any, model: Any) -> Any:
            for _ in range(1 + (calls[0] in extra)):
                FP8GlobalStateManager.reduce_and_update_fp8_tensors()
            calls[0] += 1
            return forward(batches, model)

        run.forward_step = step  # type: ignore[method-assign]
        guarded = megatron.guard()
        steps(run)
        guarded.remove()
        assert calls[0] + len(extra) == FP8GlobalStateManager.calls
        assert calls[0] == STEPS * run.microbatches
        return list(guarded.violations)

    @pytest.mark.parametrize(
        ("extra", "step", "microbatch"),
        [
            (set(), None, None),
            ({5}, 1, 1),
            ({4}, 1, 0),  # the first F of a step
            ({4, 5, 6, 7}, 1, 0),  # every F of a step
            ({0}, 0, 0),  # the first F of all
            ({1}, 0, 1),
            ({3}, 0, 3),
        ],
    )
    def test_one_too_many_is_named(
        self, extra: set[int], step: Any, microbatch: Any, made: dict[str, ModuleType]
    ) -> None:
        """The forward that updates too often is named, also the first one and every one."""
        found = self.found(made, extra)

        assert ["order.scaling-updates"] * bool(extra) == [v.clause for v in found]
        for each in found:
            where = f"in F of stage 1, microbatch {microbatch}"
            assert (step, f"2 updates of the FP8 scaling state {where}") == (each.step, each.found)
            assert each.expected.startswith("1, as in ")

    def test_two_microbatches(self, made: dict[str, ModuleType]) -> None:
        """In a first step of two forwards both are named: neither decides."""
        (found,) = self.found(made, {0}, microbatches=2)

        assert ("order.scaling-updates", 0) == (found.clause, found.step)
        assert "1 updates of the FP8 scaling state in F of stage 1, microbatch 1" == found.found
        assert "2, as in microbatch 0" == found.expected

    def test_graphs_have_a_number_of_their_own(self, made: dict[str, ModuleType]) -> None:
        """From the step on in which the layers have graphs, another number is the norm."""

        class Graphed(StandIn):
            def update(self) -> None:
                super().update()
                for chunk in self.model:
                    chunk.module.cuda_graphs = [object()]

        vars(made["cuda_graphs"])["FP8GlobalStateManager"] = type(
            "FP8GlobalStateManager",
            (),
            {"reduce_and_update_fp8_tensors": classmethod(lambda cls, forward=True: None)},
        )
        run = Graphed(made, {}, 1)
        forward = run.forward_step

        def step(batches: Any, model: Any) -> Any:
            manager: Any = vars(made["cuda_graphs"])["FP8GlobalStateManager"]
            for _ in range(1 + (run.number > 0)):
                manager.reduce_and_update_fp8_tensors()
            return forward(batches, model)

        run.forward_step = step  # type: ignore[method-assign]
        guarded = megatron.guard()
        steps(run)
        guarded.remove()

        assert () == guarded.violations
        assert STEPS == guarded.epochs


class TestPutOn:
    """What `guard` accepts."""

    def test_an_unknown_manner(self, made: dict[str, ModuleType]) -> None:
        with pytest.raises(ValueError, match="manner must be 'refuse' or 'report', got 'raise'"):
            megatron.guard(manner="raise")  # type: ignore[arg-type]

    def test_twice(self, made: dict[str, ModuleType]) -> None:
        megatron.guard()
        with pytest.raises(ValueError, match="guarded already"):
            megatron.guard()

    def test_an_untested_release(
        self, made: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
    ) -> None:
        vars(made["core"])["__version__"] = "0.25.0"
        with pytest.raises(UntestedReleaseError, match=r"megatron-core 0\.16 to 0\.19; 0\.25\.0"):
            megatron.guard(manner="refuse")
        megatron.guard(manner="refuse", untested=True).remove()
        megatron.guard().remove()

        assert 2 == caplog.text.count("this guard was tested with")

    @pytest.mark.parametrize(
        ("option", "named"),
        [
            ("overlap_moe_expert_parallel_comm", "combined_1f1b"),
            ("hybrid_context_parallel", "hybrid_context_parallel_forward_backward"),
            ("delay_wgrad_compute", "backward_dw"),
        ],
    )
    def test_a_loop_that_it_does_not_see(
        self,
        option: str,
        named: str,
        made: dict[str, ModuleType],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        run = StandIn(made, {}, 0)
        setattr(run.config, option, True)
        guarded = megatron.guard(manner="refuse")
        with pytest.raises(megatron.UnguardedScheduleError, match=named):
            run.step()
        guarded.remove()
        guarded = megatron.guard()
        steps(run, 2)

        assert 1 == caplog.text.count(named)
        assert () == guarded.violations

    def test_a_communicator_of_its_own(self, made: dict[str, ModuleType]) -> None:
        class Own(stand_in_parts.P2PCommunicator):
            def _communicate(self, **given: Any) -> Any:
                return super()._communicate(**given)

        run = StandIn(made, {}, 0)
        megatron.guard(manner="refuse")
        with pytest.raises(megatron.UnguardedScheduleError, match="exchanges of Own"):
            getattr(run.schedules, run.kind)(
                forward_step_func=run.forward_step,
                data_iterator=run.data[0],
                model=run.model[0],
                num_microbatches=4,
                p2p_communicator=Own(run.config.group, run.config),
            )

    def test_a_loop_that_was_taken_before(
        self, made: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
    ) -> None:
        run = StandIn(made, {}, 0)
        loop = getattr(run.schedules, run.kind)
        megatron.guard()
        for _ in range(2):
            run.zero()
            loop(
                forward_step_func=run.forward_step,
                data_iterator=run.data[0],
                model=run.model[0],
                num_microbatches=4,
            )
            run.update()

        assert 1 == caplog.text.count("call guard() before get_forward_backward_func()")


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "qeffect.guards")

"""
`guard(schedule)`: an action that a registered function runs is committed only if it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect.guards.pipelining import guard
from qeffect.refusals import Refused
from tests.ranks import guard_bodies as bodies
from tests.ranks.guard_bodies import Run, Stage

ZBV, IZB, IL = "ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble", "ScheduleInterleaved1F1B"
#: torch's names of the kinds that a function can be registered for.
KINDS = {
    "F": "FORWARD",
    "B": "FULL_BACKWARD",
    "I": "BACKWARD_INPUT",
    "W": "BACKWARD_WEIGHT",
    "REDUCE_GRAD": "REDUCE_GRAD",
}
#: Every kind, under a schedule that has it.
CASES = [(IL, "F"), (IL, "B"), (IL, "REDUCE_GRAD"), (ZBV, "F"), (ZBV, "I"), (ZBV, "W"), (IZB, "W")]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One rank, which is the whole pipeline."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Functions:
    """
    Functions that run the actions of a rank in torch's place, past the guard's methods.

    Args:
        run: The pipeline.
        fake: The kind of action that is left out, of the last stage.
        microbatch: Which microbatch of it is left out.
    """

    def __init__(self, run: Run, fake: str = "", microbatch: int = 2) -> None:
        self.run, self.left_out = run, (fake, run.own[-1], microbatch)
        self.seen: list[str] = []

    def register(self, *kinds: str) -> None:
        """Register the functions of some kinds of action."""
        types = bodies.torch_schedules._ComputationType
        for kind in kinds:
            self.run.schedule.register_custom_function(types[KINDS[kind]], self.runs)

    def runs(self, action: Any, context: Any) -> None:
        """Run an action, or leave what it would leave."""
        self.seen.append(str(action))
        kind, m = action.computation_type.value, action.microbatch_index
        stage = next(s for s in self.run.stages if s.stage_index == action.stage_index)
        if (kind, stage.stage_index) == self.left_out[:2] and m in (None, self.left_out[2]):
            self._leave(kind, stage, m, context)
        elif kind == "F":
            given = context.arg_mbs[m] if stage.is_first else ()
            self._forwarded(stage, m, Stage.forward_one_chunk(stage, m, given, {}), context)
        elif kind == "W":
            Stage.backward_weight_one_chunk(stage, m)
        elif kind == "REDUCE_GRAD":
            Stage.perform_reduce_grad(stage, self.run.microbatches)
        else:
            loss = self.run.schedule._maybe_get_loss(stage, m)
            Stage.backward_one_chunk(stage, m, loss=loss, full_backward=kind == "B")
            self._backwarded(stage, m)

    def _leave(self, kind: str, stage: Any, m: int, context: Any) -> None:
        if kind == "F":
            self._forwarded(stage, m, bodies._forward_faked(stage, m), context)
        elif kind in ("B", "I"):
            bodies._backward_faked(stage, m)
            self._backwarded(stage, m)

    def _forwarded(self, stage: Any, m: int, output: Any, context: Any) -> None:
        self.run.schedule._maybe_compute_loss(stage, output, context.target_mbs, m)
        for after in self.run.stages:
            if after.stage_index == stage.stage_index + 1:
                after.set_local_fwd_input(output, m)

    def _backwarded(self, stage: Any, m: int) -> None:
        for before in self.run.stages:
            if before.stage_index == stage.stage_index - 1:
                before.set_local_bwd_input(stage.get_local_bwd_output(m), m)


def own_run(name: str) -> Run:
    return Run(name, ranks=1)


class TestLegal:
    """Functions that do the work change no bit and are accepted."""

    @pytest.mark.parametrize("name", [IL, IZB, ZBV])
    @pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), tuple(KINDS)])
    def test_functions_that_compute(self, name: str, kinds: tuple[str, ...]) -> None:
        """Each kind alone and all together: the bits of torch's own actions."""
        plain, run = own_run(name), own_run(name)
        guarded = guard(run.schedule)
        functions = Functions(run)
        functions.register(*kinds)

        assert [plain.step(n) for n in range(3)] == [run.step(n) for n in range(3)]
        assert 3 == guarded.contract.epoch
        assert functions.seen or kinds in [("B",), ("I",), ("W",)]  # not in every table

    def test_functions_that_keep_their_own_graphs(self) -> None:
        """A function calls the module and keeps what it returns; another one passes back."""
        run = own_run(IL)
        guarded = guard(run.schedule)
        kept: dict[Any, Any] = {}

        class Own(Functions):
            def runs(self, action: Any, context: Any) -> None:
                m, kind = action.microbatch_index, action.computation_type.value
                stage = next(s for s in run.stages if s.stage_index == action.stage_index)
                if kind == "F":
                    given = context.arg_mbs[m][0] if stage.is_first else kept["x", m]
                    given = given.detach().requires_grad_()
                    output = stage.submod(given)
                    kept["x", m] = output
                    kept[stage.stage_index, m] = given, output
                    if stage.is_last:
                        loss = run.schedule._compute_loss(output, context.target_mbs[m])
                        run.schedule._internal_losses.append(loss)
                        stage.output_chunks.append(output)
                    return
                given, output = kept.pop((stage.stage_index, m))
                if stage.is_last:
                    run.schedule._internal_losses[m].backward()
                else:
                    output.backward(kept.pop(("g", m)))
                kept["g", m] = given.grad

        Own(run).register("F", "B")
        plain = own_run(IL)

        assert [plain.step(n) for n in range(2)] == [run.step(n) for n in range(2)]
        assert 2 == guarded.contract.epoch

    def test_gradients_in_main_grad(self) -> None:
        """A dW may write its gradient into a buffer of its own."""
        run = own_run(ZBV)
        guarded = guard(run.schedule)
        for block in run.blocks:
            for parameter in block.parameters():
                parameter.main_grad = torch.zeros_like(parameter)

        class Fused(Functions):
            def runs(self, action: Any, context: Any) -> None:
                stage = next(s for s in run.stages if s.stage_index == action.stage_index)
                Stage.backward_weight_one_chunk(stage, action.microbatch_index)
                for parameter in stage.submod.parameters():
                    assert parameter.grad is not None
                    parameter.main_grad.add_(parameter.grad)
                    parameter.grad = None

        Fused(run).register("W")
        run.schedule.scale_grads = False
        run.schedule.step(torch.ones(run.rows, 8), target=torch.ones(run.rows, 8))

        assert 1 == guarded.contract.epoch


class TestLeftOut:
    """A function that computes nothing for one microbatch is refused, whatever is registered."""

    @pytest.mark.parametrize(("name", "kind"), CASES)
    @pytest.mark.parametrize("every", [False, True])
    def test_torch_alone_passes_and_the_guard_refuses(
        self, name: str, kind: str, every: bool
    ) -> None:
        """Alone, and with functions for every other kind too: the action is named."""
        kinds = tuple(KINDS) if every else (kind,)
        whole, plain, run = own_run(name), own_run(name), own_run(name)
        Functions(plain, kind).register(*kinds)
        assert whole.step(0) != plain.step(0)

        guarded = guard(run.schedule)
        run.step(0)
        Functions(run, kind).register(*kinds)
        with pytest.raises(Refused) as caught:
            run.step(1)

        assert "epoch.device-count" == caught.value.clause
        which = "" if kind == "REDUCE_GRAD" else ", microbatch 2"
        said = f"{kind} of stage {run.own[-1]}{which}: its computation did not run"
        assert said == str(caught.value.found)
        assert 1 == guarded.contract.epoch
        assert () == guarded.contract.outstanding()

    @pytest.mark.parametrize("kind", ["I", "W"])
    def test_a_function_of_another_kind(self, kind: str) -> None:
        """A registered dW or dI does not hide a method of the other kind that does nothing."""
        method = {"I": "backward_weight_one_chunk", "W": "backward_one_chunk"}[kind]
        run = own_run(ZBV)
        guard(run.schedule)
        Functions(run).register(kind)
        run.step(0)
        bodies.leave_out(run, method)
        with pytest.raises(Refused, match="its computation did not run"):
            run.step(1)

    def test_a_class_that_leaves_its_backward_out(self) -> None:
        """The guard's own method was called: the untouched graph shows that nothing ran."""

        class Lazy(Stage):
            def backward_one_chunk(self, m: int, *args: Any, **kwargs: Any) -> None:
                if m == 1 and self.is_last:
                    bodies._backward_faked(self, m)
                else:
                    super().backward_one_chunk(m, *args, **kwargs)

        run = Run(ZBV, ranks=1, stage=Lazy)
        guard(run.schedule)
        Functions(run).register("W")
        with pytest.raises(Refused, match="I of stage 1, microbatch 1: its computation did not"):
            run.step(0)


class TestGraphs:
    """A stage that computes with graphs of its own leaves no evidence: it is trusted."""

    @pytest.mark.parametrize("attribute", ["graphs", "graph_callables"])
    @pytest.mark.parametrize(("name", "kind"), CASES)
    def test_a_stage_with_graphs(self, name: str, kind: str, attribute: str) -> None:
        """What is refused of plain modules is committed, and named in `on_trust`."""
        run = own_run(name)
        guarded = guard(run.schedule)
        Functions(run, kind).register(*("IW" if kind == "I" else [kind]))  # dW is what dI leaves
        for stage in run.stages:
            setattr(stage, attribute, None)  # TorchTitan's are made in the first step
        run.step(0)

        assert 1 == guarded.contract.epoch
        assert {
            f"the function that is registered for {kind} runs its action",
            "stage 0 runs its registered actions in its own graphs",
            "stage 1 runs its registered actions in its own graphs",
        } <= {*guarded.on_trust()}

    def test_one_stage_with_graphs(self) -> None:
        """Another stage's graphs exempt no stage of plain modules."""
        run = own_run(IL)
        guarded = guard(run.schedule)
        Functions(run, "B").register("B")
        run.stages[0].graphs = None
        with pytest.raises(Refused, match="B of stage 1, microbatch 2: its computation did not"):
            run.step(0)

        assert "the function that is registered for B runs its whole action" in (guarded.on_trust())

    def test_a_method_beside_graphs(self) -> None:
        """Only registered functions are trusted: a replaced method of such a stage is judged."""
        run = own_run(ZBV)
        guard(run.schedule)
        Functions(run).register("W")
        for stage in run.stages:
            stage.graphs = None
        run.step(0)
        bodies.leave_out(run, "backward_one_chunk")
        with pytest.raises(Refused, match="I of stage 1, microbatch 2: its computation did not"):
            run.step(1)


class Recorded(Functions):
    """
    Functions over stages that keep records of their graphs, as TorchTitan's GraphPP does.

    Args:
        run, fake, microbatch: As for `Functions`.
        splits: Whether the stages' backwards can be split; if not, dW runs the whole backward.
    """

    def __init__(
        self, run: Run, fake: str = "", microbatch: int = 2, *, splits: bool = True
    ) -> None:
        super().__init__(run, fake, microbatch)
        stages: list[Any] = run.stages
        for stage in stages:
            stage.graphs = SimpleNamespace(supports_backward_input_weight_split=splits)
            stage.state = SimpleNamespace(
                unsharded_param_grads=[torch.zeros(1)], sharded_param_grads=[]
            )
            stage.saved_values_for_backward_weight_cache = {}
            stage.fwd_cache = getattr(stage, "fwd_cache", {})

    def runs(self, action: Any, context: Any) -> None:
        """Run an action or the parts of an overlap, and leave a record of each that is run."""
        for part in action.sub_actions or [action]:
            super().runs(part, context)
            kind, m = part.computation_type.value, part.microbatch_index
            stage = next(s for s in self.run.stages if s.stage_index == part.stage_index)
            if (kind, stage.stage_index) != self.left_out[:2] or m not in (None, self.left_out[2]):
                self._record(kind, stage, m)
            elif kind == "F":
                stage.fwd_cache.pop(m, None)  # `Functions` has put an output there

    def _record(self, kind: str, stage: Any, m: int) -> None:
        if kind == "F":
            if hasattr(stage, "_forward_chunk_states"):  # torch 2.15 keeps outputs there
                stage.fwd_cache[m] = object()
        elif kind == "I":
            if stage.graphs.supports_backward_input_weight_split:
                stage.saved_values_for_backward_weight_cache[m] = ()
        elif kind == "REDUCE_GRAD":
            stage.state.sharded_param_grads = [*stage.state.unsharded_param_grads]
        else:
            stage.saved_values_for_backward_weight_cache.pop(m, None)
            stage.state.unsharded_param_grads[0].add_(1)


class TestRecords:
    """Stages that keep records of their graphs, as under GraphPP, are judged by the records."""

    @pytest.mark.parametrize("splits", [True, False])
    @pytest.mark.parametrize("name", [IL, IZB, ZBV])
    def test_functions_that_leave_records(self, name: str, splits: bool) -> None:
        plain, run = own_run(name), own_run(name)
        guarded = guard(run.schedule)
        Recorded(run, splits=splits).register(*KINDS)

        assert [plain.step(n) for n in range(2)] == [run.step(n) for n in range(2)]
        assert 2 == guarded.contract.epoch
        assert not any("in its own graphs" in claim for claim in guarded.on_trust())

    @pytest.mark.parametrize(("name", "kind"), CASES)
    def test_a_function_that_leaves_no_record(self, name: str, kind: str) -> None:
        run = own_run(name)
        guard(run.schedule)
        Recorded(run, kind).register(*KINDS)
        with pytest.raises(Refused, match=f"{kind} of stage 1.*: its computation did not run"):
            run.step(0)

    def test_a_reduction_that_leaves_no_record(self) -> None:
        """TorchTitan's schedules do not scale gradients; GraphPP's reductions leave a record."""
        run = own_run(IL)
        run.schedule.scale_grads = False
        guard(run.schedule)
        Recorded(run, "REDUCE_GRAD").register(*KINDS)
        with pytest.raises(Refused, match=r"REDUCE_GRAD of stage 1.*: its computation did not run"):
            run.step(0)

    def test_stages_that_keep_no_outputs(self) -> None:
        """They may keep their outputs elsewhere, so their actions are trusted."""
        run = own_run(IL)
        guarded = guard(run.schedule)
        Recorded(run).register(*KINDS)
        for stage in run.stages:
            del stage.fwd_cache
        assert any("in its own graphs" in claim for claim in guarded.on_trust())

    @pytest.mark.parametrize("fake", ["", "F", "B"])
    def test_an_overlap(self, fake: str) -> None:
        """Both parts of an overlapped action are judged; the table says in which order."""
        plain, run = (Run("ScheduleDualPipeV", ranks=1, microbatches=6) for _ in range(2))
        guarded = guard(run.schedule)
        parts = [p for a in run.schedule.pipeline_order_with_comms[0] for p in a.sub_actions or ()]
        overlapped = {str(part)[:2]: part.microbatch_index for part in parts}
        functions = Recorded(run, fake, overlapped[f"1{fake or 'B'}"])
        functions.register(*KINDS)
        overlap = bodies.torch_schedules._ComputationType.OVERLAP_F_B
        run.schedule.register_custom_function(overlap, functions.runs)
        if fake:
            with pytest.raises(Refused, match=rf"{fake} of stage 1, microbatch \d+: its comp"):
                run.step(0)
            assert guarded.at.endswith("OVERLAP_F_B")
            return

        assert plain.step(0) == run.step(0)
        assert 1 == guarded.contract.epoch
        said = "the function that is registered for OVERLAP_F_B runs its whole action"
        assert said in guarded.on_trust()

    @pytest.mark.parametrize("by_methods", [False, True])
    def test_an_overlap_without_records(self, by_methods: bool) -> None:
        """Graphs that leave no record are trusted; a stage's own method commits its part itself."""
        run = Run("ScheduleDualPipeV", ranks=1, microbatches=6)
        guarded = guard(run.schedule)
        functions = Functions(run)
        stages: list[Any] = run.stages
        for stage in stages:
            stage.graphs = None

        def overlap(action: Any, context: Any) -> None:
            for part in action.sub_actions:
                m, stage = part.microbatch_index, stages[part.stage_index]
                if not by_methods:
                    functions.runs(part, context)
                elif part.computation_type.value == "F":
                    given = context.arg_mbs[m] if stage.is_first else ()
                    output = stage.forward_one_chunk(m, given, {})
                    functions._forwarded(stage, m, output, context)
                else:
                    stage.backward_one_chunk(m, loss=run.schedule._maybe_get_loss(stage, m))
                    functions._backwarded(stage, m)

        kind = bodies.torch_schedules._ComputationType.OVERLAP_F_B
        run.schedule.register_custom_function(kind, overlap)
        run.step(0)

        assert 1 == guarded.contract.epoch
        trust = guarded.on_trust()
        assert "the function that is registered for OVERLAP_F_B runs its action" in trust
        assert "stage 0 runs its registered actions in its own graphs" in trust


@pytest.mark.skipif(
    "WAIT_REDUCE_GRAD" not in bodies.torch_schedules._ComputationType.__members__,
    reason="from torch 2.15 on, a table says where reductions end",
)
@pytest.mark.parametrize("waits", [True, False])
def test_the_wait_for_a_reduction(waits: bool) -> None:
    """torch keeps the handle of a reduction until it was awaited; a function may leave this out."""
    run = own_run(IL)
    types = bodies.torch_schedules._ComputationType
    stages = {stage.stage_index: stage for stage in run.stages}

    def starts(action: Any, context: Any) -> None:
        Stage.perform_reduce_grad(stages[action.stage_index], run.microbatches)
        stages[action.stage_index]._gradient_reduction_handle = object()

    def ends(action: Any, context: Any) -> None:
        if waits or action.stage_index != 1:
            stages[action.stage_index]._gradient_reduction_handle = None

    guarded = guard(run.schedule)
    run.schedule.register_custom_function(types["REDUCE_GRAD"], starts)
    run.schedule.register_custom_function(types["WAIT_REDUCE_GRAD"], ends)
    if waits:
        run.step(0)
        assert 1 == guarded.contract.epoch
        return
    with pytest.raises(Refused, match="WAIT_REDUCE_GRAD of stage 1: its computation did not run"):
        run.step(0)


def test_the_kinds_are_torchs() -> None:
    """Every kind of computation that torch lets a function take over is in this table."""
    run = own_run(IL)
    taken: list[str] = []
    register: Callable[..., None] = run.schedule.register_custom_function
    for each in bodies.torch_schedules._ComputationType:
        try:
            register(each, print)
        except ValueError:
            continue
        taken.append(each.name)

    others = {"OVERLAP_F_B", "UNSHARD", "RESHARD", "WAIT_REDUCE_GRAD"}  # the last from 2.15 on
    assert {*KINDS.values()} <= {*taken} <= {*KINDS.values()} | others

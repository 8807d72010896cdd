"""
`guard(schedule)`: an action is committed only if its computation ran, on the weights of its epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from qeffect.guards.pipelining import guard
from qeffect.refusals import Refused
from tests.ranks import guard_bodies as bodies
from tests.ranks.guard_bodies import LEFT_OUT, WIDTH, Block, Run, Stage, leave_out
from tests.ranks.ranks import launch

ZBV, IZB, IL = "ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble", "ScheduleInterleaved1F1B"
WALKS = (IL, IZB, ZBV, "ScheduleDualPipeV", "ScheduleLoopedBFS")
SINGLE = ("Schedule1F1B", "ScheduleGPipe")
NAMES = (*WALKS, *SINGLE)
FORWARD, BACKWARD, WEIGHT = LEFT_OUT
#: What can be left out: on one rank only two tables have a dW of the last stage, microbatch 2.
CASES = [*((n, m) for n in NAMES for m in (FORWARD, BACKWARD)), (IZB, WEIGHT), (ZBV, WEIGHT)]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One rank, which is the whole pipeline."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def own_run(name: str, **options: Any) -> Run:
    return Run(name, ranks=1, **options)


def refusal(run: Run, number: int = 1) -> Refused:
    with pytest.raises(Refused) as caught:
        run.step(number)
    return caught.value


class TestLeftOut:
    """A method that was replaced after the guard was put on leaves a microbatch out."""

    @pytest.mark.parametrize(("name", "method"), CASES)
    def test_torch_alone_passes_and_the_guard_refuses(self, name: str, method: str) -> None:
        """Without the guard the step ends with other gradients; with it the action is named."""
        whole, plain = own_run(name), own_run(name)
        leave_out(plain, method)
        assert whole.step(0) != plain.step(0)

        run = own_run(name)
        guarded = guard(run.schedule)
        run.step(0)
        leave_out(run, method)
        refused = refusal(run)

        assert 1 == guarded.contract.epoch
        assert () == guarded.contract.outstanding()
        if name in SINGLE or (name, method) == ("ScheduleDualPipeV", FORWARD):
            # Nothing checks the action that was not called: the one behind it is out of order.
            assert refused.clause in ("order.reordered", "ownership.stale-reference")
            return
        assert "epoch.device-count" == refused.clause
        kinds, _ = LEFT_OUT[method]
        assert str(refused.found) in {
            f"{kind} of stage 1, microbatch 2: its computation did not run" for kind in kinds
        }
        assert refused.__notes__[0].startswith("at pipeline rank 0, step ")

    @pytest.mark.parametrize("name", WALKS)
    def test_a_backward_that_looks_at_nothing(self, name: str) -> None:
        """Methods that return at once are refused; torch runs no dI of the first stage, but dW."""
        run = own_run(name)
        guard(run.schedule)
        run.stages[0].backward_one_chunk = lambda m, **_: run.stages[0].dw_runner.update({m: None})
        run.stages[0].backward_weight_one_chunk = lambda m, **_: None
        refused = refusal(run, 0)

        assert "epoch.device-count" == refused.clause
        assert str(refused.found).startswith(("W of stage 0", "B of stage 0"))

    @pytest.mark.parametrize("name", NAMES)
    def test_the_last_microbatch(self, name: str) -> None:
        """The one behind which no action comes; the end of the step refuses it at the latest."""
        run = own_run(name)
        guarded = guard(run.schedule)
        leave_out(run, BACKWARD, 3)
        refused = refusal(run, 0)

        assert refused.clause in ("epoch.device-count", "epoch.incomplete", "order.incomplete")
        assert 0 == guarded.contract.epoch

    @pytest.mark.parametrize("name", [IL, ZBV, "Schedule1F1B"])
    def test_a_stage_that_forgets_to_have_a_backward(self, name: str) -> None:
        """torch's own method returns without a word if `has_backward` is False."""

        def forget(run: Run) -> None:
            found = run.stages[-1].forward_one_chunk

            def forward(m: int, *args: Any, **kwargs: Any) -> Any:
                run.stages[-1].has_backward = False
                return found(m, *args, **kwargs)

            run.stages[-1].forward_one_chunk = forward

        run = own_run(name)
        guard(run.schedule)
        forget(run)

        assert "epoch.device-count" == refusal(run, 0).clause

    @pytest.mark.parametrize("name", NAMES)
    def test_a_class_that_leaves_its_backward_out(self, name: str) -> None:
        """What the guard found is not trusted either: the graph of the forward is untouched."""

        class Lazy(Stage):
            def backward_one_chunk(self, m: int, *args: Any, **kwargs: Any) -> None:
                if m == 1 and self.is_last:
                    bodies._backward_faked(self, m)
                else:
                    super().backward_one_chunk(m, *args, **kwargs)

        run = own_run(name, stage=Lazy)
        guard(run.schedule)
        refused = refusal(run, 0)

        assert "epoch.device-count" == refused.clause
        assert "microbatch 1" in str(refused.found)

    @pytest.mark.parametrize("name", [IL, ZBV])
    def test_gradients_that_are_not_scaled(self, name: str) -> None:
        """`perform_reduce_grad` divides gradients; one that was left out is refused."""
        whole, plain = own_run(name), own_run(name)
        plain.stages[0].perform_reduce_grad = lambda *_: None
        assert whole.step(0) != plain.step(0)
        run = own_run(name)
        guard(run.schedule)
        run.stages[0].perform_reduce_grad = lambda *_: None
        refused = refusal(run, 0)

        assert "epoch.device-count" == refused.clause
        assert "REDUCE_GRAD of stage 0: its computation did not run" == str(refused.found)

    @pytest.mark.parametrize("name", [IL, "ScheduleLoopedBFS"])
    def test_a_backward_of_inputs_alone(self, name: str) -> None:
        """A full backward that makes no gradient of a weight is short of it, and refused."""

        def half(run: Run) -> None:
            stage, found = run.stages[0], run.stages[0].backward_one_chunk

            def backward(m: int, *args: Any, **kwargs: Any) -> Any:
                if m != 2:
                    return found(m, *args, **kwargs)
                left = bodies.retained(stage).pop(m)
                edges = getattr(left, "stage_output_for_backward", None)  # torch 2.15
                outputs = left[0] if edges is None else edges()
                given = stage._retrieve_recv_grads(m)
                weight = run.blocks[0].norm.weight
                torch.autograd.grad(outputs, weight, given)  # passes, and writes nothing
                return None

            stage.backward_one_chunk = backward

        whole, plain, run = own_run(name), own_run(name), own_run(name)
        half(plain)
        assert whole.step(0) != plain.step(0)
        guard(run.schedule)
        half(run)
        refused = refusal(run, 0)

        assert "epoch.device-count" == refused.clause
        assert "B of stage 0, microbatch 2: its computation did not run" == str(refused.found)

    @pytest.mark.parametrize(
        ("name", "method"), [(IL, BACKWARD), *((ZBV, method) for method in LEFT_OUT)]
    )
    def test_over_ranks(self, name: str, method: str, tmp_path: Path) -> None:
        """Rank 1 leaves a microbatch out: torch says nothing, the guard refuses it on rank 1."""
        said = launch(2, tmp_path, bodies.left_out_over_ranks, name, method).words

        assert said[1][0] is False  # the gradients are short of it, and nothing was raised
        assert "epoch.device-count" == said[1][1]["refused"]
        assert 1 == said[1][1]["epoch"]
        assert said[1][1]["notes"][0].startswith("at pipeline rank 1, step ")


class TestReplaced:
    """A method that was replaced after the guard was put on, and does the work, is accepted."""

    @pytest.mark.parametrize("name", WALKS[:3])
    @pytest.mark.parametrize("method", LEFT_OUT)
    def test_the_class_is_called(self, name: str, method: str) -> None:
        """The replacement passes by the guard's method and calls the class: the same bits."""

        def replaced(run: Run) -> Run:
            for stage in run.stages:
                own = getattr(Stage, method)
                setattr(stage, method, lambda *a, s=stage, own=own, **k: own(s, *a, **k))
            return run

        plain, run = own_run(name), own_run(name)
        guarded = guard(run.schedule)
        replaced(run)

        assert [plain.step(n) for n in range(3)] == [run.step(n) for n in range(3)]
        assert 3 == guarded.contract.epoch

    @pytest.mark.parametrize("name", NAMES)
    def test_the_guard_is_called(self, name: str) -> None:
        """A wrapper around the guard's methods changes nothing."""
        plain, run = own_run(name), own_run(name)
        guarded = guard(run.schedule)
        for stage in run.stages:
            for method in (*LEFT_OUT, "perform_reduce_grad"):
                found = getattr(stage, method)
                setattr(stage, method, lambda *a, found=found, **k: found(*a, **k))

        assert [plain.step(n) for n in range(3)] == [run.step(n) for n in range(3)]
        assert 3 == guarded.contract.epoch

    def test_remove_restores_a_method_that_a_stage_had(self) -> None:
        """A stage that had a method of its own before the guard has it again."""
        run = own_run(ZBV)
        stage, own = run.stages[0], run.stages[0].backward_one_chunk
        stage.backward_one_chunk = own
        guarded = guard(run.schedule)
        assert stage.backward_one_chunk is not own
        guarded.remove()

        assert stage.backward_one_chunk is own


class Frozen(Block):
    """A block whose linear layer is not trained."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.linear.requires_grad_(False)


class AllFrozen(Block):
    """A block of which nothing is trained, in the first stage; else an ordinary one."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 0:
            self.requires_grad_(False)


class Normed(Block):
    """A block with running statistics, which its forward writes."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(super().forward(x))


class Looked(Block):
    """A block that adds rows of an embedding, which its own forward renormalizes."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rows = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows((x.sum(1) > 0).long())


class Recomputed(Block):
    """A block whose backward runs its forward again."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class View(Block):
    """A block whose output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:]


def _normed_weights(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def _replicated(index: int) -> nn.Module:
    return DistributedDataParallel(Block(index))


class Pass(nn.Module):
    """A stage that returns its input; its one parameter takes no part."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x


def _first_passes(index: int) -> nn.Module:
    return Block(index) if index else Pass(index)


KINDS = (
    Block,
    Frozen,
    AllFrozen,
    Normed,
    Looked,
    Recomputed,
    View,
    _first_passes,
    _normed_weights,
    _replicated,
)


class TestLegal:
    """What torch may do keeps its bits under the guard and is never refused."""

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("block", KINDS)
    def test_kinds_of_modules(self, name: str, block: Callable[[int], nn.Module]) -> None:
        """Frozen parameters, statistics, own writes of a forward, recomputation, replicas."""
        plain, run = (own_run(name, block=block) for _ in range(2))
        guarded = guard(run.schedule)

        assert [plain.step(n) for n in range(3)] == [run.step(n) for n in range(3)]
        assert 3 == guarded.contract.epoch

    @pytest.mark.parametrize("name", NAMES)
    def test_sharded_modules(self, name: str) -> None:
        """FSDP gathers weights in place: they are not watched, and the losses are the same."""
        mesh = init_device_mesh("cpu", (1,))
        found: list[list[float]] = []
        for guards in (False, True):
            run = own_run(name, block=lambda index: fully_shard(Block(index), mesh=mesh))
            guarded = guard(run.schedule) if guards else None
            found.append([])
            for _ in range(3):
                x = torch.arange(float(run.rows * WIDTH)).reshape(run.rows, WIDTH).sin()
                run.optimizer.zero_grad()
                losses: list[Tensor] = []
                run.schedule.step(x, target=x, losses=losses)
                run.optimizer.step()
                found[-1] += [float(loss.detach()) for loss in losses]
        assert guarded is not None

        assert found[0] == found[1]
        assert 3 * run.microbatches == len(set(found[0]))  # it does train
        assert 3 == guarded.contract.epoch
        assert any("its module is sharded" in claim for claim in guarded.on_trust())


class TestSplitBackward:
    """torch leaves out the gradient of a parameter that it does not find in the graph of its F."""

    @staticmethod
    def resharded(index: int) -> nn.Module:
        """The last stage's norm goes back to its shard behind F, as FSDP's `reshard` does it."""
        mesh, made = init_device_mesh("cpu", (1,)), Block(index)
        fully_shard(made.norm, mesh=mesh, reshard_after_forward=False)
        fully_shard(made, mesh=mesh, reshard_after_forward=False)
        if index == 1:
            made.register_forward_hook(lambda *_: made.norm.reshard())
        return made

    @staticmethod
    def lost(run: Run) -> set[str]:
        """Parameters of the last stage that a step leaves without a gradient."""
        x = torch.ones(run.rows, WIDTH)
        run.schedule.step(x, target=x)
        return {n for n, p in run.blocks[-1].named_parameters() if p.grad is None}

    @pytest.mark.parametrize("name", [IZB, ZBV])
    def test_a_lost_gradient_is_named(self, name: str) -> None:
        """Without the guard the step ends, and the norm has no gradient."""
        assert {"norm.weight", "norm.bias"} == self.lost(own_run(name, block=self.resharded))

        run = own_run(name, block=self.resharded)
        guard(run.schedule)
        with pytest.raises(Refused) as caught:
            self.lost(run)
        assert "ownership.work-not-queued" == caught.value.clause
        assert str(caught.value.found) == (
            "no deferred work for 2 of 4 weights in the graph of stage 1, microbatch 0: norm.bias, "
            "norm.weight"
        )

    @pytest.mark.parametrize("name", [IZB, ZBV])
    def test_it_is_reported(self, name: str) -> None:
        """Once, and the steps go on; later steps are not judged by this one."""
        run = own_run(name, block=self.resharded)
        guarded = guard(run.schedule, manner="report")
        for _ in range(2):
            assert self.lost(run) == {"norm.weight", "norm.bias"}
        assert {"ownership.work-not-queued"} == {v.clause for v in guarded.violations}

    def test_a_full_backward_loses_nothing(self) -> None:
        """Where dI and dW are one, autograd itself finds the parameter."""
        run = own_run(IL, block=self.resharded)
        guard(run.schedule)
        assert self.lost(run) == set()


class TestWeights:
    """A weight that is written in mid-step is refused where it is read next."""

    @staticmethod
    def write(run: Run, at: str, write: Callable[[Any], object]) -> None:
        """Write a weight of the last stage before microbatch 2 of a method."""
        stage, block = run.stages[-1], run.blocks[-1]
        found = getattr(stage, at)

        def method(m: int, *args: Any, **kwargs: Any) -> Any:
            if m == 1:
                with torch.no_grad():
                    write(block)
            return found(m, *args, **kwargs)

        setattr(stage, at, method)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_write_between_forwards(self, name: str) -> None:
        """torch alone trains on two states of the weights; the guard names the weight."""
        whole, plain = own_run(name), own_run(name)
        # This parameter is saved for no backward, so that autograd notices nothing.
        self.write(plain, FORWARD, lambda block: block.linear.bias.add_(1))
        assert whole.step(0) != plain.step(0)
        run = own_run(name)
        guarded = guard(run.schedule)
        run.step(0)
        version = run.blocks[-1].linear.bias._version
        self.write(run, FORWARD, lambda block: block.linear.bias.add_(1))
        refused = refusal(run)

        assert "version.wrong-epoch" == refused.clause
        stage = run.own[-1]
        assert (
            f"weight linear.bias of stage {stage} at version {version + 1}, written in mid-step"
            == str(refused.found)
        )
        assert f"version {version}, as at" in str(refused.expected)
        assert 1 == guarded.contract.epoch

    @pytest.mark.parametrize("name", NAMES)
    def test_an_optimizer_that_steps_in_a_backward(self, name: str) -> None:
        """An update in mid-step, from a hook of autograd, is refused at the stage's next action."""
        run = own_run(name)
        guard(run.schedule)
        weight = run.blocks[-1].linear.bias
        own = torch.optim.SGD([weight], lr=0.1)

        def update(_: Tensor) -> None:
            if weight.grad is not None:
                own.step()

        weight.register_hook(update)

        assert "version.wrong-epoch" == refusal(run, 0).clause

    @pytest.mark.parametrize("name", NAMES)
    def test_writes_between_steps_and_of_what_is_not_trained(self, name: str) -> None:
        """An update, a load and a write of frozen weights and buffers are legal."""
        runs = [own_run(name, block=Frozen) for _ in range(2)]
        guarded = guard(runs[1].schedule)
        bits = []
        for run in runs:
            self.write(run, FORWARD, lambda block: block.linear.bias.mul_(1))
            found = [run.step(0)]
            with torch.no_grad():
                for block in run.blocks:
                    block.norm.weight.mul_(0.5)
                    block.load_state_dict(block.state_dict())
            bits.append([*found, run.step(1)])

        assert bits[0] == bits[1]
        assert 2 == guarded.contract.epoch


def test_the_class_is_torchs() -> None:
    """The tests' stage is torch's own, so what holds of it holds of torch's."""
    assert issubclass(Stage, PipelineStage)

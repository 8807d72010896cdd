"""
Gradients that are reduced in buckets, while other stages still run. The training has the same bits
as with one reduction per stage at the end. A gradient that may not be reduced yet is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, matrices
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Reduction, Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.arena import RULES, Rule
from qeffect.gpu_runtime.step.plan.order import Kind, Order
from qeffect.refusals import Refused
from qeffect.stage_config import Bucket

from .helpers import TINY, optimizer_for, reference_stages
from .injection import FINAL, final_of
from .orders import table_order

NUM_STEPS = 3
ORDER = table_order("ScheduleZBVZeroBubble", 0)

Name = int | str


@attrs.define
class Later:
    """A reduction that writes only when it is waited for."""

    write: Callable[[], None]
    waited: int = 0

    def wait(self) -> None:
        self.waited += 1
        self.write()


@attrs.define
class Replica:
    """
    Averages gradients with those of another replica, which are drawn by name.

    Args:
        later: Whether a reduction writes only when it is waited for.
        failing: Names of buckets whose next reduction raises, when it is waited for if `later`.
        started: Each bucket that was reduced, and the names of its gradients.
    """

    later: bool = False
    failing: set[Name] = attrs.field(factory=set)
    started: list[tuple[Name, tuple[str, ...]]] = attrs.field(factory=list)
    works: list[Later] = attrs.field(factory=list)

    def __call__(self, bucket: Name, gradients: Mapping[str, Tensor]) -> Reduction | None:
        self.started.append((bucket, tuple(gradients)))

        def write() -> None:
            if bucket in self.failing:
                self.failing.remove(bucket)
                raise ConnectionError("injected")
            for name, own in gradients.items():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                theirs = torch.randn(own.shape, generator=generator) * 0.01
                own.add_(theirs.to(own.dtype)).mul_(0.5)

        if not self.later:
            write()
            return None
        self.works.append(Later(write))
        return self.works[-1]


def buckets_of(order: Order) -> dict[int, tuple[Bucket, ...]]:
    """Two buckets of matrices for each stage, and one bucket of the other parameters."""
    found = {}
    for stage in reference_stages(order, 4, TINY):
        names = [matrix.name for matrix in matrices(stage)]
        assert stage.non_matrix
        assert len(names) > 1
        found[stage.index] = (
            Bucket(f"{stage.index}a", names[1:]),
            Bucket(f"{stage.index}b", names[:1]),
            Bucket(f"{stage.index}c"),
        )
    return found


BUCKETS = buckets_of(ORDER)
NAMES = [bucket.name for own in BUCKETS.values() for bucket in own]


def made(
    reducer: Replica | None,
    buckets: Mapping[int, Sequence[Bucket]] = BUCKETS,
    rule: Rule = "accumulate",
    **config: Any,
) -> GuardedRun:
    """A fresh runtime with buckets."""
    stages = reference_stages(ORDER, 4, TINY)
    chosen = RuntimeConfig(rule=rule, readers=True, buckets=buckets, **config)
    runtime = Runtime(stages, ORDER, chosen, reducer=reducer)
    return GuardedRun(runtime, Workload(), optimizer_for(stages, torch.bfloat16))


def early(run: GuardedRun, buckets: Mapping[int, Sequence[Bucket]] = BUCKETS) -> list[int]:
    """One step whose buckets leave after the last dW of their stage; how many actions remained."""
    run.begin()
    left = {index: len(ORDER.microbatches(index, Kind.WGRAD)) for index in run.runtime.stages}
    remained = []
    for number, step in enumerate(ORDER.steps, 1):
        run.advance(step)
        if step.kind is Kind.WGRAD:
            left[step.stage] -= 1
            if not left[step.stage]:
                for bucket in buckets[step.stage]:
                    run.runtime.reduce(bucket.name)
                    remained.append(len(ORDER.steps) - number)
    run.finish()
    return remained


def end_of(run: GuardedRun) -> Recording:
    """Parameters, optimizer and scaling state."""
    return final_of(list(run.runtime.stages.values()), run.optimizer)


def assert_same_end(expected: Recording, run: GuardedRun) -> None:
    """The run ended as another did, bit for bit."""
    result = compare(expected, end_of(run), categories=FINAL)
    assert result.mismatched == 0, str(result)
    assert result.compared > 0


@pytest.fixture(scope="module")
def at_the_end() -> Mapping[Rule, Recording]:
    """Ends of runs that reduce each stage at once, when all is final."""
    found = {}
    for rule in RULES:
        run = made(Replica(), {}, rule)
        for _ in range(NUM_STEPS):
            run.step()
        found[rule] = end_of(run)
    return found


class TestBits:
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("later", [False, True], ids=["at once", "when waited for"])
    def test_buckets_that_leave_early_train_the_same(
        self, rule: Rule, later: bool, at_the_end: Mapping[Rule, Recording]
    ) -> None:
        """Reductions that began while another stage ran leave the bits of one at the end."""
        replica = Replica(later)
        run = made(replica, rule=rule)
        remained = [early(run) for _ in range(NUM_STEPS)]

        assert_same_end(at_the_end[rule], run)
        assert all(max(one) > 0 for one in remained)
        assert [1] * len(replica.works) == [work.waited for work in replica.works]
        assert len(replica.started) == NUM_STEPS * len(NAMES)

    def test_buckets_that_finalize_reduces_train_the_same(
        self, at_the_end: Mapping[Rule, Recording]
    ) -> None:
        """What nobody started is reduced by finalize, bucket by bucket."""
        replica = Replica()
        run = made(replica)
        for _ in range(NUM_STEPS):
            run.step()

        assert_same_end(at_the_end["accumulate"], run)
        assert NAMES * NUM_STEPS == [name for name, _ in replica.started]

    def test_without_the_other_replica_another_model_is_trained(
        self, at_the_end: Mapping[Rule, Recording]
    ) -> None:
        """The comparison tells a run that was not reduced from one that was."""
        run = made(None, {})
        for _ in range(NUM_STEPS):
            run.step()

        ends = compare(at_the_end["accumulate"], end_of(run), categories=FINAL)
        assert ends.mismatched > 0

    def test_each_gradient_is_in_one_bucket(self) -> None:
        """The reducer is given every gradient of a step once, under its bucket's name."""
        replica = Replica()
        run = made(replica)
        early(run)

        for index, stage in run.runtime.stages.items():
            given = [names for name, names in replica.started if str(name).startswith(str(index))]
            every = [m.name for m in matrices(stage)] + [p.name for p in stage.non_matrix]
            assert sorted(every) == sorted(name for names in given for name in names)


class TestRefusals:
    def test_a_stage_with_a_dw_to_come_is_not_reduced(self) -> None:
        """The reducer is not even called."""
        replica = Replica()
        run = made(replica)
        run.begin()
        last = max(n for n, step in enumerate(ORDER.steps) if step.kind is Kind.WGRAD)
        for step in ORDER.steps[:last]:
            run.advance(step)
        bucket = BUCKETS[ORDER.steps[last].stage][0].name

        with pytest.raises(Refused) as caught:
            run.runtime.reduce(bucket)

        assert "reduction.incomplete" == caught.value.clause
        assert [] == replica.started

    def test_a_bucket_is_reduced_once(self, at_the_end: Mapping[Rule, Recording]) -> None:
        """A second reduction would halve the gradient again; the first counts."""
        run = made(Replica())
        run.actions()
        run.runtime.reduce(NAMES[0])

        with pytest.raises(Refused) as caught:
            run.runtime.reduce(NAMES[0])
        run.finish()

        assert "reduction.in-flight" == caught.value.clause
        for _ in range(NUM_STEPS - 1):
            run.step()
        assert_same_end(at_the_end["accumulate"], run)

    def test_finalize_keeps_the_declared_order(self) -> None:
        """Every replica starts them in one order; a bucket out of turn is refused."""
        declared = NAMES[::-1]
        replica = Replica()
        run = made(replica, reductions=declared)
        run.actions()

        with pytest.raises(Refused) as caught:
            run.runtime.reduce(declared[1])
        run.runtime.reduce(declared[0])
        run.finish()

        assert "reduction.out-of-order" == caught.value.clause
        assert declared == [name for name, _ in replica.started]


class TestFailures:
    @pytest.mark.parametrize("later", [False, True], ids=["at once", "when waited for"])
    def test_a_reduction_that_fails_stops_the_commit_until_a_rebuild(
        self, later: bool, at_the_end: Mapping[Rule, Recording]
    ) -> None:
        """The others that are in flight end with it, and the epoch begins again."""
        replica = Replica(later, failing={NAMES[1]})
        run = made(replica)
        with pytest.raises(ConnectionError, match="injected"):
            early(run)
        with pytest.raises(Refused) as caught:
            run.runtime.contract.commit_epoch()
        assert caught.value.relation in ("ownership", "epoch", "reduction")

        run.runtime.rebuild()
        while run.runtime.epoch < NUM_STEPS:
            early(run)

        assert_same_end(at_the_end["accumulate"], run)

    def test_a_step_that_is_given_up_ends_its_reductions(
        self, at_the_end: Mapping[Rule, Recording]
    ) -> None:
        """A reduction that is in flight at a rebuild is waited for, and counts for nothing."""
        replica = Replica(later=True)
        run = made(replica)
        run.actions()
        run.runtime.reduce(NAMES[0])

        run.runtime.rebuild()

        assert [1] == [work.waited for work in replica.works]
        while run.runtime.epoch < NUM_STEPS:
            early(run)
        assert_same_end(at_the_end["accumulate"], run)


class TestConfiguration:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({9: (Bucket("x"),)}, r"buckets name the stages \[9\]"),
            ({0: BUCKETS[0][:2]}, "expected 1 bucket without matrices, found 0"),
            ({0: (*BUCKETS[0], Bucket("more"))}, "expected 1 bucket without matrices, found 2"),
        ],
    )
    def test_buckets_that_do_not_hold_a_stage(
        self, change: dict[int, tuple[Bucket, ...]], said: str
    ) -> None:
        """What would never be reduced is named when the runtime is made."""
        with pytest.raises(BackendError, match=said):
            made(Replica(), {**BUCKETS, **change})

    def test_a_bucket_of_two_stages(self) -> None:
        """No gradient buffer of the runtime is of two stages."""
        first, second = BUCKETS
        shared = (*BUCKETS[second][:2], attrs.evolve(BUCKETS[second][2], name=f"{first}c"))

        with pytest.raises(BackendError, match=f"stages {first} and {second} share bucket"):
            made(Replica(), {**BUCKETS, second: shared})

    def test_nothing_reduces(self) -> None:
        """Buckets want a reducer, as does a call that starts one."""
        with pytest.raises(BackendError, match="there is no reducer: pass reducer="):
            made(None)
        with pytest.raises(BackendError, match="the runtime has no reducer; pass reducer="):
            made(None, {}).runtime.reduce(0)

    def test_a_bucket_that_there_is_not(self) -> None:
        """The buckets that there are are named."""
        with pytest.raises(BackendError, match="no bucket 'x' exists; expected one of"):
            made(Replica()).runtime.reduce("x")

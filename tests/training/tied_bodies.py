"""
A language model with one weight for embedding and head: guarded over ranks, and plain in one
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, StageBackend, parameters
from qeffect.gpu_runtime.backends.reference import ReferenceStage
from qeffect.gpu_runtime.lab.comparisons.ranks import compare_pipelines
from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Batches
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.ties import Reducers, Tie
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.step.clipping import Norm, square_sums
from qeffect.gpu_runtime.step.memory.digests import digests
from qeffect.gpu_runtime.step.plan.order import Kind, Order
from qeffect.gpu_runtime.step.reductions import Reductions
from qeffect.gpu_runtime.training.checkpoint import Checkpoints
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.gpu_runtime.training.state import PersistentTensors
from qeffect.refusals import Refused
from tests.ranks.bodies import LIMITS

CPU = torch.device("cpu")
SHARED = "embedding.weight"


class Plain:
    """
    The model in one process, natively, over one `torch.nn.Parameter` for embedding and head.

    Each rank's stages have a separate state domain and run in the order of the rank's row, so that
    the scales are those of the pipeline. Autograd would add the two uses of the shared weight in
    turn, for each microbatch. Here each use is summed first, and then both sums are added, the
    embedding's first.

    Args:
        job: What to train; its rule is `accumulate`.
    """

    def __init__(self, job: LanguageJob) -> None:
        self.job, table = job, job.table()
        self.orders = [Order.of_rank(table, rank) for rank in range(job.pp)]
        self.replicas = [self._stages() for _ in range(job.dp)]
        self.named = self._named(self.replicas[0])
        self.all_named = [self._named(stages) for stages in self.replicas]
        self.losses: list[float] = []
        self.norms: list[float] = []
        shrunk = [p for n, p in self.named.items() if p.dim() > 1 and "embedding" not in n]
        others = [p for p in self.named.values() if all(p is not one for one in shrunk)]
        groups = [{"params": shrunk}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, weight_decay=job.weight_decay, fused=True)

    def _stages(self) -> dict[int, ReferenceStage]:
        made: dict[int, ReferenceStage] = {}
        for order in self.orders:
            for stage in self.job.stages(order.stages, CPU, "reference"):
                assert isinstance(stage, ReferenceStage)
                made[stage.index] = stage
        first, last = made[0], made[self.job.num_stages - 1]
        assert first.embedding is not None
        assert last.head is not None
        weight, linear = first.embedding.weight, last.head.linear
        linear.register_parameter("weight", weight)
        linear.unit = attrs.evolve(
            linear.unit, matrices=(attrs.evolve(linear.unit.matrices[0], parameter=weight),)
        )
        last.units = (*last.units[:-1], linear.unit)
        return made

    def _named(self, stages: dict[int, ReferenceStage]) -> dict[str, torch.nn.Parameter]:
        return {
            self.job.name_of(index, name): parameter
            for index, stage in sorted(stages.items())
            for name, parameter in parameters(stage).items()
        }

    def step(self, step: int) -> None:
        """One optimizer step."""
        job = self.job
        shares: list[float] = []
        sums: dict[str, Tensor] = {}
        for replica, stages in enumerate(self.replicas):
            found, losses = self._gradients(stages, step, replica)
            shares += losses
            for name, gradient in found.items():
                sums[name] = sums[name] + gradient if name in sums else gradient
        sums[SHARED] = sums.pop("rows") + sums.pop("product")
        self.losses.append(sum(shares))
        by_stage: dict[int, dict[str, Tensor]] = {}
        for index, stage in sorted(self.replicas[0].items()):
            for local in parameters(stage):
                name = job.name_of(index, local)
                if name == SHARED and index != 0:
                    continue
                by_stage.setdefault(index, {})[local] = sums[name]
        parts = [float(part) for part in square_sums(by_stage).values()]
        norm = Norm.of(parts, job.clipping)
        self.norms.append(norm.total)
        for name, parameter in self.named.items():
            parameter.grad = sums[name]
            if norm.factor != 1.0:
                parameter.grad = (sums[name].float() * norm.factor).to(parameter.dtype)
        for group in self.adamw.param_groups:
            group["lr"] = job.rate.at(step)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            for other in self.all_named[1:]:
                for name, parameter in other.items():
                    parameter.copy_(self.named[name])

    def _gradients(
        self, stages: dict[int, ReferenceStage], step: int, replica: int
    ) -> tuple[dict[str, Tensor], list[float]]:
        """
        The losses of one replica, and its gradients by name; the shared weight has a gradient for
        each use.
        """
        job, draw = self.job, self.job.batch(CPU, replica)
        last = job.num_stages - 1
        ins: dict[tuple[int, int], Tensor] = {}
        outs: dict[tuple[int, int], Tensor] = {}
        back: dict[tuple[int, int], Tensor] = {}
        kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        sums: dict[int, dict[str, Tensor]] = {n: {} for n in stages}
        opened: set[int] = set()
        losses: dict[int, float] = {}

        def forward(n: int, m: int) -> bool:
            tokens, target = draw(step, m)
            if n and (n - 1, m) not in outs:
                return False
            given = tokens if n == 0 else outs[n - 1, m].detach().clone().requires_grad_()
            ins[n, m] = given
            further = (target,) if n == last else ()
            (outs[n, m],) = stages[n].native_forward((given, *further), first=n not in opened)
            opened.add(n)
            if n == last:
                losses[m] = float(outs[n, m].detach())
            return True

        def dgrad(n: int, m: int) -> bool:
            if n != last and (n, m) not in back:
                return False
            stage = stages[n]
            kept[n, m] = {u.name: torch.full(u.shape, -0.0) for u in stage.units}
            stage.native_bind(kept[n, m])
            gradient = torch.ones(()) if n == last else back[n, m]
            torch.autograd.backward(outs[n, m], gradient)
            if n:
                wanted = ins[n, m].grad
                assert wanted is not None
                back[n - 1, m] = wanted
            return True

        def wgrad(n: int, m: int) -> bool:
            for name, value in kept.pop((n, m)).items():
                held = sums[n].setdefault(name, torch.full(value.shape, -0.0, dtype=torch.bfloat16))
                held.copy_(torch.add(held, value))
            return True

        acts = {Kind.FORWARD: forward, Kind.DGRAD: dgrad, Kind.WGRAD: wgrad}
        waiting = [list(order.steps) for order in self.orders]
        while any(waiting):
            ran = 0
            for row in waiting:
                while row and acts[row[0].kind](row[0].stage, row[0].microbatch):
                    row.pop(0)
                    ran += 1
            assert ran, "deadlock: the ranks' rows wait for each other"

        found: dict[str, Tensor] = {}
        for n, stage in stages.items():
            for unit in stage.units:
                for matrix, rows in unit.rows(sums[n][unit.name]):
                    name = job.name_of(n, matrix.name)
                    found["product" if name == SHARED else name] = rows
            for other in stage.non_matrix:
                grad = other.parameter.grad
                assert grad is not None
                name = job.name_of(n, other.name)
                found["rows" if name == SHARED else name] = grad
                other.parameter.grad = None
        return found, [losses[m] for m in sorted(losses)]

    def bits(self) -> dict[str, str]:
        """Digests of the parameters and of AdamW's state, by the names of a checkpoint."""
        held = {f"model.{name}": p.detach() for name, p in self.named.items()}
        for name, parameter in self.named.items():
            for kind, value in self.adamw.state[parameter].items():
                held[f"optim.{name}.{kind}"] = value
        return dict(zip(held, digests(list(held.values())), strict=True))


def bits(worker: Worker, job: LanguageJob) -> dict[str, str]:
    """The same digests of a rank; two copies of one tensor on the rank must be equal."""
    place = worker.member.rank % worker.pp
    held = PersistentTensors.of(
        worker.runtime, worker.optimizer, job.name_of, worker.replica, place
    )
    held.require_alike()
    wanted = {n: t for n, t in held.tensors.items() if n.startswith(("model.", "optim."))}
    return dict(zip(wanted, digests(list(wanted.values())), strict=True))


def trained(worker: Worker, job: LanguageJob, steps: Sequence[int]) -> dict[str, Any]:
    """Losses and norms of some steps, and the rank's final state."""
    norms = []
    for step in steps:
        job.prepare(step, worker.optimizer)
        worker.step()
        norms.append(None if worker.norm is None else worker.norm.total)
    feed = worker.feed
    assert isinstance(feed, Batches)
    losses = [feed.losses_of(step) for step in steps]
    return {"losses": losses, "norms": norms, "bits": bits(worker, job)}


def against_plain(jobs: list[LanguageJob], steps: int) -> list[dict[str, Any]]:
    """Train each job guarded on its ranks, and also the plain model on rank 0."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        worker = build_worker(member, job, "reference", limits=LIMITS)
        words = trained(worker, job, range(steps))
        contract = worker.runtime.contract
        words["tied"] = {own.stage: [own.tied, dict(own.buffers)] for own in contract.stages}
        worker.close()
        if member.rank == 0:
            plain = Plain(job)
            for step in range(steps):
                plain.step(step)
            words["plain"] = {
                "losses": plain.losses,
                "norms": plain.norms,
                "bits": plain.bits(),
            }
        said.append(words)
    return said


def against_torch(jobs: list[LanguageJob], steps: int) -> list[dict[str, Any]]:
    """Compare each job with torch's own pipeline over native full backwards."""
    member = join("cpu", LIMITS)
    results = [compare_pipelines(member, job, steps, limits=LIMITS) for job in jobs]
    return [{"totals": one.totals(), "same": one.same} for one in results]


def without_the_sum(job: LanguageJob) -> dict[str, Any]:
    """
    The outcome of training if the copies' gradients are not added, or if the sum is not reported.
    """
    member = join("cpu", LIMITS)
    whole = Reducers.__call__
    Reducers.__call__ = lambda self, bucket, given: (  # type: ignore[method-assign]
        None if bucket in self.pairs else whole(self, bucket, given)
    )
    worker = build_worker(member, job, "reference", limits=LIMITS)
    words: dict[str, Any] = {"drifted": ""}
    try:
        words.update(trained(worker, job, range(2)))
    except BackendError as error:
        words["drifted"] = str(error)
    worker.close()
    Reducers.__call__ = whole  # type: ignore[method-assign]
    end = Reductions.end

    def without_copies(self: Reductions, *given: Any) -> None:
        held, self.copies = self.copies, {}
        end(self, *given)
        self.copies = held

    Reductions.end = without_copies  # type: ignore[method-assign]
    worker = build_worker(member, job, "reference", limits=LIMITS)
    try:
        worker.step()
    except StoppedError as stopped:
        words["clause"] = stopped.cause.clause
    worker.close()
    Reductions.end = end  # type: ignore[method-assign]
    return words


@attrs.frozen(kw_only=True)
class Said(LanguageJob):
    """A model whose ranks may have different tie configurations."""

    said: tuple[Tie, ...] = ()

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The ties that this rank is configured with."""
        return self.said


@attrs.frozen(kw_only=True)
class Apart(LanguageJob):
    """A model whose copies begin with different values."""

    def stages(self, *given: Any, **options: Any) -> list[StageBackend]:
        """The stages, with another head."""
        made = super().stages(*given, **options)
        with torch.no_grad():
            for stage in made:
                if "head.weight" in parameters(stage):
                    parameters(stage)["head.weight"].add_(1.0)
        return made


def undeclared(cases: list[list[LanguageJob]]) -> list[list[str]]:
    """The clause or message with which this rank refuses its job in each case."""
    member = join("cpu", LIMITS)
    said = []
    for jobs in cases:
        try:
            build_worker(member, jobs[member.rank], "reference", limits=LIMITS)
        except (Refused, BackendError) as error:
            said.append([getattr(error, "clause", ""), str(error)])
    return said


def kept(jobs: list[LanguageJob], folder: str) -> list[dict[str, Any]]:
    """
    The first job trains two steps, is saved and takes a third step; every later job loads the
    checkpoint and takes the third step.

    A job that cannot load the checkpoint returns the error message.
    """
    member = join("cpu", LIMITS)
    said: list[dict[str, Any]] = []
    for n, job in enumerate(jobs):
        if member.world < job.world:
            continue
        worker = build_worker(member, job, "reference", limits=LIMITS)
        checkpoints, must = Checkpoints(folder), {"layers": sum(job.cut), "tied": job.tied}
        words: dict[str, Any] = {"error": ""}
        try:
            if n == 0:
                before = trained(worker, job, range(2))
                checkpoints.save(worker, job.name_of, must, {})
                words["held"] = before["bits"]
            else:
                path = checkpoints.latest()
                assert path is not None
                checkpoints.load(path, worker, job.name_of, must)
                words["held"] = bits(worker, job)
            words.update(trained(worker, job, range(2, 3)))
        except BackendError as error:
            words["error"] = str(error)
        checkpoints.close()
        worker.close()
        said.append(words)
    return said


def stumbling(job: LanguageJob) -> dict[str, Any]:
    """
    Run a step whose sum of copies fails once on one rank; the step runs again, with the same bits.
    """
    member = join("cpu", LIMITS)
    found = []
    for fails in (False, True):
        worker = build_worker(member, job, "reference", limits=LIMITS)
        held = worker.runtime.reducer
        assert isinstance(held, Reducers)
        if fails and member.rank == 1:

            def fail(bucket: int | str, given: Any, held: Reducers = held) -> Any:
                if bucket in held.pairs:
                    raise ArithmeticError("an injected failure")
                return held(bucket, given)

            worker.runtime.reducer = fail
        stops = 0
        job.prepare(0, worker.optimizer)
        try:
            worker.step()
        except StoppedError as stopped:
            stops += 1
            worker.rebuild(stopped)
            worker.step()
        found.append([stops, bits(worker, job)])
        worker.close()
    return {"stops": [stops for stops, _ in found], "same": found[0][1] == found[1][1]}

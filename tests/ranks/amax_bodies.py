"""What the ranks run in the tests of shared scaling state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import all_gather, join
from qeffect.gpu_runtime.ranks.pipeline import Entry, Pipeline
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.step.memory.numerical_state import live_state
from qeffect.gpu_runtime.step.optimizer import Gradients
from qeffect.schedule.actions import Kind
from tests.ranks.bodies import LIMITS, bits, once_more


class _Noting(Pipeline):
    """A pipeline that keeps the scaling state after its last F and dI."""

    left: dict[str, Tensor]

    def finalize(self) -> Gradients:
        self.left = _copied(self)
        return super().finalize()


def _copied(pipeline: Pipeline) -> dict[str, Tensor]:
    live = live_state(pipeline.runtime.domain)
    return {name: tensor.detach().clone() for name, tensor in live.items()}


def shared(job: Job, steps: int) -> list[dict[str, Any]]:
    """
    Run steps of a job; report after each step, by name, which scaling state differs between
    replicas, from the state combined by hand, and from the rank's own state.
    """
    worker = build_worker(join("cpu", LIMITS), job, "reference", limits=LIMITS, pipeline=_Noting)
    pipeline, member = worker.pipeline, worker.member
    assert isinstance(pipeline, _Noting)
    said = []
    for _ in range(steps):
        worker.step()
        now = _copied(pipeline)
        place = member.rank % job.pp
        every = [
            word[1:] for word in all_gather(member, (place, pipeline.left, now)) if word[0] == place
        ]
        by_hand = {}
        for name in now:
            each = torch.stack([left[name] for left, _ in every])
            by_hand[name] = each.amin(0) if name.endswith("scale") else each.amax(0)
        said.append(
            {
                "of": len(now),
                "replicas differ": _unlike(every[0][1], every[-1][1]),
                "replicas saw otherwise": _unlike(every[0][0], every[-1][0]),
                "by hand": _unlike(by_hand, now),
                "own": _unlike(pipeline.left, now),
            }
        )
    worker.close()
    return said


def _unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [n for n in one if not torch.equal(one[n].view(torch.int32), other[n].view(torch.int32))]


def _missing(worker: Worker) -> None:
    worker.runtime._reductions.scaling = None


def _early(worker: Worker) -> None:
    """Act after the reduction of the first stage, before the last stage is complete."""
    runtime, entries = worker.runtime, worker.pipeline.program
    at = next(n for n, entry in enumerate(entries) if entry.atom.kind is Kind.REDUCE_GRAD)

    def begin(_: Any) -> None:
        reducer = runtime.reducer
        assert reducer is not None
        runtime._reductions.start(reducer, "amax", runtime.actions.links["main"])

    entries.insert(at, Entry(begin, entries[at].passage, entries[at].atom))


FAULTS: dict[str, Callable[[Worker], None]] = {"missing": _missing, "early": _early}


def refused(job: Job, victim: int, fault: str) -> dict[str, Any]:
    """Let one rank share its scaling state wrongly; then run the step again."""
    worker = build_worker(join("cpu", LIMITS), job, "reference", limits=LIMITS)
    worker.step()
    program, scaling = list(worker.pipeline.program), worker.runtime._reductions.scaling
    if worker.member.rank == victim:
        FAULTS[fault](worker)

    def mend() -> None:
        worker.pipeline.program[:] = program
        worker.runtime._reductions.scaling = scaling

    said = once_more(worker, mend)
    said.update(epoch=worker.runtime.epoch, bits=bits(worker))
    worker.close()
    return said


def plain(job: Job, steps: int) -> dict[str, str]:
    """The state after steps without a fault."""
    worker = build_worker(join("cpu", LIMITS), job, "reference", limits=LIMITS)
    for _ in range(steps):
        worker.step()
    left = bits(worker)
    worker.close()
    return left


def unlike(job: Job) -> str:
    """Ranks with different configurations."""
    member = join("cpu", LIMITS)
    own = attrs.evolve(job, amax="replicas" if member.rank else "replica")
    try:
        build_worker(member, own, "reference", limits=LIMITS)
    except BackendError as error:
        return str(error)
    return ""

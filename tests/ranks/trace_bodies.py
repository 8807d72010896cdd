"""What the ranks run in the tests of traces."""

from __future__ import annotations

from typing import Any

from qeffect.gpu_runtime.ranks.consent import action_name
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.trace import Tracer, chrome_trace
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from tests.ranks.bodies import LIMITS, bits


def traced(job: Job) -> dict[str, Any]:
    """Run three steps of which the second is traced, and three steps without a trace."""
    member = join("cpu", LIMITS)
    found = []
    words: dict[str, Any] = {}
    for traces in (True, False):
        worker = build_worker(member, job, "reference", limits=LIMITS)
        worker.step()
        if traces:
            tracer = Tracer(worker)
            with tracer.tracing():
                worker.step()
            words["trace"] = chrome_trace(member, tracer, worker.table)
            words["row"] = [action_name(e.atom) for e in worker.pipeline.program]
        else:
            worker.step()
        worker.step()
        found.append(bits(worker))
        worker.close()
    return {**words, "differ": [n for n in found[0] if found[0][n] != found[1][n]]}

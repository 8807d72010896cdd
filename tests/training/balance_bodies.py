"""What the ranks run in the tests of a model that is cut by measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.step.eager import EagerExecutor
from qeffect.gpu_runtime.training import balance
from qeffect.gpu_runtime.training.balance import Times, measure_times
from qeffect.gpu_runtime.training.config_file import read
from qeffect.gpu_runtime.training.job_assembly import measure_cut, open_job
from qeffect.gpu_runtime.training.loop import Trainer
from tests.ranks.bodies import LIMITS

from .helpers import language


def products(path: str) -> dict[str, Any]:
    """
    Time a product of 1, 2 and 4 microbatches; return the slots (sets of buffers) of each product,
    and whether the product adds to its destination.
    """
    member = join("cpu", LIMITS)
    job = language(
        Path(path), schedule="zbv", pp=2, microbatches=4, scales="epoch", rule="accumulate"
    )
    calls: dict[int, set[tuple[int, bool]]] = {}
    wgrad = EagerExecutor.wgrad

    def seen(self: Any, memory: Any, slot: Any, variant: Any, others: Any = ()) -> Any:
        group = max(map(len, memory.groups))
        calls.setdefault(group, set()).add((1 + len(others), variant.accumulate))
        return wgrad(self, memory, slot, variant, others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerExecutor, "wgrad", seen)
        found = measure_times(
            job, member.device, "reference", mode="eager", repeats=1, groups=(2, 4)
        )
    assert found.products.keys() == {2, 4}
    return {
        "calls": {group: sorted(each) for group, each in calls.items()},
        "layer": [*found.layer, *(times[1] for times in found.products.values())],
    }


def measuring(path: str) -> dict[str, Any]:
    """Measure and train; then train with the measured times, without another measurement."""
    member = join("cpu", LIMITS)
    config = read(Path(path))
    trainer = Trainer(member, config)
    trainer.run()
    record = trainer.config.record()["parallel"]
    cut, losses = trainer.job.cut, trainer.losses
    trainer.close()

    def refused(*_: Any, **__: Any) -> Times:
        raise AssertionError("expected the given times to be used, found a new measurement")

    balance.measure_times = refused
    try:
        own = {name: record[name] for name in ("embedding_time", "layer_times", "head_time")}
        again = Trainer(member, read(Path(path), parallel=own, run={"log": ""}))
        again.run()
        same = (again.job.cut, again.losses) == (cut, losses)
        again.close()
    finally:
        balance.measure_times = measure_times
    return {"cut": cut, "again": same, "record": record}


def unlike(path: str) -> dict[str, Any]:
    """Run ranks whose devices take different times, and a rank that cannot measure."""
    member = join("cpu", LIMITS)
    config = read(Path(path))
    times = [
        Times((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (5.0, 1.0, 1.0)),
        Times((0.5, 0.0, 0.5), (1.0, 0.5, 0.5), (1.0, 4.0, 1.0)),
    ][member.rank]
    balance.measure_times = lambda *_, **__: times  # type: ignore[assignment]
    done, data = measure_cut(member, config, open_job(config))

    def fails(*_: Any, **__: Any) -> Times:
        if member.rank == 1:
            raise RuntimeError("out of memory")
        return times

    balance.measure_times = fails
    problem = ""
    try:
        measure_cut(member, config, open_job(config))
    except RuntimeError as error:
        problem = str(error)
    balance.measure_times = measure_times
    return {"cut": data.job.cut, "record": done.record()["parallel"], "problem": problem}


def going_on(path: str) -> dict[str, Any]:
    """
    A resumed run uses the times that were measured first, even if the device now takes other times.
    """
    member = join("cpu", LIMITS)
    config = read(Path(path))
    alike = Times((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
    balance.measure_times = lambda *_, **__: alike  # type: ignore[assignment]
    first = Trainer(member, config)
    first.run()
    first.close()
    slow = Times((900.0, 0.0, 0.0), (0.1, 0.1, 0.1), (0.1, 0.1, 0.1))
    balance.measure_times = lambda *_, **__: slow  # type: ignore[assignment]
    longer = read(Path(path), run={"steps": 4})
    second = Trainer(member, longer, resume=True)
    second.run()
    began, cut, times = second.began, second.job.cut, second.config.parallel.layer_times
    second.close()
    fresh, data = measure_cut(member, longer, open_job(longer))
    balance.measure_times = measure_times
    return {
        "began": began,
        "cuts": [first.job.cut, cut, data.job.cut],
        "times": [first.config.parallel.layer_times, times, fresh.parallel.layer_times],
    }

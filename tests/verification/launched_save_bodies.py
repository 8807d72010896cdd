"""What the ranks run in the tests of checkpoints between launches."""

from __future__ import annotations

from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.training.checkpoint import Checkpoints
from tests.ranks import recorded, recorded_bodies
from tests.ranks.bodies import bits
from tests.training.bodies import by_layer, facts_of


def saving(
    job: Job, folder: str, steps: int, saves: list[int], fault: int = -1, resume: bool = False
) -> dict[str, str]:
    """
    Run launches with asynchronous saves among them; each save ends while later steps are launched.

    Args:
        job: What to train.
        folder: The folder of the checkpoints.
        steps: The epoch at which the run ends.
        saves: The epochs to save.
        fault: The epoch before which the device of rank 0 counts wrongly, or -1.
        resume: Whether to load the newest checkpoint first.

    Returns:
        The digests of the final weights.
    """
    recorded.install()
    worker = recorded_bodies._made(job, {})
    checkpoints = Checkpoints(folder, asynchronous=True)
    if resume:
        path = checkpoints.latest()
        assert path is not None
        checkpoints.load(path, worker, by_layer(job.layers), facts_of(job))
    runner, due = OneLaunch(worker), set(saves)
    while worker.runtime.epoch < steps:
        epoch = worker.runtime.epoch
        if epoch == fault and worker.member.rank == 0:
            recorded_bodies.FAULTS["miscounted"](worker, "")
            fault = -1
        try:
            runner.step()
            after = epoch + 1
            if after in due or after == steps:
                runner.leave()
        except StoppedError as stopped:
            recorded.STREAM.synchronize()
            runner.rebuild(stopped)
            continue
        if after in due:
            due.remove(after)
            checkpoints.save(worker, by_layer(job.layers), facts_of(job), {})
            if after < steps:
                runner.resume()
    checkpoints.close()
    left = bits(worker)
    runner.close()
    worker.close()
    return left

"""What the ranks run in the tests of checkpoints and resumed training."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.lab.comparisons.native import rule_for
from qeffect.gpu_runtime.lab.sides import restart as restarts
from qeffect.gpu_runtime.lab.sides.restart import (
    Trial,
    build_trial,
    facts_of,
    persistent_digests,
)
from qeffect.gpu_runtime.lab.sides.torch_pipeline import NativePipeline
from qeffect.gpu_runtime.ranks.channels import Message
from qeffect.gpu_runtime.ranks.consent import Cause, StoppedError, action_name
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import Limits, join
from qeffect.gpu_runtime.ranks.pipeline import Passage
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.step.memory.digests import digests
from qeffect.gpu_runtime.step.memory.numerical_state import live_state
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.gpu_runtime.training.checkpoint import Checkpoints, EarlierSaveError
from qeffect.gpu_runtime.training.checkpoint.files import FACTS, MANIFEST, Writer, canonical
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.gpu_runtime.training.state import PersistentTensors, by_layer
from qeffect.refusals import Refused

LIMITS = Limits(start=60.0, message=20.0, commit=20.0, grace=2.0)


def trial(job: Job, **options: Any) -> Trial:
    """A job on the CPU."""
    return Trial(**{"job": job, "limits": LIMITS, **options})


def started(job: Job, folder: str, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Train a run from the beginning."""
    return restarts.first_run(join("cpu", LIMITS), trial(job, **how), folder, **options)


def gone_on(job: Job, folder: str, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Train a run from the latest checkpoint."""
    return restarts.resumed_run(join("cpu", LIMITS), trial(job, **how), folder, **options)


def remapped(job: Job, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """
    Run a step from the latest checkpoint, and the same step from a state that was set up by hand.
    """
    return restarts.remapped_run(join("cpu", LIMITS), trial(job), folder, **options)


class Run:
    """A worker with its checkpoints."""

    def __init__(self, job: Job, folder: str, *, limits: Limits = LIMITS, **options: Any) -> None:
        self.job = job
        self.worker: Worker = build_trial(join("cpu", LIMITS), trial(job, limits=limits))
        self.checkpoints = Checkpoints(folder, **options)
        self.naming = by_layer(job.layers)
        self.rank = self.worker.member.rank

    def save(self, **free: Any) -> Path:
        """Save; every rank calls this method."""
        return self.checkpoints.save(self.worker, self.naming, facts_of(self.job), free)

    def load(self, path: Path, **changes: Any) -> dict[str, Any]:
        """
        Load; every rank calls this method. `changes` are made to the facts that must be equal.
        """
        must = {**facts_of(self.job), **changes}
        return self.checkpoints.load(path, self.worker, self.naming, must)

    def bits(self) -> dict[str, str]:
        """Every persistent tensor's digest."""
        return persistent_digests(self.worker, self.job)

    def attempt(self, act: Callable[[], Any]) -> dict[str, Any]:
        """The error that an action raises, and whether any tensor changed."""
        before, epoch = self.bits(), self.worker.runtime.epoch
        said: dict[str, Any] = {"error": None, "cause": None}
        try:
            act()
        except StoppedError as stopped:
            said["cause"] = attrs.asdict(stopped.cause)
        except BackendError as error:
            said["error"] = str(error)
        after = self.bits()
        said["moved"] = [name for name in before if before[name] != after[name]]
        said["epoch"] = self.worker.runtime.epoch - epoch
        return said


# Bad checkpoints


def _sealed(path: Path, facts: Callable[[Any], Any], held: Callable[[Any], Any]) -> None:
    """Edit facts and manifest, and hash both again, so that only their contents are wrong."""
    told = json.loads((path / FACTS).read_text())
    facts(told)
    (path / FACTS).write_bytes(canonical(told))
    manifest = json.loads((path / MANIFEST).read_text())
    content = (path / FACTS).read_bytes()
    manifest["files"][FACTS] = [len(content), hashlib.sha256(content).hexdigest()]
    del manifest["sha256"]
    held(manifest)
    manifest["sha256"] = hashlib.sha256(canonical(manifest)).hexdigest()
    (path / MANIFEST).write_bytes(canonical(manifest))


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _as_it_is(_: Any) -> None:
    pass


def _fact(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: _sealed(path, edit, _as_it_is)


def _foreign(path: Path) -> None:
    """Write an index that DCP can read but that contains no tensors; its hash is right."""
    content = pickle.dumps(Metadata({}, None, {}))
    (path / ".metadata").write_bytes(content)
    mark = [len(content), hashlib.sha256(content).hexdigest()]
    _sealed(path, _as_it_is, lambda held: held["files"].update({".metadata": mark}))


_WEIGHT = "model.layers.2.qkv.weight"

#: What is done to a checkpoint, by name.
DAMAGE: dict[str, Callable[[Path], None]] = {
    "a file is cut": lambda path: _cut(path / "__1_0.distcp"),
    "a bit of a file is flipped": lambda path: _flip(path / "__1_0.distcp"),
    "a file is missing": lambda path: (path / "__0_0.distcp").unlink(),
    "a bit of DCP's index is flipped": lambda path: _flip(path / ".metadata"),
    "DCP's index is missing": lambda path: (path / ".metadata").unlink(),
    "a bit of the facts is flipped": lambda path: _flip(path / FACTS),
    "the manifest is cut": lambda path: _cut(path / MANIFEST),
    "the manifest is no end of brackets": lambda path: (path / MANIFEST).write_text("[" * 10**5),
    "the manifest is edited": lambda path: (path / MANIFEST).write_text(
        (path / MANIFEST).read_text().replace('"epoch":1', '"epoch":2')
    ),
    "the manifest is missing": lambda path: (path / MANIFEST).unlink(),
    "nothing is there": lambda path: shutil.rmtree(path),
    "another format": lambda path: _sealed(path, _as_it_is, lambda held: held.update(format=2)),
    "another backend": _fact(lambda facts: facts["must"].update(backend="transformer-engine")),
    "another recipe": _fact(lambda facts: facts["must"]["recipe"].update(amax_history_len=1024)),
    "amax reduced over replicas": _fact(lambda facts: facts["must"].update(amax="maximum of all")),
    "master weights": _fact(lambda facts: facts["must"].update(masters="torch.float32")),
    "another model": _fact(lambda facts: facts["must"]["given"].update(hidden=64)),
    "more microbatches": _fact(lambda facts: facts["must"]["given"].update(microbatches=8)),
    "a fact too few": _fact(lambda facts: facts["must"]["given"].pop("sequence")),
    "two replicas": _fact(
        lambda facts: facts.update(
            mapping={**facts["mapping"], "replicas": 2}, contracts=facts["contracts"] * 2
        )
    ),
    "a contract too few": _fact(lambda facts: facts["contracts"].pop()),
    "no epoch": _fact(lambda facts: facts.pop("epoch")),
    "an epoch below zero": _fact(lambda facts: facts.update(epoch=-1)),
    "an epoch that is text": _fact(lambda facts: facts.update(epoch="1")),
    "a mapping without its replicas": _fact(lambda facts: facts["mapping"].pop("replicas")),
    "a tensor without a size": _fact(lambda facts: facts["tensors"].update({_WEIGHT: "bf16"})),
    "DCP's index is of something else": lambda path: _foreign(path),
    "a tensor of another size": _fact(
        lambda facts: facts["tensors"].update({_WEIGHT: ["torch.bfloat16", [8, 8]]})
    ),
    "a tensor of another type": _fact(
        lambda facts: facts["tensors"][_WEIGHT].__setitem__(0, "torch.float32")
    ),
    "a tensor too few": _fact(lambda facts: facts["tensors"].pop(_WEIGHT)),
    "a tensor too many": _fact(
        lambda facts: facts["tensors"].update({"model.layers.9.x": ["torch.bfloat16", [1]]})
    ),
}


def damaged(job: Job, folder: str) -> dict[str, Any]:
    """
    Load a checkpoint with every kind of damage in turn on every rank; then load the undamaged
    checkpoint.
    """
    run = Run(job, folder)
    run.worker.step()
    sound = run.save(position=1)
    saved = run.bits()
    run.worker.step()
    said: dict[str, Any] = {}
    for name, damage in DAMAGE.items():
        bad = Path(folder) / "bad" / sound.name
        if run.rank == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(sound, bad)
            damage(bad)
        dist.barrier()
        said[name] = run.attempt(lambda bad=bad: run.load(bad))
        try:
            newest = Checkpoints(bad.parent).latest()
            said[name]["latest"] = newest is not None and newest.name
        except BackendError as error:
            said[name]["latest"] = str(error)
        dist.barrier()
    if run.rank == 0:
        shutil.rmtree(bad, ignore_errors=True)
    dist.barrier()
    other = sound if run.rank == 0 else Path(folder) / "other" / sound.name
    if run.rank == 0:
        shutil.copytree(sound, Path(folder) / "other" / sound.name)
    dist.barrier()
    said["ranks load different ones"] = run.attempt(lambda: run.load(other))
    free = run.load(sound)
    said["sound"] = {"free": free, "same": run.bits() == saved, "epoch": run.worker.runtime.epoch}
    run.worker.step()
    return said


# Saves that are refused


def refused(job: Job, folder: str) -> dict[str, Any]:
    """
    Save in the middle of each operation that a save must not interrupt, and after the operation.
    """
    run = Run(job, folder)
    worker, said = run.worker, {}
    worker.step()
    run.save()  # so that connections of saves are there, which a stop may leave on some ranks alone

    def inside(action: str, rank: int) -> dict[str, Any]:
        """One rank saves after an action, in a step of all ranks."""
        program = list(worker.pipeline.program)
        if run.rank == rank:
            place = next(n for n, e in enumerate(program) if action_name(e.atom) == action)
            entry = program[place]

            def act(passage: Passage) -> None:
                entry.act(passage)
                run.save()

            worker.pipeline.program[place] = entry._replace(act=act)
        found = run.attempt(worker.step)
        worker.pipeline.program[:] = program
        return found

    def again(name: str, found: dict[str, Any]) -> None:
        # Numerical state is of what ran, until the rebuild.
        found["moved"] = [name for name in found["moved"] if not name.startswith("fp8.")]
        said[name] = {**found, "files": sorted(p.name for p in Path(folder).glob("*"))}
        worker.rebuild(StoppedError(Cause(**found["cause"])))
        dist.barrier()

    again("live tape", inside("3I1", 0))

    def walked() -> None:
        worker.pipeline.run_actions()
        run.save()

    again("mid-epoch", run.attempt(walked))

    def spoiled() -> None:
        if run.rank == 0:
            runtime, executor = worker.runtime, worker.runtime.executor
            stage = runtime.stages[0]

            def fail(*_: Any) -> None:
                raise ArithmeticError("an injected failure")

            runtime.actions.refresh(0)
            executor.forward = fail  # type: ignore[method-assign,assignment]
            key = runtime.key(0, 0)
            with suppress(ArithmeticError):
                runtime.actions.forward(key, worker.feed.inputs(stage, key.epoch, 0))
            del executor.forward
        run.save()

    again("spoiled", run.attempt(spoiled))

    def sending() -> None:
        if run.rank == 0:
            worker.pipeline.channels.send(torch.zeros(4), 1, Message(0, 0, False))
        run.save()

    again("message away", run.attempt(sending))
    worker.step()
    said["after"] = {"epoch": worker.runtime.epoch, "saved": run.save().name}
    said["at once again"] = run.attempt(run.save)
    said["no JSON"] = run.attempt(lambda: run.save(rate=torch.ones(())))
    return said


def full(job: Job, folder: str, asynchronous: bool) -> dict[str, Any]:
    """Limit the files of one rank to a few thousand bytes; then remove the limit."""
    run = Run(job, folder, asynchronous=asynchronous)
    if run.worker.rank_log is not None:
        run.worker.rank_log.close()  # it could not be written either
    run.worker.step()
    first = run.save()
    run.checkpoints.wait()
    run.worker.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said: dict[str, Any] = {}
    for rank in (1, 0):
        if run.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

        def act() -> None:
            run.save()
            run.checkpoints.wait()

        said[str(rank)] = run.attempt(act)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        dist.barrier()
        said[str(rank)]["latest"] = run.checkpoints.latest() == first
        said[str(rank)]["left"] = sorted(p.name for p in Path(folder).glob(".*"))
    path = run.save()
    run.checkpoints.wait()
    said["then"] = run.checkpoints.latest() == path
    said["files"] = sorted(p.name for p in Path(folder).iterdir())
    run.worker.step()
    return said


def lost_before(job: Job, folder: str) -> dict[str, Any]:
    """Start an asynchronous save that fails, without waiting for it; then save again."""
    run = Run(job, folder, asynchronous=True)
    run.worker.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    run.save()
    assert run.checkpoints._under_way is not None
    run.checkpoints._under_way[1].exception()  # it has ended, and nobody was told how
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.worker.step()
    said: dict[str, Any] = {"told": None}
    try:
        run.save()
    except EarlierSaveError as error:
        said["told"] = str(error)
    run.checkpoints.wait()
    dist.barrier()
    newest = run.checkpoints.latest()
    return {**said, "latest": newest is not None and newest.name}


def untidy(job: Job, folder: str) -> dict[str, Any]:
    """
    Save twice and keep one checkpoint, among files with similar names, of which one cannot be
    removed.
    """
    run = Run(job, folder, keep=1)
    if run.rank == 0:
        for name in ("step-7", "step-\u00b2", ".partial-mine", ".removed-step-1", "step-00000000"):
            (Path(folder) / name).mkdir(parents=True)
            (Path(folder) / name / "notes").write_text("not of ours")
        (Path(folder) / ".partial-step-00000009").mkdir()
        (Path(folder) / "step-00000008").write_text("a file")
    dist.barrier()
    run.worker.step()
    run.save()
    run.worker.step()
    if run.rank == 0:  # what is older cannot lose its name
        (Path(folder) / ".removed-step-00000001").write_text("in the way")
    second = run.attempt(run.save)
    return {
        "error": second["error"],
        "untidy": run.checkpoints.untidy,
        "names": sorted(path.name for path in Path(folder).iterdir()),
    }


def drifted(job: Job, folder: str) -> dict[str, Any]:
    """Change a weight of the second replica."""
    run = Run(job, folder)
    run.worker.step()
    if run.worker.replica == 1:
        with torch.no_grad():
            for stage in run.worker.runtime.stages.values():
                next(iter(parameters(stage).values()))[0, 0] += 1.0
    said = run.attempt(run.save)
    said["files"] = sorted(p.name for p in Path(folder).glob("step-*"))
    return said


def kept(job: Job, folder: str) -> dict[str, Any]:
    """
    Save four times and keep two checkpoints; then load the older checkpoint and try to save before
    the newest.
    """
    run = Run(job, folder, keep=2)
    for _ in range(4):
        run.worker.step()
        run.save()
    said = {"names": sorted(p.name for p in Path(folder).iterdir())}
    dist.barrier()
    run.load(run.checkpoints.folder / "step-00000003")
    said["behind"] = run.attempt(run.save)["error"]
    return said


def behind_the_next_step(job: Job, folder: str, copied: bool) -> dict[str, Any]:
    """
    Start an asynchronous save that writes only after the next step has run.

    Args:
        job: What to train.
        folder: The folder of the checkpoints.
        copied: Whether the save copies tensors first; without a copy, the files contain values of
            the later step.
    """
    run = Run(job, folder, asynchronous=True)
    stepped = threading.Event()
    written = Writer.write_data

    def late(self: Any, plan: Any, planner: Any) -> Any:
        stepped.wait(30.0)
        return written(self, plan, planner)

    Writer.write_data = late  # type: ignore[method-assign]
    if not copied:
        Writer.stage = lambda self, held: dict(held)  # type: ignore[method-assign,assignment]
    run.worker.step()
    at = run.bits()
    path = run.save()
    there = path.exists()
    run.worker.step()
    moved = run.bits()
    stepped.set()
    run.checkpoints.wait()
    run.load(path)
    return {
        "named before": there,
        "moved": at != moved,
        "loaded": "saved" if run.bits() == at else "moved" if run.bits() == moved else "neither",
    }


def stopped_under_way(job: Job, folder: str) -> dict[str, Any]:
    """Stop a step and run it again while an asynchronous save of the previous step is written."""
    run = Run(job, folder, asynchronous=True)
    worker = run.worker
    rebuilt = threading.Event()
    written = Writer.write_data

    def late(self: Any, plan: Any, planner: Any) -> Any:
        rebuilt.wait(30.0)
        return written(self, plan, planner)

    Writer.write_data = late  # type: ignore[method-assign]
    worker.step()
    at = run.bits()
    path = run.save()
    program = list(worker.pipeline.program)
    if run.rank == 1:
        place = next(n for n, e in enumerate(program) if action_name(e.atom) == "1W1")
        entry = program[place]

        def act(passage: Passage) -> None:
            run.save()

        worker.pipeline.program[place] = entry._replace(act=act)
    found = run.attempt(worker.step)
    worker.pipeline.program[:] = program
    worker.rebuild(StoppedError(Cause(**found["cause"])))
    rebuilt.set()
    worker.step()
    second = run.save()
    run.checkpoints.wait()
    run.load(path)
    same = run.bits() == at
    return {"same": same, "second": second.name, "there": second.exists()}


def carried(job: Job, folder: str) -> dict[str, Any]:
    """
    Save, or load the checkpoint of other processes; return the state of the generators and of the
    caller's tensors.
    """
    run = Run(job, folder)
    torch.manual_seed(7 + run.rank)
    counts = torch.full((3,), 2.0 + run.worker.replica)
    mine = {f"counts.{run.rank}": counts, "shared": torch.arange(4)}
    arguments = run.worker, run.naming, facts_of(job)
    path = run.checkpoints.latest()
    if path is None:
        run.worker.step()
        torch.rand(5)
        run.checkpoints.save(*arguments, {"rate": 0.1}, mine)
        return {"drawn": torch.rand(3).tolist()}
    counts.zero_()
    free = run.checkpoints.load(path, *arguments, mine)
    return {"drawn": torch.rand(3).tolist(), "counts": counts.tolist(), "free": free}


def language(job: LanguageJob, folder: str) -> dict[str, Any]:
    """Run two steps of a language model and save; or load, and run a step."""
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=LIMITS)
    checkpoints, must = Checkpoints(folder), {"layers": sum(job.cut)}

    def bits_now() -> dict[str, str]:
        place = member.rank % worker.pp
        held = PersistentTensors.of(
            worker.runtime, worker.optimizer, job.name_of, worker.replica, place
        )
        return dict(zip(held.tensors, digests([*held.tensors.values()]), strict=True))

    path = checkpoints.latest()
    if path is not None:
        checkpoints.load(path, worker, job.name_of, must)
        found = bits_now()
        job.prepare(worker.runtime.epoch, worker.optimizer)
        worker.step()
        return {"bits": found, "epoch": worker.runtime.epoch}
    for step in range(2):
        job.prepare(step, worker.optimizer)
        worker.step()
    checkpoints.save(worker, job.name_of, must, {})
    return {"bits": bits_now(), "epoch": worker.runtime.epoch}


def beside_torch(job: Job, folder: str) -> dict[str, Any]:
    """Run two steps from a checkpoint, and torch's own pipeline from the same tensors."""
    run = Run(job, folder)
    path = run.checkpoints.latest()
    assert path is not None
    run.load(path)
    worker = run.worker
    epoch, stages = worker.runtime.epoch, worker.runtime.stages
    held = {
        "weights": {i: {n: p.detach().clone() for n, p in parameters(stages[i]).items()}
                    for i in stages},
        "moments": {n: t.clone() for n, t in worker.optimizer.state_tensors().items()},
        "scaling": {n: t.clone() for n, t in live_state(worker.runtime.domain).items()},
    }  # fmt: skip
    member = worker.member
    groups = [dist.new_group(job.ranks(replica)) for replica in range(job.dp)]
    order = Order.of_rank(job.table(), member.rank % job.pp)
    fuse = rule_for(order, job.rule) == "main_grad"
    theirs = NativePipeline(
        job.cls_name,
        job.stages(
            order.stages,
            member.device,
            "reference",
            loss=False,
            fuse=fuse,
            replica=worker.replica,
        ),
        job.num_stages,
        order,
        job.microbatches,
        job.batch(member.device, worker.replica),
        job.loss,
        groups[worker.replica],
        rule=job.rule,
    )
    with torch.no_grad():
        for stage in theirs.stages:
            for name, parameter in parameters(stage).items():
                parameter.copy_(held["weights"][stage.index][name])
        for name, tensor in live_state(theirs.domain).items():
            tensor.copy_(held["scaling"][name])
    theirs.optimizer.load_state(held["moments"])
    theirs.number = epoch
    for _ in range(2):
        worker.step()
        theirs.step()
    found = []
    for own, optimizer, domain in (
        (list(stages.values()), worker.optimizer, worker.runtime.domain),
        (theirs.stages, theirs.optimizer, theirs.domain),
    ):
        named = {f"{s.index}.{n}": p for s in own for n, p in parameters(s).items()}
        named.update(optimizer.state_tensors())
        named.update(live_state(domain))
        found.append(dict(zip(named, digests([*named.values()]), strict=True)))
    feed: Any = worker.feed
    return {
        "of": len(found[0]),
        "differ": sorted(n for n in found[0] if found[0][n] != found[1].get(n)),
        "same losses": [feed.losses_of(epoch + n) for n in range(2)] == theirs.losses,
    }


def unasked(job: Job, folder: str) -> dict[str, Any]:
    """Save in the middle of a step, on ranks whose contracts are not asked."""
    run = Run(job, folder)
    run.worker.step()
    runtime = run.worker.runtime
    before = run.bits()
    run.worker.pipeline.run_actions()
    runtime.contract.check_checkpoint = lambda: None  # type: ignore[method-assign]
    path = run.save()
    after = run.bits()
    moved = [name for name in before if before[name] != after[name]]
    return {"saved": path.exists(), "moved": moved}


def reducing(job: Job, folder: str) -> dict[str, Any]:
    """Save while gradients are summed over replicas."""
    run = Run(job, folder)
    run.worker.step()
    run.worker.pipeline.run_actions()
    started = [s for s in run.worker._reduces._started if s.works]  # type: ignore[union-attr]
    said = run.attempt(run.save)
    return {**said, "started": len(started), "files": [p.name for p in Path(folder).glob("*")]}


def half_updated(job: Job, folder: str) -> dict[str, Any]:
    """Save after an update that failed half way on the last rank."""
    run = Run(job, folder)
    run.worker.step()
    if run.rank == job.world - 1:

        def fail(*_: Any) -> None:
            raise MemoryError("an injected failure")

        run.worker.optimizer.update = fail  # type: ignore[method-assign]
    stepped = ""
    try:
        run.worker.step()
    except (MemoryError, StoppedError) as error:
        stepped = type(error).__name__
    said = run.attempt(run.save)
    return {**said, "stepped": stepped, "files": [p.name for p in Path(folder).glob("*")]}


def failed_alone(job: Job, folder: str, place: str) -> dict[str, Any]:
    """
    Make a first save that fails only on rank 1, while the other rank waits for it; then save again.
    """
    run = Run(job, folder)
    run.worker.step()

    def fail(*_: Any) -> Any:
        raise (BackendError if place == "confirm" else TypeError)("an injected failure")

    def act() -> None:
        with pytest.MonkeyPatch.context() as patched:
            if run.rank == 1 and place == "confirm":
                patched.setattr(run.worker.runtime, "confirm", fail)
            elif run.rank == 1:
                patched.setattr(run.worker.optimizer, "state_tensors", fail)
            run.save()

    said = run.attempt(act)
    said["files"] = [p.name for p in Path(folder).glob("*")]
    if said["cause"] is not None:
        run.worker.rebuild(StoppedError(Cause(**said["cause"])))
    said["then"] = run.save().name
    return said


def load_failed_alone(job: Job, folder: str) -> dict[str, Any]:
    """Load, with a failure only on rank 1 before its comparisons; then load again."""
    run = Run(job, folder)
    run.worker.step()
    path = run.save()

    def fail(*_: Any) -> Any:
        raise TypeError("an injected failure")

    def act() -> None:
        with pytest.MonkeyPatch.context() as patched:
            if run.rank == 1:
                patched.setattr(run.worker.optimizer, "state_tensors", fail)
            run.load(path)

    said = run.attempt(act)
    run.load(path)
    return said


def half_loaded(job: Job, folder: str) -> dict[str, Any]:
    """Load, with a failure on one rank after all ranks have accepted the checkpoint."""
    run = Run(job, folder)
    run.worker.step()
    path = run.save()
    run.worker.step()
    if run.rank == 1:

        def fail(*_: Any) -> None:
            raise MemoryError("an injected failure")

        run.worker.optimizer.load_state = fail  # type: ignore[method-assign]
    return run.attempt(lambda: run.load(path))


# Kills


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _in_save(where: str) -> None:
    """Kill this process in its next save."""
    if where == "before its file":
        Writer.write_data = lambda *_: _die()  # type: ignore[method-assign,assignment]
    elif where == "behind its file":
        write = Writer.write_data

        def half(self: Any, plan: Any, planner: Any) -> Any:
            write(self, plan, planner)
            _die()

        Writer.write_data = half  # type: ignore[method-assign]
    elif where == "before the index":
        Writer.finish = lambda *_, **__: _die()  # type: ignore[method-assign,assignment]
    elif where == "before the name":
        rename = Path.rename

        def renamed(self: Path, to: Any) -> Any:
            if Path(to).name.startswith("step-"):
                _die()
            return rename(self, to)

        Path.rename = renamed  # type: ignore[method-assign,assignment]
    else:
        finish = Writer.finish

        def named(self: Any, **given: Any) -> None:
            finish(self, **given)
            _die()

        Writer.finish = named  # type: ignore[method-assign]


#: Where a save can be killed, and by which rank; None for any.
IN_SAVES: dict[str, int | None] = {
    "before its file": None,
    "behind its file": None,
    "before the index": 0,
    "before the name": 0,
    "behind the name": 0,
}


def killed(job: Job, folder: str, until: int, seed: int | None) -> dict[str, Any]:
    """
    Continue from the newest checkpoint and save after each step; a rank is killed on the way.

    Args:
        job: What to train.
        folder: The folder of the checkpoints.
        until: The epoch at which the run ends.
        seed: Seed of the random choice of rank and moment; None for no kill.
    """
    # The dead say nothing: it is not worth waiting for.
    run = Run(job, folder, limits=attrs.evolve(LIMITS, grace=0.5))
    worker = run.worker
    path = run.checkpoints.latest()
    if path is not None:
        run.load(path)
    began = worker.runtime.epoch
    kill_at, arm = -1, _die
    if seed is not None:
        draw = random.Random(seed)
        kill_at = began + draw.randrange(2)
        where = draw.choice(["step", "step", *IN_SAVES])
        victim = draw.randrange(job.world)
        if where == "step":
            place = draw.random()
        else:
            victim = victim if IN_SAVES[where] is None else IN_SAVES[where] or 0
        if run.rank != victim:
            kill_at = -1
        elif where == "step":
            arm = lambda: _arm(worker, place)  # noqa: E731
        else:
            arm = lambda: _in_save(where)  # noqa: E731
    losses = {}
    feed: Any = worker.feed
    try:
        while (epoch := worker.runtime.epoch) < until:
            if epoch == kill_at:
                arm()
            worker.step()
            losses[epoch] = feed.losses_of(epoch)
            run.save(position=epoch)
    except StoppedError as stopped:
        return {"cause": stopped.cause.text, "recoverable": stopped.cause.recoverable}
    run.checkpoints.close()
    return {"cause": None, "began": began, "losses": losses, "bits": run.bits()}


def _arm(worker: Worker, place: float) -> None:
    """Kill this process at some action of the next step."""
    program = worker.pipeline.program
    n = int(place * len(program))
    program[n] = program[n]._replace(act=lambda _: _die())


def killed_in(job: Job, folder: str, where: str) -> dict[str, Any]:
    """Kill rank 0 in the second save; report what the other rank then finds."""
    run = Run(job, folder, limits=attrs.evolve(LIMITS, grace=0.5))
    run.worker.step()
    run.save()
    run.worker.step()
    if run.rank == 0:
        _in_save(where)
    said = run.attempt(run.save)
    newest = run.checkpoints.latest()
    return {"cause": said["cause"]["text"], "latest": newest and newest.name}


def refused_load(job: Job, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint, and return the error."""
    run = Run(job, folder)
    path = run.checkpoints.latest()
    assert path is not None
    return run.attempt(lambda: run.load(path, **options))


def with_masters(
    body: str, job: Job, folder: str, options: dict[str, Any], masters: bool
) -> dict[str, Any]:
    """Run another function of this module, with master weights in float32."""
    found: dict[str, Any] = globals()[body](job, folder, options, masters=masters)
    return found


def restored_otherwise(job: Job, _: str) -> dict[str, Any]:
    """Load a contract's checkpoint where replicas share amaxes, and where they do not."""
    member = join("cpu", LIMITS)
    own = attrs.evolve(job, amax="replica")
    workers = [build_trial(member, trial(each)) for each in (own, job)]
    checkpoint, state = workers[0].runtime.checkpoint()
    said = {"own": "", "clause": None, "text": ""}
    workers[0].runtime.restore(checkpoint, state)
    try:
        workers[1].runtime.restore(checkpoint, state)
    except Refused as refused:
        said.update(clause=refused.clause, text=str(refused))
    for worker in workers:
        worker.close()
    return said

"""
Build a job from a configuration: the model, its division into stages, and its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs

from qeffect.report import UnusableError
from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.grouping import require_group

from ..backends.dynamic_head import library
from ..backends.protocol import BackendError
from ..ranks.membership import Member, all_gather
from ..runtime import RuntimeConfig, mode_on, without_launches
from .balance import agreed_times
from .checkpoint import Checkpoints
from .checkpoint.files import manifest, read_facts
from .config import Config
from .data import DataError, Loader, Tokens
from .language_model import LanguageJob, balanced_cut, even_cut
from .rates import Rate

__all__ = [
    "TIMES",
    "JobData",
    "backend_of",
    "cut_by_times",
    "job_of",
    "measure_cut",
    "open_job",
    "require_grouped",
]


def backend_of(config: Config) -> str:
    """Return the backend of a run's layers: ``reference`` or ``transformer-engine``."""
    if config.run.backend != "auto":
        return config.run.backend
    return "reference" if config.run.device == "cpu" else "transformer-engine"


def job_of(config: Config) -> LanguageJob:
    """
    Make the job of a configuration, and open its training text.

    Raises:
        UnusableError: Fields of the configuration do not fit each other, or do not fit the training
            text.
    """
    model, parallel, source = config.model, config.parallel, config.source
    if model.vocabulary % 16:
        raise UnusableError(
            f"{source}: [model] vocabulary: expected a multiple of 16, which FP8 products need, "
            f"found {model.vocabulary}"
        )
    if model.head == "torchao":
        try:
            library()
        except BackendError as error:
            raise UnusableError(f"{source}: [model] head: {error}") from None
    _require_dropout(config)
    require_grouped(config)
    steps, layer = config.optimizer.decay_steps or config.run.steps, config.layer()
    try:
        job = LanguageJob(
            schedule=parallel.schedule,
            pp=parallel.pp,
            vpp=parallel.vpp or None,
            dp=parallel.dp,
            microbatches=parallel.microbatches,
            walks=parallel.walks,
            history=model.history,
            rule=parallel.rule,  # type: ignore[arg-type]
            provisioning=parallel.provisioning,  # type: ignore[arg-type]
            amax=parallel.amax,
            config=layer,
            seed=model.seed,
            vocabulary=model.vocabulary,
            tied=model.tied,
            dropout=model.dropout,
            scales=model.scales,  # type: ignore[arg-type]
            wgrad_group=model.wgrad_group,
            head=model.head,
            rate=Rate(
                peak=config.optimizer.rate,
                warmup=config.optimizer.warmup,
                steps=steps,
                least=config.optimizer.least_rate,
            ),
            weight_decay=config.optimizer.weight_decay,
            master=config.optimizer.master,
            clip_norm=config.optimizer.clip_norm or None,
            skip_nonfinite=config.optimizer.skip_nonfinite,
        )
        job.table()
        RuntimeConfig(rule=job.rule, walks=job.walks, group=job.wgrad_group)
    except (ScheduleError, BackendError, ValueError) as error:
        raise UnusableError(f"{source}: [parallel] {error}") from None
    cut, recompute = _cut(config, job.num_stages), _recomputing(config, job.num_stages)
    loader = _loader(config, config.data.train, "train")
    return attrs.evolve(job, cut=cut, recompute=recompute, loader=loader)


def _require_dropout(config: Config) -> None:
    """If the file asks for dropout, raise an error unless the mode supports dropout."""
    mode = config.parallel.mode
    if not config.model.dropout or config.run.device != "cuda" or mode == "eager":
        return
    expected = "'eager'"
    if backend_of(config) == "reference":
        why = "the reference backend draws random numbers on the host, which a graph cannot"
    elif config.model.scales == "epoch":
        why = "with scales = 'epoch' dropout draws by layer and microbatch, which a graph cannot"
    elif mode == "replays":
        return
    else:
        expected = "'replays' or 'eager'"
        why = "every F in one graph of a step would draw the same random numbers"
    raise UnusableError(
        f"{config.source}: [model] dropout: expected [parallel] mode = {expected}, because {why}, "
        f"found {mode!r}; set mode, or leave dropout out"
    )


def _recomputing(config: Config, stages: int) -> tuple[int, ...]:
    """Return the stages whose dI recomputes the activations of their layers."""
    asked = config.parallel.recompute
    where = f"{config.source}: [parallel] recompute"
    if asked == "none":
        return ()
    if config.model.dropout and backend_of(config) == "transformer-engine":
        raise UnusableError(
            f"{where}: expected [model] dropout = 0.0, as dI cannot draw the random numbers of its "
            f"F again, found {config.model.dropout}; set dropout, or leave recompute out"
        )
    if asked != "all" and config.parallel.cut == "measured":
        raise UnusableError(
            f"{where}: expected 'all' or 'none', because cut = 'measured' assumes the same time "
            f"for every layer, found {asked}; set recompute, or set cut to a list of layers"
        )
    if asked == "all":
        return tuple(range(stages))
    if max(asked) >= stages:
        raise UnusableError(
            f"{where}: expected stages 0 to {stages - 1}, found {max(asked)}; the model has "
            f"{stages} stages"
        )
    return tuple(sorted(asked))


def require_grouped(config: Config) -> None:
    """
    If the training file requests dW products over several microbatches (`wgrad_group`), check that
    the other fields allow such products.

    Raises:
        UnusableError: A field does not fit `wgrad_group`; the message names the field.
    """
    group, parallel = config.model.wgrad_group, config.parallel
    if group == 1:
        return
    where = f"{config.source}: [model] wgrad_group"
    if config.model.scales != "epoch":
        raise UnusableError(
            f"{where}: expected scales = 'epoch', as one product has one set of scales, found "
            f"scales = {config.model.scales!r}; set scales, or leave wgrad_group out"
        )
    if parallel.rule != "accumulate":
        raise UnusableError(
            f"{where}: expected [parallel] rule = 'accumulate', as one product writes one "
            f"destination, found {parallel.rule!r}; set rule, or leave wgrad_group out"
        )
    try:
        require_group(group, parallel.microbatches // parallel.walks)
    except ScheduleError as error:
        raise UnusableError(f"{where}: {str(error).removeprefix('group: ')}") from None


def _cut(config: Config, stages: int) -> tuple[int, ...]:
    parallel, layers = config.parallel, config.model.layers
    times, where = parallel.layer_times, f"{config.source}: [parallel] cut"
    for name in ("embedding_time", "head_time"):
        if not times and getattr(parallel, name):
            raise UnusableError(
                f"{config.source}: [parallel] {name}: expected layer_times too, found none; give "
                "all three times, or leave all three out to have them measured"
            )
    if isinstance(parallel.cut, list) and not times:
        if len(parallel.cut) != stages or sum(parallel.cut) != layers:
            raise UnusableError(
                f"{where}: expected {stages} stages with {layers} layers together, found "
                f"{parallel.cut}"
            )
        return tuple(parallel.cut)
    if times and parallel.cut != "measured":
        raise UnusableError(
            f"{config.source}: [parallel] layer_times: expected cut = 'measured' with times, "
            f"found cut = {parallel.cut!r}"
        )
    if times and len(times) != layers:
        raise UnusableError(
            f"{config.source}: [parallel] layer_times: expected one time for each of {layers} "
            f"layers, found {len(times)}"
        )
    try:
        if times:
            return balanced_cut(
                times, stages, embedding=parallel.embedding_time, head=parallel.head_time
            )
        if parallel.cut in ("even", "measured"):  # `measure_cut` cuts by what is measured
            return even_cut(layers, stages)
        return balanced_cut(
            [1.0] * layers, stages, embedding=parallel.embedding_cost, head=parallel.head_cost
        )
    except ValueError as error:
        raise UnusableError(f"{where}: {error}; set [model] layers, pp or vpp") from None


class JobData(NamedTuple):
    """
    The model and the data of a run; each data file is opened only once.

    Args:
        job: The model, its mapping and its training text.
        held_out: The text for evaluations; None if the run has none.
    """

    job: LanguageJob
    held_out: Loader | None


def open_job(config: Config) -> JobData:
    """
    Make the model of a configuration, and open its data files.

    Raises:
        UnusableError: Fields of the configuration do not fit each other, or do not fit the training
            text, or the held-out text cannot be used.
    """
    job, text = job_of(config), config.data.held_out
    return JobData(job, _loader(config, text, "held_out") if text else None)


TIMES = ("embedding_time", "layer_times", "head_time")
"""The fields of `[parallel]` that hold measured times."""


def measure_cut(
    member: Member,
    config: Config,
    data: JobData,
    *,
    resume: bool = False,
    times: Mapping[str, Any] | None = None,
) -> tuple[Config, JobData]:
    """
    If the training file has `cut = "measured"`, divide the model into stages by measured times.
    Every rank must call this function.

    Each rank measures its own device, and the slowest rank's time for each action is used. If the
    file contains times, nothing is measured. A run that resumes takes the times, and therefore the
    cut, from its newest checkpoint.

    Args:
        member: This process.
        config: The run.
        data: The configuration's data, from `open_job`.
        resume: Whether the run resumes from a checkpoint.
        times: Times that were measured for another run of the same model. None measures now.

    Returns:
        The configuration with the measured times, and the data with the divided model. The times in
        the configuration give the same cut on any machine.

    Raises:
        BackendError: A rank cannot measure. The message says why.
    """
    parallel = config.parallel
    if parallel.cut != "measured" or parallel.layer_times:
        return config, data
    job, layers = data.job, config.model.layers
    saved = _times_saved(config) if resume and member.rank == 0 else None
    fields = times if times is not None else all_gather(member, saved)[0]
    if fields is None:
        mode = without_launches(mode_on(member.device, parallel.mode))
        place = f"{config.source}: [parallel] cut"
        found = agreed_times(member, job, backend_of(config), mode=mode, place=place)
        fields = found.fields(layers)
    timed, job = cut_by_times(config, job, fields)
    return timed, JobData(job, data.held_out)


def cut_by_times(
    config: Config, job: LanguageJob, fields: Mapping[str, Any]
) -> tuple[Config, LanguageJob]:
    """
    Divide a model into stages of equal time.

    Args:
        config: The configuration of the run, whose `cut` is `measured`.
        job: The run's model.
        fields: The measured times. `TIMES` contains their names.

    Returns:
        The configuration with these times, and the divided model.
    """
    timed = attrs.evolve(config, parallel=attrs.evolve(config.parallel, **fields))
    return timed, attrs.evolve(job, cut=_cut(timed, job.num_stages))


def _times_saved(config: Config) -> dict[str, Any] | None:
    """
    Return the times in the newest checkpoint; None without a checkpoint, or if its times do not fit
    the model.
    """
    folder = config.checkpoint.folder
    try:
        path = Checkpoints(config.path(folder)).latest() if folder else None
        if path is None:
            return None
        saved = read_facts(path, manifest(path))["free"]["configuration"]["parallel"]
    except (BackendError, LookupError, TypeError):
        return None  # the load reports what is wrong
    fields = {name: saved.get(name) for name in TIMES}
    times = fields["layer_times"]
    return fields if times and len(times) == config.model.layers else None


def _loader(config: Config, name: str, field: str) -> Loader:
    sequence = config.model.sequence
    try:
        tokens = Tokens.open(
            config.path(name), vocabulary=config.model.vocabulary, sequence=sequence
        )
        if field == "train" and config.checkpoint.folder:
            tokens.sha256  # noqa: B018 - hash it now, before any rank waits for another
    except DataError as error:
        raise UnusableError(f"{config.source}: [data] {field}: {error}") from None
    shuffle = config.data.shuffle and field == "train"
    return Loader(tokens=tokens, sequence=sequence, seed=config.data.seed, shuffle=shuffle)

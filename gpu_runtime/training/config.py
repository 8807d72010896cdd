"""
The one file that a training run is configured by.

TOML with six tables. Every field has a default; whatever is wrong is one line that names the
field, what was expected and what was found. Paths are relative to the file's own folder.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from qeffect.report import UnusableError

from ..backends.layers import LayerConfig
from ..ranks.job import NAMES
from ..runtime import MODES
from ..step.memory.arena import RULES
from ..step.memory.scaling import AMAX
from ..step.plan.slots import PROVISIONINGS

__all__ = [
    "Checkpointing",
    "Config",
    "Data",
    "Model",
    "Optimizing",
    "Parallel",
    "Run",
    "differences",
    "read",
]

_T = TypeVar("_T")


_FLAGS = ("captured", "one_launch")
"""Fields of `[parallel]` that `mode` replaces."""
_SIZE = 2**20
"""The most of a dimension, and of what is counted by ranks, stages or microbatches."""
_COUNT = 2**53
"""The most of steps and windows."""
_SEED = 2**63 - 1
_DRAWN = 2**47 - 1
"""The most of a seed that parts of a model have theirs from (`ends.drawn`)."""
_NUMBER = 1e9


def _field(
    default: Any, expected: str, fits: Callable[[Any], bool], most: float | None = None
) -> Any:
    known = {"expected": expected, "fits": fits, "most": most}
    return attrs.field(default=default, metadata=known)


def _whole(default: int, least: int = 1, most: int = _SIZE) -> Any:
    fits = lambda v: type(v) is int and least <= v <= most  # noqa: E731 - one of many alike
    return _field(default, f"a whole number of at least {least}", fits, most)


def _number(default: float, *, positive: bool = False) -> Any:
    def fits(value: Any) -> bool:
        is_number = type(value) in (int, float) and value <= _NUMBER
        return is_number and (value > 0 if positive else value >= 0)

    expected = "a number above 0" if positive else "a number of at least 0"
    return _field(default, expected, fits, _NUMBER)


def _flag(default: bool) -> Any:
    return _field(default, "true or false", lambda v: type(v) is bool)


def _text(default: str) -> Any:
    return _field(default, "a text", lambda v: type(v) is str and "\0" not in v)


def _one_of(default: str, *options: str) -> Any:
    expected = f"one of {', '.join(map(repr, options))}"
    return _field(default, expected, lambda v: type(v) is str and v in options)


def _class(default: str) -> Any:
    def fits(value: Any) -> bool:
        return type(value) is str and (value in NAMES or value.startswith("Schedule"))

    return _field(default, f"one of {', '.join(NAMES)}, or a schedule class of torch", fits)


def _layers_of_stages() -> Any:
    def fits(value: Any) -> bool:
        if type(value) is list:
            return bool(value) and all(type(n) is int and 1 <= n <= _SIZE for n in value)
        return value in ("even", "balanced", "measured")

    expected = "'even', 'balanced', 'measured', or a list of layers a stage"
    return _field("even", expected, fits)


def _times_of_layers() -> Any:
    def fits(value: Any) -> bool:
        return type(value) is list and all(
            type(one) in (int, float) and 0 < one <= _NUMBER for one in value
        )

    known = {"expected": "a list of numbers above 0", "fits": fits, "most": None}
    return attrs.field(factory=list, metadata=known)


@attrs.frozen(kw_only=True)
class Model:
    """
    Table `[model]`.

    Args:
        vocabulary: Tokens; a multiple of 16.
        layers: Transformer layers of the whole model.
        hidden: Width; a multiple of 16 and of `heads`.
        ffn: Width of the MLPs; a multiple of 16.
        heads: Attention heads.
        sequence: Tokens of a window.
        seed: What the parameters are drawn from.
        history: Entries of an amax history.
        tied: Whether the token embedding and the head are one weight, which does not decay.
        head: `te`, the layers' own FP8 product with delayed scaling (the reference backend has one
            of the same rules), or `torchao`, TorchAO's `Float8Linear` with dynamic scaling.
    """

    vocabulary: int = _whole(32768, 16, 2**31)
    layers: int = _whole(4)
    hidden: int = _whole(64)
    ffn: int = _whole(256)
    heads: int = _whole(4)
    sequence: int = _whole(64)
    seed: int = _whole(0, 0, _DRAWN)
    history: int = _whole(16)
    tied: bool = _flag(False)
    head: str = _one_of("te", "te", "torchao")


@attrs.frozen(kw_only=True)
class Parallel:
    """
    Table `[parallel]`.

    Args:
        schedule: A short name, or a schedule class of torch.
        pp: Ranks of the pipeline.
        vpp: Stages of a rank; 0 takes what is usual of the schedule.
        dp: Replicas.
        microbatches: Of a step and replica.
        batch: Windows of a microbatch.
        cut: `even` layers a stage, `balanced` costs, `measured` times, or the layers of each stage.
        embedding_cost: In layers, for `balanced`; refused beside another cut.
        head_cost: In layers, for `balanced`; refused beside another cut.
        embedding_time: For `measured`: milliseconds of the embedding's F, dI and dW together.
        layer_times: For `measured`: of each layer. Where they are left out, all three are measured
            before the first step, and written to the log and the report under these names.
        head_time: For `measured`: of norm, head and loss.
        rule: Where dW writes.
        provisioning: How slots are counted.
        mode: How a step runs. `replays` replays one CUDA graph per action, `one launch` takes a
            step as one graph whose update the device gates, `eager` uses no graphs. A CPU always
            runs eager. If no step can be one launch, it runs as replays, and the log says why.
            The older flags `captured` and `one_launch` are accepted in its place.
        amax: Whose amax scales are made of: a `replica`'s own, or that of all `replicas`, which
            then share their scaling state.
    """

    schedule: str = _class("zbv")
    pp: int = _whole(1)
    vpp: int = _whole(0, 0)
    dp: int = _whole(1)
    microbatches: int = _whole(4)
    batch: int = _whole(1)
    cut: Any = _layers_of_stages()  # noqa: RUF009 - a field of attrs
    embedding_cost: float = _number(0.0)
    head_cost: float = _number(1.0)
    embedding_time: float = _number(0.0)
    layer_times: Any = _times_of_layers()  # noqa: RUF009 - a field of attrs
    head_time: float = _number(0.0)
    rule: str = _one_of("accumulate", *RULES)
    provisioning: str = _one_of("live", *PROVISIONINGS)
    mode: Any = _one_of("replays", *MODES)  # noqa: RUF009 - a field of attrs
    amax: str = _one_of("replica", *AMAX)


@attrs.frozen(kw_only=True)
class Data:
    """
    Table `[data]`.

    Args:
        train: Token file to learn from.
        held_out: Token file to evaluate on; empty for no evaluation.
        seed: What the order of windows is drawn from.
        shuffle: Whether windows come in an order of their own in each pass.
    """

    train: str = _text("train.npy")
    held_out: str = _text("")
    seed: int = _whole(0, 0, _SEED)
    shuffle: bool = _flag(True)


@attrs.frozen(kw_only=True)
class Optimizing:
    """
    Table `[optimizer]`.

    Args:
        rate: The learning rate after the warm-up.
        warmup: Steps of the warm-up.
        decay_steps: Steps until the least rate, warm-up among them; 0 takes the run's steps,
            and where a run goes on from a checkpoint those of the run that began, so that a run
            that is made longer keeps its curve.
        least_rate: The rate at the end of the cosine; no more than `rate`.
        weight_decay: Of the matrices; norms, biases and embeddings have none.
        master: Whether fp32 copies of the parameters are kept.
        clip_norm: Limit of the norm of all ranks' gradients; 0 for none.
        skip_nonfinite: Whether every rank skips an update whose norm is not finite.
    """

    rate: float = _number(1e-3, positive=True)
    warmup: int = _whole(10, 0, _COUNT)
    decay_steps: int = _whole(0, 0, _COUNT)
    least_rate: float = _number(1e-4)
    weight_decay: float = _number(0.01)
    master: bool = _flag(False)
    clip_norm: float = _number(0.0)
    skip_nonfinite: bool = _flag(False)


@attrs.frozen(kw_only=True)
class Run:
    """
    Table `[run]`.

    Args:
        steps: Steps of the whole run.
        device: `cpu` or `cuda`.
        backend: The layers; `auto` is the reference's on a CPU and Transformer Engine's on a GPU.
        log: JSON lines of what is measured, steps counted from 0; empty for none.
        log_every: Steps between two lines.
        evaluate_every: Steps between two evaluations; 0 evaluates at the end alone.
        evaluate_windows: Held-out windows of an evaluation.
        tensorboard: A folder for TensorBoard; empty for none.
        event_logs: A folder for each rank's event log; empty for none.
        deterministic: Whether libraries may only choose kernels that give the same bits each time,
            without which a run that goes on from a checkpoint ends in other bits than one that
            never stopped; `--compare` always does.
        retries: How often in a row a step that all ranks stopped, and survived, is begun again.
        start_s: Seconds until all ranks have met.
        commit_s: Seconds until all ranks have come to a commit.
    """

    steps: int = _whole(20, 1, _COUNT)
    device: str = _one_of("cpu", "cpu", "cuda")
    backend: str = _one_of("auto", "auto", "reference", "transformer-engine")
    log: str = _text("")
    log_every: int = _whole(1, 1, _COUNT)
    evaluate_every: int = _whole(0, 0, _COUNT)
    evaluate_windows: int = _whole(16, 1, _COUNT)
    tensorboard: str = _text("")
    event_logs: str = _text("")
    deterministic: bool = _flag(True)
    retries: int = _whole(0, 0)
    start_s: float = _number(120.0, positive=True)
    commit_s: float = _number(120.0, positive=True)


@attrs.frozen(kw_only=True)
class Checkpointing:
    """
    Table `[checkpoint]`.

    Args:
        folder: Where checkpoints are; empty for none.
        every: Steps between two; 0 saves at the end alone.
        keep: How many stay.
        asynchronous: Whether a checkpoint is written behind the next steps.
        replicas: Whose scaling state a replica takes where there were others: `same` refuses that,
            `modulo` takes that of replica r modulo their number.
    """

    folder: str = _text("")
    every: int = _whole(0, 0, _COUNT)
    keep: int = _whole(3)
    asynchronous: bool = _flag(False)
    replicas: str = _one_of("same", "same", "modulo")


@attrs.frozen(kw_only=True)
class Config:
    """
    A run.

    Args:
        source: The file.
        model: The model.
        parallel: How it is spread.
        data: What it learns from.
        optimizer: How it is updated.
        run: How long, where, and what is told.
        checkpoint: What is kept.
    """

    source: Path = Path("train.toml")
    model: Model = attrs.field(factory=Model)
    parallel: Parallel = attrs.field(factory=Parallel)
    data: Data = attrs.field(factory=Data)
    optimizer: Optimizing = attrs.field(factory=Optimizing)
    run: Run = attrs.field(factory=Run)
    checkpoint: Checkpointing = attrs.field(factory=Checkpointing)

    def path(self, name: str) -> Path:
        """A path of the file, from its own folder."""
        return self.source.parent / name

    def layer(self) -> LayerConfig:
        """
        The dimensions of a layer.

        Raises:
            UnusableError: They do not fit each other or FP8.
        """
        m = self.model
        try:
            return LayerConfig(m.hidden, m.ffn, m.heads, m.sequence, self.parallel.batch)
        except ValueError as error:
            both = str(error).startswith("sequence * batch")
            where = "[model] sequence and [parallel] batch:" if both else "[model]"
            raise UnusableError(f"{self.source}: {where} {error}") from None

    def record(self) -> dict[str, Any]:
        """The tables as plain data."""
        return {name: attrs.asdict(getattr(self, name)) for name in TABLES}


TABLES: Mapping[str, type] = {
    "model": Model,
    "parallel": Parallel,
    "data": Data,
    "optimizer": Optimizing,
    "run": Run,
    "checkpoint": Checkpointing,
}


def read(path: Path, **changes: Mapping[str, Any]) -> Config:
    """
    Read and check a file.

    Args:
        path: The file.
        changes: By table, fields that the command line overrides; None leaves the file's.

    Raises:
        UnusableError: It is not there or not TOML, a table or field is unknown or of another
            kind than expected, or a field is given that the others leave without a use.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # also a number of too many digits, and a NUL in the path
        raise UnusableError(f"{path}: expected a TOML file, found {error}") from None
    for name in given:
        if name not in TABLES:
            raise UnusableError(
                f"{path}: there is no table [{name}]; there are {', '.join(TABLES)}"
            )
    tables: dict[str, Any] = {}
    for name, kind in TABLES.items():
        found = given.get(name, {})
        if not isinstance(found, dict):
            raise UnusableError(f"{path}: [{name}]: expected a table, found {found!r}")
        if name == "parallel":
            found = _with_mode(path, found)
        over = {key: value for key, value in changes.get(name, {}).items() if value is not None}
        if over:  # a bad value of the file is refused also where the command line replaces it
            _table(path, name, kind, {**over, **found})
        tables[name] = _table(path, name, kind, {**found, **over})
    cut = tables["parallel"].cut
    for name in ("embedding_cost", "head_cost"):
        if cut != "balanced" and name in given.get("parallel", {}):
            raise UnusableError(
                f"{path}: [parallel] {name}: costs are for cut = 'balanced', found cut = {cut!r}; "
                "leave it out, or set cut"
            )
    rates = tables["optimizer"]
    if rates.least_rate > rates.rate:
        own = "" if "least_rate" in given.get("optimizer", {}) else ", its default"
        raise UnusableError(
            f"{path}: [optimizer] least_rate: expected at most rate, which is {rates.rate}, found "
            f"{rates.least_rate}{own}"
        )
    return Config(source=path, **tables)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """
    What differs between the tables of two runs, each field in a line.

    Args:
        saved: The tables as `Config.record` gives them, of the run that was saved.
        own: Those of the run that goes on.

    >>> differences({"run": {"steps": 4, "log": ""}}, {"run": {"steps": 6, "log": ""}})
    ['[run] steps was 4, is 6']
    """
    before = {**saved, "parallel": translated(saved.get("parallel", {}))}
    return [
        f"[{table}] {name} was {before.get(table, {}).get(name)!r}, is {value!r}"
        for table, fields in own.items()
        for name, value in fields.items()
        if before.get(table, {}).get(name) != value
    ]


def translated(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """
    A table `[parallel]` with `mode` in the place of the flags of earlier releases.

    >>> translated({"pp": 2, "captured": True, "one_launch": False})
    {'pp': 2, 'mode': 'replays'}
    """
    new = {name: value for name, value in parallel.items() if name not in _FLAGS}
    if len(new) < len(parallel):
        replays = "replays" if parallel.get("captured", True) else "eager"
        new["mode"] = "one launch" if parallel.get("one_launch", False) else replays
    return new


def _with_mode(path: Path, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept the older flags of a file's `[parallel]`, with a warning."""
    old = [name for name in _FLAGS if name in given]
    if not old:
        return given
    for name in old:
        if type(given[name]) is not bool:
            raise UnusableError(
                f"{path}: [parallel] {name}: expected true or false, found {_shown(given[name])}"
            )
    if "mode" in given:
        raise UnusableError(
            f"{path}: [parallel] {old[0]}: mode says how a step runs; leave {old[0]} out"
        )
    if given.get("one_launch") and not given.get("captured", True):
        raise UnusableError(
            f"{path}: [parallel] one_launch: expected captured = true beside it, as the step's "
            "graph is made of those that are replayed, found captured = false; write mode instead"
        )
    new = translated(given)
    warnings.warn(
        f"{path}: [parallel] {', '.join(old)} will be removed in the next release; write "
        f'mode = "{new["mode"]}"',
        DeprecationWarning,
        stacklevel=3,
    )
    return new


def _table(path: Path, name: str, kind: type[_T], given: Mapping[str, Any]) -> _T:
    fields = {field.name: field for field in attrs.fields(kind)}  # type: ignore[arg-type]
    for key, value in given.items():
        if key not in fields:
            raise UnusableError(
                f"{path}: [{name}] {key}: there is no such field; there are {', '.join(fields)}"
            )
        known = fields[key].metadata
        if not known["fits"](value):
            raise UnusableError(
                f"{path}: [{name}] {key}: expected {_expected(known, value)}, found {_shown(value)}"
            )
    return kind(**given)


def _expected(known: Mapping[str, Any], value: Any) -> str:
    said: str = known["expected"]
    if type(value) is str and "\0" in value and said == "a text":
        return "a text without NUL, which no path has"
    if known["most"] is not None and type(value) in (int, float) and value > known["most"]:
        return f"{said} and at most {known['most']:,}"
    return said


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no number of so many digits
        return "a number of too many digits"

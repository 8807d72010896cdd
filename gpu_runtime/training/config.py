"""
The tables of a training file: the TOML file that configures a training run.

Every field has a default. `docs/configuration.md` lists all fields. ``python -m
qeffect.gpu_runtime.training.config_page`` generates this page from this module. `config_file.read`
reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from qeffect.report import UnusableError

from ..backends.epoch_scales import SCALES
from ..backends.heads import HEADS
from ..backends.layers import ACTIVATIONS, NORMS, POSITIONS, LayerConfig
from ..ranks.membership import Limits
from ..runtime import MODES
from ..step.memory.arena import RULES
from ..step.memory.scaling import AMAX
from ..step.plan.slots import PROVISIONINGS
from .fields import (
    COUNT,
    SAME,
    SEED,
    cut,
    flag,
    fraction,
    name,
    number,
    one_of,
    schedule,
    stages,
    text,
    times,
    whole,
)

__all__ = [
    "TABLES",
    "Checkpointing",
    "Config",
    "Data",
    "Guarding",
    "Model",
    "Optimizing",
    "Parallel",
    "Run",
    "Waiting",
]

_PART_SEED = 2**47 - 1
"""Largest seed from which the seeds of a model's parts are derived (`ends.drawn`)."""
_DEFAULT = Limits()
_TIMES = "may change; if left out, the times in the checkpoint are used"
_WEIGHTS = "may change; weights come from the checkpoint"
_SEED = "may change; weights come from the checkpoint, and dropout draws other numbers"
_DECAY = "may change; 0 keeps the number of the first start"
_RULE = 'may change, except with `scales = "epoch"` of `[model]`'
_REPLICAS = (
    'may change only if `replicas` of `[checkpoint]` is `"modulo"`, or `amax` is `"replicas"`'
)


@attrs.frozen(kw_only=True)
class Model:
    """
    Table `[model]`: the dimensions of the model.

    Args:
        vocabulary: Size of the vocabulary; a multiple of 16.
        layers: Number of transformer layers of the whole model.
        hidden: Width of the model; a multiple of 16 and of `heads`.
        ffn: Width of the MLPs; a multiple of 16.
        heads: Number of attention heads per layer.
        kv_heads: Number of key and value heads per layer; must divide `heads`. With fewer than
            `heads`, several query heads share one key and value head (grouped-query attention). 0
            means the number of `heads`.
        norm: Kind of the norms before attention, MLP and head. `rmsnorm` has no bias.
        activation: Function between the two matrix products of an MLP. With `swiglu` the first
            product has twice `ffn` rows: rows of gates, and rows of the values that the gates
            multiply.
        positions: How the model encodes the positions of tokens: `learned` adds a table to the
            embedding; `rotary` rotates queries and keys in every layer.
        bias: Whether the matrix products of layers have a bias.
        sequence: Number of tokens per window (training sequence).
        seed: Seed of the initial parameters, and of dropout.
        start: File with the initial weights, as `qeffect runtime export` writes it; if empty, the
            weights are drawn from the seed. Names, shapes and types must equal those of the model.
        start_names: Names of the weights in the file of `start`. Empty means the model's own names;
            `gpt2` means the names of transformers' GPT2LMHeadModel. Any other value is the path of
            a file of names, as for `qeffect runtime export --names`. Each line of this file is
            `OURS = THEIRS`: the model's name of a weight, and the name in the file of `start`.
        history: Length of each amax history (FP8 delayed scaling).
        tied: Whether the token embedding and the head are one weight. A tied weight has no weight
            decay.
        dropout: Probability with which each layer drops elements of its two residual branches, in
            training only. On a GPU dropout needs `mode = "eager"`, or `mode = "replays"` with
            Transformer Engine and `scales = "action"`. With `scales = "action"` the dropped
            elements depend on `seed`, the replica and the rank's first stage; so a run with dropout
            must resume with the same `pp`. With `scales = "epoch"` the dropped elements depend on
            `seed`, replica, layer, microbatch and step; then `pp` may change.
        head: How the head (the output layer) is computed. `te` is an FP8 product with delayed
            scaling, as in the layers. `torchao` is TorchAO's `Float8Linear` with dynamic scaling.
            `bf16` is a product in bf16, without FP8.
        scales: When FP8 scales are updated. `action` updates them at the end of every F and dI, as
            Transformer Engine does. `epoch` updates them once per optimizer step, which the
            contract calls an epoch. With `epoch` every schedule and every mapping onto ranks gives
            the same bits. A new run with `epoch` first calibrates the scales: it runs the first
            step's microbatches up to 16 times, without an update of weights. `epoch` needs
            `deterministic` of `[run]`. With `rule = "accumulate"`, `epoch` also needs a schedule
            whose dI and dW run in the order of microbatches.
        wgrad_group: Number of consecutive microbatches whose weight gradients are computed as one
            product per matrix. It must divide the number of microbatches per walk (pass over the
            schedule). A larger number reads and writes gradients less often, but needs more tapes
            in memory at once. `qeffect plan TABLE --wgrad-group 2` prints this number of tapes.
            More than 1 needs delayed scaling, `scales = "epoch"`, and `rule = "accumulate"` of
            `[parallel]`. The bits of bf16 gradients depend on this number.
    """

    vocabulary: int = whole(32768, 16, 2**31, unit="tokens", resume=SAME)
    layers: int = whole(4, unit="layers", resume=SAME)
    hidden: int = whole(64, unit="elements", resume=SAME)
    ffn: int = whole(256, unit="elements", resume=SAME)
    heads: int = whole(4, unit="heads", resume=SAME)
    kv_heads: int = whole(0, 0, unit="heads", resume=SAME)
    norm: str = one_of("layernorm", *NORMS, resume=SAME)
    activation: str = one_of("gelu", *ACTIVATIONS, resume=SAME)
    positions: str = one_of("learned", *POSITIONS, resume=SAME)
    bias: bool = flag(True, resume=SAME)
    sequence: int = whole(64, unit="tokens", resume=SAME)
    seed: int = whole(0, 0, _PART_SEED, resume=_SEED)
    start: str = text("", unit="path", resume=_WEIGHTS)
    start_names: str = text("", unit="path", resume=_WEIGHTS)
    history: int = whole(16, unit="entries", resume=SAME)
    tied: bool = flag(False, resume=SAME)
    dropout: float = fraction(0.0, resume=SAME)
    head: str = one_of("te", *HEADS, resume=SAME)
    scales: str = one_of("action", *SCALES, resume=SAME)
    wgrad_group: int = whole(1, unit="microbatches", resume=SAME)

    def layer(self, batch: int = 16) -> LayerConfig:
        """
        Return the dimensions of a layer.

        Args:
            batch: Number of windows (training sequences) per microbatch. The default fits FP8
                products for windows of any length.

        Raises:
            ValueError: The dimensions do not fit each other, or do not fit FP8.
        """
        return LayerConfig(
            self.hidden,
            self.ffn,
            self.heads,
            self.sequence,
            batch,
            kv_heads=self.kv_heads or None,
            norm=self.norm,
            activation=self.activation,
            positions=self.positions,
            bias=self.bias,
        )


@attrs.frozen(kw_only=True)
class Parallel:
    """
    Table `[parallel]`: the schedule, and the mapping of the model onto ranks.

    Args:
        schedule: The pipeline schedule: a short name, or a schedule class of torch.
        pp: Number of ranks of the pipeline.
        vpp: Number of stages per rank; 0 means 1 for 1F1B and GPipe, and 2 for other schedules.
        dp: Number of replicas of the pipeline (data parallelism).
        microbatches: Number of microbatches per step and replica, over all walks (passes over the
            schedule).
        walks: Number of walks (passes over the schedule) per step. With 2, each walk takes half of
            the microbatches, and gradients accumulate over both walks before the update. More than
            one walk needs `rule = "accumulate"`. Steps of several walks cannot run as one launch.
        batch: Number of windows per microbatch.
        cut: How layers are divided into stages. `even` gives all stages the same number of layers;
            if the layers do not divide evenly, some stages get one layer more. `balanced` balances
            the stages by `embedding_cost` and `head_cost`. `measured` balances the stages by
            measured times. A list gives the number of layers of each stage.
        embedding_cost: Cost of the embedding relative to a layer, for `cut = "balanced"`; refused
            with another cut.
        head_cost: Cost of the head relative to a layer, for `cut = "balanced"`; refused with
            another cut.
        embedding_time: Time of the embedding's F, dI and dW together, for `cut = "measured"`; given
            only together with `layer_times`.
        layer_times: Time of each layer's F, dI and dW together, for `cut = "measured"`. If left
            out, the run measures `embedding_time`, `layer_times` and `head_time` before the first
            step, and writes them to the log and the report under these names.
        head_time: Total time of F, dI and dW for the final norm, the head and the loss, for `cut =
            "measured"`; given only together with `layer_times`.
        rule: Where dW writes gradients. `accumulate` adds the gradients of all microbatches in one
            buffer per matrix. `per_microbatch` has one buffer per matrix and microbatch. `copied`
            copies each microbatch's gradient out of the library's own memory. With `per_microbatch`
            and `copied`, the step ends with a sum of the gradients.
        provisioning: Number of slots per stage. `live` allocates as many slots as the largest
            number of tapes that exist at once. `static` allocates one slot per microbatch.
        mode: How a step runs. `eager` uses no graphs. `replays` replays one CUDA graph per action.
            `one launch` runs a whole step as one graph, in which the devices of all ranks vote
            whether to update. A CPU always runs eager. If steps cannot run as one launch, they run
            as replays, and the log gives the reason. The older flags `captured` and `one_launch`
            are still accepted in place of `mode`.
        recompute: Stages that recompute activations. Such a stage keeps only the inputs of its
            layers from F to dI. Its dI then computes the activations again, which takes the time of
            one more F. The bits of training stay the same. With `mode = "replays"` each slot also
            reserves the memory in which its dI recomputes; `one launch` reserves this memory once.
            A list selects stages by number: `[0, 3]` means the first and the fourth stage of the
            model. With Transformer Engine, a run that recomputes needs `dropout = 0`.
        amax: Which amaxes determine the scales. With `replica`, each replica uses its own amaxes.
            With `replicas`, all replicas use the largest amax over all replicas, and therefore have
            the same scales.
    """

    schedule: str = schedule("zbv")
    pp: int = whole(1, unit="ranks")
    vpp: int = whole(0, 0, unit="stages")
    dp: int = whole(1, unit="replicas", resume=_REPLICAS)
    microbatches: int = whole(4, unit="microbatches")
    walks: int = whole(1, unit="walks")
    batch: int = whole(1, unit="windows")
    cut: Any = cut()  # noqa: RUF009 - a field of attrs
    embedding_cost: float = number(0.0, unit="layers")
    head_cost: float = number(1.0, unit="layers")
    embedding_time: float = number(0.0, unit="ms", resume=_TIMES)
    layer_times: Any = times(unit="ms", resume=_TIMES)  # noqa: RUF009 - a field of attrs
    head_time: float = number(0.0, unit="ms", resume=_TIMES)
    rule: str = one_of("accumulate", *RULES, resume=_RULE)
    provisioning: str = one_of("live", *PROVISIONINGS)
    mode: Any = one_of("replays", *MODES)  # noqa: RUF009 - a field of attrs
    recompute: Any = stages()  # noqa: RUF009 - a field of attrs
    amax: str = one_of("replica", *AMAX, resume=SAME)


@attrs.frozen(kw_only=True)
class Data:
    """
    Table `[data]`: the token files.

    Args:
        train: Token file to train on.
        held_out: Token file to evaluate on; empty for no evaluation.
        seed: Seed of the order of windows.
        shuffle: Whether each pass over the file has its own order of windows; otherwise windows
            come in the file's order.
    """

    train: str = text("train.npy", unit="path", resume="must have the same content")
    held_out: str = text("", unit="path")
    seed: int = whole(0, 0, SEED, resume=SAME)
    shuffle: bool = flag(True, resume=SAME)


@attrs.frozen(kw_only=True)
class Optimizing:
    """
    Table `[optimizer]`: AdamW and its learning rate.

    Args:
        rate: Learning rate at the end of the warm-up.
        warmup: Number of steps of the linear warm-up.
        decay_steps: Number of steps, including the warm-up, until the learning rate reaches its
            minimum. 0 means `steps` of `[run]` at the first start; a resume with more steps keeps
            this number, so the learning-rate curve stays the same.
        least_rate: Learning rate at the end of the cosine decay; at most `rate`.
        weight_decay: Weight decay of matrices; norms, biases and embeddings have none.
        master: Whether the optimizer keeps fp32 copies of the parameters.
        clip_norm: Limit to which the norm of all gradients, of all ranks together, is clipped; 0
            for no clipping.
        skip_nonfinite: Whether every rank skips an update if the gradient norm is not finite. If
            false, the update is made despite such a norm.
        stop_after_skips: Number of skipped updates in a row after which the run ends as diverged,
            with exit code 1; 0 for no limit.
    """

    rate: float = number(1e-3, positive=True)
    warmup: int = whole(10, 0, COUNT, unit="steps")
    decay_steps: int = whole(0, 0, COUNT, unit="steps", resume=_DECAY)
    least_rate: float = number(1e-4)
    weight_decay: float = number(0.01)
    master: bool = flag(False, resume=SAME)
    clip_norm: float = number(0.0)
    skip_nonfinite: bool = flag(False)
    stop_after_skips: int = whole(10, 0, COUNT, unit="updates")


@attrs.frozen(kw_only=True)
class Run:
    """
    Table `[run]`: length, device, log and evaluation.

    Args:
        steps: Number of optimizer steps of the whole run, including those before a resume.
        device: Device of every rank.
        backend: Implementation of the layers. `auto` means `reference` on a CPU, and
            `transformer-engine` on a GPU.
        log: File for the log, in JSON lines; must be a new file, or the log of an earlier run.
            Steps are counted from 0. Empty for no log.
        log_every: Number of steps between two collections of the losses of all ranks. The log has a
            line for every step nevertheless.
        evaluate_every: Number of steps between two evaluations; 0 evaluates only after the last
            step.
        evaluate_windows: Number of held-out windows per evaluation.
        look_every: Number of steps between two checks that all weights, optimizer moments and
            scales are finite; the last check is after the last step. A value that is not finite
            ends the run as diverged, with exit code 1. 0 checks only before a checkpoint and after
            a resume.
        tensorboard: Folder for TensorBoard; empty for none.
        event_logs: Folder for the event log (each accepted call of the contract) and the rank log
            (messages, votes and commits) of each rank; empty for none. Existing logs are moved to
            the subfolders `before-0001` and so on.
        event_log_steps: Number of steps per file of an event log and of a rank log. After this
            number of steps, the log continues in a new file. 0 writes a single file.
        event_log_keep: Number of event log files to keep per rank, including the current file. When
            a new file begins, the oldest file is removed. The oldest file of a rank log is removed
            two steps later, when every rank has a new file. With a number above 0, the run also
            keeps only the newest of the folders `before-0001` and so on. 0 keeps all files and
            folders.
        deterministic: Whether libraries may use only CUDA kernels that give the same bits each
            time. If false, a resumed run may end with other bits than a run that never stopped.
            `qeffect runtime train --compare` always uses deterministic kernels.
        retries: Largest number of times in a row that a step is repeated after a rank stopped the
            step. The next stop ends the run. A stop in which a rank died also ends the run.
        max_seconds: Time limit of the run, counted from the moment when all ranks are connected; at
            the limit the run finishes its step, saves and ends. 0 for no limit.
    """

    steps: int = whole(20, 1, COUNT, unit="steps")
    device: str = one_of("cpu", "cpu", "cuda", resume="may change if the backend stays the same")
    backend: str = one_of("auto", "auto", "reference", "transformer-engine", resume=SAME)
    log: str = text("", unit="path")
    log_every: int = whole(1, 1, COUNT, unit="steps")
    evaluate_every: int = whole(0, 0, COUNT, unit="steps")
    evaluate_windows: int = whole(16, 1, COUNT, unit="windows")
    look_every: int = whole(100, 0, COUNT, unit="steps")
    tensorboard: str = text("", unit="path")
    event_logs: str = text("", unit="path")
    event_log_steps: int = whole(0, 0, COUNT, unit="steps")
    event_log_keep: int = whole(0, 0, COUNT, unit="files")
    deterministic: bool = flag(True)
    retries: int = whole(0, 0, unit="attempts")
    max_seconds: float = number(0.0, unit="s")


@attrs.frozen(kw_only=True)
class Checkpointing:
    """
    Table `[checkpoint]`: when and where checkpoints are saved.

    Args:
        folder: Folder of the checkpoints; empty for none.
        every: Number of steps between two checkpoints; 0 saves only after the last step.
        keep: Number of newest checkpoints to keep; the oldest is removed once a new checkpoint is
            complete.
        keep_every: A checkpoint is never removed if its step number is a multiple of this number,
            even if it is older than the newest `keep` checkpoints. 0 protects no checkpoint.
        asynchronous: Whether the files of a checkpoint are written while the next steps run. If
            false, the next step begins only once the files are written.
        replicas: What happens if this run and the run that saved the checkpoint have different
            numbers of replicas, and each saved replica has its own scaling state. `same` refuses
            the checkpoint. With `modulo` and N saved replicas, replica r loads the state of saved
            replica r modulo N.
        run: Identity of the run, which every checkpoint records. If empty, the run draws a random
            identity at the first start. Without `--adopt`, `--resume` refuses a checkpoint with
            another identity.
    """

    folder: str = text("", unit="path", resume="names the folder to resume from")
    every: int = whole(0, 0, COUNT, unit="steps")
    keep: int = whole(3, unit="checkpoints")
    keep_every: int = whole(0, 0, COUNT, unit="steps")
    asynchronous: bool = flag(False)
    replicas: str = one_of("same", "same", "modulo")
    run: str = name("", resume="must stay the same if given, unless `--adopt` is given")


@attrs.frozen(kw_only=True)
class Waiting:
    """
    Table `[limits]`: how long ranks wait for each other.

    Every wait has one of these limits. A rank that waits longer stops the step and reports why.

    Args:
        start_s: Time for all ranks to connect, and to connect again after a stop.
        message_s: Time for one message between pipeline ranks or between replicas, if the host
            waits for the message.
        commit_s: Time for all ranks to reach the commit at the end of a step, and for a rank's
            device to finish its work.
        grace_s: Time for all ranks to publish why they stopped.
        save_s: Time for all ranks to write or read their files of a checkpoint.
    """

    start_s: float = number(_DEFAULT.start, positive=True, unit="s")
    message_s: float = number(_DEFAULT.message, positive=True, unit="s")
    commit_s: float = number(_DEFAULT.commit, positive=True, unit="s")
    grace_s: float = number(_DEFAULT.grace, positive=True, unit="s")
    save_s: float = number(_DEFAULT.save, positive=True, unit="s")


@attrs.frozen(kw_only=True)
class Guarding:
    """
    Table `[guard]`: checks that find silent corruption.

    Args:
        digests: Whether the log has a digest (hash) of each gradient of every step, taken before
            the update. `qeffect runtime bisect` compares the digests of two logs.
        replay_every: Every N-th step runs twice, where N is this number. Both runs begin with the
            same weights, scales and random numbers. The device compares digests of all gradients;
            if the digests differ, no rank updates. The comparison does not find an error that is
            the same in both runs, such as a bit of a weight that flipped before the first run. 0
            runs no step twice.
        on_mismatch: What happens if the two runs of a step differ. `stop` ends the training with
            exit code 1. `again` restarts the step, and ends the training after three mismatches in
            a row.
    """

    digests: bool = flag(False)
    replay_every: int = whole(0, 0, COUNT, unit="steps")
    on_mismatch: str = one_of("stop", "stop", "again")


@attrs.frozen(kw_only=True)
class Config:
    """
    The configuration of a training run, from a training file.

    Args:
        source: The path of the training file.
        model: Dimensions of the model.
        parallel: Schedule and mapping onto ranks.
        data: Token files.
        optimizer: Learning rate and update.
        run: Length, device, log and evaluation.
        checkpoint: When and where checkpoints are saved.
        limits: How long ranks wait for each other.
        guard: Checks that find silent corruption.
    """

    source: Path = Path("train.toml")
    model: Model = attrs.field(factory=Model)
    parallel: Parallel = attrs.field(factory=Parallel)
    data: Data = attrs.field(factory=Data)
    optimizer: Optimizing = attrs.field(factory=Optimizing)
    run: Run = attrs.field(factory=Run)
    checkpoint: Checkpointing = attrs.field(factory=Checkpointing)
    limits: Waiting = attrs.field(factory=Waiting)
    guard: Guarding = attrs.field(factory=Guarding)

    def path(self, name: str) -> Path:
        """Return a path from the file, resolved against the file's own folder."""
        return self.source.parent / name

    def layer(self) -> LayerConfig:
        """
        Return the dimensions of a layer.

        Raises:
            UnusableError: The dimensions do not fit each other, or do not fit FP8.
        """
        try:
            return self.model.layer(self.parallel.batch)
        except ValueError as error:
            both = str(error).startswith("sequence * batch")
            where = "[model] sequence and [parallel] batch:" if both else "[model]"
            raise UnusableError(f"{self.source}: {where} {error}") from None

    def waits(self) -> Limits:
        """Return the table `[limits]` as timeouts for the ranks."""
        given = self.limits
        return Limits(
            start=given.start_s,
            message=given.message_s,
            commit=given.commit_s,
            grace=given.grace_s,
            save=given.save_s,
        )

    def require_drawn(self, what: str) -> None:
        """
        Raise an error if the weights come from a file. All runs of a comparison draw their weights
        from the seed.

        Args:
            what: Name of the comparing option or command, for the error message.

        Raises:
            UnusableError: The weights come from a file.
        """
        if self.model.start:
            raise UnusableError(
                f"{self.source}: [model] start: {what} draws the weights of every run from the "
                "seed; leave start out"
            )

    def record(self) -> dict[str, Any]:
        """Return the tables as plain data."""
        return {name: attrs.asdict(getattr(self, name)) for name in TABLES}


TABLES: Mapping[str, type] = {
    "model": Model,
    "parallel": Parallel,
    "data": Data,
    "optimizer": Optimizing,
    "run": Run,
    "checkpoint": Checkpointing,
    "limits": Waiting,
    "guard": Guarding,
}

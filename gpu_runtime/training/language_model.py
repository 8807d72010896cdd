"""
A decoder language model that is divided (cut) into the stages of a pipeline.

The first stage has the token embedding; the last has the final norm, the head and cross entropy.
Each part (embedding, layer, head) has its own seed, and a parameter's name contains the position in
the whole model (`layers.5.qkv.weight`). Therefore initial bits and names do not depend on the cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from ..backends.ends import EMBEDDED, PROJECTED, Ends, LossShare, mean_cross_entropy
from ..backends.heads import HEADS
from ..backends.protocol import BackendError, StageBackend
from ..ranks.feed import to_device
from ..ranks.job import Job
from ..ranks.ties import Tie
from ..step.clipping import Clipping
from ..step.optimizer import Optimizer
from .data import Loader
from .rates import Rate

__all__ = ["LanguageJob", "balanced_cut", "decays", "even_cut", "name_of"]

_LAYER = re.compile(r"layers\.(\d+)\.")
_MEAN = functools.partial(mean_cross_entropy, overwrite=True)
"""A microbatch's mean loss; the backward may overwrite the logits, which nothing else reads."""


def even_cut(layers: int, stages: int) -> tuple[int, ...]:
    """
    Return the number of layers of each stage, distributed as evenly as possible. The first stages
    get the extra layers.

    >>> even_cut(10, 4)
    (3, 3, 2, 2)

    Raises:
        ValueError: There are fewer layers than stages.
    """
    _require_enough(layers, stages)
    each, more = divmod(layers, stages)
    return tuple(each + (n < more) for n in range(stages))


def balanced_cut(
    costs: Sequence[float], stages: int, *, embedding: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """
    Return the numbers of layers per stage that minimize the cost of the costliest stage.

    Among cuts with the same maximum, the cut with the smallest sum of squared stage costs is
    chosen. If several such cuts remain, the one with the fewest layers in the first stages is
    chosen.

    Args:
        costs: Cost of each layer, in any unit, for example measured times.
        stages: Number of stages.
        embedding: Cost of the embedding, which is in the first stage.
        head: Cost of norm, head and loss, which are in the last stage.

    >>> balanced_cut([1.0] * 8, 4, head=2.0)
    (2, 2, 3, 1)

    Raises:
        ValueError: There are fewer layers than stages, or a cost is negative.
    """
    layers = len(costs)
    _require_enough(layers, stages)
    if min(*costs, embedding, head, 0.0) < 0:
        raise ValueError(
            "expected costs of at least 0 (times, or multiples of one layer's cost), found a "
            "negative cost"
        )

    @functools.cache
    def cost(stage: int, start: int, stop: int) -> float:
        ends = embedding * (stage == 0) + head * (stage == stages - 1)
        return sum(costs[start:stop]) + ends

    @functools.cache
    def highest(stage: int, start: int) -> float:
        """Return the lowest possible maximum cost of this stage and all later stages."""
        if stage == stages - 1:
            return cost(stage, start, layers)
        stops = range(start + 1, layers - (stages - stage - 1) + 1)
        return min(max(cost(stage, start, stop), highest(stage + 1, stop)) for stop in stops)

    limit = highest(0, 0)

    @functools.cache
    def squares(stage: int, start: int) -> tuple[float, tuple[int, ...]] | None:
        """
        Among the cuts of this stage and all later stages whose costs are at most `limit`, find the
        cut with the smallest sum of squared stage costs. Return this sum and the number of layers
        of each stage; None if no cut fits.
        """
        last = stage == stages - 1
        stops = range(start + 1, layers - (stages - stage - 1) + 1)
        best: tuple[float, tuple[int, ...]] | None = None
        for stop in (layers,) if last else stops:
            own = cost(stage, start, stop)
            rest = (0.0, ()) if last else squares(stage + 1, stop)
            if own > limit or rest is None:
                continue
            found = own**2 + rest[0], (stop - start, *rest[1])
            if best is None or found < best:
                best = found
        return best

    found = squares(0, 0)
    assert found is not None  # the cut that gave the limit fits
    return found[1]


def _require_enough(layers: int, stages: int) -> None:
    if stages < 1 or layers < stages:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages with at least one layer each"
        )


def name_of(cut: Sequence[int]) -> Callable[[int, str], str]:
    """
    Return a function that maps a stage and a name within the stage to a name in the model.

    Args:
        cut: Number of layers of each stage.

    >>> name_of((3, 1))(1, "layers.0.fc1.weight")
    'layers.3.fc1.weight'
    >>> name_of((3, 1))(1, "head.weight")
    'head.weight'
    """
    first = [sum(cut[:stage]) for stage in range(len(cut))]

    def named(stage: int, local: str) -> str:
        found = _LAYER.match(local)
        if found is None:
            return local
        return f"layers.{first[stage] + int(found[1])}.{local[found.end() :]}"

    return named


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter gets weight decay: matrices do; norms, biases and embeddings do not."""
    return parameter.dim() > 1 and not name.startswith("embedding.")


@attrs.frozen(kw_only=True)
class LanguageJob(Job):
    """
    The job of a pipeline that trains a language model.

    Args:
        vocabulary: Number of tokens in the vocabulary.
        cut: Number of layers of each stage; one layer per stage by default.
        loader: Supplies the windows of training text.
        rate: Function of the step that returns the learning rate.
        weight_decay: Weight decay of the matrices.
        master: Whether the optimizer keeps fp32 copies of the parameters.
        clip_norm: Upper limit of the norm of all gradients, by clipping; None for no clipping.
        skip_nonfinite: Whether to skip an update if the norm of the gradients is not finite.
        tied: Whether the token embedding and the head's matrix are one weight, named
            `embedding.weight`. The first stage and the last stage each have a copy.
        head: What computes the head, one of `heads.HEADS`.

    Raises:
        ValueError: The cut has the wrong number of stages or a stage without a layer, the head is
            unknown, or `dropout` is not a number in [0, 1).
    """

    vocabulary: int = 256
    cut: tuple[int, ...] = attrs.field()
    loader: Loader | None = attrs.field(default=None, eq=False)
    rate: Rate = attrs.field(factory=Rate)
    weight_decay: float = 0.01
    master: bool = False
    clip_norm: float | None = None
    skip_nonfinite: bool = False
    tied: bool = False
    head: str = "te"

    @cut.default
    def _one_each(self) -> tuple[int, ...]:
        return (1,) * self.num_stages

    def __attrs_post_init__(self) -> None:
        if len(self.cut) != self.num_stages or min(self.cut) < 1:
            raise ValueError(
                f"expected a cut into {self.num_stages} stages with at least one layer each, found "
                f"{list(self.cut)}"
            )
        if self.head not in HEADS:
            raise ValueError(f"expected head to be one of {', '.join(HEADS)}, found {self.head!r}")

    def name_of(self, stage: int, local: str) -> str:
        """Return the whole model's name for the parameter or tensor `local` of a stage."""
        return EMBEDDED if self.tied and local == PROJECTED else name_of(self.cut)(stage, local)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The tie of embedding and head; empty if embedding and head are not tied."""
        copies = (0, EMBEDDED), (self.num_stages - 1, PROJECTED)
        return (Tie(EMBEDDED, copies),) if self.tied else ()

    def decays(self, name: str, parameter: Tensor) -> bool:
        """
        Whether a parameter gets weight decay: matrices do; norms, biases and embeddings do not.

        A head that is tied to the embedding counts as an embedding.
        """
        return decays(EMBEDDED if self.tied and name == PROJECTED else name, parameter)

    def options(self, index: int, device: torch.device, *, loss: bool) -> dict[str, object]:
        """
        Return the arguments of a stage's constructor, as `Job.options` does. The cut determines the
        stage's layers. The first stage also has the embedding, and the last stage has the head.
        """
        last = index == self.num_stages - 1
        ends = Ends(
            vocabulary=self.vocabulary,
            embedding=index == 0,
            head=last,
            first_layer=sum(self.cut[:index]),
            tied=self.tied,
            kind=self.head,
        )
        closes = loss and last
        return {
            "num_layers": self.cut[index],
            "first": index == 0,
            "loss": self.loss if closes else None,
            "extra_inputs": (ends.tokens(self.config, device),) if closes else (),
            "seed": self.seed,
            "ends": ends,
        }

    def optimizer(self, stages: list[StageBackend], *, capturable: bool = False) -> Optimizer:
        """
        Return an AdamW optimizer without weight decay for norms, biases and embeddings.

        A capturable optimizer keeps its learning rate on the device, so replays of a graph use the
        current rate.
        """
        lr: float | Tensor = self.rate.at(0)
        if capturable:
            lr = torch.tensor(lr, dtype=torch.float32, device=stages[0].domain.device)
        return Optimizer(
            stages,
            lr=lr,
            capturable=capturable,
            weight_decay=self.weight_decay,
            decays=self.decays,
            master_dtype=torch.float32 if self.master else None,
        )

    @property
    def clipping(self) -> Clipping:
        """How an update uses the norm of all gradients."""
        return Clipping(max_norm=self.clip_norm, skip_nonfinite=self.skip_nonfinite)

    def prepare(self, step: int, optimizer: Optimizer) -> None:
        """Set the step's learning rate."""
        optimizer.set_rate(self.rate.at(step))

    @property
    def loss(self) -> LossShare:
        """The function that computes a microbatch's share of a step's mean loss."""
        return LossShare(_MEAN, self.microbatches * self.dp)

    @property
    def windows_a_step(self) -> int:
        """Number of windows of text per step, over all replicas."""
        return self.dp * self.microbatches * self.config.batch

    def position(self, step: int) -> int:
        """
        Return the number of windows that training uses in all steps before `step`.
        """
        loader = self._loader
        return loader.position + (step - loader.step) * self.windows_a_step

    @property
    def _loader(self) -> Loader:
        if self.loader is None:
            raise BackendError("this job has no data; give it a loader")
        return self.loader

    def batch(
        self, device: torch.device, replica: int = 0
    ) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """
        Return a function of step and microbatch. It returns the microbatch's tokens, and for each
        token the token that follows.
        """
        loader = self._loader
        held: dict[int, tuple[Tensor, Tensor]] = {}

        def whole_step(step: int) -> tuple[Tensor, Tensor]:
            """
            Copy all microbatches of a step to the device in one copy, without waiting for a stream.
            """
            c, share = self.config, self.microbatches * self.config.batch
            both = loader.windows(self.position(step) + replica * share, share)
            sides = [
                side.view(c.sequence, self.microbatches, c.batch).transpose(0, 1).contiguous()
                for side in both
            ]
            return to_device(sides[0], device), to_device(sides[1], device)

        def draw(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            if step not in held:
                held.clear()
                held[step] = whole_step(step)
            x, y = held[step]
            return x[microbatch], y[microbatch]

        return draw

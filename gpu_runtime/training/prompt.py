"""
Generate text with the model of a checkpoint. One process runs the whole model on the CPU, token by
token.

For checkpoints of the reference backend, this backend computes the model with the saved scales, as
in an evaluation. Checkpoints of Transformer Engine's backend are computed in fp32, without FP8. A
prompt starts at the model's first position. If the text is longer than a window, the model sees
only the last `sequence` tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..backends.ends import EMBEDDED, PROJECTED, Ends
from ..backends.protocol import BackendError, parameters
from ..backends.reference import ReferenceDomain, ReferenceStage
from ..step.memory.numerical_state import Snapshot
from .config import Model
from .export import read_part
from .plain_model import PlainModel
from .state import MODEL, NUMERICAL
from .te_weights import as_reference

__all__ = ["WholeModel", "choose"]

_LIBRARY: Final = "transformer-engine"
"""Name of the Transformer Engine backend; a constant, because its module needs the library."""


@attrs.frozen(eq=False)
class WholeModel:
    """
    The model of a checkpoint, loaded into this process.

    Args:
        model: The dimensions of the model.
        facts: The facts file of the checkpoint, as plain data.
        of_window: Function that computes the logits of the next token from the tokens so far, at
            most as many as a window has.
        computed: Description of how the logits are computed.
    """

    model: Model
    facts: Mapping[str, Any]
    of_window: Callable[[Sequence[int]], Tensor]
    computed: str

    @classmethod
    def of(cls, path: Path) -> WholeModel:
        """
        Load a checkpoint that any number of ranks saved. First compare each file with its hash.

        The scales of the first replica are used.

        Raises:
            BackendError: The folder is not a complete checkpoint of `qeffect runtime train`, or its
                backend is unknown.
        """
        weights, facts = read_part(path, MODEL)
        given = facts["must"].get("given", {}).get("model")
        if not isinstance(given, dict):
            raise BackendError(
                f"{path}: expected the model's dimensions in the checkpoint's facts, found none; "
                "name a checkpoint that qeffect runtime train wrote"
            )
        backend = facts["must"].get("backend")
        if backend not in (ReferenceDomain.name, _LIBRARY):
            raise BackendError(
                f"{path}: expected a checkpoint of the backend {ReferenceDomain.name} or "
                f"{_LIBRARY}, found the backend {backend}"
            )
        known = attrs.fields_dict(Model)
        model = Model(**{name: value for name, value in given.items() if name in known})
        if model.tied:
            weights[PROJECTED] = weights[EMBEDDED]
        if backend == _LIBRARY:
            plain = PlainModel(model, as_reference(weights, model.layer()), gelu="tanh")
            return cls(model, facts, plain.logits, "in fp32, without FP8")
        return cls(model, facts, _reference(path, model, weights), "with the reference backend")

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of the next token, in fp32. The checkpoint's scales stay unchanged."""
        return self.of_window(list(ids)[-self.model.sequence :])

    def continued(
        self, ids: Sequence[int], *, tokens: int, below: int, temperature: float, seed: int
    ) -> Iterator[int]:
        """
        Yield tokens that continue a text.

        Args:
            ids: The text's tokens, at least one.
            tokens: Number of tokens to yield.
            below: Number of tokens that the encoding uses. Only tokens below this number are
                chosen, because the rest of the vocabulary is padding.
            temperature: Divides the logits before a random choice; 0 takes the most probable token.
            seed: Seed of the choices.
        """
        generator = torch.Generator().manual_seed(seed)
        text = list(ids)
        for _ in range(tokens):
            text.append(choose(self.logits(text)[:below], temperature, generator))
            yield text[-1]


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """
    Choose the next token.

    Args:
        logits: The logit of each token.
        temperature: Divides the logits before a random choice; 0 takes the most probable token.
        generator: The random generator that draws the token.
    """
    if temperature == 0:
        return int(logits.argmax())
    weights = torch.softmax((logits.double() - logits.max()) / temperature, 0)
    return int(torch.multinomial(weights, 1, generator=generator))


def _reference(
    path: Path, model: Model, weights: Mapping[str, Tensor]
) -> Callable[[Sequence[int]], Tensor]:
    """
    Load a checkpoint of the reference backend, with the scales of the first replica.

    Raises:
        BackendError: A tensor is only in the checkpoint or only in the model, or has another shape.
    """
    # Windows of an F; only the first one has text.
    batch = next(n for n in range(1, 17) if model.sequence * n % 16 == 0)
    layer = model.layer(batch)
    ends = Ends(
        vocabulary=model.vocabulary,
        embedding=True,
        head=True,
        tied=model.tied,
        kind=model.head,
    )
    domain = ReferenceDomain(model.history)
    stage = ReferenceStage(0, domain, layer, num_layers=model.layers, first=True, ends=ends)
    into = {name: one.detach() for name, one in parameters(stage).items()}
    _copy(path, weights, into)
    scales, _ = read_part(path, f"{NUMERICAL}.dp0", compared=True)
    # The state of a process, such as the position of dropout, has no part in a forward.
    kept = {name: one for name, one in scales.items() if not name.startswith("process")}
    _copy(path, kept, stage.numerical_state())
    stage.refresh_cache()
    return partial(_evaluated, stage, torch.zeros(model.sequence, batch, dtype=torch.int64))


def _evaluated(stage: ReferenceStage, tokens: Tensor, seen: Sequence[int]) -> Tensor:
    """Compute logits without changing the scales; `tokens` has the shape of a microbatch."""
    tokens = torch.zeros_like(tokens)
    tokens[: len(seen), 0] = torch.tensor(list(seen))
    held = Snapshot(tuple(stage.numerical_state().values()))
    with torch.no_grad():
        (found,) = stage.native_forward((tokens,), first=False)
    held.restore()
    row: Tensor = found[len(seen) - 1, 0].float()
    return row


def _copy(path: Path, found: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Copy tensors by name; all names and shapes must be equal."""
    if odd := sorted(found.keys() ^ into.keys()):
        raise BackendError(
            f"{path}: expected the same tensors in the checkpoint and the model, found {len(odd)} "
            f"in only one of them, such as {odd[0]}; load the checkpoint with the version that "
            "wrote it"
        )
    for name, tensor in into.items():
        if found[name].shape != tensor.shape:
            raise BackendError(
                f"{path}: {name}: expected shape {tuple(tensor.shape)}, found "
                f"{tuple(found[name].shape)}"
            )
        with torch.no_grad():
            tensor.copy_(found[name])

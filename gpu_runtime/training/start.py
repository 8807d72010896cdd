"""
Begin a run from the weights in a file, such as a file that `qeffect runtime export` wrote.

Only weights come from the file. AdamW's state, the scales and the position in the text start as in
a new run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.cli.command import needs
from qeffect.report import UnusableError
from qeffect.text import counted, within

from ..backends.protocol import BackendError, parameters
from ..ranks.membership import agree_on, all_gather
from ..ranks.worker import Worker
from .state import Naming
from .weight_names import WeightNames

__all__ = ["StartingWeights", "load_start"]

#: The first bytes of what `torch.save` writes.
_ZIP = b"PK"


@attrs.frozen
class StartingWeights:
    """
    The weights in a file. Each weight is read only when it is used.

    Args:
        path: The file of weights.
        names: Names of the weights.
        read: Function that returns the weight with a given name.
    """

    path: Path
    names: frozenset[str]
    read: Callable[[str], Tensor]

    @classmethod
    def open(cls, path: Path) -> StartingWeights:
        """
        Open a safetensors file, or a dictionary that `torch.save` wrote. The file's content decides
        which format is read.

        Raises:
            BackendError: The file cannot be read, or has neither of these formats.
            UnusableError: The file is a safetensors file, and the package safetensors is not
                installed.
        """
        try:
            with path.open("rb") as file:
                zipped = file.read(len(_ZIP)) == _ZIP
        except OSError as error:
            raise BackendError(f"{path}: {error.strerror or error}") from None
        try:
            return cls._of_torch(path) if zipped else cls._of_safetensors(path)
        except (UnusableError, BackendError):
            raise
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise _unknown(path, within(str(error), 80)) from None

    def named(self, names: WeightNames, needed: Iterable[str]) -> StartingWeights:
        """
        Return the same weights under the model's names.

        Args:
            names: The file's names for the weights.
            needed: Names of the model's weights.

        Raises:
            BackendError: `names` lacks a weight of the model.
        """
        others = names.others(sorted(needed))
        held = frozenset(name for name, (theirs, _) in others.items() if theirs in self.names)
        further = self.names - {theirs for theirs, _ in others.values()}

        def read(name: str) -> Tensor:
            theirs, turned = others[name]
            return names.turned(name, self.read(theirs), turned=turned)

        return StartingWeights(self.path, held | further, read)

    @classmethod
    def _of_torch(cls, path: Path) -> StartingWeights:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(held, Mapping) or not all(
            isinstance(name, str) and isinstance(one, Tensor) for name, one in held.items()
        ):
            raise _unknown(path, f"a {type(held).__name__}, but not of tensors by name")
        return cls(path, frozenset(held), held.__getitem__)

    @classmethod
    def _of_safetensors(cls, path: Path) -> StartingWeights:
        library: Any = needs("export", lambda: __import__("safetensors"))
        try:
            opened = library.safe_open(path, "pt")
        except library.SafetensorError as error:
            raise _unknown(path, within(str(error), 80)) from None
        return cls(path, frozenset(opened.keys()), opened.get_tensor)


def _unknown(path: Path, found: str) -> BackendError:
    return BackendError(
        f"{path}: expected weights in a file of safetensors or torch.save, found: {found}"
    )


def load_start(
    worker: Worker, naming: Naming, path: Path, where: str, names: str = "", folder: Path = Path()
) -> int:
    """
    Copy the weights of a file into a model before its first step. Every rank must call this
    function.

    Args:
        worker: This rank, whose epoch is 0.
        naming: How checkpoints name each tensor of the model.
        path: The file. Every rank reads it.
        where: The training file's field that names the file, for messages.
        names: The file's names for the weights: ``gpt2``, or the path of a file of names; empty for
            QEffect's names.
        folder: The folder to which a relative path in `names` refers.

    Returns:
        The number of weights in the file.

    Raises:
        BackendError: A rank cannot read the file, or names, shapes or dtypes differ from the
            model's. Every rank raises this error before any weight changes.
    """
    into = [
        (naming(stage.index, local), parameter)
        for stage in worker.runtime.stages.values()
        for local, parameter in parameters(stage).items()
    ]
    found, problem = None, ""
    own = [name for name, _ in into]
    needed = {name for said in all_gather(worker.member, own) for name in said}
    try:
        found = StartingWeights.open(path)
        if names:
            found = found.named(WeightNames.of(names, folder), needed)
    except (BackendError, UnusableError) as error:
        problem = f"{where}: {error}"
    agree_on(worker.member, problem)
    assert found is not None
    agree_on(worker.member, _odd(found, needed, into, where))
    worker.runtime.drain()
    with torch.no_grad():
        for name, parameter in into:
            parameter.copy_(found.read(name))
    worker.optimizer.take_parameters()
    worker.runtime.drain()
    return len(needed)


def _odd(
    found: StartingWeights, needed: set[str], into: Sequence[tuple[str, Tensor]], where: str
) -> str:
    """Say how the file differs from the model; empty if file and model agree."""
    said = f"{where}: {found.path}"
    if lacking := sorted(needed - found.names):
        missing = f"{counted(len(lacking), 'weight')} of the model"
        return f"{said} lacks {lacking[0]}; in total it lacks {missing}"
    if further := sorted(found.names - needed):
        more = counted(len(further), "such weight")
        return f"{said} has {further[0]}, which the model lacks; in total it has {more}"
    for name, parameter in into:
        try:
            held = found.read(name)
        except (OSError, RuntimeError) as error:
            return f"{said}: {name} cannot be read: {within(str(error), 80)}"
        for what, expected, there in (
            ("shape", list(parameter.shape), list(held.shape)),
            ("type", parameter.dtype, held.dtype),
        ):
            if expected != there:
                return f"{said}: {name}: expected the {what} {expected}, found {there}"
    return ""

"""
The names that other programs use for a model's weights: the names of `gpt2`, or names from a file.

In such a file, a line ``OURS = THEIRS`` names one weight: QEffect's name, then the other program's
name. A ``*`` on both sides matches the number of a layer. ``transposed`` after THEIRS means that
the other program has the transposed matrix. Lines that begin with ``#`` are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from torch import Tensor

from qeffect.text import unreadable

from ..backends.protocol import BackendError

__all__ = ["GPT2", "WeightNames", "gpt2_config"]

GPT2: Final = "gpt2"
"""The names, and the transposed matrices, of `GPT2LMHeadModel` in the package transformers."""

_GPT2: Final = """
embedding.weight = transformer.wte.weight
embedding.position = transformer.wpe.weight
layers.*.norm1.weight = transformer.h.*.ln_1.weight
layers.*.norm1.bias = transformer.h.*.ln_1.bias
layers.*.qkv.weight = transformer.h.*.attn.c_attn.weight transposed
layers.*.qkv.bias = transformer.h.*.attn.c_attn.bias
layers.*.proj.weight = transformer.h.*.attn.c_proj.weight transposed
layers.*.proj.bias = transformer.h.*.attn.c_proj.bias
layers.*.norm2.weight = transformer.h.*.ln_2.weight
layers.*.norm2.bias = transformer.h.*.ln_2.bias
layers.*.fc1.weight = transformer.h.*.mlp.c_fc.weight transposed
layers.*.fc1.bias = transformer.h.*.mlp.c_fc.bias
layers.*.fc2.weight = transformer.h.*.mlp.c_proj.weight transposed
layers.*.fc2.bias = transformer.h.*.mlp.c_proj.bias
head.norm.weight = transformer.ln_f.weight
head.norm.bias = transformer.ln_f.bias
head.weight = lm_head.weight
"""
_LINE: Final = re.compile(r"(\S+)\s*=\s*(\S+)(\s+transposed)?")


@attrs.frozen
class WeightNames:
    """
    Names of another program for a model's weights.

    Args:
        source: The origin of the names, for messages.
        lines: For each of QEffect's names: the other program's name, and whether the matrix is
            transposed.
    """

    source: str
    lines: Mapping[str, tuple[str, bool]]

    @classmethod
    def of(cls, name: str, folder: Path = Path()) -> WeightNames:
        """
        Return the names that a command's option or a training file's field selects.

        Args:
            name: ``gpt2``, or the path of a file.
            folder: The folder to which a relative path refers.

        Raises:
            BackendError: The file cannot be read, or a line is malformed.
        """
        if name == GPT2:
            return cls.read(_GPT2, GPT2)
        path = folder / name
        try:
            return cls.read(path.read_text(encoding="utf-8"), str(path))
        except (OSError, ValueError) as error:
            raise BackendError(
                f"{path}: {unreadable(error)}; expected {GPT2}, or a file of lines OURS = THEIRS"
            ) from None

    @classmethod
    def read(cls, text: str, source: str) -> WeightNames:
        """
        Read the names from lines of text.

        >>> names = WeightNames.read("layers.*.fc1.weight = h.*.up transposed", "a file")
        >>> names.other("layers.12.fc1.weight")
        ('h.12.up', True)

        Raises:
            BackendError: A line is malformed, or two lines name the same weight.
        """
        lines: dict[str, tuple[str, bool]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            if found is None or found[1].count("*") != found[2].count("*") or "**" in line:
                raise BackendError(
                    f"{source}, line {number}: expected OURS = THEIRS, with one * in both "
                    f"names or in neither, found {line!r}"
                )
            if found[1].count("*") > 1 or found[1] in lines:
                why = "more than one * in" if found[1].count("*") > 1 else "a second line for"
                raise BackendError(f"{source}, line {number}: {why} {found[1]}")
            lines[found[1]] = found[2], found[3] is not None
        return cls(source, lines)

    def other(self, name: str) -> tuple[str, bool]:
        """
        Return a weight's name in the other program, and whether the matrix is transposed there.

        Raises:
            BackendError: No line names the weight.
        """
        for ours, (theirs, turned) in self.lines.items():
            pattern = re.escape(ours).replace(r"\*", r"(\d+)")
            if (found := re.fullmatch(pattern, name)) is not None:
                return theirs.replace("*", found[1]) if "*" in ours else theirs, turned
        raise BackendError(
            f"{self.source}: expected a line for {name}, found none; add {name} = ITS-OTHER-NAME"
        )

    def others(self, names: Iterable[str]) -> dict[str, tuple[str, bool]]:
        """
        Return, for each weight, its name in the other program and whether the matrix is transposed.

        Raises:
            BackendError: A weight has no line, or two weights would get the same name.
        """
        found = {name: self.other(name) for name in names}
        taken: dict[str, str] = {}
        for name, (theirs, _) in found.items():
            if theirs in taken:
                raise BackendError(
                    f"{self.source}: expected different names for {taken[theirs]} and {name}, "
                    f"found {theirs} for both"
                )
            taken[theirs] = name
        return found

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """
        Return weights with the other program's names and layouts.

        Raises:
            BackendError: A weight has no line, two weights would get the same name, or a vector
                would have to be transposed.
        """
        found = {}
        for name, (theirs, turned) in self.others(weights).items():
            found[theirs] = self.turned(name, weights[name], turned=turned)
        return found

    def turned(self, name: str, weight: Tensor, *, turned: bool) -> Tensor:
        """
        Transpose a weight if `turned` is True, else return it unchanged. Transposing twice restores
        the bits.
        """
        if not turned:
            return weight
        if weight.dim() != 2:
            raise BackendError(
                f"{self.source}: {name} has {weight.dim()} dimensions; only a matrix can be "
                "transposed"
            )
        return weight.t().contiguous()


def gpt2_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the configuration for which transformers' `GPT2LMHeadModel` computes the same as this
    model.

    The original GPT-2 uses another GELU (``gelu_new``).

    Args:
        model: The table `[model]` of the run.
    """
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model["vocabulary"],
        "n_positions": model["sequence"],
        "n_embd": model["hidden"],
        "n_layer": model["layers"],
        "n_head": model["heads"],
        "n_inner": model["ffn"],
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": model["tied"],
    }

"""Small texts and small models for the training tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.training.data import Loader, Tokens, save
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.gpu_runtime.training.rates import Rate

TINY = LayerConfig(32, 64, 2, 16)
COMMON_KIND: dict[str, Any] = {
    "kv_heads": 2,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
}
"""The features, besides sizes, of the layers that most current models have."""
COMMON = LayerConfig(32, 64, 4, 16, **COMMON_KIND)
"""The configuration of such layers."""
COMMON_MODEL = """heads = 4
kv_heads = 2
norm = "rmsnorm"
activation = "swiglu"
positions = "rotary"
bias = false
"""
"""The same features as fields of `[model]`."""
TEXT = b"the quick brown fox jumps over the lazy dog. "


def text(folder: Path, name: str = "train.npy", repeats: int = 200) -> Path:
    """A token file of bytes that a model learns quickly."""
    path = folder / name
    save(path, np.frombuffer(TEXT * repeats, np.uint8))
    return path


def noise(folder: Path, count: int = 4000, vocabulary: int = 64) -> Path:
    """A token file of random tokens."""
    path = folder / "noise.npy"
    save(path, np.random.default_rng(7).integers(0, vocabulary, count))
    return path


def language(path: Path, **options: Any) -> LanguageJob:
    """A language model with 64 tokens, over a file of such tokens."""
    tokens = Tokens.open(path, vocabulary=64, sequence=16)
    given = {
        "vocabulary": 64,
        "config": TINY,
        "loader": Loader(tokens=tokens, sequence=16, seed=3),
        "rate": Rate(peak=1e-2, warmup=2, steps=10, least=1e-3),
    }
    return LanguageJob(**{**given, **options})


SMALL = """
[model]
vocabulary = {vocabulary}
layers = {layers}
hidden = 32
ffn = 64
heads = 2
sequence = 16
history = 4
"""
"""The model of a run, for tests that define the rest of the run."""
CONFIG = (
    SMALL.format(vocabulary=256, layers=2)
    + """[parallel]
schedule = "1f1b"
batch = 2
microbatches = 2
[data]
train = "train.npy"
[optimizer]
rate = 0.02
warmup = 2
[run]
steps = 3
"""
)
"""A run that one process trains in a moment."""

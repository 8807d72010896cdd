"""
Streams of random numbers. A stream is the sequence from which a process draws; a named draw has its
own seed.

Within one stream, a named draw depends only on its name, which consists of numbers such as the
epoch, the microbatch and the layer. Streams and seeds are the same on every host.
`reference/dropout.py` draws from a stream on the host; `te/device_numbers.py` draws on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from numbers import Real
from typing import Any

from .epoch_scales import Scales

__all__ = [
    "POSITION",
    "SEEDS",
    "named_seed",
    "reported_draws",
    "require_probability",
    "stream_of",
]

POSITION = "generator.position"
"""Name of the generator's position in a domain's numerical state: an int64 tensor on the host."""

SEEDS = 2**63
"""Seeds of torch's generators are below this number."""


def stream_of(seed: int, replica: int, stage: int) -> int:
    """
    Return the number of the random stream of one process of a job.

    Args:
        seed: The model's seed.
        replica: Index of the process's replica.
        stage: Index of the process's first stage; 0 if the random numbers depend on the layer.
    """
    return _seed((seed, replica, stage))


def named_seed(stream: int, name: Iterable[int]) -> int:
    """
    Return the seed of one draw of a stream.

    Args:
        stream: Number of the stream.
        name: The draw's name, such as epoch, microbatch and layer.
    """
    return _seed((stream, *name))


def require_probability(dropout: Any) -> None:
    """
    Raise an error unless the value is a valid dropout probability.

    Raises:
        ValueError: The probability is not a number in [0, 1); a bool does not count as a number.
    """
    number = isinstance(dropout, Real) and not isinstance(dropout, bool)
    if not (number and 0.0 <= dropout < 1.0):
        raise ValueError(f"dropout: expected a number of at least 0 and below 1, found {dropout!r}")


def reported_draws(scales: Scales, *, draws: bool) -> bool | None:
    """
    Return the value for `Reports.draws`. It is False if no numbers are drawn. Otherwise it is True,
    or None with epoch scales (scales that are updated once an optimizer step), because named draws
    have no position that could be reported.

    Args:
        scales: When the domain's scales are updated.
        draws: Whether a stage draws random numbers.
    """
    return (None if scales == "epoch" else True) if draws else False


def _seed(numbers: Iterable[int]) -> int:
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) % SEEDS

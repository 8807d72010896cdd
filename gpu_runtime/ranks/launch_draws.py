"""
Keep the position of the device's random generator correct across launches.

When torch replays a graph, torch advances the generator's position by the numbers that the graph
may draw. A graph that is a node of a step's graph does not advance the position. So after each
launch the host advances the position by as much as the guarded step before the capture did. A
checkpoint after launches then holds the same position as a checkpoint after replays. Transformer
Engine's attention reserves numbers even without dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..backends.devices import generator_of

__all__ = ["LaunchDraws", "drawn"]


def drawn(device: torch.device) -> int:
    """
    Return the position of a device's generator, in numbers per thread; 0 on a CPU, which has no
    graphs.
    """
    return 0 if device.type == "cpu" else int(generator_of(device).get_offset())


class LaunchDraws:
    """
    Advances the position of a device's generator after launches.

    Args:
        device: The device whose random generator is advanced.

    Attributes:
        a_run: Count of random numbers per thread that one run of the step's work takes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.a_run = 0

    @contextmanager
    def measure(self, runs: int = 1) -> Iterator[None]:
        """
        Record how many random numbers a guarded step takes.

        Args:
            runs: How often the step does its work: 2 if it runs twice, else 1.
        """
        before = drawn(self.device)
        yield
        self.a_run = (drawn(self.device) - before) // runs

    def launched(self, runs: int = 1) -> None:
        """
        Advance the generator's position after the launches of a step.

        Args:
            runs: How often the launches did the step's work: 2 if the step ran twice, else 1.
        """
        if self.a_run:
            generator_of(self.device).set_offset(drawn(self.device) + runs * self.a_run)

"""What ranks of the tests of a step's times run."""

from __future__ import annotations

import os
import time
from typing import Any

from qeffect.gpu_runtime.step.actions import GuardedActions

from . import language_bodies


def slow(case: list[str], rank: int) -> Any:
    """A run in which every F of one rank takes 20 ms longer."""
    if os.environ["RANK"] == str(rank):
        real = GuardedActions.forward

        def forward(self: GuardedActions, *args: Any, **named: Any) -> Any:
            time.sleep(0.02)
            return real(self, *args, **named)

        GuardedActions.forward = forward  # type: ignore[method-assign]
    return language_bodies.in_turn([case])

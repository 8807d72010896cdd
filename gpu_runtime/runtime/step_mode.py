"""
How a step runs (`Mode`), and what prevents the mode ``one launch``. In this mode a whole step is
one CUDA graph.

`mode_on` returns the mode that a device can run. `one_launch_obstacles` lists every obstacle in a
configuration, each with its remedy. `ranks/obstacles.py` calls `one_launch_obstacles` with a
worker's configuration. If the capture of a step fails, the step stops and reports the failure
(`ranks/fallback.py`).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

__all__ = ["MODES", "Mode", "mode_on", "one_launch_obstacles", "walks_obstacle", "without_launches"]

Mode = Literal["eager", "replays", "one launch"]
"""How a step runs: backend calls, replays of one graph per action, or one graph for the step."""
MODES: tuple[Mode, ...] = get_args(Mode)


def mode_on(device: torch.device | str, mode: Mode = "replays") -> Mode:
    """
    Return the mode that a device can run: ``eager`` on a CPU, which has no CUDA graphs.

    >>> mode_on("cpu", "one launch"), mode_on("cuda:0")
    ('eager', 'replays')
    """
    return "eager" if torch.device(device).type == "cpu" else mode


def without_launches(mode: Mode) -> Mode:
    """
    Return the mode to use if a step cannot be one launch: ``replays`` instead of ``one launch``.

    >>> without_launches("one launch"), without_launches("eager")
    ('replays', 'eager')
    """
    return "replays" if mode == "one launch" else mode


def device_obstacle(device: torch.device) -> str | None:
    """Return why steps on this device cannot be one launch; None if they can."""
    return "a CPU has no CUDA graphs: run on cuda" if device.type == "cpu" else None


def walks_obstacle(walks: int) -> str | None:
    """
    Return why a step of several walks (passes over the table) cannot be one launch; None for one
    walk.
    """
    if walks == 1:
        return None
    return (
        f"a step has {walks} walks (passes over the table), which is not supported in a launch: "
        "take one walk over a table of all microbatches"
    )


def one_launch_obstacles(
    device: torch.device,
    rule: str,
    walks: int = 1,
    *,
    mode: Mode = "one launch",
    capturable: bool = True,
    keeps_gradients: bool = False,
    draws: bool = False,
) -> list[str]:
    """
    Return the reasons why a step of this configuration cannot be one launch.

    Args:
        device: Where the step runs.
        rule: The rule that says where dW writes its gradients, such as ``accumulate``.
        walks: Number of walks (passes) over the table in a step.
        mode: The mode of the runtime. Leave this argument out if there is no runtime yet.
        capturable: Whether the optimizer's update can be captured; leave it out if there is no
            optimizer yet.
        keeps_gradients: Whether gradients of single microbatches are kept until the end of the
            step; leave it out if there is no runtime yet.
        draws: Whether F draws random numbers, as dropout does.

    Returns:
        One sentence per obstacle, which also says what to change; empty if there is no obstacle.
    """
    found = []
    if mode != "one launch":
        found.append(
            f"the runtime's mode is {mode!r}: make it with RuntimeConfig(mode='one launch')"
        )
    if not capturable:
        found.append("the update cannot be captured: make the optimizer with capturable=True")
    if rule == "copied":
        found.append(
            "rule is 'copied', which is not supported in a launch: take 'accumulate' or "
            "'per_microbatch'"
        )
    if keeps_gradients:
        found.append(
            "scales are updated once an epoch and the table's dI are not in the order of "
            "microbatches, which is not supported in a launch: take a table whose dI are in this "
            "order"
        )
    if draws:
        found.append(
            "F draws random numbers, but a launch does not set the position of their generator: "
            "take mode 'replays', or leave dropout out"
        )
    found += filter(None, (walks_obstacle(walks), device_obstacle(device)))
    return found

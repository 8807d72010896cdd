"""What the ranks run in the tests of `[guard] replay_every`."""

from __future__ import annotations

from typing import Any

from qeffect.gpu_runtime.ranks.double_run import DoubleRun
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.step.optimizer import Gradients
from tests.ranks import recorded
from tests.ranks.double_bodies import flip

from .language_bodies import trained


def in_turn(cases: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Run the command several times in turn, in the same process."""
    return [_flipped(**case) for case in cases]


def launched(argv: list[str], step: int, rank: int, place: int) -> tuple[int, str, str]:
    """
    Run the command in a process where a step can be one launch; one digest of the first run is
    changed.

    Args:
        argv: The file and the options.
        step: The step.
        rank: The rank.
        place: Position of the gradient among the rank's gradients.
    """
    recorded.install()
    launch, left = OneLaunch._launch, [1]

    def flipping(self: OneLaunch) -> None:
        def between() -> None:
            double = self.pipeline.double
            if double is None or self.worker.member.rank != rank:
                return
            if self.runtime.epoch == step and left:
                left.clear()
                recorded.STREAM.submit(lambda: flip(double.first.values, place=place))

        self.between = between
        launch(self)

    OneLaunch._launch = flipping  # type: ignore[method-assign]
    return trained(*argv)


def _flipped(
    argv: list[str],
    *,
    step: int = -1,
    rank: int = 0,
    matrix: str = "",
    times: int = 1,
    removed: bool = False,
) -> tuple[int, str, str]:
    """
    Run `qeffect runtime train`; a bit of a gradient flips in the second run of a step.

    Args:
        argv: The file and the options.
        step: The step.
        rank: The rank whose gradient it is.
        matrix: The beginning of the gradient's name in its stage.
        times: Number of attempts at the step in which the bit flips.
        removed: Whether the comparison of the two runs is removed.
    """
    again, require = DoubleRun.again, DoubleRun.require_equal
    left = times

    def flipping(self: DoubleRun, pipeline: Any) -> Gradients:
        nonlocal left
        found = again(self, pipeline)
        if left and self.runtime.epoch == step and self.rank == rank:
            left -= 1
            flip(next(g for own in found.values() for n, g in own.items() if n.startswith(matrix)))
        return found

    DoubleRun.again = flipping  # type: ignore[method-assign]
    if removed:
        DoubleRun.require_equal = lambda _: None  # type: ignore[method-assign]
    try:
        return trained(*argv)
    finally:
        DoubleRun.again, DoubleRun.require_equal = again, require  # type: ignore[method-assign]

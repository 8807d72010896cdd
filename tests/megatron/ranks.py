"""Launch the ranks of a real Megatron-core run, each in its own process with a time limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.deepspeed.ranks import run

__all__ = ["LIMIT_S", "NEWEST", "RELEASES", "launch"]

#: No launch takes longer: a rank that hangs is killed and fails its test.
LIMIT_S = 1500.0
#: The releases that `make megatron` installs; the last one is that of most tests.
RELEASES = ("0.16.1", "0.17.0", "0.18.0", "0.19.2")
NEWEST = RELEASES[-1]


def folder_of(release: str) -> Path:
    """The folder of an installed release."""
    return Path(os.environ["MEGATRON_RELEASES"]) / release


def launch(
    world: int,
    folder: Path,
    cases: list[dict[str, Any]],
    *,
    release: str = NEWEST,
    whole: bool = True,
) -> list[list[dict[str, Any]]]:
    """
    Run cases on every rank, one after another; return the result that each rank reports for each
    case.

    Args:
        world: Number of ranks.
        folder: An empty folder.
        cases: The runs; see `tests.megatron.rank`.
        release: The release of Megatron-core.
        whole: Whether every run must end without an error; otherwise a rank may end because its
            peer ended.
    """
    outs = [folder / f"rank{rank}.json" for rank in range(world)]
    commands = []
    for rank, out in enumerate(outs):
        command = ["-m", "tests.megatron.rank", str(rank), str(world)]
        commands.append([*command, str(folder / "store"), str(out), json.dumps(cases)])
    codes = run(folder, commands, limit_s=LIMIT_S, path=folder_of(release))
    print(f"{len(cases)} runs")
    assert codes == [0] * world, codes
    said: list[list[dict[str, Any]]] = [json.loads(out.read_text()) for out in outs]
    failed = [(rank, case) for rank in said for n, case in enumerate(cases) if "failed" in rank[n]]
    assert not (whole and failed), [case for _, case in failed]
    return said

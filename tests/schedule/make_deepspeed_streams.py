"""
Write the instruction streams of a DeepSpeed release, from its own schedule classes.

    python -m tests.schedule.make_deepspeed_streams deepspeed-0.19.8.tar.gz

Only `deepspeed/runtime/pipe/schedule.py` of the source distribution is read. That module needs only
one other function, which prints. The streams go to `deepspeed_streams/<version>.json`: for each
class and size, the number of buffers of the rank, and for each step the instructions with their
arguments.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent / "deepspeed_streams"
#: Class, ranks and microbatches.
SIZES = (
    ("TrainSchedule", 1, 3),
    ("TrainSchedule", 1, 4),
    ("TrainSchedule", 2, 3),
    ("TrainSchedule", 2, 4),
    ("TrainSchedule", 2, 6),
    ("TrainSchedule", 4, 2),
    ("TrainSchedule", 4, 8),
    ("DualPipeVSchedule", 2, 4),
    ("DualPipeVSchedule", 4, 9),
    ("InferenceSchedule", 2, 3),
)


def main(sources: list[str]) -> None:
    """Write the streams of each source distribution."""
    for source in sources:
        version = Path(source).name.removeprefix("deepspeed-").removesuffix(".tar.gz")
        module = load(Path(source), version)
        path = FOLDER / f"{version}.json"
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(streams(module), separators=(",", ":")) + "\n", "utf-8")
        print(path)


def load(source: Path, version: str) -> ModuleType:
    """Import the module of schedules as part of a separate package."""
    member = f"deepspeed-{version}/deepspeed/runtime/pipe/schedule.py"
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(source) as archive:
            archive.extract(member, scratch, filter="data")
        for name in ("streams", "streams.pipe", "streams.utils"):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []
        sys.modules["streams.utils"].call_to_str = repr  # type: ignore[attr-defined]
        spec = importlib.util.spec_from_file_location(
            "streams.pipe.schedule", Path(scratch) / member
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def streams(module: ModuleType) -> dict[str, Any]:
    """The streams of all sizes."""
    found: dict[str, Any] = {}
    for name, stages, microbatches in SIZES:
        made = [getattr(module, name)(microbatches, stages, rank) for rank in range(stages)]
        found[f"{name} {stages} {microbatches}"] = [
            {
                "buffers": schedule.num_pipe_buffers(),
                "steps": [
                    [[instruction.name, instruction.kwargs] for instruction in step]
                    for step in schedule.steps()
                ],
            }
            for schedule in made
        ]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])

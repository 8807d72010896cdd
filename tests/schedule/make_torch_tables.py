"""
Write the tables of several torch releases, from each release's own schedule classes.

    python -m tests.schedule.make_torch_tables torch-2.15.0-....whl [more wheels or folders]

Only `torch/distributed/pipelining` of a wheel is read. This code runs with the installed torch,
whose version hardly matters, because constructing a schedule needs only lists and regular
expressions. Names that a release imports and the installed torch lacks are replaced by placeholders
that cannot be called, and are listed. A folder may replace a wheel if it is named after the version
(`2.15.0`) and contains `torch/distributed/pipelining`.

The tables go to `torch_tables/<version>/`, beside the activation slots that the release itself
computes (`liveness.json`, torch 2.15 and later).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from qeffect.schedule.actions import Schedule, ScheduleError
from qeffect.schedule.tables import write_table
from qeffect.schedule.torch_tables import CLASSES, SINGLE, torch_schedule

FOLDER = Path(__file__).parent / "torch_tables"
#: Ranks and microbatches; 1F1B and GPipe have one stage a rank, the others two.
SHAPES = ((2, 4), (4, 8))
#: Variants of a table by the end of its name.
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    ".defer": {"defer_receives": True},
    ".sends2": {"max_outstanding_sends": 2},
}
_MEMBERS = "torch/distributed/pipelining/"
_MISSING_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


class Placeholder:
    """A placeholder for a name that the installed torch lacks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be used."""
        raise RuntimeError(f"{self.name} is not in the installed torch")


def load(source: Path, scratch: Path) -> tuple[str, ModuleType, list[str]]:
    """
    Import a release's `schedules` module under a separate name.

    Args:
        source: A wheel, or a folder named after its version.
        scratch: Folder into which a wheel's modules may be unpacked.

    Returns:
        The version, the module, and the names that are placeholders.
    """
    if source.is_dir():
        version, root = source.name, source
    else:
        version, root = source.name.split("-")[1].split("+")[0], scratch
        with zipfile.ZipFile(source) as wheel:
            for member in wheel.namelist():
                if member.startswith(_MEMBERS) and member.endswith(".py"):
                    wheel.extract(member, root)
    package = ModuleType(f"pipelining_{version.replace('.', '_')}")
    package.__path__ = [str(root / _MEMBERS)]
    sys.modules[package.__name__] = package
    replaced: list[str] = []
    while True:
        try:
            return version, importlib.import_module(f"{package.__name__}.schedules"), replaced
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("torch.") or error.name in replaced:
                raise
            sys.modules[error.name] = ModuleType(error.name)
            replaced.append(error.name)
        except ImportError as error:
            missing = _MISSING_NAME.search(str(error))
            if missing is None or ".".join(missing.groups()[::-1]) in replaced:
                raise
            name, module = missing.groups()
            setattr(sys.modules[module], name, Placeholder(f"{module}.{name}"))
            replaced.append(f"{module}.{name}")


def tables(version: str, schedules: ModuleType) -> dict[str, Schedule]:
    """The tables of a release by file name; variants that the release lacks are left out."""
    absent: dict[str, str] = {}
    made: dict[str, Schedule] = {}
    for cls in CLASSES:
        vpp = 1 if cls in SINGLE else 2
        for pp, microbatches in SHAPES:
            for ending, options in VARIANTS.items():
                if cls in SINGLE and options:
                    continue
                try:
                    schedule = torch_schedule(
                        cls,
                        pp=pp,
                        microbatches=microbatches,
                        comms=True,
                        release=(version, schedules),
                        **options,
                    )
                except ScheduleError as error:
                    if not options:
                        raise
                    absent[ending] = str(error)
                    continue
                made[f"{cls}_pp{pp}_vpp{vpp}_m{microbatches}{ending}.comms.csv"] = schedule
    for ending, reason in absent.items():
        print(f"{version}: no tables *{ending}: {reason}")
    return made


class _Finalized:
    """The parts of a schedule that `analyze_pipeline_activation_liveness` reads."""

    def __init__(self, order: dict[int, list[Any]], microbatches: int) -> None:
        self.pipeline_order = order
        self._n_microbatches = microbatches


def liveness(schedules: ModuleType, made: dict[str, Schedule]) -> dict[str, Any] | None:
    """
    The slots that the release computes, by table and rank: of all the rank's stages together, of
    each stage alone, and of whole microbatches; `None` if the release computes no slots.
    """
    analyze = getattr(schedules, "analyze_pipeline_activation_liveness", None)
    if analyze is None:
        return None
    found: dict[str, Any] = {}
    for name, schedule in made.items():
        order = {
            rank: [schedules._Action.from_str(str(action)) for action in row]
            for rank, row in enumerate(schedule.rows)
        }
        finalized = _Finalized(order, schedule.num_microbatches)

        def slots(rank: int, stages: tuple[int, ...], granularity: str) -> int:
            return int(
                analyze(
                    finalized,  # noqa: B023
                    pp_rank=rank,
                    stage_indices=stages,
                    granularity=granularity,
                ).num_slots
            )

        found[name] = [
            {
                "rank": slots(rank, schedule.stages_of(rank), "stage_microbatch"),
                "stages": {
                    str(stage): slots(rank, (stage,), "stage_microbatch")
                    for stage in schedule.stages_of(rank)
                },
                "microbatches": slots(rank, schedule.stages_of(rank), "microbatch"),
            }
            for rank in range(schedule.num_ranks)
        ]
    return found


def main(sources: list[str]) -> int:
    """Write the tables of every source."""
    if not sources:
        print(__doc__)
        return 2
    for source in sources:
        with tempfile.TemporaryDirectory() as scratch:
            version, schedules, replaced = load(Path(source), Path(scratch))
            made = tables(version, schedules)
            slots = liveness(schedules, made)
        folder = FOLDER / version
        folder.mkdir(parents=True, exist_ok=True)
        for name, schedule in made.items():
            (folder / name).write_text(write_table(schedule), encoding="utf-8", newline="")
        if slots is not None:
            (folder / "liveness.json").write_text(json.dumps(slots, indent=1) + "\n")
        print(f"{version}: {len(made)} tables; placeholders: {', '.join(replaced) or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

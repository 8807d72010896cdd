"""
`scales = "epoch"` over Transformer Engine: training has the same digest under every mapping.

The command trains one model under several schedules, modes and numbers of ranks, and prints a
digest of parameters, moments and scales. The native side of `--compare` is Transformer Engine's own
full backward under the same recipe.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .helpers import two_gpus
from .test_language import COMMON, ran

#: Schedule, ranks, mode.
Mapping = tuple[str, int, str]

ONE: tuple[Mapping, ...] = (
    ("1f1b", 1, "eager"),
    ("gpipe", 1, "replays"),
    ("il", 1, "one launch"),
    ("zbv", 1, "replays"),
    ("izb", 1, "one launch"),
    ("dualpipev", 1, "one launch"),
)
TWO: tuple[Mapping, ...] = (
    ("1f1b", 2, "one launch"),
    ("gpipe", 2, "eager"),
    ("il", 2, "replays"),
    ("zbv", 2, "one launch"),
    ("izb", 2, "replays"),
    ("dualpipev", 2, "one launch"),
)
MODEL = 'scales = "epoch"\ntied = true'


def trained(folder: Path, mapping: Mapping, model: str = MODEL, *options: str) -> dict[str, Any]:
    """What the command says of a run of a mapping."""
    schedule, ranks, mode = mapping
    folder.mkdir()
    parallel = f'schedule = "{schedule}"\nmode = "{mode}"\nmicrobatches = 8'
    return ran(folder, model, parallel, *(options or ("--digest",)), ranks=ranks)


def digests(folder: Path, mappings: tuple[Mapping, ...], model: str = MODEL) -> list[str]:
    """The digest of each mapping; as many processes train at a time as two GPUs feed."""
    with ThreadPoolExecutor(6) as pool:
        said = pool.map(
            lambda numbered: trained(folder / str(numbered[0]), numbered[1], model),
            enumerate(mappings),
        )
        found = list(said)
    assert {one["verdict"] for one in found} == {"accepted"}
    return [one["digest"] for one in found]


def test_one_rank_has_one_digest_under_every_schedule_and_mode(tmp_path: Path) -> None:
    """Each mode among them: eager, replays and one launch."""
    found = digests(tmp_path, ONE)
    assert found == [found[0]] * len(ONE)


@two_gpus
def test_two_ranks_have_the_digest_of_one(tmp_path: Path) -> None:
    """Of every schedule; scales that move at every action have another one."""
    found = digests(tmp_path, (ONE[0], *TWO))
    assert found == [found[0]] * len(found)
    other = tmp_path / "action"
    other.mkdir()
    # Here the library's default has one digest too: every schedule runs a stage's microbatches in
    # one order, and an update of scales passes over those without a new amax.
    assert digests(other, (ONE[0],), "tied = true") != [found[0]]


@two_gpus
def test_a_model_of_the_common_kind_has_one_digest(tmp_path: Path) -> None:
    """Eager on one GPU, and one launch on one and two, with a head in bf16."""
    found = digests(tmp_path, (ONE[0], ONE[2], TWO[3]), f'{MODEL}\nhead = "bf16"\n{COMMON}')
    assert found == [found[0]] * 3


@two_gpus
@pytest.mark.parametrize("group", [2, 8])
def test_grouped_wgrads_have_one_digest(group: int, tmp_path: Path) -> None:
    """One product over two, or all, microbatches, in each mode, and with a head in bf16."""
    model = f'{MODEL}\nwgrad_group = {group}\nhead = "bf16"'
    found = digests(tmp_path, (ONE[0], ONE[3], ONE[4], TWO[2], TWO[3]), model)
    assert found == [found[0]] * 5
    alone = tmp_path / "alone"
    alone.mkdir()
    assert digests(alone, (ONE[0],), f'{MODEL}\nhead = "bf16"') != [found[0]]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("zbv", 1), ("1f1b", 1), pytest.param("zbv", 2, marks=two_gpus)],
)
def test_the_bits_are_those_of_native(tmp_path: Path, schedule: str, ranks: int) -> None:
    """Gradients, parameters, AdamW, scales and caches of every step."""
    said = trained(tmp_path / "run", (schedule, ranks, "replays"), MODEL, "--compare", "all")
    assert said["verdict"] == "accepted"
    assert said["differ"] == 0
    assert said["compared"] > 1000


@two_gpus
def test_a_run_stopped_under_two_ranks_goes_on_under_one(tmp_path: Path) -> None:
    """The digest is that of a run that never stopped."""
    whole = trained(tmp_path / "whole", ("1f1b", 1, "replays"))["digest"]
    kept = tmp_path / "kept"
    first, then = tmp_path / "first", tmp_path / "then"
    checkpoint = f'[checkpoint]\nfolder = "{kept}"\nevery = 2\n'
    for folder, mapping, options in (
        (first, ("zbv", 2, "one launch"), ("--steps", "2", "--digest")),
        (then, ("gpipe", 1, "replays"), ("--resume", "--digest")),
    ):
        said = trained(folder, mapping, MODEL + "\n" + checkpoint, *options)
    assert said["digest"] == whole

"""A model cut into stages of equal time, by given times or by times measured on the devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qeffect.gpu_runtime.training.balance import ACTIONS, Times, measure_times, slowest
from qeffect.gpu_runtime.training.config_file import read
from qeffect.gpu_runtime.training.job_assembly import job_of
from qeffect.report import UnusableError
from tests.ranks.ranks import launch

from . import balance_bodies as bodies
from .helpers import SMALL, language, noise, text

RUN = (
    SMALL.format(vocabulary=128, layers=8)
    + """[parallel]
pp = 2
schedule = "zbv"
cut = "measured"
[data]
train = "train.npy"
[run]
steps = 2
log = "log.jsonl"
"""
)


def written(folder: Path, more: str = "") -> Path:
    """A run, with more in `[parallel]`."""
    text(folder)
    path = folder / "run.toml"
    path.write_text(RUN.replace('cut = "measured"\n', f'cut = "measured"\n{more}\n'))
    return path


@pytest.mark.parametrize(
    ("times", "cut"),
    [
        ("layer_times = [1, 1, 1, 1, 1, 1, 1, 1]", (2, 2, 2, 2)),
        ("layer_times = [1, 1, 1, 1, 1, 1, 1, 1]\nhead_time = 2", (2, 2, 3, 1)),
        ("layer_times = [2, 2, 2, 2, 2, 2, 2, 2]\nembedding_time = 4\nhead_time = 4", (1, 3, 3, 1)),
        ("layer_times = [6, 1, 1, 1, 1, 1, 1, 6]", (1, 3, 3, 1)),
        ("layer_times = [3, 3, 3, 3, 1, 1, 1, 1]", (1, 1, 2, 4)),
    ],
)
def test_given_times_are_cut_by(tmp_path: Path, times: str, cut: tuple[int, ...]) -> None:
    """Closed forms: the costliest stage costs least, of those the most even, then the first."""
    assert job_of(read(written(tmp_path, times))).cut == cut


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("layer_times = [1, 2]", "expected one time for each of 8 layers, found 2"),
        ("layer_times = [0]", "expected a list of numbers above 0, found [0]"),
        ("layer_times = 3", "expected a list of numbers above 0, found 3"),
        ("layer_times = [true]", "expected a list of numbers above 0, found [True]"),
        ("head_time = -1.0", "[parallel] head_time: expected a number of at least 0"),
        ("head_time = 1.0", "[parallel] head_time: expected layer_times too, found none"),
        ("embedding_time = 1.0", "[parallel] embedding_time: expected layer_times too"),
        ("microbatches = 2", ""),
    ],
)
def test_times_that_do_not_fit_are_named(tmp_path: Path, more: str, told: str) -> None:
    """Each in one line; without times the cut waits for the devices."""
    path = written(tmp_path, more)
    if not told:
        assert job_of(read(path)).cut == (2, 2, 2, 2)
        return
    with pytest.raises(UnusableError) as error:
        job_of(read(path))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_times_belong_to_a_measured_cut(tmp_path: Path) -> None:
    """They are not passed over where something else cuts."""
    path = written(tmp_path)
    path.write_text(RUN.replace('"measured"', '"even"\nlayer_times = [1.0]'))
    with pytest.raises(
        UnusableError, match="expected cut = 'measured' with times, found cut = 'even'"
    ):
        job_of(read(path))


def test_every_part_is_timed(tmp_path: Path) -> None:
    """F, dI and dW of a layer take time; an end's are what its stage takes beyond a layer."""
    job = language(noise(tmp_path), schedule="zbv", pp=2, tied=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where other tests run beside
    try:
        times = measure_times(job, torch.device("cpu"), "reference", mode="eager", repeats=3)
    finally:
        torch.set_num_threads(threads)
    assert len(times.layer) == len(ACTIONS)
    assert all(one > 0 for one in times.layer)
    assert all(one >= 0 for one in (*times.embedding, *times.head))
    fields = times.fields(4)
    assert fields["layer_times"] == [round(sum(times.layer), 3)] * 4


def test_the_slowest_rank_counts_action_by_action() -> None:
    """Also where one rank is slow in F and another in dW."""
    found = slowest(
        [Times((0, 0, 1), (2, 1, 1), (3, 0, 0)), Times((0, 2, 0), (1, 1, 4), (1, 1, 1))]
    )
    assert found == Times((0, 2, 1), (2, 1, 4), (3, 1, 1))


def test_two_ranks_measure_and_are_cut_alike(tmp_path: Path) -> None:
    """A legal cut, in the log with its times; a file that has them gives the same run again."""
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.measuring, str(written(tmp_path)))
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    words = said.words[0]
    assert words["again"]
    assert len(words["cut"]) == 4
    assert sum(words["cut"]) == 8
    assert min(words["cut"]) >= 1
    (line,) = [
        line
        for line in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        if "cut" in line
    ]
    assert line["cut"] == words["cut"]
    names = ("embedding_time", "layer_times", "head_time")
    assert {name: line[name] for name in names} == {name: words["record"][name] for name in names}
    assert len(line["layer_times"]) == 8


def test_ranks_that_measure_differently_are_cut_alike(tmp_path: Path) -> None:
    """By the slowest of each action; where one cannot measure, all say so."""
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.unlike, str(written(tmp_path)))
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    words = said.words[0]
    assert words["record"]["embedding_time"] == 1.0
    assert words["record"]["layer_times"] == [3.0] * 8
    assert words["record"]["head_time"] == 10.0
    assert words["cut"] == [2, 2, 3, 1]
    assert "rank 1 cannot measure: out of memory" in words["problem"]


def test_a_run_that_goes_on_keeps_its_cut(tmp_path: Path) -> None:
    """The checkpoint has the times; a device that is slower by then makes no other stages."""
    path = written(tmp_path)
    path.write_text(path.read_text() + '[checkpoint]\nfolder = "kept"\n')
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.going_on, str(path))
    assert said.codes == [0, 0]
    words = said.words[0]
    assert words["began"] == 2
    assert words["cuts"][0] == words["cuts"][1] != words["cuts"][2]
    assert words["times"][0] == words["times"][1] != words["times"][2]


def test_a_product_of_two_microbatches_is_timed_as_one(tmp_path: Path) -> None:
    """Both groups of a step are timed: the first product writes, and the second adds."""
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.products, str(noise(tmp_path)))
    assert said.codes == [0]
    found = said.words[0]
    assert found["calls"] == {
        "1": [[1, False], [1, True]],
        "2": [[2, False], [2, True]],
        "4": [[4, False]],
    }
    assert all(one > 0 for one in found["layer"])


def test_times_become_the_durations_of_stages() -> None:
    """Layers of a stage and the ends of the model that it has; one stage may have both ends."""
    times = Times((0.5, 0, 0.25), (1, 2, 3), (4, 0, 1), {2: (0.5, 4, 1.5)})
    found = times.durations((2, 1, 3))
    assert (found["unit"], found["F"], found["I"], found["W"]) == ("ms", 1, 2, 3)
    assert found["stages"] == {
        "0": {"F": 2.5, "I": 4, "W": 6.25, "grouped_W": {"2": 8.5}},
        "1": {"F": 1, "I": 2, "W": 3, "grouped_W": {"2": 4}},
        "2": {"F": 7, "I": 6, "W": 10, "grouped_W": {"2": 13.5}},
    }
    (alone,) = times.durations((1,))["stages"].values()
    assert alone == {"F": 5.5, "I": 2, "W": 4.25, "grouped_W": {"2": 6}}
    assert "grouped_W" not in Times((0, 0, 0), (1, 1, 1), (0, 0, 0)).durations((1,))["stages"]["0"]

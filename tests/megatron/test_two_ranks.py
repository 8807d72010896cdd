"""`tests.gpu.two_ranks`, by which the scripts of the GPUs start their ranks, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.two_ranks import run_ranks

BODY = "tests.megatron.two_ranks_body"


def test_each_rank_says_what_it_measured(tmp_path: Path) -> None:
    said = run_ranks(BODY, tmp_path / "out", ("a word",), limit_s=60)

    assert [(each["rank"], each["word"]) for each in said] == [("0", "a word"), ("1", "a word")]
    assert all("device" in each for each in said)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_says_its_error(tmp_path: Path) -> None:
    said = run_ranks(BODY, tmp_path / "out", ("fail",), limit_s=60)

    assert "ValueError: of rank 1" in said[1]["error"]


def test_ranks_that_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last lines of both stand in for what they did not say, and are printed."""
    said = run_ranks(BODY, tmp_path / "out", ("silent",), limit_s=60)

    assert [[*each] for each in said] == [["tail"], ["tail"]]
    assert BODY in capsys.readouterr().out


def test_ranks_that_do_not_end(tmp_path: Path) -> None:
    said = run_ranks(BODY, tmp_path / "out", ("late",), limit_s=0.01)

    assert said[0]["tail"][-1] == "no end after 0.01 s"

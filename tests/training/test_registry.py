"""Several trainings in one process: no training writes another training's gradient destinations."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.ranks import launch

from . import registry_bodies as bodies
from .helpers import CONFIG, text


def test_a_training_over_anothers_destinations_is_refused(tmp_path: Path) -> None:
    """Until the first training is closed, the second cannot be made."""
    text(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.over_one_memory, str(config), beside=False)

    assert said.codes == [0]
    first, second, third = said.words[0]
    assert "arena.overlapping-destinations" in second
    assert "of a contract that shares the registry" in second
    assert ("", "") == (first, third)

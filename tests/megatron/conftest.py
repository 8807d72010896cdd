"""What the tests of the guard of Megatron-core share."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from qeffect.guards import megatron
from tests.megatron.stand_in import installed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the stand-in; a guard that is left is removed afterwards."""
    yield installed(monkeypatch)
    for guarded in list(megatron._active):
        guarded.remove()

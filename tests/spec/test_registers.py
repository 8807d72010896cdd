"""Every predicate is registered once, under one name."""

from __future__ import annotations

from typing import Any

import pytest

from qeffect.spec.predicates import Register


def filled(name: str) -> Register:
    """Return a register with one predicate."""
    register = Register()

    @register(name, slot="slot")
    def predicate(st: Any, slot: Any) -> Any:
        """Say nothing."""

    return register


def test_a_name_is_entered_once() -> None:
    """A second predicate of a name is refused, and the first stays."""
    register = filled("ownership.tenant")

    with pytest.raises(ValueError, match=r"ownership\.tenant"):
        register("ownership.tenant")(lambda st: True)
    assert 1 == len(list(register))


def test_parts_do_not_share_names() -> None:
    """Nor may two registers that become one have a name in common."""
    with pytest.raises(ValueError, match=r"ownership\.tenant"):
        Register(filled("ownership.tenant"), filled("ownership.tenant"))


def test_parts_keep_their_order() -> None:
    """Joined registers follow one another."""
    joined = Register(filled("version.cache"), filled("arena.content"))

    assert ["version.cache", "arena.content"] == [predicate.name for predicate in joined]

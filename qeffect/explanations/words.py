"""
Text that the explanations share: the name of the call that was made, and entries of columns (arrays
of the contract's state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..text import counted

__all__ = [
    "Arguments",
    "Explanation",
    "asked",
    "domain_of",
    "entries_of",
    "nonzero_entries",
    "other_indices",
    "skipped_keys",
    "slot_of",
    "stage_of",
    "stages_of",
    "with_skipped",
]

#: A transition's arguments by name, with the transition's own name under ``transition``.
Arguments = Mapping[str, Any]

#: Returns found and expected, from the state and the arguments.
Explanation = Callable[[Any, Arguments], tuple[str, str]]


def stage_of(st: Any, a: Arguments) -> int:
    """Return the stage that a call names, or the stage of the call's bucket, key or slot."""
    if "stage" in a:
        return int(a["stage"])
    if "bucket" in a:
        return int(st.stage_at[a["bucket"]])
    if "key" in a:
        return int(a["key"].stage)
    return int(st.slot_stage[a["slot"]])


def domain_of(st: Any, a: Arguments) -> int:
    """Return the state domain (stages whose FP8 scales are updated together) of a call's stage."""
    return int(st.domain_of[stage_of(st, a)])


def asked(a: Arguments) -> str:
    """Name the call that was made: its action, and its key or stage."""
    word = a["transition"].removeprefix("check_")
    word = {"forward": "F", "dgrad": "dI", "wgrad": "dW"}.get(word, word)
    if "key" in a:
        return f"{word} of {a['key']}"
    return f"{word} of stage {a['stage']}" if "stage" in a else word


def skipped_keys(st: Any, stage: int) -> int:
    """Return how many keys of a stage the current walk (pass over the microbatches) leaves out."""
    now = st.weight_epoch[stage]
    return sum(cell[0] == stage and epoch == now for cell, epoch in entries_of(st.skipped))


def with_skipped(st: Any, stages: Iterable[int]) -> str:
    """
    Return the remark that a count includes keys that the walk (pass over the microbatches) leaves
    out; empty if the walk leaves out no key.
    """
    out = sum(skipped_keys(st, stage) for stage in stages)
    return f", counting {counted(out, 'key')} that the walk leaves out" if out else ""


def slot_of(a: Arguments) -> int:
    """Return the slot that a call names, by a reference or by its index."""
    return int(a["ref"].slot if "ref" in a else a["slot"])


def entries_of(column: Any) -> Iterable[tuple[Any, Any]]:
    """Return index and value of each entry; a column by stage may be a dictionary."""
    return column.items() if isinstance(column, dict) else enumerate(column)


def nonzero_entries(column: Any) -> str:
    """Return the entries that are neither 0 nor -1 as text, ``index: value``."""
    return ", ".join(
        f"{index}: {value}" for index, value in entries_of(column) if value not in (0, -1)
    )


def other_indices(column: Any, usual: int = 0) -> str:
    """
    Return, as text, the indices of entries that differ from ``usual``; by default, of nonzero
    entries.
    """
    return ", ".join(str(index) for index, value in entries_of(column) if value != usual) or "none"


def stages_of(st: Any, a: Arguments) -> list[int]:
    """
    Return a call's stage (or the stage of the call's bucket), and the stage that shares its
    gradient destinations.
    """
    if "bucket" not in a:
        return list(dict.fromkeys((a["stage"], st.sharer_of[a["stage"]])))
    return list(dict.fromkeys((st.stage_at[a["bucket"]], st.tied_at[a["bucket"]])))

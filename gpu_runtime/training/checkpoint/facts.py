"""
The facts (plain data) of a checkpoint. Some facts must be equal in the saving and the loading run;
others may differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...backends.epoch_scales import moves_once
from ...backends.protocol import BackendError
from ...ranks.worker import Worker

__all__ = [
    "changes",
    "contract_of",
    "first_difference",
    "mapping_of",
    "narrowed",
    "placement",
    "plain",
    "requirements",
]

#: How the facts describe which amaxes set the scales, by the runtime's setting `amax`.
AMAX = {"replica": "each replica its own", "replicas": "the largest of all replicas"}

#: The beginning of the source of a torch table. torch's version is not part of a mapping.
_TORCH = re.compile(r"^torch \S+ ")


def plain(value: Any, where: str) -> Any:
    """
    Convert plain data to the form that they have after writing and reading as JSON: tuples become
    lists.

    Args:
        value: Finite numbers, strings, None, and lists and mappings of such values.
        where: The name of the value, for the error message.

    Raises:
        BackendError: JSON cannot represent a part of the value; the message names the part.

    >>> plain({"sizes": (1, 2)}, "must")
    {'sizes': [1, 2]}
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BackendError(f"{where}: expected strings as keys, found {key!r}")
        return {key: plain(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, f"{where}[{n}]") for n, one in enumerate(value)]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value - value == 0.0:
        return float(value)
    raise BackendError(
        f"{where} is {value!r}; facts are finite numbers, strings, lists and mappings: a tensor "
        "goes into extra_tensors"
    )


def requirements(worker: Worker) -> dict[str, Any]:
    """
    Return the facts that must be equal in the saving and the loading run, because they determine
    the meaning of saved numbers.
    """
    domain, masters = worker.runtime.domain, worker.optimizer.master_dtype
    config = worker.runtime.config
    # With scales that move once an epoch, how gradients are summed belongs to the recipe.
    grouped = {"group": config.group} if config.group > 1 else {}  # older checkpoints lack it
    sums = {"sums": {"rule": config.rule, "dtype": str(config.dtype), **grouped}}
    return {
        "backend": domain.name,
        "recipe": plain(domain.recipe(), "recipe"),
        "amax": AMAX[worker.runtime.config.amax],
        "optimizer": type(worker.optimizer.adamw).__name__,
        "masters": None if masters is None else str(masters),
        **(sums if moves_once(domain) else {}),
    }


def mapping_of(worker: Worker) -> dict[str, Any]:
    """
    Return the mapping of stages and microbatches to ranks. A loading run may have another mapping.
    """
    table = worker.table
    return {
        "schedule": _TORCH.sub("", Path(table.source).name),
        "ranks": worker.pp,
        "replicas": worker.member.world // worker.pp,
        "stages": table.num_stages,
        "stage_to_rank": [table.stage_to_rank[stage] for stage in range(table.num_stages)],
        "microbatches": table.num_microbatches * worker.runtime.config.walks,
    }


def placement(mapping: Mapping[str, Any]) -> list[Any]:
    """Return the processes of a mapping, and the stages of each process."""
    return [mapping[key] for key in ("ranks", "replicas", "stage_to_rank")]


def contract_of(worker: Worker) -> dict[str, Any]:
    """Return the configuration of the rank's contract, as plain data."""
    return worker.runtime.contract.configuration.without_places().plain()


def changes(worker: Worker, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe the accepted differences between the saving and the loading run."""
    saved, own = facts["mapping"], mapping_of(worker)
    found = [f"{key}: {saved[key]} -> {own[key]}" for key in own if saved[key] != own[key]]
    if not found:
        here = plain(contract_of(worker), "contract")
        if (odd := narrowed(facts["contracts"][worker.member.rank], here, "contract")) is not None:
            found.append(f"{odd[0]}: {odd[1]} -> {odd[2]}")
    environment = plain(worker.runtime.domain.environment(), "environment")
    first = facts["made_by"][0]
    found += [
        f"{key}: {first.get(key, 'unset')} -> {environment[key]}"
        for key in environment
        if first.get(key, "unset") != environment[key]
    ]
    return tuple(found)


def first_difference(saved: Any, here: Any, where: str) -> tuple[str, Any, Any] | None:
    """
    Compare two values of plain data. Return the name of the first different entry, and the entry in
    both values; None if the values are equal.
    """
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in sorted(saved.keys() | here.keys()):
            inner = f"{where}.{key}" if where else key
            if key not in saved or key not in here:
                a = saved.get(key, "nothing")
                return inner, a, here.get(key, "nothing")
            if (odd := first_difference(saved[key], here[key], inner)) is not None:
                return odd
        return None
    return None if type(saved) is type(here) and saved == here else (where, saved, here)


def narrowed(saved: Any, here: Any, where: str) -> tuple[str, str, str] | None:
    """
    Do the same as `first_difference`, but also look inside lists, and shorten both entries to 40
    characters.
    """
    if isinstance(saved, list) and isinstance(here, list):
        if len(saved) != len(here):
            return where, f"{len(saved)} entries", f"{len(here)} entries"
        pairs = enumerate(zip(saved, here, strict=True))
        found = (narrowed(one, other, f"{where}[{n}]") for n, (one, other) in pairs)
        return next((odd for odd in found if odd is not None), None)
    if isinstance(saved, Mapping) and isinstance(here, Mapping) and saved.keys() == here.keys():
        inner = (narrowed(saved[key], here[key], f"{where}.{key}") for key in sorted(saved))
        return next((odd for odd in inner if odd is not None), None)
    return None if saved == here else (where, str(saved)[:40], str(here)[:40])

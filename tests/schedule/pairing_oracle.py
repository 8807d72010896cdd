"""
An oracle for pairing: which weight gradients a runtime without keys would compute from another
action's deferred work.

For every weight gradient, the oracle reads the whole earlier row and decides, from the definition
of each pairing discipline, which work the weight gradient is given. The oracle has no queues and no
keys, so that it shares nothing with `qeffect.schedule.pairing` or with the contract, which `check`
runs.
"""

from __future__ import annotations

import attrs

from qeffect.schedule.actions import Kind, Schedule
from qeffect.schedule.pairing import Work


@attrs.frozen
class Mispaired:
    """
    A weight gradient that is given the deferred work of another action.

    Args:
        rank: The rank.
        step: The step of the weight gradient.
        action: Its entry.
        own: The stage and microbatch of the weight gradient.
        given: The stage and microbatch whose work the weight gradient is given.
    """

    rank: int
    step: int
    action: str
    own: Work
    given: Work


def mispaired(schedule: Schedule, pairing: str) -> tuple[Mispaired, ...]:
    """
    All weight gradients that a discipline pairs wrongly, by rank and then step.

    Args:
        schedule: The schedule, free of findings of `check_ranks`.
        pairing: `fifo`, `latest`, `global`, or `contract` (which never pairs wrongly).
    """
    found: list[Mispaired] = []
    for rank, atoms in enumerate(schedule.atoms):
        backward = [atom for atom in atoms if atom.kind in (Kind.DGRAD, Kind.WGRAD)]
        for at, atom in enumerate(backward):
            own = (atom.stage, atom.microbatch)
            if atom.kind is Kind.DGRAD or pairing == "contract":
                continue
            before = [a for a in backward[:at] if pairing == "global" or a.stage == atom.stage]
            left = [(a.stage, a.microbatch) for a in before if a.kind is Kind.DGRAD]
            taken = sum(a.kind is Kind.WGRAD for a in before)
            given = left[-1] if pairing == "latest" else left[taken]
            if given != own:
                found.append(Mispaired(rank, atom.step, str(atom.action), own, given))
    return tuple(found)


def first_on_each_rank(schedule: Schedule, pairing: str) -> tuple[Mispaired, ...]:
    """The first wrong pairing of each rank, by step and then rank, which `check` must refuse."""
    first: dict[int, Mispaired] = {}
    for found in mispaired(schedule, pairing):
        first.setdefault(found.rank, found)
    return tuple(sorted(first.values(), key=lambda found: (found.step, found.rank)))

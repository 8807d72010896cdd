"""
How many slots (sets of buffers for one microbatch) a stage gets, and which slot each microbatch
uses. Both depend only on the order of the actions.

Live provisioning reserves as many slots as microbatches are in progress at once, and reuses a slot
as soon as its dW has finished. The paper's static provisioning reserves one slot per microbatch.
The assignment does not depend on events at run time, so graphs can be captured in advance. At
capture it is known to which gradient memory the microbatches of a slot write, and which microbatch
writes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import attrs

from qeffect.relations.constants import ADDS, JOINS, OVERWRITES
from qeffect.schedule.grouping import group_of
from qeffect.schedule.index import Event
from qeffect.schedule.slots import Tape, assign

from ..memory.arena import Rule
from .order import Kind, Order

Provisioning = Literal["live", "static"]
PROVISIONINGS: tuple[Provisioning, ...] = ("live", "static")


class WgradVariant(NamedTuple):
    """
    To which memory a dW writes, and whether it overwrites or adds. Each variant has its own
    captured graph.

    Args:
        destination: Index of the set of gradient destinations; -1 for the library's own memory.
        accumulate: Whether the dW adds to the destinations.
        joins: Whether the dW overwrites the destinations of only this stage, but adds to
            destinations that another stage shares and has already written.
    """

    destination: int
    accumulate: bool
    joins: bool = False

    @property
    def writes(self) -> int:
        """Whether the dW overwrites or adds, as a value for `qeffect.counts.mark`."""
        return ADDS if self.accumulate else JOINS if self.joins else OVERWRITES

    def adding(self) -> WgradVariant:
        """
        The variant of this dW in a later walk (pass over the rank's actions) of the epoch. The dW
        then adds to the same destinations.
        """
        return self._replace(accumulate=True, joins=False)


@attrs.frozen
class SlotPlan:
    """
    Assigns a slot (a set of buffers) to each microbatch of each stage.

    Args:
        order: The order of the actions.
        provisioning: How slots were assigned: `live` or `static`.
        slot_of: For each stage and microbatch, the index of its slot among the slots of this stage.
        num_slots: Number of slots by stage.
        sharers: By stage, the other stage that writes to the same gradient destination, because
            weights of both stages are tied.
        walks: Largest number of walks (passes over the rank's actions) in an epoch. In walks after
            the first, every dW adds.
        group: Number of microbatches whose dW are computed as one product. The product runs at the
            place of the first of these dW in the order.
    """

    order: Order
    provisioning: Provisioning
    slot_of: Mapping[tuple[int, int], int]
    num_slots: Mapping[int, int]
    sharers: Mapping[int, int] = attrs.field(factory=dict)
    walks: int = 1
    group: int = 1

    def members(self, microbatch: int) -> tuple[int, ...]:
        """
        Return the microbatches whose dW run as one product with the dW of `microbatch`, including
        itself, in ascending order.

        The result is empty if the product has already run at the dW of an earlier microbatch of the
        group.
        """
        found = group_of(microbatch, self.group)
        return found if found[0] == microbatch else ()

    def products(self, stage: int, rule: Rule) -> tuple[tuple[tuple[int, ...], WgradVariant], ...]:
        """
        Return the captures that a stage's dW need in an epoch: each distinct combination of slots
        (sets of buffers) and variant.
        """
        found: dict[tuple[tuple[int, ...], WgradVariant], None] = {}
        for microbatch in self.order.microbatches(stage, Kind.WGRAD):
            if not (members := self.members(microbatch)):
                continue
            slots = tuple(self.slot_of[stage, m] for m in members)
            variant = self.variant(stage, microbatch, rule)
            found[slots, variant] = None
            if self.walks > 1:
                found[slots, variant.adding()] = None
        return tuple(sorted(found))

    def variant(self, stage: int, microbatch: int, rule: Rule) -> WgradVariant:
        """
        Return the variant of a microbatch's dW in the first walk (pass over the rank's actions): to
        which memory it writes under a destination rule, and whether it overwrites or adds.
        """
        if rule == "copied":
            return WgradVariant(-1, False)
        if rule == "per_microbatch":
            return WgradVariant(microbatch, False, self._joins(stage, microbatch, {microbatch}))
        every = self.order.microbatches(stage, Kind.WGRAD)
        if microbatch != every[0]:
            return WgradVariant(0, True)
        return WgradVariant(0, False, self._joins(stage, microbatch, set(every)))

    def _joins(self, stage: int, microbatch: int, others: set[int]) -> bool:
        """
        Whether, before this dW, the stage's sharer has written a destination of these microbatches.
        """
        for step in self.order.steps:
            if step.kind is not Kind.WGRAD:
                continue
            if (step.stage, step.microbatch) == (stage, microbatch):
                return False
            if step.stage == self.sharers.get(stage) and step.microbatch in others:
                return True
        return False


def plan_slots(
    order: Order,
    provisioning: Provisioning = "live",
    *,
    available: Mapping[int, int] | None = None,
    feeds: Mapping[int, int] | None = None,
    group: int = 1,
) -> SlotPlan:
    """
    Assign slots (sets of buffers) in the order of the actions. F takes the lowest free slot. The
    slot is free again once its dW and all readers of its results have run.

    A stage may pass its output directly to a later stage of the same process. Then the later
    stage's F reads the earlier stage's output. The earlier stage's dI reads the later stage's input
    gradient, possibly after the later stage's dW.

    >>> plan = plan_slots(Order.parse("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"))
    >>> plan.num_slots, [plan.slot_of[0, m] for m in range(3)]
    ({0: 2}, [0, 1, 0])

    Args:
        order: The order of the actions.
        provisioning: `live`: each stage has as many slots as microbatches are in progress at once;
            `static`: one slot per microbatch.
        available: By stage, the largest number of slots; a stage that is not listed has no limit.
        feeds: Maps a stage of this process to the stage of this process that reads its output.
        group: Number of microbatches whose dW is computed as one product.

    Raises:
        ValueError: The order needs more slots than are available, or names an unknown provisioning.
    """
    if provisioning not in PROVISIONINGS:
        raise ValueError(
            f"unknown provisioning {provisioning!r}; choose {' or '.join(PROVISIONINGS)}"
        )
    readers = local_readers(order.stages, range(order.num_microbatches), feeds or {})
    made = assign(order.steps, readers, reuse=provisioning == "live")
    needed = {stage: made.num_slots.get(stage, 0) for stage in order.stages}
    for stage, limit in (available or {}).items():
        if needed.get(stage, 0) > limit:
            raise ValueError(
                f"stage {stage} has {limit} slots, but this order needs {needed[stage]} with "
                f"{provisioning} provisioning; give the stage {needed[stage]}"
            )
    return SlotPlan(order, provisioning, made.slot_of, needed, group=group)


def local_readers(
    stages: Iterable[int], microbatches: Iterable[int], feeds: Mapping[int, int]
) -> dict[Event, list[Tape]]:
    """
    Return, for each action, the tapes (data that an F keeps) that it reads. A tape is read by its
    own dW, by the F of the stage that takes its output, and by the dI of the stage whose output it
    took.

    Args:
        stages: Stages of the process.
        microbatches: The microbatches of an epoch.
        feeds: Maps a stage of this process to the stage of this process that reads its output.
    """
    found: dict[Event, list[Tape]] = {}
    every = tuple(microbatches)
    for stage in stages:
        for microbatch in every:
            readers = [(Kind.WGRAD, stage, microbatch)]
            if stage in feeds:
                readers.append((Kind.FORWARD, feeds[stage], microbatch))
            readers += [(Kind.DGRAD, by, microbatch) for by, fed in feeds.items() if fed == stage]
            for reader in readers:
                found.setdefault(reader, []).append((stage, microbatch))
    return found

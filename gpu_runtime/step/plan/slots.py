"""
How many slots a stage gets, and which microbatch uses which slot: a function of the order only.

Live-slot provisioning reserves the order's peak of live tapes and reuses a slot as soon as its dW
is done; the paper's provisioning reserves one slot per microbatch. The assignment does not depend
on events at run time, so it can be captured: each slot's graphs know which destinations their
microbatches write, and whether one of these microbatches is the first to write.
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
    One variant of a slot's dW; each variant has its own captured graph.

    Args:
        destination: Index of the set of destinations, -1 for the library's own memory.
        accumulate: Whether the dW adds to the destinations.
        joins: Whether the dW overwrites the stage's own destinations but adds to those shared with
            another stage, because the other stage has written them first.
    """

    destination: int
    accumulate: bool
    joins: bool = False

    @property
    def writes(self) -> int:
        """How the dW writes, as `qeffect.counts.mark` takes it."""
        return ADDS if self.accumulate else JOINS if self.joins else OVERWRITES

    def adding(self) -> WgradVariant:
        """What the dW does in a later walk of the epoch: it adds to the same destinations."""
        return self._replace(accumulate=True, joins=False)


@attrs.frozen
class SlotPlan:
    """
    Which slot each microbatch of each stage uses.

    Args:
        order: The order of the actions.
        provisioning: How slots were counted.
        slot_of: Local slot by stage and microbatch.
        num_slots: Slots by stage.
        sharers: By stage, the other stage that writes the same destination of tied weights.
        walks: Largest number of walks (passes over the order) in an epoch. In walks after the
            first, every dW adds.
        group: Number of microbatches whose dW are computed as one product, at the place of the
            first dW.
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
        The microbatches whose dW runs as one product with the dW of `microbatch`, ascending and
        itself included.

        Empty if the dW of an earlier microbatch of its group includes it.
        """
        found = group_of(microbatch, self.group)
        return found if found[0] == microbatch else ()

    def products(self, stage: int, rule: Rule) -> tuple[tuple[tuple[int, ...], WgradVariant], ...]:
        """Local slots and variant of every dW of a stage in an epoch, each pair once."""
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
        """What the dW of a microbatch does in the first walk, under a destination rule."""
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
    Assign slots by walking the order: F takes the lowest free slot, until its tape is consumed.

    The dW of a tape and the readers of its results consume the tape. If a stage feeds another stage
    of the same process, the fed stage's F reads the feeding stage's output. The feeding stage's dI
    reads the fed stage's input gradient, perhaps after the fed stage's dW.

    >>> plan = plan_slots(Order.parse("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"))
    >>> plan.num_slots, [plan.slot_of[0, m] for m in range(3)]
    ({0: 2}, [0, 1, 0])

    Args:
        order: The order of the actions.
        provisioning: `live`: as many slots per stage as tapes are live at once; `static`: one slot
            per microbatch.
        available: Largest number of slots per stage; unlimited for a stage that is not named.
        feeds: Which local stage each local stage feeds.
        group: Microbatches whose dW is one product.

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
    Consumers of each tape: its dW, the stage that it feeds, and the feeding stage's dI.

    Args:
        stages: Stages of the process.
        microbatches: Microbatches of an epoch.
        feeds: Which local stage each local stage feeds.
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

"""
The normal form of a state: states that no guard can ever distinguish have one form.

Serials and counters of stream work only grow, and a freed slot keeps its last tenant. Without a
normal form nearly every path would end in a state of its own. Each rule replaces
values by others with the same futures; a test runs states and their normal forms side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from qeffect.relations.constants import DGRAD_BIT, NEVER, RESERVED, WGRAD_BIT

from .flat import TICKETS, FlatMemory
from .scopes import Scope, configuration, sizes

__all__ = ["VACATES", "Rule", "normal_form"]


#: A tape with one of these still to come has a replay, or a drop, before its slot is free.
VACATES = RESERVED | DGRAD_BIT | WGRAD_BIT


@frozen
class Rule:
    """
    One rule of the normal form.

    Args:
        after: Columns whose change can require the rule.
        apply: Applies the rule, in place.
    """

    after: frozenset[str]
    apply: Callable[[], None]


def normal_form(scope: Scope, memory: FlatMemory) -> tuple[Rule, ...]:
    """
    Return the rules that bring a memory's state into normal form, in their order.

    Args:
        scope: What is explored.
        memory: The memory; rules about columns that it does not keep are left out.
    """
    n = sizes(scope)
    found: list[tuple[tuple[str, ...], str, Callable[[], Callable[[], None]]]] = [
        (
            ("consumers", "produced", "moving", "vacated"),
            "consumers",
            lambda: _free_slots(scope, memory),
        ),
        ((*TICKETS, "serial"), "serial", lambda: _tickets(memory)),
        (
            ("ended_at", "ended_on", "submitted", "joined"),
            "ended_at",
            lambda: _ends(memory, n["slot"]),
        ),
        (("submitted", "joined"), "submitted", lambda: _joins(memory, n["link"])),
        (
            ("consumers", "produced", "landed", "vacated", "waited", "replays"),
            "replays",
            lambda: _ranks(scope, memory),
        ),
        (
            ("named", "consumer", "weight_epoch"),
            "named",
            lambda: _consumer(memory),
        ),
        (("updater", "unawaited"), "updater", lambda: _updater(memory)),
        (("cursor", "tenants"), "cursor", lambda: _empty_pools(memory, n["pool"])),
        (("incarnation",), "incarnation", lambda: _incarnation(memory)),
    ]
    if scope.fresh_keys:
        found.append((("epoch_at",), "slot_of", lambda: _fresh_keys(memory, n["cell"])))
    return tuple(
        Rule(frozenset(after), make()) for after, needs, make in found if needs in memory.layout
    )


def _free_slots(scope: Scope, st: Any) -> Callable[[], None]:
    """
    A free slot's last tenant is never asked for, nor is its output before its forward ran, nor who
    left a slot that receives nothing while its tape has a replay to come.
    """
    members = range(sizes(scope)["slot"])
    consumers, cell_at, epoch_at = st.consumers, st.cell_at, st.epoch_at
    produced = st.produced if "produced" in st.layout else None
    moving = st.moving
    vacated = st.vacated if "vacated" in st.layout else None
    config = configuration(scope)
    receives = [config["receives"][stage] for stage in config["slot_stage"]]
    forwarded, slot_of = st.forwarded if scope.fresh_keys else None, st.slot_of

    def rule() -> None:
        for slot in members:
            mask = consumers[slot]
            if mask == 0 and moving[slot] == 0:
                cell = cell_at[slot]
                if cell != -1:
                    cell_at[slot] = -1
                    epoch_at[slot] = NEVER
                    if forwarded is not None and slot_of[cell] == -1:
                        forwarded[cell] = NEVER  # the cell's next key is fresh
            if produced is not None and mask in (0, RESERVED):
                produced[slot] = 0
            if vacated is not None and mask & VACATES and not receives[slot]:
                vacated[slot] = 0

    return rule


def _tickets(st: Any) -> Callable[[], None]:
    """Tickets are compared for equality only: number those in flight from 1, in their order."""
    serial = st.serial
    columns = [getattr(st, name) for name in TICKETS if name in st.layout]
    whole = st.buffer[: sum(map(len, columns))].tobytes
    none = bytes(len(whole()))

    def rule() -> None:
        if whole() == none:
            serial[0] = 0
            return
        flying = 0
        for column in columns:
            for ticket in column:
                flying |= 1 << ticket
        flying &= ~1
        if flying:
            for column in columns:
                for index, ticket in enumerate(column):
                    if ticket:
                        column[index] = (flying & ((2 << ticket) - 1)).bit_count()
        serial[0] = flying.bit_count()

    return rule


def _ends(st: Any, slots: int) -> Callable[[], None]:
    """The graph stream has waited for a slot's latest end, or has not; then it is of a link."""
    members = range(slots)
    joined, ended_on, ended_at = st.joined, st.ended_on, st.ended_at

    def rule() -> None:
        for slot in members:
            waits = joined[ended_on[slot]] < ended_at[slot]
            ended_at[slot] = 1 if waits else 0
            if not waits:
                ended_on[slot] = 0

    return rule


def _joins(st: Any, links: int) -> Callable[[], None]:
    """The graph stream has waited for all of a caller's work, or it has not."""
    members = range(links)
    submitted, joined = st.submitted, st.joined

    def rule() -> None:
        for link in members:
            ahead = submitted[link] - joined[link]
            if ahead or joined[link]:
                submitted[link] = (ahead > 0) - (ahead < 0)
                joined[link] = 0

    return rule


def _ranks(scope: Scope, st: Any) -> Callable[[], None]:
    """
    Stream work is compared only as "waited for": per domain, number the replays that some link has
    yet to wait for and that wrote a live tape or a stage's gradients, or vacated a slot, from 1, in
    their order, and count waits by how many of those they cover. What every link has waited for
    holds nobody back again and is written 0. The last replay is numbered whatever it did, where a
    drop may yet say that it vacated a slot.
    """
    config = configuration(scope)
    at = config["domain_of"]
    domains = [
        (
            domain,
            [s for s, stage in enumerate(config["slot_stage"]) if at[stage] == domain],
            [s for s, d in enumerate(at) if d == domain],
            [link for link, d in enumerate(config["domain_at"]) if d == domain],
        )
        for domain in range(sizes(scope)["domain"])
    ]
    waited, replays, produced = st.waited, st.replays, st.produced
    # A value that no guard of the scope's transitions reads is not numbered and not part of a
    # state.
    landed = st.landed if "landed" in st.layout else [0] * len(st.landed)
    vacated = st.vacated if "vacated" in st.layout else [0] * len(produced)
    drops = "vacated" in st.layout and "drop" in scope.transitions

    def rule() -> None:
        for domain, slots, stages, links in domains:
            marks = 0
            for slot in slots:
                marks |= 1 << produced[slot] | 1 << vacated[slot]
            for stage in stages:
                marks |= 1 << landed[stage]
            if drops:
                marks |= 1 << replays[domain]
            awaited = min([waited[link] for link in links])
            marks &= -2 << awaited
            for slot in slots:
                produced[slot] = (marks & ((2 << produced[slot]) - 1)).bit_count()
                vacated[slot] = (marks & ((2 << vacated[slot]) - 1)).bit_count()
            for stage in stages:
                landed[stage] = (marks & ((2 << landed[stage]) - 1)).bit_count()
            for link in links:
                waited[link] = (marks & ((2 << waited[link]) - 1)).bit_count()
            replays[domain] = (marks & ((2 << replays[domain]) - 1)).bit_count()

    return rule


def _consumer(st: Any) -> Callable[[], None]:
    """Who reads the gradients is asked of the epoch in which it was named alone."""
    named, consumer, weight_epoch = st.named, st.consumer, st.weight_epoch

    def rule() -> None:
        if named[0] != weight_epoch[0]:
            named[0] = NEVER
            consumer[0] = 0

    return rule


def _updater(st: Any) -> Callable[[], None]:
    """Whose stream an update ran on is asked while some graph stream has yet to wait for it."""
    updater, unawaited = st.updater, st.unawaited

    def rule() -> None:
        if not any(unawaited):
            updater[0] = 0

    return rule


def _empty_pools(st: Any, pools: int) -> Callable[[], None]:
    """A pool that keeps nobody's memory may be replayed from the start."""
    cursor, tenants = st.cursor, st.tenants
    members = range(pools)

    def rule() -> None:
        for pool in members:
            if tenants[pool] == 0:
                cursor[pool] = 0

    return rule


def _incarnation(st: Any) -> Callable[[], None]:
    """An incarnation is only ever equal to itself: call the current one 0."""
    incarnation = st.incarnation

    def rule() -> None:
        incarnation[0] = 0

    return rule


def _fresh_keys(st: Any, cells: int) -> Callable[[], None]:
    """Every next key of a cell is fresh, so only whether its live tape was forwarded counts."""
    members = range(cells)
    slot_of, forwarded, epoch_at = st.slot_of, st.forwarded, st.epoch_at

    def rule() -> None:
        for cell in members:
            mark = forwarded[cell]
            if mark != NEVER:
                slot = slot_of[cell]
                if slot == -1:
                    forwarded[cell] = NEVER
                elif epoch_at[slot] != 0:
                    forwarded[cell] = 0 if mark == epoch_at[slot] else NEVER
                    epoch_at[slot] = 0

    return rule

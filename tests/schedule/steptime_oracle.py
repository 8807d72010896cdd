"""
A second simulator of a step: the longest paths in a graph of all actions and the actions that they
wait for.

The oracle shares no code with `qeffect.schedule.steptime`. It reads the texts of the entries, turns
every rule in that module's docstring into edges between names, and lets `graphlib` compute the
order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from fractions import Fraction
from graphlib import TopologicalSorter

from qeffect.schedule.actions import Schedule
from qeffect.schedule.durations import Durations, Time

from .edits import rows_of

Name = tuple[object, ...]


def longest_paths(
    schedule: Schedule,
    durations: Durations,
    queues: str,
    rendezvous: str | None,
    group: int = 1,
) -> dict[Name, tuple[Time, Time]]:
    """
    The begin and end of every action, by name: `("0F1",)`, `("0SEND_F1",)`, `("update", 2)`.

    Args:
        schedule: The schedule table; with a group above 1, a table with grouped dW.
        durations: The durations.
        queues: Which messages share a queue.
        rendezvous: What a send blocks until the message is received.
        group: Microbatches whose dW is one product.

    Raises:
        graphlib.CycleError: An action waits for itself.
    """
    home = dict(schedule.stage_to_rank)
    takes: dict[Name, Time] = {}
    late: dict[Name, Time] = {}
    after: dict[Name, set[Name]] = defaultdict(set)
    rows = rows_of(schedule)
    named = any(re.search("SEND|RECV|SHARD", entry) for row in rows for entry in row)
    reduced = any("REDUCE_GRAD" in entry for row in rows for entry in row)
    own = {"F": "F", "I": "I", "W": "W"}

    def of(letter: str, stage: int) -> Time:
        special = durations.stages.get(stage, {})
        return special.get(letter, durations.times[letter])

    def whole(stage: int) -> Time | None:
        """The time of a whole product, if it is given."""
        own = durations.grouped_stages.get(stage, {})
        if group in own:
            return own[group]
        has_own_w = "W" in durations.stages.get(stage, {})
        return None if has_own_w else durations.grouped.get(group)

    def rank_time(rank: int, name: str) -> Time:
        return durations.ranks.get(rank, {}).get(name, durations.times.get(name, 0))

    def send(rank: int, stage: int, letter: str, mb: int, last: dict[object, Name]) -> Name:
        target = home[stage + (1 if letter == "F" else -1)]
        name: Name = (f"{stage}SEND_{letter}{mb}",)
        takes[name] = durations.links.get((rank, target), durations.times.get("message", 0))
        made = f"{stage}F{mb}" if letter == "F" else f"{stage}I{mb}"
        after[name].add((made,))
        queue = (target, letter if queues.endswith("direction") else "")
        if queue in last:
            after[name].add(last[queue])
        last[queue] = name
        return name

    ends: list[set[Name]] = []
    for rank, row in enumerate(rows):
        # What stood last in the row, and what of it holds up a send, with its place.
        before: Name | None = None
        holds: tuple[Name, int] | None = None
        channel: dict[object, Name] = {}
        issued: Name | None = None
        reduction: Name | None = None
        wgrads: dict[int, Name] = {}
        places = {}
        opened: set[int] = set()
        for step, text in enumerate(row):
            inside = text[1 : text.index(")")].split(";") if text.startswith("(") else [text]
            parts = []
            for part in filter(None, inside):
                full = re.fullmatch(r"(\d+)B(\d+)", part)
                parts += [f"{full[1]}I{full[2]}", f"{full[1]}W{full[2]}"] if full else [part]
            for part in parts:
                found = re.fullmatch(r"(\d+)([A-Z_]+?)(\d*)", part)
                assert found is not None
                stage, kind, mb = int(found[1]), found[2], int(found[3] or -1)
                name: Name = (part,) if mb >= 0 else (part, step)
                if kind == "F" and stage not in opened:
                    opened.add(stage)
                    special = durations.stages.get(stage, {})
                    length = special.get("refresh", durations.times.get("refresh", 0))
                    if length:
                        refresh: Name = (f"{stage}REFRESH",)
                        takes[refresh] = length
                        after[refresh] |= {n for n in (before,) if n}
                        before = refresh
                if kind in own:
                    takes[name] = of(kind, stage)
                    alone = True
                    if kind == "W" and group > 1 and whole(stage) is not None:
                        # The parts of the product follow each other, so the first could take all.
                        takes[name] = whole(stage) * Fraction(1, group)  # type: ignore[operator]
                        alone = mb in range(0, schedule.num_microbatches, group)
                    late[name] = rank_time(rank, "launch") if alone else 0
                    places[name] = step
                    if rank_time(rank, "host") and alone:
                        call: Name = ("host", part)
                        takes[call] = rank_time(rank, "host")
                        if issued:
                            after[call].add(issued)
                        issued = call
                        after[name].add(call)
                    source = {"F": stage - 1, "I": stage + 1}.get(kind)
                    if source in home:
                        letter = "F" if kind == "F" else "B"
                        near = home[source] == rank
                        after[name].add((f"{source}{kind if near else 'SEND_' + letter}{mb}",))
                    if kind == "W":
                        wgrads[stage] = name
                    if kind in "FI" and not named:
                        letter = "F" if kind == "F" else "B"
                        to = home.get(stage + (1 if letter == "F" else -1))
                        if to is not None and to != rank:
                            send(rank, stage, letter, mb, channel)
                elif kind.startswith("SEND"):
                    letter = kind[-1]
                    sent = send(rank, stage, letter, mb, channel)
                    made = (f"{stage}{'F' if letter == 'F' else 'I'}{mb}",)
                    if holds and not (made in places and holds[1] == places[made]):
                        after[sent].add(holds[0])
                    other = stage + (1 if letter == "F" else -1)
                    if rendezvous:
                        after[sent].add((f"{other}RECV_{letter}{mb}",))
                    if rendezvous != "rank":
                        continue
                    name = ("held", part)
                    takes[name] = 0
                    after[name].add(sent)
                elif kind == "REDUCE_GRAD":
                    name = (part,)
                    takes[name] = durations.stages.get(stage, {}).get(
                        "reduce", durations.times.get("reduce", 0)
                    )
                    after[name] |= {n for n in (reduction, holds and holds[0]) if n}
                    reduction = name
                    continue
                else:
                    takes[name] = 0
                    if kind.startswith("WAIT_SEND"):
                        letter = kind[-1]
                        other = stage + (1 if letter == "F" else -1)
                        after[name] |= {
                            (f"{stage}SEND_{letter}{mb}",),
                            (f"{other}RECV_{letter}{mb}",),
                        }
                    elif kind == "WAIT_REDUCE_GRAD":
                        after[name].add((f"{stage}REDUCE_GRAD",))
                if before:
                    after[name].add(before)
                before = name
                if not kind.startswith("RECV"):
                    holds = name, step
        if not reduced:
            order = list(places)
            for stage, wgrad in sorted(wgrads.items(), key=lambda item: order.index(item[1])):
                length = durations.stages.get(stage, {}).get(
                    "reduce", durations.times.get("reduce", 0)
                )
                if length:
                    name = (f"{stage}REDUCE_GRAD",)
                    takes[name] = length
                    after[name] |= {n for n in (reduction, wgrad) if n}
                    reduction = name
        ends.append({name for name in (before, reduction) if name})
    agreed = durations.times.get("consent", 0)
    if agreed:
        takes["consent",] = agreed
        after["consent",] = set().union(*ends)
    for rank, end in enumerate(ends):
        if rank_time(rank, "update"):
            takes["update", rank] = rank_time(rank, "update")
            after["update", rank] = {("consent",)} if agreed else end
    when: dict[Name, tuple[Time, Time]] = {}
    for name in TopologicalSorter({name: after[name] for name in takes}).static_order():
        start = max((when[n][1] for n in after[name]), default=0) + late.get(name, 0)
        when[name] = start, start + takes[name]
    return when

"""
Legal schedules, written by a bookkeeper that never asks the contract.

It knows how a pipeline step goes: refresh and forward, dI after F, dW any time after its dI, the
readers between, then finalize, reduce, commit, checkpoint, now and then a failure and a restore.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from attrs import define, field

from qeffect.keys import Cell, TapeKey, TapeRef
from qeffect.layout import Layout
from qeffect.relations.constants import DGRAD_BIT, GRAD_BIT, OUT_BIT, WGRAD_BIT
from qeffect.verification.concrete import Setup

__all__ = ["Action", "Stuck", "schedule"]

#: A transition and its arguments.
Action = tuple[str, tuple[Any, ...]]


class Stuck(Exception):  # noqa: N818 - no error: the dice fell badly, throw again
    """No action is left that the capture order allows."""


@define
class _Tape:
    key: TapeKey
    slot: int
    ran: set[str] = field(factory=set)
    flying: str = ""
    ticket: int = 0
    live: bool = True


def schedule(setup: Setup, seed: int, epochs: int = 2) -> list[Action]:
    """
    Return a legal schedule of a process.

    Args:
        setup: The process.
        seed: Seed of every choice.
        epochs: Optimizer steps to take.
    """
    attempt = 0
    while True:
        try:
            return list(_Bookkeeper(setup, random.Random(f"{seed}/{attempt}")).run(epochs))
        except Stuck:
            attempt += 1


class _Bookkeeper:
    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.rng = rng
        self.laid: Layout = setup.lay_out()
        self.st = self.laid.memory  # read for its configuration only
        self.stages = [config.stage for config in setup.stages]
        self.epoch = setup.epoch
        self.incarnation = 1
        self.serial = 0
        self.generation = [0] * len(self.st.consumers)
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        self.token = dict.fromkeys(range(len(self.st.token)), 0)
        self.free = {
            config.stage: list(self.laid.slots[config.stage]) for config in self.setup.stages
        }
        self.rank: dict[int, int] = {}
        self.kept: dict[int, int] = dict.fromkeys(range(len(self.st.cursor)), 0)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.tapes: dict[Cell, _Tape] = {}
        self.opened: set[int] = set()
        self.position = dict.fromkeys(self.token, 0)
        self.cached: set[int] = set()
        self.bound: set[Cell] = set()
        self.reader = self.rng.randrange(len(self.st.domain_at))

    # Small things

    def key(self, cell: Cell) -> TapeKey:
        return TapeKey(self.epoch, *cell)

    def ref(self, tape: _Tape) -> TapeRef:
        return TapeRef(tape.slot, self.generation[tape.slot], self.incarnation)

    def domain(self, stage: int) -> int:
        return int(self.st.domain_of[stage])

    def link(self, stage: int) -> int:
        d = self.domain(stage)
        links = [i for i, domain in enumerate(self.st.domain_at) if domain == d]
        return self.rng.choice(links)

    def consumer(self, stage: int) -> int:
        """The link of the stream that reads the gradients of this epoch."""
        links = [i for i, domain in enumerate(self.st.domain_at) if domain == self.domain(stage)]
        return links[self.reader % len(links)]

    def issue(self) -> int:
        self.serial += 1
        return self.serial

    def flying(self, domain: int) -> bool:
        return any(
            t.flying in ("F", "dI") and self.domain(t.key.stage) == domain
            for t in self.tapes.values()
        )

    def release(self, tape: _Tape) -> None:
        tape.live = False
        self.generation[tape.slot] += 1
        self.free[tape.key.stage].append(tape.slot)

    def joined(self, link: int) -> Iterator[Action]:
        if self.rng.random() < 0.3:
            yield "submit", (link,)
            yield "join", (link,)

    # One epoch

    def run(self, epochs: int) -> Iterator[Action]:
        for _ in range(epochs):
            failed = False
            late = self.rng.random() < 0.3  # readers may finish after the stage is final
            todo: set[tuple[Cell, str]] = set()
            self.readers: set[tuple[Cell, str]] = set()
            for config in self.setup.stages:
                for cell in config.cells():
                    todo |= {(cell, action) for action in ("F", "dI", "dW")}
                    (self.readers if late else todo).update(
                        (cell, action) for action in self.reads(config)
                    )
            while todo or any(t.flying for t in self.tapes.values()):
                choices = [op for op in sorted(todo) if self.enabled(*op)]
                landing = [t for t in self.tapes.values() if t.flying]
                if landing and (not choices or self.rng.random() < 0.5):
                    yield from self.land(self.rng.choice(landing))
                elif choices:
                    cell, action = self.rng.choice(choices)
                    todo.discard((cell, action))
                    yield from self.act(cell, action)
                    if self.rng.random() < 0.02:
                        failed = True
                        break
                else:
                    raise Stuck
            if failed:
                yield from self.fail()
            elif self.rng.random() < 0.3 and any(c.reduces for c in self.setup.stages):
                failed = True
                yield from self.fail_to_reduce()
            else:
                yield from self.end_epoch()
            if failed or self.rng.random() < 0.4:
                yield from self.restart(failed)

    def reads(self, config: Any) -> list[str]:
        readers = [("out", config.sends_output), ("grad", config.sends_gradient)]
        return [name for name, wanted in readers if wanted]

    def enabled(self, cell: Cell, action: str) -> bool:
        tape = self.tapes.get(cell)
        domain = self.domain(cell[0])
        if action == "F":
            if self.flying(domain):
                return False
            return self.in_order(self.st.forward_at, cell, domain) and bool(self.slots_for(cell))
        if tape is None or tape.flying or "F" not in tape.ran:
            return False
        if action == "dI":
            if self.flying(domain):
                return False
            rank = self.st.dgrad_rank[tape.slot]
            return self.in_order(self.st.dgrad_at, cell, domain) and self.may_replay(tape, rank)
        if action == "dW":
            buffer = self.st.buffer_of[cell]
            writing = any(
                t.flying == "dW" and self.st.buffer_of[t.key.cell] == buffer
                for t in self.tapes.values()
            )
            ready = "dI" in tape.ran and not writing
            return ready and self.may_replay(tape, self.st.wgrad_rank[tape.slot])
        return action == "out" or "dI" in tape.ran

    def in_order(self, declared: Any, cell: Cell, domain: int) -> bool:
        return not self.st.declared[domain] or declared[cell] == self.position[domain]

    def slots_for(self, cell: Cell) -> list[int]:
        found = []
        for slot in self.free[cell[0]]:
            pool = self.st.pool_of[slot]
            fits = not self.kept[pool] or self.st.forward_rank[slot] > self.rank.get(pool, -1)
            if fits and self.generation[slot] < self.st.generation_max[0]:
                found.append(slot)
        return found

    def may_replay(self, tape: _Tape, rank: int) -> bool:
        return rank > self.rank.get(self.st.pool_of[tape.slot], -1)

    def act(self, cell: Cell, action: str) -> Iterator[Action]:
        stage, key = cell[0], self.key(cell)
        link = self.link(stage)
        if action == "F":
            slot = self.rng.choice(self.slots_for(cell))
            self.free[stage].remove(slot)
            if self.rng.random() < 0.3:
                yield "reserve", (key, slot)
            refresh = int(stage not in self.cached)
            if refresh and self.rng.random() < 0.5:
                yield from self.joined(link)
                yield "check_refresh", (stage, link)
                yield "commit_refresh", (stage, self.issue())
                refresh = 0
                if self.rng.random() < 0.2:  # lost, and filled again
                    yield "invalidate", (stage,)
                    yield "check_refresh", (stage, link)
                    yield "commit_refresh", (stage, self.issue())
            self.cached.add(stage)
            tape = self.tapes[cell] = _Tape(key, slot, flying="F")
            yield from self.joined(link)
            domain = self.domain(stage)
            if self.rng.random() < 0.5:
                self.bound.add(cell)
                yield "bind", (key, self.st.destination_of[cell])
            yield "check_forward", (key, slot, self.token[domain], link, refresh)
            tape.ticket = self.issue()
            pool = self.st.pool_of[slot]
            self.kept[pool] += 1
            self.rank[pool] = self.st.forward_rank[slot]
            return
        tape = self.tapes[cell]
        if action == "dI":
            if cell not in self.bound:
                self.bound.add(cell)
                yield "bind", (key, self.st.destination_of[cell])
            yield from self.joined(link)
            yield "wait", (link,)
            yield "check_dgrad", (key, self.ref(tape), self.token[self.domain(stage)], link)
            tape.flying, tape.ticket = "dI", self.issue()
            self.rank[self.st.pool_of[tape.slot]] = self.st.dgrad_rank[tape.slot]
        elif action == "dW":
            buffer = self.st.buffer_of[cell]
            first = int(buffer not in self.opened)
            self.opened.add(buffer)
            yield from self.joined(link)
            destination = self.st.destination_of[cell]
            yield "check_wgrad", (key, self.ref(tape), link, destination, first)
            tape.flying, tape.ticket = "dW", self.issue()
            self.rank[self.st.pool_of[tape.slot]] = self.st.wgrad_rank[tape.slot]
        else:
            bit = OUT_BIT if action == "out" else GRAD_BIT
            yield "wait", (link,)
            yield "read", (key, self.ref(tape), bit, link)
            yield "finish_read", (key, self.ref(tape), bit)
            tape.ran.add(action)
            self.maybe_release(tape)

    def maybe_release(self, tape: _Tape) -> None:
        owed = {DGRAD_BIT: "dI", WGRAD_BIT: "dW", OUT_BIT: "out", GRAD_BIT: "grad"}
        mask = self.st.owes[tape.key.stage]
        if all(name in tape.ran for bit, name in owed.items() if mask & bit):
            self.kept[self.st.pool_of[tape.slot]] -= 1
            self.release(tape)

    def land(self, tape: _Tape) -> Iterator[Action]:
        stage, done = tape.key.stage, tape.flying
        matrices = self.st.matrices[stage]
        tape.flying = ""
        if done == "F":
            yield "commit_forward", (tape.slot, tape.ticket)
        elif done == "dI":
            yield "commit_dgrad", (tape.slot, tape.ticket, matrices)
        else:
            yield "commit_wgrad", (tape.slot, tape.ticket, matrices)
        if done != "dW":
            self.token[self.domain(stage)] += 1
            self.position[self.domain(stage)] += 1
        tape.ran.add(done)
        self.maybe_release(tape)

    def finalized(self) -> Iterator[Action]:
        for stage in self.rng.sample(self.stages, len(self.stages)):
            link = self.consumer(stage)
            yield "wait", (link,)
            yield "finalize", (stage, link)

    def started(self, bucket: int) -> Iterator[Action]:
        link = self.link(self.st.stage_at[bucket])
        yield "wait", (link,)
        yield "start_reduction", (bucket, link)

    def finished(self, bucket: int) -> Iterator[Action]:
        yield "finish_reduction", (bucket, self.consumer(self.st.stage_at[bucket]))

    def declared(self) -> list[int]:
        """Every bucket, in the order in which their reductions start."""
        buckets = list(range(len(self.st.stage_at)))
        if self.st.ordered[0]:
            return sorted(buckets, key=lambda bucket: int(self.st.reduce_at[bucket]))
        return self.rng.sample(buckets, len(buckets))

    def end_epoch(self) -> Iterator[Action]:
        early = self.rng.random() < 0.5  # reductions begin before their stages are final
        buckets = self.declared()
        ended = self.rng.randrange(len(buckets) + 1) if early else 0
        if early:
            for bucket in buckets:
                yield from self.started(bucket)
            for bucket in buckets[:ended]:
                yield from self.finished(bucket)
        yield from self.finalized()
        if not early:
            for bucket in buckets:
                yield from self.started(bucket)
        if self.rng.random() < 0.3:
            yield from self.drained()
        for cell, action in sorted(self.readers):
            yield from self.act(cell, action)
        for bucket in buckets[ended:]:
            yield from self.finished(bucket)
        yield "commit_epoch", (self.epoch,)
        self.epoch += 1
        self.begin_epoch()

    def fail_to_reduce(self) -> Iterator[Action]:
        if self.rng.random() < 0.5:
            yield from self.finalized()
        bucket = self.declared()[0]
        yield from self.started(bucket)
        yield "fail_reduction", (bucket,)

    def drained(self) -> Iterator[Action]:
        for domain in self.token:
            yield "drain", (domain,)

    def restart(self, failed: bool) -> Iterator[Action]:
        if not failed and self.rng.random() < 0.4:  # a step begins, and is given up
            stage = self.rng.choice(self.stages)
            yield "check_refresh", (stage, self.link(stage))
            verb = self.rng.choice(["abort", "commit", "commit"])
            yield f"{verb}_refresh", (stage, self.issue())
            failed = True
        yield from self.drained()
        if not failed:
            yield "checkpoint", ()
        self.incarnation += 1
        yield "restore", (self.epoch, self.incarnation)
        self.generation = [0] * len(self.generation)
        self.begin_incarnation()

    def fail(self) -> Iterator[Action]:
        """Abort what is in flight, drop some of what is not, lose a cache, fail a refresh."""
        names = {"F": "abort_forward", "dI": "abort_dgrad", "dW": "abort_wgrad"}
        broken = set()
        for tape in self.tapes.values():
            if tape.flying:
                yield names[tape.flying], (tape.slot, tape.ticket)
                if tape.flying != "dW":
                    broken.add(self.domain(tape.key.stage))
            elif tape.live and self.rng.random() < 0.5:
                yield "drop", (tape.key, self.ref(tape))
        stage = self.rng.choice(self.stages)
        yield "invalidate", (stage,)
        if self.domain(stage) not in broken and stage not in self.cached:
            yield "check_refresh", (stage, self.link(stage))
            verb = self.rng.choice(["abort", "commit"])
            yield f"{verb}_refresh", (stage, self.issue())

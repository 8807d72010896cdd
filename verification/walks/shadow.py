"""
The shadow of a process: a record of all its calls so far.

The shadow reads no column of the contract. It records the tape in each slot, the actions for which
the tape still waits, the weights in each cache, and the times of waits and replays.
`qeffect.verification.walks.oracle` decides only from the shadow which calls are legal.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from qeffect import TapeKey, TapeRef, Ticket
from qeffect.engine.freelist import FreeSlots
from qeffect.keys import Cell
from qeffect.stage_config import StageConfig

from ..calls import Call
from ..process import Process
from .entities import USES, Domain, Flight, Link, Pool, Reduction, Slot, Stage, Tape

__all__ = ["Group", "Shadow"]

#: The other tapes that a dW takes.
Group = tuple[tuple[TapeKey, TapeRef], ...]


class Shadow:
    """
    Everything that has happened to one process, across its restarts.

    Args:
        process: The configuration of the process.
        incarnation: Incarnation of the contract on which the calls are made.
    """

    def __init__(self, process: Process, incarnation: int) -> None:
        self.process = process
        self.domain_names = tuple(dict.fromkeys(c.domain for c in process.stages))
        self.pool_of, self.ranks = process.capture
        self.cells = [cell for config in process.stages for cell in config.cells()]
        self.configs = {config.stage: config for config in process.stages}
        self.epoch = 0
        self.clock = 0
        #: The latest references and tickets. Once used, they must never be accepted again.
        self.old_refs: list[tuple[TapeKey, TapeRef]] = []
        self.old_tickets: list[Ticket] = []
        self.begin(incarnation, 0)

    def begin(self, incarnation: int, epoch: int) -> None:
        """Start or restore the process."""
        self.incarnation = incarnation
        self.epoch = epoch
        self.stages = {s: Stage(config) for s, config in self.configs.items()}
        self.slots = [
            Slot(index, stage, self.pool_of[index])
            for index, stage in enumerate(
                c.stage for c in self.process.stages for _ in range(c.slots)
            )
        ]
        # Free slots are taken in this order, so that the slot of a call without an explicit slot is
        # known.
        self.stacks = {
            stage: FreeSlots(slot.index for slot in self.slots if slot.stage == stage)
            for stage in self.stages
        }
        self.reductions: dict[int | str, Reduction] = {}
        for config in self.process.stages:
            for bucket in config.reductions():
                known = self.reductions.get(bucket.name, Reduction(())).stages
                self.reductions[bucket.name] = Reduction((*known, config.stage))
        #: Buckets whose reduction started since the weights were last updated, in order.
        self.begun: list[int | str] = []
        #: The stream that has waited for gradients of this epoch. Then the stream and the time of
        #: the latest update of the weights.
        self.reader: Hashable | None = None
        self.updated: tuple[Hashable, int] | None = None
        #: The update in flight, and whether one failed half way.
        self.update: Ticket | None = None
        self.half_updated = False
        #: Stages whose weights a separate stream reads.
        self.readers: set[int] = set()
        #: Stages whose gradients a separate stream reads.
        self.gradients_readers: set[int] = set()
        #: Number of completed walks of the epoch.
        self.walks = 0
        self.domains = [Domain() for _ in self.domain_names]
        self.pools = [Pool() for _ in range(max(self.pool_of) + 1)]
        self.links = [
            Link(domain, caller)
            for caller in self.process.callers
            for domain in range(len(self.domains))
        ]
        self.flights: dict[int, Flight] = {}
        self.forwarded: dict[Cell, int] = {}
        #: Cells that the walk leaves out.
        self.skipped: set[Cell] = set()
        #: Cells whose dI has succeeded in this walk.
        self.backward: set[Cell] = set()
        self.bound: set[Cell] = set()
        self.written: set[Hashable] = set()
        self.writing: set[tuple[Hashable, int]] = set()

    # Queries

    def refresh_pool(self, stage: int) -> Pool | None:
        """Return the pool that a stage's refresh shares with slots; None if it shares no pool."""
        shared = self.configs[stage].refresh_pool
        if shared is None:
            return None
        slots = (slot for slot in self.slots if self.configs[slot.stage].pool == shared)
        return self.pools[next(slots).pool]

    @property
    def quiet(self) -> bool:
        """Whether nothing is in flight, half done or broken."""
        return not (
            self.tickets()
            or self.half_updated
            or any(domain.poisoned or domain.refreshed is not None for domain in self.domains)
            or any(reduction.running for reduction in self.reductions.values())
            or any(stage.spoiled for stage in self.stages.values())
        )

    def tickets(self) -> list[Ticket]:
        """The ticket of every action in flight; the update's ticket comes last."""
        found = [flight.ticket for flight in self.flights.values()]
        return found if self.update is None else [*found, self.update]

    def uses(self, relation: str) -> bool:
        """Whether the process uses a relation."""
        return relation not in self.process.omit

    def domain_of(self, stage: int) -> int:
        """Index of a stage's state domain."""
        return self.domain_names.index(self.configs[stage].domain)

    def domain(self, stage: int) -> Domain:
        """A stage's state domain."""
        return self.domains[self.domain_of(stage)]

    def gathered(self) -> list[StageConfig]:
        """
        The first stage of each domain whose scales are updated once per epoch and have yet to be
        updated.
        """
        first = {self.domain_of(s): config for s, config in reversed(self.configs.items())}
        moving = [first[d] for d, domain in enumerate(self.domains) if domain.gathered]
        return moving if self.uses("order") else []

    def may_take_more(self) -> bool:
        """Whether a dW in flight may take more tapes (compute the gradients of further
        microbatches): only if scales are updated once per epoch."""
        flights = self.flights.values()
        return any(
            f.ticket.action == "dW" and self.configs[f.stage].scales == "epoch" for f in flights
        )

    def buffers(self, cell: Cell) -> tuple[Hashable, Hashable]:
        """Return the gradient buffers of a cell (a stage and a microbatch): its stage's buffer, and
        the shared buffer."""
        own = self.configs[cell[0]].destinations
        apart = (cell[1],) if own and own[0].microbatch is not None else ()
        together = tuple(sorted({cell[0], self.sharer(cell[0])}))
        return (cell[:1], *apart), (together, *apart)

    def sharer(self, stage: int) -> int:
        """The other stage that writes a tied destination of this stage, or the stage itself."""
        mine = {name for matrix, name in self.configs[stage].buffers}
        for other, config in self.configs.items():
            if other != stage and mine & {name for _, name in config.buffers}:
                return other
        return stage

    def source(self, stage: int) -> int | None:
        """The stage of the process that feeds a stage."""
        return next((s for s, config in self.configs.items() if config.feeds == stage), None)

    def awaits_update(self, domain: int) -> bool:
        """Whether neither a domain's graph stream nor the host has waited for the latest update."""
        if self.updated is None:
            return False
        caller, at = self.updated
        own = [link for link in self.links if (link.domain, link.caller) == (domain, caller)]
        return self.domains[domain].drained < at and not any(link.joined > at for link in own)

    def slot_of(self, cell: Cell) -> Slot | None:
        """Return the slot (set of buffers) that holds a cell's live tape; None if no slot does."""
        for slot in self.slots:
            if slot.tape is not None and slot.tape.key.cell == cell:
                return slot
        return None

    def live(self) -> list[Slot]:
        """Slots with a tape."""
        return [slot for slot in self.slots if slot.tape is not None]

    def ref(self, slot: Slot) -> TapeRef:
        """The reference that names a slot's tape."""
        return TapeRef(slot.index, slot.releases, self.incarnation)

    def free(self, stage: int) -> list[Slot]:
        """Free slots of a stage that can still take a tape, the next to use first."""
        free = [self.slots[index] for index in reversed(self.stacks[stage])]
        return [slot for slot in free if slot.releases < self.process.generation_max]

    # Events

    def happened(self, call: Call, result: Any) -> None:
        """Record an accepted call and what it returned."""
        self.clock += 1
        getattr(self, f"_{call.transition}")(result, **call.arguments)

    def _claim(self, key: TapeKey, slot: Slot) -> None:
        slot.tape = Tape(key, {"F"})
        self.stacks[slot.stage].take(slot.index)
        self.old_refs.append((key, self.ref(slot)))
        del self.old_refs[:-16]

    def _release(self, slot: Slot) -> None:
        slot.tape = None
        slot.releases += 1
        self._vacant(slot)

    def _vacant(self, slot: Slot) -> None:
        """Free a slot without a tape, if no transfer through it is running."""
        if slot.tape is None and not slot.moving:
            stack = self.stacks[slot.stage]
            if slot.releases == self.process.generation_max:
                stack.retire(slot.index)
            else:
                stack.put(slot.index)

    def _reserve(self, ref: TapeRef, key: TapeKey, slot: int | None, link: int) -> None:
        place = self.slots[ref.slot]
        self._claim(key, place)
        if self.configs[key.stage].copies_input:
            assert place.tape is not None
            place.tape.arrived.add("copy")
            place.ended = (link, self.clock)
            self.links[link].submitted = self.clock
            self.domain(key.stage).device = True

    def _skip(self, _: Any, key: TapeKey) -> None:
        self.skipped.add(key.cell)
        stage = self.stages[key.stage]
        stage.dgrads += 1
        stage.wgrads += 1

    def _bind(self, _: Any, key: TapeKey, destination: Any) -> None:
        self.bound.add(key.cell)

    def _take_off(
        self, ticket: Ticket, stage: int, slot: Slot | None, filling: bool, group: Group = ()
    ) -> None:
        self.flights[ticket.serial] = Flight(
            ticket, stage, None if slot is None else slot.index, filling, group
        )
        if slot is not None:
            slot.flight = ticket.serial
        if filling:
            self.stages[stage].filling = ticket.serial
        if ticket.action != "dW":
            self.domain(stage).running.add(ticket.serial)

    def _check_refresh(self, ticket: Ticket, stage: int, link: int) -> None:
        pool = self.refresh_pool(stage)
        if pool is not None:
            pool.replayed.append(self.ranks[stage, "refresh"])
        self._take_off(ticket, stage, None, True)

    def _check_forward(
        self, ticket: Ticket, key: TapeKey, slot: int | None, token: Any, link: int, refresh: bool
    ) -> None:
        place = self.slots[ticket.slot]
        if place.tape is None:
            self._claim(key, place)
        self.forwarded[key.cell] = key.epoch
        pool = self.pools[place.pool]
        if pool.tapes == 0:
            pool.replayed.clear()
        pool.replayed.append(self.ranks[place.index, "F"])
        pool.tapes += 1
        self._take_off(ticket, key.stage, place, refresh)

    def _check_evaluation(self, ticket: Ticket, stage: int, cached: bool, link: int) -> None:
        self.flights[ticket.serial] = Flight(ticket, stage, None, False)
        self.stages[stage].evaluating = ticket.serial
        self.domain(stage).running.add(ticket.serial)

    def _check_dgrad(
        self, ticket: Ticket, key: TapeKey, ref: TapeRef, token: Any, link: int
    ) -> None:
        place = self.slots[ref.slot]
        self.pools[place.pool].replayed.append(self.ranks[place.index, "dI"])
        self._take_off(ticket, key.stage, place, False)

    def _check_wgrad(
        self,
        ticket: Ticket,
        key: TapeKey,
        ref: TapeRef,
        destination: Any,
        first: bool | None,
        first_of_tied: bool | None,
        link: int,
        group: Group = (),
    ) -> None:
        place = self.slots[ref.slot]
        self.pools[place.pool].replayed.append(self.ranks[place.index, "dW"])
        self.writing.update((buffer, ticket.serial) for buffer in self.buffers(key.cell))
        self._take_off(ticket, key.stage, place, False, group)
        for other, tape in group:
            self.slots[tape.slot].moving.add("group")
            self.slots[tape.slot].mover = (other, tape.generation)

    def _land(self, ticket: Ticket) -> tuple[Flight, Stage, Domain, Slot | None]:
        flight = self.flights.pop(ticket.serial)
        self.old_tickets.append(ticket)
        del self.old_tickets[:-16]
        stage, domain = self.stages[flight.stage], self.domain(flight.stage)
        domain.running.discard(ticket.serial)
        domain.device = True
        slot = None if flight.slot is None else self.slots[flight.slot]
        if slot is not None:
            slot.flight = None
        if flight.filling:
            stage.filling = None
        if ticket.action == "evaluation":
            stage.evaluating = None
        if ticket.action == "dW" and slot is not None and slot.tape is not None:
            for buffer in self.buffers(slot.tape.key.cell):
                self.writing.discard((buffer, ticket.serial))
        return flight, stage, domain, slot

    def _commit(self, ref: Any, ticket: Ticket, evidence: Any = (), **reports: Any) -> None:
        flight, stage, domain, slot = self._land(ticket)
        domain.replayed = self.clock
        if ticket.action == "evaluation":
            domain.evaluated = self.clock
            return
        if flight.filling:
            stage.cached = self.epoch
        if slot is None:
            domain.refreshed = flight.stage
            return
        assert slot.tape is not None
        waits = slot.tape.waits
        if ticket.action == "F":
            waits.clear()
            waits.update({"dI", "dW"})
            waits.update({"out"} if stage.config.sends_output else ())
            waits.update({"grad"} if stage.config.sends_gradient else ())
            stage.forwards += 1
            domain.refreshed = None
            if stage.config.scales == "action":
                domain.rolled_at = domain.updates
            slot.scaled_at = domain.rolled_at
            if stage.config.reports_draws:
                slot.drawn_at = reports["draws"]
                domain.drawn.add(reports["draws"])
        elif ticket.action == "dI":
            waits.remove("dI")
            stage.dgrads += 1
            if stage.config.weights_sum is not None:
                stage.weights.append(reports["weight"])
            self.backward.add(slot.tape.key.cell)
        else:
            stage.wgrads += 1
            stage.wrote = slot.vacated = self.clock
            self.written.update(self.buffers(slot.tape.key.cell))
            self._visit(slot, "dW")
            self._ungroup(flight.group)
        if ticket.action != "dW":
            slot.wrote = self.clock
            domain.updates += 1
            domain.of_walk += 1
            domain.gathered += stage.config.scales == "epoch"

    _commit_refresh = _commit_forward = _commit_dgrad = _commit_wgrad = _commit
    _commit_evaluation = _commit

    def _abort(self, _: Any, ticket: Ticket) -> None:
        flight, stage, domain, slot = self._land(ticket)
        if ticket.action != "dW":
            domain.poisoned = True
        if ticket.action == "evaluation":
            stage.spoiled, stage.final = True, False
        if slot is not None:
            stage.spoiled = True
            slot.vacated = domain.replayed = self.clock
            self._lose(slot)
            self._ungroup(flight.group)

    _abort_refresh = _abort_forward = _abort_dgrad = _abort_wgrad = _abort
    _abort_evaluation = _abort

    def _ungroup(self, group: Group) -> None:
        """Release every tape that a dW took into its group (computed together); a spoiled epoch
        loses these tapes."""
        for key, ref in group:
            slot, stage = self.slots[ref.slot], self.stages[key.stage]
            if slot.tape is not None and stage.spoiled:
                self._drop(None, key, ref)
            slot.moving.remove("group")
            slot.vacated = self.clock
            if slot.tape is not None:
                stage.wgrads += 1
                self._visit(slot, "dW")
            else:
                self._unused(slot)

    def _unused(self, slot: Slot) -> None:
        """End a use of a lost tape; the end of the last use frees its capture memory."""
        if not slot.moving & USES:
            self.pools[slot.pool].tapes -= 1
        self._vacant(slot)

    def _visit(self, slot: Slot, consumer: str) -> None:
        assert slot.tape is not None
        slot.tape.waits.remove(consumer)
        if not slot.tape.waits:
            self.pools[slot.pool].tapes -= 1
            self._release(slot)

    def _lose(self, slot: Slot) -> None:
        """Record that a tape is lost; its capture memory stays in use while it is being read."""
        assert slot.tape is not None
        if not slot.moving & USES:
            self.pools[slot.pool].tapes -= 1
        self._release(slot)

    def _begin(self, key: TapeKey, ref: TapeRef, what: str) -> None:
        slot = self.slots[ref.slot]
        slot.moving.add(what)
        slot.mover = (key, ref.generation)
        self.domain(key.stage).device = True

    def _end(self, ref: TapeRef, what: str, link: int) -> Slot:
        slot = self.slots[ref.slot]
        slot.moving.remove(what)
        slot.ended = (link, self.clock)
        self.links[link].submitted = self.clock
        return slot

    def _post_receive(self, _: Any, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> None:
        self._begin(key, ref, "back" if gradient else "in")

    def _finish_receive(
        self, _: Any, key: TapeKey, ref: TapeRef, gradient: bool, link: int
    ) -> None:
        what = "back" if gradient else "in"
        slot = self._end(ref, what, link)
        if slot.tape is not None:
            slot.tape.arrived.add(what)
        self._vacant(slot)

    def _read(self, _: Any, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> None:
        self._begin(key, ref, "grad" if gradient else "out")

    def _finish_read(self, _: Any, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> None:
        what = "grad" if gradient else "out"
        slot = self._end(ref, what, link)
        if slot.tape is not None:
            self._visit(slot, what)
        else:
            self._unused(slot)

    def _drop(self, _: Any, key: TapeKey, ref: TapeRef) -> None:
        slot = self.slots[ref.slot]
        assert slot.tape is not None
        slot.vacated = self.domain(key.stage).replayed
        if slot.tape.claimed:
            self._release(slot)
        else:
            self._lose(slot)
        stage = self.stages[key.stage]
        stage.spoiled, stage.final = True, False

    def _purge(self, _: Any, epoch: int) -> None:
        for slot in self.live():
            assert slot.tape is not None
            if slot.tape.key.epoch == epoch:
                self._drop(None, slot.tape.key, self.ref(slot))

    def _invalidate(self, _: Any, stage: int) -> None:
        it = self.stages[stage]
        it.cached = None
        own = [f for f in self.flights.values() if f.stage == stage and f.ticket.action == "F"]
        in_use = (it.forwards or own) and it.dgrads < len(it.config.cells())
        if in_use and self.uses("order"):
            it.spoiled = True

    def _submit(self, _: Any, caller: Hashable) -> None:
        for link in self.links:
            if link.caller == caller:
                link.submitted = self.clock

    def _join(self, _: Any, link: int) -> None:
        self.links[link].joined = self.clock

    def _wait(self, _: Any, link: int) -> None:
        self.links[link].waited = self.clock
        if not self.awaits_update(self.links[link].domain):
            self.links[link].saw_update = True

    def _start_weights_read(self, _: Any, stage: int, link: int) -> None:
        self.readers.add(stage)
        self.domain(stage).device = True

    def _finish_weights_read(self, _: Any, stage: int, link: int) -> None:
        self.readers.remove(stage)
        self.reader = self.links[link].caller

    def _start_gradients_read(self, _: Any, stage: int, link: int) -> None:
        self.gradients_readers.add(stage)
        self.domain(stage).device = True

    def _finish_gradients_read(self, _: Any, stage: int, link: int) -> None:
        self.gradients_readers.remove(stage)

    def _drain(self, _: Any) -> None:
        for domain in self.domains:
            domain.device = False
            domain.drained = self.clock

    def _finalize(self, _: Any, stage: int, link: int) -> None:
        self.stages[stage].final = True
        self.reader = self.links[link].caller

    def writers(self, bucket: int | str) -> list[Stage]:
        """The stages that write a bucket."""
        return [self.stages[stage] for stage in self.reductions[bucket].stages]

    def _start_reduction(self, _: Any, bucket: int | str, link: int) -> None:
        self.reductions[bucket].running = True
        self.begun.append(bucket)
        self.domain(self.reductions[bucket].stages[0]).device = True

    def _finish_reduction(self, _: Any, bucket: int | str, link: int) -> None:
        it = self.reductions[bucket]
        it.running, it.done = False, True
        self.reader = self.links[link].caller

    def _fail_reduction(self, _: Any, bucket: int | str) -> None:
        self.reductions[bucket].running = False
        for stage in self.writers(bucket):
            stage.final, stage.spoiled = False, True

    def _next_walk(self, _: Any, epoch: int) -> None:
        """
        Begin the next walk (pass over the microbatches). The count of F continues over the whole
        epoch, and gradients stay in their buffers.
        """
        self.walks += 1
        self._walk_again()

    def _walk_again(self) -> None:
        """Reset the counts of the walk, since every microbatch runs again."""
        self.forwarded.clear()
        self.skipped.clear()
        for stage in self.stages.values():
            stage.dgrads = stage.wgrads = 0
            stage.final = False
        for domain in self.domains:
            domain.of_walk = 0
        self.backward.clear()
        self.bound.clear()

    def _check_update(self, ticket: Ticket, epoch: int, caller: Hashable) -> None:
        self.update = ticket
        self.updated = (caller, self.clock)
        self._unseen()

    def _end_update(self, ticket: Ticket) -> None:
        """End the update; all its device work is enqueued by now."""
        assert self.updated is not None
        self.update, self.updated = None, (self.updated[0], self.clock)
        self.old_tickets.append(ticket)
        del self.old_tickets[:-16]
        self._unseen()

    def _unseen(self) -> None:
        """
        Record that part of an update was enqueued: the host and the callers have yet to wait for
        it.
        """
        for domain in self.domains:
            domain.device = True
        for link in self.links:
            link.saw_update = False

    def _move_scales(self, _: Any, stage: int, updates: int | None = None) -> None:
        domain = self.domain(stage)
        domain.gathered, domain.rolled_at = 0, domain.updates

    def _abort_update(self, _: Any, ticket: Ticket) -> None:
        self._end_update(ticket)
        self.half_updated = True

    def _commit_update(self, _: Any, ticket: Ticket, evidence: Any = ()) -> None:
        self._end_update(ticket)
        self.epoch += 1
        self.reader = None
        self.walks = 0
        self._walk_again()
        for stage in self.stages.values():
            stage.forwards = 0
            stage.spoiled = False
            stage.weights.clear()
        for reduction in self.reductions.values():
            reduction.done = False
        self.begun.clear()
        self.written.clear()

    def _fail(self, _: Any, stage: int, epoch: int) -> None:
        """Record that the gradients of an epoch were wrong; an update may have used them."""
        if epoch == self.epoch:
            self.stages[stage].spoiled, self.stages[stage].final = True, False
        if epoch != self.epoch or self.update is not None:
            self.half_updated = True

    def _checkpoint(self, _: Any) -> None:
        pass

    def _restore(self, _: Any, checkpoint: Any, incarnation: int, fresh: bool) -> None:
        self.begin(incarnation, checkpoint.epoch)

"""
Build a runtime's memory, contract and executor. The contract checks each action; the executor runs
each action.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch

from qeffect.contract import Contract
from qeffect.destination_registry import DestinationRegistry
from qeffect.engine.stage import OPTIONAL
from qeffect.stage_config import Bucket, StageConfig
from qeffect.text import shown

from ..backends.epoch_scales import Scales, moves_once
from ..backends.protocol import BackendError, StageBackend, StateDomain
from ..backends.random_streams import POSITION
from ..step.eager import EagerExecutor, Executor, StageMemory
from ..step.effects import StageReports
from ..step.memory.arena import Arena
from ..step.memory.counters import DeviceCounters
from ..step.memory.numerical_state import live_state, preserving
from ..step.memory.scaling import AMAX, SharedScaling
from ..step.memory.tied_weights import TiedWeights
from ..step.memory.weight_copies import buckets_of, names_of, require_copies
from ..step.performer import Performer
from ..step.plan.order import Kind, Order
from ..step.plan.rows import Row
from ..step.plan.slots import SlotPlan, plan_slots
from ..step.reductions import SCALING, Reducer, Reductions, require_buckets
from ..step.streams import Handoff
from .runtime_config import RuntimeConfig

__all__ = ["Assembly"]


class Assembly:
    """
    Builds the parts of a runtime. Each method makes one part; call the methods in the order in
    which they are listed.

    Args:
        stages: Every stage of the state domain (stages whose FP8 scales are updated together).
        order: The rank's row of the schedule: its actions F, dI and dW in order.
        config: The process's configuration.
        reducer: Reduces gradients over replicas; None if nothing is reduced.
        row: The row with its messages, for a process of a pipeline.

    Raises:
        BackendError: The order names other stages than the given ones, the order is incomplete, or
            a stage does not fit the configuration.
    """

    def __init__(
        self,
        stages: Sequence[StageBackend],
        order: Order,
        config: RuntimeConfig,
        reducer: Reducer | None,
        row: Row | None,
    ) -> None:
        self.order, self.config, self.reducer, self.row = order, config, reducer, row
        self.domain = _one_domain(stages)
        self.stages = {stage.index: stage for stage in stages}
        if not isinstance(order, Order):
            raise BackendError(
                f"expected an Order, such as Order.parse('0F0 0I0 0W0'), found {shown(order)}"
            )
        order.require_whole()
        self.relations = frozenset[str]().union(*(stage.relations for stage in stages))
        if tuple(sorted(self.stages)) != order.stages:
            raise BackendError(
                f"the order runs stages {list(order.stages)}, this process has "
                f"{sorted(self.stages)}; build the stages of the order's rank"
            )
        self.tied = TiedWeights.of(stages, config.tied)
        self._require_shareable()
        self._require_groups()
        if moves_once(self.domain):
            self._require_sums()
        self._require_amax()
        reduces = self._guarded_reducer is not None
        require_copies(self.stages, config.copies, config.buckets, reduces=reducer is not None)
        self._held = require_buckets(
            self.stages,
            config.buckets,
            config.reductions,
            self.tied,
            config.copies,
            reduces=reduces,
        )
        plan = (
            plan_slots(order, config.provisioning, feeds=config.feeds, group=config.group)
            if row is None
            else row.slots
        )
        if plan.group != config.group:
            raise BackendError(
                f"the row was made for group={plan.group}, but the configuration has "
                f"group={config.group}; make the table and the row with the same group"
            )
        self.plan: SlotPlan = attrs.evolve(plan, sharers=self.tied.sharers, walks=config.walks)

    def warm(self, handoff: Handoff) -> None:
        """
        Warm up every stage on the graph stream, then restore the numerical state (such as FP8
        scales).
        """
        handoff.wait_for_caller()
        with handoff.scope(), preserving(self.domain):
            for stage in self.stages.values():
                stage.warm()
        handoff.synchronize()

    def memories(self) -> dict[int, StageMemory]:
        """
        Allocate every stage's slots (buffers for one microbatch each) and gradient destinations
        (the memory that dW writes).
        """
        found: dict[int, StageMemory] = {}
        first = 0
        for index in sorted(self.stages):
            stage = self.stages[index]
            arena = Arena.for_stage(
                stage, self.config.rule, self.order.num_microbatches, self.config.dtype, self.tied
            )
            shared = self.tied.with_sharer(stage)
            reports = StageReports.of(stage, self.relations, captured=self.config.replays_graphs)
            found[index] = StageMemory.allocate(stage, self.plan, arena, first, reports, shared)
            if moves_once(self.domain) and self._out_of_order(index, Kind.DGRAD):
                found[index].kept = {}
            first += self.plan.num_slots[index]
        return found

    def contract(
        self, memories: Mapping[int, StageMemory], registry: DestinationRegistry | None = None
    ) -> Contract:
        """
        Make the contract. The stages' memory then uses the contract's own tuples of matrix names,
        because the contract compares these tuples by identity.

        Raises:
            Refused: This runtime's gradient destinations overlap those of another runtime in the
                registry.
        """
        made = Contract(
            [self._stage_config(memory) for memory in memories.values()],
            omit=sorted(OPTIONAL - self.relations),
            callers=self.config.callers,
            declared=self._declared(),
            reductions=self._reduction_order(),
            counted=self.config.counts is not None,
            late=self.config.counts_late,
            registry=registry,
        )
        for own in made.stages:
            memories[own.stage].all_matrices = own.matrices
        return made

    def counters(self, memories: Mapping[int, StageMemory]) -> DeviceCounters | None:
        """Make the device's counters of actions; None if the configuration counts nothing."""
        if self.config.counts is None:
            return None
        places = [(i, slot.index) for i, m in memories.items() for slot in m.table]
        into: dict[int, int] = {}
        for memory in memories.values():
            if "arena" in self.relations:  # otherwise the contract knows no destinations
                memory.places = memory.arena.places()
            for slot, variant in zip(memory.slot_of, memory.variants, strict=True):
                into[slot] = max(into.get(slot, 1), memory.located(variant.destination) + 1)
        return DeviceCounters(places, self.domain.device, into)

    def reductions(
        self,
        contract: Contract,
        performer: Performer,
        gradients: Callable[[int], Mapping[str, torch.Tensor]],
    ) -> Reductions:
        """Make the reductions of a process; `gradients` returns a stage's summed gradients."""
        return Reductions(
            contract,
            self._held,
            gradients,
            performer,
            told="reduction" in self.relations,
            copies=self.config.copies,
            scaling=self._shared_scaling() if self._shares_amax else None,
        )

    def _shared_scaling(self) -> SharedScaling:
        """
        Return the scaling state that replicas share. The state of the random numbers is left out,
        because each replica draws other numbers.
        """
        live = live_state(self.domain)
        return SharedScaling({n: held for n, held in live.items() if not n.endswith(POSITION)})

    def executor(
        self,
        memories: Mapping[int, StageMemory],
        handoff: Handoff,
        counters: DeviceCounters | None,
    ) -> Executor:
        """
        Make the executor. It calls the backend or replays graphs. If it replays graphs, this method
        captures them.

        Raises:
            BackendError: The backend cannot be captured; every obstacle is named.
        """
        if not self.config.replays_graphs:
            return EagerExecutor(counters)
        if self.config.mode == "one launch":
            from ..step.launch_executor import launch_executor

            return launch_executor(self.domain, memories, handoff, counters)
        return self.graphs(memories, handoff, counters)

    def graphs(
        self,
        memories: Mapping[int, StageMemory],
        handoff: Handoff,
        counters: DeviceCounters | None,
    ) -> Executor:
        """
        Capture a graph of each action, and make the executor that replays these graphs.

        Raises:
            BackendError: The backend cannot be captured; every obstacle is named.
        """
        from ..step.graphs import capture

        pool = self.config.pool
        return capture(
            self.domain, memories, self.plan, handoff, shared_pool=pool, counters=counters
        )

    def _stage_config(self, memory: StageMemory) -> StageConfig:
        stage = memory.stage
        reports = memory.reports.source
        row, index = self.row, stage.index
        readers = self.config.readers or row is not None
        buffers, tied = dict(self.tied.buffers(index)), self.tied.tied(index)
        if "reduction" in self.relations:
            copied = names_of(self.config.copies, index)
            shared = {m: copied[m] for m in memory.all_matrices if m in copied}
            buffers, tied = {**buffers, **shared}, (*tied, *shared)
        return StageConfig(
            stage=stage.index,
            microbatches=self.order.num_microbatches,
            slots=self.plan.num_slots[stage.index],
            matrices=memory.all_matrices,
            destinations=memory.arena.configured() if "arena" in self.relations else (),
            sends_output=readers,
            sends_gradient=readers and any(s.differentiable for s in stage.inputs),
            receives_input=row is not None and row.receives_input(index),
            receives_gradient=row is not None and row.receives_gradient(index),
            copies_input=self.config.feeder is not None and self._takes_data(index),
            feeds=(self.config.feeds if row is None else row.feeds).get(index),
            reduces=self._guarded_reducer is not None,
            reports_fills=reports.filled is not None,
            reports_updates=reports.updates is not None,
            tape_scales=reports.tape_scales,
            scales=self._scales(),
            reports_draws=reports.draws is True,
            recomputes_draws=reports.recomputes is True,
            weights_sum=self.config.weights_sum if reports.weights else None,
            pool=self.config.pool,
            buckets=self._buckets(memory),
            buffers=buffers if "arena" in self.relations else {},
            tied=tied if "arena" in self.relations else (),
        )

    def _scales(self) -> Scales:
        """
        Return when the domain's scales are updated, for the contract's configuration.

        The result is ``action`` if the contract does not check the order of actions.
        """
        return "epoch" if moves_once(self.domain) and "order" in self.relations else "action"

    def _takes_data(self, index: int) -> bool:
        """Whether a stage's inputs are data alone, and not the output of another stage."""
        row = self.row
        return row is not None and not row.receives_input(index) and index not in row.feeds.values()

    def _buckets(self, memory: StageMemory) -> tuple[Bucket, ...]:
        """
        Return a stage's buckets for the contract; empty if one bucket holds all gradients of the
        stage.

        The bucket of the scaling state belongs to the last stage. In a declared order, this bucket
        starts after the buckets of all gradients, and therefore after the last F and dI of all
        stages.
        """
        index = memory.stage.index
        given = tuple(self.config.buckets.get(index, ()))
        if self._guarded_reducer is not None:
            given = given or buckets_of(memory.stage, self.config.copies)
        last = max(self.stages)
        if not self._shares_amax or self._guarded_reducer is None or index != last:
            return given
        return (*(given or (Bucket(index, memory.all_matrices),)), Bucket(SCALING))

    def _reduction_order(self) -> tuple[int | str, ...]:
        order = tuple(self.config.reductions)
        shared = order and self._shares_amax and self._guarded_reducer is not None
        return (*order, SCALING) if shared else order

    @property
    def _shares_amax(self) -> bool:
        """Whether the process has replicas that share their scaling state."""
        return self.config.amax == "replicas" and self.reducer is not None

    def _require_amax(self) -> None:
        if self.config.amax not in AMAX:
            raise BackendError(
                f"amax is {self.config.amax!r}; expected one of {', '.join(map(repr, AMAX))}"
            )
        if self._shares_amax and not callable(getattr(self.reducer, "largest", None)):
            raise BackendError(
                "amax='replicas' needs a reducer with the method largest(words), such as "
                "qeffect.gpu_runtime.ranks.replicas.Replicas; or set amax='replica'"
            )

    def _require_shareable(self) -> None:
        """Refuse tied weights if this runtime has no single destination for their gradient."""
        if not self.tied.names:
            return
        if self.config.rule == "copied" or "arena" not in self.relations:
            raise BackendError(
                "tied weights need one destination for their common gradient: set rule="
                "'accumulate' or 'per_microbatch', and take a backend that declares the relation "
                "arena (the rules for gradient memory)"
            )
        if self.tied.sharers and self.reducer is not None:
            raise BackendError(
                f"the stages {sorted(self.tied.sharers)} have tied weights, whose gradient needs a "
                "shared bucket, but each bucket of this runtime belongs to one stage: tie matrices "
                "of one stage, or reduce the gradients that finalize returns"
            )

    def _require_groups(self) -> None:
        """
        Refuse grouped dW if a stage cannot compute it as one product, or the order does not group
        the dW.
        """
        if self.config.group == 1:
            return
        for index, stage in self.stages.items():
            if not getattr(stage, "groups_wgrads", False):
                raise BackendError(
                    f"group is {self.config.group}, but stage {index} of the {self.domain.name} "
                    "backend cannot compute the weight gradients of several microbatches as one "
                    "product: this needs delayed scaling and scales='epoch'; make the stage's "
                    "domain with scales='epoch', or set group=1"
                )
        if self.tied.names:
            raise BackendError(
                f"group is {self.config.group}, but the stages {sorted(self.tied.names)} have tied "
                "weights with one destination; give each stage its own parameter, and name the "
                "parameters as copies in ties= of a Worker; or set group=1"
            )
        self.order.require_groups(self.config.group)

    def _out_of_order(self, stage: int, kind: Kind) -> str:
        """Return a stage's microbatches in the order of one kind of action; empty if ascending."""
        found = self.order.microbatches(stage, kind)
        return "" if list(found) == sorted(found) else ", ".join(map(str, found))

    def _require_sums(self) -> None:
        """
        With epoch scales, refuse sums of gradients that do not follow the order of microbatches.

        Raises:
            BackendError: The message names the table and the stage, and says what to change.
        """
        if self.tied.names:
            raise BackendError(
                f"the stages {sorted(self.tied.names)} have tied weights with one destination. The "
                "order of additions in this destination depends on the mapping; scales='epoch' "
                "does not allow this. Give each stage its own parameter, and name the parameters "
                "as copies in ties= of a Worker"
            )
        if self.config.rule != "accumulate":
            return
        for stage in self.order.stages:
            for kind, action in ((Kind.DGRAD, "dI"), (Kind.WGRAD, "dW")):
                if found := self._out_of_order(stage, kind):
                    raise BackendError(
                        f"{self.order.source}: stage {stage} runs its {action} in the order "
                        f"{found} of microbatches, and rule 'accumulate' adds in that order, but "
                        "scales='epoch' needs ascending microbatches; take "
                        f"rule='per_microbatch', or a table with {action} in ascending order"
                    )

    @property
    def _guarded_reducer(self) -> Reducer | None:
        return self.reducer if "reduction" in self.relations else None

    def _declared(self) -> Mapping[Hashable, Sequence[tuple[str, Any]]] | None:
        if not self.config.declared or "order" not in self.relations:
            return None
        names = {Kind.FORWARD: "F", Kind.DGRAD: "dI"}
        return {
            0: [
                (names[step.kind], (step.stage, step.microbatch, 0, 0))
                for step in self.order.steps
                if step.kind in names
            ]
        }


def _one_domain(stages: Sequence[StageBackend]) -> StateDomain:
    for stage in stages:
        if not (hasattr(stage, "domain") and hasattr(stage, "index")):
            raise BackendError(f"expected stages of a backend, found {shown(stage)}")
    if not stages:
        raise BackendError("a runtime needs at least one stage")
    domain = stages[0].domain
    if any(stage.domain is not domain for stage in stages):
        raise BackendError(
            "every stage of a process must be in one state domain (stages whose FP8 scales are "
            "updated together); make all stages with the same domain"
        )
    if {id(s) for s in domain.stages} != {id(s) for s in stages}:
        raise BackendError(
            f"the state domain has {len(domain.stages)} stages, the runtime was given "
            f"{len(stages)}; the domain updates the scales of all its stages together: pass them "
            "all"
        )
    return domain

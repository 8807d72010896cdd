"""
The contract of one process. A training runtime asks the contract before each action, and afterwards
reports the action's result.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from .arguments import Arguments
from .calls.blocks import Blocks
from .calls.queries import Queries
from .calls.readers import ReaderCalls
from .calls.restarts import RestartCalls
from .calls.steps import StepCalls
from .calls.streams import StreamCalls
from .calls.tapes import TapeCalls
from .destination_registry import DestinationRegistry
from .engine.stage import transitions
from .keys import Cell
from .ledgers.epochs import Epochs
from .ledgers.expected_counts import ExpectedCounts, places_of
from .ledgers.groups import Groups
from .ledgers.pool import Pool
from .ledgers.recorded_steps import RecordedSteps
from .ledgers.restarts import Restarts
from .ledgers.runner import Observer, Runner
from .ledgers.streams import Streams
from .ledgers.tapes import Tapes
from .process_layout import Graph, lay_out
from .relations.constants import GENERATION_MAX
from .stage_config import StageConfig
from .text import shown
from .tickets import Ticket

__all__ = ["Contract", "Observer", "Ticket"]


class Contract(Blocks, TapeCalls, StreamCalls, ReaderCalls, StepCalls, RestartCalls, Queries):
    """
    The state and resource contract of one process (paper, Section III).

    ``check_*`` runs every guard (a check before an action), reserves what the action will touch,
    and returns a ticket for this reservation. ``commit`` redeems the ticket after the physical
    action (the device work) succeeded, ``abort`` after it failed. ``forward`` (F), ``dgrad`` (dI),
    ``wgrad`` (dW), ``refresh`` and ``update`` are context managers: they check on entry, and commit
    or abort on exit. A refused call changes nothing, with one exception. A commit presents evidence
    (what the backend reports after the action). If the contract refuses this evidence, it also
    aborts the action, because the action has already run.

    Calls may come from any thread, one after another. A call that comes while another call is under
    way raises `ConcurrentCallError` and does nothing.

    The contract's methods are defined in `qeffect.calls`, one module for each kind of call.

    Args:
        stages: The stages of this process.
        omit: Names of relations (groups of guards) to leave out because the backend lacks their
            state, from ``qeffect.engine.stage.OPTIONAL``.
        callers: Names of the callers' CUDA streams, which exchange data with the graph streams.
        capture_order: Order in which graphs that share a memory pool were captured; see
            ``process_layout.lay_out``.
        declared: Declared order of F and dI per state domain (stages whose FP8 scales are updated
            together); see ``process_layout.lay_out``.
        reductions: Declared order of the reductions of all buckets (gradients that are reduced
            together), the same for all replicas; see ``process_layout.lay_out``.
        generation_max: The last generation (count of releases) that a slot (set of buffers) may
            reach.
        epoch: Weight epoch (number of optimizer steps) in which the contract starts.
        observer: Called after every accepted transition (state change). If the observer raises, the
            transition stays in effect, and the caller gets the observer's exception; see
            `outstanding`.
        counted: If True, an update requires the devices' own counts of the actions that ran; see
            `qeffect.counts`. If False, no counts are compared.
        late: When the counts are presented. If False, they are presented with the update
            (`check_update`, `commit_epoch`). If True, they are presented after the commit
            (`present_counts`), and the device itself must skip the update if the counts differ.
            True requires ``counted=True``.
        registry: A registry of the gradient destinations of the process's other contracts, which
            must not overlap this contract's destinations. By default, destinations are not compared
            with those of other contracts.

    Raises:
        TypeError, ValueError: The configuration is unusable.
        Refused: The gradient destinations overlap or do not match.

    >>> from qeffect import TapeKey
    >>> contract = Contract([StageConfig(0, microbatches=1, slots=1, matrices=("w",))])
    >>> key = TapeKey(epoch=0, stage=0, microbatch=0)
    >>> with contract.refresh(0):
    ...     pass  # quantize the weights
    >>> with contract.forward(key) as f:
    ...     pass  # replay F
    >>> contract.bind(key)
    >>> contract.wait()
    >>> with contract.dgrad(key, f.ref) as i:
    ...     i.queued = ("w",)  # replay dI
    >>> with contract.wgrad(key, f.ref, first=True) as w:
    ...     w.covered = ("w",)  # replay dW
    >>> contract.check_wgrad(key, f.ref).serial
    Traceback (most recent call last):
    ...
    qeffect.refusals.Refused: ownership.stale-reference in check_wgrad: found ...
    """

    def __init__(
        self,
        stages: Sequence[StageConfig],
        *,
        omit: Iterable[str] = (),
        callers: Sequence[Hashable] = ("main",),
        capture_order: Iterable[Graph] = (),
        declared: Mapping[Hashable, Sequence[tuple[str, Cell]]] | None = None,
        reductions: Sequence[int | str] = (),
        generation_max: int = GENERATION_MAX,
        epoch: int = 0,
        observer: Observer | None = None,
        counted: bool = False,
        late: bool = False,
        registry: DestinationRegistry | None = None,
    ) -> None:
        if epoch.__class__ is not int or epoch < 0:
            raise ValueError(f"epoch must be a non-negative integer, got {shown(epoch)}")
        for name, given in (("stages", stages), ("omit", omit), ("reductions", reductions)):
            _collection(name, given)
        self.stages = tuple(stages)
        self.transitions = transitions(omit)
        laid = lay_out(
            self.stages,
            self.transitions,
            callers=callers,
            capture_order=capture_order,
            declared=declared,
            reductions=reductions,
            generation_max=generation_max,
        )
        self.memory = laid.memory
        self._runner = Runner(
            laid.memory, self.transitions, Arguments(laid.cells, laid.slots, len(laid.links))
        )
        self._counted = None
        for name, flag in (("counted", counted), ("late", late)):
            if flag.__class__ is not bool:
                raise TypeError(f"{name} must be True or False, got {shown(flag)}")
        if late and not counted:
            raise ValueError("late=True requires counted=True; otherwise no counts are presented")
        if counted:
            own = {config.stage: config.domain for config in self.stages}
            self._counted = ExpectedCounts(
                own,
                laid.memory.slot_stage,
                places_of(self.stages, laid.memory.destination_of),
                late=late,
            )
        self.observer = observer
        self._entered = False
        self._weighed = {config.stage: config.counted for config in self.stages}
        self._shares = any(config.tied for config in self.stages)
        self._pool = Pool(laid.memory, laid.slots)
        self._tapes = Tapes(self._runner, self._pool)
        self._groups = Groups(self._runner, self._pool)
        self._streams = Streams(self._runner, tuple(callers), laid.domains, laid.links)
        self._epochs = Epochs(self._runner, self.stages[0].stage, laid.buckets)
        self._steps = RecordedSteps(self._runner, self._pool, self._counted)
        self._restarts = Restarts(
            self._runner, self._pool, self._epochs, self._steps, self._counted
        )
        self.memory.incarnation[0] = secrets.randbits(64)
        self.memory.fill(self.memory.weight_epoch, epoch)
        # Bound once for F, dI and dW: each look-up would cost a guard's time. But a contract should
        # have at most 29 attributes: with more, the interpreter keeps all of them in a dictionary,
        # and each access to one of them takes longer.
        self._join, self._wait = self._streams.join, self._streams.wait
        self._enter = self._streams.enter
        self._arguments = self._runner.arguments
        self._free, self._reserved = self._pool.free, self._pool.reserved
        t = self.transitions
        self._check_forward, self._commit_forward = t.check_forward, t.commit_forward
        self._check_dgrad, self._commit_dgrad = t.check_dgrad, t.commit_dgrad
        self._check_wgrad, self._commit_wgrad = t.check_wgrad, t.commit_wgrad
        if registry is not None:
            if not isinstance(registry, DestinationRegistry):
                raise TypeError(
                    f"registry must be a DestinationRegistry or None, got {shown(registry)}"
                )
            registry.claim(self, self.stages)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles: the guarded memory exists once, in this process."""
        raise TypeError(
            "a Contract guards the memory of its process and is neither copied nor pickled; keep "
            "contract.checkpoint(), and restore the checkpoint into a contract of the same "
            "configuration"
        )


def _collection(name: str, given: Any) -> None:
    """Require a collection; a string is rejected, since Python would iterate over its letters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a collection, got {shown(given)}")

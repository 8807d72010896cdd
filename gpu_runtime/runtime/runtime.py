"""
The runtime of one process: guarded actions, the end of an epoch, failure and restart.

Actions are in `qeffect.gpu_runtime.step.actions`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from qeffect.checkpoint import Checkpoint, require_same
from qeffect.refusals import Refused
from qeffect.text import shown

from ..backends.protocol import BackendError
from ..step.memory.numerical_state import GatedSnapshot, NumericalState, preserving
from .epoch import EpochRuntime

__all__ = ["Runtime"]


class Runtime(EpochRuntime):
    """
    Runs F (forward), dI (input gradient) and dW (weight gradient) of the process's stages, guarded.

    The stages are one state domain: they share FP8 scaling state.

    Args:
        stages: Every stage of the process; together they form one state domain.
        order: The rank's row of the schedule; it determines how many slots (memory of a microbatch
            in progress) each stage gets.
        config: How the steps run, and how memory is laid out.
        event_log: Where to write every accepted call of the contract: a path, a binary file, or
            True for memory (`recorder.lines`). None writes no log. `close` ends the log.
        reducer: Reduces a bucket's gradients in place over data-parallel ranks. The reducer takes
            the bucket's name and the gradients by name, and may return an object whose `wait` ends
            the reduction.
        row: The rank's row with its messages, for a process of a pipeline. The row determines the
            slots (a slot is in use until its messages are done), and which stages receive and send.
            With a row, `provisioning`, `feeds` and `readers` of `RuntimeConfig` are ignored.
        rank: Rank of the process, for the event log.
        registry: Records the gradient destinations of all runtimes in one training process. This
            runtime's destinations must not overlap those of another runtime; `close` releases them.
            Without a registry, destinations of two runtimes are not compared.

    Raises:
        BackendError: The order names other stages or is incomplete, the backend cannot be captured,
            or a stage does not fit the configuration.
        Refused: ``arena.overlapping-destinations``: another runtime of the registry writes one of
            the destinations.

    Attributes:
        bound: Function that runs each wait for the device. By default a wait has no time limit; a
            `Worker` sets a limit, since the device may wait for another rank.
    """

    bound: Callable[[Callable[[], None]], None] = staticmethod(lambda wait: wait())

    def abort(self) -> int:
        """
        Abort every tape (a microbatch's data between F and dW) after a failure outside of the
        actions.

        A failed action calls this method itself. Your loop calls it if a transfer or another rank
        fails. If a stage had a tape, the epoch can no longer commit; `rebuild` restarts the epoch.

        Returns:
            Number of tapes aborted.
        """
        return self.actions.abort_outstanding()

    def require_whole_update(self) -> None:
        """
        Raise an error if an optimizer update failed half way since the last `restore`.

        Raises:
            BackendError: An update failed half way; weights may be half updated.
        """
        if self.actions.broken is not None:
            raise BackendError(self.actions.broken)

    def rebuild(self) -> None:
        """
        Restart the epoch after a failure, with the numerical state of the last commit and without
        tapes.

        The call drops every remaining tape, waits for the device, and restores the numerical state
        from the snapshot of the last commit. Afterwards the contract refuses every reference to an
        older tape, and every weight cache is stale. Captured graphs stay valid, because they hold
        addresses and no contents. If the device's counts show that the device skipped the last
        update, the epoch of that update is restarted.

        Raises:
            BackendError: An optimizer update failed halfway; snapshots do not hold weights.
        """
        self.require_whole_update()
        epoch = self.contract.epoch
        self._reductions.fail()
        self.drain()
        self.contract.purge(epoch)
        try:
            self.confirm()
        except Refused:
            epoch -= 1
            self._committed, self._before = self._before, self._committed
        with self.handoff.scope():
            self._committed.restore()
        self._restart(epoch)

    def rebuild_from(self, epoch: int, kept: GatedSnapshot) -> None:
        """
        Restart after a failure, as `rebuild` does, from an epoch and a numerical state that the
        device has kept.

        Args:
            epoch: The epoch to begin. Epochs count from 0, so this is the number of updates that
                the device has run.
            kept: The numerical state after the last update that the device has run.

        Raises:
            BackendError: An optimizer update failed halfway; the kept state does not hold weights.
        """
        self.require_whole_update()
        self._reductions.fail()
        self.drain()
        self.contract.purge(self.contract.epoch)
        with self.handoff.scope():
            kept.restore()
            self._committed.take()
        self._restart(epoch)

    def _restart(self, epoch: int) -> None:
        for memory in self.memories.values():
            memory.table.rebuild()
        self.forget_gradients()
        self.drain()
        self.contract.restore(Checkpoint(epoch, self.contract.configuration))
        self.restart_counts()

    def replay_actions(self) -> None:
        """
        Capture a graph of each action, and replay these graphs from now on.

        Call this method between two steps, if the mode is ``one launch`` but a step cannot be one
        launch. Until then the actions of such a runtime call the backend.

        Raises:
            Refused: An action, a message or the epoch itself is unfinished (a clause of
                persistence).
            BackendError: The mode is not ``one launch``, or the backend cannot be captured; every
                obstacle is named.
        """
        if self.config.mode != "one launch":
            raise BackendError(
                f"the runtime's mode is {self.config.mode!r}, expected 'one launch': a runtime in "
                "another mode already runs its actions as configured"
            )
        self.confirm()
        self.drain()
        self.contract.check_checkpoint()
        performer: Any = self.performer
        performer.executor = self._assembly.graphs(self.memories, self.handoff, self.counters)

    def restart_counts(self) -> None:
        """
        Restart the counts of scaling updates and of the device's actions at zero, as for a new
        epoch 0.
        """
        self._restart_reports()
        if self.counters is not None:
            with self.handoff.scope():
                self.counters.zero()

    def drain(self) -> None:
        """
        Wait for all device work, and report the end of that work to the contract.

        Raises:
            AcceleratorError: The device failed (torch's error). The contract then refuses actions
                and checkpoints until a `restore`, as after `device_failed`.
            Exception: Any error that `bound` raises, for example when its time limit is over.
        """
        try:
            self.bound(self._empty_device)
        except torch.AcceleratorError:
            self.device_failed()
            raise
        self.contract.drain()

    def _empty_device(self) -> None:
        self.handoff.synchronize()
        if self.domain.device.type == "cuda":
            torch.cuda.synchronize(self.domain.device)

    def checkpoint(self) -> tuple[Checkpoint, NumericalState]:
        """
        Return the persistent state of the runtime: the contract's checkpoint and the numerical
        state.

        The caller must also save the parameters and the optimizer's state.

        Raises:
            Refused: An action, a message or the epoch itself is unfinished.
            BackendError: An optimizer update failed half way; the weights are not worth saving.
        """
        self.require_whole_update()
        self.confirm()
        self.drain()
        state = NumericalState.of(self.domain)
        return self.contract.checkpoint(recipe=dict(self.domain.recipe())), state

    def restore(self, checkpoint: Checkpoint, state: NumericalState) -> None:
        """
        Continue from a checkpoint, in this runtime or in a new one; load the parameters first.

        Raises:
            Refused: The checkpoint belongs to another configuration.
            BackendError: The numerical state belongs to another recipe or to other stages.
            TypeError: An argument has a wrong type; nothing has changed.
        """
        for what, given, wanted in (
            ("a Checkpoint", checkpoint, Checkpoint),
            ("a NumericalState as the second argument", state, NumericalState),
        ):
            if not isinstance(given, wanted):
                raise TypeError(
                    f"restore: expected {what}, found {shown(given)}; runtime.checkpoint() gives "
                    "both: restore(*runtime.checkpoint())"
                )
        require_same(checkpoint, self.contract.configuration)
        self._reductions.fail()
        self.drain()
        self.contract.purge(self.contract.epoch)
        before = NumericalState.of(self.domain)
        state.into(self.domain)
        try:
            self.contract.restore(checkpoint)
        except BaseException:
            before.into(self.domain)
            raise
        self.restart_counts()
        for memory in self.memories.values():
            memory.table.rebuild()
        self.forget_gradients()
        self._committed.take()

    def apart(self) -> AbstractContextManager[None]:
        """Old name of `evaluation_scope`; the next release removes this name."""
        warnings.warn(
            "Runtime.apart is now Runtime.evaluation_scope; the next release removes the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.evaluation_scope()

    @contextmanager
    def evaluation_scope(self) -> Iterator[None]:
        """
        A context between two epochs in which the backend's stages may be called directly.

        The context is meant for evaluation, and runs on the graph stream. At its end, the numerical
        state that F changes is restored. Scaling updates that the backend counts inside the context
        are not attributed to an action. The caller refreshes weight caches if the evaluation needs
        them; the next epoch refreshes them anyway before its first F.

        Raises:
            Refused: An action, a message or the epoch itself is unfinished (a clause of
                persistence).
        """
        self.confirm()
        self.drain()
        self.contract.check_checkpoint()
        reports = [memory.reports for memory in self.memories.values()]
        before = [report.updates() for report in reports]
        self.handoff.wait_for_caller()
        try:
            with self.handoff.scope(), preserving(self.domain):
                yield
        finally:
            for report, count in zip(reports, before, strict=True):
                report.pass_over(count)
            self.handoff.caller_waits()

    def close(self) -> None:
        """End the event log, if one is written, and release the gradient destinations."""
        if self.registry is not None:
            self.registry.release(self.contract)
        if self.recorder is not None:
            self.recorder.close()

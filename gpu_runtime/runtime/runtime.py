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
    Runs F (forward), dI (input gradient) and dW (weight gradient) of the process's stages. The
    contract checks every action before it runs.

    The stages are one state domain: their FP8 scales are updated together.

    Args:
        stages: Every stage of the process; together they form one state domain.
        order: The rank's row of the schedule. The order determines how many slots each stage gets;
            a slot is the memory of one microbatch in progress.
        config: How the steps run, and how memory is laid out.
        event_log: Where to write each call that the contract accepts: a path, a binary file, or
            True to keep the lines in memory (`recorder.lines`). None writes no log. `close` ends
            the log.
        reducer: Reduces a bucket's gradients in place over data-parallel ranks. The reducer takes
            the bucket's name and the gradients by name. It may return an object whose `wait` waits
            for the end of the reduction.
        row: The rank's row with its messages, for a process of a pipeline. The row determines which
            stages receive and send, and it determines the slots, because a slot is in use until its
            messages are done. With a row, `provisioning`, `feeds` and `readers` of `RuntimeConfig`
            are ignored.
        rank: Rank of the process, for the event log.
        registry: Records the gradient destinations of all runtimes in one training process. This
            runtime's destinations must not overlap another runtime's destinations; `close` releases
            them. Without a registry, destinations of two runtimes are not compared.

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
        Abort every tape after a failure outside of the actions. A tape is the data of a microbatch
        that F keeps for dI and dW.

        A failed action calls this method itself. Your loop calls it if a transfer or another rank
        fails. If a tape was aborted, the epoch (optimizer step) can no longer commit; `rebuild`
        restarts it.

        Returns:
            Number of aborted tapes.
        """
        return self.actions.abort_outstanding()

    def require_whole_update(self) -> None:
        """
        Raise an error if an optimizer update has failed halfway since the last `restore`.

        Raises:
            BackendError: An update failed halfway, so some weights may be updated and others not.
        """
        if self.actions.broken is not None:
            raise BackendError(self.actions.broken)

    def rebuild(self) -> None:
        """
        Restart the epoch (the optimizer step) after a failure, with the numerical state (FP8 scales
        and amax histories) of the last commit.

        The call drops every remaining tape (data that F keeps for dI and dW) and waits for the
        device. Then it restores the numerical state from the snapshot of the last commit.
        Afterwards the contract refuses every reference to an older tape, and every weight cache is
        stale. Captured graphs stay valid, because they contain only addresses of tensors. If the
        device's counts show that the device skipped the last update, the epoch of that update is
        restarted.

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
        Restart after a failure, as `rebuild` does, but from the numerical state (FP8 scales and
        amax histories) that the device has kept.

        Args:
            epoch: The epoch (optimizer step) to begin. Its number equals the number of updates that
                the device has run.
            kept: The numerical state at the end of the last update that the device has run.

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
        Capture one graph per action and slot, and replay these graphs from now on.

        Call this method between two steps if the mode is ``one launch`` but a step cannot be
        captured as one launch. Before this call, the actions of such a runtime call the backend.

        Raises:
            Refused: An action, a message or the epoch (optimizer step) is unfinished.
            BackendError: The mode is not ``one launch``, or the backend cannot be captured. The
                message lists every obstacle.
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
        Set the count of scaling updates and the device's counts of actions to zero, as before the
        first epoch.
        """
        self._restart_reports()
        if self.counters is not None:
            with self.handoff.scope():
                self.counters.zero()

    def drain(self) -> None:
        """
        Wait for all device work, and report to the contract that this work has finished.

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
            Refused: An action, a message or the epoch (optimizer step) is unfinished.
            BackendError: An optimizer update failed halfway, so the weights must not be saved.
        """
        self.require_whole_update()
        self.confirm()
        self.drain()
        state = NumericalState.of(self.domain)
        return self.contract.checkpoint(recipe=dict(self.domain.recipe())), state

    def restore(self, checkpoint: Checkpoint, state: NumericalState) -> None:
        """
        Continue from a checkpoint, in this runtime or in a new one. Load the parameters before this
        call.

        Raises:
            Refused: The checkpoint belongs to another configuration.
            BackendError: The numerical state belongs to another FP8 recipe or to other stages.
            TypeError: An argument has a wrong type; nothing was restored.
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
        A context between two epochs (optimizer steps) in which the backend's stages may be called
        directly.

        The context is meant for evaluation, and runs on the graph stream. At its end, the numerical
        state that F changes is restored. Scaling updates inside the context do not count as updates
        of an action. If the evaluation needs current weight caches, the caller must refresh them.
        The next epoch refreshes the caches in any case, before its first F.

        Raises:
            Refused: An action, a message or the epoch (optimizer step) is unfinished.
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
        """End the event log, if there is one, and release the gradient destinations."""
        if self.registry is not None:
            self.registry.release(self.contract)
        if self.recorder is not None:
            self.recorder.close()

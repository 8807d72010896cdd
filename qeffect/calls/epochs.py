"""
Calls that end an epoch: finalize, reductions, and the update with the devices' counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ..counts import DeviceCounts
from ..threads import exclusive_call
from ..tickets import Ticket
from .parts import ContractParts

__all__ = ["EpochCalls"]


class EpochCalls(ContractParts):
    """
    Finalize stages, reduce buckets (gradients that are reduced together), and check and commit the
    optimizer's update.
    """

    @exclusive_call
    def finalize(self, stage: int, link: int = 0) -> None:
        """
        Declare a stage's gradients complete.

        Raises:
            Refused: ``order.incomplete``, ``arena.incomplete``, ``arena.spoiled`` and others.
        """
        self._epochs.finalize(stage, link)

    def default_reader(self, bucket: int | str) -> tuple[int, int]:
        """
        Return the index of a bucket (gradients that are reduced together), and the default link
        (pair of a caller's stream and a graph stream) of its reduction.

        Raises:
            ValueError: No bucket has that name.
        """
        return self._epochs.default(bucket)

    @exclusive_call
    def start_reduction(self, bucket: int | str, link: int | None = None) -> None:
        """
        Record that the data-parallel reduction of a bucket (gradients that are reduced together)
        was enqueued, after the bucket's last dW.

        Args:
            bucket: Name of the bucket; for a stage without configured buckets, the stage's index.
            link: Link of the communication stream, which must have waited for the replays that
                wrote the bucket's gradients. By default the link that this epoch's latest
                `finalize` or `finish_reduction` named, or the first caller's link if neither was
                called in this epoch.

        Raises:
            Refused: A reduction or completion guard refused.
            ValueError: No bucket has that name.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1, reduces=True)])
        >>> contract.start_reduction(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: reduction.incomplete in start_reduction: found ...
        """
        self._epochs.reduction("start_reduction", bucket, link)

    @exclusive_call
    def finish_reduction(self, bucket: int | str, link: int | None = None) -> None:
        """
        Record that a stream waits for a bucket's reduction; this stream will read the reduced
        gradients.

        Args:
            bucket: Name of the bucket.
            link: Link of that stream: the optimizer's stream, which finalizes the stage. By default
                the link that this epoch's latest `finalize` or `finish_reduction` named, or the
                first caller's link if neither was called in this epoch.

        Raises:
            Refused: ``reduction.not-started``, or a completion guard refused.
            ValueError: No bucket has that name.
        """
        self._epochs.reduction("finish_reduction", bucket, link)

    @exclusive_call
    def fail_reduction(self, bucket: int | str) -> None:
        """
        Record that the reduction of a bucket's gradients failed; the epoch can no longer commit.
        """
        self._epochs.fail_reduction(bucket)

    @exclusive_call
    def fail(self, stage: int, epoch: int | None = None) -> None:
        """
        Record a fault that was seen late, after its action was committed.

        Call `fail` for an asynchronous device error, or for a digest mismatch that is found after
        the action's buffers were released. A fault in the current epoch spoils this epoch: it can
        no longer commit. If the epoch's update has begun or was committed, the update used wrong
        gradients. The weights then count as half updated, and the run continues only after a
        `restore`.

        Args:
            stage: The stage whose action failed.
            epoch: The epoch of that action; by default the current one.

        Raises:
            Refused: ``epoch.not-begun`` for an epoch after the current one.
            TypeError, ValueError: No stage has that number, or the epoch is not an int of at least
                0.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], epoch=3)
        >>> contract.fail(0, epoch=2)
        >>> contract.half_updated
        True
        >>> contract.checkpoint()
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: persistence.half-updated in checkpoint: found ...
        """
        self._epochs.fail(stage, epoch)

    @exclusive_call
    def next_walk(self, epoch: int | None = None) -> int:
        """
        Begin another walk (pass over all microbatches) in the same epoch: gradients accumulate.

        Call `next_walk` after every stage was finalized, in place of the reductions and the update.
        The same keys are then bound and run again, and each dW adds to the gradients of the earlier
        walks. Weights, caches and scaling state do not change. After the last walk of the epoch,
        call `commit_epoch`.

        Args:
            epoch: The epoch under way; by default the current one.

        Returns:
            The number of finished walks of the epoch: 1 after the first walk.

        Raises:
            Refused: A tape is live (for example, its dW has not run), a stage is not final, a
                reduction of the epoch has started, or an update is in flight or failed.
            TypeError, ValueError: The epoch is not an ``int``.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.next_walk()
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: epoch.not-final in next_walk: found ...
        """
        return self._epochs.next_walk(epoch)

    @exclusive_call
    def shorten_walk(self, microbatches: int) -> None:
        """
        Run only the first microbatches in the walk (pass over all microbatches) that is about to
        begin, for example for a short last batch.

        Call `shorten_walk` before the walk's first F: at the start of an epoch, or after
        `next_walk`. The call skips the later microbatches of every stage (`skip`). A stage can be
        finalized after the dW of the remaining microbatches. The next walk runs all microbatches
        again.

        Args:
            microbatches: Number of microbatches that the walk runs, from 1 to the smallest number
                of microbatches that a stage is configured with.

        Raises:
            Refused: ``ownership.walk-begun`` after the walk's first F; ``ownership.skipped`` in a
                walk that is shortened already; ``order.declared`` for a declared order;
                ``epoch.sole-writer`` if each microbatch has destinations of its own. In all these
                cases no microbatch is skipped.
            TypeError, ValueError: The number is not an ``int``, or out of range.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=4, slots=2)])
        >>> contract.shorten_walk(3)
        >>> contract.shorten_walk(2)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: ownership.skipped in skip: found ...
        """
        self._tapes.shorten(microbatches)

    @exclusive_call
    def check_commit(
        self,
        epoch: int | None = None,
        *,
        caller: Hashable | None = None,
        counted: Mapping[Hashable, DeviceCounts] | None = None,
        guards_alone: bool = False,
    ) -> None:
        """
        Test whether an update would be accepted now, without changing or logging anything.

        Every guard of `check_update` runs. So all processes of a pipeline can agree on the update
        before any of them updates its weights.

        Args:
            epoch: The epoch that the update would end; by default the current one.
            caller: Name of the stream that would run the update; by default the first caller.
            counted: For each state domain, the counts of its device, as `check_update` requires.
                Unlike `check_update`, this call also takes the counts if the contract was made with
                ``late=True``, and compares them at once.
            guards_alone: If True, run only the guards: compare no device counts, and do not require
                that the counts of the last commit were presented. If False, run all checks of
                `check_update`.

        Raises:
            Refused, TypeError, ValueError: The exception that `check_update` would raise.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.check_commit()
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: epoch.not-final in check_update: found ...
        """
        updater = self._streams.caller("check_commit", caller)
        self._epochs.ask("check_commit", epoch, updater)
        if not guards_alone:
            self._require_counts(counted, now=True)

    @exclusive_call
    def check_update(
        self,
        epoch: int | None = None,
        *,
        caller: Hashable | None = None,
        counted: Mapping[Hashable, DeviceCounts] | None = None,
    ) -> Ticket:
        """
        Reserve the weights of every stage for the optimizer's update.

        `commit` the ticket after the update was enqueued on the caller's stream; `abort` it if the
        update failed. After an abort the weights are half updated: only a `restore` is accepted.
        Between check and commit no action, checkpoint or restore is accepted.

        Args:
            epoch: The epoch that the update ends; by default the current one.
            caller: Name of the stream that runs the update; every stage must have been finalized on
                a link of this stream. By default the first caller.
            counted: For each state domain, the counts of its device. Required if the contract was
                made with ``counted=True`` and without ``late=True``; with ``late=True``,
                `present_counts` takes the counts after the commit.

        Returns:
            The update's ticket.

        Raises:
            Refused: A tape is live (for example, its dW has not run), an action is in flight, a
                stage is not final, an earlier update failed, or the device did not run exactly the
                committed actions (``epoch.uncounted``, ``epoch.device-count`` or
                ``epoch.device-order``). If a guard also refuses, the guard's clause is raised
                instead of these clauses about counts.
            TypeError, ValueError: The epoch is not an ``int``, no caller has that name, or the
                counts do not match the contract's domains and stages.
        """
        updater = self._streams.caller("check_update", caller)
        self._ask_counted("check_update", epoch, updater, counted)
        return self._epochs.check(epoch, updater)

    @exclusive_call
    def move_scales(self, stage: int, updates: int | None = None) -> None:
        """
        Record that the scales of a stage's domain (stages whose FP8 scales are updated together)
        were updated, once for the epoch.

        Call `move_scales` between the check of an optimizer update and its commit, after the scales
        were updated, once for each domain whose stages have ``scales="epoch"``. A commit without
        these calls for all such domains is refused and aborts the optimizer update, even if the
        weights do not change.

        Args:
            stage: Any stage of the domain.
            updates: How often the scales were updated (`StageConfig.reports_updates`).

        Raises:
            Refused: ``order.moves-outside-update``; ``order.nothing-gathered`` for a second call in
                one optimizer update, or for a domain whose scales are updated by F and dI;
                ``order.scaling-updates``. The optimizer update then stays in flight; abort it if
                the scales were updated too often.
            TypeError, ValueError: No stage has that number.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1, scales="epoch")])
        >>> contract.move_scales(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: order.moves-outside-update in move_scales: found ...
        """
        self._epochs.move_scales(stage, updates)

    @exclusive_call
    def commit_epoch(
        self,
        epoch: int | None = None,
        *,
        caller: Hashable | None = None,
        counted: Mapping[Hashable, DeviceCounts] | None = None,
    ) -> int:
        """
        Check and commit the optimizer's update in one call, after the whole update was enqueued.

        Do not call `commit_epoch` if the optimizer of any process raised: call `check_update`, then
        `abort`. A block ``with contract.update()`` makes both calls if its body raises.

        The update is device work on the caller's stream. No refresh and no F is accepted until each
        graph stream has waited for that stream (`join`) or the host has seen the update finish
        (`drain`). A checkpoint requires `drain`. With several processes, the caller must make all
        processes wait for each other at the update.

        If scales are updated once an epoch, use ``with contract.update() as update:`` instead, and
        call `move_scales` in the block.

        Args:
            epoch: The epoch that the update ends; by default the current one.
            caller: Name of the stream that runs the update; by default the first caller.
            counted: For each state domain, the counts of its device, as `check_update` requires.

        Returns:
            The new epoch.

        Raises:
            Refused: ``order.scales-not-moved`` if scales are updated once an epoch.
            Refused, TypeError, ValueError: As `check_update` raises them.
        """
        updater = self._streams.caller("commit_epoch", caller)
        self._ask_counted("commit_epoch", epoch, updater, counted)
        if self._counted is not None:
            self._counted.committed()  # nothing refuses any more, and an observer may raise
        return self._epochs.commit(epoch, updater)

    def _ask_counted(
        self,
        call: str,
        epoch: int | None,
        updater: int,
        counted: Mapping[Hashable, DeviceCounts] | None,
    ) -> None:
        """Require that these counts permit an update, after every guard has accepted the update."""
        if self._counted is not None or counted is not None:
            self._epochs.ask(call, epoch, updater)
            self._require_counts(counted)

    def committed_counts(self) -> Mapping[Hashable, DeviceCounts]:
        """
        Return the counts that devices have if they ran exactly the committed actions in order.

        The counts are given per state domain (stages whose FP8 scales are updated together). They
        start at zero at construction and at each restore. With ``late=True`` a device compares its
        own counts with these counts and skips an update if they differ.

        Raises:
            ValueError: The contract was made without ``counted=True``.
        """
        if self._counted is None:
            raise ValueError("committed_counts: the contract was made without counted=True")
        return self._counted.own()

    @property
    def counts_awaited(self) -> bool:
        """Whether the last commit still needs its counts; always False without ``late=True``."""
        return self._counted is not None and self._counted.awaited is not None

    @exclusive_call
    def present_counts(self, counted: Mapping[Hashable, DeviceCounts]) -> None:
        """
        Present the devices' counts at the last commit, for a contract with ``late=True``.

        Before this call, the next commit and every checkpoint are refused. If the counts differ,
        the device has skipped the committed update, so the weights are still the old weights; only
        a restore is then possible.

        Args:
            counted: For each state domain, the counts that its device had when the update began.

        Raises:
            Refused: ``epoch.device-count`` or ``epoch.device-order``.
            TypeError, ValueError: The counts do not match the contract's domains and stages, or no
                commit needs counts.
        """
        if self._counted is None:
            raise ValueError("present_counts: the contract was made without counted=True")
        self._counted.present(counted)

    def _require_counts(
        self, counted: Mapping[Hashable, DeviceCounts] | None, *, now: bool = False
    ) -> None:
        """Require that these counts permit the commit of an epoch."""
        if self._counted is not None:
            self._counted.require_commit(counted, now=now)
        elif counted is not None:
            raise ValueError("counted: the contract was made without counted=True")

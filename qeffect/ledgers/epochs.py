"""
The end of an epoch: finalized gradients, their reductions, and the update.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..evidence import printable_count, readable_count
from ..explain import explain
from ..refusals import Refused
from ..relations.constants import NEVER
from ..text import shown
from ..tickets import Ticket, issue
from .runner import FAILURES, Runner

__all__ = ["Epochs"]


class Epochs:
    """
    The calls that finalize stages, reduce buckets (gradients that are reduced together), and check
    and commit the update.

    Args:
        runner: Runs the transitions.
        stage: Any stage of the process; all stages have the same weight epoch.
        buckets: For each bucket's name, its index.
    """

    __slots__ = ("_buckets", "_runner", "_stage")

    def __init__(self, runner: Runner, stage: int, buckets: Mapping[int | str, int]) -> None:
        self._runner = runner
        self._stage = stage
        self._buckets = buckets

    @property
    def current(self) -> int:
        """The weight epoch of the process."""
        return int(self._runner.memory.weight_epoch[self._stage])

    def finalize(self, stage: int, link: int) -> None:
        """Declare a stage's gradients complete."""
        self._runner.arguments.stage("finalize", stage)
        self._runner.arguments.link("finalize", link)
        self._runner.run("finalize", stage, link)

    def reduction(self, transition: str, bucket: int | str, link: int | None) -> None:
        """
        Record that a bucket's reduction starts or has finished, on a caller's stream.

        If ``link`` is None, the link is that of the epoch's latest `finalize` or
        `finish_reduction`, whose stream reads the gradients. Before the epoch's first such call,
        the link of the first caller is used.

        Raises:
            ValueError: No bucket has that name, or no link has that index.
            Refused: A reduction or completion guard refused.
        """
        index = self._index(transition, bucket)
        if link is None:
            link = self.reader(index)
        self._runner.arguments.link(transition, link)
        self._runner.run(transition, index, link)

    def default(self, bucket: int | str) -> tuple[int, int]:
        """
        Return a bucket's index, and the default link (pair of streams) of its reduction.

        Raises:
            ValueError: No bucket has that name.
        """
        index = self._index("start_reduction", bucket)
        return index, self.reader(index)

    def reader(self, index: int) -> int:
        """Return the link of the stream that reads the gradients; by default the first caller's."""
        st = self._runner.memory
        stage = st.stage_at[index]
        named = st.named[0] == st.weight_epoch[stage]
        wanted = (st.consumer[0] if named else 0, st.domain_of[stage])
        return [*zip(st.caller_at, st.domain_at, strict=True)].index(wanted)

    def fail_reduction(self, bucket: int | str) -> None:
        """
        Record that a bucket's reduction failed.

        Raises:
            ValueError: No bucket has that name.
            Refused: ``reduction.not-started``.
        """
        self._runner.run("fail_reduction", self._index("fail_reduction", bucket))

    def other_stream(self, transition: str, stage: int, link: int) -> None:
        """
        Record that a read of weights or gradients on a separate stream starts or has ended.

        Raises:
            TypeError, ValueError: No stage or link has that number.
            Refused: A completion or epoch guard refused.
        """
        self._runner.arguments.stage(transition, stage)
        self._runner.arguments.link(transition, link)
        self._runner.run(transition, stage, link)

    def fail(self, stage: int, epoch: int | None) -> None:
        """
        Record that a fault of an epoch (by default the current one) was seen late.

        Raises:
            TypeError, ValueError: No stage has that number, or the epoch is not an int of at least
                0.
            Refused: ``epoch.not-begun``.
        """
        self._runner.arguments.stage("fail", stage)
        named = self._named("fail", epoch)
        if named < 0:
            raise ValueError(f"fail: epoch must be at least 0, got {named}")
        self._runner.run("fail", stage, named)

    def _index(self, transition: str, bucket: int | str) -> int:
        try:
            if type(bucket) in (int, str):
                return self._buckets[bucket]
        except KeyError:
            pass
        raise ValueError(
            f"{transition}: no bucket {shown(bucket)} is reduced; expected one of "
            f"{[*self._buckets]}"
        )

    def next_walk(self, epoch: int | None) -> int:
        """
        Begin the epoch's next walk (pass over the microbatches); return the number of finished
        walks.
        """
        self._runner.run("next_walk", self._named("next_walk", epoch))
        return int(self._runner.memory.walk[0])

    def ask(self, call: str, epoch: int | None, caller: int) -> None:
        """Run every guard of an update over a copy of the memory."""
        runner = self._runner
        given = (self._named(call, epoch), caller)
        try:
            runner.transitions.check_update(runner.memory.copy(), *given)
        except FAILURES as error:
            raise runner.failure(error, "check_update", given) from None

    def check(self, epoch: int | None, caller: int) -> Ticket:
        """Reserve the weights of every stage for the update; return the update's ticket."""
        current = self._named("check_update", epoch)
        serial = self._runner.run("check_update", current, caller)
        return issue("update", None, current, serial, self._runner.memory.incarnation[0], None)

    def commit(self, epoch: int | None, caller: int) -> int:
        """Check and commit an update at once; return the new weight epoch."""
        runner, current = self._runner, self._named("commit_epoch", epoch)
        if any(runner.memory.gathered):
            self._require_moved(current, caller)
        serial = runner.apply("check_update", current, caller)
        runner.apply("commit_update", current, serial)  # a ticket in flight is never refused
        runner.tell("check_update", (current, caller), serial)
        runner.tell("commit_update", (current, serial), None)
        return current + 1

    def _require_moved(self, epoch: int, caller: int) -> None:
        """Run an update's check and commit on a copy of the memory, to see whether both pass."""
        runner, trial = self._runner, self._runner.memory.copy()
        name, given = "check_update", (epoch, caller)
        try:
            serial = runner.transitions.check_update(trial, *given)
            name, given = "commit_update", (epoch, serial)
            runner.transitions.commit_update(trial, *given)
        except FAILURES as error:
            raise runner.failure(error, name, given) from None

    def move_scales(self, stage: int, updates: int | None) -> None:
        """
        Record that the scales of a stage's domain were updated, in the optimizer update in flight.

        Raises:
            TypeError, ValueError: No stage has that number.
            Refused: An order guard refused.
        """
        runner = self._runner
        runner.arguments.stage("move_scales", stage)
        moved = NEVER if updates is None else readable_count(updates)
        try:
            runner.apply("move_scales", stage, moved)
        except Refused as refused:
            shown_count = printable_count(updates)
            raise explain(refused, "move_scales", runner.memory, (stage, shown_count)) from None
        runner.tell("move_scales", (stage, moved), None)

    def _named(self, call: str, epoch: int | None) -> int:
        """Return the given epoch, by default the current one."""
        if epoch is None:
            return self.current
        self._runner.arguments.integer(call, "epoch", epoch)
        return epoch

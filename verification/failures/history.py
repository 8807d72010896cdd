"""
The calls that a re-enactment can make on its contract, each as one method.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial

from qeffect.checkpoint import Checkpoint
from qeffect.refusals import refused
from qeffect.schedule.check import check
from qeffect.schedule.infer import schedule_of
from qeffect.schedule.tables import parse_table
from qeffect.schedule.transport import Transport

from .actions import Actions

__all__ = ["History"]


class History(Actions):
    """
    One run of a re-enactment, with methods for actions, messages, streams, the ends of epochs, and
    tables.

    Args:
        faulty: If True, run the re-enactment as reported; if False, with the faulty step corrected.
    """

    # Messages

    def receive(self, microbatch: int, *, stage: int = 0, slot: int | None = None) -> None:
        """Post a receive of a forward's input into a slot (set of buffers); by default the contract
        chooses the slot."""
        key = self.key(microbatch, stage)
        name = self._name(f"{stage}RECV_F{microbatch}", key.epoch)
        self.step(name, lambda: self.contract.reserve(key, slot), f"into slot {slot}")

    def send(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        gradient: bool = False,
        caller: Hashable = "main",
    ) -> None:
        """Post a send of the output (or input gradient) of one microbatch on a caller's stream."""
        key = self.key(microbatch, stage)
        name = self._name(f"{stage}SEND_{'B' if gradient else 'F'}{microbatch}", key.epoch)
        link = self.caller.link(stage, caller)
        self.step(
            name,
            lambda: self.contract.read(key, self.ref(key), gradient=gradient, link=link),
            _on(caller),
        )

    def sent(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        gradient: bool = False,
        caller: Hashable = "main",
    ) -> None:
        """Report that a send has completed and that a caller's stream has waited for it."""
        key = self.key(microbatch, stage)
        name = self._name(f"{stage}WAIT_SEND_{'B' if gradient else 'F'}{microbatch}", key.epoch)
        link = self.caller.link(stage, caller)
        self.step(
            name,
            lambda: self.contract.finish_read(key, self.ref(key), gradient=gradient, link=link),
            _on(caller),
        )

    # Streams

    def submit(self, caller: Hashable = "main") -> None:
        """Report that a caller's stream enqueues work."""
        self.step(f"{caller} works", lambda: self.contract.submit(caller))

    def join(self, caller: Hashable = "main", stage: int = 0) -> None:
        """Make the graph stream wait for an event of a caller's stream."""
        link = self.caller.link(stage, caller)
        self.step(f"await an event of {caller}", lambda: self.contract.join(link))

    # The end of an epoch

    def finalize(self, stage: int = 0) -> None:
        """Declare a stage's gradients complete."""
        link = self.caller.link(stage, "main")
        self.step(f"s{stage}", lambda: self.contract.finalize(stage, link), "finalize")

    def await_replays(self, caller: Hashable, stage: int = 0) -> None:
        """Make a caller's stream wait for all replays on the stage's graph stream."""
        link = self.caller.link(stage, caller)
        self.step(f"{caller} waits", lambda: self.contract.wait(link), f"for s{stage}")

    def reduce(self, bucket: int | str = 0, *, caller: Hashable | None = None) -> None:
        """
        Start the data-parallel reduction of a bucket.

        Args:
            bucket: The bucket's name, or the index of a stage that has a single bucket.
            caller: The stream that enqueues the reduction; by default the stream that reads the
                gradients.
        """
        link = None if caller is None else self.caller.link(0, caller)
        detail = "" if caller is None else f"on {caller}"
        self.step(
            _of(bucket),
            lambda: self.contract.start_reduction(bucket, link),
            f"reduce {detail}".strip(),
        )

    def reduced(self, bucket: int | str = 0, *, caller: Hashable | None = None) -> None:
        """Make a stream, by default the one that reads gradients, wait for a bucket's reduction."""
        link = None if caller is None else self.caller.link(0, caller)
        detail = "" if caller is None else f"by {caller}"
        self.step(
            _of(bucket),
            lambda: self.contract.finish_reduction(bucket, link),
            f"await the reduction {detail}".strip(),
        )

    def start_weights_read(self, stage: int = 0, *, caller: Hashable = "main") -> None:
        """Report that a separate stream, started behind a caller, begins to read stage weights."""
        link = self.caller.link(stage, caller)
        name = self._name(f"s{stage}", self.contract.epoch)
        self.step(name, lambda: self.contract.start_weights_read(stage, link), "read weights")

    def finish_weights_read(self, stage: int = 0, *, caller: Hashable = "main") -> None:
        """Make a caller's stream, that of the update, wait for the read of the weights."""
        link = self.caller.link(stage, caller)
        name = self._name(f"s{stage}", self.contract.epoch)
        self.step(
            name,
            lambda: self.contract.finish_weights_read(stage, link),
            "await the read of weights",
        )

    def update(self, *, moves: bool = True) -> None:
        """
        Run the optimizer: commit the epoch, and make the graph streams wait for the update.

        Args:
            moves: Whether scales that are updated once per epoch are updated here.
        """
        moving = {c.domain: c.stage for c in self.contract.stages if c.scales == "epoch"}
        name = f"e{self.contract.epoch}"
        if moving:
            ticket = self.step(name, lambda: self.contract.check_update(), "begin the update")
            for stage in moving.values() if moves else ():
                self.step(
                    name, partial(self.contract.move_scales, stage), f"move scales of s{stage}"
                )
            self._redeem(name, ticket, detail="optimizer")
        else:
            self.step(name, lambda: self.contract.commit_epoch(), "optimizer")
        for config in self.contract.stages:
            self.contract.join(self.caller.link(config.stage, "main"))

    def end(self, *, moves: bool = True) -> None:
        """
        End the step: finalize every stage, reduce its buckets, and run the optimizer.

        Args:
            moves: Whether scales that are updated once per epoch are updated here.
        """
        for config in self.contract.stages:
            self.finalize(config.stage)
            if config.reduces:
                self.reduce(config.stage)
                self.reduced(config.stage)
        self.update(moves=moves)

    def whole_step(self) -> None:
        """Run a whole correct optimizer step of every stage, one microbatch after the other."""
        for config in self.contract.stages:
            self.refresh(config.stage)
            for microbatch in range(config.microbatches):
                self.forward(microbatch, stage=config.stage)
                self.backward(microbatch, stage=config.stage)
        self.end()

    def checkpoint(self) -> Checkpoint:
        """Wait until the device is idle, and take a checkpoint."""
        self.contract.drain()
        taken: Checkpoint = self.step("checkpoint", lambda: self.contract.checkpoint())
        return taken

    def restore(self, checkpoint: Checkpoint) -> None:
        """Wait until the device is idle, and restore a checkpoint."""
        self.contract.drain()
        self.step("restore", lambda: self.contract.restore(checkpoint))

    # Tables

    def table(
        self,
        text: str,
        *,
        stage_to_rank: Mapping[int, int] | None = None,
        transport: Transport | None = None,
    ) -> None:
        """
        Check a schedule table as ``qeffect check`` does.

        Args:
            text: The schedule table as CSV, with one line of actions per rank.
            stage_to_rank: The rank of each stage, as the table's reader assumes; inferred if
                omitted.
            transport: How the runtime carries messages.

        Raises:
            Refused: The table has findings; the refusal has the clause and place of the first one.
        """
        schedule = parse_table(text.strip())
        if stage_to_rank is not None:
            schedule = schedule_of(schedule.rows, source="table", stage_to_rank=stage_to_rank)
            self.steps.append(f"stages on ranks {dict(stage_to_rank)}")
        self.steps += [f"rank {r}: {row}" for r, row in enumerate(text.split())]
        finding = check(schedule, transport=transport).finding
        if finding is not None:
            self.place = f"rank {finding.rank} step {finding.step} {finding.action}"
            raise refused(finding.clause, "check", finding.found, finding.expected)


def _of(bucket: int | str) -> str:
    """Return a bucket's name for reports; a number names the only bucket of a stage."""
    return f"s{bucket}" if isinstance(bucket, int) else f"bucket {bucket}"


def _on(caller: Hashable) -> str:
    return "" if caller == "main" else f"on {caller}"

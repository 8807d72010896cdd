"""
The vocabulary of re-enactments: what a runtime does to its contract, one call a step.

A step is named as in a schedule table: ``0F1`` is stage 0's forward of microbatch 1, ``0I1`` its
input half of the backward and ``0W1`` the weight half; ``e1`` follows where the optimizer has
stepped since. Each step that a re-enactment names is noted, so that two runs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from qeffect.checkpoint import Checkpoint
from qeffect.config import StageConfig
from qeffect.contract import Contract
from qeffect.destinations import Destination
from qeffect.keys import TapeKey, TapeRef
from qeffect.refusals import Refused, refused
from qeffect.schedule.check import check
from qeffect.schedule.infer import schedule_of
from qeffect.schedule.tables import parse_table
from qeffect.schedule.transport import Transport
from qeffect.tickets import ABORTS

__all__ = ["MATRICES", "History", "addresses"]

#: The weight matrices of a stage, where a re-enactment names none.
MATRICES = ("fc1", "fc2")


def addresses(*matrices: str, first: int = 4096) -> tuple[Destination, ...]:
    """Return a gradient buffer for each matrix, one after the other from an address on."""
    return tuple(
        Destination(name, None, (8, 8), "float32", "cuda:0", first + 256 * place, 256)
        for place, name in enumerate(matrices)
    )


class History:
    """
    One run of a re-enactment.

    Args:
        faulty: Run it as reported; otherwise with the reported step put right.
    """

    contract: Contract

    def __init__(self, *, faulty: bool) -> None:
        self.faulty = faulty
        self.steps: list[str] = []
        self.unchanged: bool | None = None
        self.place = ""
        self.refs: dict[TapeKey, TapeRef] = {}
        self.scaled: dict[TapeKey, int] = {}

    @property
    def legal(self) -> bool:
        """The reported step is put right in this run."""
        return not self.faulty

    def at(self, refusal: Refused) -> str:
        """Where the run was refused: the transition, and the action that made it."""
        return f"{refusal.transition} {self.place}".strip()

    def step(self, name: str, call: Callable[[], Any], detail: str = "") -> Any:
        """
        Make one call of the contract and note it.

        Args:
            name: The action, as in a table.
            call: The call.
            detail: What was given to it, where that matters.

        Raises:
            Refused: The contract refused it.
        """
        self.place = name
        self.steps.append(f"{name} {detail}".strip())
        before = self.contract.snapshot()
        try:
            return call()
        except Refused:
            self.unchanged = before == self.contract.snapshot()
            raise

    # Configuration

    def process(
        self, *stages: StageConfig, callers: Iterable[Hashable] = ("main",), **options: Any
    ) -> None:
        """
        Begin a process, of the stages given or of one stage 0.

        Args:
            stages: The stages; by default one, of two microbatches and two slots.
            callers: Names of the calling streams.
            options: For ``Contract`` where it has such an option, else for the one stage.
        """
        of_contract = {
            k: options.pop(k) for k in ("capture_order", "declared", "reductions") if k in options
        }
        if not stages:
            stages = (stage(0, **options),)
        self.steps.append(
            f"configure {'; '.join(_configured(s) for s in stages)} {of_contract or ''}".strip()
        )
        self.place = ""
        self.contract = Contract(stages, callers=tuple(callers), **of_contract)

    # Actions

    def refresh(
        self,
        stage: int = 0,
        *,
        filled: Iterable[str] | None = None,
        weights_of: int | None = None,
        caller: Hashable = "main",
        joined: bool | None = True,
    ) -> None:
        """
        Refresh a stage's weight cache.

        Args:
            stage: The stage.
            filled: Matrices whose caches the device reports as filled; by default all.
            weights_of: The epoch of the weights that they were filled from; by default this one.
            caller: The stream that made the weights.
            joined: The graph stream waits for that stream; None when the history says so itself.
        """
        link = self._hand_over(stage, caller, joined)
        name = self._name(f"s{stage}", self.contract.epoch)
        ticket = self.step(
            name,
            lambda: self.contract.check_refresh(stage, link),
            f"refresh {_not(joined)}".strip(),
        )
        fills = self._fills(stage, filled, asked=True, of=weights_of)
        self._redeem(name, ticket, filled=fills)

    def invalidate(self, stage: int = 0) -> None:
        """Give a stage's weight cache up."""
        self.step(f"s{stage}", lambda: self.contract.invalidate(stage), "invalidate")

    def forward(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        slot: int | None = None,
        invocation: int = 0,
        token: int | None = None,
        refresh: bool = False,
        filled: Iterable[str] | None = None,
        caller: Hashable = "main",
        joined: bool | None = True,
    ) -> None:
        """
        Run F.

        Args:
            microbatch: Its microbatch.
            stage: Its stage.
            slot: The slot at a fixed address; by default the contract chooses.
            invocation: Which call of the stage's block it is.
            token: The scaling updates that the device counts; by default what the contract does.
            refresh: It also refreshes the weight cache.
            filled: Matrices whose caches the device reports as filled; by default those that it
                was asked to fill.
            caller: The stream that filled its inputs.
            joined: The graph stream waits for that stream; None when the history says so itself.
        """
        key = self.key(microbatch, stage, invocation)
        link = self._hand_over(stage, caller, joined)
        details = (
            "refreshes" if refresh else "",
            f"in slot {slot}" if slot is not None else "",
            _after(token),
            _not(joined),
        )
        name = self._action("F", key)
        ticket = self.step(
            name,
            lambda: self.contract.check_forward(
                key, slot=slot, token=token, link=link, refresh=refresh
            ),
            " ".join(filter(None, details)),
        )
        fills = self._fills(stage, filled, asked=refresh)
        self.scaled[key] = self.contract.token(stage)
        self.refs[key] = self._redeem(name, ticket, filled=fills, updates=1)
        self.contract.wait(link)
        self.contract.wait(self._link(stage, "main"))

    def dgrad(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        queued: Iterable[str] | None = None,
        bound: tuple[Destination, ...] | None = None,
        invocation: int = 0,
        token: int | None = None,
        updates: int = 1,
        scales_of: int | None = None,
    ) -> None:
        """
        Bind the destinations and run dI.

        Args:
            microbatch: Its microbatch.
            stage: Its stage.
            queued: Matrices whose gradient work it deferred; by default all.
            bound: Destinations that are bound; by default the configured ones.
            invocation: Which call of the stage's block it is.
            token: The scaling updates that the device counts; by default what the contract does.
            updates: The scaling updates that the device made in it.
            scales_of: The microbatch with whose scales it ran; by default its own.
        """
        key = self.key(microbatch, stage, invocation)
        name = self._action("I", key)
        detail = "" if bound is None else f"writes to {_where(bound)}"
        self.step(name, lambda: self.contract.bind(key, bound), f"bind {detail}".strip())
        link = self._hand_over(stage, "main", True)
        ticket = self.step(
            name,
            lambda: self.contract.check_dgrad(key, self.refs[key], token=token, link=link),
            _after(token),
        )
        given = self._matrices(stage) if queued is None else tuple(queued)
        scales = self.scaled[key if scales_of is None else self.key(scales_of, stage, invocation)]
        details = (
            "" if queued is None else f"queued {', '.join(given) or 'nothing'}",
            "" if updates == 1 else f"made {updates} scaling updates",
            "" if scales_of is None else f"with the scales of microbatch {scales_of}",
        )
        detail = " ".join(filter(None, details))
        self._redeem(name, ticket, given, detail, updates=updates, scales=scales)
        self.contract.wait(link)

    def wgrad(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        overwrites: bool | None = None,
        covered: Iterable[str] | None = None,
        into: tuple[Destination, ...] | None = None,
        invocation: int = 0,
        stream: Hashable | None = None,
        tape_of: int | None = None,
    ) -> None:
        """
        Run dW.

        Args:
            microbatch: Its microbatch.
            stage: Its stage.
            overwrites: The write replaces what the buffer holds; by default what is right.
            covered: Matrices whose gradient it wrote; by default all.
            into: The destinations that it writes; by default the configured ones.
            invocation: Which call of the stage's block it is.
            stream: The domain on whose graph stream it is launched; by default its own.
            tape_of: The microbatch whose retained work it takes up; by default its own.
        """
        key = self.key(microbatch, stage, invocation)
        ref = self.refs[key if tape_of is None else self.key(tape_of, stage, invocation)]
        link = self._hand_over(stage, "main", True)
        if stream is not None:
            link = self.contract.link("main", stream)
        name = self._action("W", key)
        details = (
            "" if overwrites is None else "overwrites" if overwrites else "accumulates",
            "" if into is None else f"writes to {_where(into)}",
            "" if stream is None else f"on stream {stream}",
            "" if tape_of is None else f"with the work of microbatch {tape_of}",
        )
        ticket = self.step(
            name,
            lambda: self.contract.check_wgrad(
                key, ref, destination=into, first=overwrites, link=link
            ),
            " ".join(filter(None, details)),
        )
        given = self._matrices(stage) if covered is None else tuple(covered)
        detail = "" if covered is None else f"covered {', '.join(given) or 'nothing'}"
        self._redeem(name, ticket, given, detail)
        self.contract.wait(link)

    def backward(self, microbatch: int, *, stage: int = 0, invocation: int = 0) -> None:
        """Run dI and dW."""
        self.dgrad(microbatch, stage=stage, invocation=invocation)
        self.wgrad(microbatch, stage=stage, invocation=invocation)

    # Messages

    def receive(self, microbatch: int, *, stage: int = 0, slot: int | None = None) -> None:
        """Post a receive of a forward's input, into the slot at a fixed address."""
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
        """Post a send of a tape's output (or input gradient) on a calling stream."""
        key = self.key(microbatch, stage)
        name = self._name(f"{stage}SEND_{'B' if gradient else 'F'}{microbatch}", key.epoch)
        link = self._link(stage, caller)
        self.step(
            name,
            lambda: self.contract.read(key, self.refs[key], gradient=gradient, link=link),
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
        """A send has completed, and a calling stream awaited its handle."""
        key = self.key(microbatch, stage)
        name = self._name(f"{stage}WAIT_SEND_{'B' if gradient else 'F'}{microbatch}", key.epoch)
        link = self._link(stage, caller)
        self.step(
            name,
            lambda: self.contract.finish_read(key, self.refs[key], gradient=gradient, link=link),
            _on(caller),
        )

    # Streams

    def submit(self, caller: Hashable = "main") -> None:
        """A calling stream enqueues work."""
        self.step(f"{caller} works", lambda: self.contract.submit(caller))

    def join(self, caller: Hashable = "main", stage: int = 0) -> None:
        """The graph stream waits for an event of a calling stream."""
        link = self._link(stage, caller)
        self.step(f"await an event of {caller}", lambda: self.contract.join(link))

    # The end of an epoch

    def finalize(self, stage: int = 0) -> None:
        """Declare a stage's gradients whole."""
        link = self._link(stage, "main")
        self.step(f"s{stage}", lambda: self.contract.finalize(stage, link), "finalize")

    def await_replays(self, caller: Hashable, stage: int = 0) -> None:
        """A stream waits for all that was replayed on the stage's graph stream."""
        link = self._link(stage, caller)
        self.step(f"{caller} waits", lambda: self.contract.wait(link), f"for s{stage}")

    def reduce(self, bucket: int | str = 0, *, caller: Hashable | None = None) -> None:
        """
        Start the data-parallel reduction of a bucket.

        Args:
            bucket: The bucket; a stage's index where it has only one.
            caller: The stream that it is enqueued on; by default the one that reads the gradients.
        """
        link = None if caller is None else self._link(0, caller)
        detail = "" if caller is None else f"on {caller}"
        self.step(
            _of(bucket),
            lambda: self.contract.start_reduction(bucket, link),
            f"reduce {detail}".strip(),
        )

    def reduced(self, bucket: int | str = 0, *, caller: Hashable | None = None) -> None:
        """A stream waits for that reduction; by default the one that reads the gradients."""
        link = None if caller is None else self._link(0, caller)
        detail = "" if caller is None else f"by {caller}"
        self.step(
            _of(bucket),
            lambda: self.contract.finish_reduction(bucket, link),
            f"await the reduction {detail}".strip(),
        )

    def update(self) -> None:
        """Run the optimizer: commit the epoch; the graph streams wait for it."""
        self.step(f"e{self.contract.epoch}", lambda: self.contract.commit_epoch(), "optimizer")
        for config in self.contract.stages:
            self.contract.join(self._link(config.stage, "main"))

    def end(self) -> None:
        """End the step: every stage final and, where it is reduced, reduced; then the optimizer."""
        for config in self.contract.stages:
            self.finalize(config.stage)
            if config.reduces:
                self.reduce(config.stage)
                self.reduced(config.stage)
        self.update()

    def whole_step(self) -> None:
        """Run a whole optimizer step of every stage, one microbatch after the other."""
        for config in self.contract.stages:
            self.refresh(config.stage)
            for microbatch in range(config.microbatches):
                self.forward(microbatch, stage=config.stage)
                self.backward(microbatch, stage=config.stage)
        self.end()

    def checkpoint(self) -> Checkpoint:
        """Take a checkpoint, once the device is idle."""
        self.contract.drain()
        taken: Checkpoint = self.step("checkpoint", lambda: self.contract.checkpoint())
        return taken

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint, once the device is idle."""
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
        Check a table as ``qeffect check`` does.

        Args:
            text: The table as CSV, one row a rank.
            stage_to_rank: Where its reader takes the stages to live; inferred when left out.
            transport: How the runtime carries messages.

        Raises:
            Refused: The table is refused, under the first finding's clause and place.
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

    # Helpers

    def key(self, microbatch: int, stage: int = 0, invocation: int = 0) -> TapeKey:
        """The key of a microbatch in the current epoch."""
        return TapeKey(self.contract.epoch, stage, microbatch, invocation=invocation)

    def _redeem(
        self,
        name: str,
        ticket: Any,
        evidence: Iterable[str] = (),
        detail: str = "",
        **reports: Any,
    ) -> Any:
        self.place = name
        if detail:
            self.steps.append(f"{name} {detail}")
        twin = deepcopy(self.contract.memory)
        try:
            return self.contract.commit(ticket, evidence, **reports)
        except Refused:
            # The action has run, so the contract aborts it: that, and no more, is the change.
            aborted = self.contract.transitions.functions[ABORTS[ticket.action]]
            aborted(twin, ticket.slot, ticket.serial)
            self.unchanged = twin.snapshot() == self.contract.snapshot()
            raise

    def _hand_over(self, stage: int, caller: Hashable, joined: bool | None) -> int:
        """Tell that the caller filled the inputs, and that the graph stream waits for it."""
        link = self._link(stage, caller)
        if joined is not None:
            self.contract.submit(caller)
        if joined:
            self.contract.join(link)
        return link

    def _link(self, stage: int, caller: Hashable) -> int:
        domain = next(s.domain for s in self.contract.stages if s.stage == stage)
        return self.contract.link(caller, domain)

    def _fills(
        self,
        stage: int,
        filled: Iterable[str] | None,
        *,
        asked: bool,
        of: int | None = None,
    ) -> dict[str, int]:
        """Return what the device reports as filled, and from which weights, and note it."""
        default = self._matrices(stage) if asked else ()
        given = default if filled is None else tuple(filled)
        if filled is not None:
            self.steps.append(f"s{stage} fills {', '.join(given) or 'nothing'}")
        if of is not None:
            self.steps.append(f"s{stage} fills from the weights of e{of}")
        return dict.fromkeys(given, self.contract.epoch if of is None else of)

    def _matrices(self, stage: int) -> tuple[str, ...]:
        return next(s.matrices for s in self.contract.stages if s.stage == stage)

    def _action(self, letter: str, key: TapeKey) -> str:
        again = f".{key.invocation}" if key.invocation else ""
        return self._name(f"{key.stage}{letter}{key.microbatch}{again}", key.epoch)

    @staticmethod
    def _name(name: str, epoch: int) -> str:
        return f"{name} e{epoch}" if epoch else name


def stage(index: int, **options: Any) -> StageConfig:
    """Return a stage of two microbatches, two slots and two matrices, unless told otherwise."""
    return StageConfig(index, **{"microbatches": 2, "slots": 2, "matrices": MATRICES, **options})


def _configured(config: StageConfig) -> str:
    given = f"s{config.stage} of {config.microbatches} microbatches, {config.slots} slots"
    given += f", matrices {' '.join(config.matrices)}, domain {config.domain}"
    if config.tape_scales is not None:
        given += f", scales of tapes {config.tape_scales}"
    if config.pool is not None:
        given += f", pool {config.pool}"
    return given


def _where(destinations: tuple[Destination, ...]) -> str:
    return " ".join(f"{d.matrix}@{d.address:#x}" for d in destinations)


def _after(token: int | None) -> str:
    return "" if token is None else f"after {token} scaling updates"


def _of(bucket: int | str) -> str:
    """Name a bucket as a place; one with a number is a stage's only one."""
    return f"s{bucket}" if isinstance(bucket, int) else f"bucket {bucket}"


def _on(caller: Hashable) -> str:
    return "" if caller == "main" else f"on {caller}"


def _not(joined: bool | None) -> str:
    return "without waiting for its caller" if joined is False else ""

"""
The full check of a schedule: first of the table alone, then of every action under the contract.

Each rank becomes one simulated process with one `Contract`. Its stages share one state domain
(their FP8 scales are updated together), as Transformer Engine's modules do. Each stage has the
number of slots that the plan computes, and more slots if an input is received long before its
forward. The rank's row then runs as in a runtime:

- a refresh (the quantization of a stage's weights) comes before the stage's first forward;
- before and after every replay, the caller's stream and the graph stream wait for each other;
- destinations (the buffers for gradients) are bound before dI;
- a receive is posted into a slot, and ends when the computation that uses the message begins;
- a send reads its tape (what the forward left in memory) until the table waits for the send; in a
  table without such waits, the send ends at once;
- gradients are finalized and reduced at the table's entry for the reduction, and the reduction ends
  where the table waits for it; without the entry or the wait, this happens at the row's end;
- commit, drain and checkpoint end the step.

The row runs for two optimizer steps: training repeats a table, so each step must leave the contract
ready for the next step.

If the pairing is not `contract`, each dW presents the tape reference that the pairing picks. The
contract then refuses the reference of a wrong tape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

import attrs

from ..contract import Contract
from ..keys import TapeKey, TapeRef
from ..refusals import Refused
from ..stage_config import StageConfig
from ..text import shown
from .actions import (
    RECEIVES,
    SEND_WAITS,
    SENDS,
    Atom,
    Kind,
    Schedule,
    ScheduleError,
)
from .channels import Channel, channels
from .findings import Finding, Place, place
from .pairing import Discipline, Work, discipline
from .plan import Plan, plan
from .ranks import check_ranks
from .schedule_object import read_object
from .transport import DEFAULT, Transport

MATRICES = ("fc1", "fc2", "proj", "qkv")
_SHOWN = 100


@attrs.frozen
class Verdict:
    """
    The result of a check of a schedule.

    Args:
        verdict: `accepted` or `refused`.
        source: The schedule's source.
        pairing: The rule that decides which retained work a dW gets; a name of
            `qeffect.schedule.pairing`.
        findings: The reasons for a refusal, the cause first; empty if the schedule is accepted.
        counts: Number of actions of each kind that the contract accepted, over all ranks and steps.
        plan: The resources that the schedule needs; `None` if the check of the table alone fails.
        transport: The assumed way in which the runtime carries messages.
        channels: The result for each way to share queues; empty if the table names no messages or
            is wrong for every way.
    """

    verdict: str
    source: str
    pairing: str
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    plan: Plan | None
    transport: Transport = DEFAULT
    channels: tuple[Channel, ...] = ()

    @property
    def finding(self) -> Finding | None:
        """The first finding; None if the schedule is accepted."""
        return self.findings[0] if self.findings else None

    @property
    def clause(self) -> str | None:
        """The clause of the first finding."""
        return self.findings[0].clause if self.findings else None

    @property
    def rank(self) -> int | None:
        """The rank of the first finding."""
        return self.findings[0].rank if self.findings else None

    @property
    def step(self) -> int | None:
        """The step of the first finding."""
        return self.findings[0].step if self.findings else None

    @property
    def action(self) -> str | None:
        """The refused entry of the first finding."""
        return self.findings[0].action if self.findings else None

    @property
    def actions(self) -> int:
        """Number of F, dI and dW that the contract accepted."""
        return sum(self.counts.get(kind, 0) for kind in ("F", "dI", "dW"))

    @property
    def slots_text(self) -> str:
        """The number of slots (sets of buffers) of each stage, as text."""
        if self.plan is None:
            return "unknown"
        return ", ".join(f"{stage}: {slots}" for stage, slots in sorted(self.plan.slots.items()))

    def record(self) -> dict[str, Any]:
        """The verdict as plain data for JSON, with at most the first hundred findings."""
        return {
            "verdict": self.verdict,
            "clause": self.clause,
            "rank": self.rank,
            "step": self.step,
            "action": self.action,
            "source": self.source,
            "pairing": self.pairing,
            "transport": attrs.asdict(self.transport),
            "channels": [channel.record() for channel in self.channels],
            "actions": self.actions,
            "counts": self.counts,
            "findings": [found.record() for found in self.findings[:_SHOWN]],
            "num_findings": len(self.findings),
            "plan": None if self.plan is None else self.plan.record(),
        }


def check(
    schedule: Schedule | Any,
    pairing: str = "contract",
    *,
    steps: int = 2,
    shared_pool: bool = False,
    transport: Transport | None = None,
) -> Verdict:
    """
    Check a schedule against the contract.

    Args:
        schedule: The schedule, or a schedule object of torch.distributed.pipelining (of torch's own
            classes or a subclass).
        pairing: How the runtime chooses the retained work (the operands that a dI leaves) for a dW;
            a name of `qeffect.schedule.pairing`.
        steps: Number of optimizer steps to run.
        shared_pool: If True, all graphs of a rank share one capture-memory pool, in which all F are
            captured first, then all dI, then all dW. If False, each slot (set of buffers) has its
            own pool.
        transport: How the runtime carries messages; by default as torch does.

    Raises:
        ScheduleError: An argument has the wrong type; the pairing is unknown; `steps` is below one;
            the transport limits outstanding sends, but the table does not say when its sends end;
            or the transport lets sends block, but the table does not name its sends.
    """
    if not isinstance(schedule, Schedule):
        schedule = read_object(schedule)
    if transport is not None and not isinstance(transport, Transport):
        raise ScheduleError(
            f"transport must be a Transport, not {shown(transport)}; make one with "
            "qeffect.schedule.transport.Transport"
        )
    if type(steps) is not int:
        raise ScheduleError(f"steps must be an integer, not {shown(steps)}")
    if steps < 1:
        raise ScheduleError(f"steps must be at least 1, not {steps}")
    if type(shared_pool) is not bool:
        raise ScheduleError(f"shared_pool must be True or False, not {shown(shared_pool)}")
    transport = transport or DEFAULT
    transport.require(schedule)
    discipline(pairing)
    found = check_ranks(schedule, transport)
    tried = channels(schedule, found)
    if found:
        return Verdict("refused", schedule.source, pairing, found, {}, None, transport, tried)
    needs = plan(schedule)
    counts: Counter[str] = Counter()
    refusals: list[Finding] = []
    for rank in range(schedule.num_ranks):
        if not schedule.stages_of(rank):
            continue
        process = _Process(schedule, rank, needs, discipline(pairing), shared_pool)
        try:
            for _ in range(steps):
                process.run_step()
        except Refused as refused:
            refusals.append(process.explain(refused, pairing))
        counts.update(process.counts)
    refusals.sort(key=lambda f: (f.step is None, f.step or 0, f.rank or 0))
    return Verdict(
        "refused" if refusals else "accepted",
        schedule.source,
        pairing,
        tuple(refusals),
        dict(counts),
        needs,
        transport,
        tried,
    )


class _Process:
    """The simulated process of one rank: its contract, and its references to live tapes."""

    def __init__(
        self, schedule: Schedule, rank: int, needs: Plan, rule: Discipline, shared_pool: bool
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.discipline = rule
        self.atoms = schedule.atoms[rank]
        self.counts: Counter[str] = Counter()
        self.at: Atom | None = None
        self.picked: Work | None = None
        self.posted: set[tuple[Work, bool]] = set()
        self.refs: dict[Work, TapeRef] = {}
        #: By slot, the tape that took the slot last.
        self.tenants: dict[int, Work] = {}
        receives = {(atom.kind, atom.stage) for atom in self.atoms if atom.kind in RECEIVES}
        sends = {(atom.kind, atom.stage) for atom in self.atoms if atom.kind in SENDS}
        self.ended = {atom.stage for atom in self.atoms if atom.kind is Kind.WAIT_REDUCE_GRAD}
        self.reduced = {atom.stage for atom in self.atoms if atom.kind is Kind.REDUCE_GRAD}
        self.stages = schedule.stages_of(rank)
        computed = self._peaks(frozenset({Kind.FORWARD}))
        received = self._peaks(frozenset({Kind.FORWARD, Kind.RECV_F}))
        self.contract = Contract(
            [
                StageConfig(
                    stage,
                    microbatches=schedule.num_microbatches,
                    slots=self._slots(
                        stage, needs.slots[stage] + received[stage] - computed[stage]
                    ),
                    matrices=MATRICES,
                    sends_output=(Kind.SEND_F, stage) in sends,
                    sends_gradient=(Kind.SEND_B, stage) in sends,
                    reduces=stage in self.reduced,
                    receives_input=(Kind.RECV_F, stage) in receives,
                    receives_gradient=(Kind.RECV_B, stage) in receives,
                    pool="rank" if shared_pool else None,
                    feeds=self._fed(stage, sends),
                )
                for stage in self.stages
            ]
        )
        self.evidence = self.contract.stages[0].matrices

    def _slots(self, stage: int, needed: int) -> int:
        """Return a stage's number of slots: the needed number, or one per buffer of the source."""
        if self.schedule.buffers is None:
            return needed
        named = (slot for (own, _), slot in self.schedule.buffers.items() if own == stage)
        return max(named, default=0) + 1

    def _slot(self, work: Work) -> int | None:
        """Return the slot that the schedule's source names for a tape; None if it names no slot."""
        if self.schedule.buffers is None or work not in self.schedule.buffers:
            return None
        # A contract numbers the slots of all its stages, one stage after the other.
        before = sum(stage.slots for stage in self.contract.stages if stage.stage < work[0])
        return before + self.schedule.buffers[work]

    def _fed(self, stage: int, sends: Container[tuple[Kind, int]]) -> int | None:
        """Return the next stage if it is on this rank and gets its input without a message."""
        local = stage + 1 in self.stages and (Kind.SEND_F, stage) not in sends
        return stage + 1 if local else None

    def _peaks(self, begins: frozenset[Kind]) -> dict[int, int]:
        """Return each stage's peak of live tapes; a tape becomes live at an action in `begins`."""
        ends = {Kind.WGRAD, *(SEND_WAITS if self.schedule.awaits_sends else SENDS)}
        left = Counter((atom.stage, atom.microbatch) for atom in self.atoms if atom.kind in ends)
        live: set[Work] = set()
        peaks = dict.fromkeys(self.stages, 0)
        for atom in self.atoms:
            work = (atom.stage, atom.microbatch)
            if atom.kind in begins:
                live.add(work)
                now = sum(stage == atom.stage for stage, _ in live)
                peaks[atom.stage] = max(peaks[atom.stage], now)
            elif atom.kind in ends:
                left[work] -= 1
                if not left[work]:
                    live.discard(work)
        return peaks

    def run_step(self) -> None:
        """
        Run one optimizer step: the row, then finalize, commit, drain and checkpoint.

        Raises:
            Refused: An action breaks the contract; `at` is that action.
        """
        contract = self.contract
        epoch = contract.epoch
        fresh: set[int] = set()
        for atom in self.atoms:
            self.at = atom
            kind, stage = atom.kind, atom.stage
            if kind is Kind.FORWARD:
                if stage not in fresh:
                    fresh.add(stage)
                    self._refresh(stage)
                self._forward(TapeKey(epoch, stage, atom.microbatch))
            elif kind is Kind.DGRAD:
                self._dgrad(TapeKey(epoch, stage, atom.microbatch))
            elif kind is Kind.WGRAD:
                self._wgrad(TapeKey(epoch, stage, atom.microbatch))
            elif kind in RECEIVES:
                self._receive(TapeKey(epoch, stage, atom.microbatch), kind is Kind.RECV_B)
            elif kind in SENDS:
                self._send(TapeKey(epoch, stage, atom.microbatch), kind is Kind.SEND_B)
            elif kind in SEND_WAITS:
                self._sent(TapeKey(epoch, stage, atom.microbatch), kind is Kind.WAIT_SEND_B)
                self.counts["wait"] += 1
            elif kind is Kind.REDUCE_GRAD:
                contract.finalize(stage)
                contract.start_reduction(stage)
                self.counts["reduce"] += 1
            elif kind is Kind.WAIT_REDUCE_GRAD:
                contract.finish_reduction(stage)
                self.counts["wait"] += 1
        self.at = None
        for stage in self.stages:
            if stage in self.reduced:
                if stage not in self.ended:
                    contract.finish_reduction(stage)
            else:
                contract.finalize(stage)
            self.counts["finalize"] += 1
        contract.commit_epoch(epoch)
        contract.drain()
        contract.checkpoint()
        self.counts["commit"] += 1
        self.counts["checkpoint"] += 1

    def _hand_over(self) -> None:
        # The caller filled the input buffers; the graph stream must wait for that.
        self.contract.submit()
        self.contract.join()

    def _refresh(self, stage: int) -> None:
        self._hand_over()
        self.contract.commit(self.contract.check_refresh(stage))
        self.contract.wait()
        self.counts["refresh"] += 1

    def _forward(self, key: TapeKey) -> None:
        work = (key.stage, key.microbatch)
        self._received(key, False)
        self._hand_over()
        ref = self.contract.commit(self.contract.check_forward(key, self._slot(work)))
        assert ref is not None
        self.contract.wait()
        self.refs[work] = ref
        self.tenants[ref.slot] = work
        self.counts["F"] += 1

    def _dgrad(self, key: TapeKey) -> None:
        work = (key.stage, key.microbatch)
        self._received(key, True)
        self.contract.bind(key)
        self._hand_over()
        self.contract.commit(self.contract.check_dgrad(key, self.refs[work]), self.evidence)
        self.contract.wait()
        self.discipline.retain(work)
        self.counts["dI"] += 1

    def _wgrad(self, key: TapeKey) -> None:
        self.picked = self.discipline.pick((key.stage, key.microbatch))
        # In a checked row every dW follows a dI, so retained work is left to pick.
        assert self.picked is not None
        self._hand_over()
        ticket = self.contract.check_wgrad(key, self.refs[self.picked])
        self.contract.commit(ticket, self.evidence)
        self.contract.wait()
        self.counts["dW"] += 1

    def _receive(self, key: TapeKey, gradient: bool) -> None:
        """Post a receive at its place in the table; it ends when its computation begins."""
        work = (key.stage, key.microbatch)
        if not gradient:
            ref = self.refs[work] = self.contract.reserve(key, self._slot(work))
            self.tenants[ref.slot] = work
        self.contract.post_receive(key, self.refs[work], gradient=gradient)
        self.posted.add((work, gradient))
        self.counts["receive"] += 1

    def _received(self, key: TapeKey, gradient: bool) -> None:
        work = (key.stage, key.microbatch)
        if (work, gradient) in self.posted:
            self.posted.discard((work, gradient))
            self.contract.finish_receive(key, self.refs[work], gradient=gradient)

    def _send(self, key: TapeKey, gradient: bool) -> None:
        ref = self.refs[key.stage, key.microbatch]
        self.contract.read(key, ref, gradient=gradient)
        self.counts["send"] += 1
        if not self.schedule.awaits_sends:
            self._sent(key, gradient)

    def _sent(self, key: TapeKey, gradient: bool) -> None:
        self.contract.finish_read(key, self.refs[key.stage, key.microbatch], gradient=gradient)

    def explain(self, refused: Refused, pairing: str) -> Finding:
        """
        Convert a refusal of the contract into a finding at the refused action.

        Args:
            refused: The refusal.
            pairing: The name of the rule that chose the retained work of each dW.
        """
        record = refused.record()
        atom = self.at
        message = f"likely: {record.cause}" if record.cause else f"{record.transition} was refused"
        expected, found = record.expected, record.found
        related: tuple[Place, ...] = ()
        if atom is not None:
            work = (atom.stage, atom.microbatch)
            if atom.kind is Kind.WGRAD and self.picked is not None and self.picked != work:
                own, other = f"{work[0]}I{work[1]}", f"{self.picked[0]}I{self.picked[1]}"
                message = (
                    f"under {pairing!r} pairing, {atom.stage}W{atom.microbatch} presents the "
                    f"reference of {other} instead of {own}"
                )
                expected = f"the reference of {own}, {_where(self.refs[work])}"
                found = f"the reference of {other}, {_where(self.refs[self.picked])}"
                related = self._dgrads((work, "owner"), (self.picked, "picked"))
            slot = self._slot(work)
            tenant = None if slot is None else self.tenants.get(slot)
            if record.clause == "ownership.slot-busy" and self.schedule.buffers and tenant:
                message = (
                    f"{atom.action} writes buffer {self.schedule.buffers[work]}, which still holds "
                    f"the tape of stage {tenant[0]} and microbatch {tenant[1]}"
                )
                related = self._places({Kind.FORWARD}, (tenant, "first"))
        epoch = self.contract.epoch
        return Finding(
            clause=record.clause,
            rank=self.rank,
            step=None if atom is None else atom.step,
            action=None if atom is None else str(atom.action),
            message=message + (f" (optimizer step {epoch})" if epoch else ""),
            expected=expected,
            found=found,
            remedy=record.remedy,
            related=related,
        )

    def _dgrads(self, *wanted: tuple[Work, str]) -> tuple[Place, ...]:
        return self._places({Kind.DGRAD}, *wanted)

    def _places(self, kinds: Container[Kind], *wanted: tuple[Work, str]) -> tuple[Place, ...]:
        places = {(atom.stage, atom.microbatch): atom for atom in self.atoms if atom.kind in kinds}
        return tuple(place(self.rank, places[work], role) for work, role in wanted)


def _where(ref: TapeRef) -> str:
    # Without the random incarnation, so that a report is reproducible.
    return f"slot {ref.slot} generation {ref.generation}"

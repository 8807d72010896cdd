"""
One guarded step of Megatron-core: a forward-backward loop and the update, as contract calls.

Each Python frame costs about a microsecond on a host that launches kernels. To save frames, the
methods of `LoopStep` that run for every action do three things themselves instead of calling a
method: they look up the work (stage and microbatch) that a tensor belongs to, and they compare
weights' versions and calls with the recorded ones, as `Weights` and `Works` describe.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NoReturn

from qeffect.refusals import Refused, refused
from qeffect.schedule.pairing import Work

from .evidence import VERSION, BackwardPasses, Weights, another_work, not_once, work_name
from .judging import Judge
from .megatron_buckets import check_gathered, check_not_early
from .megatron_caches import Caches
from .megatron_plan import LoopPlan
from .megatron_updates import BufferWrites
from .recurring import Call, RecurringSteps
from .works import Event, Works

__all__ = ["LoopStep", "action_name"]

#: The kinds of messages; each kind carries tensors of its own.
_MESSAGES = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")
_WRAPPERS = (list, tuple)
#: The passes through the outputs of a forward whose outputs have no graph.
_UNCOUNTED = (None,)

Made = dict[int, tuple["weakref.ref[Any]", Work]]
"""By a tensor's identity: a weak reference to the tensor, and the work that it belongs to."""

Norm = tuple[str, int, tuple[int, int]]
"""Actions that update the scaling state equally often: their kind, stage and `Caches.mode`."""


@cache
def action_name(kind: str, stage: int, microbatch: int) -> str:
    """Return the name of a forward (F) or a backward (B) in reports."""
    return f"{kind} of {work_name((stage, microbatch))}"


class LoopStep:
    """
    The forwards, backwards, messages and reductions of one loop, and the update after it.

    Every method that calls the contract raises `Refused` if an action breaks it.

    Args:
        plan: What the loop declares; also an attribute.
        steps: The steps of the rank's contract.
        judge: Asks the contract; `backward` tells it which backward is checked.
        chunks: The model chunks of the rank.
        caches: The caches of quantized weights.
        weights: The weights of each chunk.
        quantizing: The modules of each chunk that quantize their weights once in a step.
        buckets: For each chunk, the buckets that are reduced over more than one rank.
        buffers: For each chunk, its gradient buffers; none if its gradients are not in buffers.
        gathers: For each chunk, the buckets whose parameters its forwards gather.
        scales: Whether all F of a stage must update the scaling state equally often, and all B too.
        norms: Number of scaling updates per action in earlier steps, for each `Norm`.
        wrote: Whether an update wrote weights since the last loop.

    Attributes:
        buckets: By the identity of a bucket that is reduced: its name and its stage.
        inside: The work whose backward runs; None if none runs.
        first: Whether the last forward that was checked is the first of its stage.
        runs: How often the function of the last forward was called.
        updates: How many updates were committed.
        whole: Whether the loop has ended.
    """

    def __init__(
        self,
        plan: LoopPlan,
        steps: RecurringSteps,
        judge: Judge,
        chunks: Sequence[Any],
        caches: Caches,
        weights: Sequence[Weights],
        quantizing: Sequence[Sequence[tuple[str, Any]]],
        buckets: Sequence[Sequence[Any]],
        buffers: Sequence[Sequence[Any]],
        gathers: Sequence[Sequence[Any]],
        *,
        scales: bool = True,
        norms: dict[Norm, int] | None = None,
        wrote: bool = False,
    ) -> None:
        stages = plan.stages
        self.plan, self._works, self._passes = plan, Works(steps), BackwardPasses()
        self._judge = judge
        self._chunks = dict(zip(stages, chunks, strict=True))
        self._caches, self._scales = caches, scales
        self._quantizing = dict(zip(stages, quantizing, strict=True))
        self._weights = dict(zip(stages, weights, strict=True))
        self._writes = dict(zip(stages, map(BufferWrites, buffers), strict=True))
        self._gathers, self._wrote = dict(zip(stages, gathers, strict=True)), wrote
        #: The weights of the stages whose first forward has run.
        self._watched: dict[int, Weights] = {}
        self._outputs: Made = {}
        self._gradients: Made = {}
        self._inputs: Made = {}
        self._arrived: Made = {}  # gradients of outputs
        #: By kind of message, whose tensors it carries, and the messages to come.
        carried = self._outputs, self._gradients, self._inputs, self._arrived
        self._carried = dict(zip(_MESSAGES, carried, strict=True))
        self._due = deque(plan.backwards)
        self._messages = {kind: deque(plan.events.get(kind, ())) for kind in _MESSAGES}
        self._posting: list[tuple[int, Event]] = []  # receives, with their place in the result
        self._sent: list[Event] = []
        self._forwards = dict.fromkeys(stages, 0)
        self._backwards = dict.fromkeys(stages, 0)
        self.first, self.runs = False, 0
        self._norms: dict[Norm, int] = {} if norms is None else norms
        self._scaling: dict[Norm, list[tuple[int, int]]] = {}
        self._modes = dict.fromkeys(stages, (0, 0))
        self.inside: Work | None = None
        self._before: tuple[int | None, int] = None, 0  # passes when it began: its own, and all
        self.buckets = {
            id(group): (f"{stage}/{n}", stage)
            for stage, groups in zip(stages, buckets, strict=True)
            for n, group in enumerate(groups)
        }
        self._started: set[str] = set()
        self._reduced: set[str] = set()
        self._postponed: list[Callable[[], None]] = []
        self.updates = 0
        self.whole = False

    # Forward and backward

    def forward(self, event: Event, given: Any) -> None:
        """
        Check a forward.

        Args:
            event: The forward: its kind, stage and microbatch.
            given: The input that was received for it; None on the first stage.
        """
        _, stage, microbatch = event
        weights = self._watched.get(stage)
        if weights is not None and [*map(VERSION, weights.counters)] != weights.expected:
            weights.check("check_forward", stage)
        if given is not None:
            tensor = _first(given) if isinstance(given, _WRAPPERS) else given
            found = self._inputs.get(id(tensor))
            owner = found[1] if found is not None and found[0]() is tensor else None
            if owner is not None and owner != (stage, microbatch):
                raise another_work("check_forward", "input", owner, (stage, microbatch))
        self.first = not self._forwards[stage]
        refresh = {"refresh": any(self._quantizing.values())} if self.first else None
        works, call = self._works, ("check", (event,), refresh)
        if works.script[works.place] == call:
            works.place += 1
        else:
            works.make(call)
        if self.first:
            self._caches.begin()
        self.runs = 0

    def commit_forward(self, event: Event, output: Any, updates: int) -> None:
        """Commit a forward, given its output and its number of scaling updates."""
        _, stage, microbatch = event
        work = stage, microbatch
        tensor = _first(output) if isinstance(output, _WRAPPERS) else output
        known = self._outputs.get(id(tensor))
        old = known is not None and known[0]() is tensor
        if self.runs != 1 or old:
            runs = 0 if old else self.runs
            raise not_once("commit_forward", f"F of {work_name(work)}", runs)
        first = self.first
        if first:
            if self._wrote:
                check_gathered(self._gathers[stage], self._weights[stage], work, output)
            self._check_caches(work)
        if self._scales and self._norms.get(("F", stage, self._modes[stage])) != updates:
            self._check_scaling("F", work, updates)
        works, call = self._works, ("commit", (event,), None)
        if works.script[works.place] == call:
            works.place += 1
        else:
            works.make(call)
        self._forwards[stage] += 1
        if tensor is not None:
            self._outputs[id(tensor)] = weakref.ref(tensor), work
            self._passes.watch(work, tensor)
        if first:
            weights = self._watched[stage] = self._weights[stage]
            weights.renew()

    def _check_caches(self, work: Work) -> None:
        """Check that a stage's first forward quantized its weights; record its mode of graphs."""
        stage, _ = work
        stale = self._caches.stale() if self._quantizing[stage] else None
        if stale is not None:
            raise refused(
                "version.stale-cache",
                "check_forward",
                f"F of {work_name(work)}, the first of the step: {stale}",
                "the stage's first F of a step quantizes the weights that the update left",
            )
        self._modes[stage] = self._caches.mode(self._chunks[stage])

    def entered_first(self, stage: int) -> None:
        """Record that the function of a stage's first forward was called."""
        if self._quantizing[stage]:
            self._caches.entered(self._quantizing[stage])

    def backward(self, given: Any, output: Any, gradient: Any) -> Event:
        """
        Check a backward; return it as an action of the contract.

        Usually the next backward of the declared order runs. If output, input and gradient all
        belong to another backward, that other backward runs.

        Args:
            given: The input of the backward's forward.
            output: What that forward returned.
            gradient: The gradient of the output; None on the last stage.
        """
        owners: list[Work | None] = []
        for made, value in (
            (self._outputs, output),
            (self._inputs, given),
            (self._arrived, gradient),
        ):
            tensor = _first(value) if isinstance(value, _WRAPPERS) else value
            found = made.get(id(tensor))
            owners.append(found[1] if found is not None and found[0]() is tensor else None)
        known = [*filter(None, owners)]
        work = self._due.popleft() if self._due else None
        if work is None or (len(known) > 1 and known.count(known[0]) == len(known)):
            work = known[0] if known else (self.plan.stages[0], 0)
        stage, microbatch = work
        event = "B", stage, microbatch
        self._judge.at = action_name(*event)
        used, received, arrived = owners
        weights = self._watched.get(stage)
        if weights is not None and [*map(VERSION, weights.counters)] != weights.expected:
            weights.check("check_dgrad", stage)
        works, call = self._works, ("check", (event, used), None)
        if works.script[works.place] == call:
            works.place += 1
        else:
            works.make(call)
        if arrived is not None and arrived != work:
            raise another_work("check_dgrad", "gradient", arrived, work)
        if received is not None and received != work:
            raise another_work("check_dgrad", "input", received, work)
        self._writes[stage].before(work)
        passes = self._passes
        self._before = passes.counts.get(work, _UNCOUNTED)[0], passes.total
        self.inside = work
        return event

    def leave_backward(self) -> None:
        """Record that the backward raised an error and is over."""
        self.inside = None

    def commit_backward(self, event: Event, gradient: Any, updates: int) -> None:
        """Commit a backward, given its input's gradient and its number of scaling updates."""
        _, stage, microbatch = event
        work = stage, microbatch
        self.inside = None
        before, total = self._before
        passes = self._passes
        passed = passes.counts.get(work, _UNCOUNTED)[0]
        if before is not None and passed is not None:
            own = passed - before
            if passes.total - total > own:
                raise another_work("commit_dgrad", "output", passes.last, work)
            if own != 1:
                raise not_once("commit_dgrad", f"B of {work_name(work)}", own)
        self._writes[stage].after(work)
        if self._scales and self._norms.get(("B", stage, self._modes[stage])) != updates:
            self._check_scaling("B", work, updates)
        works, call = self._works, ("commit", (event,), None)
        if works.script[works.place] == call:
            works.place += 1
        else:
            works.make(call)
        self._backwards[stage] += 1
        tensor = _first(gradient) if isinstance(gradient, _WRAPPERS) else gradient
        if tensor is not None:
            self._gradients[id(tensor)] = weakref.ref(tensor), work
        if self._postponed:
            postponed, self._postponed = self._postponed, []
            for end in postponed:
                end()

    def _check_scaling(self, kind: str, work: Work, updates: int) -> None:
        """
        Check that each F of a stage, and each B, updates the scaling state equally often.

        The expected number comes from the earlier steps. In the first step the majority of three
        actions decides, so a deviating action is named at most two actions later.
        """
        stage, microbatch = work
        norm = kind, stage, self._modes[stage]
        expected = self._norms.get(norm)
        if expected == updates:
            return
        if expected is not None:
            said = f"{expected}, as in the steps before"
            raise _scaling_refused(kind, work, updates, said)
        seen = self._scaling.setdefault(norm, [])
        seen.append((microbatch, updates))
        if len(seen) < 3 or len({each for _, each in seen}) == 1:
            return
        expected = Counter(each for _, each in seen).most_common(1)[0][0]
        for other, found in seen:
            if found != expected:
                said = f"{expected}, as in other {kind} of the step"
                raise _scaling_refused(kind, (stage, other), found, said)

    def _check_few_scalings(self) -> None:
        """Check the scaling updates of stages with two microbatches, too few for a majority."""
        for (kind, stage, _), seen in self._scaling.items() if self._scales else ():
            (microbatch, found), (other, expected) = seen[-1], seen[0]
            if found != expected and len(seen) == 2:
                said = f"{expected}, as in microbatch {other}"
                raise _scaling_refused(kind, (stage, microbatch), found, said)

    def _keep_norms(self) -> None:
        """Keep how often the scaling state was updated, for later steps."""
        for norm, seen in self._scaling.items():
            self._norms.setdefault(norm, seen[0][1])

    # Messages

    def post(self, output: Any, gradient: Any, before: bool | None, behind: bool | None) -> None:
        """
        Check the messages of an exchange, which are posted together.

        Args:
            output: What is sent to the next stage; None sends nothing.
            gradient: What is sent to the previous stage; None sends nothing.
            before: Whether an input is received, from the previous stage.
            behind: Whether the gradient of an output is received, from the next stage.
        """
        if not self.plan.messages:
            return
        works = self._works
        for kind, value in (("SEND_F", output), ("SEND_B", gradient)):
            if value is not None:
                tensor = _first(value) if isinstance(value, _WRAPPERS) else value
                found = self._carried[kind].get(id(tensor))
                maker = found[1] if found is not None and found[0]() is tensor else None
                queue = self._messages[kind]
                event = queue.popleft() if queue else self._unplanned(kind, maker)
                call: Call = "post_message", (event, None, maker), None
                if works.script[works.place] == call:
                    works.place += 1
                else:
                    works.make(call)
                self._sent.append(event)
        self._posting.clear()
        for kind, place, wanted in (("RECV_F", 0, before), ("RECV_B", 1, behind)):
            if wanted:
                queue = self._messages[kind]
                event = queue.popleft() if queue else self._unplanned(kind, None)
                self._posting.append((place, event))
                call = "post_message", (event,), None
                if works.script[works.place] == call:
                    works.place += 1
                else:
                    works.make(call)

    def _unplanned(self, kind: str, maker: Work | None) -> NoReturn:
        """Refuse a message that the plan does not have."""
        raise refused(
            "order.reordered",
            "read" if kind.startswith("SEND") else "post_receive",
            f"one more {kind}" + ("" if maker is None else f", of {work_name(maker)}"),
            f"no more {kind} than {self.plan.source} has",
        )

    def posted(self, found: Any, ended: bool) -> None:
        """
        Record which work each received tensor belongs to, by the posted messages.

        Args:
            found: What the exchange returned: the received input and gradient come first.
            ended: Whether the exchange has waited for its messages.
        """
        if not self.plan.messages:
            return
        for place, (kind, stage, microbatch) in self._posting:
            value = found[place]
            tensor = _first(value) if isinstance(value, _WRAPPERS) else value
            if tensor is not None:
                self._carried[kind][id(tensor)] = weakref.ref(tensor), (stage, microbatch)
        if ended and self._sent:
            works, call = self._works, ("finish_sends", (tuple(self._sent),), None)
            if works.script[works.place] == call:
                works.place += 1
            else:
                works.make(call)
            self._sent.clear()

    # Reductions

    def start_reduction(self, group: Any) -> None:
        """Check the reduction of a bucket of gradients, before it starts."""
        if self.inside is not None:
            self._writes[self.inside[0]].reducing()
        if (found := self.buckets.get(id(group))) is None:
            return
        name, stage = found
        if self.inside is not None and self.inside[0] == stage:
            last = self._backwards[stage] == self.plan.microbatches - 1
            unready = _unready(group)
            if not last or unready:
                also = f", without the gradients of {unready} parameters" if unready else ""
                raise refused(
                    "reduction.incomplete",
                    "start_reduction",
                    f"the reduction of bucket {name} during the backward of microbatch "
                    f"{self.inside[1]}, after {self._backwards[stage]} other backwards{also}",
                    f"a reduction of the gradients of all {self.plan.microbatches} backwards",
                )
            if name in self._started:
                raise refused(
                    "reduction.duplicate",
                    "start_reduction",
                    f"a second reduction of bucket {name}",
                    "one reduction of each bucket in a step",
                )
            self._postponed.append(partial(self._works.start_reduction, name))
        else:
            self._works.start_reduction(name)
        self._started.add(name)

    def finish_reduction(self, group: Any) -> None:
        """Record that a bucket's reduction has ended, or was waited for."""
        if (found := self.buckets.get(id(group))) is None:
            return
        name, stage = found
        if name in self._reduced or name not in self._started:
            return
        self._reduced.add(name)
        finish = partial(self._works.finish_reduction, name)
        if self.inside is not None and self.inside[0] == stage:
            self._postponed.append(finish)
        else:
            finish()

    # The end of the loop, and the update

    def finish(self) -> None:
        """End the loop: Megatron has waited for every send, and every backward has run."""
        self._posting.clear()
        self.posted((), ended=True)
        self._check_few_scalings()
        for stage in self.plan.stages:
            if stage in self._watched:
                self._watched[stage].check("finalize", stage)
            self._works.finalize(stage)
        self.whole = True

    def check_update(self) -> bool:
        """Check the update; return True."""
        for stage in self.plan.stages:
            if stage in self._watched:
                self._watched[stage].check("check_update", stage)
            # The bucket of a reduction that has not ended does not say when it was gathered.
            reduced = [g for g in self._gathers[stage] if self.buckets[id(g)][0] in self._reduced]
            check_not_early(reduced, stage)
        self._works.check_update()
        return True

    def commit_update(self) -> None:
        """Commit an update that ran."""
        self._works.commit_update()
        self._works.end()
        self._watched.clear()
        for stage, gathers in self._gathers.items():
            if gathers:
                self._weights[stage].renew()  # a later write is not the update's
        self._keep_norms()
        self.updates += 1

    def commit_epoch(self) -> None:
        """End an epoch whose update the guard has not seen."""
        self._works.commit_epoch()
        self._works.end()


def _scaling_refused(kind: str, work: Work, found: int, expected: str) -> Refused:
    return refused(
        "order.scaling-updates",
        "commit_forward" if kind == "F" else "commit_dgrad",
        f"{found} updates of the FP8 scaling state in {kind} of {work_name(work)}",
        expected,
    )


def _first(values: list[Any] | tuple[Any, ...]) -> Any:
    """Return the tensor of a stage's input or output that Megatron has wrapped."""
    for each in values:
        if each is not None:
            return each
    return None


def _unready(group: Any) -> int:
    """Return how many parameters of a bucket have not registered their gradient."""
    ready = getattr(group, "per_param_grad_ready_counts", ())
    return sum(parameter not in ready for parameter in group.params)

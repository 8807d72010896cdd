"""One guarded step of Megatron-core: a forward-backward loop and the update, as contract calls."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from qeffect.refusals import Refused, refused
from qeffect.schedule.pairing import Work

from .evidence import BackwardPasses, Weights, another_work, not_once, work_name
from .megatron_caches import Caches
from .megatron_plan import LoopPlan
from .megatron_updates import BufferWrites
from .recurring import RecurringSteps
from .works import Event, Works

__all__ = ["LoopStep", "bucket_groups"]

#: What the messages carry.
_MESSAGES = {"SEND_F": "output", "SEND_B": "gradient", "RECV_F": "input", "RECV_B": "arrived"}
_WRAPPERS = (list, tuple)

Owners = tuple[Work | None, Work | None, Work | None]
"""The works that a backward's output, input and output gradient belong to; None if unknown."""

Norm = tuple[str, int, tuple[int, int]]
"""Actions that update the scaling state equally often: their kind, stage and `Caches.mode`."""


def bucket_groups(chunk: Any) -> list[Any]:
    """Return the buckets of a chunk that are reduced over more than one rank."""
    module = chunk
    while module is not None:
        if hasattr(module, "bucket_groups"):
            groups = [*module.bucket_groups, *getattr(module, "expert_parallel_bucket_groups", ())]
            return [group for group in groups if _replicas(group) > 1]
        module = getattr(module, "module", None)
    return []


def _replicas(group: Any) -> int:
    """Return how many ranks reduce a bucket; several optimizers divide them into two groups."""
    inter = getattr(group, "inter_distributed_optimizer_instance_group", None)
    instances = 1 if inter is None else int(inter.size())
    for name in ("intra_distributed_optimizer_instance_group", "data_parallel_group"):
        found = getattr(group, name, None)
        if found is not None:
            return int(found.size()) * instances
    return instances


class LoopStep:
    """
    The forwards, backwards, messages and reductions of one loop, and the update after it.

    Every method that calls the contract raises `Refused` if an action breaks it.

    Args:
        plan: What the loop declares.
        steps: The steps of the rank's contract.
        chunks: The model chunks of the rank.
        caches: The caches of quantized weights.
        weights: The weights of each chunk.
        quantizes: By stage, whether its weights are quantized once in a step.
        buckets: For each chunk, the buckets that are reduced over more than one rank.
        scales: Whether all F of a stage must update the scaling state equally often, and all B too.
        norms: Number of scaling updates per action in earlier steps, for each `Norm`.
    """

    def __init__(
        self,
        plan: LoopPlan,
        steps: RecurringSteps,
        chunks: Sequence[Any],
        caches: Caches,
        weights: Sequence[Weights],
        quantizes: Mapping[int, bool],
        buckets: Sequence[Sequence[Any]],
        *,
        scales: bool = True,
        norms: dict[Norm, int] | None = None,
    ) -> None:
        self.plan, self._works, self._passes = plan, Works(steps), BackwardPasses()
        self._chunks = dict(zip(plan.stages, chunks, strict=True))
        self._caches, self._quantizes, self._scales = caches, quantizes, scales
        self._weights = dict(zip(plan.stages, weights, strict=True))
        self._writes = {stage: BufferWrites(chunk) for stage, chunk in self._chunks.items()}
        self._watched: set[int] = set()  # the stages whose first forward has run
        #: By what a tensor is: a reference to it and whose it is, by its identity.
        self._made: dict[str, dict[int, tuple[weakref.ref[Any], Work]]]
        self._made = {what: {} for what in _MESSAGES.values()}
        self._due = deque((stage, mb) for _, stage, mb in plan.events.get("B", ()))
        self._messages = {kind: deque(plan.events.get(kind, ())) for kind in _MESSAGES}
        self._posting: list[tuple[int, Event]] = []  # receives, with their place in the result
        self._sent: list[Event] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._runs = 0
        self._norms: dict[Norm, int] = {} if norms is None else norms
        self._scaling: dict[Norm, list[tuple[int, int]]] = {}
        self._modes = dict.fromkeys(plan.stages, (0, 0))
        self._inside: Work | None = None  # the backward that runs
        self._before: tuple[int | None, int] = None, 0  # passes when it began: its own, and all
        self._buckets = {
            id(group): (f"{stage}/{n}", stage)
            for stage, groups in zip(plan.stages, buckets, strict=True)
            for n, group in enumerate(groups)
        }
        self._started: set[str] = set()
        self._reduced: set[str] = set()
        self._postponed: list[Callable[[], None]] = []
        self.updates = 0
        self.whole = False

    # Forward and backward

    def forward(self, work: Work, given: Any) -> Event:
        """
        Check a forward; return it as an action of the contract.

        Args:
            work: The forward's stage and microbatch.
            given: The input that was received for it; None on the first stage.
        """
        stage, microbatch = work
        event = "F", stage, microbatch
        self._check_weights("check_forward", stage)
        owner = self._maker("input", given)
        if owner is not None and owner != work:
            raise another_work("check_forward", "input", owner, work)
        if self._forwards[stage]:
            self._works.check(event)
        else:
            self._works.check(event, refresh=any(self._quantizes.values()))
            self._caches.begin()
        self._runs = 0
        return event

    def commit_forward(self, event: Event, output: Any, updates: int) -> None:
        """Commit a forward, given its output and its number of scaling updates."""
        _, stage, microbatch = event
        work = stage, microbatch
        before = self._maker("output", output)
        if self._runs != 1 or before is not None:
            runs = 0 if before is not None else self._runs
            raise not_once("commit_forward", f"F of {work_name(work)}", runs)
        if first := not self._forwards[stage]:
            self._check_caches(work)
        if self._scales:
            self._check_scaling("F", work, updates)
        self._works.commit(event)
        self._forwards[stage] += 1
        tensor = self._note("output", work, output)
        self._passes.watch(work, tensor)
        if first:
            self._weights[stage].renew()
            self._watched.add(stage)

    def _check_caches(self, work: Work) -> None:
        """Check that a stage's first forward quantized its weights; record its mode of graphs."""
        stage, _ = work
        stale = self._caches.stale() if self._quantizes[stage] else None
        if stale is not None:
            raise refused(
                "version.stale-cache",
                "check_forward",
                f"F of {work_name(work)}, the first of the step: {stale}",
                "the stage's first F of a step quantizes the weights that the update left",
            )
        self._modes[stage] = self._caches.mode(self._chunks[stage])

    def entered(self, stage: int) -> None:
        """Record that the forward's own function was called."""
        self._runs += 1
        if self._forwards[stage] == 0 and self._quantizes[stage]:
            self._caches.entered(self._chunks[stage])

    def owners(self, given: Any, output: Any, gradient: Any) -> Owners:
        """
        Return the work that each tensor of a backward belongs to.

        Args:
            given: The input of the backward's forward.
            output: What that forward returned.
            gradient: The gradient of the output; None on the last stage.
        """
        maker = self._maker
        return maker("output", output), maker("input", given), maker("arrived", gradient)

    def backward_of(self, owners: Owners) -> Work:
        """
        Return which backward runs.

        Usually this is the next backward of the declared order. If output, input and gradient all
        belong to another backward, that other backward runs.
        """
        known = [*filter(None, owners)]
        due = self._due.popleft() if self._due else None
        if due is None or (len(known) > 1 and known.count(known[0]) == len(known)):
            return known[0] if known else (self.plan.stages[0], 0)
        return due

    def backward(self, work: Work, owners: Owners) -> Event:
        """
        Check a backward; return it as an action of the contract.

        Args:
            work: Stage and microbatch of the backward that runs.
            owners: What `owners` returned for its tensors.
        """
        stage, microbatch = work
        used, given, arrived = owners
        self._check_weights("check_dgrad", stage)
        event = "B", stage, microbatch
        self._works.check(event, used)
        if arrived is not None and arrived != work:
            raise another_work("check_dgrad", "gradient", arrived, work)
        if given is not None and given != work:
            raise another_work("check_dgrad", "input", given, work)
        self._writes[stage].before(work)
        self._before = self._passes.of(work), self._passes.total
        self._inside = work
        return event

    def leave_backward(self) -> None:
        """Record that the backward raised: what follows is not within it."""
        self._inside = None

    def commit_backward(self, event: Event, gradient: Any, updates: int) -> None:
        """Commit a backward, given its input's gradient and its number of scaling updates."""
        _, stage, microbatch = event
        work = stage, microbatch
        self._inside = None
        before, total = self._before
        passed = self._passes.of(work)
        if before is not None and passed is not None:
            own = passed - before
            if self._passes.total - total > own:
                raise another_work("commit_dgrad", "output", self._passes.last, work)
            if own != 1:
                raise not_once("commit_dgrad", f"B of {work_name(work)}", own)
        self._writes[stage].after(work)
        if self._scales:
            self._check_scaling("B", work, updates)
        self._works.commit(event)
        self._backwards[stage] += 1
        self._note("gradient", work, gradient)
        if self._postponed:
            postponed, self._postponed = self._postponed, []
            for call in postponed:
                call()

    def _check_weights(self, call: str, stage: int) -> None:
        if stage in self._watched:
            self._weights[stage].check(call, stage)

    def _check_scaling(self, kind: str, work: Work, updates: int) -> None:
        """
        Check that each F of a stage, and each B, updates the scaling state equally often.

        The expected number comes from the earlier steps. In a first step two of three F decide, so
        an odd F is named at the latest two F after it ran.
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

    # Whose a tensor is

    def _note(self, what: str, work: Work, value: Any) -> Any:
        """Record whose a tensor is; return the tensor without Megatron's wrapper."""
        tensor = _first(value) if isinstance(value, _WRAPPERS) else value
        if tensor is not None:
            self._made[what][id(tensor)] = weakref.ref(tensor), work
        return tensor

    def _maker(self, what: str, value: Any) -> Work | None:
        if value is None:
            return None
        tensor = _first(value) if isinstance(value, _WRAPPERS) else value
        if (found := self._made[what].get(id(tensor))) is None:
            return None
        kept, work = found
        return work if kept() is tensor else None

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
        if output is not None:
            self._send("SEND_F", output)
        if gradient is not None:
            self._send("SEND_B", gradient)
        self._posting.clear()
        if before:
            self._receive("RECV_F", 0)
        if behind:
            self._receive("RECV_B", 1)

    def _send(self, kind: str, value: Any) -> None:
        maker = self._maker(_MESSAGES[kind], value)
        event = self._next(kind, maker)
        self._works.post_message(event, used=maker)
        self._sent.append(event)

    def _receive(self, kind: str, place: int) -> None:
        event = self._next(kind, None)
        self._posting.append((place, event))
        self._works.post_message(event)

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
            self._note(_MESSAGES[kind], (stage, microbatch), found[place])
        if ended:
            self._finish_sends()

    def _next(self, kind: str, maker: Work | None) -> Event:
        queue = self._messages[kind]
        if queue:
            return queue.popleft()
        raise refused(
            "order.reordered",
            "read" if kind.startswith("SEND") else "post_receive",
            f"one more {kind}" + ("" if maker is None else f", of {work_name(maker)}"),
            f"no more {kind} than {self.plan.source} has",
        )

    def _finish_sends(self) -> None:
        if self._sent:
            self._works.finish_sends(tuple(self._sent))
            self._sent.clear()

    # Reductions

    def start_reduction(self, group: Any) -> None:
        """Check the reduction of a bucket of gradients, before it starts."""
        if self._inside is not None:
            self._writes[self._inside[0]].reducing()
        if (found := self._buckets.get(id(group))) is None:
            return
        name, stage = found
        if self._inside is not None and self._inside[0] == stage:
            last = self._backwards[stage] == self.plan.microbatches - 1
            unready = _unready(group)
            if not last or unready:
                also = f", without the gradients of {unready} parameters" if unready else ""
                raise refused(
                    "reduction.incomplete",
                    "start_reduction",
                    f"the reduction of bucket {name} during the backward of microbatch "
                    f"{self._inside[1]}, after {self._backwards[stage]} other backwards{also}",
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
        if (found := self._buckets.get(id(group))) is None:
            return
        name, stage = found
        if name in self._reduced or name not in self._started:
            return
        self._reduced.add(name)
        finish = partial(self._works.finish_reduction, name)
        if self._inside is not None and self._inside[0] == stage:
            self._postponed.append(finish)
        else:
            finish()

    # The end of the loop, and the update

    def finish(self) -> None:
        """End the loop: Megatron has waited for every send, and every backward has run."""
        self._finish_sends()
        self._check_few_scalings()
        for stage in self.plan.stages:
            self._check_weights("finalize", stage)
            self._works.finalize(stage)
        self.whole = True

    def check_update(self) -> bool:
        """Check the update; return True."""
        for stage in self.plan.stages:
            self._check_weights("check_update", stage)
        self._works.check_update()
        return True

    def commit_update(self) -> None:
        """Commit an update that ran."""
        self._works.commit_update()
        self._works.end()
        self._watched.clear()
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

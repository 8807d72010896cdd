"""
The cases of a comparison. Together the cases contain every pair of values of dimensions, order,
amax history and gradient destination.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
import torch

from qeffect.schedule.torch_tables import torch_schedule

from ...backends.layers import LayerConfig
from ...step.memory.arena import RULES, Rule
from ...step.plan.order import ComputeAction, Kind, Order
from .native import NativeRule, rule_for

Scaling = Literal["delayed", "current", "block"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@attrs.frozen
class Case:
    """
    One case of a comparison: dimensions, order of actions, and gradient destinations.

    Args:
        name: Name of the case in reports.
        schedule: Name of a schedule class of torch: the case runs the actions of one rank in the
            class's table. With `random`, the case runs a random order; with `given`, the order in
            `cells`.
        rank: The rank whose actions are run, or the seed of a random order.
        history: Number of entries of each amax history.
        rule: Which memory a weight-gradient action (dW) writes to, such as `accumulate`.
        dtype: Data type of the gradient destinations.
        fused_qkv: Whether query, key and value of attention share one parameter, instead of three.
        hidden: Width of the residual stream.
        ffn: Width of the MLP.
        heads: Number of attention heads per layer.
        sequence: Tokens per microbatch.
        steps: Number of optimizer steps.
        scaling: The FP8 recipe: how the scales of casts are chosen, such as `delayed`.
        num_layers: Layers in each stage.
        cells: If the schedule is `given`: the actions in order, each as stage, action and
            microbatch, such as `0F0 0I0 0W0`.
        pp: Number of ranks in the schedule's table.
        vpp: Number of stages per rank.
        microbatches: Microbatches per step.
        dropout: Probability with which each layer drops elements of its two residual branches.
        recorded_from: The first step that is recorded. Later steps depend on every bit of earlier
            steps, so a large case records only its last step.
    """

    name: str
    schedule: str
    rank: int
    history: int
    rule: Rule
    dtype: str = "bfloat16"
    fused_qkv: bool = True
    hidden: int = 512
    ffn: int = 2048
    heads: int = 4
    sequence: int = 256
    steps: int = 20
    scaling: Scaling = "delayed"
    num_layers: int = 1
    cells: str = ""
    pp: int = 2
    vpp: int = 2
    microbatches: int = 4
    recorded_from: int = 0
    dropout: float = 0.0

    @property
    def config(self) -> LayerConfig:
        """The layer dimensions, in the form that backends take."""
        return LayerConfig(
            self.hidden, self.ffn, self.heads, self.sequence, fused_qkv=self.fused_qkv
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Data type of the gradient destinations."""
        return DTYPES[self.dtype]

    def order(self) -> Order:
        """The order of F, dI and dW."""
        if self.schedule == "random":
            return random_order(self.rank)
        if self.schedule == "given":
            return Order.parse(self.cells)
        table = torch_schedule(
            self.schedule, pp=self.pp, vpp=self.vpp, microbatches=self.microbatches
        )
        return Order.of_rank(table, self.rank)

    def with_steps(self, steps: int) -> Case:
        """The same case with another number of optimizer steps."""
        return attrs.evolve(self, steps=steps, recorded_from=min(self.recorded_from, steps - 1))

    def native_rule(self, backend: str) -> NativeRule | None:
        """
        How native training accumulates the same sum of gradients. The result is None if the library
        cannot form that sum; the reference is then eager execution with separate dI and dW.
        """
        rule = rule_for(self.order(), self.rule, self.torch_dtype)
        exact = rule in ("dgrad_order", "wgrad_order")
        if backend != "reference" and (exact or (rule == "main_grad" and not self.fused_qkv)):
            return None
        return rule

    def to_json(self) -> dict[str, Any]:
        """The case as plain data, for reports and for other processes."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """Read the case that `to_json` wrote."""
        return cls(**data)


def random_order(seed: int, *, num_stages: int = 2, num_microbatches: int = 4) -> Order:
    """
    A legal order with random delays: for each microbatch of a stage, F precedes dI, and dI precedes
    dW.
    """
    rng = random.Random(seed)
    after = {Kind.FORWARD: Kind.DGRAD, Kind.DGRAD: Kind.WGRAD}
    ready = [
        ComputeAction(Kind.FORWARD, stage, microbatch)
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
    ]
    steps = []
    while ready:
        step = ready.pop(rng.randrange(len(ready)))
        steps.append(step)
        if step.kind in after:
            ready.append(step._replace(kind=after[step.kind]))
    return Order(tuple(steps), f"random, seed {seed}")


_IL, _IZB, _ZBV = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)

#: Hidden 512, 20 steps. Every pair of an order and a destination, of an order and a history, and of
#: a destination and a history occurs.
STEPWISE: tuple[Case, ...] = (
    Case("il-copied-h4", _IL, 0, 4, "copied"),
    Case("il-arena-h64", _IL, 1, 64, "per_microbatch"),
    Case("il-accumulate-h4", _IL, 0, 4, "accumulate", "float32"),
    Case("izb-copied-h64", _IZB, 1, 64, "copied"),
    Case("izb-arena-h4", _IZB, 0, 4, "per_microbatch", fused_qkv=False),
    Case("izb-accumulate-h64", _IZB, 0, 64, "accumulate"),
    Case("zbv-copied-h4", _ZBV, 0, 4, "copied", fused_qkv=False),
    Case("zbv-arena-h64", _ZBV, 1, 64, "per_microbatch"),
    Case("zbv-accumulate-h64", _ZBV, 1, 64, "accumulate", "float32"),
    Case("zbv-accumulate-h4", _ZBV, 0, 4, "accumulate"),
    Case("random-copied-h64", "random", 3, 64, "copied"),
    Case("random-arena-h4", "random", 5, 4, "per_microbatch"),
    Case("random-accumulate-h4", "random", 7, 4, "accumulate", "float32", fused_qkv=False),
    Case("random-accumulate-h64", "random", 9, 64, "accumulate", "float32"),
    Case("zbv-two-layers-h4", _ZBV, 1, 4, "accumulate", num_layers=2),
)

_WIDE: dict[str, Any] = {"hidden": 2048, "ffn": 8192, "heads": 16, "steps": 6}

#: Hidden 2,048, 6 steps.
WIDE: tuple[Case, ...] = (
    Case("wide-il-copied-h4", _IL, 0, 4, "copied", **_WIDE),
    Case("wide-izb-arena-h64", _IZB, 1, 64, "per_microbatch", **_WIDE),
    Case("wide-zbv-accumulate-h4", _ZBV, 1, 4, "accumulate", "float32", **_WIDE),
)

#: FP8 recipes without delayed scaling's state. Their comparison leaves out the categories that
#: these recipes lack.
RECIPES: tuple[Case, ...] = (
    Case("current-scaling", _ZBV, 1, 4, "copied", scaling="current", steps=6),
    Case("block-scaling", _ZBV, 1, 4, "copied", scaling="block", steps=6),
)


def _timed(name: str, rule: Rule, hidden: int, ffn: int, sequence: int, microbatches: int) -> Case:
    return Case(
        name,
        _IL,
        0,
        1024,
        rule,
        hidden=hidden,
        ffn=ffn,
        heads=hidden // 128,
        sequence=sequence,
        steps=5,
        pp=1,
        microbatches=microbatches,
        recorded_from=4,
    )


#: Cases with the shapes, orders and amax histories of the step table; only the last step is
#: compared.
TIMED: tuple[Case, ...] = (
    _timed("timed-h2048-s256-m4-copied", "copied", 2048, 8192, 256, 4),
    _timed("timed-h2048-s256-m4-accumulate", "accumulate", 2048, 8192, 256, 4),
    _timed("timed-h4096-s256-m8-arena", "per_microbatch", 4096, 11008, 256, 8),
    _timed("timed-h4096-s256-m8-accumulate", "accumulate", 4096, 11008, 256, 8),
    _timed("timed-h4096-s4096-m4-accumulate", "accumulate", 4096, 11008, 4096, 4),
)

_SMALL: dict[str, Any] = {"hidden": 128, "ffn": 256, "heads": 2, "sequence": 64}


def _matrix() -> Iterator[Case]:
    rows = itertools.product(((_IL, "il"), (_IZB, "izb"), (_ZBV, "zbv")), (0, 1))
    for ((schedule, short), rank), history, rule, fused in itertools.product(
        rows, (4, 16, 64), RULES, (True, False)
    ):
        yield Case(
            f"{short}{rank}-{rule}-h{history}-{'fused' if fused else 'split'}",
            schedule,
            rank,
            history,
            rule,
            "float32" if rule == "accumulate" and fused else "bfloat16",
            fused_qkv=fused,
            **_SMALL,
        )


#: Every rank's row of every table, every history, every destination, fused and split QKV, at hidden
#: 128 for 20 steps: small enough for a CPU. On a device their sequences are longer.
MATRIX: tuple[Case, ...] = tuple(_matrix())

SETS: Mapping[str, tuple[Case, ...]] = {
    "stepwise": STEPWISE,
    "wide": WIDE,
    "recipes": RECIPES,
    "timed": TIMED,
    "matrix": MATRIX,
}

#: The sets of cases that `compare` runs by default.
DEFAULT_SETS = ("stepwise", "wide", "recipes", "timed")


def shrink(case: Case) -> Case:
    """The same case with hidden size 128, for a CPU; a smaller case stays unchanged."""
    if case.hidden <= _SMALL["hidden"]:
        return case
    return attrs.evolve(case, **_SMALL).with_steps(min(case.steps, 6))


#: Minimum number of tokens; shorter sequences cause an illegal memory access under capture
#: (`probes`).
SHORTEST = 128


def fit_to_device(case: Case) -> Case:
    """The same case, with sequences of at least `SHORTEST` tokens."""
    return attrs.evolve(case, sequence=max(case.sequence, SHORTEST))

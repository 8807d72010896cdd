"""What the guard of Megatron-core showed on two GPUs, as a table on its page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from tests.docs.blocks import ROOT, load, markdown
from tests.gpu.guard_host_time import KEPT as HOST
from tests.gpu.guard_megatron import (
    FFN,
    GPU_FAULTS,
    KEPT,
    SEQUENCE,
    Price,
    between,
    cost,
    found,
    tenth,
)

__all__ = ["BLOCKS", "PAGE", "on_two_gpus"]

PAGE = ROOT / "docs" / "megatron.md"

#: The text of each claim on the page, by its name in `found`.
CLAIMS: Mapping[str, str] = {
    "the guard keeps the losses": "guarded and unguarded runs have the same losses",
    "legal modes are not refused": "the guard refuses no legal mode",
    "legal modes have the same losses": "all legal modes have the same losses",
    "local graphs fall behind unguarded": (
        "without the guard, local graphs give other losses than the legal modes"
    ),
    "reported stale": "manner `report` reports the stale weights of local graphs",
    "reporting keeps the losses": "manner `report` does not change the losses of local graphs",
    "refused stale": "manner `refuse` refuses the stale weights of local graphs",
    "a thousand steps are not refused": (
        "the guard refuses no step in legal runs of 1,000 steps (eager and with full-iteration "
        "graphs; with these graphs, the guard checks only the steps before the first replay)"
    ),
    "every fault is named": (
        f"after each of {len(GPU_FAULTS)} injected faults (eager), the first clause that the guard "
        "names is the expected clause"
    ),
    "price at most 1% of the median step": "the guard adds at most 1% to the median step",
    "price at most 1% of a quiet step": (
        "the guard adds at most 1% to a quiet step (the tenth percentile)"
    ),
    "price at most 30 us for an F or a B": (
        "the guard adds at most 30 microseconds per F or B with its messages"
    ),
}


def on_two_gpus() -> str:
    """Each claim about the guard, whether the run showed it, and what the guard costs."""
    report = load(KEPT)
    runs, where = report["runs"], report["environment"]
    rows = [
        (CLAIMS.get(name, name), "yes" if shown else "no") for name, shown in found(runs).items()
    ]
    ranks = runs["none refuse price"]
    quiet = max(tenth(rank["off"]) for rank in ranks)
    median = max(statistics.median(rank["off"]) for rank in ranks)
    own, whole = (
        [price for rank in ranks if (price := cost(rank, turn)) is not None]
        for turn in ("on", "calls")
    )
    limits = [" and ".join(f"{us:.0f}" for us in between(rank)) for rank in ranks]
    return "\n\n".join(
        (
            f"2 x {where['gpu']}, torch {where['packages']['torch']}, Transformer Engine "
            f"{where['packages']['transformer-engine']}, commit `{where['commit'][:12]}` "
            "([report](../tests/megatron/two_gpus.json)):",
            markdown(("claim", "shown"), rows),
            "The guard's cost was measured without a log. Each step is eager, with four "
            "microbatches and one layer per virtual stage (hidden 4096, sequence "
            f"{SEQUENCE}, ffn {FFN}). A quiet step (the tenth percentile of the steps) takes "
            f"{quiet:.0f} ms, the median step {median:.0f} ms. On the rank where the guard costs "
            f"more, the guard adds {most(own, 'tenth'):.1%} to a quiet step and "
            f"{most(own, 'median'):.2%} to the median step, which is {most(own, 'us'):.0f} "
            "microseconds for each F and each B with their messages. In these steps the guard "
            "compared its calls of the contract with the calls of an earlier step, and committed "
            "the step in one call. If the guard instead makes every call of the contract, it adds "
            f"{most(whole, 'tenth'):.1%} to a quiet step and {most(whole, 'median'):.2%} to the "
            f"median step, which is {most(whole, 'us'):.0f} microseconds for each F and each B. "
            "The times of steps vary by more than the guard adds. So each round timed a guarded "
            "step and an unguarded step, one directly after the other. With a confidence of 95%, "
            f"the median difference for each F and each B lies between {limits[0]} microseconds "
            f"on the first rank, and between {limits[1]} microseconds on the second rank.",
            inside_the_guard(),
        )
    )


def inside_the_guard() -> str:
    """How much time the host spends inside the guard's code, by a clock at the guard's borders."""
    report = load(HOST)
    where, costs = report["environment"], report["costs"]
    median = " and ".join(f"{one['median_us']:.0f}" for one in costs)
    tenth_us = min(one["tenth_us"] for one in costs)
    ninetieth = max(one["ninetieth_us"] for one in costs)
    steps = len(report["ranks"][0]["on"])
    return (
        f"A second measurement (commit `{where['commit'][:12]}`, {report['gpus']} x "
        f"{where['gpu']}, host with {where['cpu']}, [report](../tests/megatron/host_time.json)) "
        "trains the same model, and reads a clock whenever the host enters or leaves the guard's "
        "code. For each F and each B with their messages, the host spends "
        f"{median} microseconds inside the guard on the two ranks (medians of {steps} steps; 80% "
        f"of the steps: {tenth_us:.0f} to {ninetieth:.0f}). The time that reading the clock takes "
        f"is subtracted. The goal is at most {report['goal_us']:.0f} microseconds."
    )


def most(prices: list[Price], name: str) -> float:
    """The highest price of the ranks."""
    return max(float(getattr(price, name)) for price in prices)


BLOCKS: Mapping[str, Callable[[], str]] = {"two GPUs": on_two_gpus}

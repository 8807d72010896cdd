"""What the guard of Megatron-core showed on two GPUs, as a table on its page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from tests.docs.blocks import ROOT, load, markdown

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
    "a thousand steps are not refused": "the guard refuses no step in legal runs of 1,000 steps",
    "every fault is named": "for every injected fault the guard first names the expected clause",
    "price at most 1% of a step": "the guard takes at most 1% of a step",
    "price at most 30 us for an F or a B": (
        "the guard takes at most 30 microseconds of processor time per F or B with its messages"
    ),
}


def on_two_gpus() -> str:
    """Each claim about the guard, whether the run showed it, and what the guard costs."""
    from tests.gpu.guard_megatron import KEPT, cost, found, tenth

    report = load(KEPT)
    runs, where = report["runs"], report["environment"]
    rows = [
        (CLAIMS.get(name, name), "yes" if shown else "no") for name, shown in found(runs).items()
    ]
    ranks = runs["none refuse price"]
    (share, us), (whole, each) = (
        max(found for rank in ranks if (found := cost(rank, turn)) is not None)
        for turn in ("on", "calls")
    )
    step = max(tenth(rank["off"]) for rank in ranks)
    median = max(map(more, ranks))
    return "\n\n".join(
        (
            f"2 x {where['gpu']}, torch {where['packages']['torch']}, Transformer Engine "
            f"{where['packages']['transformer-engine']}, commit `{where['commit'][:12]}` "
            "([report](../tests/megatron/two_gpus.json)):",
            markdown(("claim", "shown"), rows),
            f"A step takes {step:.0f} ms: one layer for each virtual stage, four microbatches. The "
            f"guard adds {share:.1%}, and {us:.0f} microseconds of processor time for each F and "
            "each B with their messages. If the guard makes every call in every step, it adds "
            f"{whole:.1%} and {each:.0f} microseconds. These figures compare the tenth percentiles "
            f"of the steps. The medians differ by {median:.1%}; other work on the host slows those "
            "steps.",
        )
    )


def more(rank: Mapping[str, list[float]]) -> float:
    """How much more time the median guarded step of a rank takes, as a share."""
    on, off = statistics.median(rank["on"]), statistics.median(rank["off"])
    return on / off - 1


BLOCKS: Mapping[str, Callable[[], str]] = {"two GPUs": on_two_gpus}

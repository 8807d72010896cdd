"""What the guard of Megatron-core showed on two GPUs, as a table on its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.docs.blocks import ROOT, load, markdown

__all__ = ["BLOCKS", "PAGE", "on_two_gpus"]

PAGE = ROOT / "docs" / "megatron.md"


def on_two_gpus() -> str:
    """What was to be shown, whether it was, and what the guard costs."""
    from tests.gpu.guard_megatron import KEPT, cost, found

    report = load(KEPT)
    runs, where = report["runs"], report["environment"]
    rows = [(name, "yes" if shown else "no") for name, shown in found(runs).items()]
    ranks = runs["none refuse price"]
    costs = [each for each in map(cost, ranks) if each is not None]
    rounds = [ms for rank in ranks for turn in ("off", "on") for ms in rank[turn]]
    share, us = max(costs)
    return "\n\n".join(
        (
            f"2 x {where['gpu']}, torch {where['packages']['torch']}, Transformer Engine "
            f"{where['packages']['transformer-engine']}, commit `{where['commit'][:12]}` "
            "([report](../tests/megatron/two_gpus.json)):",
            markdown(("what was to be shown", "shown"), rows),
            f"The fastest guarded round takes {share:.1%} more time than the fastest unguarded "
            f"one: {us:.0f} microseconds for each F and each B with their messages. Rounds take "
            f"{min(rounds):.0f} to {max(rounds):.0f} ms, so medians of rounds would say less.",
        )
    )


BLOCKS: Mapping[str, Callable[[], str]] = {"two GPUs": on_two_gpus}

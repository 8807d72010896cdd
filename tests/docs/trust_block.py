"""What each guard takes on trust, as a table on its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from qeffect.guards import trust
from tests.docs.blocks import ROOT, markdown

__all__ = ["PAGES", "on_trust"]

#: The sentences of each guard's `on_trust`, by page.
PAGES: Mapping[Path, Mapping[str, trust.Trust]] = {
    ROOT / "docs" / "pipelining.md": trust.PIPELINING,
    ROOT / "docs" / "torchtitan.md": trust.PIPELINING,
    ROOT / "docs" / "deepspeed.md": trust.DEEPSPEED,
    ROOT / "docs" / "megatron.md": trust.MEGATRON,
}


def on_trust(sentences: Mapping[str, trust.Trust]) -> str:
    """The sentences of a guard, and the condition under which each sentence applies."""
    rows = [(each.said(stage="N", kind="KIND"), each.when) for each in sentences.values()]
    return markdown(("taken on trust", "when"), rows)


#: The blocks of each page.
BLOCKS: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    page: {"trust": partial(on_trust, sentences)} for page, sentences in PAGES.items()
}

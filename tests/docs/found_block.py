"""The table of defects found in other software: a row for each text for upstream."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from tests.docs.blocks import ROOT, markdown

__all__ = ["FOUND", "FOUND_TEXTS", "Found", "found"]

#: The folder of the texts for upstream.
FOUND_TEXTS = ROOT / "tests" / "failures"
_TITLE = re.compile(r"# (?P<what>.*) \((?P<versions>[^()]*)\)")


@attrs.frozen
class Found:
    """
    A defect that raises no error.

    Args:
        text: The file of the text for upstream; its title says what happens, and in which versions.
        clause: The clause that names the defect.
        command: The command that refuses a run before its start; None if only a guard sees it.
        page: The page of the guard that detects the defect during a run.
        upstream: Issues and pull requests that report it.
    """

    text: str
    clause: str
    command: str | None
    page: str
    upstream: Sequence[str] = ()

    def title(self) -> tuple[str, str]:
        """What happens, and in which versions."""
        first = (FOUND_TEXTS / self.text).read_text(encoding="utf-8").partition("\n")[0]
        match = _TITLE.fullmatch(first)
        if match is None:
            raise ValueError(f"{self.text}: the title has no versions in parentheses")
        return match["what"], match["versions"]


FOUND = (
    Found(
        "torch_deferred_receives.md",
        "schedule.message-order",
        "qeffect check --torch",
        "docs/pipelining.md",
    ),
    Found(
        "torch_replicas_not_reduced.md",
        "reduction.missing",
        None,
        "docs/pipelining.md",
        ("pytorch/pytorch#144530",),
    ),
    Found(
        "torch_inferred_shapes_reduce_early.md",
        "reduction.incomplete",
        None,
        "docs/pipelining.md",
    ),
    Found(
        "torchtitan_lost_gradient.md",
        "ownership.work-not-queued",
        None,
        "docs/torchtitan.md",
    ),
    Found(
        "megatron_stale_weights.md",
        "version.stale-cache",
        None,
        "docs/megatron.md",
    ),
    Found(
        "megatron_batched_messages.md",
        "schedule.message-order",
        "qeffect check --megatron",
        "docs/megatron.md",
        (
            "NVIDIA/Megatron-LM#750",
            "NVIDIA/Megatron-LM#1450",
            "NVIDIA/Megatron-LM#1485",
        ),
    ),
)


def found() -> str:
    """The defects, with the command or guard that refuses each, and the upstream issues."""
    rows = []
    for each in FOUND:
        what, versions = each.title()
        place = (FOUND_TEXTS / each.text).relative_to(ROOT).as_posix()
        by = f"[guard]({each.page})"
        by = by if each.command is None else f"`{each.command}`, {by}"
        rows.append(
            (versions, f"[{what}]({place})", f"`{each.clause}`: {by}", _known(each.upstream))
        )
    header = ("software", "silent defect, with a reproducer", "refused by", "upstream")
    return markdown(header, rows)


def _known(upstream: Sequence[str]) -> str:
    if not upstream:
        return "no report found"
    repository = upstream[0].partition("#")[0]
    return f"{repository} " + ", ".join(f"#{name.partition('#')[2]}" for name in upstream)

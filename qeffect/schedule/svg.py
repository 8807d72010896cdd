"""
Colours and SVG elements of schedule pictures: boxes, arrows, badges and labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from .actions import Action, Kind
from .findings import Finding

__all__ = [
    "COLOURS",
    "FAINT",
    "GREY",
    "INK",
    "PALE",
    "PINK",
    "RED",
    "badge",
    "box",
    "label",
    "lightened",
    "note",
    "style",
]

#: Colour of each kind of action, as in torch's schedule visualizer.
COLOURS: Final[Mapping[Kind, str]] = {
    Kind.FORWARD: "#2f5fd0",
    Kind.DGRAD: "#0f8080",
    Kind.WGRAD: "#2c8a3d",
    Kind.BACKWARD: "#e07b12",
    Kind.OVERLAP_F_B: "#7a45b8",
    Kind.REDUCE_GRAD: "#5b6472",
}

RED: Final = "#d11a2a"
INK: Final = "#1c2330"
FAINT: Final = "#8a93a3"
GREY: Final = "#5b6472"
PINK: Final = "#fdf1f2"
PALE: Final = "#eef1f5"


def style(role: str) -> tuple[str, str, str]:
    """Return the colour, arrowhead and dash pattern for an entry with this role in a finding."""
    return (RED, "red", "4 3") if role in ("picked", "waits") else (GREY, "ink", "")


def box(width: int, fill: str, stroke: str = "none", thick: float = 0, dash: str = "") -> str:
    """Return the SVG of a coloured box in the legend."""
    inset = thick / 2
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{inset:g}" y="{inset:g}" width="{width - thick:g}" height="{11 - thick:g}" '
        f'rx="2" fill="{fill}" stroke="{stroke}" stroke-width="{thick:g}"{dashed}/>'
    )


def arrow(path: str, colour: str, head: str, dash: str, thick: float = 1.8) -> str:
    """Return the SVG of a line that ends in an arrowhead."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"{dashed} '
        f'marker-end="url(#{head})"/>'
    )


def badge(x: float, y: float, radius: float) -> str:
    """Return the SVG of the cross that marks the refused entry."""
    arm = 0.37 * radius
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{RED}" stroke="#ffffff" '
        f'stroke-width="1.5"/><path d="M{x - arm:g},{y - arm:g} l{2 * arm:g},{2 * arm:g} '
        f'm0,{-2 * arm:g} l{-2 * arm:g},{2 * arm:g}" stroke="#ffffff" '
        f'stroke-width="{radius / 4:g}" stroke-linecap="round"/>'
    )


def label(action: Action) -> list[str]:
    """Return the lines of text inside an action's box."""
    if action.kind is Kind.REDUCE_GRAD:
        return [f"{action.stage}\u03a3"]
    return [str(leaf) for leaf in action.leaves()]


def lightened(colour: str, share: float) -> str:
    """Return a colour mixed with white; a share of 0 keeps the colour, a share of 1 is white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def note(
    finding: Finding, where: str, lines: Sequence[str], left: float, top: float, width: float
) -> Iterator[str]:
    """
    Yield the box that explains a finding.

    Args:
        finding: The finding; its clause, rank, step and action form the heading.
        where: Text after the step number in the heading.
        lines: Lines of the explanation.
        left: Left edge of the box, in pixels.
        top: Top edge of the box, in pixels.
        width: Width of the box, in pixels.
    """
    height = 19 * len(lines) + 28
    yield (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" '
        f'rx="4" fill="{PINK}"/><rect x="{left}" y="{top}" width="4" height="{height}" '
        f'fill="{RED}"/>'
    )
    place = "" if finding.rank is None else f"rank {finding.rank}"
    if finding.step is not None:
        place += f", step {finding.step}{where}: {finding.action}"
    yield (
        f'<text x="{left + 16}" y="{top + 20}" font-size="12" font-weight="bold" '
        f'fill="{RED}">{escape(finding.clause)}<tspan dx="10" font-weight="normal" '
        f'fill="{GREY}">{escape(place)}</tspan></text>'
    )
    for i, line in enumerate(lines):
        yield (
            f'<text x="{left + 16}" y="{top + 40 + 18 * i}" font-size="11.5" fill="{INK}">'
            f"{escape(line)}</text>"
        )

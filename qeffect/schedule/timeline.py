"""
A schedule as a picture: one self-contained SVG, in the colours of torch's schedule visualizer.

F is blue, I teal, W green, B orange, an overlap purple, idle time white; a rank's later chunks are
lighter. The refused entry is outlined in red and its clause stands below. For a pairing, one arc
leads from the work that a weight gradient owns and another from the work that it would be given.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from qeffect.schedule.actions import Action, Kind, Schedule
from qeffect.schedule.findings import Finding, Place
from qeffect.schedule.layout import Layout, Placed, layout

COLOURS = {
    Kind.FORWARD: "#2f5fd0",
    Kind.DGRAD: "#0f8080",
    Kind.WGRAD: "#2c8a3d",
    Kind.BACKWARD: "#e07b12",
    Kind.OVERLAP_F_B: "#7a45b8",
    Kind.REDUCE_GRAD: "#5b6472",
}
_LEGEND = {
    Kind.FORWARD: "forward F",
    Kind.DGRAD: "input gradient I",
    Kind.WGRAD: "weight gradient W",
    Kind.BACKWARD: "full backward B",
    Kind.OVERLAP_F_B: "overlapped F and B",
    Kind.REDUCE_GRAD: "gradient reduction \u03a3",
}
_RED, _INK, _FAINT, _OTHER = "#d11a2a", "#1c2330", "#8a93a3", "#5b6472"
_LEFT, _RIGHT, _ROW, _ENTRY = 76, 24, 62, 30
_NARROW, _WIDE, _MARK = 28, 36, 9
_CHARACTERS = 0.146
_LEAST = 780


def timeline(schedule: Schedule, finding: Finding | None = None, *, window: int | None = 64) -> str:
    """
    Draw a schedule, with a finding marked.

    Args:
        schedule: The schedule.
        finding: What to mark; without it the picture says that nothing was refused.
        window: The most columns to draw; a longer schedule is cut around the refused entry. `None`
            draws all.

    Returns:
        The text of an SVG file.
    """
    return "\n".join(_Picture(schedule, finding, window).lines()) + "\n"


class _Picture:
    def __init__(self, schedule: Schedule, finding: Finding | None, window: int | None) -> None:
        self.schedule = schedule
        self.finding = finding
        self.layout: Layout = layout(schedule)
        self.by_place = {(entry.rank, entry.step): entry for entry in self.layout.entries}
        self.refused = (
            None
            if finding is None or finding.rank is None or finding.step is None
            else self.by_place.get((finding.rank, finding.step))
        )
        self.first, self.last = self._window(window)
        columns = self.last - self.first
        longest = max(
            (len(line) for c in self.layout.entries for line in _label(c.action)), default=3
        )
        self.unit = _WIDE if columns <= 32 or longest > 4 else _NARROW
        self.width = max(_LEFT + columns * self.unit + _RIGHT, _LEAST)
        self.top = 92
        self.bottom = self.top + schedule.num_ranks * _ROW

    def _window(self, window: int | None) -> tuple[int, int]:
        end = self.layout.end
        if window is None or end <= window:
            return 0, end
        centre = self.refused.start if self.refused is not None else 0
        first = min(max(0, centre - window // 2), end - window)
        return first, first + window

    def x(self, time: float) -> float:
        return _LEFT + (time - self.first) * self.unit

    def y(self, rank: int) -> float:
        return self.top + rank * _ROW + (_ROW - _ENTRY) - 6

    def visible(self, entry: Placed) -> bool:
        return entry.start + entry.length >= self.first and entry.start <= self.last

    def lines(self) -> Iterator[str]:
        note = self._explanation()
        height = self.bottom + (30 + 19 * len(note) if note else 14) + 16
        title = f"Schedule {self.schedule.source}"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" role="img" aria-label={quoteattr(title)} '
            f'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" font-size="11">'
        )
        yield f"<title>{escape(title)}</title>"
        yield "<defs>"
        for name, colour in (("red", _RED), ("ink", _OTHER)):
            yield (
                f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="4.5" '
                f'markerHeight="4.5" orient="auto"><path d="M0,0.8 L7.5,4 L0,7.2 z" '
                f'fill="{colour}"/></marker>'
            )
        yield "</defs>"
        yield f'<rect width="{self.width}" height="{height}" fill="#ffffff"/>'
        yield from self._head()
        yield from self._rows()
        for entry in self.layout.entries:
            if self.visible(entry) and entry.length:
                yield from self._entry(entry)
        yield from self._marks()
        yield from self._note(note)
        yield "</svg>"

    def _head(self) -> Iterator[str]:
        s = self.schedule
        yield (
            f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold" fill="{_INK}">'
            f"{escape(s.source)}</text>"
        )
        counts = f"{s.num_ranks} ranks, {s.num_stages} stages, {s.num_microbatches} microbatches"
        state = "nothing refused" if self.finding is None else f"refused: {self.finding.clause}"
        colour = _OTHER if self.finding is None else _RED
        yield (
            f'<text x="{_LEFT}" y="42" fill="{_OTHER}">{counts} <tspan dx="6" font-weight="bold" '
            f'fill="{colour}">{escape(state)}</tspan></text>'
        )
        x = float(_LEFT)
        used = {entry.action.kind for entry in self.layout.entries if entry.length}
        for kind, name in _LEGEND.items():
            if kind in used:
                yield f'<rect x="{x}" y="53" width="11" height="11" rx="2" fill="{COLOURS[kind]}"/>'
                yield f'<text x="{x + 16}" y="62.5" fill="{_OTHER}">{name}</text>'
                x += 16 + 6.6 * len(name) + 14
        yield (
            f'<rect x="{x}" y="53.5" width="10" height="10" rx="2" fill="#ffffff" '
            f'stroke="#c3cad4"/><text x="{x + 16}" y="62.5" fill="{_OTHER}">idle</text>'
        )

    def _rows(self) -> Iterator[str]:
        end = self.x(self.last)
        for time in range(self.first, self.last, 5 if self.last - self.first > 12 else 1):
            yield (
                f'<text x="{self.x(time + 0.5)}" y="{self.top + 8}" font-size="9" '
                f'text-anchor="middle" fill="{_FAINT}">{time}</text>'
            )
        yield (
            f'<text x="{_LEFT - 10}" y="{self.top + 8}" font-size="9" text-anchor="end" '
            f'fill="{_FAINT}">{self.layout.unit}</text>'
        )
        for rank in range(self.schedule.num_ranks):
            y = self.y(rank)
            blamed = self.finding is not None and self.finding.rank == rank
            yield (
                f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end" font-weight="bold" '
                f'fill="{_RED if blamed else _INK}">rank {rank}</text>'
            )
            stages = ", ".join(map(str, self.schedule.stages_of(rank)))
            yield (
                f'<text x="{_LEFT - 10}" y="{y + 27}" font-size="9" text-anchor="end" '
                f'fill="{_FAINT}">stage {escape(stages)}</text>'
            )
            yield (
                f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT}" height="{_ENTRY}" '
                f'fill="#ffffff" stroke="#dfe3ea"/>'
            )
        if self.first > 0:
            yield (
                f'<text x="{_LEFT}" y="{self.bottom + 8}" fill="{_FAINT}">(earlier part cut)</text>'
            )
        if self.last < self.layout.end:
            yield (
                f'<text x="{end}" y="{self.bottom + 8}" text-anchor="end" fill="{_FAINT}">'
                f"(later part cut)</text>"
            )

    def _entry(self, entry: Placed) -> Iterator[str]:
        x = max(self.x(entry.start), _LEFT)
        width = min(self.x(entry.start + entry.length), self.x(self.last)) - x
        if width <= 1:
            return
        y = self.y(entry.rank)
        colour = self._colour(entry)
        state = "" if entry.ran else ' fill-opacity="0.28"'
        yield (
            f"<g><title>rank {entry.rank}, step {entry.step}: {escape(str(entry.action))}</title>"
            f'<rect x="{x + 0.75}" y="{y + 0.75}" width="{width - 1.5}" height="{_ENTRY - 1.5}" '
            f'rx="2.5" fill="{colour}"{state}/>'
        )
        lines = _label(entry.action)
        size = min(11.0, (width - 5) / (0.68 * max(map(len, lines))))
        for i, line in enumerate(lines):
            middle = y + _ENTRY / 2 + size * (0.36 + 1.05 * (i - (len(lines) - 1) / 2))
            yield (
                f'<text x="{x + width / 2}" y="{middle:.1f}" font-size="{size:.1f}" '
                f'text-anchor="middle" fill="{"#ffffff" if entry.ran else _INK}">{line}</text>'
            )
        yield "</g>"

    def _colour(self, entry: Placed) -> str:
        base = COLOURS.get(entry.action.kind, _OTHER)
        local = self.schedule.stages_of(entry.rank)
        chunk = local.index(entry.action.stage) if entry.action.stage in local else 0
        return _lighten(base, 0.0 if len(local) < 2 else 0.2 * chunk / (len(local) - 1))

    def _marks(self) -> Iterator[str]:
        if self.finding is None:
            return
        if self.refused is None:
            if self.finding.rank is not None and self.finding.rank < self.schedule.num_ranks:
                yield (
                    f'<rect x="{_LEFT - 2}" y="{self.y(self.finding.rank) - 2}" '
                    f'width="{self.x(self.last) - _LEFT + 4}" height="{_ENTRY + 4}" rx="4" '
                    f'fill="none" stroke="{_RED}" stroke-width="2.5" stroke-dasharray="7 4"/>'
                )
            return
        for other in self.finding.related:
            yield from self._related(other, self.refused)
        yield from self._outline(self.refused, _RED, 3.2, "")
        x, y = (
            self._centre(self.refused)[0] + self._span(self.refused) / 2,
            self.y(self.refused.rank),
        )
        yield f'<circle cx="{x}" cy="{y}" r="7" fill="{_RED}" stroke="#ffffff" stroke-width="1.5"/>'
        yield (
            f'<path d="M{x - 2.6},{y - 2.6} l5.2,5.2 m0,-5.2 l-5.2,5.2" stroke="#ffffff" '
            f'stroke-width="1.8" stroke-linecap="round"/>'
        )

    def _related(self, other: Place, refused: Placed) -> Iterator[str]:
        entry = self.by_place.get((other.rank, other.step))
        if entry is None or not self.visible(entry):
            return
        bad = other.role in ("picked", "waits")
        colour, name = (_RED, "red") if bad else (_OTHER, "ink")
        dash = ' stroke-dasharray="4 3"' if bad else ""
        yield from self._outline(entry, colour, 2.0, dash)
        if entry is refused or other.role in ("waits", "awaited"):
            return
        (x0, y0), (x1, y1) = self._centre(entry), self._centre(refused)
        half = _ENTRY / 2
        if entry.rank == refused.rank:
            # Two arcs may end here: the one from farther away ends farther right, and neither is
            # hidden by the badge in the corner.
            rise = 24 if other.role == "owner" else 15
            x1 += -9 if bad else 3
            top = y1 - half
            path = f"M{x0},{top} C{x0},{top - rise} {x1},{top - rise} {x1},{top - 1}"
        else:
            down = 1 if entry.rank < refused.rank else -1
            y0, y1 = y0 + down * half, y1 - down * half
            path = f"M{x0},{y0} C{x0},{(y0 + y1) / 2} {x1},{(y0 + y1) / 2} {x1},{y1}"
        yield (
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash} '
            f'marker-end="url(#{name})"/>'
        )

    def _span(self, entry: Placed) -> float:
        return entry.length * self.unit if entry.length else _MARK

    def _centre(self, entry: Placed) -> tuple[float, float]:
        return self.x(entry.start + entry.length / 2), self.y(entry.rank) + _ENTRY / 2

    def _outline(self, entry: Placed, colour: str, stroke: float, dash: str) -> Iterator[str]:
        x, y = self._centre(entry)
        span = self._span(entry)
        fill = "none" if entry.length else "#ffffff"
        yield (
            f'<rect x="{x - span / 2}" y="{y - _ENTRY / 2 - 0.5}" width="{span}" '
            f'height="{_ENTRY + 1}" rx="3" fill="{fill}" stroke="{colour}" '
            f'stroke-width="{stroke}"{dash}/>'
        )

    def _explanation(self) -> list[str]:
        if self.finding is None:
            return []
        wide = int((self.width - _LEFT - _RIGHT) * _CHARACTERS)
        said = textwrap.wrap(self.finding.message, wide, max_lines=2, placeholder=" ...")
        wanted = f"expected {self.finding.expected}; found {self.finding.found}"
        return [*said, *textwrap.wrap(wanted, wide, max_lines=1, placeholder=" ...")]

    def _note(self, note: list[str]) -> Iterator[str]:
        if self.finding is None or not note:
            return
        top = self.bottom + 16
        height = 19 * len(note) + 28
        yield (
            f'<rect x="{_LEFT}" y="{top}" width="{self.width - _LEFT - _RIGHT}" height="{height}" '
            f'rx="4" fill="#fdf1f2"/><rect x="{_LEFT}" y="{top}" width="4" height="{height}" '
            f'fill="{_RED}"/>'
        )
        place = "" if self.finding.rank is None else f"rank {self.finding.rank}"
        if self.finding.step is not None:
            place += f", step {self.finding.step}: {self.finding.action}"
        yield (
            f'<text x="{_LEFT + 16}" y="{top + 20}" font-size="12" font-weight="bold" '
            f'fill="{_RED}">{escape(self.finding.clause)}<tspan dx="10" font-weight="normal" '
            f'fill="{_OTHER}">{escape(place)}</tspan></text>'
        )
        for i, line in enumerate(note):
            yield (
                f'<text x="{_LEFT + 16}" y="{top + 40 + 18 * i}" font-size="11.5" fill="{_INK}">'
                f"{escape(line)}</text>"
            )


def _label(action: Action) -> list[str]:
    if action.kind is Kind.REDUCE_GRAD:
        return [f"{action.stage}\u03a3"]
    return [str(leaf) for leaf in action.leaves()]


def _lighten(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)

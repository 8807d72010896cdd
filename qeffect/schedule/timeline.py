"""
Draw a schedule as one self-contained SVG, in the colours of torch's schedule visualizer.

F is blue, I teal, W green, B orange, an overlap purple, idle time white; a rank's later stages are
lighter. The refused entry has a red outline, and its clause is written below the rows. If a weight
gradient got the wrong retained work (operands that a dI left), two arcs lead to the weight
gradient: one from its own dI, and one from the dI that left the wrong work. The legend names every
colour, shade, outline and arrow in the picture. A message takes no time, so a marked message is
drawn as a narrow box, with its entry and step beside the box.

A schedule with simulated times is drawn whole and to scale. Arrows lead from the time at which a
message is sent to the time at which it arrives; the entries of the critical path have an outline.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from .actions import Kind, Schedule
from .findings import Finding
from .layout import Layout, TimedEntry, layout, timed_layout
from .steptime import Span, StepTime
from .svg import (
    COLOURS,
    FAINT,
    GREY,
    INK,
    PALE,
    PINK,
    RED,
    arrow,
    badge,
    box,
    label,
    lightened,
    note,
    style,
)

_LEGEND = {
    Kind.FORWARD: "forward F",
    Kind.DGRAD: "input gradient I",
    Kind.WGRAD: "weight gradient W",
    Kind.BACKWARD: "full backward B",
    Kind.OVERLAP_F_B: "overlapped F and B",
    Kind.REDUCE_GRAD: "gradient reduction \u03a3",
}
ROLES = {
    "owner": "its own work",
    "picked": "the work that it is given",
    "first": "comes before it",
    "needs": "is needed before it",
    "peer": "the message received instead",
    "awaited": "is waited for",
    "waits": "also waits",
}
_UNRUN = 0.28
_LEFT, _RIGHT, _ROW, _ENTRY = 76, 24, 62, 30
_NARROW, _WIDE, _MARK = 28, 36, 9
_CHARACTERS = 0.146
_LEAST = 780
_LEGEND_TOP, _LEGEND_LINE = 53, 18
#: In a picture to scale: the mean width of a computation, and the maximum width of the step.
_MEAN, _MOST, _TICK, _SMALLEST = 30.0, 2400.0, 70.0, 4.0


def timeline(
    schedule: Schedule,
    finding: Finding | None = None,
    *,
    window: int | None = 64,
    timed: StepTime | None = None,
) -> str:
    """
    Draw a schedule, with a finding marked.

    Args:
        schedule: The schedule.
        finding: The finding to mark; if `None`, the picture states that nothing was refused.
        window: Maximum number of columns to draw. A longer schedule is cut to the part around the
            refused entry. `None` draws all columns.
        timed: The simulated times of the schedule's step. If given, the schedule is drawn whole and
            to scale, and nothing is marked.

    Returns:
        The text of an SVG file.
    """
    if timed is not None:
        return "\n".join(Picture(schedule, None, None, timed_layout(timed)).lines()) + "\n"
    return "\n".join(Picture(schedule, finding, window, layout(schedule)).lines()) + "\n"


class Picture:
    """
    Draws a schedule as SVG; the class of the HTML page inherits from this class.

    Args:
        schedule: The schedule.
        finding: The finding to mark; `None` marks nothing.
        window: Maximum number of columns to draw; `None` draws all columns.
        placed: The start time and length of each entry.
    """

    #: Distance from the lower edge of an entry's box to the name below the box.
    name_below = 12

    def __init__(
        self, schedule: Schedule, finding: Finding | None, window: int | None, placed: Layout
    ) -> None:
        self.schedule = schedule
        self.finding = finding
        self.layout = placed
        self.timed = placed.timed
        self.by_place = {(entry.rank, entry.step): entry for entry in self.layout.entries}
        self.refused = (
            None
            if finding is None or finding.rank is None or finding.step is None
            else self.by_place.get((finding.rank, finding.step))
        )
        self.first, self.last = self._window(window)
        columns = self.last - self.first
        longest = max(
            (len(line) for c in self.layout.entries for line in label(c.action)), default=3
        )
        self.unit: float = _WIDE if columns <= 32 or longest > 4 else _NARROW
        if self.timed is not None:
            lengths = [entry.length for entry in self.layout.entries if entry.length]
            mean = sum(lengths) / len(lengths) if lengths else 1.0
            self.unit = min(_MEAN / mean, _MOST / columns) if columns else 1.0
        self.width = max(_LEFT + columns * self.unit + _RIGHT, _LEAST)
        self.labels: list[tuple[float, float, float]] = []
        self.legend = list(self._legend())
        self.top = _LEGEND_TOP + 21 + _LEGEND_LINE * (1 + max(line for _, line in self.legend))
        self.bottom = self.top + schedule.num_ranks * _ROW

    def _window(self, window: int | None) -> tuple[float, float]:
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

    def visible(self, entry: TimedEntry) -> bool:
        return entry.start + entry.length >= self.first and entry.start <= self.last

    def lines(self) -> Iterator[str]:
        lines = self._explanation()
        height = self.bottom + (30 + 19 * len(lines) if lines else 14) + 16
        title = f"Schedule {self.schedule.source}"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" role="img" aria-label={quoteattr(title)} '
            f'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" font-size="11">'
        )
        yield f"<title>{escape(title)}</title>"
        yield "<defs>"
        for name, colour in (("red", RED), ("ink", GREY)):
            yield (
                f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="5" '
                f'markerHeight="5" orient="auto"><path d="M0,0.8 L7.5,4 L0,7.2 z" '
                f'fill="{colour}"/></marker>'
            )
        yield "</defs>"
        yield f'<rect width="{self.width}" height="{height}" fill="#ffffff"/>'
        yield from self._head()
        yield from self._rows()
        for entry in self.layout.entries:
            if self.visible(entry):
                yield from self._entry(entry) if entry.length else self._instant(entry)
        if self.timed is not None:
            yield from self._to_scale(self.timed)
        yield from self._marks()
        if self.finding is not None and lines:
            where = ""
            if self.layout.unit == "time" and self.refused is not None:
                # A time axis counts no steps: a step is a position in the rank's row.
                where = f" of its row, at time {self.refused.start}"
            inside = self.width - _LEFT - _RIGHT
            yield from note(self.finding, where, lines, _LEFT, self.bottom + 16, inside)
        yield "</svg>"

    def _head(self) -> Iterator[str]:
        s = self.schedule
        yield (
            f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold" fill="{INK}">'
            f"{escape(s.source)}</text>"
        )
        counts = f"{s.num_ranks} ranks, {s.num_stages} stages, {s.num_microbatches} microbatches"
        state = "nothing refused" if self.finding is None else f"refused: {self.finding.clause}"
        if self.timed is not None:
            step, bound = float(self.timed.time), float(self.timed.bound)
            state = f"step {step:.4g} {self.timed.unit}, busiest rank {bound:.4g}"
        colour = GREY if self.finding is None else RED
        yield (
            f'<text x="{_LEFT}" y="42" fill="{GREY}">{counts} <tspan dx="6" font-weight="bold" '
            f'fill="{colour}">{escape(state)}</tspan></text>'
        )
        yield '<g id="legend">'
        yield from (drawn for drawn, _ in self.legend)
        yield "</g>"

    def _legend(self) -> Iterator[tuple[str, int]]:
        """Yield each entry of the legend with its line; the legend names only what is drawn."""
        x, line = float(_LEFT), 0
        for group, entries in enumerate((self._fills(), self._marked())):
            for number, (width, swatch, words) in enumerate(entries):
                needed = width + 5 + 6.4 * len(words)
                if (group and not number) or x + needed > self.width - _RIGHT:
                    x, line = float(_LEFT), line + 1
                y = _LEGEND_TOP + _LEGEND_LINE * line
                yield (
                    f'<g transform="translate({x:g},{y})">{swatch}'
                    f'<text x="{width + 5}" y="9.5" fill="{GREY}">{escape(words)}</text></g>',
                    line,
                )
                x += needed + 14

    def _fills(self) -> Iterator[tuple[int, str, str]]:
        """Yield the width, drawing and text of each colour and shade in the legend."""
        shown = [e for e in self.layout.entries if e.length and self.visible(e)]
        used = {entry.action.kind for entry in shown}
        for kind, name in _LEGEND.items():
            if kind in used:
                yield 11, box(11, COLOURS[kind]), name
        yield 11, box(11, "#ffffff", "#c3cad4", 1), "idle"
        base = COLOURS[next((kind for kind in _LEGEND if kind in used), Kind.FORWARD)]
        if not used <= set(_LEGEND):
            yield 11, box(11, GREY), "wait"
        if any(self._colour(e) != COLOURS.get(e.action.kind, GREY) for e in shown):
            later = f'<g transform="translate(12,0)">{box(11, lightened(base, 0.2))}</g>'
            yield 23, box(11, base) + later, "lighter: a later stage of the rank"
        if any(not entry.ran for entry in shown):
            pale = f'<g fill-opacity="{_UNRUN}">{box(11, base)}</g>'
            yield 11, pale, "pale: never runs"

    def _marked(self) -> Iterator[tuple[int, str, str]]:
        """Yield the width, drawing and text of each outline and arrow in the legend."""
        if self.timed is not None:
            found = {span.what for span in self.timed.spans if span.end > span.start}
            yield 11, box(11, "none", INK, 2), "critical path"
            if "update" in found:
                yield 11, box(11, PALE, GREY, 1), "update"
            if any(span.what == "message" for span in self.timed.spans):
                yield 26, arrow("M2,5.5 L25,5.5", GREY, "ink", "", 1), "message"
            return
        if self.finding is None or self.finding.rank is None:
            return
        if self.refused is None:
            yield 26, box(26, "none", RED, 2, "7 4"), "the row with a missing entry"
            return
        yield 17, box(11, "none", RED, 2.6) + badge(12, 1, 4.5), "refused"
        related = [
            (other.role, entry)
            for other in self.finding.related
            if (entry := self.by_place.get((other.rank, other.step))) and self.visible(entry)
        ]
        for role in dict.fromkeys(role for role, _ in related):
            colour, name, dash = style(role)
            swatch, width = box(11, "none", colour, 2, dash), 11
            if any(self._has_arrow(other, entry) for other, entry in related if other == role):
                dashes = "4 3" if dash else ""
                swatch += arrow("M14,5.5 L35,5.5", colour, name, dashes)
                width = 36
            yield width, swatch, ROLES.get(role, role)
        every = [
            (RED, "", self.refused),
            *((*style(role)[::2], entry) for role, entry in related),
        ]
        for colour, dash, entry in every:
            if not entry.length:
                yield 5, box(5, PALE, colour, 1.5, dash), "narrow: takes no time, such as a message"
                return

    def _rows(self) -> Iterator[str]:
        end = self.x(self.last)
        for time, name in self._ticks():
            yield (
                f'<text x="{self.x(time)}" y="{self.top + 8}" font-size="9" '
                f'text-anchor="middle" fill="{FAINT}">{name}</text>'
            )
        yield (
            f'<text x="{_LEFT - 16}" y="{self.top + 8}" font-size="9" text-anchor="end" '
            f'fill="{FAINT}">{self.layout.unit}</text>'
        )
        for rank in range(self.schedule.num_ranks):
            y = self.y(rank)
            blamed = self.finding is not None and self.finding.rank == rank
            yield (
                f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end" font-weight="bold" '
                f'fill="{RED if blamed else INK}">rank {rank}</text>'
            )
            stages = ", ".join(map(str, self.schedule.stages_of(rank)))
            yield (
                f'<text x="{_LEFT - 10}" y="{y + 27}" font-size="9" text-anchor="end" '
                f'fill="{FAINT}">stage {escape(stages)}</text>'
            )
            yield (
                f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT}" height="{_ENTRY}" '
                f'fill="#ffffff" stroke="#dfe3ea"/>'
            )
        if self.first > 0:
            yield (
                f'<text x="{_LEFT}" y="{self.bottom + 8}" fill="{FAINT}">(earlier part cut)</text>'
            )
        if self.last < self.layout.end:
            yield (
                f'<text x="{end}" y="{self.bottom + 8}" text-anchor="end" fill="{FAINT}">'
                f"(later part cut)</text>"
            )

    def _ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the time and the text of each label on the time axis."""
        if self.timed is not None:
            # The first of 1, 2, 5, 10, 20, ... of some power of ten that is wide enough.
            wanted = max(_TICK / self.unit, 1e-300)
            power = 10.0 ** math.floor(math.log10(wanted))
            gap = next(power * n for n in (1, 2, 5, 10) if power * n >= wanted)
            for number in range(int(self.layout.end / gap) + 1):
                yield number * gap, f"{number * gap:g}"
            return
        # A step is a column, named in its middle; a time is where something begins.
        middle = 0.5 if self.layout.unit == "step" else 0.0
        first, last = int(self.first), int(self.last)
        for time in range(first, last, 5 if last - first > 12 else 1):
            yield time + middle, str(time)

    def _to_scale(self, timed: StepTime) -> Iterator[str]:
        """Draw the updates, the critical path and the messages of a timed step."""
        for span in timed.spans:
            if span.what == "update" and span.end > span.start:
                x, width = self._extent(span)
                y = self.y(span.rank)
                yield (
                    f'<g><title>rank {span.rank}: update</title><rect x="{x:.2f}" y="{y + 0.75}" '
                    f'width="{width:.2f}" height="{_ENTRY - 1.5}" rx="2.5" fill="{PALE}" '
                    f'stroke="{GREY}"/></g>'
                )
        critical = {(s.rank, s.step) for s in timed.critical if s.what == "computation"}
        for entry in self.layout.entries:
            if (entry.rank, entry.step) in critical and entry.length:
                yield from self._outline(entry, INK, 2.0, "")
        for span in timed.spans:
            if span.what == "message" and span.peer is not None:
                yield self._message(span, span.peer)

    def _message(self, span: Span, peer: int) -> str:
        down = span.rank < peer
        y0 = self.y(span.rank) + (_ENTRY + 1 if down else -1)
        y1 = self.y(peer) + (-1 if down else _ENTRY + 1)
        x0, width = self._extent(span)
        path = f"M{x0:.2f},{y0} L{x0 + width:.2f},{y1}"
        return f"<g><title>{span.name}</title>{arrow(path, GREY, 'ink', '', 1)}</g>"

    def _extent(self, span: Span) -> tuple[float, float]:
        return self.x(float(span.start)), float(span.end - span.start) * self.unit

    def _entry(self, entry: TimedEntry) -> Iterator[str]:
        x = max(self.x(entry.start), _LEFT)
        width = min(self.x(entry.start + entry.length), self.x(self.last)) - x
        if width <= 1:
            return
        y = self.y(entry.rank)
        colour = self._colour(entry)
        state = "" if entry.ran else f' fill-opacity="{_UNRUN}"'
        yield (
            f"<g{self._attributes(entry)}><title>{escape(self._title(entry))}</title>"
            f'<rect x="{x + 0.75}" y="{y + 0.75}" width="{width - 1.5}" height="{_ENTRY - 1.5}" '
            f'rx="2.5" fill="{colour}"{state}/>'
        )
        lines = label(entry.action)
        size = min(11.0, (width - 5) / (0.68 * max(map(len, lines))))
        for i, line in enumerate(lines if self.timed is None or size >= _SMALLEST else ()):
            middle = y + _ENTRY / 2 + size * (0.36 + 1.05 * (i - (len(lines) - 1) / 2))
            yield (
                f'<text x="{x + width / 2}" y="{middle:.1f}" font-size="{size:.1f}" '
                f'text-anchor="middle" fill="{"#ffffff" if entry.ran else INK}">{line}</text>'
            )
        yield "</g>"

    def _instant(self, entry: TimedEntry) -> Iterator[str]:
        """Draw an entry that takes no time. It is drawn only if it is marked."""
        return iter(())

    def _attributes(self, entry: TimedEntry) -> str:
        """Return the SVG attributes of an entry's group, each after a blank."""
        return ""

    def _title(self, entry: TimedEntry) -> str:
        """Return the text that a mouse pointer over an entry shows."""
        return f"rank {entry.rank}, step {entry.step}: {entry.action}"

    def _colour(self, entry: TimedEntry) -> str:
        base = COLOURS.get(entry.action.kind, GREY)
        local = self.schedule.stages_of(entry.rank)
        chunk = local.index(entry.action.stage) if entry.action.stage in local else 0
        return lightened(base, 0.0 if len(local) < 2 else 0.2 * chunk / (len(local) - 1))

    def _marks(self) -> Iterator[str]:
        if self.finding is None:
            return
        if self.refused is None:
            if self.finding.rank is not None and self.finding.rank < self.schedule.num_ranks:
                yield (
                    f'<rect x="{_LEFT - 2}" y="{self.y(self.finding.rank) - 2}" '
                    f'width="{self.x(self.last) - _LEFT + 4}" height="{_ENTRY + 4}" rx="4" '
                    f'fill="none" stroke="{RED}" stroke-width="2.5" stroke-dasharray="7 4"/>'
                )
            return
        refused = self.refused
        related = [
            (other.role, entry)
            for other in self.finding.related
            if (entry := self.by_place.get((other.rank, other.step))) and self.visible(entry)
        ]
        for role, entry in related:
            colour, _, dash = style(role)
            yield from self._outline(entry, colour, 2.0, dash)
        yield from self._outline(refused, RED, 3.2, "")
        arrows = [(r, e) for r, e in related if self._has_arrow(r, e)]
        for role, entry in arrows:
            yield self._arc(role, entry, refused)
        # The badge of a narrow box stands beside it, where no arrow comes from.
        x, y = self._centre(refused)
        side = -1 if any(self._centre(e)[0] > x for _, e in arrows) else 1
        span = self._span(refused) / 2
        x += span if refused.length else side * (span + 9)
        yield badge(x, y - _ENTRY / 2, 7)
        down = any(entry.rank <= refused.rank for _, entry in arrows)
        yield from self._said(refused, RED, below=down or not arrows)
        for role, entry in related:
            yield from self._said(entry, style(role)[0], below=entry.rank >= refused.rank)

    def _has_arrow(self, role: str, entry: TimedEntry) -> bool:
        return entry is not self.refused and role not in ("waits", "awaited")

    def _arc(self, role: str, entry: TimedEntry, refused: TimedEntry) -> str:
        colour, name, dash = style(role)
        (x0, y0), (x1, y1) = self._centre(entry), self._centre(refused)
        half = _ENTRY / 2
        if entry.rank == refused.rank:
            # Two arcs may end here: the one from farther away ends farther right, and neither is
            # hidden by the badge in the corner.
            rise = 24 if role == "owner" else 15
            x1 += -9 if dash else 3
            top = y1 - half
            path = f"M{x0},{top - 1} C{x0},{top - rise} {x1},{top - rise} {x1},{top - 2.5}"
        else:
            down = 1 if entry.rank < refused.rank else -1
            y0, y1 = y0 + down * (half + 1), y1 - down * (half + 2.5)
            path = f"M{x0},{y0} C{x0},{(y0 + y1) / 2} {x1},{(y0 + y1) / 2} {x1},{y1}"
        return arrow(path, colour, name, dash)

    def _said(self, entry: TimedEntry, colour: str, *, below: bool) -> Iterator[str]:
        """Write an entry's name beside its box, if the box is too narrow and there is room."""
        if entry.length:
            return
        words = f"{entry.action}, step {entry.step}"
        x, y = self._centre(entry)
        half = 2.9 * len(words)
        x = min(max(x, _LEFT + half), self.width - _RIGHT - half)
        sides = (y + _ENTRY / 2 + self.name_below, y - _ENTRY / 2 - 6)
        for line in sides if below else reversed(sides):
            if all(
                abs(line - other) > 9 or x + half < left or x - half > right
                for other, left, right in self.labels
            ):
                self.labels.append((line, x - half, x + half))
                yield (
                    f'<text x="{x:g}" y="{line:g}" font-size="9.5" text-anchor="middle" '
                    f'font-weight="bold" fill="{colour}">{escape(words)}</text>'
                )
                return

    def _span(self, entry: TimedEntry) -> float:
        return entry.length * self.unit if entry.length else _MARK

    def _centre(self, entry: TimedEntry) -> tuple[float, float]:
        return self.x(entry.start + entry.length / 2), self.y(entry.rank) + _ENTRY / 2

    def _outline(self, entry: TimedEntry, colour: str, stroke: float, dash: str) -> Iterator[str]:
        x, y = self._centre(entry)
        span = self._span(entry)
        fill = "none" if entry.length else PINK if colour == RED else PALE
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        yield (
            f'<rect x="{x - span / 2}" y="{y - _ENTRY / 2 - 0.5}" width="{span}" '
            f'height="{_ENTRY + 1}" rx="3" fill="{fill}" stroke="{colour}" '
            f'stroke-width="{stroke}"{dashed}/>'
        )

    def _explanation(self) -> list[str]:
        if self.finding is None:
            return []
        wide = int((self.width - _LEFT - _RIGHT) * _CHARACTERS)
        said = textwrap.wrap(self.finding.message, wide, max_lines=2, placeholder=" ...")
        wanted = f"expected {self.finding.expected}; found {self.finding.found}"
        return [*said, *textwrap.wrap(wanted, wide, max_lines=1, placeholder=" ...")]

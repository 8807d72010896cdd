"""
A verdict on a schedule as one HTML file: an interactive timeline, and the reasons for the verdict.

The file needs no network and no other file, and can be read without its script. It shows the whole
picture of `qeffect.schedule.timeline`, with an element for each action, including messages and
reductions. With the script, the user steps through the actions in time order. At each step the page
shows which tape (what one forward leaves for its backward) each slot (set of buffers) holds. The
page also shows the slot of each action, and both ends of each message.

The file also contains the checker's result as the JSON object that ``qeffect check --json`` prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES

from .actions import RECEIVES, SEND_WAITS, SENDS, Atom, Kind, Schedule, ScheduleError
from .findings import Finding
from .layout import TimedEntry, layout
from .messages import COUNTERPART
from .page_parts import SCRIPT, STYLE
from .slots import Tape, assign, own_readers
from .svg import COLOURS, GREY, INK
from .timeline import ROLES, Picture

__all__ = ["MOST_ACTIONS", "page"]

#: Largest number of actions on a page; browsers do not scroll a larger page smoothly.
MOST_ACTIONS: Final = 20_000
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.DGRAD: "input gradient",
    Kind.WGRAD: "weight gradient",
    Kind.BACKWARD: "backward",
    Kind.SEND_F: "sends the output",
    Kind.RECV_F: "receives the input",
    Kind.SEND_B: "sends the input's gradient",
    Kind.RECV_B: "receives the output's gradient",
    Kind.WAIT_SEND_F: "waits for the send of the output",
    Kind.WAIT_SEND_B: "waits for the send of the gradient",
}
_TICK_WIDTH, _TICK_HEIGHT, _TICK_GAP, _TICK_BELOW = 4.0, 9.0, 1.5, 33.0


def page(schedule: Schedule, said: Mapping[str, Any], finding: Finding | None = None) -> str:
    """
    Return the HTML page of a verdict.

    Args:
        schedule: The schedule.
        said: The checker's result as plain data; the page contains it unchanged.
        finding: The finding to mark; if `None`, the page states that nothing was refused.

    Raises:
        ScheduleError: The schedule has more than `MOST_ACTIONS` actions.
    """
    require_small(schedule)
    return "\n".join(_Page(schedule, said, finding).lines()) + "\n"


def require_small(schedule: Schedule) -> None:
    """
    Refuse a schedule that is too large for an HTML page.

    Raises:
        ScheduleError: The schedule has more than `MOST_ACTIONS` actions.
    """
    if schedule.num_actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{schedule.source}: {schedule.num_actions} actions, but an HTML page shows at most "
            f"{MOST_ACTIONS}; draw an SVG file, which is cut around the refused entry"
        )


class _Facts:
    """The facts that the page shows about an action: its tape's slot, its message's other end."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.slots: dict[Tape, int] = dict(schedule.buffers or {})
        #: For each tape (what one forward leaves for its backward): rank, stage, microbatch, slot,
        #: first step and last step. The last step is None if the tape never ends.
        self.tapes: list[list[Any]] = []
        self.places: dict[tuple[Kind, int, int], tuple[int, int]] = {}
        for rank, atoms in enumerate(schedule.atoms):
            for atom in atoms:
                self.places.setdefault((atom.kind, atom.stage, atom.microbatch), (rank, atom.step))
            self._assign(rank, atoms)

    def _assign(self, rank: int, atoms: tuple[Atom, ...]) -> None:
        ends = {Kind.WGRAD, *(SEND_WAITS if self.schedule.awaits_sends else SENDS)}
        begins = {Kind.FORWARD, Kind.RECV_F}
        events = [(atom.kind, atom.stage, atom.microbatch) for atom in atoms]
        made = assign(events, own_readers(events, ends), begins=begins)
        first: dict[Tape, int] = {}
        last: dict[Tape, int] = {}
        settled: set[Tape] = set()
        for atom in atoms:
            tape = (atom.stage, atom.microbatch)
            if atom.kind in begins:
                first.setdefault(tape, atom.step)
            elif atom.kind in ends:
                last[tape] = atom.step
                if atom.kind is Kind.WGRAD:
                    settled.add(tape)
        for tape, step in first.items():
            slot = self.slots.setdefault(tape, made.slot_of[tape])
            end = last[tape] if tape in settled else None
            self.tapes.append([rank, *tape, slot, step, end])

    def other_end(self, kind: Kind, stage: int, microbatch: int) -> tuple[int, int] | None:
        """Return the rank and step of a message's other end: its send or its receive."""
        if kind not in COUNTERPART:
            return None
        counterpart, offset = COUNTERPART[kind]
        return self.places.get((counterpart, stage + offset, microbatch))

    def words(self, entry: TimedEntry) -> list[str]:
        """Return lines that describe an entry for the user."""
        action = entry.action
        lines = [f"rank {entry.rank}, step {entry.step}: {action}"]
        for leaf in action.leaves():
            name = _NAMES.get(leaf.kind)
            if name is None or leaf.microbatch < 0:
                continue
            tape = (leaf.stage, leaf.microbatch)
            held = "" if tape not in self.slots else f", slot {self.slots[tape]} of the stage"
            lines.append(f"{name}: stage {leaf.stage}, microbatch {leaf.microbatch}{held}")
            other = self.other_end(leaf.kind, *tape)
            if other is not None:
                found = self.schedule.entry(*other)
                way = "from" if leaf.kind in RECEIVES else "to"
                lines.append(f"{way} rank {other[0]}, step {other[1]}: {found}")
        if not entry.ran:
            lines.append("never runs: its rank waits forever at an earlier action")
        return lines


class _Interactive(Picture):
    """The picture of a schedule in which each action is an HTML element."""

    name_below = 21

    def __init__(self, schedule: Schedule, finding: Finding | None, facts: _Facts) -> None:
        super().__init__(schedule, finding, None, layout(schedule))
        self.facts = facts
        self.roles: dict[tuple[int, int], str] = {}
        if finding is not None:
            for place in reversed(finding.related):
                self.roles[place.rank, place.step] = place.role
            if finding.rank is not None and finding.step is not None:
                self.roles[finding.rank, finding.step] = "refused"
        self.crowds: dict[tuple[int, float], int] = {}
        self.drawn: dict[tuple[int, float], int] = {}
        for entry in self.layout.entries:
            if not entry.length:
                here = (entry.rank, entry.start)
                self.crowds[here] = self.crowds.get(here, 0) + 1

    def _title(self, entry: TimedEntry) -> str:
        return "\n".join(self.facts.words(entry))

    def _attributes(self, entry: TimedEntry) -> str:
        role = self.roles.get((entry.rank, entry.step))
        mark = "" if role is None else f' data-role="{escape(role)}"'
        state = "" if role is None else " refused" if role == "refused" else " related"
        return f' id="{_id(entry.rank, entry.step)}" class="action{state}" tabindex="0"{mark}'

    def _instant(self, entry: TimedEntry) -> Iterator[str]:
        """Draw an entry without length as a tick below its row, beside other ticks at that time."""
        here = (entry.rank, entry.start)
        number = self.drawn.get(here, 0)
        self.drawn[here] = number + 1
        gap = min(_TICK_WIDTH + _TICK_GAP, self.unit / self.crowds[here])
        x, y = self.x(entry.start) + gap * number, self.y(entry.rank) + _TICK_BELOW
        kind = entry.action.kind
        colour = INK if kind in SENDS else COLOURS.get(kind, GREY)
        fill = "#ffffff" if kind in RECEIVES else colour
        yield (
            f"<g{self._attributes(entry)}><title>{escape(self._title(entry))}</title>"
            f'<rect x="{x:.2f}" y="{y:g}" width="{_TICK_WIDTH:g}" height="{_TICK_HEIGHT:g}" '
            f'fill="{fill}" stroke="{colour}"/></g>'
        )


class _Page:
    def __init__(
        self, schedule: Schedule, said: Mapping[str, Any], finding: Finding | None
    ) -> None:
        self.schedule = schedule
        self.said = said
        self.finding = finding
        self.facts = _Facts(schedule)
        self.picture = _Interactive(schedule, finding, self.facts)

    def lines(self) -> Iterator[str]:
        title = f"{self.said.get('verdict', 'checked')}: {self.schedule.source}"
        yield "<!DOCTYPE html>"
        yield '<html lang="en"><head><meta charset="utf-8">'
        yield (
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        )
        yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
        yield f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        yield f"<h1>{escape(title)}</h1>"
        yield from self._reasons()
        yield from self._controls()
        yield '<div id="picture">'
        yield from self.picture.lines()
        yield "</div>"
        hint = "Point at an action, or step through the actions."
        yield f'<div id="below"><pre id="about">{hint}</pre>'
        yield '<div id="slots"></div></div>'
        yield _embedded("said", self.said)
        yield _embedded("actions", list(self._actions()))
        yield _embedded("tapes", self.facts.tapes)
        yield f"<script>{SCRIPT}</script></body></html>"

    def _reasons(self) -> Iterator[str]:
        schedule = self.schedule
        yield (
            f"<p>{schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches, {schedule.num_actions} actions.</p>"
        )
        found = self.finding
        if found is None:
            yield '<p id="verdict" class="accepted">Nothing was refused.</p>'
        else:
            clause = {**CLAUSES, **SCHEDULE_CLAUSES}.get(found.clause)
            yield f'<div id="verdict" class="refused"><h2>{escape(found.clause)}</h2>'
            yield f"<p>{escape(found.message)}</p><dl>"
            if found.rank is not None and found.step is not None:
                yield f"<dt>refused</dt><dd>{_link(found.rank, found.step, found.action)}</dd>"
            elif found.rank is not None:
                yield f"<dt>refused</dt><dd>rank {found.rank}: an action is missing</dd>"
            for place in found.related:
                role = ROLES.get(place.role, place.role)
                yield f"<dt>{escape(role)}</dt>"
                yield f"<dd>{_link(place.rank, place.step, place.action)}</dd>"
            words = [("expected", found.expected), ("found", found.found)]
            if clause is not None:
                words += [("rule", clause.invariant), ("usual cause", clause.cause)]
            for name, text in (*words, ("what to do", found.remedy)):
                if text:
                    yield f"<dt>{name}</dt><dd>{escape(text)}</dd>"
            yield "</dl></div>"
        for note in schedule.notes:
            yield f"<p>Note: {escape(note)}.</p>"

    def _controls(self) -> Iterator[str]:
        last = max(self.schedule.num_actions - 1, 0)
        yield '<div id="controls">'
        yield '<button id="back" title="left arrow">back</button>'
        yield (
            f'<input id="at" type="range" min="0" max="{last}" value="{last}" '
            'aria-label="number of the action">'
        )
        yield '<button id="next" title="right arrow">next</button>'
        yield '<output id="count"></output>'
        yield '<button id="smaller" title="minus">smaller</button>'
        yield '<button id="larger" title="plus">larger</button>'
        yield '<button id="fit" title="0">whole width</button>'
        if self.finding is not None:
            yield '<button id="refusal" title="r">to the refusal</button>'
        yield "</div>"

    def _actions(self) -> Iterator[dict[str, Any]]:
        """Yield all actions by start time; the actions of one rank stay in the order of its row."""
        begins: dict[tuple[int, int], float] = {}
        earliest: dict[int, float] = {}
        for entry in reversed(self.picture.layout.entries):
            # A receive is drawn where its message arrives, and posted before.
            begin = min(entry.start, earliest.get(entry.rank, entry.start))
            begins[entry.rank, entry.step] = earliest[entry.rank] = begin
        for entry in sorted(
            self.picture.layout.entries,
            key=lambda entry: (begins[entry.rank, entry.step], entry.step, entry.rank),
        ):
            action = entry.action
            other = self.facts.other_end(action.kind, action.stage, action.microbatch)
            yield {
                "id": _id(entry.rank, entry.step),
                "rank": entry.rank,
                "step": entry.step,
                "action": str(action),
                "other": None if other is None else _id(*other),
                "words": self.facts.words(entry),
            }


def _id(rank: int, step: int) -> str:
    return f"a{rank}-{step}"


def _link(rank: int, step: int, action: str | None) -> str:
    return f'<a href="#{_id(rank, step)}">rank {rank}, step {step}: {escape(str(action))}</a>'


def _embedded(name: str, data: Any) -> str:
    # Nothing inside may end the element.
    text = json.dumps(data)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'

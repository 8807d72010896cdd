"""
The HTML page of a verdict is complete, self-contained and escaped, and shows what the checker
reported.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.cli import main
from qeffect.schedule import page as pages
from qeffect.schedule.actions import Action, Schedule, ScheduleError
from qeffect.schedule.check import Verdict, check
from qeffect.schedule.findings import Finding
from qeffect.schedule.infer import from_actions
from qeffect.schedule.megatron import megatron_schedule
from qeffect.schedule.page import MOST_ACTIONS, page
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.tables import fixture_names, read_fixture

from .edits import ZBV, ZBV_COMMS
from .faults import FAULTS, random_illegal

#: Elements without an end tag.
VOID = {"meta", "input"}


class Read(HTMLParser):
    """A page as a browser would read it: its elements, its text, its embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.titles: dict[str, str] = {}
        self.seen = ""
        self.feed(text)
        self.close()
        assert [] == [name for name, _ in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element; each is closed."""
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that closes itself, as in SVG."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Close what was opened last."""
        assert tag == self.open.pop()[0]

    def handle_data(self, data: str) -> None:
        """Note text: of scripts by their id, of titles by their action, else what is seen."""
        if not self.open:
            return
        tag, given = self.open[-1]
        if tag == "script":
            self.texts[given.get("id") or "code"] = data
        elif tag == "title" and len(self.open) > 1 and self.open[-2][0] == "g":
            self.titles[str(self.open[-2][1].get("id"))] = data
        elif tag != "style":
            self.seen += data

    def data(self, name: str) -> Any:
        """Return embedded data."""
        return json.loads(self.texts[name])

    @property
    def actions(self) -> dict[str, dict[str, str | None]]:
        """The elements of actions, by their ids."""
        found = [a for _, a in self.elements if "action" in (a.get("class") or "").split()]
        assert len(found) == len({a["id"] for a in found})
        return {str(a["id"]): a for a in found}

    @property
    def marked(self) -> dict[str, str | None]:
        """The role of each marked action."""
        return {name: a["data-role"] for name, a in self.actions.items() if "data-role" in a}


def read(schedule: Schedule, finding: Finding | None = None) -> Read:
    """The page of a schedule."""
    return Read(page(schedule, {"verdict": "told"}, finding))


def wanted(schedule: Schedule) -> dict[str, str]:
    """The id of each action of a schedule, with its text."""
    return {
        f"a{rank}-{step}": str(action)
        for rank, row in enumerate(schedule.rows)
        for step, action in enumerate(row)
        if action is not None
    }


def mismatch() -> tuple[Schedule, Verdict]:
    """ZB-V, refused under `latest`."""
    schedule = read_fixture(ZBV)
    return schedule, check(schedule, "latest")


SMALL = [name for name in fixture_names() if "_m64" not in name]


@pytest.mark.parametrize("name", SMALL)
def test_every_action_has_its_element(name: str) -> None:
    """Computations, messages, sharding and reductions: each has one element that names it."""
    schedule = read_fixture(name)
    shown = read(schedule)

    assert wanted(schedule).keys() == shown.actions.keys()
    assert {} == shown.marked
    for place, action in wanted(schedule).items():
        rank, step = place[1:].split("-")
        assert shown.titles[place].splitlines()[0] == f"rank {rank}, step {step}: {action}"
    assert "Nothing was refused." in shown.seen


def test_the_actions_are_embedded_in_the_order_of_the_picture() -> None:
    """The data of the script names each action once, and the other end of each message."""
    schedule = read_fixture(ZBV_COMMS)
    actions = read(schedule).data("actions")
    by_id = {action["id"]: action for action in actions}

    assert wanted(schedule) == {name: action["action"] for name, action in by_id.items()}
    messages = [a for a in actions if "SEND" in a["action"] or "RECV" in a["action"]]
    assert messages
    for action in messages:
        assert by_id[action["other"]]["other"] == action["id"]
    for rank in range(schedule.num_ranks):
        steps = [action["step"] for action in actions if action["rank"] == rank]
        assert sorted(steps) == steps


def test_what_the_command_says_is_embedded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page embeds the object that ``--json`` prints."""
    file = tmp_path / "out.html"
    asked = "check --megatron --pp 2 --vpp 2 --microbatches 4 --messages batched --json --html"
    code = main([*asked.split(), str(file)])
    printed = json.loads(capsys.readouterr().out)

    assert 1 == code
    assert printed == Read(file.read_text(encoding="utf-8")).data("said")
    assert "schedule.message-order" == printed["clause"]


def test_both_actions_of_a_refusal_are_marked() -> None:
    """The receive that was refused, and the send whose tensor it would get."""
    schedule = megatron_schedule(pp=2, vpp=2, microbatches=4, messages="batched")
    shown = read(schedule, check(schedule).finding)
    names = wanted(schedule)

    assert {"1RECV_F2": "refused", "2SEND_B0": "peer"} == {
        names[place]: role for place, role in shown.marked.items()
    }
    assert {"a1-14", "a0-13"} == {
        (a.get("href") or "")[1:] for tag, a in shown.elements if tag == "a"
    }
    for words in (
        "the tensors would be swapped",
        "the message received instead",
        "Two ranks receive the messages of a queue in the order in which they were sent.",
        "usual cause",
        "what to do",
        "--messages overlapped",
    ):
        assert words in shown.seen


def test_a_wrong_pairing_marks_both_works() -> None:
    """The dW, its own dI, and the dI whose work it would get."""
    schedule, verdict = mismatch()
    shown = read(schedule, verdict.finding)

    assert ["owner", "picked", "refused"] == sorted(str(r) for r in shown.marked.values())
    assert "1W2" == wanted(schedule)[{v: k for k, v in shown.marked.items()}["refused"]]


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_finding_has_a_page(fault: str) -> None:
    """Any fault in a table: every place of the finding is marked; each action has its element."""
    schedule = random_illegal(0, fault).schedule
    finding = check_ranks(schedule)[0]
    shown = read(schedule, finding)
    places = [(p.rank, p.step) for p in finding.related]
    if finding.rank is not None and finding.step is not None:
        places.append((finding.rank, finding.step))

    assert wanted(schedule).keys() == shown.actions.keys()
    assert {f"a{rank}-{step}" for rank, step in places} == shown.marked.keys()
    assert finding.message in shown.seen


def test_slots_are_those_of_the_walk() -> None:
    """Each tape is in one slot from its first action to its last, and no slot holds two."""
    schedule = read_fixture(ZBV_COMMS)
    tapes = read(schedule).data("tapes")

    assert len(tapes) == schedule.num_stages * schedule.num_microbatches
    for rank, stage, _, slot, first, last in tapes:
        others = [t for t in tapes if t[0] == rank and t[1] == stage and t[3] == slot]
        assert 1 == sum(t[4] <= last and first <= t[5] for t in others)


def test_named_buffers_are_the_slots() -> None:
    """If the source names buffers, these are shown."""
    plain = from_actions([["0F0", "0F1", "0B0", "0B1"]])
    named = attrs.evolve(plain, buffers={(0, 0): 5, (0, 1): 3})

    assert [5, 3] == [tape[3] for tape in read(named).data("tapes")]
    assert "slot 5 of the stage" in read(named).titles["a0-0"]


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028"


def test_names_are_text() -> None:
    """A name of a file, of a clause, of an action or in a message becomes no element."""
    schedule, verdict = mismatch()
    assert verdict.finding is not None
    finding = attrs.evolve(
        verdict.finding, **dict.fromkeys(("clause", "action", "message", "found", "remedy"), EVIL)
    )
    text = page(
        attrs.evolve(schedule, source=EVIL, notes=(EVIL,)), {"verdict": EVIL, "x": EVIL}, finding
    )
    shown = Read(text)
    plain = Read(page(schedule, {"verdict": "", "x": ""}, verdict.finding))

    assert {"verdict": EVIL, "x": EVIL} == shown.data("said")
    assert "alert(1)" in shown.seen
    for tag in ("script", "img"):
        counts = [sum(name == tag for name, _ in one.elements) for one in (shown, plain)]
        assert counts[0] == counts[1]
    assert shown.texts["code"] == plain.texts["code"]


def test_an_entry_that_is_no_action_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table with markup in a cell is unusable: one line names the cell; no page appears."""
    table, file = tmp_path / "t.csv", tmp_path / "out.html"
    table.write_text("0F0,<script>alert(1)</script>\n", encoding="utf-8")
    code = main(["check", str(table), "--html", str(file)])
    said = capsys.readouterr().err

    assert 2 == code
    assert 1 == len(said.splitlines())
    assert "rank 0, step 1: entry '<script>alert(1)</script>' is not an action" in said
    assert not file.exists()


def test_a_file_name_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of the table is the page's title, whatever it holds."""
    table, file = tmp_path / "<script>é&'.csv", tmp_path / "out.html"
    table.write_text("0F0,0B0\n", encoding="utf-8")

    assert 0 == main(["check", str(table), "--html", str(file)])
    assert "<script>é&'.csv" in Read(file.read_text(encoding="utf-8")).seen
    assert "accepted" in capsys.readouterr().out


def test_a_page_needs_nothing_from_elsewhere() -> None:
    """No address is loaded: no link, image, frame, import or style from outside, and a policy."""
    schedule, verdict = mismatch()
    text = page(schedule, {}, verdict.finding)
    shown = Read(text)

    for tag, given in shown.elements:
        assert "src" not in given
        assert tag not in {"link", "iframe", "img", "object", "base"}
        assert (given.get("href") or "#").startswith("#")
        assert not [name for name in given if name.startswith("on")]
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttp|innerHTML|eval\(", text)
    policy = next(a for _, a in shown.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_the_script_finds_its_elements() -> None:
    """Each id that the script asks for is in the page of a refusal."""
    schedule, verdict = mismatch()
    shown = read(schedule, verdict.finding)
    ids = {given["id"] for _, given in shown.elements if "id" in given}
    asked = set(re.findall(r'(?:part|read)\("(\w+)"\)', shown.texts["code"]))

    assert {"back", "next", "larger", "refusal", "slots", "about", "actions"} <= asked
    assert asked <= ids


def test_a_page_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table that no browser could show is refused before it is checked."""
    row: list[Action | None] = [Action.parse("0F0")] * (MOST_ACTIONS + 1)
    with pytest.raises(ScheduleError, match="at most 20000; draw an SVG file"):
        page(Schedule((tuple(row),), {0: 0}, 1, 1, "long"), {})
    monkeypatch.setattr(pages, "MOST_ACTIONS", 3)
    file = tmp_path / "out.html"

    assert 2 == main(["check", "--te-order", "1,1,-1,-1", "--html", str(file)])
    assert not file.exists()


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: Appended to a page: what a person would do, and what is then seen.
PLAY = """
<script>
const seen = {};
const count = () => document.getElementById("count").textContent;
const slots = () => [...document.querySelectorAll("#slots tr")].slice(1)
  .map((row) => [...row.cells].map((cell) => cell.textContent));
seen.start = count();
seen.later = document.querySelectorAll(".action.later").length;
document.getElementById("next").click();
seen.next = count();
document.dispatchEvent(new KeyboardEvent("keydown", {key: "Home"}));
seen.home = count();
seen.homeSlots = slots();
document.getElementById("refusal").click();
seen.refusal = count();
seen.about = document.getElementById("about").textContent;
seen.other = [...document.querySelectorAll(".action.other")].map((one) => one.id);
document.getElementById("a0-13").dispatchEvent(new MouseEvent("mouseenter"));
seen.hover = document.getElementById("about").textContent;
const svg = document.querySelector("#picture svg"), wide = () => svg.getBoundingClientRect().width;
const before = wide();
document.getElementById("larger").click();
seen.grown = wide() / before;
document.title = "seen" + JSON.stringify(seen);
</script>
"""


@pytest.mark.browser
def test_a_browser_steps_zooms_and_shows(tmp_path: Path) -> None:
    """Chromium without a network: buttons, keys and pointer do what they say; no script fails."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.fail(f"expected a browser, found none; install one of {', '.join(BROWSERS)}")
    schedule = megatron_schedule(pp=2, vpp=2, microbatches=4, messages="batched")
    file = tmp_path / "page.html"
    file.write_text(page(schedule, {}, check(schedule).finding) + PLAY, encoding="utf-8")
    done = subprocess.run(
        [
            browser,
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<title>seen(.*?)</title>", done.stdout)
    assert found is not None, done.stderr
    seen = json.loads(found[1])

    assert seen["start"].endswith("of 80: 1RECV_F2")
    at = int(seen["start"].split()[0])
    assert seen["later"] == 80 - at
    assert seen["next"].startswith(f"{at + 1} of 80")
    assert seen["home"].startswith("1 of 80")
    assert seen["refusal"] == seen["start"]
    assert seen["about"].startswith("rank 1, step 14: 1RECV_F2")
    assert seen["other"] == ["a0-14"]
    assert seen["hover"].startswith("rank 0, step 13: 2SEND_B0")
    assert ["0", "0", "0", "free", "free", "free"] == seen["homeSlots"][0]
    assert 1.3 < seen["grown"] < 1.5

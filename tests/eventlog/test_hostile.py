"""Logs that try to mislead a reader: other spellings, huge headers, names with terminal codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qeffect import Contract, Destination, Refused, StageConfig, TapeKey
from qeffect.cli import main
from qeffect.cli.command import brief
from qeffect.cli.replay import Replay
from qeffect.log.budget import CELLS, DECLARED, PLACED, STAGES
from qeffect.log.format import FIELDS, compact
from qeffect.log.reader import spelling
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import LogError, replay_lines
from qeffect.text import escaped, within
from qeffect.verification.logs.edits import reseal
from qeffect.verification.logs.examples import valid

from .test_bad_input import complaint, header, sealed

#: Clears a line and writes a verdict of its own.
FORGED = "\x1b[2K\raccepted: 9 events"
JOIN = '{"seq":1,"transition":"join","link":0'


def bodies(log: str) -> list[str]:
    """A valid log's lines without their digests."""
    return [line[: line.rindex(',"digest"')] for line in valid()[log]]


def run(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a replay, and everything that it printed."""
    code = main(["replay", str(path)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


class TestSpelling:
    @pytest.mark.parametrize(
        "body",
        [
            '{"seq":1,"transition":"join","link" :7,"link":0',
            '{"seq":1,"transition":"join","link" :0',
            '{"seq":1,"transition":"join", "link":0',
            '{"seq":1,"transition":"join","link":-0',
            '{"seq":1,"transition":"\\u006aoin","link":0',
            '{"seq":1,"transition":"join","l\\u0069nk":0',
            '{"seq":1 ,"transition":"join","link":0',
            '{ "seq":1,"transition":"join","link":0',
            '{"seq":1,"transition":"join","link":0 ',
            ' {"seq":1,"transition":"join","link":0',
            '{"seq":1,"transition":"join","link":0\t',
        ],
    )
    def test_another_spelling_of_an_event_is_no_event(self, body: str) -> None:
        """Only one sequence of bytes says what an event says; the like of it is unusable."""
        said = complaint(sealed(header(), body))

        assert "line 2" in said
        assert "occurs twice" in said or "not spelled as a recorder spells it" in said

    def test_a_header_has_one_spelling(self) -> None:
        """Likewise a header: blanks, escapes, and a configuration in other words."""
        start = header()
        for old, new, said in (
            ('"epoch":0', '"epoch": 0', "not spelled"),
            ('["w"]', '["\\u0077"]', "not spelled"),
            ('["main"]', '["m\\/n"]', "not spelled"),
            ('["w"]', '["w","a"]', "field stages"),
            (
                '"capture_order":[[0,0,"F"],[0,0,"dI"],[0,0,"dW"]]',
                '"capture_order":[]',
                "field capture_order",
            ),
        ):
            assert start.count(old) == 1
            assert said in complaint(sealed(start.replace(old, new)))

    @pytest.mark.parametrize("log", ["readers", "without-version-order-arena"])
    def test_a_blank_anywhere_is_unusable(self, log: str) -> None:
        """A blank before any colon or comma of any line, the closing line too, is found there."""
        whole = bodies(log)
        for number, line in enumerate(whole):
            at = line.index(",", len(line) // 2) if "," in line[len(line) // 2 :] else len(line)
            other = f"{line[:at]} {line[at:]}"
            with pytest.raises(LogError, match=f"line {number + 1} is not spelled"):
                replay_lines(reseal([*whole[:number], other, *whole[number + 1 :]]))

    def test_every_line_of_the_examples_takes_the_short_way(self) -> None:
        """The recorder's spelling is the short way's, but for destinations in full."""
        for log in valid():
            for line in bodies(log)[1:-1]:
                short = spelling(json.loads(line + "}")["transition"])(line + "}")
                assert (short is None) == ('"destination":[' in line), line

    def test_names_beyond_ascii_and_with_quotes_are_names(self) -> None:
        """They take the long way, and mean the same."""
        matrices = ("größe", 'q"k', "back\\slash")
        of = Contract([StageConfig(0, 1, 1, matrices=matrices)])
        with Recorder(of) as log:
            key = TapeKey(0, 0, 0)
            with of.forward(key, refresh=True) as f:
                pass
            of.bind(key)
            of.wait()
            with of.dgrad(key, f.ref) as i:
                i.queued = matrices

        assert replay_lines(log.lines).verdict == "accepted"

    def test_every_transition_has_a_spelling(self) -> None:
        """The short way knows the fields of each, and takes no line of another."""
        for name in FIELDS:
            assert spelling(name)(JOIN + "}") is None or name == "join"


class TestBudget:
    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"slots":1', f'"slots":{CELLS + 1}', f"slots; a log may have at most {CELLS}"),
            (
                '"microbatches":1',
                f'"microbatches":{CELLS + 1}',
                f"cells; a log may have at most {CELLS}",
            ),
            ('"blocks":1', f'"blocks":{CELLS + 1}', f"cells; a log may have at most {CELLS}"),
            (
                '"invocations":1',
                f'"invocations":{CELLS + 1}',
                f"cells; a log may have at most {CELLS}",
            ),
            (
                '"matrices":["w"]',
                f'"matrices":{json.dumps([f"m{i:03}" for i in range(150)])}'.replace(" ", ""),
                f"destinations of cells; a log may have at most {PLACED}",
            ),
            (
                '"callers":["main"]',
                f'"callers":{json.dumps(list(range(CELLS + 1)))}'.replace(" ", ""),
                f"links; a log may have at most {CELLS}",
            ),
        ],
    )
    def test_a_header_that_asks_for_much_is_refused_before_it_is_built(
        self, old: str, new: str, said: str
    ) -> None:
        """Few bytes may not cost minutes or gigabytes: the message says what is too many."""
        start = header()
        if "matrices" in old:
            start = start.replace('"microbatches":1', '"microbatches":8192')
        assert start.count(old) == 1

        assert f"{said}" in complaint(sealed(start.replace(old, new)))

    def test_many_stages_and_many_declared_orders_are_too_many(self) -> None:
        """What is looked through once for each of many is bounded by the product."""
        fields = json.loads(header() + "}")
        fields["stages"] = [{**fields["stages"][0], "stage": s} for s in range(STAGES + 1)]

        assert f"{STAGES + 1} stages; a log may have at most {STAGES}" in complaint(
            sealed(compact(fields)[:-1])
        )

        fields["stages"] = [{**fields["stages"][0], "microbatches": CELLS}]
        fields["stages"][0]["matrices"] = []
        fields["declared"] = [[d, []] for d in range(DECLARED // CELLS + 1)]

        assert "cells of declared orders; a log may have at most" in complaint(
            sealed(compact(fields)[:-1])
        )

    def test_the_recorder_begins_no_log_that_nobody_may_replay(self) -> None:
        """The same bounds hold for a contract that is to be recorded."""
        of = Contract([StageConfig(0, CELLS + 1, 1)])
        with pytest.raises(ValueError, match="a log may have at most"):
            Recorder(of)

        assert of.observer is None

    def test_a_large_contract_within_the_budget_is_recorded_and_replayed(self) -> None:
        """64 microbatches of 32 blocks with four matrices each are far from the bounds."""
        of = Contract([StageConfig(0, 64, 8, blocks=32, matrices=("a", "b", "c", "d"))])
        with Recorder(of) as log:
            of.submit()

        assert 4 * len(of.memory.slot_of) * 64 < PLACED
        assert replay_lines(log.lines).verdict == "accepted"

    @pytest.mark.parametrize("error", [MemoryError(), OverflowError("too large"), RecursionError()])
    def test_what_still_is_too_much_is_unusable(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a machine with less memory than the budget assumes, the replay ends with one line
        about the missing memory."""

        def fail(header: object) -> None:
            raise error

        monkeypatch.setattr("qeffect.log.player.rebuild", fail)

        assert "does not describe a valid contract" in complaint(sealed(header()))


class TestText:
    @pytest.mark.parametrize("name", [FORGED, "w\n", "w\u202eelif", "w\u0085", "\x7f"])
    @pytest.mark.parametrize("place", ['"callers":["main"]', '"domain":0', '"matrices":["w"]'])
    def test_a_name_that_is_not_printable_is_unusable(
        self, place: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """No name of a header reaches the terminal as more than characters of one line."""
        new = place.partition(":")[0] + ":" + json.dumps(name, ensure_ascii=False)
        if "[" in place:
            new = new.replace(":", ":[", 1) + "]"
        path = tmp_path / "log"
        path.write_bytes(b"".join(sealed(header().replace(place, new))))
        code, printed = run(path, capsys)

        assert code == 2
        assert printed.count("\n") == 1
        assert printed.rstrip("\n").isprintable()

    @pytest.mark.parametrize("escape", ["\\ud800", "\\udfff", "\\u001b[2K"])
    @pytest.mark.parametrize(
        "body",
        [
            '{"seq":1,"transition":"commit_dgrad","slot":0,"ticket":1,"queued":["?"]'
            ',"updates":-1,"scales":-1',
            '{"seq":1,"transition":"?"',
            '{"seq":1,"?":0',
            '{"events":0,"state":{"?":"0123456789abcdef"}',
        ],
    )
    def test_escapes_in_a_line_are_unusable(
        self, body: str, escape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Half a surrogate pair and a control character, spelled as escapes, get one line."""
        path = tmp_path / "log"
        path.write_bytes(b"".join(sealed(header(), body.replace("?", escape))))
        code, printed = run(path, capsys)

        assert code == 2
        assert printed.rstrip("\n").isprintable()

    def test_evidence_that_is_not_printable_is_unusable(self) -> None:
        """JSON forbids raw control characters. Names may not contain the other characters that move
        text."""
        event = (
            '{"seq":1,"transition":"commit_dgrad","slot":0,"ticket":1,"queued":["w\u202e"]'
            ',"updates":-1,"scales":-1'
        )

        assert "field queued" in complaint(sealed(header(), event))

    def test_the_recorder_writes_no_name_that_the_replayer_refuses(self) -> None:
        """Every name of a configuration is looked at when the recorder is attached."""
        for config in (
            StageConfig(0, 1, 1, matrices=(FORGED,)),
            StageConfig(0, 1, 1, domain="\ud800"),
            StageConfig(0, 1, 1, pool="a\tb"),
            StageConfig(0, 1, 1, matrices=("w",), destinations=(Destination("w", device="\x00"),)),
        ):
            with pytest.raises(ValueError, match="printable"):
                Recorder(Contract([config]))

    def test_a_path_cannot_forge_a_verdict(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A file's own name is shown escaped, whatever bytes it has."""
        for name in (FORGED, "\udcff"):
            path = tmp_path / name
            path.write_bytes(b"nothing")
            code, printed = run(path, capsys)

            assert code == 2
            assert printed.rstrip("\n").isprintable()

        assert main(["replay", "a\0b"]) == 2
        assert "Traceback" not in capsys.readouterr().err

    def test_a_line_that_is_shown_is_short(self) -> None:
        """Megabytes of a name or of evidence do not reach the terminal either."""
        names = json.dumps(["x" * 1000] * 1000, separators=(",", ":"))
        lines = bodies("readers")
        number = next(n for n, line in enumerate(lines) if '"commit_dgrad"' in line)
        at = lines[number].index('"queued":') + len('"queued":')
        lines[number] = f'{lines[number][:at]}{names},"updates":-1,"scales":-1'
        report = replay_lines(reseal(lines))

        assert report.clause == "ownership.work-not-queued"
        assert len(report.summary()) < 1000
        assert len(within("x" * 10**6)) <= 300

    def test_text_that_is_not_unicode_is_unusable(self) -> None:
        """Lines given as text may hold half a surrogate pair, which no file could."""
        with pytest.raises(LogError, match="is not text"):
            replay_lines([valid()["readers"][0], "\ud800\n"])

    def test_escaping_leaves_printable_text_alone(self) -> None:
        """And whatever it returns is printable."""
        assert escaped("größe ☃") == "größe ☃"
        assert escaped(FORGED + "\ud800\u202e").isprintable()
        assert brief(f"no such file: {FORGED}").isprintable()


class TestExitCodes:
    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            RecursionError("too deep"),
            UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
            KeyError("a fault of ours"),
            AssertionError(FORGED),
        ],
    )
    def test_no_exception_looks_like_a_violation(
        self,
        error: Exception,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Exit code 1 means that the contract was broken; all else that ends a run is 2."""

        def fail(*arguments: object) -> None:
            raise error

        monkeypatch.setattr(Replay, "run", fail)

        assert main(["replay", "log"]) == 2
        printed = capsys.readouterr().err
        assert type(error).__name__ in printed
        assert printed.count("\n") == 1
        assert printed.rstrip("\n").isprintable()

    def test_a_verdict_is_printed_where_the_terminal_knows_ascii_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A name that the terminal cannot spell does not turn a violation into anything else."""
        import io
        import sys

        of = Contract([StageConfig(0, 1, 1, matrices=("größe",))])
        lines = bodies_of_evidence(of)
        path = tmp_path / "log"
        path.write_text("".join(lines), encoding="utf-8")
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)

        assert main(["replay", str(path)]) == 1
        out.flush()
        assert b"gr\\xf6\\xdfe" in out.buffer.getvalue()  # type: ignore[attr-defined]


def bodies_of_evidence(of: Contract) -> list[str]:
    """A log whose dI queued nothing, resealed: refused, with the matrix's name in the text."""
    key = TapeKey(0, 0, 0)
    with Recorder(of) as log:
        with of.forward(key, refresh=True) as f:
            pass
        of.bind(key)
        of.wait()
        with of.dgrad(key, f.ref) as i:
            i.queued = of.stages[0].matrices
    whole = [line[: line.rindex(',"digest"')] for line in log.lines]
    return reseal(line.replace('"queued":["größe"]', '"queued":[]') for line in whole)


class TestIncarnations:
    @pytest.mark.parametrize("earlier", ["000000005eed0100", "000000005eed0101"])
    def test_an_incarnation_that_comes_back_is_refused(self, earlier: str) -> None:
        """A later restore into an earlier incarnation, the header's own too, is refused there."""
        lines = [
            line.replace('"000000005eed0103"', f'"{earlier}"')
            for line in bodies("aborts-and-restores")
        ]
        number = [n for n, line in enumerate(lines, 1) if '"restore"' in line][2]
        report = replay_lines(reseal(lines))

        assert ("log.incarnation", number, "incarnation", "restore", earlier) == (
            report.clause,
            report.line,
            report.field,
            report.action,
            report.found,
        )

    def test_the_current_one_stays_the_contracts_own_clause(self) -> None:
        """The contract itself knows the incarnation that it is in."""
        of = Contract([StageConfig(0, 1, 1)])
        saved = of.checkpoint()
        with pytest.raises(Refused, match="same-incarnation"):
            of.restore(saved, incarnation=of.incarnation)


class TestGroups:
    """Logs of a grouped dW, edited by hand."""

    def refused(self, was: str, now: str) -> tuple[str | None, str | None, str | None]:
        """Edit the first line of a group; return the clause, the transition and the field."""
        whole = bodies("grouped-wgrads")
        at = next(n for n, line in enumerate(whole) if '"group_wgrad"' in line)
        assert was in whole[at]
        whole[at] = whole[at].replace(was, now)
        report = replay_lines(reseal(whole))
        return report.clause, report.action, report.field

    @pytest.mark.parametrize(
        ("was", "now", "clause", "field"),
        [
            ('"leader":0', '"leader":3', "ownership.unknown-slot", "leader"),
            ('"leader":0', '"leader":2', "ownership.unknown-ticket", "ticket"),
            ('"ticket":7', '"ticket":6', "ownership.unknown-ticket", "ticket"),
            ('"destination":0', '"destination":[]', "arena.mismatch", "destination"),
        ],
    )
    def test_a_group_names_its_dw(self, was: str, now: str, clause: str, field: str) -> None:
        """By the slot and the ticket of the dW in flight."""
        assert (clause, "group_wgrad", field) == self.refused(was, now)

    def test_a_group_has_a_leader(self) -> None:
        """NO_SLOT cannot be the slot of a group's first dW."""
        with pytest.raises(LogError, match="leader"):
            self.refused('"leader":0', '"leader":-1')


class TestWithoutVersion:
    """A log of a contract that leaves version out, spliced by hand: what its API refuses, replay
    refuses by the same clause."""

    def splice(self, after: str, body: str) -> tuple[str | None, str | None]:
        """Insert an event after the first of a transition; return what replay refuses it by."""
        whole = bodies("without-version-order-arena")
        (at,) = [n for n, line in enumerate(whole) if f'"{after}"' in line][:1]
        spliced = [*whole[: at + 1], f'{{"seq":{at + 1},{body}']
        report = replay_lines(reseal(spliced))
        return report.clause, report.action

    @pytest.mark.parametrize(
        "event",
        [
            '"transition":"check_refresh","stage":0,"link":0,"result":2',
            '"transition":"commit_refresh","stage":0,"ticket":0,"filled":[],"fill_epoch":-1',
            '"transition":"commit_refresh","stage":0,"ticket":1,"filled":[],"fill_epoch":-1',
            '"transition":"abort_refresh","stage":0,"ticket":1',
            '"transition":"invalidate","stage":0',
        ],
    )
    def test_a_refresh_is_refused(self, event: str) -> None:
        """Also while an F is in flight, with that F's own ticket or with none."""
        transition = event.split('"')[3]

        assert ("version.left-out", transition) == self.splice("check_forward", event)

    def test_an_epoch_commits_once(self) -> None:
        """The same commit again ends no epoch."""
        event = '"transition":"check_update","epoch":0,"caller":0,"result":99'

        assert ("epoch.wrong-epoch", "check_update") == self.splice("commit_update", event)

"""
Input that is not an event log is refused with one clear line about the input, never a traceback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import pytest

from qeffect import Contract, StageConfig, spec
from qeffect.cli import main
from qeffect.log.format import DIGEST_BYTES
from qeffect.log.player import MAX_LINE
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import LogError, replay, replay_lines
from qeffect.verification.logs.examples import valid


def header() -> str:
    """The first line of a log, without its digest."""
    log = Recorder(Contract([StageConfig(0, 1, 1, matrices=("w",))]))
    return log.lines[0][: -len(',"digest":"0123456789abcdef"}\n')]


def sealed(*bodies: bytes | str) -> list[bytes]:
    """Return lines with right digests over any bodies."""
    chain = blake2b(digest_size=DIGEST_BYTES)
    lines = []
    for body in bodies:
        start = body.encode() if isinstance(body, str) else body
        chain.update(start)
        end = f',"digest":"{chain.hexdigest()}"}}\n'.encode()
        chain.update(end)
        lines.append(start + end)
    return lines


def complaint(lines: Iterable[bytes]) -> str:
    """The replayer's messages for malformed lines."""
    with pytest.raises(LogError) as caught:
        replay_lines(lines)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


class TestFiles:
    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"", "is empty"),
            (b"\n", "is not an event log"),
            (b"\x00\xff\xfe\x80" * 1000, "is not an event log"),
            (b"\x89PNG\r\n\x1a\n", "is not an event log"),
            (b"0F0,0I0,0W0\n", "is not an event log"),
            (b'{"a":1}\n', "is not an event log"),
            (b'{"qeffect":"event-log",\n', "does not end in a digest"),
            (b'{"qeffect":"event-log",' + b"\xff" * 40 + b"\n", "does not end in a digest"),
            (b'{"qeffect":"event-log",' + b"x" * MAX_LINE, "is longer than"),
        ],
    )
    def test_a_file_that_is_no_log_is_unusable(
        self, data: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Empty, binary, foreign, malformed and huge files get one line and exit code 2."""
        path = tmp_path / "input"
        path.write_bytes(data)
        with pytest.raises(LogError, match=said):
            replay(path)

        assert main(["replay", str(path)]) == 2
        assert said in capsys.readouterr().err

    def test_a_missing_file_and_a_folder_are_unusable(self, tmp_path: Path) -> None:
        """What cannot be opened is named, with the system's reason."""
        with pytest.raises(LogError, match=r"none: cannot be read: No such file"):
            replay(tmp_path / "none")
        with pytest.raises(LogError, match="Is a directory"):
            replay(tmp_path)

    def test_a_refused_log_exits_with_one_and_an_accepted_one_with_none(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The command line tells violation from unusable input, and names clause and line."""
        path = tmp_path / "run.jsonl"
        lines = valid()["readers"]
        path.write_text("".join(lines), encoding="utf-8")

        assert main(["replay", str(path), "--json"]) == 0

        rejected = Path(spec.__file__).parent / "logs" / "rejected" / "log.sequence.jsonl"
        capsys.readouterr()

        assert main(["replay", str(rejected), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert ("refused", "log.sequence") == (report["verdict"], report["clause"])
        assert {"rank", "step", "action", "line"} <= report.keys()

        path.write_text("".join(lines[:-1]), encoding="utf-8")

        assert main(["replay", str(path), "--json"]) == 2
        report = json.loads(capsys.readouterr().out)
        assert ("unusable", "log.closing", len(lines)) == (
            report["verdict"],
            report["clause"],
            report["line"],
        )


class TestLines:
    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ('{"seq":1', "transition"),
            ('{"seq":1,"transition":"leap"', "found 'leap'; expected a transition"),
            ('{"seq":1,"transition":["join"]', "expected a transition"),
            ('{"seq":1,"transition":null', "found None; expected a transition"),
            ('{"seq":1,"transition":"join"', "found the fields"),
            ('{"transition":"join","seq":1,"link":0', "found the fields"),
            ('{"seq":1,"transition":"join","link":0,"more":0', "found the fields"),
            ('{"seq":1,"transition":"join","link":0,"link":0', "occurs twice"),
            ('{"seq":1,"transition":"join","link":0.0', "0.0 is not an integer"),
            ('{"seq":1,"transition":"join","link":1e0', "1e0 is not an integer"),
            ('{"seq":1,"transition":"join","link":NaN', "NaN is not an integer"),
            ('{"seq":1,"transition":"join","link":false', "found False; expected an integer"),
            ('{"seq":1,"transition":"join","link":"0"', "found '0'; expected an integer"),
            ('{"seq":1,"transition":"join","link":{}', "expected an integer"),
            ('{"seq":1,"transition":"join","link":-1', "found -1; expected an integer"),
            ('{"seq":1,"transition":"join","link":7', "the header configures 0"),
            ('{"seq":1,"transition":"join","link":' + "9" * 5000, "not JSON as a log writes it"),
            ('{"seq":true,"transition":"join","link":0', "found True; expected an integer"),
            ('{"seq":"1","transition":"join","link":0', "found '1'; expected an integer"),
            ('{"seq":1,"transition":"invalidate","stage":4', "the header configures 0"),
            ('{"seq":1,"transition":"drain","domain":4', "the header configures 0"),
            ('{"seq":1,"transition":"bind","key":[0,0,0,0,0],"destination":5', "1 buffers"),
            ('{"seq":1,"transition":"bind","key":[0,0,0,0],"destination":0', "field key"),
            ('{"seq":1,"transition":"bind","key":"00000","destination":0', "field key"),
            ('{"seq":1,"transition":"bind","key":[0,[0],0,0,0],"destination":0', "field key"),
            ('{"seq":1,"transition":"bind","key":[0,0,0,0,0],"destination":"w"', "destination"),
            ('{"seq":1,"transition":"bind","key":[0,0,0,0,0],"destination":[1]', "destination"),
            ('{"seq":1,"transition":"restore","epoch":0,"incarnation":"0x1"', "incarnation"),
            ('{"seq":1,"transition":"restore","epoch":0,"incarnation":5', "incarnation"),
            (
                '{"seq":1,"transition":"commit_dgrad","slot":0,"ticket":1,"queued":"w"'
                ',"updates":-1,"scales":-1',
                "field queued",
            ),
            ('{"events":0', "found the fields"),
            ('{"events":0,"state":{}', "qeffect differ in"),
            ('{"events":0,"state":[]', "field state"),
            ("[1,2", "not JSON"),
            ('{"seq":1}{"x":2', "not JSON"),
            ('{"a":' + "[" * 100_000, "nested too deeply|not JSON"),
            (b'{"seq":1,"transition":"join\xff","link":0', "not UTF-8"),
            (b"\x00", "not JSON"),
        ],
    )
    def test_a_malformed_line_is_unusable(self, body: bytes | str, said: str) -> None:
        """A line of a wrong shape names the line, the field and what was expected."""
        message = complaint(sealed(header(), body))

        assert "line 2" in message
        assert re.search(said, message)

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"version":3', '"version":4', "field version: found 4; expected 3"),
            ('"rank":null', '"rank":-1', "field rank"),
            ('"tickets"', '"ticket"', "relations"),
            (
                '"ownership","version"',
                '"version","ownership"',
                "expected the relations in the order",
            ),
            ('"ownership",', "", "cannot leave out ownership"),
            ('"callers":["main"]', '"callers":[]', "callers"),
            ('"callers":["main"]', '"callers":[["main"]]', "names a caller"),
            ('"callers":["main"]', '"callers":[null]', "names a caller"),
            ('"slots":1', '"slots":0', "slots"),
            ('"slots":1', '"slots":true', "stage configurations"),
            ('"slots":1', '"slots":1000000000', "must be at most 1,048,576"),
            ('"microbatches":1', '"microbatches":1000000000', "must be at most 1,048,576"),
            ('"domain":0', '"domain":[0]', "names a domain"),
            ('"pool":null', '"pool":{}', "pool must be"),
            ('"matrices":["w"]', '"matrices":"w"', "stage configurations"),
            ('"destinations":[]', '"destinations":[{}]', "stage configurations"),
            ('"capture_order":[[0,0,"F"]', '"capture_order":[[0,0]', "capture_order"),
            ('"declared":[]', '"declared":[[0,[["F",[0,0,0,0]]]]]', "declared order"),
            ('"declared":[]', '"declared":[[0,[["F",[]]]]]', "declared"),
            ('"declared":[]', '"declared":[[9,[]]]', "declared"),
            ('"epoch":0', '"epoch":-1', "field epoch"),
            ('"generation_max":18446744073709551615', '"generation_max":-1', "generation_max"),
            ('"incarnation":"', '"incarnation":"0', "field incarnation"),
            ('"declared":[],', "", "found the fields"),
        ],
    )
    def test_a_malformed_header_is_unusable(self, old: str, new: str, said: str) -> None:
        """A header that configures no contract says why."""
        start = header()
        assert start.count(old) == 1, start
        message = complaint(sealed(start.replace(old, new)))

        assert "line 1" in message
        assert said in message

    def test_stages_that_are_missing_are_unusable(self) -> None:
        """A header without stages configures nothing."""
        fields = json.loads(header() + "}")
        fields["stages"] = []
        complaint(sealed(json.dumps(fields, separators=(",", ":"))[:-1]))

    def test_lines_after_the_closing_line_are_refused(self) -> None:
        """A log ends where it is closed."""
        lines = valid()["readers"]
        report = replay_lines([*lines, lines[-1]])

        assert ("log.closing", len(lines) + 1) == (report.clause, report.line)

    def test_text_and_bytes_are_the_same_log(self) -> None:
        """Lines may be given as text or as bytes."""
        lines = valid()["readers"]

        assert replay_lines(lines) == replay_lines([line.encode() for line in lines])

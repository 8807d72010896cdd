"""The recorder writes what happened, and writes nothing where it is not attached."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from qeffect import Contract, Refused, StageConfig, TapeKey
from qeffect.log.format import rebuild
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import replay, replay_lines
from qeffect.log.rotation import Rotation

KEY = TapeKey(0, 0, 0)


def contract(**options: object) -> Contract:
    """One stage of one microbatch."""
    return Contract([StageConfig(0, 1, 1, matrices=("w",))], **options)  # type: ignore[arg-type]


def forward(of: Contract) -> None:
    """A refresh and a forward."""
    with of.refresh(0):
        pass
    with of.forward(KEY):
        pass


class TestRecorder:
    def test_every_accepted_transition_is_one_line(self) -> None:
        """A log has a header, a line per accepted transition, and a closing line."""
        log = Recorder(contract())
        forward(log.contract)
        lines = [json.loads(line) for line in log.close()]

        assert [
            "check_refresh",
            "commit_refresh",
            "check_forward",
            "commit_forward",
        ] == [line["transition"] for line in lines[1:-1]]
        assert [1, 2, 3, 4] == [line["seq"] for line in lines[1:-1]]
        assert lines[-1]["events"] == 4

    def test_a_refused_transition_leaves_no_line(self) -> None:
        """What was refused did not happen, and is not in the log."""
        log = Recorder(contract())
        with pytest.raises(Refused):
            log.contract.check_forward(KEY)

        assert len(log.lines) == 1

    def test_it_writes_to_a_path_and_to_an_open_file(self, tmp_path: Path) -> None:
        """A path is opened and closed, a binary file is left open; both hold the same log."""
        file = io.BytesIO()
        for target in (tmp_path / "run.jsonl", file):
            of = contract()
            of.memory.incarnation[0] = 7
            with Recorder(of, target):
                forward(of)

        assert not file.closed
        assert (tmp_path / "run.jsonl").read_bytes() == file.getvalue()
        assert replay(tmp_path / "run.jsonl").verdict == "accepted"

    @pytest.mark.parametrize("file", [5, io.StringIO(), b"log", object()])
    def test_a_file_that_is_none(self, file: Any) -> None:
        """Text or no file at all: said before anything is written, and nobody observes."""
        of = contract()
        with pytest.raises(TypeError, match=r"^file must be a path, a binary file or None, got "):
            Recorder(of, file)

        assert of.observer is None

    def test_a_line_that_is_written_in_part_is_an_error(self) -> None:
        """As an unbuffered file writes it on a disk that is nearly full."""

        class Short(io.BytesIO):
            def write(self, data: Any) -> int:
                return super().write(data[: max(0, 800 - self.tell())])

        of = contract()
        log = Recorder(of, Short())
        with pytest.raises(OSError, match=r"of \d+ bytes of the event log were written"):
            forward(of)

        assert log.contract.outstanding() or of.live()

    @pytest.mark.parametrize("rotates", [False, True])
    def test_a_log_can_end_without_its_caller(self, tmp_path: Path, rotates: bool) -> None:
        """On a full disk the contract continues. The error is reported once, even if it occurs only
        at the end of the log."""
        path = tmp_path / "rank0.jsonl"
        path.symlink_to("/dev/full")
        for times in (1, 300):
            of = contract()
            told: list[OSError] = []
            log = Recorder(of, Rotation(path, 1) if rotates else path)
            log.ends = told.append
            forward(of)
            for _ in range(times):
                of.submit()
            assert log.close() == []
            assert (of.observer, log.ended) == (None, True)
            assert ["No space left on device"] == [error.strerror for error in told]

    def test_the_next_file_may_be_the_one_that_ends_the_log(self, tmp_path: Path) -> None:
        """It cannot be made."""
        of = contract()
        told: list[OSError] = []
        log = Recorder(of, Rotation(tmp_path / "rank0.jsonl", 1))
        log.ends = told.append
        (tmp_path / "rank0.00001.jsonl").mkdir()
        log._taken = 1
        log._rotate()
        of.submit()
        log.close()
        assert ["Is a directory"] == [error.strerror for error in told]
        assert replay(tmp_path / "rank0.jsonl").verdict == "accepted"

    def test_the_log_is_closed_when_the_run_raises(self) -> None:
        """An exception inside the block still leaves a whole log."""
        of = contract()
        with pytest.raises(RuntimeError, match="device"), Recorder(of) as log, of.refresh(0):
            raise RuntimeError("device")

        assert replay_lines(log.lines).verdict == "accepted"
        assert json.loads(log.lines[-2])["transition"] == "abort_refresh"

    def test_closing_detaches_and_happens_once(self) -> None:
        """After the close the contract has no observer, and a second close adds nothing."""
        log = Recorder(contract())
        lines = list(log.close())

        assert log.contract.observer is None
        assert lines == log.close()

    def test_a_contract_without_recorder_has_no_observer(self) -> None:
        """Nothing is called per transition unless a recorder is attached."""
        assert contract().observer is None

    def test_two_recorders_are_refused(self) -> None:
        """One contract has one observer."""
        of = contract()
        Recorder(of)
        with pytest.raises(ValueError, match="already has an observer"):
            Recorder(of)

    def test_a_contract_that_has_begun_is_refused(self) -> None:
        """A log that lacks its beginning could not be replayed, so it is not begun."""
        of = contract()
        forward(of)
        with pytest.raises(ValueError, match="before the first transition"):
            Recorder(of)

        assert of.observer is None

    def test_a_name_that_json_cannot_hold_is_refused(self) -> None:
        """Domains, pools and callers are integers or strings in a log."""
        of = Contract([StageConfig(0, 1, 1, domain=("a", 1))])
        with pytest.raises(ValueError, match="names a domain by an integer or a string"):
            Recorder(of)

    def test_destinations_of_another_class_are_refused_before_a_line_is_written(self) -> None:
        """Opaque destinations, possible without an arena, cannot be logged."""
        of = contract(omit=["arena", "completion", "version"])
        log = Recorder(of)
        with of.forward(KEY) as f:
            pass
        with of.dgrad(KEY, f.ref) as i:
            i.queued = ("w",)
        written = len(log.lines)
        with pytest.raises(TypeError, match="Destination"):
            of.check_wgrad(KEY, f.ref, destination=("elsewhere",))  # type: ignore[arg-type]

        assert written == len(log.lines)


class TestHeader:
    @pytest.mark.parametrize(
        ("stages", "options"),
        [
            ([StageConfig(0, 1, 1)], {}),
            ([StageConfig(3, 2, 2, blocks=2, invocations=2, matrices=("a", "b"))], {"epoch": 5}),
            ([StageConfig(0, 1, 1, domain="x"), StageConfig(1, 1, 1)], {"callers": ("c", 1)}),
            ([StageConfig(0, 2, 2)], {"omit": ["version", "arena"], "generation_max": 9}),
            (
                [StageConfig(0, 1, 2, pool="p"), StageConfig(1, 1, 1, pool="p", reduces=True)],
                {
                    "capture_order": [
                        (s, i, kind)
                        for kind in ("F", "dI", "dW")
                        for s, i in ((1, 0), (0, 1), (0, 0))
                    ],
                    "declared": {0: [(kind, (s, 0, 0, 0)) for kind in ("F", "dI") for s in (1, 0)]},
                },
            ),
        ],
    )
    def test_the_header_rebuilds_the_contract(
        self, stages: list[StageConfig], options: dict[str, object]
    ) -> None:
        """A contract built from a log's header is in the same state, configuration included."""
        of = Contract(stages, **options)  # type: ignore[arg-type]
        log = Recorder(of)
        built = rebuild(json.loads(log.lines[0]))

        assert of.snapshot() == built.snapshot()
        assert of.stages == built.stages
        assert of.transitions.relations == built.transitions.relations

    def test_the_rank_is_in_the_header_and_in_the_report(self) -> None:
        """A rank's log names the rank."""
        log = Recorder(contract(), rank=3)
        log.close()

        assert replay_lines(log.lines).rank == 3

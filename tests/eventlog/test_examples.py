"""
The example logs are up to date, follow the schema, and are accepted or refused as their names say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest

from qeffect import spec
from qeffect.destinations import Destination
from qeffect.log.checker import LogError
from qeffect.log.fields import EVENT, HEADER, OPTIONAL
from qeffect.log.format import FIELDS
from qeffect.log.replayer import replay
from qeffect.log.rotation import CONTINUES
from qeffect.spec.clauses import CLAUSES
from qeffect.verification.logs.__main__ import main
from qeffect.verification.logs.edits import line_schema, schema, semantic_fields
from qeffect.verification.logs.examples import UNREACHED, files, single_edit_logs, valid

LOGS = Path(spec.__file__).parent / "logs"
VALID = sorted((LOGS / "valid").glob("*.jsonl"))
REJECTED = sorted((LOGS / "rejected").glob("*.jsonl"))


@cache
def index() -> dict[str, dict[str, Any]]:
    """The index of rejected logs by clause."""
    rows = json.loads((LOGS / "rejected" / "index.json").read_text(encoding="utf-8"))
    return {row["clause"]: row for row in rows}


@cache
def validator() -> jsonschema.Draft202012Validator:
    """The schema's validator."""
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a value with its path; a list of names is one leaf."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, list) and any(isinstance(part, list | dict | int) for part in value):
        for place, part in enumerate(value):
            yield from leaves(part, (*path, place))
    else:
        yield path, value


def test_the_valid_examples_are_what_their_script_writes() -> None:
    """Running the scenarios again gives the checked-in files, byte for byte, and no others."""
    assert {path.stem: path.read_text(encoding="utf-8") for path in VALID} == {
        name: "".join(lines) for name, lines in {**valid(), **single_edit_logs()}.items()
    }


@pytest.mark.nightly
def test_the_examples_are_what_their_script_writes() -> None:
    """Running the script again gives the checked-in files, byte for byte, and no others."""
    found = {
        str(path.relative_to(LOGS)): path.read_bytes() for path in LOGS.rglob("*") if path.is_file()
    }

    assert {name: text.encode() for name, text in files().items()} == found
    assert main(["--check"]) == 0


@pytest.mark.nightly
def test_the_script_repairs_a_folder(tmp_path: Path) -> None:
    """A changed, a missing and a superfluous example are found, then written or removed."""
    main(["--folder", str(tmp_path)])
    changed = tmp_path / "valid" / "readers.jsonl"
    changed.write_bytes(b"edited")
    (tmp_path / "valid" / "zbv-rank.jsonl").unlink()
    (tmp_path / "valid" / "other.jsonl").write_bytes(b"")

    assert main(["--folder", str(tmp_path), "--check"]) == 1
    assert changed.read_bytes() == b"edited"

    main(["--folder", str(tmp_path)])

    assert main(["--folder", str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize("path", [*VALID, *REJECTED], ids=lambda path: path.stem)
def test_every_line_is_what_the_schema_describes(path: Path) -> None:
    """Rejected logs are as well formed as valid ones: what is wrong is what they say."""
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        jsonschema.Draft202012Validator(
            {**line_schema(fields), "$defs": schema()["$defs"]}
        ).validate(fields)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_the_whole_schema_accepts_a_valid_log(path: Path) -> None:
    """Each line of a valid log matches exactly one kind of line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        validator().validate(json.loads(line))


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_a_valid_log_is_accepted(path: Path) -> None:
    """The replayer accepts every event of a valid log."""
    report = replay(path)

    assert report.verdict == "accepted"
    assert report.events == len(path.read_bytes().splitlines()) - 2


@pytest.mark.parametrize("path", REJECTED, ids=lambda path: path.stem)
def test_a_rejected_log_is_refused_by_its_clause(path: Path) -> None:
    """The replayer names the clause, the line and a field that the line has."""
    report = replay(path)
    row = index()[path.stem]

    assert ("refused", path.stem) == (report.verdict, report.clause)
    assert report.line == row["refused_at_line"]
    assert report.cause == CLAUSES[path.stem].cause
    assert report.line is not None
    assert report.field is not None
    refused_line = json.loads(path.read_bytes().splitlines()[report.line - 1])
    assert report.field.partition(".")[0] in refused_line


def said(line: bytes) -> dict[str, Any]:
    """What a line says apart from its number, its digest and a count of lines."""
    return {
        name: value
        for name, value in json.loads(line).items()
        if name not in ("seq", "digest", "events")
    }


@pytest.mark.parametrize("path", REJECTED, ids=lambda path: path.stem)
def test_a_rejected_log_is_one_place_away_from_a_valid_one(path: Path) -> None:
    """
    Digests apart, one field of one line differs, one line is missing, or one stands twice.

    The index says which.
    """
    row = index()[path.stem]
    theirs = (LOGS / row["log"]).read_bytes().splitlines()
    ours = path.read_bytes().splitlines()
    if "field" not in row:
        kept = [said(line) for line in theirs]
        one = kept.pop(row["line"] - 1) if "removed" in row else kept[row["line"] - 1]
        if "removed" not in row:
            kept.insert(row["repeated_at"] - 1, one)
        assert kept == [said(line) for line in ours]
        assert row["refused_at_line"] == row.get("repeated_at", row["refused_at_line"])
        return
    differing = []
    for number, (before, after) in enumerate(zip(theirs, ours, strict=True), 1):
        old, new = json.loads(before), json.loads(after)
        differing += [(number, name) for name in old if name != "digest" and old[name] != new[name]]

    assert [(row["line"], row["field"].split("[")[0].split(".")[0])] == differing


def test_every_clause_has_a_rejected_log_or_a_reason() -> None:
    """Clauses without a rejected log are those that no single place can break, and are listed."""
    assert set(CLAUSES) - UNREACHED == {path.stem for path in REJECTED} == set(index())


def test_a_rejected_log_edits_the_part_that_its_clause_names() -> None:
    """Where an edit changes a part of a key or a reference, the text says to look at that part."""
    parts = {
        "key": ("epoch", "stage", "microbatch", "block", "invocation"),
        "ref": ("slot", "generation", "incarnation"),
    }
    rows = json.loads((LOGS / "rejected" / "index.json").read_text(encoding="utf-8"))
    compared = []
    for row in rows:
        head, _, place = row.get("field", "").rstrip("]").partition("[")
        named, _, part = CLAUSES[row["clause"]].argument.partition(".")
        if part and head == named and place:
            assert part == parts[head][int(place)], row
            compared.append(row["clause"])
    assert {"ownership.stale-reference", "ownership.unknown-slot"} <= {*compared}


class TestSchema:
    def test_every_transition_has_its_fields(self) -> None:
        """The schema's events have the fields that the recorder writes, in that order."""
        defs = schema()["$defs"]
        for transition, fields in FIELDS.items():
            part = defs[f"event.{transition}"]
            assert [*fields, "digest"] == list(part["properties"])
            assert [name for name in part["properties"] if name not in OPTIONAL] == part["required"]
            assert part["properties"]["transition"]["const"] == transition

    def test_header_and_closing_line_have_their_fields(self) -> None:
        """Likewise the first and the last line."""
        defs = schema()["$defs"]

        assert [*HEADER, CONTINUES, "digest"] == list(defs["header"]["properties"])
        assert ["events", "state", "digest"] == list(defs["closing"]["properties"])

    @pytest.mark.parametrize("name", sorted({*EVENT} - {"transition"}))
    def test_the_table_of_fields_accepts_what_the_schema_does(self, name: str) -> None:
        """Every field has one shape, in the schema and in the table of the reader and checker."""
        hexadecimal = "0" * 16
        destination = dict.fromkeys(("matrix", "dtype", "device"), "w")
        destination |= {"microbatch": None, "shape": [1], "address": 0, "nbytes": 4}
        ordered = {a.name: destination[a.name] for a in attrs.fields(Destination)}
        values: list[Any] = [-1, 1, 2, 3, 4, 7, 8, 1 << 70, True, None, 0.5, "x", hexadecimal]
        values += [[], ["w"], [1], [0] * 5, [0] * 4, [0, 0, hexadecimal], [0, 0, 0], [ordered], {}]
        values += [] if name == "seq" else [0]  # the number of an event, which the player compares
        part = jsonschema.Draft202012Validator(
            {"$ref": f"#/$defs/{name}", "$defs": schema()["$defs"]}
        )
        for value in values:
            assert part.is_valid(value) == EVENT[name].accepts(value), value

    def test_a_line_is_one_of_the_described_kinds(self) -> None:
        """The schema offers the header, every transition and the closing line, nothing else."""
        offered = {part["$ref"].removeprefix("#/$defs/") for part in schema()["oneOf"]}

        assert {"header", "closing", *(f"event.{t}" for t in FIELDS)} == offered

    def test_only_the_frame_is_not_semantic(self) -> None:
        """Every field is marked as semantic but the format's own and the reader's rank."""
        frame = {"qeffect", "version", "rank", "digest"}
        for path in VALID:
            for line in path.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                assert set(fields) - frame == set(semantic_fields(fields))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("key", [0, 0, 0, 0]),
            ("key", [0, 0, 0, 0, -1]),
            ("key", [0, 0, 0, 0, True]),
            ("ref", [0, 0, "0"]),
            ("ref", [0, 0, "000000005EED0001"]),
            ("ref", [-1, 0, "000000005eed0001"]),
            ("link", -1),
            ("link", "0"),
            ("token", 0.5),
            ("first", 4),
            ("destination", [{"matrix": "w"}]),
            ("destination", None),
            ("covered", "fc1"),
            ("covered", [1]),
            ("result", None),
            ("transition", "check"),
        ],
    )
    def test_schema_and_replayer_reject_the_same_shapes(self, field: str, value: object) -> None:
        """The schema rejects a field of another shape, and the replayer reports it as unusable."""
        from qeffect.log.checker import check_event

        lines = [
            json.loads(line)
            for path in VALID
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        event = next(line for line in lines if field in line and "transition" in line)

        assert validator().is_valid(event)
        event[field] = value
        assert not validator().is_valid(event)
        del event["digest"]
        with pytest.raises(LogError, match=field):
            check_event(event, "line 1")

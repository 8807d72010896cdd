"""
`report modes`: covers of pairs, the result of a row, and ranks that fail, hang or do not answer.

Most tests replace the Python interpreter of the ranks by a script; one test runs torch's own
pipeline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.lab.comparisons.modes import (
    FRAMEWORKS,
    Framework,
    Place,
    cover,
    pairs,
    rows_of,
    run_rows,
)
from qeffect.gpu_runtime.lab.statistics.modes import changed, derive_modes
from qeffect.report import UnusableError
from tests.runtime.report_samples import modes_report
from tests.torch_release import NEEDS_DEFERRED

PLACES = [
    ("torch", {"torch": "2.11.0"}, "cuda"),
    ("torch", {"torch": "2.13.0+cpu"}, "cpu"),
    ("torch", {"torch": "2.15.0"}, "cpu"),
    ("megatron", {}, "cpu"),
    ("megatron", {}, "cuda"),
    ("torchtitan", {}, "cpu"),
]


def framework(name: str, versions: Mapping[str, str], device: str) -> Framework:
    return FRAMEWORKS[name](versions, device)


class TestCover:
    @pytest.mark.parametrize(("name", "versions", "device"), PLACES)
    def test_each_pair_of_a_legal_row_is_covered(
        self, name: str, versions: Mapping[str, str], device: str
    ) -> None:
        """By at most twenty legal rows, the same ones each time."""
        modes = framework(name, versions, device)
        chosen = cover(modes.factors, modes.legal)
        had = set().union(*map(pairs, chosen))

        values = product(*modes.factors.values())
        every = [dict(zip(modes.factors, row, strict=True)) for row in values]
        assert {pair for row in every if modes.legal(row) for pair in pairs(row)} == had
        assert all(map(modes.legal, chosen))
        assert len(chosen) <= 20
        assert cover(modes.factors, modes.legal) == chosen

    def test_every_pair_of_values_without_a_rule(self) -> None:
        factors = {"a": (1, 2, 3), "b": "xy", "c": (False, True), "d": (0, 1)}
        chosen = cover(factors)

        for one, other in combinations(factors, 2):
            found = {(row[one], row[other]) for row in chosen}
            assert set(product(factors[one], factors[other])) == found
        assert len(chosen) < 10

    @pytest.mark.parametrize(("name", "versions", "device"), PLACES)
    def test_each_row_has_a_reference(
        self, name: str, versions: Mapping[str, str], device: str
    ) -> None:
        modes = framework(name, versions, device)
        rows = rows_of(modes)
        references = [row for row in rows if row["kind"] == "reference"]

        assert {row["numbers"] for row in rows} == {row["numbers"] for row in references}
        assert all(modes.legal(row["row"]) for row in references)


def raw(own: str, guarded: str = "", clauses: Sequence[str] = ()) -> dict[str, Any]:
    """A reference, and a row of some bits."""
    rows: list[dict[str, Any]] = modes_report()["raw"]["rows"][:2]
    for side, bits in (("plain", own), ("guarded", guarded or own)):
        rows[1][side] = {"losses": [1.0, 0.25], "bits": {**rows[0]["plain"]["bits"]}}
        rows[1][side]["bits"]["losses"] = [12 * "a", bits * 12]
    rows[1]["violations"] = [[clause, 0, 0, "F", "found"] for clause in clauses]
    return {"rows": rows}


class TestEnds:
    @pytest.mark.parametrize(
        ("own", "guarded", "clauses", "end"),
        [
            ("a", "a", [], "same"),
            ("b", "b", ["order.reordered"], "found"),
            ("a", "a", ["order.reordered"], "false alarm"),
            ("b", "b", [], "silent difference"),
            ("a", "b", [], "guard changes bits"),
            ("b", "a", ["order.reordered"], "guard changes bits"),
        ],
    )
    def test_a_row_ends_by_its_bits_and_clauses(
        self, own: str, guarded: str, clauses: list[str], end: str
    ) -> None:
        found = derive_modes(raw(own, guarded, clauses))
        (row,) = found["rows"]

        assert {end: 1} == found["ends"]
        assert (clauses, end) == (row["clauses"], row["end"])
        assert ([["losses", 1]] if own == "b" else []) == row["differs"]
        assert 0.25 == row["losses_apart"]

    def test_a_row_without_a_reference_is_not_the_same(self) -> None:
        given = raw("a")
        given["rows"][0] = {**given["rows"][0], "failed": "no answer", "guarded": False}

        assert {"no reference": 1} == derive_modes(given)["ends"]

    def test_pairs_of_a_failed_row_did_not_run(self) -> None:
        given = raw("a")
        failed = {
            "failed": "no",
            "guarded": False,
            "kind": "cover",
            "row": {"schedule": "V", "w": 1},
        }
        found = derive_modes({"rows": [*given["rows"], {**given["rows"][1], **failed}]})

        assert (2, 1) == (found["pairs"], found["pairs_that_ran"])
        assert {"same": 1, "refused": 1} == found["ends"]

    def test_what_differs_from_the_plainest(self) -> None:
        factors = {"schedule": ["GPipe", "V"], "walks": [1, 2]}

        assert "walks=2" == changed({"schedule": "GPipe", "walks": 2}, factors)
        assert "the plainest mode" == changed({"schedule": "GPipe", "walks": 1}, factors)


#: A rank: it says of each row what the row tells it to, and writes down that it began.
RANK = """#!{python}
import json, os, sys, time
rank, folder = int(sys.argv[4]), sys.argv[6]
with open(folder + "/rank%d.jsonl" % rank, "w", buffering=1) as out:
    out.write('{{"ready": true}}\\n')
    for one in json.load(open(folder + "/rows.json"))["rows"]:
        row = one["row"]
        if row["does"] == "hang" and rank == 1:
            time.sleep(1000)
        if row["does"] == "die" and rank == 1:
            os._exit(7)
        if row["does"] == "raise":
            out.write(json.dumps(dict(failed="ValueError: no", guarded=False, at=rank)) + "\\n")
            sys.exit(3)
        bits = dict(losses=[dict()], parameters=[{{str(rank): "x"}}])
        part = dict(losses=[[1.0 + rank]], bits=bits)
        guarded = dict(part, violations=[["c", rank, 0, "F", "f"]])
        said = dict(seconds=rank, plain=part, guarded=guarded)
        out.write(json.dumps(said) + "\\n")
"""


def ran(folder: Path, does: Sequence[str], limit_s: float = 100.0) -> list[dict[str, Any]]:
    """The results of rows (combinations of options) from ranks that are replaced by scripts."""
    script = folder / "rank"
    script.write_text(RANK.format(python=sys.executable))
    script.chmod(0o755)
    rows = [{"kind": "cover", "numbers": "", "row": {"layout": "pp2", "does": one}} for one in does]
    return run_rows(Place(str(script), limit_s=limit_s), "torch", rows)


class TestRanks:
    def test_what_the_ranks_say_is_one(self, tmp_path: Path) -> None:
        (found,) = ran(tmp_path, ["answer"])

        assert (1, 2) == (found["seconds"], found["ranks"])
        assert [1.5] == found["plain"]["losses"]
        assert [["c", 0, 0, "F", "f"], ["c", 1, 0, "F", "f"]] == found["violations"]

    def test_fresh_ranks_follow_a_row_that_fails(self, tmp_path: Path) -> None:
        """An exception has its text; a rank that ends without a word has its exit code."""
        found = ran(tmp_path, ["answer", "raise", "answer", "die", "answer"])

        assert [False, True, False, True, False] == ["failed" in one for one in found]
        assert "ValueError: no" == found[1]["failed"]
        assert "7" in found[3]["failed"]

    def test_a_row_that_does_not_end_is_ended(self, tmp_path: Path) -> None:
        (found,) = ran(tmp_path, ["hang"], limit_s=0.2)

        assert found["failed"].startswith("no answer within 0.2 s")

    def test_an_interpreter_without_the_framework(self, tmp_path: Path) -> None:
        script = tmp_path / "python"
        script.write_text("#!/bin/sh\necho ImportError: no torch >&2; exit 1\n")
        script.chmod(0o755)

        with pytest.raises(UnusableError, match=r"cannot import torch: .*no torch"):
            Place(str(script)).versions("torch")


@NEEDS_DEFERRED
@pytest.mark.ci
def test_rows_of_torch() -> None:
    """Two real ranks: a mode with the same bits, a mode that swaps tensors, and a refused mode."""
    modes = framework("torch", {"torch": "2.13.0"}, "cpu")
    plain = {name: values[0] for name, values in modes.factors.items()}
    given: list[dict[str, Any]] = [
        {},
        {"schedule": "Interleaved1F1B", "recompute": True},
        {"schedule": "ZBVZeroBubble", "defer_pp_recv": True},
        {"schedule": "Missing"},
    ]
    rows = [
        {"kind": "cover" if n else "reference", "numbers": "", "row": {**plain, **row}}
        for n, row in enumerate(given)
    ]
    found = derive_modes({"rows": json.loads(json.dumps(run_rows(Place(), "torch", rows)))})

    assert ["same", "found", "refused"] == [row["end"] for row in found["rows"]]
    assert ["schedule.message-order"] == found["rows"][1]["clauses"]
    assert "ScheduleMissing" in found["rows"][2]["said"]

"""
The evidence commands on a CPU: what they cover, how a planted difference shows, and what they
refuse.

The matrix of rows, histories, destinations and QKV layouts runs here over the reference backend:
four cases that contain every value of the matrix, and the rest in `make nightly`. `qeffect runtime
compare --device cpu --sets matrix` runs all cases at once.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
import torch

from qeffect.gpu_runtime.__main__ import main
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.commands import compare as command
from qeffect.gpu_runtime.lab.commands import probes
from qeffect.gpu_runtime.lab.commands.pools import record_of
from qeffect.gpu_runtime.lab.comparisons import faults, interleaved
from qeffect.gpu_runtime.lab.comparisons.capture_memory import DISCIPLINES, ORDERS, run_trial
from qeffect.gpu_runtime.lab.comparisons.cases import (
    DEFAULT_SETS,
    MATRIX,
    SETS,
    STEPWISE,
    TIMED,
    Case,
    fit_to_device,
    shrink,
)
from qeffect.gpu_runtime.lab.comparisons.recording import CATEGORIES, REQUIRED, Recording, compare
from qeffect.gpu_runtime.lab.comparisons.sides import fresh_stages, record
from qeffect.gpu_runtime.lab.reports.report import Report
from qeffect.gpu_runtime.lab.sides.cells import CELLS
from qeffect.gpu_runtime.lab.sides.columns import Settings
from qeffect.gpu_runtime.lab.statistics.derive import DERIVE
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.arena import RULES
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.refusals import Refused

from .helpers import guarded_run
from .orders import SCHEDULES, TABLE_ROWS
from .report_samples import ENVIRONMENT

COMMIT = ["--commit", "1" * 40]
CPU = ["compare", "--device", "cpu", *COMMIT]


class TestCases:
    @pytest.mark.parametrize(
        ("one", "other", "wanted"),
        [
            ("schedule", "rule", itertools.product((*SCHEDULES, "random"), RULES)),
            ("schedule", "history", itertools.product((*SCHEDULES, "random"), (4, 64))),
            ("rule", "history", itertools.product(RULES, (4, 64))),
        ],
    )
    def test_every_pair_occurs(self, one: str, other: str, wanted: Any) -> None:
        """Orders, destinations and histories are covered pairwise at hidden 512 for 20 steps."""
        cases = [case for case in STEPWISE if (case.hidden, case.steps) == (512, 20)]

        held = {(getattr(case, one), getattr(case, other)) for case in cases}

        assert set(wanted) <= held

    def test_names_are_unique(self) -> None:
        """A name chooses one case, in all sets together."""
        names = [case.name for cases in SETS.values() for case in cases]

        assert len(names) == len(set(names))

    def test_the_matrix_is_whole(self) -> None:
        """Every row of every table, history, destination and QKV layout, once."""
        held = {(c.schedule, c.rank, c.history, c.rule, c.fused_qkv) for c in MATRIX}

        wanted = {
            (*row, history, rule, fused)
            for row, history, rule, fused in itertools.product(
                TABLE_ROWS, (4, 16, 64), RULES, (True, False)
            )
        }
        assert wanted == held
        assert len(wanted) == len(MATRIX) == 108
        assert {(128, 64, 20)} == {(c.hidden, c.sequence, c.steps) for c in MATRIX}

    def test_the_timed_shapes_are_the_benchmarks(self) -> None:
        """Every cell of the step table is compared: its dimensions, its order, its history."""
        held = {(c.config, c.order(), c.history, c.scaling, c.num_layers) for c in TIMED}

        assert {
            (cell.config, cell.order(), Settings().history, "delayed", 1) for cell in CELLS
        } == held
        assert {"copied", "per_microbatch", "accumulate"} == {case.rule for case in TIMED}
        assert all(case.recorded_from == case.steps - 1 for case in TIMED)

    def test_the_matrix_is_not_made_smaller_on_a_cpu(self) -> None:
        """Its cases are small already and keep their 20 steps; larger ones shrink."""
        assert all(shrink(case) == case for case in MATRIX)
        assert {128} == {fit_to_device(case).sequence for case in MATRIX}
        assert all(fit_to_device(case) == case for case in (*STEPWISE, *TIMED))
        assert all(shrink(case).hidden == 128 for case in STEPWISE)
        assert "matrix" not in DEFAULT_SETS

    @pytest.mark.parametrize("case", [STEPWISE[0], MATRIX[5], ORDERS[0]], ids=lambda c: c.name)
    def test_a_case_crosses_processes(self, case: Case) -> None:
        """As plain data, its order included."""
        again = Case.from_json(json.loads(json.dumps(case.to_json())))

        assert case == again
        assert case.order() == again.order()


def agrees(case: Case) -> None:
    """Native full backward and the guarded runtime give the same bits in every category."""
    native = record(case, "native", "reference", "cpu")
    eager = record(case, "eager", "reference", "cpu")
    assert native is not None
    assert eager is not None

    result = compare(native, eager, categories=(*CATEGORIES, *REQUIRED))

    assert result.mismatched == 0, str(result)
    assert all(category.compared for category in result.categories)


# Neighbours in the matrix differ in their QKV layout alone; taking turns spreads the layouts.
LAYOUT = [2 * pair + pair % 2 for pair in range(len(MATRIX) // 2)]
# A row of the matrix is nine pairs, histories by destinations: of each row three, so that every two
# of row, history and destination meet. The others are nightly.
SQUARE = [n for pair, n in enumerate(LAYOUT) if (pair // 9 + pair % 9 // 3 + pair % 3) % 3 == 0]
# Four of those hold each schedule, rank, history, destination and layout; the others are nightly.
# `test_numerics.py` has every row with every history, and compares the same two sides.
FEW = SQUARE[5], SQUARE[11], SQUARE[12], SQUARE[16]


class TestMatrix:
    def test_every_two_of_what_a_case_is_made_of_meet(self) -> None:
        """Row, history and destination, in a third of the cases; no case is left out."""
        names = [MATRIX[n].name.split("-")[:3] for n in LAYOUT]
        taken = [MATRIX[n].name.split("-")[:3] for n in SQUARE]
        assert len(names) == 3 * len(taken) == 54
        for a, b in ((0, 1), (0, 2), (1, 2)):
            assert {(name[a], name[b]) for name in names} == {(t[a], t[b]) for t in taken}

    def test_everything_that_a_case_is_made_of_occurs_in_few(self) -> None:
        """Each schedule, rank, history, destination and QKV layout."""
        parts = ("schedule", "rank", "history", "rule", "fused_qkv")
        for part in parts:
            few, every = ({getattr(MATRIX[n], part) for n in ns} for ns in (FEW, SQUARE))
            assert few == every, part

    @pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                MATRIX[n],
                marks=() if n == FEW[0] else pytest.mark.ci if n in FEW else pytest.mark.nightly,
                id=MATRIX[n].name,
            )
            for n in SQUARE
        ],
    )
    def test_the_matrix_agrees_where_every_two_meet(self, case: Case) -> None:
        """20 steps: a third of the rows with histories and destinations, in one QKV layout."""
        agrees(case)

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        "case", [MATRIX[n] for n in LAYOUT if n not in SQUARE], ids=lambda c: c.name
    )
    def test_the_rest_of_the_matrix_agrees_in_one_layout(self, case: Case) -> None:
        """20 steps: the other two thirds of every row with every history and every destination."""
        agrees(case)

    @pytest.mark.nightly
    @pytest.mark.parametrize("case", [MATRIX[n ^ 1] for n in LAYOUT], ids=lambda c: c.name)
    def test_the_matrix_agrees_in_the_other_layout(self, case: Case) -> None:
        """The same in the other QKV layout."""
        agrees(case)


class TestCompare:
    @pytest.mark.nightly
    def test_two_cases_with_faults(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Fresh processes, all categories, faults injected: no bit differs."""
        out = tmp_path / "compare.json"
        names = ["zbv-accumulate-h4", "izb-arena-h4"]
        sides = ["native", "native-again", "eager", "disturbed"]

        code = main([*CPU, "--cases", *names, "--sides", *sides, "--steps", "5", "--out", str(out)])

        assert 0 == code
        report = json.loads(out.read_text())
        jsonschema.Draft202012Validator(reports.schema()).validate(report)
        assert report["complete"]
        assert DERIVE["compare"](report["raw"]) == report["derived"]
        assert [] == report["raw"]["failures"]
        runs = report["raw"]["runs"]
        assert set(itertools.product(names, sides[1:])) == {
            (run["case"]["name"], run["candidate"]) for run in runs
        }
        for run in runs:
            held = CATEGORIES if run["candidate"] == "native-again" else (*CATEGORIES, *REQUIRED)
            assert [*held] == [entry["category"] for entry in run["categories"]]
            injected = {entry["fault"] for entry in run["injected"]}
            assert (injected >= faults.ROWS.keys()) is (run["candidate"] == "disturbed")
        derived = report["derived"]
        assert 0 == derived["mismatched"]
        assert derived["native_against_ours"]["compared"] > 9_000
        assert derived["faults"].keys() >= {row["clause"] for row in faults.ROWS.values()}
        assert "0 mismatched" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "what",
        [
            "bit",
            pytest.param("missing", marks=pytest.mark.nightly),
            pytest.param("failure", marks=pytest.mark.ci),
        ],
    )
    def test_a_planted_difference(
        self,
        what: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        """One other digest, one missing value or one failed side is found, named, and exit 1."""
        real = command.record
        # Sides are threads of one process here; growth counts what a process holds, so in turn.
        alone = threading.Lock()

        def planted(case: Case, side: str, backend: str, device: str) -> Recording | None:
            with alone:
                found = real(case, side, backend, device)
            if side == "eager" and found is not None:
                if what == "failure":
                    raise RuntimeError("planted")
                held = found.values["parameters"]
                label = next(iter(held))
                if what == "bit":
                    held[label] = held[label][:-1] + "x"
                else:
                    del held[label]
            return found

        monkeypatch.setattr(command, "record", planted)
        monkeypatch.setattr(multiprocessing, "get_context", lambda _: Threads())
        out = tmp_path / "compare.json"
        asked = ["--cases", "zbv-accumulate-h4", "--sides", "native", "eager", "--steps", "1"]

        assert 1 == main([*CPU, *asked, "--out", str(out)])

        report = json.loads(out.read_text())
        said = capsys.readouterr()
        if what == "failure":
            (failure,) = report["raw"]["failures"]
            assert ("zbv-accumulate-h4", "eager") == (failure["case"], failure["side"])
            assert "planted" in failure["error"]
            assert "failed: zbv-accumulate-h4 eager" in said.out
            return
        assert 1 == report["derived"]["mismatched"]
        assert 1 == report["derived"]["categories"]["parameters"]["mismatched"]
        (run,) = report["raw"]["runs"]
        (entry,) = [e for e in run["categories"] if e["mismatched"]]
        assert entry["first"][0].startswith("step 0 stage")
        assert "DIFFER {'parameters': 1}" in said.err

    def test_a_case_that_nobody_could_compare_is_a_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Native cannot form some sums; alone with one other side, nothing would be compared."""
        monkeypatch.setattr(multiprocessing, "get_context", lambda _: Threads())
        monkeypatch.setattr(
            command, "record", lambda _, side, *__: None if side == "native" else Recording("x")
        )
        report = Report("compare", None, ENVIRONMENT, {}, {"runs": [], "failures": []})

        command.compare_cases([STEPWISE[0]], ["native", "eager"], "cpu", report, print)

        (failure,) = report.raw["failures"]
        assert "fewer than two sides ran, so nothing was compared" == failure["error"]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--cases", "nonsense"], "unknown case 'nonsense'; choose from"),
            (["--steps", "0"], "--steps must be at least 1, not 0"),
            (["--sides", "native"], "--sides native names one side, but"),
            (["--sides", "native", "captured"], "a CPU has no CUDA graphs"),
            (["--sides", "native", "disturbed", "--steps", "4"], "before the last fault"),
            (["--sets", "recipes"], "only cases with delayed scaling"),
            (["--device", "cuda"], "found no CUDA device; --device cpu"),
            (["--commit", "main"], "--commit takes 40 hexadecimal digits"),
            (["--out", "nowhere/at/all.json"], "--out nowhere/at/all.json: there is no folder"),
        ],
    )
    def test_bad_arguments_are_one_line_before_anything_runs(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Exit code 2 and one clear line, before anything runs."""
        assert 2 == main([*CPU, *arguments])

        got = capsys.readouterr()
        assert "" == got.out
        assert 1 == len(got.err.splitlines())
        assert got.err.startswith("qeffect: ")
        assert said in got.err

    @pytest.mark.parametrize("arguments", [["--sets", "none"], ["--sides", "both"], ["--device"]])
    def test_choices_are_listed_in_one_line(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Choices are listed by the parser; exit code 2 and one line as well."""
        assert 2 == main(["compare", *arguments])

        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"qeffect: {arguments[0]}: expected ")


class Threads:
    """Stands in for a multiprocessing context, so that what a test plants reaches the sides."""

    Pipe = staticmethod(multiprocessing.Pipe)

    @staticmethod
    def Process(target: Callable[..., None], args: Any, daemon: bool) -> threading.Thread:
        """A thread with an end of the pipe of its own, as a process would have."""
        pipe, *rest = args
        own = Connection(os.dup(pipe.fileno()))

        def run() -> None:
            target(own, *rest)
            own.close()

        return threading.Thread(target=run, daemon=daemon)


class TestFaults:
    def test_an_accepted_fault_is_no_success(self) -> None:
        """Injection fails when the kernel accepts, names another clause, or changes something."""
        runtime = guarded_run(Order.parse("0F0 0I0 0W0")).runtime

        def refuse() -> None:
            refusal = Refused("order.token")
            refusal.transition = "check_dgrad"
            raise refusal

        def change() -> None:
            runtime.contract.memory.token[0] += 1
            refuse()

        wanted = {"clause": "order.token", "transition": "check_dgrad"}
        assert wanted == faults.require_refusal(runtime, **wanted, action=refuse)
        with pytest.raises(AssertionError, match=r"accepted; expected order\.token"):
            faults.require_refusal(runtime, **wanted, action=lambda: None)
        with pytest.raises(
            AssertionError, match=r"refused by order\.token in check_dgrad, expected"
        ):
            faults.require_refusal(runtime, "arena.mismatch", "check_dgrad", refuse)
        with pytest.raises(AssertionError, match=r"expected order\.token in finalize"):
            faults.require_refusal(runtime, "order.token", "finalize", refuse)
        with pytest.raises(AssertionError, match="the refused call changed token"):
            faults.require_refusal(runtime, **wanted, action=change)

    def test_an_undisturbed_runtime_has_no_reduction_to_interrupt(self) -> None:
        """Without one a row of the table could not be injected, and that is said."""
        run = guarded_run(Order.parse("0F0 0F1 0I0 0I1 0W0 0W1"))
        run.step()
        with pytest.raises(AssertionError, match="expected a reduction that can be interrupted"):
            faults.inject_faults(run, 1)

    def test_every_case_is_long_enough_for_every_fault(self) -> None:
        """Faults belong to steps 1 to 4; a shorter case would never meet the last."""
        cases = [case for cases in SETS.values() for case in cases]
        assert [1, 2, 3, 4] == sorted(faults.INJECTED)

        assert min(case.steps for case in cases) > max(faults.INJECTED)


class TestPools:
    """The capture-memory trials with the reference backend, where no memory is shared."""

    @pytest.mark.parametrize(
        ("case", "action", "position"),
        list(zip(ORDERS, ("0I0", "0F2", "1F1"), (3, 5, 2), strict=True)),
        ids=lambda v: getattr(v, "name", None),
    )
    def test_the_kernel_refuses_a_shared_pool(self, case: Case, action: str, position: int) -> None:
        """At the first action that is not in capture order; then nobody is asked."""
        short = attrs.evolve(shrink(case), steps=2)

        found = run_trial(short.to_json(), "shared", "reference", "cpu")

        refused = {"clause": "capture.out-of-order", "action": action, "position": position}
        assert refused == found["refused"]
        assert found["error"] is None

    def test_a_declared_order_in_a_shared_pool_is_refused_before_it_runs(self) -> None:
        """The runtime is not even made, and the message says what to give each slot."""
        stages = fresh_stages(shrink(ORDERS[0]), "reference", device="cpu")
        config = RuntimeConfig(readers=True, pool="shared")

        with pytest.raises(
            ValueError, match=r"cannot run to its end: .* each slot a pool of its own"
        ):
            Runtime(stages, ORDERS[0].order(), config)

    @pytest.mark.parametrize(
        "case",
        [ORDERS[0], *(pytest.param(case, marks=pytest.mark.nightly) for case in ORDERS[1:])],
        ids=lambda c: c.name,
    )
    def test_every_discipline_computes_the_same(self, case: Case) -> None:
        """Eager, where a pool's name moves no memory, guarded or not: native's bits."""
        short = attrs.evolve(shrink(case), steps=2).to_json()
        native = run_trial(short, "native", "reference", "cpu")

        for discipline in DISCIPLINES:
            own = run_trial(short, discipline, "reference", "cpu")
            run = record_of(Case.from_json(short), discipline, native, own)
            assert 4 == len(run["categories"])
            assert 0 == sum(entry["mismatched"] for entry in run["categories"])
            assert ("shared" == discipline) is (run["refused"] is not None)

    def test_differences_and_failures_are_recorded(self) -> None:
        """One other digest is one mismatch with its label; a failed run has its error."""
        case = attrs.evolve(shrink(ORDERS[0]), steps=1)
        native = run_trial(case.to_json(), "native", "reference", "cpu")
        other = json.loads(json.dumps(native))
        held = other["recording"]["values"]["input gradients"]
        label = next(iter(held))
        held[label] = "other"

        run = record_of(case, "private", native, other)
        failed = record_of(case, "private", native, {"error": "it died"})

        assert [label] == [first for entry in run["categories"] for first in entry["first"]]
        assert "it died" == failed["error"]
        assert [] == failed["categories"]

    def test_values_that_are_no_numbers_are_counted(self) -> None:
        """In outputs and gradients, not in digests."""
        import torch

        from qeffect.gpu_runtime.lab.comparisons.capture_memory import FiniteRecording

        recording = FiniteRecording("test")
        bad = torch.tensor([1.0, float("nan"), float("inf")]).bfloat16()
        recording.add_all("outputs", "here", {"0": bad})
        recording.add_all("caches", "here", {"0": bad})

        assert 2 == recording.nonfinite

    @pytest.mark.parametrize(
        ("arguments", "said"), [([], "expected a GPU"), (["--steps", "0"], "--steps must be")]
    )
    def test_on_a_cpu(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One line, and exit code 2."""
        assert 2 == main(["report", "pools", *arguments])

        got = capsys.readouterr()
        assert said in got.err
        assert 1 == len(got.err.splitlines())


class TestProbes:
    def test_the_pairing_is_read_from_the_source(self) -> None:
        """Each statement by its line; one that is missing has none."""
        source = "\n".join(("", *(f"    {statement}" for statement in probes.PAIRING[:2])))

        found = probes.find_pairing(source)

        assert [2, 3, None] == list(found["lines"].values())
        assert 64 == len(found["sha256"])

    def test_digests_are_compared_by_name(self) -> None:
        """What differs and what is missing is counted, and the first of them named."""
        same = {"compared": 2, "different": 0, "first": None}
        assert same == interleaved.differences({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
        found = interleaved.differences({"a": "1", "b": "2"}, {"a": "1"})
        assert {"compared": 2, "different": 1, "first": "b"} == found

    def test_the_ranks_run_their_chunks_in_other_orders(self) -> None:
        """Or the side that captures in the other rank's order would show nothing."""
        own, other = (interleaved.actions_of(rank) for rank in (0, 1))

        assert own != other
        assert sorted(own) == sorted(other)
        assert 2 * 2 * interleaved.MICROBATCHES == len(own)

    def test_a_late_reader_reads_what_is_there_then(self) -> None:
        """A result that is overwritten before it is read is read as overwritten."""
        for late, expected in ((0, True), (1, False)):
            record = interleaved._Record()
            reader = interleaved._Late(record, late)
            result = torch.zeros(3)
            reader.give("first", result)
            result.fill_(torch.nan)
            reader.give("second", torch.ones(3))
            reader.end()

            assert expected is (record.not_finite is None)
            assert {"first", "second"} == record.digests.keys()

    def test_every_side_but_the_right_ones_breaks_a_relation(self) -> None:
        """Each of the wrong ones differs from a right one in one thing."""
        right = [side for side in interleaved.GRAPH_USES if side.breaks is None]
        wrong = [side for side in interleaved.GRAPH_USES if side.breaks is not None]
        for side in wrong:
            changes = [
                sum(getattr(side, name) != getattr(other, name) for name in ("late", "taken"))
                + (side.captured_by != other.captured_by)
                for other in right
                if (other.graphs, other.reuse) == (side.graphs, side.reuse)
            ]
            assert 1 == min(changes), side.name

    def test_invalid_writes_are_counted_by_kernel(self) -> None:
        """As compute-sanitizer says them, reads left out."""
        said = (
            "========= Invalid __global__ write of size 16 bytes\n"
            "=========     at some_bprop_kernel+0x10 in x.cu\n"
            "========= Invalid __global__ read of size 4 bytes\n"
            "=========     at other+0x10\n"
        )

        found = probes.sanitizer_findings(2 * said)

        assert {"invalid_writes": 2, "write_bytes": [16], "kernels": ["some_bprop_kernel"]} == found

    @pytest.mark.slow
    def test_on_a_cpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The reference backend runs every length; the library is not there to be read."""
        out = tmp_path / "probes.json"

        assert 0 == main(["report", "probes", "--device", "cpu", *COMMIT, "--out", str(out)])

        report = json.loads(out.read_text())
        jsonschema.Draft202012Validator(reports.schema()).validate(report)
        assert [None] * 3 == [run["error"] for run in report["raw"]["attention"]]
        assert report["raw"]["addresses"]["median_us"] > 0
        assert "not installed or binds otherwise" in capsys.readouterr().out

    def test_without_a_device(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One line, and exit code 2."""
        assert 2 == main(["report", "probes", *COMMIT])
        assert "found no CUDA device" in capsys.readouterr().err


class TestOtherCommands:
    def test_the_doctor_names_what_is_missing_with_its_remedy(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It names what is missing with its remedy; the reference backend works here."""
        assert 0 == main(["doctor"])

        out = capsys.readouterr().out
        assert "reference backend, eager: works" in out
        assert "miss  CUDA device          none" in out
        assert "Transformer Engine, captured: does not work here" in out

    def test_doctor_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One object, with a remedy for everything that is missing."""
        assert 0 == main(["doctor", "--json"])

        found = json.loads(capsys.readouterr().out)
        assert found["reference_backend"]
        assert not found["transformer_engine_captured"]
        assert all(f["works"] or f["remedy"] for f in found["findings"])

    @pytest.mark.nightly
    def test_the_demo_gives_the_bits_of_native(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Guarded steps and native ones, in processes of their own: the same bits."""
        assert 0 == main(["demo", "--steps", "2"])

        out = capsys.readouterr().out
        assert "the reference backend, eager" in out
        assert "The same bits" in out
        assert all(category in out for category in CATEGORIES)

    def test_demo_of_no_steps(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A clear line."""
        assert 2 == main(["demo", "--steps", "0"])
        assert "--steps must be at least 1" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["demo", "report bench --help", "report streams", "doctor"])
    def test_without_torch_a_command_names_the_extra(self, name: str) -> None:
        """Any command says what is missing and how to get it, and exits with 2."""
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "from qeffect.gpu_runtime.__main__ import main\n"
            f"raise SystemExit(main({name.split()!r}))"
        )

        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )

        assert 2 == done.returncode
        assert "Traceback" not in done.stderr
        assert "pip install 'qeffect[torch]'" in (done.stdout if name == "doctor" else done.stderr)

"""The benchmark's machinery, with scripted and toy columns and with the reference backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from qeffect.cli import main
from qeffect.gpu_runtime.backends.devices import visible_id
from qeffect.gpu_runtime.backends.protocol import parameters
from qeffect.gpu_runtime.lab.reports.report import Report, environment
from qeffect.gpu_runtime.lab.runner import device
from qeffect.gpu_runtime.lab.runner.column_process import ColumnProcess
from qeffect.gpu_runtime.lab.runner.device import MemoryPoll, parse
from qeffect.gpu_runtime.lab.runner.processes import ChildError
from qeffect.gpu_runtime.lab.runner.rounds import CellRun
from qeffect.gpu_runtime.lab.sides.cells import (
    CELLS,
    SWEEP_MICROBATCHES,
    TINY,
    BenchCell,
    cells_named,
    sweep_cell,
)
from qeffect.gpu_runtime.lab.sides.columns import (
    COUNTED,
    LATE,
    REFERENCE_SPECS,
    SPECS,
    SWEEP_SPECS,
    UNGUARDED,
    ColumnSpec,
    Settings,
    specs_named,
)
from qeffect.gpu_runtime.lab.sides.ours import Ours
from qeffect.gpu_runtime.lab.sides.reference import NativeReference
from qeffect.gpu_runtime.lab.statistics.traces import (
    busy_times,
    kind_of,
    launch_shares,
    matrix_copies,
    summarize,
    times_by_kind,
    times_by_name,
)
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.step.plan.slots import plan_slots
from tests.profiles import few

from . import toys

COMMIT = "0" * 40


def bench(*words: str) -> int:
    """Run `qeffect runtime report bench`; return its exit code."""
    return main(["runtime", "report", "bench", *words, "--commit", COMMIT])


def scripted_run(
    log: list[tuple[str, str]],
    specs: Sequence[ColumnSpec] = (toys.spec("a"), toys.spec("b"), toys.spec("c")),
    *,
    fails: dict[str, tuple[str, int]] | None = None,
    **changes: Any,
) -> CellRun:
    """A run whose workers answer from a script."""

    def make(
        spec: ColumnSpec, cell: BenchCell, settings: Settings, *, profiles: bool = False
    ) -> toys.Scripted:
        log.append((spec.name, "start to profile" if profiles else "start to time"))
        return toys.Scripted(log, spec.name, [0.1, 0.2, 0.3], (fails or {}).get(spec.name))

    return CellRun(TINY, specs, attrs.evolve(toys.SETTINGS, **changes), make_column=make)


class TestRounds:
    def test_columns_take_turns_and_each_round_starts_with_another(self) -> None:
        """Every round runs every column once, rotated by one."""
        log: list[tuple[str, str]] = []
        scripted_run(log).run()

        turns = [name for name, method in log if method == "turn"]
        assert ["abc", "bca", "cab"] == ["".join(turns[n : n + 3]) for n in (0, 3, 6)]

    def test_set_up_is_one_column_at_a_time_and_before_any_turn(self) -> None:
        """Nothing is built while another column is measured; what is profiled is built anew."""
        log: list[tuple[str, str]] = []
        scripted_run(log).run()

        del log[log.index(("a", "start to profile")) :]
        methods = [method for _, method in log]
        assert methods.index("turn") > max(i for i, m in enumerate(methods) if m == "build")
        assert [name for name, method in log if method == "build"] == ["a", "b", "c"]

    def test_the_profiler_runs_in_processes_that_start_after_all_timed_ones_ended(self) -> None:
        """What is timed in a process that profiled once is slower for ever."""
        log: list[tuple[str, str]] = []
        scripted_run(log).run()

        starts = [n for n, (_, method) in enumerate(log) if method == "start to profile"]
        assert 3 == len(starts)
        for n, (_, method) in enumerate(log):
            assert (method == "trace") <= (n > max(starts))
            assert (method in ("turn", "memory", "host_actions")) <= (n < min(starts))
        for name in "abc":
            methods = [method for who, method in log if who == name]
            assert methods.index("end") < methods.index("start to profile")
            assert ["start to profile", "prepare", "build", "trace", "end"] == methods[-5:]

    def test_without_a_profile_nothing_starts_again(self) -> None:
        """As in the sweep, and with --no-profile."""
        log: list[tuple[str, str]] = []
        record = scripted_run(log, profile_steps=0).run()

        assert "start to profile" not in {method for _, method in log}
        assert [None] * 3 == [column["trace"] for column in record["columns"].values()]

    def test_a_failing_column_is_recorded_and_the_others_go_on(self) -> None:
        """It fails in its second turn: its error stands in the record, its worker is ended."""
        log: list[tuple[str, str]] = []
        record = scripted_run(log, fails={"b": ("turn", 1)}).run()

        assert "scripted" == record["columns"]["b"]["error"]
        assert [1, 3, 3] == [len(record["columns"][n]["rounds"]) for n in ("b", "a", "c")]
        assert record["columns"]["a"]["error"] is None
        assert ("b", "end") in log
        assert log.index(("b", "end")) < len(log) - 2

    @pytest.mark.parametrize("method", ["prepare", "build", "memory", "trace"])
    def test_a_column_may_fail_anywhere(self, method: str) -> None:
        """No method's failure stops the table."""
        record = scripted_run([], fails={"b": (method, 0)}).run()

        assert "scripted" == record["columns"]["b"]["error"]
        assert record["columns"]["c"]["trace"] is not None

    def test_growth_is_asked_for_over_the_steps_that_were_wanted(self) -> None:
        """Rounds count: 3 turns of 4 + 1 + 1 steps leave 22 of 40 to run."""
        log: list[tuple[str, str]] = []
        specs = [toys.spec("ours", family="ours_captured"), toys.spec("native")]
        record = scripted_run(log, specs).run()

        assert 40 == record["columns"]["ours"]["growth"]["steps"]
        assert 18 == record["columns"]["native"]["growth"]["steps"]
        assert 4 == [who for who, method in log if method == "turn"].count("ours")

    def test_a_run_that_is_interrupted_leaves_a_report_of_what_it_had(self, tmp_path: Path) -> None:
        """The file is valid JSON with the finished rounds, marked incomplete, and workers end."""
        log: list[tuple[str, str]] = []
        report = Report(
            "bench",
            tmp_path / "report.json",
            environment(COMMIT),
            {"quick": True, "settings": attrs.asdict(toys.SETTINGS)},
            {"cells": []},
        )
        run = scripted_run(log)
        saved = 0

        def save() -> None:
            nonlocal saved
            report.save()
            saved += 1
            if saved == 5:
                raise KeyboardInterrupt

        run.save = save
        report.raw["cells"].append(run.record)
        with pytest.raises(KeyboardInterrupt):
            run.run()

        left = json.loads((tmp_path / "report.json").read_text())
        assert left["complete"] is False
        assert [2, 2, 2] == [
            len(column["rounds"]) for column in left["raw"]["cells"][0]["columns"].values()
        ]
        assert {"a", "b", "c"} == {who for who, method in log if method == "end"}


class TestWorkers:
    def test_a_worker_process_runs_a_column(self) -> None:
        """Facts come back from a process that is not this one."""
        worker = ColumnProcess(toys.spec("a"), TINY, toys.SETTINGS)
        worker.post("build")
        built = worker.collect(60)
        worker.post("turn", steps=2, warm_steps=1)
        turn = worker.collect(60)
        worker.end()

        assert {"steps": 2} == built["facts"]
        assert 2 == turn["steps"]
        assert turn["wall_s"] > 0

    @pytest.mark.ci
    @pytest.mark.parametrize("profiles", few([False, True], (1,), ()))
    def test_a_worker_that_times_cannot_profile(self, profiles: bool) -> None:
        """A step that uses the profiler fails the column, unless its process is for that."""
        worker = ColumnProcess(toys.spec("a", profile=True), TINY, toys.SETTINGS, profiles=profiles)
        worker.post("build")
        refusal = pytest.raises(ChildError, match="in a process that times steps")
        with nullcontext() if profiles else refusal:
            worker.collect(60)
        worker.end()

    @pytest.mark.ci
    def test_an_exception_becomes_one_line(self) -> None:
        """The parent hears the type and the first line, and the process can go on."""
        worker = ColumnProcess(toys.spec("a", fail_in="warm"), TINY, toys.SETTINGS)
        worker.post("build")
        with pytest.raises(ChildError, match=r"^ValueError: told to fail in warm$"):
            worker.collect(60)
        worker.post("close")
        assert {} == worker.collect(60)
        worker.end()

    def test_a_process_that_dies_is_a_failed_column(self) -> None:
        """The exit code is named."""
        worker = ColumnProcess(toys.spec("a", die_in="step"), TINY, toys.SETTINGS)
        worker.post("build")
        with pytest.raises(ChildError, match="exit code 7"):
            worker.collect(60)
        worker.end()

    @pytest.mark.ci
    def test_a_process_that_does_not_answer_is_ended(self) -> None:
        """Waiting has a limit, after which the process is gone."""
        worker = ColumnProcess(toys.spec("a"), TINY, toys.SETTINGS)
        with pytest.raises(ChildError, match="no answer within"):
            worker.collect(0.01)
        assert not worker._process.alive

    def test_a_worker_inside_this_process_behaves_alike(self) -> None:
        """Same answers, same failures."""
        worker = toys.InlineColumn(toys.spec("a", fail_in="build"), TINY, toys.SETTINGS)
        worker.post("build")
        with pytest.raises(ChildError, match=r"^ValueError: told to fail in build$"):
            worker.collect(1)
        worker.end()


class TestCells:
    def test_the_three_cells_are_those_of_the_tables(self) -> None:
        """Hidden, ffn, sequence, microbatches; heads of 128."""
        assert [
            (2048, 8192, 256, 4),
            (4096, 11008, 256, 8),
            (4096, 11008, 4096, 4),
        ] == [(c.hidden, c.ffn, c.sequence, c.microbatches) for c in CELLS]
        assert [16, 32, 32] == [c.config.heads for c in CELLS]

    def test_chunks_run_in_the_order_of_interleaved_1f1b(self) -> None:
        """At PP=1 the second chunk's backward comes before the first chunk's next forward."""
        order = " ".join(str(step) for step in CELLS[0].order().steps)
        assert order.startswith("0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1")

    def test_live_tapes_of_the_sweep_are_flat_from_four_microbatches_on(self) -> None:
        """So the sweep has something to be flat over, and the paper's provisioning is not."""
        live, paper = (
            [
                sum(plan_slots(sweep_cell(CELLS[0], m).order(), provisioning).num_slots.values())
                for m in SWEEP_MICROBATCHES
            ]
            for provisioning in ("live", "static")
        )
        assert [4, 5, 5, 5, 5] == live
        assert [4, 8, 16, 32, 64] == paper

    def test_an_unknown_cell_is_named_with_the_known_ones(self) -> None:
        """One line says what there is."""
        with pytest.raises(ValueError, match=r"unknown cell 'h9'; choose from .*h2048-s256-m4"):
            cells_named(["h9"])

    def test_cells_survive_json(self) -> None:
        """A worker and a report see the same cell."""
        cell = sweep_cell(CELLS[0], 8)
        assert cell == BenchCell.from_json(json.loads(json.dumps(cell.to_json())))


class TestColumns:
    def test_every_column_can_be_made_without_a_device(self) -> None:
        """Factories import and construct; only build() needs what they run on."""
        settings = Settings()
        for spec in (*SPECS, UNGUARDED, COUNTED, LATE, *SWEEP_SPECS, *REFERENCE_SPECS):
            assert callable(spec.make(TINY, settings).step)

    def test_the_table_has_every_contender(self) -> None:
        """Both native rules, TE's graphs, a whole step of each rule, ours in all destinations."""
        assert {"native", "te_graphs", "whole_step", "ours_eager", "ours_captured"} == {
            spec.family for spec in SPECS
        }
        assert {"copied", "per_microbatch", "accumulate"} == {
            spec.options["destination"] for spec in SPECS if spec.family == "ours_captured"
        }
        for family in ("native", "whole_step"):
            assert {"grad", "main_grad"} == {s.rule for s in SPECS if s.family == family}

    def test_names_may_be_shortened(self) -> None:
        """A leading part names a group; an exact name only itself."""
        assert {"te_graphs"} == {spec.family for spec in specs_named(["te"], SPECS)}
        assert ["whole_grad"] == [spec.name for spec in specs_named(["whole_grad"], SPECS)]
        with pytest.raises(ValueError, match="unknown column 'nvfuser'"):
            specs_named(["nvfuser"], SPECS)

    @pytest.mark.parametrize("guards", [True, False])
    def test_ours_trains_to_the_same_bits_as_native(self, guards: bool) -> None:
        """Columns that are compared do the same arithmetic, with guards and without."""
        native = NativeReference(TINY, toys.SETTINGS)
        ours = Ours(TINY, toys.SETTINGS, "per_microbatch", "live", "eager", guards=guards)
        for column in (native, ours):
            column.build()
            column.warm()
            for _ in range(4):
                column.step()

        compared = 0
        for stage in ours.stages:
            reference = parameters(native.stages[stage.index])
            for name, parameter in parameters(stage).items():
                assert same_bits(reference[name], parameter), name
                compared += 1
        assert 24 == compared

    @pytest.mark.parametrize("destination", ["copied", "per_microbatch", "accumulate"])
    def test_leaving_guards_out_changes_no_bit(self, destination: Any) -> None:
        """Guards on and off differ in what is asked, never in what is done."""
        runs = []
        for guards in (True, False):
            column = Ours(TINY, toys.SETTINGS, destination, "live", "eager", guards=guards)
            column.build()
            column.warm()
            for _ in range(3):
                column.step()
            runs.append([p for stage in column.stages for p in parameters(stage).values()])
        assert len(runs[0]) == 24
        assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))

    def test_the_sweep_runs_in_both_provisionings(self) -> None:
        """A rank's row whose stages do not feed each other, with slots and arena as planned."""
        facts = {}
        for spec in SWEEP_SPECS:
            column = spec.make(sweep_cell(TINY, 4), toys.SETTINGS)
            column.build()
            column.warm()
            column.step()
            facts[spec.name] = column.facts()
        assert [5, 8] == [facts[name]["slots"] for name in ("live", "per_microbatch")]
        assert 4 * facts["live"]["arena_bytes"] == facts["per_microbatch"]["arena_bytes"]


class TestTracing:
    TRACE = (
        {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 10.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 12.0},
        {"ph": "X", "cat": "kernel", "name": "elementwise_copy", "dur": 3.0},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "dur": 1.0},
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoD (Device -> Device)",
            "dur": 5.0,
            "args": {"bytes": 4096},
        },
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoD (Device -> Device)",
            "dur": 5.5,
            "args": {"bytes": 4096},
        },
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoD (Device -> Device)",
            "dur": 0.5,
            "args": {"bytes": 64},
        },
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD (Pageable -> Device)",
            "dur": 0.5,
            "args": {"bytes": 4096},
        },
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "dur": 100.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 40.0},
        {"ph": "M", "name": "process_name"},
    )

    def test_device_time_is_kernels_copies_and_fills(self) -> None:
        """Annotations and host operators are not work of the device."""
        found = summarize(self.TRACE, 2)
        assert 37.5 == found["device_us"]
        assert 8 == found["device_events"]
        assert [{"name": "elementwise_copy", "count": 1, "us": 3.0}] == found["copy_kernels"]

    def test_matrix_copies_are_device_copies_of_a_gradients_size(self) -> None:
        """Not the small one, and not the one from the host."""
        found = matrix_copies(summarize(self.TRACE, 2), [4096, 8192])
        assert 1.0 == found["per_step"]
        assert 4096.0 == found["bytes_per_step"]
        assert 5.25 == found["us_per_step"]
        assert 0 == found["without_size"]

    def test_messages_are_apart_from_other_kernels(self) -> None:
        """A rank that waits for another one is not busy."""
        message = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv", "dur": 4000.0}
        own = {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 3000.0}
        fill = {"ph": "X", "cat": "gpu_memset", "name": "Memset", "dur": 500.0}
        found = busy_times([message, own, fill, {**own, "cat": "cpu_op"}], 2)
        assert {"kernels": 1.5, "copies": 0.25, "messages": 2.0} == found

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT", "FP8 products"),
            ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "other products"),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
            ("void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<>", "norms"),
            ("cast_transpose_fusion_kernel_optimized(transformer_engine::CTDB)", "quantization"),
            ("transformer_engine::delayed_scaling_recipe::(anonymous namespace)", "quantization"),
            ("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>", "optimizer"),
            ("multi_tensor_apply_kernel<TensorListMetadata<2>", "other elementwise"),
            (
                "at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add",
                "other elementwise",
            ),
            ("Memcpy DtoD (Device -> Device)", "copies"),
            ("ncclDevKernel_SendRecv", "messages"),
            ("online_softmax_kernel", "loss"),
            ("void cudnn::fusion::matmul_dq<true, 64>(void const*", "attention"),
            ("transformer_engine::gated_act_kernel<16, true, float, Empty, cast", "activations"),
            ("triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0", "activations"),
            ("gpu_kernel_impl_nocast<at::native::direct_copy_kernel_", "copies"),
            ("void transformer_engine::fused_rope_backward_kernel<bf16>", "rotary positions"),
            ("set_counter", "other"),
        ],
    )
    def test_kinds_of_work_by_name(self, name: str, kind: str) -> None:
        """Names from traces of H200s."""
        assert kind == kind_of(name)

    def test_time_by_kind_is_all_of_the_devices_time(self) -> None:
        """Per step, longest first, by name and by kind."""
        one = {"ph": "X", "cat": "kernel"}
        gemm = {**one, "name": "nvjet_sm90_qqtst", "dur": 3000.0}
        other = {**one, "name": "nvjet_sm90_qrtst", "dur": 5000.0}
        fill = {"ph": "X", "cat": "gpu_memset", "name": "Memset", "dur": 500.0}
        found = times_by_name([fill, other, gemm, gemm, {**gemm, "cat": "cpu_op"}], 2)
        assert [("nvjet_sm90_qqtst", 3.0), ("nvjet_sm90_qrtst", 2.5), ("Memset", 0.25)] == [
            *found.items()
        ]
        assert [("FP8 products", 5.5), ("copies", 0.25)] == [*times_by_kind(found).items()]

    @staticmethod
    def launches(number: int) -> list[dict[str, Any]]:
        """A step of 100 us: 40 of a kernel, 30 of a message, 10 of them at once; others between."""
        found = []
        for n in range(number):
            at = 100.0 * n
            one = {"ph": "X", "cat": "kernel", "args": {"correlation": n}}
            found += [
                {**one, "name": "gemm", "ts": at + 10.0, "dur": 30.0},
                {**one, "name": "ncclDevKernel_SendRecv", "ts": at + 30.0, "dur": 30.0},
                {**one, "name": "update", "ts": at + 85.0, "dur": 10.0},
            ]
        return found

    def test_a_launch_is_split_into_what_runs_in_it(self) -> None:
        """Every microsecond is in one share; a message beside a kernel is counted once."""
        found = launch_shares(self.launches(4), 4)
        assert {
            "busy": 0.04,
            "beside": 0.01,
            "awaited": 0.02,
            "between": 0.04,
            "step": 0.1,
        } == found

    def test_work_between_two_launches_is_in_the_step(self) -> None:
        """A copy of the next step's data, in a call of its own."""
        data = {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "dur": 4.0}
        copies = [
            {**data, "ts": 100.0 * n + 2.0, "args": {"correlation": 10 + n}} for n in range(4)
        ]
        found = launch_shares([*self.launches(4), *copies], 4)
        assert (0.044, 0.036, 0.1) == (found["busy"], found["between"], found["step"])

    @pytest.mark.parametrize(("inside", "launches"), [(3, 4), (1, 1)])
    def test_too_few_launches_are_refused(self, inside: int, launches: int) -> None:
        """Of one alone it is not known when it began to wait."""
        with pytest.raises(RuntimeError, match="launches in the trace, found"):
            launch_shares(self.launches(inside), launches)

    def test_a_copy_whose_size_the_trace_lacks_is_reported(self) -> None:
        """It cannot be attributed, so zero is not claimed for it."""
        event = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 1.0, "args": {}}
        assert 1 == matrix_copies(summarize([event], 1), [4096])["without_size"]


class TestDevice:
    def test_readings_are_numbers_where_they_are_numbers(self) -> None:
        """What nvidia-smi does not support stays text."""
        assert {"clocks.sm": 1980.0, "power.draw": "[N/A]"} == parse(
            ("clocks.sm", "power.draw"), "1980, [N/A]\n"
        )

    def test_memory_rises_from_the_marked_reading(self) -> None:
        """What other columns hold already is not counted."""
        poll = MemoryPoll()
        assert poll.rise() is None
        for used in (700, 500):
            poll.sample(used)
        poll.mark()
        for used in (500, 900, 600):
            poll.sample(used)
        assert 400 == poll.rise()

    @staticmethod
    def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """An `nvidia-smi` that says what a test wants."""
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def test_the_driver_is_asked_and_never_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every argument that reaches nvidia-smi asks; none sets anything."""
        self.stand_in(tmp_path, f'echo "$@" > {tmp_path}/asked; echo "1980, P0"', monkeypatch)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert {"clocks.sm": 1980.0, "pstate": "P0"} == device.query(("clocks.sm", "pstate"))
        asked = (tmp_path / "asked").read_text().split()
        assert [
            "--query-gpu=clocks.sm,pstate",
            "--format=csv,noheader,nounits",
            "--id=0",
        ] == asked

    @pytest.mark.parametrize(
        ("visible", "number"), [("5,3", "5"), ("GPU-8f2c", "GPU-8f2c"), ("", "0")]
    )
    def test_the_visible_device_is_asked(
        self, visible: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A column runs on the first visible device; nvidia-smi is asked about that one."""
        self.stand_in(tmp_path, f'echo "$@" > {tmp_path}/asked; echo 7', monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert {"memory.used": 7.0} == device.query(("memory.used",))

        assert f"--id={number}" == (tmp_path / "asked").read_text().split()[-1]

    def test_a_poll_reads_what_is_printed_until_it_ends(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """100 MiB, then 350: a rise of 250 MiB, and the program is gone afterwards."""
        self.stand_in(
            tmp_path,
            f"while [ ! -e {tmp_path}/go ]; do echo 100; sleep 0.02; done\n"
            "while :; do echo 350; sleep 0.02; done",
            monkeypatch,
        )
        with MemoryPoll() as poll:
            poll.mark()
            (tmp_path / "go").touch()
            deadline = time.monotonic() + 20
            while poll.rise() != 250 * 2**20 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert 250 * 2**20 == poll.rise()
        assert poll._process is not None
        assert poll._process.returncode is not None

    def test_a_poll_that_stays_silent_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is then no figure, and no column waits for one again."""
        self.stand_in(tmp_path, "exec sleep 60", monkeypatch)
        monkeypatch.setattr(device, "FIRST_READING_S", 0.05)
        with MemoryPoll() as poll:
            poll.mark()
            assert poll.rise() is None

    @pytest.mark.parametrize(
        ("visible", "wanted"),
        [(None, "0"), ("", "0"), ("2", "2"), ("3,1", "3")],
    )
    def test_the_process_s_own_device_is_asked(
        self, visible: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """nvidia-smi sees every device of a host; the figures of another one would be wrong."""
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        assert wanted == visible_id()

    def test_a_machine_without_a_driver_has_no_figures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is assumed."""
        monkeypatch.setenv("PATH", str(tmp_path))
        assert device.query(device.STATE) is None
        with MemoryPoll() as poll:
            poll.mark()
            assert poll.rise() is None


class TestCommand:
    @pytest.mark.ci
    def test_the_tables_run_on_a_cpu_from_end_to_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Native and ours in processes of their own, a complete report, a table printed last."""
        out = tmp_path / "report.json"
        code = bench(
            *("--device", "cpu", "--columns", "native", "ours_accumulate", "--rounds", "2"),
            *("--steps", "2", "--growth-steps", "0", "--out", str(out)),
        )
        report = json.loads(out.read_text())

        assert 0 == code
        assert report["complete"]
        cell = report["derived"]["cells"][0]
        assert {"native_grad", "ours_accumulate"} == set(cell["columns"])
        assert cell["columns"]["ours_accumulate"]["native_over_this"]["median"] > 0
        assert "ours_accumulate" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--cells", "h1"), "unknown cell 'h1'"),
            (("--columns", "x"), "unknown column 'x'"),
            (("--rounds", "0"), "--rounds must be at least 1"),
            (("sweep", "--microbatches", "0", "--device", "cpu"), "microbatches"),
        ],
    )
    def test_bad_options_are_one_line(
        self, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Nothing is measured, and the line names what was wrong."""
        assert 2 == bench(*words)
        said_lines = capsys.readouterr().err.strip().splitlines()
        assert 1 == len(said_lines)
        assert said in said_lines[0]

    def test_without_a_device_the_tables_say_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A missing device is unusable input, not a failed column."""
        assert not torch.cuda.device_count()
        assert 2 == bench("--cells", "0")
        assert "no CUDA device" in capsys.readouterr().err

    def test_a_place_that_cannot_be_written_is_refused_before_measuring(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Half an hour of measurements must not end in a wrong path."""
        missing = tmp_path / "no" / "report.json"
        assert 2 == bench("--device", "cpu", "--out", str(missing))
        assert "there is no folder" in capsys.readouterr().err

    def test_the_commit_is_forty_digits(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A report that names no commit cannot be reproduced."""
        assert 2 == main(["runtime", "report", "bench", "--device", "cpu", "--commit", "main"])
        assert "40 hexadecimal digits" in capsys.readouterr().err

    def test_importing_the_benchmark_imports_no_library(self) -> None:
        """Neither Transformer Engine nor a device context, nor the runtime's captures."""
        code = (
            "import sys, torch, qeffect.gpu_runtime.lab.commands.bench\n"
            "import qeffect.gpu_runtime.lab.commands.streams\n"
            "import qeffect.gpu_runtime.lab.commands.plots\n"
            "import qeffect.gpu_runtime.backends.te.baselines\n"
            "import qeffect.gpu_runtime.lab.sides.library\n"
            "assert 'transformer_engine' not in sys.modules\n"
            "assert 'matplotlib' not in sys.modules\n"
            "assert not torch.cuda.is_initialized()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "" == done.stderr
        assert 0 == done.returncode

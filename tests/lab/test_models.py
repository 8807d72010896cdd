"""The report of whole models: what it counts, and a run over two ranks of a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jsonschema
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qeffect.cli import main
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.norms import CUDNN_NORMS
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.commands import models
from qeffect.gpu_runtime.lab.reports.text import model_lines
from qeffect.gpu_runtime.lab.sides import megatron
from qeffect.gpu_runtime.lab.sides import model_rows as row_module
from qeffect.gpu_runtime.lab.sides.megatron import gpt_chunk
from qeffect.gpu_runtime.lab.sides.model_rows import CELLS, MODELS, ModelRow, model_rows
from qeffect.gpu_runtime.lab.statistics.models import derive_models, step_flops
from tests.ranks import table_bodies
from tests.ranks.ranks import launch
from tests.runtime.report_samples import model_row

#: Parameters that the published models of these shapes have, with a head of its own.
PUBLISHED = {"1b": 1_498_482_688, "3b": 3_606_752_256, "8b": 8_030_261_248}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_shapes_are_those_of_published_models(name: str) -> None:
    """Layers, embedding, head and the last norm add up to the published number of parameters."""
    shape = MODELS[name]
    ends = 2 * shape.vocabulary * shape.hidden + shape.hidden

    assert PUBLISHED[name] == shape.layers * shape.config(4096).parameters + ends


def _forward(config: LayerConfig, layers: int, vocabulary: int) -> None:
    """A decoder's products in plain torch, with whole attention."""
    x = torch.zeros(1, config.sequence, config.hidden, device="meta")

    def product(x: torch.Tensor, rows: int) -> torch.Tensor:
        return x @ torch.zeros(x.shape[-1], rows, device="meta")

    for _ in range(layers):
        q, k, v = (
            product(x, width).unflatten(-1, (-1, config.head_width)).transpose(1, 2)
            for width in (config.hidden, config.kv_width, config.kv_width)
        )
        k, v = (part.repeat_interleave(config.sharing, 1) for part in (k, v))
        mixed = (q @ k.transpose(-1, -2)) @ v
        x = product(mixed.transpose(1, 2).flatten(-2), config.hidden)
        gate, up = product(x, config.ffn), product(x, config.ffn)
        x = product(gate * up, config.hidden)
    product(x, vocabulary)


@pytest.mark.parametrize("name", ["tiny", "1b", "8b"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """Three times a forward of plain torch's counter, less half of attention's two products."""
    shape, sequence = MODELS[name], 4096
    config = shape.config(sequence)
    with FlopCounterMode(display=False) as counter:
        _forward(config, shape.layers, shape.vocabulary)
    attention = shape.layers * 2 * (2 * sequence * sequence * shape.hidden)

    asked = {**attrs.asdict(shape), "sequence": sequence, "microbatches": 8}
    assert step_flops(asked) == 8 * 3 * (counter.get_total_flops() - attention // 2)


def test_rates_shares_and_idle_time() -> None:
    """Of rounds of known length: half the time is twice the rate; the FP8 peak is the unit."""
    shape = {**attrs.asdict(MODELS["1b"]), "sequence": 4096, "microbatches": 8}
    at_peak = step_flops(shape) / 2 / 1979e9  # milliseconds of two GPUs at their peak
    found = derive_models(
        {
            "rows": [
                model_row("native", "il", [4 * at_peak]),
                model_row(
                    "one launch",
                    "il",
                    [2 * at_peak, 2.5 * at_peak, 2 * at_peak],
                    facts=[{"capture_s": 3.0}, {"capture_s": 5.0}],
                    busy_ms=[{"kernels": at_peak, "copies": 0.5 * at_peak}],
                    compared=[10, 0],
                ),
                {"cell": "x", "side": "native", "schedule": "il", "error": "no memory"},
            ]
        }
    )

    native, launches = found["rows"]
    assert (0.25, 0.5) == (native["share"], launches["share"])
    assert {"median": 989.5, "min": 791.6, "max": 989.5} == launches["tflops"]
    assert (1.0, 2.0) == (native["native_over_this"], launches["native_over_this"])
    assert (None, 0.25) == (native["idle"], launches["idle"])
    assert (None, 4.0) == (native["capture_s"], launches["capture_s"])
    assert (10, 0, 7) == (launches["compared"], launches["different"], launches["peak_bytes"])
    assert launches["tokens_per_s"] == round(8 * 4096 / (2 * at_peak / 1e3))
    assert [{"cell": "x", "side": "native", "schedule": "il", "error": "no memory"}] == found[
        "errors"
    ]


def test_megatron_is_its_fastest_mode_with_natives_loss() -> None:
    """A mode that computes another loss is another model, however fast."""
    rows = [
        model_row("native", "il", [4.0], loss=12.0),
        model_row("one launch", "zbv", [2.0], loss=None),
        model_row("megatron none", "il", [3.0], loss=12.0119),
        model_row("megatron full_iteration", "il", [2.5], loss=11.9881),
        model_row("megatron local", "il", [1.0], loss=12.0121),
    ]
    found = derive_models({"rows": rows})["rows"]
    assert [0.625, 1.25, 0.8333, 1.0, 2.5] == [row["megatron_over_this"] for row in found]
    assert [12.0, None, 12.0119, 11.9881, 12.0121] == [row["loss"] for row in found]
    for ours in (rows[1:], rows[:2]):
        assert [None] * len(ours) == [
            row["megatron_over_this"] for row in derive_models({"rows": ours})["rows"]
        ]


@pytest.mark.parametrize(
    ("main_grad", "said"), [("fp32", ", fp32 gradients"), ("bf16", ""), (None, "")]
)
def test_lines_name_gradients_that_are_not_bf16(main_grad: str | None, said: str) -> None:
    """Native always accumulates in bf16; earlier reports name no type."""
    rows = [
        model_row("native", "il", [4.0], loss=12.0),
        model_row("one launch", "il", [2.0]),
        {"cell": "x", "side": "megatron local", "schedule": "il", "error": "no memory"},
    ]
    asked = {} if main_grad is None else {"main_grad": main_grad}
    lines = model_lines({"configuration": asked, "derived": derive_models({"rows": rows})})

    native, ours = (re.split(" {2,}", line.strip())[2] for line in lines[-3:-1])
    assert ("native", f"one launch{said}") == (native, ours)
    assert lines[-1] == f"FAILED: x, megatron local{said}, il: no memory"


def test_replicas_are_compared_with_one() -> None:
    """Of the same schedule; each GPU's rate counts its own replica's work alone."""
    rows = [
        model_row("native", "il", [4.0], loss=12.0),
        model_row("one launch", "il", [2.0]),
        model_row("one launch", "zbv", [3.0]),
        model_row("one launch", "il", [2.5], replicas=2, peak_bytes=[5, 7, 5, 7]),
        model_row("one launch", "izb", [2.5], replicas=2, peak_bytes=[5, 7, 5, 7]),
    ]
    found = derive_models({"rows": rows})["rows"]
    assert [None, None, None, 0.8, None] == [row["one_replica_over_this"] for row in found]
    assert [1, 1, 1, 2, 2] == [row["replicas"] for row in found]
    one, two = found[1], found[3]
    assert two["tflops"]["median"] == pytest.approx(one["tflops"]["median"] * 0.8, rel=1e-3)
    assert two["tokens_per_s"] == pytest.approx(one["tokens_per_s"] * 1.6, rel=1e-3)
    assert (None, None) == (two["native_over_this"], two["megatron_over_this"])


def test_rows_and_cuts() -> None:
    """Native once in each cell, then every schedule; the layers are all cut into stages."""
    rows = model_rows(CELLS[:2], ["il", "zbv"], 2, device="cuda")
    assert [row.side for row in rows] == ["native", "one launch", "one launch"] * 2
    for row in rows:
        job = row.job()
        assert row.shape.layers == sum(job.cut)
        assert "bf16" == job.head
    assert (1, 1, 2, 2) == ModelRow("tiny-s16-m4", "native", "il", cut=(1, 1, 2, 2)).job().cut


def test_rows_that_recompute() -> None:
    """Each guarded row a second time, at every stage; native keeps its activations."""
    rows = model_rows(CELLS[:1], ["il", "zbv"], 2, device="cuda", head="te", recompute=True)
    found = [(row.side, row.schedule, row.job().recompute, row.job().head) for row in rows]
    every = (0, 1, 2, 3)
    assert found == [
        ("native", "il", (), "te"),
        *(("one launch", name, stages, "te") for stages in ((), every) for name in ("il", "zbv")),
    ]
    assert [row.name.get("recompute") for row in rows] == [None, None, None, True, True]


def test_fp32_gradients_are_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native accumulates in bf16; ours and Megatron's side get the type."""
    native, ours = model_rows(CELLS[:1], ["il"], 1, device="cuda", main_grad="fp32")
    assert ("bf16", "fp32") == (native.main_grad, ours.main_grad)
    made: list[object] = []
    monkeypatch.setattr(row_module, "build_guarded", lambda *_, dtype: made.append(dtype))
    monkeypatch.setattr(megatron, "MegatronSide", lambda *_: made.append(_[-1]))
    ours.make(None)  # type: ignore[arg-type]
    theirs = megatron.MegatronModelRow(CELLS[0], "megatron none", "il", 1, main_grad="fp32")
    theirs.make(None)  # type: ignore[arg-type]
    assert made == [torch.float32, torch.float32]


@pytest.mark.ci
def test_a_run_over_two_ranks_of_a_cpu(tmp_path: Path) -> None:
    """
    Native and guarded steps, also those that recompute, leave the same bits; the report is valid
    and has their rates.
    """
    out = tmp_path / "models.json"
    asked = ["--device", "cpu", "--cells", "tiny-s16-m4", "--schedules", "il", "--no-profile"]
    asked += ["--rounds", "1", "--steps", "1", "--native-steps", "1", "--out", str(out)]

    asked += ["--commit", "0" * 40, "--head", "te", "--recompute"]

    (tmp_path / "said").mkdir()
    ended = launch(2, tmp_path / "said", table_bodies.models_command, asked)

    code, said, err = ended.words[0]
    assert 0 == code, err
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    native, guarded, again = report["derived"]["rows"]
    assert "il" == native["schedule"] == guarded["schedule"]
    assert [None, None, True] == [row.get("recompute") for row in (native, guarded, again)]
    for row in (guarded, again):
        assert 0 == row["different"] < 100 < row["compared"]
    assert ("te", True) == tuple(report["configuration"][key] for key in ("head", "recompute"))
    assert "replays, recomputed" in said
    assert 6 == sum(guarded["cut"])
    assert guarded["tflops"]["median"] > 0
    assert "TFLOP/s per GPU" in said


@pytest.mark.ci
def test_a_run_without_native(tmp_path: Path) -> None:
    """No row is compared with native."""
    out = tmp_path / "models.json"
    asked = ["--device", "cpu", "--cells", "tiny-s16-m4", "--schedules", "izb", "il", "--pp", "1"]
    asked += ["--rounds", "1", "--steps", "1", "--no-native", "--no-profile", "--out", str(out)]
    words = [sys.executable, "-m", "qeffect", "runtime", "report", "models", *asked]

    done = subprocess.run(
        [*words, "--commit", "0" * 40], capture_output=True, text=True, timeout=110, check=False
    )

    assert 0 == done.returncode, done.stderr
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    rows = report["derived"]["rows"]
    assert [("replays", "izb"), ("replays", "il")] == [(r["side"], r["schedule"]) for r in rows]
    assert [None, None] == [row["native_over_this"] for row in rows]
    assert [0, 0] == [row["compared"] for row in rows]


@pytest.mark.ci
def test_replicas_over_two_ranks_of_a_cpu(tmp_path: Path) -> None:
    """One replica in one process, then two replicas in two processes of their own."""
    out = tmp_path / "models.json"
    asked = ["--device", "cpu", "--cells", "tiny-s16-m4", "--schedules", "il", "--no-profile"]
    asked += ["--rounds", "1", "--steps", "1", "--native-steps", "1", "--out", str(out)]
    asked += ["--commit", "0" * 40, "--pp", "1", "--replicas", "2"]
    words = [sys.executable, "-m", "qeffect", "runtime", "report", "models", *asked]

    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)

    assert 0 == done.returncode, done.stderr
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    rows = report["derived"]["rows"]
    assert [("native", 1), ("replays", 1), ("replays", 2)] == [
        (row["side"], row["replicas"]) for row in rows
    ]
    assert [1, 1, 2] == [len(row["peak_bytes"]) for row in report["raw"]["rows"]]
    assert rows[2]["one_replica_over_this"] > 0
    assert rows[1]["cut"] == rows[2]["cut"]


@pytest.mark.ci
def test_a_rank_that_cannot_measure_is_named_by_all(tmp_path: Path) -> None:
    """No rank waits for it for ever."""
    said = launch(2, tmp_path, table_bodies.unmeasured_parts).words

    assert {"tiny-s16-m4: rank 1 cannot measure: not today"} == {said[0], said[1]}


def test_more_stages_than_layers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the cell and the option, before anything starts."""
    asked = ["--device", "cpu", "--cells", "tiny-s16-m4", "--pp", "4"]
    assert 2 == main(["runtime", "report", "models", *asked])
    said = capsys.readouterr().err
    assert "tiny-s16-m4 over --pp 4 ranks: 6 layers cannot be cut into 8 stages" in said


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--megatron", "none", "--device", "cpu"], "--megatron none needs --device cuda; on a"),
        (["--megatron", "local", "--pp", "4"], "--megatron needs --pp 2 or --pp 1, found --pp 4"),
        (["--limit", "0"], "--limit must be positive, found 0"),
        (["--replicas", "0"], "--replicas must be at least 1, found 0"),
        (["--device", "cuda"], "--cells tiny-s16-m4 is only for a CPU, found --device cuda; add"),
        (["--norms", "cudnn", "--device", "cpu"], "--norms cudnn needs --device cuda, found"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(
    asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    assert 2 == main(["runtime", "report", "models", "--cells", "tiny-s16-m4", *asked])
    assert message in capsys.readouterr().err


def test_a_cell_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the cells that there are, and exit code 2."""
    assert 2 == main(["runtime", "report", "models", "--cells", "2b-s4096-m8"])
    assert "1b-s4096-m8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "asked"),
    [
        (None, {"ignore_virtual": True, "vp_stage": None}),
        (1, {"ignore_virtual": False, "vp_stage": 1}),
    ],
)
def test_a_chunk_of_megatron_is_one_of_several_or_the_ranks_whole_part(
    number: int | None, asked: dict[str, Any]
) -> None:
    """If a rank has several chunks, each chunk has a number, which Megatron gets before it builds
    the chunk."""
    told: list[Any] = []

    def ends(**given: Any) -> bool:
        told.append(given)
        return True

    state = SimpleNamespace(
        set_virtual_pipeline_model_parallel_rank=told.append,
        is_pipeline_first_stage=ends,
        is_pipeline_last_stage=ends,
    )
    specs = SimpleNamespace(get_gpt_layer_with_transformer_engine_spec=lambda: "spec")
    model = SimpleNamespace(GPTModel=lambda *given, **named: (given, named))
    library = SimpleNamespace(parallel_state=state, gpt_layer_specs=specs, gpt_model=model)

    given, named = gpt_chunk(library, "config", 64, 16, number, "rope")

    assert ([] if number is None else [number]) + [asked, asked] == told
    assert ("config", "spec", 64, 16) == given
    assert named["vp_stage"] == number
    assert named["position_embedding_type"] == "rope"


@pytest.mark.parametrize(("norms", "left"), [("library", set()), ("cudnn", {"1"})])
def test_the_ranks_get_the_norms_that_the_report_names(
    norms: str, left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the caller's environment says otherwise."""
    for name in CUDNN_NORMS:
        monkeypatch.setenv(name, "0" if norms == "cudnn" else "1")
    models._choose_norms(norms)
    assert {os.environ[name] for name in CUDNN_NORMS if name in os.environ} == left

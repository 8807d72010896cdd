"""
The runtime's page about the paper's complete-step tables and about the peers, from their reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.statistics.models import FP8_TFLOPS, LOSS_WITHIN
from tests.docs.blocks import markdown
from tests.docs.remarks import bound, remark

Row = Mapping[str, Any]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _gigabytes(value: float | None, *, sign: bool = True) -> str:
    return "-" if value is None else f"{value / 1e9:{'+' if sign else ''}.2f}"


def _ranks(values: Sequence[Any] | None) -> str:
    """One number if it is the same on all ranks, otherwise the number of each rank."""
    if values is None:
        return "-"
    said = [str(sum(v) if isinstance(v, list) else v) for v in values]
    return said[0] if len(set(said)) == 1 else ", ".join(said)


def tables(found: Iterable[tuple[str, Mapping[str, Any]]], machine: Any) -> list[str]:
    """
    The paragraphs and tables of the reports of `report tables`.

    Args:
        found: Reports of kind `tables`, with the names of their files.
        machine: Gives the machine of a report in a line.
    """
    parts: list[str] = []
    for name, report in found:
        derived = report["derived"]
        parts.append(
            f"**The paper's tables on this machine** ({name}; {derived['trials']} fresh starts "
            f"of all ranks; {machine(report)}). The language model has one layer per stage, and "
            "an embedding and a head for a vocabulary of 32,768 tokens. A time is the time of "
            "the slowest rank: the median within a trial, then the median over trials. Captured "
            "sides add all microbatches' gradients of a matrix in one buffer. The exceptions "
            "are `copied`, which copies each gradient out of the library's memory, and "
            "`direct`, which has one buffer per microbatch, as in the paper. The paper measured "
            "on H800 PCIe GPUs, and its table by microbatches on an RTX 5880. The paper's "
            "efficiency over four ranks is for the language model. If graphs, gradient buffers, "
            "live tapes or delayed dW differ between ranks, the entry has one number per rank."
            f"{remark(name, report)}"
        )
        sign = bound(name, report)
        parts += [*_complete(derived, sign), *_attribution(derived, sign)]
        for make in (_resources, _weak, _mapping, _bits, goals):
            parts += make(derived)
    return parts


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown(header, rows)] if rows else []


def _complete(derived: Row, sign: str) -> list[str]:
    rows = [
        (
            row["cell"],
            row["schedule"],
            row["set"],
            f"{_number(row['native_ms'])} / {_number(row['ms'])}",
            sign + _ratio(row["speedup"]),
            f"{row['paper_native_ms']} / {row['paper_ms']}",
            f"{row['paper_speedup']:.3f}x",
            f"{_number(row['break_even_steps'], 1)} ({_number(row['paper_break_even_steps'], 1)})",
            f"{_gigabytes(row['above_native_bytes'])} ({row['paper_above_native_gb']:+.2f})",
        )
        for row in derived["complete"]
    ]
    header = (
        "cell", "schedule", "trials", "native / captured, ms", "speedup", "paper, ms",
        "paper's speedup", "break-even, steps (paper)", "GB above native (paper)",
    )  # fmt: skip
    return _table(header, rows)


def _attribution(derived: Row, sign: str) -> list[str]:
    rows = [
        (
            row["configuration"],
            _number(row["ms"]),
            "-" if row["native_over_this"] is None else sign + _ratio(row["native_over_this"]),
            _ratio(row["copied_over_this"]),
            _number(row["break_even_steps"], 1),
            _gigabytes(row["above_native_bytes"]),
            _number(row["copies"], 0),
            _ranks(row["graphs"]),
            f"{_number(row['capture_s'])}, {_gigabytes(row['captured_bytes'])}",
            _ranks(row["handoffs"]),
            _ranks(row["replays"]),
            f"{_number(row['paper_ms'])}, {_ratio(row['paper_native_over_this'])}",
        )
        for row in derived["attribution"]
    ]
    header = (
        "configuration", "ms", "native / this", "copied / this", "break-even, steps",
        "GB above native", "matrix copies per rank", "graphs", "capture, s and GB beyond eager",
        "stream handoffs per step", "replays per step", "paper",
    )  # fmt: skip
    return _table(header, rows)


def _resources(derived: Row) -> list[str]:
    rows = []
    for row in derived["resources"]:
        theirs = row["paper"] or {}
        captured = theirs["capture_ms"] / 1e3 if theirs else None
        rows.append(
            (
                str(row["microbatches"]),
                f"{_number(row['ms'])} ({_number(theirs.get('ms'))})",
                f"{row['tokens_per_s']:,}",
                f"{_ranks(row['graphs'])} ({theirs.get('graphs', '-')})",
                _ranks(
                    row["arena_bytes"] and [_gigabytes(n, sign=False) for n in row["arena_bytes"]]
                ),
                _gigabytes(row["peak_bytes"], sign=False),
                f"{_ranks(row['peak_live'])} ({theirs.get('live', '-')})",
                f"{_ranks(row['delayed'])} ({theirs.get('delayed', '-')})",
                f"{_number(row['capture_s'])} ({_number(captured)})",
            )
        )
    header = (
        "microbatches, ZB-V", "ms (paper)", "tokens per second", "graphs per rank (paper)",
        "gradient buffers, GB",
        "peak, GB", "live tapes by rank (paper)", "delayed dW by rank (paper)",
        "capture, s (paper)",
    )  # fmt: skip
    return _table(header, rows)


def _weak(derived: Row) -> list[str]:
    rows = [
        (row["cell"], row["side"], _number(row["pp2_ms"]), _number(row["pp4_ms"]),
         f"{100 * row['rate']:.1f}%")
        for row in derived["weak"]
    ]  # fmt: skip
    return _table(
        ("layers alone, one per stage", "side", "PP=2, ms", "PP=4, ms", "rate of PP=4 over PP=2"),
        rows,
    )


def _mapping(derived: Row) -> list[str]:
    rows = [
        (
            row["model"],
            f"{row['pp2']} to {row['pp4']}",
            _number(row["pp2_ms"]),
            _number(row["pp4_ms"]),
            _ratio(row["speedup"]),
            f"{100 * row['efficiency']:.1f}% ({_percent(row['paper_efficiency'])})",
        )
        for row in derived["mapping"]
    ]
    header = (
        "the same four layers", "side", "PP=2, ms", "PP=4, ms", "speedup", "efficiency (paper)",
    )  # fmt: skip
    return _table(header, rows)


def _bits(derived: Row) -> list[str]:
    compared = [row for row in derived["rows"] if row["compared_with"] is not None]
    if not compared:
        return []
    values = sum(row["values"] for row in compared)
    different = sum(row["different"] for row in compared)
    return [
        f"After six steps {different} of {values} tensors (parameters, AdamW's state, scales and "
        "histories) differ. Eager calls and replays were compared with native, `direct` with "
        "`copied`, and one launch with replays."
    ]


def goals(derived: Row) -> list[str]:
    """How many goals are met, and a table of the missed ones; nothing without goals."""
    asked = derived["targets"]
    if not asked:
        return []
    missed = [g for g in asked if not g["met"]]
    rows = [
        (g["goal"], g["cell"], g["column"], f"{g['bound']} {g['value']}", _measured(g["measured"]))
        for g in missed
    ]
    said = f"{len(asked) - len(missed)} of {len(asked)} goals of these tables are met"
    if not missed:
        return [said + "."]
    return [said + ". Missed:", markdown(("goal", "cell", "side", "wanted", "measured"), rows)]


def _measured(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def peers(found: Iterable[tuple[str, Mapping[str, Any]]], machine: Any) -> list[str]:
    """
    Our steps beside the steps of torch's own pipeline and of Megatron.

    Args:
        found: Reports of kind `peers`, with the names of their files.
        machine: Gives the machine of a report in a line.
    """
    parts: list[str] = []
    for name, report in found:
        derived = report["derived"]
        options = f"Megatron's options: {_options(report['configuration']['megatron'])}."
        title = f"**Peers** ({name}; {machine(report)})."
        parts.append(
            f"{title} The sides and columns have the same meaning as above. "
            f"{options}{remark(name, report)}"
            if parts
            else (
                f"{title} Every side trains the same language model: four layers, with an "
                "embedding and a head for a vocabulary of 32,768 tokens. Every side starts from "
                "the same bits, runs over two ranks with two stages each, and has its own "
                "processes. The column *gradients* compares a side's gradients with the "
                "gradients of the same framework without graphs (replays with `native`, one "
                "launch with replays). *Same bits* means equal gradients; *close* means close "
                "to these gradients and to native's; other gradients are *wrong*. Every head is "
                "bf16. *main_grad* is the type of accumulated gradients; with fp32, the master "
                "weights are also fp32. Native runs only with bf16. *Group* is the number of "
                "microbatches whose weight gradients are one matrix product; rows with a group "
                "update FP8 scales once per step. Rows without a group update scales at every "
                "action, as Megatron does. Rows with a group therefore have other FP8 scales "
                "than native, and their gradients are rounded differently. On a CPU a group of "
                "1 has the same distance from native (tests/ranks/test_peers.py). "
                f"{options}{remark(name, report)}"
            )
        )
        rows = [_peer(row) for row in derived["rows"]]
        header = (
            "cell", "side", "schedule", "main_grad", "group", "ms", "native / this",
            "best Megatron graphs / this", "over the busiest rank's kernels",
            "distance from native's gradients", "gradients",
        )  # fmt: skip
        parts += _table(header, rows)
        parts += _table(
            ("path", "a graph holds", "backward", "observed here", "in the paper"),
            [
                (row["path"], row["graph"], row["backward"], row["observed"], row["paper"])
                for row in derived["capability"]
            ],
        )
        parts += goals(derived)
    return parts


_HEADS = {"bf16": "", "te": ", FP8 head", "torchao": ", TorchAO's FP8 head"}
"""What a table's title says of the head (`backends/heads.py`)."""


def models(found: Iterable[tuple[str, Mapping[str, Any]]], machine: Any) -> list[str]:
    """
    TFLOP/s of whole decoders.

    Args:
        found: Reports of kind `models`, with the names of their files.
        machine: Gives the machine of a report in a line.
    """
    parts: list[str] = []
    for name, report in found:
        derived, asked = report["derived"], report["configuration"]
        parts.append(
            f"**Whole models over {asked['pp']} rank{'s' * (asked['pp'] != 1)}"
            f"{', fp32 gradients' * (asked.get('main_grad') == 'fp32')}"
            f"{_HEADS[asked.get('head', 'bf16')]}"
            f"{', norms of cuDNN' * (asked.get('norms') == 'cudnn')}** ({name}; "
            f"{machine(report)})."
            f"{remark(name, report)}"
        )
        rows = [_model(row) for row in derived["rows"]]
        rows += [
            (
                error["cell"],
                error["schedule"],
                error["side"],
                *"--------",
                f"failed: {error['error']}",
            )
            for error in derived["errors"]
        ]
        header = (
            "cell", "schedule", "side", "ms (counted rounds)", "TFLOP/s per GPU", "of the FP8 peak",
            "native / this", "Megatron / this", "one replica / this", "idle", "peak GB", "differ",
        )  # fmt: skip
        parts += _table(header, rows)
        parts += _kinds(derived["rows"])
    if parts:
        parts.insert(
            0,
            "The models are decoders with RMSNorm, SwiGLU, rotary positions, grouped-query "
            "attention and a vocabulary of 128,256 tokens. A rank has two stages; a microbatch "
            "is one sequence. Layers compute in FP8 under delayed scaling; the head, gradients, "
            "weights and the optimizer's moments are bf16. With *fp32 gradients*, our "
            "accumulated gradients and Megatron's are fp32, both with fp32 master weights; "
            "native's gradients stay bf16. With *norms of cuDNN*, Transformer Engine computes "
            "norms with cuDNN's kernels instead of its own, in all rows. Layers are divided "
            "among the stages by the measured times of a layer, the embedding and the head. "
            "TFLOP/s count the matrix products of layers and head once for the forward and "
            "twice for the backward. Products of attention count half, because a token attends "
            "only to earlier tokens; recomputation does not count. The FP8 peak is "
            f"{FP8_TFLOPS:,} TFLOP/s, the dense peak of an H100 or H200; the bf16 head is "
            "compared with this peak too. *Native* is torch's Interleaved 1F1B over full "
            "backwards. *Megatron* is the fastest measured mode of Megatron-core 0.19.2 whose "
            f"loss of the initial weights equals native's (within {LOSS_WITHIN:.1%}). Megatron "
            "has the same division into stages, and its optimizer has a learning rate of 0. "
            "Replicas reduce their gradients within the step; *one replica* is the same "
            "pipeline without reductions. *Recomputed* rows compute the activations of all "
            "layers again in dI. *Idle* is the share of a step that the kernels and copies of "
            "the busiest GPU do not cover; kernels of messages do not count, and kernels that "
            "overlap count twice. *Differ* compares weights, moments and scales after three "
            "steps with native's. Only rows with native's schedule can have the same bits, "
            "because other schedules update scales in another order.",
        )
    return parts


def _kinds(rows: Iterable[Row]) -> list[str]:
    """A table of the time by kind of kernel; no table if no row was profiled."""
    profiled = [row for row in rows if row.get("kinds")]
    if not profiled:
        return []
    total = Counter[str]()
    for row in profiled:
        total.update(row["kinds"])
    kinds = [kind for kind, _ in total.most_common()]
    return [
        "Milliseconds per step by kind of kernel, on the busiest GPU, under the profiler:",
        *_table(
            ("cell", "schedule", "side", *kinds),
            [
                (
                    row["cell"],
                    row["schedule"],
                    _side(row),
                    *(f"{row['kinds'].get(kind, 0.0):.1f}" for kind in kinds),
                )
                for row in profiled
            ],
        ),
    ]


def _side(row: Row) -> str:
    """The side of a row, and how the row differs from most rows of this side."""
    replicas = f", {row['replicas']} replicas" if row["replicas"] > 1 else ""
    return f"{row['side']}{replicas}{', recomputed' if row.get('recompute') else ''}"


def _model(row: Row) -> tuple[str, ...]:
    took = row["step_ms"]
    return (
        row["cell"],
        row["schedule"],
        _side(row),
        f"{took['median']:.1f} ({took['min']:.1f} to {took['max']:.1f}"
        f"{', rounds differ too much' if row['settled'] is False else ''})",
        f"{row['tflops']['median']:.0f}",
        f"{row['share']:.1%}",
        _ratio(row["native_over_this"]),
        _ratio(row["megatron_over_this"]),
        "-" if row["one_replica_over_this"] is None else f"{row['one_replica_over_this']:.3f}x",
        "-" if row["idle"] is None else f"{row['idle']:.1%}",
        f"{row['peak_bytes'] / 1e9:.1f}",
        f"{row['different']:,} of {row['compared']:,}" if row["compared"] else "-",
    )


def _options(options: Row) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in options.items())


def _peer(row: Row) -> tuple[str, ...]:
    group = "-" if row["group"] is None else str(row["group"])
    named = row["cell"], row["side"], row["schedule"], row["main_grad"], group
    if row["error"] is not None:
        return (*named, "-", "-", "-", "-", "-", f"failed: {row['error']}")
    return (
        *named,
        _number(row["step_ms"]["median"]),
        _ratio(row["native_over_this"]),
        _ratio(row["best_graphs_over_this"]),
        _ratio(row["over_busiest"]),
        _number(row["from_native"], 4),
        row["verdict"],
    )

"""
The part of the runtime's page about loss curves; empty without such a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.docs.blocks import markdown

Report = Mapping[str, Any]


def curves(name: str, report: Report, machine: str) -> Iterator[str]:
    """
    Runs, schedules over seeds, and times to the same losses.

    Args:
        name: The report's file.
        report: The report.
        machine: The machine of the report, in a line.
    """
    derived, raw = report["derived"], report["raw"]["runs"]
    asked, first = report["configuration"], raw[0]
    model = asked["model"]
    captured = "guarded and captured" if any(run["captured"] for run in raw) else "guarded"
    yield (
        f"**Loss curves** ({name}; {machine}). Runs are {captured}, or native under torch's own "
        f"pipeline. The model has {first['parameters'] / 1e6:.0f} M parameters in "
        f"{model['layers']} layers of hidden size {model['hidden']}, over "
        f"PP={asked['parallel']['pp']} ranks, with {first['tokens_a_step']:,} tokens per step. "
        f"The held-out text has {asked['windows']:,} windows of {model['sequence']} tokens. A "
        "run is named side:schedule:seed:head. Runs of one seed start from the same bits and "
        "read the same windows. The runs were timed one after the other, so a change of the "
        "machine's load between two runs also shows in their times. *Loss* has two values: the "
        "mean training loss of the first ten steps and of the last ten; in brackets, the last "
        "mean divided by the first. A step time is the median over blocks of steps; each block "
        "ends when the device is idle. *Building* is the time to make the stages, warm up and "
        "capture:"
    )
    beside = {row["run"]: row for row in derived["same_order"]}
    header = (
        "run", "steps", "losses that differ from native's", "held-out losses and final tensors",
        "loss", "held-out loss (perplexity)", "ms per step", "tokens per second", "building, s",
        "peak, GB",
    )  # fmt: skip
    yield markdown(header, [_row(run, beside.get(run["run"])) for run in derived["runs"]])
    finite = all(run["finite"] for run in derived["runs"])
    moved = sum(run["moved_by_evaluation"] for run in derived["runs"])
    yield (
        f"{'Every loss is finite' if finite else 'NOT every loss is finite'}, and evaluation "
        f"changed {moved} tensors of the training state."
    )
    for row in derived["non_inferiority"]:
        yield _judged(row) + _same_bits(row, report)
    rows = [
        (
            f"`{row['run']}` and `{row['native']}`",
            f"{level['loss']:g}",
            f"{level['native_seconds']:.1f}",
            f"{level['seconds']:.1f}",
            f"{level['native_over_this']:.2f}x",
            f"{level['with_building']:.2f}x",
        )
        for row in derived["to_loss"]
        for level in row["levels"][-1:]
    ]
    if rows:
        yield (
            "This table has the seconds of training until the mean of the last ten losses is at "
            "most the given loss. The given loss is the lowest loss that the report lists for "
            "both runs. The last column includes building; the first run of a process also "
            "builds parts that later runs reuse:"
        )
        yield markdown(
            ("runs", "loss", "native, s", "this, s", "ratio", "ratio with building"), rows
        )


def _row(run: Mapping[str, Any], beside: Mapping[str, Any] | None) -> Sequence[str]:
    differ, ends = "-", "-"
    if beside is not None:
        differ = f"{beside['losses_differ']} of {beside['steps']}"
        ends = f"{beside['held_out_differ']} of {beside['held_out']} held-out losses differ"
        if beside["state_differs"] is not None:
            same = "differ" if beside["state_differs"] else "are the same"
            ends += f"; all {beside['tensors']} tensors {same}"
    share = "-" if run["last_over_first"] is None else f"{run['last_over_first']:.4f}"
    peak = run["peak_bytes"]
    return (
        f"`{run['run']}`",
        f"{run['steps']:,}",
        differ,
        ends,
        f"{_figure(run['first_ten'])} to {_figure(run['last_ten'])} ({share})",
        f"{_figure(run['held_out_loss'], 4)} ({_figure(run['perplexity'])})",
        f"{run['step_ms']:.2f}",
        f"{run['tokens_per_s']:,}",
        f"{run['build_s']:.1f}",
        "-" if peak is None else f"{peak / 1e9:.2f}",
    )


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _same_bits(row: Mapping[str, Any], report: Report) -> str:
    """Whether both orders gave the same losses bit for bit, and why the measured library does."""
    runs = {(r["side"], r["head"], r["schedule"], r["seed"]): r for r in report["raw"]["runs"]}
    pairs = [
        [runs[row["side"], row["head"], name, seed] for name in (row["schedule"], row["against"])]
        for seed in row["seeds"]
    ]
    steps = row["step"]

    def told(run: Mapping[str, Any]) -> Any:
        return run["losses"][:steps], [pair for pair in run["held_out"] if pair[0] <= steps]

    if any(told(own) != told(base) for own, base in pairs):
        return ""
    asked = report["configuration"]
    said = " **No loss differs by a bit**, so the interval adds no information"
    if asked["backend"] != "transformer-engine":
        return f"{said}."
    stages = len(pairs[0][0]["cut"]) // asked["parallel"]["pp"]
    each = asked["parallel"]["microbatches"] * stages
    history = asked["model"]["history"]
    whole = "a whole number of" if history % each == 0 else "not a whole number of"
    return (
        f"{said}. The bits are the same for two reasons: each stage runs its microbatches in the "
        "same order under both schedules, and Transformer Engine's scale update rolls (shifts) "
        "only the amax histories of the layers that ran (tests/gpu/test_histories.py). A step "
        f"has {each} F per rank; an amax history had {history} entries, which are {whole} steps."
    )


def _judged(row: Mapping[str, Any]) -> str:
    """The paper's criterion, and the confidence interval over the seeds."""
    seeds = len(row["seeds"])
    head = (
        f"*Non-inferiority* of {row['schedule']} against {row['against']} ({row['side']}, head `"
        f"{row['head']}`) after {row['step']:,} steps, over {seeds} seed{'s' * (seeds > 1)}: "
    )
    if row["ratio"] is None:
        return head + "not judged, because a held-out loss is not finite."
    said = (
        f"the held-out perplexity under {row['schedule']} is {row['ratio']:.4f} times the "
        f"perplexity under {row['against']} (geometric mean over the seeds). "
        f"This ratio is {'within' if row['within'] else 'NOT within'} the margin of "
        f"{row['margin']:g}"
    )
    if row["upper"] is None:
        return head + said + ". One seed gives no variation."
    return head + (
        f"{said}. The ratio's one-sided 95 % confidence interval, with runs paired by seed, ends "
        f"at {row['upper']:.4f}, {'below' if row['shown'] else 'NOT below'} the margin. The "
        "highest perplexity of a seed, divided by the lowest, is "
        f"{row['spread']:.4f} for {row['schedule']} and "
        f"{row['spread_against']:.4f} for {row['against']}."
    )

"""
``qeffect runtime report plots``: draw pictures of the reports.

The pictures show step time beside its floor (the shortest kernel time), resources by microbatches,
memory above native, and loss by steps and by seconds. The legend below each picture explains its
marks. Equal reports give byte-identical pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError

from .. import reports
from ..statistics.curves import BASE, seconds_at

Report = Mapping[str, Any]

COLORS = {
    "native": "#7f7f7f",
    "te_graphs": "#e07b39",
    "whole_step": "#9ecae1",
    "ours_eager": "#74a57f",
    "ours_captured": "#08519c",
}
PROVISIONINGS = {
    "live": ("live slots, accumulate", "#08519c", "o"),
    "per_microbatch": ("a slot per microbatch", "#e07b39", "s"),
}
GREY = "#444444"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "svg.hashsalt": "qeffect",
}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UnusableError("pictures need matplotlib: pip install 'qeffect[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(STYLE)
    return pyplot


def _best(derived: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, str]:
    """
    Columns (ways to run a step) to draw, by the title of their row in the picture.

    The pictures show the fastest native column, the fastest column of TE's graphs, and all our
    guarded columns. The fastest columns differ between cells.
    """
    once = {
        "native": (derived["fastest_native"], "native eager, faster gradient rule"),
        "te_graphs": (derived["fastest_te_graphs"], "TE's own graphs, best chunking"),
    }
    found = {}
    for name in derived["columns"]:
        column = raw["columns"][name]
        fastest, title = once.get(column["family"], (name, column["title"]))
        if name == fastest and column["options"].get("guards", True):
            found[title] = name
    return found


def _rows(drawn: Iterable[Iterable[str]]) -> list[str]:
    """The titles of the rows of all panels, each title once, so that all panels show the same rows.
    A row is one column of the report, that is, one way to run a step."""
    return list(dict.fromkeys(title for titles in drawn for title in titles))


def _mark(look: str, label: str, **options: Any) -> Any:
    """A legend entry: a mark, with a line only if the options request a line."""
    options = {"color": GREY, "ls": "", "ms": 5, **options}
    return _pyplot().Line2D([], [], marker=look, label=label, **options)


def _legend_below(figure: Any, handles: Sequence[Any], columns: int, *, top: float = 1) -> None:
    """A legend below all panels, where it covers no line."""
    rows = -(-len(handles) // columns)
    room = (0.1 + 0.18 * rows) / figure.get_figheight()
    figure.legend(handles=handles, loc="lower center", ncol=columns, fontsize=7.5)
    figure.tight_layout(rect=(0, room, 1, top))


def _label_rows(axis: Any, rows: Sequence[str], *, shown: bool) -> None:
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)))
    axis.set_yticklabels([fill(row, 36) if shown else "" for row in rows], fontsize=8)


def step_time(found: Sequence[Report]) -> Any:
    """
    Draw the median step time and its range for each column (a way to run a step); one panel per
    cell (workload). Also draw the floor: the shortest kernel time of a library column with the same
    gradient sum.
    """
    pyplot = _pyplot()
    cells = reports.cells(found)
    best = [_best(derived, raw) for derived, raw in cells]
    rows = _rows(best)
    figure, axes = pyplot.subplots(
        1, len(cells), figsize=(1.2 + 3.6 * len(cells), 1.4 + 0.36 * len(rows)), squeeze=False
    )
    for axis, (derived, raw), names in zip(axes[0], cells, best, strict=True):
        for title, name in names.items():
            row = rows.index(title)
            entry, column = derived["columns"][name], raw["columns"][name]
            step, color = entry["step_ms"], COLORS[column["family"]]
            axis.plot([step["min"], step["max"]], [row, row], color=color, lw=2)
            axis.plot(step["median"], row, "o", color=color, ms=6)
            over = entry["over_floor"]
            label = f"{step['median']:.2f} ms"
            if over is not None:
                floor = derived["floors"][column["rule"]]["kernel_ms"]
                axis.plot([floor] * 2, [row - 0.35, row + 0.35], color="black", lw=1.2)
                label += f", {over['ratio']:.2f}x"
            axis.annotate(
                label, (step["max"], row), (7, -3), textcoords="offset points", fontsize=7
            )
        axis.set_xscale("log")
        axis.set_xlim(*_room_for_labels(derived, names.values()))
        _label_rows(axis, rows, shown=axis is axes[0][0])
        axis.set_title(_title(raw["cell"]))
        axis.set_xlabel("ms per step")
        _plain_ticks(axis)
        axis.grid(axis="x", color="#e6e6e6", lw=0.6)
        axis.set_axisbelow(True)
    handles = [
        _mark("o", "median of the rounds (first number)", ms=6),
        _mark("", "fastest to slowest round", ls="-", lw=2),
        _mark(
            "|",
            "floor: least kernel time of a library column with the same gradient sum (second "
            "number: median over floor)",
            color="black",
            ms=10,
            mew=1.2,
        ),
    ]
    _legend_below(figure, handles, 3)
    return figure


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _room_for_labels(derived: Mapping[str, Any], names: Iterable[str]) -> tuple[float, float]:
    """Limits of a logarithmic axis whose right 45 % are free for text."""
    steps = [derived["columns"][name]["step_ms"] for name in names]
    floors = [float(floor["kernel_ms"]) for floor in derived["floors"].values()]
    low = 0.93 * min([*floors, *(float(step["min"]) for step in steps)])
    high = max(1.25 * low, *(float(step["max"]) for step in steps))
    return low, float(low * (high / low) ** (1 / 0.55))


def _title(cell: Mapping[str, Any]) -> str:
    return f"hidden {cell['hidden']}, sequence {cell['sequence']}, M {cell['microbatches']}"


PEAKS = {
    "allocated": ("o", -0.24, "allocated by tensors"),
    "reserved": ("s", 0.0, "reserved by torch"),
    "driver": ("^", 0.24, "in use according to the driver"),
}
"""Sources of memory figures, each with its mark, its position in the row, and its name."""


def memory(found: Sequence[Report]) -> Any:
    """
    Draw the peak memory of each column (a way to run a step) minus the peak of the faster native
    column, from three sources, and mark the largest of the three differences.
    """
    pyplot = _pyplot()
    cells = [
        (derived, raw)
        for derived, raw in reports.cells(found)
        if any(entry["above_native_bytes"] for entry in derived["columns"].values())
    ]
    if not cells:
        return None
    best = [
        {
            title: name
            for title, name in _best(derived, raw).items()
            if name != derived["fastest_native"]
            and derived["columns"][name]["above_native_bytes"] is not None
        }
        for derived, raw in cells
    ]
    rows = _rows(best)
    figure, axes = pyplot.subplots(
        1, len(cells), figsize=(1.6 + 3.2 * len(cells), 1.2 + 0.34 * len(rows)), squeeze=False
    )
    for axis, (derived, raw), names in zip(axes[0], cells, best, strict=True):
        for title, name in names.items():
            row = rows.index(title)
            above = derived["columns"][name]["above_native_bytes"]
            color = COLORS[raw["columns"][name]["family"]]
            axis.barh(row, above["largest"] / 1e9, color=color, height=0.74, alpha=0.45)
            for kind, (mark, lift, _) in PEAKS.items():
                axis.plot(above[kind] / 1e9, row + lift, mark, color=color, ms=3.5)
            axis.annotate(
                f"{above['largest'] / 1e9:.2f}",
                (max(above["largest"] / 1e9, 0), row),
                (6, -3),
                textcoords="offset points",
                fontsize=7,
            )
        axis.axvline(0, color="black", lw=0.8)
        _label_rows(axis, rows, shown=axis is axes[0][0])
        axis.set_title(_title(raw["cell"]))
        native = raw["columns"][derived["fastest_native"]]["title"]
        axis.set_xlabel(f"peak GB above the faster native\n({native})")
        axis.margins(x=0.15)
    handles = [
        pyplot.Rectangle(
            (0, 0), 1, 1, color=GREY, alpha=0.45, label="largest of the three (the number)"
        ),
        *(_mark(mark, said, ms=4) for mark, _, said in PEAKS.values()),
    ]
    _legend_below(figure, handles, 4)
    return figure


def resources(found: Sequence[Report]) -> Any:
    """
    Draw slots, graphs, arena size, construction time and peak memory against the number of
    microbatches, for each way to provision slots.

    A slot is a set of buffers for one microbatch. The axis of slots is logarithmic. A dotted line
    beside the slots shows the number of live tapes (microbatches between F and dW).
    """
    pyplot = _pyplot()
    points = [point for report in found for point in report["derived"]["points"]]
    panels: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
        ("slots", lambda p: float(p["slots"])),
        ("graphs", lambda p: float(p["graphs"])),
        ("arena, GB", lambda p: float(p["arena_bytes"]) / 1e9),
        ("construction, s", lambda p: float(p["construction_s"])),
        (
            "peak memory, GB",
            lambda p: None if p["peak_bytes"] is None else max(p["peak_bytes"].values()) / 1e9,
        ),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 3.3))
    for axis, (title, read) in zip(axes, panels, strict=True):
        for name, (label, color, mark) in PROVISIONINGS.items():
            own = sorted(
                (p for p in points if p["provisioning"] == name), key=lambda p: p["microbatches"]
            )
            drawn = [(p["microbatches"], value) for p in own if (value := read(p)) is not None]
            if drawn:
                x, y = zip(*drawn, strict=True)
                axis.plot(x, y, marker=mark, color=color, ms=4, lw=1.4, label=label)
            alone = [(p["microbatches"], p["capture_s"]) for p in own if p["capture_s"] is not None]
            if title.startswith("construction") and alone:
                x, y = zip(*alone, strict=True)
                axis.plot(x, y, color=color, lw=1, ls="--")
        if title == "slots":
            tapes = sorted({(p["microbatches"], p["peak_live_tapes"]) for p in points})
            x, y = zip(*tapes, strict=True)
            axis.plot(x, y, color=GREY, lw=1.2, ls=":")
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            axis.set_ylim(bottom=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({p["microbatches"] for p in points}))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_title(title)
        axis.set_xlabel("microbatches")
        axis.grid(color="#e6e6e6", lw=0.6)
        axis.set_axisbelow(True)
    handles = [
        *(
            _mark(mark, label, color=color, ls="-", lw=1.4, ms=4)
            for label, color, mark in PROVISIONINGS.values()
        ),
        _mark("", "capture time, included in construction", ls="--", lw=1),
        _mark("", "largest number of live tapes in the rank", ls=":", lw=1.2),
    ]
    figure.suptitle("; ".join(sweep_names(found)), fontsize=9)
    _legend_below(figure, handles, 4, top=0.97)
    return figure


def sweep_names(found: Iterable[Report]) -> list[str]:
    """A description of each shape whose number of microbatches was varied."""
    cells = (record["cell"] for report in found for record in report["raw"]["cells"])
    return list(
        dict.fromkeys(
            f"{cell['schedule']}, PP {cell['pp']}, VPP {cell['vpp']}, rank {cell['rank']}, "
            f"hidden {cell['hidden']}, ffn {cell['ffn']}, sequence {cell['sequence']}"
            for cell in cells
        )
    )


ORDERS = {"il": "#08519c", "zbv": "#e07b39"}
"""Colors of loss curves by schedule; other schedules are green."""
OTHER_ORDER = "#74a57f"
NATIVE, GUARDED, LAUNCHED = {"lw": 5.0, "alpha": 0.3}, {"lw": 1.8}, {"lw": 1.8, "alpha": 0.6}
"""
Line styles: native curves are wide and pale, guarded curves are thin and on top, so that both are
visible where they coincide.
"""
LOOKS = {"native": NATIVE, "guarded": GUARDED, "launched": LAUNCHED}
MARKS = {
    "native": {"marker": "s", "ms": 8},
    "guarded": {"marker": "o", "ms": 3},
    "launched": {"marker": "^", "ms": 3},
}
"""Marks of held-out losses."""
THINNER = 0.8
"""
Line width of a guarded run under a schedule other than the base schedule; such a run is drawn on
top.
"""
_POINTS = 200
"""
Approximate number of points of a curve; each point is the mean of the steps since the previous
point.
"""


def loss(found: Sequence[Report]) -> Any:
    """
    Draw loss by steps and by seconds of training, with held-out losses as points; one row per
    report.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(found), 2, figsize=(11, 0.9 + 3.1 * len(found)), squeeze=False
    )
    orders: dict[str, str] = {}
    heads: dict[str, str] = {}
    for (by_step, by_time), report in zip(axes, found, strict=True):
        runs = report["raw"]["runs"]
        for run in sorted(runs, key=_drawn_at):
            color = orders.setdefault(run["schedule"], ORDERS.get(run["schedule"], OTHER_ORDER))
            style = heads.setdefault(run["head"], ("-", "--", ":")[min(len(heads), 2)])
            steps, seconds, losses = _course(run)
            look: dict[str, Any] = dict(LOOKS[run["side"]])
            look["color"] = color
            if run["side"] != "native" and run["schedule"] != BASE:
                look["lw"] = THINNER
            by_step.plot(steps, losses, ls=style, **look)
            by_time.plot(seconds, losses, ls=style, **look)
            held = [(step, loss) for step, loss in run["held_out"] if loss is not None]
            mark = {"ls": "", "color": color, "mfc": "none" if run["side"] == "native" else color}
            size: dict[str, Any] = MARKS[run["side"]]
            for axis, places in (
                (by_step, [step for step, _ in held]),
                (by_time, [seconds_at(run["clock"], step) for step, _ in held]),
            ):
                axis.plot(places, [loss for _, loss in held], **mark, **size)
        model = report["configuration"]["model"]
        count = runs[0]["parameters"] / 1e6
        by_step.set_title(f"{count:.0f} M parameters" + _shape(model))
        by_step.set_xlabel("steps")
        by_time.set_xlabel("seconds of training, without set-up, capture and evaluation")
        by_time.set_xscale("log")
        _plain_ticks(by_time)
        for axis in (by_step, by_time):
            axis.set_ylabel("cross entropy, nats per token")
            axis.grid(color="#e6e6e6", lw=0.6)
            axis.set_axisbelow(True)
    handles = [
        *(_mark("", name, color=color, ls="-", lw=2) for name, color in orders.items()),
        _mark("", "native eager", ls="-", **NATIVE),
        _mark("", "guarded", ls="-", **GUARDED),
        _mark("s", "held out, native", ms=8, mfc="none"),
        _mark("o", "held out, guarded", ms=3),
    ]
    if any(run["side"] == "launched" for report in found for run in report["raw"]["runs"]):
        handles.append(_mark("^", "one launch per step", ms=3, ls="-", **LAUNCHED))
    if len(heads) > 1:
        handles += [_mark("", f"head: {name}", ls=style, lw=1) for name, style in heads.items()]
    _legend_below(figure, handles, 6)
    return figure


def _drawn_at(run: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """
    Sort key of the drawing order: native below guarded, the base schedule below other schedules.
    """
    return run["side"] != "native", run["schedule"] != BASE, run["seed"]


def _shape(model: Mapping[str, Any]) -> str:
    known = [f"{name} {model[name]}" for name in ("layers", "hidden", "sequence") if name in model]
    return ", ".join(["", *known])


def _course(run: Mapping[str, Any]) -> tuple[list[int], list[float], list[float]]:
    """
    A run's curve, reduced to a few points: steps done, seconds so far, and mean loss since the
    previous point.
    """
    losses, clock = run["losses"], run["clock"]
    each = max(1, len(losses) // _POINTS)
    ends = [*range(each, len(losses), each), len(losses)]
    steps, means = [], []
    for begun, end in zip([0, *ends], ends, strict=False):
        block = losses[begun:end]
        if None not in block:
            steps.append(end)
            means.append(sum(block) / len(block))
    return steps, [seconds_at(clock, step) for step in steps], means


PICTURES: dict[str, tuple[str, Callable[[Sequence[Report]], Any]]] = {
    "step_time": ("bench", step_time),
    "memory": ("bench", memory),
    "resources": ("sweep", resources),
    "loss": ("curves", loss),
}
"""
For each picture, by name: the kind of report that the picture needs, and the function that draws
the picture.
"""


def draw(folder: Path, out: Path, *, suffix: str = "svg") -> list[Path]:
    """
    Draw every picture for which a folder contains the needed report.

    Args:
        folder: Folder of the reports.
        out: Folder for the pictures; created if missing.
        suffix: "svg" or "png".

    Raises:
        UnusableError: No report can be drawn, a file is not a report, or matplotlib is missing.
        OSError: A picture cannot be written.
    """
    drawn = []
    for name, (kind, make) in PICTURES.items():
        found = list(reports.load(folder, kind=kind))
        try:
            figure = make(found) if any(_has_content(report) for report in found) else None
        except UnusableError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnusableError(
                f"{folder}: expected {kind} reports that can be drawn, found one that cannot "
                f"({type(error).__name__}: {error}); make that report again, or remove it from "
                "the folder"
            ) from error
        if figure is None:
            continue
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{name}.{suffix}"
        metadata = {"Date": None} if suffix == "svg" else {}
        figure.savefig(path, dpi=120, metadata=metadata)
        _pyplot().close(figure)
        drawn.append(path)
    if not drawn:
        raise UnusableError(
            f"{folder}: expected a step, sweep or curves report, found none; make one with "
            "qeffect runtime report bench or report curves"
        )
    return drawn


def _has_content(report: Report) -> bool:
    derived = report["derived"]
    drawn = derived.get("points") or derived.get("runs")
    return bool(drawn or any(c["columns"] for c in derived.get("cells", ())))


def add_plots_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plots`."""
    parser.add_argument(
        "--reports",
        type=Path,
        default=reports.FOLDER,
        metavar="DIR",
        help="folder of the reports (default: gpu_runtime/lab/reports of this checkout)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the pictures"
    )
    parser.add_argument(
        "--format",
        choices=("svg", "png"),
        default="svg",
        help="format of the pictures (default svg)",
    )


def run_plots(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Draw the pictures and print their paths.

    Raises:
        UnusableError: No picture can be drawn, matplotlib is missing, or a file is not a report.
    """
    try:
        paths = [str(path) for path in draw(args.reports, args.out, suffix=args.format)]
    except OSError as error:
        raise UnusableError(
            f"--out {args.out}: {error.strerror or error}; name a folder that can be written"
        ) from error
    return Outcome("accepted", {"pictures": paths}, paths)

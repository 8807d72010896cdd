"""
Pictures of the reports for the README: step time against its floor, resources against the number of
microbatches, memory above native.

Drawn from reports alone; the same reports give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from qeffect.cli.command import Outcome, Progress
from qeffect.gpu_runtime import reports
from qeffect.report import UnusableError

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
    "per_microbatch": ("a slot each microbatch", "#e07b39", "s"),
}
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


def _cells(found: Iterable[Report]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Derived and raw cells of every step-table report; a later report of a cell replaces it."""
    cells = {
        derived["cell"]: (derived, raw)
        for report in found
        for derived, raw in zip(report["derived"]["cells"], report["raw"]["cells"], strict=True)
        if derived["columns"]
    }
    return [cells[name] for name in cells]


def _best(derived: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, str]:
    """
    Columns to draw by the title of their row.

    Of natives and of TE's graphs the fastest, which differs from cell to cell; of ours every one
    with guards.
    """
    once = {
        "native": (derived["fastest_native"], "native eager, the faster rule"),
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
    """Titles of all panels, each once, so that rows are the same in each."""
    return list(dict.fromkeys(title for titles in drawn for title in titles))


def _label_rows(axis: Any, rows: Sequence[str], *, shown: bool) -> None:
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)))
    axis.set_yticklabels([fill(row, 36) if shown else "" for row in rows], fontsize=8)


def step_time(found: Sequence[Report]) -> Any:
    """Median step of each column with its range, and the floor of its rule, a panel each cell."""
    pyplot = _pyplot()
    cells = _cells(found)
    best = [_best(derived, raw) for derived, raw in cells]
    rows = _rows(best)
    figure, axes = pyplot.subplots(
        1, len(cells), figsize=(1.2 + 3.6 * len(cells), 1.1 + 0.36 * len(rows)), squeeze=False
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
        axis.set_xlabel("ms a step")
        _plain_ticks(axis)
        axis.grid(axis="x", color="#e6e6e6", lw=0.6)
        axis.set_axisbelow(True)
    floor_mark = pyplot.Line2D(
        [],
        [],
        color="black",
        marker="|",
        ms=10,
        mew=1.2,
        ls="",
        label="floor: kernel time of the library, same sum (labels: over it)",
    )
    figure.legend(handles=[floor_mark], loc="lower left", fontsize=7)
    figure.tight_layout()
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


def memory(found: Sequence[Report]) -> Any:
    """Peak memory above native, the largest of three figures, with the figures."""
    pyplot = _pyplot()
    cells = [
        (derived, raw)
        for derived, raw in _cells(found)
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
        1, len(cells), figsize=(1.6 + 3.2 * len(cells), 1.0 + 0.3 * len(rows)), squeeze=False
    )
    marks = {"allocated": "o", "reserved": "s", "driver": "^"}
    for axis, (derived, raw), names in zip(axes[0], cells, best, strict=True):
        for title, name in names.items():
            row = rows.index(title)
            above = derived["columns"][name]["above_native_bytes"]
            color = COLORS[raw["columns"][name]["family"]]
            axis.barh(row, above["largest"] / 1e9, color=color, height=0.6, alpha=0.55)
            for kind, mark in marks.items():
                axis.plot(above[kind] / 1e9, row, mark, color=color, ms=4)
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
        axis.set_xlabel("GB above native at the peak")
        axis.margins(x=0.15)
    handles = [
        pyplot.Line2D([], [], color="#444444", marker=mark, ls="", ms=4, label=kind)
        for kind, mark in marks.items()
    ]
    figure.legend(handles=handles, loc="lower right", ncol=3, fontsize=7)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def resources(found: Sequence[Report]) -> Any:
    """Graphs, arena, construction and peak memory against microbatches, for each provisioning."""
    pyplot = _pyplot()
    points = [point for report in found for point in report["derived"]["points"]]
    panels: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
        ("graphs", lambda p: float(p["graphs"])),
        ("arena, GB", lambda p: float(p["arena_bytes"]) / 1e9),
        ("construction, s", lambda p: float(p["construction_s"])),
        (
            "peak memory, GB",
            lambda p: None if p["peak_bytes"] is None else max(p["peak_bytes"].values()) / 1e9,
        ),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 2.9))
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
                axis.plot(x, y, color=color, lw=1, ls="--", label="of it, capture")
        if title.startswith("construction"):
            axis.legend(fontsize=7)
        if title == "graphs":
            for key, label, dashes in (
                ("sum_of_stage_peaks", "sum of the stages' peaks of tapes", "--"),
                ("peak_live_tapes", "tapes live at once", ":"),
            ):
                tapes = sorted({(p["microbatches"], p[key]) for p in points})
                x, y = zip(*tapes, strict=True)
                axis.plot(x, y, color="#7f7f7f", lw=1, ls=dashes, label=label)
            axis.legend(fontsize=7)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({p["microbatches"] for p in points}))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel("microbatches")
        axis.grid(color="#e6e6e6", lw=0.6)
        axis.set_axisbelow(True)
    figure.tight_layout()
    return figure


PICTURES: dict[str, tuple[str, Callable[[Sequence[Report]], Any]]] = {
    "step_time": ("bench", step_time),
    "memory": ("bench", memory),
    "resources": ("sweep", resources),
}
"""Pictures by name: the kind of report that each needs, and what draws it."""


def draw(folder: Path, out: Path, *, suffix: str = "svg") -> list[Path]:
    """
    Draw every picture that a folder's reports allow.

    Args:
        folder: Where the reports are.
        out: Where pictures go; made when it is missing.
        suffix: "svg" or "png".

    Raises:
        UnusableError: No report allows any picture, or matplotlib is missing.
    """
    drawn = []
    for name, (kind, make) in PICTURES.items():
        found = list(reports.load(folder, kind=kind))
        if not any(_has_content(report) for report in found):
            continue
        figure = make(found)
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
            f"no step or sweep report is in {folder}; make one with qeffect runtime bench"
        )
    return drawn


def _has_content(report: Report) -> bool:
    derived = report["derived"]
    return bool(derived.get("points") or any(c["columns"] for c in derived.get("cells", ())))


def add_plots_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plots`."""
    parser.add_argument(
        "--reports",
        type=Path,
        default=reports.FOLDER,
        metavar="DIR",
        help="where reports are (default: those of the checkout)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where pictures go")
    parser.add_argument(
        "--format", choices=("svg", "png"), default="svg", help="of the pictures (default svg)"
    )


def run_plots(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Draw, and name what was drawn.

    Raises:
        UnusableError: There is nothing to draw, matplotlib is missing, or a report is not one.
    """
    try:
        paths = [str(path) for path in draw(args.reports, args.out, suffix=args.format)]
    except OSError as error:
        raise UnusableError(f"cannot read {args.reports} or write {args.out}: {error}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UnusableError(f"{args.reports} holds a file that is not a report: {error}") from error
    return Outcome("accepted", {"pictures": paths}, paths)

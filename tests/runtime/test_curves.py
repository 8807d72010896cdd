"""
Figures derived from loss curves: counts, ratios and intervals, compared with numbers computed by
hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.lab.commands import plots
from qeffect.gpu_runtime.lab.reports.text import curve_lines
from qeffect.gpu_runtime.lab.statistics.curves import (
    derive_curves,
    quantile,
    upper_bound,
)
from tests.docs.curves_block import curves

from .report_samples import curve_run, curves_report


def derived(*runs: dict[str, Any]) -> dict[str, Any]:
    """What follows from runs."""
    return derive_curves({"runs": list(runs)})


def seeds(*pairs: tuple[float | None, float | None]) -> dict[str, Any]:
    """How ZB-V is judged against Interleaved, by held-out losses of each, a pair a seed."""
    runs = [
        curve_run(schedule=schedule, seed=seed, held_out=[(40, loss)])
        for seed, pair in enumerate(pairs)
        for schedule, loss in zip(("zbv", "il"), pair, strict=True)
    ]
    (row,) = derived(*runs)["non_inferiority"]
    assert (row["schedule"], row["against"], row["margin"]) == ("zbv", "il", 1.05)
    assert row["seeds"] == [*range(len(pairs))]
    found: dict[str, Any] = row
    return found


class TestOneOrder:
    def test_nothing_differs_where_nothing_does(self) -> None:
        """Losses, held-out losses and tensors; a run under another schedule is not compared."""
        (row,) = derived(curve_run("native"), curve_run(), curve_run(schedule="zbv"))["same_order"]
        assert (row["steps"], row["losses_differ"], row["held_out"]) == (40, 0, 1)
        assert (row["held_out_differ"], row["tensors"], row["state_differs"]) == (0, 100, False)

    @pytest.mark.parametrize(
        ("field", "value", "counted"),
        [
            (
                "losses",
                [5.0 - n * 0.1 for n in range(39)] + [math.nextafter(1.1, 2)],
                (1, 0, False),
            ),
            ("losses", [None] * 40, (40, 0, False)),
            ("held_out", [[40, 1.3]], (0, 1, False)),
            ("state", ["a" * 64, "c" * 64], (0, 0, True)),
        ],
    )
    def test_what_differs_is_counted(self, field: str, value: Any, counted: Any) -> None:
        """One bit of one loss is enough."""
        (row,) = derived(curve_run("native"), curve_run(**{field: value}))["same_order"]
        assert counted == (row["losses_differ"], row["held_out_differ"], row["state_differs"])

    def test_a_launched_run_is_held_to_native_too(self) -> None:
        """Beside the guarded one of the same order, and counted for itself."""
        wrong = curve_run("launched", losses=[6.0] * 40)
        guarded, launched = derived(curve_run("native"), curve_run(), wrong)["same_order"]
        assert (guarded["run"], guarded["losses_differ"]) == ("guarded:il:0:te", 0)
        assert (launched["run"], launched["losses_differ"]) == ("launched:il:0:te", 40)

    def test_a_shorter_run_is_compared_as_far_as_it_goes(self) -> None:
        """Its last tensors are those of another step, and say nothing."""
        short = curve_run("native", steps=20, held_out=[(20, 3.0)])
        ours = curve_run(held_out=[(20, 3.0), (40, 1.25)])
        (row,) = derived(short, ours)["same_order"]
        assert (row["steps"], row["losses_differ"]) == (20, 0)
        assert (row["held_out"], row["held_out_differ"]) == (1, 0)
        assert row["tensors"] is row["state_differs"] is None

    @pytest.mark.parametrize("field", ["seed", "head", "schedule"])
    def test_runs_of_another_kind_are_not_compared(self, field: str) -> None:
        """Another seed, head or order has other bits."""
        other = {"seed": 1, "head": "torchao", "schedule": "zbv"}[field]
        assert [] == derived(curve_run("native"), curve_run(**{field: other}))["same_order"]


class TestNonInferiority:
    def test_the_ratio_is_of_geometric_means(self) -> None:
        """Differences 0.01 and 0.03 of the losses: e to their mean, and Student's t by hand."""
        row = seeds((2.01, 2.0), (2.13, 2.1))
        assert row["ratio"] == pytest.approx(math.exp(0.02), abs=1e-6)
        # t(0.95, 1) = 6.3138, deviation 0.02 / sqrt 2, over sqrt 2
        assert row["upper"] == pytest.approx(math.exp(0.02 + 6.3138 * 0.01), abs=1e-4)
        assert (row["within"], row["shown"]) == (True, False)
        assert row["spread"] == pytest.approx(math.exp(0.12), abs=1e-6)
        assert row["spread_against"] == pytest.approx(math.exp(0.1), abs=1e-6)
        first, _ = row["perplexities"]
        assert first == pytest.approx([math.exp(2.01), math.exp(2.0)], abs=1e-5)

    def test_seeds_that_agree_show_it(self) -> None:
        """Seeds may lie far apart where both schedules go with them."""
        row = seeds((2.010, 2.0), (3.011, 3.0), (4.012, 4.0))
        assert (row["within"], row["shown"]) == (True, True)
        assert row["spread"] > 7

    @pytest.mark.parametrize(("apart", "within"), [(0.0487, True), (0.0489, False)])
    def test_the_margin_is_five_percent(self, apart: float, within: bool) -> None:
        """ln 1.05 is 0.04879."""
        row = seeds((2.0 + apart, 2.0), (3.0 + apart, 3.0))
        assert (row["within"], row["shown"]) == (within, within)

    def test_a_better_schedule_is_no_worse(self) -> None:
        """The test is one-sided."""
        assert seeds((1.0, 2.0), (1.01, 2.0))["shown"]

    def test_one_seed_shows_nothing(self) -> None:
        """The ratio alone: one seed has no variation to compare it with."""
        row = seeds((2.01, 2.0))
        assert row["within"]
        assert row["upper"] is row["spread"] is None
        assert not row["shown"]

    def test_a_loss_that_is_not_finite_is_not_within(self) -> None:
        """Nor is it left out of the mean."""
        row = seeds((None, 2.0), (2.0, 2.0))
        assert (row["ratio"], row["within"], row["shown"]) == (None, False, False)

    def test_a_ratio_that_no_float_holds_is_not_within(self) -> None:
        """A loss of eight hundred is finite, and its perplexity is not."""
        row = seeds((800.0, 2.0), (801.0, 2.0))
        assert (row["ratio"], row["upper"], row["within"], row["shown"]) == (
            None, None, False, False,
        )  # fmt: skip
        assert curve_lines(derived(curve_run(held_out=[(40, 800.0)])))

    def test_runs_are_judged_at_the_last_step_that_all_have(self) -> None:
        """A run that its limit ended early has no later one."""
        runs = [
            curve_run(schedule="zbv", held_out=[(20, 3.0), (40, 1.0)]),
            curve_run(held_out=[(20, 3.0), (40, 9.0)]),
            curve_run(schedule="zbv", seed=1, held_out=[(20, 3.0), (40, 1.0)]),
            curve_run(seed=1, steps=20, held_out=[(20, 3.0)]),
        ]
        (row,) = derived(*runs)["non_inferiority"]
        assert (row["step"], row["ratio"]) == (20, 1.0)

    def test_seeds_of_one_schedule_alone_are_not_compared(self) -> None:
        """Nor are sides and heads mixed."""
        runs = [curve_run("native"), curve_run(schedule="zbv"), curve_run(head="torchao", seed=1)]
        assert [] == derived(*runs)["non_inferiority"]


def test_quantiles_are_those_of_the_tables() -> None:
    """Student's t at 0.95 and 0.975, to the digits that tables have."""
    tables = {
        0.95: {1: 6.3138, 2: 2.9200, 3: 2.3534, 4: 2.1318, 5: 2.0150, 9: 1.8331, 30: 1.6973},
        0.975: {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423},
    }
    for level, table in tables.items():
        for freedom, value in table.items():
            assert value == pytest.approx(quantile(level, freedom), abs=1e-4)
    assert upper_bound([0.5, 0.5, 0.5]) == 0.5


class TestTimeToALoss:
    def test_the_same_losses_take_the_ratio_of_the_steps(self) -> None:
        """
        Losses fall from 5 by 0.1: the mean of ten is 4 after 16 steps.

        Those ten are 4.5 down to 3.6, of which the mean is 4.05; the next ones' is 3.95.
        """
        (row,) = derived(curve_run("native", step_s=1.0), curve_run())["to_loss"]
        first, *_, last = row["levels"]
        assert (first["loss"], first["native_seconds"], first["seconds"]) == (4.0, 16.0, 1.6)
        assert first["native_over_this"] == 10.0
        assert first["with_building"] == pytest.approx((16 + 2) / (1.6 + 2))
        assert (last["loss"], last["native_seconds"]) == (1.6, 40.0)
        assert [level["loss"] for level in row["levels"]] == [4.0, 3.0, 2.0, 1.6]

    def test_a_run_that_learns_more_slowly_takes_longer(self) -> None:
        """Half the fall takes more steps to a loss, at the same time a step."""
        slow = curve_run(schedule="zbv", fall=0.05, step_s=0.1)
        (row,) = derived(curve_run("native", step_s=0.1), slow)["to_loss"]
        assert [level["loss"] for level in row["levels"]] == [4.0, 3.3]
        assert all(level["native_over_this"] < 0.7 for level in row["levels"])

    def test_losses_that_one_never_reaches_are_left_out(self) -> None:
        """As are runs that are too short for a mean."""
        flat = curve_run(schedule="zbv", fall=0.0)
        (row,) = derived(curve_run("native"), flat)["to_loss"]
        assert [level["loss"] for level in row["levels"]] == [5.0]
        few = curve_run("native", steps=5)
        assert [] == derived(few, curve_run())["to_loss"]


class TestRuns:
    def test_the_ends_of_a_run_are_means_of_ten(self) -> None:
        """The report has the means of a run's first ten and last ten losses, and their ratio, as
        the paper does for its short run."""
        run = derived(curve_run(steps=20, held_out=[(20, 1.0)]))["runs"][0]
        assert (run["first_ten"], run["last_ten"]) == (4.55, 3.55)
        assert run["last_over_first"] == pytest.approx(3.55 / 4.55, abs=1e-6)
        assert run["perplexity"] == pytest.approx(math.e, abs=1e-6)

    def test_a_step_is_the_median_of_blocks(self) -> None:
        """One slow block does not move it; tokens a second follow from it."""
        run = derived(curve_run(clock=[[10, 9.0], [20, 10.0], [30, 11.0], [40, 12.0]]))["runs"][0]
        assert (run["step_ms"], run["tokens_per_s"], run["seconds"]) == (100.0, 2560, 12.0)

    def test_what_is_not_finite_is_said(self) -> None:
        """In the losses or in the held-out ones."""
        losses = [5.0] * 39 + [None]
        found = derived(curve_run(losses=losses), curve_run(held_out=[(40, None)]), curve_run())
        assert [False, False, True] == [run["finite"] for run in found["runs"]]
        assert found["runs"][0]["last_ten"] is None
        assert "NOT FINITE" in curve_lines(found)[0]


class TestWords:
    def test_every_part_has_its_lines(self) -> None:
        """On a terminal, and in the README."""
        report = curves_report()
        lines = "\n".join(curve_lines(report["derived"]))
        assert "0 of 40 losses differ" in lines
        assert "10.00 times as long" in lines
        model = {"layers": 8, "hidden": 64, "sequence": 16}
        report["configuration"] |= {"model": model, "parallel": {"pp": 2}}
        text = "\n".join(curves("curves.json", report, "a machine"))
        assert "0 of 1 held-out losses differ; all 100 tensors are the same" in text
        assert "within the margin of 1.05" in text
        assert "NOT below" in text
        row = "| `guarded:il:0:te` and `native:il:0:te` | "
        assert f"{row}1.6 | 40.0 | 4.0 | 10.00x |" in text
        assert text.count(row) == 1  # the lowest loss alone; the report has the others

    def test_orders_that_learn_alike_bit_for_bit_are_said_to_do_so(self) -> None:
        """Why, of the library that was measured alone; one bit of one loss ends it."""
        runs = [curve_run(schedule=s, seed=n) for s in ("il", "zbv") for n in (0, 1)]
        told = []
        library = "transformer-engine"
        for backend, history, last in (
            (library, 16, 1.1),
            (library, 12, 1.1),
            ("reference", 16, 1.1),
            (library, 16, 1.2),
        ):
            runs[3]["losses"][-1] = last
            runs[1]["losses"][-1] = 1.1
            report = curves_report(*runs)
            report["configuration"] |= {
                "backend": backend,
                "model": {"layers": 8, "hidden": 64, "sequence": 16, "history": history},
                "parallel": {"pp": 2, "microbatches": 8},
            }
            told.append("\n".join(curves("curves.json", report, "a machine")))
        for said, where in (
            ("No loss differs by a bit", [True, True, True, False]),
            (
                "rolls (shifts) only the amax histories of the layers that ran",
                [True, True, False, False],
            ),
            ("entries, which are a whole number of steps", [True, False, False, False]),
            ("not a whole number of steps", [False, True, False, False]),
        ):
            assert [said in text for text in told] == where

    def test_what_differs_is_in_the_readme_too(self) -> None:
        """The text claims no success that the report lacks."""
        report = curves_report(
            curve_run("native"), curve_run(state=["c" * 64], held_out=[(40, None)])
        )
        model = {"layers": 8, "hidden": 64, "sequence": 16}
        report["configuration"] |= {"model": model, "parallel": {"pp": 2}}
        text = "\n".join(curves("curves.json", report, "a machine"))
        assert "1 of 1 held-out losses differ; all 100 tensors differ" in text
        assert "NOT every loss is finite" in text


class TestPicture:
    def test_native_is_seen_under_guarded(self) -> None:
        """Wide and pale below, thin above, in both panels; the second is over seconds."""
        figure = plots.loss([curves_report()])
        for axis in figure.axes:
            drawn = [line for line in axis.lines if line.get_linestyle() != "None"]
            wide, *thin = drawn
            assert len(thin) == 4
            assert wide.get_alpha() < 1
            assert all(wide.get_linewidth() > 2 * line.get_linewidth() for line in thin)
            assert "nats" in axis.get_ylabel()
        steps, seconds = figure.axes
        assert steps.get_xlabel() == "steps"
        assert "seconds" in seconds.get_xlabel()
        assert seconds.lines[0].get_xdata()[-1] == 40.0
        assert steps.lines[0].get_xdata()[-1] == 40
        (legend,) = figure.legends
        told = {text.get_text() for text in legend.get_texts()}
        assert {"il", "zbv", "native eager", "guarded", "held out, native"} <= told

    def test_a_launched_run_has_a_mark_of_its_own(self) -> None:
        """It is in the legend where there is one."""
        for side, there in (("launched", True), ("guarded", False)):
            (legend,) = plots.loss([curves_report(curve_run("native"), curve_run(side))]).legends
            told = {text.get_text() for text in legend.get_texts()}
            assert ("one launch per step" in told) is there

    def test_the_file_is_drawn_from_the_report(self, tmp_path: Path) -> None:
        """The same report gives the same bytes, and another loss gives other bytes. A value that is
        not a number leaves a gap."""
        drawn = []
        for n, last in enumerate((1.1, 1.1, None)):
            folder = tmp_path / str(n)
            folder.mkdir()
            run = curve_run(losses=[5.0] * 39 + [last])
            (folder / "curves.json").write_text(json.dumps(curves_report(run)))
            (path,) = plots.draw(folder, folder / "out")
            assert path.name == "loss.svg"
            drawn.append(path.read_bytes())
        assert drawn[0] == drawn[1] != drawn[2]

"""The block of grouped dW: the products of a layer, and steps over two ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.docs.blocks import markdown

Row = Mapping[str, Any]
_SET = ("cell", "schedule", "dtype")


def groups(found: Iterable[tuple[str, Mapping[str, Any]]], machine: Any) -> list[str]:
    """
    Products and steps of every report.

    Args:
        found: Reports of kind `groups`, with the names of their files.
        machine: Gives the machine of a report in a line.
    """
    every = list(found)
    parts: list[str] = []
    products = [one for _, report in every for one in report["derived"]["products"]]
    if products:
        parts += [
            "**The weight gradients of one layer's four matrices**, with scales that are powers "
            "of two. *Each* computes one product per microbatch. *One* computes one product for "
            "all microbatches; its time includes the copy that joins the operands. *Distance* "
            "compares errors: the distance of *one* from a sum in fp64, divided by the distance "
            "of *each* from this sum. Below 1, *one* is more accurate.",
            markdown(
                (
                    *("cell", "gradients", "microbatches", "each ms", "one ms", "one/each"),
                    *("distance, one/each", "matrices of equal bits"),
                ),
                [_product(one) for one in products],
            ),
        ]
    for name, report in every:
        derived, asked = report["derived"], report["configuration"]
        compared = [one for one in derived["digests"] if one["alike"] is not None]
        alike = sum(one["alike"] for one in compared)
        digests = (
            " Both schedules should give the same bits. For each cell, gradient type and group "
            "size, the two schedules' digests of parameters, moments and scales after four "
            f"steps were compared: {alike} of {len(compared)} pairs are equal."
            if compared
            else ""
        )
        parts += [
            f"**Steps in {asked['mode']} over {asked['pp']} ranks** ({name}; {machine(report)}). "
            "The row *today* is the default: each action updates the scales, and each "
            "microbatch has its own dW. This row was measured before and after the other rows. "
            "Columns *group 1* to *8* have the median step time with this group size, divided "
            "by the median over all rounds of both *today* measurements. *Slots* is the number "
            f"of slots of all stages on all ranks.{digests}",
            markdown(
                (
                    *("cell", "schedule", "gradients", "today ms", "group 1", "2", "4", "8"),
                    *("slots, today and largest group", "peak GB, today and largest group"),
                ),
                [_steps(one, derived["rows"]) for one in derived["sets"]],
            ),
        ]
        goals = [
            (
                *(target[part] for part in ("cell", "goal", "column")),
                f"at most {target['value']}",
                str(target["measured"]),
            )
            for target in derived["targets"]
        ]
        if goals:
            parts.append(markdown(("cell", "goal", "row", "wanted", "measured"), goals))
    return parts


def _product(one: Row) -> tuple[str, ...]:
    return (
        *(str(one[name]) for name in ("cell", "dtype", "microbatches")),
        f"{one['each_ms']:.3f}",
        f"{one['joined_ms']:.3f}",
        f"{one['over_each']:.3f}",
        f"{one['apart_over_each']:.3f}",
        f"{one['same_bits']} of {one['of']}",
    )


def _steps(one: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    own = [row for row in rows if all(row[name] == one[name] for name in _SET)]
    today, largest = own[0], max(own, key=lambda row: row["group"])
    took = one["today_ms"]
    over = (one["over_today"].get(str(group)) for group in (1, 2, 4, 8))
    return (
        *(one[name] for name in _SET),
        f"{took['median']:.2f} ({took['min']:.2f} to {took['max']:.2f})",
        *("-" if value is None else f"{value:.3f}" for value in over),
        *(
            " / ".join(map(str, pair))
            for pair in (
                [sum(row["slots"].values()) for row in (today, largest)],
                [f"{row['peak_bytes'] / 1e9:.1f}" for row in (today, largest)],
            )
        ),
    )

"""
Derive the figures of the bit comparisons, the stream table, the pools and the probes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .summary import Raw, totals

__all__ = [
    "REQUIREMENTS",
    "derive_compare",
    "derive_pools",
    "derive_probes",
    "derive_streams",
]

REQUIREMENTS = ("addresses", "retained work", "growth")
"""Categories in which a guarded run is compared with zero, not with native."""


def derive_streams(raw: Raw) -> dict[str, Any]:
    """Stale reads by handoff, over all processes."""
    found: dict[str, Any] = {}
    for handoff in dict.fromkeys(run["handoff"] for run in raw["runs"]):
        runs = [run for run in raw["runs"] if run["handoff"] == handoff]
        found[handoff] = {
            "processes": len(runs),
            "checks": sum(run["checks"] for run in runs),
            "stale": sum(run["stale"] for run in runs),
            "stale_by_kind": totals(run["stale_by_kind"] for run in runs),
            "vacuous": sum(run["vacuous"] for run in runs),
        }
    return {"handoffs": found}


def derive_compare(raw: Raw) -> dict[str, Any]:
    """
    Totals of bit comparisons, by category and by reference.

    `native_against_ours` is the comparison of this runtime with the library. `native_again` is the
    control: the library is compared with itself in another process. `eager_against_ours` covers the
    orders of actions in which the library cannot sum gradients; there the reference is eager
    execution with separate dI and dW. `requirements` compares counts of a guarded run with zero;
    the entry `mismatched` must be 0.
    """
    categories: dict[str, dict[str, int]] = {}
    by_reference: dict[str, dict[str, int]] = {
        name: {"runs": 0, "compared": 0, "mismatched": 0}
        for name in ("native_against_ours", "native_again", "eager_against_ours")
    }
    requirements = {"compared": 0, "mismatched": 0}
    for run in raw["runs"]:
        own = by_reference[_compared_as(run)]
        own["runs"] += 1
        for entry in run["categories"]:
            for total in (
                categories.setdefault(entry["category"], {"compared": 0, "mismatched": 0}),
                requirements if entry["category"] in REQUIREMENTS else own,
            ):
                total["compared"] += entry["compared"]
                total["mismatched"] += entry["mismatched"]
    return {
        "runs": len(raw["runs"]),
        "compared": sum(t["compared"] for t in categories.values()),
        "mismatched": sum(t["mismatched"] for t in categories.values()),
        **by_reference,
        "requirements": requirements,
        "faults": totals({f["clause"]: 1} for run in raw["runs"] for f in run.get("injected", ())),
        "categories": categories,
    }


def _compared_as(run: Raw) -> str:
    if run["candidate"] == "native-again":
        return "native_again"
    return "native_against_ours" if run["reference"].startswith("native") else "eager_against_ours"


def derive_pools(raw: Raw) -> dict[str, Any]:
    """
    Results of each discipline of capture memory (a rule for sharing pools) in each order, and the
    problems found.
    """
    orders = []
    problems: list[str] = []
    for order in dict.fromkeys(run["order"] for run in raw["runs"]):
        runs = {run["discipline"]: run for run in raw["runs"] if run["order"] == order}
        disciplines = {name: _pool_totals(run) for name, run in runs.items()}
        orders.append({"order": order, "disciplines": disciplines})
        for name in ("native-again", "private", "private-unguarded", "shared"):
            if name not in runs:
                problems.append(f"{order}: {name} was not run")
            elif runs[name]["error"]:
                problems.append(f"{order}: {name} failed: {runs[name]['error']}")
            else:
                problems += (f"{order}: {p}" for p in _pool_problems(name, disciplines[name]))
    return {"orders": orders, "problems": problems}


def _pool_totals(run: Raw) -> dict[str, Any]:
    return {
        "refused": run["refused"],
        "compared": sum(c["compared"] for c in run["categories"]),
        "mismatched": sum(c["mismatched"] for c in run["categories"]),
        "nonfinite": run["nonfinite"],
        "by_category": {c["category"]: c["mismatched"] for c in run["categories"]},
        "first": [f"{c['category']}: {label}" for c in run["categories"] for label in c["first"]],
    }


def _pool_problems(name: str, total: Raw) -> Iterable[str]:
    refused = None if total["refused"] is None else total["refused"]["clause"]
    if not total["compared"]:
        yield f"{name} compared nothing"
    elif name == "shared":
        if refused != "capture.out-of-order":
            yield f"the kernel did not refuse a shared pool out of capture order ({refused})"
        if not total["mismatched"]:
            yield "the shared pool corrupted nothing, so the comparison proves nothing"
    else:
        if refused is not None:
            yield f"{name} was refused by {refused}"
        if total["mismatched"]:
            yield f"{name} differs from native in {total['mismatched']} values"


def derive_probes(raw: Raw) -> dict[str, Any]:
    """The result of each probe in a sentence, without a verdict."""
    probes = []
    for run in raw["attention"]:
        attention = "fused attention" if run["fused_attention"] else "NVTE_FUSED_ATTN=0"
        found = "ran" if run["error"] is None else f"failed, {run['error']}"
        if run.get("invalid_writes") is not None:
            where = ", ".join(run["kernels"])
            sizes = " and ".join(map(str, run["write_bytes"]))
            found += f"; {run['invalid_writes']} invalid writes"
            found += f" of {sizes} bytes in {where}" if run["invalid_writes"] else ""
        what = f"sequences of {run['sequence']} tokens, {attention}, {run['how']}"
        probes.append({"what": what, "found": found})
    lines = list(raw["pairing"]["lines"].values())
    version = raw["pairing"]["version"]
    if None in lines:
        found = "the library is not installed or binds otherwise"
    else:
        found = (
            f"that of its chunk's most recent dgrad (Transformer Engine {version}, "
            f"pytorch/graph.py, lines {', '.join(map(str, sorted(lines)))})"
        )
    probes.append({"what": "the graph of a dW in the library's own graphs", "found": found})
    if (looked := raw["addresses"]) is not None:
        found = looked["error"] or (
            f"{looked['median_us']:.1f} µs for {looked['addresses']} addresses of a stage"
        )
        probes.append({"what": "a look at every baked address", "found": found})
    # Older reports have no probe of interleaved stages.
    for side in raw.get("interleaved", ()):
        found = side["error"] or f"{side['different']} of {side['compared']} values differ"
        if side["first"] is not None:
            found += f", first {side['first']}"
        if side["not_finite"] is not None:
            found += f"; not finite from {side['not_finite']} on"
        probes.append({"what": f"interleaved stages, {side['name']}", "found": found})
    return {"probes": probes}

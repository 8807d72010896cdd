"""
The structure of the laboratory: only one module imports Megatron-core, statistics work without
torch, one module runs rows over ranks, and one module computes medians.
"""

from __future__ import annotations

import ast
from pathlib import Path

LAB = Path(__file__).parents[2] / "gpu_runtime" / "lab"


def test_one_module_names_megatrons_modules() -> None:
    """Every other side runs without Megatron-core."""
    found = [
        path.relative_to(LAB).as_posix()
        for path in sorted(LAB.rglob("*.py"))
        if any(
            isinstance(node, ast.Constant) and str(node.value).startswith("megatron.core")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]

    assert ["sides/megatron.py"] == found


def test_statistics_measure_nothing() -> None:
    """They import neither torch nor a room that runs something."""
    for path in sorted((LAB / "statistics").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            level = node.level if isinstance(node, ast.ImportFrom) else 0

            assert "torch" not in {name.partition(".")[0] for name in (*names, module)}, path
            assert level != 2, (
                f"{path}: imports another folder of the laboratory; statistics/ imports none"
            )


def _users(name: str) -> list[str]:
    """The modules of the laboratory that import a name, or use it as an attribute."""
    found = set()
    for path in LAB.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
            else:
                names = {ast.unparse(node)} if isinstance(node, ast.Attribute) else set()
            if name in names:
                found.add(path.relative_to(LAB).as_posix())
    return sorted(found)


def test_one_module_takes_medians() -> None:
    """Every figure of every report has its median from there, rounded or exact."""
    assert ["statistics/summary.py"] == _users("statistics.median")
    assert "statistics/derive.py" in _users("exact_median")


def test_one_runner_times_the_rows_over_ranks() -> None:
    """The reports over ranks time their sides by it; columns share its clock."""
    assert ["runner/rank_rows.py"] == _users("time_side")
    for name in ("commands/scale.py", "commands/peers.py", "commands/tables.py"):
        assert name in _users("RankRun"), name
        assert name in _users("measure_rows"), name
    assert ["runner/column_process.py", "runner/timing.py"] == _users("back_to_back_s")

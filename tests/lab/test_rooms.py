"""The rooms of the laboratory: Megatron-core in one module, and statistics without torch."""

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
            assert level != 2, f"{path}: imports another room of the laboratory"

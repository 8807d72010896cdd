"""
The page of limits names every declared version of Python and torch, as tested or not tested.
"""

from __future__ import annotations

import re
import tomllib

from tests.docs.blocks import ROOT
from tests.schedule.test_torch_releases import RELEASES


def test_every_declared_version_is_named() -> None:
    """Each Python of the classifiers, each torch with kept tables, and those that CI runs."""
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").partition("## Versions")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==(\S+)$", pins, re.MULTILINE)

    assert len(pythons) > 2
    assert [] == [version for version in pythons if f"{version} " not in text]
    assert [] == [one for one in RELEASES if one.rpartition(".")[0] not in text]
    assert f"CI runs CPython 3.11 with torch {torch}" in text

"""
Examine a machine: what it has, which backends work on it, and how to install missing parts.
"""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attrs import asdict, frozen

from qeffect.cli.command import Outcome, Progress

__all__ = ["Diagnosis", "add_doctor_arguments", "examine", "run_doctor"]

TORCH_MINIMUM = (2, 11)


@frozen
class Diagnosis:
    """
    The result of examining one part of the machine, such as torch.

    Args:
        what: Name of the part.
        found: What this machine has, such as the installed version.
        works: Whether the found part is good enough for the runtime.
        remedy: What to install or change if the part is not good enough.
    """

    what: str
    found: str
    works: bool
    remedy: str = ""


def examine(*, probe: bool = False) -> list[Diagnosis]:
    """
    Examine Python, torch, the device and Transformer Engine, in that order.

    Args:
        probe: Also run one small layer of Transformer Engine on the device. This run finds failures
            that a check of the library's names cannot find. The run creates a CUDA context and
            resets Transformer Engine's FP8 state.
    """
    findings = [Diagnosis("Python", platform.python_version(), True)]
    torch_finding, torch = _torch()
    findings.append(torch_finding)
    if torch is None:
        return findings
    findings.append(_device(torch))
    findings.append(_library(torch, probe))
    return findings


def _torch() -> tuple[Diagnosis, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Diagnosis("torch", str(error), False, "pip install 'qeffect[torch]'"), None
    numbers = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    works = numbers >= TORCH_MINIMUM
    remedy = "" if works else "install torch 2.11 or later"
    return Diagnosis("torch", str(torch.__version__), works, remedy), torch


def _device(torch: Any) -> Diagnosis:
    if not torch.cuda.is_available():
        return Diagnosis(
            "CUDA device",
            "none",
            False,
            "the reference backend runs here on the CPU, without capture; capture needs a CUDA "
            "build of torch and a GPU",
        )
    # The current device, as everything else here; a host may have several, not all alike.
    index = torch.cuda.current_device()
    name = torch.cuda.get_device_name(index)
    major, minor = torch.cuda.get_device_capability(index)
    works = (major, minor) >= (8, 9)
    count = torch.cuda.device_count()
    which = f" (device {index} of {count})" if count > 1 else ""
    return Diagnosis(
        "CUDA device",
        f"{name}{which}, compute capability {major}.{minor}",
        works,
        "" if works else "FP8 needs compute capability 8.9 or later; measured on 9.0 only",
    )


def _library(torch: Any, probe: bool) -> Diagnosis:
    what = "Transformer Engine"
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return Diagnosis(
            what,
            "not installed",
            False,
            "pip install 'qeffect[gpu]' on a CUDA host; the reference backend does not need it",
        )
    from .backends.te.domain import library, version_problem

    problem = version_problem(found)
    if not torch.cuda.is_available():
        return Diagnosis(what, found, False, problem or "Transformer Engine needs a CUDA device")
    if problem and os.environ.get("QEFFECT_UNTESTED_TE") != "1":
        return Diagnosis(what, found, False, f"{problem}. {_internals()}")
    try:
        library()
        if probe:
            from .backends.te.self_test import check_backend

            check_backend()
    except Exception as error:  # whatever the library raises while it loads or runs
        said = str(error) or type(error).__name__
        return Diagnosis(what, found, False, f"{problem}. {said}" if problem else said)
    return Diagnosis(what, found, True)


def _internals() -> str:
    """Say whether this Transformer Engine has all internal names that the runtime uses."""
    from .backends.te.internals import BASELINE, IMPORTED, missing_imports

    try:
        missing = missing_imports((*IMPORTED, *BASELINE))
    except Exception as error:  # whatever the library raises while it loads
        return f"Transformer Engine's internals cannot be examined: {error}"
    if missing:
        return f"Transformer Engine lacks names that the runtime uses: {', '.join(missing)}"
    return "Transformer Engine has all names that the runtime imports"


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options: `doctor` has none."""


def run_doctor(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Print what was found; the exit code is 2 if not even the reference backend works."""
    findings = examine(probe=True)
    by_name = {f.what: f for f in findings}
    reference = by_name["torch"].works
    captured = reference and len(findings) == 4 and all(f.works for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{'ok  ' if f.works else 'miss'}  {f.what:20} {f.found}")
        if not f.works:
            lines.append(f"      {f.remedy}")
    lines.append(f"reference backend, eager: {'works' if reference else 'does not work'}")
    lines.append(f"Transformer Engine, captured: {'works' if captured else 'does not work here'}")
    data = {
        "reference_backend": reference,
        "transformer_engine_captured": captured,
        "findings": [asdict(f) for f in findings],
    }
    return Outcome("accepted" if reference else "unusable", data, lines)

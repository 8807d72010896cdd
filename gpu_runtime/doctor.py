"""
What a machine has, what will work on it, and how to get what is missing.
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attrs import asdict, frozen

from qeffect.cli.command import Outcome, Progress

__all__ = ["Finding", "add_doctor_arguments", "examine", "run_doctor"]

TORCH_MINIMUM = (2, 11)


@frozen
class Finding:
    """
    One thing that was looked at.

    Args:
        what: What it is.
        found: What is here.
        works: Whether it is enough.
        remedy: What to do when it is not.
    """

    what: str
    found: str
    works: bool
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at Python, torch, the device and Transformer Engine, in that order."""
    findings = [Finding("Python", platform.python_version(), True)]
    torch_finding, torch = _torch()
    findings.append(torch_finding)
    if torch is None:
        return findings
    findings.append(_device(torch))
    findings.append(_library(torch))
    return findings


def _torch() -> tuple[Finding, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", str(error), False, "pip install 'qeffect[torch]'"), None
    numbers = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    works = numbers >= TORCH_MINIMUM
    remedy = "" if works else "install torch 2.11 or later"
    return Finding("torch", str(torch.__version__), works, remedy), torch


def _device(torch: Any) -> Finding:
    if not torch.cuda.is_available():
        return Finding(
            "CUDA device",
            "none",
            False,
            "the reference backend runs here on the CPU, without capture; capture needs a CUDA "
            "build of torch and a GPU",
        )
    name = torch.cuda.get_device_name(0)
    major, minor = torch.cuda.get_device_capability(0)
    works = (major, minor) >= (8, 9)
    return Finding(
        "CUDA device",
        f"{name}, compute capability {major}.{minor}",
        works,
        "" if works else "FP8 needs compute capability 8.9 or later; measured on 9.0 only",
    )


def _library(torch: Any) -> Finding:
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return Finding(
            "Transformer Engine",
            "not installed",
            False,
            "pip install 'qeffect[gpu]' on a CUDA host; the reference backend needs nothing",
        )
    from qeffect.gpu_runtime.backends.te.domain import version_problem

    problem = version_problem(found)
    if problem:
        return Finding("Transformer Engine", found, False, problem)
    if not torch.cuda.is_available():
        return Finding("Transformer Engine", found, False, "it needs a CUDA device")
    try:
        from qeffect.gpu_runtime.backends.te.domain import library

        library()
    except Exception as error:  # whatever the library raises while it loads
        return Finding("Transformer Engine", found, False, str(error))
    return Finding("Transformer Engine", found, True)


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """`doctor` has no options of its own."""


def run_doctor(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Report what was found; unusable when not even the reference backend works."""
    findings = examine()
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

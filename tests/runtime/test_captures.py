"""
What `capture_graph` tells torch after a capture that failed, with stand-ins for torch's graphs.

`tests/gpu/test_captured.py` has a capture that CUDA itself invalidates.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.step.captures import capture_graph

ENDED = ["begin 1", "end 1", "allocator", "begin 2", "end 2"]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of torch; the end of the first capture raises."""
    found: list[str] = []

    class Graph:
        def __init__(self) -> None:
            self.number = 1 + sum(line.startswith("begin") for line in found)

        def capture_begin(self, **_: Any) -> None:
            found.append(f"begin {self.number}")

        def capture_end(self) -> None:
            found.append(f"end {self.number}")
            if self.number == 1:
                raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch._C,
        "_cuda_endAllocateToPool",
        lambda device, pool: found.append("allocator"),
        raising=False,
    )
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    return found


def test_the_error_of_the_work_is_raised(log: list[str]) -> None:
    def work() -> None:
        raise ValueError("the work's own")

    with pytest.raises(ValueError, match="the work's own"):
        capture_graph(work, (0, 1))
    assert log == ENDED


def test_a_capture_that_only_its_end_finds_invalid(log: list[str]) -> None:
    """The work has hidden the error; a second end raises again."""
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture_graph(lambda: None, (0, 1))
    assert log == ["begin 1", "end 1", *ENDED[1:]]


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_an_error_of_the_small_capture_is_not_raised(
    error: type[Exception], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error("of the small capture")

    def work() -> None:
        raise ValueError("the work's own")

    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(ValueError, match="the work's own"):
        capture_graph(work, (0, 1))
    assert log == ENDED


def test_a_torch_without_the_private_name(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    with pytest.raises(RuntimeError, match="previous error"):
        capture_graph(lambda: None, (0, 1))
    assert log[-2:] == ["begin 2", "end 2"]

"""
Graphs that can be replayed while another graph is captured.

Such a graph becomes a child node of the graph under capture, after the stream's earlier work. A
plain graph of torch cannot become a child node: launching it during a capture is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..backends.protocol import BackendError

__all__ = ["nestable_graph", "nesting_obstacle"]


def nesting_obstacle(device: torch.device) -> str | None:
    """Return why no graph on a device can become a node of another graph; None if graphs can."""
    if device.type == "cpu":
        return "a CPU has no CUDA graphs: run on cuda"
    try:
        from cuda.bindings import runtime  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        return f"cuda.bindings cannot be imported ({error}): pip install cuda-bindings"
    return None


def nestable_graph() -> torch.cuda.CUDAGraph:
    """
    Make a graph whose `replay` adds it to the current capture, or launches it outside a capture.

    Raises:
        BackendError: cuda.bindings, which calls the driver, cannot be imported.
    """
    if (problem := nesting_obstacle(torch.device("cuda"))) is not None:
        raise BackendError(f"graphs of a whole step: {problem}")
    made: torch.cuda.CUDAGraph = _nestable()()
    return made


@cache
def _nestable() -> Any:
    from cuda.bindings import runtime  # type: ignore[import-not-found,unused-ignore]

    def done(answer: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(answer[0]):
            raise BackendError(f"adding a graph to the step's graph failed: {answer[0]}")
        return answer[1:]

    class Nestable(torch.cuda.CUDAGraph):
        def __new__(cls) -> Any:
            return super().__new__(cls, True)

        def __init__(self) -> None:
            super().__init__(True)  # type: ignore[call-arg]

        def replay(self) -> None:
            if not torch.cuda.is_current_stream_capturing():
                super().replay()
                return
            stream = runtime.cudaStream_t(torch.cuda.current_stream().cuda_stream)
            _, _, graph, behind, *_, count = done(runtime.cudaStreamGetCaptureInfo(stream))
            before = list(behind)[:count] if behind else []
            (node,) = done(
                runtime.cudaGraphAddChildGraphNode(
                    graph, before or None, len(before), runtime.cudaGraph_t(self.raw_cuda_graph())
                )
            )
            flag = runtime.cudaStreamUpdateCaptureDependenciesFlags
            instead = flag.cudaStreamSetCaptureDependencies
            update = runtime.cudaStreamUpdateCaptureDependencies
            try:
                done(update(stream, [node], None, 1, instead))
            except TypeError:  # before CUDA 13 edges carried no data
                done(update(stream, [node], 1, instead))

    return Nestable

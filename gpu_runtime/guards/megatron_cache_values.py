"""
Compare the caches of quantized weights with the weights themselves, by value.

A flag says that a forward was to quantize its weights; the values say that it did. So the
comparison also covers graphs that the library replays, and steps that are replayed as one graph.
Only caches of Transformer Engine in FP8 with one scale per tensor are compared, and only their
rows, which the forward reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from qeffect.refusals import refused

__all__ = ["CacheValues"]

#: The largest share of a cache's elements that may differ from the weight, quantized again.
TOLERANCE = 1e-4
#: How many elements are quantized again at once, to bound the memory of the comparison.
_PART = 1 << 24


@attrs.frozen
class _Comparison:
    """
    A comparison that the device may still be computing.

    Args:
        names: Names of the caches.
        shares: Share of the elements of each cache that differ, fp32, on the host.
        event: The CUDA event after the comparison; None on a CPU.
        update: The number of the update before which the caches were compared, from 1.
    """

    names: list[str]
    shares: Any
    event: Any
    update: int


class CacheValues:
    """
    Compares caches with weights before every n-th update, when both belong to the same step.

    Args:
        every: n; 0 compares nothing. Also an attribute.
        waits: Whether the host waits for each comparison. Otherwise a comparison is read before a
            later update, once the device has ended it.

    Attributes:
        compared: How many caches were compared so far.
        updates: How many updates were counted so far.
    """

    def __init__(self, every: int, *, waits: bool) -> None:
        self.every, self._waits = every, waits
        self.compared = self.updates = 0
        self._begun: _Comparison | None = None

    def update(self, modules: Iterable[tuple[str, Any]]) -> None:
        """
        Compare the caches before an update that was counted, and read an earlier comparison.

        In a capture of a CUDA graph, such as that of an optimizer's step, nothing is done.

        Args:
            modules: The modules that keep a cache, with their names.

        Raises:
            Refused: ``version.stale-cache``.
        """
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._read(self._waits)
        if self.updates % self.every == 0 and self._begun is None:
            self._begun = self._start(modules)
            self._read(self._waits)

    def finish(self) -> None:
        """
        Wait for a comparison that was begun, and read it.

        Raises:
            Refused: ``version.stale-cache``.
        """
        self._read(True)

    def _start(self, modules: Iterable[tuple[str, Any]]) -> _Comparison | None:
        import torch

        found = [
            (f"{name}.{key}", _differing(cache, weight))
            for name, module in modules
            for key, cache, weight in _caches(module)
        ]
        if not found:
            return None
        device = found[0][1].device
        with torch.no_grad():
            shares = torch.stack([share.to(device) for _, share in found])
        event = None
        if shares.is_cuda:
            shares = shares.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return _Comparison([name for name, _ in found], shares, event, self.updates)

    def _read(self, waits: bool) -> None:
        begun = self._begun
        if begun is None:
            return
        if begun.event is not None:
            if waits:
                begun.event.synchronize()
            elif not begun.event.query():
                return
        self._begun = None
        self.compared += len(begun.names)
        shares = begun.shares.tolist()
        wrong = [n for n, share in enumerate(shares) if share > TOLERANCE]
        if wrong:
            first = wrong[0]
            raise refused(
                "version.stale-cache",
                "check_update",
                f"{len(wrong)} of {len(shares)} caches of quantized weights that differ from their "
                f"weights before update {begun.update - 1}: {shares[first]:.2%} of the elements "
                f"of {begun.names[first]}, the first",
                "caches that hold the quantized weights of the step",
            )


def _caches(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the comparable caches of a module: the weight's name, the cache, and the weight."""
    for key, cache in (getattr(module, "_fp8_workspaces", None) or {}).items():
        weight, data = getattr(module, key, None), getattr(cache, "_data", None)
        scale = getattr(cache, "_scale_inv", None)
        if data is None or scale is None or weight is None:
            continue
        if scale.numel() == 1 and data.numel() == weight.numel():
            yield key, cache, weight


def _differing(cache: Any, weight: Any) -> Any:
    """
    Return the share of a cache's elements that differ from the weight, quantized again: a tensor of
    one fp32 number on the weight's device.

    A cache has the rounded reciprocal of its scale, so the scale is known to one unit in its last
    place only. For some scales, this unit decides how percents of bf16 weights round. So an element
    differs only if it differs from the results of both ends of the interval.
    """
    import torch

    dtype = torch.float8_e5m2 if "E5M2" in str(cache._fp8_dtype) else torch.float8_e4m3fn
    most = torch.finfo(dtype).max
    with torch.no_grad():
        data = cache._data.reshape(-1).view(torch.uint8)
        scale = cache._scale_inv.reshape(()).float().reciprocal()
        ends = [torch.nextafter(scale, torch.full_like(scale, end)) for end in (0.0, torch.inf)]
        number = torch.zeros((), dtype=torch.float32, device=data.device)
        for own, kept in zip(
            weight.detach().reshape(-1).split(_PART), data.split(_PART), strict=True
        ):
            low, high = (
                (own.float() * end).clamp(-most, most).to(dtype).view(torch.uint8) for end in ends
            )
            number += (low.ne(kept) & high.ne(kept) & ~own.isnan()).sum()  # a NaN has many codes
        return number / data.numel()

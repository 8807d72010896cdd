"""
A transformer stage with delayed-scaling FP8 in plain PyTorch, for a CPU or a GPU.

The rules that matter for the contract are Transformer Engine's: scales lag behind the amax history,
every F rolls the forward histories of the domain and every dI the backward ones, a roll happens
even if F raises, quantized weights are cached, and dW is deferred. One is its older, stricter rule:
every history of the domain is rolled, where it now rolls those alone that have a new entry. So any
two actions that change places show in the bits here. The products are not its own: operands are
dequantized and multiplied in fp32, which is exact enough to compare as raw bits.
"""

from .scaling import ReferenceDomain
from .stage import ReferenceStage

__all__ = ["ReferenceDomain", "ReferenceStage"]

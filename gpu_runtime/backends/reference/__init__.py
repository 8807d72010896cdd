"""
A transformer stage with delayed-scaling FP8 in plain PyTorch, for a CPU or a GPU.

The rules that matter for the contract are Transformer Engine's: scales lag behind the amax history,
every F rolls every forward history of the domain and every dI every backward one, a roll happens
even if F raises, quantized weights are cached, and dW is deferred. The products are not: operands
are dequantized and multiplied in fp32, which is exact enough to compare as raw bits.
"""

from qeffect.gpu_runtime.backends.reference.scaling import ReferenceDomain
from qeffect.gpu_runtime.backends.reference.stage import ReferenceStage

__all__ = ["ReferenceDomain", "ReferenceStage"]

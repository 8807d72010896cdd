"""
A transformer stage with delayed-scaling FP8 in plain PyTorch, for a CPU or a GPU.

The rules that matter for the contract are the same as in Transformer Engine. Scales lag behind the
amax history. Every F rolls the forward histories of the domain, and every dI rolls the backward
histories. A roll shifts a history and computes the next scale; the roll happens even if F raises.
Quantized weights are cached, and dW is deferred. One rule is the rule of older versions of
Transformer Engine: a roll covers every history of the domain, while newer versions roll only
histories with a new entry. So swapping two F, or two dI, of a domain can change the bits, even if
the two belong to different stages. The products differ from Transformer Engine's: operands are
dequantized and multiplied in fp32. The tests compare the raw bits.
"""

from .scaling import ReferenceDomain
from .stage import ReferenceStage

__all__ = ["ReferenceDomain", "ReferenceStage"]

"""
A transformer stage with FP8 and delayed scaling in plain PyTorch, for a CPU or a GPU.

The rules that matter for the contract are the same as in Transformer Engine. Scales are computed
from earlier entries of the amax history. Every F rolls the forward histories of the domain, and
every dI rolls the backward histories. A roll shifts a history by one entry and computes the next
scale, even if F raises an error. Quantized weights are cached, and dW is deferred. One rule comes
from older versions of Transformer Engine: a roll covers every history of the domain, while newer
versions roll only histories with a new entry. Therefore swapping two F, or two dI, of a domain can
change the bits, even if they belong to different stages. The matrix products are not those of
Transformer Engine: operands are dequantized and multiplied in fp32. The tests compare the raw bits
of full and split backward.
"""

from .scaling import ReferenceDomain
from .stage import ReferenceStage

__all__ = ["ReferenceDomain", "ReferenceStage"]

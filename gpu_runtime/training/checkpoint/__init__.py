"""
Checkpoints of a pipeline through torch's distributed checkpoint (DCP), which any mapping can load.

All ranks save together, between two steps, when nothing is live or in flight. Each rank asks its
contract (`check_checkpoint`), then all ranks consent to one epoch. If one rank cannot save, all
ranks stop with its cause, and nothing is written. A load compares files, facts, names, sizes and
dtypes on every rank before any rank writes anything.

The run that saved and the run that loads may differ in ranks, stages and table, and therefore in
how microbatches are split and in which order F and dI update scaling state. `Checkpoints.changed`
lists the differences. Weights, AdamW and the histories of each layer have the same bits after the
load; later steps run under the new mapping.
"""

from .checkpoints import Checkpoints, EarlierSaveError
from .facts import plain
from .load import Replicas
from .save import NonFiniteError
from .sizes import sizes

__all__ = ["Checkpoints", "EarlierSaveError", "NonFiniteError", "Replicas", "plain", "sizes"]

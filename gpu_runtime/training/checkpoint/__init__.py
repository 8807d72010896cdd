"""
Checkpoints of a pipeline in torch's distributed checkpoint format (DCP). A run with another mapping
of stages to ranks can load them.

All ranks save together, between two steps. At this time all work must be finished and all messages
must have arrived. Each rank asks its contract (`check_checkpoint`), then all ranks check that they
are at the same epoch (optimizer step). If one rank cannot save, all ranks stop with this rank's
cause, and nothing is written. A load first checks files, facts (plain data), names, sizes and
dtypes on every rank. Only then do ranks change tensors.

The run that saved and the run that loads may differ in ranks, stages and schedule table. Therefore
the loading run may distribute microbatches differently, and its F and dI may update scaling state
in another order. `Checkpoints.changed` lists the differences. Weights, AdamW's state and the amax
histories of each layer have the same bits after the load. Later steps use the new mapping.
"""

from .checkpoints import Checkpoints, EarlierSaveError
from .facts import plain
from .load import Replicas
from .save import NonFiniteError
from .sizes import sizes

__all__ = ["Checkpoints", "EarlierSaveError", "NonFiniteError", "Replicas", "plain", "sizes"]

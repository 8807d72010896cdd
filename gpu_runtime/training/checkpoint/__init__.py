"""
Checkpoints of a pipeline, which any mapping can load, in torch's distributed checkpoint (DCP).

All ranks save together, between two steps, when no work is unfinished and no message is in flight.
Each rank asks its contract (`check_checkpoint`), then all ranks agree on one epoch. If one rank
cannot save, all ranks stop with that rank's cause, and nothing is written. A load compares files,
facts, names, sizes and dtypes on every rank before any rank writes anything.

The run that saved and the run that loads may differ in ranks, stages and schedule table. They may
therefore split microbatches differently, and their F and dI may update scaling state in another
order. `Checkpoints.changed` lists the differences. Weights, AdamW and the histories of each layer
have the same bits after the load; later steps run under the new mapping.
"""

from .checkpoints import Checkpoints, EarlierSaveError
from .facts import plain
from .load import Replicas
from .save import NonFiniteError
from .sizes import sizes

__all__ = ["Checkpoints", "EarlierSaveError", "NonFiniteError", "Replicas", "plain", "sizes"]

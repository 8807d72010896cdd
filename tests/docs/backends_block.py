"""What each backend reports about its own effects, as a table on the page of limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

from qeffect.gpu_runtime.backends.ends import LossShare, mean_cross_entropy
from qeffect.gpu_runtime.backends.epoch_scales import Scales
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import Reports
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from tests.docs.blocks import ROOT, markdown

__all__ = ["BLOCKS", "MANNERS", "PAGE", "ROWS", "backends"]

PAGE = ROOT / "docs" / "limits.md"
_LOSS = LossShare(mean_cross_entropy, 4)
_DROPOUT = 0.1


def _reference(scales: Scales) -> Reports:
    """What the reference backend's last stage reports if it drops elements and recomputes F."""
    domain = ReferenceDomain(scales=scales)
    config = LayerConfig(hidden=32, ffn=64, heads=2, sequence=16)
    stage = ReferenceStage(0, domain, config, loss=_LOSS, recompute=True, dropout=_DROPOUT)
    return stage.reports


def _transformer_engine(scales: Scales) -> Reports:
    """What Transformer Engine's last stage reports with dropout; the library is not needed."""
    stage = SimpleNamespace(
        dropout=_DROPOUT, layers=(None,), loss=_LOSS, domain=SimpleNamespace(scales=scales)
    )
    told: Reports = vars(TransformerEngineStage)["reports"].fget(stage)
    return told


#: The reports of each backend, by when scales move.
BACKENDS: Mapping[str, Callable[[Scales], Reports]] = {
    "reference": _reference,
    "Transformer Engine": _transformer_engine,
}
#: Fields of `Reports` that say how the other fields hold for a replay.
MANNERS = ("recorded", "places_draws")
#: Each row: the field of `Reports`, its words, when scales move.
ROWS: tuple[tuple[str, str, Scales], ...] = (
    ("filled", "which caches a refresh filled", "action"),
    ("updates", "how often F and dI updated scales", "action"),
    ("tape_scales", "the F whose scales dI used", "action"),
    ("draws", "where F began to draw random numbers", "action"),
    ("draws", 'where F began to draw random numbers, if `scales = "epoch"`', "epoch"),
    ("recomputes", "where a recomputation in dI began to draw random numbers", "action"),
    ("weights", "the factor by which a `LossShare` weighted a microbatch", "action"),
)


def _cell(told: Reports, field: str, *, replayed: bool) -> str:
    """Whether a field is reported; for a replay, whether anew or as recorded at its capture."""
    value = getattr(told, field)
    draws = field in ("draws", "recomputes")
    if draws and value is False:
        return "nothing drawn"
    if not value:
        return "on trust"
    return "as captured" if replayed and not draws else "reported"


def backends() -> str:
    """A row for each report; a column for each backend, eager and replayed."""
    rows = []
    for field, words, scales in ROWS:
        cells = []
        for reports in BACKENDS.values():
            told = reports(scales)
            cells.append(_cell(told, field, replayed=False))
            cells.append(_cell(told.captured(), field, replayed=True))
        rows.append((words, f"`{field}`", *cells))
    columns = [f"{name}, {mode}" for name in BACKENDS for mode in ("eager", "replayed")]
    return markdown(("report", "field of `Reports`", *columns), rows)


#: The blocks of the page.
BLOCKS: Mapping[Path, Mapping[str, Callable[[], str]]] = {PAGE: {"backends": backends}}

"""
Transformer Engine's state domain (the FP8 state that is updated together). It covers the whole
process. Besides the checks in `internals.py`, only this module and `product.py` import the library.

Every update of the library covers all registered modules of the process, including modules of other
stages. The update rolls (shifts by one entry) each amax history that has a new entry. (Before the
library's pull request 825, and with `NVTE_UNFUSED_FP8_UPDATE=1`, an update rolls all histories.) A
captured graph contains a fixed set of modules. Therefore a process has one domain, which stages
(`qeffect.gpu_runtime.backends.te.stage`) join. The domain refuses modules that do not belong to its
stages, and modules that appear after `freeze`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import attrs
import torch
from torch import Tensor

from ..devices import placed
from ..epoch_scales import Scales, require_scales, unnamed
from ..norms import CUDNN_NORMS
from ..protocol import BackendError, StageBackend
from ..random_streams import POSITION
from .device_numbers import DeviceNumbers
from .internals import EPOCH, missing_imports

TESTED = ((2, 18), (2, 20))
"""
First and last supported version, by their first two numbers. The device tests ran under these two
versions. The internals of the versions between them were compared with the internals of these two.
"""

Scaling = Literal["delayed", "current", "block"]

_SETTINGS = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", *CUDNN_NORMS)
"""Environment variables that choose the library's kernels, and so affect bits."""
_THREAD = threading.local()


def tested_versions() -> str:
    """
    Return the range of tested versions as text.

    >>> tested_versions()
    '2.18 to 2.20'
    """
    return " to ".join(".".join(map(str, version)) for version in TESTED)


def version_problem(found: str) -> str | None:
    """
    Return a message if this version of Transformer Engine is untested; None for a tested version.

    >>> version_problem("2.18.0") is version_problem("2.20.2") is None
    True
    >>> print(version_problem("1.13.0"))
    Transformer Engine 1.13.0 is untested; tested: 2.18 to 2.20. The runtime reaches into ...
    """
    numbers = found.split(".")[:2]
    if all(n.isdigit() for n in numbers):
        first, last = TESTED
        if first <= tuple(map(int, numbers)) <= last:
            return None
    return (
        f"Transformer Engine {found} is untested; tested: {tested_versions()}. The runtime reaches "
        "into internals that change between versions: install a tested version, or set "
        "QEFFECT_UNTESTED_TE=1 and compare the results with those of Transformer Engine alone"
    )


@cache
def library() -> SimpleNamespace:
    """
    Import Transformer Engine on first use, and return the parts that the runtime uses.

    Raises:
        BackendError: The library is not installed, cannot be loaded, is untested, or lacks a name
            that the runtime uses. The message names the reason.
    """
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except (ImportError, OSError) as error:
        raise BackendError(
            f"Transformer Engine cannot be imported ({error}); install "
            "transformer-engine[pytorch] on a CUDA host, or use the reference backend"
        ) from error
    version = str(transformer_engine.__version__)
    problem = version_problem(version)
    if problem is not None and os.environ.get("QEFFECT_UNTESTED_TE") != "1":
        raise BackendError(problem)
    refuse_missing(version, missing_imports())
    from transformer_engine.pytorch.module._common import WeightGradStore, noop_cat
    from transformer_engine.pytorch.optimizers import multi_tensor_scale_tensor
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    from transformer_engine.pytorch.triton.cross_entropy import cross_entropy_forward

    return SimpleNamespace(
        te=te,
        recipe=recipe,
        WeightGradStore=WeightGradStore,
        noop_cat=noop_cat,
        cross_entropy_forward=cross_entropy_forward,
        multi_tensor_scale_tensor=multi_tensor_scale_tensor,
        manager=FP8GlobalStateManager,
        version=version,
    )


def refuse_missing(version: str, missing: Sequence[str]) -> None:
    """
    Raise an error if the library lacks required internals.

    Args:
        version: The library's version.
        missing: The required names that `qeffect.gpu_runtime.backends.te.internals` did not find.

    Raises:
        BackendError: A name is missing. The message lists all missing names.
    """
    if missing:
        raise BackendError(
            f"Transformer Engine {version} lacks names that the runtime uses: "
            f"{', '.join(missing)}; install a tested version ({tested_versions()})"
        )


def reset_process() -> None:
    """Unregister all FP8 modules of the process, so that a new domain can be made."""
    library().manager.reset()


class LibraryStage(StageBackend, Protocol):
    """The interface of a stage made of Transformer Engine layers."""

    layers: Any
    """The library's layers, in order."""
    dropout: float
    """Probability with which each layer drops elements of its two residual branches."""

    def fp8_modules(self) -> Iterator[tuple[str, Any]]:
        """The modules that have FP8 state after the warm-up, with their names."""
        ...

    def require_warm(self) -> None:
        """Raise `BackendError` if a module does not have FP8 state yet."""
        ...


@attrs.define(eq=False)
class TransformerEngineDomain:
    """
    The numerical state of all Transformer Engine modules of this process.

    Args:
        scaling: Delayed, current or block scaling. Only delayed scaling has state that depends on
            the order of actions.
        history_length: Number of entries of each amax history, for delayed scaling.
        device: The CUDA device. If it is left out or has no index, the current CUDA device is used.
        scales: When scales are updated, for delayed scaling. With ``action`` the library updates
            them at the end of every F and dI. With ``epoch`` `move_scales` updates them once an
            epoch (an optimizer step). Then neither the exit of an FP8 context nor the backward
            updates scales. Casts gather each amax (largest absolute value) in the first entry of
            its history, and dropout's random numbers depend on layer, microbatch and epoch.

    Attributes:
        random: The random numbers of the domain's dropout.
        recomputing: Whether dI is recomputing the activations of a layer.

    Raises:
        BackendError: The library is missing; modules of other code already share the state;
            `scales` is ``epoch`` without delayed scaling; or the library lacks a name that epoch
            scales need.
        ValueError: `scales` is unknown.
    """

    scaling: Scaling = "delayed"
    history_length: int = 1024
    device: torch.device = attrs.field(factory=placed, converter=placed)
    scales: Scales = "action"
    frozen: bool = attrs.field(default=False, init=False)
    recomputing: bool = attrs.field(default=False, init=False)
    random: DeviceNumbers = attrs.field(init=False)
    _dropping: bool = attrs.field(default=True, init=False)
    _microbatch: tuple[int, int] | None = attrs.field(default=None, init=False)
    _stages: list[LibraryStage] = attrs.field(factory=list, init=False)
    _recipe: Any = attrs.field(init=False)
    _lib: SimpleNamespace = attrs.field(init=False)
    _frozen_members: int = attrs.field(default=0, init=False)

    name = "transformer-engine"

    def __attrs_post_init__(self) -> None:
        require_scales(self.scales)
        self.random = DeviceNumbers(self.device)
        self._lib = library()
        if self.scales == "epoch":
            if self.scaling != "delayed":
                raise BackendError(
                    f"scaling {self.scaling!r} has no scales that outlive an action; leave "
                    "scales='epoch' out, or take scaling='delayed'"
                )
            refuse_missing(self._lib.version, missing_imports(EPOCH))
        if found := self._registered():
            raise BackendError(
                f"{found} FP8 states of this process are registered already, and every update "
                "moves them too; make the domain before other modules, or call reset_process() of "
                "qeffect.gpu_runtime.backends.te.domain"
            )
        recipe = self._lib.recipe
        self._recipe = {
            # Reducing amax over the default group would reduce over pipeline ranks.
            "delayed": lambda: recipe.DelayedScaling(
                margin=0,
                fp8_format=recipe.Format.HYBRID,
                amax_history_len=self.history_length,
                amax_compute_algo="max",
                reduce_amax=False,
            ),
            "current": lambda: recipe.Float8CurrentScaling(),
            "block": lambda: recipe.Float8BlockScaling(),
        }[self.scaling]()

    @property
    def stages(self) -> tuple[LibraryStage, ...]:
        """The stages of the domain, in the order in which they joined."""
        return tuple(self._stages)

    def join(self, stage: LibraryStage) -> None:
        """
        Add a stage to the domain.

        Raises:
            BackendError: The domain is frozen.
        """
        if self.frozen:
            raise BackendError(
                f"stage {stage.index} joins a frozen state domain; build and warm every stage "
                "of the process before capture, because a captured update covers a fixed set of "
                "modules"
            )
        self._stages.append(stage)

    def autocast(self, *, registers: bool = False) -> Any:
        """
        An outermost FP8 context. Its exit rolls each forward history that has a new entry.

        With epoch scales, histories are rolled neither at the exit of the context nor in the
        backward of its modules.

        Args:
            registers: Whether modules without FP8 state run in the context. The library registers
                their state only in a context that rolls histories. Therefore this context then
                rolls histories even with epoch scales.
        """
        if self.scales == "epoch" and not registers:
            return self._gathering()
        return self._lib.te.autocast(enabled=True, recipe=self._recipe)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """
        An FP8 context in which nothing updates scales, because the library treats it as under
        capture.
        """
        with self._lib.te.autocast(enabled=True, recipe=self._recipe, _graph=True):
            # Otherwise the first module's backward would update all backward scales.
            self._lib.manager.quantization_state.is_first_fp8_module = False
            yield

    def around_recomputation(
        self, layer: torch.nn.Module
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """
        Return the two contexts that `torch.utils.checkpoint.checkpoint` needs for a layer's F.

        The library's own checkpoint function keeps the scales of each F in a queue. If dI runs in
        another order than F, dI would get the scales of another F from this queue. Therefore each F
        keeps copies of its scales.

        Args:
            layer: The layer, whose FP8 state must exist.

        Returns:
            A context for the layer's F, and a context for the recomputation. The first context
            changes nothing. The second context quantizes with the scales of this F, and leaves
            scales and histories unchanged.
        """
        states = []
        if self.scaling == "delayed" and self.scales == "action":
            metas = (getattr(module, "fp8_meta", None) for module in layer.modules())
            states = [meta["scaling_fwd"] for meta in metas if meta and "scaling_fwd" in meta]
        scales = [state.scale.clone() for state in states]
        return nullcontext(), self._recompute(states, scales)

    @contextmanager
    def _recompute(self, states: Sequence[Any], scales: Sequence[Tensor]) -> Iterator[None]:
        if not hasattr(_THREAD, "ready"):
            # autograd's thread may have run nothing yet; the library's kernels that are compiled at
            # run time fail there until one call has made the device's context current.
            torch.zeros((), device=self.device)
            _THREAD.ready = True
        # With epoch scales the scales are still those of F, and a second cast of the same tensor
        # gathers the same amax.
        kept = [(state.scale.clone(), state.amax_history[0].clone()) for state in states]
        for state, scale in zip(states, scales, strict=True):
            state.scale.copy_(scale)
        self.recomputing = True
        try:
            with self._gathering():
                yield
        finally:
            self.recomputing = False
            for state, (scale, newest) in zip(states, kept, strict=True):
                state.scale.copy_(scale)
                state.amax_history[0].copy_(newest)

    def move_scales(self) -> None:
        """
        Update the forward and backward scales once, in the same way as F and dI do by default.

        Raises:
            BackendError: The library updates the scales of this domain at every F and dI.
        """
        if self.scales != "epoch":
            raise BackendError(
                "the library updates the scales of this domain at the end of every F and dI; make "
                "the domain with scales='epoch' to update its scales once an epoch"
            )
        for forward in (True, False):
            self._lib.manager.reduce_and_update_fp8_tensors(forward=forward)

    @property
    def drops(self) -> bool:
        """Whether a stage of the domain uses dropout."""
        return any(stage.dropout > 0.0 for stage in self._stages)

    def begin_forward(self, epoch: int, microbatch: int) -> None:
        """
        Set the microbatch of the next F. With epoch scales, dropout's random numbers depend on the
        microbatch.
        """
        self._microbatch = epoch, microbatch

    def drawing(self) -> AbstractContextManager[int | None]:
        """
        A context around one F, eager or replayed, in which dropout draws from the domain's position
        in the random sequence.

        The context yields the position at which F begins to draw. It yields None without dropout,
        or if dropout draws by name (epoch, microbatch and layer).
        """
        if not (self.drops and self._dropping) or self.scales == "epoch":
            return nullcontext()
        return self.random.drawing()

    def drawing_layer(self, layer: int) -> AbstractContextManager[None]:
        """
        A context around one layer's F. With epoch scales, dropout draws by name (epoch, microbatch
        and layer) in this context.

        Args:
            layer: The layer's number in the model.

        Raises:
            BackendError: The microbatch of this F was not set by `begin_forward`.
        """
        if not (self.drops and self._dropping) or self.scales != "epoch":
            return nullcontext()
        if self._microbatch is None:
            raise unnamed()
        return self.random.drawing_by_name((*self._microbatch, layer))

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """A context without dropout, for an evaluation."""
        before, self._dropping = self._dropping, False
        layers = [layer for stage in self._stages for layer in stage.layers]
        kept = [layer.hidden_dropout for layer in layers]
        try:
            for layer in layers:
                layer.hidden_dropout = 0.0
            yield
        finally:
            self._dropping = before
            for layer, probability in zip(layers, kept, strict=True):
                layer.hidden_dropout = probability

    def _registered(self) -> int:
        buffers = self._lib.manager.quantization_state.global_amax_buffer
        return sum(len(held) for held in buffers.values())

    def _members(self) -> int:
        key = self._lib.manager.get_buffer_info()
        return sum(
            len(module.fp8_meta[key]) // 2
            for stage in self._stages
            for _, module in stage.fp8_modules()
            if key in module.fp8_meta
        )

    def freeze(self) -> None:
        """
        Close the set of modules before capture.

        Raises:
            BackendError: A stage has not been warmed up; a module outside the domain shares the
                state; or the library's process-wide flag to skip weight updates exists. This flag
                would override the refresh flag of every F.
        """
        for stage in self._stages:
            stage.require_warm()
        if self._lib.manager.quantization_state.skip_fp8_weight_update_tensor is not None:
            raise BackendError(
                "the process-wide skip_fp8_weight_update tensor exists; do not mix these graphs "
                "with make_graphed_callables(cache_quantized_params=True) in one process"
            )
        if self._registered() != self._members():
            raise BackendError(
                f"{self._registered()} FP8 states are registered in this process, but the domain's "
                f"stages have {self._members()}; every module of the process must belong to a stage"
            )
        self._frozen_members = self._registered()
        self.frozen = True

    def check_membership(self) -> None:
        """
        Check that no module was registered since `freeze`.

        Raises:
            BackendError: A module was registered. Eager actions would update the scales of this
                module, but replays would not.
        """
        if self.frozen and self._registered() != self._frozen_members:
            raise BackendError(
                f"{self._registered() - self._frozen_members} FP8 states joined the process after "
                "capture; warm every module before capture"
            )

    def extra_state(self) -> Mapping[str, Tensor]:
        """
        Return the library's process-wide amax buffers, without the buffers that share memory with a
        module's history. If dropout draws by position, also return the random generator's position.
        """
        covered = {
            tensor.untyped_storage().data_ptr()
            for stage in self._stages
            for tensor in stage.numerical_state().values()
        }
        buffers = self._lib.manager.quantization_state.global_amax_buffer
        state = {
            f"global_amax.{key}.{n}": tensor
            for key, held in sorted(buffers.items())
            for n, tensor in enumerate(held)
            if tensor.untyped_storage().data_ptr() not in covered
        }
        if self.drops and self.scales == "action":
            state[POSITION] = self.random.position
        return state

    def capture_obstacles(self) -> tuple[str, ...]:
        """
        Return why the domain cannot be captured: its CUDA device is missing or not the current
        device, or dropout draws by name, which a graph cannot do.
        """
        named = (
            "dropout under scales='epoch' draws by layer, microbatch and epoch, but a graph draws "
            "from the position of the generator: take mode 'eager', or scales='action'"
        )
        by_name = self.drops and self.scales == "epoch"
        return (*self._device_obstacles(), *((named,) if by_name else ()))

    def _device_obstacles(self) -> tuple[str, ...]:
        if not torch.cuda.is_available():
            return ("no CUDA device is available",)
        current = placed()
        if self.device.type == "cuda" and self.device != current:
            return (
                f"the domain is on {self.device}, but the current device is {current}; call "
                f"torch.cuda.set_device({self.device.index}) before the runtime is made",
            )
        return ()

    def environment(self) -> Mapping[str, str]:
        """Return the versions, the device, and the settings that affect results."""
        return {
            "torch": torch.__version__,
            "transformer_engine": self._lib.version,
            "cuda": str(torch.version.cuda),
            "device": _device_name(self.device),
            **{name: os.environ.get(name, "unset") for name in _SETTINGS},
        }

    def recipe(self) -> Mapping[str, Any]:
        """
        Return the recipe as plain data. With epoch scales, the recipe also says when the scales are
        updated.
        """
        if self.scaling != "delayed":
            return {"recipe": type(self._recipe).__name__}
        found = {
            "recipe": "DelayedScaling",
            "format": "HYBRID",
            "amax_history_len": self.history_length,
            "amax_compute_algo": "max",
            "margin": 0,
        }
        return found if self.scales == "action" else {**found, "scales": self.scales}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)

"""
A guard that checks TorchTitan's pipeline. Call `guarded` in your own configuration module.

`guarded(spec)` returns a `ModelSpec` whose two hooks also install a guard. The hook `pipelining_fn`
builds the schedule, which `pipelining.guard` then guards. TorchTitan calls the hook
`post_optimizer_build_fn` with the optimizers. From then on, each update by these optimizers ends an
epoch (one optimizer step, not a pass over the data). If TorchTitan accumulates gradients over
several steps of the schedule, each of these steps is a *walk* of the epoch. The guard changes no
file, no option, and no result of a correct run. By default, violations are reported; with
``manner="refuse"`` they raise an error.

TorchTitan's validator calls `schedule.eval`, which is not guarded. `pipelining` and
`pipelining_update` describe what the guard checks. This module connects the guard to TorchTitan.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import attrs

from qeffect.text import shown

from . import pipelining
from .pipelining import GuardedSchedule
from .releases import check_release
from .reports import LOGGER, Manner, OnViolation, Violation

__all__ = ["TESTED", "GuardedSchedule", "Violation", "guard_of", "guarded"]

#: The releases of TorchTitan that the guard was tested with.
TESTED = ("0.3",)

_HOOKS = ("pipelining_fn", "post_optimizer_build_fn")
#: The attribute of a guarded `pipelining_fn` that holds its options.
_MARK = "_qeffect_guarded"


def guarded(
    spec: Any,
    *,
    manner: Manner = "report",
    on_violation: OnViolation | None = None,
    log: str | os.PathLike[str] | None = None,
    untested: bool = False,
) -> Any:
    """
    Return a model's specification whose pipeline is guarded.

    Write ``config.model_spec = guarded(config.model_spec)`` at the end of a function of your
    configuration module. A run without pipeline parallelism is not guarded. The logger
    ``qeffect.guards`` then logs a warning.

    Args:
        spec: A `ModelSpec` of TorchTitan.
        manner: ``report`` reports a violation, and the run continues. ``refuse`` raises an error.
        on_violation: Called with the first violation of each clause, in manner ``report``.
        log: A folder in which each rank writes an event log, as in `pipelining.guard`. None writes
            no log.
        untested: Whether manner ``refuse`` accepts releases that the guard was not tested with.
            Manner ``report`` only warns about such releases.

    Raises:
        UntestedReleaseError: The manner is ``refuse``, `untested` is False, and the guard was not
            tested with the installed TorchTitan.
        TypeError: `spec` is not a `ModelSpec`.
        ValueError: The model has no pipeline or is already guarded, or the manner is unknown.
    """
    if manner not in ("refuse", "report"):
        raise ValueError(f"manner must be 'refuse' or 'report', got {shown(manner)}")
    fields: Any = getattr(spec, "__dataclass_fields__", {})
    if not all(name in fields for name in _HOOKS):
        raise TypeError(
            "guarded expects a ModelSpec, which `model_registry(...)` of a TorchTitan model "
            f"returns; found {type(spec).__name__} without {' or '.join(_HOOKS)}"
        )
    if spec.pipelining_fn is None:
        raise ValueError(
            f"model {shown(getattr(spec, 'name', '?'))} has no pipelining_fn, so there is no "
            "pipeline to guard; leave guarded() out"
        )
    if hasattr(spec.pipelining_fn, _MARK):
        raise ValueError("this specification is guarded already")
    check_release("torchtitan", _release(spec), *TESTED, manner=manner, untested=untested)
    hooks = _Hooks(manner, on_violation, log, untested)
    replace: Callable[..., Any] = dataclasses.replace
    return replace(
        spec,
        pipelining_fn=hooks.pipelining(spec.pipelining_fn),
        post_optimizer_build_fn=hooks.optimizers(spec.post_optimizer_build_fn),
    )


def guard_of(built: Any) -> GuardedSchedule:
    """
    Return the guard of a run. The guard has `violations`, `on_trust()`, `contract` and `remove()`.

    Args:
        built: A `Trainer`, or its `pp_schedule`.

    Raises:
        ValueError: The run has no guarded schedule.
    """
    schedule = getattr(built, "pp_schedule", built)
    found = getattr(getattr(schedule, "schedule", schedule), pipelining.MARK, None)
    if not isinstance(found, GuardedSchedule):
        raise ValueError(
            f"{type(built).__name__} has no guarded schedule; the messages of the Python logger "
            "`qeffect.guards` say why, if `guarded` was called"
        )
    return found


def _release(spec: Any) -> str:
    """Return the release of the package that defines the specification's class."""
    package = sys.modules.get(type(spec).__module__.partition(".")[0])
    return str(getattr(package, "__version__", "unknown"))


@attrs.define
class _Hooks:
    """
    The two hooks of a guarded specification.

    Args:
        manner, on_violation, log, untested: The arguments that were passed to `guarded`.

    Attributes:
        built: The guard of the last schedule, and the number of schedule steps per update; None
            again once the optimizers are built.
    """

    manner: Manner
    on_violation: OnViolation | None
    log: str | os.PathLike[str] | None
    untested: bool
    built: tuple[GuardedSchedule, int | None] | None = None

    def pipelining(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the hook that builds the schedule."""

        @wraps(build)
        def pipelining_fn(*args: Any, **kwargs: Any) -> Any:
            found = build(*args, **kwargs)
            self.built = None
            self._put(lambda: self._guard(found[0], kwargs))
            return found

        setattr(pipelining_fn, _MARK, self)
        return pipelining_fn

    def optimizers(self, build: Callable[..., Any] | None) -> Callable[..., Any]:
        """Wrap the hook that is called with the optimizers."""

        def post_optimizer_build_fn(optimizers: Any, *args: Any, **kwargs: Any) -> None:
            if build is not None:
                build(optimizers, *args, **kwargs)
            built, self.built = self.built, None
            if built is None:
                LOGGER.warning("this run has no guarded pipeline: guarded() has no effect")
                return
            guard, walks = built
            self._put(lambda: guard.follow_optimizer(optimizers, walks=walks))

        return post_optimizer_build_fn

    def _guard(self, schedule: Any, given: dict[str, Any]) -> None:
        guard = pipelining.guard(
            schedule,
            manner=self.manner,
            on_violation=self.on_violation,
            log=self.log,
            untested=self.untested,
        )
        self.built = guard, _walks(given.get("training"), given.get("parallel_dims"))

    def _put(self, put: Callable[[], None]) -> None:
        """
        Install a guard; if this fails in manner ``report``, log the error and let the run continue
        unguarded.
        """
        try:
            put()
        except Exception as error:
            if self.manner == "refuse":
                raise
            LOGGER.error("the pipeline is not guarded: %s: %s", type(error).__name__, error)


def _walks(training: Any, dims: Any) -> int | None:
    """Return the number of schedule steps per update; None if the trainer does not specify it."""
    local = getattr(training, "local_batch_size", None)
    whole = getattr(training, "global_batch_size", None)
    if not isinstance(local, int) or not isinstance(whole, int):
        return None
    if whole < 0:  # TorchTitan's default: no accumulation
        return 1
    replicas = dims.get_mesh("batch").size() if getattr(dims, "dp_enabled", False) else 1
    return whole // (local * replicas)

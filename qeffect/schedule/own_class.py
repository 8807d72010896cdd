"""
Import a user's own schedule class by its name ``module:Class``.
"""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ..text import near
from .actions import ScheduleError

__all__ = ["base_name", "import_class", "own_class"]

#: A module as Python imports it, a colon, and a class.
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
#: For each base class of torch, the torch class whose stages a user's subclass gets.
_BASES = {"PipelineScheduleSingle": "ScheduleGPipe", "PipelineScheduleMulti": "ScheduleLoopedBFS"}


def own_class(name: str) -> type:
    """
    Import a subclass of torch's schedule classes; modules in the working folder are found too.

    Args:
        name: The class as ``module:Class``.

    Raises:
        ScheduleError: The name does not have this form, the module cannot be imported, or the
            module has no such schedule class.
    """
    found = import_class(name)
    base_name(found)
    return found


def import_class(name: str, missing: str = "") -> type:
    """
    Import a class; modules in the working folder are found too.

    Text that the module prints during its import goes to standard error, so that it does not mix
    with a command's own output.

    Args:
        name: The class as ``module:Class``.
        missing: Advice for the error message if a package is not installed.

    Raises:
        ScheduleError: The name does not have this form, the module cannot be imported, or the
            module has no such class.
    """
    if not _NAME.fullmatch(name):
        raise ScheduleError(
            f"{name}: expected module:Class, with the module as Python imports it, such as "
            "mymodule:MySchedule or package.module:MySchedule"
        )
    module_name, _, class_name = name.partition(":")
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a module raises while it is imported
        said = " ".join(str(error).split()) or "no message"
        raise ScheduleError(
            f"{name}: module {module_name} cannot be imported: {type(error).__name__}: {said}"
            + (f"; {missing}" if missing and isinstance(error, ModuleNotFoundError) else "")
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        own = (n for n, value in vars(module).items() if isinstance(value, type))
        hint = near(class_name, own) or "; name one of its classes"
        raise ScheduleError(f"{name}: module {module_name} has no class {class_name!r}{hint}")
    return found


def base_name(own: type, known: tuple[str, ...] = ()) -> str:
    """
    Return the name of the torch class whose constructor takes the same stages as a user's class.

    Args:
        own: The user's class.
        known: Names of torch's concrete schedule classes.

    Raises:
        ScheduleError: The class is not a subclass of torch's schedules.
    """
    for base in own.__mro__:
        if base.__module__.startswith("torch."):
            if base.__name__ in known:
                return base.__name__
            if base.__name__ in _BASES:
                return _BASES[base.__name__]
    raise ScheduleError(
        f"{own.__module__}:{own.__name__} is not a schedule class; expected a subclass of "
        f"{' or '.join(_BASES)} of torch.distributed.pipelining"
    )

"""
Old import names, which keep working for one release with a `DeprecationWarning`.

`install` takes a table of old and new names. An import by an old name gives a stand-in module,
whose attributes are the same objects as the new module's. The tables below are for the kernel and
the guards; `qeffect.gpu_runtime.renamed` has the runtime's tables.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

import attrs

__all__ = ["MODULES", "NAMES", "install", "old_names", "whole"]

#: Renamed modules of the kernel and the guards that documentation pages showed: for each old name,
#: the new name; both are relative to `qeffect`.
MODULES: Mapping[str, str] = {
    "calls.reading": "calls.queries",
    "config": "stage_config",
    "engine.memory": "engine.concrete_memory",
    "entries": "steps.entries",
    "guards.price": "gpu_runtime.lab.commands.guards",
    "layout": "process_layout",
    "ledgers.counted": "ledgers.expected_counts",
    "ledgers.steps": "ledgers.recorded_steps",
}

#: Objects that also have another name in their new module.
NAMES: Mapping[str, str] = {
    "calls.reading.Reading": "calls.queries.Queries",
    "layout.Layout": "process_layout.ProcessLayout",
    "ledgers.counted.Counted": "ledgers.expected_counts.ExpectedCounts",
    "ledgers.steps.Steps": "ledgers.recorded_steps.RecordedSteps",
}


def install(package: str, modules: Mapping[str, str], names: Mapping[str, str]) -> None:
    """
    Make old names of a package importable.

    Args:
        package: The package that all names below are relative to.
        modules: For each old module name, the new module name. An empty new name marks a removed
            folder; a new name that begins with ``qeffect.`` is already complete.
        names: For each old ``module.name``, the new ``module.name``. Only for objects that were
            renamed, or that moved to another module than the rest of their old module.
    """
    if not any(isinstance(f, _Finder) and f.package == package for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package, modules, names))


def whole(package: str, new: str) -> str:
    """
    Return a new name in full; a name without the prefix ``qeffect.`` is relative to the package.

    >>> whole("qeffect.gpu_runtime", "step.graphs"), whole("qeffect.gpu_runtime", "qeffect.guards")
    ('qeffect.gpu_runtime.step.graphs', 'qeffect.guards')
    """
    return new if new.startswith("qeffect.") else f"{package}.{new}"


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """
    Return a module's ``__getattr__`` for objects that were renamed within the module.

    Args:
        module: Full name of the module.
        names: For each old name, the new name.
    """

    def find(name: str) -> Any:
        if (new := names.get(name)) is None:
            raise AttributeError(f"module {module} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} is now {module}.{new}; the next release removes the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[module], new)

    return find


class _StandIn(ModuleType):
    """A module under its old name; its attributes come from the new module."""

    _find: Any

    def __getattr__(self, name: str) -> Any:
        return self._find(name)


@attrs.frozen
class _Finder(MetaPathFinder, InspectLoader):
    """Finds one package's stand-ins before other finders run, since a file may have an old name."""

    package: str
    modules: Mapping[str, str]
    names: Mapping[str, str]

    def _old(self, fullname: str) -> str:
        return fullname.removeprefix(f"{self.package}.")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a stand-in's spec; None if the name is not an old one."""
        if not fullname.startswith(f"{self.package}.") or self._old(fullname) not in self.modules:
            return None
        return ModuleSpec(fullname, self, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        """Whether the table has other old names inside this package."""
        return any(old.startswith(f"{self._old(fullname)}.") for old in self.modules)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stand-in."""
        module = _StandIn(spec.name)
        module._find = lambda name: self._found(self._old(spec.name), name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Import the new module, and warn."""
        if new := self.modules[self._old(module.__name__)]:
            importlib.import_module(whole(self.package, new))
            warnings.warn(self._warning(module.__name__, new), DeprecationWarning, stacklevel=2)

    def _warning(self, old: str, new: str) -> str:
        return f"{old} is now {whole(self.package, new)}; the next release removes the old name"

    def _found(self, old: str, name: str) -> Any:
        """Return the object for an attribute of a stand-in."""
        if (place := self.names.get(f"{old}.{name}")) is not None:
            module, _, attribute = place.rpartition(".")
            warnings.warn(
                self._warning(f"{self.package}.{old}.{name}", place),
                DeprecationWarning,
                stacklevel=3,
            )
            return getattr(importlib.import_module(whole(self.package, module)), attribute)
        if f"{old}.{name}" in self.modules or name in ("__path__", "__file__"):
            raise AttributeError(name)  # a module below, which is imported next
        if not (new := self.modules[old]):
            raise AttributeError(f"module {self.package}.{old} has no attribute {name!r}")
        return getattr(importlib.import_module(whole(self.package, new)), name)

    def get_source(self, fullname: str) -> str:
        """Return a program that runs the new module, for ``python -m`` with the old name."""
        new = whole(self.package, self.modules[self._old(fullname)])
        return f"import runpy\nrunpy.run_module({new!r}, run_name='__main__', alter_sys=True)\n"

    def get_code(self, fullname: str) -> CodeType:
        """Compile `get_source`, and warn here, since ``python -m`` does not call `exec_module`."""
        new = self.modules[self._old(fullname)]
        warnings.warn(self._warning(fullname, new), DeprecationWarning, stacklevel=2)
        return compile(self.get_source(fullname), f"<{fullname}>", "exec")

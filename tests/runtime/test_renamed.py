"""
Import names of earlier releases: each name still works, warns, and gives the object with the new
name.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from qeffect.gpu_runtime.renamed import MODULES, NAMES
from qeffect.gpu_runtime.runtime import Runtime
from qeffect.renamed import whole
from tests.profiles import few

ROOT = Path(__file__).parents[2]
RUNTIME = "qeffect.gpu_runtime"
#: What the README and the runtime's page showed, and where the object is now.
SHOWN = {
    "parallel.guard.guard": "qeffect.guards.pipelining.guard",
    "guards.pipelining.guard": "qeffect.guards.pipelining.guard",
    "parallel.world.Worker": "ranks.worker.Worker",
    "parallel.world.join": "ranks.membership.join",
    "parallel.consent.StoppedError": "ranks.consent.StoppedError",
    "optimizer.Optimizer": "step.optimizer.Optimizer",
    "plan.order.Order": "step.plan.order.Order",
}


def imports(old: str) -> bool:
    """Whether a module can be imported here: no gone folder, program, or kernel without Triton."""
    kernel = old.endswith("_kernel") and importlib.util.find_spec("triton") is None
    return bool(MODULES[old]) and not old.endswith("__main__") and not kernel


def fresh(old: str) -> object:
    """Import a module by its old name as a process does for the first time; it has to warn."""
    name = f"{RUNTIME}.{old}"
    sys.modules.pop(name, None)
    new = re.escape(whole(RUNTIME, MODULES[old]))
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module(name.rpartition(".")[0])  # an old package warns of its own name
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(name)} is now {new};"):
        return importlib.import_module(name)


@pytest.mark.parametrize("old", [old for old in MODULES if imports(old)])
def test_a_module_is_found_under_its_old_name(old: str) -> None:
    """Each public name of the new module is the same object under the old one."""
    module = fresh(old)
    new = importlib.import_module(whole(RUNTIME, MODULES[old]))

    for name in getattr(new, "__all__", ()):
        if f"{old}.{name}" not in NAMES:
            assert getattr(module, name) is getattr(new, name)


@pytest.mark.parametrize(("old", "new"), sorted({**NAMES, **SHOWN}.items()))
def test_a_name_is_found_in_its_old_module(old: str, new: str) -> None:
    """What was shown, and what moved by itself, is the same object, with a warning."""
    module, _, name = old.rpartition(".")
    place, _, attribute = new.rpartition(".")
    sys.modules.pop(f"{RUNTIME}.{module}", None)
    with pytest.warns(DeprecationWarning, match=r"is now qeffect\."):
        found = getattr(importlib.import_module(f"{RUNTIME}.{module}"), name)

    assert found is getattr(importlib.import_module(whole(RUNTIME, place)), attribute)


def test_the_warning_points_at_the_import() -> None:
    """The warning names the line that has to be changed."""
    sys.modules.pop(f"{RUNTIME}.parallel.guard", None)
    with pytest.warns(DeprecationWarning, match="parallel.guard is now") as caught:
        from qeffect.gpu_runtime.parallel.guard import guard  # type: ignore[import-not-found]

    assert [one.filename for one in caught] == [__file__]
    assert guard.__module__ == "qeffect.guards.pipelining"


def test_a_guard_is_loaded_once_though_its_file_lies_under_the_old_name_too() -> None:
    """Each file of the guards is loaded by its short name, also where the old one comes first."""
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from qeffect.gpu_runtime.guards import pipelining as old\n"
        "from qeffect.guards import pipelining as new\n"
        "assert old.guard is new.guard\n"
        "print(*(n for n, m in sys.modules.items() if '/guards/' in str(vars(m).get('__file__'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr
    loaded = {n for n in done.stdout.split() if n.startswith("qeffect.")}
    assert "qeffect.guards.pipelining" in loaded
    assert {"qeffect.guards"} == {".".join(name.split(".")[:2]) for name in loaded}


def test_a_folder_that_is_gone_gives_its_modules_and_nothing_else() -> None:
    """`from package import module` works; any other name is missing, as it always was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from qeffect.gpu_runtime.parallel import consent  # type: ignore[import-not-found]

        assert consent.StoppedError.__name__ == "StoppedError"
        with pytest.raises(ImportError):
            from qeffect.gpu_runtime.parallel import nothing  # noqa: F401
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{RUNTIME}.parallel.nothing")


def test_a_new_module_keeps_its_name() -> None:
    """An import by the old name leaves the new module as it is."""
    fresh("optimizer")
    new = importlib.import_module(f"{RUNTIME}.step.optimizer")

    assert new.__name__ == f"{RUNTIME}.step.optimizer"
    assert new.__spec__ is not None
    assert new.__spec__.name == new.__name__
    assert not hasattr(importlib.import_module(f"{RUNTIME}.ranks"), "guard")


@pytest.mark.ci
@pytest.mark.parametrize("old", few(["bench.peers", "training.restarts"], (0,), ()))
def test_a_program_runs_under_its_old_name(old: str) -> None:
    """`python -m` with the old name runs the new module, and warns."""
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-m", f"{RUNTIME}.{old}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "usage:" in done.stdout
    assert f"{RUNTIME}.{old} is now {RUNTIME}.{MODULES[old]};" in done.stderr


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("qeffect.gpu_runtime.training.encodings", "Given", "FileEncoding"),
        ("qeffect.guards.megatron_plan", "Plan", "LoopPlan"),
    ],
)
def test_a_name_that_changed_in_its_module_is_found(module: str, old: str, new: str) -> None:
    """With a warning that points at the caller; any other name is missing."""
    place = importlib.import_module(module)
    with pytest.warns(
        DeprecationWarning, match=f"^{module}.{old} is now {module}.{new};"
    ) as caught:
        found = getattr(place, old)

    assert found is getattr(place, new)
    assert [one.filename for one in caught] == [__file__]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        place.nothing  # noqa: B018


def test_the_old_name_of_a_scope_works() -> None:
    """`Runtime.apart` is the scope of an evaluation."""
    runtime = object.__new__(Runtime)
    with pytest.warns(DeprecationWarning, match="is now Runtime.evaluation_scope;") as caught:
        found = runtime.apart()

    assert found.func is Runtime.evaluation_scope.__wrapped__  # type: ignore[attr-defined]
    assert [one.filename for one in caught] == [__file__]

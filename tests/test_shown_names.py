"""Import names that the README and the pages showed still work for one release, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from typing import Final

import pytest

from qeffect import renamed
from qeffect.gpu_runtime import renamed as renamed_runtime

#: Modules in code blocks, commands and paths of the README, CONTRIBUTING and the pages of `qeffect`
#: and `gpu_runtime`, before the runtime was divided into rooms (f488c55) and after it (8be2905).
MODULES: Final = {
    "qeffect": """
        arguments checkpoint cli config configuration contract counts engine entries evidence
        explain gpu_runtime layout refusals report spec steps text threads tickets verification
    """,
    "qeffect.calls": """
        checks epochs reading redemption tapes
    """,
    "qeffect.cli": """
        check command
    """,
    "qeffect.engine": """
        compose freelist memory stage
    """,
    "qeffect.gpu_runtime": """
        commands demo doctor operators optimizer reductions runtime
    """,
    "qeffect.gpu_runtime.backends": """
        devices dynamic ends layers protocol
    """,
    "qeffect.gpu_runtime.backends.te": """
        baselines deferred domain internals stage
    """,
    "qeffect.gpu_runtime.bench": """
        megatron peers side_by_side tables
    """,
    "qeffect.gpu_runtime.evidence": """
        comparison driver native
    """,
    "qeffect.gpu_runtime.execute": """
        actions eager graphs nested reports streams
    """,
    "qeffect.gpu_runtime.guards": """
        pipelining
    """,
    "qeffect.gpu_runtime.lab.sides": """
        megatron
    """,
    "qeffect.gpu_runtime.lab.statistics": """
        complete_step paper
    """,
    "qeffect.gpu_runtime.measure": """
        complete curves paper workload
    """,
    "qeffect.gpu_runtime.memory": """
        arena copies counters counters_kernel looks scaling slots state sums sums_kernel tied
    """,
    "qeffect.gpu_runtime.parallel": """
        baked channels command compare consent executor feeds gate_kernel guard model native
        one_launch reduction rehearsal ties timing world
    """,
    "qeffect.gpu_runtime.plan": """
        order rows slots
    """,
    "qeffect.gpu_runtime.ranks": """
        assembly causes channels consent gate_kernel obstacles one_launch pipeline processes
        rehearsal replicas ties worker world
    """,
    "qeffect.gpu_runtime.runtime": """
        assembly parts runtime
    """,
    "qeffect.gpu_runtime.step": """
        actions clipping eager graphs optimizer reductions streams
    """,
    "qeffect.gpu_runtime.step.memory": """
        scaling
    """,
    "qeffect.gpu_runtime.step.plan": """
        rows
    """,
    "qeffect.gpu_runtime.training": """
        balance checkpoint command config config_file config_page corpus curves data evaluate
        files launches loop metrics model rates restarts
    """,
    "qeffect.ledgers": """
        counted epochs pool restarts steps streams tapes
    """,
    "qeffect.relations": """
        ownership
    """,
    "qeffect.schedule": """
        actions check messages slots tables te_order torch_tables
    """,
    "qeffect.verification": """
        kept logs
    """,
}

#: Names in the code blocks and in the text of the same pages.
NAMES: Final = (
    "qeffect.gpu_runtime.backends.layers:LayerConfig",
    "qeffect.gpu_runtime.backends.reference:ReferenceDomain",
    "qeffect.gpu_runtime.backends.reference:ReferenceStage",
    "qeffect.gpu_runtime.guards.pipelining:guard",
    "qeffect.gpu_runtime.optimizer:Optimizer",
    "qeffect.gpu_runtime.parallel.consent:StoppedError",
    "qeffect.gpu_runtime.parallel.guard:guard",
    "qeffect.gpu_runtime.parallel.world:Worker",
    "qeffect.gpu_runtime.parallel.world:join",
    "qeffect.gpu_runtime.plan.order:Order",
    "qeffect.gpu_runtime.ranks.consent:StoppedError",
    "qeffect.gpu_runtime.ranks.worker:Worker",
    "qeffect.gpu_runtime.ranks.world:join",
    "qeffect.gpu_runtime.runtime:Runtime",
    "qeffect.gpu_runtime.runtime:RuntimeConfig",
    "qeffect.gpu_runtime.step.optimizer:Optimizer",
    "qeffect.gpu_runtime.step.plan.order:Order",
    "qeffect.gpu_runtime.training.checkpoint:Checkpoints",
    "qeffect.gpu_runtime.training.state:by_layer",
    "qeffect.schedule.check:check",
    "qeffect.schedule.tables:read_fixture",
    "qeffect.schedule.tables:write_table",
    "qeffect.schedule.torch_tables:torch_schedule",
    "qeffect.sharing:require_tied_ranks",
    "qeffect:Contract",
    "qeffect:Refused",
    "qeffect:StageConfig",
    "qeffect:TapeKey",
    "qeffect:guarded",
)

#: Old names and their new names, both in full.
MOVED: Final = {
    f"{package}.{old}": renamed.whole(package, new)
    for package, table in (
        ("qeffect", {**renamed.MODULES, **renamed.NAMES}),
        ("qeffect.gpu_runtime", {**renamed_runtime.MODULES, **renamed_runtime.NAMES}),
    )
    for old, new in table.items()
}

SHOWN: Final = [
    f"{folder}.{name}".lstrip(".") for folder, names in MODULES.items() for name in names.split()
]


def imported(name: str) -> tuple[object, bool]:
    """Import a module as a fresh process does; return it, and whether the import warned."""
    if name in MOVED:
        sys.modules.pop(name, None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DeprecationWarning)
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("qeffect"):
            raise
        pytest.skip(f"{name} needs {error.name}")
    return module, any(f"{name} is now " in str(one.message) for one in caught)


@pytest.mark.parametrize("name", SHOWN)
def test_a_module_that_a_page_showed_imports(name: str) -> None:
    """The old name gives the objects of the new module, and warns with the new name."""
    module, warned = imported(name)

    assert warned == (name in MOVED)
    if name in MOVED:
        new = importlib.import_module(MOVED[name])
        for one in getattr(new, "__all__", ()):
            if f"{name}.{one}" not in MOVED:
                assert getattr(module, one) is getattr(new, one)
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_a_page_showed_imports(name: str) -> None:
    """The import statement of the page still works."""
    module, _, attribute = name.partition(":")
    found, _ = imported(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert callable(getattr(found, attribute))


@pytest.mark.parametrize("old", sorted(renamed.NAMES))
def test_a_renamed_class_of_the_kernel_is_the_same_object(old: str) -> None:
    """The old name in the old module gives the renamed class, with a warning."""
    module, _, attribute = f"qeffect.{old}".rpartition(".")
    place, _, name = MOVED[f"qeffect.{old}"].rpartition(".")
    found, _ = imported(module)
    with pytest.warns(DeprecationWarning, match=f"qeffect.{old} is now {place}.{name};"):
        one = getattr(found, attribute)

    assert one is getattr(importlib.import_module(place), name)

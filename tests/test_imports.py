"""
Imports between layers: spec <- qeffect <- {verification, gpu_runtime, guards} (the left layer is
imported).

One exception: four modules of the laboratory import the guards, to measure them.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("spec", "qeffect", "verification", "gpu_runtime", "guards")
#: Folder of each layer; a later layer may lie inside an earlier one.
FOLDERS = {name: ROOT / name for name in PACKAGES} | {"guards": ROOT / "gpu_runtime" / "guards"}
#: Layers that are installed inside the package ``qeffect``, beside the kernel.
INSIDE = {f"qeffect.{name}": name for name in PACKAGES if name != "qeffect"}
#: The layers that each layer may import.
ALLOWED = {
    "spec": {"spec"},
    "qeffect": {"spec", "qeffect"},
    "verification": {"spec", "qeffect", "verification"},
    "gpu_runtime": {"spec", "qeffect", "gpu_runtime"},
    "guards": {"spec", "qeffect", "guards"},
}
#: The modules of the runtime that import the guards: one times them, three sweep modes under them.
TIMES_THE_GUARDS = {
    ROOT / "gpu_runtime" / "lab" / name
    for name in (
        "commands/guards.py",
        *("sides/mode_runs.py", "sides/megatron_modes.py", "sides/titan_modes.py"),
    )
}
#: The one module of the kernel that imports torch, and only inside its functions.
TORCH_TABLES = ROOT / "qeffect" / "schedule" / "torch_tables.py"
#: The modules that import each framework.
IMPORTS_OF_FRAMEWORKS = {
    "deepspeed": {"qeffect/schedule/deepspeed.py"},
    "megatron": {"gpu_runtime/guards/megatron_library.py", "gpu_runtime/lab/sides/megatron.py"},
    "torchtitan": {  # the guard's module only uses the objects that a run gives it
        "gpu_runtime/lab/sides/titan_cpu.py",
        "gpu_runtime/lab/sides/titan_modes.py",
    },
}
#: The one module of the kernel that pytest loads, by an entry point.
PYTEST_PLUGIN = ROOT / "qeffect" / "pytest_plugin.py"


def _modules(package: str) -> list[Path]:
    """The modules of a layer, without those of a layer inside its folder."""
    within = [path for path in FOLDERS.values() if FOLDERS[package] in path.parents]
    return sorted(
        path for path in FOLDERS[package].rglob("*.py") if not set(within) & set(path.parents)
    )


def _parts(path: Path) -> tuple[str, ...]:
    """The parts of the full name that imports a file, such as qeffect, guards, meeting."""
    layer = next(p for p in reversed(PACKAGES) if FOLDERS[p] in path.parents)
    parts = path.relative_to(FOLDERS[layer]).with_suffix("").parts
    return ("qeffect", *parts) if layer == "qeffect" else ("qeffect", layer, *parts)


@cache
def _statements(path: Path) -> tuple[tuple[bool, ast.Import | ast.ImportFrom], ...]:
    """The imports of a module, each with whether it is inside a function; parsed once."""
    found: list[tuple[bool, ast.Import | ast.ImportFrom]] = []
    left: list[tuple[bool, ast.AST]] = [(False, ast.parse(path.read_text(encoding="utf-8")))]
    while left:
        inside, node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((inside, node))
        elif (called := _called(node)) is not None:
            found.append((inside, called))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        left += [(inside, child) for child in ast.iter_child_nodes(node)]
    return tuple(found)


def _called(node: ast.AST) -> ast.Import | ast.ImportFrom | None:
    """The statement that a call such as ``import_module("a.b")`` stands for."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    function = node.func
    called = getattr(function, "attr", None) or getattr(function, "id", None)
    first = node.args[0]
    text = first.value if isinstance(first, ast.Constant) else None
    if called not in ("import_module", "__import__") or not isinstance(text, str):
        return None
    name = text.lstrip(".")
    if not (level := len(text) - len(name)):
        return ast.Import(names=[ast.alias(name)])
    module, _, last = name.rpartition(".")
    return ast.ImportFrom(module=module or None, names=[ast.alias(last)], level=level)


def statements(path: Path, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module, also calls of `import_module`; inside functions only if lazy."""
    yield from (node for inside, node in _statements(path) if lazy or not inside)


def _names(path: Path, *, lazy: bool) -> Iterator[str]:
    """Full names that a module imports; those inside functions only if lazy."""
    package = _parts(path)[:-1]
    for node in statements(path, lazy=lazy):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join((*base, node.module or "", a.name)) for a in node.names)


def _imports(path: Path, *, lazy: bool) -> Iterator[str]:
    """The layers and the other top-level packages that a module imports."""
    for name in _names(path, lazy=lazy):
        parts = [part for part in name.split(".") if part]
        yield INSIDE.get(".".join(parts[:2]), parts[0])


EACH = pytest.mark.parametrize("package", PACKAGES)


@EACH
def test_no_module_imports_a_layer_above_or_beside_it(package: str) -> None:
    """No module imports a layer above it or beside it, not even inside a function."""
    modules = _modules(package)
    assert modules
    for path in modules:
        assert not {n.partition(".")[0] for n in _names(path, lazy=True)} & set(INSIDE.values())
        ours = {name for name in _imports(path, lazy=True) if name in PACKAGES}

        assert ours <= ALLOWED[package] | ({"guards"} if path in TIMES_THE_GUARDS else set()), path


def _own_by_full_name(package: str) -> list[tuple[str, str]]:
    """Modules that import another module of their layer by its full name, with that name."""
    found = []
    for path in _modules(package):
        for node in statements(path, lazy=True):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif node.level:
                continue
            else:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                if INSIDE.get(".".join(parts[:2]), parts[0]) == package:
                    found.append((path.name, name))
    return found


@EACH
def test_imports_within_a_layer_are_relative(package: str) -> None:
    """Editors and import-graph tools then find the module without the links in `qeffect/`."""
    assert [] == _own_by_full_name(package)


def _planted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, module: str, code: str
) -> Path:
    """Replace a layer by a single module; return the module's file."""
    path = folder / package / module
    path.parent.mkdir(parents=True)
    path.write_text(f"{code}\n")
    monkeypatch.setitem(FOLDERS, package, folder / package)
    return path


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("gpu_runtime", "import qeffect.gpu_runtime.step.graphs"),
        ("gpu_runtime", "from qeffect.gpu_runtime import step"),
        ("gpu_runtime", "def f():\n    from qeffect.gpu_runtime.step.graphs import capture"),
        ("verification", 'import_module("qeffect.verification.lint")'),
        ("qeffect", "from qeffect import Contract"),
        ("qeffect", "import qeffect.keys"),
        ("spec", 'importlib.import_module("qeffect.spec.clauses")'),
    ],
)
def test_a_full_name_within_a_layer_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, code: str
) -> None:
    """The test of relative imports finds a full name in a statement, a call or a function."""
    _planted(tmp_path, monkeypatch, package, "planted.py", code)

    assert ["planted.py"] == [name for name, _ in _own_by_full_name(package)]


@pytest.mark.parametrize(
    ("code", "layer"),
    [
        ("import qeffect.gpu_runtime.step.graphs", "gpu_runtime"),
        ("import os, qeffect.verification", "verification"),
        ('import_module("qeffect.guards.pipelining")', "guards"),
        ('def f():\n    importlib.import_module("torch.distributed")', "torch"),
        ('__import__("numpy")', "numpy"),
    ],
)
def test_an_import_of_every_form_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, layer: str
) -> None:
    """Import statements and calls are found, also inside a function."""
    path = _planted(tmp_path, monkeypatch, "spec", "planted.py", code)

    assert layer in set(_imports(path, lazy=True))


def test_a_relative_call_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leading dots in a call of ``import_module`` count from the module's own package."""
    code = 'import_module("..guarded.names", __package__)'
    path = _planted(tmp_path, monkeypatch, "spec", "clauses/planted.py", code)

    assert ["qeffect.spec.guarded.names"] == [
        ".".join(part for part in name.split(".") if part) for name in _names(path, lazy=True)
    ]


def _module(path: Path) -> str:
    """The full name that a file is imported by."""
    parts = _parts(path)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _graph(layers: tuple[str, ...]) -> dict[str, set[str]]:
    """The modules that each module imports, also inside functions or only for type checking."""
    files = {_module(path): path for layer in layers for path in _modules(layer)}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        found = set()
        for name in _names(path, lazy=True):
            name = ".".join(part for part in name.split(".") if part)
            found.add(name if name in files else name.rpartition(".")[0])
        graph[module] = (found & set(files)) - {module}
    return graph


def test_no_import_circle() -> None:
    """Modules can be read in an order in which each follows the modules that it imports."""
    graph = _graph(PACKAGES)
    assert {"qeffect.contract", "qeffect.spec.clauses", "qeffect.verification.lint"} <= set(graph)
    assert "qeffect.stage_config" in graph["qeffect.process_layout"]
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        pytest.fail(f"expected no import circle, found {circle}; remove one of these imports")

    assert set(graph) == set(order)


def test_a_circle_would_be_seen() -> None:
    """The test finds a circle: one added import back makes one."""
    graph = _graph(("qeffect",))
    graph["qeffect.keys"].add("qeffect.contract")

    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


@EACH
def test_nothing_imports_the_tests(package: str) -> None:
    """No installed module imports the tests."""
    for path in _modules(package):
        assert "tests" not in set(_imports(path, lazy=True)), path


@pytest.mark.parametrize("package", ["spec", "qeffect"])
def test_kernel_needs_attrs_only(package: str) -> None:
    """The kernel and the specification import attrs, the standard library and each other."""
    for path in _modules(package):
        others = {
            name
            for name in _imports(path, lazy=path != TORCH_TABLES)
            if name not in sys.stdlib_module_names and name not in PACKAGES
        }

        assert others <= {"attrs", "attr"} | ({"pytest"} if path == PYTEST_PLUGIN else set()), path


def test_torch_is_imported_where_it_is_used() -> None:
    """The module that reads torch's tables imports torch inside its functions only."""
    assert "torch" in set(_imports(TORCH_TABLES, lazy=True))
    assert "torch" not in set(_imports(TORCH_TABLES, lazy=False))


def test_the_pytest_plugin_is_loaded_by_pytest_alone() -> None:
    """No module imports the plugin, and it imports ours only when a test uses it."""
    plugin = _module(PYTEST_PLUGIN)
    assert not [name for name, found in _graph(PACKAGES).items() if plugin in found]
    assert "qeffect.schedule" not in _modules_of("import qeffect.pytest_plugin")


def test_transformer_engine_in_one_backend() -> None:
    """Transformer Engine is imported by its own backend modules alone, lazily or not."""
    users = {
        path.relative_to(ROOT).parent.as_posix()
        for package in PACKAGES
        for path in _modules(package)
        if "transformer_engine" in set(_imports(path, lazy=True))
    }

    assert users == {"gpu_runtime/backends/te"}


def _frameworks(path: Path) -> set[str]:
    """
    The frameworks that a module imports, also by a name that is put together at run time.

    A string that is the dotted name of a framework's module counts as an import.
    """
    found = set(_imports(path, lazy=True))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"(\w+)(\.\w+)+\.?", node.value)
            found |= {match[1]} if match else set()
    return found & IMPORTS_OF_FRAMEWORKS.keys()


def test_each_framework_is_imported_by_one_module() -> None:
    """Only the listed modules import DeepSpeed, Megatron-core or TorchTitan."""
    users: dict[str, set[str]] = {name: set() for name in IMPORTS_OF_FRAMEWORKS}
    for package in PACKAGES:
        for path in _modules(package):
            for name in _frameworks(path):
                users[name].add(path.relative_to(ROOT).as_posix())

    assert users == IMPORTS_OF_FRAMEWORKS


@pytest.mark.parametrize(
    "code",
    [
        "import torchtitan.config",
        "from deepspeed import pipe",
        'import_module("megatron.core")',
        'core = "megatron.core"\nimport_module(f"{core}.optimizer")',
    ],
)
def test_an_import_of_a_framework_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """An import of a framework is found as a statement, as a call, or with a name that is put
    together; the framework's name alone is not an import."""
    path = _planted(tmp_path, monkeypatch, "guards", "planted.py", code)
    other = path.with_name("other.py")
    other.write_text('check_release("torchtitan")\n')

    assert 1 == len(_frameworks(path))
    assert set() == _frameworks(other)


def _modules_of(statement: str) -> list[str]:
    """All modules that a statement loads in a fresh process."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def _loaded(statement: str) -> set[str]:
    """Layers of ours and other top-level packages that a statement loads in a fresh process."""
    names = [name.split(".") for name in _modules_of(statement)]
    return {INSIDE.get(".".join(parts[:2]), parts[0]) for parts in names}


@pytest.mark.parametrize(
    "statement",
    [
        "import qeffect",
        "import qeffect.spec",
        "import qeffect.cli",
        "import qeffect.schedule",
        "import qeffect.pytest_plugin",
        "import qeffect.spec.clauses, qeffect.spec.promises",
        "import qeffect; c = qeffect.Contract([qeffect.StageConfig(0, microbatches=1, slots=1)])",
    ],
)
def test_a_fresh_process_is_light(statement: str) -> None:
    """Neither importing the kernel nor making a contract loads torch, NumPy, Z3 or Hypothesis."""
    loaded = _loaded(statement)

    heavy = {"torch", "numpy", "z3", "cvc5", "hypothesis", "matplotlib", "jsonschema", "cattrs"}
    assert not heavy & loaded
    assert not {"verification", "gpu_runtime", "guards", "tests"} & loaded


def test_the_instrument_sees_what_is_loaded() -> None:
    """The test finds NumPy in a process that imported it."""
    if importlib.util.find_spec("numpy") is None:
        pytest.fail("expected NumPy, found none: pip install 'qeffect[verify]'")

    assert "numpy" in _loaded("import numpy")


@EACH
def test_every_package_says_that_it_is_typed(package: str) -> None:
    """Every layer has the marker file `py.typed`."""
    assert (FOLDERS[package] / "py.typed").exists()


@EACH
def test_every_module_says_what_it_is_for(package: str) -> None:
    """Every module opens with a docstring."""
    for path in _modules(package):
        text = path.read_text(encoding="utf-8")

        assert not text or ast.get_docstring(ast.parse(text)), path

"""Imports run one way, from the commands down to the errors, without cycles, and frameworks stay in their backends.

Read from the source with `ast`, so that a module counts whether or not anything imports it. Imports for typing alone
(under `if TYPE_CHECKING`) do not count; imports inside functions do, except where a test says otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tightfit

SOURCE = Path(__file__).parents[1] / "src"

LAYERS = (
    ("tightfit.__main__",),
    ("tightfit", "tightfit.cli"),
    ("tightfit.commands",),
    ("tightfit.planner",),
    ("tightfit.ladder",),
    ("tightfit.ladder.peers",),
    ("tightfit.doctor",),
    ("tightfit.profiling.report",),
    ("tightfit.display", "tightfit.profiling.findings"),
    ("tightfit.profiling.step",),
    ("tightfit.training", "tightfit.profiling.measure", "tightfit.profiling.profile"),
    ("tightfit.data",),
    ("tightfit.planning.resolve_auto",),
    ("tightfit.planning.search",),
    ("tightfit.planning",),
    ("tightfit.backends",),
    ("tightfit.backends.pytorch.own_loop",),
    ("tightfit.backends.pytorch.backend",),
    ("tightfit.backends.pytorch.measure",),
    ("tightfit.backends.pytorch.simulate",),
    ("tightfit.backends.pytorch.simulate.compiled",),
    ("tightfit.backends.pytorch.simulate.cuda",),
    ("tightfit.backends.pytorch.follow",),
    ("tightfit.backends.pytorch", "tightfit.backends.jax"),
    ("tightfit.backends.measuring", "tightfit.backends.cuda_context"),
    ("tightfit.backends.base",),
    ("tightfit.backends.measurements",),
    ("tightfit.backends.world",),
    ("tightfit.recipe.json_schema",),
    ("tightfit.recipe.lookup",),
    ("tightfit.recipe",),
    ("tightfit.recipe.resume",),
    ("tightfit.recipe.schema",),
    ("tightfit.recipe.hf_arguments",),
    ("tightfit.recipe.sections",),
    ("tightfit.recipe.yaml",),
    ("tightfit.recipe.yaml_text",),
    ("tightfit.recipe.best_metric",),
    ("tightfit.recipe.hf_arguments.table",),
    ("tightfit.recipe.hf_arguments.sft", "tightfit.recipe.synonyms"),
    ("tightfit.model_facts",),
    ("tightfit.models",),
    ("tightfit.hub",),
    ("tightfit.bundled",),
    ("tightfit.techniques",),
    ("tightfit.tasks", "tightfit.metrics"),
    ("tightfit.calibration",),
    ("tightfit.devices",),
    ("tightfit.catalogue",),
    ("tightfit.trace.extension",),
    ("tightfit.trace.events",),
    ("tightfit.trace.file",),
    ("tightfit.trace",),
    ("tightfit.page",),
    ("tightfit.nvml",),
    ("tightfit.system", "tightfit.errors", "tightfit.files", "tightfit.garbage", "tightfit.profiling", "tightfit.text"),
)
"""From the top down; a module belongs to the longest name here that it lies under. The package itself stands at the
top, beside the commands: it offers the public names, and what is inside never imports them back."""

FRAMEWORKS = {"torch", "transformers", "jax"}
FRAMEWORK_HOMES = ("tightfit.backends.pytorch", "tightfit.backends.jax", "tightfit.ladder.peers")
FRAMEWORK_FREE = tuple(f"tightfit.{name}" for name in (
    "display", "profiling", "training", "data", "planning", "techniques"))


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, the line, and whether importing the importer already runs it."""

    module: str
    line: int
    at_top: bool


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_modules(source: Path) -> dict[str, list[Import]]:
    """Every module below `source`, and what it imports at run time."""
    paths = {module_name(path, source): path for path in sorted(source.rglob("*.py"))}
    return {
        name: list(_imports(ast.parse(path.read_text("utf-8")).body, name, path.stem == "__init__", set(paths), True))
        for name, path in paths.items()
    }


def _imports(nodes: list[ast.AST] | list[ast.stmt], module: str, package: bool, known: set[str],
             at_top: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports(node.orelse, module, package, known, at_top)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_top)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if package and node.level == 1 else -(node.level - package)]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield Import(submodule if submodule in known else base, node.lineno, at_top)
        else:
            inner = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(list(ast.iter_child_nodes(node)), module, package, known, inner)


def layer(module: str) -> int | None:
    """The index in LAYERS of the longest name that `module` is or lies under; the package's own name counts only for
    itself."""
    matches = [
        (len(name), index)
        for index, names in enumerate(LAYERS)
        for name in names
        if module == name or (name != "tightfit" and module.startswith(f"{name}."))
    ]
    return max(matches)[1] if matches else None


def lies_in(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def upward_imports(modules: dict[str, list[Import]]) -> list[str]:
    """Imports of a layer above the importer's own."""
    found = []
    for name, imports in modules.items():
        own = layer(name)
        assert own is not None, f"{name}: not in LAYERS; give it a place"
        for imported in imports:
            target = layer(imported.module)
            if target is not None and target < own:
                found.append(f"{name}:{imported.line} imports {imported.module}, which is above it")
    return found


def cycle(modules: dict[str, list[Import]]) -> list[str]:
    """The modules of one import cycle, empty where there is none."""
    graph = {name: {i.module for i in imports if i.module in modules} for name, imports in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def frameworks_outside(modules: dict[str, list[Import]]) -> list[str]:
    """Frameworks imported at the top of a module that is no backend's, or anywhere in a framework-free one."""
    found = []
    for name, imports in modules.items():
        if lies_in(name, FRAMEWORK_HOMES):
            continue
        everywhere = {"torch", "jax"} if lies_in(name, FRAMEWORK_FREE) else set()
        for imported in imports:
            if imported.module.split(".")[0] in (FRAMEWORKS if imported.at_top else everywhere):
                found.append(f"{name}:{imported.line} imports {imported.module}")
    return found


@pytest.fixture(scope="module")
def modules() -> dict[str, list[Import]]:
    return read_modules(SOURCE)


def test_imports_run_downward(modules: dict[str, list[Import]]) -> None:
    assert upward_imports(modules) == []


def test_no_cycles(modules: dict[str, list[Import]]) -> None:
    assert cycle(modules) == []


def test_frameworks_are_imported_in_backends_only(modules: dict[str, list[Import]]) -> None:
    assert frameworks_outside(modules) == []


def test_planning_names_no_backend(modules: dict[str, list[Import]]) -> None:
    """It knows the protocol, and what loads one by the name that a recipe has."""
    known = {"tightfit.backends", "tightfit.backends.base", "tightfit.backends.measurements"}
    named = {f"{name} imports {i.module}" for name, imports in modules.items() if lies_in(name, ("tightfit.planning",))
             for i in imports if lies_in(i.module, ("tightfit.backends",)) and i.module not in known}
    assert named == set()


def test_imported_modules_exist(modules: dict[str, list[Import]]) -> None:
    missing = {i.module for imports in modules.values() for i in imports if i.module.split(".")[0] == "tightfit"}
    assert missing <= set(modules)


def test_layers_name_modules_that_exist(modules: dict[str, list[Import]]) -> None:
    assert {name for names in LAYERS for name in names} <= set(modules)


def test_every_public_name_resolves() -> None:
    assert [name for name in tightfit.__all__ if getattr(tightfit, name, None) is None] == []


def write(folder: Path, files: dict[str, str]) -> dict[str, list[Import]]:
    for name, text in files.items():
        path = folder / "tightfit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_modules(folder)


def test_an_upward_import_is_found_wherever_it_stands(tmp_path: Path) -> None:
    modules = write(tmp_path, {
        "__init__.py": "from tightfit.cli import main",
        "cli.py": "",
        "errors.py": "def f():\n    from tightfit.cli import main",
        "techniques/__init__.py": "from .. import recipe",
        "recipe.py": "from tightfit.techniques import x\nfrom tightfit.errors import y",
        "tasks.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tightfit.recipe import y",
        "backends/base.py": "from .pytorch import loss",
        "backends/pytorch/__init__.py": "import tightfit",
        "backends/pytorch/step.py": "from . import loss\nfrom ..base import Step",
        "backends/pytorch/loss.py": "",
    })
    assert upward_imports(modules) == [
        "tightfit.backends.base:1 imports tightfit.backends.pytorch.loss, which is above it",
        "tightfit.backends.pytorch:1 imports tightfit, which is above it",
        "tightfit.errors:2 imports tightfit.cli, which is above it",
        "tightfit.techniques:1 imports tightfit.recipe, which is above it",
    ]
    assert set(cycle(modules)) == {"tightfit.recipe", "tightfit.techniques"}


def test_a_framework_out_of_place_is_found(tmp_path: Path) -> None:
    modules = write(tmp_path, {
        "cli.py": "def f():\n    import torch",
        "models.py": "try:\n    import transformers.models\nexcept ImportError:\n    pass",
        "data/packing.py": "def f():\n    from torch import nn\n    import transformers",
        "backends/pytorch/step.py": "import torch",
    })
    assert frameworks_outside(modules) == [
        "tightfit.data.packing:2 imports torch",
        "tightfit.models:2 imports transformers.models",
    ]

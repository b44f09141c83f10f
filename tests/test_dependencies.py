"""What pyproject.toml declares, held to what the source imports and to what its hints tell people to install."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from sys import stdlib_module_names

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_imports import SOURCE, Import, read_modules
from tightfit.doctor.software_checks import OPTIONAL
from tightfit.errors import INSTALL, install_command

ROOT = SOURCE.parent
CONTENT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = CONTENT["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_USERS = EXTRAS.keys() - {"dev", "docs", "site"}
MODULES = {
    "PIL": "pillow", "flash_attn": "flash-attn", "jax_plugins": "jax-cuda12-plugin", "liger_kernel": "liger-kernel",
    "optimi": "torch-optimi", "pynvml": "nvidia-ml-py", "yaml": "pyyaml",
}  # fmt: skip
"""Modules that are named unlike the library that has them."""
UNDECLARED = {
    "apex": "built from its source, against the installed torch and CUDA",
    "bitsandbytes": "one optimizer of a peer", "flash-attn": "built against the installed torch",
    "jax-cuda12-plugin": "of jax's own version", "triton": "torch brings it where it runs",
    "xprof": "a viewer that a person starts",
}  # fmt: skip
"""Libraries that src looks for and no extra has, with the reason; errors name how to install them all the same."""


def libraries(requirements: list[str]) -> set[str]:
    """The names of requirements, those of tightfit's own extras among them."""
    found = set()
    for requirement in map(Requirement, requirements):
        if requirement.name == "tightfit":
            found |= {name for extra in requirement.extras for name in libraries(EXTRAS[extra])}
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def library_of(module: str) -> str:
    top = module.partition(".")[0]
    return MODULES.get(top, canonicalize_name(top))


def foreign(modules: dict[str, list[Import]]) -> Iterator[tuple[str, Import]]:
    """Imports of what is neither ours nor Python's."""
    for name, imports in modules.items():
        for each in imports:
            if each.module.partition(".")[0] not in {*stdlib_module_names, "tightfit"}:
                yield name, each


def undeclared(modules: dict[str, list[Import]], needed: set[str], optional: set[str]) -> list[str]:
    """Imports of libraries that nothing declares, or at the top of a module and declared for an extra alone."""
    found = []
    for name, each in foreign(modules):
        library = library_of(each.module)
        optional_here = not each.at_top or name.startswith("tightfit.backends.jax.")
        if library not in needed | (optional if optional_here else set()):
            found.append(f"{name}:{each.line} imports {library}")
    return found


@pytest.fixture(scope="module")
def modules() -> dict[str, list[Import]]:
    return read_modules(SOURCE)


def test_what_the_source_imports_is_declared(modules: dict[str, list[Import]]) -> None:
    optional = {name for extra in FOR_USERS for name in libraries(EXTRAS[extra])}
    assert undeclared(modules, libraries(PROJECT["dependencies"]), optional) == []


def test_what_is_declared_is_imported(modules: dict[str, list[Import]]) -> None:
    assert libraries(PROJECT["dependencies"]) - {library_of(each.module) for _, each in foreign(modules)} == set()


def test_what_is_looked_for_by_name_is_declared_or_said_why_not() -> None:
    texts = [path.read_text("utf-8") for path in SOURCE.rglob("*.py")]
    named = {library_of(name) for text in texts for name in re.findall(r'(?:find_spec|import_module)\(f?"(\w+)', text)}
    named = {name for name in named if name != "tightfit"} | {library.name for library in OPTIONAL}
    declared = {name for extra in FOR_USERS for name in libraries(EXTRAS[extra])}
    assert named - declared - libraries(PROJECT["dependencies"]) == set(UNDECLARED)


def test_an_undeclared_import_is_found(tmp_path: Path) -> None:
    for name, text in {"__init__.py": "import yaml", "a.py": "import peft", "b.py": "def f():\n    import peft",
                       "c.py": "def f():\n    import gone", "backends/jax/d.py": "import jax"}.items():
        path = tmp_path / "tightfit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert undeclared(read_modules(tmp_path), {"pyyaml"}, {"peft", "jax"}) == [
        "tightfit.a:1 imports peft", "tightfit.c:2 imports gone",
    ]


def test_every_tool_knows_the_oldest_python() -> None:
    """ruff and mypy refuse what is newer than the oldest Python that the package may be installed on."""
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if text.startswith("Programming Language")][1:]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert CONTENT["tool"]["ruff"]["target-version"] == f"py{named[0].replace('.', '')}"
    assert CONTENT["tool"]["mypy"]["python_version"] == named[0]


def test_hints_name_the_extra_that_has_the_library() -> None:
    for library, arguments in INSTALL.items():
        if found := re.fullmatch(r"'tightfit\[(\S+)\]'", arguments):
            assert library in libraries(EXTRAS[found[1]]), library
        else:
            assert library in UNDECLARED
    assert {name for extra in FOR_USERS for name in libraries(EXTRAS[extra])} <= INSTALL.keys()
    assert install_command("xprof") == "pip install xprof"


def test_what_texts_tell_to_install_is_declared() -> None:
    pages = [*SOURCE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text("utf-8") for page in pages]
    extras = {name for text in texts for names in re.findall(r"[\"'](?:tightfit|\.)\[([\w,-]+)\][\"']", text)
              for name in names.split(",")}
    assert {"gpu", "jax", "jax-cuda"} <= extras <= EXTRAS.keys()
    least = {hint for text in texts for hint in re.findall(r"pip install ['\"]([\w-]+>=[\d.]+)['\"]", text)}
    assert {"torchao>=0.17"} <= least <= set(PROJECT["dependencies"])

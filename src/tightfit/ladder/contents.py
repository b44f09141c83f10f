"""What a recipe names on this machine's disk, told by its content: figures are of that, and not of its name.

| what is named | what counts |
|---|---|
| `package.module:factory` | the source of the module, of its packages, and of what they import from their root folder |
| one that is installed | the source of the module and of its packages |
| a folder of a model or a tokenizer | its JSON files and its code; size and date of the others, such as weights |
| a file or a folder of data | size and date of each file |

Hidden files do not count, nor what such code reads when it runs.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from tightfit.data.caching import digest
from tightfit.errors import ModelError
from tightfit.models import resolve_source
from tightfit.recipe import Recipe

READ = (".json", ".py")
INSTALLED = ("site-packages", "dist-packages")
NO_DATA, NO_TOKENIZER = ("stdlib", "dummy"), ("auto", "train")
"""Words of those fields that are no path, whatever is called so here."""


def contents(recipe: Recipe) -> str | None:
    """A digest of what the recipe names on this machine's disk; None where it names nothing there."""
    told = list(_of_model(recipe))
    if recipe.tokenizer not in NO_TOKENIZER:
        told += _of_path(recipe.tokenizer, READ)
    if recipe.data.source not in NO_DATA:
        told += _of_path(recipe.data.source)
    return digest(told) if told else None


def _of_model(recipe: Recipe) -> Iterator[str]:
    try:
        source = resolve_source(recipe)
    except ModelError:  # which the rung says
        return
    if source.kind == "factory":
        for path in sorted(sources(source.name.partition(":")[0])):
            yield _told(path, READ)
    elif source.kind == "folder":
        yield from _of_path(source.name, READ)


def _of_path(name: str, read: Iterable[str] = ()) -> Iterator[str]:
    """What is told of a file, or of every file below a folder; nothing of what is not here."""
    path = Path(name).expanduser()
    for each in sorted(path.rglob("[!.]*")) if path.is_dir() else [path]:
        if each.is_file():
            yield _told(each, read)


def _told(path: Path, read: Iterable[str]) -> str:
    """A file's name and its content, where its name ends as `read` says, or else its size and date."""
    try:
        if path.suffix in read:
            return f"{path.name} {digest([path.read_bytes()])}"
        found = path.stat()
        return f"{path.name} {found.st_size} {found.st_mtime_ns}"
    except OSError as error:  # which the rung says
        return f"{path.name} {error.strerror}"


def sources(module: str) -> set[Path]:
    """The source files that count of a module, which is not imported; none where there is no such module."""
    top = module.partition(".")[0]
    try:
        # A rung's process looks in the folder where it starts, the command itself may not.
        spec = PathFinder.find_spec(top, ["", *sys.path]) or find_spec(top)
    except (ImportError, ValueError):
        return set()
    root = None if spec is None else _root(spec)
    if root is None:
        return set()
    installed = any(name in root.parts for name in INSTALLED)
    found, seen, waiting = set[Path](), set[str](), set(_with_packages(module))
    while waiting:
        seen.add(name := waiting.pop())
        for path, package in _files(root, name):
            found.add(path)
            if not installed:
                waiting |= _imports(path, package) - seen
    return found


def _root(spec: ModuleSpec) -> Path | None:
    """The folder that a top-level module is found in."""
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    return Path(spec.origin).resolve().parent if spec.has_location and spec.origin else None


def _files(root: Path, name: str) -> Iterator[tuple[Path, str]]:
    """The files that a module's name means below a folder, each with the package it is in."""
    place = root.joinpath(*name.split("."))
    module = place.with_name(f"{place.name}.py")
    for path, package in ((place / "__init__.py", name), (module, name.rpartition(".")[0])):
        if path.is_file():
            yield path, package


def _imports(path: Path, package: str) -> set[str]:
    """The modules that a file of a package may import, with the packages around them: what is imported from a module
    may be one itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how it is written
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # which the rung says
        return set()
    names = list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            names += [".".join([*around, *filter(None, [node.module]), each.name]) for each in node.names]
    return {each for name in names for each in _with_packages(name)}


def _with_packages(module: str) -> Iterator[str]:
    """A module's name and those of the packages it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]

"""A cache of plans on disk: what was planned before is there at once, with no framework loaded.

An entry's key is a digest of all that can change the plan: the words of the command, the files that they name, the
model's configuration, installed versions, tightfit's own source, calibrations, cards, processor and memory. An entry
that cannot be read is no entry.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from tightfit import calibration
from tightfit.bundled import BUNDLED, HUB_NAMES
from tightfit.errors import RecipeError
from tightfit.files import digest, write_atomically
from tightfit.models import FACTORY, HUB_ID, cached_file
from tightfit.nvml import Lost, NoNvml, nvml_session
from tightfit.recipe.yaml import read_yaml
from tightfit.system import cores, expanded, host_memory

FOLDER = Path("~/.cache/tightfit/plans")
MOST = 64 << 20
"""Bytes of all entries; beyond them, the least recently used are removed."""
ENVIRONMENT = ("CUDA", "HF_HOME", "HF_HUB", "JAX", "MKL", "NVIDIA", "OMP", "PYTORCH", "TORCH", "XLA")
"""Prefixes of the environment variables that libraries read."""
DRIVER = Path("/proc/driver/nvidia")

Entry = TypeVar("Entry")


def cached(kind: type[Entry], key: Callable[[], str | None], make: Callable[[], Entry]) -> tuple[Entry, bool]:
    """The entry, made and saved where there is none yet; and whether it comes from the cache.

    kind: a dataclass. key: the entry's; None where nothing is to be cached.
    """
    before = key()
    found = None if before is None else load(kind, before)
    if found is not None:
        return found, True
    made = make()
    after = key()  # a configuration that planning has fetched is known from now on
    if after is not None and before in (None, after):
        save(kind, after, made)
    return made, False


def is_cached(key: str | None) -> bool:
    """Whether there is an entry of that key."""
    return key is not None and _path(key).is_file()


def load(kind: type[Entry], key: str) -> Entry | None:
    """The entry of that key; None where there is none, or it is damaged."""
    path = _path(key)
    try:
        written, _, values = path.read_text("utf-8").partition("\n")
        found = TypeAdapter(kind).validate_json(values) if digest([values]) == written else None
    except (OSError, ValueError):  # ValueError: not text, or values that do not make a plan
        return None
    with suppress(OSError):  # of a folder that cannot be written
        os.utime(path)
    return found


def save(kind: type[Entry], key: str, entry: Entry) -> None:
    """Write an entry, and remove the least recently used ones; nothing is written that would not come back equal, nor
    where the folder cannot be written."""
    path, adapter = _path(key), TypeAdapter(kind)
    values = adapter.dump_json(entry).decode()
    with suppress(OSError, ValueError):
        if adapter.validate_json(values) != entry:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{digest([values])}\n{values}")
        room = MOST
        for path in sorted(path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
            room -= path.stat().st_size
            if room < 0:
                path.unlink()


def _path(key: str) -> Path:
    return expanded(FOLDER) / f"{key}.json"


def cache_key(
    recipe: str | None, overrides: Sequence[str], options: Mapping[str, Any], training_arguments: Path | None,
    machine: str,
) -> str | None:  # fmt: skip
    """The key of a command's entry; None where code of the model's own decides, which no file tells of, and for a model
    that is not on this machine.

    recipe, overrides: as a person writes them. options: those that change what is planned, by name.
    machine: see `machine_fingerprint`.
    """
    files = [Path(recipe)] if recipe is not None and recipe.endswith((".yaml", ".yml")) else []
    files += [] if training_arguments is None else [training_arguments]
    try:
        models = list(_models(recipe, overrides))
        if any(FACTORY.fullmatch(model) for model in models):
            return None
        for model in models:
            files += _configuration(model)
        contents = [path.read_bytes() for path in files]
    except (OSError, RecipeError, UnicodeDecodeError, LookupError):  # which is said where it is read
        return None
    words = [recipe or "", *overrides, *(f"{name}={value!r}" for name, value in sorted(options.items()))]
    if any("trust_remote_code" in word for word in (*words, *(c.decode(errors="replace") for c in contents))):
        return None
    return digest([*words, *map(str, files), *contents, machine])


def _models(recipe: str | None, overrides: Iterable[str]) -> Iterator[str]:
    """The models that a command may mean."""
    if recipe is not None:
        yield recipe
    if recipe is not None and recipe.endswith((".yaml", ".yml")):
        values = read_yaml(Path(recipe).read_text("utf-8"), recipe)
        for each in (values, values.get("if_cuda")):
            if isinstance(each, dict) and "model" in each:
                yield str(each["model"])
    yield from (word.removeprefix("model=") for word in overrides if word.startswith("model="))


def _configuration(model: str) -> list[Path]:
    """The files of a model's configuration. Raises LookupError for one on the hub that is not on this machine."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return sorted([*folder.glob("*config*.json"), *folder.glob("*.py")])
    if model in BUNDLED or not (model in HUB_NAMES or HUB_ID.fullmatch(model)) or model.endswith((".yaml", ".yml")):
        return []
    if (found := cached_file(model, "config.json")) is None:
        raise LookupError(model)
    return [found]


def machine_fingerprint() -> str:
    """A digest of this machine and its software, as far as a plan depends on them. Taken before planning, for libraries
    write into the environment as they load."""
    return digest(_machine())


def _machine() -> Iterator[str]:
    source = Path(__file__).parents[1]
    yield from (f"{path.relative_to(source)} {path.stat().st_size} {path.stat().st_mtime_ns}"
                for path in sorted(source.rglob("*")) if path.suffix in (".py", ".yaml", ".json"))
    for folder in filter(Path.is_dir, map(Path, sys.path)):  # where a library's name has its version
        yield from sorted(path.name for path in folder.iterdir() if path.suffix in (".dist-info", ".egg-info"))
    yield from (sys.version, platform.platform(), calibration.processor(), str(cores()), str(host_memory().total))
    yield from sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(ENVIRONMENT))
    measured = expanded(calibration.FOLDER)  # in whose parent contexts are kept that were measured
    for path in sorted([*measured.glob("*.json"), *measured.parent.glob("*.json")]):
        with suppress(OSError):
            yield path.read_text("utf-8", errors="replace")
    with suppress(NoNvml), nvml_session() as nvml:
        for card in nvml.cards():
            lost = isinstance(card, Lost)
            yield str(card) if lost else f"{nvml.ask('nvmlDeviceGetName', card)} {(nvml.memory(card) or [0])[0]}"
    for path in sorted([DRIVER / "version", *DRIVER.glob("gpus/*/information")]):  # where there is no binding of NVML
        with suppress(OSError):
            yield path.read_text()

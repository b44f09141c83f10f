"""A run's folder: who may write to it, and which recipe it holds.

    recipe.yaml, metrics.jsonl, summary.json, checkpoints/, model/
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.errors import CheckpointError, RecipeError, remedy, shown
from tightfit.files import WRITING, lock_path, remove_unfinished, write_atomically
from tightfit.recipe import Recipe
from tightfit.recipe.yaml_text import read_yaml, to_yaml

RECIPE, METRICS, SUMMARY, CHECKPOINTS, MODEL = "recipe.yaml", "metrics.jsonl", "summary.json", "checkpoints", "model"
PLAN = "plan.json"
LOCK = ".lock"
IN_USE: dict[Path, object] = {}
"""Folders that runs of this process write into: the system's locks are between processes."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder if need be, and keep other processes from writing into it; what was made and stays empty goes
    again, and so does the lock. It falls with the process, however that ends. Raises RecipeError where another process
    holds it, and where the folder cannot be written."""
    with ExitStack() as held:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own, place = object(), folder.resolve()
            if IN_USE.setdefault(place, own) is not own:
                raise BlockingIOError
            held.callback(IN_USE.pop, place)
            while not lock_path(folder / LOCK, held):
                pass
        except BlockingIOError:
            raise RecipeError(
                f"output_dir: another run is using {folder}; wait for it, or write output_dir=..."
            ) from None
        except OSError as error:
            raise RecipeError(f"output_dir: {folder} cannot be written ({error.strerror or error}: {error.filename}); "
                              f"{remedy(error, 'write output_dir=... elsewhere')}") from None
        for name in (RECIPE, METRICS, SUMMARY, PLAN, MODEL):
            remove_unfinished(folder / name)
        try:
            yield
        finally:
            with suppress(OSError):  # of Windows, for a file that is open; of a folder that holds something
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()


def run_path(recipe: Recipe, name: str) -> Path:
    """The folder of a run: the recipe's `output_dir`, or `runs/` and the name of the recipe or model. Raises
    RecipeError for a name that is not UTF-8, by which `tokenizers` can neither write nor read."""
    path = Path(recipe.output_dir or Path("runs") / folder_name(name)).expanduser()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise RecipeError(f"output_dir: {shown(str(path))} is not UTF-8 here; write output_dir=... with other letters, "
                          "or set PYTHONUTF8=1") from None
    return path


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are written down: None for what is not a finite number."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()}


def folder_name(name: str) -> str:
    """The name of a recipe or model as a folder's: `mine` for `mine.yaml`, `owner--model` for `owner/model`, `model`
    for `../model`."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).stem
    first, *below = re.split(r"[/\\]+", name.rstrip("/\\"))
    if below and (first in ("", ".", "..") or first.startswith("~") or first.endswith(":")):
        first, *below = below[-1:]
    plain = "--".join([first, *below]).replace(":", "-")
    return plain if plain.strip(".") else Path(name).resolve().name


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def saved_recipe(self) -> Recipe | None:
        """The resolved recipe of the run that is here; None where there is none."""
        path = self.path / RECIPE
        try:
            if not path.exists():
                return None
            return Recipe.from_dict(read_yaml(path.read_text("utf-8")))
        except (OSError, UnicodeDecodeError, RecipeError) as error:
            raise RecipeError(
                f"{path}: the recipe of this folder's run cannot be read ({error}); restore the file, or name another "
                "folder"
            ) from None

    def elsewhere(self) -> Path:
        """A folder beside this one that is not there."""
        return next(path for count in itertools.count(2)
                    if not (path := self.path.with_name(f"{self.path.name}-{count}")).exists())

    def require_fresh(self) -> None:
        """Raises RecipeError where anything is here but a profile, which may come before a run."""
        names = [path.name for path in self.path.iterdir() if path.suffix != WRITING and path.name != LOCK]
        if not names:
            return
        from tightfit.profiling import is_profile_file

        if others := sorted(name for name in names if not is_profile_file(name)):
            of_run = RECIPE not in others and not {METRICS, SUMMARY, CHECKPOINTS}.isdisjoint(others)
            lost = f", or put back the {RECIPE} of the run there, which is missing, to resume it" if of_run else ""
            raise RecipeError(f"output_dir: {self.path} is not empty (it holds {', '.join(others[:3])}); "
                              f"write output_dir={self.elsewhere()}{lost}")

    def require_kept(self) -> None:
        """Raises CheckpointError where the run's folder, or the recipe in it, was removed since the run began."""
        if not (self.path / RECIPE).exists():
            raise CheckpointError(f"output_dir: {self.path} was removed while the run wrote into it, for its {RECIPE} "
                                  "is gone; run again, and leave the folder there")

    def write_recipe(self, recipe: Recipe) -> None:
        write_atomically(self.path / RECIPE, to_yaml(recipe.to_dict()))

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(values, indent=2) + "\n")

    def logged(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The lines of metrics that the run has written, each as it stands and by its values; those of a damaged one,
        such as the last of a run cut off, are empty."""
        path = self.path / METRICS
        for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
            values = None
            with suppress(ValueError, RecursionError):
                values = json.loads(line)
            yield line, values if isinstance(values, dict) and isinstance(values.get("step"), int) else {}

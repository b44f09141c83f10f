"""A run's folder: who may write to it, and which recipe it holds.

    recipe.yaml, metrics.jsonl, summary.json, checkpoints/, model/
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tightfit.errors import RecipeError
from tightfit.files import write_atomically
from tightfit.profiling import is_profile_file
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import read_yaml, to_yaml

RECIPE, METRICS, SUMMARY, CHECKPOINTS, MODEL = "recipe.yaml", "metrics.jsonl", "summary.json", "checkpoints", "model"
PLAN = "plan.json"
LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a folder. The lock falls with the process, however it ends.

    Raises RecipeError where another process holds it, and where the lock cannot be made.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not inherited by loader workers
        except OSError:
            os.close(descriptor)
            raise
    except BlockingIOError:
        raise RecipeError(
            f"output_dir: another process is using {folder}; wait for it, or write output_dir=..."
        ) from None
    except OSError as error:
        raise RecipeError(
            f"output_dir: {path}, which keeps two processes from writing here at once, cannot be used "
            f"({error.strerror or error}); remove it, or write output_dir=... elsewhere"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def run_path(recipe: Recipe, name: str) -> Path:
    """Where a run lies: the recipe's `output_dir`, or `runs/` and the name of the recipe or model."""
    return Path(recipe.output_dir or Path("runs") / folder_name(name)).expanduser()


def folder_name(name: str) -> str:
    """The name of a recipe or model as a folder's: `mine` for `mine.yaml`, `owner--model` for `owner/model`."""
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name.replace("/", "--").replace(":", "-")


class RunFolder:
    """The folder of one run, made if need be. Raises RecipeError where it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".probe"
            probe.touch()
            probe.unlink()
            for name in (CHECKPOINTS, MODEL):
                if (path / name).exists() and not (path / name).is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, f"{name} in it is not a folder")
        except OSError as error:
            reason = error.strerror or str(error)
            raise RecipeError(
                f"output_dir: {path} cannot be written ({reason}); write output_dir=... elsewhere"
            ) from None

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def saved_recipe(self) -> Recipe | None:
        """The resolved recipe of the run that is here; None where there is none."""
        path = self.path / RECIPE
        if not path.exists():
            return None
        try:
            return Recipe.from_dict(read_yaml(path.read_text(), str(path)))
        except (OSError, UnicodeDecodeError, RecipeError) as error:
            raise RecipeError(
                f"{path}: the recipe of the run in this folder cannot be read ({error}); write another output_dir"
            ) from None

    def require_fresh(self) -> None:
        """Raises RecipeError where anything is here but a profile, which may come before a run."""
        if others := sorted(p.name for p in self.path.iterdir() if p.name != LOCK and not is_profile_file(p.name)):
            raise RecipeError(
                f"output_dir: {self.path} is not empty (it holds {', '.join(others[:3])}); write output_dir=... "
                "elsewhere, or remove it"
            )

    def write_recipe(self, recipe: Recipe) -> None:
        write_atomically(self.path / RECIPE, to_yaml(recipe.to_dict()))

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(values, indent=2) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """The summary of a run that finished here; None where there is none that can be read."""
        try:
            values = json.loads((self.path / SUMMARY).read_text())
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

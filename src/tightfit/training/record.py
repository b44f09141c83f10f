"""The record of a run, read from its folder: its figures, the metrics that it logged, and its recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.errors import ReportError
from tightfit.recipe import Recipe
from tightfit.text import size
from tightfit.trace.file import wrong_fields
from tightfit.training.run_folder import METRICS, SUMMARY, RunFolder
from tightfit.training.summary import Summary

LOGGED: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("steps so far", "step", "{:,}".format), ("loss", "loss", "{:.4f}".format),
    ("held-out loss", "eval_loss", "{:.4f}".format),
    ("throughput", "samples_per_second", "{:,.1f} samples/s".format), ("peak memory", "peak_memory", size),
)  # fmt: skip
"""Figures of a run's lines of metrics: names, keys and forms."""


METRIC_BOUND = 1e100
"""Numbers in a run's metrics are below it."""


@dataclass(frozen=True)
class Record:
    """Record of a run, read from its folder. rows: name and value of each figure, as a person reads them. lines: of its
    metrics, each a mapping with its step. recipe: None where it is not kept."""

    rows: Sequence[tuple[str, str]]
    lines: Sequence[dict[str, Any]]
    recipe: Recipe | None = None


def record_of(folder: Path) -> Record | None:
    """The record of the run in a folder: of one that has not finished, by what it has logged; None where nothing is
    there. Raises RecipeError for a recipe that is damaged, ReportError for another file."""
    run = RunFolder(folder)
    recipe, finished = run.saved_recipe(), (folder / SUMMARY).exists()
    with _reading(folder / METRICS):
        lines = _logged_lines(run)
        if finished and not lines and (folder / METRICS).exists():
            raise ValueError("no line of it is whole")
    if finished:
        with _reading(folder / SUMMARY):
            return Record(Summary.read(folder / SUMMARY).rows(), lines, recipe)
    last = {name: value for line in lines for name, value in line.items()}
    rows = [(name, form(last[key])) for name, key, form in LOGGED if key in last]
    return Record(rows, lines, recipe) if rows else None


def _logged_lines(run: RunFolder) -> list[dict[str, Any]]:
    """The values of each line of metrics, without those that are not known. Raises ValueError for one that no run
    writes; the last may be cut off."""
    logged, lines = list(run.logged()), list[dict[str, Any]]()
    for number, (text, values) in enumerate(logged, 1):
        known = {name: value for name, value in values.items() if value is not None}
        if wrong := [n for n, v in known.items() if not isinstance(v, int | float) or not abs(v) < METRIC_BOUND]:
            raise ValueError(f"line {number}: {wrong[0]} is no finite number")
        if known:
            lines.append(known)
        elif number < len(logged) or not text.startswith("{") or text.endswith("}"):
            raise ValueError(f"line {number} is no JSON object with a step")
    return lines


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context that reads a run's file; raises ReportError, which names it, where it is damaged."""
    try:
        yield
    except ValidationError as error:
        reason = wrong_fields(error)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, OverflowError) as error:
        reason = str(error)
    else:
        return
    raise ReportError(f"{path}: the file is damaged ({reason.removeprefix(': ')}); restore it, or remove it")

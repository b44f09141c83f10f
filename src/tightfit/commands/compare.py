"""`tightfit compare`: what a change of fields does to a step's memory and time, predicted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit import text
from tightfit.backends import backend_of
from tightfit.devices import Device
from tightfit.display.tables import plain_table
from tightfit.errors import RecipeError, UnknownRecipe
from tightfit.planner import target_for
from tightfit.planning.costs import Memory
from tightfit.planning.estimate import predict_memory
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.targets import Target
from tightfit.planning.timing.step_time import step_time
from tightfit.planning.timing.uncertainty import Work
from tightfit.profiling.measure import predicted_profile
from tightfit.profiling.profile import Profile
from tightfit.profiling.report.compare import ORIGIN, PEAK, Pair, headlines, pairs, phase_pairs, recipe_changes
from tightfit.profiling.step import op_class, steps_of
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import load_recipe
from tightfit.recipe.resume import differences
from tightfit.trace import CATEGORY_NAMES
from tightfit.training.listeners import Terminal

MEMORY, OPS, PHASES = "memory at the peak", "seconds of ops", "seconds of a step"
WAITS, WAITED = "seconds of waiting", (Work.HOST, Work.TRANSFERS, Work.COMMUNICATION)
PLANNED = " (auto)"
"""Mark of a value that a plan, or a default, put in the place of `auto`."""


@dataclass(frozen=True)
class Side:
    """One of the two recipes.

    memory: that of its plan, evaluation and saving included. work: a step's seconds by what takes them. opened: its
    fields that said `auto`.
    """

    profile: Profile
    memory: Memory
    work: Mapping[Work, float]
    opened: frozenset[str]

    def marked(self, field: str, value: str) -> str:
        """The value of a field of dotted name, marked where that is a field that said `auto`."""
        return value + PLANNED * (field.partition(".")[0] in self.opened)


def run_compare(name: str, words: Sequence[str], gpu: str | None, gpu_memory: str | None, as_json: bool) -> None:
    """Print two recipes' steps side by side: the fields that differ, the headline, memory by category, time by class of
    ops and by phase.

    name: the first recipe. words: the second one, or else the first again, and fields to set in the second. What says
    `auto` is planned first, for each. Raises TightfitError.
    """
    other, overrides = (words[0], words[1:]) if words and "=" not in words[0] else (name, words)
    if "=" in name:
        raise RecipeError(f"RECIPE is missing before {name}; write the recipe that is changed")
    if other == name and not overrides:
        raise RecipeError(f"compare: {name} is one recipe; write another one, or fields to change, such as seq_len=512")
    with Terminal(Console(stderr=True, soft_wrap=True)) as terminal, redirect_stdout(sys.stderr):
        sides = _sides([(name, ()), (other, overrides)], gpu, gpu_memory, terminal.message)
    ours, theirs = (side.profile for side in sides)
    found = _sections(sides)
    changes = recipe_changes(ours, theirs)
    # a profile's peak is of a step alone, a plan's of the whole run; and both steps are predicted
    heads = [row for row in headlines(ours, theirs) if row[0] not in (PEAK, ORIGIN)]
    first, second = (_peaks(side.memory, ours.device) for side in sides)
    peaks = pairs(first, second)
    if as_json:
        values = {"changes": {field: [first, second] for field, first, second in changes},
                  "headline": {figure: [first, second] for figure, first, second, _ in heads},
                  "peak": {pair.name: [pair.first, pair.second] for pair in peaks},
                  **{title: {pair.name: [pair.first, pair.second] for pair in rows} for title, _, rows in found}}
        sys.stdout.write(json.dumps(values, indent=2, allow_nan=False) + "\n")
        return
    console = Console()
    named = f"{name} and {' '.join([other, *overrides])}"
    console.print(Text(f"{named} on {ours.device.name}", style="bold"), soft_wrap=True)
    console.print(_table("changed", [(field, sides[0].marked(field, first), sides[1].marked(field, second), "")
                                     for field, first, second in changes]))
    console.print(_table("predicted", [*heads, *(_row(pair, text.size) for pair in peaks)]))
    for title, written, rows in found:
        console.print(_table(title, [_row(pair, written) for pair in rows]))


def _sides(
    recipes: Sequence[tuple[str, Sequence[str]]], gpu: str | None, gpu_memory: str | None, log: Callable[[str], None]
) -> list[Side]:
    """Each recipe, given by its name and the fields to set in it, predicted; all are read first. Raises RecipeError
    that begins with the recipe that cannot be read or planned."""
    read, sides = list[Recipe](), list[Side]()
    for name, fields in recipes:
        with _naming(name, fields):
            read.append(load_recipe(name, fields))
    targets = [target_for(recipe, gpu, gpu_memory) for recipe in read]
    asked = [load_recipe(name, fields, cuda=target.device.kind == "cuda")
             for (name, fields), target in zip(recipes, targets, strict=True)]
    for (name, fields), recipe, target in zip(recipes, asked, targets, strict=True):
        with _naming(name, fields):
            sides.append(_side(recipe, target, log))
    return sides


@contextmanager
def _naming(name: str, fields: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except UnknownRecipe:
        raise
    except RecipeError as error:
        raise RecipeError(f"{' '.join([name, *fields])}: {str(error).removeprefix(f'{name}: ')}") from None


def _side(asked: Recipe, target: Target, log: Callable[[str], None]) -> Side:
    profile, _ = predicted_profile(asked, target, log)
    assert profile.predicted is not None
    trace, recipe, device = profile.predicted, profile.recipe, profile.device
    filled = differences(asked.to_dict(), recipe.to_dict())
    return Side(profile, predict_memory(trace, recipe, device, standard_tools(backend_of(recipe))),
                step_time(trace, recipe, device, target.calibration).work,
                frozenset(field.partition(".")[0] for field, said, _ in filled if said in (None, "auto")))


def _peaks(memory: Memory, device: Device) -> dict[str, float]:
    """The peak by each account of it, and what it leaves of the device."""
    reserved = {"peak reserved": memory.peak_reserved, "with CUDA context": memory.used}
    return {PEAK: memory.peak_allocated, **(reserved if device.kind == "cuda" else {}),
            "free at the peak": device.memory_bytes - memory.used}


def _sections(sides: Sequence[Side]) -> list[tuple[str, Callable[[float], str], list[Pair]]]:
    """Each table's title, how its figures are written, and its pairs."""
    held = [{CATEGORY_NAMES[key]: count for key, count in side.memory.by_category.items()} for side in sides]
    ops = [steps_of(side.profile)["predicted"].by(op_class) for side in sides]
    waits = [Pair(kind.value, *(side.work.get(kind, 0.0) for side in sides)) for kind in WAITED]
    waits = [pair for pair in waits if pair.first or pair.second]
    return [(MEMORY, text.size, pairs(held[0], held[1], "all")), (OPS, text.seconds, pairs(ops[0], ops[1], "all")),
            (PHASES, text.seconds, phase_pairs(*(side.profile for side in sides))),
            *([(WAITS, text.seconds, waits)] if waits else [])]


def _row(pair: Pair, written: Callable[[float], str]) -> tuple[str, str, str, str]:
    sign = "+" if pair.difference > 0 else "-" if pair.difference < 0 else ""
    return pair.name, written(pair.first), written(pair.second), sign + written(abs(pair.difference))


def _table(title: str, rows: Sequence[tuple[str, str, str, str]]) -> Table:
    table = plain_table()
    table.add_column(title, min_width=26)
    for heading in ("first", "second", "difference"):
        table.add_column(heading, justify="right", min_width=14)
    for row in rows:
        table.add_row(*map(Text, row))
    return table

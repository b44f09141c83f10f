"""`tightfit compare`: what a change of fields does to a step's memory and time, predicted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit import text
from tightfit.errors import RecipeError
from tightfit.planner import target_for
from tightfit.profiling.measure import predicted_profile
from tightfit.profiling.profile import Profile
from tightfit.profiling.report.compare import Pair, compared, headlines, phase_pairs, recipe_changes
from tightfit.profiling.step import steps_of
from tightfit.recipe.lookup import load_recipe
from tightfit.training.listeners import Terminal

MEMORY, OPS, PHASES = "memory at the peak", "seconds of ops", "seconds of a step"


def run_compare(
    name: str, words: Sequence[str], gpu: str | None = None, gpu_memory: str | None = None, as_json: bool = False
) -> None:
    """Print two recipes' steps side by side: the fields that differ, the headline, memory by category, time by class of
    ops and by phase.

    name: the first recipe. words: the second one, or else the first again, and fields to set in the second. What says
    `auto` is planned first, for each. Raises TightfitError.
    """
    other, overrides = (words[0], words[1:]) if words and "=" not in words[0] else (name, words)
    if other == name and not overrides:
        raise RecipeError(f"compare: {name} is one recipe; write another one, or fields to change, such as seq_len=512")
    if "=" in name:
        raise RecipeError(f"RECIPE is missing before {name}; write the recipe that is changed")
    with Terminal(Console(stderr=True, soft_wrap=True)) as terminal, redirect_stdout(sys.stderr):
        profiles = [_profile(each, fields, gpu, gpu_memory, terminal.message)
                    for each, fields in ((name, ()), (other, overrides))]
    ours, theirs = profiles
    found = _sections(ours, theirs)
    changes, heads = list(recipe_changes(ours, theirs)), list(headlines(ours, theirs))
    if as_json:
        values = {"changes": {field: [first, second] for field, first, second in changes},
                  "headline": {figure: [first, second] for figure, first, second, _ in heads},
                  **{title: {pair.name: [pair.first, pair.second] for pair in pairs} for title, _, pairs in found}}
        sys.stdout.write(json.dumps(values, indent=2, allow_nan=False) + "\n")
        return
    console = Console()
    named = f"{name} and {' '.join([other, *overrides])}"
    console.print(Text(f"{named} on {ours.device.name}", style="bold"), soft_wrap=True)
    console.print(_table("changed", [(field, first, second, "") for field, first, second in changes]))
    console.print(_table("predicted", [*heads, _room(ours, theirs)]))
    for title, written, pairs in found:
        console.print(_table(title, [_row(pair, written) for pair in pairs]))


def _profile(
    name: str, fields: Sequence[str], gpu: str | None, gpu_memory: str | None, log: Callable[[str], None]
) -> Profile:
    target = target_for(load_recipe(name, fields), gpu, gpu_memory)
    return predicted_profile(load_recipe(name, fields, cuda=target.device.kind == "cuda"), target, log)[0]


def _sections(ours: Profile, theirs: Profile) -> list[tuple[str, Callable[[float], str], list[Pair]]]:
    """Each table's title, how its figures are written, and its pairs."""
    first, second = (steps_of(profile)["predicted"] for profile in (ours, theirs))
    pairs = compared(first, second, ("all", "all"))
    return [(MEMORY, text.size, pairs["memory"]), (OPS, text.seconds, pairs["classes"]),
            (PHASES, text.seconds, phase_pairs(ours, theirs))]


def _room(ours: Profile, theirs: Profile) -> tuple[str, str, str, str]:
    """Memory that each leaves at its peak; a plan, which knows the allocator's pieces, says whether that is enough."""
    first, second = (each.capacity_bytes - each.peak for each in (ours, theirs))
    return _row(Pair("room at the peak", first, second), text.size)


def _row(pair: Pair, written: Callable[[float], str]) -> tuple[str, str, str, str]:
    sign = "+" if pair.difference > 0 else "-" if pair.difference < 0 else ""
    return pair.name, written(pair.first), written(pair.second), sign + written(abs(pair.difference))


def _table(title: str, rows: Sequence[tuple[str, str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(title, min_width=26)
    for heading in ("first", "second", "difference"):
        table.add_column(heading, justify="right", min_width=14)
    for row in rows:
        table.add_row(*map(Text, row))
    return table

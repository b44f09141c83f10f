"""`tightfit gpus` and `tightfit recipes`: names that other commands take."""

from __future__ import annotations

import typer
from rich.console import Console

from tightfit.bundled import BUNDLED
from tightfit.recipe.lookup import bundled_recipes


def list_gpus() -> None:
    """Print the GPUs that a plan can be made for."""
    from tightfit.display.gpu_tables import gpu_table

    Console().print(gpu_table())


def list_recipes() -> None:
    """Print the bundled recipes and models."""
    typer.echo("recipes")
    for name in bundled_recipes():
        typer.echo(f"  {name}")
    typer.echo("models, each of which is also a recipe of that name")
    for name in sorted(BUNDLED):
        typer.echo(f"  {name:<18} {BUNDLED[name].task}")

"""The command line: thin. Errors a person can act on are one line and exit status 2."""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tightfit.training.summary import Summary

app = typer.Typer(
    name="tightfit",
    help="Fit a bigger transformer on one GPU, and train it faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A YAML file, a bundled recipe or model, a model's folder or its Hugging Face id."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Fields to set, such as `max_steps=100` or `optimizer.block_size=256`."
    ),
]


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from tightfit import __version__

        typer.echo(f"tightfit {__version__}")
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": True})  # they reach the overrides, which say what to write
def train(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Train a model by a recipe; the same command goes on where it stopped.

    Example: `tightfit train gpt2 data=notes.txt seq_len=512 precision=bf16`. Every field is in docs/recipe.md.
    """
    from tightfit.training.progress import LastingConsole, Terminal

    _quiet_libraries()
    console = LastingConsole(soft_wrap=True)
    with Terminal(console) as terminal:
        from tightfit.training.trainer import Trainer, recipe_for_machine

        settled = recipe_for_machine(recipe, overrides or [])
        summary = Trainer(recipe=settled, listener=terminal, name=recipe).train()
    _show(console, summary)
    if summary.stopped_by is not None:
        console.print(f"stopped by {summary.stopped_by} at step {summary.steps}, saved; the same command goes on")
        raise typer.Exit(128 + signal.Signals[summary.stopped_by])


@app.command()
def recipes() -> None:
    """List the bundled recipes and models."""
    from tightfit.bundled import BUNDLED
    from tightfit.recipe_files import bundled_recipes

    typer.echo("recipes")
    for name in bundled_recipes():
        typer.echo(f"  {name}")
    typer.echo("models")
    for name in sorted(BUNDLED):
        typer.echo(f"  {name:<24} {BUNDLED[name].task}")


def _quiet_libraries() -> None:
    """Keep what libraries log about themselves while they load off the screen; errors still show."""
    for name in ("torchao", "torch.utils._pytree", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _show(console: Console, summary: Summary) -> None:
    from rich.table import Table

    if summary.sample:
        console.rule("sample")
        console.print(summary.sample, markup=False, highlight=False)
    console.rule("summary")
    table = Table.grid(padding=(0, 2))
    for name, value in summary.rows():
        table.add_row(name, value)
    console.print(table)
    for warning in summary.warnings:
        console.print(f"warning: {warning}", markup=False)
    console.print(f"run folder: {summary.output_dir}", markup=False)


def main() -> None:
    """Run the command line. Exit status: 0 done, 2 something to change, said in one line, 128 + n after signal n."""
    from tightfit.errors import TightfitError

    try:
        app(standalone_mode=True)
    except TightfitError as error:
        typer.echo(f"tightfit: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("tightfit: interrupted", err=True)
        sys.exit(130)

"""`tightfit train`: a recipe trained with a progress bar, then its sample and its summary."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tightfit.backends.world import OUT_OF_MEMORY, launched_process
from tightfit.errors import RecipeError, SaidElsewhere, TightfitError
from tightfit.recipe.lookup import RECIPES, name_and_overrides
from tightfit.techniques.parallel import ManyProcesses
from tightfit.training.listeners import LastingConsole, Terminal
from tightfit.training.run_folder import RunFolder
from tightfit.training.summary import SAMPLE_TEMPERATURE, Summary
from tightfit.training.trainer import Trainer


def run_train(name: str | None, overrides: Sequence[str] = (), training_arguments: Path | None = None) -> int:
    """Train by a recipe, or go on with a run of it; the exit status: 0, or 128 and the signal's number where one
    stopped it. Raises TightfitError.

    training_arguments: a file of Hugging Face's, as of `recipe.lookup.load_recipe`.
    """
    console = LastingConsole(soft_wrap=True)
    with _TrainingTerminal(console) as terminal:
        words = [*([name] if name else []), *overrides]
        if not words:
            raise RecipeError(f"RECIPE is missing: {RECIPES}")
        name, overrides = name_and_overrides(words)
        place = launched_process()
        try:
            trainer = Trainer(recipe=name, overrides=overrides, listener=terminal,
                              training_arguments=training_arguments)
        except TightfitError as error:
            if place is None or not place.local_rank:
                raise
            raise SaidElsewhere(str(error), 2) from error  # by the first of this machine's
        parallel = trainer.recipe.parallel
        if place is None and isinstance(parallel, ManyProcesses) and trainer.recipe.backend.runs_torch:
            from tightfit.backends.pytorch.launch import launch, process_count  # for several processes alone
            from tightfit.training.recovery import start_anew

            device = trainer.backend.device(trainer.recipe)
            count = process_count(parallel, device)
            options = [] if training_arguments is None else ["--training-args", str(training_arguments)]
            words = ["tightfit", "train", name, *overrides, *options]
            while (status := launch(words, count)) == OUT_OF_MEMORY:
                words += start_anew(RunFolder(trainer.path), device, terminal.message)
            return status
        summary = trainer.train()
    if isinstance(parallel, ManyProcesses) and place is not None and place.rank:
        console.quiet = True
    _show(console, summary)
    if summary.stopped_by is None:
        return 0
    console.print(f"stopped by {summary.stopped_by} at step {summary.steps}, saved; the same command resumes the run")
    return 128 + signal.Signals[summary.stopped_by]


class _TrainingTerminal(Terminal):
    """A Terminal that ends the process at the second Ctrl-C, for which Python would wait to the end of an operation
    such as a backward pass. What is written to disk bears that at any moment."""

    def stopping(self, by: str, again: bool) -> None:
        super().stopping(by, again)
        if again:
            self.finished()  # gives a terminal its cursor back
            os._exit(128 + signal.SIGINT)


def _show(console: Console, summary: Summary) -> None:
    if summary.sample:
        console.rule(f"sample, drawn at temperature {SAMPLE_TEMPERATURE}")
        console.print(summary.sample, markup=False, highlight=False)
    console.rule("summary")
    table = Table.grid(padding=(0, 2))
    for name, value in summary.rows():
        table.add_row(name, value)
    console.print(table)
    console.print(f"run folder: {summary.output_dir}", markup=False)

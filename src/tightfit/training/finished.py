"""A run that is complete in its folder: its summary, and its weights for a module of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from tightfit.backends.world import World
from tightfit.errors import CheckpointError
from tightfit.recipe import Recipe
from tightfit.training import checkpoints
from tightfit.training.run_folder import MODEL, RunFolder
from tightfit.training.session import open_session
from tightfit.training.summary import Summary


def summary_if_finished(folder: RunFolder, recipe: Recipe, saved: Recipe) -> Summary | None:
    """The summary of a run that is complete here at the recipe's last step; None too where its model is gone, and its
    last checkpoint is there to write it from again. saved: the recipe that the run had, whose steps are those of as
    many epochs."""
    if recipe.num_train_epochs is not None:
        if saved.num_train_epochs != recipe.num_train_epochs:
            return None
        recipe = saved
    summary = Summary.of(folder.path)
    model = folder.path / MODEL
    if summary is None or (summary.steps in checkpoints.steps(folder.checkpoints)
                           and not (model.is_dir() and any(model.iterdir()))):
        return None
    if summary.early_stopped:
        ended = ("best_metric", "early_stopping_patience", "early_stopping_threshold")
        return summary if all(getattr(recipe, name) == getattr(saved, name) for name in ended) else None
    return summary if summary.steps >= recipe.max_steps else None


def give_weights(
    module: Any, finished: Summary, recipe: Recipe, folder: RunFolder, world: World, log: Callable[[str], None]
) -> None:
    """Put the weights that a finished run ended with into the caller's module, as it would hold them had it been
    trained here; say where that cannot be done. recipe: with no `auto` left."""
    best = finished.best_step if recipe.load_best_model_at_end else None
    place = checkpoints.folder_of(folder.checkpoints, best or finished.steps)
    try:
        if world.size > 1:
            raise CheckpointError("several processes train it")
        found = checkpoints.read(place)
    except CheckpointError as error:
        log(f"note: your module keeps the weights that it has ({error}); those of the run are in {folder.path / MODEL}")
        return
    session = open_session(recipe, log, module=module, resumed=True)
    build = session.build()
    with build.process_settings(), closing(session.backend.step(build)) as step:
        step.load(found.folder, found.meta)
    log(f"your module has that run's weights, of step {found.step}")

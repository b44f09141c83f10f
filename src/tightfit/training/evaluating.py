"""Evaluation of a model that was trained before, a finished run's or another, on examples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tightfit.backends import backend_of
from tightfit.backends.base import DrawnAtRandom
from tightfit.data import evaluation_global_batches
from tightfit.data.samples import Packed
from tightfit.errors import RecipeError
from tightfit.metrics import evaluation_metrics
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import name_and_overrides
from tightfit.recipe.model_defaults import brings_weights
from tightfit.tasks import TASKS
from tightfit.training.listeners import Listener
from tightfit.training.run_folder import MODEL, RECIPE
from tightfit.training.session import open_session, recipe_for_machine, require_data


@dataclass(frozen=True)
class Evaluated:
    """Metrics of a model, by the names under which a run writes them down.

    labels: how many count. samples: that were read. model: its folder or name. rows: what the samples were cut to, and
    whether they share rows, in words; empty for images.
    """

    metrics: dict[str, float]
    labels: int
    samples: int
    model: str
    rows: str


def evaluate(words: Sequence[str], listener: Listener) -> Evaluated:
    """Evaluate the model of a finished run, by that run's recipe, or that of another recipe.

    words: a run's folder or a recipe's name, and `key=value` overrides. All examples are read: those that a word names
    as `data` or as `data.eval_source`, else those that the run held out. Raises the errors of `tightfit.errors`.
    """
    recipe = _recipe(*name_and_overrides(words))
    session = open_session(recipe, listener.message, resumed=True)
    data = session.prepare(progress=listener.preparing)
    if data.evaluation is None:
        raise RecipeError("data: nothing is held out; write data=<examples to evaluate on>")
    build = session.build()
    if drawn := [note for note in build.notes if isinstance(note, DrawnAtRandom)]:
        raise RecipeError(f"model: {drawn[0]}; only what was trained can be evaluated: leave num_labels and task as "
                          "they were, or train it first")
    for note in build.notes:
        listener.message(f"note: {note}")
    with build.process_settings(), closing(session.backend.step(build)) as step:
        found = step.evaluate(evaluation_global_batches(data.evaluation, recipe))
    if not found.loss.count:
        raise RecipeError("data: no label of these examples counts; write data=<examples with something to predict>")
    samples = min(len(data.evaluation), recipe.eval_samples or len(data.evaluation))
    rows = "" if TASKS[recipe.task].reads == "images" else f"seq_len={recipe.seq_len}"
    rows += ", packed" * isinstance(data.evaluation, Packed)
    return Evaluated(evaluation_metrics(found), found.loss.count, samples, recipe.model, rows)


def _recipe(name: str, overrides: list[str]) -> Recipe:
    """The recipe to evaluate by, with no `auto` left: the run's, of the model that it wrote, or the one of that name,
    whose data is all evaluated."""
    run = Path(name)
    if "/" in name and run.parent.is_dir() and not run.exists():
        raise RecipeError(f"{name}: there is no such folder; name a finished run's, or a saved model's")
    of_run = (run / RECIPE).is_file()
    own = ["eval_samples=null", "parallel=none", "compile=off", *(_model_of(run) if of_run else ())]
    recipe = recipe_for_machine(str(run / RECIPE) if of_run else name, overrides=[*own, *overrides])
    if not brings_weights(recipe.to_dict()):
        raise RecipeError(f"model: {recipe.model!r} has random weights; name a run's folder, a saved model's, or a "
                          "Hugging Face id")
    require_data(recipe)
    data, written = recipe.data, {word.partition("=")[0] for word in overrides}
    if {"data", "data.source"} & written:
        whole = not {"data.eval_source", "data.eval_split"} & written
    else:
        whole = not of_run and data.eval_source is None and data.eval_split is None
    if whole and data.source != "dummy":
        held_out = data.model_copy(update={"eval_source": data.source, "eval_split": None})
        recipe = recipe.model_copy(update={"data": held_out})
    return resolve(recipe, backend_of(recipe).device(recipe))


def _model_of(run: Path) -> tuple[str, str]:
    """Overrides that name the model which a run wrote. Raises RecipeError where it wrote an adapter, or none yet."""
    model = run / MODEL
    if (model / "config.json").is_file():
        return f"model={model}", "model_overrides={}"
    if (model / "adapter_config.json").is_file():
        raise RecipeError(f"{run}: {model} is an adapter alone; run: tightfit export {run} --merge, and evaluate "
                          f"{run / 'merged'} with data=...")
    raise RecipeError(f"{run}: no finished run, for it holds no {MODEL}/; go on with it by the command that began it")

"""Evaluation of a model that was trained before, a finished run's or another, on examples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tightfit.backends import backend_of
from tightfit.backends.base import DrawnAtRandom
from tightfit.data import GlobalBatchLoader, Prepared, evaluation_global_batches
from tightfit.data.samples import Packed
from tightfit.errors import CheckpointError, RecipeError
from tightfit.metrics import evaluation_metrics
from tightfit.models import needs_own_code, read_saved_config
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import name_and_overrides
from tightfit.recipe.model_defaults import brings_weights
from tightfit.recipe.sections import GIVEN_ROWS
from tightfit.tasks import TASKS
from tightfit.training import checkpoints
from tightfit.training.checkpoints import Checkpoint
from tightfit.training.listeners import Listener
from tightfit.training.run_folder import CHECKPOINTS, MODEL, RECIPE, RunFolder
from tightfit.training.session import Session, open_session, recipe_for_machine, require_data
from tightfit.training.summary import Summary

if TYPE_CHECKING:
    from tightfit.data.rows import Rows

PLAIN = ["eval_samples=null", "parallel=none", "compile=off"]
"""Overrides of a run's recipe: all examples, by one process, and no compilation for a single pass."""


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
    """Evaluate the model of a run, by that run's recipe, or that of another recipe.

    words: the folder of a run, or of one of its checkpoints, or a recipe's name, and `key=value` overrides. A finished
    run's model is its `model/`, and where that is not whole, or the run has not finished, its newest checkpoint. All
    examples are read: those that a word names as `data` or as `data.eval_source`, else those that the run held out.
    Raises the errors of `tightfit.errors`.
    """
    name, overrides = name_and_overrides(words)
    overrides = [each for word in overrides for each in _of_its_fields(word)]
    path = Path(name)
    if "/" in name and path.parent.is_dir() and not path.exists():
        raise RecipeError(f"{name}: there is no such folder; name a run's, or a saved model's")
    if path.name == MODEL and (path.parent / RECIPE).is_file() and not _is_whole(path):
        path = path.parent  # for an adapter, or a module's weights, its run says the rest
    named = (path / checkpoints.MANIFEST).is_file()
    run = path.resolve().parent.parent if named else path
    if not (run / RECIPE).is_file():
        if named:
            raise RecipeError(f"{name}: a checkpoint is read by its run's {RECIPE}, and {run} holds none; name one in "
                              f"a run's {CHECKPOINTS}/")
        return _of_whole_model(name, overrides, listener)
    if not named and _is_whole(run / MODEL) and not _went_on(RunFolder(run)):
        return _of_whole_model(str(run / RECIPE), [f"model={run / MODEL}", "model_overrides={}", *overrides], listener,
                               run)
    return _of_checkpoint(RunFolder(run), checkpoints.read(path) if named else None, overrides, listener)


def evaluate_in_python(
    recipe: Recipe, folder: RunFolder, module: object, dataset: Rows | None, eval_dataset: Rows | None,
    listener: Listener,
) -> Evaluated:  # fmt: skip
    """Evaluate a module of the caller's own as it is, but for adapters beside it, which a run alone holds; where it is
    None, the recipe's model as the run in a folder has it, or as it begins where there is no such run. The rows are
    those of `Session.prepare`."""
    found = _newest(folder) if module is None or recipe.trainable.adapts else None
    if found is None and module is None and (model := folder.path / MODEL).is_dir():
        if not _is_whole(model):
            raise CheckpointError(f"{folder.path}: the checkpoints of its run are gone, and {model} is not a whole "
                                  "model; run it again with another output_dir")
        recipe = recipe.model_copy(update={"model": str(model), "model_overrides": {}})
    session = _session(recipe, listener, module)
    return _evaluated(session, session.prepare(dataset, listener.preparing, eval_dataset), listener, found)


def _of_whole_model(name: str, overrides: list[str], listener: Listener, run: Path | None = None) -> Evaluated:
    """Evaluate a model that a recipe can name; without a `run` that it is of, on all of the recipe's data."""
    recipe = recipe_for_machine(name, overrides=[*PLAIN, *overrides])
    if not brings_weights(recipe.to_dict()):
        raise RecipeError(f"model: {recipe.model!r} has random weights; name a run's folder, a saved model's, or a "
                          "Hugging Face id")
    require_data(recipe)
    data, written = recipe.data, _fields(overrides)
    if {"data", "data.source"} & written:
        whole = not {"data.eval_source", "data.eval_split"} & written
    else:
        whole = run is None and data.eval_source is None and data.eval_split is None
    if whole and data.source != "dummy":
        recipe = _evaluated_on(recipe, data.source, data.source)
    session = _session(recipe, listener)
    return _evaluated(session, session.prepare(progress=listener.preparing), listener)


def _of_checkpoint(folder: RunFolder, found: Checkpoint | None, overrides: list[str], listener: Listener) -> Evaluated:
    """Evaluate a run's model as a checkpoint has it; None stands for the newest one. What the run makes of its training
    data, such as a tokenizer, it is evaluated with."""
    found = found or _newest(folder)
    if found is None:
        raise RecipeError(f"{folder.path}: it holds neither a whole model in {MODEL}/ nor a checkpoint in "
                          f"{CHECKPOINTS}/; go on with that run by the command that began it")
    began = folder.saved_recipe()
    assert began is not None
    listener.message(f"evaluating step {found.step} of {began.max_steps}, by {found.folder}")
    with TemporaryDirectory() as made:
        own = _own_tokenizer(folder, found, Path(made), listener)
        recipe = recipe_for_machine(str(folder.path / RECIPE), overrides=[*PLAIN, *own, *overrides])
        if {"data", "data.source"} & _fields(overrides):
            given = recipe.data.source
            recipe = _evaluated_on(recipe, given if began.data.source == GIVEN_ROWS else began.data.source, given)
        session = _session(recipe, listener)
        return _evaluated(session, session.prepare(progress=listener.preparing), listener, found)


def _own_tokenizer(folder: RunFolder, found: Checkpoint, made: Path, listener: Listener) -> list[str]:
    """The override that names a run's own tokenizer: the one beside its model, or where none is there the one made
    again of its data, into the folder `made`. Raises CheckpointError where that data is not what it was."""
    model = folder.path / MODEL
    if any(model.glob("tokenizer*")):
        return [f"tokenizer={model}"]
    recipe = recipe_for_machine(str(folder.path / RECIPE), overrides=PLAIN)
    data = _session(recipe, listener).prepare(progress=listener.preparing)
    checkpoints.require_continuing(found, recipe, GlobalBatchLoader(data.train, recipe))
    if data.tokenizer is None:
        return []
    data.tokenizer.save(made)
    return [f"tokenizer={made}"]


def _newest(folder: RunFolder) -> Checkpoint | None:
    """The checkpoint that a run's model is read from: the best of a finished run that ends with that, else the newest
    whole one. Raises CheckpointError where none of them is whole."""
    recipe, summary = folder.saved_recipe(), Summary.of(folder.path)
    present = checkpoints.folders(folder.checkpoints)
    if recipe is not None and recipe.load_best_model_at_end and summary is not None and summary.best_step is not None:
        present.append(checkpoints.folder_of(folder.checkpoints, summary.best_step))
    error = None
    for place in reversed(present):
        try:
            return checkpoints.read(place)
        except CheckpointError as broken:
            error = error or broken
    if error is not None:
        raise error
    return None


def _is_whole(model: Path) -> bool:
    """Whether a run's model is all that is needed to build it: no adapter, nor one that its own code alone builds."""
    return (model / "config.json").is_file() and not needs_own_code(read_saved_config(model))


def _went_on(folder: RunFolder) -> bool:
    """Whether a run took more steps after it wrote its model."""
    summary = Summary.of(folder.path)
    return summary is not None and any(step > summary.steps for step in checkpoints.steps(folder.checkpoints))


def _evaluated_on(recipe: Recipe, source: str, examples: str) -> Recipe:
    """The recipe with all of `examples` to evaluate on, whose training data is `source`."""
    data = {"source": source, "eval_source": examples, "eval_split": None}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})


def _of_its_fields(word: str) -> list[str]:
    """An override that names other data by its source alone as one that keeps the names of the data's fields."""
    field, _, source = word.partition("=")
    short = field == "data" and not source.lstrip().startswith("{")
    return [f"data.source={source}", "data.split=train", "data.config=null"] if short else [word]


def _fields(overrides: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in overrides}


def _session(recipe: Recipe, listener: Listener, module: object = None) -> Session:
    plain = resolve(recipe, backend_of(recipe).device(recipe))
    return open_session(plain, listener.message, module=module, resumed=True)


def _evaluated(session: Session, data: Prepared, listener: Listener, found: Checkpoint | None = None) -> Evaluated:
    """Metrics of a session's model, with a checkpoint's weights where one is given."""
    recipe = session.recipe
    if data.evaluation is None:
        raise RecipeError("eval_dataset: nothing of the rows is held out; give rows to evaluate on, or write "
                          "data.eval_fraction=0.05" if recipe.data.source == GIVEN_ROWS else
                          "data: nothing is held out; write data=<examples to evaluate on>")
    build = session.build()
    drawn = [note for note in build.notes if isinstance(note, DrawnAtRandom)]
    if drawn and found is None and session.module is None:
        raise RecipeError(f"model: {drawn[0]}; only what was trained can be evaluated: leave num_labels and task as "
                          "they were, or train it first")
    for note in build.notes:
        if found is None or note not in drawn:
            listener.message(f"note: {note}")
    with build.process_settings(), closing(session.backend.step(build)) as step:
        if found is not None:
            step.load(found.folder, found.meta)
        result = step.evaluate(evaluation_global_batches(data.evaluation, recipe))
    if not result.loss.count:
        raise RecipeError("data: no label of these examples counts; write data=<examples with something to predict>")
    samples = min(len(data.evaluation), recipe.eval_samples or len(data.evaluation))
    rows = "" if TASKS[recipe.task].reads == "images" else f"seq_len={recipe.seq_len}"
    rows += ", packed" * isinstance(data.evaluation, Packed)
    model = recipe.model if found is None else str(found.folder)
    return Evaluated(evaluation_metrics(result), result.loss.count, samples, model, rows)

"""Training a recipe from start to finish: folder, data, model, loop, summary."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.backends import load_backend
from tightfit.backends.base import Backend, Step
from tightfit.data import Prepared, prepare
from tightfit.data.loading import WindowLoader, evaluation_windows
from tightfit.devices import Device
from tightfit.errors import OutOfMemory, RecipeError
from tightfit.models import model_facts, module_facts
from tightfit.planning.advice import smaller
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.recipe_files import load_recipe
from tightfit.training import checkpoints
from tightfit.training.loop import Loop, Progress
from tightfit.training.progress import Listener, Quiet
from tightfit.training.records import MetricsFile, Trackers
from tightfit.training.run_folder import METRICS, MODEL, RunFolder, continued
from tightfit.training.summary import Summary, precision_warning

SAMPLE_TOKENS = 160


class Trainer:
    """Train a model by a recipe.

    model: a bundled name, Hugging Face id or folder (replacing the recipe's), or a torch module of your own; None
        takes the recipe's.
    recipe: a Recipe, a mapping of its fields, or the name or path of a recipe file.
    dataset: any object with `len` and `[i]` giving mappings with `input_ids` and, if need be, `labels`; None reads
        what `recipe.data` names.
    listener: told how the run goes; by default nobody is.

    >>> summary = Trainer("gpt2", {"data": "notes.txt", "max_steps": 100}).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any = None,
        recipe: Recipe | dict[str, Any] | str | Path | None = None,
        dataset: Any = None,
        *,
        listener: Listener | None = None,
        name: str | None = None,
    ) -> None:
        self.recipe = as_recipe(recipe, model)
        self.module = None if model is None or isinstance(model, str) else model
        self.dataset = dataset
        self.listener: Listener = listener or Quiet()
        label = name or (recipe if isinstance(recipe, str) else self.recipe.model)
        self.path = Path(self.recipe.output_dir or Path("runs") / _label(str(label)))
        self.backend: Backend = load_backend(self.recipe.backend)

    def train(self) -> Summary:
        """Run to the recipe's last step, or go on where an earlier run in the same folder stopped.

        Raises the errors of `tightfit.errors`, each naming what to change.
        """
        began = time.perf_counter()
        folder = RunFolder(self.path)
        with folder.lock():
            recipe, device = self._settle(folder)
            if (finished := _finished(folder, recipe)) is not None:
                self.listener.message(
                    f"{folder.path} holds a finished run of {recipe.max_steps} steps; to train on write a larger "
                    "max_steps=..., to start anew another output_dir=..."
                )
                return finished
            try:
                return self._train(recipe, device, folder, began)
            except OutOfMemory as error:
                raise OutOfMemory(f"{error}. Try: {'; or '.join(smaller(recipe))}") from None

    def _settle(self, folder: RunFolder) -> tuple[Recipe, Device]:
        """The resolved recipe: what `auto` stands for here, or stood for when the run in this folder began."""
        recipe, saved = self.recipe, folder.saved_recipe()
        if recipe.resume == "never" or saved is None:
            folder.require_fresh()
        device = self.backend.device(recipe)
        if saved is not None:
            recipe = continued(recipe, saved)
        recipe = resolve(recipe, device)
        return recipe, device

    def _train(self, recipe: Recipe, device: Device, folder: RunFolder, began: float) -> Summary:
        module = self.module
        facts = model_facts(recipe) if module is None else module_facts(module, recipe)
        data = prepare(recipe, facts, progress=self.listener.preparing, dataset=self.dataset)
        source = WindowLoader(data.train, recipe)
        build = self.backend.build(recipe, device, self.module)
        for note in build.notes:
            self.listener.message(f"note: {note}")
        step = self.backend.step(build)
        folder.write_recipe(recipe)
        found = checkpoints.newest(folder.checkpoints, self.listener.message)
        metrics = MetricsFile(folder.path / METRICS, found.step if found else 0)
        evaluation = data.evaluation
        with build.session(), Trackers(recipe, folder.path) as trackers:
            loop = Loop(
                recipe, step, source,
                None if evaluation is None else lambda: evaluation_windows(evaluation, recipe),
                folder, metrics, trackers, self.listener,
            )
            if found is not None:
                loop.resume(found)
                self.listener.message(f"going on from step {found.step} of {recipe.max_steps}")
            try:
                progress = loop.run()
            finally:
                metrics.close()
            sample = None if progress.stopped_by else _sample(recipe, step, data)
        summary = self._summary(recipe, device, step, data, progress, began)
        summary = replace(summary, sample=sample, parameters=step.parameter_count, output_dir=str(folder.path))
        if summary.stopped_by is None:
            step.export(folder.path / MODEL)
            if data.tokenizer is not None:
                data.tokenizer.save(folder.path / MODEL)
            folder.write_summary(summary.to_dict())
        return summary

    def _summary(
        self, recipe: Recipe, device: Device, step: Step, data: Prepared, progress: Progress, began: float
    ) -> Summary:
        seconds = progress.training_seconds or 1e-9
        inspection = step.inspection
        assert recipe.precision != "auto"
        warning = precision_warning(recipe.precision.name, inspection)
        return Summary(
            steps=progress.step,
            seconds=time.perf_counter() - began,
            training_seconds=progress.training_seconds,
            compile_seconds=step.compile_seconds,
            data_wait_seconds=progress.data_wait_seconds,
            samples_per_second=progress.samples / seconds,
            tokens_per_second=progress.tokens / seconds,
            peak_memory=step.peak_memory(),
            device=device.name,
            loss=progress.losses[-1] if progress.losses else None,
            eval_loss=progress.eval_loss,
            unigram_loss=data.unigram_loss,
            attention_kernels=inspection.attention_kernels if inspection else (),
            warnings=(warning,) if warning else (),
            stopped_by=progress.stopped_by,
            losses=tuple(progress.losses),
        )


def as_recipe(recipe: Recipe | dict[str, Any] | str | Path | None, model: Any = None) -> Recipe:
    """The recipe that a caller means; a model given by name replaces the recipe's."""
    changes = {"model": model} if isinstance(model, str) else {}
    if isinstance(recipe, Recipe):
        return recipe.override(**changes) if changes else recipe
    if recipe is None or isinstance(recipe, dict):
        return Recipe.from_dict({**(recipe or {}), **changes})
    if isinstance(recipe, str | Path):
        return load_recipe(str(recipe), [f"{name}={value}" for name, value in changes.items()])
    raise RecipeError(f"recipe: {type(recipe).__name__} is not a Recipe, a mapping, or a recipe file's name")


def _finished(folder: RunFolder, recipe: Recipe) -> Summary | None:
    """The summary of a run that is complete here at the recipe's last step."""
    values = folder.summary()
    if values is None or values["steps"] < recipe.max_steps:
        return None
    return Summary.from_dict(values)


def _sample(recipe: Recipe, step: Step, data: Prepared) -> str | None:
    """The recipe's prompt, continued by the trained model."""
    if recipe.sample_prompt is None or recipe.task != "causal-lm" or data.tokenizer is None:
        return None
    prompt = data.tokenizer.encode_prompt(recipe.sample_prompt)
    tokens = step.generate(prompt, SAMPLE_TOKENS, temperature=0.7, seed=recipe.seed)
    if data.tokenizer.end_id in tokens:
        tokens = tokens[: tokens.index(data.tokenizer.end_id)]
    return recipe.sample_prompt + data.tokenizer.decode(tokens)


def _label(name: str) -> str:
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name.replace("/", "--").replace(":", "-")

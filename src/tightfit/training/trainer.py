"""Training a recipe from start to finish: folder, data, model, loop, summary."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from tightfit.backends import load_backend
from tightfit.backends.base import Backend, Step
from tightfit.backends.world import World
from tightfit.data import GlobalBatchLoader, Prepared, evaluation_global_batches
from tightfit.data.tokenizing import name_end
from tightfit.errors import CheckpointError, DataError, OutOfMemory, RecipeError, one_line
from tightfit.models import resolve_source
from tightfit.recipe import Recipe
from tightfit.recipe.resume import continued
from tightfit.training import checkpoints
from tightfit.training.listeners import Listener
from tightfit.training.loop import TrainerState, TrainingLoop
from tightfit.training.records import MetricsLog, Summary, Unwritten
from tightfit.training.run_folder import MODEL, PLAN, SUMMARY, RunFolder, locked, run_path
from tightfit.training.schedule import respaced
from tightfit.training.session import Session, open_session, recipe_for_machine

if TYPE_CHECKING:
    from tightfit.profiling.measure import RunProfile

SAMPLE_TOKENS = 160


class Trainer:
    """Train a model by a recipe.

    model: a bundled name, Hugging Face id or folder (replacing the recipe's), or a torch module of your own; None
        takes the recipe's.
    recipe: a Recipe, a mapping of its fields, or the name or path of a recipe file.
    dataset: any object with `len` and `[i]` giving mappings with `input_ids` and, if need be, `labels`; None reads
        what `recipe.data` names.
    overrides: `field=value` words, as on the command line, on top of a recipe that is given by name.
    listener: called as the run goes on; by default nothing is shown.

    >>> summary = Trainer("gpt2", {"data": "notes.txt", "max_steps": 100}).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any = None,
        recipe: Recipe | dict[str, Any] | str | Path | None = None,
        dataset: Any = None,
        *,
        overrides: Iterable[str] = (),
        listener: Listener | None = None,
    ) -> None:
        self.recipe = recipe_for_machine(recipe, model, overrides)
        if self.recipe.mode != "train":
            raise RecipeError("mode: 'inference' is for planning, and trains nothing; write mode=train, or run "
                              "tightfit plan with this recipe")
        self.module = None if model is None or isinstance(model, str) else model
        self.dataset = dataset
        self.listener: Listener = listener or Listener()
        given = str(recipe) if isinstance(recipe, str | Path) else None
        label = given or (type(model).__name__ if self.module is not None else self.recipe.model)
        self.path = run_path(self.recipe, label)
        self.backend: Backend = load_backend(self.recipe.backend.name)

    def train(self) -> Summary:
        """Run to the recipe's last step, or go on where an earlier run in the same folder stopped.

        SIGTERM and Ctrl-C end the run early, saved: the summary's `stopped_by` then names the signal.
        Raises the errors of `tightfit.errors`, each naming what to change.
        """
        began = time.perf_counter()
        folder = RunFolder(self.path)
        with self.backend.world(self.recipe) as world, locked(folder.path) if world.rank == 0 else nullcontext():
            if world.rank:
                self.listener = Listener()
            session = self._open_together(folder, world)
            if isinstance(session, Summary):
                return session
            try:
                return self._train(session, folder, began, world)
            except OutOfMemory as error:
                from tightfit.planning.suggestions import memory_suggestions

                ways = memory_suggestions(session.recipe, session.device)
                raise OutOfMemory(f"{error}. Try: {'; or '.join(ways)}") from None
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder.path}: {one_line(error)}") from error

    def _open_together(self, folder: RunFolder, world: World) -> Session | Summary:
        """As `_open`, by the first process for all of them."""
        here = list[Session]()

        def opened() -> Recipe | Summary:
            found = self._open(folder, world)
            if isinstance(found, Summary):
                return found
            here.append(found)
            return found.recipe

        found = world.from_first(opened)
        if isinstance(found, Summary):
            return found
        return here[0] if here else Session(recipe=found, device=self.backend.device(found), backend=self.backend,
                                            module=self.module)

    def _open(self, folder: RunFolder, world: World) -> Session | Summary:
        """The session to train in: `auto` stands for what it means here, or meant when the run in this folder began.
        Where that run is complete, its summary."""
        recipe, saved = self.recipe.among(world.size), folder.saved_recipe()
        if recipe.resume == "never" or saved is None:
            folder.require_fresh()
        kept = bool(checkpoints.folders(folder.checkpoints))
        finished = _finished(folder, recipe, saved)
        if saved is not None and not kept and finished is None and folder.summary() is not None:
            raise CheckpointError(f"output_dir: {folder.path} holds a finished run whose checkpoints are gone; write "
                                  "another output_dir")
        if saved is not None and (kept or finished is not None):
            recipe, rounding = continued(recipe, saved)
            if rounding and finished is None:
                self.listener.message(f"{', '.join(rounding)} changed: the run resumes with the same results up to "
                                      "rounding, not bit for bit")
        if finished is not None:
            length = "max_steps" if recipe.num_train_epochs is None else "num_train_epochs"
            self.listener.message(f"{folder.path} holds a finished run of {finished.steps} steps; to train on write a "
                                  f"larger {length}=..., to start anew another output_dir=...")
            return finished
        if recipe.hugging_face:
            self.listener.message("hugging_face: these arguments of the Hugging Face Trainer's have no effect here: "
                                  + ", ".join(sorted(recipe.hugging_face)))
        session = open_session(recipe, self.listener.message, module=self.module)
        session.check_memory(self.listener.message)
        return session

    def _train(self, session: Session, folder: RunFolder, began: float, world: World) -> Summary:
        recipe = session.recipe
        data = self._prepare(session, world)
        source, evaluation = GlobalBatchLoader(data.train, recipe), data.evaluation
        if recipe.num_train_epochs is not None:
            recipe = recipe.with_steps(len(source))
            session = replace(session, recipe=recipe)
        found = world.from_first(lambda: checkpoints.newest(folder.checkpoints, self.listener.message))
        first_step = found.step if found else 0
        profile = self._profile(session, folder, first_step)
        build = session.build()
        for note in build.notes:
            self.listener.message(f"note: {note}")
        step = self.backend.step(build)
        self.listener.message(_beginning(recipe, step, data, len(source), self.module is None))
        before = folder.saved_recipe()
        if world.rank == 0:
            folder.write_recipe(recipe)
            if session.plan is not None:
                folder.write_json(PLAN, session.plan.to_json())
        if profile is not None:
            profile.begin(step, first_step, tuple(build.notes))
        metrics = Unwritten() if world.rank else MetricsLog(recipe, folder.path, first_step)
        with build.session(), closing(step), metrics as log:
            part = (world.rank, world.size)
            loop = TrainingLoop(
                recipe, step, source,
                None if evaluation is None else lambda: evaluation_global_batches(evaluation, recipe, part),
                folder, log, self.listener, profile, world,
            )
            if found is not None:
                loop.resume(found)
                longer = before is not None and before.max_steps != recipe.max_steps
                self.listener.message(f"resuming from step {found.step} of {recipe.max_steps}"
                                      + respaced(recipe, found.step) * longer)
            state = loop.run()
            summary = self._summary(session, step, data, state, began, world)
            if summary.stopped_by is not None:
                return summary
            step.export(folder.path / MODEL, data.classes)
            if world.rank == 0:
                if data.tokenizer is not None:
                    data.tokenizer.save(folder.path / MODEL)
                    if recipe.task in ("causal-lm", "seq2seq"):
                        name_end(folder.path / MODEL, data.tokenizer.end_id)
                folder.write_json(SUMMARY, summary.to_dict())
            summary = replace(summary, sample=self._sample(recipe, step, data))
        if world.rank == 0:
            folder.write_json(SUMMARY, summary.to_dict())
        return summary

    def _prepare(self, session: Session, world: World) -> Prepared:
        """The data: the first process prepares it, and the others find what it cached."""
        def prepared() -> Prepared:
            try:
                return session.prepare(self.dataset, self.listener.preparing)
            except OSError as error:
                source = session.recipe.data.source
                raise DataError(f"data: {source!r} cannot be prepared: {one_line(error)}") from error

        here = list[Prepared]()
        world.from_first(lambda: here.append(prepared()))
        return here[0] if here else prepared()

    def _profile(self, session: Session, folder: RunFolder, first_step: int) -> RunProfile | None:
        """The profile of the step that the recipe names; None where it names none that is still to come."""
        recipe = session.recipe
        if recipe.profile_step is None:
            return None
        from tightfit.profiling.measure import RunProfile, profiled_step

        at = profiled_step(recipe, first_step)
        if at is not None:
            return RunProfile(at, recipe, session.device, self.backend, self.module, folder.path, self.listener)
        if recipe.profile_step > first_step:
            self.listener.message(f"profile_step: no step from {recipe.profile_step} on comes before max_steps "
                                  f"{recipe.max_steps} that has warmed up; none is profiled")
        return None

    def _sample(self, recipe: Recipe, step: Step, data: Prepared) -> str | None:
        """The recipe's prompt, continued by the trained model; None where there is none to continue."""
        if recipe.sample_prompt is None or recipe.task != "causal-lm" or data.tokenizer is None:
            return None
        try:
            prompt = data.tokenizer.encode_prompt(recipe.sample_prompt)
        except (TypeError, UnicodeError):  # such as a lone surrogate
            prompt = []
        if not prompt:
            self.listener.message("no sample: sample_prompt holds no token to begin with")
            return None
        try:
            tokens = step.generate(prompt, SAMPLE_TOKENS, temperature=0.7, seed=recipe.seed)
        except OutOfMemory as error:
            self.listener.message(f"no sample: {error}")
            return None
        if data.tokenizer.end_id in tokens:
            tokens = tokens[: tokens.index(data.tokenizer.end_id)]
        return recipe.sample_prompt + data.tokenizer.decode(tokens)

    def _summary(
        self, session: Session, step: Step, data: Prepared, state: TrainerState, began: float, world: World
    ) -> Summary:
        seconds = state.training_seconds or 1e-9
        return Summary(
            steps=state.step,
            first_step=state.first_step,
            skipped_steps=state.skipped_steps,
            parameters=step.parameter_count,
            active_parameters=step.active_parameters,
            output_dir=str(self.path),
            seconds=time.perf_counter() - began,
            training_seconds=state.training_seconds,
            compile_seconds=step.compile_seconds,
            data_wait_seconds=state.data_wait_seconds,
            samples_per_second=state.samples / seconds,
            tokens_per_second=state.tokens / seconds,
            peak_memory=int(world.largest(step.peak_memory())),
            context_memory=step.context_memory(),
            device=session.device.name,
            loss=state.losses[-1] if state.losses else None,
            eval_loss=state.eval_loss,
            unigram_loss=data.unigram_loss,
            attention_kernels=step.attention_kernels,
            experts_functions=step.experts_functions,
            metrics={name: metric.mean for name, metric in state.metrics.items()},
            inexact=tuple(name for name, metric in state.metrics.items() if not metric.adds_up),
            stopped_by=state.stopped_by,
            losses=tuple(state.losses),
        )


def _finished(folder: RunFolder, recipe: Recipe, saved: Recipe | None) -> Summary | None:
    """The summary of a run that is complete here at the recipe's last step. saved: the recipe that the run had, whose
    steps are those of as many epochs."""
    if recipe.num_train_epochs is not None:
        if saved is None or saved.num_train_epochs != recipe.num_train_epochs:
            return None
        recipe = saved
    try:
        summary = Summary.from_dict(folder.summary() or {})
    except TypeError:  # none, or one of another version
        return None
    return summary if summary.steps >= recipe.max_steps else None


def _beginning(recipe: Recipe, step: Step, data: Prepared, global_batches: int, named: bool) -> str:
    """One line on what is about to be trained."""
    weights = ""
    if named and resolve_source(recipe).kind == "bundled":
        weights = " from random weights (a bundled shape; a Hugging Face id or folder brings its own)"
    model = recipe.model if named else "your model"
    if step.active_parameters != step.parameter_count:
        weights = f", of which a token meets {step.active_parameters:,}{weights and ','}{weights}"
    return (f"{model}: {step.parameter_count:,} parameters{weights}; {len(data.train):,} training samples, "
            f"{global_batches:,} steps an epoch; micro_batch_size {recipe.micro_batch_size}")

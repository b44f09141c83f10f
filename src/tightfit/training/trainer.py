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
from tightfit.backends.base import Backend
from tightfit.backends.world import World
from tightfit.data import GlobalBatchLoader, Prepared, evaluation_global_batches
from tightfit.errors import CheckpointError, DataError, OutOfMemory, RecipeError, limit_advice, one_line
from tightfit.files import replacing_folder
from tightfit.model_facts import module_facts
from tightfit.recipe import Recipe
from tightfit.recipe.sections import GIVEN_ROWS
from tightfit.tasks import TASKS
from tightfit.text import counted
from tightfit.training import checkpoints
from tightfit.training.data_workers import data_workers
from tightfit.training.listeners import LastingConsole, Listener, Terminal
from tightfit.training.loop import TrainingLoop
from tightfit.training.metrics_log import MetricsLog, require_trackers
from tightfit.training.model_folder import finish_model, loaded_by
from tightfit.training.run_folder import MODEL, PLAN, SUMMARY, RunFolder, locked, run_path
from tightfit.training.schedule import length_field, respaced
from tightfit.training.session import Session, open_session, recipe_for_machine, require_data, unread
from tightfit.training.state import TrainerState
from tightfit.training.summary import Summary, beginning, sample_text, summarize

if TYPE_CHECKING:
    from transformers import TrainingArguments


class Trainer:
    """Train a model by a recipe.

    model: a bundled name, Hugging Face id or folder (replacing the recipe's), or a torch module of your own; None
        takes the recipe's.
    recipe: a Recipe, a mapping of its fields, the name or path of a recipe file, or Hugging Face's TrainingArguments.
    dataset: any object with `len` and `[i]` giving mappings with `input_ids` and, if need be, `labels`, or with the
        fields that files have; None reads what `recipe.data` names.
    eval_dataset: likewise, to evaluate on; None holds out a share of `dataset`.
    overrides: `field=value` words, as on the command line, on top of a recipe that is given by name, or of
        TrainingArguments. training_arguments: a JSON file of TrainingArguments between a named recipe and overrides.
    progress: show the run on standard error, as the command line does; by default nothing is shown. listener: called
        as the run goes on, in its place.

    >>> summary = Trainer("gpt2", {"data": "notes.txt", "max_steps": 100}).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any = None,
        recipe: Recipe | dict[str, Any] | str | Path | TrainingArguments | None = None,
        dataset: Any = None,
        eval_dataset: Any = None,
        *,
        overrides: Iterable[str] = (),
        training_arguments: Path | None = None,
        progress: bool = False,
        listener: Listener | None = None,
    ) -> None:
        self.dataset, self.eval_dataset = dataset, eval_dataset
        self.recipe = recipe_for_machine(recipe, model, overrides, training_arguments,
                                         {"dataset": dataset, "eval_dataset": eval_dataset})
        if self.recipe.mode != "train":
            raise RecipeError("mode: 'inference' is for planning, and trains nothing; write mode=train, or run "
                              "tightfit plan with this recipe")
        self.module = None if model is None or isinstance(model, str) else model
        if self.module is not None:
            module_facts(self.module, self.recipe)  # which says at once what data and plans would miss
        if dataset is None:
            require_data(self.recipe, self.module)
        else:
            rows = self.recipe.data.model_copy(update={"source": GIVEN_ROWS})
            self.recipe = self.recipe.model_copy(update={"data": rows})
        shown = Terminal(LastingConsole(stderr=True, soft_wrap=True)) if progress else Listener()
        self.listener: Listener = listener or shown
        self.listener.unit = TASKS[self.recipe.task].unit
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
            with self.listener:
                session = self._session_for_all(folder, world)
                if isinstance(session, Summary):
                    return session
                try:
                    return self._train_recovering(session, folder, began, world)
                except (OSError, SafetensorError) as error:
                    advice = limit_advice(error, checkpoints.ELSEWHERE)
                    raise CheckpointError(f"{folder.path}: {one_line(error)}{advice and f'; {advice}'}") from error

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Metrics such as `eval_loss` on `eval_dataset`, by default on what is held out.

        A module of your own is evaluated as it is, a named model as the run in its folder has it, or as it begins where
        there is no run yet. Raises the errors of `tightfit.errors`.
        """
        from tightfit.training.evaluating import evaluate_in_python  # for this alone

        rows = self.dataset, self.eval_dataset if eval_dataset is None else eval_dataset
        with self.listener:
            return evaluate_in_python(self.recipe, RunFolder(self.path), self.module, *rows, self.listener).metrics

    def _train_recovering(self, session: Session, folder: RunFolder, began: float, world: World) -> Summary:
        """`_train`, and on with a recipe that takes less memory where the recipe's own is too much for the device.
        Raises OutOfMemory where nothing is left to change."""
        try:
            return self._train(session, folder, began, world)
        except OutOfMemory as error:
            failed = error
        from tightfit.training.recovery import train_on

        return train_on(failed, lambda changed, carried: self._train(changed, folder, began, world, carried), session,
                        world, self.listener.message)

    def _session_for_all(self, folder: RunFolder, world: World) -> Session | Summary:
        """`_session_here` by the first process for all of them."""
        here = list[Session]()

        def recipe_or_summary() -> Recipe | Summary:
            found = self._session_here(folder, world)
            if isinstance(found, Summary):
                return found
            here.append(found)
            return found.recipe

        found = world.broadcast_from_rank0(recipe_or_summary)
        if isinstance(found, Summary):
            return found
        return here[0] if here else Session(recipe=found, device=self.backend.device(found), backend=self.backend,
                                            module=self.module)

    def _session_here(self, folder: RunFolder, world: World) -> Session | Summary:
        """The session to train in: `auto` stands for what it means here, or meant when the run in this folder began.
        Where that run is complete, its summary."""
        recipe, saved = self.recipe.with_processes(world.size), folder.saved_recipe()
        if recipe.resume == "never" or saved is None:
            folder.require_fresh()
        kept = bool(checkpoints.folders(folder.checkpoints))
        finished = None
        if saved is not None:
            from tightfit.recipe.resume import continued  # for runs that began before
            from tightfit.training.finished import give_weights, summary_if_finished

            finished = summary_if_finished(folder, recipe, saved)
            if kept or finished is not None:
                recipe, rounding = continued(recipe, saved, folder.elsewhere())
                if rounding and finished is None:
                    self.listener.message(f"{', '.join(rounding)} changed: the run resumes with the same results up to "
                                          "rounding, not bit for bit")
            elif (folder.path / SUMMARY).exists() or (folder.path / MODEL).is_dir():
                raise CheckpointError(f"output_dir: {folder.path} holds a finished run whose checkpoints are gone; "
                                      f"write output_dir={folder.elsewhere()}")
        if finished is not None:
            length = "early_stopping_patience" if finished.early_stopped else length_field(recipe)
            self.listener.message(f"{folder.path} holds a finished run of {finished.steps} steps; to train on write a "
                                  f"larger {length}=..., to start anew output_dir={folder.elsewhere()}")
            if self.module is not None:
                give_weights(self.module, finished, recipe, folder, world, self.listener.message)
            return finished
        if recipe.hugging_face:
            from tightfit.recipe.hf_arguments.table import without_effect  # for recipes from them

            if ignored := without_effect(recipe.hugging_face):
                self.listener.message(ignored)
        require_trackers(recipe)  # before data is prepared
        session = open_session(recipe, self.listener.message, module=self.module, resumed=saved is not None and kept)
        session.check_memory(self.listener.message)
        return session

    def _train(
        self, session: Session, folder: RunFolder, began: float, world: World, carried: TrainerState | None = None
    ) -> Summary:
        """carried: the state of the loop that goes on here."""
        recipe = session.recipe
        data = self._prepare(session, world)
        source, evaluation = GlobalBatchLoader(data.train, recipe), data.evaluation
        source.require_labels()
        if data.unlearned:
            self.listener.message(f"warning: nothing is learned of {counted(data.unlearned, 'training document')}: no "
                                  f"answer begins within seq_len={recipe.seq_len}, or there is none")
        if recipe.best_metric is not None and evaluation is None:
            from tightfit.recipe.best_metric import comparing_field  # for a message alone

            raise RecipeError(f"{comparing_field(recipe)}: nothing is held out to measure {recipe.best_metric} on; "
                              "write data.eval_fraction=0.05, or data.eval_source=<other examples>")
        if recipe.num_train_epochs is not None:
            recipe = recipe.with_steps(len(source))
            session = replace(session, recipe=recipe)
        found = world.broadcast_from_rank0(lambda: checkpoints.newest(folder.checkpoints, self.listener.message))
        first_step = found.step if found else 0
        profile = None
        if recipe.profile_step is not None:
            from tightfit.profiling.measure import profile_of_run  # where a step is profiled

            profile = profile_of_run(session, folder.path, first_step, source, self.listener)
        build = session.build()
        for note in (*unread(recipe, evaluation is not None), *data.notes, *build.notes):
            self.listener.message(f"note: {note}")
        step = self.backend.step(build)
        for line in beginning(recipe, step, data, len(source)):
            self.listener.message(line)
        before = folder.saved_recipe()
        if world.rank == 0:
            folder.write_recipe(recipe)
            if session.plan is not None:
                folder.write_json(PLAN, session.plan.to_json())
        if profile is not None:
            profile.begin(step, first_step, tuple(build.notes))
        metrics = nullcontext() if world.rank else MetricsLog(recipe, folder.path, first_step)
        with build.process_settings(), closing(step), metrics as log:
            loop = TrainingLoop(
                recipe, step, source, None if evaluation is None else
                lambda: evaluation_global_batches(evaluation, recipe, (world.rank, world.size)),
                folder, log, self.listener, profile, world, session.utilization(),
                data_workers(self.recipe, recipe, world),
            )
            if found is not None:
                self._resume(loop, found, before, carried)
            state = loop.run()
            if state.stopped_by is not None:
                return summarize(session, step, data, state, folder.path, began, world)
            summary = self._finish(loop, session, data, began)
        if world.rank == 0:
            folder.write_json(SUMMARY, summary.to_dict())
        return summary

    def _resume(
        self, loop: TrainingLoop, found: checkpoints.Checkpoint, before: Recipe | None, carried: TrainerState | None
    ) -> None:
        """Let a loop go on from a checkpoint. before: the recipe that the run had. carried: as of `_train`."""
        loop.resume(found)
        if carried is not None:
            loop.carry(carried)
        longer = before is not None and before.max_steps != loop.recipe.max_steps
        self.listener.message(f"resuming from step {found.step} of {loop.recipe.max_steps}"
                              + respaced(loop.recipe, found.step) * longer)

    def _finish(self, loop: TrainingLoop, session: Session, data: Prepared, began: float) -> Summary:
        """Write the model of a loop that ended, a sample of its text, and the summary."""
        step, folder, world, log = loop.step, loop.folder, loop.world, self.listener.message
        model = folder.path / MODEL
        if world.rank == 0:
            folder.require_kept()
        with nullcontext(model) if world.rank else replacing_folder(model) as written:
            with loop.saved_on_out_of_memory():
                if loop.recipe.load_best_model_at_end:
                    from tightfit.training.best_checkpoint import load_best  # for these alone

                    load_best(step, loop.state, folder, world, log)
                step.export(written, data.classes)
            if world.rank == 0:
                finish_model(written, loop.recipe, data)
        summary = summarize(session, step, data, loop.state, folder.path, began, world)
        if world.rank == 0:
            folder.write_json(SUMMARY, summary.to_dict())
        summary = replace(summary, sample=sample_text(loop.recipe, step, data, log))
        if how := loaded_by(model, loop.recipe):
            log(how)
        return summary

    def _prepare(self, session: Session, world: World) -> Prepared:
        """The data: the first process prepares it, and the others find what it cached."""
        def prepared() -> Prepared:
            try:
                return session.prepare(self.dataset, self.listener.preparing, self.eval_dataset)
            except OSError as error:
                source = session.recipe.data.source
                raise DataError(f"data: {source!r} cannot be prepared: {one_line(error)}") from error

        here = list[Prepared]()
        world.broadcast_from_rank0(lambda: here.append(prepared()))
        return here[0] if here else prepared()

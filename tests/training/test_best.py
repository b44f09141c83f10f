"""The best checkpoint and early stopping: told by the evaluations that were written down, whatever comes between."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest

from tests.training.runs import Said, logged, same_weights, train
from tests.training.test_loop import FakeStep, run
from tests.training.test_resume import killed_after
from tightfit.backends.world import ALONE
from tightfit.errors import RecipeError
from tightfit.metrics import Evaluation, Total
from tightfit.recipe import Recipe
from tightfit.training.best_checkpoint import Best, load_best
from tightfit.training.run_folder import RunFolder
from tightfit.training.state import TrainerState
from tightfit.training.trainer import Trainer

WATCHED = {"eval_steps": 1, "load_best_model_at_end": True}


class Scripted(FakeStep):
    """Evaluations of given losses, one a step."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = losses

    def evaluate(self, global_batches: Any) -> Evaluation:
        self.asked.append(f"evaluate {self.taken}")
        return Evaluation(loss=Total(self.losses[self.taken - 1], 1), correct=0)


def kept(folder: Path) -> list[str]:
    return sorted(path.name[-1] for path in (folder / "checkpoints").iterdir())


def best_of(metric: str, values: list[float | None], **fields: Any) -> Best:
    recipe = Recipe.from_dict({**WATCHED, "metric_for_best_model": metric, "task": "sequence-classification", **fields})
    best = Best(recipe)
    for step, value in enumerate(values, 1):
        best.add(step, {f"eval_{metric}": value})
    return best


@pytest.mark.parametrize(("metric", "values", "step", "waited"), [
    ("loss", [3.0, 2.0, 2.5, 2.0], 2, 2), ("accuracy", [0.3, 0.5, 0.4], 2, 1), ("f1", [0.3, 0.2, 0.4], 3, 0),
    ("loss", [None, float("nan"), 2.0], 3, 0), ("loss", [2.0, None], 1, 1),
])  # fmt: skip
def test_the_best_is_the_first_of_the_best(metric, values, step, waited):
    found = best_of(metric, values)
    assert (found.step, found.waited, found.is_out_of_patience) == (step, waited, False)


def test_a_gain_below_the_threshold_is_the_best_and_wears_patience_out():
    found = best_of("loss", [3.0, 2.95, 2.9], early_stopping_patience=2, early_stopping_threshold=0.1)
    assert (found.step, found.waited, found.is_out_of_patience) == (3, 2, True)


def test_the_best_checkpoint_outlives_the_limit(tmp_path):
    step = Scripted(5, 3, 4, 4, 4, 4)
    loop = run(step, tmp_path, **WATCHED, save_steps=1, save_total_limit=1)
    assert kept(tmp_path) == ["2", "6"]
    assert (loop.state.best_step, loop.state.best_metrics["eval_loss"]) == (2, 3.0)


def test_the_best_is_saved_where_nothing_else_is(tmp_path):
    run(Scripted(5, 3, 4, 2, 4, 4), tmp_path, **WATCHED, save_total_limit=1)
    assert kept(tmp_path) == ["4", "6"]


def test_a_run_that_no_longer_gets_better_ends(tmp_path):
    step, said = Scripted(5, 3, 4, 4, 1, 1), Said()
    loop = run(step, tmp_path, said, **WATCHED, early_stopping_patience=2)
    assert (loop.state.step, loop.state.early_stopped, loop.state.stopped_by) == (4, True, None)
    assert step.asked[-2:] == ["evaluate 4", "save 4"]
    assert any("no better in 2 evaluations than at step 2; the run ends here" in text for text in said.texts)


def test_patience_survives_an_end_of_the_process(tmp_path):
    run(Scripted(5, 3, 4, 4, 4, 4), tmp_path, **WATCHED, early_stopping_patience=3, max_steps=4)
    step = Scripted(5, 3, 4, 4, 4, 1)
    loop = run(step, tmp_path, **WATCHED, early_stopping_patience=3)
    assert step.asked == ["evaluate 5", "save 5"]  # step 4 has been evaluated
    assert (loop.state.early_stopped, loop.state.best_step, kept(tmp_path)) == (True, 2, ["2", "4", "5"])
    more = Scripted(5, 3, 4, 4, 4, 1)
    assert run(more, tmp_path, **WATCHED, early_stopping_patience=9).state.best_step == 6
    assert more.asked == ["evaluate 6", "save 6"] or more.asked == ["save 6", "evaluate 6"]


@pytest.mark.parametrize(("values", "words"), [
    ({"early_stopping_patience": 2}, "early_stopping_patience: .*write eval_steps"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end: .*write eval_steps"),
    ({"metric_for_best_model": "f1", "eval_steps": 1}, "'f1' is not measured where tokens .*write accuracy or loss"),
    ({"metric_for_best_model": "perplexity", "eval_steps": 1, "task": "sequence-classification"}, "where classes"),
    ({"metric_for_best_model": "bleu", "eval_steps": 1}, "metric_for_best_model: 'bleu'"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(values, words):
    with pytest.raises(RecipeError, match=words):
        Recipe.from_dict(values)


def test_the_names_of_metrics_may_have_their_prefix():
    assert Recipe.from_dict({"metric_for_best_model": "eval_accuracy", "eval_steps": 1}).best_metric == "accuracy"


def test_nothing_held_out_is_refused(tiny):
    with pytest.raises(RecipeError, match=r"load_best_model_at_end: nothing is held out .*eval_fraction"):
        Trainer(recipe={**tiny, **WATCHED, "data": {"source": "dummy", "eval_fraction": 0}}).train()


@pytest.fixture
def overfitting(tiny) -> dict[str, Any]:
    """Held-out loss on random tokens falls while the model learns their range, and rises as it learns them by heart."""
    overrides = {**tiny["model_overrides"], "resid_pdrop": 0.1}
    return {**tiny, "model_overrides": overrides, "learning_rate": 2e-2, "max_steps": 40, "eval_steps": 2,
            "load_best_model_at_end": True, "loading": {"workers": 0}}


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw-8bit"}, {"accumulation": "by-block",
                         "update": "with-forward"}, {"trainable": "lora", "learning_rate": 3e-2}], ids=str)
def test_the_finished_model_is_the_best_ones(overfitting, tmp_path, changes):
    overfitting |= changes
    summary = Trainer(recipe=overfitting).train()
    folder = Path(overfitting["output_dir"])
    evaluations = {line["step"]: line["eval_loss"] for line in logged(folder) if "eval_loss" in line}
    assert summary.best_step == min(evaluations, key=evaluations.__getitem__)
    assert summary.best_step is not None
    assert 0 < summary.best_step < 40
    assert summary.eval_loss == evaluations[summary.best_step]
    shorter = {**overfitting, "max_steps": summary.best_step, "load_best_model_at_end": False, "eval_steps": None}
    train({**shorter, "output_dir": str(tmp_path / "shorter")})
    assert same_weights(folder, tmp_path / "shorter")


def test_a_run_killed_at_random_ends_and_chooses_as_one_that_was_not(overfitting, tmp_path):
    values = {**overfitting, "early_stopping_patience": 3, "save_steps": 3, "save_total_limit": 1, "max_steps": 60}
    train({**values, "output_dir": str(tmp_path / "undisturbed")})
    moments = random.Random(0)
    kills = sum(killed_after(values, moments.uniform(0.0, 0.1)) for _ in range(4))
    train(values)
    one, other = tmp_path / "undisturbed", Path(values["output_dir"])
    assert kills > 0
    assert same_weights(one, other)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    assert summaries[0]["early_stopped"]
    for name in ("steps", "best_step", "eval_loss", "early_stopped", "tokens_seen"):
        assert summaries[0][name] == summaries[1][name]
    evaluations = [[line for line in logged(folder) if "eval_loss" in line] for folder in (one, other)]
    assert evaluations[0] == evaluations[1]
    said = Said()
    again = Trainer(recipe=values, listener=said).train()
    assert again.steps == summaries[0]["steps"] < 60
    assert any("finished run" in text and "early_stopping_patience" in text for text in said.texts)


def test_a_best_checkpoint_that_is_gone_is_said(tmp_path):
    state = TrainerState(step=4, best_step=2, evaluation={"eval_loss": 2.0}, best_metrics={"eval_loss": 1.0})
    said, untouched = Said(), cast("Any", None)
    load_best(untouched, state, RunFolder(tmp_path), ALONE, said.message)
    assert "best checkpoint cannot be read" in said.texts[0]
    assert (state.evaluation, state.best_step) == ({"eval_loss": 2.0}, None)


def test_a_run_that_compares_from_now_on_chooses_among_checkpoints_that_are_there(tmp_path):
    run(Scripted(5, 1, 4, 3), tmp_path, eval_steps=1, save_steps=1, save_total_limit=1, max_steps=4)
    said = Said()
    loop = run(Scripted(5, 1, 4, 3, 2, 3), tmp_path, said, **WATCHED, save_total_limit=1, early_stopping_patience=3)
    assert any("step 2, whose evaluation was the best so far, is gone: the best is chosen among step 4" in text
               for text in said.texts)
    assert (loop.state.best_step, kept(tmp_path), loop.state.early_stopped) == (5, ["5"], True)
    assert any("no better in 3 evaluations than at step 2" in text for text in said.texts)

"""The loop, driven by a step of known figures: what it writes, when it saves, and when it refuses to go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.training.runs import StopAt, logged
from tightfit.backends.base import ParameterCounts, StepResult
from tightfit.errors import CheckpointError, NonFiniteLoss
from tightfit.metrics import Evaluation, Total
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, GlobalBatch, MicroBatch, global_batch_of
from tightfit.training import checkpoints
from tightfit.training.listeners import Listener
from tightfit.training.loop import TrainingLoop
from tightfit.training.metrics_log import MetricsLog
from tightfit.training.run_folder import RunFolder
from tightfit.training.state import SKIPS_IN_A_ROW, Interval, SaveTimer


class Source:
    def __init__(self, global_batches: int = 5) -> None:
        self.global_batches = global_batches

    def __len__(self) -> int:
        return self.global_batches

    def global_batch(self, index: int) -> GlobalBatch:
        batch = MicroBatch(inputs={"input_ids": np.zeros((2, 3), np.int64)}, labels=np.zeros((2, 3), np.int64))
        return global_batch_of((batch,), f"global batch {index}")


class Pending:
    def __init__(self, result: StepResult, ready: bool) -> None:
        self.result, self.is_ready = result, ready

    def ready(self) -> bool:
        return self.is_ready

    def read(self) -> StepResult:
        return self.result


class FakeStep:
    """Gives the results that `script` says for each step, and notes what is asked of it."""

    attention_kernels = ()
    parameters = ParameterCounts(1, 1, 1)
    compile_seconds = 0.0

    def __init__(self, script: Callable[[int], StepResult] = lambda step: StepResult(loss=Total(6.0, 6)),
                 lagging: bool = False) -> None:
        self.script, self.lagging, self.taken, self.finite = script, lagging, 0, True
        self.clock = 0.0
        self.asked: list[str] = []

    def global_batches(self, source: Source, start: int, stop: int):
        return (source.global_batch(index) for index in range(start, stop))

    def __call__(self, global_batch: GlobalBatch, learning_rate: float) -> Pending:
        self.taken += 1
        self.clock += 1
        return Pending(self.script(self.taken), ready=not self.lagging)

    def evaluate(self, global_batches: Any) -> Evaluation:
        self.asked.append("evaluate")
        return Evaluation(loss=Total(3.0, 2), correct=1)

    def save(self, folder: Path) -> dict[str, Any]:
        self.asked.append(f"save {self.taken}")
        (folder / "weights.safetensors").write_bytes(bytes([self.taken]))
        return {}

    def load(self, folder: Path, meta: dict[str, Any]) -> None:
        self.taken = (folder / "weights.safetensors").read_bytes()[0]

    def is_finite(self) -> bool:
        return self.finite

    def peak_memory(self) -> int:
        return 1000


class FakeProfile:
    """Takes one step in the place of `step`, by a clock of the test's own."""

    def __init__(self, step: FakeStep, at: int) -> None:
        self.step, self.at, self.kept = step, at, 0
        self.timing: list[int] = []

    def timed(self, number: int):
        self.timing.append(number)
        return nullcontext()

    def take(self, global_batch: GlobalBatch, learning_rate: float) -> Pending:
        self.step.clock += 100
        return self.step(global_batch, learning_rate)

    def keep(self) -> None:
        self.step.clock += 1000
        self.kept += 1


def run(step: FakeStep, folder: Path, listener: Any = None, source: Source | None = None, profile: Any = None,
        **values: Any) -> TrainingLoop:
    recipe = Recipe.from_dict({"max_steps": 6, "logging_steps": 2, **values})
    place = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    place.write_recipe(recipe)
    found = checkpoints.newest(place.checkpoints, lambda text: None)
    with MetricsLog(recipe, folder, found.step if found else 0) as log:
        loop = TrainingLoop(recipe, step, source or Source(), list, place, log, listener or Listener(),
                    profile)
        if found is not None:
            loop.resume(found)
        loop.run()
    return loop


@pytest.mark.parametrize("lagging", [False, True])
def test_every_step_is_counted_once_however_late_its_figures_come(tmp_path, lagging):
    step = FakeStep(lambda number: StepResult(loss=Total(6.0 * number, 6)), lagging)
    loop = run(step, tmp_path)
    assert loop.state.losses == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [line["loss"] for line in logged(tmp_path) if "loss" in line] == [1.5, 3.5, 5.5]
    assert (loop.state.samples, loop.state.tokens) == (12, 36)
    assert loop.state.evaluation == {"eval_loss": 1.5, "eval_accuracy": 0.5, "eval_perplexity": math.exp(1.5)}


@pytest.mark.parametrize("lagging", [False, True])
def test_a_profiled_step_is_learned_from_and_not_timed(tmp_path, monkeypatch, lagging):
    step = FakeStep(lambda number: StepResult(loss=Total(6.0 * number, 6)), lagging)
    profile = FakeProfile(step, 4)
    monkeypatch.setattr("tightfit.training.loop.time", SimpleNamespace(perf_counter=lambda: step.clock))
    loop = run(step, tmp_path, profile=profile, save_steps=4)
    assert loop.state.losses == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [line["loss"] for line in logged(tmp_path) if "loss" in line] == [1.5, 3.5, 5.5]
    assert (loop.state.samples, loop.state.tokens) == (10, 30)
    assert loop.state.training_seconds == pytest.approx(5)
    assert loop.state.step - loop.state.profiled_steps == 5
    if not lagging:  # which shifts a step's seconds to the one before
        assert [line["tokens_per_second"] for line in logged(tmp_path) if "loss" in line] == pytest.approx([6, 6, 6])
    assert profile.timing == [1, 2, 3, 4, 5, 6]
    assert profile.kept == 1


def test_a_line_tells_how_far_the_run_has_come(tmp_path):
    run(FakeStep(), tmp_path, max_steps=4, save_steps=4)
    run(FakeStep(), tmp_path)
    told = [(line["step"], line["epoch"], line["num_input_tokens_seen"], line["peak_memory"])
            for line in logged(tmp_path) if "loss" in line]
    assert told == [(2, 0.4, 12, 1000), (4, 0.8, 24, 1000), (6, 1.2, 36, 1000)]


def test_mfu_is_that_of_the_interval():
    found = Interval(loss=6.0, count=3, samples=4, tokens=50, seconds=2.0).figures(lambda rate: rate / 100)
    assert found == {"loss": 2.0, "tokens_per_second": 25.0, "samples_per_second": 2.0, "mfu": 0.25}
    assert Interval(seconds=1.0).figures(None).keys() == {"tokens_per_second", "samples_per_second"}


class Unlabelled(Source):
    """The labels of the first and the third global batch are all ignored."""

    def global_batch(self, index: int) -> GlobalBatch:
        whole = super().global_batch(index)
        labels = np.full((2, 3), IGNORE if index in (0, 2) else 0)
        (batch,) = whole.micro_batches
        return global_batch_of((replace(batch, labels=labels),), whole.origin)


def test_a_step_without_labels_is_said_once_and_its_loss_is_not_written(tmp_path):
    said = []
    listener = Listener()
    listener.message = said.append
    step = FakeStep(lambda number: StepResult(loss=Total(0.0, 0) if number in (1, 3) else Total(6.0, 6)))
    run(step, tmp_path, listener, Unlabelled(), logging_steps=1)
    (warning,) = [text for text in said if "warning" in text]
    assert "every label of step 1 is -100 (global batch 0)" in warning
    assert [line["step"] for line in logged(tmp_path) if "loss" in line] == [2, 4, 5, 6]


def test_saving_comes_before_evaluating_and_once_a_step(tmp_path):
    step = FakeStep()
    run(step, tmp_path, save_steps=3, eval_steps=3)
    assert step.asked == ["save 3", "evaluate", "save 6", "evaluate"]


def test_a_run_that_says_nothing_of_it_saves_by_time_and_the_less_the_longer_that_takes(tmp_path, monkeypatch):
    step, now = FakeStep(), 0.0

    def taken(number: int) -> StepResult:
        nonlocal now
        now += 400
        return StepResult(loss=Total(6.0, 6))

    monkeypatch.setattr("tightfit.training.state.time", SimpleNamespace(monotonic=lambda: now))
    step.script = taken
    run(step, tmp_path, max_steps=9)
    assert step.asked == ["save 4", "save 8", "save 9", "evaluate"]  # the first step that begins after 15 minutes
    timer = SaveTimer()
    timer.restart(took=60.0)
    for then, rank, sent, due in ((1199, 0, 0, False), (1200, 0, 0, True), (1200, 1, 0, False), (1200, 0, 15, False)):
        monkeypatch.setattr("tightfit.training.state.time", SimpleNamespace(monotonic=lambda then=then: now + then))
        world = SimpleNamespace(rank=rank, all_reduce_max=lambda number: number)
        assert (timer.agree(world, sent, by_time=True), timer.due) == (sent, due)
        assert (timer.agree(world, sent, by_time=False), timer.due) == (sent, False)


def test_epochs_are_of_as_many_steps_as_the_data_has_global_batches_and_a_resumed_run_keeps_them(tmp_path):
    step, again, watched = FakeStep(), FakeStep(), {"save_steps": "epoch", "eval_steps": "epoch"}
    run(step, tmp_path, source=Source(4), **watched)
    assert step.asked == ["save 4", "evaluate", "save 6", "evaluate"]
    run(again, tmp_path, source=Source(4), max_steps=9, **watched)
    assert again.asked == ["save 8", "evaluate", "save 9", "evaluate"]


def test_shares_are_of_the_steps_that_the_run_has(tmp_path):
    step = FakeStep()
    run(step, tmp_path, save_steps=0.5, eval_steps=0.3, logging_steps=0.5, max_steps=6)
    assert step.asked == ["evaluate", "save 3", "evaluate", "save 6", "evaluate"]
    assert [line["step"] for line in logged(tmp_path) if "learning_rate" in line] == [3, 6]


def test_an_evaluation_that_an_end_of_the_process_came_before_is_made_up_for(tmp_path):
    run(FakeStep(), tmp_path, max_steps=3, save_steps=3, eval_steps=3)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(True) if "eval_loss" not in line))
    step = FakeStep()
    run(step, tmp_path, save_steps=3, eval_steps=3)
    assert step.asked == ["evaluate", "save 6", "evaluate"]
    assert [line["step"] for line in logged(tmp_path) if "eval_loss" in line] == [3, 6]
    again = FakeStep()
    run(again, tmp_path, max_steps=7, save_steps=3, eval_steps=3)
    assert again.asked[0] != "evaluate"  # step 6 has been evaluated


def test_lines_that_are_no_metrics_are_dropped_on_resume(tmp_path):
    run(FakeStep(), tmp_path, max_steps=2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    run(FakeStep(), tmp_path)
    assert logged(tmp_path)[-1]["step"] == 6


def test_an_interval_that_a_stop_cut_is_logged_whole(tmp_path):
    def script(number: int) -> StepResult:
        return StepResult(loss=Total(6.0 * number, 6))

    stopped = run(FakeStep(script), tmp_path, StopAt(3))
    assert (stopped.state.stopped_by, stopped.state.step) == ("SIGTERM", 3)
    resumed = run(FakeStep(script), tmp_path)
    assert resumed.state.first_step == 3
    assert [line["loss"] for line in logged(tmp_path) if "loss" in line] == [1.5, 3.5, 5.5]


@pytest.mark.parametrize("result", [
    StepResult(loss=Total(math.nan, 6)), StepResult(loss=Total(math.inf, 6)),
    StepResult(loss=Total(6.0, 6), grad_norm=math.nan),
])
def test_what_is_not_finite_stops_the_run_unsaved(tmp_path, result):
    step = FakeStep(lambda number: result if number == 4 else StepResult(loss=Total(6.0, 6)))
    with pytest.raises(NonFiniteLoss, match=r"step 4 .*global batch 3.*learning_rate=") as error:
        run(step, tmp_path, save_steps=2)
    assert "\n" not in str(error.value)
    assert [folder.name for folder in checkpoints.folders(tmp_path / "checkpoints")] == ["step-00000002"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    step = FakeStep()
    step.finite = False
    with pytest.raises(NonFiniteLoss, match="weights of step 2"):
        run(step, tmp_path, save_steps=2)
    assert not checkpoints.folders(tmp_path / "checkpoints")


def test_skipped_steps_are_counted_and_too_many_stop_the_run(tmp_path):
    skipped = StepResult(loss=Total(6.0, 6), grad_norm=math.inf, skipped=True)
    loop = run(FakeStep(lambda number: skipped if number < 4 else StepResult(loss=Total(6.0, 6))), tmp_path)
    assert loop.state.skipped_steps == 3
    assert [line.get("skipped_steps") for line in logged(tmp_path) if "loss" in line] == [2, 1, None]
    assert logged(tmp_path)[0]["grad_norm"] is None
    with pytest.raises(NonFiniteLoss, match="fp16 overflows"):
        run(FakeStep(lambda number: skipped), tmp_path / "other", max_steps=SKIPS_IN_A_ROW + 1)


def test_other_data_is_refused_on_resume(tmp_path):
    run(FakeStep(), tmp_path, max_steps=2)
    with pytest.raises(CheckpointError, match="data: it is not what it was"):
        run(FakeStep(), tmp_path, source=Source(7))


def test_a_run_past_the_last_step_says_so(tmp_path):
    run(FakeStep(), tmp_path, max_steps=4)
    with pytest.raises(CheckpointError, match="already taken 4 steps"):
        run(FakeStep(), tmp_path, max_steps=2)

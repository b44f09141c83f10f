"""A run that profiles one of its steps: it learns what it would without, and whatever fails leaves the run alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.failing import failing
from tests.training.runs import Said, logged, logged_losses, same_weights
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.measure import step_profiler
from tightfit.backends.pytorch.measure.marks import Marks
from tightfit.commands.report import run_report
from tightfit.data.loading import GlobalBatchLoader
from tightfit.profiling import profile as profiles
from tightfit.profiling.measure import profile_recipe, profiled_step
from tightfit.profiling.report.compare import figures
from tightfit.recipe import Recipe
from tightfit.trace import WALL_PHASES, Phase
from tightfit.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture
def run(tiny):
    """A run with dropout, ragged global batches and warm-up: everything that a profile could disturb."""
    overrides = {**tiny["model_overrides"], "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
    return {**tiny, "model_overrides": overrides, "data": {"source": "dummy", "samples": 21}, "max_steps": 7,
            "lr_scheduler_type": "cosine", "loading": {"workers": 0}, "compile": "off"}


@pytest.fixture
def plain(run, tmp_path):
    folder = tmp_path / "plain"
    return folder, train({**run, "output_dir": str(folder)})[0]


def train(values):
    told = Said()
    return Trainer(recipe=values, listener=told).train(), told.texts


@pytest.mark.parametrize("change", [
    {}, {"checkpointing": "every-block"}, {"precision": "fp16"}, {"precision": "bf16", "optimizer": "adamw-8bit"},
], ids=str)  # fmt: skip
def test_a_profiled_run_learns_the_same_and_can_be_reported(run, tmp_path, change):
    summary, _ = train({**run, **change, "output_dir": str(tmp_path / "plain")})
    folder = Path(run["output_dir"])
    profiled, messages = train({**run, **change, "profile_step": 5})
    assert profiled.losses == summary.losses
    assert profiled.eval_loss == summary.eval_loss
    assert same_weights(tmp_path / "plain", folder)
    assert logged_losses(tmp_path / "plain") == logged_losses(folder)
    assert f"profiled step 5; to draw it: tightfit report {folder}" in messages

    found = profiles.load(folder)
    assert found.notes[0] == "step 5 of a training run"
    assert {span.name for span in found.measured.spans} == {"step 1", "forward", "backward", "optimizer"}
    assert set(found.phase_seconds) == set(found.predicted_seconds) == set(WALL_PHASES)
    assert found.peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    assert run_report(folder) == folder / "report.html"
    assert {path.name for path in folder.iterdir()} >= {"trace.json.gz", "profile", "summary.json", "model"}


def test_no_step_is_profiled_unless_asked_for(plain):
    folder, _ = plain
    assert not (folder / "profile").exists()


def test_the_profiled_step_is_left_out_of_the_speed(run):
    train({**run, "profile_step": 5})
    lines = logged(Path(run["output_dir"]))
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "loss" in line and "tokens_per_second" not in line] == [5]


def test_a_run_that_goes_on_past_the_step_profiles_none(run):
    train({**run, "profile_step": 5, "save_steps": 6})
    kept = Path(run["output_dir"]) / "profile/profile.json.gz"
    before = kept.stat().st_mtime_ns
    _, messages = train({**run, "profile_step": 5, "save_steps": 6, "max_steps": 12, "lr_scheduler_type": "cosine"})
    assert any("resuming from step 7" in message for message in messages)
    assert not any("profile" in message for message in messages)
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize(("wanted", "first", "expected"), [
    (None, 0, None), (10, 0, 10), (1, 0, 4), (4, 0, 4), (10, 6, 10), (10, 8, 12), (10, 9, 13), (10, 10, None),
    (10, 15, None), (20, 0, 20), (21, 0, None), (19, 18, None),
])  # fmt: skip
def test_which_step_is_profiled(wanted, first, expected):
    recipe = Recipe.from_dict({"profile_step": wanted, "max_steps": 20, "batch_size": 4, "micro_batch_size": 2})
    assert profiled_step(recipe, first, GlobalBatchLoader(range(12), recipe)) == expected


@pytest.mark.parametrize(("wanted", "last", "expected"), [(5, 20, 5), (6, 20, 7), (7, 20, 7), (9, 9, None)])
def test_an_epochs_short_last_global_batch_is_not_profiled(wanted, last, expected):
    recipe = Recipe.from_dict({"profile_step": wanted, "max_steps": last, "batch_size": 4, "micro_batch_size": 2})
    assert profiled_step(recipe, 0, GlobalBatchLoader(range(10), recipe)) == expected


def test_a_profile_measures_whole_global_batches_alone(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": "a b c", "label": n % 2}) for n in range(5)))
    data = {"source": str(tmp_path / "rows.jsonl"), "eval_fraction": 0}
    values = {**run, "task": "sequence-classification", "num_labels": 2, "data": data, "vocab_size": 300,
              "batch_size": 4, "micro_batch_size": 4}
    found, _, _ = profile_recipe(Recipe.from_dict(values))  # every other global batch has one row
    assert found.tokens % 4 == 0


def test_a_step_that_never_comes_is_said(run):
    _, messages = train({**run, "profile_step": 50, "max_steps": 2})
    assert "profile_step: no step from 50 on comes before max_steps 2 that has warmed up; none is profiled" in messages


def break_marks(monkeypatch, owner, name, phase, times):
    """Let a method of the marks, or of what they are made from, fail in that phase, after it has worked so often."""
    works, left = getattr(owner, name), [times]

    def fail(self, *arguments):
        left[0] -= self.phase is phase
        if left[0] < 0:
            raise RuntimeError("this op is not known\nand more")
        return works(self, *arguments)

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize(("owner", "name", "phase"), [
    (Marks, "_run", Phase.FORWARD), (Marks, "_run", Phase.BACKWARD), (Tracker, "_note", Phase.FORWARD),
    (Tracker, "_note", Phase.OPTIMIZER),
])  # fmt: skip
def test_a_step_that_cannot_be_followed_is_taken_all_the_same(run, plain, monkeypatch, owner, name, phase):
    break_marks(monkeypatch, owner, name, phase, times=3)
    summary, messages = train({**run, "profile_step": 5})
    assert summary.losses == plain[1].losses
    assert same_weights(plain[0], Path(run["output_dir"]))
    assert not (Path(run["output_dir"]) / "profile").exists()
    warnings = [message for message in messages if "warning" in message]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "warning: step 5 has no profile, and the run continues: the step could not be followed")
    assert warnings[0].endswith("RuntimeError: this op is not known")


def test_a_full_disk_costs_the_profile_alone(run, plain, monkeypatch):
    monkeypatch.setattr(step_profiler.shutil, "copyfileobj", failing(OSError(28, "No space left on device")))
    summary, messages = train({**run, "profile_step": 5})
    folder = Path(run["output_dir"])
    assert summary.losses == plain[1].losses
    assert [path.name for path in folder.iterdir() if "trace" in path.name] == []
    assert (f"warning: step 5 has no profile, and the run continues: {folder}/trace.json.gz: cannot be written "
            "(No space left on device)") in messages


def test_a_prediction_that_fails_leaves_the_measurement(run, plain, monkeypatch):
    monkeypatch.setattr(PytorchBackend, "predict", failing(RuntimeError("no way to trace it")))
    summary, _ = train({**run, "profile_step": 5})
    assert summary.losses == plain[1].losses
    found = profiles.load(Path(run["output_dir"]))
    assert found.predicted is None
    assert found.measured.ops
    assert any("no way to trace it" in note for note in found.notes)


def test_tokens_of_rows_shorter_than_the_longest_count_without_padding(run, tmp_path):
    rows = [{"text": "a b c d"[: 1 + 2 * (number % 4)], "label": number % 2} for number in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {**run, "task": "sequence-classification", "num_labels": 2, "data": str(tmp_path / "rows.jsonl"),
              "vocab_size": 300}
    found, _, _ = profile_recipe(Recipe.from_dict(values))
    assert 8 <= found.tokens <= 8 * 4
    rate = next(figures(found))
    assert (rate.name, rate.value) == ("tokens/s", pytest.approx(found.tokens / found.step_seconds))
    train({**values, "profile_step": 5})
    assert 8 <= profiles.load(Path(run["output_dir"])).tokens <= 8 * 4

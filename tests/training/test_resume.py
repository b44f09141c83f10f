"""A run that was stopped, killed or damaged goes on to the very weights of one that was not."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.training.runs import Said, StopAt, logged_losses, same_weights, train
from tightfit.errors import CheckpointError, RecipeError
from tightfit.files import WRITING
from tightfit.recipe import Recipe
from tightfit.recipe.resume import continued
from tightfit.techniques.offload import Host
from tightfit.training.trainer import Trainer

FORK = multiprocessing.get_context("fork")
BY_BLOCK = {"accumulation": "by-block", "update": "with-forward"}
STREAMED = {"by block": BY_BLOCK, "from host memory": {
    **BY_BLOCK, "offload": {"name": "host", "activations": 1, "embeddings": True}}}


@pytest.fixture
def run(tiny):
    """A run with dropout, several epochs, ragged global batches, warm-up and clipping: everything that could drift."""
    overrides = {**tiny["model_overrides"], "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
    return {**tiny, "model_overrides": overrides, "data": {"source": "dummy", "samples": 21}, "max_steps": 12,
            "save_steps": 1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "loading": {"workers": 0}}


@pytest.mark.parametrize("emptied", [True, False])
def test_a_finished_run_writes_a_model_again_that_is_gone(undisturbed, run, tmp_path, emptied):
    values = {**run, "output_dir": str(tmp_path / "again")}
    train(values)
    shutil.rmtree(tmp_path / "again" / "model")
    if emptied:
        (tmp_path / "again" / "model").mkdir()
    train(values)
    assert same_weights(tmp_path / "again", undisturbed)


@pytest.fixture
def undisturbed(run, tmp_path) -> Path:
    folder = tmp_path / "undisturbed"
    train({**run, "output_dir": str(folder), "save_steps": None})
    return folder


def killed_after(values, seconds: float) -> bool:
    """Train in a forked process and kill it some time after it began writing; whether it was still at work then."""
    metrics = Path(values["output_dir"]) / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else None
    process = FORK.Process(target=train, args=(values,))
    process.start()
    while process.is_alive() and (not metrics.exists() or metrics.stat().st_mtime_ns == before):
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def killed_while_saving(values) -> bool:
    """Train in a forked process and kill it as it writes a checkpoint; whether that is left half written."""
    folder = Path(values["output_dir"]) / "checkpoints"

    def half_written() -> set[int]:
        with suppress(OSError):  # gone, or given its name meanwhile
            return {path.stat().st_ino for path in folder.glob(f".*{WRITING}")}
        return set()

    before = half_written()
    process = FORK.Process(target=train, args=(values,))
    process.start()
    while process.is_alive() and not half_written() - before:
        time.sleep(0.0002)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL and bool(half_written())


@pytest.mark.parametrize("kind", [pytest.param("by block", marks=pytest.mark.cold), "from host memory"])
def test_killed_while_a_streamed_run_saves(run, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(Host, "refuse", lambda *_: [])  # a processor's memory stands for a card's as well
    run, whole, moments = {**run, **STREAMED[kind], "max_steps": 30}, tmp_path / "undisturbed", random.Random(0)
    train({**run, "output_dir": str(whole), "save_steps": None})
    saving = sum(killed_while_saving(run) for _ in range(4))
    kills = sum(killed_after(run, moments.uniform(0.0, 0.15)) for _ in range(3))
    train(run)
    assert saving > 0
    assert kills > 0
    assert same_weights(whole, Path(run["output_dir"]))
    assert logged_losses(whole) == logged_losses(Path(run["output_dir"]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.cold) for seed in (1, 2, 3))])
def test_killed_at_random_moments(run, tmp_path, seed):
    run, undisturbed, moments = {**run, "max_steps": 40}, tmp_path / "undisturbed", random.Random(seed)
    train({**run, "output_dir": str(undisturbed), "save_steps": None})
    kills = sum(killed_after(run, moments.uniform(0.0, 0.15)) for _ in range(4))
    train(run)
    assert kills > 1
    assert same_weights(undisturbed, Path(run["output_dir"]))
    assert logged_losses(undisturbed) == logged_losses(Path(run["output_dir"]))


@pytest.mark.parametrize("change", [
    {"optimizer": "adamw-8bit"}, {"optimizer": "lion"}, {"optimizer": "muon"}, {"precision": "fp16"},
    {"precision": "bf16-pure"}, {"precision": "bf16-pure", "optimizer": "muon"},
    {"precision": {"name": "bf16-pure", "rounding": "stochastic"}}, {"checkpointing": "every-block"},
    {"precision": {"name": "bf16-pure", "rounding": "stochastic"}, **BY_BLOCK}, {"loading": {"workers": 2}},
    {"trainable": {"name": "lora", "dropout": 0.1}, "base": "nf4", "precision": "bf16"}, {"trainable": "dora"},
    {"trainable": {"name": "layers", "names": ["h.1"]}, "base": "int8"},
], ids=str)
def test_stopped_half_way(run, tmp_path, change):
    values = {**run, **change, "save_steps": 5, "max_steps": 8}
    train({**values, "output_dir": str(tmp_path / "whole"), "save_steps": None})
    # The schedule looks ahead to max_steps, so the first half runs under the same one and is cut short by a signal.
    process = FORK.Process(target=_train_and_stop, args=(values,))
    process.start()
    process.join()
    assert process.exitcode == 0
    train(values)
    assert same_weights(tmp_path / "whole", Path(run["output_dir"]))


def _train_and_stop(values) -> None:
    summary = Trainer(recipe=values, listener=StopAt(5)).train()
    assert summary.stopped_by == "SIGTERM"
    assert summary.steps < 8


def test_a_broken_newest_checkpoint_falls_back(run, undisturbed):
    process = FORK.Process(target=_train_and_stop, args=({**run, "max_steps": 12},))
    process.start()
    process.join()
    newest = max((Path(run["output_dir"]) / "checkpoints").iterdir())
    (newest / "optimizer.safetensors").write_bytes(b"not what was written")
    said = Said()
    Trainer(recipe=run, listener=said).train()
    assert any(f"checkpoint {newest.name} is broken" in text for text in said.texts)
    assert same_weights(undisturbed, Path(run["output_dir"]))


def test_a_changed_recipe_is_refused_with_the_difference(run):
    train({**run, "max_steps": 2})
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.001 then, 0\.002 now"):
        train({**run, "learning_rate": 2e-3})
    with pytest.raises(CheckpointError, match="optimizer"):
        train({**run, "optimizer": "lion"})


def test_more_steps_and_other_logging_may_be_asked_for(run):
    train({**run, "max_steps": 2})
    train({**run, "max_steps": 4, "logging_steps": 2, "eval_steps": 2})
    assert set(logged_losses(Path(run["output_dir"]))) == {1, 2, 4}


def test_what_was_auto_comes_from_the_run_that_goes_on(run):
    train({**run, "max_steps": 1, "micro_batch_size": 2})
    summary = Trainer(recipe={**run, "max_steps": 2, "micro_batch_size": "auto"}).train()
    assert summary.steps == 2
    assert "micro_batch_size: 2" in (Path(run["output_dir"]) / "recipe.yaml").read_text()


def test_shares_that_were_auto_come_from_the_run_that_goes_on():
    """And a run may go on with another update, or with nothing offloaded: its checkpoints are the ordinary ones."""
    def streamed(share):
        return Recipe.from_dict({**BY_BLOCK, "offload": {"name": "host", "weights": share, "activations": 1}})

    assert continued(streamed("auto"), streamed(0.5), "runs/other") == (streamed(0.5), [])
    plain = Recipe.from_dict({"accumulation": "loop", "update": "after-backward", "offload": "none"})
    assert continued(plain, streamed(0.5), "runs/other") == (plain, ["accumulation"])


def test_a_backend_may_go_on_with_other_knobs_and_is_no_other():
    scanned = Recipe.from_dict({"backend": {"name": "jax", "layers": "scanned", "unroll": 2}})
    unrolled = Recipe.from_dict({"backend": {"name": "jax", "layers": "unrolled"}})
    assert continued(Recipe.from_dict({"backend": "jax"}), scanned, "runs/other") == (scanned, [])
    assert continued(unrolled, scanned, "runs/other") == (unrolled, ["backend"])
    with pytest.raises(CheckpointError, match="backend: 'jax' then, 'pytorch' now"):
        continued(Recipe(), scanned, "runs/other")


def test_a_finished_run_is_not_run_again(run):
    train(run)
    before = (Path(run["output_dir"]) / "metrics.jsonl").read_text()
    newest = max((Path(run["output_dir"]) / "checkpoints").iterdir())
    written = newest.stat().st_mtime_ns
    assert Trainer(recipe=run).train().steps == 12
    assert newest.stat().st_mtime_ns == written
    assert (Path(run["output_dir"]) / "metrics.jsonl").read_text() == before


def test_resume_never_asks_for_an_empty_folder(run):
    train({**run, "resume": "never", "max_steps": 1})
    with pytest.raises(RecipeError, match="not empty"):
        train({**run, "resume": "never"})


def test_a_folder_of_something_else_is_left_alone(run):
    folder = Path(run["output_dir"])
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(RecipeError, match=r"thesis\.txt"):
        train(run)


def test_a_run_without_its_recipe_is_never_to_be_removed(run):
    train({**run, "max_steps": 1})
    (Path(run["output_dir"]) / "recipe.yaml").unlink()
    with pytest.raises(RecipeError, match=r"put back the recipe\.yaml of the run there, which is missing") as raised:
        train(run)
    assert "remove" not in str(raised.value)


def test_what_a_killed_process_left_half_written_is_no_content(run):
    folder = Path(run["output_dir"])
    folder.mkdir()
    for name in (".recipe.yaml.123.writing", ".report.html.4.writing"):
        (folder / name).touch()
    train({**run, "max_steps": 1})
    assert [path.name for path in folder.glob("*.writing")] == [".report.html.4.writing"]  # another may write that one


def test_two_processes_do_not_share_a_folder(run):
    long = {**run, "max_steps": 100_000, "save_steps": None}
    process = FORK.Process(target=train, args=(long,))
    process.start()
    try:
        lock = Path(run["output_dir"]) / ".lock"
        for _ in range(100):
            if lock.exists():
                break
            time.sleep(0.05)
        time.sleep(0.2)
        with pytest.raises(RecipeError, match="another run"):
            train(run)
    finally:
        process.kill()
        process.join()

"""Metrics of a run as they are written down."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.failing import failing
from tightfit.errors import CheckpointError, MissingLibrary, RecipeError
from tightfit.training.metrics_log import MetricsLog
from tightfit.training.session import Session
from tightfit.training.trainer import Trainer


def test_trackers_are_told_what_the_file_holds(tiny):
    read = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    Trainer(recipe={**tiny, "report_to": "tensorboard"}).train()
    events = (Path(tiny["output_dir"]) / "trackers").rglob("events.out.tfevents*")
    found = {name for file in events for name in read(str(file)).Reload().Tags()["scalars"]}
    assert {"train/loss", "train/grad_norm", "train/learning_rate", "train/peak_memory", "eval/loss", "eval/accuracy",
            "eval/perplexity"} <= found


@pytest.mark.parametrize(("tracker", "error", "said"), [
    ("wandb", MissingLibrary, "report_to=wandb needs the library wandb, which is not installed; run: pip install"),
    ("tensorbored", RecipeError, "report_to: 'tensorbored' is not known; did you mean 'tensorboard'?"),
])
def test_a_tracker_that_is_not_there_is_noticed_before_data_is_prepared(tiny, monkeypatch, tracker, error, said):
    tracking = import_module("accelerate.tracking")
    monkeypatch.setattr(tracking, "_available_trackers", [])
    monkeypatch.setattr(Session, "prepare", lambda *arguments: pytest.fail("data was prepared"))
    with pytest.raises(error) as raised:
        Trainer(recipe={**tiny, "report_to": tracker}).train()
    assert str(raised.value).startswith(said)
    assert not Path(tiny["output_dir"]).exists()


def test_a_full_disk_is_said_with_what_to_do(tiny, monkeypatch):
    monkeypatch.setattr(MetricsLog, "write", failing(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"No space left on device\. Free some space, or write output_dir="):
        Trainer(recipe=tiny).train()

"""Metrics of a run as they are written down."""

from __future__ import annotations

import errno
import os
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


@pytest.mark.parametrize(("number", "advice"), [
    (errno.ENOSPC, "No space left on device; free some space, or write output_dir="),
    (errno.EFBIG, "File too large; allow larger files by: ulimit -f unlimited"),
    (errno.EMFILE, "Too many open files; allow more open files by: ulimit -n 1024"),
])
def test_a_limit_of_the_system_is_said_with_what_to_do(tiny, monkeypatch, number, advice):
    monkeypatch.setattr(MetricsLog, "write", failing(OSError(number, os.strerror(number))))
    with pytest.raises(CheckpointError, match=advice):
        Trainer(recipe=tiny).train()

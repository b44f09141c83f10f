"""Metrics of a run as they are written down."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tightfit.training.trainer import Trainer


def test_trackers_are_told_what_the_file_holds(tiny):
    read = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    Trainer(recipe={**tiny, "report_to": "tensorboard"}).train()
    events = (Path(tiny["output_dir"]) / "trackers").rglob("events.out.tfevents*")
    found = {name for file in events for name in read(str(file)).Reload().Tags()["scalars"]}
    assert {"loss", "grad_norm", "learning_rate", "num_input_tokens_seen", "peak_memory", "eval_accuracy",
            "eval_perplexity"} <= found

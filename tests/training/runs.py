"""Runs that are killed and go on: shared by the forked and the cold tests."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tightfit.training.listeners import Listener
from tightfit.training.trainer import Trainer


class Said(Listener):
    """What a run says."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


class StopAt(Listener):
    """Has a run stopped at a step, by a signal."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def train(values: dict[str, Any]) -> None:
    """One run in this process, on one thread so that sums have one order."""
    torch.set_num_threads(1)
    Trainer(recipe=values).train()


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    """The finished model's tensors, or its adapter's."""
    (written,) = (run / "model").glob("*model.safetensors")
    return load_file(written)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two finished runs hold the same bits."""
    a, b = final_weights(one), final_weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged_losses(run: Path) -> dict[int, float]:
    """Loss by step, from metrics.jsonl."""
    return {line["step"]: line["loss"] for line in logged(run) if "loss" in line}

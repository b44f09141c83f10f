"""The PyTorch backend: the device, the build, the step, the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import nn

from tightfit.backends.base import Measurement
from tightfit.backends.pytorch.assembly import assemble
from tightfit.backends.pytorch.batch import TensorWindow
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.measuring.measure import measure
from tightfit.backends.pytorch.memory import memory_guard
from tightfit.backends.pytorch.predicting.inference import predict_inference
from tightfit.backends.pytorch.predicting.predict import predict
from tightfit.backends.pytorch.predicting.unseen import unseen
from tightfit.backends.pytorch.step import Step
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.recipe import Recipe
from tightfit.trace import Trace, Unseen


class PytorchBackend:
    """Trains with PyTorch. See `backends.base.Backend` for what each method promises."""

    def device(self, recipe: Recipe) -> Device:
        cuda = torch.cuda.is_available()
        if recipe.device == "cuda" and not cuda:
            raise Refused("device: 'cuda' was asked for, and torch finds no CUDA device; write device=cpu")
        if cuda and recipe.device != "cpu":
            properties = torch.cuda.get_device_properties(0)
            return Device(
                kind="cuda",
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=(properties.major, properties.minor),
                units=properties.multi_processor_count,
                uuid=f"GPU-{properties.uuid}",
            )
        return Device(
            kind="cpu", name="CPU", memory_bytes=psutil.virtual_memory().total, units=torch.get_num_threads()
        )

    def build(self, recipe: Recipe, device: Device, model: nn.Module | None = None) -> Build:
        with memory_guard(lambda: "building the model"):
            return assemble(recipe, device, torch.device(device.kind), model)

    def step(self, build: Build) -> Step:
        return Step(build)

    def predict(self, recipe: Recipe, device: Device, model: nn.Module | None = None) -> Trace:
        return (predict if recipe.mode == "train" else predict_inference)(recipe, device, model)

    def measure(
        self, step: Step, windows: Iterator[TensorWindow], chrome_trace: Path | None = None
    ) -> Measurement:
        return measure(step, windows, chrome_trace=chrome_trace)

    def unseen(self, recipe: Recipe, device: Device, trace: Trace) -> list[Unseen]:
        return unseen(recipe, device, trace)

"""Windows prepared ahead of the step: torch's DataLoader over window indices.

A window is a pure function of its index, so resuming is starting at the next index, exact with any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.utils.data import DataLoader, Dataset

from tightfit.backends.base import WindowSource
from tightfit.backends.pytorch.batch import TensorWindow, tensor_window
from tightfit.backends.pytorch.build import Build
from tightfit.techniques.loading import Loading


class _Windows(Dataset[TensorWindow]):
    def __init__(self, source: WindowSource) -> None:
        self.source = source

    def __getitem__(self, index: int) -> TensorWindow:
        return tensor_window(self.source.window(index))


def loading(technique: Loading, build: Build) -> Build:
    def windows(source: WindowSource, start: int, stop: int) -> Iterator[TensorWindow]:
        workers = technique.workers
        assert workers != "auto", "resolve the recipe first"
        loader = DataLoader(
            _Windows(source),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            prefetch_factor=technique.prefetch if workers else None,
            pin_memory=technique.pin_memory and build.torch_device.type == "cuda",
            generator=torch.Generator(),  # its own, so that starting workers draws nothing from the run's stream
        )
        return iter(loader)

    return replace(build, windows=windows)

"""The JAX backend: the device, the build, the step. What predicts and what measures is loaded when it is called."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
import psutil

from tightfit.backends.jax.assembly import assemble, find_network, unserved
from tightfit.backends.jax.build import Build
from tightfit.backends.jax.step import Step
from tightfit.backends.measurements import ModelSize, Timings
from tightfit.backends.world import ALONE, World
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.models import read_config
from tightfit.recipe import Recipe
from tightfit.system import host_memory
from tightfit.trace import Trace, UntracedMemory

if TYPE_CHECKING:
    from tightfit.backends.jax.compiled.step_profiler import StepProfiler

DRIVER = "libcuda.so.1"
"""NVIDIA's driver, as a library."""


class JaxBackend:
    """Training with JAX. See `backends.base.Backend` for what each method promises."""

    def device(self, recipe: Recipe) -> Device:
        found = jax_devices(recipe)[0]
        if found.platform == "cpu":
            return Device(kind="cpu", name="CPU", memory_bytes=host_memory().total,
                          units=psutil.cpu_count(logical=False) or 1)
        major, minor = str(found.compute_capability).split(".")
        limit = (found.memory_stats() or {}).get("bytes_limit", 0)
        return Device(kind="cuda", name=found.device_kind, memory_bytes=limit, capability=(int(major), int(minor)),
                      units=found.core_count)

    def limit_memory(self, recipe: Recipe, memory_bytes: int) -> Device:
        raise Refused("gpu-memory: JAX takes its share of a GPU's memory as it starts; set "
                      "XLA_PYTHON_CLIENT_MEM_FRACTION and leave this out")

    def absences(self, recipe: Recipe) -> list[str]:
        return unserved(recipe)

    def build(self, recipe: Recipe, device: Device, model: Any = None, config: Any = None) -> Build:
        return assemble(recipe, device, jax_devices(recipe), model, config)

    def step(self, build: Build) -> Step:
        return Step(build)

    def predict(self, recipe: Recipe, device: Device, model: Any = None) -> Trace:
        from tightfit.backends.jax.compiled.predict import predict

        return predict(recipe, device)

    def model_size(self, recipe: Recipe, config: Any = None) -> ModelSize:
        from tightfit.backends.pytorch.model_size import model_size  # whose modules have the same shapes

        find_network(recipe, read_config(recipe) if config is None else config)
        return model_size(recipe, config)

    def world(self, recipe: Recipe) -> AbstractContextManager[World]:
        return nullcontext(ALONE)

    def step_profiler(self, step: Step) -> StepProfiler:
        from tightfit.backends.jax.compiled.step_profiler import StepProfiler

        return StepProfiler(step)

    def time(self, step: Step, global_batches: Iterator[Any], warm_up: int, steps: int) -> Timings:
        """Each step is timed from the end of the one before, with its wait for data; memory on a processor is XLA's
        plan."""
        seconds, losses = list[float](), list[float]()
        for _ in range(warm_up + steps + 1):
            begun = time.perf_counter()
            losses.append(step(next(global_batches), step.build.recipe.learning_rate).read().loss.mean)
            seconds.append(time.perf_counter() - begun)
        peak = step.peak_memory() if step.build.device.kind == "cuda" else step.planned_memory()
        return Timings(seconds=tuple(seconds[warm_up:-1]), losses=tuple(losses), peak_allocated=peak,
                       peak_reserved=peak)

    def untraced(self, recipe: Recipe, device: Device, trace: Trace) -> list[UntracedMemory]:
        from tightfit.backends.jax.compiled.predict import untraced

        return untraced(device)


def jax_devices(recipe: Recipe) -> tuple[Any, ...]:
    """The devices that the recipe runs on. Raises Refused where there is no such device."""
    logger = logging.getLogger("jax._src.xla_bridge")
    level = logger.level
    try:
        ctypes.CDLL(DRIVER)
    except OSError:  # keep off the screen that a CUDA plug-in finds no driver
        logger.setLevel(logging.CRITICAL)
    try:
        found = jax.devices("cpu" if recipe.device == "cpu" else None)
    finally:
        logger.setLevel(level)
    if recipe.device == "cuda" and found[0].platform != "gpu":
        raise Refused("device: 'cuda' was asked for, and JAX finds no CUDA device; run: pip install "
                      "'tightfit[jax-cuda]', or write device=cpu")
    if found[0].platform not in ("gpu", "cpu"):
        found = jax.devices("cpu")
    return tuple(found if recipe.parallel.every_device else found[:1])

"""One step compiled for a GPU that need not be present: `python -m tightfit.backends.jax.compiled.worker DUMP TRACE`,
with the recipe and the device as JSON on standard input.

In a process of its own: what XLA does not like ends it, and its caller only reads that. Once XLA has planned the step's
memory all is known, and the process ends; the kernels themselves, most of a compilation, are never needed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from tightfit.backends.jax.assembly import assemble
from tightfit.backends.jax.compiled.predict import CUDNN_VERSION, target_description
from tightfit.backends.jax.compiled.trace import memory_is_planned, read_step, trace_of
from tightfit.backends.jax.update import lower_step
from tightfit.devices import Device
from tightfit.errors import TightfitError, one_line
from tightfit.recipe import Recipe
from tightfit.trace.file import TRACE_FILE

LOOK_EVERY = 0.05
"""Seconds between looks at what XLA has written."""
CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
"""A private module of jax 0.10 and 0.11; where its functions are gone, JAX's own refusal stands."""


def main(dump: Path, trace: Path) -> None:
    """Compile the step, and write its trace; or print why there is none. XLA_FLAGS say that it dumps into `dump`."""
    job = json.load(sys.stdin)
    device = Device(**{**job["device"], "capability": tuple(job["device"]["capability"])})
    try:
        _plan_memory(*lowered_for(Recipe.from_dict(job["recipe"]), device), dump)
        TRACE_FILE.save(trace_of(read_step(dump, "gpu")), trace)
    except Exception as error:  # JAX and XLA raise what they like for what they cannot do
        ours = isinstance(error, TightfitError)
        text = str(error) if ours else f"model: XLA cannot compile this step for {device.name}: {one_line(error)}"
        print(json.dumps({"kind": type(error).__name__ if ours else "ModelError", "text": text}))


def lowered_for(recipe: Recipe, device: Device) -> tuple[jax.stages.Lowered, dict[str, Any]]:
    """The real step of a resolved recipe, lowered for a GPU, and the options to compile it with."""
    described = target_description(device)
    topology = topologies.get_topology_desc(platform="cuda", target_config=described, topology="1x1x1")
    build = assemble(recipe, device, (topology.devices[0],))
    _simulate_cudnn(device)
    return lower_step(build), build.compiler_options


def _plan_memory(lowered: jax.stages.Lowered, options: dict[str, Any], dump: Path) -> None:
    """Compile until the step's memory is planned. Raises what the compiler raises."""
    compiling = ThreadPoolExecutor(1).submit(lowered.compile, compiler_options=options)
    while not memory_is_planned(dump):
        if compiling.done():
            compiling.result()
            return
        time.sleep(LOOK_EVERY)


def _simulate_cudnn(device: Device) -> None:
    """Let JAX's attention by cuDNN be lowered for `device`, a CUDA device that is not there, in this process.

    While it traces, JAX asks the cuDNN at hand for its version and the GPU at hand for its capability. Those questions
    are answered for `device`; XLA calls no cuDNN to plan memory.
    """
    own = device.capability or (0, 0)
    major, minor, patch = CUDNN_VERSION
    answers: dict[str, Callable[..., object]] = {
        "check_cudnn_version": lambda: 10_000 * major + 100 * minor + patch,
        "check_compute_capability": lambda capability: own >= tuple(map(int, capability.split("."))),
        "is_cuda_compute_capability_equal": lambda capability: own == tuple(map(int, capability.split("."))),
    }
    with suppress(ImportError):
        asked = importlib.import_module(CUDNN)
        for name in answers.keys() & vars(asked).keys():
            setattr(asked, name, answers[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # the compiler's threads would go on

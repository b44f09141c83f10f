"""Prediction of a step on a GPU that need not be present: XLA compiles it in a process of its own; its plan is cached.

XLA's own description files (openxla/xla, xla/backends/gpu/target_config/specs) are the guide to the fields of a GPU's
description. What a generation has in common is here, from the CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability"; the rest is the device's own. The memory size matters most: XLA recomputes what would not fit.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tightfit import errors
from tightfit.backends import cuda_context
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, ModelError, Refused, ReportError, last_words
from tightfit.models import read_config
from tightfit.recipe import Recipe
from tightfit.system import expanded, installed, version_of
from tightfit.trace import Trace, UntracedMemory
from tightfit.trace.file import TRACE_FILE

WORKER = "tightfit.backends.jax.compiled.worker"
PLUGINS = ("xla_cuda12", "xla_cuda13")
"""JAX's plugins that hold the compiler for NVIDIA's GPUs, as modules of `jax_plugins`."""
LIBRARIES = ("jax", "jaxlib", "optax", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
INDIFFERENT = frozenset({
    "output_dir", "cache_dir", "report_to", "logging_steps", "eval_steps", "eval_samples", "save_steps",
    "save_total_limit", "resume", "profile_step", "sample_prompt", "hugging_face", "seed", "max_steps", "warmup_steps",
    "num_train_epochs", "lr_scheduler_type", "lr_scheduler_kwargs", "learning_rate", "allow_numerics", "device",
    "tokenizer", "loading", "compile", "pretrained",
})  # fmt: skip
"""Fields that change nothing of a compiled step."""
COMPILE_SECONDS = 900.0
"""Seconds that one compilation may take."""
JAX_SHARE = 0.75
"""The share of a GPU's memory that JAX takes as it starts, by default (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
KIB = 1024
CUDNN_VERSION = (9, 10, 0)
"""The cuDNN that XLA compiles for: the one that XLA's own descriptions of newer cards have."""


class Generation(NamedTuple):
    """One streaming multiprocessor. shared_kib: its shared memory, of which a block may have `block_kib`. lanes: fp32
    units."""

    shared_kib: int
    block_kib: int
    lanes: int


GENERATIONS = {
    (7, 0): Generation(96, 96, 64), (7, 5): Generation(64, 64, 64), (8, 0): Generation(164, 163, 64),
    (8, 6): Generation(100, 99, 128), (8, 9): Generation(100, 99, 128), (9, 0): Generation(228, 227, 128),
    (10, 0): Generation(228, 227, 128), (12, 0): Generation(100, 99, 128),
}  # fmt: skip
ACCELERATED = {(9, 0), (10, 0)}
"""Capabilities for which XLA compiles with the features that no later generation keeps, such as sm_90a."""


def predict(recipe: Recipe, device: Device) -> Trace:
    """The trace of a resolved recipe's step on a device.

    Raises Refused and ModelError as building it does, ModelError where XLA cannot compile it, and MissingLibrary where
    the compiler for GPUs is not installed.
    """
    if device.kind == "cpu":
        raise Refused("backend: jax is planned for GPUs alone, since XLA's own figures for a processor mislead; write "
                      "backend=pytorch, or for a plan --gpu with a name, such as rtx-a5000")
    trace = _cached(recipe, device)
    trace.untraced = [*untraced(device), *trace.untraced]
    trace.notes = [*trace.notes, *_notes(trace, device)]
    return trace


def untraced(device: Device) -> list[UntracedMemory]:
    """Memory of a step besides what XLA plans: what PyTorch's context and kernels are assumed to take."""
    return [] if device.kind == "cpu" else cuda_context.assumed(device)


def _cached(recipe: Recipe, device: Device) -> Trace:
    """The trace that is in the cache, or else one that is made and put there."""
    folder = expanded(recipe.cache_dir) / "compiled"
    path = folder / f"{_digest(recipe, device)}.json.gz"
    if path.exists():
        try:
            return TRACE_FILE.load(path)
        except ReportError:  # damaged: made anew
            path.unlink(missing_ok=True)
    if not any(find_spec(f"jax_plugins.{name}") for name in PLUGINS if find_spec("jax_plugins")):
        version = version_of("jax")
        install = f"pip install jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
        raise MissingLibrary("jax-cuda12-plugin", "compiling for a GPU", install)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as dump:
            _compile(recipe, device, Path(dump), path)
            return TRACE_FILE.load(path)
    except OSError as error:
        raise Refused(f"cache_dir: {folder} cannot be written ({error.strerror or error}); write cache_dir=<a folder "
                      "with room>") from None


def _compile(recipe: Recipe, device: Device, dump: Path, trace: Path) -> None:
    """Compile in a process of its own, which writes the trace's file."""
    quoted = json.dumps(str(dump), ensure_ascii=False)  # for a space in it
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={quoted}".strip()
    # Even where there is a GPU, nothing of it is asked: another may be planned for, and this one may be at work.
    alone = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": flags}
    job = json.dumps({"recipe": recipe.to_dict(), "device": asdict(device)})
    try:
        done = subprocess.run([sys.executable, "-m", WORKER, str(dump), str(trace)], input=job, env=alone,
                              capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"model: XLA took more than {COMPILE_SECONDS:.0f} seconds to compile a step of it; write "
                         "backend.layers=scanned") from None
    if trace.exists():
        return
    if done.stdout.startswith("{"):
        failure = json.loads(done.stdout)
        raise getattr(errors, failure["kind"], ModelError)(failure["text"])
    raise ModelError(f"model: XLA cannot compile this step for {device.name}: {last_words(done.stderr)}")


def _digest(recipe: Recipe, device: Device) -> str:
    """The cache's key: all that decides a compilation, this backend's own source included."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(path.read_bytes())
    parts = {
        "recipe": {name: value for name, value in recipe.to_dict().items() if name not in INDIFFERENT},
        "model": repr(read_config(recipe)), "target": target_description(device), "versions": installed(LIBRARIES),
        "flags": os.environ.get("XLA_FLAGS", ""), "source": source.hexdigest(),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def target_description(device: Device) -> str:
    """The device as text of XLA's GpuTargetConfigProto. Raises Refused for one whose figures are not known."""
    own = GENERATIONS.get(device.capability or (0, 0))
    fp32 = device.flops.get("fp32", 0.0)
    if own is None or not (device.units and device.bandwidth and device.l2_bytes and fp32):
        raise Refused(f"gpu: XLA cannot compile for {device.name}, whose figures are not known; write --gpu with one "
                      "that tightfit gpus lists, or backend=pytorch")
    major, minor = device.capability or (0, 0)
    clock = fp32 / (2 * own.lanes * device.units) / 1e9  # a lane multiplies and adds in a cycle
    extension = "ACCELERATED_FEATURES" if (major, minor) in ACCELERATED else "NONE"
    fields = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": device.resident_threads,
        "shared_memory_per_block": 48 * KIB, "shared_memory_per_core": own.shared_kib * KIB,
        "shared_memory_per_block_optin": own.block_kib * KIB,
        "core_count": device.units, "fpus_per_core": own.lanes, "clock_rate_ghz": f"{clock:.3f}",
        "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64,
        "registers_per_core_limit": 64 * KIB, "registers_per_block_limit": 64 * KIB,
        "memory_bandwidth": round(device.bandwidth), "device_memory_size": device.memory_bytes,
        "l2_cache_size": device.l2_bytes, "dnn_version": '"{}.{}.{}"'.format(*CUDNN_VERSION),
    }  # fmt: skip
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    return "\n".join([
        "gpu_device_info {", *lines,
        f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}", "}",
        'platform_name: "CUDA"',
        "dnn_version_info {{ major: {} minor: {} patch: {} }}".format(*CUDNN_VERSION),
        f'device_description_str: "{device.name}"', "",
    ])  # fmt: skip


def _notes(trace: Trace, device: Device) -> Iterator[str]:
    yield ("memory is what XLA plans for this very step; its time is a rough sum over the kernels that it makes, of "
           "products by the data sheet's peak and of bytes by its bandwidth")
    needed = trace.peak()[1] / device.memory_bytes
    if needed > JAX_SHARE:
        yield (f"JAX takes {JAX_SHARE:.0%} of a GPU's memory as it starts, and this step needs {needed:.0%}: set "
               f"XLA_PYTHON_CLIENT_MEM_FRACTION={min(needed + 0.03, 0.98):.2f}")

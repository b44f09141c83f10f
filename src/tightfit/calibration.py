"""The calibration of the machine at hand: how fast its device really runs, measured once and kept.

A record holds what was measured, by whom it may be used (device, processor, threads, versions), and answers how long a
piece of work takes by interpolating between its points. Measuring is a backend's work.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter

from tightfit.errors import writing
from tightfit.files import write_atomically
from tightfit.system import expanded, version_of

Progress = Callable[[str, float], None]
"""Called with the name of the next measurement, and the share of the work that is done, 0 to 1."""

FOLDER = Path("~/.cache/tightfit/calibration")
FORMAT: Literal[1] = 1
"""Version of the file's layout; a file of another one is measured anew."""

SLUMP = 10  # times slower than a matmul with a side less: no device runs one so by itself
MATMULS_IN_OP = 16
"""Matmuls in an op, where they are measured many at a time."""


@dataclass(frozen=True)
class Curve:
    """Measured points, by size: `sizes` grow, and each has a value above 0. In between, straight on a log-log scale."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, size: float) -> float:
        """The value at a size; the nearest point's outside the measured range."""
        return float(np.exp(np.interp(math.log(max(size, 1.0)), np.log(self.sizes), np.log(self.values))))

    def beyond(self, size: float) -> float:
        """`at`, but growing in proportion to the size past the last point: for times."""
        return self.at(size) * max(size / self.sizes[-1], 1.0)


@dataclass(frozen=True)
class Grid:
    """Operations a second of matrix products (M, K) by (K, N), for M, N and K each of `sizes`: `rates[m][n][k]`."""

    sizes: tuple[int, ...]
    rates: tuple[tuple[tuple[float, ...], ...], ...]

    def rate(self, m: float, n: float, k: float) -> float:
        """Operations a second at that shape, linear between the logarithms of the eight points around it."""
        corners = self.corners(m, n, k)
        return math.exp(sum(share * math.log(self.rates[i][j][h]) for (i, j, h), share in corners))

    def corners(self, m: float, n: float, k: float) -> list[tuple[tuple[int, int, int], float]]:
        """The points around a shape, by their places in `sizes` for M, N and K, and the share of each; they sum to 1.
        """
        around = product(*(_neighbours(self.sizes, size) for size in (m, n, k)))
        return [((i, j, h), u * v * w) for (i, u), (j, v), (h, w) in around]


def _neighbours(sizes: Sequence[int], size: float) -> list[tuple[int, float]]:
    """The indices of the points below and above a size, and the share of each, on a log scale."""
    place = float(np.interp(math.log(max(size, 1.0)), np.log(sizes), range(len(sizes))))
    low, share = int(place), place % 1
    return [(low, 1 - share), (low + 1, share)] if share else [(low, 1.0)]


@dataclass(frozen=True, kw_only=True)
class CopyRates:
    """Bytes a second of large copies in one direction between the host's memory and a GPU's.

    alone: from or to page-locked memory, nothing else running. both_ways: while copies go the other way. pageable: from
    or to ordinary memory, alone.
    """

    alone: float
    both_ways: float
    pageable: float


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Copies between the host's memory and a GPU's."""

    to_device: CopyRates
    to_host: CopyRates


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured speeds of one device in one machine.

    device: the name that `devices.Device` has. processor: the host's. torch: PyTorch's version. threads: how many the
        CPU computed with; 0 for another device.
    matmuls: matrix products, by number format, such as `bfloat16`; `tf32` is float32 on the tensor cores.
        batched_matmuls: the same for many small ones in one op.
    attention: operations a second of fused attention against the sequence's length, by `forward` or `backward`, a
        space and the features of a head, then by number format; pairs that a causal kernel skips do not count.
    memory: seconds of ops that memory binds against the bytes they read and write, by family (`FAMILIES`), then by
        number format.
    host: the host's seconds for an op by phase: `forward`, `recompute`, `backward`, `optimizer`. On a CUDA device the
        whole time to issue an op's kernel; on the CPU what comes on top of the op itself.
    link: copies between the host's memory and the device's; None where there is nothing to copy, and where memory could
        not be page-locked.
    """

    device: str
    kind: Literal["cpu", "cuda"]
    processor: str
    torch: str
    threads: int = 0
    date: str = ""
    matmuls: Mapping[str, Grid] = field(default_factory=dict)
    batched_matmuls: Mapping[str, Grid] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)
    link: LinkRates | None = None

    def attention_rate(self, direction: str, dtype: str, length: float, head: float) -> float | None:
        """Operations a second of fused attention over so many positions with heads of so many features, in float32
        where the format was not measured; None where that was not either."""
        heads = {}
        for name, curves in self.attention.items():
            curve = curves.get(dtype) or curves.get("float32")
            if name.startswith(f"{direction} ") and curve is not None:
                heads[float(name.split()[1])] = curve.at(length)
        return Curve(tuple(sorted(heads)), tuple(heads[h] for h in sorted(heads))).at(head) if heads else None

    def memory_seconds(self, family: str, dtype: str, size: float) -> float | None:
        """Seconds for an op of a family that moves `size` bytes. Of the two 16-bit formats one stands for the other,
        and float32 for whatever was not measured; `add` for a family that was not. None where nothing was."""
        curves = self.memory.get(family) or self.memory.get("add") or {}
        other = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, "float32")
        curve = curves.get(dtype) or curves.get(other) or curves.get("float32")
        return None if curve is None else curve.beyond(size)

    @property
    def disturbed(self) -> str:
        """A sentence where something else seems to have kept the device busy: a matmul ran at less than a SLUMP-th of
        the rate of one with a side less. Empty otherwise."""
        for name, grid in self.matmuls.items():
            rates = np.log(grid.rates)
            if min(np.diff(rates, axis=side).min(initial=0.0) for side in range(3)) < -math.log(SLUMP):
                return (f"a {name} matmul ran at less than a {SLUMP}th of the speed of a smaller one: something else "
                        "keeps the device busy")
        return ""


FAMILIES: dict[str, tuple[str, ...]] = {
    "add": (),
    "add_": ("add_", "mul_", "sub_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "neg_", "clamp_"),
    "sqrt": ("sqrt", "rsqrt", "div", "reciprocal"),
    "tanh": ("tanh", "tan", "sinh"),
    "gelu": ("gelu", "gelu_backward"),
    "silu": ("silu", "silu_backward", "sigmoid", "mish", "hardswish", "softplus"),
    "where": ("where", "masked_fill", "masked_fill_", "threshold_backward"),
    "_softmax": ("_softmax", "softmax", "_softmax_backward_data", "_log_softmax", "log_softmax", "logsumexp",
                 "_log_softmax_backward_data"),
    "_safe_softmax": ("_safe_softmax",),
    "native_layer_norm": tuple(f"{name}{backward}" for name in (
        "native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm"
    ) for backward in ("", "_backward")),
    "sum": ("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "argmax", "any", "all", "prod"),
    "zeros": ("zeros", "zeros_like", "new_zeros", "zero_", "fill", "fill_", "full", "full_like", "ones", "ones_like",
              "new_ones", "nll_loss_backward", "slice_backward", "select_backward", "arange", "_foreach_zero_"),
    "embedding": ("embedding", "index", "index_select", "gather", "nll_loss_forward", "embedding_dense_backward",
                  "index_put_", "index_put", "index_add_", "scatter", "scatter_add", "scatter_add_", "scatter_"),
    "bernoulli_": ("bernoulli_", "native_dropout", "bernoulli", "uniform_", "normal_", "rand", "randn", "rand_like",
                   "randn_like", "randint"),
    "_foreach_mul_": ("_foreach_mul_", "_foreach_add_", "_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_",
                      "_foreach_sqrt", "_foreach_div_", "_foreach_mul", "_foreach_add", "_foreach_copy_"),
    "_fused_adamw_": ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_"),
}  # fmt: skip
"""The ops that are measured for others that take about as long for their bytes, by name without namespace and overload.
Whatever is nowhere here counts as `add`."""

FAMILY_OF: dict[str, str] = {name: family for family, names in FAMILIES.items() for name in names}


def family_of(op: str) -> str:
    """The family of an op by its name, with namespace and overload or without."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else op
    return FAMILY_OF.get(name, "add_" if name.endswith("_") and not name.startswith("_") else "add")


@dataclass(frozen=True)
class _Record:
    """The file's content."""

    format: Literal[1]
    calibration: Calibration


@cache
def _record() -> TypeAdapter[_Record]:
    return TypeAdapter(_Record)


def save(calibration: Calibration, folder: Path = FOLDER) -> Path:
    """Write the record into `folder`, whole or not at all. Raises ReportError where it cannot be written."""
    path = expanded(folder) / _file_name(calibration.device, calibration.threads)
    with writing(f"{path.parent}: the calibration", "make it writable, or set XDG_CACHE_HOME to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _record().dump_json(_Record(format=FORMAT, calibration=calibration)).decode())
    return path


def load(device: str, folder: Path = FOLDER, *, threads: int = 0) -> Calibration | None:
    """The record of that device on this machine; None where there is none, or it was measured with another processor,
    another PyTorch, or another number of threads, or its file is damaged.

    threads: how many the CPU computes with; 0 for another device.
    """
    try:
        found = _record().validate_json((expanded(folder) / _file_name(device, threads)).read_bytes()).calibration
    except (OSError, ValueError):  # ValueError: no record, or one of another layout
        return None
    here = (device, processor(), torch_version(), threads)
    return found if (found.device, found.processor, found.torch, found.threads) == here else None


def processor() -> str:
    """The host's processor, as its system names it, and its number of cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1].strip() if found else name
    return f"{name}, {os.cpu_count()} cores"


def torch_version() -> str:
    """The installed PyTorch's version, without loading it; empty where it is not installed."""
    return (version_of("torch") or "").partition("+")[0]


def _file_name(device: str, threads: int) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{name}-{threads}-threads.json" if threads else f"{name}.json"

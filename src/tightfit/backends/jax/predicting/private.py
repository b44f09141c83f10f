"""Private functions of jax 0.10 and 0.11, all of them that are used; where they are gone, JAX's own refusal stands."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tightfit.backends.jax.predicting.target import DNN
from tightfit.devices import Device

CUDNN = "jax._src.cudnn.fused_attention_stablehlo"


@contextmanager
def simulated_cudnn(device: Device) -> Iterator[None]:
    """JAX's attention by cuDNN can be lowered for `device`, a CUDA device that is not there.

    While it traces, JAX asks the cuDNN at hand for its version and the GPU at hand for its capability. Those questions
    are answered for `device`; XLA calls no cuDNN to plan memory.
    """
    own = device.capability or (0, 0)
    major, minor, patch = DNN
    answers: dict[str, Callable[..., object]] = {
        "check_cudnn_version": lambda: 10_000 * major + 100 * minor + patch,
        "check_compute_capability": lambda capability: own >= tuple(map(int, capability.split("."))),
        "is_cuda_compute_capability_equal": lambda capability: own == tuple(map(int, capability.split("."))),
    }
    try:
        asked = importlib.import_module(CUDNN)
    except ImportError:
        asked = None
    before = {name: getattr(asked, name) for name in answers if hasattr(asked, name)}
    for name in before:
        setattr(asked, name, answers[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(asked, name, function)

"""JAX's attention by cuDNN, lowered for a GPU that is not there.

While it traces, JAX asks the cuDNN at hand for its version and the GPU at hand for its capability, and refuses where
there is neither. Those two questions are answered here for the GPU that is compiled for; XLA itself calls no cuDNN to
plan memory. Private functions of jax 0.10 and 0.11; where they are gone, JAX's own refusal stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jax._src.cudnn import fused_attention_stablehlo as fused

from tightfit.backends.jax.predicting.target import DNN
from tightfit.devices import Device

VERSION, CAPABLE, EQUAL = "check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"


@contextmanager
def cudnn_as_on(device: Device) -> Iterator[None]:
    """What JAX asks about cuDNN is answered for `device`, a CUDA device."""
    own = device.capability or (0, 0)
    major, minor, patch = DNN
    answers: dict[str, Callable[..., object]] = {
        VERSION: lambda: 10_000 * major + 100 * minor + patch,
        CAPABLE: lambda capability: own >= tuple(map(int, capability.split("."))),
        EQUAL: lambda capability: own == tuple(map(int, capability.split("."))),
    }
    before = {name: getattr(fused, name) for name in answers if hasattr(fused, name)}
    for name in before:
        setattr(fused, name, answers[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(fused, name, function)

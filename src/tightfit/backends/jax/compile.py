"""torch.compile has no counterpart to choose here: XLA compiles every step whole."""

from __future__ import annotations

from tightfit.backends.jax.build import Build
from tightfit.techniques.compile import NoCompile


def no_compile(technique: NoCompile, build: Build) -> Build:
    return build

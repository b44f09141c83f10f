"""How layers follow one another: as the modules they are."""

from __future__ import annotations

from tightfit.backends.pytorch.build import Build
from tightfit.techniques.layers import Unrolled


def unrolled(technique: Unrolled, build: Build) -> Build:
    return build

"""Offloading, as a technique."""

from __future__ import annotations

from dataclasses import replace

from tightfit.backends.pytorch.build import Build, HostShare
from tightfit.techniques.offload import Host


def host(technique: Host, build: Build) -> Build:
    share = HostShare(weights=technique.weights, gradients=technique.gradients, optimizer=technique.optimizer,
                      activations=technique.activations)
    return replace(build, host_share=share, calls_blocks=True)

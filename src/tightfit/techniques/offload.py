"""Offloading: what waits in the host's memory while the device does not need it."""

from __future__ import annotations

from typing import ClassVar

from tightfit.techniques.base import Technique, technique


class Offload(Technique):
    slot: ClassVar[str] = "offload"
    may_be_auto: ClassVar[bool] = False


@technique
class NoOffload(Offload):
    """Keep weights, gradients, optimizer states and activations on the device."""

    name: ClassVar[str] = "none"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"

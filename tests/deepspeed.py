"""What the tests of DeepSpeed's ZeRO share."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None,
                                     reason="DeepSpeed is not installed: pip install 'tightfit[deepspeed]'")
needs_async_io = pytest.mark.skipif(
    shutil.which("g++") is None or not Path("/usr/include/libaio.h").exists(),
    reason="DeepSpeed's async_io is compiled with g++ and libaio's headers: apt-get install g++ libaio-dev")
STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
    "stage 2 offloaded": {"stage": 2, "offload": "cpu"}, "stage 3 offloaded": {"stage": 3, "offload": "cpu"},
}  # fmt: skip
each_stage = pytest.mark.parametrize("knobs", STAGES.values(), ids=STAGES)


def zero(knobs: dict[str, Any]) -> dict[str, Any]:
    """ZeRO with those knobs, as a recipe names it."""
    return {"name": "zero", **knobs}

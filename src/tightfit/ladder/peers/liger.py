"""The Hugging Face Trainer with Liger's kernels in the model."""

from __future__ import annotations

import importlib.util
from importlib import import_module

from tightfit.backends.base import Timings
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, Refused
from tightfit.ladder.peers import hf_trainer
from tightfit.models import read_config
from tightfit.recipe import Recipe


def run(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """Take the recipe's steps with the Trainer's `use_liger_kernel`. Raises Refused, MissingLibrary, OutOfMemory."""
    if device.kind == "cpu":
        raise Refused("device: Liger's kernels are written in Triton, which needs a GPU; run this peer on one")
    if importlib.util.find_spec("liger_kernel") is None:
        raise MissingLibrary("liger-kernel", "the peer liger", "liger-kernel")
    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = getattr(read_config(recipe), "model_type", recipe.model)
    if kind not in known:
        raise Refused(f"model: Liger has no kernels for models of type {kind}; choose a Llama, Qwen, Gemma or such")
    return hf_trainer.run(recipe, device, warm_up, steps, use_liger_kernel=True)

"""AdamW's fused kernel of NVIDIA's Apex, which updates many tensors in a launch."""

from __future__ import annotations

import importlib
from typing import Any

from torch.optim import Optimizer

from tightfit.errors import Refused


def load_fused_adam() -> Any:
    """Apex's class of it. Raises Refused where it is not there."""
    try:
        return importlib.import_module("apex.optimizers").FusedAdam
    except (ImportError, AttributeError):
        raise Refused("optimizer.implementation: apex needs NVIDIA's Apex, which is not installed (pip's package of "
                      "that name is another one); build it from github.com/NVIDIA/apex, or write "
                      "optimizer.implementation=fused") from None


def fused_adam(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """Apex's optimizer, of which each parameter's state has the count of steps that Apex keeps by group: a checkpoint
    holds the states."""
    optimizer: Optimizer = load_fused_adam()(groups, adam_w_mode=True, **options)
    optimizer.register_step_pre_hook(_count_by_group)
    optimizer.register_step_post_hook(_count_by_state)
    return optimizer


def _count_by_group(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["step"] = max((optimizer.state[parameter].get("step", 0) for parameter in group["params"]
                             if parameter in optimizer.state), default=0)


def _count_by_state(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                optimizer.state[parameter]["step"] = group["step"]

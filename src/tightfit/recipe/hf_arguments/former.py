"""Arguments of transformers 3 and 4 that today's TrainingArguments do not have, read as today's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.errors import RecipeError
from tightfit.recipe.hf_arguments.table import ASIDE, DEFAULTS

RENAMED: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size", "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
"""Names that are read as today's."""

SAME_AS_NONE: Mapping[str, tuple[Any, ...]] = {
    "local_rank": (0,), "include_num_input_tokens_seen": (False,), "include_for_metrics": (None,),
}
"""Values that said then what the default says today."""

FSDP_DEFAULT = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
DROPPED = ("push_to_hub_token", "_n_gpu")
"""A secret, which `to_dict` hides, and what a machine happened to have."""


def as_today(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with older ones in today's names, those that have none and say nothing left out. Raises RecipeError
    for an older and a newer name that contradict each other."""
    found = dict(given)
    for old, new in RENAMED.items():
        value = found.pop(old, None)
        if value is None or (value == DEFAULTS[new] and new in found):  # a dump holds both, the older at its default
            continue
        if found.get(new, DEFAULTS[new]) not in (DEFAULTS[new], value):
            raise RecipeError(f"{old}: the older name of {new}, which is given too; keep {new}")
        found[new] = value
    if ratio := found.pop("warmup_ratio", None):  # steps stand above it
        found["warmup_steps"] = found.get("warmup_steps") or ratio
    if found.pop("group_by_length", False):
        raise RecipeError("group_by_length: true orders the data otherwise than at random; write false or leave it out")
    if found.pop("adafactor", False):
        found["optim"] = "adafactor"
    for name, values in SAME_AS_NONE.items():
        if name in found and found[name] in values and type(found[name]) is type(values[0]):
            del found[name]
    for name in [name for name in found if name in DROPPED or found[name] == ASIDE.get(name, found)]:
        del found[name]
    if found.get("fsdp_config") == FSDP_DEFAULT:
        del found["fsdp_config"]
    return found

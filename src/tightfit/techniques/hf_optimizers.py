"""Optimizers in Hugging Face's TrainingArguments: `optim`, `optim_args` and the arguments that hold knobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tightfit.errors import RecipeError

if TYPE_CHECKING:
    from tightfit.techniques.optimizer import Optimizer

KNOBS = {"weight_decay": ("weight_decay",), "betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}
"""The arguments that hold a knob's values."""

ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
"""Arguments that the Trainer gives every kind of Adam, with its defaults."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def write(optimizer: Optimizer, on_cpu: bool) -> dict[str, Any] | None:
    """The arguments that say an optimizer; None where the Trainer has none for it."""
    names = [name for name, meant in _names(type(optimizer), on_cpu).items()
             if all(getattr(optimizer, knob) in values for knob, values in meant.items())]  # fmt: skip
    if not names:
        return None
    written: dict[str, Any] = {"optim": names[0]}
    options = {option: getattr(optimizer, knob) for option, (knob, absent) in optimizer.hf_options.items()
               if getattr(optimizer, knob) != absent}  # fmt: skip
    if options:
        written["optim_args"] = ",".join(f"{option}={DTYPES.get(value, value)}" for option, value in options.items())
    for knob, arguments in KNOBS.items():
        value = getattr(optimizer, knob, None)
        if value is not None:
            written |= zip(arguments, value if isinstance(value, tuple) else (value,), strict=True)
    return written


def read(variant: type[Optimizer], a: Mapping[str, Any]) -> dict[str, Any] | None:
    """The knobs that complete arguments give a variant; None where `optim` names another.

    Raises RecipeError for an argument whose value it has no knob for.
    """
    names = _names(variant, a["use_cpu"])
    if a["optim"] not in names:
        return None
    knobs = {knob: a[given[0]] if len(given) == 1 else [a[name] for name in given]
             for knob, given in KNOBS.items() if hasattr(variant, knob)}  # fmt: skip
    taken = {name for knob in knobs for name in KNOBS[knob]}
    for name, default in ADAM.items():
        if variant.hf_adam and name not in taken and a[name] != default:
            raise RecipeError(f"{name}: {a[name]!r} is no knob of {variant.name}; write {default}")
    options = _options(a["optim_args"])
    for option, (knob, absent) in variant.hf_options.items():
        knobs[knob] = _value(option, options.pop(option)) if option in options else absent
    for option, text in options.items():
        if option not in variant.hf_ignored:
            raise RecipeError(f"optim_args: {option}={text} is no knob of a recipe's {variant.name}; leave it out")
    return {**{knob: values[0] for knob, values in names[a["optim"]].items()}, **knobs}


def _names(variant: type[Optimizer], on_cpu: bool) -> Mapping[str, Mapping[str, tuple[Any, ...]]]:
    return {**variant.hf_names, **(variant.hf_names_on_cpu if on_cpu else {})}


def _options(text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (text or "").replace(" ", "").split(",") if pair]
    if broken := [key for key, equals, _ in pairs if not equals]:
        raise RecipeError(f"optim_args: {broken[0]!r} has no value; write name=value, separated by commas")
    return {key: value for key, _, value in pairs}


def _value(option: str, text: str) -> str | float:
    if option.endswith("_dtype"):
        for value, dtype in DTYPES.items():
            if dtype == text:
                return value
        raise RecipeError(f"optim_args: {option}={text} is not in a recipe; write float32 or bfloat16")
    try:
        return float(text)
    except ValueError:
        raise RecipeError(f"optim_args: {option}={text} should be a number") from None

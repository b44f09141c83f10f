"""Dimensions that do not fill the tiles of a GPU's tensor cores, and what padding them gains.

The multiples are those of NVIDIA's Matrix Multiplication Background User's Guide (2023), "Tensor Core Requirements":
16 bytes of a row, and on the A100 128 bytes. A warning is given below the first; below the second only where a field
of the recipe can pad, for it is a matter of a few percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.model_facts import text_config
from tightfit.models import read_config
from tightfit.planning.timing.op_times import op_seconds
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.text import percent
from tightfit.trace import Op, Trace

INTERMEDIATE = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim")
"""Names that configurations have for the width of a feed-forward layer."""

WORTH_SAYING = 0.001
"""The predicted share of a step's time below which padding is not worth a word."""

Gain = Callable[[Recipe], float | None]
"""The share of a step's time that a changed recipe saves, predicted; None where it cannot be."""


@dataclass(frozen=True, kw_only=True)
class Misalignment:
    """A dimension that is not a multiple of what the device's tensor cores want.

    field: what it is called, such as `vocab_size`.
    value, multiple, padded: what it is, what it should be a multiple of, the next such size.
    change: what to write in the recipe, `key=value`; empty where the model's shape would have to be another.
    gain: predicted share of a step's time that padding saves, 0 to 1; None where it was not predicted.
    """

    field: str
    value: int
    multiple: int
    padded: int
    change: str
    gain: float | None

    @property
    def finding(self) -> str:
        """Sentence that names the misaligned dimension."""
        return f"{self.field} {self.value:,} is not a multiple of {self.multiple}, which tensor cores want"

    @property
    def sentence(self) -> str:
        """The finding, and what to write where a recipe field pads it."""
        if not self.change:
            return f"{self.finding}; it is part of the model's shape: {self.padded:,} would be, in a model of your own."
        if self.field == "seq_len":
            return f"{self.finding}; write {self.change}."
        saves = "" if self.gain is None else f", which is predicted to save {percent(self.gain)} of a step"
        return f"{self.finding}; write {self.change} ({self.padded:,}){saves}."


def dimensions(recipe: Recipe) -> dict[str, int]:
    """The dimensions that matrix products of the recipe's model have, as far as its configuration states them. Raises
    ModelError as `read_config` does."""
    text = text_config(read_config(recipe))

    def stated(*names: str) -> int:
        return next((n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), 0)

    vocabulary = stated("vocab_size") if TASKS[recipe.task].reads == "tokens" else 0
    hidden, heads = stated("hidden_size", "dim"), stated("num_attention_heads", "n_heads")
    found = {
        "vocab_size": _padded(vocabulary, recipe.pad_vocab_to or 1), "hidden_size": hidden,
        "intermediate_size": stated(*INTERMEDIATE),
        "head_dim": stated("head_dim", "d_kv") or (hidden // heads if heads else 0),
        "seq_len": _padded(recipe.seq_len, recipe.pad_sequence_to or 1) * (TASKS[recipe.task].reads == "tokens"),
    }  # fmt: skip
    return {field: value for field, value in found.items() if value}


def wanted_multiples(device: Device, element_bytes: int) -> tuple[int, int]:
    """Numbers that a dimension should at least, and best, be a multiple of; (1, 1) without tensor cores."""
    if not device.has_tensor_cores("tf32" if element_bytes == 4 else "fp16"):
        return 1, 1
    least = 16 // element_bytes
    return least, 128 // element_bytes if device.wants_wide_rows else least


def misaligned(
    recipe: Recipe, device: Device, dims: Mapping[str, int], gain: Gain | None = None
) -> tuple[Misalignment, ...]:
    """The dimensions that leave tensor cores idle, worst first; those that padding is predicted not to help are left
    out.

    recipe: resolved. dims: as `dimensions` gives them. gain: predicts what a padded recipe saves.
    """
    precision = recipe.precision
    assert precision != "auto", "resolve the recipe first"
    if not precision.is_half and not precision.tf32:
        return ()
    least, best = wanted_multiples(device, 2 if precision.is_half else 4)
    found = []
    for field, value in dims.items():
        multiple = best if field == "vocab_size" else least
        over = value % multiple
        if not over:
            continue
        padded, saved, change = _padded(value, multiple), None, ""
        if field == "seq_len":
            change = f"seq_len={padded if padded - value <= over else value - over}"
        elif field == "vocab_size" and recipe.pad_vocab_to != multiple:
            change = f"pad_vocab_to={multiple}"
            saved = None if gain is None else gain(recipe.override(pad_vocab_to=multiple))
        if saved is None or saved >= WORTH_SAYING:
            found.append(Misalignment(field=field, value=value, multiple=multiple, padded=padded, change=change,
                                      gain=saved))
    return tuple(sorted(found, key=lambda m: -(m.gain or 0.0)))


def vocabulary(trace: Trace) -> int:
    """Rows of the largest embedding that the trace looks anything up in; 0 where it has none."""
    return max((op.shapes[0][0] for op in trace.ops
                if "embedding" in op.name and "backward" not in op.name and op.shapes and len(op.shapes[0]) == 2),
               default=0)


def has_side(op: Op, rows: int) -> bool:
    """Whether any of an op's arguments is so long in a dimension."""
    return any(rows in shape for shape in op.shapes)


def padding_gain(
    ops: Iterable[tuple[Op, int]], whole: float, device: Device, rows: int, padded: Recipe
) -> float | None:
    """The share of a step that a padded vocabulary saves: of the seconds of each op with that dimension, the share
    that the time model takes off once it is larger. None where the model knows no figures of the device.

    ops: the step's, each with how often it runs. whole: seconds that the share is of. rows: the vocabulary's."""
    side = _padded(rows, padded.pad_vocab_to or 1)

    def saved(op: Op) -> float:
        """The share of an op's seconds."""
        more = {name: getattr(op, name) * side // rows for name in ("flops", "bytes_read", "bytes_written")}
        shapes = tuple(tuple(side if each == rows else each for each in shape) for shape in op.shapes)
        leading = tuple(side if each == rows else each for each in op.leading)
        now = op_seconds(op, device, tf32=padded.tf32)
        then = op_seconds(replace(op, shapes=shapes, leading=leading, **more), device, tf32=padded.tf32)
        return 1 - then / now if now else 0.0

    try:
        gained = sum(times * (op.seconds or 0.0) * saved(op) for op, times in ops if has_side(op, rows))
    except TightfitError:
        return None
    return gained / whole if whole else None


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

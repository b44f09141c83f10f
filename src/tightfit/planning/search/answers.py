"""Answers of a plan: each is made by one function, which may trace a few recipes more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightfit.devices import Device
from tightfit.planning.plan import Answers
from tightfit.planning.search.adapters import adapters
from tightfit.planning.search.changes import smallest_change
from tightfit.planning.search.choose import choose
from tightfit.planning.search.evaluate import Evaluated
from tightfit.planning.search.explain import trade_off, why
from tightfit.planning.search.exploration import Exploration
from tightfit.planning.search.gains import gain_of_opening, misalignments, without_dropout
from tightfit.planning.search.host_memory import enough_host_memory
from tightfit.planning.search.more_gpus import more_gpus, scaling
from tightfit.planning.search.smallest_gpu import smallest_gpu
from tightfit.recipe import Recipe
from tightfit.recipe.hf_arguments.table import without_effect
from tightfit.recipe.yaml import field_text
from tightfit.techniques import SLOTS

TRAINING_ALONE = ("micro_batch_size", *(slot for slot, variants in SLOTS.items() if variants[0].trains_only))
"""Fields that generating has no use for."""


def brief_answers(exploration: Exploration, recipe: Recipe, head: Evaluated) -> Answers:
    """Answers that take no trace. head: the choice, or what comes nearest to fitting."""
    best = choose(exploration)
    return Answers(
        why=" ".join(why(exploration, best)) if best is not None else "",
        more_gpus=more_gpus(exploration, head),
        unread=_unread(recipe),
    )


def all_answers(
    exploration: Exploration, recipe: Recipe, shown: Sequence[Evaluated], head: Evaluated, missed: Sequence[str],
    catalogue: Sequence[Device],
) -> Answers:  # fmt: skip
    """Every answer, in the order in which their traces are worth most.

    shown: candidates that fit, the best first. missed: a sentence for each that does not. catalogue: as of `search`.
    """
    brief, fits = brief_answers(exploration, recipe, head), bool(shown)
    traced = not recipe.backend.compiles_whole_steps  # else every answer takes a compilation
    trains = traced and recipe.mode == "train"
    change, change_text = smallest_change(exploration) if traced and not fits else (None, "")
    gpu, gpu_text, gpu_changed_text = smallest_gpu(exploration, catalogue)
    return replace(
        brief,
        next_best=trade_off(exploration, shown[1], shown[0]) if len(shown) > 1 else "",
        would_not_fit=tuple(missed),
        smallest_change=change,
        smallest_change_text=change_text,
        smallest_gpu=gpu,
        smallest_gpu_text=gpu_text,
        smallest_gpu_changed_text=gpu_changed_text,
        open_fields=gain_of_opening(exploration, head) if trains and fits else "",
        adapters="" if fits else adapters(exploration),
        offload="" if fits else enough_host_memory(exploration),
        dropout=without_dropout(exploration, head) if trains and fits else "",
        misaligned=misalignments(exploration, head) if trains and fits else (),
        scaling=scaling(exploration, head) if fits else None,
    )


def _unread(recipe: Recipe) -> tuple[str, ...]:
    """Sentences on what was written and has no effect: pins that only training reads, arguments of Hugging Face."""
    pinned = [field_text(field, value) for field in TRAINING_ALONE * (recipe.mode == "inference")
              if (value := getattr(recipe, field)) != Recipe.model_fields[field].default]
    pins = f"{', '.join(pinned)}: for training alone, and not read with mode=inference." if pinned else ""
    return tuple(filter(None, (pins, without_effect(recipe.hugging_face))))

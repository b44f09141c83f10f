"""`tightfit export`: a finished run's adapter worked into its model's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rich.console import Console

from tightfit.data.tokenizing import GENERATION, name_end
from tightfit.errors import RecipeError, one_line
from tightfit.files import replacing_folder
from tightfit.training.run_folder import MODEL, RECIPE, RunFolder
from tightfit.training.summary import Summary

MERGED = "merged"
"""The folder of a run in which the merged model lies, where no other is named."""
NOT_COPIED = ("adapter_", "config.json", "model.safetensors", GENERATION)
"""Beginnings of the names of files that a merged model has itself, or has no use for."""


def run_export(run: Path, merge: bool, output: Path | None) -> None:
    """Write a run's model with its adapter merged. Raises TightfitError."""
    folder = RunFolder(run)
    recipe, adapter = folder.saved_recipe(), run / MODEL
    if recipe is None or not adapter.is_dir():
        missing = (f"{RECIPE}; name a run's folder, such as runs/mine" if recipe is None else
                   f"{MODEL}/, which a run writes at its end; go on with it by the command that began it")
        raise RecipeError(f"{run}: no finished run, for it holds no {missing}")
    if not recipe.trainable.adapts and (adapter / "adapter_config.json").is_file():
        raise RecipeError(f"{run}: {adapter} is the adapter of a module that peft wrapped; load it with peft, and "
                          "merge it by merge_and_unload()")
    if not recipe.trainable.adapts:
        raise RecipeError(f"{run}: trainable={recipe.trainable.name} trained the model's own weights; {adapter} is the "
                          "whole model")
    if not merge:
        raise RecipeError(f"{run}: {adapter} is the adapter, as peft reads it; write --merge for a model with it "
                          "worked into the weights")
    summary = Summary.of(run)
    steps = summary.steps if summary else 0
    if steps < recipe.max_steps and not (summary and summary.early_stopped):
        raise RecipeError(f"{run}: the run is to take {recipe.max_steps} steps, and its adapter is of {steps}; go on "
                          "with it by the command that began it")
    target = run / MERGED if output is None else output
    here = target.exists() and target.samefile(Path())  # which its replacement would leave without a name
    if here or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        what = "the folder that you are in" if here else "not an empty folder"
        raise RecipeError(f"--output: {target} is {what}; write another one, or remove it")
    from safetensors import SafetensorError

    from tightfit.backends import quiet_loading

    with quiet_loading():
        from tightfit.backends.pytorch.merge import merge as merged  # torch takes seconds

    console = Console(soft_wrap=True)
    try:
        with replacing_folder(target) as writing:
            for note in merged(recipe, adapter, writing):
                console.print(f"note: {note}", markup=False)
            for file in adapter.iterdir():  # the tokenizer's, and what else a model is read with
                if file.is_file() and not file.name.startswith(NOT_COPIED):
                    shutil.copy(file, writing / file.name)
            if (adapter / GENERATION).is_file():
                ends = json.loads((adapter / GENERATION).read_text("utf-8")).get("eos_token_id", [])
                for end in ends if isinstance(ends, list) else [ends]:
                    name_end(writing, end, end)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"--output: {target} cannot be written: {one_line(error)}; write another folder") from None
    held = json.loads((target / "config.json").read_text("utf-8")).get("dtype")  # the run's, whatever the base's was
    console.print(f"merged model: {target}{f', in {held}' if held else ''}", markup=False)

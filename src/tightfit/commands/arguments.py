"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tightfit.commands.completion import complete_override, complete_recipe

RECIPE = typer.Argument(metavar="RECIPE", autocompletion=complete_recipe, help="A YAML file, a bundled recipe or "
                        "model, a model's folder, its Hugging Face id, or package.module:factory.")
RecipeName = Annotated[str, RECIPE]
Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="[KEY=VALUE]...", autocompletion=complete_override, help="Fields to set, such as `max_steps=100` or "
    "`optimizer.block_size=256`.",
)]  # fmt: skip
GpuMemory = Annotated[str | None, typer.Option(
    metavar="SIZE", help="Memory such as `24GB`: of a card that is not listed, or instead of the named one's.",
)]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
TrainingArgs = Annotated[Path | None, typer.Option(
    metavar="FILE", help="Hugging Face TrainingArguments, as `to_json_string` writes them, or as YAML.")]  # fmt: skip

"""Loss curves of adapters and of quantized bases against training all weights, from one pretrained model.

A small GPT learns the standard library's source; then copies of it learn tightfit's own source, the same batches in the
same order, once with all weights and once with each way to train a part beside weights held in fewer bits. Learning
rates are those that each way wants. None may end further above the full fine-tuning's held-out loss than the techniques
declare.
Run: python benchmarks/adapter_curves.py [--steps 100]     a few minutes on one core
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import record
import tightfit
from tightfit.recipe.lookup import recipe_values

SOURCE = Path(tightfit.__file__).parent
PRETRAINING = 300
ALL, FACTORS = 5e-4, 5e-3
"""Peak learning rates, of weights and of what is added to them."""

RUNS: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"trainable": "lora"},
    "dora": {"trainable": "dora"},
    "layers": {"trainable": {"name": "layers", "names": ["h.1", "ln_f"]}, "learning_rate": ALL},
    "lora, bf16": {"trainable": "lora", "precision": "bf16", "base": "bf16"},
    "lora, fp16": {"trainable": "lora", "precision": "fp16", "base": "fp16"},
    "lora, int8": {"trainable": "lora", "base": "int8"},
    "lora, nf4": {"trainable": "lora", "base": "nf4"},
}


def train(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run: its held-out losses by step, and its learning rate."""
    tightfit.Trainer(recipe={**values, "output_dir": str(folder)}).train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"learning_rate": values["learning_rate"],
            "held_out": [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]}


def tolerance(changes: dict[str, Any]) -> float:
    """What the techniques in `changes` declare, added up."""
    recipe = tightfit.Recipe.from_dict(changes)
    chosen = [recipe.trainable, recipe.frozen_base, *([] if recipe.precision == "auto" else [recipe.precision])]
    return sum(technique.tolerance for technique in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    values = recipe_values("quickstart")
    values.pop("if_cuda")
    values.update({
        "seq_len": 128, "sample_prompt": None, "precision": "fp32", "optimizer": "adamw", "attention": "sdpa",
        "checkpointing": "none", "compile": "off", "logging_steps": 20,
    })
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        rows = here / "source.jsonl"
        rows.write_text("".join(json.dumps({"text": file.read_text("utf-8")}) + "\n"
                                for file in sorted(SOURCE.rglob("*.py"))), "utf-8")
        shape = {**values["model_overrides"], "n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 128}
        train({**values, "model_overrides": shape, "max_steps": PRETRAINING, "learning_rate": 2e-3}, here / "base")
        stored = {**values, "model": str(here / "base" / "model"), "model_overrides": {}, "data": str(rows),
                  "vocab_size": None, "max_steps": steps, "eval_steps": steps // 4}
        curves = {}
        for number, (name, changes) in enumerate(RUNS.items()):
            rate = FACTORS if "trainable" in changes else ALL
            curves[name] = train({**stored, "learning_rate": rate, **changes}, here / str(number))
            print(f"{name}: {curves[name]['held_out'][-1][1]:.3f}", flush=True)
    best = curves["all"]["held_out"][-1][1]
    runs = {name: {**curve, "above": round(curve["held_out"][-1][1] - best, 4), "allowed": tolerance(RUNS[name])}
            for name, curve in curves.items()}
    print(record.write("adapter_curves", {"steps": steps, "pretraining": PRETRAINING, "runs": runs}))


if __name__ == "__main__":
    main()

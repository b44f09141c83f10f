"""Loss curves of every precision and every optimizer against fp32 AdamW, on quickstart's data.

The same small GPT, the same batches in the same order; the learning rate is the one each optimizer wants (stated in
the record). None may end further above fp32 AdamW's held-out loss than the tolerance its technique declares.
Run: python benchmarks/convergence.py [--steps 300] [--only RUN ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import record
import tightfit
from tightfit.recipe.lookup import recipe_values

BASE_RATE = 2e-3
RATES = {"sgd": 0.5, "lion": 6e-4, "adafactor": 2e-2}
"""Peak learning rates of the optimizers that want another one than AdamW."""

RUNS: dict[str, dict[str, Any]] = {
    "fp32 adamw": {},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "bf16-pure, kahan": {"precision": "bf16-pure"},
    "bf16-pure, stochastic": {"precision": {"name": "bf16-pure", "rounding": "stochastic"}},
    "fp8, tensorwise": {"precision": "fp8"},
    "fp8, rowwise": {"precision": {"name": "fp8", "scaling": "rowwise"}},
    "fp8, bf16 weights": {"precision": {"name": "fp8", "weights": "bf16"}},
    "fp8, adamw-8bit": {"precision": "fp8", "optimizer": "adamw-8bit"},
    "bf16-pure, stochastic, adamw-8bit, streamed": {  # offloading moves these steps' tensors and changes no bit of them
        "precision": {"name": "bf16-pure", "rounding": "stochastic"}, "optimizer": "adamw-8bit",
        "accumulation": "by-block", "update": "with-forward", "micro_batch_size": 4,
    },
    "adamw loop": {"optimizer": {"name": "adamw", "implementation": "loop"}},
    "adamw foreach": {"optimizer": {"name": "adamw", "implementation": "foreach"}},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "lion": {"optimizer": "lion"},
    "muon": {"optimizer": "muon"},
    "bf16-pure, kahan, muon": {"precision": "bf16-pure", "optimizer": "muon"},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "adamw-4bit": {"optimizer": "adamw-4bit"},
    "adamw-anyprecision": {"optimizer": "adamw-anyprecision"},
}


def run(changes: dict[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    """Train once; the curve of the training loss and the held-out loss."""
    values = recipe_values("quickstart")
    values.pop("if_cuda")
    optimizer = changes.get("optimizer", "adamw")
    name = optimizer if isinstance(optimizer, str) else optimizer["name"]
    values.update({
        "model_overrides": {**values["model_overrides"], "n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 128},
        "seq_len": 128, "max_steps": steps, "eval_steps": steps // 6, "logging_steps": 5, "sample_prompt": None,
        "learning_rate": RATES.get(name, BASE_RATE), "output_dir": str(folder), "precision": "fp32",
        "optimizer": "adamw", "attention": "sdpa", "checkpointing": "none", "compile": "off", **changes,
    })
    if tightfit.Trainer(recipe=values).train().stopped_by:
        sys.exit(1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "learning_rate": values["learning_rate"],
        "train": [(line["step"], line["loss"]) for line in lines if "loss" in line],
        "held_out": [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line],
    }


def tolerance(changes: dict[str, Any]) -> float:
    """Tolerances that the techniques in `changes` declare, added up."""
    recipe = tightfit.Recipe.from_dict(changes)
    chosen = [technique for technique in (recipe.precision, recipe.optimizer) if technique != "auto"]
    return sum(technique.tolerance for technique in chosen) or 0.01


def plot(curves: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, title, names in (
        (axes[0], "precision", [n for n in curves if "fp" in n or "bf16" in n]),
        (axes[1], "optimizer", [n for n in curves if n == "fp32 adamw" or not ("fp" in n or "bf16" in n)]),
    ):
        for name in names:
            steps, losses = zip(*curves[name]["held_out"], strict=True)
            style = {"color": "black", "linewidth": 2.5} if name == "fp32 adamw" else {"linewidth": 1.4}
            axis.plot(steps, losses, label=f"{name} ({losses[-1]:.3f})", **style)
        axis.set(title=f"held-out loss by {title}", xlabel="step", ylabel="nats a token")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=list(RUNS), help="runs to make again; the others stay recorded")
    arguments = parser.parse_args()
    steps = arguments.steps
    record_name = f"convergence-{record.device_slug()}" if torch.cuda.is_available() else "convergence"
    previous = record.RESULTS / f"{record_name}.json"
    curves: dict[str, Any] = json.loads(previous.read_text())["runs"] if previous.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            changes = RUNS[name]
            torch.manual_seed(0)
            place = Path(folder) / name.replace(" ", "-").replace(",", "")
            curves[name] = {"changes": changes, "date": record.environment()["date"]} | run(changes, steps, place)
            end, base = curves[name]["held_out"][-1][1], curves["fp32 adamw"]["held_out"][-1][1]
            allowed = tolerance(changes)
            curves[name].update({"above_fp32_adamw": end - base, "tolerance": allowed, "within": end - base <= allowed})
            print(f"{name:24} {end:.4f}  {end - base:+.4f} (at most {allowed:+.2f})", flush=True)
    print(record.write(record_name, {"steps": steps, "runs": curves}))
    plot(curves, record.RESULTS / f"{record_name}.png")
    sys.exit(0 if all(curve["within"] for curve in curves.values()) else 1)


if __name__ == "__main__":
    main()

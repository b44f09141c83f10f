"""tokens/s of tightfit's loop against a bare hand-written loop and against the Hugging Face Trainer.

The three train the same model from the same weights on the same rows in the same process, in turn, several rounds; a
ratio is taken within each round, so that a machine whose speed drifts cannot favour one of them. Warm-up steps are
left out. Run: python benchmarks/loop_overhead.py
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import record
import tightfit
from tightfit.training.listeners import Listener

WARM_UP = 5
SHAPES = {
    "tiny": {"layers": 1, "heads": 2, "width": 32, "vocabulary": 256, "length": 16, "batch": 4, "steps": 200,
             "threads": 1, "rounds": 21},
    "quickstart": {"layers": 4, "heads": 4, "width": 192, "vocabulary": 2048, "length": 256, "batch": 4, "steps": 12,
                   "threads": 2, "rounds": 21},
}
RATE = 1e-3


def make_model(shape: dict[str, int]) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=shape["layers"], n_head=shape["heads"], n_embd=shape["width"], n_positions=shape["length"],
        vocab_size=shape["vocabulary"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def make_rows(shape: dict[str, int]) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    size = (shape["batch"] * (shape["steps"] + WARM_UP), shape["length"])
    return [{"input_ids": row, "labels": row} for row in random.integers(0, shape["vocabulary"], size)]


def bare(shape: dict[str, int], rows: list[dict[str, np.ndarray]]) -> float:
    """The loop a person writes by hand. Returns seconds a step."""
    model = make_model(shape)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=shape["batch"], shuffle=True)  # type: ignore[arg-type]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    model.train()
    began = 0.0
    for step, batch in enumerate(loader):
        if step == WARM_UP:
            began = time.perf_counter()
        ids = batch["input_ids"]
        logits = model(input_ids=ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            loss.item()
    return (time.perf_counter() - began) / shape["steps"]


def ours(shape: dict[str, int], rows: list[dict[str, np.ndarray]]) -> float:
    """tightfit's own loop, with its metrics file and its checks."""

    class Clock(Listener):
        began = ended = 0.0

        def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
            if step == WARM_UP:
                self.began = time.perf_counter()
            self.ended = time.perf_counter()

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "batch_size": shape["batch"], "micro_batch_size": shape["batch"], "seq_len": shape["length"],
            "max_steps": shape["steps"] + WARM_UP, "learning_rate": RATE, "lr_scheduler_type": "constant",
            "data": {"source": "dummy", "eval_fraction": 0.0}, "optimizer": "adamw", "output_dir": f"{folder}/run",
            "device": "cpu",
        }
        tightfit.Trainer(make_model(shape), recipe, rows, listener=clock).train()
    return (clock.ended - clock.began) / shape["steps"]


def hugging_face(shape: dict[str, int], rows: list[dict[str, np.ndarray]]) -> float:
    """The Hugging Face Trainer with its own flags."""

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        began = ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARM_UP:
                self.began = time.perf_counter()
            self.ended = time.perf_counter()

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=shape["batch"], max_steps=shape["steps"] + WARM_UP,
            learning_rate=RATE, lr_scheduler_type="constant", optim="adamw_torch_fused", weight_decay=0.01,
            max_grad_norm=1.0, logging_steps=10, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        )
        trainer = transformers.Trainer(make_model(shape), arguments, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return (clock.ended - clock.began) / shape["steps"]


LOOPS: dict[str, Callable[[dict[str, int], list[dict[str, np.ndarray]]], float]] = {
    "bare": bare, "tightfit": ours, "hf_trainer": hugging_face,
}


def main() -> None:
    logging.disable(logging.WARNING)
    outcome: dict[str, Any] = {"warm_up_steps": WARM_UP, "shapes": {}}
    for name, shape in SHAPES.items():
        rows = make_rows(shape)
        seconds: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        torch.set_num_threads(shape["threads"])
        for turn in range(shape["rounds"]):
            order = list(LOOPS)[turn % 3 :] + list(LOOPS)[: turn % 3]
            for loop in order:
                seconds[loop].append(LOOPS[loop](shape, rows))
        tokens = shape["batch"] * shape["length"]
        against_bare = [b / t for b, t in zip(seconds["bare"], seconds["tightfit"], strict=True)]
        against_trainer = [h / t for h, t in zip(seconds["hf_trainer"], seconds["tightfit"], strict=True)]
        extra = [(t - b) * 1e6 for b, t in zip(seconds["bare"], seconds["tightfit"], strict=True)]
        outcome["shapes"][name] = {
            "shape": shape,
            "tokens_per_second": {loop: tokens / record.quantiles(s)["median"] for loop, s in seconds.items()},
            "speed_over_bare": record.quantiles(against_bare),
            "speed_over_hf_trainer": record.quantiles(against_trainer),
            "overhead_microseconds_a_step": record.quantiles(extra),
        }
        print(f"{name}: {record.quantiles(against_bare)['median']:.3f} of the bare loop, "
              f"{record.quantiles(against_trainer)['median']:.3f} of the Hugging Face Trainer, "
              f"{record.quantiles(extra)['median']:.0f} microseconds a step")
    print(record.write("loop_overhead", outcome))


if __name__ == "__main__":
    main()

"""The peers do the same work as ours: the same losses, step by step, at about the same memory."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.failing import failing
from tightfit.backends.measurements import Timings
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, OutOfMemory, Refused
from tightfit.ladder.peers import PEERS
from tightfit.ladder.peers.plain import make_optimizer
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.training.session import training_global_batches

pytestmark = pytest.mark.usefixtures("few_objects")

WARM_UP, STEPS = 1, 2
GPT2 = {"model": "gpt2", "model_overrides": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}}
BLOCKS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
BERT = {"model": "bert-base", "model_overrides": BLOCKS}
CLASSES = {**BERT, "task": "sequence-classification", "num_labels": 3}
T5 = {"model": "t5-small", "task": "seq2seq",
      "model_overrides": {"num_layers": 1, "num_decoder_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 2,
                          "d_kv": 16}}  # fmt: skip
VIT = {"model": "vit-base", "task": "image-classification", "num_labels": 5, "vocab_size": None,
       "model_overrides": {**BLOCKS, "image_size": 32, "patch_size": 16}}  # fmt: skip
OURS = {"model": "transformer-156m",
        "model_overrides": {"num_layers": 2, "hidden_size": 32, "head_dim": 16, "num_heads": 2}}  # fmt: skip
COMPILED = {"name": "per-block", "backend": "aot_eager"}
NEAREST = {"name": "bf16-pure", "rounding": "nearest"}

CASES: dict[str, tuple[dict[str, Any], float]] = {
    "gpt2": (GPT2, 1e-5),
    "gpt2, every block": ({**GPT2, "checkpointing": "every-block", "attention": "eager", "max_grad_norm": 0}, 1e-5),
    "gpt2, uneven": ({**GPT2, "micro_batch_size": 3, "attention": {"name": "sdpa", "kernel": "math"}}, 1e-5),
    "bert, fp16": ({**CLASSES, "precision": "fp16"}, 1e-3),
    "bert, bf16": ({**CLASSES, "precision": "bf16", "checkpointing": "every-nth"}, 1e-3),
    "bert, one micro-batch": ({**CLASSES, "micro_batch_size": 8, "optimizer": "sgd", "learning_rate": 1e-2}, 1e-5),
    "bert, adafactor": ({**BERT, "task": "masked-lm", "optimizer": "adafactor", "learning_rate": 1e-2}, 1e-4),
    "t5": ({**T5, "label_smoothing_factor": 0.1}, 1e-5),
    "vit, bf16 weights": ({**VIT, "precision": NEAREST}, 1e-3),
    "ours": (OURS, 1e-5),
    "ours, compiled": ({**OURS, "compile": COMPILED, "checkpointing": "every-block"}, 1e-3),
}
"""Recipes, dropout on, and how far a peer's losses may lie from ours."""

CANNOT = {"plain": (), "hf-trainer": ("gpt2, uneven", "bert, fp16")}
"""What is refused on a processor."""


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Leave no setting of Accelerate's behind, which are one for all of a process."""
    before = accelerates()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert accelerates() == before


def accelerates() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


def made(values: dict[str, Any], **more: Any) -> tuple[Recipe, Device]:
    """A recipe for the processor, and that."""
    base = {
        "data": {"source": "dummy", "samples": 20}, "vocab_size": 128, "seq_len": 16, "batch_size": 8,
        "micro_batch_size": 4, "precision": "fp32", "attention": "sdpa", "checkpointing": "none", "compile": "off",
        "optimizer": {"name": "adamw", "implementation": "foreach"}, "loading": {"workers": 0}, "device": "cpu",
        "learning_rate": 1e-3,
    }  # fmt: skip
    recipe = Recipe.from_dict({**base, **values, **more})
    device = PytorchBackend().device(recipe)
    return resolve(recipe, device), device


def ours(recipe: Recipe, device: Device) -> Timings:
    backend = PytorchBackend()
    step = backend.step(backend.build(recipe, device))
    data = training_global_batches(recipe)
    return backend.time(step, step.global_batches(data, 0, WARM_UP + STEPS + 1), WARM_UP, STEPS)


@lru_cache
def ours_of(case: str) -> Timings:
    return ours(*made(CASES[case][0]))


def theirs(peer: str, recipe: Recipe, device: Device) -> Timings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the peers' own code is told off for
        return PEERS[peer].run(recipe, device, WARM_UP, STEPS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("peer", CANNOT)
def test_a_peer_does_the_same_work(peer, case, capfd):
    recipe, device = made(CASES[case][0])
    if case in CANNOT[peer]:
        with pytest.raises(Refused, match=r"batch_size: 8 is no multiple|precision: .*fp16"):
            theirs(peer, recipe, device)
        return
    found, expected = theirs(peer, recipe, device), ours_of(case)
    assert found.losses == pytest.approx(expected.losses, abs=CASES[case][1])
    assert len(found.losses) == WARM_UP + STEPS + 1
    assert len(found.seconds) == STEPS
    assert 0.9 * expected.peak_allocated < found.peak_allocated < 1.3 * expected.peak_allocated
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("peer", CANNOT)
def test_padded_rows_and_uneven_counts_are_the_same_work(peer, texts, tmp_path):
    """Hidden tokens are drawn anew, so that no two micro-batches have as many labels."""
    recipe, device = made({**BERT, "task": "masked-lm"}, data={"source": texts, "packing": False}, vocab_size=280,
                          cache_dir=str(tmp_path))
    assert theirs(peer, recipe, device).losses == pytest.approx(ours(recipe, device).losses, abs=1e-5)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A file of documents of many lengths."""
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [{"text": " ".join(words[: 1 + n % 7] * (1 + n % 3))} for n in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return str(path)


@pytest.mark.parametrize("peer", CANNOT)
@pytest.mark.parametrize(("changes", "reason"), [
    ({"vocab_size": 280}, "data.packing: no peer keeps documents apart"),
    ({"checkpointing": "segments"}, "checkpointing: no peer has segments"),
    ({"precision": "bf16-pure", "optimizer": "adamw"}, "precision.rounding: "),
    ({"optimizer": "adamw-anyprecision"}, "optimizer: .*adamw"),
    ({"pad_vocab_to": 100}, "pad_vocab_to: no peer cuts"),
])  # fmt: skip
def test_what_a_peer_cannot_say_is_refused(peer, changes, reason, texts, tmp_path):
    data = {"data": {"source": texts}} if reason.startswith("data") else {}
    recipe, device = made({**GPT2, **data, **changes}, cache_dir=str(tmp_path))
    with pytest.raises(Refused, match=reason):
        theirs(peer, recipe, device)


def test_the_trainer_names_the_library_of_lion():
    with pytest.raises(MissingLibrary, match="pip install bitsandbytes"):
        PEERS["hf-trainer"].run(*made({**GPT2, "optimizer": "lion"}), 1, 1)


@pytest.mark.parametrize("peer", CANNOT)
def test_out_of_memory_is_said(peer, monkeypatch):
    full = RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 "
                        "bytes. Buy more")
    monkeypatch.setattr("transformers.GPT2LMHeadModel.forward", failing(full))
    with pytest.raises(OutOfMemory, match=r": DefaultCPUAllocator: .*: you tried to allocate 9 bytes$"):
        theirs(peer, *made(GPT2))


@pytest.mark.parametrize("name", ["adamw-8bit", "adamw-4bit"])
def test_torchaos_optimizers_are_theirs(name):
    from torchao import optim

    recipe, _ = made(GPT2, optimizer=name)
    model = torch.nn.Linear(64, 64)
    optimizer = make_optimizer(recipe, model)
    assert type(optimizer) is {"adamw-8bit": optim.AdamW8bit, "adamw-4bit": optim.AdamW4bit}[name]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]

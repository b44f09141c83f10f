"""Folders of models with mutated configurations and damaged weights: a step of training, or one message, and no code or
pickle of theirs is run."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.architectures import TASK_OF, tiny_model

from fuzzing.harness import Kind, fault, run_command

ARCHITECTURES = ("gpt2", "llama", "mistral", "qwen3", "gemma", "phi", "gpt_neox", "opt", "bert", "roberta", "t5",
                 "bart", "vit")
FIELDS = ("rope_scaling", "rope_theta", "quantization_config", "torch_dtype", "dtype", "auto_map", "problem_type",
          "layer_types", "num_labels", "pad_token_id", "_attn_implementation", "attn_implementation")
"""Of configurations, beside those that one has."""
TYPES = ("evil", "", 3, None, "llama", "bert", "gpt2", "mamba", "clip", "rwkv", "tightfit-transformer", "t5", "../x")
CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification")
MOST_BYTES = 24 << 30
"""Address space of a process, so that a size that is let through does not take the machine."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 2**31, 2**63, 10**30, 0.0, -0.5, 1e-9, 1e300, "", "x", "relu", "fp8",
    [], [1, 2], {}, {"x": [1]}, [None], "\u202e<b>", "x" * 5000,
)  # fmt: skip
CODE = """
import os, pathlib
pathlib.Path({place!r}).write_text('code')
from transformers import PretrainedConfig, PreTrainedModel
class Evil(PretrainedConfig):
    model_type = 'evil'
class EvilModel(PreTrainedModel):
    config_class = Evil
"""


class Touch:
    """What its pickle does when it is read."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.place}'",)


def base(folder: Path) -> None:
    """A tiny model of each architecture, as `save_pretrained` writes it."""
    transformers.logging.disable_progress_bar()
    for name in ARCHITECTURES:
        model: Any = tiny_model(name)
        model.save_pretrained(folder / name)


def mutate_config(draw: random.Random, model: Path) -> bool:
    """Change fields of the configuration. Returns whether it has to be refused."""
    path = model / "config.json"
    if draw.random() < 0.1:
        raw = path.read_bytes()
        damaged = draw.choice((b"", raw[: len(raw) // 2], b"[]", b"null", b"\xff\xfe" + raw, b"{" * 50_000, b'"x"',
                               b"{}",
                               raw.replace(b":", b"", 1)))
        path.write_bytes(damaged)
        return damaged != b"{}"
    values = json.loads(path.read_text())
    for _ in range(draw.choice((1, 1, 2, 3))):
        key = draw.choice([*values, *FIELDS])
        if draw.random() < 0.2:
            values.pop(key, None)
        else:
            values[key] = draw.choice(VALUES)
    path.write_text(json.dumps(values))
    return False


def other_type(draw: random.Random, model: Path) -> bool:
    """Another model_type, or code of the folder's own."""
    path, values = model / "config.json", json.loads((model / "config.json").read_text())
    if draw.random() < 0.5:
        values["model_type"] = draw.choice(TYPES)
    if draw.random() < 0.7:
        values["auto_map"] = {"AutoConfig": "evil.Evil", **dict.fromkeys(CLASSES, "evil.EvilModel")}
        (model / "evil.py").write_text(CODE.format(place=str(model.parent / "executed")))
    path.write_text(json.dumps(values))
    return False


def spoil_weights(draw: random.Random, model: Path) -> bool:
    """Damage the one file of weights."""
    path = model / "model.safetensors"
    raw = path.read_bytes()
    place = draw.randrange(len(raw))
    kind = draw.randrange(8)
    if kind < 2:
        path.write_bytes(raw[:place])
    elif kind == 2:
        path.write_bytes(draw.randbytes(8) + raw[8:])
    elif kind == 3:
        path.write_bytes((2**40).to_bytes(8, "little") + raw[8:])
    elif kind == 4:
        path.write_bytes(raw.replace(b'"dtype":"F32"', b'"dtype":"F31"', 1))
    elif kind == 5:
        path.write_bytes(b"")
    elif kind == 6:
        tensors = load_file(path)
        name = draw.choice(list(tensors))
        tensors[name] = draw.choice((torch.zeros(3), torch.zeros(0), tensors[name].to(torch.int8)))
        save_file(tensors, path, {"format": "pt"})
        return False  # whose message may be a note, where it is a classifier's
    else:
        tensors = load_file(path)
        save_file({draw.choice(("x", "é", "../x")): tensor for tensor in tensors.values()}, path, {"format": "pt"})
        return False
    return True


def pickled(draw: random.Random, model: Path) -> bool:
    """Weights as a pickle, which runs a program where it is read as one."""
    executed = model.parent / "executed"
    tensors = load_file(model / "model.safetensors")
    if draw.random() < 0.8:
        (model / "model.safetensors").unlink()
    path = model / draw.choice(("pytorch_model.bin", "pytorch_model.bin", "pytorch_model-00001-of-00001.bin"))
    kind = draw.randrange(5)
    if kind == 0:
        torch.save(tensors, path)
        return False
    held = draw.choice((Touch(executed), {"x": Touch(executed)}, {**tensors, "x": Touch(executed)}))
    if kind == 1:
        path.write_bytes(pickle.dumps(held))
    elif kind == 2:
        torch.save(held, path, _use_new_zipfile_serialization=False)
    elif kind == 3:
        torch.save(held, path)
        path.write_bytes(path.read_bytes()[: draw.randint(1, 4000)])
    else:
        torch.save(held, path)
    return False


def sharded(draw: random.Random, model: Path) -> bool:
    """An index of weights in several files, one of which is not there, or elsewhere."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = [names[::2], names[1::2]]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name].contiguous() for name in half}, model / file, {"format": "pt"})
    weights: Any = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    kind = draw.randrange(6)
    if kind == 0:
        (model / files[1]).unlink()
    elif kind == 1:
        other = model.parent / "other.safetensors"
        (model / files[1]).rename(other)
        weights |= dict.fromkeys(halves[1], draw.choice(("../other.safetensors", str(other))))
    elif kind == 2:
        weights = dict.fromkeys(names, files[0])
    elif kind == 3:
        others: list[Any] = [{}, [], None, {"x": 3}, dict.fromkeys(names)]
        weights = draw.choice(others)
    elif kind == 4:
        (model / "model.safetensors.index.json").write_text("{")
        return True
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return kind == 0


WAYS: tuple[Callable[[random.Random, Path], bool], ...] = (
    *(mutate_config,) * 4, other_type, *(spoil_weights,) * 2, pickled, sharded,
)  # fmt: skip


def attempt(seed: int, folder: Path) -> str | None:
    """A folder, drawn from a seed, trained for a step; or planned."""
    draw = random.Random(seed)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    name = draw.choice(ARCHITECTURES)
    model, task = folder / "m", TASK_OF[name]
    shutil.copytree(folder.parent / "base" / name, model)
    way = draw.choice(WAYS)
    refused = way(draw, model)
    words = ["m", f"task={task}", "data=dummy", "data.samples=4", "batch_size=2", "micro_batch_size=2", "max_steps=1",
             "device=cpu"]
    if task != "image-classification":
        words += ["seq_len=16"]
    if seed % 4 == 0:
        words = ["plan", *words, "precision=fp32", "attention=eager", "checkpointing=none", "optimizer=adamw",
                 "loss=plain", "compile=off", "--gpu", "rtx-4090"]
    else:
        words = ["train", *words, f"cache_dir={folder / 'cache'}", "output_dir=run"]
    said = run_command(*words)
    wrong = fault(said)
    if wrong is None and (folder / "executed").exists():
        wrong = "code of the folder's own was run"
    if wrong is None and refused and said.status == 0 and words[0] == "train":
        wrong = f"{way.__name__} went unsaid: {said.out[-1500:]}"
    config = (model / "config.json").read_text(errors="replace")
    return wrong and f"{wrong}\n{name} {way.__name__} {' '.join(words)}\n{config[:2500]}"


KIND = Kind(attempt, quick=12, chunk=6, base=base,
            shared=("tightfit.backends.pytorch.backend", "tightfit.commands.train"))

"""Accumulation leaves the gradients as the full batch's: exact in fp64, to rounding in fp32, padding and all."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.architectures import CAUSAL, IMAGES, MASKED, POSITIONS, SEQ2SEQ, TASK_OF, VOCAB, tiny_model
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import tensor_window
from tightfit.backends.pytorch.step import Step
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, MicroBatch, window_of

ROWS = 6
SPLITS = {"full": (6,), "twos": (2, 2, 2), "ones": (1,) * 6, "ragged": (4, 2), "uneven": (1, 3, 2)}
CASES = [*((name, TASK_OF[name]) for name in (*CAUSAL, *MASKED, *SEQ2SEQ, *IMAGES)),
         ("bert", "sequence-classification"), ("gpt2", "sequence-classification")]


def rows(task: str, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Examples of unequal length: the arrays of one row each, not yet padded."""
    random = np.random.default_rng(seed)
    made = []
    for length in random.integers(5, 20, ROWS):
        ids = random.integers(4, VOCAB, length)
        if task == "image-classification":
            made.append({"pixel_values": random.normal(size=(3, 16, 16)), "labels": random.integers(0, 2, ())})
        elif task == "sequence-classification":
            made.append({"input_ids": ids, "labels": random.integers(0, 2, ())})
        elif task == "seq2seq":
            target = random.integers(4, VOCAB, random.integers(3, 12))
            made.append({"input_ids": ids, "decoder_input_ids": np.roll(target, 1), "labels": target})
        else:
            chosen = np.where(random.random(length) < 0.4, ids, IGNORE)
            labels = np.append(ids[1:], IGNORE) if task == "causal-lm" else chosen
            made.append({"input_ids": ids, "labels": labels})
    return made


def collate(part: list[dict[str, np.ndarray]], task: str) -> MicroBatch:
    """Rows padded to the longest among them."""
    if task == "image-classification":
        return MicroBatch(inputs={"pixel_values": np.stack([r["pixel_values"] for r in part])},
                          labels=np.stack([r["labels"] for r in part]))

    def padded(name: str, value: int) -> np.ndarray:
        longest = max(len(r[name]) for r in part)
        return np.stack([np.pad(r[name], (0, longest - len(r[name])), constant_values=value) for r in part])

    inputs = {name: padded(name, 0) for name in part[0] if name != "labels"}
    scalar = task == "sequence-classification"
    labels = np.stack([r["labels"] for r in part]) if scalar else padded("labels", IGNORE)
    if task == "causal-lm":
        return MicroBatch(inputs=inputs, labels=labels)
    lengths = np.array([len(r["input_ids"]) for r in part])
    padding = np.arange(inputs["input_ids"].shape[1]) < lengths[:, None]
    return MicroBatch(inputs=inputs, labels=labels, mask="padded", padding=padding)


class Wide(TorchFunctionMode):
    """fp64 all through: what a model casts to fp32 on its own, such as its norms and softmax, is cast to fp64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        return function(*wide, **{n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()})


def gradients(
    name: str, task: str, split: tuple[int, ...], dtype: torch.dtype, **changes
) -> tuple[dict[str, Tensor], float]:
    """Each parameter's gradient over one window, and the window's mean loss."""
    values = {"task": task, "micro_batch_size": max(split), "batch_size": ROWS, "max_grad_norm": 0.0,
              "data": "dummy", "device": "cpu", "seq_len": POSITIONS, **changes}
    recipe = Recipe.from_dict(values)
    backend = PytorchBackend()
    device = backend.device(recipe)
    build = backend.build(resolve(recipe, device), device, tiny_model(name, task).to(dtype))
    step = Step(build)
    made, parts = rows(task), []
    for size in split:
        part, made = made[:size], made[size:]
        batch = collate(part, task)
        if task == "image-classification":
            batch.inputs["pixel_values"] = batch.inputs["pixel_values"].astype(str(dtype).removeprefix("torch."))
        parts.append(batch)
    window = window_of(tuple(parts))
    with Wide() if dtype == torch.float64 else nullcontext():
        total = step.accumulate(tensor_window(window))
    found = {n: p.grad.clone() for n, p in build.model.named_parameters() if p.grad is not None}
    return found, total.item() / window.count


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """max |difference| over max |gradient|."""
    assert one.keys() == other.keys()
    largest = max(g.abs().max().item() for g in one.values())
    return max((one[n] - other[n]).abs().max().item() for n in one) / largest


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("name", "task"), CASES)
def test_accumulation_equals_the_full_batch(name, task, dtype, limit):
    whole, loss = gradients(name, task, SPLITS["full"], dtype)
    for label in ("twos", "ones", "ragged", "uneven"):
        split, split_loss = gradients(name, task, SPLITS[label], dtype)
        assert worst(whole, split) <= limit, label
        assert split_loss == pytest.approx(loss, rel=limit * 10)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_the_full_batch_equals_transformers_own_loss(name, task):
    """An independent reference: transformers' attention, masks and loss, on the whole batch at once."""
    ours, loss = gradients(name, task, SPLITS["full"], torch.float64)
    model = tiny_model(name, task).double()
    batch = collate(rows(task), task)
    inputs = {n: torch.from_numpy(a) for n, a in batch.inputs.items()}
    labels = torch.from_numpy(batch.labels)
    with Wide():
        if task == "image-classification":
            logits = model(**inputs).logits
        elif task == "causal-lm":
            logits = model(**inputs, attention_mask=(inputs["input_ids"] != 0).long(), use_cache=False).logits
        else:
            mask = torch.from_numpy(batch.padding).long()
            extra = {"use_cache": False} if task == "seq2seq" else {}
            logits = model(**inputs, attention_mask=mask, **extra).logits
    reference = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE)
    reference.backward()
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(reference.item(), rel=1e-10)
    assert worst(theirs, ours) <= 1e-10


@pytest.mark.parametrize("split", ["twos", "uneven"])
def test_clipping_under_accumulation_is_exact(split):
    """The clipped update of a window is that of the full batch."""

    def updated(parts: tuple[int, ...]) -> dict[str, Tensor]:
        recipe = Recipe.from_dict({
            "task": "causal-lm", "batch_size": ROWS, "micro_batch_size": max(parts), "max_grad_norm": 0.01,
            "optimizer": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}, "device": "cpu", "seq_len": POSITIONS,
        })
        backend = PytorchBackend()
        device = backend.device(recipe)
        build = backend.build(resolve(recipe, device), device, tiny_model("llama").double())
        step, made, batches = Step(build), rows("causal-lm"), []
        for size in parts:
            part, made = made[:size], made[size:]
            batches.append(collate(part, "causal-lm"))
        result = step(tensor_window(window_of(tuple(batches))), 1.0).read()
        assert result.grad_norm is not None
        assert result.grad_norm > 0.01
        return {n: p.detach().clone() for n, p in build.model.named_parameters()}

    before = {n: p.detach().clone() for n, p in tiny_model("llama").double().named_parameters()}
    whole, parted = updated(SPLITS["full"]), updated(SPLITS[split])
    moved = torch.sqrt(sum(((whole[n] - before[n]) ** 2).sum() for n in whole)).item()
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert worst(whole, parted) <= 1e-12

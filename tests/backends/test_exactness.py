"""Accumulation leaves the gradients as the full batch's: exact in fp64, to rounding in fp32, padding and all.

PyTorch's models compute in either format, JAX's in fp32; those of JAX are read from what transformers wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.architectures import CAUSAL, IMAGES, MASKED, POSITIONS, SEQ2SEQ, TASK_OF, VOCAB, tiny_model
from tests.backends.jax.cases import SCANNED, fast_options
from tests.built import built
from tightfit.backends.jax.loading import stack_micro_batches
from tightfit.backends.jax.step import Step as JaxStep
from tightfit.backends.jax.update import global_batch_gradients
from tightfit.backends.pytorch.batch import tensor_global_batch
from tightfit.backends.pytorch.step import Step
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, MicroBatch, global_batch_of

ROWS, SHORTEST, LONGEST = 6, 5, 19
SPLITS = {"full": (6,), "twos": (2, 2, 2), "ones": (1,) * 6, "ragged": (4, 2), "uneven": (1, 3, 2)}
CASES = [*((name, TASK_OF[name]) for name in (*CAUSAL, *MASKED, *SEQ2SEQ, *IMAGES)),
         ("bert", "sequence-classification"), ("gpt2", "sequence-classification")]
IN_JAX = ("gpt2", "llama", "qwen2")
BY_BACKEND = [
    *((f"{name}-{task}-{bits}", "pytorch", name, task, bits) for name, task in CASES for bits in ("fp64", "fp32")),
    *((f"{name}-jax", "jax", name, "causal-lm", "fp32") for name in IN_JAX),
]
DTYPES, LIMITS = {"fp64": torch.float64, "fp32": torch.float32}, {"fp64": 1e-12, "fp32": 1e-5}

each_case = pytest.mark.parametrize(
    ("backend", "name", "task", "bits"), [case[1:] for case in BY_BACKEND], ids=[case[0] for case in BY_BACKEND]
)


def rows(task: str, seed: int = 0, longest: int = LONGEST) -> list[dict[str, np.ndarray]]:
    """Examples of unequal length: the arrays of one row each, not yet padded."""
    random = np.random.default_rng(seed)
    made = []
    for length in random.integers(SHORTEST, longest + 1, ROWS):
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


def micro_batches(task: str, split: Iterable[int], seed: int = 0, longest: int = LONGEST) -> tuple[MicroBatch, ...]:
    """The examples in micro-batches of these sizes."""
    left = iter(rows(task, seed, longest))
    return tuple(collate(list(islice(left, size)), task) for size in split)


class Wide(TorchFunctionMode):
    """fp64 all through: what a model casts to fp32 on its own, such as its norms and softmax, is cast to fp64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        return function(*wide, **{n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()})


@pytest.fixture
def gradients(request, tmp_path_factory):
    """Each parameter's gradient over one global batch, and the global batch's mean loss, by a backend."""

    def computed(
        backend: str, name: str, task: str, split: tuple[int, ...], bits: str
    ) -> tuple[dict[str, Tensor], float]:
        if backend == "pytorch":
            return in_pytorch(name, task, split, DTYPES[bits])
        request.getfixturevalue("fast_xla")
        return in_jax(written(name, tmp_path_factory.getbasetemp()), split)

    return computed


@cache
def written(name: str, folder: Path) -> Path:
    """The tiny model of that name as transformers writes it."""
    tiny_model(name).save_pretrained(folder / name)  # type: ignore[operator]
    return folder / name


@cache
def jax_step(folder: Path) -> tuple[JaxStep, dict[str, Any]]:
    """A JAX step of the model in that folder, and room for the program that computes its gradients."""
    recipe = Recipe.from_dict({"backend": SCANNED, "model": str(folder), "batch_size": ROWS, "micro_batch_size": ROWS,
                               "data": "dummy", "device": "cpu", "seq_len": POSITIONS})
    return JaxStep(built(recipe)), {}


def in_jax(folder: Path, split: tuple[int, ...]) -> tuple[dict[str, Tensor], float]:
    step, programs = jax_step(folder)
    global_batch = stack_micro_batches(global_batch_of(micro_batches("causal-lm", split)), ROWS, ROWS)
    count = np.int32(global_batch.count)
    if not programs:
        compute = jax.jit(lambda params, arrays, count: global_batch_gradients(step.build, params, arrays, count, None))
        lowered = compute.lower(step.state["params"], global_batch.arrays, count)
        programs["one for every split"] = lowered.compile(compiler_options=fast_options())
    total, found = programs["one for every split"](step.state["params"], global_batch.arrays, count)
    arrays = step.build.network.unstack_layers(jax.device_get(found))
    return {name: torch.tensor(array) for name, array in arrays.items()}, float(total) / global_batch.count


def in_pytorch(
    name: str, task: str, split: tuple[int, ...], dtype: torch.dtype
) -> tuple[dict[str, Tensor], float]:
    build = built({
        "task": task, "micro_batch_size": max(split), "batch_size": ROWS, "max_grad_norm": 0.0, "data": "dummy",
        "device": "cpu", "seq_len": POSITIONS,
    }, tiny_model(name, task).to(dtype))
    step, parts = Step(build), micro_batches(task, split)
    for batch in parts if task == "image-classification" else ():
        batch.inputs["pixel_values"] = batch.inputs["pixel_values"].astype(str(dtype).removeprefix("torch."))
    global_batch = global_batch_of(parts)
    with Wide() if dtype == torch.float64 else nullcontext():
        total = step.accumulate(tensor_global_batch(global_batch))
    found = {n: p.grad.clone() for n, p in build.model.named_parameters() if p.grad is not None}
    return found, total.item() / global_batch.count


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """max |difference| over max |gradient|."""
    assert one.keys() == other.keys()
    largest = max(g.abs().max().item() for g in one.values())
    return max((one[n] - other[n]).abs().max().item() for n in one) / largest


@each_case
def test_accumulation_equals_the_full_batch(backend, name, task, bits, gradients):
    whole, loss = gradients(backend, name, task, SPLITS["full"], bits)
    for label in ("twos", "ones", "ragged", "uneven"):
        split, split_loss = gradients(backend, name, task, SPLITS[label], bits)
        assert worst(whole, split) <= LIMITS[bits], label
        assert split_loss == pytest.approx(loss, rel=LIMITS[bits] * 10)


@pytest.mark.parametrize(("backend", "name", "task"), [
    *(("pytorch", *case) for case in CASES), *(("jax", name, "causal-lm") for name in IN_JAX),
])
def test_the_full_batch_equals_transformers_own_loss(backend, name, task, gradients):
    """An independent reference: transformers' attention, masks and loss, on the whole batch at once."""
    bits, limit = ("fp64", 1e-10) if backend == "pytorch" else ("fp32", 1e-5)
    ours, loss = gradients(backend, name, task, SPLITS["full"], bits)
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
    assert loss == pytest.approx(reference.item(), rel=limit)
    assert worst(theirs, ours) <= limit


@pytest.mark.parametrize("split", ["twos", "uneven"])
@pytest.mark.parametrize("backend", ["pytorch", "jax"])
def test_clipping_under_accumulation_is_exact(backend, split, request, tmp_path_factory):
    """The clipped update of a global batch is that of the full batch."""
    wanted = {
        "task": "causal-lm", "batch_size": ROWS, "max_grad_norm": 0.01, "device": "cpu", "seq_len": POSITIONS,
        "optimizer": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}, "backend": backend,
    }
    if backend == "jax":
        request.getfixturevalue("fast_xla")
        wanted |= {"model": str(written("llama", tmp_path_factory.getbasetemp())), "backend": SCANNED}

    def updated(parts: tuple[int, ...]) -> dict[str, Tensor]:
        recipe = Recipe.from_dict({**wanted, "micro_batch_size": max(parts)})
        global_batch = global_batch_of(micro_batches("causal-lm", parts))
        if backend == "jax":
            jax_step = JaxStep(built(recipe))
            result = jax_step(stack_micro_batches(global_batch, ROWS, ROWS), 1.0).read()
            weights = jax_step.build.network.unstack_layers(jax.device_get(jax_step.state["params"]))
            after = {n: torch.tensor(array).double() for n, array in weights.items()}
        else:
            build = built(recipe, tiny_model("llama").double())
            result = Step(build)(tensor_global_batch(global_batch), 1.0).read()
            after = {n: p.detach().clone() for n, p in build.model.named_parameters()}
        assert result.grad_norm is not None
        assert result.grad_norm > 0.01
        return after

    limit = 1e-12 if backend == "pytorch" else 1e-5
    before = {n: p.detach().clone() for n, p in tiny_model("llama").double().named_parameters()}
    whole, parted = updated(SPLITS["full"]), updated(SPLITS[split])
    moved = {n: whole[n] - before[n] for n in whole}
    assert torch.sqrt(sum((m**2).sum() for m in moved.values())).item() == pytest.approx(0.01, rel=1e-3)
    assert worst(moved, {n: parted[n] - before[n] for n in parted}) <= limit

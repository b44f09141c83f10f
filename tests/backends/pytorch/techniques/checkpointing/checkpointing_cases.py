"""Tiny models with dropout on, checkpointed, and what their steps compute and keep."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.architectures import VOCAB, tiny_model
from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.build import Build
from tightfit.devices import Device
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import TASKS
from tightfit.techniques import Technique

CPU = Device(kind="cpu", name="cpu", memory_bytes=1 << 30)
LAYERS = 4

_BERT = {"num_hidden_layers": LAYERS, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": LAYERS, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": _BERT,
    "llama": {"num_hidden_layers": LAYERS, "attention_dropout": 0.1},
    "opt": {"num_hidden_layers": LAYERS, "dropout": 0.1, "attention_dropout": 0.1},
    "t5": {"num_layers": LAYERS, "dropout_rate": 0.1},
    "vit": _BERT,
}


class Block(nn.Module):
    """Two parts with dropout, from (B, T, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x + scale * self.attention(x)
        output: Tensor = x + self.mlp(x)
        return output


class Plain(nn.Module):
    """Blocks called one after the other, by position or by keyword."""

    def __init__(self, by_keyword: bool = False) -> None:
        super().__init__()
        self.by_keyword = by_keyword
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(LAYERS))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            x = block(x=x, scale=index) if self.by_keyword else block(x, index)
        return x


def make(name: str, **changes: Any) -> nn.Module:
    """A tiny model in training mode, its weights always the same."""
    torch.manual_seed(0)
    plain = {"plain": False, "plain-by-keyword": True}
    model = Plain(plain[name]) if name in plain else tiny_model(name, **{**CHANGES[name], **changes})
    return model.train()


def inputs(name: str) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    ids = torch.arange(32).view(2, 16)
    extra: dict[str, Any] = {"t5": {"decoder_input_ids": ids}}.get(name, {})
    cached = {} if name in ("bert", "plain", "plain-by-keyword") else {"use_cache": False}
    return {"input_ids": ids, **extra, **cached}


def build(model: nn.Module, technique: Technique) -> Build:
    """The model with the technique applied, and nothing else."""
    start = Build(
        recipe=Recipe(), device=CPU, torch_device=torch.device("cpu"), task=TASKS["causal-lm"], facts=ModelFacts(),
        model=model, stacks=find_stacks(model),
    )  # fmt: skip
    return APPLY[type(technique)](technique, start)


def loss(model: nn.Module, name: str, seed: int = 1) -> Tensor:
    """A scalar of one forward pass, dropout seeded."""
    torch.manual_seed(seed)
    output = model(**inputs(name))
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float().square().sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, which are taken from the model."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(model: nn.Module, name: str) -> dict[str, Tensor]:
    loss(model, name).backward()
    return gradients(model)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)]
    assert not different


class Recorder(TorchDispatchMode):
    """Counts the ops that run, and the bytes they made that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.ops[func.name()] += 1
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self.alive.keys():
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        return result

    @property
    def bytes(self) -> int:
        return sum(self.alive.values())


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Measured:
    kept: int
    """Bytes alive after the forward pass."""
    ops: Counter[str]
    """Ops of the forward and the backward pass."""


def measure(model: nn.Module, name: str) -> Measured:
    with Recorder() as recorder:
        total = loss(model, name)
        kept = recorder.bytes
        total.backward()
    return Measured(kept, recorder.ops)


def saved_bytes(model: nn.Module, name: str) -> int:
    """Bytes that a compiled model's forward pass hands to its backward pass."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model, name)
    return sum(held.values())

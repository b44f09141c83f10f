"""Linear layers that multiply in fp8, by torchao's float8 training. Importing this needs torchao.

A layer stays what it is but for its class: parameters, names, hooks and ties are its own, so that checkpoints, exports,
checkpointing and blocks in host memory see an ordinary model. torchao's own layer is not used because it knows no
autocast but CUDA's, none of GPT-2's layers, and no micro-batch whose tokens are not a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, LinearMMConfig, convert_to_float8_training
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import ScaledMMConfig
from transformers.pytorch_utils import Conv1D

ROW_MULTIPLE = 16
"""Numbers in 16 bytes: what tensor cores read fp8 rows by."""
MATMUL_CONFIG = LinearMMConfig()
"""Sums of the forward product may be kept in fewer bits than fp32, those of gradients not."""
EMULATED_CONFIG = LinearMMConfig(*[ScaledMMConfig(emulate=True)] * 3)
"""Products of the same fp8 numbers in fp32."""


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in fp8."""

    fp8: Float8LinearConfig

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return _multiply(input, self.weight.t(), self.bias, self.fp8)


class Fp8Conv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is (in, out), in fp8."""

    fp8: Float8LinearConfig

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.weight, self.bias, self.fp8)


CLASSES: dict[type[nn.Module], type[Fp8Linear | Fp8Conv1D]] = {nn.Linear: Fp8Linear, Conv1D: Fp8Conv1D}


def convert(blocks: Iterable[nn.Module], scaling: str, *, emulated: bool) -> tuple[int, int]:
    """Let the linear layers of a model's blocks multiply in fp8 from now on. scaling: the name of torchao's recipe.
    emulated: whether in fp32, as on a processor, whose own kernel for it is a slow reference.

    Returns how many do, and how many do not because a side is no multiple of 16.
    """
    convert_to_float8_training(nn.Identity())  # for its workaround of a Triton miscompile (triton issue 11111)
    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulated)
    layers = {layer for block in blocks for layer in block.modules() if type(layer) in CLASSES}
    fitting = [layer for layer in layers if not any(side % ROW_MULTIPLE for side in _sides(layer))]
    for layer in fitting:
        layer.__class__ = CLASSES[type(layer)]
        layer.fp8 = config
    return len(fitting), len(layers) - len(fitting)


def _sides(layer: nn.Module) -> Sequence[int]:
    assert isinstance(layer.weight, Tensor)
    return layer.weight.shape


def _multiply(values: Tensor, weight: Tensor, bias: Tensor | None, config: Float8LinearConfig) -> Tensor:
    """`values` (..., in) by `weight` (in, out), in autocast's format where that is on, else the values' own."""
    kind, dtype = values.device.type, values.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    rows = values.to(dtype).reshape(-1, values.shape[-1])
    count = rows.shape[0]
    missing = -count % ROW_MULTIPLE if count else ROW_MULTIPLE
    if missing:  # the weight's gradient is a product over rows
        rows = F.pad(rows, (0, 0, 0, missing))
    with torch.autocast(kind, enabled=False):  # which would cast fp32 weights before fp8's own cast does
        products = EMULATED_CONFIG if config.emulate else MATMUL_CONFIG
        result: Tensor = matmul_with_hp_or_float8_args.apply(rows, weight, products, config)
    if missing:
        result = result[:count]
    if bias is not None:
        result = result + bias.to(dtype)
    return result.view(*values.shape[:-1], -1)

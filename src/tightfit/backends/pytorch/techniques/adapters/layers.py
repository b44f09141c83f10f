"""Linear layers whose weight is frozen: held in fewer bits, added to by low-rank factors, or both.

A layer stays what it is but for its class: names, hooks and ties are its own, so that what works on blocks sees an
ordinary model. The factors are parameters of the layer, `lora_a` (rank, in) and `lora_b` (out, rank), and with DoRA
`lora_magnitude` (out,); a quantized weight lies in buffers that no state dict holds, and `weight` is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from tightfit.techniques.trainable import LowRank

FACTORS = ("lora_a", "lora_b", "lora_magnitude")
"""Names of the parameters that are added to a layer."""


@dataclass(frozen=True)
class Quantized:
    """A weight that is held in fewer bits. parts: the names of the buffers."""

    kind: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]


class FrozenLayer(nn.Module):
    """A linear layer with a frozen weight. transposed: whether the weight is (in, out)."""

    transposed: ClassVar[bool] = False
    quantized: Quantized | None = None
    added: LowRank | None = None
    weight: Tensor
    bias: nn.Parameter  # or None, as of nn.Linear
    lora_a: Tensor
    lora_b: Tensor
    lora_magnitude: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        added = self.added
        if added is None:
            return _product(self, input, self.bias)
        dropped = F.dropout(input, added.dropout, self.training) if added.dropout else input
        low = F.linear(F.linear(dropped, self.lora_a) * added.scale, self.lora_b)
        if not added.learns_magnitude:
            return _product(self, input, self.bias) + low
        factor = _dora_factor(self, low.dtype)
        if dropped is input:
            result = factor * (_product(self, input, None) + low)
            return result if self.bias is None else result + self.bias.to(result.dtype)
        # As the paper's authors have it: what is dropped is dropped from the change of lengths too, not from the
        # weight.
        return _product(self, input, self.bias) + (factor - 1) * _product(self, dropped, None) + factor * low

    @property
    def sides(self) -> tuple[int, int]:
        """Outputs and inputs."""
        first, last = self.weight.shape if self.quantized is None else self.quantized.shape
        return (last, first) if self.transposed else (first, last)

    @property
    def quantized_weights(self) -> int:
        """Weights that are quantized, and no parameters."""
        return 0 if self.quantized is None else math.prod(self.quantized.shape)

    def own_tensors(self, dtype: torch.dtype) -> dict[str, Tensor | None]:
        """Tensors where they are stored otherwise than in the state dict, as if nothing were added: no factors, and a
        quantized weight dequantized, in host memory."""
        own: dict[str, Tensor | None] = dict.fromkeys(FACTORS)
        if self.quantized is not None:
            own["weight"] = _as_stored(self, full_weight(self, dtype).cpu())
        return own


class FrozenLinear(FrozenLayer, nn.Linear):
    """A linear layer of PyTorch's, frozen."""


class FrozenConv1D(FrozenLayer, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, frozen."""

    transposed: ClassVar[bool] = True


CLASSES: dict[type[nn.Module], type[FrozenLayer]] = {nn.Linear: FrozenLinear, Conv1D: FrozenConv1D}
LINEAR = (nn.Linear, Conv1D)
PLAIN = {frozen: plain for plain, frozen in CLASSES.items()}


def frozen_layer(layer: nn.Module) -> FrozenLayer | None:
    """The layer, of the class that can be added to and quantized; None for what is no linear layer of that kind."""
    if type(layer) in CLASSES:
        layer.__class__ = CLASSES[type(layer)]
    return layer if isinstance(layer, FrozenLayer) else None


def frozen_layers(model: nn.Module) -> Iterator[tuple[str, FrozenLayer]]:
    """The layers of those classes, by name, each once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, FrozenLayer))


def call_layers(model: nn.Module) -> None:
    """Have torch's own encoder layers call their linear layers in evaluation too, of which their fast path reads the
    weights alone: what is added to a layer is in its forward pass."""
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # as of an activation that the fast path does not have
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def quantize(layer: FrozenLayer, kind: str, device: torch.device, held_on: torch.device) -> None:
    """Hold a layer's weight in fewer bits from now on, made on `device`."""
    from tightfit.backends.pytorch.techniques.adapters.quantization import QUANTIZE

    weight = layer.weight.detach().to(device)
    parts = QUANTIZE[kind](weight)
    names = tuple(f"weight_{number}" for number in range(len(parts)))
    layer.register_parameter("weight", None)
    for name, part in zip(names, parts, strict=True):
        # As a tensor of its own: a view would keep its memory when it lies elsewhere.
        layer.register_buffer(name, part.to(held_on).data, persistent=False)
    layer.quantized = Quantized(kind, tuple(weight.shape), names)


def quantized_parts(layer: FrozenLayer) -> list[Tensor]:
    """The buffers of a quantized weight."""
    return [] if layer.quantized is None else [getattr(layer, name) for name in layer.quantized.parts]


def full_weight(layer: FrozenLayer, dtype: torch.dtype) -> Tensor:
    """The frozen weight as (out, in), dequantized where it is quantized."""
    if layer.quantized is None:
        weight = layer.weight.detach().to(dtype)
    else:
        from tightfit.backends.pytorch.techniques.adapters.quantization import DEQUANTIZE

        held = layer.quantized
        weight = DEQUANTIZE[held.kind](*quantized_parts(layer), held.shape, dtype, False)
    return weight.t() if layer.transposed else weight


def merged_weight(layer: FrozenLayer, dtype: torch.dtype) -> Tensor:
    """The weight that a layer works as, (out, in): with what is added worked in."""
    weight = full_weight(layer, dtype)
    if layer.added is None:
        return weight
    whole = weight + layer.added.scale * (layer.lora_b.to(dtype) @ layer.lora_a.to(dtype))
    if layer.added.learns_magnitude:
        whole = whole * (layer.lora_magnitude.to(dtype) / torch.linalg.vector_norm(whole, dim=1))[:, None]
    return whole


def _as_stored(layer: FrozenLayer, weight: Tensor) -> Tensor:
    """A weight (out, in) as the layer's own class holds it."""
    return (weight.t() if layer.transposed else weight).contiguous()


def dequantize(layer: FrozenLayer, dtype: torch.dtype) -> None:
    """Make a layer an ordinary one again, with what is added worked into its weight."""
    weight = _as_stored(layer, merged_weight(layer, dtype).detach())
    for name in (*FACTORS, *(layer.quantized.parts if layer.quantized else ())):
        if name in layer._parameters or name in layer._buffers:
            delattr(layer, name)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.quantized = layer.added = None
    layer.__class__ = PLAIN[type(layer)]  # type: ignore[assignment]


def _dora_factor(layer: FrozenLayer, dtype: torch.dtype) -> Tensor:
    """The learned length of each output's weights over the length that they have, (out,). The latter is taken as a
    constant, by section 4.3 of the paper."""
    assert layer.added is not None
    with torch.no_grad(), torch.autocast(layer.lora_a.device.type, enabled=False):
        whole = full_weight(layer, layer.lora_a.dtype) + layer.added.scale * (layer.lora_b @ layer.lora_a)
        length = torch.linalg.vector_norm(whole, dim=1)
    factor: Tensor = (layer.lora_magnitude / length).to(dtype)
    return factor


def _product(layer: FrozenLayer, values: Tensor, bias: Tensor | None) -> Tensor:
    if layer.quantized is None:
        return F.linear(values, layer.weight.t() if layer.transposed else layer.weight, bias)
    from tightfit.backends.pytorch.techniques.adapters.quantization import QuantizedProduct

    kind = values.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype
    held = layer.quantized
    bias = None if bias is None else bias.to(dtype)
    values = values.to(dtype)
    with torch.autocast(kind, enabled=False):
        parts = quantized_parts(layer)
        result: Tensor = QuantizedProduct.apply(  # type: ignore[no-untyped-call]
            values, bias, held.kind, held.shape, layer.transposed, *parts)
    return result


def magnitudes(layer: FrozenLayer) -> Tensor:
    """The lengths of each output's weights, (out,): what DoRA's learned ones begin with."""
    found: Tensor = torch.linalg.vector_norm(full_weight(layer, torch.float32), dim=1)
    return found

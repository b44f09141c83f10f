"""Weights in few bits: the values, the error that the format itself has, and what is kept between two passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from tightfit.backends.pytorch.techniques.adapters.layers import FrozenConv1D, FrozenLinear, full_weight, quantize
from tightfit.backends.pytorch.techniques.adapters.quantization import DEQUANTIZE, PIECE_SIZE, QUANTIZE, nf4_values

CPU = torch.device("cpu")
# Table of the QLoRA paper's appendix E.
PUBLISHED = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
             0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)


def test_nf4s_values_are_the_papers():
    assert nf4_values() == pytest.approx(PUBLISHED, abs=5e-7)


@pytest.mark.parametrize("shape", [(64, 64), (7, 9), (3, PIECE_SIZE // 2 + 5)])
@pytest.mark.parametrize("kind", QUANTIZE)
def test_a_weight_comes_back_within_half_a_step_of_its_block(kind, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    back = DEQUANTIZE[kind](*QUANTIZE[kind](weight), shape, torch.float32, False)
    assert back.shape == weight.shape
    block = {"nf4": 64, "int8": 256}[kind]
    rows = F.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
    most = rows.abs().amax(1)
    if kind == "int8":
        bound = most / 127 / 2
    else:  # half the widest step, and the rounding of the scale to 8 bits around the mean
        steps = torch.tensor(nf4_values()).diff().max() / 2
        bound = most * steps + (most - most.mean()).abs().max() / 127 / 2
    errors = F.pad((back - weight).abs().flatten(), (0, -weight.numel() % block)).view(-1, block).amax(1)
    assert (errors <= bound * 1.0001).all()


def test_nf4s_error_on_a_normal_distribution_is_what_its_16_values_give():
    torch.manual_seed(0)
    weight = torch.randn(512, 512)
    back = DEQUANTIZE["nf4"](*QUANTIZE["nf4"](weight), weight.shape, torch.float32, False)
    rows = weight.view(-1, 64)
    scale, table = rows.abs().amax(1, keepdim=True), torch.tensor(nf4_values())
    nearest = table[(rows[..., None] / scale[..., None] - table).abs().argmin(-1)] * scale
    ideal = (nearest - rows).pow(2).mean().sqrt()
    assert (back - weight).pow(2).mean().sqrt() <= 1.02 * ideal  # the scales' own 8 bits add 2 % at most


@pytest.mark.parametrize("kind", QUANTIZE)
@pytest.mark.parametrize(("made", "sides"), [(nn.Linear, (40, 24)), (Conv1D, (24, 40))], ids=["Linear", "Conv1D"])
def test_a_product_is_that_of_the_dequantized_weight_and_keeps_its_codes_alone(made, sides, kind):
    torch.manual_seed(0)
    layer = made(*sides)
    layer.__class__ = FrozenLinear if isinstance(layer, nn.Linear) else FrozenConv1D
    quantize(layer, kind, CPU, CPU)
    weight = full_weight(layer, torch.float32)
    assert weight.shape == (24, 40)
    values = torch.randn(3, 5, 40, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        result = layer(values)
    assert set(kept) <= {buffer.data_ptr() for buffer in layer.buffers()}
    result.square().sum().backward()
    plain = values.detach().clone().requires_grad_()
    expected = F.linear(plain, weight, layer.bias)
    expected.square().sum().backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(values.grad, plain.grad)


def test_bits_of_a_weight():
    weight = torch.randn(1024, 1024)
    bits = {kind: 8 * sum(p.numel() * p.element_size() for p in QUANTIZE[kind](weight)) / weight.numel()
            for kind in QUANTIZE}
    assert bits["nf4"] == pytest.approx(4.127, abs=0.001)  # the paper's, section 3
    assert bits["int8"] == pytest.approx(8.125, abs=0.001)

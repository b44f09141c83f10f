"""Dimensions that leave tensor cores idle."""

from __future__ import annotations

import pytest

from tightfit.devices import find_device
from tightfit.planning.alignment import dimensions, misaligned, wanted_multiples
from tightfit.recipe import Recipe

A100, RTX, V100 = find_device("a100-80gb-sxm"), find_device("rtx-4090"), find_device("v100-16gb")


@pytest.mark.parametrize(("device", "size", "expected"), [
    (A100, 2, (8, 64)), (A100, 4, (4, 32)), (RTX, 2, (8, 8)), (RTX, 4, (4, 4)), (V100, 2, (8, 8)), (V100, 4, (1, 1)),
])
def test_multiples_by_device_and_format(device, size, expected):
    """NVIDIA, Matrix Multiplication Background User's Guide, tensor core requirements."""
    assert wanted_multiples(device, size) == expected


def test_reads_dimensions_from_the_configuration():
    assert dimensions(Recipe(model="gpt2", seq_len=77)) == {
        "vocab_size": 50_257, "hidden_size": 768, "head_dim": 64, "seq_len": 77}
    assert dimensions(Recipe(model="t5-small", task="seq2seq"))["intermediate_size"] == 2048
    padded = dimensions(Recipe(model="gpt2", pad_vocab_to=64, pad_sequence_to=8, seq_len=77))
    assert (padded["vocab_size"], padded["seq_len"]) == (50_304, 80)
    assert "vocab_size" not in dimensions(Recipe(model="vit-base", task="image-classification"))


def test_names_each_with_what_to_write():
    recipe = Recipe(model="gpt2", precision="bf16", seq_len=1001)
    dims = {"vocab_size": 50_257, "hidden_size": 1023, "intermediate_size": 4096, "seq_len": 1001}
    asked = []
    found = misaligned(recipe, A100, dims, lambda padded: asked.append(padded) or 0.125)
    assert {m.field: (m.multiple, m.padded, m.gain) for m in found} == {
        "vocab_size": (64, 50_304, 0.125), "hidden_size": (8, 1024, None), "seq_len": (8, 1008, None)}
    assert found[0].field == "vocab_size"
    assert "write pad_vocab_to=64 (50,304), which is predicted to save 12 % of a step" in found[0].sentence
    assert "write seq_len=1000" in next(m.sentence for m in found if m.field == "seq_len")
    assert [padded.pad_vocab_to for padded in asked] == [64]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_full_precision_without_tensor_cores_wants_nothing(precision):
    recipe = Recipe(precision=precision)
    found = misaligned(recipe, A100, {"vocab_size": 50_257})
    assert [m.multiple for m in found] == ([] if precision == "fp32" else [32])


def test_what_padding_does_not_help_is_left_out():
    recipe = Recipe(model="gpt2", precision="bf16")
    assert misaligned(recipe, A100, {"vocab_size": 50_257}, lambda padded: 0.0) == ()
    assert len(misaligned(recipe, A100, {"vocab_size": 50_257}, lambda padded: None)) == 1


def test_aligned_dimensions_are_silent():
    assert misaligned(Recipe(precision="bf16"), A100, {"vocab_size": 50_304, "hidden_size": 768, "seq_len": 1024}) == ()

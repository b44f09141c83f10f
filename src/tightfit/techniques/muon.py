"""Muon: an optimizer of matrices, beside AdamW for all other parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tightfit.techniques.optimizer import Beta, Optimizer
from tightfit.techniques.precision import bf16_emulation
from tightfit.techniques.technique import NonNegative, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


@technique
class Muon(Optimizer):
    """Muon from torch.optim (Jordan et al. 2024): momentum whose step for a matrix is made orthogonal by five
    Newton-Schulz iterations in bf16, so that it moves all directions alike. Steps are as large as AdamW's, whose
    learning rate and weight decay serve (Liu et al. 2025, arXiv 2502.16982). Muon's are the matrices of a model's
    blocks, those of stacked experts one by one, LoRA's factors among them; projections that a model fuses to one matrix
    are one. Embeddings, head, norms, biases, convolutions and all else outside the blocks are AdamW's. A model without
    blocks has all of its matrices made orthogonal but its embeddings."""

    name: ClassVar[str] = "muon"
    auto_on: ClassVar = ()  # it takes other steps than AdamW, and saves no more than AdamW with 8-bit states
    speed: ClassVar[str] = "slower than AdamW: fifteen products of a matrix, little beside those of many tokens"
    memory: ClassVar[str] = "4 bytes a parameter of the blocks' matrices, 8 of all others"
    numerics_change: ClassVar[int] = 4
    state_bytes: ClassVar[float] = 4.0
    works_on_shards: ClassVar[bool] = False  # parts of a matrix made orthogonal are no parts of one that is
    bf16_roundings: ClassVar = ("kahan", "stochastic", "nearest")

    momentum: Beta = 0.95
    """Decay rate of the matrices' momentum, which is Nesterov's."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, on matrices only."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates, for the parameters that it updates."""

    def notes(self, recipe: Recipe, device: Device) -> tuple[str, ...]:
        if not recipe.backend.runs_torch or not (emulated := bf16_emulation(device)):
            return ()
        return (f"optimizer: muon's products are bf16 in every precision, and {emulated}, slowly",)

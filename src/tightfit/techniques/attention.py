"""Attention: the kernels that avoid, or keep, the matrix of sequence by sequence scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from tightfit.techniques.technique import Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

SdpaKernel = Literal["auto", "flash", "efficient", "cudnn", "math"]


class Attention(Technique):
    slot: ClassVar[str] = "attention"
    exact: ClassVar = "rounding"
    hf_name: ClassVar[str]
    """transformers' `attn_implementation` of it."""
    keeps_scores: ClassVar[bool] = False
    """Whether every layer's matrix of scores is kept for the backward pass."""
    generates: ClassVar[bool] = True
    """Whether transformers generates with it."""

    @property
    def packs_unmasked(self) -> bool:
        """Whether PyTorch's variable-length kernel keeps packed documents apart with no mask, in half precision on
        CUDA and without dropout."""
        return False


def _refuse_half_kernel(recipe: Recipe, device: Device, kernel: str, instead: str) -> Iterator[str]:
    """Reasons why flash attention's kernels or cuDNN's cannot serve on a CUDA device. instead: what to write to do
    without them."""
    if not device.has_flash:
        yield f"{kernel} needs compute capability 8.0 or later; write {instead}"
    if recipe.precision != "auto" and not recipe.is_half:
        yield f"{kernel} needs half precision; write precision=bf16 or {instead}"


@technique
class Eager(Attention):
    """Plain matrix products and a softmax in fp32. It keeps every layer's matrix of scores, which grows with the
    square of the sequence: the reference the other kernels are compared with."""

    name: ClassVar[str] = "eager"
    hf_name: ClassVar[str] = "eager"
    speed: ClassVar[str] = "slowest"
    memory: ClassVar[str] = "most: batch x heads x sequence x sequence for each layer"
    keeps_scores: ClassVar[bool] = True
    slowdown_share: ClassVar = {"cpu": -0.1, "cuda": 0.4}
    dominated_by: ClassVar = {"cuda": "sdpa"}  # a processor has no fused kernel for some, as with dropout


@technique
class Sdpa(Attention):
    """PyTorch's scaled_dot_product_attention, or JAX's dot_product_attention: it picks a fused kernel, or takes the one
    named here."""

    name: ClassVar[str] = "sdpa"
    hf_name: ClassVar[str] = "sdpa"
    speed: ClassVar[str] = "faster, most with long sequences"
    memory: ClassVar[str] = "linear in the sequence (flash, efficient and cuDNN kernels)"
    activation_share: ClassVar[float] = 0.5
    worth_trying: ClassVar = ({}, {"kernel": "flash"}, {"kernel": "efficient"}, {"kernel": "cudnn"}, {"kernel": "math"})

    kernel: SdpaKernel = "auto"
    """The kernel to allow: auto lets the framework choose; flash and cudnn need half precision; math is the unfused
    one."""

    @property
    def packs_unmasked(self) -> bool:
        return self.kernel in ("auto", "flash")

    def slowdown(self, device: Device) -> float:
        return -0.1 if self.kernel == "cudnn" else 0.0

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if device.kind == "cpu" and self.kernel in ("efficient", "cudnn"):
            yield f"the {self.kernel} kernel exists on CUDA devices only; write attention.kernel=auto"
        if device.kind == "cuda" and self.kernel in ("flash", "cudnn"):
            yield from _refuse_half_kernel(recipe, device, f"the {self.kernel} kernel", "attention.kernel=efficient")

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        return cls()

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [cls(), cls(kernel="cudnn")] if recipe.backend.compiles_whole_steps else [cls()]

    def saving(self, recipe: Recipe) -> str:
        return "no matrix of scores" if recipe.keeps_scores else ""


@technique
class Flex(Attention):
    """PyTorch's FlexAttention: a compiled kernel that skips what a block mask rules out, so that packed documents
    cost only what lies inside them."""

    name: ClassVar[str] = "flex"
    hf_name: ClassVar[str] = "flex_attention"
    speed: ClassVar[str] = "fast with packed documents"
    memory: ClassVar[str] = "linear in the sequence"
    activation_share: ClassVar[float] = 0.5
    generates: ClassVar[bool] = False
    auto_on: ClassVar = ("pytorch",)
    dominated_by: ClassVar = {"cuda": "sdpa"}  # not measured side by side: taken where a model has no sdpa

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return super().search_settings(recipe, device) if device.kind == "cuda" and recipe.mode == "train" else []

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if device.kind == "cpu":
            yield "FlexAttention has no backward pass on the CPU; write attention=sdpa"


@technique
class FlashAttn(Attention):
    """The flash-attn library's own kernels, where it is installed."""

    name: ClassVar[str] = "flash-attn"
    hf_name: ClassVar[str] = "flash_attention_2"
    speed: ClassVar[str] = "as the flash kernel, or faster on the newest GPUs"
    memory: ClassVar[str] = "linear in the sequence"
    activation_share: ClassVar[float] = 0.5
    generates: ClassVar[bool] = False
    auto_on: ClassVar = ()

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if device.kind == "cpu":
            yield "flash-attn runs on CUDA devices only; write attention=sdpa"
        else:
            yield from _refuse_half_kernel(recipe, device, "flash-attn", "attention=sdpa")

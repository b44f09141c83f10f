"""Number formats: what the matrix products run in, and what weights and optimizer states are kept in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from tightfit.techniques.technique import Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

Rounding = Literal["kahan", "stochastic", "nearest"]


class Precision(Technique):
    slot: ClassVar[str] = "precision"
    changes_states: ClassVar[bool] = True
    computes_in: ClassVar[str] = "float32"
    """The format of matrix products, where they have one of several that of the blocks' linear layers."""
    loss_scaling: ClassVar[bool] = False
    """Whether losses are scaled up, so that a step whose gradients overflow is skipped."""
    unserved: ClassVar[Mapping[str, str]] = {
        "mxfp8": "its kernels are made for data-center Blackwell alone, and torchao has them as a prototype; write "
                 "precision=fp8",
        "nvfp4": "its kernels are made for Blackwell alone, and torchao has training in it as a prototype; write "
                 "precision=fp8",
    }

    hf_flag: ClassVar[str | None] = None
    """The argument of Hugging Face's TrainingArguments that turns it on; empty where none has to, None where none can.
    """

    def hf_arguments(self, on_cpu: bool) -> dict[str, Any] | None:
        if self.hf_flag is None:
            return None
        knobs = {"tf32": "tf32", "full_eval": f"{self.hf_flag}_full_eval"}
        written = {argument: True for knob, argument in knobs.items() if getattr(self, knob, False)}
        return {**({self.hf_flag: True} if self.hf_flag else {}), **written}

    @classmethod
    def from_hf_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any] | None:
        on = next((flag for flag in ("bf16", "fp16") if a[flag]), "")
        if cls.hf_flag != on:
            return None
        return {"tf32": bool(a["tf32"]), **({"full_eval": a[f"{on}_full_eval"]} if on else {})}

    @property
    def tf32(self) -> bool:
        """Whether matrix products of fp32 tensors may use the tensor cores."""
        return False

    @property
    def full_eval(self) -> bool:
        """Whether an evaluation takes the weights themselves in 16 bits."""
        return False

    @property
    def is_half(self) -> bool:
        """Whether matrix products take numbers of 16 bits or fewer."""
        return self.computes_in != "float32"

    @property
    def activations_in(self) -> str:
        """The format of activations, and of every other product: attention's, and the head's."""
        return self.computes_in

    @property
    def scales_weights(self) -> bool:
        """Whether products scale the weights by what they see of them."""
        return self.computes_in != self.activations_in

    @property
    def autocast(self) -> bool:
        """Whether weights are cast to `activations_in` while a step runs."""
        return self.is_half and self.weight_rounding is None

    @property
    def weight_rounding(self) -> Rounding | None:
        """Rounding of updates of weights that are bf16 themselves; None where weights are fp32."""
        return None

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return 4 if self.weight_rounding is None else 2

    def bytes_per_parameter(self, recipe: Recipe) -> float:
        recomputed = recipe.compiled and recipe.recomputes
        copies = 2 if self.autocast and not recomputed else 0  # else each block's are freed with its activations
        return 2.0 * self.weight_bytes + copies  # a weight and its gradient


@technique
class _Fp32Weights(Precision):
    tf32: bool = False
    """Let matrix products and convolutions of fp32 tensors use the tensor cores (CUDA, capability 8.0 and later)."""

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if self.tf32 and not device.has_tensor_cores("tf32"):
            yield (f"tf32 is a mode of CUDA devices of compute capability 8.0 or later, which {device.name} is not; "
                   "write precision.tf32=false")


@technique
class _Mixed(_Fp32Weights):
    exact: ClassVar = "changes"
    activation_share: ClassVar[float] = 0.65
    tolerance: ClassVar[float] = 0.05
    speed: ClassVar[str] = "2 to 5 times faster on tensor cores"
    memory: ClassVar[str] = "activations halve; weights stay fp32, with a half copy while a step runs"

    full_eval: bool = False
    """Evaluate with the weights themselves in 16 bits: half the memory, figures a little off."""

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from super().refuse(recipe, device)
        if self.full_eval and not recipe.backend.runs_torch:
            yield "JAX evaluates with the weights as they are; write precision.full_eval=false"

    @classmethod
    def default_setting(cls, recipe: Recipe, device: Device) -> Self | None:
        if device.kind == "cpu" or half_precision(device) is not cls or recipe.backend.name not in cls.auto_on:
            return None
        return cls(full_eval=recipe.mode == "inference")

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        if half_precision(device) is not cls or recipe.backend.name not in cls.auto_on:
            return []
        return [cls(full_eval=True), cls()] if recipe.mode == "inference" else [cls()]

    def saving(self, recipe: Recipe) -> str:
        return "" if recipe.precision == "auto" or recipe.precision.is_half else "activations halve"


@technique
class Fp32(_Fp32Weights):
    """Everything in 32-bit floating point; with `tf32`, matrix products round their inputs to 19 bits and run on the
    tensor cores. `precision=tf32` is short for this with `tf32: true`."""

    name: ClassVar[str] = "fp32"
    hf_flag: ClassVar = ""
    exact: ClassVar = "bitwise"
    speed: ClassVar[str] = "the baseline; with tf32 up to 3 times faster on Ampere and later"
    memory: ClassVar[str] = "the baseline: 4 bytes a weight, 4 a gradient"
    slowdown_share: ClassVar = {"cuda": 0.4}

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [cls(tf32=device.has_tensor_cores("tf32"))]


@technique
class Fp16(_Mixed):
    """Mixed precision with 16-bit floating point under autocast, and dynamic loss scaling against its small range."""

    name: ClassVar[str] = "fp16"
    auto_on: ClassVar = ("pytorch",)
    loss_scaling: ClassVar[bool] = True
    hf_flag: ClassVar = "fp16"
    computes_in: ClassVar[str] = "float16"


@technique
class Bf16(_Mixed):
    """Mixed precision with bfloat16 under autocast: fp32's range, so no loss scaling."""

    name: ClassVar[str] = "bf16"
    # Measured with AVX-512 BF16 (results/search_quality.json); on a CPU without it, the first trace shows otherwise.
    slowdown_share: ClassVar = {"cpu": -0.3}
    hf_flag: ClassVar = "bf16"
    computes_in: ClassVar[str] = "bfloat16"

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from _refuse_bf16(device)
        yield from super().refuse(recipe, device)


@technique
class Bf16Pure(Precision):
    """Weights, gradients and optimizer states all in bfloat16. Its 8 bits of mantissa lose small updates, so the
    update is rounded stochastically or carries a Kahan compensation."""

    name: ClassVar[str] = "bf16-pure"
    auto_on: ClassVar = ("pytorch",)
    computes_in: ClassVar[str] = "bfloat16"
    exact: ClassVar = "changes"
    numerics_change: ClassVar[int] = 2
    activation_share: ClassVar[float] = 0.5
    tolerance: ClassVar[float] = 0.15
    speed: ClassVar[str] = "as bf16, with no casts of weights"
    memory: ClassVar[str] = "2 bytes a weight, 2 a gradient, 4 for AdamW's states (6 with Kahan)"
    slowdown_share: ClassVar = {"cuda": -0.1}
    worth_trying: ClassVar = ({}, {"rounding": "stochastic"})

    rounding: Rounding = "kahan"
    """How a weight takes an update smaller than its last bit: kahan keeps the lost part in one more bf16 tensor,
    stochastic rounds up or down at random in proportion, nearest loses it."""

    @property
    def weight_rounding(self) -> Rounding:
        return self.rounding

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        yield from _refuse_bf16(device)
        yield from _refuse_rounding(self.rounding, recipe)

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [] if recipe.mode == "inference" else super().search_settings(recipe, device)

    def saving(self, recipe: Recipe) -> str:
        full = recipe.precision != "auto" and recipe.precision.weight_bytes > self.weight_bytes
        return "2 bytes a weight and a gradient" if full else ""


@technique
class Fp8(Precision):
    """Matrix products of the blocks' linear layers in 8-bit floating point, by torchao's dynamic scaling; everything
    else as in bf16. Embeddings and head are left out, and layers with a side that is no multiple of 16."""

    name: ClassVar[str] = "fp8"
    computes_in: ClassVar[str] = "float8_e4m3fn"
    exact: ClassVar = "changes"
    numerics_change: ClassVar[int] = 2
    activation_share: ClassVar[float] = 0.5
    tolerance: ClassVar[float] = 0.1
    speed: ClassVar[str] = "faster than bf16 in large layers once compiled; slower uncompiled, and on a processor"
    memory: ClassVar[str] = "as bf16, with no half copies of the blocks' weights; compiled, less is kept of activations"
    slowdown_share: ClassVar = {"cuda": -0.1}
    auto_on: ClassVar = ("pytorch",)
    worth_trying: ClassVar = ({}, {"scaling": "rowwise"}, {"weights": "bf16"})

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale for a whole tensor, with gradients in e5m2; or one for each row and column, all of it in e4m3."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """The format that weights and their gradients are kept in."""
    rounding: Rounding = "kahan"
    """How a bf16 weight takes an update smaller than its last bit; see bf16-pure."""

    @property
    def activations_in(self) -> str:
        return "bfloat16"

    @property
    def weight_rounding(self) -> Rounding | None:
        return self.rounding if self.weights == "bf16" else None

    def bytes_per_parameter(self, recipe: Recipe) -> float:
        return 2.0 * self.weight_bytes  # casts of weights live as long as a product

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if self.weights != "fp32":
            yield from _refuse_rounding(self.rounding, recipe)
        if device.kind == "cuda" and not device.has_tensor_cores("fp8"):
            instead = half_precision(device).name
            yield (f"fp8 products need compute capability 8.9 or later, which {device.name} has not; write "
                   f"precision={instead}")
        if recipe.mode == "inference":
            yield "fp8 is for training; write precision=bf16"

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        """Only for who lets numerics change for speed: what it saves in memory, others save with less change."""
        if not recipe.allow_numerics or device.kind != "cuda" or not super().search_settings(recipe, device):
            return []
        return [cls(), cls(weights="bf16", rounding="stochastic")]


def half_precision(device: Device) -> type[Bf16] | type[Fp16]:
    """The mixed precision that is usual on a device: bf16, or fp16 where bf16 is emulated."""
    return Fp16 if bf16_emulation(device) else Bf16


def bf16_emulation(device: Device) -> str:
    """A clause that says that a device emulates bf16; empty for one that does not."""
    if device.kind != "cuda" or device.has_tensor_cores("bf16"):
        return ""
    return (f"{device.name} computes bf16 in emulation only (compute capability "
            f"{'.'.join(map(str, device.capability or ()))}, 8.0 is needed)")


def _refuse_bf16(device: Device) -> Iterator[str]:
    if emulated := bf16_emulation(device):
        yield f"{emulated}; write precision=fp16"


def _refuse_rounding(rounding: Rounding, recipe: Recipe) -> Iterator[str]:
    """Reasons why a recipe's optimizer cannot update bf16 weights so; one that has no way to says it itself."""
    if recipe.optimizer != "auto" and (able := recipe.optimizer.bf16_roundings) and rounding not in able:
        yield (f"optimizer {recipe.optimizer.name} cannot round bf16 weights with {rounding!r}; write "
               + " or ".join(f"precision.rounding={way}" for way in able))

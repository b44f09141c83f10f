"""Optimizers: how fast an update is computed, and how many bytes a parameter its states take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from tightfit.techniques.precision import Rounding
from tightfit.techniques.technique import NUMBER, Exactness, NonNegative, Technique, at_most, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

Beta = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), NUMBER]
BlockSize = Annotated[int, Field(ge=32), at_most(2**31 - 1), NUMBER]
Implementation = Literal["auto", "loop", "foreach", "fused", "apex"]

ADAFACTOR_USUAL_RATE = 1e-2
"""The relative step of the paper."""


class Optimizer(Technique):
    slot: ClassVar[str] = "optimizer"
    exact: ClassVar[Exactness] = "changes"
    tolerance: ClassVar[float] = 0.1
    changes_states: ClassVar[bool] = True
    trains_only: ClassVar[bool] = True
    auto_on: ClassVar[tuple[str, ...]] = ("pytorch",)
    state_bytes: ClassVar[float]
    """Bytes of optimizer state a parameter, for fp32 weights, as a rule of thumb."""
    works_on_shards: ClassVar[bool] = True
    """Whether it updates a part of a weight, such as some of its rows, as it would with the whole at hand."""
    own_formats: ClassVar[bool] = False
    """Whether states have formats of their own, whatever the weights' format is; otherwise they have the weights'."""
    bf16_roundings: ClassVar[tuple[Rounding, ...]] = ("nearest",)
    """The ways this optimizer can update weights that are bf16 themselves; none where it refuses such weights."""
    hf_names: ClassVar[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {}
    """The names of Hugging Face's `optim` that mean it, the one to write first, and the knobs that each stands for."""
    hf_names_on_cpu: ClassVar[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {}
    """Those of them that stand for other knobs on the processor."""
    hf_adam: ClassVar[bool] = False
    """Whether a Hugging Face Trainer gives it the betas and the epsilon of its arguments."""
    hf_options: ClassVar[Mapping[str, tuple[str, Any]]] = {}
    """Knobs by their names in `optim_args`, each with what it is where it is absent there."""
    hf_ignored: ClassVar[tuple[str, ...]] = ()
    """Names in `optim_args` that say nothing here."""

    def hf_arguments(self, on_cpu: bool) -> dict[str, Any] | None:
        from tightfit.techniques import hf_optimizers  # whoever trains by a recipe reads no such names

        return hf_optimizers.write(self, on_cpu)

    @classmethod
    def from_hf_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any] | None:
        from tightfit.techniques import hf_optimizers

        return hf_optimizers.read(cls, a)

    def bytes_beside(self, rounding: Rounding | None) -> float:
        """`state_bytes` beside weights whose updates are rounded so (see `Precision.weight_rounding`): states in the
        weights' format halve beside bf16 ones, and Kahan summation keeps one more bf16 number a weight."""
        if rounding is None:
            return self.state_bytes
        states = self.state_bytes if self.own_formats else self.state_bytes / 2
        return states + (2 if rounding == "kahan" else 0)

    def bytes_per_parameter(self, recipe: Recipe) -> float:
        return self.bytes_beside(recipe.weight_rounding)


@technique
class _Decaying(Optimizer):
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, on matrices only."""


@technique
class _Adam(_Decaying):
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running mean and the running mean of squares."""


@technique
class _Quantized(_Adam):
    speed: ClassVar[str] = "as AdamW once compiled"
    own_formats: ClassVar[bool] = True
    works_on_shards: ClassVar[bool] = False  # a block of values may straddle two parts
    bf16_roundings: ClassVar = ("stochastic", "nearest")
    numerics_change: ClassVar[int] = 1
    hf_adam: ClassVar[bool] = True

    block_size: BlockSize = 256
    """Values that share one scale."""


@technique
class AdamW(_Adam):
    """Adam with decoupled weight decay, from torch.optim: one parameter at a time, in multi-tensor operations
    (foreach), or in one fused kernel; or in the fused kernel of NVIDIA's Apex."""

    name: ClassVar[str] = "adamw"
    auto_on: ClassVar = ("pytorch", "jax")
    exact: ClassVar = "rounding"
    speed: ClassVar[str] = "fused is the fastest, loop the slowest"
    memory: ClassVar[str] = "8 bytes a parameter; foreach adds about one copy of the parameters at its peak"
    state_bytes: ClassVar[float] = 8.0
    bf16_roundings: ClassVar = ("kahan", "stochastic", "nearest")
    hf_names: ClassVar = {"adamw_torch_fused": {"implementation": ("auto", "fused")},
                          "adamw_torch": {"implementation": ("foreach",)},
                          "adamw_apex_fused": {"implementation": ("apex",)},
                          "paged_adamw_32bit": {"implementation": ("auto",)}}
    hf_names_on_cpu: ClassVar = {"adamw_torch": {"implementation": ("loop",)}}
    hf_adam: ClassVar[bool] = True
    worth_trying: ClassVar = ({"implementation": "loop"}, {"implementation": "foreach"}, {"implementation": "fused"})

    implementation: Implementation = "auto"
    """loop, foreach (multi-tensor), fused, or apex where NVIDIA's Apex is installed; auto is fused."""
    eps: NonNegative = 1e-8
    """Added to the denominator."""

    def opened(self) -> Self:
        return replace(self, implementation="auto")

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        rounding = recipe.weight_rounding
        if self.implementation == "auto":
            return
        if recipe.backend.compiles_whole_steps:
            yield (f"XLA compiles AdamW's update as one program, not in PyTorch's way {self.implementation!r}; write "
                   "optimizer.implementation=auto")
        elif self.implementation == "apex":
            yield from self._refuse_apex(recipe, device, rounding)
        elif rounding not in (None, "nearest"):
            yield (f"AdamW that rounds bf16 weights by {rounding!r} has one implementation; "
                   "write optimizer.implementation=auto")

    def _refuse_apex(self, recipe: Recipe, device: Device, rounding: Rounding | None) -> Iterator[str]:
        instead = "write optimizer.implementation=fused"
        if device.kind != "cuda":
            yield f"Apex's kernels run on CUDA devices alone; {instead}"
        if rounding is not None:
            yield f"Apex keeps fp32 states beside bf16 weights; {instead}"
        if recipe.parallel.shards or recipe.parallel.engine_steps:
            yield f"Apex updates no parts of weights; {instead}"
        update = recipe.update
        if recipe.offloaded.uses_host or (update != "auto" and (update.deferred or update.in_backward)):
            yield f"Apex updates all weights at once, on the device; {instead}"

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [cls()]


@technique
class Sgd(_Decaying):
    """Stochastic gradient descent with momentum. It trains transformers far more slowly than Adam does: a baseline."""

    name: ClassVar[str] = "sgd"
    auto_on: ClassVar = ()  # it wants another learning rate, and saves no more than AdamW with 8-bit states
    tolerance: ClassVar[float] = 1.6
    speed: ClassVar[str] = "the cheapest update"
    memory: ClassVar[str] = "4 bytes a parameter; none without momentum"
    numerics_change: ClassVar[int] = 4
    state_bytes: ClassVar[float] = 4.0
    bf16_roundings: ClassVar = ("kahan", "nearest")

    hf_names: ClassVar = {"sgd": {}}
    hf_options: ClassVar = {"momentum": ("momentum", 0.0)}

    momentum: Beta = 0.9
    """Decay rate of the velocity; 0 keeps no state."""
    weight_decay: NonNegative = 0.01
    """Weight decay, on matrices only."""


@technique
class Adafactor(_Decaying):
    """Adafactor from torch.optim: the running mean of squares of a matrix is kept as one row and one column
    (Shazeer and Stern 2018). Its learning rate is relative to each matrix's own size: about 1e-2 is usual. With
    `scale_parameter: false` it is transformers', as its Trainer has it, whose learning rate is the step itself."""

    name: ClassVar[str] = "adafactor"
    tolerance: ClassVar[float] = 0.5
    speed: ClassVar[str] = "slower than AdamW"
    memory: ClassVar[str] = "almost none for matrices: rows plus columns"
    numerics_change: ClassVar[int] = 4
    state_bytes: ClassVar[float] = 0.05
    works_on_shards: ClassVar[bool] = False  # its means are of whole rows and columns, and of whole tensors
    bf16_roundings: ClassVar = ()
    hf_names: ClassVar = {"adafactor": {"scale_parameter": (False,)}}

    scale_parameter: bool = True
    """Whether the learning rate is relative to the size of each matrix."""

    def notes(self, recipe: Recipe, device: Device) -> tuple[str, ...]:
        learning_rate = recipe.learning_rate
        if learning_rate >= ADAFACTOR_USUAL_RATE / 2 or not self.scale_parameter:
            return ()
        return (f"adafactor's learning rate is relative to the size of the weights: {ADAFACTOR_USUAL_RATE:g} is usual, "
                f"and learning_rate is {learning_rate:g}; optimizer.scale_parameter=false takes it as it is",)

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if recipe.weight_rounding is not None:
            yield ("Adafactor's steps are mostly smaller than a bf16 weight's last bit and would be lost; "
                   "write precision=bf16, or optimizer=adamw")  # which rounds in every way


@technique
class Lion(_Decaying):
    """Lion from torch-optimi: the sign of an interpolated momentum, one state (Chen et al. 2023). It wants a
    learning rate three to ten times smaller than AdamW's, and trails it at small batches: by 0.8 nats a token over the
    300 steps of the recorded curves, at the best of four learning rates."""

    name: ClassVar[str] = "lion"
    auto_on: ClassVar = ()  # it wants another learning rate, and saves no more than AdamW with 8-bit states
    tolerance: ClassVar[float] = 0.9
    speed: ClassVar[str] = "a cheaper update than AdamW's"
    memory: ClassVar[str] = "4 bytes a parameter"
    numerics_change: ClassVar[int] = 4
    state_bytes: ClassVar[float] = 4.0
    bf16_roundings: ClassVar = ("kahan", "nearest")

    hf_names: ClassVar = {"lion_32bit": {}}

    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Interpolation of the update, and decay rate of the momentum."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, on matrices only; Lion wants three to ten times AdamW's."""


@technique
class AdamW8bit(_Quantized):
    """AdamW from torchao with both states quantized to 8 bits in blocks; embeddings keep 32-bit states
    (Dettmers et al. 2022)."""

    name: ClassVar[str] = "adamw-8bit"
    memory: ClassVar[str] = "2 bytes a parameter, 8 for embeddings"
    state_bytes: ClassVar[float] = 2.0
    hf_names: ClassVar = {name: {"block_size": (256,)} for name in
                          ("adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")}  # fmt: skip

    def saving(self, recipe: Recipe) -> str:
        pinned = recipe.optimizer
        if pinned == "auto" or (held := pinned.bytes_per_parameter(recipe)) <= self.state_bytes:
            return ""
        return f"{self.state_bytes:g} bytes of states a parameter instead of {held:g}"


@technique
class AdamW4bit(_Quantized):
    """AdamW from torchao with both states quantized to 4 bits in blocks; embeddings keep 32-bit states
    (Li et al. 2023)."""

    name: ClassVar[str] = "adamw-4bit"
    tolerance: ClassVar[float] = 0.2
    numerics_change: ClassVar[int] = 3
    memory: ClassVar[str] = "1 byte a parameter, 8 for embeddings"
    state_bytes: ClassVar[float] = 1.0

    hf_names: ClassVar = {"adamw_torch_4bit": {"block_size": (256,)}}

    block_size: BlockSize = 128


@technique
class AdamWAnyPrecision(_Decaying):
    """AdamW whose states may each have their own format, bf16 by default, with Kahan summation where the weights
    are bf16 too (the scheme of torchdistX's AnyPrecisionAdamW)."""

    name: ClassVar[str] = "adamw-anyprecision"
    speed: ClassVar[str] = "as AdamW's foreach"
    memory: ClassVar[str] = "4 bytes a parameter (bf16 states); 2 more for Kahan under bf16-pure"
    state_bytes: ClassVar[float] = 4.0
    own_formats: ClassVar[bool] = True
    numerics_change: ClassVar[int] = 1
    bf16_roundings: ClassVar = ("kahan", "stochastic", "nearest")

    hf_adam: ClassVar[bool] = True
    hf_names: ClassVar = {"adamw_anyprecision": {}}
    hf_options: ClassVar = {"momentum_dtype": ("momentum", "fp32"), "variance_dtype": ("variance", "fp32")}
    hf_ignored: ClassVar = ("compensation_buffer_dtype",)  # of Kahan summation, which no recipe asks it for

    momentum: Literal["fp32", "bf16"] = "bf16"
    """Format of the running mean."""
    variance: Literal["fp32", "bf16"] = "bf16"
    """Format of the running mean of squares."""

    def redundant(self, recipe: Recipe, written: Recipe) -> bool:
        """AdamW's states are bf16 already where the weights are."""
        return recipe.weight_rounding is not None

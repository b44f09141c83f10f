"""The framework that runs the step, and how it lays a model's layers out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from tightfit.techniques.technique import Exactness, Names, Positive, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Backend(Technique):
    slot: ClassVar[str] = "backend"
    may_be_auto: ClassVar[bool] = False
    exact: ClassVar[Exactness] = "rounding"
    runs_torch: ClassVar[bool]
    """Whether models are torch modules, so that PyTorch's own kernels and libraries serve them."""
    compiles_whole_steps: ClassVar[bool]
    """Whether XLA compiles every step as one program, in training and to predict it."""
    libraries: ClassVar[tuple[str, ...]]
    """The packages whose versions a record of a run names."""

    @property
    def scans_layers(self) -> bool:
        """Whether a step runs its layers as a loop over their stacked weights."""
        return False

    def continuing(self, saved: Backend) -> Backend:
        """This backend as a run goes on that was started with `saved`: what is `auto` stays as it was."""
        return self


@technique
class Pytorch(Backend):
    """PyTorch: models from transformers, one op after the other or with torch.compile."""

    name: ClassVar[str] = "pytorch"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"
    runs_torch: ClassVar[bool] = True
    compiles_whole_steps: ClassVar[bool] = False
    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers")


@technique
class Jax(Backend):
    """JAX: models of its own (see docs/jax.md), and every step compiled whole by XLA. Scanned layers are one layer,
    compiled once, in a loop over the layers' stacked weights. Without checkpointing the loop copies every layer's
    activations into arrays for all layers, which costs time and memory; with it there is little to copy."""

    name: ClassVar[str] = "jax"
    speed: ClassVar[str] = "every step is one program; compile time grows with depth only where layers are unrolled"
    memory: ClassVar[str] = "planned by XLA; scanned layers take more without checkpointing, about the same with it"
    runs_torch: ClassVar[bool] = False
    compiles_whole_steps: ClassVar[bool] = True
    trace_cost: ClassVar[int] = 4
    libraries: ClassVar[tuple[str, ...]] = ("jax", "jaxlib", "optax")
    worth_trying: ClassVar = ({"layers": "unrolled"}, {"layers": "scanned"}, {"layers": "scanned", "unroll": 2})

    layers: Literal["auto", "unrolled", "scanned"] = "auto"
    """unrolled: every layer stands in the program, and XLA plans the memory of each; scanned: one stands there, in a
    loop over all. auto is unrolled."""
    unroll: Positive = 1
    """Layers side by side in one turn of the loop over scanned layers."""
    xla_flags: Names = ()
    """Flags for XLA besides its own defaults, such as `--xla_gpu_enable_triton_gemm=false`; each is tried first."""

    @property
    def scans_layers(self) -> bool:
        return self.layers == "scanned"

    def resolved(self) -> Self:
        return replace(self, layers="unrolled") if self.layers == "auto" else self

    def continuing(self, saved: Backend) -> Backend:
        if isinstance(saved, Jax) and self.layers == "auto":
            return replace(self, layers=saved.layers, unroll=saved.unroll)
        return self

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if self.unroll > 1 and not self.scans_layers:
            yield (f"unroll: {self.unroll} layers in a turn of the loop that only scanned layers have; write "
                   "backend.layers=scanned")

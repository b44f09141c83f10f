"""torch.compile: what is compiled, by which backend, in which mode."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from tightfit.errors import RecipeError, nearest
from tightfit.techniques.technique import Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe

CompileBackend = Literal[
    "inductor", "aot_eager", "eager", "cudagraphs",
    "nvfuser", "aot_nvfuser", "aot_cudagraphs", "ofi", "fx2trt", "onnxrt", "ipex",
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

BACKENDS: dict[str, tuple[str, str]] = {
    "eager": ("debugging: runs the extracted graph as it is", ""),
    "aot_eager": ("debugging: runs AOTAutograd's forward and backward graphs, no code generated", ""),
    "inductor": ("training and inference: generated Triton or C++ kernels", ""),
    "cudagraphs": ("training and inference: CUDA graphs over AOTAutograd's graphs", ""),
    "nvfuser": ("was nvFuser with TorchScript; no longer part of PyTorch", "inductor"),
    "aot_nvfuser": ("was nvFuser with AOTAutograd; no longer part of PyTorch", "inductor"),
    "aot_cudagraphs": ("the old name of the backend cudagraphs", "cudagraphs"),
    "ofi": ("TorchScript's optimize_for_inference: it cannot train; no longer part of PyTorch", "inductor"),
    "fx2trt": ("TensorRT, now the library torch-tensorrt: it cannot train", "inductor"),
    "onnxrt": ("ONNX Runtime: it cannot train here", "inductor"),
    "ipex": ("Intel's extension, retired in favour of what PyTorch itself has for CPUs", "inductor"),
}
"""The guides' backends: purpose, and what to write instead where a backend cannot train or is gone."""


class Compile(Technique):
    slot: ClassVar[str] = "compile"
    trains_only: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    """Whether torch.compile runs at all."""
    one_region: ClassVar[bool] = False
    """Whether the whole model is compiled as one."""

    @property
    def partitions(self) -> bool:
        """Whether forward and backward are partitioned by a compiler, which then decides what is kept between them."""
        return False

    @property
    def records_graphs(self) -> bool:
        """Whether kernels are launched together, as CUDA graphs, over memory that stays where it is."""
        return False


@technique
class NoCompile(Compile):
    """Run the model as it is, op by op."""

    name: ClassVar[str] = "off"
    compiles: ClassVar[bool] = False
    exact: ClassVar = "bitwise"
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"
    hf_unless: ClassVar = "torch_compile"


@technique
class _Compiled(Compile):
    exact: ClassVar = "rounding"
    memory: ClassVar[str] = "often less: fused element-wise chains keep fewer results"
    activation_share: ClassVar[float] = 0.65
    trace_cost: ClassVar[int] = 3
    startup_seconds: ClassVar[float] = 60.0
    slowdown_share: ClassVar = {"cpu": -0.2, "cuda": -0.2}
    auto_on: ClassVar[tuple[str, ...]] = ("pytorch",)
    worth_trying: ClassVar = ({}, {"backend": "aot_eager"})

    backend: CompileBackend = "inductor"
    """Who generates the code; see the table of backends."""
    mode: CompileMode = "default"
    """How long the compiler may search."""

    @property
    def partitions(self) -> bool:
        return self.backend != "eager"

    @property
    def records_graphs(self) -> bool:
        return self.backend == "cudagraphs" or self.mode in ("reduce-overhead", "max-autotune")

    def hf_arguments(self, on_cpu: bool) -> dict[str, Any]:
        mode = {} if self.mode == "default" else {"torch_compile_mode": self.mode}
        return {"torch_compile": True, "torch_compile_backend": self.backend, **mode}

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        purpose, instead = BACKENDS[self.backend]
        if instead:
            yield f"compile backend {self.backend}: {purpose}; write compile.backend={instead}"
        elif self.backend == "cudagraphs" and device.kind == "cpu":
            yield "CUDA graphs need a CUDA device; write compile.backend=inductor"
        elif self.backend == "inductor" and device.kind == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
            yield ("backend inductor generates C++ for the CPU, and no C++ compiler is on the PATH; install g++, "
                   "or write compile.backend=aot_eager")

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return super().search_settings(recipe, device)[:1]  # the other backends are for debugging


@technique
class PerBlock(_Compiled):
    """Compile each block of the model: equal blocks share one compilation, so that compile time does not grow with
    depth. Inductor compiles the loss over a vocabulary, and the update of bf16 states, too."""

    name: ClassVar[str] = "per-block"
    speed: ClassVar[str] = "faster; seconds to a minute of compiling"


@technique
class WholeModel(_Compiled):
    """Compile the whole model as one region, and the loss over a vocabulary as another."""

    name: ClassVar[str] = "whole"
    speed: ClassVar[str] = "faster; compile time grows with depth"
    one_region: ClassVar[bool] = True
    auto_on: ClassVar = ()

    @classmethod
    def from_hf_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any] | None:
        if not a["torch_compile"]:
            return None
        backend, mode = a["torch_compile_backend"], a["torch_compile_mode"] or "default"
        if backend not in BACKENDS:
            raise RecipeError(f"torch_compile_backend: {backend!r} is not in a recipe; {nearest(backend, BACKENDS)}")
        if mode not in get_args(CompileMode):
            raise RecipeError(f"torch_compile_mode: {mode!r} is not known; {nearest(mode, get_args(CompileMode))}")
        return {"backend": backend, "mode": mode}

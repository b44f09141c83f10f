"""Activation checkpointing: keep less of the forward pass, and compute it again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from tightfit.techniques.technique import NUMBER, Exactness, Positive, Technique, technique

if TYPE_CHECKING:
    from tightfit.devices import Device
    from tightfit.recipe import Recipe


class Checkpointing(Technique):
    slot: ClassVar[str] = "checkpointing"
    exact: ClassVar[Exactness] = "bitwise"
    trains_only: ClassVar[bool] = True
    spans_blocks: ClassVar[bool] = False
    """Whether it recomputes several blocks as one."""
    recomputes: ClassVar[bool] = True
    """Whether anything is computed again in the backward pass."""
    tiles: ClassVar[bool] = False
    """Whether parts of a block take some tokens at a time, in a backward pass of their own."""

    @property
    def period(self) -> int | None:
        """Blocks after which the same is done again; None where that depends on the depth."""
        return 1

    recomputing: ClassVar[float] = 0.0
    """Share of a step's time that goes into it, as a rule of thumb."""

    def slowdown(self, device: Device) -> float:
        return self.recomputing


def _hf_every(a: Mapping[str, Any]) -> Any:
    """The number of layers of which Hugging Face's TrainingArguments checkpoint one; None where they name none."""
    return (a["gradient_checkpointing_kwargs"] or {}).get("every_n_layers")


@technique
class NoCheckpointing(Checkpointing):
    """Keep every activation that the backward pass reads."""

    name: ClassVar[str] = "none"
    recomputes: ClassVar[bool] = False
    speed: ClassVar[str] = "the baseline"
    memory: ClassVar[str] = "the baseline"
    hf_unless: ClassVar = "gradient_checkpointing"


@technique
class EveryBlock(Checkpointing):
    """Keep only each block's input, and recompute the block in the backward pass."""

    name: ClassVar[str] = "every-block"
    speed: ClassVar[str] = "20 to 30 % slower"
    memory: ClassVar[str] = "activations fall to one block's, plus one input for each block"
    activation_share: ClassVar[float] = 0.1
    recomputing: ClassVar[float] = 0.25

    apart: bool = False
    """Recompute a block's feed-forward part and its attention part each alone: one more input is kept for each block,
    and only one part's activations are there at a time."""

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [cls(), cls(apart=True)] if recipe.backend.compiles_whole_steps else [cls()]

    def saving(self, recipe: Recipe) -> str:
        kept = recipe.checkpointing != "auto" and recipe.checkpointing.kept_share > self.kept_share
        return "activations are computed again, 20 to 30 % slower" if kept else ""

    def hf_arguments(self, on_cpu: bool) -> dict[str, Any] | None:
        return None if self.apart else {"gradient_checkpointing": True}

    @classmethod
    def from_hf_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any] | None:
        return {} if a["gradient_checkpointing"] and _hf_every(a) is None else None


@technique
class EveryNth(Checkpointing):
    """Recompute every n-th block's activations in the backward pass, and keep the other blocks'."""

    name: ClassVar[str] = "every-nth"
    speed: ClassVar[str] = "one n-th of every-block's cost"
    memory: ClassVar[str] = "about one n-th of every-block's saving"
    activation_share: ClassVar[float] = 0.6
    recomputing: ClassVar[float] = 0.1
    auto_on: ClassVar = ("pytorch",)
    worth_trying: ClassVar = ({"n": 2}, {"n": 3})

    n: Positive = 2
    """Checkpoint one block in n."""

    @property
    def period(self) -> int:
        return self.n

    def hf_arguments(self, on_cpu: bool) -> dict[str, Any]:
        return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": self.n}}

    @classmethod
    def from_hf_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any] | None:
        every = _hf_every(a)
        return {"n": every} if a["gradient_checkpointing"] and every is not None else None


@technique
class Segments(Checkpointing):
    """Keep only the input of each run of consecutive blocks: with about sqrt(layers) runs, memory grows with the
    square root of the depth (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost)."""

    name: ClassVar[str] = "segments"
    speed: ClassVar[str] = "as every-block"
    memory: ClassVar[str] = "one input for each segment, plus one segment's activations"
    activation_share: ClassVar[float] = 0.2
    recomputing: ClassVar[float] = 0.25
    auto_on: ClassVar = ("pytorch",)
    spans_blocks: ClassVar[bool] = True
    dominated_by: ClassVar = {"cpu": "every-block", "cuda": "every-block"}

    count: Positive | Literal["auto"] = "auto"
    """Number of segments; auto is the square root of the number of blocks, rounded."""

    @property
    def period(self) -> None:
        return None

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if recipe.one_region:
            yield ("a segment opens and closes between blocks, which one compiled region does not allow; "
                   "write compile=per-block")


@technique
class TiledMlp(Checkpointing):
    """Recompute each block from its input, its feed-forward part and its norms some tokens at a time: of their wide
    activations, the largest of a block, there are only so many tokens' in either pass (tiled MLP: Bekman et al. 2025,
    Arctic Long Sequence Training, arXiv 2506.13996)."""

    name: ClassVar[str] = "tiled-mlp"
    tiles: ClassVar[bool] = True
    exact: ClassVar = "rounding"
    speed: ClassVar[str] = "a few percent slower than every-block"
    memory: ClassVar[str] = "as every-block, without most of one block's activations: for long sequences"
    activation_share: ClassVar[float] = 0.05
    recomputing: ClassVar[float] = 0.27
    auto_on: ClassVar = ("pytorch",)

    tokens: Positive = 8192
    """Tokens that a feed-forward part or a norm takes at a time."""

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        settings = super().search_settings(recipe, device)
        return [each for each in settings if recipe.seq_len > each.tokens]  # shorter ones have smaller micro-batches

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if recipe.one_region or (recipe.compile != "auto" and recipe.compile.records_graphs):
            yield ("a tile's backward pass is a graph of its own, which a whole compiled model or a CUDA graph "
                   "cannot hold; write compile=per-block")
        if recipe.parallel.engine_steps and recipe.parallel.shards:
            yield ("a tile's backward pass is a graph of its own, for which stage 3 gathers no weights; write "
                   "checkpointing=every-block, or parallel.stage=2")


@technique
class MlpOnly(Checkpointing):
    """Recompute the feed-forward part of each block, and keep attention's activations."""

    name: ClassVar[str] = "mlp"
    speed: ClassVar[str] = "slower by about the feed-forward part's forward time"
    memory: ClassVar[str] = "saves the wide hidden activations, the largest of a block at short sequences"
    activation_share: ClassVar[float] = 0.5
    recomputing: ClassVar[float] = 0.13


@technique
class AttentionOnly(Checkpointing):
    """Recompute the attention part of each block, and keep the feed-forward's activations."""

    name: ClassVar[str] = "attention"
    speed: ClassVar[str] = "slower by about attention's forward time"
    memory: ClassVar[str] = "saves queries, keys and values, and under eager attention the score matrices"
    activation_share: ClassVar[float] = 0.85
    recomputing: ClassVar[float] = 0.06


@technique
class Selective(Checkpointing):
    """Keep the results of the costly ops of each block and recompute the cheap ones."""

    name: ClassVar[str] = "selective"
    speed: ClassVar[str] = "a few percent slower"
    memory: ClassVar[str] = "saves the element-wise and normalization results"
    worth_trying: ClassVar = ({}, {"keep": "attention"}, {"keep": "every-other-matmul"})

    keep: Literal["matmul-and-attention", "attention", "every-other-matmul"] = "matmul-and-attention"
    """Which results to keep: every matrix product's and attention's, attention's alone, or attention's and every
    second matrix product's."""
    offload: bool = False
    """Keep them in the host's memory while the forward pass goes on (backend: jax)."""

    @property
    def kept_share(self) -> float:
        return {"matmul-and-attention": 0.45, "attention": 0.12, "every-other-matmul": 0.3}[self.keep]

    def slowdown(self, device: Device) -> float:
        return {"matmul-and-attention": 0.1, "attention": 0.23, "every-other-matmul": 0.16}[self.keep]

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if self.offload and recipe.backend.runs_torch:
            yield "PyTorch keeps the results on the device; write checkpointing.offload=false, or backend=jax"

    @classmethod
    def search_settings(cls, recipe: Recipe, device: Device) -> list[Self]:
        return [cls()] if recipe.backend.compiles_whole_steps else cls.representative_settings()

    def saving(self, recipe: Recipe) -> str:
        kept = recipe.checkpointing != "auto" and recipe.checkpointing.kept_share > Segments.activation_share
        return "cheap results are computed again" if kept else ""


@technique
class MemoryBudget(Checkpointing):
    """Let the compiler choose what to recompute, so that saved activations stay within a share of what they were."""

    name: ClassVar[str] = "memory-budget"
    exact: ClassVar = "rounding"
    speed: ClassVar[str] = "a few percent slower; less at larger budgets"
    memory: ClassVar[str] = "saved activations at most the budget's share"
    activation_share: ClassVar[float] = 0.7
    recomputing: ClassVar[float] = 0.02
    needs: ClassVar = {"compile": "per-block"}
    auto_on: ClassVar = ("pytorch",)

    budget: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False), NUMBER] = 0.5
    """Share of the activations to keep: 1 keeps what the compiler would anyway, 0 only each region's inputs and
    what random numbers made."""

    def refuse(self, recipe: Recipe, device: Device) -> Iterator[str]:
        if recipe.compile == "auto" or not recipe.compile.partitions:
            yield ("a memory budget is kept by a compiler that partitions the graph; write compile=per-block with "
                   "backend inductor or aot_eager")

"""The build: a model that techniques transform on the way to a training step. It holds no array."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tightfit.backends.jax.network import AttentionFn, Network, Params
from tightfit.devices import Device
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import Task

SumGradients = Callable[[Callable[[Any, jax.Array], Any], Any, int], Any]
"""(micro-batch, its number -> a tree of arrays), the global batch's micro-batches stacked, how many -> the trees'
sum."""

BATCH_AXIS = "data"


class Optimizer(NamedTuple):
    """init: params -> state. update: (gradients, state, params, learning rate) -> (new params, state)."""

    init: Callable[[Params], Any]
    update: Callable[[Params, Any, Params, jax.Array], tuple[Params, Any]]


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The part of the forward pass that the backward pass computes again.

    branches: those of a layer that are each recomputed alone. every: one layer in so many is recomputed; 0 for none.
    segments: number of runs of layers of which only the input is kept; 0 for none. policy: which named values of a
    recomputed layer are kept all the same.
    """

    branches: frozenset[str] = frozenset()
    every: int = 0
    segments: int = 0
    policy: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Build:
    """A model on its way to a step. Each technique takes one and returns one, changed with `dataclasses.replace`.

    devices: what the step runs on; more than one share each micro-batch's rows.
    stored: the folder of the model's weights; None where they are drawn.
    compute_dtype: what products are computed in; weights are kept in fp32. matmul_precision: how fp32 products are, in
    JAX's words; None leaves it to JAX.
    attention_fn, recomputation, sum_gradients, optimizer: what the techniques chose.
    compiler_options: XLA's, by name.
    notes: sentences for the person running this.
    """

    recipe: Recipe
    device: Device
    devices: tuple[Any, ...]
    task: Task
    facts: ModelFacts
    network: Network
    stored: Path | None = None
    compute_dtype: Any = jnp.float32
    matmul_precision: str | None = None
    attention_fn: AttentionFn | None = None
    recomputation: Recomputation = field(default_factory=Recomputation)
    sum_gradients: SumGradients | None = None
    optimizer: Optimizer | None = None
    compiler_options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def process_settings(self) -> AbstractContextManager[None]:
        """The settings of the process while steps run: none are changed."""
        return nullcontext()

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return self._sharding()

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of (micro-batches, rows, ...): each device holds some rows of every micro-batch."""
        return self._sharding(None, BATCH_AXIS)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, as many on each device."""
        return -(-self.recipe.resolved_micro_batch // len(self.devices)) * len(self.devices)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full global batch."""
        return -(-self.recipe.batch_size // self.recipe.resolved_micro_batch)

    def _sharding(self, *axes: str | None) -> NamedSharding:
        mesh = Mesh(np.asarray(self.devices), (BATCH_AXIS,), axis_types=(AxisType.Auto,))
        return NamedSharding(mesh, PartitionSpec(*axes))

"""Figures that a backend measures of real steps, or counts of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.trace import Phase

if TYPE_CHECKING:
    from tightfit.trace import Trace
    from tightfit.trace.lanes import Stretch


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A few real steps, measured.

    trace: of one step; ticks are nanoseconds, of a compiled step in its program's order.
    step_seconds: wall seconds of a step as it is, the wait for its data included; of several, the one of median length.
    phase_seconds: the same by phase (data, forward, backward with recomputation, optimizer); they sum to it.
    overhead: what the step that `trace` is of took, over `step_seconds`.
    peak_bytes: the most allocated in that step, by the allocator's own account where it has one; of a compiled step
        what was planned for it.
    lanes: when the device computed and copied in the step that `trace` is of; none where that was not recorded.
    memory_record: that account, as PyTorch's memory_viz reads it once it is pickled; None on the CPU.
    xplane: the profile as JAX's profiler serializes it, for xprof and TensorBoard; None from PyTorch.
    """

    trace: Trace
    step_seconds: float
    phase_seconds: dict[Phase, float]
    overhead: float
    peak_bytes: int
    lanes: tuple[Stretch, ...] = ()
    memory_record: dict[str, Any] | None = None
    xplane: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Timings:
    """A few real steps, timed one by one.

    seconds: wall seconds of each timed step, the wait for its data included. losses: of every step taken, those before
    and after the timed ones too.
    peak_allocated: the most bytes allocated in a step. peak_reserved: the most that the allocator held; on the CPU the
    same. context: bytes on the card outside the allocator; None on the CPU, and where the driver does not say.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_allocated: int
    peak_reserved: int
    context: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model's parameters, and what it takes to train on one sample of the recipe's length.

    parameters: tied ones once. active_parameters: those of them that a token meets: of a mixture of experts, of each
        expert's the share of experts that a token is sent to.
    flops: model FLOPs of one sample's forward and backward pass, by the convention of PaLM (arXiv 2204.02311,
        appendix B): 6 for each weight that a token is multiplied by, which is 6 N without embeddings that are only
        looked up, and 12 for each pair of positions, layer and feature of the queries, masked or not. The backward
        pass counts twice the forward pass, and once where a weight is frozen; recomputation, norms, softmax and the
        optimizer count nothing, and of a mixture of experts only the experts that are used. 0 where the forward pass
        needs values.
    values: numbers that one sample's forward pass makes, attention's scores written out; 0 likewise.
    """

    parameters: int
    active_parameters: int
    flops: int
    values: int

    @property
    def parameters_text(self) -> str:
        """The parameters and those that are active per token, as a person reads them; empty where all are."""
        if self.active_parameters == self.parameters:
            return ""
        return f"{self.parameters:,} parameters, of which {self.active_parameters:,} are active per token"

"""Facts of a recipe's techniques; of a choice that is still `auto` none is known, and each is false."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tightfit.techniques.offload import HostShares

if TYPE_CHECKING:
    from tightfit.techniques import Checkpointing, Compile, Offload, Precision
    from tightfit.techniques.precision import Rounding


class TechniqueFacts:
    """Facts of the techniques that a recipe names."""

    if TYPE_CHECKING:
        precision: Precision | Literal["auto"]
        checkpointing: Checkpointing | Literal["auto"]
        offload: Offload | Literal["auto"]
        compile: Compile | Literal["auto"]

    @property
    def tf32(self) -> bool:
        """Whether its matrix products of fp32 tensors may use the tensor cores."""
        return self.precision != "auto" and self.precision.tf32

    @property
    def is_half(self) -> bool:
        """Whether its matrix products are known to take numbers of 16 bits or fewer."""
        return self.precision != "auto" and self.precision.is_half

    @property
    def weight_rounding(self) -> Rounding | None:
        """How updates of bf16 weights are rounded; None where weights are fp32."""
        return None if self.precision == "auto" else self.precision.weight_rounding

    @property
    def recomputes(self) -> bool:
        """Whether anything is computed again in the backward pass."""
        return self.checkpointing != "auto" and self.checkpointing.recomputes

    @property
    def compiled(self) -> bool:
        """Whether it names a compiler."""
        return self.compile != "auto" and self.compile.compiles

    @property
    def offloaded(self) -> HostShares:
        """The shares of the model that wait in the host's memory."""
        return HostShares() if self.offload == "auto" else self.offload.shares

    @property
    def one_region(self) -> bool:
        """Whether a compiler takes the whole model as one."""
        return self.compile != "auto" and self.compile.one_region

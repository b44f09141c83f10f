"""How batches reach the device: worker processes, pinned memory, prefetching."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from tightfit.techniques.base import NUMBER, Technique, at_most, technique


@technique
class Loading(Technique):
    """Prepare windows ahead of the step, in this process or in workers, and copy them from pinned memory."""

    slot: ClassVar[str] = "loading"
    may_be_auto: ClassVar[bool] = False
    name: ClassVar[str] = "loading"
    exact: ClassVar = "bitwise"
    speed: ClassVar[str] = "faster where the step waits for data"
    memory: ClassVar[str] = "none on the device; each worker holds its prefetched windows in host memory"

    workers: Annotated[int, Field(ge=0), at_most(1024), NUMBER] | Literal["auto"] = "auto"
    """Worker processes; 0 prepares windows in the training process; auto is 0 on the CPU and 2 on a GPU."""
    pin_memory: bool = True
    """Copy windows from page-locked host memory (CUDA devices only; no effect on the CPU)."""
    prefetch: Annotated[int, Field(ge=1), at_most(1024), NUMBER] = 2
    """Windows each worker prepares ahead."""

    @classmethod
    def rungs(cls) -> list[Self]:
        return [cls(workers=0), cls(workers=2), cls(workers=2, pin_memory=False)]

"""Loading of batches onto the device: worker processes, pinned memory, prefetching."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tightfit.errors import RecipeError
from tightfit.techniques.technique import NUMBER, Technique, at_most, technique


@technique
class Loading(Technique):
    """Prepare global batches ahead of the step, in this process or in workers, and copy them from pinned memory."""

    slot: ClassVar[str] = "loading"
    may_be_auto: ClassVar[bool] = False
    name: ClassVar[str] = "loading"
    exact: ClassVar = "bitwise"
    speed: ClassVar[str] = "faster where the step waits for data"
    memory: ClassVar[str] = "none on the device; each worker holds its prefetched global batches in host memory"
    worth_trying: ClassVar = ({"workers": 0}, {"workers": 2}, {"workers": 2, "pin_memory": False})

    workers: Annotated[int, Field(ge=0), at_most(1024), NUMBER] | Literal["auto"] = "auto"
    """Worker processes; 0 prepares global batches in the training process; auto begins with 0 on the CPU and 2 on a
    GPU, and goes on with as many as keep steps from waiting for data."""
    pin_memory: bool = True
    """Copy global batches from page-locked host memory (CUDA devices only; no effect on the CPU)."""
    prefetch: Annotated[int, Field(ge=1), at_most(1024), NUMBER] = 2
    """Global batches each worker prepares ahead."""

    def hf_arguments(self, on_cpu: bool) -> dict[str, Any]:
        written: dict[str, Any] = {} if on_cpu else {"dataloader_pin_memory": self.pin_memory}
        if self.workers != "auto":
            written["dataloader_num_workers"] = self.workers
            if self.workers and self.prefetch != Loading().prefetch:
                written["dataloader_prefetch_factor"] = self.prefetch
        return written

    @classmethod
    def from_hf_arguments(cls, a: Mapping[str, Any]) -> dict[str, Any]:
        workers, prefetch = a["dataloader_num_workers"], a["dataloader_prefetch_factor"]
        if prefetch is not None and not workers:
            raise RecipeError("dataloader_prefetch_factor: needs workers; write dataloader_num_workers too")
        ahead = {} if prefetch is None else {"prefetch": prefetch}
        # On a processor nothing is pinned, whatever is written.
        return {"workers": workers, **ahead, **({} if a["use_cpu"] else {"pin_memory": a["dataloader_pin_memory"]})}


def preparing_seconds(waited: float, seconds: float, now: int) -> float:
    """Seconds that data workers spend, all together, on the data of steps that take `seconds` with `now` of them and
    wait for data for `waited` of these: workers that are too slow are always at it."""
    return now * seconds if now else waited


def enough_workers(waited: float, seconds: float, now: int) -> int:
    """Number of data workers with which such steps no longer wait; arguments as of `preparing_seconds`."""
    return math.ceil(round(preparing_seconds(waited, seconds, now) / max(seconds - waited, 1e-9), 3))

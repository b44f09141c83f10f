"""What lay outside the allocator in published runs: the context as it is predicted, and kernels as their software
loaded them. CUDA before 11.7, PyTorch before 1.13, and drivers before 515, loaded every kernel of PyTorch at once.

`KERNELS` is what published contexts of such software hold beyond the bare context that is predicted for their cards, in
MiB, by the major version of CUDA; the runs that are compared are not among them, but for the V100's own context.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from tightfit.backends.cuda_context import context
from tightfit.devices import MIB, Device
from tightfit.trace import UntracedMemory

KERNELS = {
    10: (611, 647, 481),
    11: (985, 1165, 1364),
}
"""CUDA 10: RTX 2080 Ti (pytorch issue 49877), Titan V (28394), GTX 1080 (55277). CUDA 11: V100 (the context with one
tensor of Hugging Face's guide, 1,343 MiB), RTX 3090 twice (issues 49877 and 55277)."""


def loads_all_with(versions: str) -> int | None:
    """The major version of CUDA of software that loads all kernels at once; None for software that does not."""
    torch, driver = re.search(r"torch ~?1\.(\d+)", versions), re.search(r"driver (\d+)", versions)
    if torch is not None:
        minor = int(torch[1])
        eager = minor < 13 or (driver is not None and int(driver[1]) < 515)
        return (10 if minor < 7 else 11) if eager else None
    container = re.search(r"NGC pytorch (\d\d)\.(\d\d)", versions)
    if container is not None and int(container[1]) < 23:
        return 10 if container.groups() < ("20", "06") else 11
    return None


def as_loaded(untraced: Sequence[UntracedMemory], device: Device, versions: str) -> list[UntracedMemory]:
    """Memory that no trace shows, with the context of a run's own software."""
    cuda = loads_all_with(versions)
    if cuda is None:
        return list(untraced)
    kernels = round(statistics.mean(KERNELS[cuda]) * MIB)
    spread = (max(KERNELS[cuda]) - min(KERNELS[cuda])) * MIB // 2
    return [*(figure for figure in untraced if figure.where != "context"), context(device), UntracedMemory(
        name="CUDA kernels", bytes=kernels, uncertainty=spread, where="context",
        source=f"all of PyTorch's, CUDA {cuda}",
    )]  # fmt: skip

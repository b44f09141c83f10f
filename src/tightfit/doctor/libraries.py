"""Optional libraries: what each would give, and the command that installs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Optional:
    """One library. capability: the least of a card that it serves; None where it needs no card."""

    name: str
    gives: str
    install: str
    capability: tuple[int, int] | None = None


OPTIONAL = (
    Optional(name="nvidia-ml-py", gives="power, temperature, processes and links in this check-up, and the CUDA "
             "context's share of memory", install="pip install 'tightfit[gpu]'", capability=(0, 0)),
    Optional(name="flash-attn", gives="attention=flash-attn, as fast as sdpa's flash kernel or faster on the newest "
             "GPUs; it is built against the installed PyTorch, which takes nvcc and minutes to hours",
             install="pip install flash-attn --no-build-isolation", capability=(8, 0)),
    Optional(name="triton", gives="compile=per-block and compile=whole on the GPU; PyTorch's CUDA builds for Linux "
             "bring it", install="pip install triton", capability=(7, 0)),
    Optional(name="accelerate", gives="trackers of a run (report_to), and Hugging Face's own loop with tightfit.apply",
             install="pip install accelerate"),
    Optional(name="tensorboard", gives="curves of a run with report_to=[tensorboard]",
             install="pip install accelerate tensorboard"),
    Optional(name="datasets", gives="data from the Hugging Face hub, and saved datasets",
             install="pip install datasets"),
    Optional(name="pyarrow", gives="data in Parquet files", install="pip install pyarrow"),
    Optional(name="pillow", gives="folders of images as data", install="pip install pillow"),
)  # fmt: skip
"""What tightfit itself makes use of beyond what it always installs."""

"""DeepSpeed itself, loaded for whoever asks for it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tightfit.errors import MissingLibrary, Refused

INSTALL = "pip install 'tightfit[deepspeed]'"


def require_deepspeed() -> None:
    """Raise MissingLibrary where DeepSpeed is not installed, before anything that takes long."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingLibrary("deepspeed", "parallel: zero", INSTALL)


def load_deepspeed(kind: str) -> ModuleType:
    """DeepSpeed, for processors or GPUs, and with nothing to say that is no warning."""
    os.environ["DS_ACCELERATOR"] = kind  # it looks for itself otherwise, and takes a GPU where there is one
    try:
        with quiet():
            deepspeed = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        raise MissingLibrary(error.name or "deepspeed", "parallel: zero", INSTALL) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    ops = importlib.import_module("deepspeed.ops")
    # Its exchange between processors through shared memory would be compiled; gloo serves.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def require_async_io() -> None:
    """Raise Refused where what reads and writes a drive cannot be compiled."""
    builders = importlib.import_module("deepspeed.ops.op_builder")
    if not builders.AsyncIOBuilder().is_compatible(verbose=False):
        raise Refused("parallel.offload: nvme needs DeepSpeed's async_io, which cannot be compiled here without a C++ "
                      "compiler and libaio's headers; install them (libaio-dev), or write parallel.offload=cpu")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep names that DeepSpeed calls, and that later versions of torch have others for, from being warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield

"""The frameworks that run a step. Each is loaded only when a recipe names it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tightfit.errors import MissingLibrary, install_command

if TYPE_CHECKING:
    from tightfit.backends.base import Backend

CHATTY = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap", "transformers")
"""Loggers of libraries that say much about themselves while they load, or advise what is done already."""


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep off the screen what libraries log about themselves while they load; errors still show, and so does what
    someone has set a level for. Meanwhile no collector goes through their half a million objects, none of them
    garbage."""
    enabled = gc.isenabled()
    loggers = [logger for logger in map(logging.getLogger, CHATTY) if logger.level == logging.NOTSET]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        for logger in loggers:
            logger.setLevel(logging.NOTSET)


def load_backend(name: str) -> Backend:
    """The backend of that name, its framework imported now. Raises MissingLibrary where that is not installed."""
    with quiet_loading():
        if name == "jax":
            try:
                from tightfit.backends.jax.backend import JaxBackend
            except ImportError as error:
                library = str(error.name or "jax").partition(".")[0]
                raise MissingLibrary(library, "backend: jax", install_command("jax")) from None
            return JaxBackend()
        from tightfit.backends.pytorch.backend import PytorchBackend

        return PytorchBackend()

"""The frameworks that run a step. Each is loaded only when a recipe names it."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tightfit.errors import MissingLibrary, Refused, install_command

if TYPE_CHECKING:
    from tightfit.backends.base import Backend
    from tightfit.recipe import Recipe

PLUGIN_NOTES = (b"I0000 ", b"WARNING: All log messages before absl::InitializeLog()")
"""Beginnings of lines that XLA logs for information."""
CHATTY = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap", "transformers")
"""Loggers of libraries that say much about themselves while they load, or advise what is done already."""


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep off the screen what libraries log about themselves while they load; errors still show, and so does what
    someone has set a level for. Meanwhile no collector goes through their half a million objects, none of them
    garbage."""
    enabled = gc.isenabled()
    levels = {logger: logger.level for logger in map(logging.getLogger, CHATTY)}
    for logger, level in levels.items():
        logger.setLevel(level or logging.ERROR)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        for logger, level in levels.items():  # transformers sets its own as it loads
            logger.setLevel(level)


@contextmanager
def _without_plugin_notes() -> Iterator[None]:
    """Keep off the screen what XLA's plugins write to the process's stderr as they load on a machine without their
    device; other lines are written behind it."""
    with tempfile.TemporaryFile() as kept:
        screen = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(screen, 2)
            os.close(screen)
            kept.seek(0)
            for line in kept:
                if not line.startswith(PLUGIN_NOTES):
                    os.write(2, line)


def load_backend(name: str) -> Backend:
    """The backend of that name, its framework imported now. Raises MissingLibrary where that is not installed."""
    with quiet_loading():
        if name == "jax":
            try:
                with _without_plugin_notes():
                    import jax  # noqa: F401 - whose plugins print as they load
                from tightfit.backends.jax.backend import JaxBackend
            except ImportError as error:
                library = str(error.name or "jax").partition(".")[0]
                raise MissingLibrary(library, "backend: jax", install_command("jax")) from None
            return JaxBackend()
        from tightfit.backends.pytorch.backend import PytorchBackend

        return PytorchBackend()


def backend_of(recipe: Recipe) -> Backend:
    """The backend that a recipe names. Raises as `load_backend` does, and Refused for what it does not have: said ahead
    of what a device cannot do, whose advice is another thing that the backend may lack."""
    backend = load_backend(recipe.backend.name)
    if reasons := backend.absences(recipe):
        raise Refused("; ".join(reasons))
    return backend

"""The error for a model whose step cannot be traced without values, and where it stopped."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import (
    compiler_failure,
    is_models_own,
    located,
    module_of,
    raised,
    recomputation_failure,
)
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.replaced import replaced
from tightfit.errors import ModelError, TightfitError

VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
NO_RULE = (UnsupportedOperatorException, UnsupportedFakeTensorException)
SIZE_OVERFLOW = re.compile(r"Storage size calculation overflowed with sizes=\[([\d, ]+)\]")
"""torch's message for a tensor whose bytes are more than 64 bits count, also where its compiler wraps it."""


@contextmanager
def explain_trace_failure(build: Build, tracker: Tracker) -> Iterator[None]:
    """Raises ModelError, naming the module and the op, for what the model raises where it is run on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    try:
        with replaced(logger, "disabled", True):  # what it logs of an op that fails, the error says
            yield
    except TightfitError:
        raise
    except (Exception, SystemExit) as error:
        technique, name = build.recipe.compile, type(build.model).__name__
        if (sizes := SIZE_OVERFLOW.search(str(error))) is not None:
            raise ModelError(f"seq_len: {name} makes a tensor of {sizes[1].replace(', ', ' x ')} numbers, more than "
                             "any machine can address; write a smaller seq_len or micro_batch_size, or a smaller "
                             "model") from error
        if (failure := recomputation_failure(error)) is not None:
            raise ModelError(f"model: {name} cannot be trained so: {failure}") from error
        failure = compiler_failure(error)
        if failure is not None and technique != "auto":
            raise ModelError(f"compile: {technique.name} cannot be planned for {name}: {failure}") from error
        place = tracker.place_of(error)
        if place is None and not isinstance(error, VALUE_ERRORS + NO_RULE) and not is_models_own(error, build.model):
            raise
        module, op = place or ("", "")
        module = module_of(error, build.model) or module
        raise ModelError(_message(build, module, op or str(getattr(error, "func", "")), error)) from error


def _message(build: Build, module: str, op: str, error: BaseException) -> str:
    name = type(build.model).__name__
    where = located(module, op)
    if isinstance(error, DynamicOutputShapeException):
        reason = f"{where} makes a result whose very shape hangs on values"
    elif isinstance(error, DataDependentOutputException):
        reason = f"{where} reads a value"
    elif isinstance(error, NO_RULE):
        reason = f"{where} runs an op that torch has no shape rule for"
    else:
        reason = raised(error, module, op)
    runs, learn = "trains", "train for a few steps on the device (max_steps=3)"
    if build.recipe.mode == "inference":
        runs, learn = "runs", "generate on the device"
    return (
        f"model: {name} cannot be planned for: {reason}. A plan has shapes and no values, so that what {runs} may "
        f"still fail here. To learn what it takes, {learn}"
    )


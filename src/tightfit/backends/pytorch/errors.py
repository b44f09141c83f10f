"""Errors as one sentence: out of memory while doing what; of a model's own code, in which of its modules and at which
line. What torch's compiler raises is said of the choice of `compile` that fails.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from tightfit.errors import ModelError, OutOfMemory, Refused, TightfitError, one_line

OUR_FOLDER = Path(__file__).parents[2]
TORCH_FOLDER = Path(torch.__file__).parent
LIBRARY_FOLDERS = ("site-packages", "dist-packages")
"""Folders of libraries that are not Python's own."""
COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch._functorch")
"""Modules of the exceptions that torch.compile raises of its own."""

NO_MEMORY_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "STATUS_ALLOC_FAILED")
"""Texts of plain RuntimeErrors of who finds no memory: the CPU's allocator, CUDA itself, Triton, CUDA's libraries."""
REQUEST_TEXT = "ried to allocate"
"""Part of the sentence in which each device's allocator says how much was asked for; it is not the first."""
NOT_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def model_guard(model: nn.Module, doing: Callable[[], str]) -> Iterator[None]:
    """Context of work that runs the model: raises ModelError for what the model's own code raises, naming what
    `doing` says was under way."""
    try:
        yield
    except TightfitError:
        raise
    except (Exception, SystemExit) as error:
        clause = recomputation_failure(error)
        if clause is None and not is_models_own(error, model):
            raise
        clause = clause or compiler_failure(error) or raised(error, module_of(error, model))
        raise ModelError(f"model: {type(model).__name__} failed in {doing()}: {clause}") from error


def is_models_own(error: BaseException, model: nn.Module) -> bool:
    """Whether one of the model's modules was running, or code that belongs to no library, such as an autograd function
    of a person's own. What our own code raises is ours."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    if not files or OUR_FOLDER in Path(files[-1]).parents:
        return False
    return module_of(error, model) is not None or any(map(_is_a_persons, files))


def raised(error: BaseException, module: str | None, op: str = "") -> str:
    """The clause that says which module of a model raised what, in which op, and at which line of code."""
    text, kind = one_line(error), type(error).__name__
    return f"{located(module, op)} raised {kind if text == kind else f'{kind}: {text}'}{at_line(error)}"


def located(module: str | None, op: str) -> str:
    """The subject of a clause on a model: its module, if one is known, and the op."""
    return (f"its module {module!r}" if module else "it") + (f", in the op {op}," if op else "")


def compiler_failure(error: BaseException) -> str | None:
    """The clause for what torch.compile raised of its own; None for any other exception."""
    if not type(error).__module__.startswith(COMPILER_MODULES):
        return None
    return f"torch.compile raised {cause(error)}{at_line(error)}; write compile=off"


def recomputation_failure(error: BaseException) -> str | None:
    """The clause for what torch's checkpoint raised of its own: the recomputation found, or did, something else than
    the forward pass. None for any other exception."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    if not files or files[-1] != torch_checkpoint.__file__ or not isinstance(error, RuntimeError):
        return None
    if isinstance(error, torch_checkpoint.CheckpointError):
        return ("checkpointing computes other tensors in the backward pass than the forward pass did; write "
                "checkpointing=none")
    if "mutated" in str(error):
        return ("it changes in place, after a block has ended, a matrix product of the block's that "
                "checkpointing=selective keeps; write checkpointing=every-block")
    return ("checkpointing=selective runs other ops in the backward pass than the forward pass did; write "
            "checkpointing=every-block")


def cause(error: BaseException) -> str:
    """The first line of an exception, or of the one that the compiler wrapped in it."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return cause(inner)
    first, kind = str(error).strip().partition("\n")[0], type(error).__name__
    if kind == "LoweringException":  # its text begins with the type of what it wraps
        return first
    return f"{kind}: {first}" if first else kind


def module_of(error: BaseException, model: nn.Module) -> str | None:
    """The path inside the model of the innermost module that was running; empty for the model itself, None where no
    module of it was."""
    paths = {id(module): path for path, module in model.named_modules()}
    running = (paths.get(id(frame.f_locals.get("self"))) for frame, _ in walk_tb(error.__traceback__))
    return next(reversed([path for path in running if path is not None]), None)


def at_line(error: BaseException) -> str:
    """` (file:line)` of the innermost line of a person's own code, or else of the library that the model is from;
    nothing where neither was running."""
    lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    lines += [(line.filename, line.lineno) for line in getattr(error, "real_stack", None) or ()]  # Dynamo's
    for theirs in (_is_a_persons, _is_a_models):
        found = next((line for line in reversed(lines) if theirs(line[0])), None)
        if found is not None:
            return f" ({found[0]}:{found[1]})"
    return ""


def _is_a_persons(file: str) -> bool:
    path = Path(file)
    library = Path(sysconfig.get_path("stdlib")) in path.parents or any(name in path.parts for name in LIBRARY_FOLDERS)
    return _is_a_models(file) and not library


def _is_a_models(file: str) -> bool:
    path = Path(file)
    return not file.startswith("<") and OUR_FOLDER not in path.parents and TORCH_FOLDER not in path.parents


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an allocator's, of the device or of the CPU, or was raised because of one."""
    return _allocators_error(error) is not None


def _allocators_error(error: BaseException) -> BaseException | None:
    """The innermost allocator's error of those that an error is, was raised from, or had torch.compile wrap in it."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    if isinstance(inner, BaseException) and (found := _allocators_error(inner)):
        return found
    own = isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in NO_MEMORY_TEXTS)
    return error if own else None


@contextmanager
def memory_guard(doing: Callable[[], str]) -> Iterator[None]:
    """Turn the device's out-of-memory error into ours, naming what `doing` says was under way. Raises OutOfMemory."""
    try:
        yield
    except Exception as error:
        found = _allocators_error(error)
        if found is None:
            raise
        sentences = " ".join(str(found).split()).split(". ")
        said = next((sentence for sentence in sentences if REQUEST_TEXT in sentence), sentences[0])
        raise OutOfMemory(f"out of memory in {doing()}: {said}") from None


@contextmanager
def determinism_guard() -> Iterator[None]:
    """Turn torch's error of an op without a deterministic form into ours. Raises Refused."""
    try:
        yield
    except RuntimeError as error:
        op = NOT_DETERMINISTIC.search(str(error))
        if op is None:
            raise
        raise Refused(f"deterministic: PyTorch has no deterministic form of {op[1]}, which a step of this model runs; "
                      "write deterministic=false") from None

"""Everything a step needs to go on exactly: weights, optimizer states, random streams; as safetensors and JSON."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.pytorch.techniques.optimizer import state as optimizer_state
from tightfit.errors import CheckpointError

WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once, under their first name."""
    tensors: dict[str, Tensor] = {name: p.data for name, p in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors.update({name: t for name, t in model.state_dict().items() if name not in every and isinstance(t, Tensor)})
    return tensors


def save_state(model: nn.Module, optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Write the three files into `folder`; return what is not a tensor, as JSON values."""
    save_file({name: t.contiguous() for name, t in named_tensors(model).items()}, folder / WEIGHTS)
    tensors, meta = optimizer_state.state_tensors(optimizer, model)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / OPTIMIZER)
    streams, python_random = random_state()
    save_file(streams, folder / RANDOM)
    return {"optimizer": meta, "python_random": python_random, "torch": torch.__version__}


def load_state(
    model: nn.Module, optimizer: Optimizer, folder: Path, meta: dict[str, Any], make_states: Callable[[], None]
) -> None:
    """Restore what `save_state` wrote. make_states: as `make` of `optimizer_state.load_state`.

    Raises CheckpointError where names, shapes or formats differ.
    """
    try:
        weights, states, streams = (load_file(folder / name) for name in (WEIGHTS, OPTIMIZER, RANDOM))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: {' '.join(str(error).split())}") from None
    optimizer_state.load_state(optimizer, model, states, meta["optimizer"], make_states)
    optimizer_state.copy_tensors("weights", weights, named_tensors(model))
    restore_random(streams, meta["python_random"])


def random_state() -> tuple[dict[str, Tensor], Any]:
    """Where the random streams stand: torch's as tensors, and Python's own."""
    streams = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams, random.getstate()


def restore_random(streams: dict[str, Tensor], python_random: Any) -> None:
    """Let the random streams go on from where `random_state` found them."""
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
    version, internal, gauss = python_random
    random.setstate((version, tuple(internal), gauss))

"""Everything a step needs to go on exactly: weights, optimizer states, random streams; as safetensors and JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.pytorch.techniques.optimizer import state as optimizer_state
from tightfit.errors import CheckpointError

WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"

FORMATS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of tensors' formats in a file of safetensors."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once, under their first name."""
    tensors: dict[str, Tensor] = {name: p.data for name, p in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors.update({name: t for name, t in model.state_dict().items() if name not in every and isinstance(t, Tensor)})
    return tensors


def save_state(model: nn.Module, optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Write the three files into `folder`; return what is not a tensor, as JSON values."""
    write_tensors(named_tensors(model), folder / WEIGHTS)
    tensors, meta = optimizer_state.state_tensors(optimizer, model)
    write_tensors(tensors, folder / OPTIMIZER)
    streams, python_random = random_state()
    write_tensors(streams, folder / RANDOM)
    return {"optimizer": meta, "python_random": python_random, "torch": torch.__version__}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors of any device as the safetensors library reads them, one after the other: the host holds one of a
    device's at a time, where the library's own writer takes the bytes of all at once.

    The form is public: the length of a JSON header in eight bytes, the header, every tensor's bytes in its order.
    Raises KeyError for a format that it has no name for.
    """
    # The widest first: each then begins at a multiple of its own size.
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].element_size(), named[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    with path.open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        for _, tensor in ordered:
            values = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(values.view(torch.uint8).numpy().data)


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

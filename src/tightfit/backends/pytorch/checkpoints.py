"""Files of a checkpoint: weights, optimizer states and random streams, which a step resumes from exactly."""

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

from tightfit.backends.pytorch.sharding import UngatheredTensor, full_tensor
from tightfit.backends.pytorch.techniques.optimizer import state as optimizer_state
from tightfit.backends.pytorch.world import ALONE, TensorWorld
from tightfit.errors import CheckpointError, ModelError

WEIGHTS_FILE, OPTIMIZER_FILE, RANDOM_FILE = "weights.safetensors", "optimizer.safetensors", "random.safetensors"

FORMAT_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip
"""Names of tensors' formats in a file of safetensors."""


def named_tensors(model: nn.Module, *, learned: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once, under their first name. learned: of the parameters,
    those alone that require a gradient."""
    tensors: dict[str, Tensor] = {name: p.data for name, p in model.named_parameters()
                                  if p.requires_grad or not learned}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors.update({name: t for name, t in model.state_dict().items() if name not in every and isinstance(t, Tensor)})
    return tensors


def require_formats(model: nn.Module) -> None:
    """Raises ModelError where a checkpoint of the model could not be written."""
    for name, tensor in named_tensors(model).items():
        if tensor.dtype not in FORMAT_NAMES:
            own, *known = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *FORMAT_NAMES))
            raise ModelError(f"model: {name!r} is {own}, which safetensors, the form of checkpoints, does not hold; "
                             f"make it one of {', '.join(known)}")


def save_state(
    model: nn.Module, optimizer: Optimizer, folder: Path, world: TensorWorld = ALONE, *, learned: bool = False
) -> dict[str, Any]:
    """Write the three files into `folder`; return what is not a tensor, as JSON values. learned: as of `named_tensors`.

    All processes of a world call this, and the first writes: a run of another number of processes can go on from it.
    """
    tensors, meta = optimizer_state.state_tensors(optimizer, model)
    return write_state(named_tensors(model, learned=learned), tensors, meta, folder, world)


def write_state(
    weights: Mapping[str, Tensor | UngatheredTensor], states: Mapping[str, Tensor | UngatheredTensor],
    meta: dict[str, Any], folder: Path, world: TensorWorld,
) -> dict[str, Any]:  # fmt: skip
    """`save_state` of tensors by name. meta: the optimizer's other values."""
    write = write_tensors if world.rank == 0 else _gather
    write(weights, folder / WEIGHTS_FILE)
    write(states, folder / OPTIMIZER_FILE)
    streams, python_random = random_state()
    by_rank = enumerate(world.all_gather(streams))
    write({_stream(name, rank): stream for rank, own in by_rank for name, stream in own.items()}, folder / RANDOM_FILE)
    return {"optimizer": meta, "python_random": python_random, "torch": torch.__version__}


def _stream(name: str, rank: int) -> str:
    """The name of a random stream of a process."""
    return f"{name}/{rank}" if rank else name


def _ordered(tensors: Mapping[str, Tensor | UngatheredTensor]) -> list[tuple[str, Tensor | UngatheredTensor]]:
    """The widest first: each then begins at a multiple of its own size."""
    return sorted(tensors.items(), key=lambda named: (-named[1].element_size(), named[0]))


def _gather(tensors: Mapping[str, Tensor | UngatheredTensor], path: Path) -> None:
    """Give this process's parts of the tensors to the process that writes them."""
    for _, tensor in _ordered(tensors):
        full_tensor(tensor.detach())


def write_tensors(tensors: Mapping[str, Tensor | UngatheredTensor], path: Path) -> None:
    """Write tensors of any device as the safetensors library reads them, one after the other: the host holds one of a
    device's at a time, where the library's own writer takes the bytes of all at once.

    The form is public: the length of a JSON header in eight bytes, the header, every tensor's bytes in its order.
    Raises KeyError for a format that it has no name for.
    """
    ordered = _ordered(tensors)
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": FORMAT_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    with path.open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        for _, tensor in ordered:
            values = full_tensor(tensor.detach()).cpu().contiguous().reshape(-1)
            file.write(values.view(torch.uint8).numpy().data)


def load_state(
    model: nn.Module, optimizer: Optimizer, folder: Path, meta: dict[str, Any], make_states: Callable[[], None],
    world: TensorWorld = ALONE, *, learned: bool = False,
) -> None:  # fmt: skip
    """Restore what `save_state` wrote. make_states: as `make` of `optimizer_state.load_state`.

    Each process of a world reads for itself; one that has no random streams there keeps those that it has.

    Raises CheckpointError where names, shapes or formats differ.
    """
    weights, states, streams = read_tensors(folder)
    optimizer_state.load_state(optimizer, model, states, meta["optimizer"], make_states)
    optimizer_state.copy_tensors("weights", weights, named_tensors(model, learned=learned))
    restore_streams(streams, meta, world)


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights, optimizer states and random streams by name. Raises CheckpointError."""
    try:
        return load_file(folder / WEIGHTS_FILE), load_file(folder / OPTIMIZER_FILE), load_file(folder / RANDOM_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: {' '.join(str(error).split())}") from None


def restore_streams(streams: Mapping[str, Tensor], meta: Mapping[str, Any], world: TensorWorld) -> None:
    """Let this process's random streams go on from where they were saved."""
    names = {name: _stream(name, world.rank) for name in random_state()[0]}
    restore_random({name: streams[here] for name, here in names.items() if here in streams}, meta["python_random"])


def random_state() -> tuple[dict[str, Tensor], Any]:
    """State of the random streams: torch's as tensors, and Python's own."""
    streams = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams, random.getstate()


def restore_random(streams: dict[str, Tensor], python_random: Any) -> None:
    """Let the random streams go on from where `random_state` found them."""
    if "torch" in streams:
        torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
    version, internal, gauss = python_random
    random.setstate((version, tuple(internal), gauss))

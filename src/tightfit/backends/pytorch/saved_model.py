"""A trained model written as others read it: `save_pretrained`, or safetensors."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeGuard

import torch
import transformers
from torch import Tensor, nn

from tightfit.backends.pytorch.checkpoints import named_tensors, write_tensors
from tightfit.backends.pytorch.models import WEIGHTS_FILE, no_progress_bars
from tightfit.backends.pytorch.padding import stored_tensors
from tightfit.backends.pytorch.sharding import full_tensor, is_sharded
from tightfit.backends.pytorch.switches import as_loaded
from tightfit.files import follow_umask
from tightfit.models import OUR_TRANSFORMER


def _alone(tensor: Tensor) -> Tensor:
    """A tensor on the same memory with a storage of its own: transformers copies tensors that share one, such as those
    of a block that waits in host memory, before it writes any."""
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() == tensor.nbytes or not tensor.is_contiguous():
        return tensor
    memory = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return memory.view(tensor.dtype).view(tensor.shape)


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    """The stored tensors, whole; those that are split among processes in host memory, tied ones once."""
    whole: dict[Tensor, Tensor] = {}
    state: dict[str, Tensor] = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_sharded(parameter):
            if parameter not in whole:
                whole[parameter] = full_tensor(parameter).detach().cpu()
            state[name] = whole[parameter]
    return stored_tensors(model, state)


def _own_tensors(model: nn.Module, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors with those of layers that hold theirs otherwise, as `techniques.adapters` has them."""
    dtype = next((tensor.dtype for tensor in stored.values() if tensor.is_floating_point()), torch.float32)
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "own_tensors")]
    own = {f"{name}.{key}": tensor for name, layer in layers for key, tensor in layer.own_tensors(dtype).items()}
    return {name: tensor for name, tensor in {**stored, **own}.items() if tensor is not None}


def name_classes(model: transformers.PreTrainedModel, classes: dict[int, str]) -> None:
    """Write the names of labels into the model's configuration, in place of any that it has."""
    numbers = range(model.config.num_labels)
    model.config.id2label = {number: classes.get(number, f"LABEL_{number}") for number in numbers}
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}


def is_wrapped_by_peft(model: nn.Module) -> TypeGuard[Any]:
    """Whether the model is what `peft.get_peft_model` returns, which saves the adapter alone."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_model(
    model: nn.Module, folder: Path | str, classes: dict[int, str] | None = None, *, first: bool = True
) -> None:
    """Write the model's configuration and weights (safetensors) so that `model: <folder>` reads them.

    transformers' models are written by `save_pretrained`, and so is the adapter of one that peft wraps, as peft reads
    it; of a model of unknown class only its own code can make sense.
    Rows that only pad the vocabulary are left out, and so are an adapter's factors; quantized weights are written
    dequantized. `classes` names labels in the configuration. Of several processes
    all call this, and the `first` writes.
    """
    stored = _own_tensors(model, _gathered(model))
    if not first:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, transformers.PreTrainedModel) and classes:
        name_classes(model, classes)
    if isinstance(model, transformers.PreTrainedModel) or is_wrapped_by_peft(model):
        with no_progress_bars(), as_loaded(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Could not find a config file")  # of peft's base: it is kept as it is
            model.save_pretrained(str(folder), state_dict={name: _alone(tensor) for name, tensor in stored.items()})
        follow_umask(folder)
        return
    names = {*named_tensors(model), *(stored.keys() - model.state_dict().keys())}
    write_tensors({name: tensor for name, tensor in stored.items() if name in names}, folder / WEIGHTS_FILE)
    described: dict[str, Any] = {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
    from tightfit.backends.pytorch.transformer import Transformer

    if isinstance(model, Transformer):
        described = {"model_type": OUR_TRANSFORMER, **asdict(model.shape)}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

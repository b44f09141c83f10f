"""Models as PyTorch modules: built from a recipe, loaded, read for their logits."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from safetensors.torch import load_model as load_safetensors
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from tightfit.backends.base import DrawnAtRandom
from tightfit.backends.pytorch.errors import at_line, is_out_of_memory
from tightfit.backends.pytorch.sharding import full_shape
from tightfit.backends.pytorch.switches import turn_off
from tightfit.errors import ModelError, TightfitError, nearest, one_line
from tightfit.model_facts import facts_of, text_config
from tightfit.models import ModelSource, TransformerConfig, read_config, resolve_source
from tightfit.recipe import Recipe
from tightfit.tasks import Task
from tightfit.text import counted

WEIGHTS_FILE = "model.safetensors"
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
"""Names of a folder's weights."""
NUMBER = re.compile(r"\.\d+\.")
"""A block's number in a weight's name."""

SEES_BOTH_SIDES = frozenset({"xlnet", "xlm", "flaubert", "big_bird", "megatron-bert", "rembert", "roformer", "cpmant",
                             "prophetnet"})
"""Model types whose causal-lm class is not causal by itself, in transformers 5.17."""


class BuiltModel(NamedTuple):
    """A model in training mode, and what the person who trains it should know, as sentences."""

    model: nn.Module
    notes: tuple[str, ...] = ()


def build_model(
    recipe: Recipe, task: Task, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    config: Any = None, drawn_on: torch.device | None = None,
) -> BuiltModel:
    """The recipe's model for the task, on `device` (`meta` for shapes alone), its weights in `dtype`, which the device
    never holds wider. Buffers keep the format that the model gives them: fp32 for the frequencies of rotary positions.

    Weights are the stored ones where the recipe wants them and there are any; others are drawn on the device, from
    `recipe.seed` alone, or as `drawn_on` would draw them: another device that they are to be used on. A factory's
    module is drawn on the host where `dtype` is not fp32, since only it knows what it must not round. Normal draws,
    which most models start from, are the fp32 ones rounded; a transformers model that draws from another distribution
    may differ from its fp32 build in more than the rounding.
    Raises ModelError for what cannot be found, loaded or built.
    """
    device, source = torch.device(device), resolve_source(recipe)
    drawing = nullcontext() if drawn_on is None or drawn_on == device else _drawn_on(drawn_on)
    torch.manual_seed(recipe.seed)
    if source.kind == "factory":
        on_host = dtype != torch.float32 and device.type != "meta"
        with nullcontext() if on_host else drawing:
            model = _from_factory(source.name, recipe.model_overrides, torch.device("cpu") if on_host else device)
        model = cast_weights(model, dtype)
        if any(tensor.device != device for tensor in [*model.parameters(), *model.buffers()]):
            model = model.to(device)  # which fake tensors with other references to them cannot do
        return BuiltModel(ready_to_train(model, recipe))
    config = read_config(recipe) if config is None else config
    stored = stored_source(recipe) is not None
    notes: list[str] = []
    if source.kind == "folder" and recipe.pretrained and not stored:
        notes.append(DrawnAtRandom(f"the folder {source.name} holds no weights: the model starts from its "
                                   "configuration"))
    if isinstance(config, TransformerConfig):
        with nullcontext() if stored else drawing:
            model = _our_transformer(config, Path(source.name) if stored else None, device, dtype)
        return BuiltModel(ready_to_train(model, recipe), tuple(notes))
    if task.name == "causal-lm" and config.model_type in SEES_BOTH_SIDES:
        notes.append(f"{type(config).__name__} sees the tokens it predicts: its causal-lm loss says nothing")
    if stored:
        if recipe.precision != "auto" and recipe.precision.computes_in == "float16" and config.dtype == torch.bfloat16:
            notes.append("this model was trained in bf16, whose larger range fp16 does not have: its activations may "
                         "overflow; precision=bf16 is safer")
        model, found = _from_stored(source.name, config, recipe, task, device, dtype)
        notes += found
    else:
        with drawing:
            model = _from_config(config, recipe, task, device, dtype)
    return BuiltModel(ready_to_train(model, recipe), tuple(notes))


def _drawn_on(device: torch.device) -> AbstractContextManager[Any]:
    # Only whoever offloads pays for it.
    from tightfit.backends.pytorch.computed_on import ComputedOn

    return ComputedOn(device)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' own bars off a screen that has one already; those of downloads still show."""
    shown, downloads = transformers.utils.logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    transformers.utils.logging.disable_progress_bar()  # and, as it enables them, those of downloads
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()


def stored_source(recipe: Recipe) -> ModelSource | None:
    """The stored model whose weights a recipe loads; None where it draws them."""
    source = resolve_source(recipe)
    if source.kind not in ("folder", "hub") or not recipe.pretrained:
        return None
    there = source.kind == "hub" or any(any(Path(source.name).glob(files)) for files in WEIGHT_FILES)
    return source if there else None


def cast_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with its weights cast to `dtype`, one after the other. Buffers are never rounded, which would shift
    rotary positions; narrower ones, such as a BatchNorm's means, become `dtype` too: its ops take no mixture."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.itemsize < dtype.itemsize:
            buffer.data = buffer.data.to(dtype)
    return model


def ready_to_train(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The model in training mode, with its caches off and, where it classifies, the padding token that it looks for.

    For models that come from elsewhere as well.
    """
    turn_off(model, "use_cache")
    if isinstance(model, transformers.PreTrainedModel) and recipe.task == "sequence-classification":
        model.config.pad_token_id = text_config(model.config).pad_token_id = facts_of(model.config, recipe).pad_token_id
    return model.train()


def _from_config(config: Any, recipe: Recipe, task: Task, device: torch.device, dtype: torch.dtype) -> nn.Module:
    auto = getattr(transformers, task.auto_class)
    try:
        with torch.device(device):
            model: nn.Module = auto.from_config(config, dtype=dtype, trust_remote_code=recipe.trust_remote_code)
    except (
        ValueError, TypeError, AssertionError, ArithmeticError, RuntimeError, ImportError, LookupError, AttributeError
    ) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(_explain_build(recipe, error)) from error
    return model


def _from_stored(
    name: str, config: Any, recipe: Recipe, task: Task, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, list[str]]:
    """The model with its stored weights, and notes on those that had to be drawn at random or are not used.

    A classifier of another size is drawn anew; any other weight of another size is an error.
    """
    from tightfit.hub import explain_hub_error, only_local

    auto = getattr(transformers, task.auto_class)
    try:
        with no_progress_bars(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # as it refuses to read it
            model, loading = auto.from_pretrained(
                name, config=config, dtype=dtype, trust_remote_code=recipe.trust_remote_code,
                ignore_mismatched_sizes=True, output_loading_info=True, local_files_only=only_local(name),
            )
    except Exception as error:  # the hub's client, its transport and remote code each raise their own
        raise ModelError(explain_hub_error(name, error)) from error
    labels, drawn = config.num_labels, sorted(loading["missing_keys"])
    for key, stored, wanted in sorted(loading["mismatched_keys"]):
        if not (task.name.endswith("classification") and tuple(wanted)[:1] == (labels,)):
            raise ModelError(
                f"model: the stored weight {key} of {name!r} has shape {tuple(stored)}, and the recipe asks for "
                f"{tuple(wanted)}; take back the changed vocab_size or model_overrides, or write pretrained=false"
            )
        drawn.append(key)
    notes: list[str] = []
    if drawn:
        notes.append(note := DrawnAtRandom(f"not stored with {name}, so drawn at random: {', '.join(drawn)}"))
        note.names = drawn
    unused, asks, remedy = sorted(loading["unexpected_keys"]), "model_overrides asks for", "leave it out"
    if not recipe.model_overrides:  # what was trained for another task leaves its head behind, but no blocks
        blocks = {NUMBER.sub(".", key) for key in model.state_dict()}
        unused = [key for key in unused if NUMBER.sub(".", key) in blocks]
        asks, remedy = "its config.json describes", "write its number of layers there"
    if unused:
        notes.append(f"not used of what is stored with {name}: {counted(len(unused), 'weight')}, "
                     f"{', '.join(unused[:3])}{', ...' * (len(unused) > 3)}; the model that {asks} has no place for "
                     f"them: to train the whole stored model, {remedy}")
    return model.to(device), notes


def _our_transformer(
    config: TransformerConfig, folder: Path | None, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    from tightfit.backends.pytorch.transformer import Transformer
    from tightfit.hub import damaged_weights

    with torch.device(device), local_torch_dtype(dtype):  # it has no buffers that this could round
        model = Transformer(config)
    if folder is not None:
        try:
            load_safetensors(model, folder / WEIGHTS_FILE, device=str(device))
        except SafetensorError as error:
            raise ModelError(damaged_weights(str(folder), error)) from error
        except (OSError, RuntimeError) as error:
            raise ModelError(f"model: the weights in {str(folder)!r} do not fit: {one_line(error)}; take back "
                             "model_overrides, or write pretrained=false") from error
    return model


def _from_factory(name: str, arguments: Mapping[str, Any], device: torch.device) -> nn.Module:
    """Module from the factory `package.module:attribute`. Raises ModelError for a part of the name that is missing,
    arguments that it does not take, whatever it raises, and a result that is no nn.Module."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # another person's code raises anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(f"model: there is no module {module_name!r}; install its package, or put its folder "
                             "on PYTHONPATH") from None
        raise ModelError(f"model: importing {module_name!r} failed with {type(error).__name__}: "
                         f"{one_line(error)}{at_line(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            choices = [known for known in dir(found) if not known.startswith("_")]
            raise ModelError(f"model: {module_name} has no {path!r}; {nearest(part, choices)}")
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(f"model: {name!r} is a {type(found).__name__}; name a function or class that returns a module")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise ModelError(f"model_overrides: {name} cannot be called with {dict(arguments)}: {error}") from None
    with torch.device(device) if device.type != "cpu" else nullcontext():
        try:
            model = found(**arguments)
        except (Exception, SystemExit) as error:  # another person's code raises anything
            if isinstance(error, TightfitError) or is_out_of_memory(error):
                raise
            raise ModelError(f"model: {name!r} failed with {type(error).__name__}: "
                             f"{one_line(error)}{at_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: {name!r} returned a {type(model).__name__}; it should return a torch.nn.Module")
    return model


def _explain_build(recipe: Recipe, error: BaseException) -> str:
    reason = f"{one_line(error)} is not known" if isinstance(error, KeyError) else one_line(error)
    overrides = f" with model_overrides {recipe.model_overrides}" if recipe.model_overrides else ""
    return f"model: {recipe.model!r} cannot be built{overrides}: {reason}"


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: the tensor itself, its `logits`, or a mapping's, or the first of a tuple."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple | Mapping) and output:
        logits = output.get("logits") if isinstance(output, Mapping) else output[0]
    if not isinstance(logits, Tensor):
        raise ModelError(f"model: its forward returned a {type(output).__name__}; it should return the logits, "
                         "an object or a mapping with `logits`, or a tuple that begins with them")
    return logits


def parameter_count(model: nn.Module, *, trained: bool = False) -> int:
    """The model's parameters; tied ones count once, and quantized weights as what they stand for. trained: those alone
    that are not frozen."""
    own = sum(full_shape(each).numel() for each in model.parameters() if each.requires_grad or not trained)
    return own + sum(0 if trained else getattr(module, "quantized_weights", 0) for module in model.modules())

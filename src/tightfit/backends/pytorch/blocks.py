"""A model's repeated blocks, and inside a block its attention part and its feed-forward part.

Found by structure and by the names that the field's models share, so that no model needs an entry of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

SMALLEST_SHARE = 0.05
"""Repeated blocks that hold less than this share of the largest stack's parameters are no stack: heads and such."""

ATTENTION_CHAINS: tuple[tuple[str, ...], ...] = (
    ("attn",), ("attention",), ("self_attn",), ("self_attention",), ("rel_attn",), ("temporal_block",),
)
"""Attribute names of a block's attention part, in call order."""

MLP_CHAINS: tuple[tuple[str, ...], ...] = (
    ("mlp",), ("feed_forward",), ("block_sparse_moe",), ("moe",),
    ("ffn", "activation", "ffn_output"), ("ffn",), ("ff",), ("intermediate", "output"),
    ("fc1", "activation_fn", "fc2"),
)
"""Attribute names of a block's feed-forward part, in call order; the first chain that a block has in full counts."""

SUBLAYERS = "layer"
"""The list in which the T5 family's blocks keep their parts, each with its own norm and residual."""
SUBLAYER_ATTENTION = ("SelfAttention", "LocalSelfAttention", "TransientGlobalSelfAttention", "EncDecAttention")


def find_stacks(model: nn.Module) -> tuple[tuple[nn.Module, ...], ...]:
    """The model's repeated blocks, one tuple for each stack (an encoder-decoder has two), in forward order.

    A stack is the outermost run of modules of one class, or of one family, in a ModuleList or a Sequential. Empty
    where the model repeats nothing.
    """
    found = list(_runs(model))
    sizes = [_parameters(run) for run in found]
    least = SMALLEST_SHARE * max(sizes, default=0)
    return tuple(run for run, size in zip(found, sizes, strict=True) if 0 < size >= least)


def attention_modules(block: nn.Module) -> list[nn.Module]:
    """The block's attention part: modules called in order, each one's output the next one's first argument.

    Of a decoder block whose cross-attention does not follow its self-attention directly, the self-attention alone.
    Empty where the block has none that can be named.
    """
    sublayers = _sublayers(block)
    if sublayers:
        return [part for part in sublayers if _is_attention(part)]
    return _chain(block, ATTENTION_CHAINS)


def mlp_modules(block: nn.Module) -> list[nn.Module]:
    """The block's feed-forward part: modules called in order, each one's output the next one's first argument.

    Without the last matrix of a block that drops activations by a function call in front of it (BART, Whisper): the
    modules are a chain up to there. Empty where the block has none that can be named.
    """
    sublayers = _sublayers(block)
    if sublayers:
        return [part for part in sublayers if not _is_attention(part)]
    chain = _chain(block, MLP_CHAINS)
    return chain[:-1] if len(chain) == 3 and hasattr(block, "activation_dropout") else chain


def _runs(module: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    """The outermost runs of blocks below `module`, in registration order."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        run = _largest_run(module)
        certain = len(run) > 1 or any(isinstance(block, GradientCheckpointingLayer) for block in run)
        # One block alone may be a wrapper around the repeated ones.
        inner = [] if certain else [found for child in module.children() for found in _runs(child)]
        if run and not any(len(found) > 1 for found in inner):
            yield run
        else:
            yield from inner
        return
    for child in module.children():
        yield from _runs(child)


def _largest_run(container: nn.Module) -> tuple[nn.Module, ...]:
    """The consecutive children of one family that hold the most parameters."""
    runs: list[list[nn.Module]] = []
    before: nn.Module | None = None
    for child in container.children():
        if _is_block(child):
            if runs and before is runs[-1][-1] and _family(before) & _family(child):
                runs[-1].append(child)
            else:
                runs.append([child])
        before = child
    return tuple(max(runs, key=_parameters, default=[]))


def _is_block(module: nn.Module) -> bool:
    """Whether the module may be one of a model's blocks: more than a single layer of torch's own."""
    leaf = next(module.children(), None) is None
    return not (leaf and type(module).__module__.startswith("torch.nn"))


def _family(module: nn.Module) -> set[type]:
    """The module's class and its bases, without those that every module has, or any container."""
    return set(type(module).__mro__) - set(nn.Module.__mro__) - {nn.ModuleList, nn.ModuleDict}


def _parameters(modules: Iterable[nn.Module]) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def _sublayers(block: nn.Module) -> list[nn.Module]:
    parts = dict(block.named_children()).get(SUBLAYERS)
    sublayers = list(parts.children()) if isinstance(parts, nn.ModuleList) else []
    return sublayers if any(_is_attention(part) for part in sublayers) else []


def _is_attention(sublayer: nn.Module) -> bool:
    return any(name in SUBLAYER_ATTENTION for name, _ in sublayer.named_children())


def _chain(block: nn.Module, chains: tuple[tuple[str, ...], ...]) -> list[nn.Module]:
    children = dict(block.named_children())
    for names in chains:
        if all(name in children for name in names):
            return [children[name] for name in names]
    # A block that only wraps the real ones (ALBERT's groups): its part is found where it holds exactly one.
    wrapped = [inner for child in block.children() if isinstance(child, nn.ModuleList) for inner in child]
    return _chain(wrapped[0], chains) if len(wrapped) == 1 else []

"""The repeated blocks of many architectures, and that their parts are chains of calls as the recomputation needs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.architectures import TASK_OF, tiny_model
from tightfit.backends.pytorch.blocks import attention_modules, find_stacks, mlp_modules
from tightfit.backends.pytorch.transformer import Transformer
from tightfit.models import TransformerConfig

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # DeBERTa scripts functions

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "falcon": ("AutoModelForCausalLM", "FalconConfig", SMALL),
    "deberta_v2": ("AutoModelForMaskedLM", "DebertaV2Config", SMALL),
    "xlnet": ("AutoModelForCausalLM", "XLNetConfig", {
        "d_model": 32, "d_inner": 48, "n_layer": 2, "n_head": 4, "vocab_size": 96,
    }),
    "mixtral": ("AutoModelForCausalLM", "MixtralConfig", {
        **SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
    }),
    "whisper": ("AutoModelForSpeechSeq2Seq", "WhisperConfig", {
        "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96, "num_mel_bins": 8,
        "max_source_positions": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None,
    }),
}
TWO_STACKS = ("t5", "bart", "whisper")
NAMES = (*TASK_OF, *MORE, "transformer")
CHAINS = {  # class of the block: attention part, feed-forward part; the number of modules in each
    "T5Block encoder": (1, 1), "T5Block decoder": (2, 1), "OPTDecoderLayer": (1, 3), "AlbertLayerGroup": (1, 3),
    "BartEncoderLayer": (1, 2), "BartDecoderLayer": (1, 2), "WhisperEncoderLayer": (1, 2),
    "WhisperDecoderLayer": (1, 2), "BertLayer": (1, 2), "RobertaLayer": (1, 2), "ElectraLayer": (1, 2),
    "DebertaV2Layer": (1, 2),
}


@functools.cache
def make(name: str) -> nn.Module:
    if name == "transformer":
        return Transformer(TransformerConfig(
            vocab_size=96, num_outputs=96, hidden_size=32, num_layers=2, num_heads=4, head_dim=8, max_seq_len=16
        ))
    if name not in MORE:
        return tiny_model(name)
    auto, config, numbers = MORE[name]
    model: nn.Module = getattr(transformers, auto).from_config(getattr(transformers, config)(**numbers))
    return model


def inputs(name: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(12).view(2, 6) + 5
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids}
    return {"input_ids": ids, **({"decoder_input_ids": ids} if name in TWO_STACKS else {})}


@pytest.mark.parametrize("name", NAMES)
def test_stacks(name: str) -> None:
    stacks = find_stacks(make(name))
    blocks = 1 if name == "albert" else 2  # ALBERT calls one shared block twice
    assert [len(stack) for stack in stacks] == [blocks] * (2 if name in TWO_STACKS else 1)
    for stack in stacks:
        assert len({type(block) for block in stack}) == 1
    in_order = [block for block in make(name).modules() if any(block in stack for stack in stacks)]
    assert in_order == [block for stack in stacks for block in stack]


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_chains(name: str) -> None:
    """Each module of a part is called, in order, with what the one before returned as its first argument."""
    model = make(name)
    blocks = [block for stack in find_stacks(model) for block in stack]
    chains = [find(block) for block in blocks for find in (attention_modules, mlp_modules)]
    calls: list[tuple[nn.Module, Any, Any]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = args[0] if args else kwargs["hidden_states"]
        calls.append((module, first, output[0] if isinstance(output, tuple) else output))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for chain in chains for module in chain]
    model(**inputs(name))
    for hook in hooks:
        hook.remove()
    for chain in chains:
        assert chain
        mine = [call for call in calls if call[0] in chain]
        repeats = 2 if name == "albert" else 1
        assert [module for module, _, _ in mine] == chain * repeats
        for i in range(1, len(chain)):
            assert mine[i][1] is mine[i - 1][2]


@pytest.mark.parametrize("name", NAMES)
def test_parts_hold_the_blocks_matrices(name: str) -> None:
    """Attention and feed-forward parts share no parameter, and together they leave little of a block out."""
    for stack_index, stack in enumerate(find_stacks(make(name))):
        block = stack[-1]
        attention, mlp = attention_modules(block), mlp_modules(block)
        kind = type(block).__name__ + (("", " encoder", " decoder")[stack_index + 1] if name == "t5" else "")
        assert (len(attention), len(mlp)) == CHAINS.get(kind, (1, 1))
        one, two = ({id(p) for m in part for p in m.parameters()} for part in (attention, mlp))
        assert one
        assert two
        assert not one & two
        if name not in ("bart", "whisper"):  # whose chains end early; see the docstrings
            covered = sum(p.numel() for p in block.parameters() if id(p) in one | two)
            assert covered > 0.9 * sum(p.numel() for p in block.parameters())


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class OtherBlock(Block):
    """Another class of the same family."""


def test_a_sequential_with_ends() -> None:
    blocks = [Block(), OtherBlock(), Block()]
    model = nn.Sequential(nn.Embedding(10, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 10))
    assert find_stacks(model) == (tuple(blocks),)
    assert mlp_modules(blocks[0]) == []


def test_a_wrapped_sequential_and_a_small_head() -> None:
    blocks = [Block(64) for _ in range(3)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.ModuleList([Block(2), Block(2)]))
    assert find_stacks(model) == (tuple(blocks),)


def test_one_block_is_a_stack_and_none_is_none() -> None:
    gpt2 = tiny_model("gpt2", n_layer=1)
    assert [len(stack) for stack in find_stacks(gpt2)] == [1]
    t5 = tiny_model("t5", num_layers=1, num_decoder_layers=1)
    assert [type(block).__name__ for stack in find_stacks(t5) for block in stack] == ["T5Block", "T5Block"]
    assert find_stacks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == ()


def test_layers_of_torch() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    )
    (stack,) = find_stacks(encoder)
    assert stack == tuple(encoder.layers)
    assert attention_modules(stack[0]) == [encoder.layers[0].self_attn]
    assert mlp_modules(stack[0]) == []  # its activation is a function between the modules

"""What the attention tests share: batches of every mask kind, builds with an attention technique, more models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from tests.architectures import POSITIONS, TASK_OF, VOCAB, tiny_model
from tightfit.backends.pytorch.batch import TensorBatch, tensor_batch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.attention import apply as attention
from tightfit.devices import Device
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import MicroBatch, get_task
from tightfit.techniques.attention import Attention, Eager, Flex, Sdpa

ROWS, LENGTH = 2, 24
DOCUMENTS = ((7, 12, 5), (10, 14))
"""Lengths of the documents in each row of a packed batch."""
APPLY = {Eager: attention.eager, Sdpa: attention.sdpa, Flex: attention.flex}

_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "pad_token_id": 0,
}
_ENCODER = {**{k: v for k, v in _SMALL.items() if k not in ("num_key_value_heads", "pad_token_id")},
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5GEMMA = {**_SMALL, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": None}
_MORE: dict[str, Any] = {
    "gemma2": lambda: transformers.Gemma2Config(**_SMALL, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SMALL, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SMALL, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "modernbert": lambda: transformers.ModernBertConfig(
        **{k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}, local_attention=8,
        global_attn_every_n_layers=2, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **_SMALL, head_dim=8, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=48,
        no_rope_layers=[1, 0],
    ),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=6, max_position_embeddings=POSITIONS, resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=POSITIONS, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False,
        max_position_embeddings=POSITIONS,
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "biogpt": lambda: transformers.BioGptConfig(
        **{k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, activation_dropout=0.0, layerdrop=0.0,
    ),
    "deepseek_v32": lambda: transformers.DeepseekV32Config(  # many heads in the index: few scores tie
        **{**_SMALL, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
        index_topk=6, index_head_dim=16, index_n_heads=32, first_k_dense_replace=1,
    ),
    "doge": lambda: transformers.DogeConfig(**_SMALL, keep_window_size=6),
    "mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4),
    "ibert": lambda: transformers.IBertConfig(**_ENCODER, pad_token_id=1, type_vocab_size=2),
    "mobilebert": lambda: transformers.MobileBertConfig(
        **_ENCODER, embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=1),
    "longformer": lambda: transformers.LongformerConfig(**_ENCODER, pad_token_id=1, attention_window=4),
    "mra": lambda: transformers.MraConfig(**_ENCODER),
    "nystromformer": lambda: transformers.NystromformerConfig(**_ENCODER, num_landmarks=4, segment_means_seq_len=24),
    "big_bird": lambda: transformers.BigBirdConfig(**_ENCODER, attention_type="block_sparse", block_size=4),
    "umt5": lambda: transformers.UMT5Config(
        vocab_size=VOCAB, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "t5gemma": lambda: transformers.T5GemmaConfig(
        encoder=_T5GEMMA, decoder=_T5GEMMA, vocab_size=VOCAB, is_encoder_decoder=True,
    ),
}
MORE_TASKS = {**dict.fromkeys(("ibert", "mobilebert", "longformer", "mra", "big_bird", "nystromformer"), "masked-lm"),
              "modernbert": "masked-lm", "umt5": "seq2seq", "t5gemma": "seq2seq"}
_AUTO = {"causal-lm": transformers.AutoModelForCausalLM, "masked-lm": transformers.AutoModelForMaskedLM,
         "seq2seq": transformers.AutoModelForSeq2SeqLM}
INSIDE_FP32 = ("llama4", "gpt_neo", "gptj", "falcon", "deepseek_v32")
"""Models that compute part of attention in fp32 whatever their format."""


def make(name: str, implementation: str | None = None) -> nn.Module:
    """A tiny fp64 model with seeded weights and dropout off, on transformers' `implementation` if named."""
    if name in TASK_OF:
        model = tiny_model(name)
    else:
        torch.manual_seed(0)
        model = _AUTO[task_of(name)].from_config(_MORE[name]())
    model = model.double().eval()
    # initial weights of 0.02 leave attention nearly uniform: nothing would show
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    if name in ("gpt_oss", "deepseek_v32"):
        model.set_experts_implementation("eager")  # type: ignore[operator]  # the grouped matrix product knows no fp64
    if implementation is not None:
        for part in model.modules():  # T5's stacks hold copies of the configuration
            if hasattr(part, "set_attn_implementation"):
                part.set_attn_implementation(implementation)  # type: ignore[operator]
    return model


def task_of(name: str) -> str:
    return {**TASK_OF, **MORE_TASKS}.get(name, "causal-lm")


def built(model: nn.Module, technique: Attention, task: str = "causal-lm") -> Build:
    """A build of the model with that attention alone."""
    cpu = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
    build = Build(
        recipe=Recipe(task=task), device=cpu, torch_device=torch.device("cpu"), task=get_task(task),
        facts=ModelFacts(vocab_size=VOCAB), model=model, stacks=(),
    )
    apply: Any = APPLY[type(technique)]
    result: Build = apply(technique, build)
    return result


def batch_of(kind: str, task: str, seed: int = 0) -> TensorBatch:
    """A micro-batch of that mask kind: ROWS rows of LENGTH tokens."""
    random = np.random.default_rng(seed)
    if task == "image-classification":
        pixels = random.normal(size=(ROWS, 3, 16, 16))
        return tensor_batch(MicroBatch(inputs={"pixel_values": pixels}, labels=np.zeros(ROWS, dtype=np.int64)))
    ids = random.integers(4, VOCAB, (ROWS, LENGTH))
    inputs = {"input_ids": ids}
    if task == "seq2seq":
        inputs["decoder_input_ids"] = random.integers(4, VOCAB, (ROWS, 9))
    extra: dict[str, Any] = {}
    if kind == "padded":
        extra["padding"] = np.arange(LENGTH) < np.array([[LENGTH], [15]])
        inputs["input_ids"] = np.where(extra["padding"], ids, 0)
    if kind == "packed":
        inputs["position_ids"] = np.array([np.concatenate([np.arange(n) for n in row]) for row in DOCUMENTS])
        extra["document_ids"] = np.array(
            [np.repeat(np.arange(len(row)), row) for row in DOCUMENTS], dtype=np.int32
        )
    return tensor_batch(MicroBatch(inputs=inputs, labels=ids, mask=kind, **extra))


def documents(batch: TensorBatch) -> list[tuple[int, slice, TensorBatch]]:
    """Each document of a packed batch: its row, its place, and itself alone as a batch of kind none."""
    alone = []
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            place = slice(start, start + length)
            ids = batch.inputs["input_ids"][row : row + 1, place]
            alone.append((row, place, TensorBatch(inputs={"input_ids": ids}, labels=ids)))
            start += length
    return alone


def reference(name: str, batch: TensorBatch, implementation: str = "sdpa") -> Tensor:
    """The logits of transformers' own attention and masks for the same model."""
    arguments: dict[str, Any] = dict(batch.inputs)
    if batch.padding is not None:
        arguments["attention_mask"] = batch.padding.long()
    with torch.no_grad():
        logits: Tensor = make(name, implementation)(**arguments).logits
    return logits


def real(logits: Tensor, batch: TensorBatch, task: str) -> Tensor:
    """The logits of real positions."""
    return logits if batch.padding is None or task == "seq2seq" else logits[batch.padding]

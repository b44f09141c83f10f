"""Tiny models of many architectures, from transformers' own classes, dropout off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 96
POSITIONS = 40

_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_dropout": 0.0, "max_position_embeddings": POSITIONS, "pad_token_id": 0,
}
_BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": POSITIONS,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "llama": ("LlamaConfig", _LLAMA),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 8}),
    "gemma": ("GemmaConfig", {**_LLAMA, "head_dim": 8}),
    "phi": ("PhiConfig", {**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoXConfig", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "max_position_embeddings": POSITIONS,
    }),
    "opt": ("OPTConfig", {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0,
        "attention_dropout": 0.0, "max_position_embeddings": POSITIONS, "word_embed_proj_dim": 32,
    }),
    "bert": ("BertConfig", _BERT),
    "roberta": ("RobertaConfig", {**_BERT, "type_vocab_size": 1, "max_position_embeddings": POSITIONS + 2}),
    "electra": ("ElectraConfig", {**_BERT, "embedding_size": 32}),
    "albert": ("AlbertConfig", {**_BERT, "embedding_size": 16}),
    "distilbert": ("DistilBertConfig", {
        "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0, "max_position_embeddings": POSITIONS,
    }),
    "t5": ("T5Config", {
        "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }),
    "bart": ("BartConfig", {
        "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0, "max_position_embeddings": POSITIONS, "decoder_start_token_id": 2,
    }),
    "vit": ("ViTConfig", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "image_size": 16, "patch_size": 8,
    }),
}
CAUSAL = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "opt")
MASKED = ("bert", "roberta", "electra", "albert", "distilbert")
SEQ2SEQ = ("t5", "bart")
IMAGES = ("vit",)

TASK_OF = {
    **dict.fromkeys(CAUSAL, "causal-lm"), **dict.fromkeys(MASKED, "masked-lm"), **dict.fromkeys(SEQ2SEQ, "seq2seq"),
    **dict.fromkeys(IMAGES, "image-classification"),
}
_AUTO: dict[str, Callable[..., Any]] = {
    "causal-lm": transformers.AutoModelForCausalLM.from_config,
    "masked-lm": transformers.AutoModelForMaskedLM.from_config,
    "sequence-classification": transformers.AutoModelForSequenceClassification.from_config,
    "seq2seq": transformers.AutoModelForSeq2SeqLM.from_config,
    "image-classification": transformers.AutoModelForImageClassification.from_config,
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The tiny configuration of an architecture."""
    config_class, numbers = _CONFIGS[name]
    vocabulary = {} if name == "vit" else {"vocab_size": VOCAB}
    return getattr(transformers, config_class)(**{**vocabulary, **numbers, **changes})


def tiny_model(name: str, task: str | None = None, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model with seeded weights, for the architecture's own task or the one named."""
    torch.manual_seed(seed)
    model: nn.Module = _AUTO[task or TASK_OF[name]](tiny_config(name, **changes))
    return model

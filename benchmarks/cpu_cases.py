"""The cases of `plan_vs_cpu.py`: small models of many architectures, each under several combinations of techniques.

Models are small in width and depth, and rows long enough that activations outweigh optimizer states in most cases.
Every value of every setting meets every architecture group, and settings are combined by walking through their lists
at different paces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from tightfit.recipe import Recipe
from tightfit.tasks import get_task

VOCABULARY, LENGTH, ROWS = 500, 96, 6

_WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROPE = {**_WIDTH, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_ROPE, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {**_ROPE, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
_BERT = {**_WIDTH, "max_position_embeddings": 256}
_VIT = {**_WIDTH, "image_size": 64, "patch_size": 8}
_HEADS = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "causal-lm", _HEADS),
    "gptj": ("GPTJConfig", "causal-lm", {**_HEADS, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", "causal-lm", _ROPE),
    "opt": ("OPTConfig", "causal-lm", {**_ROPE, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("BloomConfig", "causal-lm", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", "causal-lm", _ROPE),
    "llama": ("LlamaConfig", "causal-lm", _GROUPED),
    "llama-deep": ("LlamaConfig", "causal-lm", {**_GROUPED, "num_hidden_layers": 12}),
    "mistral": ("MistralConfig", "causal-lm", {**_GROUPED, "sliding_window": 32}),
    "qwen2": ("Qwen2Config", "causal-lm", _GROUPED),
    "qwen3": ("Qwen3Config", "causal-lm", _GROUPED),
    "phi": ("PhiConfig", "causal-lm", _ROPE),
    "phi3": ("Phi3Config", "causal-lm", _ROPE),
    "gemma2": ("Gemma2Config", "causal-lm", {**_GROUPED, "sliding_window": 32}),
    "gemma3": ("Gemma3TextConfig", "causal-lm", {**_GROUPED, "sliding_window": 32}),
    "mixtral": ("MixtralConfig", "causal-lm", {**_GROUPED, "num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", "causal-lm", _EXPERTS),
    "qwen3-moe": ("Qwen3MoeConfig", "causal-lm", {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 32}),
    "gpt-oss": ("GptOssConfig", "causal-lm", {**_GROUPED, "num_local_experts": 4, "sliding_window": 32}),
    "xlnet": ("XLNetConfig", "causal-lm", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}),
    "bert": ("BertConfig", "masked-lm", _BERT),
    "roberta": ("RobertaConfig", "masked-lm", {**_BERT, "type_vocab_size": 1}),
    "electra": ("ElectraConfig", "masked-lm", {**_BERT, "embedding_size": 64}),
    "albert": ("AlbertConfig", "masked-lm", {**_BERT, "embedding_size": 16}),
    "distilbert": ("DistilBertConfig", "masked-lm", {
        "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 256,
    }),
    "deberta-v2": ("DebertaV2Config", "masked-lm", _BERT),
    "modernbert": ("ModernBertConfig", "masked-lm", {**_ROPE, "sep_token_id": 2, "cls_token_id": 1}),
    "t5": ("T5Config", "seq2seq", {
        "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    }),
    "bart": ("BartConfig", "seq2seq", {
        "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 256,
        "decoder_start_token_id": 2,
    }),
    "vit": ("ViTConfig", "image-classification", _VIT),
    "dinov2": ("Dinov2Config", "image-classification", {**_VIT, "mlp_ratio": 2}),
    "swin": ("SwinConfig", "image-classification", {
        "image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    }),
}  # fmt: skip
"""Configuration class of transformers, task, and numbers."""

BESIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "squeezebert": ("SqueezeBertConfig", "masked-lm", {**_BERT, "embedding_size": 64}),
    "roformer": ("RoFormerConfig", "masked-lm", {**_BERT, "embedding_size": 64}),
    "convbert": ("ConvBertConfig", "masked-lm", _BERT),
    "biogpt": ("BioGptConfig", "causal-lm", {**_WIDTH, "max_position_embeddings": 256}),
}
"""Models that are compared beside the others. The first three make themselves a mask that hides nothing. BioGPT drops
what its attention holds, and so do the plain cases of packed documents: see `cases_beside`."""

KNOWN = {**MODELS, **BESIDE}

NAMED = ("moe-tiny",)
"""Bundled models, as they are."""

OURS = "transformer"
"""Our own bundled model, by a recipe of its own."""
_OURS = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "num_heads": 4, "max_seq_len": 256}

CHECKPOINTING: tuple[Any, ...] = (
    "none", "every-block", "none", "every-nth", "mlp", "segments", "attention", "selective",
    {"name": "selective", "keep": "attention"}, {"name": "selective", "keep": "every-other-matmul"},
)
PRECISION = ("fp32", "bf16", "fp16", "bf16-pure")
OPTIMIZER: tuple[Any, ...] = (
    "adamw", {"name": "adamw", "implementation": "foreach"}, {"name": "adamw", "implementation": "loop"}, "sgd",
    "adafactor", "lion", "adamw-8bit", "adamw-4bit", "adamw-anyprecision",
)
MICRO_BATCH = (6, 2, 4)
"""Of 6 rows: one, three, and two of which the last is smaller."""
CASES_EACH = 5

_CHUNKS = {"name": "chunked", "tokens": 100}
CHUNKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2", {"loss": _CHUNKS, "precision": "bf16-pure", "micro_batch_size": 4, "data": "stdlib"}),
    ("gemma2", {"loss": _CHUNKS, "precision": "fp16", "pad_vocab_to": 64, "checkpointing": "every-block"}),
    ("bart", {"loss": _CHUNKS, "precision": "bf16", "micro_batch_size": 2, "max_grad_norm": 0.0}),
)
"""Cases of chunked cross-entropy: a tied head, a softcap, and a bias behind the head."""

FP8: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"precision": "fp8", "checkpointing": "every-block", "micro_batch_size": 2, "seq_len": 32}),
    ("gpt2", {"precision": {"name": "fp8", "weights": "bf16"}, "micro_batch_size": 4, "seq_len": 32}),
    ("bart", {"precision": {"name": "fp8", "scaling": "rowwise"}, "seq_len": 32}),
)
"""Cases of products in fp8: either kind of linear layer and of scaling, and weights in both formats, on short
rows."""

ADAPTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"trainable": "lora", "base": "nf4", "precision": "bf16", "checkpointing": "every-block",
               "micro_batch_size": 2}),
    ("gpt2", {"trainable": "dora", "base": "int8", "micro_batch_size": 4}),
    ("bart", {"trainable": {"name": "lora", "dropout": 0.1}, "base": "bf16", "precision": "bf16", "loss": _CHUNKS}),
    ("qwen3", {"trainable": {"name": "layers", "names": ["layers.1", "lm_head"]}, "checkpointing": "selective"}),
    ("llama", {"trainable": "lora", "base": "fp16", "precision": "fp16", "micro_batch_size": 2}),
)
"""Cases of frozen weights: either kind of linear layer, and each way to hold them."""

ALTERNATING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("moe-tiny", {"micro_batch_size": 2, "precision": "bf16", "checkpointing": "every-block"}),
    ("moe-tiny", {"router_z_loss_coef": 0.001, "micro_batch_size": 4, "accumulation": "by-block"}),
)
"""Cases of experts in every other block."""

TILED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"checkpointing": {"name": "tiled-mlp", "tokens": 64}, "precision": "bf16", "micro_batch_size": 2}),
    ("t5", {"checkpointing": {"name": "tiled-mlp", "tokens": 50}, "micro_batch_size": 2}),
    ("gemma2", {"checkpointing": {"name": "tiled-mlp", "tokens": 64}, "trainable": "lora", "base": "nf4",
                "precision": "bf16", "micro_batch_size": 4}),
)
"""Cases of feed-forward parts in tiles: with and without a norm inside, and with frozen weights."""

STOCHASTIC = {"name": "bf16-pure", "rounding": "stochastic"}
"""What 8-bit and 4-bit states want of bf16 weights."""

MUON: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"optimizer": "muon", "micro_batch_size": 2}),
    ("gpt2", {"optimizer": "muon", "precision": "bf16-pure", "checkpointing": "every-block"}),
    ("t5", {"optimizer": "muon", "precision": "bf16", "accumulation": "by-block", "update": "with-forward",
            "micro_batch_size": 4}),
    ("moe-tiny", {"optimizer": "muon", "precision": STOCHASTIC, "micro_batch_size": 2}),
    ("bert", {"optimizer": "muon", "accumulation": "by-block", "update": "in-backward", "max_grad_norm": 0.0,
              "checkpointing": "every-block"}),
)
"""Cases of matrices made orthogonal: in fp32 and bf16, experts' one by one, and block by block."""


@dataclass(frozen=True)
class Case:
    """One prediction to hold to the truth. settings: fields of a recipe; dropout: whether the model keeps its own;
    documents: in each row that is packed, by default as many as planning takes."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    dropout: bool = True
    documents: int | None = None

    @property
    def name(self) -> str:
        parts = [f"{key}={_short(value)}" for key, value in self.settings.items()]
        more = ["" if self.dropout else "dropout=off", f"documents={self.documents}" if self.documents else ""]
        return " ".join(filter(None, [self.model, *parts, *more]))

    def recipe(self) -> Recipe:
        """Resolved, for the CPU."""
        if self.model == OURS:
            rate = {} if self.dropout else {"dropout_rate": 0.0}
            own = {"model": "transformer-156m", "model_overrides": {**_OURS, **rate}, "task": "causal-lm"}
        elif self.model in NAMED:
            own = {"model": self.model, "task": "causal-lm"}
        else:
            own = {"task": KNOWN[self.model][1]}
        images = own["task"] == "image-classification"
        return Recipe.from_dict({
            "precision": "fp32", "checkpointing": "none", "optimizer": "adamw", "attention": "sdpa", "compile": "off",
            "batch_size": ROWS, "micro_batch_size": ROWS, "seq_len": LENGTH, "pretrained": False, "device": "cpu",
            "vocab_size": None if images else VOCABULARY, "data": "dummy", **own, **self.settings,
        })  # fmt: skip

    def model_factory(self) -> Callable[[], nn.Module] | None:
        """Makes the model; None where the recipe names it."""
        if self.model == OURS or self.model in NAMED:
            return None
        class_name, task, numbers = KNOWN[self.model]
        vocabulary = {} if task == "image-classification" else {"vocab_size": VOCABULARY}
        config = getattr(transformers, class_name)(**{**numbers, **vocabulary})
        if not self.dropout:
            for key, value in vars(config).items():
                if "drop" in key and isinstance(value, float):
                    setattr(config, key, 0.0)

        def make() -> nn.Module:
            torch.manual_seed(0)
            model: nn.Module = getattr(transformers, get_task(task).auto_class).from_config(config)
            return model

        return make


def cases() -> list[Case]:
    """Every case, in a fixed order."""
    names = [*MODELS, OURS]
    every = [_case(name, number) for number, name in enumerate(n for n in names for _ in range(CASES_EACH))]
    return [*every, *(Case(model, settings, dropout=False)
              for model, settings in (*CHUNKED, *FP8, *ADAPTED, *ALTERNATING, *TILED, *MUON))]


def cases_beside() -> list[Case]:
    """Cases recorded beside the others, and in no figure: models' own masks, and dropout inside attention over packed
    documents, whose memory on a processor hangs on the documents' lengths. Planning takes the fullest global batch, of
    one document a row, and over-predicts the others."""
    packed: dict[str, Any] = {"micro_batch_size": 2, "data": "stdlib"}
    masks: dict[str, dict[str, Any]] = {
        "squeezebert": {"precision": "bf16"},
        "roformer": {"precision": "fp16", "checkpointing": "selective"},
        "convbert": {"precision": "fp16", "checkpointing": "selective"},
    }
    dropout: dict[str, dict[str, Any]] = {
        "biogpt": {"checkpointing": "every-block", "optimizer": "sgd", **packed},
        "gpt2": packed,
    }
    return [
        *(Case(model, settings) for model, settings in masks.items()),
        *(Case(model, settings, documents=each) for model, settings in dropout.items() for each in (None, 1)),
    ]


def _case(model: str, number: int) -> Case:
    lap = number // CASES_EACH
    task = "causal-lm" if model == OURS else KNOWN[model][1]
    checkpointing = CHECKPOINTING[number % len(CHECKPOINTING)]
    precision: Any = PRECISION[(number + lap) % len(PRECISION)]
    optimizer = OPTIMIZER[(2 * number + lap) % len(OPTIMIZER)]
    if precision == "bf16-pure":
        if optimizer == "adafactor" or isinstance(optimizer, dict):
            optimizer = "adamw"
        elif optimizer in ("adamw-8bit", "adamw-4bit"):
            precision = STOCHASTIC
    settings: dict[str, Any] = {
        "precision": precision, "checkpointing": _served(model, checkpointing), "optimizer": optimizer,
        "micro_batch_size": MICRO_BATCH[(number + lap) % len(MICRO_BATCH)],
    }
    if number % 4 == 3:
        settings["attention"] = "eager"
    if number % 6 == 5 and task != "image-classification":
        settings["data"] = {"source": "stdlib", "packing": False} if model in UNPACKED else "stdlib"
    if number % 7 == 6:
        settings["max_grad_norm"] = 0.0
    if number % 8 == 7 and task != "image-classification":
        settings["pad_vocab_to"] = 64
    return Case(model, settings, dropout=number % 2 == 0)


UNPACKED = frozenset({"xlnet", "bloom", "deberta-v2"})
"""Models that cannot keep packed documents apart: theirs are padded."""

PARTLESS = {"swin": frozenset({"attention", "mlp"})}
"""Checkpointing that is refused with an error, for the model's blocks (stages) have no such part to recompute alone:
every-block takes its place."""


def _served(model: str, checkpointing: Any) -> Any:
    name = checkpointing if isinstance(checkpointing, str) else checkpointing["name"]
    return "every-block" if name in PARTLESS.get(model, ()) else checkpointing


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ":".join(f"no-{key}" if part is False else str(part) for key, part in value.items())
    return str(value)

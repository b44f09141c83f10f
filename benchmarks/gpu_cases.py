"""The cases of `plan_vs_gpu.py`: recipes over models, techniques and shapes, each with how full its memory is to be.

A case is a line: `MODEL ROWSxTOKENS[*MICRO_BATCHES] [key=value ...]`. ROWS is the micro-batch, and the global batch is
that many times MICRO_BATCHES, 1 by default; 2.5 leaves a smaller last one. The rest changes BASE.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal

from tightfit.bundled import BUNDLED
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import apply_overrides

BASE: dict[str, Any] = {
    "precision": "bf16", "loss": "plain", "checkpointing": "none", "optimizer": "adamw", "attention": "sdpa",
    "compile": "off", "data": "dummy", "loading": {"workers": 2}, "max_steps": 10, "pretrained": False,
}
PACKED, PADDED = "data=stdlib", "data=stdlib data.packing=false"

_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_EXPERTS = {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
CONFIGURED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-0.6b": ("Qwen3Config", "causal-lm", {
        "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "llama-3.2-3b": ("LlamaConfig", "causal-lm", {
        "num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }),
    "gemma-3-1b": ("Gemma3TextConfig", "causal-lm", {
        "num_hidden_layers": 26, "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144, "sliding_window": 512,
    }),
    "mistral-window": ("MistralConfig", "causal-lm", {
        **_EXPERTS, "num_hidden_layers": 16, "intermediate_size": 4096, "vocab_size": 32000, "sliding_window": 512,
    }),
    "pythia-1b": ("GPTNeoXConfig", "causal-lm", {
        "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 8, "intermediate_size": 8192,
        "vocab_size": 50304,
    }),
    "opt-1.3b": ("OPTConfig", "causal-lm", {
        "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "ffn_dim": 8192,
        "word_embed_proj_dim": 2048,
    }),
    "mixtral-0.9b": ("MixtralConfig", "causal-lm", {
        **_EXPERTS, "intermediate_size": 3584, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    }),
    "olmoe-0.5b": ("OlmoeConfig", "causal-lm", {
        **_EXPERTS, "num_key_value_heads": 16, "intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 8,
        "vocab_size": 50304,
    }),
    "electra-base": ("ElectraConfig", "masked-lm", {**_BERT, "embedding_size": 768}),
    "albert-base": ("AlbertConfig", "masked-lm", {**_BERT, "embedding_size": 128}),
    "xlm-roberta-large": ("XLMRobertaConfig", "masked-lm", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1,
    }),
    "bart-base": ("BartConfig", "seq2seq", {
        "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "decoder_start_token_id": 2,
    }),
    "t5-large": ("T5Config", "seq2seq", {
        "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16, "d_model": 1024, "d_ff": 2816, "d_kv": 64,
        "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
    }),
    "vit-large": ("ViTConfig", "image-classification", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "num_labels": 1000,
    }),
}  # fmt: skip
"""Models from a configuration class of transformers: class, task, numbers."""

_KERNELS = ("eager", *(f"sdpa attention.kernel={kernel}" for kernel in ("flash", "efficient", "math")))
SMALL_GPT = "model_overrides.n_layer=6 model_overrides.n_embd=512 model_overrides.n_head=8"


def _each(models: Iterable[str], field: str, values: Iterable[str]) -> list[str]:
    return [f"{model} {field}={value}" for model, value in product(models, values)]


GROUPS: dict[str, tuple[str, ...]] = {
    "models": (
        f"gpt2 32x512 {SMALL_GPT}", "gpt2 16x1024", "gpt2-medium 16x1024", "gpt2-large 8x1024", "gpt2-xl 4x1024",
        "llama-3.2-1b 4x2048", "llama-3.2-1b 1x8192", "llama-3.2-3b 2x2048", "qwen2.5-0.5b 8x1024",
        "qwen2.5-1.5b 4x2048", "qwen3-0.6b 4x2048", "gemma-2b 2x2048", "gemma-3-1b 2x2048", "mistral-window 8x2048",
        "phi-2 4x1024", "opt-125m 32x512", "opt-1.3b 4x1024", "pythia-160m 16x1024", "pythia-1b 8x1024",
        "mixtral-0.9b 8x1024", "olmoe-0.5b 8x1024", "transformer-156m 32x512", "bert-base 64x512", "bert-large 32x384",
        "distilbert-base 128x256", "roberta-base 48x512", "electra-base 48x512", "albert-base 64x256",
        "xlm-roberta-large 24x256", "t5-small 64x256", "t5-base 24x512", "t5-large 8x512", "bart-base 24x512",
        "vit-base 128x1", "vit-large 96x1", "bert-base 128x128 task=sequence-classification num_labels=3",
        "qwen2.5-0.5b 8x512 task=sequence-classification num_labels=5",
    ),
    "checkpointing": (
        *_each(("gpt2-medium 16x1024", "llama-3.2-1b 8x2048"), "checkpointing", (
            "every-block", "every-nth", "every-nth checkpointing.n=3", "segments", "mlp", "attention", "selective",
            "selective checkpointing.keep=attention", "selective checkpointing.keep=every-other-matmul",
        )),
        "bert-large 64x512 checkpointing=every-block", "t5-large 16x512 checkpointing=every-block",
        "mixtral-0.9b 16x1024 checkpointing=every-block", "vit-large 128x1 checkpointing=selective",
        "llama-3.2-3b 4x4096 checkpointing=every-block", "gemma-2b 4x2048 checkpointing=every-block",
        "gpt2-xl 8x1024 checkpointing=segments checkpointing.count=4",
    ),
    "precision": (
        *_each(("gpt2 16x1024", "qwen2.5-0.5b 4x1024", "bert-base 32x512"), "precision", (
            "fp32", "tf32", "fp16", "bf16-pure", "bf16-pure precision.rounding=stochastic",
            "bf16-pure precision.rounding=nearest",
        )),
        *_each(("gpt2 16x1024 compile=per-block", "llama-3.2-1b 4x2048 compile=per-block"), "precision", (
            "fp8", "fp8 precision.scaling=rowwise", "fp8 precision.weights=bf16",
        )),
        "gpt2 16x1024 precision=bf16 precision.full_eval=true", "bert-base 32x512 precision=bf16 precision.tf32=true",
        "t5-base 16x512 precision=fp32", "vit-base 96x1 precision=fp16", "mixtral-0.9b 8x1024 precision=bf16-pure",
        "gemma-2b 2x2048 precision=bf16-pure",
    ),
    "optimizer": (
        *_each(("gpt2-medium 8x512", "llama-3.2-1b 2x1024"), "optimizer", (
            "adamw optimizer.implementation=loop", "adamw optimizer.implementation=foreach",
            "adamw optimizer.implementation=fused", "sgd", "adafactor", "lion", "adamw-8bit", "adamw-4bit",
            "adamw-anyprecision",
        )),
        "gpt2-xl 1x512 optimizer=sgd optimizer.momentum=0", "bert-large 16x128 precision=bf16-pure optimizer=lion",
        "t5-large 4x256 optimizer=adafactor", "gpt2-large 4x512 max_grad_norm=0",
        "gpt2-large 4x512 precision=fp16 optimizer=adamw optimizer.implementation=foreach",
    ),
    "loss": (
        *_each(("gpt2 8x1024", "llama-3.2-1b 2x2048"), "loss", ("plain", "chunked", "liger")),
        "gpt2 8x1024 precision=bf16-pure loss=chunked", "gemma-2b 2x2048 loss=chunked",
        f"bert-base 32x512 {PADDED} loss=chunked",
    ),
    "attention": (
        *_each(("gpt2 8x1024",), "attention", (*_KERNELS, "flex model_overrides.attn_pdrop=0.0", "flash-attn")),
        *_each(("llama-3.2-1b 2x2048",), "attention", (*_KERNELS, "flex", "flash-attn")),
        "llama-3.2-1b 2x2048 attention=sdpa attention.kernel=cudnn",
        "gpt2 8x1024 model_overrides.attn_pdrop=0.0 attention=sdpa attention.kernel=cudnn",
        "bert-base 32x512 attention=eager", "gpt2 8x1024 precision=fp32 attention=eager",
        "t5-base 16x512 attention=eager", "mistral-window 4x2048 attention=eager",
        "gpt2 8x1024 precision=fp32 attention=sdpa attention.kernel=efficient",
        f"gpt2 8x1024 {PACKED} attention=flex model_overrides.attn_pdrop=0.0",
        f"qwen2.5-0.5b 4x2048 {PACKED} attention=sdpa attention.kernel=flash",
    ),
    "windows": (
        "gpt2 8x1024*2", "gpt2 8x1024*4", "gpt2 8x1024*2.5", "llama-3.2-1b 2x2048*8", "bert-large 16x384*3.25",
        "t5-base 16x512*4", "mixtral-0.9b 4x1024*4", "gpt2-medium 4x1024*4 precision=fp16",
        "qwen2.5-0.5b 4x2048*2 checkpointing=every-block", f"gpt2 16x1024 {PACKED}", f"llama-3.2-1b 4x2048 {PACKED}",
        f"bert-base 48x512 {PACKED}", f"gpt2 8x1024*4 {PACKED} checkpointing=every-block",
        f"qwen2.5-0.5b 4x1024 {PACKED} attention=eager", f"bert-base 48x512 {PADDED}", f"t5-base 24x512 {PADDED}",
        f"bart-base 24x512 {PADDED}", f"bert-large 32x300 {PADDED} pad_sequence_to=64", f"gpt2 16x1000 {PADDED}",
        f"bert-base 128x128 task=sequence-classification num_labels=3 {PADDED}", "gpt2 16x1024 pad_vocab_to=128",
        "t5-small 64x256 pad_vocab_to=256", "gpt2-medium 8x1024 loading.pin_memory=false",
    ),
    "expandable": (
        "gpt2 16x1024", "gpt2-medium 8x1024*2.5 attention=eager", "bert-large 32x384 checkpointing=every-block",
        "llama-3.2-1b 4x2048 optimizer=adamw optimizer.implementation=foreach", f"t5-base 24x512 {PADDED}",
    ),
    "compile": (
        "gpt2 16x1024 compile=per-block", "llama-3.2-1b 4x2048 compile=per-block", "bert-base 48x512 compile=per-block",
        "vit-base 128x1 compile=per-block", "t5-base 16x512 compile=per-block", "gpt2 16x1024 compile=whole",
        "bert-base 48x512 compile=whole", "gpt2 16x1024 compile=per-block compile.backend=aot_eager",
        "gpt2 16x1024 compile=whole compile.backend=aot_eager",
        "gpt2-medium 16x1024 compile=per-block checkpointing=every-block",
        "gpt2-medium 16x1024 compile=per-block checkpointing=memory-budget",
        "llama-3.2-1b 4x2048 compile=per-block checkpointing=memory-budget checkpointing.budget=0.2",
        "gpt2 16x1024 compile=whole checkpointing=memory-budget checkpointing.budget=0",
        "qwen2.5-0.5b 4x2048 compile=per-block precision=bf16-pure", "gpt2 8x1024*4 compile=per-block precision=fp32",
        "opt-125m 32x512 compile=per-block precision=fp16",
    ),
    "tiles": (  # the order says how full each card is: what is new comes last
        "llama-3.2-1b 1x65536 loss=chunked checkpointing=tiled-mlp",
        "llama-3.2-1b 8x2048 checkpointing=tiled-mlp checkpointing.tokens=4096",
        "llama-3.2-1b 1x65536 loss=chunked checkpointing=tiled-mlp compile=per-block",
    ),
    "adapters": (
        "qwen2.5-7b 2x2048 trainable=lora base=nf4 checkpointing=every-block",
        "llama-3.1-8b 2x2048 trainable=lora base=bf16 checkpointing=every-block",
        *_each(("qwen2.5-1.5b 4x1024 trainable=lora",), "base", ("bf16", "int8", "nf4")),
        "qwen2.5-1.5b 4x1024 trainable=dora base=nf4",
        "llama-3.1-8b 4x1024 trainable=lora base=nf4 loss=chunked checkpointing=every-block",
        "gpt2-medium 8x1024*2 trainable=lora trainable.rank=64 base=bf16",
        f"qwen2.5-0.5b 4x2048 {PACKED} trainable=lora base=nf4 optimizer=adamw-8bit",
        "qwen2.5-1.5b 4x1024 trainable=lora base=nf4 compile=per-block",
        "llama-3.1-8b 2x2048 trainable=lora base=nf4 checkpointing=every-block compile=per-block",
    ),
    "muon": ("gpt2-medium 8x512 optimizer=muon", "llama-3.2-1b 2x1024 optimizer=muon"),
}
RETRIES = (
    "gpt2 16x1024", "gpt2 8x1024*2.5 attention=eager", "gpt2-medium 8x1024*2.5 attention=eager", "t5-base 24x512",
    "mixtral-0.9b 8x1024", "gpt2-medium 16x1024 checkpointing=every-block", "bert-large 16x384*3.25",
    "qwen2.5-0.5b 8x1024 optimizer=adamw optimizer.implementation=foreach", "gpt2-large 8x1024 precision=fp32",
    f"bart-base 24x512 {PADDED}",
)
"""Cases that are made to fit only after cached memory is released."""

SHORT = (
    "gpt2 16x1024", "gpt2 8x1024*2.5 attention=eager", "llama-3.2-1b 4x2048", "bert-large 32x384", "t5-base 24x512",
    "vit-large 96x1", "mixtral-0.9b 8x1024", "gpt2-medium 16x1024 checkpointing=every-block",
    "qwen2.5-0.5b 8x1024 optimizer=adamw optimizer.implementation=foreach", "gpt2-large 8x1024 precision=fp32",
)
"""Cases that are made not to fit."""

SMOKE = (
    "gpt2 2x16*2.5 vocab_size=96 model_overrides.n_layer=2 model_overrides.n_embd=32 model_overrides.n_head=2 "
    "precision=fp32",
    f"bert-base 4x16 {PACKED} vocab_size=96 precision=fp32 model_overrides.num_hidden_layers=2 "
    "model_overrides.hidden_size=32 model_overrides.num_attention_heads=2 model_overrides.intermediate_size=64",
    f"bart-base 4x16 {PADDED} vocab_size=96 checkpointing=every-block model_overrides.d_model=32 "
    "model_overrides.encoder_layers=2 model_overrides.decoder_layers=2 model_overrides.encoder_attention_heads=2 "
    "model_overrides.decoder_attention_heads=2 model_overrides.encoder_ffn_dim=64 model_overrides.decoder_ffn_dim=64",
)

FILLS = (98, 45, 90, 70, 96, 30, 85, 94, 60, 97, 75, 92, 38, 95, 80, 52, 88)
SHORT_BY = (2, 5, 10)


@dataclass(frozen=True)
class Aim:
    """How much memory a case is given, by its prediction.

    fill: the predicted peak of reserved bytes is `percent` of it. retries: enough, if cached memory is released.
    short: it is `percent` of what is needed too small.
    """

    kind: Literal["fill", "retries", "short"]
    percent: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.percent}" if self.percent else self.kind


@dataclass(frozen=True)
class Case:
    """A recipe to measure. group: what it is there for. line: as in the module's docstring."""

    group: str
    line: str
    aim: Aim
    expandable: bool = False

    @property
    def name(self) -> str:
        return f"{self.line}, {self.aim}" + (", expandable segments" if self.expandable else "")

    @property
    def compiles(self) -> bool:
        return "compile=" in self.line or "attention=flex" in self.line

    def recipe(self, folder: Path) -> Recipe:
        """folder: where `write_configurations` was. Raises RecipeError for a line that says nothing sensible."""
        model, shape, *changes = self.line.split()
        rows, _, rest = shape.partition("x")
        tokens, _, batches = rest.partition("*")
        task = CONFIGURED[model][1] if model in CONFIGURED else BUNDLED[model].task
        values = {
            **BASE, "model": str(folder / model) if model in CONFIGURED else model, "task": task,
            "micro_batch_size": int(rows), "batch_size": round(int(rows) * float(batches or 1)), "seq_len": int(tokens),
        }
        return Recipe.from_dict(apply_overrides(values, changes))

    @property
    def key(self) -> str:
        """Changes with whatever is measured but the memory given, which follows from the prediction."""
        model = self.line.split()[0]
        numbers = CONFIGURED.get(model) or tuple(BUNDLED[model])
        text = json.dumps([self.name, BASE, numbers], sort_keys=True, default=dict)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_configurations(folder: Path) -> None:
    """Write the models of CONFIGURED as folders that a recipe can name."""
    import transformers

    for name, (config_class, _, numbers) in CONFIGURED.items():
        getattr(transformers, config_class)(**numbers).save_pretrained(folder / name)


def all_cases() -> list[Case]:
    """Every case. What comes first has something of every group, so that a run cut short does too; those that compile
    come last."""
    fills, short = cycle(FILLS), cycle(SHORT_BY)
    groups = [
        [Case(group, line, Aim("fill", next(fills)), expandable=group == "expandable") for line in lines]
        for group, lines in GROUPS.items()
    ]
    tight = [[Case("tight", line, Aim("retries")) for line in RETRIES],
             [Case("tight", line, Aim("short", next(short))) for line in SHORT]]
    groups.append([case for pair in zip(*tight, strict=True) for case in pair])
    placed = [((case.compiles, place / len(group)), case) for group in groups for place, case in enumerate(group)]
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


def smoke_cases() -> list[Case]:
    """Tiny cases, that any machine runs in seconds."""
    return [Case("smoke", line, Aim("fill", 90)) for line in SMOKE]

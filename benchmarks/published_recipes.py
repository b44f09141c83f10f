"""The recipe that a published training run's words stand for, or why no recipe says the same.

A row of results/published_runs.jsonl is mapped field by field: its card, model, task, number formats, optimizer,
attention and memory figure. What cannot be said in a recipe is told as `field: reason`; what can be said but for a
detail is said, with the detail as a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tightfit.devices import Device, find_device
from tightfit.errors import RecipeError
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe

Row = Mapping[str, Any]
Timed = Literal["step", "forward", "forward and backward", "nothing"]
"""The part of a step that a published speed covers."""
MemoryKind = Literal["allocated", "reserved", "driver", ""]
"""Who counted a published memory figure: PyTorch's allocator, or the driver; empty where there is none."""


class CannotExpress(Exception):
    """No recipe says what a row says. The message names the field and the reason."""


@dataclass(frozen=True, kw_only=True)
class Expressed:
    """A row as a recipe.

    recipe: resolved, every field pinned. timed: what the published speed covers. memory: who counted the memory.
    held: the recipe whose memory is compared, which is the same but for `gradients_stayed`.
    fits: whether running, or running out of memory, is held against what is predicted.
    kernels: special kernels that ran in place of PyTorch's own; empty for plain PyTorch.
    notes: in what the recipe differs from the run.
    """

    recipe: Recipe
    held: Recipe
    device: Device
    timed: Timed
    memory: MemoryKind
    fits: bool
    kernels: str = ""
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Rows of the same key have the same trace."""
        return str(self.device.capability), self.recipe.model_dump_json()


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

SHAPES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bert-large", "bert-large", {}),
    ("BertConfig 24L,1024h,16 heads,4096 ffn", "bert-large", {}),
    ("bert-base", "bert-base", {}),
    ("distilbert-base", "distilbert-base", {}),
    ("GPT2LMHeadModel 36L,1280h", "gpt2-large", {}),
    ("GPT2LMHeadModel 32L,2560h,32 heads,2048 ctx", "gpt2",
     {"n_layer": 32, "n_embd": 2560, "n_head": 32, "n_positions": 2048}),
    ("GPT2LMHeadModel 24L,3072h,24 heads,2048 ctx", "gpt2",
     {"n_layer": 24, "n_embd": 3072, "n_head": 24, "n_positions": 2048}),
    ("facebook/opt-1.3b", "opt-125m",
     {"num_hidden_layers": 24, "num_attention_heads": 32, "hidden_size": 2048, "ffn_dim": 8192,
      "word_embed_proj_dim": 2048, "vocab_size": 50272}),
    ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", {}),
    ("meta-llama/Llama-3.2-3B", "llama-3.2-1b",
     {"num_hidden_layers": 28, "num_attention_heads": 24, "hidden_size": 3072, "head_dim": 128,
      "rope_parameters": LLAMA3_ROPE}),
    ("meta-llama/Llama-2-7b-hf", "llama-2-7b", {}),
    ("mistralai/Mistral-7B", "mistral-7b", {}),
    ("NousResearch/Llama-2-70b-hf", "llama-2-7b",
     {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
      "intermediate_size": 28672}),
    ("meta-llama/Llama-2-13b-hf", "llama-2-7b",
     {"num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40, "hidden_size": 5120,
      "intermediate_size": 13824}),
    ("TinyLlama", "llama-2-7b",
     {"num_hidden_layers": 22, "num_key_value_heads": 4, "hidden_size": 2048, "intermediate_size": 5632,
      "max_position_embeddings": 2048}),
)
"""How a shape's words begin, the bundled model it is, or of whose family, and the overrides."""

NO_DROPOUT = {
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "opt": {"dropout": 0.0},
}
"""Overrides that turn a family's dropout off: a training step's forward pass is then that of inference."""

APEX = "NVIDIA's BERT: apex's FusedLayerNorm, bias and GELU fused by TorchScript"


def express(row: Row) -> Expressed:
    """Raises CannotExpress with every reason, one a line."""
    if "recipe" in row:
        return pinned(row)
    device, model, task, formats, optimizer, rest, trained = _all_of(
        lambda: card(row["gpu"]), lambda: shape(row["shape"]), lambda: purpose(row),
        lambda: formats_of(row, card(row["gpu"])), lambda: optimizer_of(row), lambda: rest_of(row),
        lambda: trained_of(row),
    )  # fmt: skip
    fields, timed, notes = task
    micro = row["micro_batch"]
    passes = {"step": row.get("accumulation", 1), "forward and backward": 2}.get(timed, 1)
    if timed == "forward" and fields.get("mode") != "inference":
        family = next(name for name in NO_DROPOUT if model["model"].startswith(name))
        model = {**model, "model_overrides": {**model["model_overrides"], **NO_DROPOUT[family]}}
    recipe = Recipe.from_dict({
        **model, **fields, "seq_len": row["seq_len"], "micro_batch_size": micro,
        "batch_size": micro * passes, "precision": formats[0], "optimizer": optimizer[0],
        "max_grad_norm": 1.0 if timed in ("step", "nothing") else 0.0, **rest, **trained, "compile": "off",
    })  # fmt: skip
    recipe, counted = resolve(recipe, device), counted_by(row.get("memory_kind", ""))
    stay = bool(counted) and timed == "step" and passes == 1 and gradients_stayed(row.get("versions", ""))
    return Expressed(
        recipe=recipe, held=recipe.override(batch_size=2 * micro) if stay else recipe, device=device,
        timed="nothing" if row.get("oom") else timed, memory=counted,
        fits=("apex AMP O2" not in row["precision"] and timed != "forward") or fields.get("mode") == "inference",
        kernels=kernels_of(row), notes=(*notes, *optimizer[1], *formats[1]),
    )  # fmt: skip


def pinned(row: Row) -> Expressed:
    """A row that says its recipe itself, in fields; its words are for readers."""
    device, micro = card(row["gpu"]), row["micro_batch"]
    recipe = resolve(Recipe.from_dict({
        "task": "causal-lm", "data": {"source": "dummy", "eval_fraction": 0.0}, "seq_len": row["seq_len"],
        "micro_batch_size": micro, "batch_size": micro * row.get("accumulation", 1), "max_grad_norm": 1.0,
        **row["recipe"],
    }), device)  # fmt: skip
    return Expressed(
        recipe=recipe, held=recipe, device=device, timed="step" if samples_per_second(row) else "nothing",
        memory=counted_by(row.get("memory_kind", "")), fits=True, kernels=row.get("kernels", ""),
    )  # fmt: skip


def _all_of(*parts: Callable[[], Any]) -> list[Any]:
    """Settings that each part gives. Raises CannotExpress with the reasons of all that raise it."""
    found, reasons = [], []
    for part in parts:
        try:
            found.append(part())
        except CannotExpress as reason:
            reasons.append(str(reason))
    if reasons:
        raise CannotExpress("\n".join(dict.fromkeys(reasons)))
    return found


def card(words: str) -> Device:
    """The catalogue's GPU; what stands in parentheses is a remark."""
    name = re.sub(r"\(.*?\)", "", words).strip()
    try:
        return find_device(name)
    except RecipeError:
        raise CannotExpress(f"gpu: {name} is not in the catalogue") from None


def shape(words: str) -> dict[str, Any]:
    """The recipe's fields of a model."""
    for begin, model, overrides in SHAPES:
        if words.startswith(begin):
            return {"model": model, "model_overrides": dict(overrides)}
    raise CannotExpress(f"model: {words.partition(' (')[0]} is not in the table of shapes")


def purpose(row: Row) -> tuple[dict[str, Any], Timed, tuple[str, ...]]:
    """The fields of the task and the data, what the speed covers, and notes."""
    words: str = row["task"]
    encoder = row["shape"].lower().startswith(("bert", "distilbert"))
    padded = {"source": "stdlib", "packing": False, "eval_fraction": 0.0}
    whole = {"source": "dummy", "eval_fraction": 0.0}
    one_class = {"task": "sequence-classification", "data": padded}
    if words.startswith("inference forward"):
        if encoder:
            return {**one_class, "mode": "inference"}, "forward", ()
        return {"task": "causal-lm", "data": whole}, "forward", ("timed as a training step's forward pass",)
    if words.startswith("forward+backward only"):
        if encoder:
            note = "the sentence-order head is left out"
            return {"task": "masked-lm", "data": padded}, "forward and backward", (note,)
        return {"task": "causal-lm", "data": whole}, "forward and backward", ()  # gradients are there, and added to
    if words.startswith("QA fine-tune (SQuAD"):
        return one_class, "step", ("a class for each sequence in place of two scores for each token",)
    if words.startswith(("sequence classification", "SST-2")):
        return one_class, "step", ()
    if words.startswith("MLM (") and "all positions" in row["loss"]:
        return {"task": "masked-lm", "data": padded}, "step", ()
    if words.startswith(("SFT MetaMathQA", "full SFT", "LoRA SFT (alpaca", "LoRA SFT (samsum packed")):
        return {"task": "causal-lm", "data": whole}, "nothing", ("rows are of the longest length: memory alone",)
    if words.startswith("SFT packed"):
        return {"task": "causal-lm", "data": whole}, "step", ()
    if words.startswith("causal LM pretraining"):  # at its tenth micro-batch, before the first update
        return {"task": "causal-lm", "data": whole}, "forward and backward", ()
    if "MLM" in words:
        raise CannotExpress("task: logits of the hidden positions alone")
    if "BingBertSquad" in words:
        raise CannotExpress("task: the source contradicts others on what fits, and does not say why")
    if "lambada" in words:
        raise CannotExpress("attention: Megatron's own GPT with its own kernels")
    raise CannotExpress("task: lengths are not stated")


def formats_of(row: Row, device: Device) -> tuple[Any, tuple[str, ...]]:
    """The recipe's `precision`, and notes."""
    words: str = row["precision"]
    if words.startswith("fp16 (model.half"):
        raise CannotExpress("precision: fp16 weights beside fp32 ones")
    if words.startswith("fp16 (apex AMP O2"):
        if device.at_least(8):
            return {"name": "bf16-pure", "rounding": "nearest"}, (
                "fp16 weights, and fp32 ones for the update, as bf16 weights alone",)
        return "fp16", ("fp16 weights, and fp32 ones for the update, as autocast, whose norms and softmax are fp32",)
    if words.startswith(("fp16 autocast", "fp16 (fp32 master")):
        return "fp16", ()
    if "adapters fp32" in words and "full-finetuning" not in row["source"]:  # which has none
        return "bf16", ("adapters in fp32, under autocast: peft keeps a copy in fp32 of what each of them reads",)
    if words.startswith("fp16-true"):
        return {"name": "bf16-pure", "rounding": "nearest"}, ("fp16 as bf16",)
    if words.startswith(("bf16-true", "pure bf16")) or words == "bf16":
        return {"name": "bf16-pure", "rounding": "nearest"}, ()
    if "tf32" in words.lower():
        return "tf32", ()
    if words == "fp32":
        return "fp32", ()
    raise CannotExpress(f"precision: {words}")


def optimizer_of(row: Row) -> tuple[Any, tuple[str, ...]]:
    """The recipe's `optimizer`, and notes."""
    words: str = row["optimizer"]
    if "LAMB" in words:
        raise CannotExpress("optimizer: LAMB")
    if words == "none" or words.endswith("on accumulation boundary"):
        return {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}, ()  # which keeps nothing, and is not timed
    if words.startswith("BertAdam"):
        return {"name": "adamw", "implementation": "loop"}, ()
    if "adamw_hf" in words:
        return {"name": "adamw", "implementation": "loop"}, ()
    if "apex FusedAdam" in words:
        return "adamw", ()
    if words.startswith("Adafactor"):
        return "adafactor", ("transformers' Adafactor as PyTorch's",)
    if "Adam8bit" in words:
        return "adamw-8bit", ("8-bit states of bitsandbytes as torchao's",)
    if "torch AdamW" in words or words == "AdamW on adapters" or words.startswith("torch.optim.AdamW"):
        first = re.search(r"torch (\d+)\.", row.get("versions", ""))
        loop = first is not None and first[1] == "1"  # multi-tensor by default from PyTorch 2.0 on
        fused = "fused" in words
        return {"name": "adamw", "implementation": "fused" if fused else "loop" if loop else "foreach"}, ()
    raise CannotExpress(f"optimizer: {words}: not stated which")


NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
"""Parts of a Llama that are trained where norms alone are."""


def trained_of(row: Row) -> dict[str, Any]:
    """Settings of what is trained, and how the rest is held, where that is not all."""
    if not row.get("lora"):
        return {}
    base = {"base": "nf4" if "nf4" in row["precision"] else "bf16"} if "adapters fp32" in row["precision"] else {}
    if "ln_tuning" in row["id"]:
        return {"trainable": {"name": "layers", "names": NORMS}, **base}
    rank = re.search(r"\br=(\d+)|rank(\d+)", f"{row['id']} {row['notes']}")
    targets = re.search(r"\b(q(?:,[kvo])+)\b", row["notes"])
    if rank is None or targets is None:
        raise CannotExpress("model: LoRA of a rank or targets that are not stated")
    # The script of LitGPT drops of what adapters read.
    dropout = 0.05 if row["id"].startswith("litgpt") else 0.0
    return {"trainable": {"name": "lora", "rank": int(rank[1] or rank[2]), "dropout": dropout,
                          "targets": [f"{letter}_proj" for letter in targets[1].split(",")]}, **base}


def rest_of(row: Row) -> dict[str, Any]:
    """Attention, checkpointing and loss."""
    words: str = row.get("attention", "")
    if row.get("compile"):
        raise CannotExpress(f"compile: {row['compile']}")
    if row.get("n_gpus", 1) != 1:
        raise CannotExpress("parallel: several GPUs")
    if words.startswith("TE "):
        raise CannotExpress("attention: TransformerEngine's layer")
    if row.get("seq_len") is None:
        raise CannotExpress("seq_len: not stated")
    attention: Any = "sdpa" if "SDPA" in words else "eager"
    if "flash" in words and "no flash" not in words:
        attention = {"name": "sdpa", "kernel": "flash"}
    checkpointing = "every-block" if row["checkpointing"].startswith("full") else "none"
    loss = "chunked" if row.get("loss", "").startswith("chunked") else "plain"
    return {"attention": attention, "checkpointing": checkpointing, "loss": loss}


def counted_by(words: str) -> MemoryKind:
    """Who counted a memory figure."""
    if not words:
        return ""
    if "max_memory_allocated" in words:
        return "allocated"
    return "reserved" if "RESERVED" in words else "driver"


def gradients_stayed(versions: str) -> bool:
    """Whether gradients lay there as zeros between steps, as `zero_grad` left them before PyTorch 2: they are then held
    through the forward pass, as in the second micro-batch of two."""
    return re.match(r"(transformers [~.\d]+, )?(torch ~?1\.|NGC pytorch (19|2[0-2]))", versions) is not None


def kernels_of(row: Row) -> str:
    """The special kernels of a run; empty for eager PyTorch with its own."""
    if row["task"].startswith("QA fine-tune"):
        return APEX + (", FusedAdam" if "FusedAdam" in row["optimizer"] else "")
    return "bitsandbytes' optimizer" if "bitsandbytes" in row["optimizer"] else ""


def samples_per_second(row: Row) -> float | None:
    """The published speed; of a time that is published, as samples of a micro-batch over it."""
    if row.get("samples_per_second"):
        return float(row["samples_per_second"])
    seconds = row.get("step_seconds")
    return row["micro_batch"] / seconds if seconds else None


def backward_samples_per_second(row: Row) -> float | None:
    """The speed of the backward pass alone, where a row's notes tell its time."""
    found = re.search(r"\bbwd ([.\d]+) ms", row["notes"])
    return 1e3 * row["micro_batch"] / float(found[1]) if found else None

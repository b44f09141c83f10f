"""Sizes of a model that data and planning need, read from its configuration: vocabulary, positions, labels, images."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tightfit.errors import ModelError, Refused
from tightfit.models import check_classes, read_config
from tightfit.tasks import TASKS

if TYPE_CHECKING:
    from tightfit.recipe import Recipe

OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "longformer"})
"""Model types whose position embedding begins behind the padding token's index."""
STARTS_WITH_LAST = frozenset({"mbart", "plbart", "fsmt"})
"""Model types whose decoder reads first what its labels end with, such as a language's token."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a model that data and planning need, read from its configuration alone.

    `max_positions` is None where positions have no limit. Sizes that a model does not have are 0.
    """

    vocab_size: int = 0
    num_labels: int = 2
    max_positions: int | None = None
    image_size: int = 0
    num_channels: int = 3
    pad_token_id: int = 0
    decoder_start_token_id: int | None = 0
    """Token that decoder inputs begin with; None where it is the last token of the labels, as in mBART."""
    label_names: tuple[str, ...] = ()
    """The names of the model's classes by number; none where its configuration has transformers' own, or another
    number of them."""

    def check_length(self, seq_len: int, new_tokens: int = 0) -> None:
        """Raise Refused where a sequence, or a prompt and what is generated after it, is longer than the model has
        positions."""
        positions = self.max_positions
        if positions is None or seq_len + new_tokens <= positions:
            return
        if not new_tokens:
            raise Refused(f"seq_len: {seq_len} exceeds the model's {positions} positions; write seq_len={positions}")
        instead = (f"seq_len={positions - new_tokens}" if new_tokens < positions else
                   f"inference.new_tokens={positions // 2}")
        raise Refused(f"inference: a prompt of {seq_len} tokens and {new_tokens} new ones are more than the model's "
                      f"{positions} positions; write {instead}")


def model_facts(recipe: Recipe, config: Any = None, name: str = "") -> ModelFacts:
    """The facts of the recipe's model, from its configuration alone, which is read where it is not given. Raises
    ModelError as `read_config` does, and for a factory whose vocabulary nothing states."""
    facts = facts_of(read_config(recipe) if config is None else config, recipe)
    if TASKS[recipe.task].reads == "tokens" and not facts.vocab_size:
        raise ModelError(f"vocab_size: {name or recipe.model} has no configuration that states its vocabulary's size; "
                         "write vocab_size")
    return facts


def module_facts(module: object, recipe: Recipe) -> ModelFacts:
    """The facts of a model object given in place of a name: its `config`'s, where it has one, and the recipe's. Raises
    ModelError as `model_facts` and `check_classes` do."""
    config = getattr(module, "config", SimpleNamespace())
    check_classes(config, recipe)
    return model_facts(recipe, config, type(module).__name__)


def facts_of(config: Any, recipe: Recipe) -> ModelFacts:
    """The facts that a configuration object states; the recipe's `vocab_size` and `num_labels` take precedence."""
    text = text_config(config)

    def first(*names: str, default: int = 0, parts: tuple[Any, ...] = (text,)) -> int:
        values = (getattr(part, name, None) for name in names for part in parts)
        return next((v for v in values if isinstance(v, int) and v >= 0), default)

    vocab_size = recipe.vocab_size or first("vocab_size")
    positions = first("max_position_embeddings", "max_target_positions", "max_seq_len", default=-1)
    if getattr(text, "model_type", None) in OFFSET_POSITIONS:
        positions -= first("pad_token_id", default=0) + 1
    reads_images = TASKS[recipe.task].reads == "images"
    vision = vision_config(config) if reads_images else config
    image_size = getattr(vision, "image_size", None) or (224 if reads_images else 0)
    if not isinstance(image_size, int):
        sides = set(image_size)
        if len(sides) != 1:
            raise ModelError(f"model_overrides.image_size: {image_size!r} is not a square; write one number")
        image_size = sides.pop()
    # an encoder-decoder shifts its labels by its own tokens, or else by its decoder's
    tokens = (config, text) if getattr(config, "is_encoder_decoder", False) else (text,)
    pad = first("pad_token_id", "eos_token_id", parts=tokens)
    if vocab_size and pad >= vocab_size:
        pad = 0
    num_labels = recipe.num_labels or getattr(config, "num_labels", None) or 2
    return ModelFacts(
        vocab_size=vocab_size,
        num_labels=num_labels,
        max_positions=positions if positions > 0 else None,
        image_size=image_size,
        num_channels=getattr(vision, "num_channels", 3),
        pad_token_id=pad,
        decoder_start_token_id=None if getattr(config, "model_type", None) in STARTS_WITH_LAST else first(
            "decoder_start_token_id", "bos_token_id", default=pad, parts=tokens),
        label_names=_label_names(config, num_labels),
    )


def _label_names(config: Any, num_labels: int) -> tuple[str, ...]:
    named = getattr(config, "id2label", None) or {}
    names = tuple(str(named.get(number, f"LABEL_{number}")) for number in range(num_labels))
    usual = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return () if usual or len(named) != num_labels or len(set(names)) < num_labels else names


def text_config(config: Any) -> Any:
    """The part of a model's configuration that is about its text; all of it where it has no such part."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def vision_config(config: Any) -> Any:
    """The part of a model's configuration that is about its images; all of it where it has no such part."""
    return getattr(config, "vision_config", None) or config


def attention_dropout(config: Any) -> str | None:
    """The configuration's field that sets dropout inside attention, where it is more than 0."""
    names = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
    return next((name for name in names if getattr(config, name, None)), None)


def experts_per_token(config: Any) -> int:
    """The number of experts that a token is sent to, from a model's configuration; 0 where none says."""
    text = text_config(config)
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)

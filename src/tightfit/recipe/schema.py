"""The recipe: what to train and how, one field per choice; YAML and `key=value` in, YAML out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from tightfit.errors import RecipeError
from tightfit.recipe.yaml import explain, parse_technique, technique_to_yaml
from tightfit.tasks import TASKS
from tightfit.techniques import (
    SLOTS,
    VARIANTS,
    Accumulation,
    Attention,
    Backend,
    Checkpointing,
    Compile,
    Loading,
    Loss,
    Offload,
    Optimizer,
    Parallel,
    Precision,
    Update,
)
from tightfit.techniques.backend import Pytorch
from tightfit.techniques.base import NUMBER, Natural, Positive, at_most
from tightfit.techniques.offload import HostShares
from tightfit.techniques.parallel import ManyProcesses, NoParallel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from transformers import TrainingArguments

    from tightfit.devices import Device

Auto = Literal["auto"]
Size = Annotated[int, Field(ge=1), at_most(2**31 - 1), NUMBER]
CHOICES = ("micro_batch_size", "precision", "loss", "checkpointing", "optimizer", "attention", "compile")
"""The fields that a search decides."""
CHOSEN_SLOTS = tuple(field for field in CHOICES if field in SLOTS)
"""Those of them that a technique fills."""
Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial"]


def _slot(name: str) -> tuple[BeforeValidator, PlainSerializer]:
    return BeforeValidator(lambda value: parse_technique(name, value)), PlainSerializer(technique_to_yaml)


class Data(BaseModel):
    """Where the examples come from. A short string in a recipe stands for `{source: ...}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: str = "stdlib"
    """`stdlib` (the Python standard library's own source), `dummy` (random), a text, JSONL, CSV or Parquet file, a
    folder of them or of images, a folder saved by `datasets`, or a Hugging Face dataset id."""
    config: str | None = None
    """The Hugging Face dataset's configuration."""
    split: str = "train"
    """The Hugging Face dataset's split to train on."""
    text: str = "text"
    """Field that holds the text (seq2seq: the source text)."""
    label: str = "label"
    """Field that holds the class."""
    target: str = "target"
    """Field that holds the target text of seq2seq."""
    packing: bool = True
    """Fill every row with documents, kept apart by document ids; otherwise one document a row, padded."""
    samples: Positive = 512
    """Number of random examples that `dummy` makes."""
    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), NUMBER] = 0.05
    """Share of the documents held out for evaluation."""


class Inference(BaseModel):
    """Generation from each prompt. A number in a recipe stands for `{new_tokens: ...}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    new_tokens: Positive = 128
    """Tokens to generate after each prompt."""
    beams: Positive = 1
    """Beams to search with; 1 takes the likeliest token at every step."""


class Recipe(BaseModel):
    """Model, data and techniques of a run. Frozen; build another with `override`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    model: str = "gpt2"
    """A bundled shape, a Hugging Face id, a local folder, or `package.module:factory`."""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's configuration to change, such as `n_layer: 4`."""
    pretrained: bool = True
    """Load the weights where the model has some; otherwise start from its configuration."""
    trust_remote_code: bool = False
    """Run Python code that comes with a Hugging Face model."""
    task: Literal[tuple(TASKS)] = "causal-lm"  # type: ignore[valid-type]
    """causal-lm, masked-lm, sequence-classification, seq2seq or image-classification."""
    mode: Literal["train", "inference"] = "train"
    """Purpose of a plan: training, or generating from `batch_size` prompts of `seq_len` tokens. Only `train` trains."""
    inference: Annotated[
        Inference, BeforeValidator(lambda v: v if isinstance(v, BaseModel | dict) else {"new_tokens": v})
    ] = Inference()
    """With `mode: inference`, what is generated."""
    data: Annotated[Data, BeforeValidator(lambda v: {"source": v} if isinstance(v, str) else v)] = Data()
    """Where the examples come from."""
    tokenizer: str = "auto"
    """A Hugging Face id, a folder or a tokenizer.json; `train` trains a byte-level BPE on the data; auto takes the
    model's own where it has one and trains one otherwise."""
    vocab_size: Size | None = None
    """Size of the vocabulary; by default the model configuration's."""
    num_labels: Size | None = None
    """Number of classes; by default the model configuration's."""
    seq_len: Positive = 1024
    """Tokens in a sequence."""
    pad_vocab_to: Size | None = None
    """Round the embedding's rows up to a multiple of this; loss and logits of real tokens stay the same."""
    pad_sequence_to: Positive | None = None
    """Round padded sequences up to a multiple of this; padding never counts."""
    batch_size: Positive = 64
    """Global batch, in sequences: what one optimizer step learns from."""
    micro_batch_size: Positive | Auto = "auto"
    """Sequences in one forward pass; accumulation is derived, and the last micro-batch may be smaller."""
    precision: Annotated[Precision | Auto, *_slot("precision")] = "auto"
    """Number formats: fp32, tf32, fp16, bf16, bf16-pure, fp8."""
    loss: Annotated[Loss | Auto, *_slot("loss")] = "auto"
    """Cross-entropy of whole logits, or chunk by chunk from the hidden states."""
    checkpointing: Annotated[Checkpointing | Auto, *_slot("checkpointing")] = "auto"
    """Activation checkpointing."""
    optimizer: Annotated[Optimizer | Auto, *_slot("optimizer")] = "auto"
    """The optimizer."""
    attention: Annotated[Attention | Auto, *_slot("attention")] = "auto"
    """The attention kernel."""
    accumulation: Annotated[Accumulation | Auto, *_slot("accumulation")] = "auto"
    """How a step's micro-batches follow one another; PyTorch has only a loop."""
    compile: Annotated[Compile | Auto, *_slot("compile")] = "auto"
    """torch.compile."""
    loading: Annotated[Loading, *_slot("loading")] = Loading()
    """How batches reach the device."""
    offload: Annotated[Offload | Auto, *_slot("offload")] = "auto"
    """Parts of a step that wait in the host's memory while the device does not need them."""
    update: Annotated[Update | Auto, *_slot("update")] = "auto"
    """When gradients are clipped, applied and dropped; `auto` hides the copies of offloaded optimizer states."""
    parallel: Annotated[Parallel, *_slot("parallel")] = NoParallel()
    """More than one device: ddp and fsdp with a process for each, dp with one for all of a machine's (backend: jax)."""
    backend: Annotated[Backend, *_slot("backend")] = Pytorch()
    """The framework that runs the step: pytorch, or jax with its own knobs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run: auto takes the CUDA device where there is one."""
    allow_numerics: bool = False
    """Whether `auto` may pick techniques that change training results, such as 8-bit optimizer states, pure bf16
    weights or products in fp8, because they are faster."""
    expandable_segments: bool | Auto = "auto"
    """Let PyTorch's CUDA allocator grow its segments page by page, which leaves less memory cached in pieces; a plan
    tries both where this says auto, and without a plan auto is false (no effect on the CPU, nor with backend: jax)."""
    empty_cache_steps: Positive | None = None
    """Give cached memory back to the device every so many steps: less fragmentation, about 10 % slower."""
    learning_rate: Annotated[float, Field(gt=0.0, allow_inf_nan=False), NUMBER] = 3e-4
    """Peak learning rate."""
    lr_scheduler_type: Schedule = "cosine"
    """How the learning rate falls after warm-up."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises from 0."""
    max_steps: Positive = 300
    """Optimizer steps to train for."""
    max_grad_norm: Annotated[float, Field(ge=0.0, allow_inf_nan=False), NUMBER] = 1.0
    """Clip gradients to this norm; 0 does not clip."""
    seed: Annotated[int, Field(ge=0), at_most(2**63 - 1), NUMBER] = 0
    """Seeds weights, data order, dropout and sampling."""
    logging_steps: Positive = 10
    """Write a line of metrics every so many steps."""
    eval_steps: Positive | None = None
    """Evaluate every so many steps; by default only at the end."""
    eval_samples: Positive = 256
    """At most so many held-out samples an evaluation."""
    save_steps: Positive | None = None
    """Write a checkpoint every so many steps; by default only when stopped."""
    save_total_limit: Positive = 2
    """Checkpoints to keep."""
    output_dir: str | None = None
    """The run's folder; by default `runs/<name>`."""
    resume: Literal["auto", "never"] = "auto"
    """Continue from the newest checkpoint in the run's folder, or insist on an empty folder."""
    report_to: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    """Where metrics also go: tensorboard, wandb, and others that Accelerate knows."""
    profile_step: Positive | None = None
    """Profile this step of the run, or the fourth that a process takes if that is later, for `tightfit report`: left
    out of the run's own speed, and what it learns stays the same."""
    sample_prompt: str | None = None
    """Text to continue at the end of a causal-lm run."""
    cache_dir: str = "~/.cache/tightfit"
    """Where trained tokenizers and tokenized data are kept."""
    hugging_face: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a Hugging Face Trainer that are no field here, such as `log_level` or `num_train_epochs`: kept for
    TrainingArguments, and without effect on training here."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        micro, batch = self.micro_batch_size, self.batch_size
        if self.mode == "train" and micro != "auto" and micro > batch:
            raise RecipeError(f"micro_batch_size: {micro} is more than batch_size={batch}, which is what one optimizer "
                              f"step learns from; write micro_batch_size={batch} or less, or batch_size={micro}")
        if self.hugging_face:
            from tightfit.recipe.hf_arguments import check_carried

            check_carried(self.hugging_face)
        return self

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a recipe from plain values. Raises RecipeError naming the field, the value and what to write."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(explain(cls, error)) from None

    @classmethod
    def from_training_arguments(
        cls, arguments: TrainingArguments | Mapping[str, Any] | str | Path, **fields: Any
    ) -> Self:
        """The recipe that says what Hugging Face's TrainingArguments say; every field it makes is pinned.

        arguments: a TrainingArguments, a mapping of its names, or the path of a JSON file of `to_json_string`.
        fields: what the arguments do not have (model, data, seq_len, attention), or what replaces them, such as
            `checkpointing="auto"`.

        Arguments without a counterpart that concern no step are kept in `hugging_face`. Raises RecipeError naming each
        other one, with the reason and what to write instead.
        """
        from tightfit.recipe.hf_arguments import from_training_arguments

        return from_training_arguments(cls, arguments, fields)

    def refusals(self, device: Device, answered: Collection[str] = ()) -> list[str]:
        """Reasons why the techniques named here cannot serve on `device`, each naming its field; empty if they can.

        answered: fields that the caller answers for.
        """
        named = {field: getattr(self, field) for field in VARIANTS if field not in answered}
        return [
            f"{field}: {reason}"
            for field, technique in named.items()
            if technique != "auto"
            for reason in technique.refuse(self, device)
        ]

    def among(self, processes: int) -> Recipe:
        """The recipe with the number of processes that train it, where it has several."""
        if not isinstance(self.parallel, ManyProcesses):
            return self
        return self.model_copy(update={"parallel": replace(self.parallel, processes=processes)})

    def open_choices(self) -> tuple[str, ...]:
        """The fields that a search decides and that still say `auto`, or whose technique does of a knob."""
        shares = self.offload != "auto" and self.offload.open_shares
        return (*(field for field in CHOICES if getattr(self, field) == "auto"), *(("offload",) if shares else ()))

    @property
    def tf32(self) -> bool:
        """Whether its matrix products of fp32 tensors may use the tensor cores."""
        return self.precision != "auto" and self.precision.tf32

    @property
    def compiled(self) -> bool:
        """Whether it names a compiler."""
        return self.compile != "auto" and self.compile.compiles

    @property
    def offloaded(self) -> HostShares:
        """What waits in the host's memory."""
        return HostShares() if self.offload == "auto" else self.offload.shares

    @property
    def one_region(self) -> bool:
        """Whether a compiler takes the whole model as one."""
        return self.compile != "auto" and self.compile.one_region

    def override(self, **changes: Any) -> Self:
        """Another recipe with some fields changed. Raises RecipeError as `from_dict` does."""
        return self.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values: strings, numbers, lists and dicts, as written in YAML."""
        return self.model_dump(mode="json")

"""The recipe: what to train and how, one field per choice; YAML and `key=value` in, YAML out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tightfit import techniques
from tightfit.errors import RecipeError
from tightfit.recipe.sections import (
    BestMetric,
    Data,
    Every,
    Inference,
    NameOrPath,
    Schedule,
    ScheduleArguments,
    Size,
    StepsOrShare,
)
from tightfit.recipe.yaml import explain, slot_field
from tightfit.tasks import TASKS
from tightfit.techniques import SLOTS, VARIANTS, TechniqueFacts
from tightfit.techniques.backend import Pytorch
from tightfit.techniques.parallel import ManyProcesses, NoParallel
from tightfit.techniques.technique import NUMBER, NonNegative, Positive, at_most
from tightfit.techniques.trainable import All

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import TrainingArguments

    from tightfit.devices import Device

Auto = Literal["auto"]
Epoch = Literal["epoch"]
CHOICES = ("micro_batch_size", "precision", "loss", "checkpointing", "optimizer", "attention", "compile")
"""The fields that a search decides."""
CHOSEN_SLOTS = tuple(field for field in CHOICES if field in SLOTS)
"""Those of them that a technique fills."""


class Recipe(TechniqueFacts, BaseModel):
    """Model, data and techniques of a run. Frozen; build another with `override`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    model: NameOrPath = "gpt2"
    """A bundled shape, a Hugging Face id, a local folder, or `package.module:factory`."""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's configuration to change, such as `n_layer: 4`."""
    pretrained: bool = True
    """Load the weights where the model has some; otherwise start from its configuration."""
    trust_remote_code: bool = False
    """Run Python code that comes with a Hugging Face model."""
    task: Literal[tuple(TASKS)] = "causal-lm"  # type: ignore[valid-type]
    """causal-lm, masked-lm, sequence-classification, seq2seq or image-classification; where none is written, the one
    that `data.label` or `num_labels` (sequence-classification) or `data.target` (seq2seq) is for, or else the model, if
    it says so."""
    mode: Literal["train", "inference"] = "train"
    """Purpose of a plan: training, or generating from `batch_size` prompts of `seq_len` tokens. Only `train` trains."""
    inference: Annotated[Inference, BeforeValidator(
        lambda v: v if isinstance(v, BaseModel | dict) else {"new_tokens": v})] = Inference()
    """With `mode: inference`, what is generated."""
    data: Annotated[Data, BeforeValidator(lambda v: {"source": v} if isinstance(v, str) else v)] = Data()
    """Source of the examples."""
    tokenizer: NameOrPath = "auto"
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
    trainable: Annotated[techniques.Trainable, *slot_field("trainable")] = All()
    """Parts that are trained: all, lora, dora, or named layers."""
    base: Annotated[techniques.Base | Auto, *slot_field("base")] = "auto"
    """Format of weights that are not trained: as-is, bf16, fp16, int8, nf4; `auto` is bf16 or fp16 beside adapters
    that compute in it, else as-is."""
    precision: Annotated[techniques.Precision | Auto, *slot_field("precision")] = "auto"
    """Number formats: fp32, tf32, fp16, bf16, bf16-pure, fp8."""
    loss: Annotated[techniques.Loss | Auto, *slot_field("loss")] = "auto"
    """Cross-entropy of whole logits, or chunk by chunk from the hidden states."""
    checkpointing: Annotated[techniques.Checkpointing | Auto, *slot_field("checkpointing")] = "auto"
    """Activation checkpointing."""
    optimizer: Annotated[techniques.Optimizer | Auto, *slot_field("optimizer")] = "auto"
    """The optimizer."""
    attention: Annotated[techniques.Attention | Auto, *slot_field("attention")] = "auto"
    """The attention kernel."""
    accumulation: Annotated[techniques.Accumulation | Auto, *slot_field("accumulation")] = "auto"
    """Order of a global batch's passes: by micro-batch (loop; scan under jax), or block by block (by-block)."""
    compile: Annotated[techniques.Compile | Auto, *slot_field("compile")] = "auto"
    """torch.compile."""
    loading: Annotated[techniques.Loading, *slot_field("loading")] = techniques.Loading()
    """Loading of batches to the device."""
    offload: Annotated[techniques.Offload | Auto, *slot_field("offload")] = "auto"
    """Parts of a step that wait in the host's memory while the device does not need them."""
    update: Annotated[techniques.Update | Auto, *slot_field("update")] = "auto"
    """Time of clipping, applying and dropping gradients; `auto` hides the copies of offloaded optimizer states."""
    parallel: Annotated[techniques.Parallel, *slot_field("parallel")] = NoParallel()
    """More than one device: ddp, fsdp and zero with a process for each, dp with one for all of a machine's (jax)."""
    backend: Annotated[techniques.Backend, *slot_field("backend")] = Pytorch()
    """The framework that runs the step: pytorch, or jax with its own knobs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on: auto takes the CUDA device where there is one."""
    allow_numerics: bool = False
    """Whether `auto` may pick what changes results, such as 8-bit states or products in fp8, because it is faster."""
    expandable_segments: bool | Auto = "auto"
    """Let PyTorch's CUDA allocator grow its segments page by page, which leaves less memory cached in pieces; a plan
    tries both where this says auto, and without a plan auto is false (no effect on the CPU, nor with backend: jax)."""
    deterministic: bool = False
    """Run only ops whose results are the same each time, on a GPU as well: slower, and refused for ops without one."""
    empty_cache_steps: Positive | None = None
    """Give cached memory back to the device every so many steps: less fragmentation, about 10 % slower."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False), NUMBER] = 3e-4
    """Peak learning rate; 2e-5 by default where all weights of a saved model are trained further."""
    lr_scheduler_type: Schedule = "cosine"
    """Schedule by which the learning rate falls after warm-up."""
    lr_scheduler_kwargs: ScheduleArguments = {}
    """Its arguments, as transformers calls them: `{min_lr_rate: 0.1}`, `{num_cycles: 2}`, `{num_decay_steps: 100}`."""
    warmup_steps: StepsOrShare = 0
    """Steps over which the learning rate rises from 0; below 1, a share of all steps."""
    max_steps: Positive = 300
    """Optimizer steps to train for, unless the recipe's `num_train_epochs` says how many."""
    num_train_epochs: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False), NUMBER] | None = None
    """Train for so many passes over the training data: `max_steps` is then counted when the data is prepared."""
    label_smoothing_factor: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), NUMBER] = 0.0
    """Share of each label's weight in the training loss that is spread over all classes; losses of evaluations have
    none."""
    max_grad_norm: NonNegative = 1.0
    """Clip gradients to this norm; 0 does not clip."""
    router_aux_loss_coef: NonNegative | None = None
    """Weight of the balance loss of a mixture of experts' routers; by default the model configuration's."""
    router_z_loss_coef: NonNegative | None = None
    """Weight of the routers' z-loss, which keeps their logits small; by default the model configuration's, or 0."""
    seed: Annotated[int, Field(ge=0), at_most(2**63 - 1), NUMBER] = 0
    """Seeds weights, data order, dropout and sampling."""
    logging_steps: Every = 10
    """Write a line of `metrics.jsonl` every so many steps (below 1, a share of all steps); the screen shows steps some
    seconds apart."""
    eval_steps: Every | Epoch | None = None
    """Evaluate every so many steps (below 1, a share of all), or after each `epoch`; by default only at the end."""
    eval_samples: Positive | None = 256
    """At most so many held-out samples an evaluation, null for all of them."""
    save_steps: Every | Epoch | Auto | None = "auto"
    """Write a checkpoint every so many steps (below 1, a share of all), after each `epoch`, or with `auto` every 15
    minutes, less often where that took over 5 % of the time; null for the run's end alone. Stopping it saves too."""
    save_total_limit: Positive | None = 2
    """Checkpoints to keep, null for all of them; the best one stays besides."""
    metric_for_best_model: BestMetric | None = None
    """Metric of the evaluations by which the best checkpoint is kept: loss (the default of the two fields below),
    perplexity, accuracy or f1."""
    load_best_model_at_end: bool = False
    """Whether the finished model is the best checkpoint's, instead of the last step's."""
    early_stopping_patience: Positive | None = None
    """End the run after so many evaluations in a row without a better one."""
    early_stopping_threshold: NonNegative = 0.0
    """Improvement from which on an evaluation counts as better for early stopping."""
    output_dir: NameOrPath | None = None
    """The run's folder; by default `runs/<name>`."""
    resume: Literal["auto", "never"] = "auto"
    """Continue from the newest checkpoint in the run's folder, or insist on an empty folder."""
    recover: bool = True
    """Go on where the device's memory was too small for a step: with half the micro-batch, then with what else takes
    less memory and changes results by rounding alone."""
    report_to: Annotated[tuple[str, ...], BeforeValidator(
        lambda v: (v,) if isinstance(v, str) else v, json_schema_input_type=tuple[str, ...] | str)] = ()
    """Trackers that metrics also go to: tensorboard, wandb, and others that Accelerate knows."""
    profile_step: Positive | None = None
    """Profile this step, or a process's fourth if that is later, for `tightfit report`: not in the run's own speed."""
    sample_prompt: str | None = None
    """Text to continue, or after conversations to answer, at the end of a causal-lm run."""
    cache_dir: NameOrPath = "~/.cache/tightfit"
    """Folder for trained tokenizers and tokenized data; `~/.cache` stands for XDG_CACHE_HOME where that is set."""
    hugging_face: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a Hugging Face Trainer that are no field here, such as `log_level`: kept for
    TrainingArguments, and without effect on training here."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        micro, batch = self.micro_batch_size, self.batch_size
        if self.mode == "train" and micro != "auto" and micro > batch:
            raise RecipeError(f"micro_batch_size: {micro} is more than batch_size={batch}, which is what one optimizer "
                              f"step learns from; write micro_batch_size={batch} or less, or batch_size={micro}")
        if self.best_metric is not None:
            from tightfit.recipe.best_metric import check_best

            check_best(self)
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

        arguments: a TrainingArguments or trl's SFTConfig, a mapping of its names, or a file of them: JSON or YAML.
        fields: what the arguments do not have (model, data, seq_len, attention), or what replaces them, such as
            `checkpointing="auto"`.

        Arguments without a counterpart that concern no step are kept in `hugging_face`. Raises RecipeError naming each
        other one, with the reason and what to write instead.
        """
        from tightfit.recipe.hf_arguments import from_training_arguments

        return from_training_arguments(cls, arguments, fields)

    def refusals(self, device: Device) -> list[str]:
        """Reasons why the techniques named here cannot serve on `device`, each naming its field; empty if they can."""
        return [f"{field}: {reason}" for field in VARIANTS if (technique := getattr(self, field)) != "auto"
                for reason in technique.refuse(self, device)]

    def with_processes(self, processes: int) -> Recipe:
        """The recipe with the number of processes that train it, where it has several."""
        if not isinstance(self.parallel, ManyProcesses):
            return self
        return self.model_copy(update={"parallel": replace(self.parallel, processes=processes)})

    def with_steps(self, steps_an_epoch: int) -> Recipe:
        """The recipe with `max_steps` counted where it says `num_train_epochs`."""
        steps = math.ceil((self.num_train_epochs or 0) * steps_an_epoch)
        return self if self.num_train_epochs is None else self.model_copy(update={"max_steps": max(1, steps)})

    @property
    def warmup(self) -> int:
        """Steps of warm-up."""
        return self.in_steps(self.warmup_steps)

    def in_steps(self, given: float) -> int:
        """A number of steps that is written as one, or below 1 as a share of all."""
        return math.ceil(given * self.max_steps) if given < 1 else int(given)

    @property
    def continued_tokens(self) -> int:
        """Tokens that inference appends to each prompt."""
        return self.inference.new_tokens if self.mode == "inference" and TASKS[self.task].predicts == "next" else 0

    @property
    def best_metric(self) -> str | None:
        """The metric by which evaluations are compared; None where they are not."""
        asked = self.metric_for_best_model or self.load_best_model_at_end or self.early_stopping_patience
        return self.metric_for_best_model or "loss" if asked else None

    def open_choices(self) -> tuple[str, ...]:
        """The fields that a search decides and that still say `auto`, or whose technique does of a knob."""
        shares = self.offload != "auto" and self.offload.open_shares
        return (*(field for field in CHOICES if getattr(self, field) == "auto"), *(("offload",) if shares else ()))

    def override(self, **changes: Any) -> Self:
        """Another recipe with some fields changed; `max_steps` takes the place of epochs, and a field that was not
        written stays unwritten. Raises RecipeError as `from_dict` does."""
        epochs = {"num_train_epochs": None} if "max_steps" in changes else {}
        return self.from_dict({**self.model_dump(mode="json", exclude_unset=True), **epochs, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values: strings, numbers, lists and dicts, as written in YAML."""
        return self.model_dump(mode="json")

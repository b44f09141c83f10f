"""The sections of a recipe that are mappings of their own: its data, and generation from prompts; and the types of its
numbers and names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from tightfit.errors import RecipeError, nearest
from tightfit.metrics import MetricName
from tightfit.tasks import Task
from tightfit.techniques.technique import LARGEST, NUMBER, Positive, at_most


def _steps_or_share(least: int) -> BeforeValidator:
    """A validator of a number of steps, from `least` on, or below 1 a share of all steps."""

    def check(value: Any) -> Any:
        if not isinstance(value, bool) and isinstance(value, int | float):
            if 0 < value < 1:
                return value
            if value == value // 1 >= least:
                return int(value)
        raise ValueError(f"a whole number of steps from {least} on, or below 1 a share of all steps")

    return BeforeValidator(check)


def _file_name(value: str) -> str:
    """Raises ValueError for what no file can be named, so that each who looks for one need not ask."""
    try:
        path = Path(value).expanduser()
        whole, longest = os.fsencode(path), max((len(os.fsencode(part)) for part in path.parts), default=0)
    except RuntimeError:  # as pathlib says it
        raise ValueError("a name or path, and no home folder is known for its ~; set HOME, or write all") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"a name or path, and {error}") from None
    if b"\0" in whole or len(whole) > MOST_PATH or longest > MOST_NAME:
        raise ValueError(f"a name or path, of at most {MOST_NAME} bytes between slashes and no null byte")
    return value


def _of_schedule(given: dict[str, int | float | str], info: ValidationInfo) -> dict[str, int | float | str]:
    """Raises RecipeError for arguments that the recipe's schedule does not take, and where it lacks one."""
    kind = info.data.get("lr_scheduler_type", "")  # none where that is wrong itself
    takes = SCHEDULE_ARGUMENTS.get(kind, ())
    for name, value in given.items() if kind else ():
        at = f"lr_scheduler_kwargs.{name}"
        if name not in takes:
            raise RecipeError(f"{at}: {kind} has no such argument; {nearest(name, takes) if takes else 'leave it out'}")
        if name.endswith("_type") and value not in CURVES:
            raise RecipeError(f"{at}: {value!r} is not known; {nearest(str(value), CURVES)}")
        if not name.endswith("_type") and (isinstance(value, str) or not 0 <= value <= LARGEST):
            raise RecipeError(f"{at}: {value!r} should be a number from 0 to {LARGEST:g}")
    if kind == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & given.keys()) != 1:
        raise RecipeError(f"lr_scheduler_kwargs: {kind} takes one of min_lr and min_lr_rate, and {given} holds "
                          f"{'both' if given.keys() >= {'min_lr', 'min_lr_rate'} else 'none'}; write "
                          "lr_scheduler_kwargs='{min_lr_rate: 0.1}'")
    if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
        raise RecipeError(f"lr_scheduler_kwargs: {kind} takes num_decay_steps, and {given} holds none; write "
                          "lr_scheduler_kwargs='{num_decay_steps: 100}'")
    return given


CURVES = ("linear", "cosine", "1-sqrt")
"""Curves of a rate's rise and fall, where a schedule lets one choose."""
SCHEDULE_ARGUMENTS = {
    "cosine": ("num_cycles",), "cosine_with_restarts": ("num_cycles",), "polynomial": ("lr_end", "power"),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio",
                            "num_cycles"),
}  # fmt: skip
"""The arguments that schedules take, by their names in transformers."""
MOST_NAME, MOST_PATH = 255, 4000
"""Bytes that file systems take in a name, and systems in a path."""
NameOrPath = Annotated[str, AfterValidator(_file_name)]
Size = Annotated[int, Field(ge=1), at_most(2**31 - 1), NUMBER]
StepsOrShare = Annotated[int | float, _steps_or_share(0)]
Every = Annotated[int | float, _steps_or_share(1)]
Schedule = Literal["linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "constant", "constant_with_warmup",
                   "inverse_sqrt", "polynomial", "warmup_stable_decay"]
ScheduleArguments = Annotated[dict[str, int | float | str], AfterValidator(_of_schedule), Field(validate_default=True)]
BestMetric = Annotated[MetricName, BeforeValidator(lambda v: v.removeprefix("eval_") if isinstance(v, str) else v)]


GIVEN_ROWS = "rows given in Python"
"""The source that the recipe of a caller's own rows names."""


class Data(BaseModel):
    """Source of the examples. A short string in a recipe stands for `{source: ...}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: NameOrPath = "stdlib"
    """`stdlib` (the Python standard library's own source), `dummy` (random), a text, JSONL, CSV or Parquet file, a
    folder of them or of images, a folder saved by `datasets`, or a Hugging Face dataset id. To train a saved model
    further, one has to be named."""
    config: str | None = None
    """The Hugging Face dataset's configuration."""
    split: str = "train"
    """The Hugging Face dataset's split to train on."""
    text: str = "text"
    """Field that holds the text (seq2seq: the source text)."""
    text_pair: str | None = None
    """Field that holds the second sentence of a pair, such as a hypothesis (sequence-classification)."""
    messages: str | None = None
    """Field that holds a conversation, of which a causal-lm learns the assistant's turns: a list of messages with
    `role` and `content`; by default `messages`, where there is no field of texts."""
    chat_template: NameOrPath | None = None
    """File with the Jinja template that conversations are written with; by default the tokenizer's own."""
    prompt: str | None = None
    """Field that holds what a causal-lm is given and does not learn, a text or messages; by default `prompt`, where
    there is no field of texts."""
    completion: str | None = None
    """Field that holds the text, or the messages, learned behind the prompt; by default `completion`."""
    label: str = "label"
    """Field that holds the class."""
    target: str = "target"
    """Field that holds the target text of seq2seq."""
    packing: bool = True
    """Fill every row with documents, kept apart by document ids; otherwise one document a row, padded."""
    samples: Positive = 512
    """Number of random examples that `dummy` makes."""
    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), NUMBER] = 0.05
    """Share of the documents held out for evaluation, unless they are named."""
    eval_source: NameOrPath | None = None
    """Source of the examples of evaluation, instead of a share of the others: as `source`."""
    eval_split: str | None = None
    """The Hugging Face dataset's split to evaluate on."""

    def shares_rows(self, task: Task) -> bool:
        """Whether documents share a row in that task, kept apart; random tokens are one document a row."""
        return task.packs and self.packing and self.source != "dummy"

    @property
    def holds_out(self) -> bool:
        """Whether there are examples to evaluate on."""
        return bool(self.eval_fraction or self.eval_source or self.eval_split)


class Inference(BaseModel):
    """Generation from each prompt. A number in a recipe stands for `{new_tokens: ...}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    new_tokens: Positive = 128
    """Tokens to generate after each prompt."""
    beams: Positive = 1
    """Beams to search with; 1 takes the likeliest token at every step."""

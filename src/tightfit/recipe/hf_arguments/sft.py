"""SFTConfig, trl's subclass of TrainingArguments (trl 1.10): its own arguments, and what a recipe makes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

Arguments = Mapping[str, Any]

LOSSES = {None: "chunked", "chunked_nll": "chunked", "nll": "plain"}
ALWAYS_SAID = ("max_length", "packing", "loss_type")
"""Arguments that make their field whatever their value."""
SAID_UNLESS_DEFAULT = ("dataset_text_field", "chat_template_path", "pad_to_multiple_of", "trust_remote_code",
                       "router_aux_loss_coef")
"""Those whose default leaves it as it is."""


class Own(NamedTuple):
    """An argument of SFTConfig's own.

    default: its value where nothing is written. field: the recipe's that stands for it, whatever its value, where a
    person writes that. reads: whether complete arguments say what a recipe can. reason: why others are refused, and
    what to write.
    """

    default: Any
    field: str = ""
    reads: Callable[[Arguments], bool] = lambda a: True
    reason: str = ""


SFT_ARGUMENTS: Mapping[str, Own] = {
    "max_length": Own(1024, "seq_len", lambda a: isinstance(a["max_length"], int),
                      "cuts nothing, and a recipe's rows have a length; write seq_len=<the longest's tokens>"),
    "truncation_mode": Own("keep_start", "", lambda a: a["truncation_mode"] == "keep_start",
                           "cuts beginnings, where a recipe cuts ends; write 'keep_start'"),
    "packing": Own(False, "data.packing"),
    "packing_strategy": Own(
        "bfd", "data.packing", lambda a: not a["packing"] or a["packing_strategy"] != "wrapped",
        "shows a token the other documents of its row, which a recipe keeps apart; write 'bfd', or data.packing=true",
    ),
    "padding_free": Own(False, "data.packing", lambda a: a["packing"] or not a["padding_free"],
                        "joins the rows of a batch, as a recipe does by packing; write data.packing=true, or =false"),
    "eval_packing": Own(None, "data.packing", lambda a: a["eval_packing"] in (None, a["packing"]),
                        "packs held-out rows otherwise than those to train on; leave it out"),
    "dataset_text_field": Own("text", "data.text"),
    "chat_template_path": Own(
        None, "data.chat_template", lambda a: str(a["chat_template_path"] or ".j2").endswith((".jinja", ".j2")),
        "is a tokenizer, whose tokens the model would get too; write data.chat_template=<a file with its template>",
    ),
    "pad_to_multiple_of": Own(None, "pad_sequence_to"),
    "trust_remote_code": Own(False, "trust_remote_code"),
    "router_aux_loss_coef": Own(0.001, "router_aux_loss_coef"),
    "loss_type": Own(None, "loss", lambda a: a["loss_type"] in tuple(LOSSES),
                     "is no cross-entropy; write 'chunked_nll' or 'nll'"),
    "assistant_only_loss": Own(False),
    "completion_only_loss": Own(
        None, "", lambda a: a["completion_only_loss"] is not False,
        "learns prompts too, where a recipe learns completions alone; leave it out, or make each pair one text",
    ),
    "shuffle_dataset": Own(False),
    "activation_offloading": Own(
        False, "offload", lambda a: not a["activation_offloading"],
        "keeps activations in host memory; write offload='{name: host, weights: 0, gradients: 0, optimizer: 0, "
        "activations: 1}'",
    ),
    "eos_token": Own(None, "tokenizer", lambda a: a["eos_token"] is None,
                     "is not found as the eos_token of the model's own tokenizer; write tokenizer=<a folder whose "
                     "tokenizer has it>"),
    "model_init_kwargs": Own(None, "", lambda a: not a["model_init_kwargs"],
                             "is how a model is loaded; leave it out, and write model_overrides, attention and "
                             "precision (bf16-pure where weights are bfloat16)"),
    "dataset_kwargs": Own(None, "", lambda a: a["dataset_kwargs"] in (None, {}, {"skip_prepare_dataset": False}),
                          "is for data that is prepared already; leave it out: tightfit.Trainer takes such rows"),
}  # fmt: skip
"""The arguments of SFTConfig's own of which something is read."""

UNREAD = "assistant_only_loss"
"""The argument of which false, its default, learns all of a conversation, where a recipe learns the assistant's turns
either way: kept, so that it is said."""
KEPT_ARGUMENTS = ("dataset_num_proc", "pad_token")
"""Its others, which change no step."""

SFT_DEFAULTS: Arguments = {"learning_rate": 2e-5, "logging_steps": 10, "gradient_checkpointing": True}
"""SFTConfig's defaults for TrainingArguments' names; bf16 is true too, unless fp16 is."""


def divide(given: Arguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """TrainingArguments' own arguments, with `UNREAD` where it is false, and all of SFTConfig's: with its defaults
    where any of these is given, else none."""
    rest = {name: value for name, value in given.items() if name not in SFT_ARGUMENTS}
    if not given.keys() & {*SFT_ARGUMENTS, *KEPT_ARGUMENTS}:
        return rest, {}
    if rest.get("bf16") is None:
        rest["bf16"] = not rest.get("fp16")
    if not given.get(UNREAD):
        rest[UNREAD] = False
    return {**SFT_DEFAULTS, **rest}, {name: given.get(name, own.default) for name, own in SFT_ARGUMENTS.items()}


def recipe_values(a: Arguments, written: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The values that SFTConfig's arguments give a recipe's fields, each by its path such as `data.text`, and a reason
    for each that no field can say. written: paths of the fields that a person writes, which stand above them."""
    values, reasons = {}, []
    for name in a:
        own, value = SFT_ARGUMENTS[name], a[name]
        if own.field in written:
            continue
        if not own.reads(a):
            reasons.append(f"{name}: {value!r} {own.reason}")
        elif name in ALWAYS_SAID or (name in SAID_UNLESS_DEFAULT and value != own.default):
            values[own.field] = LOSSES[value] if name == "loss_type" else value
    return values, reasons


def paths(fields: Arguments) -> set[str]:
    """The paths of fields that a person writes: of data those of a mapping, and of a whole `Data` all of them."""
    data = fields.get("data", "")
    if not isinstance(data, Mapping | str):
        return {*fields, *(own.field for own in SFT_ARGUMENTS.values() if own.field.startswith("data."))}
    return {*fields, *(f"data.{name}" for name in data if isinstance(data, Mapping))}


def beneath(values: Arguments, fields: Arguments) -> dict[str, Any]:
    """Fields that a person writes, with values by their paths where those leave room."""
    found = {**{path: value for path, value in values.items() if "." not in path}, **fields}
    if inner := {path.removeprefix("data."): value for path, value in values.items() if "." in path}:
        data = fields.get("data", {})
        found["data"] = {**inner, **({"source": data} if isinstance(data, str) else data)}
    return found

"""Hugging Face's TrainingArguments to a recipe, and a recipe to TrainingArguments.

One process on one device: `per_device_train_batch_size` is the micro-batch, and times `gradient_accumulation_steps`
the global batch. What a recipe cannot hold is kept in its field `hugging_face` or refused by name, as `table` says;
nothing is dropped. As with the Trainer, all examples to evaluate on are read, and without `eval_strategy` none is held
out.

Some pairs are close, not the same. `adamw_bnb_8bit` is bitsandbytes' and `adamw_torch_8bit` torchao's with no exception
for embeddings; here it is torchao's with embeddings at 32 bits. `dataloader_prefetch_factor` counts micro-batches,
`loading.prefetch` global batches. `every_n_layers` counts layers over the whole model, every-nth within each stack.
`torch_compile` compiles the whole model, unless ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true is in the environment.

trl's SFTConfig is read too, one way (`sft`). Its `packing` moves documents whole to the row with the least room for
them and drops (`bfd`) or splits (`bfd_split`) what is longer than `max_length`; here each goes on in the next row,
without what came before, in the data's order whatever `shuffle_dataset` says. Both keep documents apart; `wrapped` does
not. A padded row that is cut has `max_length` labels here and one fewer there, where rows with nothing left to learn
are dropped. Of conversations only the assistant's turns are learned, as with `assistant_only_loss`, be it false or
true; behind a prompt the completion is, whole. A `router_aux_loss_coef` of 0.001, trl's default, leaves the model's
own. An `eos_token` is refused unless it is that of the model's own tokenizer, in its folder or the hub's cache, or
`tokenizer` is written. A dump hides `eos_token` and `pad_token`, which are then taken for unset.
"""

from __future__ import annotations

from tightfit.recipe.hf_arguments.conversion import from_training_arguments, training_arguments
from tightfit.recipe.hf_arguments.table import check_carried

__all__ = ["check_carried", "from_training_arguments", "training_arguments"]

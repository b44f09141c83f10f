"""From a recipe to samples: what to train on, what is held out, and the tokenizer between text and both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tightfit.data.corpora import check_named_parts, evaluation_data, given_corpus, open_corpus
from tightfit.data.readers import (
    COMPLETION,
    LABEL,
    LOSS_MASK,
    MESSAGES,
    PAIR,
    PROMPT,
    TARGET,
    TEXT,
    TOOLS,
    HoldsMessages,
    MissingField,
    Wanted,
    named_fields,
    usual_fields,
)
from tightfit.data.samples import Documents, Masking, Packed, Padded, Samples, padded
from tightfit.data.splitting import Progress, Split, held_out
from tightfit.data.tokenized import Part, classes_by_number, something_to_learn, tokenize, unigram_loss, unlearned
from tightfit.data.tokenizer_choice import choose_tokenizer, named_tokenizer
from tightfit.data.tokenizing import Tokenizer
from tightfit.errors import DataError, shown
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.recipe.sections import GIVEN_ROWS
from tightfit.system import expanded
from tightfit.tasks import get_task

if TYPE_CHECKING:
    from tightfit.data.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Data ready to load.

    evaluation: the held-out samples; None where nothing is held out. tokenizer: None where samples are not made from
    text. unigram_loss: nats per held-out token for a model that knows how often each token occurs and nothing else;
    None where tokens are not predicted. classes: the classes' names by id, from 0 without gaps; None where the data
    names none: labels are numbers, or rows of the caller's own, or no classes. image_processor: the configuration of
    the one that makes such samples of image files; None where they are not made from those. unlearned: training
    documents of which no token is learned. turn_end: the token that ends the assistant's turn, where documents are
    conversations and one token does. notes: sentences on what of the caller's own rows is not read.
    """

    train: Samples
    evaluation: Samples | None
    tokenizer: Tokenizer | None = None
    unigram_loss: float | None = None
    classes: dict[int, str] | None = None
    image_processor: dict[str, Any] | None = None
    unlearned: int = 0
    turn_end: int | None = None
    notes: tuple[str, ...] = ()


def prepare(
    recipe: Recipe, facts: ModelFacts, *, progress: Progress | None = None, dataset: Rows | None = None,
    eval_dataset: Rows | None = None,
) -> Prepared:  # fmt: skip
    """The recipe's data, or the caller's own `dataset` of rows, tokenized or with the fields that files have, as
    samples of the recipe's task.

    eval_dataset: the caller's own rows to evaluate on, instead of a share of `dataset`.

    Raises DataError for data that cannot be read, is too small, or disagrees with the recipe or the model.
    """
    task = get_task(recipe.task)
    if task.reads == "tokens":
        _check_positions(recipe, facts, padded=dataset is not None or not (task.packs and recipe.data.packing))
    if eval_dataset is not None and dataset is None:
        raise DataError("eval_dataset: rows to evaluate on go with rows to train on; give dataset too, or write "
                        "data.eval_source=<other examples>")
    if dataset is not None:
        own = {"eval_dataset": eval_dataset} if eval_dataset is not None else {}
        return _from_rows(recipe, facts, {"dataset": dataset, **own}, progress)
    if recipe.data.source == GIVEN_ROWS:
        raise DataError("data: it was rows given in Python, which a recipe does not hold; run that code again, with "
                        "profile_step=10 for a profile, or write data=<a file, a folder or a Hugging Face dataset>")
    check_named_parts(recipe.data)
    if recipe.data.source == "dummy":
        return _from_dummy(recipe, facts)
    return _from_images(recipe, facts) if task.reads == "images" else _from_text(recipe, facts, progress)


def _check_positions(recipe: Recipe, facts: ModelFacts, padded: bool) -> None:
    facts.check_length(recipe.seq_len)
    limit, multiple = facts.max_positions, recipe.pad_sequence_to or 1
    if limit is not None and padded and -(-recipe.seq_len // multiple) * multiple > limit:
        raise DataError(f"pad_sequence_to: rounding seq_len={recipe.seq_len} up to a multiple of {multiple} passes the "
                        f"model's {limit} positions; write seq_len={max(limit // multiple * multiple, 1)}")


def _from_rows(recipe: Recipe, facts: ModelFacts, rows: Mapping[str, Rows], progress: Progress | None) -> Prepared:
    """rows: by the argument that they are given as."""
    from tightfit.data.rows import RowExamples  # for these alone

    if len(rows) == 1 and (recipe.data.eval_source or recipe.data.eval_split):
        raise DataError("data.eval_source: the training examples are rows of the caller's own; give those to evaluate "
                        "on as eval_dataset")
    try:
        given = [RowExamples.of(each, recipe, facts, name) for name, each in rows.items()]
    except MissingField as missing:
        fields, has = named_fields(recipe.data) or usual_fields(missing.present), set(missing.present)
        if "input_ids" in has or get_task(recipe.task).reads == "images" or not (fields or recipe.data.text in has):
            raise
        return _from_text(recipe, facts, progress, rows)
    notes = [note for examples in given if (note := examples.cut_note())]
    samples, *own = (padded(examples, recipe, facts) for examples in given)
    train, evaluation = _divide(samples, recipe.data.eval_fraction, *own)
    if evaluation is not None and recipe.eval_samples is not None and len(evaluation) > recipe.eval_samples:
        notes.append(f"eval_samples: {recipe.eval_samples} of the {len(evaluation):,} rows to evaluate on are read; "
                     "write eval_samples=null for all")
    name = recipe.tokenizer
    tokenizer = None if name in ("auto", "train") else named_tokenizer(recipe, name)
    return Prepared(train=train, evaluation=evaluation, tokenizer=tokenizer, notes=tuple(notes))


def _from_dummy(recipe: Recipe, facts: ModelFacts) -> Prepared:
    from tightfit.data.dummy import Dummy  # for random examples alone

    def samples(count: int, part: int) -> Samples:
        return Padded(pad_id=facts.pad_token_id, examples=Dummy(
            task=get_task(recipe.task), facts=facts, seq_len=recipe.seq_len, seed=recipe.seed, count=count, part=part))

    count, fraction = recipe.data.samples, recipe.data.eval_fraction
    if evaluation_data(recipe.data) is not None:
        raise DataError(f"data.eval_source: {recipe.data.eval_source!r} is not of the kind of data.source=dummy; write "
                        "data.eval_fraction, or data.source=<a file or folder>")
    evaluation = samples(max(round(count * fraction), 1), part=1) if fraction else None
    return Prepared(train=samples(count, part=0), evaluation=evaluation)


def _from_images(recipe: Recipe, facts: ModelFacts) -> Prepared:
    from tightfit.data.images import image_processor, open_images, pixel_scale  # for images alone

    held, own, scale = evaluation_data(recipe.data), None, pixel_scale(recipe, facts.num_channels)
    images, names = open_images(recipe.data.source, facts, recipe.num_labels, scale)
    if held is not None:
        own = padded(open_images(held.source, facts, recipe.num_labels, scale, names)[0], recipe, facts)
    train, evaluation = _divide(padded(images, recipe, facts), recipe.data.eval_fraction, own)
    return Prepared(train=train, evaluation=evaluation, classes=dict(enumerate(names)),
                    image_processor=image_processor(facts, scale))


def _divide(samples: Padded, fraction: float, own: Samples | None = None) -> tuple[Samples, Samples | None]:
    """The samples to train on, and those to evaluate on: `own`, or a share of them."""
    if own is not None:
        return samples, own
    chosen = held_out(len(samples), fraction)
    if not chosen.any():
        return samples, None
    return replace(samples, chosen=(~chosen).nonzero()[0]), replace(samples, chosen=chosen.nonzero()[0])


def _from_text(
    recipe: Recipe, facts: ModelFacts, progress: Progress | None, rows: Mapping[str, Rows] = MappingProxyType({})
) -> Prepared:
    """Documents, of the recipe's data or of given `rows`, that are texts; or for a causal-lm conversations, or prompts
    and completions, where the recipe names their fields, or the data has such fields and none of texts."""
    data, task = recipe.data, get_task(recipe.task)
    extra = {"class": {LABEL: data.label}, "target": {TARGET: data.target}}
    pair = {} if data.text_pair is None else {PAIR: data.text_pair}
    if pair and task.predicts != "class":
        raise DataError(f"{PAIR}: {recipe.task} reads one text a row; write task=sequence-classification, or leave it "
                        "out")
    texts: Wanted = {TEXT: data.text, **pair, **extra.get(task.predicts, {})}
    named = named_fields(data)
    if named is not None and task.predicts != "next":
        raise DataError(f"{next(iter(named))}: {recipe.task} does not learn from it; write task=causal-lm, or leave it "
                        "out")
    wanted = named or texts
    while True:
        try:
            return _from_fields(recipe, facts, wanted, progress, rows)
        except HoldsMessages:
            wanted = {MESSAGES: wanted[PROMPT], COMPLETION: wanted[COMPLETION], TOOLS: TOOLS}
        except MissingField as missing:
            if wanted is not texts or task.predicts != "next":
                raise
            usual = usual_fields(missing.present)
            if usual is None:
                raise DataError(f"{missing}, data.messages=<that of conversations>, or data.prompt=<what is given> "
                                "data.completion=<what is learned>") from None
            wanted = usual


def _from_fields(
    recipe: Recipe, facts: ModelFacts, wanted: Wanted, progress: Progress | None, rows: Mapping[str, Rows]
) -> Prepared:
    task = get_task(recipe.task)
    cache_dir = expanded(recipe.cache_dir)
    sources = [data for data in (recipe.data, evaluation_data(recipe.data)) if data is not None]
    corpus, *own = ([given_corpus(each, wanted, name) for name, each in rows.items()]
                    or [open_corpus(data, wanted, cache_dir) for data in sources])
    split = Split(corpus, wanted, recipe.data.eval_fraction, *own)
    tokenizer = choose_tokenizer(recipe, facts, lambda: split.training_texts(progress), split.key)
    if MESSAGES in wanted:
        from tightfit.data.chat import turn_end, with_template  # for conversations alone

        tokenizer = with_template(tokenizer, recipe.data, recipe.tokenizer)
    train, evaluation, found = tokenize(split, tokenizer, cache_dir, progress)
    names = classes_by_number(found, facts, recipe.num_labels)
    train, evaluation = (part.renumbered([names.index(name) for name in found]) for part in (train, evaluation))
    if train.classes is not None and evaluation.classes is not None:
        classes = len(names) or 1 + int(max(train.classes.max(), evaluation.classes.max(initial=0)))
        if classes > facts.num_labels:
            if _are_fractions(names):
                raise DataError(f"{LABEL}: field {recipe.data.label!r} of {split.corpus.name} looks like numbers to "
                                f"regress on, such as {names[0]}, which no task here does; write data.label=<the field "
                                f"of a class>, or num_labels={classes} where each of them is a class of its own")
            count = len(np.union1d(train.classes, evaluation.classes))
            gaps = not names and count < classes  # texts are numbered here
            new = np.setdiff1d(evaluation.classes, train.classes) if names else evaluation.classes[:0]
            known = split.evaluation is None or not len(new)  # in a share of the rows it is no mistake
            alone = "" if known else f" ({shown(names[new[0]])} among the held-out rows alone)"
            numbered = f", numbered up to {classes - 1}," * gaps
            raise DataError(f"{LABEL}: {split.corpus.name} has {count} classes{alone}{numbered} and the model "
                            f"{facts.num_labels}; {'number them from 0, or ' * gaps}write num_labels={classes}")
    packed = task.packs and recipe.data.packing
    if not something_to_learn(task, train, tokenizer):
        why = "each is empty or holds special tokens only; write data=<documents with text>"
        if LOSS_MASK in train.streams:
            roles = ""
            if MESSAGES in wanted:
                from tightfit.data.conversations import roles_in  # for a message alone

                roles = f", and the roles are {roles_in(wanted, split.corpus.rows())}"
            why = f"no assistant's turn and no completion holds any{roles}; write data=<rows where one does>"
        what = "text to classify" if task.predicts == "class" else "token to predict"
        raise DataError(f"data: there is no {what} in the documents of {split.corpus.name}: {why}")
    samples = partial(_text_samples, recipe=recipe, facts=facts, tokenizer=tokenizer, packed=packed)
    held = evaluation if len(evaluation.streams[TEXT]) else None
    spare = 2 * tokenizer.vocab_size < facts.vocab_size
    ends = turn_end(tokenizer, wanted, split.corpus.rows()) if MESSAGES in wanted else None
    return Prepared(
        train=samples(train),
        evaluation=None if held is None else samples(held),
        tokenizer=tokenizer,
        unigram_loss=None if held is None else unigram_loss(task, train, held, tokenizer.special_ids),
        classes=dict(enumerate(names)) or None,
        unlearned=unlearned(train.streams.get(LOSS_MASK), None if packed else recipe.seq_len),
        turn_end=ends,
        notes=(f"vocab_size: the tokenizer has {tokenizer.vocab_size:,} tokens, and the model rows for "
               f"{facts.vocab_size:,}; write vocab_size={tokenizer.vocab_size} for a smaller model",) * spare
        + ("data.messages: the chat template ends the assistant's turns with no token, so that a model does not learn "
           "where to stop; write data.chat_template=<one with {{ eos_token }} behind them>",)
        * (MESSAGES in wanted and ends is None),
    )


def _are_fractions(names: Sequence[str]) -> bool:
    """Whether classes' names are numbers, and not whole ones alone."""
    try:
        return bool((np.array(names, dtype=np.float64) % 1 > 0).any())
    except ValueError:
        return False


def _text_samples(part: Part, *, recipe: Recipe, facts: ModelFacts, tokenizer: Tokenizer, packed: bool) -> Samples:
    masking = None
    if get_task(recipe.task).predicts == "hidden":
        assert tokenizer.mask_id is not None, "choose_tokenizer refuses a tokenizer without one"
        masking = Masking(mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size,
                          special_ids=tokenizer.special_ids, seed=recipe.seed)
    if packed:
        return Packed(part.streams[TEXT], recipe.seq_len, masking, part.streams.get(LOSS_MASK))
    documents = Documents(part=part, seq_len=recipe.seq_len, facts=facts, masking=masking,
                          special_ids=(*tokenizer.special_ids, tokenizer.end_id))
    return padded(documents, recipe, facts)

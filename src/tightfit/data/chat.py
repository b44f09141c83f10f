"""Conversations, and prompts with their completions: which of a document's tokens are learned.

A conversation is rendered by the tokenizer's chat template. Where that marks what the assistant says (its `generation`
blocks) the marks are taken; else a second rendering, with a placeholder for each of the assistant's turns, shows where
they lie: so the template's own text between turns is not learned, but for what ends a turn of the assistant's.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.readers import LEARNED, MESSAGES, TEXT, Row, Wanted
from tightfit.data.tokenizer_choice import read_chat_template
from tightfit.data.tokenizing import Tokenizer, load_tokenizer
from tightfit.errors import DataError, one_line, shown
from tightfit.files import digest
from tightfit.recipe import Data
from tightfit.tasks import Array

ASSISTANT = "assistant"
MARKS = re.compile(r"\{%-?\s*generation\b")
"""A template's own marks around what the assistant says."""
HOLDERS = re.compile("\ue000\\d+\ue001")
"""Placeholders of turns, in characters that no text has a meaning for."""

Span = tuple[int, int]


def texts_of(row: Row) -> Iterator[str]:
    """The texts in a row's messages, whatever else they hold: what is wrong with them is said where they are read."""
    with suppress(DataError):
        yield from (message["content"] for message in _messages(row, "a row"))


def with_template(tokenizer: Tokenizer, data: Data, name: str) -> Tokenizer:
    """The tokenizer with a chat template: the recipe's, or its own. Raises DataError where there is none."""
    if not hasattr(tokenizer.backend, "apply_chat_template"):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            tokenizer = load_tokenizer(folder, trust_remote_code=False)
    if (template := read_chat_template(data)) is not None:
        tokenizer.backend.chat_template = template
    if not tokenizer.backend.chat_template:
        raise DataError(f"data.messages: the tokenizer (tokenizer={name}) has no chat template to write messages with; "
                        "write data.chat_template=<a file with a Jinja template>, or tokenizer=<a chat model's>")
    return replace(tokenizer, fingerprint=digest([tokenizer.fingerprint, str(tokenizer.backend.chat_template)]))


def encode(wanted: Wanted, rows: Sequence[Row], tokenizer: Tokenizer, origins: Sequence[str]) -> dict[str, list[Array]]:
    """The ids of each row, int64 (tokens,), and which of them are learned, 0 or 1. origins: of the rows, for messages.

    Raises DataError naming the row that cannot be written so.
    """
    documents = _conversations(rows, tokenizer, origins) if MESSAGES in wanted else _completions(rows, tokenizer)
    pairs = [(np.array(ids, dtype=np.int64), np.array(learned, dtype=np.int64)) for ids, learned in documents]
    return {TEXT: [ids for ids, _ in pairs], LEARNED: [learned for _, learned in pairs]}


def _completions(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each prompt and completion as one text with its end token, and which of them are learned."""
    found = tokenizer.located([prompt + completion for prompt, completion in rows], True)
    for (prompt, completion), (ids, offsets) in zip(rows, found, strict=True):
        learned = _inside(offsets, [(len(prompt), len(prompt) + len(completion))])
        if ids[-1:] == [tokenizer.end_id]:
            learned[-1] = 1
            yield ids, learned
        else:
            yield [*ids, tokenizer.end_id], [*learned, 1]


def _conversations(
    rows: Sequence[Row], tokenizer: Tokenizer, origins: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template  # as slow as a tokenizer's own library

    listed = [_messages(row, origin) for row, origin in zip(rows, origins, strict=True)]
    backend, template = tokenizer.backend, tokenizer.backend.get_chat_template()
    marked = MARKS.search(template) is not None

    def written(messages: list[dict[str, Any]], origin: str) -> tuple[str, list[Span]]:
        """The text of messages, and where its marks lie."""
        try:
            (text,), spans = render_jinja_template(
                [messages], chat_template=template, return_assistant_tokens_mask=marked, **backend.special_tokens_map)
        except Exception as error:  # of Jinja, and of the template's own
            raise DataError(f"data.messages: the chat template refuses {origin}: {one_line(error)}; change that row, "
                            "or write data.chat_template=<another>") from None
        return text, spans[0] if marked else []

    texts, spans = [], []
    for messages, origin in zip(listed, origins, strict=True):
        text, inside = written(messages, origin)
        if not marked:
            bare = [{"role": ASSISTANT, "content": m["content"]} if m["role"] == ASSISTANT else m for m in messages]
            if bare != messages and written(bare, origin)[0] != text:
                raise DataError(f"data.messages: the chat template writes more of an assistant's message in {origin} "
                                "than its content, such as calls of tools or reasoning, which would not be learned; "
                                "write data.chat_template=<one with {% generation %} around it>, or all of it as "
                                "content")
            held, last = _held(messages)
            between = HOLDERS.split(written(held, origin)[0])
            whole = last in (0, len(held))
            ending = _ending(between if whole else HOLDERS.split(written(held[:last], origin)[0]))
            said = [message["content"] for message in messages if message["role"] == ASSISTANT]
            inside = _turns(text, between, said, ending, origin)
        texts.append(text)
        spans.append(inside)
    for (ids, offsets), inside in zip(tokenizer.located(texts, False), spans, strict=True):
        yield ids, _inside(offsets, inside)


def _held(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """A conversation with a placeholder for each of the assistant's turns, and how many messages end with the last."""
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    held = [{**m, "content": f"\ue000{i}\ue001"} if i in turns else m for i, m in enumerate(messages)]
    return held, turns[-1] + 1 if turns else 0


def _ending(between: list[str]) -> str:
    """The end of the assistant's turn. between: the template's text around those of messages that end with one."""
    return between[-1].rstrip()


def turn_end(tokenizer: Tokenizer, rows: Iterable[Row]) -> int | None:
    """The token with which the chat template ends the assistant's turn in the first of the conversations that has one;
    None where it does so by no single one."""
    backend = tokenizer.backend
    for row in rows:
        held, last = _held(_messages(row, "a row"))
        if last:
            shown = backend.apply_chat_template(held[:last], tokenize=False)
            ids = backend(_ending(HOLDERS.split(str(shown))), add_special_tokens=False)["input_ids"]
            return int(ids[0]) if len(ids) == 1 else None
    return None


def _turns(text: str, between: list[str], said: list[str], ending: str, origin: str) -> list[Span]:
    """Spans of the assistant's turns in a rendered conversation. between: the template's text around them. said: the
    turns. ending: what the template ends a turn with."""
    spans: list[Span] = []
    place = len(between[0])
    if len(between) == len(said) + 1 and text.startswith(between[0]):
        for turn, after in zip(said, between[1:], strict=True):
            shown = next((s for s in (turn, turn.strip(), turn.rstrip(), turn.lstrip())
                          if text.startswith(s + after, place)), None)
            if shown is None:
                break
            stop = place + len(shown)
            spans.append((place, stop + len(ending) * after.startswith(ending)))
            place = stop + len(after)
    if len(spans) < len(said) or place != len(text):
        raise DataError(f"data.messages: the chat template changes what the assistant says in {origin}, so that it "
                        "cannot be told from the rest; write data.chat_template=<one with {% generation %} around it>")
    return spans


def _inside(offsets: Iterable[Span], spans: Sequence[Span]) -> list[int]:
    """For each token, by its characters, 1 where any of them lies in a span, else 0."""
    begins, ends = np.array(list(offsets), dtype=np.int64).reshape(-1, 2).T
    begins = np.minimum(begins, ends - 1)  # of spaces alone, some tokenizers say where they end and that they are empty
    found = np.zeros(len(ends), dtype=np.int64)
    for start, stop in spans:
        found |= (ends > np.maximum(begins, start)) & (begins < stop)
    return found.tolist()


def _messages(row: Row, origin: str) -> list[dict[str, Any]]:
    """A row's messages, or those of its instruction, input and output, checked: mappings with a role and a text. Raises
    DataError."""
    value, *more = row
    if more:
        asked, said = [part for part in (value, more[0]) if part not in ("", None)], more[1]  # most have no input
        whole = "\n\n".join(asked) if all(isinstance(part, str) for part in asked) else asked
        value = [{"role": "user", "content": whole}, {"role": ASSISTANT, "content": said}]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise DataError(f"data.messages: {origin} holds text that is no JSON list of messages; write the text's "
                            "field as data.text") from None
    usual = 'write [{"role": "user", "content": "..."}, ...]'
    if not isinstance(value, list) or not value:
        raise DataError(f"data.messages: {origin} holds {shown(value)}, and no list of messages; {usual}")
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"data.messages: message {number} of {origin} is {shown(message)}, without a "
                            f"role; {usual}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"data.messages: the content of message {number} of {origin} is "
                            f"{shown(message.get('content'))}, not text; {usual}")
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            raise DataError(f"data.messages: the content of message {number} of {origin} holds half of a character; "
                            "mend that text") from None
    return [{name: item for name, item in message.items() if item is not None} for message in value]

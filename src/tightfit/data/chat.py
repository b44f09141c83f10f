"""Conversations, and prompts with their completions: which of a document's tokens are learned.

A conversation is rendered by the tokenizer's chat template. Where that marks what the assistant says (its `generation`
blocks) the marks are taken; else a second rendering, with a placeholder for each of the assistant's turns, shows where
they lie: so the template's own text between turns is not learned, but for what ends a turn of the assistant's. A turn
that holds more than its content, such as calls of functions, is what the rendering up to it adds to the one before.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.conversations import ASSISTANT, Conversation, Message, arguments_as_text, read_conversation
from tightfit.data.readers import LEARNED, MESSAGES, TEXT, TOOLS, Row, Wanted
from tightfit.data.tokenizer_choice import read_chat_template
from tightfit.data.tokenizing import Tokenizer, load_tokenizer
from tightfit.errors import DataError, one_line
from tightfit.files import digest
from tightfit.recipe import Data
from tightfit.tasks import Array

MARKS = re.compile(r"\{%-?\s*generation\b")
"""A template's own marks around what the assistant says."""
READS_NONE = re.compile(r"content\S* is (?:not )?none")
"""A template's own treatment of messages without content; others would write the word None."""
HOLDERS = re.compile("\ue000\\d+\ue001")
"""Placeholders of turns, in characters that no text has a meaning for."""

Span = tuple[int, int]


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
    talks = MESSAGES in wanted
    documents = _conversations(wanted, rows, tokenizer, origins) if talks else _completions(rows, tokenizer)
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
    wanted: Wanted, rows: Sequence[Row], tokenizer: Tokenizer, origins: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each conversation, and which are learned: the assistant's turns, or behind a prompt that is messages,
    as trl does, all from the first token on that differs from those of the prompt alone."""
    template = _Template(tokenizer.backend)
    texts, spans, prompts = [], [], []
    for row, origin in zip(rows, origins, strict=True):
        conversation = read_conversation(wanted, row, origin)
        text, inside = template.learned(conversation)
        texts.append(text)
        spans.append(inside)
        if conversation.asked:
            prompts.append(template.asked(conversation))
    found = tokenizer.located(texts, False)
    if prompts:
        for (ids, _), (asked, _) in zip(found, tokenizer.located(prompts, False), strict=True):
            shown = len([*takewhile(lambda pair: pair[0] == pair[1], zip(ids, asked, strict=False))])
            yield ids, [0] * shown + [1] * (len(ids) - shown)
    else:
        for (ids, offsets), inside in zip(found, spans, strict=True):
            yield ids, _inside(offsets, inside)


class _Template:
    """A tokenizer's chat template. marked: whether it marks what the assistant says."""

    def __init__(self, backend: Any) -> None:
        self._source = backend.get_chat_template()
        self._special_tokens = backend.special_tokens_map
        self._marked = MARKS.search(self._source) is not None

    def learned(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """A conversation's text, and the spans of the assistant's turns in it, not looked for behind a prompt.
        Raises DataError where they cannot be found, or the template leaves out tools or tool calls."""
        text, spans = self._written(conversation)
        messages, origin = conversation.messages, conversation.origin
        if conversation.tools and self._leaves_alike(replace(conversation, tools=None), text):
            raise DataError(f"data: {origin} has {TOOLS}, which the chat template does not write; write "
                            "data.chat_template=<one that does>, or leave the field out of the data")
        calls = any("tool_calls" in message for message in messages)
        bare = [{"role": ASSISTANT, "content": m["content"] or ""} if m["role"] == ASSISTANT else m for m in messages]
        alike = bare == messages
        if not alike and (calls or not self._marked):
            alike = self._leaves_alike(replace(conversation, messages=bare), text)
        if alike and calls:
            raise DataError(f"data.messages: the chat template does not write the tool_calls in {origin}; write "
                            "data.chat_template=<one that does>, or the calls as content")
        if self._marked or conversation.asked:
            return text, spans
        if not alike:
            return text, self._added(conversation, text)
        held, last = _held(bare)
        between = HOLDERS.split(self._written(replace(conversation, messages=held))[0])
        ending = between[-1].rstrip() if last in (0, len(held)) else self.ending(conversation)
        return text, _turns(text, between, [m["content"] for m in bare if m["role"] == ASSISTANT], ending, origin)

    def asked(self, conversation: Conversation) -> str:
        """The text of a conversation's prompt, up to where its completion begins."""
        asked = conversation.messages[: conversation.asked]
        return self._written(replace(conversation, messages=asked), prompt=True)[0]

    def _leaves_alike(self, conversation: Conversation, text: str) -> bool:
        """Whether another conversation is written as the same text; not where the template refuses it."""
        try:
            return self._written(conversation)[0] == text
        except DataError:
            return False

    def ending(self, conversation: Conversation) -> str:
        """The end-of-turn text behind the assistant's last turn with content; empty where none is found."""
        says = [m for m in conversation.messages if m["role"] != "tool" and "tool_calls" not in m]
        held, last = _held(says)
        try:
            between = HOLDERS.split(self._written(replace(conversation, messages=held[:last]))[0]) if last else []
        except DataError:  # which wants what was left out
            return ""
        turns = sum(message["role"] == ASSISTANT for message in held)
        return between[-1].rstrip() if len(between) == turns + 1 else ""

    def _added(self, conversation: Conversation, text: str) -> list[Span]:
        """Spans of what each of the assistant's turns adds to the conversation up to it."""
        spans: list[Span] = []
        messages, ending = conversation.messages, self.ending(conversation)
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._written(replace(conversation, messages=messages[:place]), prompt=True)[0]
            until = self._written(replace(conversation, messages=messages[: place + 1]))[0].rstrip()
            start, stop = len(before), len(until)
            if not text.startswith(until):  # of the last turn some templates write more than of the same elsewhere
                stop = text.find(ending, start) + len(ending) if ending else -1
                following = (messages[place + 1]["content"] or "") if place + 1 < len(messages) else ""
                if stop < start + len(ending) or following.strip() not in text[stop:]:
                    stop = -1
            if not text.startswith(before) or stop <= start:
                raise DataError(f"data.messages: the chat template writes more of an assistant's message in "
                                f"{conversation.origin} than its content, such as calls of tools or reasoning, and "
                                "not the same in every turn, so that its span cannot be found; write "
                                "data.chat_template=<one with {% generation %} around it>, or all of it as content")
            spans.append((start, stop))
        return spans

    def _written(self, conversation: Conversation, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """The text of a conversation, and where the template's marks lie. prompt: with what begins the assistant's
        turn."""
        from transformers.utils.chat_template_utils import render_jinja_template  # slow as a tokenizer's own library

        messages = conversation.messages
        if not READS_NONE.search(self._source):
            messages = [{**message, "content": message["content"] or ""} for message in messages]
        try:
            (text,), spans = render_jinja_template(
                [messages], tools=conversation.tools, chat_template=self._source,
                return_assistant_tokens_mask=self._marked, add_generation_prompt=prompt, **self._special_tokens,
            )  # fmt: skip
        except Exception as error:  # of Jinja, and of the template's own
            if conversation != (textual := arguments_as_text(conversation)):
                return self._written(textual, prompt=prompt)
            raise DataError(f"data.messages: the chat template refuses {conversation.origin}: {one_line(error)}; "
                            "change that row, or write data.chat_template=<another>") from None
        return text, spans[0] if self._marked else []


def _held(messages: list[Message]) -> tuple[list[Message], int]:
    """A conversation with a placeholder for each of the assistant's turns, and how many messages end with the last."""
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    held = [{**m, "content": f"\ue000{i}\ue001"} if i in turns else m for i, m in enumerate(messages)]
    return held, turns[-1] + 1 if turns else 0


def question(tokenizer: Tokenizer, says: str) -> list[int]:
    """The tokens of a conversation that a user begins, up to where the assistant's answer begins. Raises DataError."""
    said = Conversation(messages=[{"role": "user", "content": says}], tools=None, origin="sample_prompt", asked=1)
    ((ids, _),) = tokenizer.located([_Template(tokenizer.backend).asked(said)], False)
    return ids


def turn_end(tokenizer: Tokenizer, wanted: Wanted, rows: Iterable[Row]) -> int | None:
    """The token with which the chat template ends the assistant's turn in the first of the conversations that has one;
    None where it does so by none that is never cut."""
    template, whole = _Template(tokenizer.backend), tokenizer.backend.added_tokens_decoder
    for row in rows:
        if ending := template.ending(read_conversation(wanted, row, "a row")):
            ids = tokenizer.backend(ending, add_special_tokens=False)["input_ids"]
            return int(ids[0]) if len(ids) == 1 or ids[0] in whole else None
    return None


def _common(after: str, ending: str) -> str:
    """The prefix of the last turn's end-of-turn text that another turn has too: all of it, or whole special tokens."""
    differ = next((place for place, pair in enumerate(zip(after, ending, strict=False)) if pair[0] != pair[1]), None)
    shared = ending[: min(len(after), len(ending)) if differ is None else differ]
    return shared if shared == ending else shared[: max(shared.rfind(">"), shared.rfind("]")) + 1]


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
            spans.append((place, stop + len(_common(after, ending))))
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

"""Conversations, and prompts with their completions, and their loss masks: which of their tokens are learned.

A conversation is rendered by the tokenizer's chat template. Where that marks what the assistant says (its `generation`
blocks) the marks are taken; else each of the assistant's turns is learned from behind the generation prompt to its end,
as renderings of the conversation up to the turn, and with it, show; where they are no part of the whole, another with a
placeholder for the turn. One without an end of its own ends with the special token that begins the next message.
"""

from __future__ import annotations

import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.conversations import ASSISTANT, Conversation, Message, arguments_as_text, read_conversation
from tightfit.data.readers import LOSS_MASK, MESSAGES, TEXT, TOOLS, Row, Wanted
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
PLACEHOLDER = "\ue000"
"""Placeholder of what is said, a character that no text has a meaning for."""

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
    template = str(tokenizer.backend.chat_template)
    return replace(tokenizer, fingerprint=digest(["chat 2", tokenizer.fingerprint, template]))


def encode(wanted: Wanted, rows: Sequence[Row], tokenizer: Tokenizer, origins: Sequence[str]) -> dict[str, list[Array]]:
    """The ids of each row, int64 (tokens,), and its loss mask. origins: of the rows, for messages.

    Raises DataError naming the row that cannot be written so.
    """
    documents = (_conversations(wanted, rows, tokenizer, origins) if MESSAGES in wanted else
                 _completions(rows, tokenizer))
    ids, masks = zip(*documents, strict=True)
    return {TEXT: [np.array(each, np.int64) for each in ids], LOSS_MASK: [np.array(each, np.int64) for each in masks]}


def _completions(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each prompt and completion as one text with its end token, and its loss mask."""
    found = tokenizer.encode_with_offsets([prompt + completion for prompt, completion in rows], True)
    for (prompt, completion), (ids, offsets) in zip(rows, found, strict=True):
        mask = _loss_mask(offsets, [(len(prompt), len(prompt) + len(completion))])
        if ids[-1:] == [tokenizer.end_id]:
            mask[-1] = 1
            yield ids, mask
        else:
            yield [*ids, tokenizer.end_id], [*mask, 1]


def _conversations(
    wanted: Wanted, rows: Sequence[Row], tokenizer: Tokenizer, origins: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each conversation, and its loss mask: 1 in the assistant's turns, or behind a prompt that is messages,
    as trl does, from the first token on that differs from those of the prompt alone."""
    template = _Template(tokenizer.backend)
    texts, spans, prompts = [], [], []
    for row, origin in zip(rows, origins, strict=True):
        conversation = read_conversation(wanted, row, origin)
        text, turns = template.text_and_turns(conversation)
        texts.append(text)
        spans.append(turns)
        if conversation.prompt_messages:
            prompts.append(template.prompt_text(conversation))
    found = tokenizer.encode_with_offsets(texts, False)
    if prompts:
        for (ids, _), (prompt, _) in zip(found, tokenizer.encode_with_offsets(prompts, False), strict=True):
            shown = len([*takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt, strict=False))])
            yield ids, [0] * shown + [1] * (len(ids) - shown)
    else:
        for (ids, offsets), turns in zip(found, spans, strict=True):
            yield ids, _loss_mask(offsets, turns)


class _Template:
    """A tokenizer's chat template. marked: whether it marks what the assistant says."""

    def __init__(self, backend: Any) -> None:
        self._source = backend.get_chat_template()
        self._special_tokens = backend.special_tokens_map
        self._marked = MARKS.search(self._source) is not None
        special = sorted((t.content for t in backend.added_tokens_decoder.values() if t.special), key=len, reverse=True)
        self._special = re.compile(rf"\s*(?:{'|'.join(map(re.escape, special)) or '(?!)'})")

    def text_and_turns(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """A conversation's text, and the spans of the assistant's turns in it, not looked for behind a prompt.
        Raises DataError where they cannot be found, or the template leaves out tools or tool calls."""
        text, spans = self._written(conversation)
        messages, origin = conversation.messages, conversation.origin
        if conversation.tools and self._accepted(replace(conversation, tools=None)) == text:
            raise DataError(f"data: {origin} has {TOOLS}, which the chat template does not write; write "
                            "data.chat_template=<one that does>, or leave the field out of the data")
        bare = [{n: v or "" for n, v in m.items() if n != "tool_calls"} if "tool_calls" in m else m for m in messages]
        if bare != messages and self._accepted(replace(conversation, messages=bare)) == text:
            raise DataError(f"data.messages: the chat template does not write the tool_calls in {origin}; write "
                            "data.chat_template=<one that does>, or the calls as content")
        if self._marked or conversation.prompt_messages:
            return text, spans
        own = self._own_end(conversation)
        for place, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                spans.append(self._span(conversation, place, text, own, spans[-1][1] if spans else 0))
        if messages[-1]["role"] == ASSISTANT and not own:
            text += self._begin_of_next(conversation, "tool" if "tool_calls" in messages[-1] else "user")
            spans[-1] = (spans[-1][0], len(text))
        return text, spans

    def prompt_text(self, conversation: Conversation) -> str:
        """The text of a conversation's prompt, up to where its completion begins."""
        prompt = conversation.messages[: conversation.prompt_messages]
        return self._written(replace(conversation, messages=prompt), prompt=True)[0]

    def ending(self, conversation: Conversation) -> str:
        """End-of-turn text of the assistant's messages; empty where the template writes none."""
        return self._own_end(conversation) or self._begin_of_next(conversation, "user")

    def _own_end(self, conversation: Conversation) -> str:
        """End-of-turn text that the template writes after an assistant message at the end of a conversation."""
        return (self._accepted(_up_to_last(conversation)) or "").partition(PLACEHOLDER)[2].rstrip()

    def _begin_of_next(self, conversation: Conversation, role: str) -> str:
        """The special token with which the template begins a message behind the assistant's: what ends a turn that has
        no end of its own. Empty where there is none."""
        held = _up_to_last(conversation)
        text = self._accepted(held)
        more = self._accepted(replace(held, messages=[*held.messages, {"role": role, "content": PLACEHOLDER}]))
        found = self._special.match(more, len(text)) if text and more and more.startswith(text) else None
        return found[0] if found else ""

    def _span(self, conversation: Conversation, place: int, text: str, own: str, floor: int) -> Span:
        """Span of one of the assistant's turns in a conversation's text: from behind the generation prompt to its
        end. own: the template's own end of turns. floor: where the turn before it ends."""
        messages = conversation.messages
        before = self._accepted(replace(conversation, messages=messages[:place]), prompt=True)
        until = self._accepted(replace(conversation, messages=messages[: place + 1]))
        start = len(before) if before is not None and text.startswith(before) else None
        stop = len(until) if until is not None and text.startswith(until) else None
        if stop is not None:
            stop = len(text[:stop].rstrip()) if own else self._end(text, stop, own)
        if start is None or stop is None:  # what follows changes how it is written: a placeholder shows where it lies
            def held(at: int, message: Message) -> str | None:
                return self._accepted(replace(conversation, messages=[*messages[:at], message, *messages[at + 1 :]]))

            said = {"role": ASSISTANT, "content": PLACEHOLDER}
            tries = (held(place, message) for message in (said, {**messages[place], **said}))  # some want the calls
            other = next((each for each in tries if each and PLACEHOLDER in each), "")
            if start is None:
                asked = self._accepted(replace(conversation, messages=messages[:place])) or ""
                start = _behind(asked, before or asked, text, other, floor) if other else -1
            if stop is None:
                stop = self._end(text, max(len(text) - _alike(text[::-1], other[::-1]), start), own)
                after = held(place + 1, {**messages[place + 1], "content": PLACEHOLDER})
                stop = stop if other and after is not None and stop <= _alike(text, after) else -1
        if not floor <= start <= stop:
            raise DataError(f"data.messages: where the chat template writes an assistant's turn of "
                            f"{conversation.origin} cannot be found, for what else it writes depends on that turn; "
                            "write data.chat_template=<one with {% generation %} around it>")
        return start, stop

    def _end(self, text: str, place: int, own: str) -> int:
        """End of a turn whose content ends at `place`: behind its own end, or else a special token right there."""
        if own and text.startswith(own, place):
            return place + len(own)
        found = self._special.match(text, place)
        return found.end() if found else place

    def _accepted(self, conversation: Conversation, *, prompt: bool = False) -> str | None:
        """The text of a conversation; None where the template refuses it."""
        with suppress(DataError):
            return self._written(conversation, prompt=prompt)[0]
        return None

    def _written(self, conversation: Conversation, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """The text of a conversation, and where the template's marks lie. prompt: with what begins the assistant's
        turn."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template  # slow as a tokenizer's own library

        messages = conversation.messages
        if not READS_NONE.search(self._source):
            messages = [{**message, "content": message["content"] or ""} for message in messages]
        try:
            (text,), spans = render_jinja_template(
                [messages], tools=conversation.tools, chat_template=self._source,
                return_assistant_tokens_mask=self._marked, add_generation_prompt=prompt, **self._special_tokens,
            )  # fmt: skip
        except TemplateSyntaxError as error:
            raise DataError(f"data.messages: the chat template is no Jinja, line {error.lineno}: {one_line(error)}; "
                            "mend it, or write data.chat_template=<another>") from None
        except Exception as error:  # of Jinja, and of the template's own
            if conversation != (textual := arguments_as_text(conversation)):
                return self._written(textual, prompt=prompt)
            raise DataError(f"data.messages: the chat template refuses {conversation.origin}: {one_line(error)}; "
                            "change that, or write data.chat_template=<another>") from None
        return text, spans[0] if self._marked else []


def _up_to_last(conversation: Conversation) -> Conversation:
    """A conversation up to the assistant's last turn, a placeholder for what it says; all of it where it has none."""
    turns = [place for place, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    held = [{"role": ASSISTANT, "content": PLACEHOLDER}] if turns else []
    return replace(conversation, messages=[*conversation.messages[: turns[-1] if turns else None], *held])


def _alike(one: str, other: str) -> int:
    """Length of two texts' common prefix."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda i: one[: i + 1] != other[: i + 1])


def _behind(asked: str, before: str, text: str, other: str, floor: int) -> int:
    """Start of an assistant's turn in a text: behind as much of the generation prompt as it has; -1 where that is
    not found. asked, before: the text up to the turn, without the prompt and with it. other: the text with a
    placeholder for the turn."""
    if asked and text.startswith(asked):
        return min(_alike(before, text), _alike(before, other))
    prompt, same, held = before[_alike(asked, before) :], _alike(text, other), other.find(PLACEHOLDER)
    found = other.rfind(prompt, floor, held)
    start = held if found < 0 else found + len(prompt)
    return -1 if other[same:start].strip() else min(same, start)


def question(tokenizer: Tokenizer, says: str) -> list[int]:
    """The tokens of a conversation that a user begins, up to where the assistant's answer begins. Raises DataError."""
    said = Conversation([{"role": "user", "content": says}], None, "sample_prompt", prompt_messages=1)
    ((ids, _),) = tokenizer.encode_with_offsets([_Template(tokenizer.backend).prompt_text(said)], False)
    return ids


def turn_end(tokenizer: Tokenizer, wanted: Wanted, rows: Iterable[Row]) -> int | None:
    """The token with which the chat template ends the assistant's turn in the first of the conversations that has one;
    None where it does so by none that is never cut."""
    template, whole = _Template(tokenizer.backend), tokenizer.backend.added_tokens_decoder
    conversations = (read_conversation(wanted, row, "a row") for row in rows)
    first = next((each for each in conversations if any(m["role"] == ASSISTANT for m in each.messages)), None)
    ids = tokenizer.backend(template.ending(first), add_special_tokens=False)["input_ids"] if first else []
    return int(ids[0]) if len(ids) == 1 or (ids and ids[0] in whole) else None


def _loss_mask(offsets: Iterable[Span], spans: Sequence[Span]) -> list[int]:
    """For each token, by its characters, 1 where any of them lies in a span, else 0."""
    begins, ends = np.array(list(offsets), dtype=np.int64).reshape(-1, 2).T
    begins = np.minimum(begins, ends - 1)  # of spaces alone, some tokenizers say where they end and that they are empty
    found = np.zeros(len(ends), dtype=np.int64)
    for start, stop in spans:
        found |= (ends > np.maximum(begins, start)) & (begins < stop)
    return found.tolist()
